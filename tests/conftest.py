"""What every test gets: a fresh kernel cache, Hypothesis profiles, and a rule for tests that need a GPU.

pytest                              all but the long runs; without a device GPU tests are counted as skipped
CUFLASH_REQUIRE_GPU=1 pytest        a missing device is a failure
pytest -m full                      the long runs, with the Hypothesis profile "full"
CUFLASH_CACHE_DIR=DIR pytest        keep compiled kernels between runs
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from cuflash import copies, devices, launch

NO_GPU = "needs a CUDA device"
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

# The profile for every run draws the same examples each time: what passes here passes there.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50, suppress_health_check=QUIET)
settings.register_profile("full", deadline=None, max_examples=1000, suppress_health_check=QUIET)


def wants_full(config: pytest.Config) -> bool:
    return "full" in (config.option.markexpr or "")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile", default=None):
        settings.load_profile("full" if wants_full(config) else "ci")
    if "CUFLASH_CACHE_DIR" not in os.environ:  # workers of xdist inherit the first process' folder
        config.cuflash_cache = os.environ["CUFLASH_CACHE_DIR"] = tempfile.mkdtemp(prefix="cuflash-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = getattr(config, "cuflash_cache", None)
    if folder is not None:
        os.environ.pop("CUFLASH_CACHE_DIR", None)
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long runs only when asked for."""
    if wants_full(config):
        return
    long_runs = [item for item in items if item.get_closest_marker("full")]
    if long_runs:
        config.hook.pytest_deselected(items=long_runs)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture
def copies_however_dear(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What TMA cannot address is copied, where the plan of so short a call would refuse."""
    monkeypatch.setattr(copies, "COPY_SHARE", 1e9)
    launch.forget()
    yield
    launch.forget()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and devices.gpu_count() == 0:
        if os.environ.get("CUFLASH_REQUIRE_GPU") == "1":
            pytest.fail(f"{NO_GPU}, and CUFLASH_REQUIRE_GPU=1", pytrace=False)
        pytest.skip(NO_GPU)


def pytest_report_teststatus(report: pytest.TestReport):
    """Count these by themselves, so that the last line says how many there were."""
    if report.skipped and NO_GPU in str(report.longrepr):
        return "skipped for want of a GPU", "s", "SKIPPED (no GPU)"
    return None
