"""JAX: jax.nn.dot_product_attention."""

from __future__ import annotations

from typing import Any

from cuflash.attention import attention
from cuflash.compat import arguments
from cuflash.errors import CuflashError


def dot_product_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: float | None = None,
    is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None, implementation: str | None = None,
    return_residual: bool = False,
) -> Any:  # fmt: skip
    """jax.nn.dot_product_attention: causal and window from the top left.

    | argument | shape | meaning |
    |---|---|---|
    | query | (batch, len_q, heads, head_dim) | or without batch |
    | key, value | (batch, len_k, heads_k, head_dim) | heads is a multiple of heads_k |
    | bias | broadcasts to (batch, heads, len_q, len_k) | added to the scores |
    | mask | broadcasts to (batch, heads, len_q, len_k) | bool, True = attend |
    | scale | | None: 1/sqrt(head_dim) |
    | is_causal | | query i sees keys j <= i |
    | query_seq_lengths, key_value_seq_lengths | (batch,) | the first n rows are valid |
    | local_window_size | (left, right), or one number for both | query i sees keys i - left to i + right |
    | implementation | | accepted: cuflash chooses its own kernel |
    | return_residual | | return (out, lse), lse (batch, len_q, heads) |

    Returns out with the shape of query.

        >>> dot_product_attention(q, k, v, is_causal=True, local_window_size=(64, 0)).shape

    What differs: a row that sees nothing gives 0 and lse -inf (the original gives the mean of all values);
    lse is float32 (float64 for float64), not key's dtype; everything runs in linear memory.  Raises
    CuflashError as `cuflash.attention` does.
    """
    where = "dot_product_attention"
    return_residual = arguments.flag(where, "return_residual", return_residual)
    query, key, value = arguments.arrays(where, query=query, key=key, value=value)
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4):
        raise CuflashError(
            f"{where}: query {query.shape}, key {key.shape}, value {value.shape}\n"
            "  Give (batch, len, heads, head_dim) each, or all without batch."
        )
    one = query.ndim == 3
    if one:
        query, key, value = query[None], key[None], value[None]
    window = local_window_size
    if not isinstance(window, (tuple, list)):
        window = (window, window)
    out, lse = attention(
        query, key, value, bias=bias, mask=mask, scale=scale, causal=is_causal, query_offset=0, window=window,
        query_lengths=query_seq_lengths, key_lengths=key_value_seq_lengths, return_lse=True,
    )  # fmt: skip
    lse = lse.swapaxes(1, 2)
    if one:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out
