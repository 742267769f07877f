"""The README's table feature x path: current, complete, and true."""

import re
from pathlib import Path

import pytest

import cuflash
from cuflash import features, rows
from cuflash.bench import markdown
from cuflash.row import FEATURES, wanted_features

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
# every line that a starred kernel must say yes to is of the whole contract
LINES = {"forward": 22, "backward": 24}


def test_the_readme_has_the_current_table():
    between = re.search(r"<!-- features -->\n(.*?)\n<!-- /features -->", README, re.DOTALL)
    assert between and between[1] == features.table(), "run `cuflash bench --tables`"
    assert markdown.render("features", []) == features.table()


def test_the_readme_says_what_runs_where():
    between = re.search(r"<!-- chosen -->\n(.*?)\n<!-- /chosen -->", README, re.DOTALL)
    assert between and between[1] == features.chosen(), "run `cuflash bench --tables`"
    found = {line.split(" | ")[0].strip("| "): line for line in features.chosen().splitlines()}
    assert "`fwd_10_persistent`, `bwd_06_specialize` |" in found["9.0 (Hopper)"]
    assert "`fwd_05_pipeline`, `bwd_04_pipeline` |" in found["8.0"]


@pytest.mark.parametrize(
    "dtype, head_dim", [("bfloat16", 64), ("float16", 256), ("float32", 64), ("float64", 64)]
)
def test_what_is_said_to_run_is_what_explain_says(dtype, head_dim):
    q = cuflash.spec((1, 256, 4, head_dim), dtype)
    for gpu in features.GPUS.values():
        for direction in ("forward", "backward"):
            found = cuflash.explain(q, q, q, backward=direction == "backward", device=gpu)
            assert found.kernel == features.first_choice(direction, dtype, head_dim, gpu)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_feature_that_a_row_may_refuse_has_a_line(direction):
    found = features.problems(direction)
    words = {word for problem in found.values() for word in wanted_features(problem)}
    only_backward = {"dlse", "deterministic"} if direction == "forward" else set()
    assert words == set(FEATURES) - only_backward and len(found) == LINES[direction]


def test_what_the_table_says():
    for direction, text in zip(LINES, features.table().split("\n\n")[1::2], strict=False):
        head, _, *body = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
        assert len(body) == LINES[direction]
        table = rows.FORWARD if direction == "forward" else rows.BACKWARD
        assert head[2:-1] == [f"`{row.name}`" + " *" * row.starred for row in reversed(table)]
        for feature, _, *cells, said in body:
            for name, cell in zip(head[2:-1], cells, strict=True):
                assert cell in ("yes", "-")
                assert cell == "yes" or not name.startswith(("`fwd_02", "`bwd_02")), (feature, name)
            assert ("-" in cells) == bool(said), feature
    assert "| `softcap` | yes | - |" in features.table() and "does not do softcap" in features.table()
