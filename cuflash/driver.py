"""Functions of the CUDA driver that CuPy does not offer, through ctypes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from cuflash.errors import CuflashError


@functools.cache
def function(name: str) -> Any:
    """A function that gives a CUresult.  CuflashError where the driver is missing or too old."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise CuflashError(f"the CUDA driver has no {name}, which came with 12.0: {error}") from error
