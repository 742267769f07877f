"""ONNX: the operator Attention of opsets 23, 24 and 25."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import reference
from cuflash.arrays import device_of, module_of
from cuflash.attention import attention
from cuflash.check import check
from cuflash.compat import arguments
from cuflash.errors import CuflashError
from cuflash.introspect import attention_weights
from cuflash.reference_scores import Arithmetic, scores

WHERE = "onnx_attention"
PRECISIONS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}  # onnx.TensorProto.DataType


def onnx_attention(
    Q: Any, K: Any, V: Any, attn_mask: Any = None, past_key: Any = None, past_value: Any = None,
    nonpad_kv_seqlen: Any = None, *, is_causal: int = 0, kv_num_heads: int | None = None,
    left_window_size: int = -1, q_num_heads: int | None = None, qk_matmul_output_mode: int = 0,
    right_window_size: int = -1, scale: float | None = None, softcap: float = 0.0,
    softmax_precision: int | None = None, n_outputs: int = 1,
) -> Any:  # fmt: skip
    """The ONNX operator Attention: its inputs in their order, its attributes by name.

    | argument | shape | meaning |
    |---|---|---|
    | Q | (batch, q_num_heads, len_q, head_dim) | or (batch, len_q, q_num_heads * head_dim) |
    | K, V | (batch, kv_num_heads, len_k, head_dim) | or three axes as Q; the new keys, if some are past |
    | attn_mask | broadcasts to (batch, q_num_heads, len_q, total) | bool, True = attend; or numbers to add |
    | past_key, past_value | (batch, kv_num_heads, past, head_dim) | keys that come before K |
    | nonpad_kv_seqlen | (batch,) | how many keys of K are valid |
    | is_causal | | query i sees keys j <= i + offset |
    | left_window_size, right_window_size | | keys around i + offset that query i sees; -1: unbounded |
    | q_num_heads, kv_num_heads | | for Q, K, V with three axes, and only then |
    | qk_matmul_output_mode | | the fourth output: 0 scores, 1 after softcap, 2 after masks, 3 after softmax |
    | scale, softcap | | None: 1/sqrt(head_dim); 0: no softcap |
    | softmax_precision | | 11 (DOUBLE) computes in float64; 1, 10, 16 ask for what is done anyway |
    | n_outputs | | how many of the outputs are wanted, 1 to 4 |

    offset is `past` with past keys, nonpad_kv_seqlen - len_q with that, else 0.  total is past + len_k.  An
    attn_mask whose last axis is shorter than total (1 too) hides the keys that it does not reach.

    Returns Y, with the axes of Q, for n_outputs=1; else the first outputs of (Y, present_key, present_value,
    qk_matmul_output).  qk_matmul_output (batch, q_num_heads, len_q, total) is the one result of cuflash that
    takes memory for all scores; it is made when it is asked for.

        >>> Y = onnx_attention(Q, K, V, is_causal=1)
        >>> Y, present_key, present_value = onnx_attention(Q, K, V, None, past_key, past_value, n_outputs=3)

    The order is that of the corrected specification (onnx pull request 7867): scale, softcap, attn_mask,
    softmax.  Accumulation and softmax run in float32 at least; the original may round each step to float16.
    V has the dtype of Q.  Raises CuflashError as `cuflash.attention` does, and for what ONNX forbids.
    """
    _check(past_key, past_value, nonpad_kv_seqlen, qk_matmul_output_mode, softmax_precision, n_outputs)
    Q, K, V = arguments.arrays(WHERE, Q=Q, K=K, V=V)
    with device_of(Q):
        xp, n_axes = module_of(Q), Q.ndim
        Q = _with_heads("Q", "q_num_heads", Q, q_num_heads)
        K, V = (_with_heads(name, "kv_num_heads", x, kv_num_heads) for name, x in (("K", K), ("V", V)))
        if past_key is not None:
            past_key, past_value = arguments.arrays(WHERE, past_key=past_key, past_value=past_value)
            _check_past("past_key", past_key, "K", K)
            _check_past("past_value", past_value, "V", V)
            K, V = xp.concatenate([past_key, K], axis=2), xp.concatenate([past_value, V], axis=2)
        offset = 0 if past_key is None else past_key.shape[2]
        options = dict(
            layout="bhsd",
            scale=scale,
            softcap=None if arguments.is_number(softcap, 0) else softcap,
            causal=arguments.flag(WHERE, "is_causal", is_causal),
            window=tuple(
                None if arguments.is_number(n, -1) else n for n in (left_window_size, right_window_size)
            ),
            # None: each sequence's own length - len_q
            query_offset=offset if nonpad_kv_seqlen is None else None,
            key_lengths=nonpad_kv_seqlen,
            **_mask(attn_mask, K.shape[2], Q.dtype),
        )
        dtype, q, k, v = Q.dtype, Q, K, V
        if softmax_precision == 11:
            q, k, v = (x.astype(np.float64) for x in (Q, K, V))
        Y = attention(q, k, v, out_dtype=dtype.name, **options)
        if n_axes == 3:
            Y = Y.swapaxes(1, 2).reshape(*Y.shape[::2], -1)
        if n_outputs == 1:
            return Y
        outputs = [Y, K, V]
        if n_outputs == 4:
            outputs.append(_qk_matmul_output(q, k, options, qk_matmul_output_mode).astype(dtype))
        return tuple(outputs[:n_outputs])


def _check(past_key: Any, past_value: Any, lengths: Any, mode: int, precision: int | None, n: int) -> None:
    """Refuse what the operator forbids."""
    if (past_key is None) != (past_value is None):
        raise CuflashError(f"{WHERE}: one of past_key and past_value is None\n  Give both, or neither.")
    if past_key is not None and lengths is not None:
        raise CuflashError(
            f"{WHERE}: nonpad_kv_seqlen with past_key\n"
            "  Give past keys and values, or K and V as the whole cache with nonpad_kv_seqlen."
        )
    if not any(arguments.is_number(mode, n) for n in (0, 1, 2, 3)):
        raise CuflashError(f"{WHERE}: qk_matmul_output_mode is {mode!r}\n  Give 0, 1, 2 or 3.")
    if precision is not None and not any(arguments.is_number(precision, code) for code in PRECISIONS):
        known = ", ".join(f"{code} ({name})" for code, name in PRECISIONS.items())
        raise CuflashError(f"{WHERE}: softmax_precision is {precision!r}\n  Give one of {known}.")
    if not any(arguments.is_number(n, count) for count in (1, 2, 3, 4)):
        raise CuflashError(f"{WHERE}: n_outputs is {n!r}\n  Give 1, 2, 3 or 4.")


def _check_past(name: str, past: Any, new_name: str, new: Any) -> None:
    """Past rows go before new ones: all else must agree."""
    is_alike = type(past) is type(new) and past.dtype == new.dtype and past.ndim == 4
    if not is_alike or past.shape[:2] + past.shape[3:] != new.shape[:2] + new.shape[3:]:
        raise CuflashError(
            f"{WHERE}: {name} is {past.shape} {past.dtype.name}, "
            f"{new_name} with its heads apart {new.shape} {new.dtype.name}\n"
            "  They need one kind of array, one dtype, and one shape but for the third axis."
        )


def _with_heads(name: str, attribute: str, x: Any, n_heads: int | None) -> Any:
    """(batch, heads, len, dim) from an input with three or four axes, a view."""
    if x.ndim == 4 and n_heads is None:
        return x
    if x.ndim == 4:
        raise CuflashError(
            f"{WHERE}: {attribute} is {n_heads}, {name} has 4 axes\n  Leave {attribute} out: the axes say it."
        )
    is_number = isinstance(n_heads, (int, np.integer)) and not isinstance(n_heads, bool) and n_heads >= 1
    if x.ndim != 3 or not is_number or x.shape[2] % n_heads:
        raise CuflashError(
            f"{WHERE}: {name} has the shape {x.shape}, {attribute} is {n_heads!r}\n"
            f"  Give (batch, heads, len, dim), or (batch, len, heads * dim) with {attribute}=."
        )
    return x.reshape(*x.shape[:2], n_heads, -1).swapaxes(1, 2)


def _mask(attn_mask: Any, total: int, dtype: np.dtype) -> dict[str, Any]:
    """mask= or bias=, as long as the keys; whole numbers are added like floats."""
    option = arguments.mask_or_bias(WHERE, attn_mask)
    for name, x in option.items():
        if x.dtype.kind in "iu":
            x = x.astype(dtype)
        missing = total - x.shape[-1] if x.ndim else 0
        if missing > 0:
            hidden = False if name == "mask" else -np.inf
            rest = module_of(x).full((*x.shape[:-1], missing), hidden, x.dtype)
            x = module_of(x).concatenate([x, rest], axis=-1)
        option[name] = x
    return option


def _qk_matmul_output(q: Any, k: Any, options: dict[str, Any], mode: int) -> Any:
    """The scores of every pair after a step of the operator, in the accumulation dtype."""
    if mode == 3:
        return attention_weights(q, k, **options)
    kept = {0: ("layout", "scale"), 1: ("layout", "scale", "softcap"), 2: tuple(options)}[mode]
    options = {name: options[name] for name in kept}
    problem, operands = check("forward", {"q": q, "k": k, "v": k}, options, where=WHERE)
    xp = module_of(q)
    arithmetic = Arithmetic(problem.accumulator)
    S = xp.full((problem.batch, problem.heads, problem.len_q, problem.len_k), -np.inf, problem.accumulator)
    i = xp.arange(problem.len_q)
    for sequence, h in reference.every_head(problem, operands):
        j = xp.arange(sequence.len_k)
        S[sequence.b, h, :, : sequence.len_k] = scores(problem, operands, sequence, h, i, j, arithmetic).S
    return S
