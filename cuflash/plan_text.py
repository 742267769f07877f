"""A Plan as text and as HTML: the same lines, (label, value) pairs."""

from __future__ import annotations

import html as html_
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cuflash import row
from cuflash.problem import Problem

if TYPE_CHECKING:
    from cuflash.plan import Plan

WIDTH = 12  # of labels
PRODUCTS = (  # by PRECISION of kernels/lib/params.cuh
    "float32 arithmetic",
    "one TF32 product on tensor cores: 11 bits of each number",
    "three TF32 products on tensor cores: what float32 keeps",
)


def text(plan: Plan) -> str:
    """What `print(plan)` shows."""
    lines = [title(plan)]
    before = None
    for label, value in pairs(plan):
        lines.append(f"  {label if label != before else '':<{WIDTH}}{value}")
        before = label
    return "\n".join(lines)


def html(plan: Plan) -> str:
    """What Jupyter shows: a table of the same lines."""
    rows, before = [], None
    for label, value in pairs(plan):
        head = html_.escape(label if label != before else "")
        rows.append(
            f'<tr><th style="text-align:left;vertical-align:top">{head}</th>'
            f'<td style="text-align:left"><code>{html_.escape(value)}</code></td></tr>'
        )
        before = label
    return f"<p><b>{html_.escape(title(plan))}</b></p><table>{''.join(rows)}</table>"


def title(plan: Plan) -> str:
    """The kernel, and where it runs."""
    how = "named" if plan.named else "chosen"
    return f"{plan.kernel} ({how}) for attention {plan.problem.direction} on {plan.device.label}"


def pairs(plan: Plan) -> Iterator[tuple[str, str]]:
    """(label, value); a label that comes again belongs to the line before."""
    problem = plan.problem
    for sentence in shapes(problem):
        yield "problem", sentence
    yield "idea", plan.row.teaches
    if plan.main is not None:
        params = dict(plan.main.params)
        tile = ", ".join(f"{name} {params[name]}" for name in ("TILE_Q", "TILE_KV", "HEAD_DIM", "HEAD_DIM_V"))
        stages = "1 stage" if params["N_STAGES"] == 1 else f"{params['N_STAGES']} stages"
        yield "tile", f"{tile}, {params['N_WARPS']} warps, {stages}"
        if problem.dtype == "float32":
            yield "products", PRODUCTS[params["PRECISION"] if plan.row.flops_per_clock else 0]
    for launch in plan.launches:
        grid = " x ".join(f"{n:,}" for n in launch.grid if n > 1) or "1"
        shared = f"{launch.smem_bytes:,} bytes of shared memory"
        start = ", starts while the one before ends" if launch.overlaps else ""
        yield "launch", f"{launch.name}: {grid} blocks of {launch.block[0]} threads, {shared}{start}"
        if maps := [one for one in launch.step.maps if one.when(problem)]:
            boxes = [(one.name, *one.box(dict(launch.params))) for one in maps]
            yield "maps", ", ".join(f"{name} {rows} x {cols}" for name, cols, rows in boxes) + " at once"
    if plan.tile is not None and not plan.launches:
        yield "launch", "nothing: the result is empty"
    for slot in plan.slots:
        yield "workspace", f"{slot.name} {slot.shape} {slot.dtype}, {slot.n_bytes:,} bytes"
    yield "workspace", f"{plan.workspace_bytes:,} bytes in all"
    for copy in plan.copies:
        back = "copied back: " if copy.back else ""
        yield "copies", f"{copy.name}, {copy.slot.n_bytes:,} bytes: {back}{copy.why}"
    if not plan.copies:
        yield "copies", "none"
    yield "arithmetic", f"{si(plan.flops)}FLOP"
    if plan.traffic:
        each = ", ".join(f"{name} {si(sum(moved))}B" for name, moved in plan.traffic.items() if sum(moved))
        yield "memory", f"{si(plan.bytes)}B asked of global memory: {each}"
    else:
        yield "memory", f"{si(plan.bytes)}B when every array moves once"
    yield from compiled(plan)
    for name, why in plan.refused.items():
        yield "refused", f"{name}: {why}"


def shapes(problem: Problem) -> Iterator[str]:
    """The arrays and the options of a problem."""
    p = problem
    batch = f"{p.batch} sequences" if p.packed else f"batch {p.batch}"
    yield f"{batch}, len_q {p.len_q:,}, len_k {p.len_k:,}, heads {p.heads}, heads_k {p.heads_k}"
    yield f"head_dim {p.head_dim}, head_dim_v {p.head_dim_v}, {p.dtype}, results {p.out_dtype}"
    used = [row.FEATURES[word] for word in row.wanted_features(problem)]
    if used:
        yield "with " + ", ".join(used)


def compiled(plan: Plan) -> Iterator[tuple[str, str]]:
    """Registers and spills, when they are known: to print a plan compiles nothing."""
    if plan.device.kind != "cuda" or not plan.launches:
        return
    if "resources" not in plan.__dict__:
        yield "compiled", "not yet: plan.registers, plan.spills and plan.blocks_per_sm compile"
        return
    for name, found in plan.resources.items():
        spills = found.spill_stores + found.spill_loads
        yield "compiled", f"{name}: {found.registers} registers, {spills} bytes of spills"
    if plan.blocks_per_sm is not None:
        yield "compiled", f"{plan.blocks_per_sm} blocks of {plan.kernel} per SM"


def si(number: float) -> str:
    """
    >>> si(2050048000)
    '2.05 G'
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.0f} "
