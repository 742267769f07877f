"""Arrays and options of a call -> Problem and Operands: every user-facing rule, before anything runs.

Read after problem.py.  check() goes through a call in this order: option names, arrays (kind, device, rank, dtype,
shape), numbers and switches (check_options.py), lengths, targets (check_targets.py).  messages.py words the errors.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cuflash import arrays as arrays_
from cuflash import check_options, check_targets
from cuflash.arrays import HOST, SPEC
from cuflash.messages import Call, device_text
from cuflash.problem import FLOAT_DTYPES, Operands, Problem

_WHERE = {"forward": "attention", "backward": "attention_backward"}
_CORE = {"forward": ("q", "k", "v"), "backward": ("dout", "q", "k", "v", "out", "lse", "dlse")}
_MODIFIERS = ("bias", "mask", "alibi_slopes", "sink")
_LENGTHS = ("query_lengths", "key_lengths", "cu_seqlens_q", "cu_seqlens_k")
_SCORES = ("batch", "heads", "len_q", "len_k")

_VECTORS = {
    "q": ("batch", "len_q", "heads", "head_dim"),
    "k": ("batch", "len_k", "heads_k", "head_dim"),
    "v": ("batch", "len_k", "heads_k", "head_dim_v"),
    "out": ("batch", "len_q", "heads", "head_dim_v"),
}
_VECTORS |= {"dout": _VECTORS["out"], "dq": _VECTORS["q"], "dk": _VECTORS["k"], "dv": _VECTORS["v"]}
_PER_ROW = ("lse", "dlse")
# what an axis is called when two arrays disagree about its length
_PHRASES = {
    "len_q": "{} query rows", "len_k": "{} key rows", "tokens_q": "{} query tokens", "tokens_k": "{} key tokens",
    "heads": "{} heads", "heads_k": "{} key heads", "batch": "batch {}",
}  # fmt: skip


def check(
    direction: str,
    arrays: dict[str, Any],
    options: dict[str, Any] | None = None,
    *,
    where: str | None = None,
    specs: bool = False,
) -> tuple[Problem, Operands]:
    """(Problem, Operands) of a call, or CuflashError; nothing is computed, copied or written.

    | argument | meaning |
    |---|---|
    | direction | "forward" or "backward" |
    | arrays | q, k, v; in the backward also dout, out, lse and dlse (or None) |
    | options | any of the keyword arguments of `attention`, `attention_vjp`, `attention_backward` |
    | where | the public function, for messages |
    | specs | whether arrays may be specs (`explain`, `warmup`) |

        >>> problem, operands = check("forward", dict(q=q, k=k, v=v), dict(causal=True))
    """
    call = Call(where or _WHERE[direction])
    options = check_options.known(call, options or {})
    packed = check_options.is_packed(call, options)
    swapped = check_options.is_swapped(call, options, packed)

    _take_arrays(call, direction, arrays, options, specs)
    targets = check_targets.take(call, direction, options, specs)
    _name_axes(call, packed, swapped)
    device = _check_devices(call)
    _check_ranks(call, packed, swapped)
    lengths = _check_lengths_kind(call, options, device)
    dtype, out_dtype = _check_dtypes(call, direction, options, targets)
    _check_shapes(call, packed, lengths, targets)

    numbers = check_options.numbers(call, options, dtype)
    longest_q, longest_k = _check_length_values(call, lengths, packed)
    _check_scores(call, packed, longest_q, longest_k)
    block_mask = check_options.block_mask(call, options["block_mask"], longest_q, longest_k)
    dropout, seed, shift = check_options.dropout(call, options["dropout"], device)
    check_targets.check(call, targets, options, device)

    operands = _operands(call, packed, swapped, direction, targets)
    for name, value in lengths.items():
        setattr(operands, name, value)
    operands.block_mask, operands.seed, operands.counter_shift = block_mask, seed, shift
    operands.workspace, operands.progress = call.arrays.get("workspace"), options["progress"]

    size = {axis: n for axis, (n, _) in call.sizes.items()}
    given = call.arrays
    problem = Problem(
        direction=direction,
        dtype=dtype,
        out_dtype=out_dtype,
        batch=size["batch"],
        len_q=size["tokens_q" if packed else "len_q"],
        len_k=size["tokens_k" if packed else "len_k"],
        heads=size["heads"],
        heads_k=size["heads_k"],
        head_dim=size["head_dim"],
        head_dim_v=size["head_dim_v"],
        packed=packed,
        layout="bhsd" if swapped else "bshd",
        has_query_lengths="query_lengths" in lengths,
        has_key_lengths="key_lengths" in lengths,
        has_alibi="alibi_slopes" in given,
        bias=given["bias"].dtype.name if "bias" in given else None,
        has_mask="mask" in given,
        block_mask=(block_mask.block_q, block_mask.block_k) if block_mask is not None else None,
        has_sink="sink" in given,
        dropout=dropout,
        has_dlse="dlse" in given,
        gradients=_gradients(given) if direction == "backward" else (),
        specs=_specs(operands),
        **numbers,
    )
    return problem, operands


def _gradients(given: dict[str, Any]) -> tuple[str, ...]:
    """What there is to differentiate."""
    return ("dq", "dk", "dv", *("d" + name for name in ("bias", "sink", "alibi_slopes") if name in given))


def _take_arrays(call: Call, direction: str, arrays: dict, options: dict, specs: bool) -> None:
    """Every array argument, brought to NumPy or CuPy; those that are None are left out."""
    for name in _CORE[direction]:
        value = arrays.get(name)
        if value is None and name == "dlse":
            continue
        call.take(name, value, specs)
    for name in _MODIFIERS:
        if options[name] is not None:
            call.take(name, options[name], specs)


def _name_axes(call: Call, packed: bool, swapped: bool) -> None:
    """Names of the axes of every array, in the caller's order."""
    for name, array in call.arrays.items():
        if name in _VECTORS:
            axes = _VECTORS[name]
            if packed:
                axes = (axes[1].replace("len", "tokens"), *axes[2:])
            elif swapped:
                axes = (axes[0], axes[2], axes[1], axes[3])
        elif name in _PER_ROW:
            axes = ("heads", "tokens_q") if packed else ("batch", "heads", "len_q")
        elif name in ("bias", "mask"):
            axes = _SCORES[max(0, 4 - array.ndim) :]
        elif name == "alibi_slopes":
            axes = ("heads",) if array.ndim == 1 else ("batch", "heads")
        elif name == "sink":
            axes = ("heads",)
        else:  # dbias, dsink, dalibi_slopes follow their argument; workspace has one axis
            axes = call.axes.get(name[1:], ("bytes",))
        call.axes[name] = axes


def _check_ranks(call: Call, packed: bool, swapped: bool) -> None:
    for name, array in call.arrays.items():
        axes = call.axes[name]
        if array.ndim == len(axes):
            continue
        wants = f"({', '.join(axes)})"
        do = f"{name} needs {wants}."
        if name in _VECTORS and packed and array.ndim == 4:
            do = f"Packed sequences need {wants}; without cu_seqlens_q and cu_seqlens_k it is four axes."
        elif name in _VECTORS and not packed and array.ndim == 3:
            do = f"{name} needs {wants}; packed sequences also need cu_seqlens_q and cu_seqlens_k."
        elif name in ("bias", "mask"):
            do = f"{name} broadcasts to the scores {wants}, aligned right: at most four axes."
        call.fail(
            f"{name} has {array.ndim} {'axis' if array.ndim == 1 else 'axes'}, needs {len(axes)}",
            do, show=(name,), mark=((name, "rank"),),
        )  # fmt: skip


def _check_devices(call: Call) -> Any:
    """The one device of all arrays: HOST, SPEC or a CUDA device number."""
    device = call.devices["q"]
    for name, other in call.devices.items():
        if device == SPEC:
            device = other
        if other in (device, SPEC):
            continue
        show, mark = tuple(dict.fromkeys(("q", name))), ((name, "device"),)
        if HOST in (other, device):
            call.fail(
                f"{name} is on {device_text(other)}, q on {device_text(device)}",
                "All arrays of a call live on one device: cupy.asarray(x) copies one to the GPU, cupy.asnumpy(x) back.",
                show=show, mark=mark,
            )  # fmt: skip
        call.fail(
            f"{name} is on {device_text(other)}, q on {device_text(device)}",
            "All arrays of a call live on one device; one call over several GPUs is planned, not there yet.",
            show=show, mark=mark,
        )  # fmt: skip
    return device


@functools.lru_cache
def _name_of(dtype: np.dtype) -> str:
    return dtype.name if dtype.isnative else f"{dtype.name} in the other byte order"


def _check_dtypes(call: Call, direction: str, options: dict, targets: dict) -> tuple[str, str]:
    """(dtype, out_dtype), every array's dtype checked against what its role allows."""
    given = {name: _name_of(array.dtype) for name, array in call.arrays.items()}
    dtype = given["q"]
    accumulator = "float64" if dtype == "float64" else "float32"
    out_dtype = check_options.out_dtype(call, options["out_dtype"]) or dtype
    fixed = {name: accumulator for name in ("lse", "dlse", "alibi_slopes", "sink", "dsink", "dalibi_slopes")}
    fixed |= {"mask": "bool", "workspace": "uint8", "dbias": given.get("bias"), "k": dtype, "v": dtype}
    fixed |= {name: out_dtype for name in ("dq", "dk", "dv")}
    if direction == "forward":
        fixed["out"] = out_dtype
    for name, got in given.items():
        wants = fixed.get(name)
        if name in ("mask", "workspace") or got in FLOAT_DTYPES:
            if wants in (None, got):
                continue
            _fail_dtype(call, name, got, wants, targets)
        if got.startswith("float8"):
            do = "float8 is planned, not there yet: give float16 or bfloat16."
        elif name == "bias" and got == "bool":
            do = "A boolean array is a mask: give it as mask= (True = attend)."
        elif got.startswith(("int", "uint", "bool")):
            do = f"Give {wants or 'one of ' + ', '.join(FLOAT_DTYPES)}; whole numbers and booleans are not converted."
        else:
            do = f"Give {wants or 'one of ' + ', '.join(FLOAT_DTYPES)}."
        call.fail(f"{name} is {got}", do, show=(name,), mark=((name, "dtype"),))
    return dtype, out_dtype


def _fail_dtype(call: Call, name: str, got: str, wants: str, targets: dict) -> None:
    """An array has a dtype that is none of its business."""
    mark = ((name, "dtype"),)
    if name in ("k", "v"):
        call.fail(
            f"{name} is {got}, q is {wants}",
            "q, k and v need the same dtype.",
            show=("q", "k", "v"),
            mark=mark,
        )
    if name == "mask":
        call.fail(
            f"mask is {got}, needs bool", "mask is boolean, True = attend; numbers added to the scores are bias=.",
            show=("mask",), mark=mark,
        )  # fmt: skip
    if name in targets and name in ("out", "dq", "dk", "dv"):
        call.fail(
            f"{name} is {got}, the result is {wants}",
            f'Give a {wants} array, or out_dtype="{got}".', show=("q", name), mark=mark,
        )  # fmt: skip
    if name == "dbias":
        call.fail(
            f"dbias is {got}, bias is {wants}",
            "dbias has the dtype of bias.",
            show=("bias", "dbias"),
            mark=mark,
        )
    if name == "workspace":
        call.fail(
            f"workspace is {got}, needs uint8", "Give plan.workspace_bytes of uint8.", show=(name,), mark=mark
        )
    call.fail(
        f"{name} is {got}, needs {wants}",
        f"{name} is float32, and float64 when q, k and v are float64.", show=("q", name), mark=mark,
    )  # fmt: skip


def _check_shapes(call: Call, packed: bool, lengths: dict, targets: dict) -> None:
    """Bind every axis to the first array that has it; all others must agree."""
    if packed:
        call.sizes["batch"] = (lengths["cu_seqlens_q"].shape[0] - 1, "cu_seqlens_q")
    order = (
        "q",
        "k",
        "v",
        *(name for name in call.arrays if name not in ("q", "k", "v", "bias", "mask", "workspace", "dbias")),
    )
    for name in order:
        array = call.arrays[name]
        for axis, (label, n) in enumerate(zip(call.axes[name], array.shape, strict=True)):
            bound, by = call.sizes.setdefault(label, (n, name))
            if bound != n and not (name == "alibi_slopes" and label == "batch" and n == 1):
                _fail_shape(call, name, axis, label, n, bound, by)
    for name in ("head_dim", "head_dim_v"):
        n, by = call.sizes[name]
        if n == 0:
            call.fail(
                f"{by} has {name} 0",
                f"{name} is at least 1.",
                show=(by,),
                mark=((by, call.axes[by].index(name)),),
            )
    heads, heads_k = call.sizes["heads"][0], call.sizes["heads_k"][0]
    if heads % heads_k if heads_k else heads:
        bshd = call.axes["q"] == _VECTORS["q"]
        hint = ' Arrays laid out (batch, heads, len, dim) need layout="bhsd".' if bshd else ""
        call.fail(
            f"{heads} query heads are no multiple of {heads_k} key heads",
            "heads must be a multiple of heads_k: each key head serves as many query heads." + hint,
            show=("q", "k"), mark=(("q", call.axes["q"].index("heads")), ("k", call.axes["k"].index("heads_k"))),
        )  # fmt: skip
    for name in ("dbias", "dalibi_slopes"):
        if name in targets and name in call.arrays and call.arrays[name].shape != call.arrays[name[1:]].shape:
            call.fail(
                f"{name} has another shape than {name[1:]}",
                f"{name} has the shape of {name[1:]}.",
                show=(name[1:], name),
            )


def _fail_shape(call: Call, name: str, axis: int, label: str, n: int, bound: int, by: str) -> None:
    phrase = _PHRASES.get(label, label + " {}").format(n)
    mark = ((name, axis),)
    if by == "cu_seqlens_q":
        call.fail(
            f"{name} has {phrase}, cu_seqlens_q has {bound} sequences",
            "Options with a batch axis have one entry per sequence.", show=(name,), mark=mark,
        )  # fmt: skip
    do = {
        "k": "q and k need the same batch and head_dim.",
        "v": "k and v need the same batch, length and heads.",
    }
    if name == "k" and "batch" not in call.axes["k"]:
        do = {"k": "q and k need the same head_dim."}
    if name == "v" and "batch" not in call.axes["v"]:
        do = {"v": "k and v need the same tokens and heads."}
    wants = ", ".join(
        f"{a} {call.sizes.get(a, (size,))[0]}"
        for a, size in zip(call.axes[name], call.arrays[name].shape, strict=True)
    )
    call.fail(
        f"{name} has {phrase}, {by} has {bound}",
        do.get(name, f"{name} needs ({wants})."),
        show=tuple(dict.fromkeys(("q", "k", "v", name))), mark=mark,
    )  # fmt: skip


def _check_lengths_kind(call: Call, options: dict, device: Any) -> dict[str, Any]:
    """query_lengths, key_lengths, cu_seqlens_q, cu_seqlens_k as one-axis integer arrays, NumPy or on the call's device."""
    lengths = {}
    for name in _LENGTHS:
        value = options[name]
        if value is None:
            continue
        do = f"{name} is a list, a NumPy or a device array of whole numbers."
        if isinstance(value, (list, tuple, range)):
            try:
                array, where = np.asarray(value if len(value) else np.zeros(0, np.int64)), HOST
            except (ValueError, OverflowError, TypeError):
                call.fail(f"{name} is no list of whole numbers", do)
        else:
            try:
                array, where = arrays_.convert(value)
            except TypeError as error:
                call.fail(f"{name} {error}", do)
        call.arrays[name], call.devices[name] = array, where
        call.axes[name] = ("batch + 1",) if name.startswith("cu_") else ("batch",)
        if array.ndim != 1:
            call.fail(f"{name} has {array.ndim} axes, needs 1", do, show=(name,), mark=((name, "rank"),))
        if array.dtype.kind not in "iu":
            call.fail(f"{name} is {array.dtype.name}", do, show=(name,), mark=((name, "dtype"),))
        if where not in (HOST, SPEC, device) and device != SPEC:
            call.fail(
                f"{name} is on {device_text(where)}, q on {device_text(device)}",
                "Lengths live on the host or on the device of q.", show=("q", name), mark=((name, "device"),),
            )  # fmt: skip
        if where not in (HOST, SPEC) and array.dtype.name not in ("int32", "int64"):
            call.fail(
                f"{name} on the device is {array.dtype.name}", f"Give int32 or int64: {name}.astype(cupy.int32).",
                show=(name,), mark=((name, "dtype"),),
            )  # fmt: skip
        if name.startswith("cu_") and array.shape[0] == 0:
            call.fail(f"{name} is empty", "Cumulative lengths of n sequences are n + 1 numbers, the first 0.")
        lengths[name] = array
        del call.arrays[name]
    if "cu_seqlens_q" in lengths and lengths["cu_seqlens_q"].shape != lengths["cu_seqlens_k"].shape:
        n_q, n_k = (lengths[name].shape[0] for name in ("cu_seqlens_q", "cu_seqlens_k"))
        call.fail(
            f"cu_seqlens_q has {n_q} numbers, cu_seqlens_k has {n_k}",
            "Both hold one number per sequence and one more: the same sequences in q and in k.",
        )
    return lengths


def _check_length_values(call: Call, lengths: dict[str, Any], packed: bool) -> tuple[int, int]:
    """Check host lengths; returns the longest (query, key) length that can occur, as far as the host knows.

    With cumulative lengths on the device nothing is known: 0.
    """
    longest = {"q": 0, "k": 0}
    for side in "qk":
        if not packed:
            longest[side] = call.sizes[f"len_{side}"][0]
    batch = call.sizes["batch"][0]
    for name, value in lengths.items():
        side = "q" if name in ("query_lengths", "cu_seqlens_q") else "k"
        axis = f"{'tokens' if packed else 'len'}_{side}"
        limit, by = call.sizes[axis]
        if not packed and value.shape[0] != batch:
            call.fail(
                f"{name} has {value.shape[0]} entries, q has batch {batch}",
                "Give one length per batch entry.",
                show=("q",),
            )
        if type(value) is not np.ndarray or call.devices[name] == SPEC:
            continue  # device values are trusted, and clamped by the kernels
        wrong = (value < 0) | (value > limit)
        if wrong.any():
            at = int(wrong.argmax())
            call.fail(
                f"{name}[{at}] is {value[at]}, {by} has {axis} {limit}",
                f"Every entry lies between 0 and {axis}.", show=(by,), mark=((by, call.axes[by].index(axis)),),
            )  # fmt: skip
        if packed:
            longest[side] = _check_cumulative(call, name, value)
        if value.dtype.name not in ("int32", "int64"):
            lengths[name] = value.astype(np.int64)
    return longest["q"], longest["k"]


def _check_cumulative(call: Call, name: str, value: np.ndarray) -> int:
    """Longest sequence of cumulative lengths that start at 0 and do not decrease."""
    if value[0] != 0:
        call.fail(f"{name}[0] is {value[0]}", "Cumulative lengths start at 0.")
    steps = np.diff(value.astype(np.int64))
    if (steps < 0).any():
        at = int((steps < 0).argmax()) + 1
        call.fail(
            f"{name} decreases: {name}[{at}] is {value[at]} after {value[at - 1]}",
            "Cumulative lengths never decrease.",
        )
    return int(steps.max(initial=0))


def _check_scores(call: Call, packed: bool, longest_q: int, longest_k: int) -> None:
    """bias and mask broadcast to the scores; when packed, an axis longer than 1 reaches the longest sequence."""
    lengths = (call.sizes["batch"][0], call.sizes["heads"][0], longest_q, longest_k)
    for name in ("bias", "mask"):
        if name not in call.arrays:
            continue
        array = call.arrays[name]
        for axis, n in enumerate(array.shape):
            label = call.axes[name][axis]
            score = lengths[_SCORES.index(label)]
            if n == 1 or n == score or (packed and label.startswith("len") and n > score):
                continue
            got = ", ".join(
                f"{a} {s}{'!' if a == label else ''}"
                for a, s in zip(call.axes[name], array.shape, strict=True)
            )
            where = "from cu_seqlens_q and cu_seqlens_k, the longest sequence" if packed else "from q and k"
            call.fail(
                f"{name} ({got}) does not broadcast to the scores",
                f"Give {name} a shape whose every axis is 1 or the scores' length.",
                show=("scores (" + ", ".join(f"{a} {s}" for a, s in zip(_SCORES, lengths, strict=True)) + f") {where}",),
            )  # fmt: skip


def _operands(call: Call, packed: bool, swapped: bool, direction: str, targets: dict) -> Operands:
    """Canonical views of every array (see Operands)."""
    operands = Operands()
    for name, array in call.arrays.items():
        if name in _VECTORS:
            view = array[None] if packed else array.swapaxes(1, 2) if swapped else array
        elif name in _PER_ROW:
            view = array[None] if packed else array
        elif name in ("bias", "mask", "dbias"):
            view = array[(None,) * (4 - array.ndim)]
        elif name in ("alibi_slopes", "dalibi_slopes"):
            view = array[(None,) * (2 - array.ndim)]
        else:
            view = array
        if direction == "backward" and name in targets:
            operands.grads[name] = view
        elif name != "workspace":
            setattr(operands, name, view)
    return operands


def _specs(operands: Operands) -> tuple:
    """(name, ArraySpec) of every operand that is there, sorted by name."""
    found = dict(operands.grads)
    for name in (*_CORE["backward"], *_MODIFIERS, *_LENGTHS):
        value = getattr(operands, name)
        if value is not None:
            found[name] = value
    return tuple((name, arrays_.array_spec(found[name])) for name in sorted(found))
