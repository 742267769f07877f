"""The table feature x path of the README: what each kernel takes, asked from the plan table.

`cuflash bench --tables` writes it between <!-- features --> markers; a test checks that it is current.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cuflash import devices, plan, rows
from cuflash.arrays import spec
from cuflash.attention import explain
from cuflash.blockmask import BlockMask
from cuflash.devices import Device
from cuflash.problem import FLOAT_DTYPES, Problem
from cuflash.row import Row

_LEN, _HEADS = 256, 4


def _vectors(
    dtype: str = "float16", head_dim: int = 64, head_dim_v: int | None = None, heads_k: int = _HEADS
):
    """Specs of q, k, v."""
    shapes = (_HEADS, head_dim), (heads_k, head_dim), (heads_k, head_dim_v or head_dim)
    return {name: spec((1, _LEN, *shape), dtype) for name, shape in zip("qkv", shapes, strict=True)}


def _packed() -> dict[str, Any]:
    tokens = {name: spec(one.shape[1:], one.dtype) for name, one in _vectors().items()}
    return tokens | {f"cu_seqlens_{side}": spec((3,), "int32") for side in "qk"}


def _calls() -> dict[str, dict[str, Any]]:
    """Line of the table -> arguments of a call that needs that feature, and little else."""
    scores, head = (_HEADS, _LEN, _LEN), spec((_HEADS,), "float32")
    lengths = spec((1,), "int32")
    return {
        **{dtype: _vectors(dtype) for dtype in FLOAT_DTYPES},
        '`precision="tf32"`': _vectors("float32") | {"precision": "tf32"},
        "grouped heads": _vectors(heads_k=1),
        "head_dim 40": _vectors(head_dim=40),
        "head_dim 320": _vectors(head_dim=320),
        "head_dim_v other than head_dim": _vectors(head_dim_v=32),
        "`causal`": {"causal": True},
        "`window`": {"window": (64, None)},
        "`query_offset`": {"query_offset": 0, "causal": True},
        "`softcap`": {"softcap": 30.0},
        "`alibi_slopes`": {"alibi_slopes": head},
        "`bias`": {"bias": spec(scores, "float16")},
        "`mask`": {"mask": spec(scores, "bool")},
        "`query_lengths`, `key_lengths`": {"query_lengths": lengths, "key_lengths": lengths},
        "`cu_seqlens_q`, `cu_seqlens_k`": _packed(),
        "`block_mask`": {"block_mask": BlockMask.causal(_LEN, _LEN, 64, 64)},
        "`sink`": {"sink": head},
        "`dropout`": {"dropout": (0.1, 0)},
        "`out_dtype`": {"out_dtype": "float32"},
        "`deterministic`": {"deterministic": True},
    }


def problems(direction: str) -> dict[str, Problem]:
    """Line of the table -> a problem that needs that feature."""
    found = {}
    for name, arguments in _calls().items():
        if name == "`deterministic`" and direction == "forward":
            continue
        arguments = _vectors() | arguments
        found[name] = explain(**arguments, backward=direction == "backward", device="sm_90").problem
    if direction == "backward":
        found["gradient through lse"] = _with_dlse(found["float16"])
    return found


def _with_dlse(problem: Problem) -> Problem:
    return replace(problem, has_dlse=True, specs=(*problem.specs, ("dlse", problem.spec("lse"))))


def _device(row: Row) -> Device:
    """A GPU that the row runs on."""
    return devices.named(f"sm_{row.arch if row.exact_arch else max(row.arch, 90)}")


def table() -> str:
    """Both directions in Markdown: a line per feature, a column per path, and the sentences of refusal."""
    parts = []
    for direction, kernels in (("forward", rows.FORWARD), ("backward", rows.BACKWARD)):
        names = [f"`{row.name}`{' *' if row.starred else ''}" for row in reversed(kernels)]
        lines = [["feature", "NumPy", *names, "what a kernel says that refuses"]]
        for feature, problem in problems(direction).items():
            answers = [plan.consider(problem, _device(row), row) for row in reversed(kernels)]
            said = dict.fromkeys(str(answer) for answer in answers if not isinstance(answer, plan.Plan))
            cells = ["yes" if isinstance(answer, plan.Plan) else "-" for answer in answers]
            lines.append([feature, "yes", *cells, "; ".join(said)])
        lines.insert(1, ["---"] * len(lines[0]))
        parts.append(
            f"{direction.capitalize()}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
        )
    parts.append("\\* obeys the whole contract and is chosen by itself; the others run by name.")
    return "\n\n".join(parts)
