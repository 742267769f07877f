"""Is a timed result right?  Sampled rows against the float64 reference, by the rule of judge.py.

A sample is one (sequence, key head) with all its query heads, cut out of the arrays as a small problem of its
own.  Of each sample 64 query rows are compared (out, lse, dq) and 64 key rows (dk, dv), always with the first
and the last among them, and always with the first and the last sample of the problem.  Baselines go the whole
way: their gradients come from their own rounded forward.  Everything runs where the arrays are, GPU included.

float64 results are compared with the float64 reference too (long double exists only on the CPU): their
baseline moves every step at random by half a unit.

float32 and float64 results have one baseline more: the exact numbers, off by what one long sum loses.  The
baseline's own sums are split by the library that runs them (pairwise, or into many parts of a matmul), and
know less of it than a kernel that adds key after key: n rounding errors of random sign, each half a unit of
the largest partial sum, walk sqrt(n) half units away.
"""

# ruff: noqa: E741  (O is the papers' name)

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash import reference
from cuflash.bench.inputs import Inputs, of_forward, seed_of
from cuflash.blockmask import BlockMask
from cuflash.check import check
from cuflash.judge import Verdict, judge, to_numpy
from cuflash.problem import Operands, Problem
from cuflash.reference_scores import Arithmetic, sequences

ROWS = 64  # query rows and key rows compared in each sample
SAMPLES = 16  # query heads sampled of a problem, all sequences together
FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")
AXES = {"lse": "sample head row"}
# Bits that are all set in NaN and infinities alone: a test on integers, which every array module can do.
EXPONENT = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F800000,
    "float64": 0x7FF0000000000000,
}


@dataclass(frozen=True)
class Sample:
    """One (sequence, key head).  rows, keys: array rows to compare, counted from the sequence's own start."""

    b: int
    head_k: int
    q_start: int
    k_start: int
    rows: np.ndarray
    keys: np.ndarray
    problem: Problem
    operands: Operands


class Truth:
    """Exact numbers and baselines of a shape's samples; `judge(results)` compares a result with them."""

    def __init__(self, inputs: Inputs, samples: int = SAMPLES) -> None:
        self.inputs, self.direction = inputs, inputs.shape.direction
        self.names = FORWARD if self.direction == "forward" else BACKWARD
        self.accumulator = "float64" if inputs.shape.dtype == "float64" else "float32"
        self.samples = self._sample(samples)
        self.exact = self._stack([self._computed(one, reference.FLOAT64) for one in self.samples])
        is_tf32 = dict(inputs.shape.settings).get("precision") == "tf32"  # asked for products of 11 bits
        narrow = Arithmetic(self.accumulator, "tf32" if is_tf32 else inputs.shape.dtype)
        wide = Arithmetic("float32", "tf32" if is_tf32 else "float32")
        if self.accumulator == "float64":
            noise = np.random.default_rng(seed_of(inputs.shape))
            narrow = wide = Arithmetic("float64", "float64", noise)
        self.baseline = self._stack([self._computed(one, narrow) for one in self.samples])
        if "lse" in self.names:
            self.baseline["lse"] = self._stack([self._computed(one, wide) for one in self.samples])["lse"]

    def judge(self, results: dict[str, Any]) -> list[Verdict]:
        """Verdicts on a result by name, canonical axes, whole arrays; lse may be missing (peers keep it)."""
        verdicts = [
            judge(
                name,
                np.stack([self._cut(name, results[name], one) for one in self.samples]),
                self.exact[name],
                [self.baseline[name], *self._long_sums(name)],
                accumulator=self.accumulator,
                axes=AXES.get(name, "sample row head d"),
            )
            for name in self.names
            if results.get(name) is not None
        ]
        found = [self._placed(verdict) for verdict in verdicts]
        missing = [name for name in self.names if results.get(name) is None and name != "lse"]
        found += [Verdict(n, np.nan, np.nan, np.nan, f"{n}: is missing") for n in missing]
        return [*found, *self._not_finite(results)]

    def _long_sums(self, name: str) -> list[np.ndarray]:
        """Baseline of one long sum: see the top of this file.  None for 16-bit results, which hide it."""
        if self.inputs.shape.dtype != self.accumulator or name == "lse":
            return []
        one = self.samples[0].problem
        n = one.len_q * one.group if name in ("dk", "dv") else one.len_k
        walk = np.sqrt(n) * np.finfo(self.accumulator).eps / 2 * np.abs(self.exact[name]).max(initial=0)
        return [self.exact[name] + walk / 2]  # the limit is twice the error of a baseline

    def _not_finite(self, results: dict[str, Any]) -> list[Verdict]:
        """NaN or infinities anywhere, sampled or not: normal inputs give none."""
        found = []
        for name, array in results.items():
            if array is None or name == "lse":
                continue
            bits = array.view(f"uint{8 * array.itemsize}")
            exponent = EXPONENT[array.dtype.name]
            wrong = int(((bits & exponent) == exponent).sum())
            if wrong:
                says = f"{name}: {wrong} of {array.size} numbers are not finite"
                found.append(Verdict(name, np.nan, np.nan, np.nan, says))
        return found

    def _placed(self, verdict: Verdict) -> Verdict:
        """The message with sequence and key head in place of the sample's number."""

        def place(match: re.Match[str]) -> str:
            one = self.samples[int(match[1])]
            return f"sequence {one.b}, key head {one.head_k}"

        if verdict.message is None:
            return verdict
        message = re.sub(r"sample (\d+)", place, verdict.message)
        return Verdict(verdict.name, verdict.error, verdict.limit, verdict.baseline_error, message)

    # ---- samples

    def _sample(self, n_heads: int) -> list[Sample]:
        problem, operands = self.inputs.problem, self.inputs.operands
        random = np.random.default_rng(seed_of(self.inputs.shape) + 2)
        found = [s for s in sequences(problem, operands) if s.len_q and s.len_k]
        everything = [(sequence, head) for sequence in found for head in range(problem.heads_k)]
        wanted = max(2, n_heads // max(1, problem.group))
        if len(everything) > wanted:
            inner = random.permutation(np.arange(1, len(everything) - 1))[: wanted - 2]
            everything = [everything[n] for n in [0, *sorted(inner), len(everything) - 1]]
        n_rows = min([ROWS, *(s.len_q for s, _ in everything)])
        n_keys = min([ROWS, *(s.len_k for s, _ in everything)])
        samples = []
        for sequence, head in everything:
            arrays, options = self._small(sequence, head)
            small, cut = check("forward", arrays, options)
            rows, keys = (
                _some(random, n, length) for n, length in ((n_rows, sequence.len_q), (n_keys, sequence.len_k))
            )
            samples.append(
                Sample(sequence.b, head, sequence.q_start, sequence.k_start, rows, keys, small, cut)
            )
        return samples

    def _small(self, sequence: Any, head_k: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arrays, options) of one sequence and one key head as a problem of batch 1."""
        whole, b = self.inputs.operands, sequence.array_b
        group = self.inputs.problem.group
        heads = slice(head_k * group, (head_k + 1) * group)
        q_rows = slice(sequence.q_start, sequence.q_start + sequence.len_q)
        k_rows = slice(sequence.k_start, sequence.k_start + sequence.len_k)
        arrays = {
            "q": whole.q[b : b + 1, q_rows, heads],
            "k": whole.k[b : b + 1, k_rows, head_k : head_k + 1],
            "v": whole.v[b : b + 1, k_rows, head_k : head_k + 1],
        }
        options = {
            name: value
            for name, value in of_forward(self.inputs.options).items()
            if "lengths" not in name and "seqlens" not in name
        }
        own = slice(sequence.b, sequence.b + 1)
        for name in ("bias", "mask"):
            value = getattr(whole, name)
            if value is not None:
                value = value[own if value.shape[0] != 1 else slice(None)]
                value = value[:, heads if value.shape[1] != 1 else slice(None)]
                value = value[:, :, : sequence.len_q if value.shape[2] != 1 else None]
                options[name] = value[..., : sequence.len_k if value.shape[3] != 1 else None]
        if whole.alibi_slopes is not None:
            slopes = whole.alibi_slopes
            options["alibi_slopes"] = slopes[own if slopes.shape[0] != 1 else slice(None), heads]
        if whole.sink is not None:
            options["sink"] = whole.sink[heads]
        if whole.block_mask is not None:
            options["block_mask"] = _cut_blocks(whole.block_mask, sequence, heads)
        if options.get("dropout") is not None:
            options["dropout"] = (*options["dropout"][:2], (sequence.b, heads.start, 0, 0))
        if self.direction == "backward":
            arrays["dout"] = self._dout(b, q_rows, heads)
        return {name: arrays[name] for name in "qkv"}, options

    def _dout(self, b: int, rows: slice, heads: slice) -> Any:
        dout = self.inputs.first["dout"]
        return (dout[None] if self.inputs.problem.packed else dout)[b : b + 1, rows, heads]

    # ---- numbers

    def _computed(self, one: Sample, arithmetic: Arithmetic) -> dict[str, np.ndarray]:
        """Results of one sample by name: the sampled rows, on the host, without the batch axis."""
        if self.direction == "forward":
            O, lse = reference.forward(one.problem, one.operands, arithmetic, one.rows)
            return {"out": to_numpy(O)[0], "lse": to_numpy(lse)[0]}
        noiseless = Arithmetic(arithmetic.accumulate, arithmetic.rounds_to)
        O, lse = reference.forward(one.problem, one.operands, noiseless)
        group = one.problem.group
        heads = slice(one.head_k * group, (one.head_k + 1) * group)
        rows = slice(one.q_start, one.q_start + one.problem.len_q)
        b = 0 if self.inputs.problem.packed else one.b
        given = Operands(**{**vars(one.operands), "out": O, "lse": lse, "dout": self._dout(b, rows, heads)})
        problem = _backward_of(one.problem)
        of_rows = reference.backward(problem, given, arithmetic, rows=one.rows)
        of_keys = reference.backward(problem, given, arithmetic, keys=one.keys)
        return {name: to_numpy(array)[0] for name, array in {**of_rows, **of_keys}.items()}

    def _stack(self, computed: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {name: np.stack([one[name] for one in computed]) for name in self.names}

    def _cut(self, name: str, array: Any, one: Sample) -> np.ndarray:
        """The sample's rows of a whole result, on the host."""
        b = 0 if self.inputs.problem.packed else one.b
        group = one.problem.group
        heads = slice(one.head_k * group, (one.head_k + 1) * group)
        xp = self.inputs.xp
        rows, keys = xp.asarray(one.rows + one.q_start), xp.asarray(one.keys + one.k_start)
        bits = array.view(f"int{8 * array.itemsize}")
        if name == "lse":
            found = bits[b, heads][:, rows]
        elif name in ("dk", "dv"):
            found = bits[b, :, one.head_k : one.head_k + 1][keys]
        else:
            found = bits[b, :, heads][rows]
        return to_numpy(found).view(array.dtype)


def _some(random: np.random.Generator, n: int, length: int) -> np.ndarray:
    """n rows of `length`, ascending, the first and the last among them."""
    inner = random.permutation(np.arange(1, length - 1))[: max(0, n - 2)]
    return np.unique(np.concatenate([[0], inner, [length - 1]]))[:n].astype(np.int64)


def _cut_blocks(mask: BlockMask, sequence: Any, heads: slice) -> BlockMask:
    """The block mask of one sequence and one group of heads."""
    dense = mask.dense()
    dense = dense[sequence.b : sequence.b + 1] if dense.shape[0] != 1 else dense
    dense = dense[:, heads] if dense.shape[1] != 1 else dense
    rows, columns = -(-sequence.len_q // mask.block_q), -(-sequence.len_k // mask.block_k)
    cut = np.zeros((*dense.shape[:2], rows, columns), bool)
    kept = dense[:, :, :rows, :columns]
    cut[:, :, : kept.shape[2], : kept.shape[3]] = kept
    return BlockMask.from_dense(cut, mask.block_q, mask.block_k)


def _backward_of(problem: Problem) -> Problem:
    """The backward of a forward's problem; only what reference.backward reads."""
    return replace(problem, direction="backward", gradients=("dq", "dk", "dv"))
