"""The README's table feature x path: current, complete, and true."""

import re
from pathlib import Path

import pytest

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
