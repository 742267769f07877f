"""launch.py, args.py, backends.py: what reaches a kernel, by its own layout, and how calls behave on a GPU.

Without a GPU a recording backend stands where the emulator is: it keeps the Args struct and the arrays of
each launch.  Values are judged elsewhere; here it is addresses, strides, sizes, streams, threads and graphs.
"""

import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from cuflash import (
    BlockMask,
    CuflashError,
    args,
    attention,
    backends,
    build,
    launch,
    plan,
    prepared,
    reference,
    rows,
)
from cuflash import arrays as arrays_
from cuflash.attention import attention_backward, explain
from cuflash.check import check
from cuflash.devices import EMULATED, Device, gpu_count
from cuflash.problem import Operands
from cuflash.row import Slot


class Recorder(backends.Emulated):
    """The emulated backend without its kernels: results stay as they are made."""

    def __init__(self):
        self.calls = []

    def load(self, one):
        return one

    def launch_all(self, loaded, struct, buffers=None, progress=None):
        record = np.frombuffer(bytes(struct.memory), args.args_dtype())[0]
        self.calls.append((loaded, record, buffers))


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(backends, "of", lambda device: made)
    plan.make.cache_clear()  # plans keep their prepared calls, and those their backend
    yield made
    plan.make.cache_clear()


def arrays(shape_q=(2, 5, 4, 8), heads_k=2, len_k=7, dim_v=6, dtype=np.float32):
    batch, _, _, dim = shape_q
    rng = np.random.default_rng(1)
    shapes = dict(q=shape_q, k=(batch, len_k, heads_k, dim), v=(batch, len_k, heads_k, dim_v))
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def run(given, direction="forward", kernel="fwd_02_tiled", **options):
    problem, operands = check(direction, given, options)
    return launch.run(plan.make(problem, EMULATED, kernel), operands), problem, operands


def pointer(array):
    return array.__array_interface__["data"][0]


# ---- the struct


def test_layout_is_that_of_a_cpp_compiler(tmp_path):
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")

    def fields(dtype, path, start=0):
        for name, (kind, offset) in ((n, dtype.fields[n][:2]) for n in dtype.names):
            yield f"{path}{name}", start + offset
            if kind.names:
                yield from fields(kind, f"{path}{name}.", start + offset)

    expected = dict(fields(args.args_dtype(), ""))
    lines = "".join(f'  show("{name}", offsetof(Args, {name}));\n' for name in expected)
    source = (
        '#include <cstddef>\n#include <cstdio>\n#include "args.cuh"\n'
        'static void show(const char* name, size_t n) { std::printf("%s %zu\\n", name, n); }\n'
        f'int main() {{\n{lines}  show("sizeof", sizeof(Args));\n}}\n'
    )
    (tmp_path / "layout.cpp").write_text(source)
    include = str(build.kernels_directory() / "lib")
    binary = str(tmp_path / "layout")
    command = [compiler, "-std=c++17", "-I", include, "-o", binary, str(tmp_path / "layout.cpp")]
    subprocess.run(command, check=True, timeout=120)
    said = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.split()
    found = dict(zip(said[::2], map(int, said[1::2]), strict=True))
    assert found.pop("sizeof") == args.args_bytes()
    assert found == expected


def test_parse_refuses_what_it_does_not_know():
    assert args.parse("struct A { u8 a; i64 b[3]; };")["A"].fields["b"][1] == 8
    with pytest.raises(CuflashError, match="struct A: 'short x' is not a field this reader knows"):
        args.parse("struct A {\n  short x;\n};")


def test_strides_pointers_and_sizes(recorder):
    given = arrays()
    q = np.zeros((4, 2, 5, 8), np.float32).transpose(1, 2, 0, 3)[:, ::-1]  # any strides, negative ones too
    q[...] = given["q"]
    results, _, _ = run(given | {"q": q}, causal=True, window=(3, None), softcap=2.5, scale=0.5)
    ((launches, record, buffers),) = recorder.calls
    assert [one.name for one in launches] == ["fwd_02_tiled"]
    assert record["Q"]["data"] == pointer(q)
    assert [record["Q"][axis] for axis in ("batch", "row", "head")] == [s // 4 for s in q.strides[:3]]
    assert record["Q"]["row"] < 0
    assert record["V"]["data"] == pointer(given["v"]) and record["V"]["row"] == 2 * 6
    assert record["O"]["data"] == pointer(results["out"]) and record["lse"]["data"] == pointer(results["lse"])
    assert [record["lse"][axis] for axis in ("batch", "head", "row")] == [4 * 5, 5, 1]
    sizes = ("batch", "len_q", "len_k", "heads", "heads_k", "head_dim", "head_dim_v")
    assert [record[name] for name in sizes] == [2, 5, 7, 4, 2, 8, 6]
    assert record["scale"] == 0.5 and record["softcap"] == 2.5
    assert record["window_left"] == 3 and record["window_right"] == args.UNBOUNDED
    assert record["offset_is_given"] == 0 and record["n_splits"] == 1
    assert set(buffers) == {"q", "k", "v", "out", "lse"}
    for absent in ("bias", "mask", "alibi", "sink", "dQ", "query_lengths"):
        assert record[absent]["data"] == 0


def test_vector_bytes_say_what_wide_loads_may_do(recorder):
    whole = arrays(shape_q=(2, 5, 4, 8), dim_v=8)
    run(whole)
    assert [recorder.calls[-1][1][name]["vector_bytes"] for name in "QKVO"] == [16] * 4
    wide = np.zeros((2, 5, 4, 9), np.float32)[..., 1:]  # the address and every row are off by one element
    run(whole | {"q": wide})
    assert recorder.calls[-1][1]["Q"]["vector_bytes"] == 0
    run(arrays(dim_v=6))
    assert recorder.calls[-1][1]["V"]["vector_bytes"] == 0, "24 bytes of a row are no whole number of 16"


def test_every_option_that_is_an_array(recorder):
    given = arrays()
    bias, mask = np.zeros((4, 1, 7), np.float16), np.ones((2, 1, 5, 1), bool)
    slopes, sink = np.ones((2, 4), np.float32), np.ones(4, np.float32)
    options = dict(
        bias=bias, mask=mask, alibi_slopes=slopes, sink=sink, dropout=(0.25, 2**63 + 5, (1, 2, 3, 4))
    )
    run(given, query_offset=-3, query_lengths=[1, 5], key_lengths=np.array([7, 0], np.int32), **options)
    record, buffers = recorder.calls[-1][1:]
    steps = ("batch", "head", "row", "col", "rows", "cols")
    assert [record["bias"][name] for name in steps] == [0, 7, 0, 1, args.BROADCAST, 7]
    assert [record["mask"][name] for name in steps] == [5, 0, 1, 0, 5, args.BROADCAST]
    assert [record["alibi"][name] for name in ("data", "batch", "head")] == [pointer(slopes), 4, 1]
    assert [record["sink"][name] for name in ("data", "batch", "head")] == [pointer(sink), 0, 1]
    assert record["seed"] == 2**63 + 5 and record["seed_pointer"] == 0
    assert record["dropout_threshold"] == 2**30 and record["dropout_scale"] == 1 / 0.75
    assert [record[f"dropout_{name}"] for name in ("batch0", "head0", "i0", "j0")] == [1, 2, 3, 4]
    assert record["query_offset"] == -3 and record["offset_is_given"] == 1
    for name, values in (("query_lengths", [1, 5]), ("key_lengths", [7, 0])):
        assert [record[name]["stride"], record[name]["bytes"]] == [1, 8]
        assert record[name]["data"] == pointer(buffers[name])
        assert buffers[name].tolist() == values


def test_dropout_threshold_is_the_contract():
    assert args.dropout_threshold(0.5) == 2**31
    assert args.dropout_threshold(np.nextafter(1, 0)) == 2**32 - 1


def test_block_masks_by_rows_and_by_columns(recorder):
    mask = BlockMask.from_dense(np.array([[1, 0], [1, 1], [0, 1]], bool), 2, 4)
    run(arrays(), block_mask=mask)
    record, buffers = recorder.calls[-1][1:]
    assert record["blocks"]["indptr"] == pointer(buffers["blocks.indptr"])
    assert buffers["blocks.indices"].tolist() == [0, 0, 1, 1]
    assert [record["blocks"][name] for name in ("batch", "head")] == [0, 0], "one for all heads"
    assert record["blocks_of_key"]["indptr"] == 0, "the forward walks rows only"


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_new_results_are_contiguous_in_the_layout(recorder, layout):
    given = arrays()
    if layout == "bhsd":
        given = {name: array.transpose(0, 2, 1, 3) for name, array in given.items()}
    results, _, _ = run(given, layout=layout)
    assert results["out"].shape == (2, 5, 4, 6) and results["lse"].shape == (2, 4, 5)
    assert (results["out"] if layout == "bshd" else results["out"].transpose(0, 2, 1, 3)).flags.c_contiguous
    record = recorder.calls[-1][1]
    assert [record["O"][axis] * 4 for axis in ("batch", "row", "head")] == list(results["out"].strides[:3])


def test_packed(recorder):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((9, 4, 8), np.float32), rng.standard_normal((11, 2, 8), np.float32)
    cumulative = dict(cu_seqlens_q=[0, 4, 4, 9], cu_seqlens_k=[0, 2, 6, 11])
    results, problem, _ = run(dict(q=q, k=k, v=k), **cumulative)
    record, buffers = recorder.calls[-1][1:]
    assert (problem.batch, record["batch"], record["len_q"], record["len_k"]) == (3, 3, 9, 11)
    assert record["Q"]["batch"] == 0, "one leading axis of length 1"
    assert buffers["cu_seqlens_k"].tolist() == [0, 2, 6, 11]
    assert results["out"].shape == (1, 9, 4, 8) and results["lse"].shape == (1, 4, 9)


def test_results_are_written_where_the_caller_says(recorder):
    given = arrays()
    out, lse = np.empty((2, 5, 4, 6), np.float32), np.empty((2, 4, 5), np.float32)
    results, _, _ = run(given, out=(out, lse), return_lse=True)
    record = recorder.calls[-1][1]
    assert record["O"]["data"] == pointer(out) == pointer(results["out"])
    assert record["lse"]["data"] == pointer(lse) == pointer(results["lse"])


def test_an_operand_that_no_kernel_can_read_is_copied(recorder):
    given = arrays()
    k = np.zeros((2, 7, 2, 16), np.float32)[..., ::2]
    k[...] = given["k"]
    out = np.empty((2, 5, 4, 12), np.float32)[..., ::2]
    run(given | {"k": k}, out=out)
    record, buffers = recorder.calls[-1][1:]
    assert record["K"]["data"] != pointer(k) and record["K"]["data"] == pointer(buffers["k"])
    np.testing.assert_array_equal(buffers["k"], k)
    assert buffers["k"].flags.c_contiguous and record["K"]["row"] == 16
    assert record["O"]["data"] == pointer(buffers["out"]) and buffers["out"].strides != out.strides


def test_workspace_of_the_caller(recorder):
    given = arrays()
    k = np.zeros((2, 7, 2, 16), np.float32)[..., ::2]
    need = explain(given["q"], k, given["v"], device="emulated", kernel="fwd_02_tiled").workspace_bytes
    assert need >= k.nbytes
    workspace = np.empty(need, np.uint8)
    run(given | {"k": k}, workspace=workspace)
    assert recorder.calls[-1][1]["K"]["data"] == pointer(workspace)
    with pytest.raises(CuflashError, match=rf"workspace has {need - 1} bytes, this call needs {need}"):
        run(given | {"k": k}, workspace=workspace[:-1])
    big = np.empty(need + 32, np.uint8)
    with pytest.raises(CuflashError, match="multiple of 16 bytes"):
        run(given | {"k": k}, workspace=big[17 - pointer(big) % 16 :])


def test_slots_that_have_a_field_fill_it(recorder):
    given = arrays(dim_v=8)
    forward = dict(out=np.zeros((2, 5, 4, 8), np.float32), lse=np.zeros((2, 4, 5), np.float32))
    results, _, _ = run(given | forward | {"dout": forward["out"]}, "backward", "bwd_02_tiled")
    loaded, record, buffers = recorder.calls[-1]
    names = [one.name for one in loaded]
    assert names.index("pass_delta") < names.index("bwd_02_tiled")
    assert record["delta"]["data"] == pointer(buffers["workspace.delta"])
    assert [record["delta"][axis] for axis in ("batch", "head", "row")] == [20, 5, 1]
    assert set(results) == {"dq", "dk", "dv"} and results["dk"].shape == (2, 7, 2, 8)


@pytest.mark.parametrize("shape", [(0, 5, 4, 8), (2, 0, 4, 8), (2, 5, 0, 8)])
def test_nothing_to_launch(recorder, shape):
    given = arrays(shape_q=shape, heads_k=min(2, shape[2]))
    results, _, _ = run(given)
    assert results["out"].shape == (*shape[:3], 6) and recorder.calls == []


def test_a_plan_for_a_gpu_that_is_not_there_does_not_run():
    problem, operands = check("forward", arrays(), {})
    far = plan.make(problem, plan.devices.named("sm_86"))
    with pytest.raises(
        CuflashError, match=r"a plan for RTX 3090 \(sm_86\) cannot run here: this GPU is not there"
    ):
        launch.run(far, operands)


# ---- prepared calls, with CuPy arrays over host memory: no GPU is touched


@pytest.fixture
def pretend(monkeypatch):
    """(array maker, backend): cupy.ndarrays whose memory is NumPy's, and a backend that records launches."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.memory

    def make(shape, dtype=np.float32, offset=0):
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize + offset
        held = np.zeros(n_bytes + 256, np.uint8)
        start = -pointer(held) % 256
        owned = memory.UnownedMemory(pointer(held) + start, n_bytes, held, 0)
        return cupy.ndarray(shape, dtype, memptr=memory.MemoryPointer(owned, offset))

    class Pretended(Recorder):
        lengths: ClassVar = {}  # address -> numbers copied to it

        def copy_lengths(self, values, address):
            self.lengths[address] = values.tolist()

        def empty(self, shape, dtype):
            return make(shape, dtype)

        def scratch(self, n_bytes):
            return make((n_bytes,), np.uint8).data

        @staticmethod
        def pointer(array):
            return array.data.ptr

    backend = Pretended()
    monkeypatch.setattr(backends, "of", lambda device: backend)
    monkeypatch.setattr(launch, "_prepared", {})
    return make, backend


HERE = Device("cuda", "pretended", 90, 132, 232448, 233472, 2048, 32, 256, 128, 1e9, 1e12, index=0)


def call_of(given, options=()):
    """(key, arrays in ORDER) as attention.py makes them."""
    ordered = tuple(given.get(name) for name in launch.ORDER["forward"])
    return launch.key(ordered, ("forward", *options)), ordered


def test_a_prepared_call_repeats_with_other_addresses(pretend):
    make, backend = pretend
    given = {name: make(array.shape) for name, array in arrays().items()}
    key, ordered = call_of(given)
    assert launch.cached(key, ordered) is None
    problem, operands = check("forward", given, {})
    chosen = plan.make(problem, HERE)
    launch.remember(key, chosen, operands)
    other = {name: make(array.shape) for name, array in arrays().items()}
    key, ordered = call_of(other)
    call = launch.cached(key, ordered)
    results = call(ordered, seed=7)
    record = backend.calls[-1][1]
    assert record["Q"]["data"] == other["q"].data.ptr and record["O"]["data"] == results["out"].data.ptr
    assert record["Q"]["row"] == 32 and record["seed"] == 7
    assert results["out"].shape == (2, 5, 4, 6) and results["lse"].shape == (2, 4, 5)


def test_attention_takes_the_warm_way(pretend, monkeypatch):
    make, backend = pretend
    monkeypatch.setattr(plan.devices, "gpu", lambda index: HERE)
    given = {name: make(array.shape) for name, array in arrays().items()}
    options = dict(causal=True, sink=make((4,)), dropout=(0.5, 3), window=(2, None))
    first = attention(*given.values(), **options)
    monkeypatch.setattr(plan, "make", lambda *_: pytest.fail("the second call plans nothing"))
    out, lse = make((2, 5, 4, 6)), make((2, 4, 5))
    again = attention(*given.values(), **(options | {"dropout": (0.5, 4)}))
    assert again.shape == first.shape and again.data.ptr != first.data.ptr
    assert [call[1]["seed"] for call in backend.calls] == [3, 4]
    monkeypatch.undo()
    monkeypatch.setattr(backends, "of", lambda device: backend)
    monkeypatch.setattr(plan.devices, "gpu", lambda index: HERE)
    for _ in range(2):
        assert attention(*given.values(), out=(out, lse), return_lse=True)[0] is out
        assert backend.calls[-1][1]["lse"]["data"] == lse.data.ptr
    with pytest.raises(CuflashError, match="without return_lse=True"):
        attention(*given.values(), out=(out, lse))


def test_q_k_v_alone_take_the_shortest_way(pretend, monkeypatch):
    """It fills in what the other way does, and the two may alternate."""
    make, backend = pretend
    monkeypatch.setattr(plan.devices, "gpu", lambda index: HERE)
    first, second = ([make(array.shape) for array in arrays().values()] for _ in range(2))
    options = dict(causal=True, kernel="fwd_02_tiled")
    attention(*first, **options)
    attention(*first, **options, return_lse=True)
    longer, run = [], launch.Prepared.run
    monkeypatch.setattr(launch.Prepared, "run", lambda self, *given: longer.append(1) or run(self, *given))

    def filled(given, out):
        record = backend.calls[-1][1]
        assert [record[name]["data"] for name in "QKVO"] == [array.data.ptr for array in (*given, out)]
        return int(record["lse"]["data"])

    unread = filled(second, attention(*second, **options))
    assert not longer and unread
    out, lse = attention(*first, **options, return_lse=True)
    assert filled(first, out) == lse.data.ptr and lse.shape == (2, 4, 5)
    assert filled(first, attention(*first, **options)) == unread
    assert filled(second, attention(*second, **options)) == unread and not longer
    for seed in (3, 4):
        attention(*first, **options, dropout=(0.5, seed))
        assert backend.calls[-1][1]["seed"] == seed
    assert len(longer) == 1, "a seed is written, too"
    target = make((2, 5, 4, 6))
    for _ in range(2):
        assert attention(*first, **options, out=target) is target
        filled(first, target)
    assert len(longer) == 2


@pytest.mark.parametrize("kernel", ["fwd_02_tiled", "fwd_05_pipeline"])
def test_threads_do_not_mix_their_addresses(pretend, monkeypatch, kernel):
    make, backend = pretend
    monkeypatch.setattr(plan.devices, "gpu", lambda index: HERE)
    given = [[make(array.shape) for array in arrays().values()] for _ in range(4)]
    attention(*given[0], kernel=kernel)
    attention(*given[0], return_lse=True, kernel=kernel)
    backend.calls.clear()

    def work(number):
        found = []
        for turn in range(50):
            out = attention(*given[number], kernel=kernel, return_lse=turn % 3 == 0)
            found.append((number, out[0] if isinstance(out, tuple) else out))
        return found

    with ThreadPoolExecutor(4) as pool:
        found = [one for many in pool.map(work, range(4)) for one in many]
    wanted = sorted((*(array.data.ptr for array in given[number]), out.data.ptr) for number, out in found)
    filled = sorted(tuple(int(record[name]["data"]) for name in "QKVO") for _, record, _ in backend.calls)
    assert filled == wanted


@pytest.mark.parametrize("change", ["shape", "stride", "dtype", "alignment", "option", "extra array"])
def test_what_a_prepared_call_depends_on(pretend, change):
    make, _ = pretend
    given = {name: make(array.shape) for name, array in arrays().items()}
    key, _ = call_of(given, ("causal", 1))
    changed = {
        "shape": dict(given, q=make((2, 6, 4, 8))),
        "stride": dict(given, q=make((2, 5, 8, 8))[:, :, ::2]),
        "dtype": dict(given, q=make((2, 5, 4, 8), np.float16)),
        "alignment": dict(given, q=make((2, 5, 4, 8), offset=4)),
        "option": given,
        "extra array": dict(given, sink=make((4,))),
    }[change]
    assert call_of(changed, ("causal", 0 if change == "option" else 1))[0] != key


def test_what_cannot_be_prepared(pretend):
    make, _ = pretend
    given = {name: make(array.shape) for name, array in arrays().items()}
    assert call_of(dict(given, q=np.zeros((2, 5, 4, 8), np.float32)))[0] is None, "not a cupy.ndarray"
    key, ordered = call_of(given, ([1, 2],))
    assert launch.cached(key, ordered) is None, "an option that cannot be hashed"
    packed = {name: make(array.shape[1:]) for name, array in arrays().items()}
    ends = dict(cu_seqlens_q=np.array([0, 2, 5]), cu_seqlens_k=np.array([0, 3, 7]))
    for options, is_kept in ((ends, True), (ends | {"mask": make((3, 4), bool)}, False)):
        problem, operands = check("forward", packed, options)
        key, ordered = call_of(packed | options)
        launch.remember(key, plan.make(problem, HERE), operands)
        assert (launch.cached(key, ordered) is not None) == is_kept, "must the mask reach other lengths too?"


def test_lengths_on_the_host_change_from_call_to_call(pretend, monkeypatch):
    make, backend = pretend
    monkeypatch.setattr(plan.devices, "gpu", lambda index: HERE)
    given = {name: make(array.shape) for name, array in arrays().items()}

    def lengths_of(record, name):
        return backend.lengths[int(record[name]["data"])]

    attention(*given.values(), key_lengths=[1, 2], query_lengths=(5, 0))
    tokens = {name: make(array.shape[1:]) for name, array in arrays().items()}
    attention(*tokens.values(), cu_seqlens_q=[0, 2, 5], cu_seqlens_k=[0, 0, 7])
    with monkeypatch.context() as patch:
        patch.setattr(plan, "make", lambda *_: pytest.fail("later calls plan nothing"))
        attention(*given.values(), key_lengths=np.array([7, 0], np.uint8), query_lengths=[0, 3])
        record = backend.calls[-1][1]
        assert lengths_of(record, "key_lengths") == [7, 0]
        assert lengths_of(record, "query_lengths") == [0, 3]
        attention(*tokens.values(), cu_seqlens_q=[0, 5, 5], cu_seqlens_k=range(0, 7, 3))
        assert lengths_of(backend.calls[-1][1], "cu_seqlens_k") == [0, 3, 6]
    n_calls = len(backend.calls)
    for wrong, said in (
        ({"key_lengths": [8, 0], "query_lengths": [0, 3]}, r"key_lengths\[0\] is 8"),
        ({"key_lengths": [1, 2], "query_lengths": [-1, 3]}, r"query_lengths\[0\] is -1"),
        ({"key_lengths": [0.5, 0], "query_lengths": [0, 3]}, "key_lengths is float64"),
        ({"key_lengths": [1, 2, 3], "query_lengths": [0, 3]}, "key_lengths has 3 entries"),
        ({"key_lengths": [[1], [2, 3]], "query_lengths": [0, 3]}, "no list of whole numbers"),
    ):
        with pytest.raises(CuflashError, match=said):
            attention(*given.values(), **wrong)
    for wrong, said in (([0, 5, 2], "decreases"), ([1, 2, 5], "is 1"), ([0, 2, 6], "is 6")):
        with pytest.raises(CuflashError, match=said):
            attention(*tokens.values(), cu_seqlens_q=wrong, cu_seqlens_k=[0, 0, 7])
    assert len(backend.calls) == n_calls, "nothing is launched"


def test_arrays_of_other_libraries_take_the_warm_way(pretend, monkeypatch):
    make, backend = pretend
    monkeypatch.setattr(plan.devices, "gpu", lambda index: HERE)

    class Foreign:
        """Another library's array on a CUDA device, over the memory of a CuPy one."""

        def __init__(self, array):
            self.array, self.shape = array, array.shape

        __dlpack__ = None

        def __dlpack_device__(self):
            return 2, 0

    monkeypatch.setattr(arrays_, "_from_dlpack", lambda value: (value.array, 0))
    given = {name: Foreign(make(array.shape)) for name, array in arrays().items()}
    bias, out, lse = Foreign(make((4, 5, 7))), Foreign(make((2, 5, 4, 6))), Foreign(make((2, 4, 5)))
    dout = Foreign(make((2, 5, 4, 6)))

    def both():
        attention(*given.values())
        assert backend.calls[-1][1]["Q"]["data"] == given["q"].array.data.ptr
        assert attention(*given.values(), bias=bias, out=(out, lse), return_lse=True)[0] is out
        assert backend.calls[-1][1]["bias"]["data"] == bias.array.data.ptr
        gradients = attention_backward(dout, *given.values(), out, lse, bias=bias)
        assert gradients.dbias.shape == (4, 5, 7) and gradients.dq.shape == (2, 5, 4, 8)
        assert backend.calls[-1][1]["dO"]["data"] == dout.array.data.ptr

    both()
    monkeypatch.setattr(plan, "make", lambda *_: pytest.fail("the second call plans nothing"))
    both()


def test_a_result_that_overlaps_takes_the_checked_way(pretend):
    make, _ = pretend
    given = {name: make(array.shape) for name, array in arrays(dim_v=8).items()}
    problem, operands = check("forward", given, dict(out=make((2, 5, 4, 8))))
    key, ordered = call_of(given | {"out": operands.out})
    launch.remember(key, plan.make(problem, HERE), operands)
    assert launch.cached(key, ordered) is not None
    key, ordered = call_of(given | {"out": given["q"]})
    assert key in launch._prepared and launch.cached(key, ordered) is None


def test_a_plan_keeps_its_prepared_calls(recorder, monkeypatch):
    given, mask = arrays(), BlockMask.from_dense(np.ones((1, 1), bool), 64, 64)
    made, real = [], launch.Prepared
    monkeypatch.setattr(launch, "Prepared", lambda *a: made.append(1) or real(*a))
    for lengths in ([1, 2], [3, 4]):
        run(given, key_lengths=lengths)
        assert recorder.calls[-1][2]["key_lengths"].tolist() == lengths
    assert len(made) == 1
    for shift in ((0, 0, 0, 0), (0, 0, 7, 0)):
        run(given, dropout=(0.5, 1, shift), block_mask=mask)
        assert recorder.calls[-1][1]["dropout_i0"] == shift[2]
    assert len(made) == 3


def test_prepared_calls_are_bounded(pretend, monkeypatch):
    make, _ = pretend
    monkeypatch.setattr(launch, "MAX_PREPARED", 3)
    given = {name: make(array.shape) for name, array in arrays().items()}
    problem, operands = check("forward", given, {})
    for number in range(10):
        launch.remember((number,), plan.make(problem, HERE), operands)
    assert len(launch._prepared) <= 3


# ---- on a GPU


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def on_gpu(cupy, seed=0, shape=(2, 300, 8, 64), dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [cupy.asarray(rng.standard_normal(shape).astype(dtype)) for _ in range(3)]


def assert_right(out, q, k, v, **options):
    want = reference.attention(*(array.get() for array in (q, k, v)), **options)
    np.testing.assert_allclose(out.get(), want, rtol=0, atol=1e-5)


SPIN = r"""extern "C" __global__ void spin(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {}
}"""


@pytest.mark.gpu
def test_a_call_returns_before_earlier_work_is_done(cupy):
    q, k, v = on_gpu(cupy)
    attention(q, k, v, causal=True, key_lengths=[300, 7])
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (np.int64(1000),))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin((1,), (1,), (np.int64(600_000_000),))
        start = time.perf_counter()
        out = attention(q, k, v, causal=True, key_lengths=[300, 7])
        seconds = time.perf_counter() - start
        assert not stream.done, "the stream is still busy, so nothing has waited for it"
        assert seconds < 0.15
    stream.synchronize()
    assert_right(out, q, k, v, causal=True, key_lengths=[300, 7])


@pytest.mark.gpu
def test_work_is_ordered_on_the_current_stream(cupy):
    spin = cupy.RawKernel(SPIN, "spin")
    q, k, v = on_gpu(cupy)
    source = q.copy()
    q[...] = 0
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        spin((1,), (1,), (np.int64(100_000_000),))
        q[...] = source
        out = attention(q, k, v)
        doubled = out * 2
        stream.synchronize()
    assert_right(out, source, k, v)
    np.testing.assert_array_equal(doubled.get(), 2 * out.get())


@pytest.mark.gpu
def test_threads_on_their_own_streams(cupy):
    q, k, v = on_gpu(cupy)
    want = attention(q, k, v, causal=True).get()
    wrong = []

    def work(number):
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True) as stream:
            for turn in range(40):
                out = attention(q, k, v, causal=turn % 2 == 0)
                stream.synchronize()
                if turn % 2 == 0 and not np.array_equal(out.get(), want):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["none", "host", "device"])
def test_graph_capture(cupy, lengths):
    q, k, v = on_gpu(cupy)
    options = {"none": {}, "host": dict(key_lengths=[300, 5])}.get(lengths)
    if options is None:
        options = dict(key_lengths=cupy.asarray([300, 5]))
    out = cupy.full_like(q, np.nan)
    lse = cupy.empty((2, 8, 300), np.float32)
    need = explain(q, k, v, causal=True, **options).workspace_bytes
    workspace = cupy.empty(need, np.uint8)
    settings = dict(causal=True, out=(out, lse), return_lse=True, workspace=workspace, **options)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        attention(q, k, v, **settings)
        stream.synchronize()
        used = cupy.get_default_memory_pool().used_bytes()
        stream.begin_capture()
        attention(q, k, v, **settings)
        graph = stream.end_capture()
        assert cupy.get_default_memory_pool().used_bytes() == used, (
            "a call with out= and workspace= allocates nothing"
        )
        q[...] = cupy.asarray(np.random.default_rng(9).standard_normal(q.shape).astype(np.float32))
        out[...] = np.nan
        graph.launch(stream)
        stream.synchronize()
    host = {name: value.get() if hasattr(value, "get") else value for name, value in options.items()}
    assert_right(out, q, k, v, causal=True, **host)


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() < 2, reason="needs a CUDA device: a second one")
def test_arrays_on_a_device_that_is_not_current(cupy):
    with cupy.cuda.Device(1):
        q, k, v = on_gpu(cupy)
    with cupy.cuda.Device(0):
        out = attention(q, k, v)
        assert out.device.id == 1 and cupy.cuda.Device().id == 0
    cupy.cuda.Device(1).synchronize()
    assert_right(out, q, k, v)


@pytest.mark.gpu
def test_torch_tensors_come_in_by_dlpack(cupy):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    q, k, v = on_gpu(cupy)
    out = attention(*(torch.from_dlpack(array) for array in (q, k, v)))
    assert isinstance(out, cupy.ndarray)
    assert_right(out, q, k, v)


@pytest.mark.gpu
def test_read_only_arrays_are_fine_as_inputs(cupy):
    class ReadOnly:
        def __init__(self, array):
            interface = dict(array.__cuda_array_interface__)
            self.__cuda_array_interface__ = interface | {"data": (interface["data"][0], True)}

    q, k, v = on_gpu(cupy)
    assert_right(attention(*map(ReadOnly, (q, k, v))), q, k, v)


@pytest.mark.gpu
def test_any_strides_and_targets(cupy):
    q, k, v = on_gpu(cupy)
    wide = cupy.empty((2, 300, 8, 128), np.float32)
    wide[..., ::2] = k
    target = cupy.full((2, 300, 8, 128), np.nan, np.float32)
    out = attention(q[:, ::-1], wide[..., ::2], v, out=target[..., ::2])
    assert_right(out, q[:, ::-1], k, v)
    assert bool(cupy.isnan(target[..., 1::2]).all()), "what lies between the elements stays"


@pytest.mark.gpu
def test_ptx_runs_where_the_gpu_is_newer_than_the_compiler(cupy, monkeypatch):
    known = [arch for arch in build.supported_archs() if arch <= plan.devices.gpu(0).arch]
    monkeypatch.setattr(build, "target_of", lambda arch, exact=False: f"compute_{known[-1]}")
    fresh = backends.Cuda(plan.devices.gpu(0))
    monkeypatch.setattr(backends, "of", lambda device: fresh)
    q, k, v = on_gpu(cupy, shape=(1, 100, 2, 32))
    problem, operands = check("forward", dict(q=q, k=k, v=v), dict(causal=True, key_lengths=[90]))
    chosen = replace(plan.make(problem, plan.devices.gpu(0)))  # a plan without prepared calls
    out = launch.run(chosen, operands)["out"]
    assert_right(out, q, k, v, causal=True, key_lengths=[90])


@pytest.mark.gpu
def test_a_launch_that_the_driver_refuses_says_what_was_asked(cupy):
    backend = backends.of(plan.devices.gpu(0))
    loaded = backend.load(plan.make(check("forward", arrays(), {})[0], plan.devices.gpu(0)).main)
    struct = backends.ArgsBuffer(bytearray(args.args_bytes()))
    with pytest.raises(CuflashError, match=r"(?s)could not be launched on device 0.*block \(4096, 1, 1\)"):
        backend.launch_all([(*loaded[:4], 4096, *loaded[5:])], struct)


@pytest.mark.gpu
def test_a_warm_call_costs_microseconds(cupy):
    q, k, v = on_gpu(cupy, shape=(1, 16, 2, 32))
    attention(q, k, v, causal=True)
    best = np.inf
    for _ in range(20):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(100):
            attention(q, k, v, causal=True)
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 40e-6, f"{best * 1e6:.1f} us; 15 on an H200's host"


@pytest.mark.gpu
def test_gradients_on_a_gpu_repeat_a_prepared_call(cupy):
    q, k, v = on_gpu(cupy, shape=(1, 130, 4, 32))
    dout = on_gpu(cupy, 5, (1, 130, 4, 32))[0]
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    want = reference.attention_backward(*(a.get() for a in (dout, q, k, v, out, lse)), causal=True)
    for _ in range(3):
        found = attention_backward(dout, q, k, v, out, lse, causal=True)
        for name in ("dq", "dk", "dv"):
            np.testing.assert_allclose(getattr(found, name).get(), getattr(want, name), rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_an_lse_that_nobody_reads_is_not_allocated(cupy):
    """Many calls at once write it to one place; their out is the same bits as of a call that returns lse."""
    q, k, v = on_gpu(cupy, shape=(2, 200, 4, 64))
    want, lse = attention(q, k, v, causal=True, return_lse=True)
    attention(q, k, v, causal=True)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(8)]
    pool, found = cupy.get_default_memory_pool(), []
    before = pool.used_bytes()
    for stream in streams:
        with stream:
            found.append(attention(q, k, v, causal=True))
    used = pool.used_bytes() - before
    for stream in streams:
        stream.synchronize()
    assert all(cupy.array_equal(one, want) for one in found)
    assert used <= sum(-(-one.nbytes // 512) * 512 for one in found), "out alone"
    assert cupy.array_equal(attention(q, k, v, causal=True, out=cupy.empty_like(want)), want)
    assert cupy.array_equal(attention(q, k, v, causal=True, return_lse=True)[1], lse)


def test_memory_that_nobody_reads_is_made_once(monkeypatch):
    """Were it made twice at once, one would be freed, and kernels would go on writing there."""
    monkeypatch.setattr(prepared, "_unread_of", {})

    class Backend:
        index = 3

        def empty(self, shape, dtype):
            time.sleep(0.02)
            return np.empty(shape, dtype)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: prepared._unread(Backend()), range(8)))
    assert all(one is found[0] for one in found)


NOT_ARRAYS = {"block_mask", "counter_shift", "grads", "progress"}


def test_operands_name_every_array_once():
    fields = set(Operands.__dataclass_fields__)
    gradients = {"dq", "dk", "dv", "dbias", "dsink", "dalibi_slopes"}
    for direction, order in launch.ORDER.items():
        assert set(order) <= fields | gradients and len(set(order)) == len(order), direction
    assert set(launch.ORDER["backward"]) == (fields | gradients) - NOT_ARRAYS


def test_a_slot_too_many_is_refused(monkeypatch):
    """It would lie on the field of Args behind the workspace."""
    slots = tuple(Slot(f"slot {n}", "float32", (4,)) for n in range(9))
    row = replace(rows.FWD_02, workspace=lambda problem, params: slots)
    monkeypatch.setattr(rows, "FORWARD", (row,))
    launch.forget()
    q = np.ones((1, 4, 1, 8), np.float32)
    with pytest.raises(
        CuflashError, match="fwd_02_tiled has 9 slots in its workspace\n  Args has room for 8"
    ):
        attention(q, q, q, kernel="fwd_02_tiled")
    launch.forget()
