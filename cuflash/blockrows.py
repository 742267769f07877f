"""What a BlockMask is made of, checked: whole numbers, and rows of block columns brought to one form."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from cuflash.errors import CuflashError


def fail(what: str, do: str) -> NoReturn:
    raise CuflashError(f"BlockMask: {what}\n  {do}")


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        fail(f"{name} is {value!r}", f"{name} is a whole number from 0.")
    return int(value)


def positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        fail(f"{name} is {value!r}", f"{name} is a whole number from 1.")
    return int(value)


def n_blocks(length: int, block: int) -> int:
    return -(-whole("a length", length) // block)


def whole_numbers(name: str, value: Any) -> np.ndarray:
    """An integer NumPy array; device arrays are refused, for one would have to wait for them."""
    if type(value).__module__.split(".")[0] == "cupy":
        fail(
            f"{name} is on a CUDA device", "Give host arrays: cupy.asnumpy(x); the device copy is made once."
        )
    array = np.asarray(value)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        fail(f"{name} is {array.dtype.name}", f"{name} holds whole numbers.")
    return array


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
