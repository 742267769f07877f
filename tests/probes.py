"""Small kernels for tests: compiled for the emulator or the GPU, called alike with NumPy arrays."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np

from cuflash import build, emulator, tensormap

HERE = Path(__file__).parent / "kernels"


@functools.cache
def folder() -> Path:
    """A folder with kernels/lib in it, where expand() finds the includes of a kernel from elsewhere."""
    path = Path(tempfile.mkdtemp(prefix="cuflash-probes-"))
    shutil.copytree(build.kernels_directory() / "lib", path / "lib")
    return path


def expand(name: str, text: str, emulated: bool) -> str:
    (folder() / f"{name}.cu").write_text(text)
    return build.expand(name, emulated=emulated, directory=folder())


@functools.cache
def emulated(name: str, text: str, entry: str, params: tuple = ()):
    return emulator.compile(expand(name, text, True), dict(params), entry).get_function(entry)


@functools.cache
def on_gpu(name: str, text: str, entry: str, params: tuple = ()):
    import cupy

    major, minor = cupy.cuda.Device().compute_capability[0], cupy.cuda.Device().compute_capability[1:]
    target = f"sm_{major}{minor}" + ("a" if major == "9" else "")
    (folder() / f"{name}.cu").write_text(text)
    job = build.Job(name, params, target)
    options = [o for o in build.options_of(job) if o != "-DCUFLASH_JIT" or params]
    image, _ = build._run_nvrtc(job, expand(name, text, False), options)
    module = cupy.cuda.function.Module()
    module.load(image)
    return module.get_function(entry)


def source(file: str) -> str:
    return (HERE / f"{file}.cu").read_text()


def probe(where, file, entry, arrays, numbers=(), *, block=32, grid=1, shared_mem=0, maps=(), text=None):
    """Run an entry of tests/kernels/<file>.cu on copies of `arrays`; returns the copies after it.

    text: another text of that file.

    maps: (index of array, tensormap.Layout keywords) of up to two tensor maps, for kernels whose Probe begins
    with `TensorMap maps[2]`.  where: "emulator" or "gpu".
    """
    text = text or source(file)
    has_maps = "TensorMap maps[2]" in text
    if where == "gpu":
        import cupy

        copies = [cupy.asarray(a.view(np.uint8)) for a in arrays]
        addresses = [c.data.ptr for c in copies]
    else:
        copies = [a.copy() for a in arrays]
        addresses = [c.ctypes.data for c in copies]
    blob = b""
    if has_maps:
        for index, keywords in maps:
            layout = tensormap.Layout(**keywords, emulated=where == "emulator")
            blob += layout.encode(addresses[index])
        blob = blob.ljust(256, b"\0")
    blob += np.array(addresses + [0] * (8 - len(addresses)), np.uint64).tobytes()
    blob += np.array([*numbers, *[0] * (8 - len(numbers))], np.int32).tobytes()
    if has_maps:
        blob = blob.ljust(384, b"\0")
    grid, block = (grid, 1, 1), (block, 1, 1)
    if where == "emulator":
        named = {name_of(i): c for i, c in enumerate(copies)}
        emulated(file, text, entry)(grid, block, (blob,), shared_mem=shared_mem, buffers=named)
        return copies
    function = on_gpu(file, text, entry)
    if shared_mem > 48 * 1024:
        cupy.cuda.driver.funcSetAttribute(function.ptr, 8, shared_mem)
    function(grid, block, (np.frombuffer(blob, np.dtype(f"V{len(blob)}"))[0],), shared_mem)
    cupy.cuda.Device().synchronize()
    return [cupy.asnumpy(c).view(a.dtype).reshape(a.shape) for c, a in zip(copies, arrays, strict=True)]


def name_of(index: int) -> str:
    return f"array {index}"


def swizzle(offsets: np.ndarray, line: int) -> np.ndarray:
    """Byte offsets in a tile -> where TMA's swizzle of `line` bytes puts them (0: none)."""
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[line]
    return offsets ^ ((offsets >> 7 & mask) << 4)
