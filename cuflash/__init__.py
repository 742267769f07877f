"""Exact attention for CuPy and NumPy."""

from cuflash.errors import CuflashError

__all__ = ["CuflashError"]
__version__ = "0.1.0"
