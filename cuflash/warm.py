"""The key of a warm call on a GPU: what must be equal for a prepared call to be made again, unchecked."""

from __future__ import annotations

from typing import Any

from cuflash import launch
from cuflash.check_options import DEFAULTS

# options that are arrays (launch.ORDER), that the arrays stand for, or that need more than their value
_ELSEWHERE = {*launch.ORDER, "dropout", "progress", "out", "grads"}
_PLAIN = tuple(name for name in (*DEFAULTS, "deterministic") if name not in _ELSEWHERE)
_KNOWN = {*DEFAULTS, "deterministic", "return_lse", "out", "grads"}


def key(direction: str, arrays: dict[str, Any], options: dict[str, Any]) -> tuple[Any, tuple, int]:
    """(key or None, arrays in launch.ORDER, seed); None when the call has to be checked: see launch.key.

    Lengths on the host, unknown options and a progress function are checked every time.
    """
    p, seed, shift, seed_array = 0, 0, None, None
    if options.get("dropout") is not None:
        dropout = options["dropout"]
        if type(dropout) is not tuple or len(dropout) not in (2, 3):
            return None, (), 0
        p, seed, shift = (*dropout, None)[:3]
        if type(seed) is not int:
            seed, seed_array = 0, seed
        elif not 0 <= seed < 1 << 64:
            return None, (), 0
    if options.get("progress") is not None or not options.keys() <= _KNOWN:
        return None, (), 0
    given = tuple(
        seed_array if name == "seed" else arrays[name] if name in arrays else options.get(name)
        for name in launch.ORDER
    )
    plain = tuple(options.get(name, DEFAULTS.get(name, False)) for name in _PLAIN)
    return launch.key(direction, given, (*plain, p, shift)), given, seed
