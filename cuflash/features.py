"""Two tables of the README, asked from the plan table: what each kernel takes, and which runs where.

`cuflash bench --tables` writes them between <!-- features --> and <!-- chosen --> markers; a test checks that
they are current.
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
        found[name] = _problem(direction, arguments)
    if direction == "backward":
        found["gradient through lse"] = _with_dlse(found["float16"])
    return found


def _problem(direction: str, arguments: dict[str, Any]) -> Problem:
    """Any row that takes everything will do."""
    row, backward = f"{direction[0]}wd_02_tiled", direction == "backward"
    return explain(**arguments, backward=backward, kernel=row, device="sm_90").problem


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


GPUS = {
    "7.5": "sm_75",
    "8.0": "sm_80",
    "8.6, 8.9": "sm_86",
    "9.0 (Hopper)": "sm_90",
    "10.0": "sm_100",
    "12.0": "sm_120",
}
# Column of the table -> dtypes that must agree, head_dims that must agree.
SIZES = {
    "16 bits, head_dim to 128": (("float16", "bfloat16"), (64, 128)),
    "16 bits, to 256": (("float16", "bfloat16"), (192, 256)),
    "16 bits, more": (("float16", "bfloat16"), (320,)),
    "float32, to 128": (("float32",), (64, 128)),
    "float32, to 256": (("float32",), (192, 256)),
    "float64": (("float64",), (64, 320)),
}


def first_choice(direction: str, dtype: str, head_dim: int, gpu: str) -> str:
    """The starred row that runs a square problem without options."""
    problem = _problem(direction, _vectors(dtype, head_dim))
    kernels = rows.FORWARD if direction == "forward" else rows.BACKWARD
    device = devices.named(gpu)
    return next(
        row.name
        for row in kernels
        if row.starred
        and isinstance(plan.consider(problem, device, row), plan.Plan)
        and (row.yields is None or row.yields(problem) is None)
    )


def chosen() -> str:
    """Compute capability x dtype and size: the forward and the backward kernel that run by themselves."""
    lines = [["compute capability", *SIZES], ["---"] * (1 + len(SIZES))]
    for words, gpu in GPUS.items():
        cells = []
        for dtypes, dims in SIZES.values():
            names = []
            for direction in ("forward", "backward"):
                found = [first_choice(direction, dtype, dim, gpu) for dtype in dtypes for dim in dims]
                names.append(" or ".join(f"`{name}`" for name in dict.fromkeys(found)))
            cells.append(", ".join(names))
        lines.append([words, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
