"""The one rule by which results are judged, in the tests and in `cuflash check`.

An array passes when its largest error is at most

    2 x (largest error of the baseline) + 4 eps(accumulation dtype) x max |reference|
    + 256 x the smallest normal number of the accumulation dtype (3e-36 in float32)

The last term is for results that consist of underflow: below the smallest normal number exponentials and
atomic adds of a GPU flush to zero, so that a sum of such numbers has no digits to compare.

The reference is `cuflash.reference` in float64 (np.longdouble for float64 inputs).  The baseline is
`reference.unfused(dtype)`: the same mathematics as a plain library computes it, rounded to the dtype
after each step; where once is not enough, the largest error of up to 200 draws of its roundings and of the
order of its sums counts.  lse, delta, dsink and dalibi_slopes are judged against the float32 baseline
whatever the input dtype.

Where the reference is not finite the result must be of the same kind (NaN, +inf, -inf); where it is
finite, anything else fails, except NaN at places named by `may_be_nan` and an overflow of the result's
own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

UNDERFLOWS = 256  # numbers of a sum that may have been flushed to zero

AXES = {
    "lse": "batch head i",
    "delta": "batch head i",
    "dbias": "batch head i j",
    "dsink": "head",
    "dalibi_slopes": "batch head",
}


@dataclass(frozen=True)
class Verdict:
    """What the rule says of one array.  message is None when it passes, else it names the worst place."""

    name: str
    error: float
    limit: float
    baseline_error: float
    message: str | None = None

    @property
    def passed(self) -> bool:
        return self.message is None


def to_numpy(array: Any) -> np.ndarray:
    """A NumPy array of a NumPy or CuPy one."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def kind_of(x: np.ndarray) -> np.ndarray:
    """0 finite, 1 NaN, 2 +inf, 3 -inf, for each number."""
    return np.select([np.isnan(x), np.isposinf(x), np.isneginf(x)], [1, 2, 3], 0)


def limit_of(reference: np.ndarray, baselines: Sequence[Any], accumulator: str) -> tuple[float, float]:
    """(limit, largest error of the baselines).  A number that overflowed in a baseline is left out."""
    finite = np.isfinite(reference)
    largest = np.max(np.abs(reference[finite]), initial=0)
    error = 0.0
    for baseline in baselines:
        baseline = to_numpy(baseline).astype(reference.dtype)
        both = finite & np.isfinite(baseline)
        error = max(error, np.max(np.abs(baseline[both] - reference[both]), initial=0))
    accuracy = np.finfo(accumulator)
    return 2 * error + 4 * accuracy.eps * largest + UNDERFLOWS * accuracy.smallest_normal, error


def allowed_kinds(
    got: np.ndarray, reference: np.ndarray, may_be_nan: Any, largest_of_dtype: float
) -> np.ndarray:
    """Where got is finite, NaN or infinite as the reference is, or may differ from it.

    largest_of_dtype: from this size on, an infinity in place of a number is an overflow of the dtype.
    """
    allowed = kind_of(got) == kind_of(reference)
    if may_be_nan is not None:
        allowed |= np.isnan(got) & np.broadcast_to(may_be_nan, got.shape)
    overflow = np.isinf(got) & np.isfinite(reference) & (np.sign(got) == np.sign(reference))
    return allowed | (overflow & (np.abs(np.where(overflow, reference, 0)) >= largest_of_dtype))


# One draw of few numbers, or of a sum that cancels, may be exact by luck: then more are made.  More draws
# only raise the limit, so what passes with few need not wait for many.
# One draw, mostly.  Errors of one row are few numbers of a wide distribution: of 5,000 calls some have a row
# that is 9 times the median draw, which 24 draws do not reach.  Who is far off is not drawn for so often.
N_DRAWS = (1, 4, 24, 200)
FAR_OFF = 2


class Draws:
    """Results of the baseline with other roundings each time, made when they are first asked for.

    run(noise) -> {name: array}; noise is None or a numpy.random.Generator, see `reference.unfused`.
    """

    def __init__(self, run: Callable[[Any], dict[str, Any]]) -> None:
        self.run = run
        self.found: list[dict[str, Any]] = []

    def first(self, n: int, name: str) -> list[Any]:
        """The results called `name` of the first n draws: the plain one, then noisy ones."""
        for number in range(len(self.found), n):
            self.found.append(self.run(np.random.default_rng(number - 1) if number else None))
        return [draw[name] for draw in self.found[:n]]


def judge_drawn(name: str, result: Any, reference: Any, draws: Draws, **options: Any) -> Verdict:
    """`judge` with one baseline and, only where that is not enough, with the largest error of several."""
    for n in N_DRAWS:
        verdict = judge(name, result, reference, draws.first(n, name), **options)
        if verdict.passed or (n >= 24 and not verdict.error <= FAR_OFF * verdict.limit):
            break
    return verdict


def judge(
    name: str,
    result: Any,
    reference: Any,
    baselines: Any,
    *,
    accumulator: str = "float32",
    may_be_nan: Any = None,
    axes: str | None = None,
) -> Verdict:
    """The verdict on one array.

    | argument | meaning |
    |---|---|
    | name | what is compared: "out", "lse", "dq", "dbias", ...; starts the message and picks the axis names |
    | result | array of any float dtype, NumPy or CuPy |
    | reference | the exact numbers, float64 or np.longdouble, same shape |
    | baselines | one array or a list of arrays of the same shape |
    | accumulator | dtype of sums and softmax: "float32" or "float64" |
    | may_be_nan | boolean, broadcasts to the shape: where NaN is allowed (contract item 8) |
    | axes | axis names for the message, "batch i head d" |
    """
    result, reference = to_numpy(result), to_numpy(reference)
    baselines = baselines if isinstance(baselines, list | tuple) else [baselines]

    def failed(message: str, error=np.nan, limit=np.nan, baseline_error=np.nan) -> Verdict:
        return Verdict(name, error, limit, baseline_error, f"{name}: {message}")

    if result.shape != reference.shape:
        return failed(f"shape {result.shape}, the reference has {reference.shape}")
    for baseline in baselines:
        if baseline.shape != reference.shape:
            return failed(f"the baseline has shape {baseline.shape}, the reference has {reference.shape}")
    if result.size == 0:
        return Verdict(name, 0.0, 0.0, 0.0)
    limit, baseline_error = (float(number) for number in limit_of(reference, baselines, accumulator))
    got = result.astype(reference.dtype)
    names = (axes or AXES.get(name, "batch i head d")).split()[-result.ndim :] if result.ndim else []

    def place(index: tuple[int, ...]) -> str:
        labels = names if len(names) == len(index) else [f"axis {n}" for n in range(len(index))]
        where = ", ".join(f"{label} {int(n)}" for label, n in zip(labels, index, strict=True))
        return f"({where}): got {got[index]:.9g}, reference {reference[index]:.9g}"

    allowed = allowed_kinds(got, reference, may_be_nan, float(ml_dtypes.finfo(result.dtype).max) - limit)
    if not allowed.all():
        wrong = np.argwhere(~allowed)
        first = place(tuple(wrong[0]))
        message = f"{len(wrong)} of {got.size} numbers of the wrong kind, first at {first}"
        return failed(message, np.nan, limit, baseline_error)

    both = np.isfinite(got) & np.isfinite(reference)
    errors = np.where(both, np.abs(np.where(both, got, 0) - np.where(both, reference, 0)), 0)
    worst = np.unravel_index(np.argmax(errors), errors.shape)
    error = float(errors[worst])
    if not error <= limit:
        message = (
            f"error {error:.3g} is over the limit {limit:.3g} (baseline error {baseline_error:.3g}), "
            f"{np.count_nonzero(errors > limit)} of {errors.size} numbers are; worst at {place(worst)}"
        )
        return failed(message, error, limit, baseline_error)
    return Verdict(name, error, limit, baseline_error)
