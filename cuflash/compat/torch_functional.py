"""PyTorch: torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

from cuflash.attention import attention
from cuflash.compat import arguments
from cuflash.errors import CuflashError


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, seed: Any = None,
) -> Any:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention: causal from the top left.

    | argument | shape | meaning |
    |---|---|---|
    | query | (batch, heads, len_q, head_dim) | leading axes may be left out |
    | key, value | (batch, heads_k, len_k, head_dim), (batch, heads_k, len_k, head_dim_v) | |
    | attn_mask | broadcasts to (batch, heads, len_q, len_k) | bool, True = attend; or numbers to add |
    | dropout_p, seed | | probability to drop a weight; above 0 it needs seed=, which the original has not |
    | is_causal | | query i sees keys j <= i |
    | scale | | None: 1/sqrt(head_dim) |
    | enable_gqa | | whether heads may be a multiple of heads_k |

    Returns (batch, heads, len_q, head_dim_v), without the axes that query lacks.

        >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape

    What differs: attn_mask and is_causal together mean both (the original refuses them); a row that sees
    nothing gives 0 (NaN in older versions of the original); the batch axes of query, key and value are equal,
    not broadcast; dropout draws cuflash's mask.  Raises CuflashError as `cuflash.attention` does.
    """
    where = "scaled_dot_product_attention"
    query, key, value = arguments.arrays(where, query=query, key=key, value=value)
    n_axes = query.ndim
    if not n_axes == key.ndim == value.ndim or n_axes not in (2, 3, 4):
        raise CuflashError(
            f"{where}: query {query.shape}, key {key.shape}, value {value.shape}\n"
            "  Give (batch, heads, len, head_dim) each, or all without batch, or without batch and heads."
        )
    query, key, value = (x[(None,) * (4 - n_axes)] for x in (query, key, value))
    enable_gqa = arguments.flag(where, "enable_gqa", enable_gqa)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise CuflashError(
            f"{where}: query has {query.shape[1]} heads, key has {key.shape[1]}\n"
            "  Give enable_gqa=True where several query heads share a key head."
        )
    out = attention(
        query, key, value, layout="bhsd", causal=is_causal, query_offset=0, scale=scale,
        dropout=arguments.dropout(where, dropout_p, seed), **arguments.mask_or_bias(where, attn_mask),
    )  # fmt: skip
    return out[(0,) * (4 - n_axes)]
