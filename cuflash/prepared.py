"""A plan bound to shapes and strides: what stays from call to call; the next one fills in addresses only."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import numpy as np

from cuflash import args, backends, maps
from cuflash import results as results_
from cuflash.arrays import address, bounds, numpy_dtype
from cuflash.errors import CuflashError
from cuflash.plan import Plan
from cuflash.problem import Operands, Problem

log = logging.getLogger("cuflash")
_UNREAD_BYTES = 1 << 20  # an lse of up to so many bytes needs no array of its own where nobody reads it
_MAX_LSE_ITEMSIZE = 8
_unread_of: dict[int, Any] = {}  # by the GPU's number
_unread_lock = threading.Lock()

# The arrays of a call in the order that key, cached and prepared calls take them.
_OPTIONS = (
    "bias", "mask", "alibi_slopes", "sink",
    "query_lengths", "key_lengths", "cu_seqlens_q", "cu_seqlens_k", "workspace", "seed",
)  # fmt: skip
_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink", "dalibi_slopes")
ORDER = {
    "forward": ("q", "k", "v", "out", "lse", *_OPTIONS),
    "backward": ("dout", "q", "k", "v", "out", "lse", "dlse", *_OPTIONS, *_GRADIENTS),
}
_FIELDS = {name: f"{field}.data" for field, name in args.OPERANDS.items()} | {"seed": "seed_pointer"}
_SEED_WORD = args.offset_of("seed") // 8


def outputs_of(problem: Problem) -> tuple[str, ...]:
    """Names of the results, in the order of the public functions."""
    return ("out", "lse") if problem.direction == "forward" else problem.gradients


class Prepared:
    """A plan bound to shapes and strides: everything of a call but the addresses.  Thread-safe.

    call(arrays, seed), arrays as launch.key takes them -> {name: result in the caller's axis order}.
    """

    def __init__(self, plan: Plan, operands: Operands) -> None:
        self.plan = plan
        self.backend = backends.of(plan.device)
        self._is_emulated = plan.device.kind == "emulated"
        self._lock = threading.RLock()  # progress may call attention again
        self._loaded = [self.backend.load(launch) for launch in plan.launches]
        self._names = outputs_of(plan.problem)
        self.order = ORDER[plan.problem.direction]
        arrays = arrays_of(operands, self.order)
        there = {name for name, array in zip(self.order, arrays, strict=True) if array is not None}
        self.given = there.intersection(self._names)
        self._workspace_at = self.order.index("workspace")
        self._written = bool(self.given) or operands.workspace is not None
        hosted = host_lengths(operands)
        extents = [
            _extent(None if name in hosted else array) for name, array in zip(self.order, arrays, strict=True)
        ]
        self._spans = [(at, low, high) for at, (low, high) in enumerate(extents) if low < high]
        self._alone = {self._workspace_at, *(self.order.index(name) for name in self.given)}
        made = {name: _new_result(plan.problem, name) for name in self._names if name not in there}
        record = self._template(operands, made)
        self._args = backends.ArgsBuffer(bytearray(record.tobytes().ljust(maps.bytes_of(plan), b"\0")))
        self._places: dict[str, maps.Place] = {}  # by field of Args
        elsewhere = {*hosted, *(copy.name for copy in plan.copies)}  # kernels read them in the workspace
        self._inputs = [
            (position, self._place(_FIELDS[name]))
            for position, name in enumerate(self.order)
            if name in there and name in _FIELDS and name not in elsewhere
        ]
        self._new = [(name, self._place(_FIELDS[name]), *made[name]) for name in made]
        self._lse_place = self._place(_FIELDS["lse"])
        self._unread = self._address_of_unread()
        self._read = self._new if self._unread is None else [one for one in self._new if one[0] != "lse"]
        self._is_short = self._no_more_than_addresses()
        offset_of = {slot.name: offset for slot, offset in zip(plan.slots, plan.offsets, strict=True)}
        self._slots_at = self._places_of_slots()
        self._slots_at += [(self._place(_FIELDS[name]), offset_of[name]) for name in hosted]
        self._lengths = [(self.order.index(name), offset_of[name], *_limits(plan, name)) for name in hosted]
        self._zeroed = [
            (offset, slot.n_bytes)
            for offset, slot in zip(plan.offsets, plan.slots, strict=True)
            if slot.zero and slot.n_bytes
        ]
        maps.attach(plan, record, self._args, self._place)
        self.looks = self._written or bool(self._lengths)  # at what arrays hold, before every call
        self._blocks = self._set_blocks(operands)
        self._line = _line(plan)

    def run(
        self, arrays: Any, seed: int = 0, operands: Operands | None = None, lse: bool = True
    ) -> dict[str, Any]:
        """operands: the canonical views, where copies may be needed; None on the fast way.

        lse=False: nobody reads a new lse, and it may be left out of the results.
        """
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", self._line)
        if self.backend.is_current():
            return self._run(arrays, seed, operands, lse)
        with self.backend.device:
            return self._run(arrays, seed, operands, lse)

    __call__ = run

    def results_of(self, qkv: tuple[Any, Any, Any], lse: bool) -> Any:
        """out, or (out, lse), of run(qkv) by the shortest way: a small call takes what its host takes."""
        backend = self.backend
        if not self._is_short or not backend.is_current() or log.isEnabledFor(logging.DEBUG):
            found = self.run(qkv, 0, None, lse)
            return (found["out"], found["lse"]) if lse else found["out"]
        q, k, v = qkv
        (_, at_q), (_, at_k), (_, at_v) = self._inputs
        (_, at_out, shape, dtype), (_, at_lse, lse_shape, lse_dtype) = self._new
        results = out = backend.empty(shape, dtype)
        lse_address = self._unread
        if lse:
            results = out, (made := backend.empty(lse_shape, lse_dtype))
            lse_address = made.data.ptr
        with self._lock:
            if (address := q.data.ptr) != at_q.address:
                at_q.move(address)
            if (address := k.data.ptr) != at_k.address:
                at_k.move(address)
            if (address := v.data.ptr) != at_v.address:
                at_v.move(address)
            if (address := out.data.ptr) != at_out.address:
                at_out.move(address)
            if lse_address != at_lse.address:
                at_lse.move(lse_address)
            backend.launch_all(self._loaded, self._args)
        return results

    def _no_more_than_addresses(self) -> bool:
        """Whether a call of q, k, v alone has but their addresses and those of out and lse to fill in."""
        plan = self.plan
        more = plan.slots or plan.problem.dropout is not None or len(self._inputs) > 3
        return self._unread is not None and not more and len(self._new) == 2

    def overlaps(self, arrays: Any) -> bool:
        """Whether a result or the workspace shares memory with another array, by the bounds of addresses."""
        if not self._written:
            return False
        spans = [(at, arrays[at].data.ptr + low, arrays[at].data.ptr + high) for at, low, high in self._spans]
        for mine, low, high in spans:
            if mine in self._alone:
                for other, other_low, other_high in spans:
                    if other != mine and low < other_high and other_low < high:
                        return True
        return False

    def fit(self, arrays: Any) -> bool:
        """Whether check.py would let lengths on the host pass."""
        for position, _, limit, cumulative in self._lengths:
            values = arrays[position]
            if cumulative:
                fits = values[0] == 0 and values[-1] <= limit and bool((values[1:] >= values[:-1]).all())
            else:
                fits = not values.size or (values.min() >= 0 and values.max() <= limit)
            if not fits:
                return False
        return True

    def _run(self, arrays: Any, seed: int, operands: Operands | None, lse: bool) -> dict[str, Any]:
        backend, pointer = self.backend, self.backend.pointer
        new = self._new if lse else self._read
        results = {name: backend.empty(shape, dtype) for name, _, shape, dtype in new}
        if self.given:
            results |= {name: arrays[self.order.index(name)] for name in self.given}
        if not self._loaded:
            return self._fill_empty(results)
        slots: list[Any] = []
        with self._lock:
            # an address that has stayed is not written again, nor is its map
            for position, place in self._inputs:
                if (address := pointer(arrays[position])) != place.address:
                    place.move(address)
            for name, place, _, _ in new:
                if (address := pointer(results[name])) != place.address:
                    place.move(address)
            if new is not self._new and self._lse_place.address != self._unread:
                self._lse_place.move(self._unread)
            self._args.words[_SEED_WORD] = seed
            if self.plan.slots:
                slots = self._fill_slots(arrays, operands)
            if self._is_emulated:
                buffers = self._buffers(arrays, results, slots)
                backend.launch_all(self._loaded, self._args, buffers, operands and operands.progress)
            else:
                backend.launch_all(self._loaded, self._args)
        if operands is not None:
            for number, copy in enumerate(self.plan.copies, self.plan.n_row_slots):
                if copy.back:
                    backend.copy(slots[number][..., : copy.dim], args.operand(operands, copy.name))
        return results

    def _fill_slots(self, arrays: Any, operands: Operands | None) -> list[Any]:
        """Give the slots their places in a workspace, and what has to lie there before a kernel starts.

        The workspace as arrays where operands are there; else what keeps it alive until kernels are launched.
        """
        backend = self.backend
        given = arrays[self._workspace_at] if len(arrays) > self._workspace_at else None
        if given is None and operands is None:
            workspace = backend.scratch(self.plan.workspace_bytes)
            start = workspace.ptr
        else:
            workspace = self._workspace(given)
            start = backend.pointer(workspace)
        for place, offset in self._slots_at:
            if place.address != start + offset:
                place.move(start + offset)
        for offset, n_bytes in self._zeroed:
            backend.zero(start + offset, n_bytes)
        for position, offset, _, _ in self._lengths:
            backend.copy_lengths(arrays[position], start + offset)
        if operands is None:
            return [workspace]
        slots = self._slots(workspace)
        self._stage(operands, slots)
        return slots

    def _place(self, path: str) -> maps.Place:
        """Where the address of a field of Args stands."""
        if path not in self._places:
            self._places[path] = maps.Place(self._args, args.offset_of(path) // 8)
        return self._places[path]

    def _address_of_unread(self) -> int | None:
        """Where a kernel may write an lse that nobody reads, at any time, any number of calls at once.

        An array less to allocate is a tenth of the host's time of a small call.  None: lse is no new array,
        does not fit, or a later kernel of the call might read it.
        """
        lse = [shape for name, _, shape, _ in self._new if name == "lse"]
        if self.plan.problem.direction != "forward" or self.plan.device.kind != "cuda" or not lse:
            return None
        if len(self.plan.launches) != 1 or math.prod(lse[0]) * _MAX_LSE_ITEMSIZE > _UNREAD_BYTES:
            return None
        with self.backend.device:
            return self.backend.pointer(_unread(self.backend))

    def _fill_empty(self, results: dict[str, Any]) -> dict[str, Any]:
        """Nothing to launch: what results hold then (no query rows, no batch or no heads)."""
        for name, array in results.items():
            array[...] = -np.inf if name == "lse" else 0
        return results

    def _workspace(self, given: Any) -> Any:
        """plan.workspace_bytes of uint8: the caller's, or new."""
        wanted, backend = self.plan.workspace_bytes, self.backend
        if given is None:
            return backend.empty((wanted,), np.dtype(np.uint8))
        if given.nbytes < wanted:
            raise CuflashError(
                f"workspace has {given.nbytes} bytes, this call needs {wanted}\n"
                "  cuflash.explain(...).workspace_bytes says how many a call needs."
            )
        if backend.pointer(given) % 16:
            raise CuflashError(
                "workspace does not start on a multiple of 16 bytes\n  Give a whole allocation."
            )
        return given

    def _places_of_slots(self) -> list[tuple[maps.Place, int]]:
        """(place, offset in the workspace) of the row's slots."""
        base, found = args.offset_of("workspace") // 8, []
        most = args.args_dtype()["workspace"].shape[0]
        if self.plan.n_row_slots > most:  # a slot too many would lie on the next field
            got = f"{self.plan.kernel} has {self.plan.n_row_slots} slots in its workspace"
            raise CuflashError(f"{got}\n  Args has room for {most}.")
        for index, slot in enumerate(self.plan.slots[: self.plan.n_row_slots]):
            if slot.n_bytes:
                found.append((maps.Place(self._args, base + index), self.plan.offsets[index]))
                if slot.name in args.SLOTS:
                    found.append((self._place(f"{slot.name}.data"), self.plan.offsets[index]))
        return found

    def _slots(self, workspace: Any) -> list[Any]:
        """The workspace as arrays."""
        slots = []
        for offset, slot in zip(self.plan.offsets, self.plan.slots, strict=True):
            piece = workspace[offset : offset + slot.n_bytes]
            slots.append(piece.view(numpy_dtype(slot.dtype)).reshape(slot.shape))
        return slots

    def _template(self, operands: Operands, made: dict[str, tuple[tuple[int, ...], np.dtype]]) -> np.ndarray:
        """Args without addresses: strides of operands, copies, slots, and results still to be made."""
        plan = self.plan
        record = args.record_of(plan.problem, operands)
        for name, (shape, dtype) in made.items():
            args.fill(record, name, results_.canonical(plan.problem, name, _hollow(shape, dtype)))
        for copy in plan.copies:
            slot = _hollow(copy.slot.shape, numpy_dtype(copy.slot.dtype))
            args.fill(record, copy.name, slot[..., : copy.dim])
        for slot in plan.slots[: plan.n_row_slots]:
            if slot.name in args.SLOTS:
                args.fill(record, slot.name, _hollow(slot.shape, numpy_dtype(slot.dtype)))
        for name in host_lengths(operands):
            args.fill(record, name, np.empty(1, np.int64))
        return record

    def _set_blocks(self, operands: Operands) -> dict[str, Any]:
        """The block mask's rows, and in the backward its columns, put where kernels read them."""
        mask, found = operands.block_mask, {}
        if mask is None:
            return found
        masks = {"blocks": mask}
        if self.plan.problem.direction == "backward":
            masks["blocks_of_key"] = mask.transpose()
        for field, one in masks.items():
            indptr, indices = self.backend.blocks(one)
            batch, heads, n = indptr.shape
            word = args.offset_of(field) // 8
            steps = (0 if batch == 1 else heads * n, 0 if heads == 1 else n)
            for number, value in enumerate(
                (self.backend.pointer(indptr), self.backend.pointer(indices), *steps)
            ):
                self._args.words[word + number] = value
            found |= {f"{field}.indptr": indptr, f"{field}.indices": indices}
        return found

    def _stage(self, operands: Operands, slots: list[Any]) -> None:
        """Copy what the kernel cannot address into the workspace."""
        backend = self.backend
        for number, copy in enumerate(self.plan.copies, self.plan.n_row_slots):
            if not copy.back:
                backend.copy(args.operand(operands, copy.name), slots[number][..., : copy.dim])
            self._place(_FIELDS[copy.name]).move(backend.pointer(slots[number]))

    def _buffers(self, arrays: Any, results: dict[str, Any], slots: list[Any]) -> dict[str, Any]:
        """Every array that a kernel may touch, by name, for the emulator."""
        named = {name: array for name, array in zip(self.order, arrays, strict=True) if array is not None}
        named.pop("workspace", None)
        replaced = {copy.name for copy in self.plan.copies}
        for described, slot in zip(self.plan.slots, slots, strict=True):
            if slot.size:
                name = described.name
                named[name if name in replaced or name in args.LENGTHS else f"workspace.{name}"] = slot
        return results | named | self._blocks


def _unread(backend: Any) -> Any:
    """Memory of a GPU that kernels write and nobody reads: one for all calls, and never freed, for who knows
    which stream still writes to it."""
    with _unread_lock:
        if backend.index not in _unread_of:
            _unread_of[backend.index] = backend.empty((_UNREAD_BYTES,), np.dtype(np.uint8))
        return _unread_of[backend.index]


def _new_result(problem: Problem, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape in the caller's axis order (dbias and dalibi_slopes: canonical), and dtype."""
    shape, dtype = results_.shape_and_dtype(problem, name)
    made = _hollow(shape, numpy_dtype(dtype))
    return results_.in_layout(problem, name, made).shape, made.dtype


def arrays_of(operands: Operands, order: tuple[str, ...]) -> list[Any]:
    """Operands that kernels read by their address, None for numbers; lengths on the host as int64."""
    values, grads = operands.__dict__, operands.grads
    found = [values[name] if name in values else grads.get(name) for name in order]
    found[order.index("seed")] = operands.seed if hasattr(operands.seed, "dtype") else None
    for name in host_lengths(operands):
        found[order.index(name)] = np.ascontiguousarray(values[name], np.int64)
    return found


def host_lengths(operands: Operands) -> list[str]:
    return [name for name in args.LENGTHS if isinstance(getattr(operands, name), np.ndarray)]


def _limits(plan: Plan, name: str) -> tuple[int, bool]:
    """(the largest length that may occur, whether lengths are cumulative)."""
    limit = plan.problem.len_q if name in ("query_lengths", "cu_seqlens_q") else plan.problem.len_k
    return limit, name.startswith("cu_")


def _hollow(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Shape, C-contiguous strides and a 16-byte aligned address of an array, without its memory."""
    if 0 in shape:
        return np.empty(shape, dtype)
    strides = [dtype.itemsize]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return np.lib.stride_tricks.as_strided(np.empty(2, np.complex128).view(dtype)[:1], shape, strides)


def _extent(array: Any) -> tuple[int, int]:
    """[low, high) in bytes from the first element, wherever the strides lead."""
    if array is None or array.size == 0:
        return 0, 0
    (low, high), start = bounds(array), address(array)
    return low - start, high - start


def _line(plan: Plan) -> str:
    steps = ", ".join(f"{one.name} {one.grid[0]} x {one.block[0]}" for one in plan.launches) or "nothing"
    return f"launch: {steps} on {plan.device.label}"
