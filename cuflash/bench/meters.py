"""How much memory a call takes above what it is given and what it returns; giving memory back."""

from __future__ import annotations

import contextlib
import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any


def peak_bytes(family: str, call: Callable[[], Any], result_bytes: Callable[[], int]) -> int | None:
    """Peak bytes during a call minus its results; None where the library does not tell.

    family: "cupy", "numpy" or "torch", the allocator that counts.  result_bytes(): of what the call left.
    """
    meter = {"cupy": _cupy_peak, "numpy": _numpy_peak, "torch": _torch_peak}.get(family)
    if meter is None:
        return None
    return max(0, meter(call) - result_bytes())


def _numpy_peak(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _torch_peak(call: Callable[[], Any]) -> int:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cupy_peak(call: Callable[[], Any]) -> int:
    """By a hook on CuPy's pool: bytes handed out and not given back, at their most."""
    import cupy

    class Hook(cupy.cuda.MemoryHook):
        name = "cuflash bench"

        def __init__(self) -> None:
            self.live: dict[int, int] = {}
            self.peak = 0

        def malloc_postprocess(self, **what: Any) -> None:
            self.live[what["mem_ptr"]] = what["mem_size"]
            self.peak = max(self.peak, sum(self.live.values()))

        def free_postprocess(self, **what: Any) -> None:
            self.live.pop(what["mem_ptr"], None)

    hook = Hook()
    with hook:
        call()
        cupy.cuda.runtime.deviceSynchronize()
    return hook.peak


def free_bytes() -> int | None:
    """Bytes free on the current GPU; None without one."""
    with contextlib.suppress(Exception):  # no CuPy, no driver, no GPU: each raises its own class
        import cupy

        return cupy.cuda.runtime.memGetInfo()[0]
    return None


def release() -> bool:
    """Give back what CuPy's and PyTorch's pools keep; False when the GPU cannot be used any more."""
    gc.collect()
    try:
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            sys.modules["torch"].cuda.empty_cache()
        if "cupy" in sys.modules:
            sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
            sys.modules["cupy"].cuda.runtime.deviceSynchronize()
    except Exception:  # each library has its own class for a broken context
        return False
    return True
