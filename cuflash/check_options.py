"""The options of a call that are no arrays: names, switches, numbers, window, dropout, block mask."""

from __future__ import annotations

import difflib
import math
from typing import Any

import numpy as np

from cuflash import arrays as arrays_
from cuflash.arrays import HOST, SPEC
from cuflash.messages import Call, device_text
from cuflash.problem import FLOAT_DTYPES

# every keyword argument of the public functions, with its default
DEFAULTS: dict[str, Any] = dict(
    causal=False, window=(None, None), query_offset=None, scale=None, softcap=None, alibi_slopes=None,
    bias=None, mask=None, query_lengths=None, key_lengths=None, cu_seqlens_q=None, cu_seqlens_k=None,
    block_mask=None, sink=None, dropout=None, layout="bshd", precision=None, out_dtype=None, kernel=None,
    workspace=None, progress=None,
)  # fmt: skip
_EXTRA: dict[str, Any] = dict(return_lse=False, deterministic=False, out=None, grads=None)
_ALL = DEFAULTS | _EXTRA
# those of _EXTRA that a function has
_EXTRA_OF = {
    "attention": ("return_lse", "out"),
    "attention_backward": ("deterministic", "grads"),
    "attention_vjp": ("return_lse", "deterministic"),
    "attention_weights": (),
    "key_importance": (),
    "row_stats": (),
}

# what other libraries call it
_ALIASES = dict(
    is_causal="causal=", softmax_scale="scale=", sm_scale="scale=", window_size="window=",
    local_window_size="window=", attn_mask="mask= (boolean, True = attend) or bias= (added to the scores)",
    attn_bias="bias=", logits_soft_cap="softcap=", dropout_p="dropout=(p, seed)", sinks="sink=",
    s_aux="sink=",
    query_seq_lengths="query_lengths=", key_value_seq_lengths="key_lengths=",
    return_attn_probs="return_lse=, and cuflash.attention_weights for rows of P",
    enable_gqa="nothing: heads and heads_k may differ", dtype="out_dtype=", backend="kernel=",
)  # fmt: skip
_PLANNED = {
    "a KV cache": ("k_cache", "v_cache", "kv_cache", "cache", "cache_seqlens", "past_key", "past_value"),
    "paged keys and values": ("block_table", "block_tables", "page_table", "paged"),
    "one call over several GPUs": ("devices", "mesh", "group", "ring"),
    "float8": ("q_descale", "k_descale", "v_descale", "q_scale", "k_scale", "v_scale"),
    "forward-mode differentiation (JVP)": ("tangents", "q_tangent", "k_tangent", "v_tangent", "jvp"),
    "differentiating the gradients again": ("double_backward", "create_graph"),
}

LAYOUTS = ("bshd", "bhsd")
# kernels take numbers times log2(e) and their reciprocals: both must fit the dtype
_LARGEST = {"float32": 2.0**127, "float64": 2.0**1023}
_SMALLEST_SOFTCAP = {"float32": 2.0**-126, "float64": 2.0**-1022}
# positions are 64-bit in the kernels, and an offset plus a window must fit; no offset undoes _UNBOUNDED
_LARGEST_OFFSET = 1 << 60
_UNBOUNDED = 1 << 61


def known(call: Call, options: dict[str, Any]) -> dict[str, Any]:
    """All options with their defaults; a name that is no option is refused with the one that may be meant."""
    takes = (*DEFAULTS, *_EXTRA_OF.get(call.where, _EXTRA))
    for name in options:
        if name in takes:
            continue
        if name in _EXTRA:
            call.fail(f"there is no option {name}= here", f"Options: {', '.join(takes)}.")
        for what, names in _PLANNED.items():
            if name in names:
                call.fail(f"there is no option {name}= yet", f"Planned: {what}.")
        close = difflib.get_close_matches(name, takes, n=1)
        meant = _ALIASES.get(name) or (f"{close[0]}=" if close else None)
        call.fail(
            f"there is no option {name}=",
            f"cuflash calls it {meant}" if meant else f"Options: {', '.join(takes)}.",
        )
    options = _ALL | options
    for name in ("causal", "return_lse", "deterministic"):
        value = options[name]
        if value is not True and value is not False and not isinstance(value, np.bool_):
            call.fail(f"{name} is {value!r}", f"{name} is True or False.")
    _check_kernel(call, options["kernel"])
    if not _is_one_of(options["layout"], LAYOUTS):
        call.fail(
            f"layout is {options['layout']!r}",
            'layout is "bshd", for (batch, len, heads, dim), or "bhsd", for (batch, heads, len, dim).',
        )
    if not (options["progress"] is None or callable(options["progress"])):
        call.fail(f"progress is {options['progress']!r}", "progress is a function of (done, total).")
    return options


def _is_one_of(value: Any, names: tuple[str, ...]) -> bool:
    """Whether value is one of these names; an array or a dtype, which == may take apart, is none."""
    return isinstance(value, str) and value in names


def _check_kernel(call: Call, kernel: Any) -> None:
    """A row's name or None; `attention_vjp` takes a pair of them.  plan.py knows the names."""
    names, do = (kernel,), "kernel is a row's name, see cuflash.explain, or None."
    if call.where == "attention_vjp" and kernel is not None:
        names = kernel if isinstance(kernel, tuple) and len(kernel) == 2 else (0,)
        do = "kernel is (forward, backward): a row's name or None each."
    if not all(name is None or isinstance(name, str) for name in names):
        call.fail(f"kernel is {kernel!r}", do)


def is_packed(call: Call, options: dict[str, Any]) -> bool:
    """Whether sequences are packed; what excludes it is refused."""
    cumulative = [name for name in ("cu_seqlens_q", "cu_seqlens_k") if options[name] is not None]
    if len(cumulative) == 1:
        other = {"cu_seqlens_q": "cu_seqlens_k", "cu_seqlens_k": "cu_seqlens_q"}[cumulative[0]]
        call.fail(f"{cumulative[0]} without {other}", "Packed sequences need both.")
    if not cumulative:
        return False
    for name in ("query_lengths", "key_lengths"):
        if options[name] is not None:
            call.fail(
                f"{name} and {cumulative[0]} both give the lengths of sequences",
                "Give lengths (batch,) for padded arrays, or cumulative lengths for packed ones.",
            )
    if options["layout"] != "bshd":
        call.fail(
            f"layout {options['layout']!r} with packed sequences",
            "Packed arrays are (tokens, heads, dim): leave layout out.",
        )
    return True


def out_dtype(call: Call, value: Any) -> str | None:
    """Name of out_dtype, or None."""
    if value is None:
        return None
    try:
        name = arrays_.dtype_name(value)
    except ValueError:
        name = repr(value)
    if name not in FLOAT_DTYPES:
        planned = "; float8 is planned, not there yet" if name.startswith("float8") else ""
        call.fail(f"out_dtype is {name}", f"out_dtype is one of {', '.join(FLOAT_DTYPES)}{planned}.")
    return name


def numbers(call: Call, options: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Fields of Problem that are numbers, switches and names."""
    scale = _number(call, "scale", options["scale"], dtype, "any finite number; None is 1/sqrt(head_dim)")
    softcap = _number(call, "softcap", options["softcap"], dtype, "a finite number above 0; None is no cap")
    wide = "float64" if dtype == "float64" else "float32"
    if softcap is not None and softcap <= 0:
        call.fail(f"softcap is {options['softcap']}", "softcap is a finite number above 0; None is no cap.")
    if softcap is not None and softcap < _SMALLEST_SOFTCAP[wide]:
        call.fail(
            f"softcap is {options['softcap']}, too small for {wide}",
            f"softcap is at least {_SMALLEST_SOFTCAP[wide]:.4g}, for which 1 / softcap is finite.",
        )
    precision = options["precision"]
    if not (precision is None or _is_one_of(precision, ("float32", "tf32"))):
        call.fail(f"precision is {precision!r}", 'precision is None, "float32" or "tf32".')
    if precision is not None and dtype != "float32":
        call.fail(
            f"precision {precision!r} with {dtype} inputs",
            "precision is for float32 inputs: leave it None.",
            show=("q",),
        )
    return dict(
        scale=1 / math.sqrt(call.sizes["head_dim"][0]) if scale is None else scale,
        softcap=softcap,
        causal=bool(options["causal"]),
        window=_window(call, options["window"]),
        query_offset=_whole(
            call, "query_offset", options["query_offset"], "a whole number, or None for len_k - len_q"
        ),
        precision=precision,
        deterministic=bool(options["deterministic"]),
    )


def _number(call: Call, name: str, value: Any, dtype: str, meaning: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        call.fail(f"{name} is {value!r}", f"{name} is {meaning}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        call.fail(f"{name} is {value}", f"{name} is {meaning}.")
    wide = "float64" if dtype == "float64" else "float32"
    if abs(number) > _LARGEST[wide]:
        call.fail(
            f"{name} is {value}, beyond {wide}",
            f"{name} is used in float32 unless q, k and v are float64: up to {_LARGEST[wide]:.4g} in size.",
        )
    return number


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _whole(call: Call, name: str, value: Any, meaning: str) -> int | None:
    if value is None:
        return None
    if not _is_whole(value):
        call.fail(f"{name} is {value!r}", f"{name} is {meaning}.")
    if abs(int(value)) > _LARGEST_OFFSET:
        call.fail(f"{name} is {value}", f"{name} lies from -2^60 to 2^60.")
    return int(value)


def _window(call: Call, value: Any) -> tuple[int | None, int | None]:
    if value is None:
        return (None, None)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        call.fail(
            f"window is {value!r}",
            "window is (left, right): how many keys before and after its position a query sees; None is all.",
        )
    sides = []
    for side, n in zip(("left", "right"), value, strict=True):
        if n is not None and (not _is_whole(n) or n < 0):
            do = f"{side} is a whole number from 0, or None for unbounded."
            call.fail(f"window {tuple(value)!r} has {side} {n!r}", do)
        sides.append(None if n is None or n >= _UNBOUNDED else int(n))
    return sides[0], sides[1]


def block_mask(call: Call, value: Any, longest_q: int, longest_k: int) -> Any:
    """The BlockMask, checked against the call and grown to cover it; None without one."""
    if value is None:
        return None
    from cuflash.blockmask import BlockMask

    if not isinstance(value, BlockMask):
        call.fail(
            f"block_mask has the type {type(value).__name__}",
            "block_mask is a cuflash.BlockMask; an array is mask=.",
        )
    for axis, label in enumerate(("batch", "heads")):
        n, (size, _) = value.indptr.shape[axis], call.sizes[label]
        if n not in (1, size):
            call.fail(
                f"block_mask has {label} {n}, the call has {size}",
                "Its leading axes are (batch or 1, heads or 1).",
                show=("q",),
            )
    for label, length, blocks, block in (
        ("len_q", longest_q, value.n_rows, value.block_q),
        ("len_k", longest_k, value.n_columns if value.n_columns_given else None, value.block_k),
    ):
        if blocks is not None and blocks * block < length:
            call.fail(
                f"block_mask covers {label} {blocks * block}, {blocks} blocks of {block}; needed is {length}",
                f"Give {-(-length // block)} blocks along {label}.", show=("q", "k"),
            )  # fmt: skip
    # with lengths on the device nobody knows the longest sequence: as long as the arrays, then
    most = [
        next(call.sizes[a][0] for a in (f"tokens_{side}", f"len_{side}") if a in call.sizes) for side in "qk"
    ]
    return value.covering(longest_q or most[0], longest_k or most[1])


def dropout(call: Call, value: Any, device: Any) -> tuple[float | None, Any, tuple[int, int, int, int]]:
    """(p or None, seed, counter shift) of contract item 10."""
    nothing = (0, 0, 0, 0)
    if value is None:
        return None, None, nothing
    do = "dropout is (p, seed) or (p, seed, (batch0, head0, i0, j0)), 0 <= p < 1."
    if not isinstance(value, (tuple, list)) or len(value) not in (2, 3):
        call.fail(f"dropout is {value!r}", do)
    p, seed = value[0], value[1]
    is_number = isinstance(p, (int, float, np.integer, np.floating)) and not isinstance(p, bool)
    if not is_number or not 0 <= p < 1 or float(p) == 1:  # a longdouble may round to 1
        call.fail(f"dropout has p = {p!r}", do)
    seed = _seed(call, seed, device)
    shift = tuple(value[2]) if len(value) == 3 and isinstance(value[2], (tuple, list)) else nothing
    if (
        len(value) == 3
        and value[2] is not None
        and (not isinstance(value[2], (tuple, list)) or not _is_shift(shift))
    ):
        call.fail(
            f"dropout has the shift {value[2]!r}",
            "The shift is four whole numbers (batch0, head0, i0, j0), 0 to 2^32 - 1.",
        )
    return (float(p) or None), seed, tuple(int(n) for n in shift)


def _is_shift(shift: tuple) -> bool:
    return len(shift) == 4 and all(_is_whole(n) and 0 <= n < 1 << 32 for n in shift)


def _seed(call: Call, seed: Any, device: Any) -> Any:
    do = "The seed is a whole number from 0 to 2^64 - 1, or a uint64 device array without axes."
    if _is_whole(seed):
        if not 0 <= seed < 1 << 64:
            call.fail(f"dropout has the seed {seed}", do)
        return int(seed)
    try:
        array, where = arrays_.convert(seed)
    except TypeError as error:
        call.fail(f"the seed of dropout {error}", do)
    if array.shape != () or array.dtype.name != "uint64":
        call.fail(f"the seed of dropout is an array {array.shape} {array.dtype.name}", do)
    if where == HOST:
        return int(array)
    if device not in (where, SPEC) and where != SPEC:
        call.fail(f"the seed of dropout is on {device_text(where)}, q on {device_text(device)}", do)
    return array
