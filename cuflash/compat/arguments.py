"""What the translations share: arrays of any kind, masks that are two things, dropout without a seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.arrays import convert
from cuflash.errors import CuflashError


def array(where: str, name: str, value: Any) -> Any:
    """value as a NumPy or CuPy array on the same memory."""
    try:
        return convert(value)[0]
    except TypeError as error:
        raise CuflashError(f"{where}: {name} {error}\n  Give a NumPy or CuPy array.") from None


def arrays(where: str, **values: Any) -> list[Any]:
    """The same for several arrays by name."""
    return [array(where, name, value) for name, value in values.items()]


def mask_or_bias(where: str, attn_mask: Any) -> dict[str, Any]:
    """The option that a mask is in cuflash: a boolean one mask=, one of numbers bias=."""
    if attn_mask is None:
        return {}
    attn_mask = array(where, "attn_mask", attn_mask)
    return {"mask" if attn_mask.dtype == bool else "bias": attn_mask}


def is_number(value: Any, number: float) -> bool:
    """Whether value is this number: what is not a number, an array too, is left for check.py to refuse."""
    return isinstance(value, (int, float, np.number)) and value == number


def flag(where: str, name: str, value: Any) -> bool:
    """True or False, which may be written 1 and 0."""
    if not any(is_number(value, n) for n in (0, 1)) and not isinstance(value, np.bool_):
        raise CuflashError(f"{where}: {name} is {value!r}\n  Give True or False.")
    return bool(value)


def dropout(where: str, p: float, seed: Any) -> tuple | None:
    """cuflash's dropout= from a probability and a seed: there is no hidden generator."""
    if is_number(p, 0):
        return None
    if seed is None:
        raise CuflashError(
            f"{where}: dropout_p is {p}, seed is None\n"
            "  Give seed=, a whole number from 0 to 2^64 - 1: the same seed drops the same weights."
        )
    return p, seed
