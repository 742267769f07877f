"""cuflash.trace: bytes by array equal what plan.py says, to the byte; the timeline shows the tiles."""

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.errors import CuflashError

rng = np.random.default_rng(13)
CASES = [  # (len_q, len_k, heads, heads_k, head_dim, dtype, options)
    (70, 90, 2, 1, 40, np.float32, {}),
    (64, 64, 2, 2, 64, ml_dtypes.bfloat16, {"causal": True}),
    (100, 37, 1, 1, 64, np.float16, {"causal": True}),
    (33, 129, 2, 2, 16, np.float64, {"causal": True, "query_offset": 10}),
]


def inputs(len_q, len_k, heads, heads_k, head_dim, dtype):
    shapes = (len_q, heads), (len_k, heads_k), (len_k, heads_k)
    return [rng.standard_normal((2, *shape, head_dim)).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ["std_00_unfused", "fwd_01_naive", "fwd_02_tiled"])
def test_bytes_are_what_the_plan_says(kernel, case):
    *sizes, options = case
    q, k, v = inputs(*sizes)
    seen = cuflash.trace(q, k, v, kernel=kernel, **options)
    made = cuflash.explain(q, k, v, kernel=kernel, **options)
    said = made.row.bytes(made.problem, dict(made.launches[0].params))
    moved = {
        name.removeprefix("workspace."): (read, written)
        for name, (read, written, _) in seen.arrays.items()
        if read or written
    }
    assert said and moved == {name: both for name, both in said.items() if any(both)}
    assert seen.read == sum(r for r, _ in said.values()) and seen.written == sum(w for _, w in said.values())


def test_a_tile_serves_a_whole_query_tile():
    q, k, v = inputs(128, 128, 2, 2, 64, np.float32)
    naive, unfused, tiled = (
        cuflash.trace(q, k, v, kernel=kernel) for kernel in ("fwd_01_naive", "std_00_unfused", "fwd_02_tiled")
    )
    assert tiled.read < unfused.read < naive.read
    assert tiled.written == naive.written < unfused.written
    assert tiled.exps >= 2 * 2 * 128 * 128 and tiled.tensor_flops == 0 and tiled.shared > tiled.read
    out, lse = tiled.results
    assert np.allclose(out, cuflash.reference.attention(q, k, v), atol=1e-5)
    assert lse.shape == (2, 2, 128)
    assert "fwd_02_tiled" in str(tiled) and "B read" in str(tiled)


def test_the_timeline_walks_the_key_tiles_in_order():
    q, k, v = inputs(64, 200, 1, 1, 64, np.float32)
    seen = cuflash.trace(q, k, v)
    made = cuflash.explain(q, k, v, kernel="fwd_02_tiled")
    steps = {}
    for tile in seen.tiles("k", block=(0, 0, 0)):
        first, last = steps.get(tile.step, (10**9, -1))
        steps[tile.step] = (min(first, tile.rows[0]), max(last, tile.rows[1]))
    ranges = [steps[step] for step in sorted(steps)]
    size = made.tile.tile_kv
    assert ranges == [(j, min(j + size, 200) - 1) for j in range(0, 200, size)]
    assert sum(tile.n_bytes for tile in seen.tiles("k")) == seen.arrays["k"][0]
    assert all(tile.writes for tile in seen.tiles("out")) and not any(tile.writes for tile in seen.tiles("q"))


def test_the_backward_can_be_traced():
    q, k, v = inputs(40, 50, 2, 1, 32, np.float32)
    dout = rng.standard_normal(q.shape).astype(np.float32)
    seen = cuflash.trace(q, k, v, dout=dout, causal=True)
    assert any(record.kernel.startswith("bwd_02_tiled") for record in seen.launches)
    assert seen.arrays["dout"][0] > 0
    for got, want in zip(
        seen.results[:3],
        cuflash.reference.attention_vjp(q, k, v, causal=True)[1](dout)[:3],
        strict=True,
    ):
        assert np.allclose(got, want, atol=1e-4)


def test_an_array_given_as_three_is_found_by_each_name():
    q, _, _ = inputs(40, 40, 1, 1, 32, np.float32)
    seen = cuflash.trace(q, q, q)
    assert "q = k = v" in seen.arrays
    assert seen.tiles("k") and seen.tiles("k") == seen.tiles("v")
    assert all(0 <= tile.rows[0] <= tile.rows[1] < 40 for tile in seen.tiles("k"))


def test_only_numpy_arrays_are_traced():
    with pytest.raises(CuflashError, match="needs a NumPy array"):
        cuflash.trace([1.0], [1.0], [1.0])


def test_results_always_hold_the_lse():
    q = np.ones((1, 8, 1, 16), np.float32)
    out, lse = cuflash.trace(q, q, q, return_lse=True).results
    assert (out.shape, lse.shape) == ((1, 8, 1, 16), (1, 1, 8))
