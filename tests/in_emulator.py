"""What the tests of kernels share that run cases of `cuflash check` in the emulator."""

import numpy as np

from cuflash import checks, emulator


def check_case(row, direction, case, dtype, may_refuse=False):
    """The row gives what the specification gives, or refuses where it may."""
    line = checks.one(row, direction, checks.Expected(case, dtype), np)
    assert line.status == "passed" or (may_refuse and line.status == "refused"), f"{row}: {line.message}"


def check_orders(row, direction, expected, n_orders=3):
    """The row fails in no order of its threads; expected: of one case and dtype."""
    for seed in range(n_orders):
        with emulator.options(seed=seed):
            line = checks.one(row, direction, expected, np)
        assert line.status != "failed", f"{row}, seed {seed}: {line.message}"
