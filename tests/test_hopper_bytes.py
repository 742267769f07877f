"""What the rows of the Hopper backward say that they move, beside what the emulator counts."""

import numpy as np
import pytest
from test_backward_kernels import draw, modelled, moved

import cuflash

ROWS = ("bwd_05_wgmma", "bwd_06_specialize", "bwd_07_cluster")
# name -> (batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v), dtype, options
CASES = {
    "grouped": ((2, 70, 293, 4, 2, 128, 96), "bfloat16", {}),
    "causal": ((1, 300, 350, 2, 1, 96, 128), "float16", {"causal": True}),
    "few keys": ((1, 293, 70, 2, 2, 40, 104), "bfloat16", {"causal": True, "query_offset": 5}),
    "deterministic": ((1, 293, 300, 4, 2, 64, 32), "float16", {"causal": True, "deterministic": True}),
    "long": ((1, 140, 1060, 2, 2, 64, 64), "float16", {"causal": True}),
    "deterministic, long": ((1, 140, 1060, 2, 2, 64, 64), "float16", {"causal": True, "deterministic": True}),
    "dout of another dtype": ((1, 140, 150, 2, 2, 64, 64), "float16", {"out_dtype": "float32"}),
    "window": ((1, 400, 300, 2, 2, 64, 64), "float16", {"window": (30, 20)}),
    "wide": ((1, 140, 250, 4, 2, 192, 160), "bfloat16", {"causal": True}),
    "wider": ((1, 293, 70, 2, 2, 200, 256), "bfloat16", {"causal": True, "query_offset": 5}),
}


def takes(row, name):
    return row == "bwd_07_cluster" or (CASES[name][0][5] <= 128 and (row, name) != ("bwd_05_wgmma", "window"))


@pytest.mark.parametrize("row, name", [(row, name) for row in ROWS for name in CASES if takes(row, name)])
def test_traffic_is_what_the_row_says(row, name):
    shape, dtype, options = CASES[name]
    arrays = draw(shape, dtype, options)
    expected = modelled(row, arrays, **options)
    assert expected["k"][0] > 0 and moved(row, arrays, **options) == expected


def test_what_data_decides_is_not_said():
    q = np.zeros((2, 70, 2, 64), np.float16)
    for row in ROWS[1:]:
        found = cuflash.explain(q, q, q, kernel=row, backward=True, key_lengths=[3, 70])
        assert found.traffic == {} and found.bytes > 0
