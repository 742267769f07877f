"""The one comparison of the tests: the rule of cuflash/judge.py, as an assertion."""

from __future__ import annotations

from cuflash.judge import AXES, judge, kind_of, limit_of, to_numpy

__all__ = ["AXES", "check_close", "kind_of", "limit_of", "to_numpy"]


def check_close(name, result, reference, baselines, *, accumulator="float32", may_be_nan=None, axes=None):
    """Raise AssertionError, naming the worst place, unless the result is as near as the rule asks.

    Arguments as in `cuflash.judge.judge`.  Returns the Verdict: error, limit, baseline_error.
    """
    verdict = judge(
        name, result, reference, baselines, accumulator=accumulator, may_be_nan=may_be_nan, axes=axes
    )
    if not verdict.passed:
        raise AssertionError(verdict.message)
    return verdict
