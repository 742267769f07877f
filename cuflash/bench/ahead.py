"""Compile what a run will need before anything is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import cuflash
from cuflash import build, plan
from cuflash.arrays import spec
from cuflash.bench.contenders import AUTOMATIC, own
from cuflash.bench.inputs import options_of
from cuflash.bench.shapes import Shape
from cuflash.errors import CuflashError

if TYPE_CHECKING:
    from cuflash.bench.run import Task


def compile_ahead(task: Task) -> None:
    """Every build that cuflash's kernels need for the suite, in parallel."""
    compile_pairs(
        (one.name, shape)
        for shape in task.suite.shapes
        for one in own(shape.direction, task.place, task.kernels, task.suite.ladder)
    )


def compile_pairs(pairs: Iterable[tuple[str, Shape]]) -> None:
    """Every build of (kernel or "auto", shape), in parallel; a backward needs its forward too."""
    plans = []
    for name, shape in pairs:
        q, k, v, options = specs_of(shape)
        for backward in {False, shape.direction == "backward"}:
            with contextlib.suppress(CuflashError):  # a row that refuses is a line later
                own_kernel = backward == (shape.direction == "backward") and name != AUTOMATIC
                kernel = name if own_kernel else None
                plans.append(cuflash.explain(q, k, v, **options, backward=backward, kernel=kernel))
    with contextlib.suppress(CuflashError):  # what does not compile is a line later
        build.compile_all(plan.jobs(plans))


def specs_of(shape: Shape) -> tuple[Any, Any, Any, dict[str, Any]]:
    """q, k, v and options of a shape, arrays as specs; where options are drawn, of a smaller problem."""
    if shape.drawn:
        shape = replace(
            shape, batch=min(shape.batch, 2), len_q=min(shape.len_q, 512), len_k=min(shape.len_k, 512)
        )
    packed = "packed" in shape.drawn
    sides = ((shape.len_q, shape.heads), (shape.len_k, shape.heads_k))
    (q, k) = [(shape.batch * n, h) if packed else (shape.batch, n, h) for n, h in sides]
    options = {
        name: spec(value.shape, value.dtype.name)
        if isinstance(value, np.ndarray) and "lengths" not in name
        else value
        for name, value in options_of(shape, np).items()
    }
    vectors = [(*q, shape.head_dim), (*k, shape.head_dim), (*k, shape.head_dim_v)]
    return *(spec(size, shape.dtype) for size in vectors), options
