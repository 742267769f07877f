"""The one comparison of the tests: the rule of cuflash/judge.py, as an assertion.

check_close("dq", dq, reference, baseline)        one array
judge = Judge(call)                               all results of a call of problems.py
judge.forward(out, lse)
out, lse = judge.saved()                          what a forward gives, for tests of a backward alone
judge.backward(gradients, out, lse)
"""

from __future__ import annotations

import numpy as np

from cuflash import reference
from cuflash.check import check
from cuflash.judge import AXES, Draws, judge, judge_drawn, kind_of, limit_of, to_numpy

__all__ = ["AXES", "Judge", "check_close", "kind_of", "limit_of", "to_numpy"]


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


class Judge:
    """The reference and the baselines of one Call, made when first asked for, on the host.

    The backward is judged as a function of the out and lse it is given: pass those that the tested
    backward got. Gradients that the result leaves None are not looked at, except that dq, dk and dv must
    be there.
    """

    # lse and sums over rows are accumulated in float32 whatever the dtype, and judged so
    FLOAT32_RESULTS = ("lse", "delta", "dsink", "dalibi_slopes")

    def __init__(self, call):
        self.call = call
        self.dtype = call.build.dtype
        self.accumulator = "float64" if self.dtype == "float64" else "float32"
        self.exact = reference.LONGDOUBLE if self.dtype == "float64" else reference.FLOAT64
        self._forward, self._saved, self._backward = None, None, (None, None, None)

    def expected(self, exact, run):
        """{name: (reference, Draws)} of the results in exact; run(baseline) -> {name: array}."""

        def draws_in(dtype):
            dtype = self.call.options.get("precision") or dtype
            return Draws(lambda noise: run(reference.unfused(dtype, noise)))

        own = draws_in(self.dtype)
        in_float32 = own if self.dtype == self.accumulator else draws_in(self.accumulator)
        return {
            name: (array, in_float32 if name in self.FLOAT32_RESULTS else own)
            for name, array in exact.items()
            if array is not None
        }

    def expected_forward(self):
        """{"out": (reference, Draws), "lse": ...}"""
        if self._forward is None:
            call = self.call
            arrays, options = (call.q, call.k, call.v), call.options | {"return_lse": True}
            names = ("out", "lse")
            exact = reference.attention(*arrays, **options, arithmetic=self.exact)
            self._forward = self.expected(
                dict(zip(names, exact, strict=True)),
                lambda baseline: dict(zip(names, baseline.attention(*arrays, **options), strict=True)),
            )
        return self._forward

    def expected_backward(self, out, lse):
        """{name: (reference, Draws)} of the gradients for these out and lse."""
        if self._backward[0] is not out or self._backward[1] is not lse:
            call = self.call
            arrays = (call.dout, call.q, call.k, call.v, to_numpy(out), to_numpy(lse))
            options = call.options | {"dlse": call.dlse}
            exact = reference.attention_backward(*arrays, **options, arithmetic=self.exact)
            found = self.expected(
                exact._asdict(), lambda baseline: baseline.attention_backward(*arrays, **options)._asdict()
            )
            self._backward = out, lse, found
        return self._backward[2]

    def saved(self):
        """(out, lse) as a perfect forward would round them, in the dtypes the call's backward gets."""
        if self._saved is None:
            from problems import NUMPY_DTYPES

            build = self.call.build
            dtype = build.dtype if build.out_dtype == "same" else build.out_dtype
            dtype = dtype if build.dout_dtype == "same" else build.dout_dtype
            with np.errstate(over="ignore"):
                out = self.expected_forward()["out"][0].astype(NUMPY_DTYPES[dtype])
            self._saved = out, self.expected_forward()["lse"][0].astype(self.accumulator)
        return self._saved

    def forward(self, out, lse=None):
        """Raise AssertionError unless out (and lse) pass.

        A row whose lse is NaN may be NaN, also where dropout happens to drop all that it sees.
        """
        may_be_nan = nan_allowed(self.call)
        nan_rows = np.isnan(self.expected_forward()["lse"][0])[..., None]
        if self.call.options.get("layout") != "bhsd":
            nan_rows = nan_rows.swapaxes(-2, -3)
        may_be_nan["out"] = may_be_nan["out"] | nan_rows
        for name, result in (("out", out), ("lse", lse)):
            if result is not None:
                self.one(name, result, *self.expected_forward()[name], may_be_nan)

    def backward(self, gradients, out, lse):
        """Raise AssertionError unless every gradient passes; out and lse are those the backward was given."""
        may_be_nan = nan_allowed(self.call)
        gradients = gradients._asdict()
        for name, (exact, draws) in self.expected_backward(out, lse).items():
            if gradients[name] is None:
                raise AssertionError(f"{name} is None")
            self.one(name, gradients[name], exact, draws, may_be_nan)

    def one(self, name, result, exact, draws, may_be_nan):
        axes = "batch head i d" if self.call.options.get("layout") == "bhsd" and name not in AXES else None
        verdict = judge_drawn(
            name, result, exact, draws,
            accumulator=self.accumulator, may_be_nan=may_be_nan.get(name), axes=axes,
        )  # fmt: skip
        if not verdict.passed:
            raise AssertionError(f"{verdict.message}\n  in {self.call}")


def nan_allowed(call):
    """Where contract item 8 lets a kernel give NaN: {"out" | "dq" | "dk" | "dv" | "dbias": bool array}.

    out and dq of a (sequence, head) in which any existing row of K or V is not finite; dk, dv and dbias
    of one in which any existing row of Q or dO is not.  (Rows to which such a row is visible are judged
    by the reference.)
    """
    problem, operands = check("forward", {"q": call.q, "k": call.k, "v": call.v}, call.options)
    dout = call.dout[None] if problem.packed else call.dout
    dout = dout.swapaxes(1, 2) if problem.layout == "bhsd" else dout
    batch = operands.q.shape[0]
    rows = np.zeros((batch, problem.len_q, problem.heads, 1), bool)
    keys = np.zeros((batch, problem.len_k, problem.heads_k, 1), bool)
    planes = np.zeros((problem.batch, problem.heads, 1, 1), bool)
    for sequence, h in reference.every_head(problem, operands):
        b, h_k = sequence.array_b, h // problem.group
        q_rows = slice(sequence.q_start, sequence.q_start + sequence.len_q)
        k_rows = slice(sequence.k_start, sequence.k_start + sequence.len_k)
        k_bad, v_bad = (not_finite(x[b, k_rows, h_k]) for x in (operands.k, operands.v))
        q_bad, dout_bad = (not_finite(x[b, q_rows, h]) for x in (operands.q, dout))
        rows[b, q_rows, h] |= k_bad | v_bad
        keys[b, k_rows, h_k] |= q_bad | dout_bad
        planes[sequence.b, h] = q_bad | dout_bad

    allowed = {"out": rows, "dq": rows, "dk": keys, "dv": keys}
    allowed = {name: reference.results.in_layout(problem, name, array) for name, array in allowed.items()}
    if operands.bias is not None:
        for axis in (0, 1):
            if operands.bias.shape[axis] == 1:
                planes = planes.any(axis=axis, keepdims=True)
        allowed["dbias"] = np.broadcast_to(planes, operands.bias.shape).reshape(call.options["bias"].shape)
    return allowed


def not_finite(x):
    return not np.isfinite(x.astype("float64")).all()
