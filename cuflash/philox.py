"""Dropout's random numbers: Philox-4x32-10, one 32-bit word for each score.

The weight of query i and key j of one (batch, head) is kept when its word reaches a threshold.  The word
depends on the seed and on (batch, head, i, j) alone, so every tile shape, layout and path drops the same
weights:

    key      (seed low, seed high)           32 bits each
    counter  (j // 4, i, head, batch)        the generator gives four words at once: j % 4 picks one
    kept     word >= min(round(p * 2^32), 2^32 - 1)

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
kernels/lib/philox.cuh computes the same, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import check_options
from cuflash.arrays import HOST, module_of
from cuflash.errors import CuflashError
from cuflash.messages import Call

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
N_ROUNDS = 10
LOW_32 = 0xFFFFFFFF
WORDS_AT_ONCE = 1 << 22  # 8 bytes each, and a few temporaries


def philox_4x32_10(counter: tuple, key: tuple) -> tuple:
    """Four random 32-bit words for each counter.

    counter: four uint64 arrays that broadcast, each value below 2^32; key: two such values (arrays or ints).
    Returns four uint64 arrays of values below 2^32.

        >>> zero = np.zeros((), np.uint64)
        >>> [f"{int(word):08x}" for word in philox_4x32_10((zero, zero, zero, zero), (0, 0))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(N_ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # 32 x 32 -> 64 bits
        c0, c1 = (product1 >> 32) ^ c1 ^ key0, product1 & LOW_32
        c2, c3 = (product0 >> 32) ^ c3 ^ key1, product0 & LOW_32
        key0, key1 = (key0 + KEY_STEPS[0]) & LOW_32, (key1 + KEY_STEPS[1]) & LOW_32
    return c0, c1, c2, c3


def uniform_words(seed: Any, head: int, batch: int, i: Any, j_block: Any) -> Any:
    """The words of keys 4 j_block to 4 j_block + 3 for each query: uint64 (len(i), len(j_block), 4).

    i and j_block are one-dimensional integer arrays, NumPy or CuPy; seed is an int or a uint64 array
    without axes. Counters wrap at 2^32.
    """
    xp = module_of(i)
    counter = (j_block[None, :], i[:, None], xp.asarray([[head]]), xp.asarray([[batch]]))
    counter = tuple(word.astype(xp.uint64) & LOW_32 for word in counter)
    words = philox_4x32_10(counter, (seed & LOW_32, seed >> 32))
    return xp.stack(xp.broadcast_arrays(*words), axis=-1)


def dropout_keep(
    seed: Any, p: float, batch: int, head: int, i: Any, j: Any, shift: tuple = (0, 0, 0, 0)
) -> Any:
    """Which weights of one (batch, head) are kept: bool (len(i), len(j)).

    i and j are one-dimensional integer arrays, NumPy or CuPy, counted from the start of the sequence.
    shift is the (batch0, head0, i0, j0) of a shard of a larger problem.
    """
    batch0, head0, i0, j0 = shift
    xp = module_of(j)
    j_block, which = xp.unique((j + j0) // 4, return_inverse=True)
    words = uniform_words(seed, head + head0, batch + batch0, i + i0, j_block)
    return words[:, which.reshape(-1), (j + j0) % 4] >= threshold(p)


def threshold(p: float) -> int:
    """The smallest word that is kept."""
    return min(round(p * 2**32), LOW_32)


def dropout_mask(
    batch: int, heads: int, len_q: int, len_k: int, dropout: tuple, *, device: int | None = None
) -> Any:
    """The weights that `attention(..., dropout=dropout)` keeps: bool (batch, heads, len_q, len_k).

    | argument | meaning |
    |---|---|
    | batch, heads, len_q, len_k | shape of the scores: query heads, and sequences when packed |
    | dropout | (p, seed) or (p, seed, (batch0, head0, i0, j0)), as in `attention` |
    | device | None: a NumPy array; a number: a CuPy array on that CUDA device |

    Kept weights are multiplied by 1 / (1 - p) by `attention`.  The mask takes batch x heads x len_q x
    len_k bytes; attention itself never stores it.  Query and key rows count from the start of their
    sequence.

        >>> dropout_mask(1, 2, 3, 5, (0.5, 7)).shape
        (1, 2, 3, 5)

    Raises CuflashError on a negative size, and on a p, seed or shift that `attention` would refuse.
    """
    sizes = {"batch": batch, "heads": heads, "len_q": len_q, "len_k": len_k}
    for name, n in sizes.items():
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 0 <= n < 1 << 32:
            raise CuflashError(
                f"dropout_mask: {name} is {n!r}\n  Sizes are whole numbers from 0 to 2^32 - 1."
            )
    if device is not None and (isinstance(device, bool) or not isinstance(device, int | np.integer)):
        raise CuflashError(f"dropout_mask: device is {device!r}\n  Give a CUDA device number, or None.")
    p, seed, shift = _checked(dropout, device)
    if device is None:
        return _fill(tuple(sizes.values()), p, seed, shift)
    from cuflash import devices, passes

    return passes.dropout_mask(tuple(sizes.values()), p or 0.0, seed, shift, devices.gpu(device))


def _fill(shape: tuple[int, ...], p: float | None, seed: Any, shift: tuple) -> Any:
    batch, heads, len_q, len_k = shape
    keep = np.ones(shape, bool)
    if p is None or not keep.size:
        return keep
    j = np.arange(len_k)
    n_rows = max(1, WORDS_AT_ONCE // len_k)
    for b, h in np.ndindex(batch, heads):
        for i0 in range(0, len_q, n_rows):
            i = np.arange(i0, min(i0 + n_rows, len_q))
            keep[b, h, i0 : i0 + len(i)] = dropout_keep(seed, p, b, h, i, j, shift)
    return keep


def _checked(dropout: tuple, device: int | None) -> tuple:
    """(p or None, seed, shift), judged by the rules of `attention`."""
    if dropout is None:
        raise CuflashError("dropout_mask: dropout is None\n  Give (p, seed).")
    return check_options.dropout(Call("dropout_mask"), dropout, HOST if device is None else device)
