"""Tensor maps from a row of the plan table to the kernel: maps.py, copies.py, kernels/lib/maps.cuh.

A kernel of the tests copies q to out and adds k to a slot of the workspace through maps.  It runs by the path
of every call, in the emulator and on a GPU.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cuflash import CuflashError, args, arrays, backends, build, devices, launch, maps, plan, tensormap
from cuflash.check import check
from cuflash.row import CORE, Map, Row, Slot, Step, Tile, ceil_div, shared_bytes

WHERE = ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
TILE = 16


def probe_smem(p):
    return shared_bytes((2, p["TILE_Q"], 64), (2, p["TILE_KV"], 64), (4, p["TILE_KV"], 32), (8, 1, 1))


def probe_grid(problem, p):
    return ceil_div(problem.len_q, p["TILE_Q"]) * problem.heads * problem.batch, 1, 1


def probe_slots(problem, p):
    shape = (problem.batch, problem.len_q, problem.heads, 32)
    return (Slot("dQ_sum", "float32", shape, zero=True),)


MAPS = (
    Map("Q", "TILE_Q", swizzle=0),
    Map("K", lambda p: p["TILE_KV"], swizzle=0),
    Map("O", "TILE_Q", swizzle=0),
    Map("dQ_sum", "TILE_KV", cols=32, swizzle=0),
)
ROW = Row(
    "probe_maps", False, 90, (Tile(TILE, TILE, 2, up_to=64, least=64),),
    (Step("probe_maps", probe_grid, probe_smem, maps=MAPS),),
    "maps", dtypes=("float16", "bfloat16"), features=CORE, workspace=probe_slots,
)  # fmt: skip


@pytest.fixture
def sources(tmp_path):
    shutil.copytree(build.kernels_directory() / "lib", tmp_path / "lib")
    shutil.copy(build.kernels_directory() / "pass_lengths.cu", tmp_path)
    shutil.copy(Path(__file__).parent / "kernels" / "probe_maps.cu", tmp_path)
    with build.sources_from(tmp_path):
        yield


@pytest.fixture(params=WHERE)
def device(request, sources):
    return devices.EMULATED if request.param == "emulator" else devices.gpu(0)


def laid_out(x, how):
    """x, canonical, as a view with other strides."""
    batch, rows, heads, dim = x.shape
    if how == "bhsd":
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if how == "sliced":  # rows of q, k and v side by side, as one projection leaves them
        wide = np.zeros((batch, rows, 3, heads, dim), x.dtype)
        wide[:, :, 1] = x
        return wide[:, :, 1]
    if how == "backwards":
        return np.ascontiguousarray(x[:, ::-1])[:, ::-1]
    if how == "odd":  # every address is 2 bytes off
        wide = np.zeros((batch, rows, heads, dim + 8), x.dtype)
        wide[..., 1 : dim + 1] = x
        return wide[..., 1 : dim + 1]
    return x


def inputs(shape, dtype="float16", how="plain", seed=3):
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    return {name: laid_out(rng.integers(-99, 99, shape).astype(kind), how) for name in "qkv"}


def planned(given, device, row=ROW, **options):
    problem, operands = check("forward", given, options)
    found = plan.consider(problem, device, row)
    assert isinstance(found, plan.Plan), found
    return found, operands


def on(device, array):
    """The array on the device, with the strides it has."""
    if device.kind == "emulated":
        return array
    import cupy

    low, high = np.lib.array_utils.byte_bounds(array)
    low -= low % 16  # what the address is a multiple of stays as it is
    start = arrays.address(array) - low
    memory = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (high - low)).from_address(low))
    there = cupy.asarray(memory)
    return cupy.ndarray(array.shape, array.dtype, there.data + start, strides=array.strides)


def to_host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def run(given, device, out=None, **options):
    given = {name: on(device, array) for name, array in given.items()}
    if out is not None:
        options["out"] = on(device, out)
    found, operands = planned(given, device, **options)
    backend = backends.of(device)
    with backend.device:
        operands.workspace = backend.empty((found.workspace_bytes,), np.dtype(np.uint8))
        results = launch.run(found, operands)
    sums = to_host(operands.workspace)[: found.slots[0].n_bytes].view(np.float32)
    return found, to_host(results["out"]), sums.reshape(found.slots[0].shape)


def assert_copied(given, out, sums):
    q, k = (given[name].astype(np.float32) for name in "qk")
    assert np.array_equal(out.astype(np.float32), q)
    wide = np.zeros(sums.shape, np.float32)
    wide[..., : k.shape[3]] = k[..., :32]
    assert np.array_equal(sums, wide)


# ---- values


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("how", ["plain", "bhsd", "sliced"])
@pytest.mark.parametrize("shape", [(2, 37, 3, 64), (1, 16, 1, 40), (3, 1, 2, 8)])
def test_any_stride_that_tma_can_address(device, shape, how, dtype):
    given = inputs(shape, dtype, how)
    found, out, sums = run(given, device)
    assert not found.copies
    assert_copied(given, out, sums)


def test_batches_of_one_and_heads_of_one_have_any_stride(device):
    given = inputs((1, 20, 1, 24))
    odd = np.lib.stride_tricks.as_strided(given["q"], strides=(6, 48, 2, 2))
    _, out, sums = run(given | {"q": odd}, device)
    assert_copied(given, out, sums)


def test_broadcast_axes(device):
    given = inputs((1, 20, 1, 24))
    shape = (2, 20, 3, 24)
    wide = {name: np.broadcast_to(array, shape) for name, array in given.items()}
    found, out, sums = run(wide, device)
    assert not found.copies
    assert_copied(wide, out, sums)


@pytest.mark.parametrize("how", ["odd", "backwards", "plain"])
def test_what_tma_cannot_address_is_copied(device, how, monkeypatch):
    monkeypatch.setattr("cuflash.copies.COPY_SHARE", float("inf"))
    given = inputs((2, 37, 3, 20 if how == "plain" else 24), how=how)
    found, out, sums = run(given, device)
    assert {copy.name for copy in found.copies} == {"q", "k"}
    assert_copied(given, out, sums)


@pytest.mark.parametrize("how", ["odd", "bhsd", "backwards", "plain"])
def test_results_are_stored_wherever_they_lie(device, how):
    given = inputs((2, 37, 3, 24))
    out = laid_out(np.zeros((2, 37, 3, 24), np.float16), how)
    found, written, sums = run(given, device, out=out)
    assert not found.copies
    assert_copied(given, written, sums)
    problem, operands = check("forward", given, {"out": out})
    call = launch.prepare(plan.consider(problem, devices.EMULATED, ROW), operands)
    bit = list(args.map_offsets()).index("O")
    there = call._args.words[args.map_offsets()["mapped"] // 8] >> bit & 1
    assert bool(there) == (how in ("bhsd", "plain"))


def test_new_addresses_are_seen(device):
    """A prepared call is made again with other arrays, and again with the first."""
    found, _ = planned({n: on(device, a) for n, a in inputs((2, 37, 3, 64)).items()}, device)
    many = [inputs((2, 37, 3, 64), seed=seed) for seed in range(3)]
    there = [{name: on(device, array) for name, array in given.items()} for given in many]
    for number in (0, 1, 2, 1, 0):
        _, operands = check("forward", there[number], {})
        out = launch.run(found, operands)["out"]
        assert np.array_equal(to_host(out), many[number]["q"])


def test_packed_rows_count_tokens(device):
    given = {name: array[0] for name, array in inputs((1, 37, 3, 64)).items()}
    row = replace(ROW, features=CORE | {"packed"})
    there = {name: on(device, array) for name, array in given.items()}
    problem, operands = check("forward", there, {"cu_seqlens_q": [0, 37], "cu_seqlens_k": [0, 37]})
    found = plan.consider(problem, device, row)
    assert np.array_equal(to_host(launch.run(found, operands)["out"])[0], given["q"])


# ---- what the host says


def test_copies_that_are_dear_are_refused():
    given = inputs((1, 64, 2, 20))
    problem, _ = check("forward", given, {})
    why = plan.consider(problem, devices.named("sm_90a"), ROW)
    assert why.startswith(
        "copies by TMA, and of q the stride of its head axis is 40 bytes, no multiple of 16 and of k the "
        "stride of its head axis is 40 bytes, no multiple of 16; copying q and k would cost "
    )
    assert why.argument == "q and k"


def test_copies_that_are_cheap_are_made_with_rows_of_whole_16_bytes():
    n, heads, dim = 16384, 16, 60
    arrays_of = {name: arrays.spec((1, n, heads, dim), "bfloat16") for name in "qkv"}
    problem, _ = check("forward", arrays_of, {}, specs=True)
    found = plan.consider(problem, devices.named("sm_90a"), ROW)
    assert [(copy.name, copy.slot.shape, copy.dim) for copy in found.copies] == [
        ("q", (1, n, heads, 64), 60), ("k", (1, n, heads, 64), 60),
    ]  # fmt: skip
    assert "of its head axis is 120 bytes, no multiple of 16" in str(found)
    assert "maps        Q 16 x 64, K 16 x 64, O 16 x 64, dQ_sum 16 x 32 at once" in str(found)


@pytest.mark.parametrize(
    "shape, strides, align, why",
    [
        (
            (2, 100, 3, 20),
            (6400, 64, 20, 1),
            16,
            "the stride of its head axis is 40 bytes, no multiple of 16",
        ),
        ((2, 100, 3, 64), (19200, -192, 64, 1), 16, "the stride of its row axis is negative"),
        ((2, 100, 3, 64), (19200, 192, 64, 1), 8, "its address is no multiple of 16 bytes"),
        ((2, 100, 3, 64), (19200, 192, 64, 2), 16, "the stride of its last axis is 2 elements, not 1"),
        ((2, 1, 1, 64), (2**39, 3, 5, 1), 16, "the stride of its batch axis is 1099511627776 bytes, more "),
        ((1, 1, 1, 1), (3, 3, 3, 3), 16, None),
        ((2, 100, 3, 64), (0, 0, 0, 1), 16, None),
        ((2, 100, 3, 20), (7200, 72, 24, 1), 16, None),
    ],
)
def test_why_tma_cannot_address(shape, strides, align, why):
    said = tensormap.why_not(shape, strides, 2, align)
    assert said is None if why is None else said.startswith(why)


def test_maps_of_an_empty_array_are_not_there(sources):
    given = inputs((2, 5, 3, 64)) | {"k": np.zeros((2, 0, 3, 64), np.float16)}
    given["v"] = given["k"]
    found, operands = planned(given, devices.EMULATED)
    call = launch.prepare(found, operands)
    names = list(args.map_offsets())
    bits = call._args.words[args.map_offsets()["mapped"] // 8]
    assert {name for number, name in enumerate(names) if bits >> number & 1} == {"Q", "O", "dQ_sum"}


def test_sizes_and_places():
    offsets = args.map_offsets()
    assert list(offsets)[:4] == ["Q", "K", "V", "O"] and all(at % 64 == 0 for at in offsets.values())
    assert offsets["Q"] - args.args_bytes() in range(64)
    assert args.mapped_args_bytes() % 64 == 0 and args.mapped_args_bytes() <= 4096, (
        "what sm_90 takes by value"
    )
    found, _ = planned(inputs((2, 5, 3, 64)), devices.EMULATED)
    assert found.launches[0].args_bytes == args.mapped_args_bytes() == maps.bytes_of(found)


def test_steps_of_a_row_share_maps(sources):
    other = Step("probe_maps", probe_grid, probe_smem, maps=(Map("Q", 8),))
    found, operands = planned(
        inputs((2, 5, 3, 64)), devices.EMULATED, replace(ROW, steps=(*ROW.steps, other))
    )
    with pytest.raises(CuflashError, match="probe_maps: two steps map Q with different boxes"):
        launch.prepare(found, operands)


# ---- a GPU


@pytest.mark.gpu
def test_a_graph_can_be_captured_and_replayed(sources):
    import cupy

    given = {name: cupy.asarray(array) for name, array in inputs((2, 37, 3, 64)).items()}
    out, lse = cupy.zeros((2, 37, 3, 64), np.float16), cupy.zeros((2, 3, 37), np.float32)
    found, operands = planned(given, devices.gpu(0), out=(out, lse), return_lse=True)
    operands.workspace = cupy.empty(found.workspace_bytes, np.uint8)
    launch.run(found, operands)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        launch.run(found, operands)
        graph = stream.end_capture()
    for seed in (4, 5):
        fresh = inputs((2, 37, 3, 64), seed=seed)["q"]
        given["q"].set(fresh)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(out.get(), fresh)
