"""The rules of conftest.py: GPU tests without a GPU, long runs, the cache folder; each in its own pytest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

TESTS = """
import os
import pytest
from hypothesis import settings

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(3))
def test_on_a_gpu(n):
    import cupy
    assert cupy.arange(n).sum() >= 0

def test_anywhere():
    assert os.path.isdir(os.environ["CUFLASH_CACHE_DIR"])
    print("cache:", os.environ["CUFLASH_CACHE_DIR"])
    print("examples:", settings().max_examples)

@pytest.mark.full
def test_long():
    print("examples:", settings().max_examples)
"""


@pytest.fixture
def run(tmp_path):
    """run(*arguments, **environment) -> (exit code, output) of pytest on TESTS, where no GPU is visible."""
    shutil.copy(HERE / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: .\n  full: .\n")

    def start(*arguments, **environment):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "CUFLASH_"))}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-s", *arguments],
            cwd=tmp_path,
            env={**clean, "CUDA_VISIBLE_DEVICES": "", **environment},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout

    return start


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_gpu_tests_are_skipped_and_counted_in_the_last_line(run, workers):
    code, out = run(*workers)
    assert code == 0
    assert "1 passed, 1 deselected, 3 skipped for want of a GPU" in out.splitlines()[-1] or (
        workers and "1 passed, 3 skipped for want of a GPU" in out.splitlines()[-1]
    )


def test_a_missing_gpu_can_be_a_failure(run):
    code, out = run(CUFLASH_REQUIRE_GPU="1")
    assert code == 1
    assert "3 error" in out.splitlines()[-1] or "3 failed" in out.splitlines()[-1]
    assert "needs a CUDA device, and CUFLASH_REQUIRE_GPU=1" in out


def test_long_runs_only_when_asked_for(run):
    code, out = run()
    assert code == 0 and "examples: 50\n" in out and "examples: 1000\n" not in out
    code, out = run("-m", "full")
    assert code == 0 and "examples: 1000\n" in out and "1 passed" in out.splitlines()[-1]


def test_the_cache_folder_lives_as_long_as_the_run(run, tmp_path):
    _, out = run()
    folder = next(line for line in out.splitlines() if "cache: " in line).split("cache: ")[1]
    assert "cuflash-tests-" in folder and not Path(folder).exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    _, out = run(CUFLASH_CACHE_DIR=str(mine))
    assert f"cache: {mine}" in out and mine.exists()
