"""Problem and device -> Plan: which kernel runs, with what tile, grid and memory, and why not another.

rows.py holds the tables; the first starred row that accepts wins, a named row runs or says why not.  Nothing
here touches a GPU or compiles: a Plan for a GPU that is not there is as good as any.
"""

from __future__ import annotations

import difflib
import functools
import logging
from dataclasses import dataclass, replace
from typing import Any

from cuflash import args, build, cost, devices, rows
from cuflash.copies import Copy, copies_of
from cuflash.devices import Device
from cuflash.errors import CuflashError
from cuflash.problem import FLOAT_DTYPES, Problem
from cuflash.row import Params, Refusal, Row, Slot, Step, Tile, dbias_case, number, round_up

log = logging.getLogger("cuflash")
ALIGNMENT = 256  # of every slot in the workspace
MAX_GRID = (2**31 - 1, 65535, 65535)
DTYPE_CODES = {name: code for code, name in enumerate(FLOAT_DTYPES)}
NUMPY = Row("tiled", True, 0, (), (), "the tiled algorithm in NumPy: cuflash/tiled.py")
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Launch:
    """One kernel launch.  params: all parameters of its build.  grid and block as CUDA takes them.

    overlaps: it may start before the launch before it has ended.
    """

    step: Step
    params: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    arch: int
    exact_arch: bool
    overlaps: bool = False

    @property
    def name(self) -> str:
        """Entry point."""
        return self.step.entry

    @functools.cached_property
    def args_bytes(self) -> int:
        """sizeof its one argument."""
        return dict(self.params)["ARGS_BYTES"]

    @property
    def job(self) -> build.Job:
        """What build.py compiles for a GPU."""
        return build.Job(self.step.file, self.params, build.target_of(self.arch, self.exact_arch))


@dataclass(frozen=True, eq=False)
class Plan:
    """How a call runs.  Prints itself; str, _repr_html_.

    | field | meaning |
    |---|---|
    | row, tile | the kernel and its tile; tile is None for the NumPy path |
    | launches | kernels in the order they run |
    | slots | arrays of the workspace: the row's own (Args.workspace), copies, lengths that live on the host |
    | copies | operands copied because the kernel cannot address them |
    | refused | name of every other row -> the sentence why it does not run |
    | named | whether the caller named the row |
    """

    problem: Problem
    device: Device
    row: Row
    tile: Tile | None
    launches: tuple[Launch, ...]
    slots: tuple[Slot, ...]
    n_row_slots: int
    copies: tuple[Copy, ...]
    refused: dict[str, str]
    named: bool

    @property
    def kernel(self) -> str:
        """Name of the row."""
        return self.row.name

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: all but what is bound to this process."""
        return {name: value for name, value in vars(self).items() if name not in ("calls", "resources")}

    @functools.cached_property
    def calls(self) -> dict[Any, Any]:
        """Prepared calls of launch.py, by what they depend on besides the problem."""
        return {}

    @functools.cached_property
    def main(self) -> Launch | None:
        """The row's own kernel among the launches; None when there is nothing to launch."""
        own = [launch for launch in self.launches if launch.step.file == self.row.name]
        return own[0] if own else None

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of the row's own kernel; (0, 0, 0) when there is nothing to launch."""
        return self.main.grid if self.main else (0, 0, 0)

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block of the row's own kernel."""
        return self.main.block if self.main else (0, 0, 0)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block of the row's own kernel."""
        return self.main.smem_bytes if self.main else 0

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each slot starts in the workspace, in bytes."""
        starts, end = [], 0
        for slot in self.slots:
            starts.append(end)
            end += round_up(slot.n_bytes, ALIGNMENT)
        return tuple(starts)

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """How much workspace= needs; 0: none."""
        return sum(round_up(slot.n_bytes, ALIGNMENT) for slot in self.slots)

    @functools.cached_property
    def flops(self) -> int:
        """Of the products, over the pairs that causal and window leave."""
        return cost.flops(self.problem)

    @functools.cached_property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Array -> (bytes read, bytes written) of global memory by the kernels, exact; {} when not known."""
        if self.row.bytes is None or self.main is None:
            return {}
        return self.row.bytes(self.problem, dict(self.main.params))

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of global memory: what the kernels ask for when that is known, else every array once."""
        return sum(read + written for read, written in self.traffic.values()) or cost.least_bytes(
            self.problem
        )

    @functools.cached_property
    def resources(self) -> dict[str, build.Resources]:
        """Entry point -> registers, spills, stack.  Compiles on first access (NVRTC; no GPU needed)."""
        if self.device.kind != "cuda":
            return {}
        builds = build.compile_all([launch.job for launch in self.launches])
        found = {}
        for launch, built in zip(self.launches, builds, strict=True):
            if launch.name in built.entries:
                found[launch.name] = built.entries[launch.name]
        return found

    @property
    def registers(self) -> int | None:
        """Per thread of the row's own kernel; compiles on first access.  None where nothing is compiled."""
        found = self.main and self.resources.get(self.main.name)
        return found.registers if found else None

    @property
    def spills(self) -> int | None:
        """Bytes of spill stores and loads per thread of the row's own kernel; compiles on first access."""
        found = self.main and self.resources.get(self.main.name)
        return found.spill_stores + found.spill_loads if found else None

    @property
    def blocks_per_sm(self) -> int | None:
        """How many blocks of the row's own kernel one SM holds at once; compiles on first access."""
        if self.main is None or self.registers is None:
            return None
        return occupancy(self.device, self.main.block[0], self.registers, self.main.smem_bytes)

    def __str__(self) -> str:
        from cuflash import plan_text

        return plan_text.text(self)

    def _repr_html_(self) -> str:
        from cuflash import plan_text

        return plan_text.html(self)


@functools.lru_cache(maxsize=4096)
def make(problem: Problem, device: Device | None = None, kernel: str | None = None) -> Plan:
    """The plan of a problem on a device; kernel names a row, None chooses.

    Raises CuflashError when the row is unknown or refuses.
    """
    device = devices.find(device)
    if device.kind == "host" and kernel is None:
        why = "runs on a GPU; by name, on NumPy arrays, in the emulator"
        plan = Plan(
            problem, device, NUMPY, None, (), (), 0, (), {row.name: why for row in table(problem)}, False
        )
    else:
        device = devices.EMULATED if device.kind == "host" else device
        plan = _named(problem, device, kernel) if kernel is not None else _chosen(problem, device)
    log.debug("plan: %s for %s on %s", plan.kernel, problem.direction, device.label)
    return plan


def table(problem: Problem) -> tuple[Row, ...]:
    """The rows of the problem's direction, best first."""
    return rows.FORWARD if problem.direction == "forward" else rows.BACKWARD


def _chosen(problem: Problem, device: Device) -> Plan:
    refused: dict[str, str] = {}
    winner: Plan | None = None
    blame: tuple[Row, Refusal] | None = None
    for row in table(problem):
        found = consider(problem, device, row)
        if not isinstance(found, Plan):
            refused[row.name] = found
            is_reason = found.argument != "device" and problem.dtype not in ("float32", "float64")
            if winner is None and row.starred and is_reason and blame is None:
                blame = row, found
        elif not row.starred:
            refused[row.name] = "accepts, and runs by name only"
        elif winner is not None:
            refused[row.name] = f"accepts, and comes after {winner.kernel}"
        elif row.yields is not None and (why := row.yields(problem)) is not None:
            refused[row.name] = why
        else:
            winner = found
    if winner is None:
        raise CuflashError("no kernel takes this problem\n" + _sentences(refused))
    if blame is not None:
        _warn_once(blame[0].name, blame[1], winner.kernel)
    winner.refused.update(refused)
    return winner


def _named(problem: Problem, device: Device, kernel: str) -> Plan:
    known = {row.name: row for row in table(problem)}
    if kernel not in known:
        other = rows.BACKWARD if problem.direction == "forward" else rows.FORWARD
        close = difflib.get_close_matches(kernel, known, n=1)
        hint = f"  Did you mean {close[0]}?\n" if close else ""
        if kernel in {row.name for row in other}:
            hint = f"  It is a row of the other direction; this call is a {problem.direction}.\n"
        raise CuflashError(
            f"no {problem.direction} kernel is called {kernel!r}\n{hint}  Known: {', '.join(known)}."
        )
    found = {name: consider(problem, device, row) for name, row in known.items()}
    plan = found.pop(kernel)
    if not isinstance(plan, Plan):
        accepting = ", ".join(name for name, other in found.items() if isinstance(other, Plan)) or "none"
        raise CuflashError(f"{kernel} {plan}\n  Rows that would accept: {accepting}.")
    for name, other in found.items():
        plan.refused[name] = "accepts, but another row was named" if isinstance(other, Plan) else other
    return replace(plan, named=True)


def _sentences(refused: dict[str, str]) -> str:
    return "\n".join(f"  {name:<20}{why}" for name, why in refused.items())


def _warn_once(row: str, reason: Refusal, instead: str) -> None:
    if (row, str(reason)) not in _warned:
        _warned.add((row, str(reason)))
        log.warning("%s runs instead of %s, which %s (%s)", instead, row, reason, reason.argument)


def consider(problem: Problem, device: Device, row: Row) -> Plan | Refusal:
    """The plan of one row, or the sentence why it refuses."""
    why = row.refuses(problem, device)
    if why is not None:
        return why
    copies = copies_of(problem, device, row)
    if isinstance(copies, Refusal):
        return copies
    found = row.tile_of(problem, params_of, device.shared_bytes)
    if found is None:
        return Refusal(
            f"has no tile for head_dim {problem.head_dim}, head_dim_v {problem.head_dim_v}", "head_dim"
        )
    tile, params = found
    sizes: dict[str, set[int]] = {}
    for step in row.steps:
        if step.when(problem):
            sizes.setdefault(step.file, set()).add(step.smem(params | dict(step.fixed)))
    launches = []
    for step in row.steps:
        if not step.when(problem):
            continue
        grid = step.grid(problem, params | dict(step.fixed))
        if step.resident is not None and step.resident(params):
            # Emulated blocks run one after another: none may wait for the turn of one that comes later.
            waits = device.kind != "cuda" and (problem.deterministic or params.get("IN_TURN"))
            width = int(step.resident(params))
            grid = (grid[0] if waits else min(grid[0], device.n_sms // width * width)), *grid[1:]
        if 0 in grid:
            continue
        if any(n > most for n, most in zip(grid, MAX_GRID, strict=True)):
            return Refusal(f"would need {grid} blocks, CUDA takes {MAX_GRID}", "shape")
        one = _launch(row, step, params, grid, device, sizes[step.file])
        may_overlap = step.overlaps and bool(launches) and device.kind == "cuda" and device.arch >= 90
        launches.append(replace(one, overlaps=may_overlap))
    own = row.workspace(problem, params)
    slots = (*own, *(copy.slot for copy in copies), *_length_slots(problem))
    return Plan(problem, device, row, tile, tuple(launches), slots, len(own), copies, {}, False)


def _launch(
    row: Row, step: Step, params: Params, grid: tuple[int, int, int], device: Device, sizes: set[int]
) -> Launch:
    """sizes: shared bytes of the steps in this step's file; different ones are not asserted there (-1)."""
    params = params | dict(step.fixed)
    mine = {name: value for name, value in params.items() if step.uses is None or name in step.uses}
    unused = {name: -1 if name == "BIAS_DTYPE" else 0 for name in params if name not in mine}
    mine |= unused
    args_bytes = args.mapped_args_bytes() if step.maps else args.args_bytes()
    mine |= {"SMEM_BYTES": max(sizes) if len(sizes) == 1 else -1, "ARGS_BYTES": args_bytes}
    threads = 32 * params["N_WARPS"] if step.threads is None else number(step.threads, params)
    block = (threads, 1, 1)
    smem_bytes = step.smem(params)
    return Launch(step, tuple(sorted(mine.items())), grid, block, smem_bytes, device.arch, row.exact_arch)


def params_of(problem: Problem, row: Row, tile: Tile) -> Params:
    """Every parameter of kernels/lib/params.cuh but the sizes that are checked (SMEM_BYTES, ARGS_BYTES)."""
    out, dout = problem.spec("out"), problem.spec("dout")
    is_forward = problem.direction == "forward"
    code = DTYPE_CODES
    params = {
        "DTYPE": code[problem.dtype],
        "OUT_DTYPE": code[problem.out_dtype],
        "O_DTYPE": code[problem.out_dtype if is_forward or out is None else out.dtype],
        "DOUT_DTYPE": code[problem.dtype if dout is None else dout.dtype],
        "HEAD_DIM": tile.head_dim(problem.head_dim),
        "HEAD_DIM_V": tile.head_dim_v(problem.head_dim_v),
        "TILE_Q": tile.tile_q,
        "TILE_KV": tile.tile_kv,
        "N_WARPS": tile.warps,
        "N_STAGES": tile.stages,
        "CAUSAL": int(problem.causal),
        "WINDOW": int(problem.window != (None, None)),
        "LENGTHS_Q": int(problem.has_query_lengths),
        "LENGTHS_K": int(problem.has_key_lengths),
        "PACKED": int(problem.packed),
        "SOFTCAP": int(problem.softcap is not None),
        "ALIBI": int(problem.has_alibi),
        "BIAS_DTYPE": -1 if problem.bias is None else code[problem.bias],
        "MASK": int(problem.has_mask),
        "BLOCK_MASK": int(problem.block_mask is not None),
        "BLOCK_Q": problem.block_mask[0] if problem.block_mask else 1,
        "BLOCK_KV": problem.block_mask[1] if problem.block_mask else 1,
        "SINK": int(problem.has_sink),
        "DROPOUT": int(problem.dropout is not None),
        "DLSE": int(problem.has_dlse),
        "DBIAS": dbias_case(problem),
        "DSINK": int("dsink" in problem.gradients),
        "DALIBI": int("dalibi_slopes" in problem.gradients),
        "DETERMINISTIC": int(problem.deterministic),
        "SPLIT": 0,
        "PRECISION": 1 if problem.precision == "tf32" else 0,
    }
    params |= dict(row.options) | dict(tile.options)
    if row.splits is not None:
        params["SPLIT"] = row.splits(problem, params)
    if row.more is not None:
        params |= row.more(problem, params)
    return params


def _length_slots(problem: Problem) -> tuple[Slot, ...]:
    """Room for lengths that the caller gives on the host."""
    slots = []
    if problem.has_query_lengths:
        slots.append(Slot("query_lengths", "int64", (problem.batch,)))
    if problem.has_key_lengths:
        slots.append(Slot("key_lengths", "int64", (problem.batch,)))
    if problem.packed:
        slots += [Slot(name, "int64", (problem.batch + 1,)) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    return tuple(slots)


def occupancy(device: Device, threads: int, registers: int, smem_bytes: int) -> int:
    """Blocks of one kernel that an SM holds at once: the least of four limits.

    Registers are given out 256 at a time to each warp, shared memory 128 bytes at a time; a block also takes
    1 KiB of shared memory for the system (sm_80 and later).
    """
    warps = -(-threads // 32)
    by_registers = 65536 // (round_up(registers * 32, 256) * warps) if registers else device.blocks_per_sm
    taken = round_up(smem_bytes + (1024 if device.arch >= 80 else 0), 128)
    by_shared = device.shared_bytes_per_sm // taken if taken else device.blocks_per_sm
    return min(by_registers, by_shared, device.threads_per_sm // (32 * warps), device.blocks_per_sm)


def jobs(plans: list[Plan]) -> list[build.Job]:
    """Every build that these plans need, once."""
    found: dict[Any, None] = {}
    for plan in plans:
        if plan.device.kind == "cuda":
            found.update(dict.fromkeys(launch.job for launch in plan.launches))
    return list(found)
