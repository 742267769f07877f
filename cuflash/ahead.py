"""Compile before the first call: `warmup`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cuflash import backends, build, devices
from cuflash import plan as plan_
from cuflash.attention import explain
from cuflash.errors import CuflashError
from cuflash.plan import Plan
from cuflash.problem import Problem


def warmup(
    specs: Iterable[Any],
    *,
    device: Any = None,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Plan]:
    """Compile the kernels of calls to come, in parallel, and load them when the GPU is here.

    | argument | meaning |
    |---|---|
    | specs | calls: dicts of `explain`'s arguments, (q, k, v), Problems or Plans; arrays or `spec`s |
    | device | as in `explain`, for calls that name none; None: the current GPU |
    | threads | compilers at once; None: one per core |
    | progress | called with (done, total) after each build |

    Returns the plans, in the order of the calls.

        >>> x = cuflash.spec((2, 4096, 16, 128), "bfloat16")
        >>> cuflash.warmup([(x, x, x), dict(q=x, k=x, v=x, causal=True, backward=True)])
        >>> cuflash.warmup([(x, x, x)], device="sm_90a")          # fills the cache for another machine

    Raises CuflashError for a call that no kernel takes, and when CuPy's compiler is missing.
    """
    target = devices.find(device)
    if target.kind == "host":
        do = 'Name one to compile for: device="sm_90a".'
        raise CuflashError(f"warmup: there is no GPU here, and NumPy needs no kernels\n  {do}")
    if not isinstance(specs, Iterable):
        raise CuflashError(f"warmup: specs has the type {type(specs).__name__}\n  Give a list of calls.")
    is_count = isinstance(threads, int) and not isinstance(threads, bool) and threads > 0
    if threads is not None and not is_count:
        raise CuflashError(f"warmup: threads is {threads!r}\n  Give a whole number from 1, or None.")
    if progress is not None and not callable(progress):
        raise CuflashError(f"warmup: progress is {progress!r}\n  Give a function of (done, total).")
    plans = [_plan(one, target) for one in specs]
    build.compile_all(plan_.jobs(plans), threads, progress)
    for plan in plans:
        if plan.device.index is not None or plan.device.kind == "emulated":
            for launch in plan.launches:
                backends.of(plan.device).load(launch)
    return plans


def _plan(one: Any, device: devices.Device) -> Plan:
    if isinstance(one, Plan):
        return one
    if isinstance(one, Problem):
        return plan_.make(one, device)
    if isinstance(one, tuple | list) and len(one) == 3:
        return explain(*one, device=device)
    if isinstance(one, dict):
        missing = [name for name in ("q", "k", "v") if name not in one]
        if missing:
            raise CuflashError(f"warmup: a call lacks {', '.join(missing)}\n  Give {_signature()}.")
        return explain(**{"device": device, **one})
    what = repr(one) if isinstance(one, str | int | float) else f"an object of type {type(one).__name__}"
    raise CuflashError(f"warmup: {what} is no call\n  Give {_signature()}, or (q, k, v).")


def _signature() -> str:
    return "a dict of explain's arguments: q, k, v and options"
