"""What a row of the plan table is made of: Row, Tile, Step, Slot, and the sizes they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cuflash.devices import Device
from cuflash.problem import FLOAT_DTYPES, Problem

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
CLASSES = (16, 32, 64, 96, 128, 192, 256)  # tile sizes of head_dim: others round up to the next

# Every option a row may refuse: the word in Row.features -> how a sentence names it.
FEATURES = {
    "causal": "causal",
    "window": "window",
    "query_offset": "query_offset",
    "lengths": "query_lengths and key_lengths",
    "packed": "cu_seqlens_q and cu_seqlens_k",
    "softcap": "softcap",
    "alibi": "alibi_slopes",
    "bias": "bias",
    "mask": "mask",
    "block_mask": "block_mask",
    "sink": "sink",
    "dropout": "dropout",
    "dlse": "dlse",
    "tf32": 'precision="tf32"',
    "deterministic": "deterministic=True",
    "out_dtype": "an out_dtype other than the inputs' dtype",
    "head_dim_v": "a head_dim_v other than head_dim",
}
CORE = frozenset({"tf32", "causal", "query_offset", "dlse", "deterministic", "head_dim_v", "out_dtype"})
WHOLE = frozenset(FEATURES)  # "tf32" too: it allows less exact products, it does not ask for them

Params = dict[str, int]  # name without CUFLASH_ -> value: what build.py passes as -D
Grid = tuple[int, int, int]
ParamsOf = Callable[[Problem, "Row", "Tile"], Params]


class Refusal(str):
    """Why a row does not take a problem, as a sentence.  argument: the option or property that caused it."""

    argument: str

    def __new__(cls, sentence: str, argument: str) -> Refusal:
        self = super().__new__(cls, sentence)
        self.argument = argument
        return self

    def __getnewargs__(self) -> tuple[str, str]:
        return str(self), self.argument


@dataclass(frozen=True)
class Tile:
    """One tile size of a row.  The first that takes the problem and fits the device's shared memory wins.

    up_to: the largest head_dim and head_dim_v it takes; None: any, walked in chunks of `chunk`.
    chunk_v: the widest chunk of head_dim_v, where it is not `chunk`.
    least: smaller head_dims are padded to it.
    spills: bytes of spill stores and loads a thread may have without options; the kernel's header says why.
    """

    tile_q: int
    tile_kv: int
    warps: int
    stages: int = 1
    up_to: int | None = None
    chunk: int | None = None
    chunk_v: int | None = None
    itemsizes: tuple[int, ...] = (2, 4, 8)
    least: int = 16
    spills: int = 0
    room: int = 0  # bytes of shared memory a block of the device can have, at least: what it is tuned for
    options: tuple[tuple[str, int], ...] = ()  # parameters this tile sets itself
    longest: int | None = None  # len_k it is meant for, at most
    most_queries: int | None = None  # len_q it is meant for, at most; not for packed sequences
    tf32: bool = False  # only where float32 inputs may be rounded to TF32
    whole_blocks: bool = False  # only problems with a block mask whose blocks are whole tiles
    least_tiles: int = 0  # only problems with this many query tiles
    plain: bool = False  # only problems whose scores are scaled products, hidden by position alone

    def head_dim(self, size: int) -> int:
        """What CUFLASH_HEAD_DIM becomes for a head_dim: its class, or the chunk it is walked in."""
        return self.chunk or min(c for c in CLASSES if c >= max(size, self.least))

    def head_dim_v(self, size: int) -> int:
        """What CUFLASH_HEAD_DIM_V becomes for a head_dim_v."""
        if self.chunk_v is None:
            return self.head_dim(size)
        return min(c for c in (*CLASSES, self.chunk_v) if c >= min(size, self.chunk_v))

    def takes(self, problem: Problem) -> bool:
        if self.longest is not None and problem.len_k > self.longest:
            return False
        if self.most_queries is not None and (problem.packed or problem.len_q > self.most_queries):
            return False
        if self.tf32 and problem.precision != "tf32":
            return False
        if (
            self.least_tiles
            and n_slots(problem, problem.len_q, self.tile_q) * problem.heads < self.least_tiles
        ):
            return False
        if self.whole_blocks:
            block = problem.block_mask
            if block is None or block[0] % self.tile_q or block[1] % self.tile_kv:
                return False
        modifies = problem.softcap is not None or problem.has_alibi or problem.bias is not None
        if self.plain and (modifies or problem.has_mask or problem.block_mask or problem.dropout is not None):
            return False
        widest = max(problem.head_dim, problem.head_dim_v)
        return ITEMSIZE[problem.dtype] in self.itemsizes and (self.up_to is None or widest <= self.up_to)


@dataclass(frozen=True)
class Slot:
    """One array of the workspace.  Its address is Args.workspace[index of the slot in the row's list].

    A slot named in args.SLOTS ("delta", "dQ_sum") fills that field of Args too, C-contiguous.
    zero: set to zero bytes before the first launch.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    zero: bool = False

    @property
    def n_bytes(self) -> int:
        size = {"int32": 4, "int64": 8, "uint8": 1, **ITEMSIZE}[self.dtype]
        for length in self.shape:
            size *= length
        return size


def _always(problem: Problem) -> bool:
    return True


def _no_shared(params: Params) -> int:
    return 0


def _no_slots(problem: Problem, params: Params) -> tuple[Slot, ...]:
    return ()


Number = int | str | Callable[[Params], int]  # itself, a parameter's name, or a function of the parameters


@dataclass(frozen=True)
class Map:
    """A tensor map that a kernel copies through: args.maps.<name> of kernels/lib/maps.cuh.

    name: a field of Args, of an operand ("K", "dO") or of a slot of the workspace ("dQ_sum").
    rows, cols: of the box that one instruction copies.  swizzle: bytes of a line of it in shared memory.
    when: which problems need it.

    An input that TMA cannot address is copied, or the row refuses (copies.py); a result that it cannot
    address gets no map, and the kernel stores it otherwise.
    """

    name: str
    rows: Number
    cols: Number = 64
    swizzle: Number = 128
    when: Callable[[Problem], bool] = _always

    def box(self, params: Params) -> tuple[int, int]:
        """(columns, rows)."""
        return number(self.cols, params), number(self.rows, params)


def number(wanted: Number, params: Params) -> int:
    """The value of a Number."""
    if callable(wanted):
        return wanted(params)
    return params[wanted] if isinstance(wanted, str) else wanted


@dataclass(frozen=True)
class Step:
    """One launch of a row: an entry point of kernels/<entry up to "__">.cu.

    grid(problem, params) -> (x, y, z); a step whose grid is empty is skipped.  smem(params) = sizeof(Smem).
    threads: of a block; None means 32 x the tile's warps.  (More, where some warps only fetch.)
    uses: the parameters its source depends on; the others are passed as 0, so that a shared pass is built
    once and not once per row.  None: all of them.
    resident: blocks of a cluster that stay on their SMs and walk many tiles, 0: none do.  Then there are no
    more blocks than SMs.
    maps: its kernel takes MappedArgs with these; steps of one row that map the same name share the map.
    fixed: parameters that are not the row's, such as the warps of a shared pass.
    overlaps: on sm_90 and later it may start before the step before it has ended (kernels/lib/dependent.cuh):
    its kernel waits where it needs what that one wrote.
    """

    entry: str
    grid: Callable[[Problem, Params], Grid]
    smem: Callable[[Params], int] = _no_shared
    threads: Number | None = None
    when: Callable[[Problem], bool] = _always
    uses: tuple[str, ...] | None = None
    maps: tuple[Map, ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()
    resident: Callable[[Params], int] | None = None
    overlaps: bool = False

    @property
    def file(self) -> str:
        return self.entry.split("__")[0]


def wanted_features(problem: Problem) -> list[str]:
    """Words of FEATURES that the problem uses, in the order of the signature."""
    uses = {
        "causal": problem.causal,
        "window": problem.window != (None, None),
        "query_offset": problem.query_offset is not None,
        "softcap": problem.softcap is not None,
        "alibi": problem.has_alibi,
        "bias": problem.bias is not None,
        "mask": problem.has_mask,
        "lengths": problem.has_query_lengths or problem.has_key_lengths,
        "packed": problem.packed,
        "block_mask": problem.block_mask is not None,
        "sink": problem.has_sink,
        "dropout": problem.dropout is not None,
        "tf32": problem.precision == "tf32",
        "out_dtype": problem.out_dtype != problem.dtype,
        "head_dim_v": problem.head_dim != problem.head_dim_v,
        "deterministic": problem.deterministic,
        "dlse": problem.has_dlse,
    }
    return [word for word, used in uses.items() if used]


@dataclass(frozen=True)
class Row:
    """One kernel of the ladder.

    starred: obeys the whole contract for what it covers, and is chosen automatically; others run by name.
    arch: the oldest compute capability it runs on, 10 x major + minor.  exact_arch: only that one (sm_90a).
    dtype_archs: (dtype, capability) of dtypes that need a newer one.
    features: words of FEATURES it supports.  limits: (attribute of Problem, largest value) pairs.
    teaches: the one idea, for tables and reports.
    """

    name: str
    starred: bool
    arch: int
    tiles: tuple[Tile, ...]
    steps: tuple[Step, ...]
    teaches: str
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    exact_arch: bool = False
    dtype_archs: tuple[tuple[str, int], ...] = ()
    features: frozenset[str] = WHOLE
    limits: tuple[tuple[str, int], ...] = ()
    dtype_limits: tuple[tuple[str, str, int], ...] = ()  # (dtype, attribute, largest value), where it is less
    workspace: Callable[[Problem, Params], tuple[Slot, ...]] = _no_slots
    # bytes(problem, params) -> {operand or slot name: (bytes read, bytes written)} of global memory, exact
    bytes: Callable[[Problem, Params], dict[str, tuple[int, int]]] | None = None
    # what the strides (last axis apart) and addresses of q, k, v, out, dout must be multiples of
    stride_bytes: int = 1
    flops_per_clock: int = 0  # of one SM, for rows on tensor cores; 0: the device's plain arithmetic
    options: tuple[tuple[str, int], ...] = ()  # parameters this row sets itself
    splits: Callable[[Problem, Params], int] | None = None  # SPLIT: among how many blocks keys are shared
    more: Callable[[Problem, Params], Params] | None = None  # parameters of its own
    # the sentence why another starred row is to have a problem that this one would take; None: none
    yields: Callable[[Problem], str | None] | None = None

    def tile_of(self, problem: Problem, params_of: ParamsOf, shared_bytes: int) -> tuple[Tile, Params] | None:
        """The first tile that takes the problem in this much shared memory, with its parameters."""
        for tile in self.tiles:
            if tile.takes(problem) and tile.room <= shared_bytes:
                params = params_of(problem, self, tile)
                if all(step.smem(params) <= shared_bytes for step in self.steps if step.when(problem)):
                    return tile, params
        return None

    def mapped(self, problem: Problem) -> set[str]:
        """Names of the tensor maps that its kernels take for this problem."""
        steps = [step for step in self.steps if step.when(problem)]
        return {one.name for step in steps for one in step.maps if one.when(problem)}

    def covers(self, dtype: str, head_dim: int, head_dim_v: int) -> bool:
        """Is the row made for this dtype and these sizes?  A starred row then takes every option."""
        sizes, limits = {"head_dim": head_dim, "head_dim_v": head_dim_v}, self.limits_of(dtype)
        return dtype in self.dtypes and all(sizes.get(name, 0) <= most for name, most in limits)

    def limits_of(self, dtype: str) -> tuple[tuple[str, int], ...]:
        """(attribute of Problem, largest value) pairs for inputs of this dtype."""
        return (*((name, most) for other, name, most in self.dtype_limits if other == dtype), *self.limits)

    def refuses(self, problem: Problem, device: Device) -> Refusal | None:
        """None, or the sentence why not; everything but tile sizes and strides (plan.py)."""
        arch = dict(self.dtype_archs).get(problem.dtype, self.arch)
        if device.kind == "cuda" and (device.arch != arch if self.exact_arch else device.arch < arch):
            need = f"sm_{arch}a, and no other" if self.exact_arch else f"sm_{arch}"
            what = "" if arch == self.arch else f" for {problem.dtype}"
            return Refusal(f"needs {need}{what}, this device is sm_{device.arch}", "device")
        if problem.dtype not in self.dtypes:
            return Refusal(f"takes {' and '.join(self.dtypes)}, not {problem.dtype}", "dtype")
        for word in wanted_features(problem):
            if word not in self.features:
                return Refusal(f"does not do {FEATURES[word]}", word)
        for attribute, most in self.limits_of(problem.dtype):
            if getattr(problem, attribute) > most:
                got, of = getattr(problem, attribute), f" in {problem.dtype}" if self.dtype_limits else ""
                return Refusal(f"takes {attribute} up to {most}{of}, got {got}", attribute)
        return None


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(size: int, step: int) -> int:
    return ceil_div(size, step) * step


def shared_bytes(*members: tuple[int, int, int]) -> int:
    """sizeof a struct of Shared<T, rows, cols> members, each given as (bytes of T, rows, cols).

    Shared is aligned to 16 bytes, so every member's size is rounded up to 16.

    >>> shared_bytes((2, 64, 72), (4, 1, 1))
    9232
    """
    return sum(round_up(size * rows * cols, 16) for size, rows, cols in members)


# ---- grids: one axis, so that no 65,535 limit applies.  The same numbers as kernels/lib/positions.cuh.


def n_slots(problem: Problem, rows: int, tile_rows: int) -> int:
    """Blocks per head for tiles of tile_rows out of `rows`: = n_slots of positions.cuh."""
    if problem.packed:
        return rows // tile_rows + problem.batch + 1
    return ceil_div(rows, tile_rows) * problem.batch


def query_tiles(problem: Problem, params: Params) -> Grid:
    """One block per query tile of each (sequence, head)."""
    return n_slots(problem, problem.len_q, params["TILE_Q"]) * problem.heads, 1, 1


def key_tiles(problem: Problem, params: Params) -> Grid:
    """One block per key tile of each (sequence, query head)."""
    return n_slots(problem, problem.len_k, params["TILE_KV"]) * problem.heads, 1, 1


def key_head_tiles(problem: Problem, params: Params) -> Grid:
    """One block per key tile of each (sequence, key head): it walks the query heads of its group."""
    return n_slots(problem, problem.len_k, params["TILE_KV"]) * problem.heads_k, 1, 1


def delta_rows(problem: Problem, params: Params) -> Grid:
    """pass_delta.cu: a few lanes per query row of the arrays, more of them for longer rows."""
    rows = problem.len_q * problem.heads * (1 if problem.packed else problem.batch)
    dim = params["HEAD_DIM_V"]
    lanes = 16 if dim >= 128 else 8 if dim >= 64 else 4 if dim >= 32 else 2
    return ceil_div(rows * lanes, 32 * params["N_WARPS"]), 1, 1


def dbias_case(problem: Problem) -> int:
    """CUFLASH_DBIAS, how dbias is summed: 0 none; 1 every score has its own entry; 2 queries share one;
    3 keys share one; 4 heads or sequences share one."""
    bias = problem.spec("bias")
    if bias is None or "dbias" not in problem.gradients:
        return 0
    batch, heads, rows, cols = bias.shape
    if cols == 1 and problem.len_k > 1:
        return 3
    if rows == 1 and problem.len_q > 1:
        return 2
    return 1 if (batch, heads) == (problem.batch, problem.heads) else 4
