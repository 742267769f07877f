"""The key of a warm call on a GPU: what must be equal for a prepared call to be made again, unchecked."""

from __future__ import annotations

import operator
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
_ABSENT = {
    direction: dict.fromkeys(order) | DEFAULTS | {"return_lse": False, "deterministic": False}
    for direction, order in launch.ORDER.items()
}
_ARRAYS = {direction: operator.itemgetter(*order) for direction, order in launch.ORDER.items()}
_plain_of = operator.itemgetter(*PLAIN)
_MAX_SEED = 1 << 64
_LENGTHS_AT = {
    direction: tuple(order.index(name) for name in args.LENGTHS) for direction, order in launch.ORDER.items()
}
_HOST_KINDS = (list, tuple, range, np.ndarray)


def key(direction: str, arrays: dict[str, Any], options: dict[str, Any]) -> tuple[Any, tuple[Any, ...], int]:
    """(key or None, arrays as launch.key takes them, seed); None when the call has to be checked.

    Calls with unknown options or a progress function are checked every time.
    """
    if options.get("progress") is not None or not options.keys() <= _KNOWN:
        return None, (), 0
    values = _ABSENT[direction] | options | arrays
    plain = direction, *_plain_of(values)
    given = _ARRAYS[direction](values)
    if direction == "forward" and all(array is None for array in given[3:]):
        given = given[:3]
    return of_values(direction, given, plain, values["dropout"])


def of_values(
    direction: str, arrays: tuple[Any, ...], plain: tuple[Any, ...], dropout: Any
) -> tuple[Any, tuple[Any, ...] | list[Any], int]:
    """The same from arrays as launch.key takes them, without the seed, and plain: the direction, then options
    in the order of PLAIN.
    """
    given: Any = arrays
    if len(arrays) > 3:
        given = list(arrays)
        for at in _LENGTHS_AT[direction]:
            if type(given[at]) in _HOST_KINDS:
                given[at] = _whole_numbers(given[at])
                if given[at] is None:
                    return None, (), 0
    seed = 0
    if dropout is not None:
        if type(dropout) is not tuple or len(dropout) not in (2, 3) or dropout[1] is None:
            return None, (), 0
        p, seed, shift = (*dropout, None)[:3]
        plain = (*plain, p, shift)
        if type(seed) is not int:
            at = launch.ORDER[direction].index("seed")
            given = [*given, *(None,) * (len(launch.ORDER[direction]) - len(given))]
            given[at], seed = seed, 0
        elif not 0 <= seed < _MAX_SEED:
            return None, (), 0
    key = launch.key(given, plain)
    if key is None:  # perhaps for arrays of other libraries
        given = arrays_.brought(given)
        key = launch.key(given, plain)
    return key, given, seed


def _whole_numbers(values: Any) -> np.ndarray | None:
    """Lengths on the host as an int64 array; None when they are none."""
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError, TypeError):
        return None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        return None
    return np.ascontiguousarray(found, np.int64)
