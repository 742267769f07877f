"""driver.py without a GPU: what is asked of the CUDA driver, and what is said where there is none."""

import ctypes

import numpy as np
import pytest

from cuflash import CuflashError, driver, tensormap


@pytest.fixture(autouse=True)
def nothing_remembered():
    driver.function.cache_clear()
    yield
    driver.function.cache_clear()


@pytest.mark.parametrize("library", [None, object()], ids=["missing", "too old"])
def test_a_driver_that_cannot_is_named(monkeypatch, library):
    def load(name):
        assert name == "libcuda.so.1"
        if library is None:
            raise OSError("not here")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(CuflashError, match="the CUDA driver has no cuLaunchKernelEx"):
        driver.function("cuLaunchKernelEx")


def test_a_tensor_map_is_what_the_driver_wrote(monkeypatch):
    asked = []

    class Library:
        @staticmethod
        def cuTensorMapEncodeTiled(place, dtype, rank, address, *_):
            asked.append((dtype.value, rank.value, address.value))
            ctypes.memset(place, 7, tensormap.BYTES)
            return 0 if address.value < 4096 else 1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library)
    layout = tensormap.Layout("float16", (64, 128, 4, 1), (512, 128, 65536), (64, 64, 1, 1), 128)
    for _ in range(2):
        assert layout.encode(1024) == bytes(np.full(tensormap.BYTES, 7, np.uint8))
    assert asked == [(6, 4, 1024)], "an address is asked for once"
    with pytest.raises(CuflashError, match="cuTensorMapEncodeTiled returned 1"):
        layout.encode(8192)
