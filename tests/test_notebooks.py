"""Every notebook runs from its first cell to its last, and is committed with the outputs of such a run."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 400_000
MINUTES = 5  # a lesson that takes longer than this to run is not one


def read(path):
    return nbformat.read(path, as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_the_numbered_notebooks_are_there():
    names = [path.stem for path in NOTEBOOKS]
    assert names[:2] == ["1_online_softmax", "2_tiles_and_bytes"]
    assert [name.split("_")[0] for name in names] == [str(n + 1) for n in range(len(names))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    """Each assert in a notebook is a test; a fresh folder, so that it cannot lean on files beside it."""
    notebook = read(path)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=60 * MINUTES, kernel_name="python3", resources=resources).execute()
    plots = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(plots) >= 2
    assert [output for output in outputs(notebook) if output.get("name") == "stderr"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_as_it_ran(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    assert not any(output.output_type == "error" for output in outputs(notebook))
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_a_lesson(path):
    """A title, prose before every few lines of code, sources, and where to go next."""
    notebook = read(path)
    number = path.stem.split("_")[0]
    assert notebook.cells[0].source.startswith(f"# {number}. ")
    assert "**The one idea.**" in notebook.cells[0].source
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds.count("markdown") >= kinds.count("code") * 0.6
    assert "What to take along" in notebook.cells[-1].source and "*Sources:" in notebook.cells[-1].source
    longest = max(cell.source.count("\n") + 1 for cell in notebook.cells if cell.cell_type == "code")
    assert longest <= 45, f"a cell of {longest} lines"
