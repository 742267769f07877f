"""flash-attn 2, the functions of flash_attn_interface.py.

What differs from the original, in all four functions:

| | flash-attn 2 | here |
|---|---|---|
| dtypes, head_dim | 16-bit floats, head_dim up to 256 | those of `cuflash.attention` |
| a row that sees nothing | lse +inf, or -inf when the kernel splits over keys | lse -inf |
| lse of causal ALiBi | lacks slope * (i + len_k - len_q) | that of the formula |
| dropout | torch's generator; p in steps of 1/256, kept weights scaled as if exact | `seed=`; p exact |
| deterministic | of the gradients | accepted; the forward always is |
| return_attn_probs | (out, lse, S_dmask) | (out, lse, None): `cuflash.attention_weights` gives rows of P |
"""

from __future__ import annotations

from typing import Any

from cuflash.attention import attention
from cuflash.compat import arguments
from cuflash.errors import CuflashError


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, seed: Any = None,
) -> Any:  # fmt: skip
    """flash_attn.flash_attn_func: attention, causal from the bottom right.

    | argument | shape | meaning |
    |---|---|---|
    | q | (batch, len_q, heads, head_dim) | |
    | k, v | (batch, len_k, heads_k, head_dim) | heads is a multiple of heads_k |
    | dropout_p, seed | | probability to drop a weight; above 0 it needs seed=, which the original has not |
    | softmax_scale | | None: 1/sqrt(head_dim) |
    | causal | | query i sees keys j <= i + len_k - len_q |
    | window_size | (left, right) | inclusive, around i + len_k - len_q; -1 or None: unbounded |
    | softcap | | 0: none |
    | alibi_slopes | (heads,) or (batch, heads) | float32 |
    | deterministic | | accepted: the forward always is |
    | return_attn_probs | | return (out, lse, None) |

    Returns out (batch, len_q, heads, head_dim), or (out, lse, None) with lse (batch, heads, len_q).

        >>> flash_attn_func(q, k, v, causal=True, window_size=(256, 0)).shape
        >>> out, lse, _ = flash_attn_func(q, k, v, 0.1, return_attn_probs=True, seed=7)

    The head of this file says what differs.  Raises CuflashError as `cuflash.attention` does.
    """
    options = _options(
        "flash_attn_func", dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, seed
    )
    return _results(attention(q, k, v, return_lse=return_attn_probs, **options), return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, seed: Any = None,
) -> Any:  # fmt: skip
    """flash_attn.flash_attn_qkvpacked_func: q, k and v in one array, read in place.

    qkv is (batch, len, 3, heads, head_dim); all else as in `flash_attn_func`.

        >>> flash_attn_qkvpacked_func(qkv, causal=True).shape          # (batch, len, heads, head_dim)
    """
    where = "flash_attn_qkvpacked_func"
    q, k, v = _unpacked(where, "qkv", qkv, 3)
    options = _options(where, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, seed)
    return _results(attention(q, k, v, return_lse=return_attn_probs, **options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Any, kv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, seed: Any = None,
) -> Any:  # fmt: skip
    """flash_attn.flash_attn_kvpacked_func: k and v in one array, read in place.

    kv is (batch, len_k, 2, heads_k, head_dim); all else as in `flash_attn_func`.

        >>> flash_attn_kvpacked_func(q, kv, window_size=(128, 128)).shape
    """
    where = "flash_attn_kvpacked_func"
    k, v = _unpacked(where, "kv", kv, 2)
    options = _options(where, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, seed)
    return _results(attention(q, k, v, return_lse=return_attn_probs, **options), return_attn_probs)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int | None, int | None] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Any = None, *, seed: Any = None,
) -> Any:  # fmt: skip
    """flash_attn.flash_attn_varlen_func: sequences of any length, one after the other.

    | argument | shape | meaning |
    |---|---|---|
    | q | (tokens_q, heads, head_dim) | |
    | k, v | (tokens_k, heads_k, head_dim) | |
    | cu_seqlens_q, cu_seqlens_k | (n + 1,) | sequence b has rows cu[b] to cu[b + 1]; host or device |
    | max_seqlen_q, max_seqlen_k | | accepted, not needed |
    | block_table | | must be None: paged keys are planned |

    All else as in `flash_attn_func`.  Returns out (tokens_q, heads, head_dim), or (out, lse, None) with lse
    (heads, tokens_q).

        >>> flash_attn_varlen_func(q, k, v, [0, 3, 9], [0, 3, 9], causal=True).shape
    """
    where = "flash_attn_varlen_func"
    if block_table is not None:
        raise CuflashError(f"{where}: block_table is given\n  Paged keys are planned: leave it None.")
    options = _options(where, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, seed)
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _results(attention(q, k, v, return_lse=return_attn_probs, **options), return_attn_probs)


def _options(
    where: str, dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Any,
    softcap: float, alibi_slopes: Any, seed: Any,
) -> dict[str, Any]:  # fmt: skip
    """The options of `cuflash.attention`: -1 in a window and a softcap of 0 are None there."""
    if isinstance(window_size, (tuple, list)):
        window_size = tuple(None if arguments.is_number(n, -1) else n for n in window_size)
    return dict(
        dropout=arguments.dropout(where, dropout_p, seed),
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=None if arguments.is_number(softcap, 0) else softcap,
        alibi_slopes=alibi_slopes,
    )


def _unpacked(where: str, name: str, value: Any, n: int) -> list[Any]:
    """The n arrays along the third axis, as views."""
    packed = arguments.array(where, name, value)
    if packed.ndim != 5 or packed.shape[2] != n:
        raise CuflashError(
            f"{where}: {name} has the shape {packed.shape}\n  Give (batch, len, {n}, heads, head_dim)."
        )
    return [packed[:, :, part] for part in range(n)]


def _results(found: Any, with_lse: bool) -> Any:
    return (*found, None) if with_lse else found
