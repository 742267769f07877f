"""BlockMask: which blocks of the score matrix are kept, as rows of block columns (CSR) in NumPy arrays."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash import blockpatterns, blockrows
from cuflash.blockrows import MOST_BLOCKS, booleans, canonical, fail, n_blocks, positive, whole

_LOCK = threading.Lock()  # guards the device copies: two threads may ask for the first one at once


class BlockMask:
    """Key j is visible to query i when block (i // block_q, j // block_k) is kept.

    | argument | shape | meaning |
    |---|---|---|
    | block_q, block_k | | queries and keys of one block; the last blocks may be ragged |
    | indptr | ([batch or 1,] [heads or 1,] n_rows + 1) | row r keeps indices[indptr[r] : indptr[r + 1]] |
    | indices | (kept,) | block columns of all rows, of all heads and batch entries, in one array |
    | n_columns | | block columns there are; None: as many as the keys need, those never named being hidden |

    Masks compose by AND: element-level rules stay in causal, window and mask.  i and j count from the start
    of the sequence, whatever query_offset is; when packed, of each sequence.  A BlockMask does not change:
    its arrays are read-only int32, its rows sorted, its copy on a device made once.

        >>> BlockMask.from_dense([[1, 0], [1, 1]], 64, 64)                 # two by two blocks of 64 x 64
        BlockMask(2 x 2 blocks of 64 x 64, 3 kept, density 0.75)
        >>> BlockMask.window(1_000_000, 1_000_000, 4096, 0)                # memory: the blocks kept
        >>> BlockMask.from_predicate(lambda i, j: (i + j) % 3 == 0, 4096, 4096, 64, 64)
        >>> BlockMask.window(4096, 4096, 256, 256) | BlockMask.butterfly(4096, 4096, 128, 128)  # or; & is and

    Raises CuflashError for sizes that are not positive, offsets that decrease or lead out of indices,
    columns that are negative, not below n_columns, or named twice in one row.
    """

    def __init__(self, block_q: int, block_k: int, indptr: Any, indices: Any, n_columns: int | None = None):
        self.block_q = positive("block_q", block_q)
        self.block_k = positive("block_k", block_k)
        indptr = blockrows.whole_numbers("indptr", indptr)
        indices = blockrows.whole_numbers("indices", indices)
        if not 1 <= indptr.ndim <= 3 or indptr.shape[-1] < 1:
            fail(
                f"indptr has shape {indptr.shape}",
                "It is ([batch or 1,] [heads or 1,] n_rows + 1): one offset per block row, and one more.",
            )
        if indices.ndim != 1:
            fail(f"indices has shape {indices.shape}", "It is one axis: the block columns of all rows.")
        indptr = indptr.reshape((1,) * (3 - indptr.ndim) + indptr.shape)
        self.n_columns_given = n_columns is not None
        largest = int(indices.max(initial=-1))
        n_columns = largest + 1 if n_columns is None else n_columns
        self.n_columns = whole("n_columns", n_columns, most=MOST_BLOCKS)
        if largest >= self.n_columns or indices.min(initial=0) < 0:
            fail(
                f"indices reach from {indices.min()} to {largest}, there are {self.n_columns} block columns",
                "Block columns lie from 0 to n_columns - 1.",
            )
        self.indptr, self.indices = canonical(indptr, indices)
        self.indptr.flags.writeable = self.indices.flags.writeable = False
        self._transposed: BlockMask | None = None
        self._wider: BlockMask | None = None
        self._on_device: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def _trusted(
        cls, block_q: int, block_k: int, indptr: np.ndarray, indices: np.ndarray, n_columns: int
    ) -> BlockMask:
        """A mask of arrays in canonical form by construction: checks would cost as much as the making."""
        mask = cls.__new__(cls)
        mask.block_q, mask.block_k, mask.n_columns, mask.n_columns_given = block_q, block_k, n_columns, True
        if indptr[-1, -1, -1] >= 1 << 31 if indptr.size else False:
            fail(f"{indptr[-1, -1, -1]} blocks are kept", "Offsets are 32-bit: take larger blocks.")
        mask.indptr = np.ascontiguousarray(indptr, np.int32)
        mask.indices = np.ascontiguousarray(indices, np.int32)
        mask.indptr.flags.writeable = mask.indices.flags.writeable = False
        mask._transposed = mask._wider = None
        mask._on_device = {}
        return mask

    @classmethod
    def _from_rows(
        cls, block_q: int, block_k: int, n_columns: int, counts: np.ndarray, indices: np.ndarray
    ) -> BlockMask:
        """counts (batch or 1, heads or 1, n_rows): blocks kept in each row; indices: their columns."""
        ends = np.cumsum(counts, dtype=np.int64).reshape(counts.shape)
        total = counts.sum(axis=-1, keepdims=True, dtype=np.int64)
        starts = np.cumsum(total, dtype=np.int64).reshape(total.shape) - total
        return cls._trusted(block_q, block_k, np.concatenate([starts, ends], axis=-1), indices, n_columns)

    # how to make one

    @classmethod
    def from_dense(cls, dense: Any, block_q: int, block_k: int) -> BlockMask:
        """The mask of a block matrix ([batch or 1,] [heads or 1,] n_rows, n_columns) of booleans, or 0 and 1.

        True is kept.
        """
        dense = booleans("the block matrix", dense)
        if not 2 <= dense.ndim <= 4:
            fail(
                f"the block matrix has shape {dense.shape}",
                "It is ([batch or 1,] [heads or 1,] n_rows, n_columns).",
            )
        dense = dense.reshape((1,) * (4 - dense.ndim) + dense.shape)
        indices = np.nonzero(dense)[-1]
        block_q, block_k = positive("block_q", block_q), positive("block_k", block_k)
        return cls._from_rows(block_q, block_k, dense.shape[-1], dense.sum(axis=-1), indices)

    @classmethod
    def from_predicate(
        cls,
        keep: Callable,
        len_q: int,
        len_k: int,
        block_q: int = 128,
        block_k: int = 128,
        *,
        batch: int = 1,
        heads: int = 1,
    ) -> BlockMask:
        """The blocks where keep(row, column) is true; memory is the blocks kept and some rows at a time.

        keep gets broadcasting integer arrays, row (n, 1) and column (1, n_columns) of blocks, and returns
        booleans that broadcast to (n, n_columns); with batch or heads above 1 it is called as
        keep(b, h, row, column).

            >>> BlockMask.from_predicate(lambda i, j: j <= i, 4096, 4096)          # block-causal
        """
        if not callable(keep):
            fail(f"keep has the type {type(keep).__name__}", "keep is a function of (row, column).")
        block_q, block_k = positive("block_q", block_q), positive("block_k", block_k)
        n_rows, n_columns = n_blocks(len_q, block_q), n_blocks(len_k, block_k)
        batch, heads = whole("batch", batch), whole("heads", heads)
        step = max(1, (1 << 22) // max(1, n_columns))
        column = np.arange(n_columns)[None]
        counts, parts = np.zeros((batch, heads, n_rows), np.int64), [np.zeros(0, np.int32)]
        for b in range(batch):
            for h in range(heads):
                for start in range(0, n_rows, step):
                    row = np.arange(start, min(start + step, n_rows))[:, None]
                    kept = keep(row, column) if batch == heads == 1 else keep(b, h, row, column)
                    kept = booleans("what keep returns", kept, (row.size, n_columns))
                    counts[b, h, start : start + step] = np.count_nonzero(kept, axis=1)
                    parts.append(np.nonzero(kept)[1].astype(np.int32))
        return cls._from_rows(block_q, block_k, n_columns, counts, np.concatenate(parts))

    @classmethod
    def causal(
        cls, len_q: int, len_k: int, block_q: int = 128, block_k: int = 128, query_offset: int | None = None
    ) -> BlockMask:
        """Every block with a pair that `causal=True` shows; the diagonal blocks still need causal=True."""
        return cls.window(len_q, len_k, None, 0, block_q, block_k, query_offset)

    @classmethod
    def window(
        cls,
        len_q: int,
        len_k: int,
        left: int | None,
        right: int | None,
        block_q: int = 128,
        block_k: int = 128,
        query_offset: int | None = None,
    ) -> BlockMask:
        """Every block with a pair that `window=(left, right)` shows; right 0 is causal."""
        block_q, block_k = positive("block_q", block_q), positive("block_k", block_k)
        n_columns = n_blocks(whole("len_k", len_k), block_k)
        n_blocks(whole("len_q", len_q), block_q)
        left, right = blockrows.side("left", left), blockrows.side("right", right)
        query_offset = blockrows.offset(query_offset)
        first, last = blockpatterns.band(len_q, len_k, block_q, block_k, left, right, query_offset)
        counts, indices = blockpatterns.ranges(first, last)
        return cls._from_rows(block_q, block_k, n_columns, counts[None, None], indices)

    @classmethod
    def sliding_global(
        cls, len_q: int, len_k: int, window: int, n_global: int, block_q: int = 128, block_k: int = 128
    ) -> BlockMask:
        """Longformer: `window` tokens to each side; the first n_global tokens see, and are seen by, all.

        Source: Beltagy, Peters, Cohan, "Longformer: The Long-Document Transformer", 2020, section 3.1.
        """
        window = whole("window", window)
        near = cls.window(len_q, len_k, window, window, block_q, block_k, query_offset=0)
        n_global = min(whole("n_global", n_global), max(len_q, len_k))
        rows, columns = n_blocks(n_global, block_q), n_blocks(n_global, block_k)
        return near | cls._cross(near.n_rows, near.n_columns, rows, columns, block_q, block_k)

    @classmethod
    def bigbird(
        cls,
        len_q: int,
        len_k: int,
        block_q: int = 64,
        block_k: int = 64,
        *,
        n_window: int = 3,
        n_global: int = 2,
        n_random: int = 3,
        seed: int = 0,
    ) -> BlockMask:
        """BigBird: n_window blocks around the diagonal, n_global first rows and columns, n_random a row.

        The random blocks of a row are drawn without repetition from all columns by NumPy's default generator
        seeded with `seed`; where they fall on kept blocks the row keeps fewer.
        Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020, section 2 and appendix D.
        """
        block_q, block_k = positive("block_q", block_q), positive("block_k", block_k)
        n_rows, n_columns = n_blocks(len_q, block_q), n_blocks(len_k, block_k)
        n_window, n_global = whole("n_window", n_window), whole("n_global", n_global)
        n_random, seed = whole("n_random", n_random), whole("seed", seed, most=(1 << 64) - 1)
        half = n_window // 2
        middle = np.arange(n_rows) * n_columns // max(n_rows, 1)
        counts, indices = blockpatterns.ranges(
            np.clip(middle - half, 0, n_columns), np.clip(middle - half + n_window, 0, n_columns)
        )
        near = cls._from_rows(block_q, block_k, n_columns, counts[None, None], indices)
        counts, indices = blockpatterns.random_columns(n_rows, n_columns, n_random, seed)
        far = cls._from_rows(block_q, block_k, n_columns, counts[None, None], indices)
        return near | far | cls._cross(n_rows, n_columns, n_global, n_global, block_q, block_k)

    @classmethod
    def butterfly(
        cls, len_q: int, len_k: int, block_q: int = 64, block_k: int = 64, *, n_global: int = 1
    ) -> BlockMask:
        """FlashAttention's fixed butterfly: blocks (r, c) whose numbers are equal or differ in one bit.

        About log2(n) blocks a row, and n_global first rows and columns (the low-rank part).

        Source: Dao et al., "FlashAttention", 2022, section 3.3; Chen et al., "Pixelated Butterfly", 2021.
        """
        block_q, block_k = positive("block_q", block_q), positive("block_k", block_k)
        n_rows, n_columns = n_blocks(len_q, block_q), n_blocks(len_k, block_k)
        n_global = whole("n_global", n_global)
        counts, indices = blockpatterns.butterfly(n_rows, n_columns)
        flat = cls._from_rows(block_q, block_k, n_columns, counts[None, None], indices)
        return flat | cls._cross(n_rows, n_columns, n_global, n_global, block_q, block_k)

    @classmethod
    def _cross(
        cls, n_rows: int, n_columns: int, rows: int, columns: int, block_q: int, block_k: int
    ) -> BlockMask:
        """The first `rows` block rows and the first `columns` block columns."""
        last = np.full(n_rows, min(columns, n_columns), np.int64)
        last[:rows] = n_columns
        counts, indices = blockpatterns.ranges(np.zeros(n_rows, np.int64), last)
        return cls._from_rows(block_q, block_k, n_columns, counts[None, None], indices)

    # what it is

    @property
    def n_rows(self) -> int:
        """Block rows: blocks of queries."""
        return self.indptr.shape[-1] - 1

    @property
    def n_kept(self) -> int:
        """Blocks kept, over all batch entries and heads the mask tells apart."""
        return self.indices.size

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, heads or 1, block rows, block columns)."""
        return (*self.indptr.shape[:2], self.n_rows, self.n_columns)

    @property
    def density(self) -> float:
        """Share of the blocks that is kept: what is left of the work; 0 for a mask without blocks."""
        return self.n_kept / max(1, math.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.indptr.nbytes + self.indices.nbytes

    def dense(self) -> np.ndarray:
        """The boolean block matrix, of `shape`."""
        dense = np.zeros(self.shape, bool)
        dense.reshape(math.prod(self.shape[:3]), self.n_columns)[self._rows(), self.indices] = True
        return dense

    def to_elements(self, len_q: int, len_k: int) -> np.ndarray:
        """The boolean mask (batch or 1, heads or 1, len_q, len_k) of single pairs: for tests and pictures."""
        len_q, len_k = whole("len_q", len_q), whole("len_k", len_k)
        rows, columns = np.arange(len_q) // self.block_q, np.arange(len_k) // self.block_k
        dense = self.covering(len_q, len_k).dense()
        return dense[:, :, rows[:, None], columns[None]]

    def transpose(self) -> BlockMask:
        """Queries and keys exchanged: for each block of keys, the blocks of queries that see it."""
        if self._transposed is None:
            batch, heads, n_rows, n_columns = self.shape
            rows = self._rows()
            group, row = np.divmod(rows, n_rows) if n_rows else (rows, rows)
            column = group * n_columns + self.indices  # row of the transposed mask, over all groups
            order = np.argsort(column, kind="stable")
            counts = np.bincount(column, minlength=batch * heads * n_columns).reshape(batch, heads, n_columns)
            self._transposed = BlockMask._from_rows(
                self.block_k, self.block_q, n_rows, counts, row[order].astype(np.int32)
            )
            self._transposed._transposed = self
        return self._transposed

    def covering(self, len_q: int, len_k: int) -> BlockMask:
        """This mask with at least the block rows and columns of these lengths; those added keep nothing.

        Kernels rely on it: they look up the row of any query block, and of any key block in the backward.
        """
        n_rows, n_columns = n_blocks(len_q, self.block_q), n_blocks(len_k, self.block_k)
        if n_rows <= self.n_rows and n_columns <= self.n_columns:
            return self
        need = max(n_rows, self.n_rows), max(n_columns, self.n_columns)
        wider = self._wider  # read once: another thread may be making one for other lengths
        if wider is None or wider.shape[2:] != need:
            indptr = np.pad(self.indptr, ((0, 0), (0, 0), (0, need[0] - self.n_rows)), "edge")
            wider = BlockMask._trusted(self.block_q, self.block_k, indptr, self.indices, need[1])
            self._wider = wider
        return wider

    def on_device(self, xp: Any) -> tuple[Any, Any]:
        """(indptr, indices) as arrays of xp, numpy or cupy; a device copy is made once, and complete."""
        if xp is np:
            return self.indptr, self.indices
        device = xp.cuda.Device().id
        found = self._on_device.get(device)
        if found is None:
            with _LOCK, xp.cuda.Stream(non_blocking=True) as stream:
                # on a stream of its own, waited for: any stream may read the copy afterwards
                if device not in self._on_device:
                    self._on_device[device] = (xp.asarray(self.indptr), xp.asarray(self.indices))
                stream.synchronize()
                found = self._on_device[device]
        return found

    def _rows(self) -> np.ndarray:
        """(kept,) row number of each kept block, counted over batch, heads and block rows."""
        return np.repeat(np.arange(math.prod(self.shape[:3])), np.diff(self.indptr, axis=-1).ravel())

    def __or__(self, other: BlockMask) -> BlockMask:
        """The blocks kept in either; equal block sizes and block counts."""
        return self._combine(other, np.union1d)

    def __and__(self, other: BlockMask) -> BlockMask:
        """The blocks kept in both; equal block sizes and block counts."""
        return self._combine(other, lambda a, b: np.intersect1d(a, b, assume_unique=True))

    def _combine(self, other: BlockMask, rule: Callable) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        sizes = [(m.block_q, m.block_k, m.n_rows, m.n_columns) for m in (self, other)]
        lead = [m.shape[:2] for m in (self, other)]
        if sizes[0] != sizes[1] or any(a != b and 1 not in (a, b) for a, b in zip(*lead, strict=True)):
            fail(
                f"{self!r} and {other!r} do not fit together",
                "Both need the same block sizes and block counts.",
            )
        shape = tuple(max(pair) if 0 not in pair else 0 for pair in zip(*lead, strict=True))
        keys = rule(self._keys(shape), other._keys(shape))
        rows, columns = np.divmod(keys, max(self.n_columns, 1))
        counts = np.bincount(rows, minlength=math.prod(shape) * self.n_rows).reshape(*shape, self.n_rows)
        return BlockMask._from_rows(
            self.block_q, self.block_k, self.n_columns, counts, columns.astype(np.int32)
        )

    def _keys(self, lead: tuple[int, int]) -> np.ndarray:
        """row * n_columns + column of each kept block, the leading axes broadcast to `lead`; ascending."""
        mask = self
        if lead != self.shape[:2]:
            batch, heads = self.shape[:2]
            copies = [(b % batch, h % heads) for b in range(lead[0]) for h in range(lead[1])]
            counts = np.broadcast_to(np.diff(self.indptr, axis=-1), (*lead, self.n_rows))
            parts = [self.indices[self.indptr[b, h, 0] : self.indptr[b, h, -1]] for b, h in copies]
            indices = np.concatenate(parts) if parts else self.indices[:0]
            mask = BlockMask._from_rows(self.block_q, self.block_k, self.n_columns, counts, indices)
        return mask._rows() * np.int64(max(self.n_columns, 1)) + mask.indices

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return (
            (self.block_q, self.block_k, self.shape) == (other.block_q, other.block_k, other.shape)
            and np.array_equal(self.indptr, other.indptr)
            and np.array_equal(self.indices, other.indices)
        )

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: what the mask is, without what was derived from it."""
        names = ("block_q", "block_k", "n_columns", "n_columns_given", "indptr", "indices")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _transposed=None, _wider=None, _on_device={})
        self.indptr.flags.writeable = self.indices.flags.writeable = False

    def __hash__(self) -> int:
        return hash((self.block_q, self.block_k, self.shape, self.n_kept))

    def __repr__(self) -> str:
        batch, heads, n_rows, n_columns = self.shape
        lead = "" if (batch, heads) == (1, 1) else f"batch {batch}, heads {heads}, "
        return (
            f"BlockMask({lead}{n_rows} x {n_columns} blocks of {self.block_q} x {self.block_k}, "
            f"{self.n_kept} kept, density {self.density:.3g})"
        )
