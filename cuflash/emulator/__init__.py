"""Every CUDA kernel of cuflash, unchanged, on a CPU.

A kernel file is compiled by the host's C++ compiler against the host bodies in kernels/lib; the threads of
a block are fibers on one OS thread, blocks spread over cores.  Accesses outside the arrays passed in,
misaligned vectors, barriers that part of a block never reaches and deadlocks raise CuflashError with kernel,
block, thread and source line.

>>> module = emulator.compile(build.expand("fwd_02_tiled", emulated=True), params, "fwd_02_tiled")
>>> kernel = module.get_function("fwd_02_tiled")
>>> with emulator.arrays({"q": q, "k": k, "v": v, "out": out, "lse": lse}):
...     kernel(grid, block, (args,), shared_mem=n_bytes)
"""

from cuflash.emulator.compiler import compile, find_compiler
from cuflash.emulator.module import Function, Module, Options, Record, arrays, empty, options, recording

__all__ = [
    "Function",
    "Module",
    "Options",
    "Record",
    "arrays",
    "compile",
    "empty",
    "find_compiler",
    "options",
    "recording",
]
