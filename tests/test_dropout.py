"""The mask that each path applies, recovered from its results: `dropout_mask`, bit for bit.

With q = 0 every visible weight of a row is alike.  V = identity makes row i of out the kept weights of query
i; dO = identity makes row j of dV the kept weights of key j.
"""

import numpy as np
import pytest

import cuflash
from cuflash import rows
from cuflash.arrays import numpy_dtype

BATCH, HEADS, P = 2, 2, 0.3
SEED = 2**63 + 12345
CASES = {
    "plain": ("float32", (P, SEED), {}),
    "float16": ("float16", (0.9, 7), {}),
    "bfloat16": ("bfloat16", (0.01, 7), {}),
    "float64": ("float64", (P, 0), {}),
    "shard": ("float32", (P, SEED, (1, 2, 31, 41)), {}),
    "shard at the end": ("float32", (P, SEED, (2**32 - 1, 7, 2**32 - 20, 2**32 - 3)), {}),
    "causal": ("float32", (P, SEED), {"causal": True, "query_offset": 3}),
    "packed": ("float16", (P, SEED), {"packed": True}),
    "bhsd": ("float32", (P, SEED), {"layout": "bhsd"}),
}
STARRED = [(row.name, None) for row in rows.FORWARD if row.starred]
STARRED += [(None, row.name) for row in rows.BACKWARD if row.starred]


def check_mask(name, forward, backward, xp, length):
    """forward, backward: rows by name; None the path of its own choice, "no" not run."""
    dtype, dropout, options = CASES[name]
    options = dict(options)
    packed = options.pop("packed", False)
    batch, lengths = (1, (length // 3, length - length // 3)) if packed else (BATCH, (length,))
    arrays = dict.fromkeys("qk", np.zeros((batch, length, HEADS, 8)))
    inside = np.concatenate([np.arange(n) for n in lengths])  # position of each row in its sequence
    identity = np.eye(length)[inside] if packed else np.eye(length)
    arrays |= dict.fromkeys(("v", "dout"), np.broadcast_to(identity[:, None], (batch, length, HEADS, length)))
    arrays = {n: x.astype(numpy_dtype(dtype)) for n, x in arrays.items()}
    if packed:
        arrays = {n: x[0] for n, x in arrays.items()}
        ends = np.array([0, *np.cumsum(lengths)], np.int32)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    if options.get("layout") == "bhsd":
        arrays = {n: x.swapaxes(1, 2) for n, x in arrays.items()}
    q, k, v, dout = (xp.asarray(x) for x in arrays.values())
    options["dropout"] = dropout
    out, lse = cuflash.attention(q, k, v, return_lse=True, kernel=forward, **options)
    dv = cuflash.attention_backward(dout, q, k, v, out, lse, kernel=backward, **options).dv
    out, dv = (x.get() if xp is not np else x for x in (out, dv))
    if options.get("layout") == "bhsd":
        out, dv = out.swapaxes(1, 2), dv.swapaxes(1, 2)
    expected = cuflash.dropout_mask(
        len(lengths) if packed else BATCH, HEADS, max(lengths), max(lengths), dropout
    )
    if options.get("causal"):
        expected &= np.tri(length, length, 3, bool)
    start = 0
    for b, n in enumerate(lengths if packed else (length,) * BATCH):
        where = slice(start, start + n) if packed else (b, slice(0, n))
        kept = expected[b, :, :n, :n]
        assert np.array_equal(out[where].swapaxes(0, 1)[..., :n] != 0, kept)
        assert np.array_equal(dv[where].transpose(1, 2, 0)[:, :n] != 0, kept)
        start += n


def test_the_numpy_path():
    for name in CASES:
        check_mask(name, None, None, np, 70)


def skip_unless_covered(name, forward, backward, length):
    """Skips what a row is not made for: dtypes, and the identity as V or dO makes head_dim_v the length."""
    table = rows.FORWARD if forward else rows.BACKWARD
    row = next(row for row in table if row.name == (forward or backward))
    if not row.covers(CASES[name][0], 8, length):
        pytest.skip(f"{row.name} is not made for it")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("forward, backward", STARRED)
def test_kernels_in_the_emulator(name, forward, backward):
    skip_unless_covered(name, forward, backward, 70)
    check_mask(name, forward, backward, np, 70)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("forward, backward", STARRED)
def test_kernels_on_a_gpu(name, forward, backward):
    import cupy

    skip_unless_covered(name, forward, backward, 150)
    check_mask(name, forward, backward, cupy, 150)


@pytest.mark.gpu
def test_a_seed_on_the_device():
    import cupy

    q = cupy.zeros((1, 5, 1, 8), np.float32)
    v = cupy.eye(5, dtype=np.float32)[None, :, None]
    seed = cupy.asarray(np.array(SEED, np.uint64))
    for value in (SEED, 99):  # changed in place, as between replays of a graph
        seed[...] = value
        out = cuflash.attention(q, q, v, dropout=(P, seed))
        assert np.array_equal(out.get()[0, :, 0] != 0, cuflash.dropout_mask(1, 1, 5, 5, (P, value))[0, 0])
