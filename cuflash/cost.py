"""What a problem costs: visible pairs, FLOPs, and the bytes that any kernel must move.  From shapes alone."""

from __future__ import annotations

from cuflash.problem import Problem
from cuflash.row import ITEMSIZE


def _below(end: int, limit: int) -> int:
    """sum of clamp(x, 0, limit) over all integers x < end."""
    if end <= 0:
        return 0
    if end <= limit + 1:
        return end * (end - 1) // 2
    return limit * (limit + 1) // 2 + (end - limit - 1) * limit


def bounds(problem: Problem) -> tuple[int | None, int | None]:
    """(left, right) of the window with causal folded in; None is unbounded."""
    left, right = problem.window
    return left, (0 if problem.causal else right)


def visible_pairs(problem: Problem, len_q: int | None = None, len_k: int | None = None) -> int:
    """(query, key) pairs of one head of one sequence that causal and window leave, exactly.

    Masks, block masks and lengths are data, not shape: they are not counted.

    """
    n_q = problem.len_q if len_q is None else len_q
    n_k = problem.len_k if len_k is None else len_k
    offset = n_k - n_q if problem.query_offset is None else problem.query_offset
    left, right = bounds(problem)
    first = (
        offset + right + 1 if right is not None else n_k
    )  # keys below clamp(i + first) are not too far right
    ends = _below(first + n_q, n_k) - _below(first, n_k) if right is not None else n_q * n_k
    starts = 0
    if left is not None:
        starts = _below(offset - left + n_q, n_k) - _below(offset - left, n_k)
    return ends - starts


def all_pairs(problem: Problem) -> int:
    """Visible pairs of the whole problem.  Packed: as if all sequences were equally long."""
    if not problem.packed:
        return visible_pairs(problem) * problem.batch * problem.heads
    if problem.batch == 0:
        return 0
    each = visible_pairs(problem, problem.len_q // problem.batch, problem.len_k // problem.batch)
    return each * problem.batch * problem.heads


def flops(problem: Problem) -> int:
    """2 per visible pair and dimension of each product: two products in the forward, five in the backward."""
    d, dv = problem.head_dim, problem.head_dim_v
    per_pair = 2 * d + 2 * dv if problem.direction == "forward" else 6 * d + 4 * dv
    return per_pair * all_pairs(problem)


def least_bytes(problem: Problem) -> int:
    """Bytes of global memory when every operand is read once and every result written once."""
    rows_q = problem.len_q * problem.heads * (1 if problem.packed else problem.batch)
    rows_k = problem.len_k * problem.heads_k * (1 if problem.packed else problem.batch)
    size, out = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    d, dv, acc = problem.head_dim, problem.head_dim_v, ITEMSIZE[problem.accumulator]
    inputs = size * (rows_q * d + rows_k * (d + dv))
    if problem.direction == "forward":
        return inputs + rows_q * (out * dv + acc)
    sizes = [ITEMSIZE.get(spec.dtype, size) for name in ("out", "dout") if (spec := problem.spec(name))]
    given = sum(sizes) * rows_q * dv + (acc + acc * problem.has_dlse) * rows_q
    return inputs + given + out * (rows_q * d + rows_k * (d + dv))
