"""BlockMask: every way to make one against the block matrix it stands for."""

import copy
import pickle
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash import BlockMask, CuflashError


@st.composite
def dense_masks(draw, lead=None):
    batch, heads = draw(st.tuples(st.integers(1, 2), st.integers(1, 3))) if lead is None else lead
    n_rows, n_columns = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    bits = draw(st.lists(st.booleans(), min_size=batch * heads * n_rows * n_columns))
    size = batch * heads * n_rows * n_columns
    return np.array(bits[:size], bool).reshape(batch, heads, n_rows, n_columns)


def visible(len_q, len_k, left, right, offset):
    """(len_q, len_k): the pairs that window=(left, right) shows, from the contract's words."""
    i, j = np.arange(len_q)[:, None], np.arange(len_k)[None]
    offset = len_k - len_q if offset is None else offset
    seen = np.ones((len_q, len_k), bool)
    if left is not None:
        seen &= j >= i + offset - left
    if right is not None:
        seen &= j <= i + offset + right
    return seen


def blocks_of(pairs, block_q, block_k):
    """The blocks with any true pair."""
    n_rows, n_columns = -(-pairs.shape[0] // block_q), -(-pairs.shape[1] // block_k)
    kept = np.zeros((n_rows, n_columns), bool)
    for r in range(n_rows):
        for c in range(n_columns):
            kept[r, c] = pairs[r * block_q : (r + 1) * block_q, c * block_k : (c + 1) * block_k].any()
    return kept


@given(dense_masks())
def test_dense_round_trip(dense):
    mask = BlockMask.from_dense(dense, 3, 2)
    assert mask.shape == dense.shape and mask.n_kept == dense.sum()
    np.testing.assert_array_equal(mask.dense(), dense)
    again = BlockMask(3, 2, mask.indptr, mask.indices, mask.n_columns)
    assert again == mask and hash(again) == hash(mask)
    assert mask.indptr.dtype == mask.indices.dtype == np.int32
    assert mask.density == pytest.approx(dense.mean() if dense.size else 0)


@given(dense_masks())
def test_transpose(dense):
    mask = BlockMask.from_dense(dense, 3, 2)
    turned = mask.transpose()
    np.testing.assert_array_equal(turned.dense(), dense.swapaxes(-1, -2))
    assert (turned.block_q, turned.block_k) == (2, 3)
    assert turned.transpose() is mask
    assert BlockMask(2, 3, turned.indptr, turned.indices, turned.n_columns) == turned, "rows are sorted"


@given(st.data())
def test_union_and_intersection(data):
    one = data.draw(dense_masks(lead=(1, 2)))
    other = data.draw(st.just(np.random.default_rng(one.size).random((2, 1, *one.shape[2:])) < 0.5))
    masks = BlockMask.from_dense(one, 4, 4), BlockMask.from_dense(other, 4, 4)
    np.testing.assert_array_equal((masks[0] | masks[1]).dense(), one | other)
    np.testing.assert_array_equal((masks[0] & masks[1]).dense(), one & other)


@given(dense_masks())
def test_predicate(dense):
    batch, heads, n_rows, n_columns = dense.shape

    def keep(*where):
        return dense[(0, 0, *where) if len(where) == 2 else where]

    mask = BlockMask.from_predicate(keep, 3 * n_rows, 2 * n_columns, 3, 2, batch=batch, heads=heads)
    assert mask == BlockMask.from_dense(dense, 3, 2)


def test_a_predicate_may_return_one_boolean_for_all():
    for value in (True, np.True_):
        assert BlockMask.from_predicate(lambda i, j, value=value: value, 9, 9, 2, 2).n_kept == 25
    assert BlockMask.from_predicate(lambda i, j: False, 9, 9, 2, 2).n_kept == 0


@given(
    st.integers(0, 20),
    st.integers(0, 20),
    st.sampled_from([None, 0, 1, 5, 30]),
    st.sampled_from([None, 0, 1, 5, 30]),
    st.sampled_from([None, 0, -7, 4, 40]),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_window(len_q, len_k, left, right, offset, block_q, block_k):
    mask = BlockMask.window(len_q, len_k, left, right, block_q, block_k, offset)
    pairs = visible(len_q, len_k, left, right, offset)
    np.testing.assert_array_equal(mask.dense()[0, 0], blocks_of(pairs, block_q, block_k))
    if (left, right) == (None, 0):
        assert mask == BlockMask.causal(len_q, len_k, block_q, block_k, offset)


def test_to_elements():
    mask = BlockMask.from_dense([[1, 0, 1], [0, 1, 0]], 2, 3)
    expected = np.array([[1, 1, 1, 0, 0, 0, 1], [1, 1, 1, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1, 0]], bool)
    np.testing.assert_array_equal(mask.to_elements(3, 7)[0, 0], expected)
    assert mask.to_elements(4, 10)[0, 0, :, 9].sum() == 0, "keys past the last block are hidden"


def test_sliding_global():
    mask = BlockMask.sliding_global(40, 40, window=4, n_global=3, block_q=4, block_k=4)
    pairs = visible(40, 40, 4, 4, 0)
    pairs[:3] = pairs[:, :3] = True
    np.testing.assert_array_equal(mask.dense()[0, 0], blocks_of(pairs, 4, 4))


def test_bigbird():
    make = {"n_window": 3, "n_global": 2, "n_random": 4}
    dense = BlockMask.bigbird(64 * 40, 64 * 40, seed=5, **make).dense()[0, 0]
    r, c = np.arange(40)[:, None], np.arange(40)[None]
    fixed = (abs(r - c) <= 1) | (r < 2) | (c < 2)
    assert dense[fixed].all()
    extra = (dense & ~fixed)[2:].sum(axis=1)
    assert extra.max() == 4 and extra.min() >= 1, "random blocks, some of them on kept ones"
    assert BlockMask.bigbird(2560, 2560, seed=5, **make) == BlockMask.bigbird(2560, 2560, seed=5, **make)
    assert BlockMask.bigbird(2560, 2560, seed=5, **make) != BlockMask.bigbird(2560, 2560, seed=6, **make)
    assert BlockMask.bigbird(64, 64).density == 1


def test_butterfly():
    dense = BlockMask.butterfly(64 * 11, 64 * 11, n_global=0).dense()[0, 0]
    expected = [[r == c or bin(r ^ c).count("1") == 1 for c in range(11)] for r in range(11)]
    np.testing.assert_array_equal(dense, expected)
    dense = BlockMask.butterfly(64 * 11, 64 * 11, n_global=1).dense()[0, 0]
    assert dense[0].all() and dense[:, 0].all()


def test_rows_are_sorted_and_shared_rows_are_spread():
    """Two heads may point at the same indices, in any order within a row."""
    mask = BlockMask(2, 2, [[0, 2, 3], [0, 2, 3]], [3, 1, 0])
    assert mask.shape == (1, 2, 2, 4)
    np.testing.assert_array_equal(mask.indices, [1, 3, 0, 1, 3, 0])
    np.testing.assert_array_equal(mask.indptr[0], [[0, 2, 3], [3, 5, 6]])


def test_arrays_do_not_change():
    mask = BlockMask.causal(8, 8, 2, 2)
    with pytest.raises(ValueError, match="read-only"):
        mask.indices[0] = 3
    assert mask.on_device(np)[0] is mask.indptr


def test_copies_are_equal_and_do_not_change_either():
    mask = BlockMask.window(40, 50, 7, 3, 4, 8)
    assert mask.transpose() and mask.covering(400, 500)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert other == mask and hash(other) == hash(mask) and other.transpose() == mask.transpose()
        assert not other.indptr.flags.writeable and not other.indices.flags.writeable


def test_windows_that_lead_far():
    everything = BlockMask.window(40, 50, None, None, 4, 8)
    for far in (1 << 60, 1 << 62, (1 << 64) - 1):
        assert BlockMask.window(40, 50, far, far, 4, 8) == everything
    assert BlockMask.causal(40, 50, 4, 8, 1 << 60) == everything
    assert BlockMask.causal(40, 50, 4, 8, -(1 << 60)).n_kept == 0


def test_covering():
    mask = BlockMask(4, 4, [0, 1, 2], [0, 1])
    assert mask.n_columns == 2 and mask.covering(8, 8) is mask
    wider = mask.covering(12, 20)
    assert wider.shape == (1, 1, 3, 5) and wider is mask.covering(12, 20)
    np.testing.assert_array_equal(wider.dense()[0, 0], np.eye(5)[:3] * [[1], [1], [0]])
    assert wider.transpose().shape == (1, 1, 5, 3)


def test_repr():
    assert (
        repr(BlockMask.causal(256, 256, 128, 64))
        == "BlockMask(2 x 4 blocks of 128 x 64, 6 kept, density 0.75)"
    )
    two = BlockMask.from_dense(np.ones((2, 3, 1, 1)), 8, 8)
    assert repr(two) == "BlockMask(batch 2, heads 3, 1 x 1 blocks of 8 x 8, 6 kept, density 1)"


MATRIX_SHAPE = "It is ([batch or 1,] [heads or 1,] n_rows, n_columns)."
INDPTR_SHAPE = "It is ([batch or 1,] [heads or 1,] n_rows + 1): one offset per block row, and one more."
OFFSETS = "Offsets lie in indices: those of a later head start where the head before it ends."
COLUMNS = "Block columns lie from 0 to n_columns - 1."
ONE, TWO = BlockMask.causal(4, 4, 4, 4), BlockMask.causal(8, 8, 4, 4)

# (call, what, do)
ERRORS = [
    (lambda: BlockMask(0, 1, [0], []), "block_q is 0", "block_q is a whole number from 1."),
    (lambda: BlockMask(1, 1.5, [0], []), "block_k is 1.5", "block_k is a whole number from 1."),
    (lambda: BlockMask(1, 1, [0.0, 1.0], [0]), "indptr is float64", "indptr holds whole numbers."),
    (
        lambda: BlockMask(1, 1, [0, 1], [[0]]),
        "indices has shape (1, 1)",
        "It is one axis: the block columns of all rows.",
    ),
    (lambda: BlockMask(1, 1, [[[[0, 1]]]], [0]), "indptr has shape (1, 1, 1, 2)", INDPTR_SHAPE),
    (
        lambda: BlockMask(1, 1, [0, 2, 1], [0, 1]),
        "indptr decreases after block row 1 of batch 0, head 0",
        "Offsets never decrease along a row axis.",
    ),
    (
        lambda: BlockMask(1, 1, [0, 1, 3], [0, 1]),
        "indptr reaches from 0 to 3, indices has 2 entries",
        OFFSETS,
    ),
    (
        lambda: BlockMask(1, 1, [0, 2], [0, 4], 4),
        "indices reach from 0 to 4, there are 4 block columns",
        COLUMNS,
    ),
    (
        lambda: BlockMask(1, 1, [0, 2], [0, -1]),
        "indices reach from -1 to 0, there are 1 block columns",
        COLUMNS,
    ),
    (
        lambda: BlockMask(1, 1, [0, 1, 4], [5, 5, 2, 5]),
        "block row 1 names column 5 twice",
        "Name each column once.",
    ),
    (lambda: BlockMask.from_dense([1, 0, 1], 1, 1), "the block matrix has shape (3,)", MATRIX_SHAPE),
    (lambda: BlockMask.causal(-1, 4), "len_q is -1", "len_q is a whole number from 0."),
    (
        lambda: BlockMask(1 << 31, 4, [0, 1], [0]),
        f"block_q is {1 << 31}",
        f"block_q is a whole number from 1 to {1 << 30}.",
    ),
    (
        lambda: BlockMask(1, 1, [0, 1], [1 << 32]),
        f"n_columns is {(1 << 32) + 1}",
        f"n_columns is a whole number from 0 to {(1 << 31) - 1}.",
    ),
    (lambda: BlockMask.window(8, 8, -1, 0), "left is -1", "left is a whole number from 0."),
    (lambda: BlockMask.window(8, 8, 0, "x"), "right is 'x'", "right is a whole number from 0."),
    (
        lambda: BlockMask.causal(8, 8, 2, 2, 1.5),
        "query_offset is 1.5",
        f"query_offset is a whole number from {-(1 << 60)} to {1 << 60}.",
    ),
    (lambda: BlockMask.sliding_global(8, 8, [1], 2), "window is [1]", "window is a whole number from 0."),
    (lambda: BlockMask.sliding_global(8, 8, 1, -2), "n_global is -2", "n_global is a whole number from 0."),
    (lambda: BlockMask.bigbird(8, 8, n_window=1.5), "n_window is 1.5", "n_window is a whole number from 0."),
    (lambda: BlockMask.bigbird(8, 8, n_random=-1), "n_random is -1", "n_random is a whole number from 0."),
    (lambda: BlockMask.bigbird(8, 8, seed=None), "seed is None", "seed is a whole number from 0."),
    (
        lambda: BlockMask.butterfly(8, 8, n_global=None),
        "n_global is None",
        "n_global is a whole number from 0.",
    ),
    (lambda: ONE.to_elements(2.5, 4), "len_q is 2.5", "len_q is a whole number from 0."),
    (
        lambda: BlockMask.from_predicate(7, 8, 8),
        "keep has the type int",
        "keep is a function of (row, column).",
    ),
    (
        lambda: BlockMask.from_predicate(lambda i, j: j - i, 8, 8, 2, 2),
        "what keep returns is int64",
        "It is booleans that broadcast to (4, 4): True is kept.",
    ),
    (
        lambda: BlockMask.from_predicate(lambda i, j: None, 8, 8, 2, 2),
        "what keep returns is object",
        "It is booleans that broadcast to (4, 4): True is kept.",
    ),
    (
        lambda: BlockMask.from_predicate(lambda i, j: "yes", 8, 8, 2, 2),
        "what keep returns is str96",
        "It is booleans that broadcast to (4, 4): True is kept.",
    ),
    (
        lambda: BlockMask.from_dense([[0.5, np.nan]], 2, 2),
        "the block matrix is float64 and has other numbers than 0 and 1",
        "It is booleans: True is kept.",
    ),
    (
        lambda: BlockMask.from_dense([[0, 2]], 2, 2),
        "the block matrix is int64 and has other numbers than 0 and 1",
        "It is booleans: True is kept.",
    ),
    (
        lambda: BlockMask.from_predicate(lambda i, j: np.zeros(3, bool), 8, 8, 2, 2),
        "what keep returns is no mask: operands could not be broadcast together with remapped shapes "
        "[original->remapped]: (3,)  and requested shape (4,4)",
        "It is booleans that broadcast to (4, 4): True is kept.",
    ),
    (
        lambda: ONE | TWO,
        f"{ONE} and {TWO} do not fit together",
        "Both need the same block sizes and block counts.",
    ),
]


@pytest.mark.parametrize(("call", "what", "do"), ERRORS, ids=[what for _, what, _ in ERRORS])
def test_errors(call, what, do):
    with pytest.raises(CuflashError) as caught:
        call()
    assert str(caught.value) == f"BlockMask: {what}\n  {do}"


@pytest.mark.parametrize("how", ["window", "predicate"])
def test_a_million_square(how):
    """A causal window of 4,096 over a million tokens: megabytes, and seconds at most."""
    n, block, left = 1_000_000, 128, 4096
    tracemalloc.start()
    start = time.perf_counter()
    if how == "window":
        mask = BlockMask.window(n, n, left, 0)
    else:
        reach = -(-left // block)
        mask = BlockMask.from_predicate(lambda i, j: (j <= i) & (j >= i - reach), n, n)
    mask.transpose()
    seconds = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert mask.n_rows == mask.n_columns == 7813
    assert mask.n_kept == sum(min(r, 32) + 1 for r in range(7813))
    assert mask.nbytes < 2e6 and peak < 100e6
    assert seconds < 10


@pytest.mark.gpu
def test_on_device():
    cupy = pytest.importorskip("cupy")
    mask = BlockMask.causal(512, 512, 64, 64)
    indptr, indices = mask.on_device(cupy)
    np.testing.assert_array_equal(indptr.get(), mask.indptr)
    np.testing.assert_array_equal(indices.get(), mask.indices)
    assert mask.on_device(cupy)[0] is indptr, "one copy per device"
