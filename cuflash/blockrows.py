"""What a BlockMask is made of, checked: whole numbers, and rows of block columns brought to one form."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from cuflash.errors import CuflashError


def fail(what: str, do: str) -> NoReturn:
    raise CuflashError(f"BlockMask: {what}\n  {do}")


MOST_BLOCKS = (1 << 31) - 1  # along one axis: columns and offsets are 32-bit
MOST_BLOCK = 1 << 30  # rows or keys of one block: kernels hold it in 32 bits
FAR = 1 << 60  # no length, window or offset leads further


def whole(name: str, value: Any, least: int = 0, most: int = FAR) -> int:
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        to = f" to {most}" if least < 0 or (is_whole and value > most) else ""
        fail(f"{name} is {value!r}", f"{name} is a whole number from {least}{to}.")
    return int(value)


def positive(name: str, value: Any) -> int:
    """A block size."""
    return whole(name, value, 1, MOST_BLOCK)


def side(name: str, value: Any) -> int | None:
    """One side of a window; None is unbounded, and so is what leads further than any length."""
    return None if value is None else min(whole(name, value, most=1 << 64), FAR)


def offset(value: Any) -> int | None:
    """A query_offset."""
    return None if value is None else whole("query_offset", value, -FAR, FAR)


def n_blocks(length: int, block: int) -> int:
    n = -(-whole("a length", length) // block)
    if n > MOST_BLOCKS:
        fail(f"{length} rows or keys are {n} blocks of {block}", "Take larger blocks: at most 2^31 - 1 fit.")
    return n


def whole_numbers(name: str, value: Any) -> np.ndarray:
    """An integer NumPy array; device arrays are refused, for one would have to wait for them."""
    if type(value).__module__.split(".")[0] == "cupy":
        fail(
            f"{name} is on a CUDA device", "Give host arrays: cupy.asnumpy(x); the device copy is made once."
        )
    try:
        array = np.asarray(value)
    except ValueError as error:
        fail(f"{name} is no array: {error}", f"{name} holds whole numbers.")
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        fail(f"{name} is {array.dtype.name}", f"{name} holds whole numbers.")
    return array


def booleans(what: str, value: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """value as booleans, broadcast to shape where one is given; without, 0 and 1 will also do.

    Other numbers are refused: scores, weights or indices in the place of a mask would keep nearly all.
    """
    axes = "" if shape is None else f" that broadcast to {shape}"
    do = f"It is booleans{axes}: True is kept."
    try:
        array = np.asarray(value)
        is_boolean = array.dtype == bool or array.size == 0
        if not is_boolean and shape is None and array.dtype.kind in "iuf":
            is_boolean = bool(((array == 0) | (array == 1)).all())
            if not is_boolean:
                fail(f"{what} is {array.dtype.name} and has other numbers than 0 and 1", do)
        if not is_boolean:
            fail(f"{what} is {array.dtype.name}", do)
        array = array.astype(bool)
        return array if shape is None else np.broadcast_to(array, shape)
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, CuflashError):
            raise
        fail(f"{what} is no mask: {error}", do)


def canonical(indptr: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int32 copies in which rows are sorted and follow each other without gaps; what cannot is refused."""
    indptr = indptr.astype(np.int64)
    counts = np.diff(indptr, axis=-1)
    if (counts < 0).any():
        b, h, r = np.argwhere(counts < 0)[0]
        fail(
            f"indptr decreases after block row {r} of batch {b}, head {h}",
            "Offsets never decrease along a row axis.",
        )
    if indptr.size and (indptr.min() < 0 or indptr.max() > indices.size):
        fail(
            f"indptr reaches from {indptr.min()} to {indptr.max()}, indices has {indices.size} entries",
            "Offsets lie in indices: those of a later head start where the head before it ends.",
        )
    counts, starts = counts.ravel(), indptr[..., :-1].ravel()
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    if total >= 1 << 31:
        fail(f"{total} blocks are kept", "Offsets are 32-bit: take larger blocks.")
    rows = np.repeat(np.arange(counts.size), counts)
    columns = indices[np.arange(total) + np.repeat(starts - (ends - counts), counts)].astype(np.int64)
    falls = (np.diff(columns) <= 0) & (np.diff(rows) == 0)
    if falls.any():
        order = np.lexsort((columns, rows))
        columns = columns[order]
        twice = (np.diff(columns) == 0) & (np.diff(rows) == 0)
        if twice.any():
            at = int(twice.argmax())
            fail(
                f"block row {rows[at] % (indptr.shape[-1] - 1)} names column {columns[at]} twice",
                "Name each column once.",
            )
    lead = (*indptr.shape[:2], indptr.shape[-1] - 1)
    first = np.cumsum(counts.reshape(lead).sum(axis=-1).ravel())
    first = (first - counts.reshape(lead).sum(axis=-1).ravel()).reshape(*lead[:2], 1)
    return (
        np.concatenate([first, ends.reshape(lead)], axis=-1).astype(np.int32),
        columns.astype(np.int32),
    )
