"""Arrays and options of a call -> Problem and Operands: every user-facing rule, before anything runs.

Read after problem.py.  check() goes through a call in this order: option names and arrays, devices and dtypes
(check_kinds.py), axes (check_shapes.py), numbers and switches (check_options.py), lengths (check_lengths.py),
targets (check_targets.py).  messages.py words the errors.
"""

from __future__ import annotations

from typing import Any

from cuflash import arrays as arrays_
from cuflash import check_options, check_targets
from cuflash.check_kinds import check_devices, check_dtypes
from cuflash.check_lengths import LENGTHS, check_lengths, take_lengths
from cuflash.check_shapes import PER_ROW, VECTORS, check_ranks, check_scores, check_shapes, name_axes
from cuflash.messages import Call
from cuflash.problem import Operands, Problem

_WHERE = {"forward": "attention", "backward": "attention_backward"}
_CORE = {"forward": ("q", "k", "v"), "backward": ("dout", "q", "k", "v", "out", "lse", "dlse")}
_MODIFIERS = ("bias", "mask", "alibi_slopes", "sink")


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
    swapped = options["layout"] == "bhsd"

    _take_arrays(call, direction, arrays, options, specs)
    targets = check_targets.take(call, direction, options, specs)
    name_axes(call, packed, swapped)
    device = check_devices(call)
    check_ranks(call, packed)
    lengths = take_lengths(call, options, device)
    dtype, out_dtype = check_dtypes(call, direction, options, targets)
    check_shapes(call, packed, lengths, targets)

    numbers = check_options.numbers(call, options, dtype)
    longest_q, longest_k = check_lengths(call, lengths, packed)
    check_scores(call, packed, longest_q, longest_k)
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


def _operands(call: Call, packed: bool, swapped: bool, direction: str, targets: dict) -> Operands:
    """Canonical views of every array (see Operands)."""
    operands = Operands()
    for name, array in call.arrays.items():
        if name in VECTORS:
            view = array[None] if packed else array.swapaxes(1, 2) if swapped else array
        elif name in PER_ROW:
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
    for name in (*_CORE["backward"], *_MODIFIERS, *LENGTHS):
        value = getattr(operands, name)
        if value is not None:
            found[name] = value
    return tuple((name, arrays_.array_spec(found[name])) for name in sorted(found))
