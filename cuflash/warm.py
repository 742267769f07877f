"""The key of a warm call on a GPU: what must be equal for a prepared call to be made again, unchecked."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import args, launch
from cuflash import arrays as arrays_
from cuflash.check_options import DEFAULTS

# options that are part of the key as they are, in this order; arrays are described by launch.key
PLAIN = (
    "causal", "window", "query_offset", "scale", "softcap", "block_mask", "layout", "precision", "out_dtype",
    "kernel", "return_lse", "deterministic",
)  # fmt: skip
_KNOWN = {*DEFAULTS, "deterministic", "return_lse", "out", "grads"}
_MAX_SEED = 1 << 64
_LENGTHS_AT = {
    direction: tuple(order.index(name) for name in args.LENGTHS) for direction, order in launch.ORDER.items()
}
_HOST_KINDS = (list, tuple, range, np.ndarray)


def key(direction: str, arrays: dict[str, Any], options: dict[str, Any]) -> tuple[Any, tuple[Any, ...], int]:
    """(key or None, arrays in launch.ORDER, seed); None when the call has to be checked: see launch.key.

    Calls with unknown options or a progress function are checked every time.
    """
    if options.get("progress") is not None or not options.keys() <= _KNOWN:
        return None, (), 0
    plain = tuple(options.get(name, DEFAULTS.get(name, False)) for name in PLAIN)
    values = dict(options, **arrays)
    given = arrays_.brought([values.get(name) for name in launch.ORDER[direction]])
    return of_values(direction, given, plain, options.get("dropout"))


def of_values(
    direction: str, arrays: list[Any], plain: tuple[Any, ...], dropout: Any
) -> tuple[Any, tuple[Any, ...] | list[Any], int]:
    """The same from arrays in launch.ORDER, the seed's place left None, and options in the order of PLAIN.

    Lengths on the host are made int64 arrays in place.
    """
    for at in _LENGTHS_AT[direction]:
        if arrays[at] is not None and type(arrays[at]) in _HOST_KINDS:
            arrays[at] = _whole_numbers(arrays[at])
            if arrays[at] is None:
                return None, (), 0
    if dropout is None:
        return launch.key(arrays, (direction, plain)), arrays, 0
    if type(dropout) is not tuple or len(dropout) not in (2, 3) or dropout[1] is None:
        return None, (), 0
    p, seed, shift = (*dropout, None)[:3]
    if type(seed) is not int:
        arrays[launch.ORDER[direction].index("seed")] = seed
        seed = 0
    elif not 0 <= seed < _MAX_SEED:
        return None, (), 0
    return launch.key(arrays, (direction, plain, p, shift)), arrays, seed


def _whole_numbers(values: Any) -> np.ndarray | None:
    """Lengths on the host as an int64 array; None when they are none."""
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError, TypeError):
        return None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        return None
    return np.ascontiguousarray(found, np.int64)
