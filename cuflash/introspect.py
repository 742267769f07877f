"""Looking at the softmax: weights of chosen rows, column sums, entropy; never all of len_q x len_k at once.

The weights P are those before dropout, masks and sink included.  The mathematics is that of
reference_scores.py and reference.softmax, here in float32 (float64 for float64 inputs), block by block
over query rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuflash import reference
from cuflash.arrays import array_spec, device_of, is_cupy, module_of
from cuflash.check import check
from cuflash.problem import Operands, Problem
from cuflash.reference_scores import Arithmetic, scores


class RowStats(NamedTuple):
    """What `row_stats` returns, each (batch, heads, len_q)."""

    entropy: Any  # in nats: 0 when a row sees one key, log n when it sees n alike
    max_score: Any  # the largest visible score, sink included; -inf in a row that sees nothing


def attention_weights(q: Any, k: Any, *, rows: Any = None, **options: Any) -> Any:
    """P, the weights with which chosen query rows look at the keys.

    | argument | shape, default layout | meaning |
    |---|---|---|
    | q | (batch, len_q, heads, head_dim) | as in `attention`; v is not needed |
    | k | (batch, len_k, heads_k, head_dim) | |
    | rows | (n,), or (batch or 1, heads or 1, n) | rows of q; None: all, len_q x len_k numbers |
    | options | | those of `attention` |

    Returns P (batch, heads, n, len_k), float32 (float64 for float64 inputs); packed (heads, n, tokens),
    rows and columns counted in tokens.  A row sums to 1, to less with a sink, to 0 when it sees nothing.

        >>> attention_weights(q, k, causal=True, rows=[0, -1]).shape          # the first and the last query
        (2, 8, 2, 1024)

    dropout is left out, and options that change no weight (precision, out_dtype, kernel, ...) are read
    and change nothing: one dict of options serves both calls.  Raises CuflashError as `attention` does,
    and for rows that are not there.
    """
    problem, operands = _parse("attention_weights", q, k, options)
    rows = _rows(problem, operands, rows)
    with device_of(operands.q):
        P = module_of(operands.q).zeros((*rows.shape, problem.len_k), problem.accumulator)
        for b, h, place, columns, _, part, _ in _blocks(problem, operands, rows):
            P[b, h, place[:, None], columns] = part
    return P[0] if problem.packed else P


def key_importance(q: Any, k: Any, **options: Any) -> Any:
    """Column sums of P: how much weight each key receives from all queries of its sequence.

    | argument | shape, default layout | meaning |
    |---|---|---|
    | q | (batch, len_q, heads, head_dim) | as in `attention`; v is not needed |
    | k | (batch, len_k, heads_k, head_dim) | |
    | options | | those of `attention` |

    Returns (batch, heads, len_k), packed (heads, tokens), in float32 (float64 for float64 inputs).
    Without a sink a (batch, head) sums to its number of rows that see something.

        >>> key_importance(q, k, causal=True).sum(axis=-1)                    # len_q for each (batch, head)
        >>> key_importance(q, k).argsort(axis=-1)[..., -10:]                  # the ten most looked at

    Options as in `attention_weights`.  Raises CuflashError as `attention` does.
    """
    problem, operands = _parse("key_importance", q, k, options)
    if is_cupy(operands.q):
        from cuflash import devices

        total = _sums_by_kernel(problem, operands, devices.gpu(operands.q.device.id))
        return total[0] if problem.packed else total
    rows = _rows(problem, operands, None)
    total = np.zeros((*rows.shape[:2], problem.len_k), problem.accumulator)
    for b, h, _, columns, _, P, _ in _blocks(problem, operands, rows):
        total[b, h, columns] += P.sum(axis=0)
    return total[0] if problem.packed else total


def _sums_by_kernel(problem: Problem, operands: Operands, device: Any) -> Any:
    """Column sums by kernels: a forward for lse, with a v of one column, then kernels/pass_columns.cu."""
    from cuflash import launch, passes, plan

    v = operands.k[..., :1]
    specs = dict(problem.specs) | {"v": array_spec(v)}
    problem = replace(
        problem, head_dim_v=1, out_dtype=problem.dtype, dropout=None, specs=tuple(sorted(specs.items()))
    )
    operands = replace(operands, v=v, seed=None, workspace=None, progress=None)
    operands.lse = launch.run(plan.make(problem, device), operands)["lse"]
    return passes.column_sums(problem, operands, device)


def row_stats(q: Any, k: Any, **options: Any) -> RowStats:
    """Entropy and largest score of every query row.

    | argument | shape, default layout | meaning |
    |---|---|---|
    | q | (batch, len_q, heads, head_dim) | as in `attention`; v is not needed |
    | k | (batch, len_k, heads_k, head_dim) | |
    | options | | those of `attention` |

    Returns RowStats(entropy, max_score), each (batch, heads, len_q), packed (heads, tokens), in float32
    (float64 for float64 inputs).  The entropy -sum P log P is that of keys and sink together, in nats;
    exp(entropy) is the number of keys a row looks at.  A row that sees nothing has entropy 0 and
    max_score -inf.

        >>> entropy, max_score = row_stats(q, k, causal=True)
        >>> entropy[0, :, 0]                                                  # 0: the first row sees one key

    Options as in `attention_weights`.  Raises CuflashError as `attention` does.
    """
    problem, operands = _parse("row_stats", q, k, options)
    xp = module_of(operands.q)
    rows = _rows(problem, operands, None)
    with device_of(operands.q):
        entropy = xp.zeros(rows.shape, problem.accumulator)
        max_score = xp.full(rows.shape, -np.inf, problem.accumulator)
        for b, h, place, _, logits, P, lse in _blocks(problem, operands, rows):
            # -log P = lse - logit, where there is weight; the sink is the last column of logits
            with np.errstate(invalid="ignore"):  # -inf - -inf, where nothing is seen
                P = xp.concatenate([P, xp.exp(logits[:, -1:] - lse[:, None])], axis=1)
                P = xp.where(xp.isneginf(logits), 0, P)
                entropy[b, h, place] = xp.where(P == 0, 0, P * (lse[:, None] - logits)).sum(axis=1)
            max_score[b, h, place] = logits.max(axis=1)
    return RowStats(*((entropy[0], max_score[0]) if problem.packed else (entropy, max_score)))


def _parse(where: str, q: Any, k: Any, options: dict[str, Any]) -> tuple[Problem, Operands]:
    """Problem and operands of a call without v."""
    return check("forward", {"q": q, "k": k, "v": k}, options, where=where)


def _rows(problem: Problem, operands: Operands, rows: Any) -> np.ndarray:
    """Array rows to look at, (batch, heads, n) on the host."""
    return reference.chosen(
        rows, operands.q.shape[0], problem.heads, problem.len_q, where="attention_weights"
    )


def _blocks(problem: Problem, operands: Operands, rows: np.ndarray) -> Iterator[tuple]:
    """Each block of query rows: (b, h, place in rows, array rows of its keys, logits, P, lse).

    logits (n, keys + 1) hold the scores and in the last column the sink, -inf without one; P is (n, keys).
    """
    xp = module_of(operands.q)
    arithmetic = Arithmetic(problem.accumulator)
    for sequence, h in reference.every_head(problem, operands):
        b = sequence.array_b
        j = xp.arange(sequence.len_k)
        sink = reference.sink_of(operands, h, arithmetic)
        for place, i in reference.blocks(xp, rows[b, h], sequence.q_start, sequence.len_q, sequence.len_k):
            with np.errstate(all="ignore"):
                S, visible, _, _ = scores(problem, operands, sequence, h, i, j, arithmetic)
                P, lse = reference.softmax(S, sink)
            logits = reference.with_sink(S, sink)
            yield b, h, place, sequence.k_start + j, logits, xp.where(visible, P, 0), lse
