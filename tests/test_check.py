"""check(): what it refuses, word for word, and what it makes of calls that are right."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import BlockMask, CuflashError, Gradients, arrays, check_options, messages, spec
from cuflash.check import check


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K, V = zeros(2, 6, 4, 8), zeros(2, 5, 2, 8), zeros(2, 5, 2, 3)
QKV = {"q": Q, "k": K, "v": V}
OUT, LSE = zeros(2, 6, 4, 3), zeros(2, 4, 6)
BACKWARD = {**QKV, "out": OUT, "dout": OUT, "lse": LSE}
PACKED = {"q": Q[0], "k": K[0], "v": V[0]}
CUMULATIVE = {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_k": [0, 2, 5]}

# what a user reads in each case below: "== table: case", then the message
MESSAGES = dict(
    part.split("\n", 1) for part in (Path(__file__).parent / "data/messages.txt").read_text().split("== ")[1:]
)


def check_message(case, direction, arrays_, options):
    with pytest.raises(CuflashError) as caught:
        check(direction, arrays_, options)
    assert str(caught.value) == MESSAGES[case].rstrip("\n")


# case -> (arrays that differ from QKV, options)
FORWARD = {
    "rank": ({"q": Q[0]}, {}),
    "rank, packed": ({}, CUMULATIVE),
    "batch": ({"k": K[:1]}, {}),
    "head_dim": ({"k": zeros(2, 5, 2, 7)}, {}),
    "key heads": ({"v": zeros(2, 5, 4, 3)}, {}),
    "key length": ({"v": zeros(2, 6, 2, 3)}, {}),
    "heads no multiple": ({"k": zeros(2, 5, 3, 8), "v": zeros(2, 5, 3, 3)}, {}),
    "no key heads": ({"k": K[:, :, :0], "v": V[:, :, :0]}, {}),
    "head_dim 0": ({"q": Q[..., :0], "k": K[..., :0]}, {}),
    "dtypes differ": ({"k": K.astype(np.float64)}, {}),
    "integers": ({"q": Q.astype(np.int64)}, {}),
    "complex": ({"q": Q.astype(np.complex64)}, {}),
    "byte order": ({"q": Q.astype(">f4")}, {}),
    "float8": ({"q": Q.astype(ml_dtypes.float8_e4m3fn)}, {}),
    "list": ({"k": [[1.0]]}, {}),
    "nothing": ({"v": None}, {}),
    "masked array": ({"k": np.ma.masked_array(K)}, {}),
    "spec": ({"q": spec((2, 6, 4, 8), "float32")}, {}),
    "half elements": (
        {"q": np.zeros(2 * 6 * 4 * 8 * 4 + 4, np.uint8)[2:-2].view(np.float32).reshape(2, 6, 4, 8)},
        {},
    ),
    "bias shape": ({}, {"bias": zeros(4, 6, 4)}),
    "bias rank": ({}, {"bias": zeros(1, 1, 1, 6, 5)}),
    "bool bias": ({}, {"bias": zeros(6, 5, dtype=bool)}),
    "float mask": ({}, {"mask": zeros(6, 5)}),
    "mask shape": ({}, {"mask": zeros(3, 1, 1, 5, dtype=bool)}),
    "sink shape": ({}, {"sink": zeros(2)}),
    "sink dtype": ({}, {"sink": zeros(4, dtype=np.float64)}),
    "slopes shape": ({}, {"alibi_slopes": zeros(3, 4)}),
    "lengths beyond": ({}, {"key_lengths": [5, 6]}),
    "negative length": ({}, {"query_lengths": np.array([-1, 6])}),
    "lengths count": ({}, {"query_lengths": [1, 2, 3]}),
    "float lengths": ({}, {"query_lengths": [1.0, 2.0]}),
    "lengths axes": ({}, {"key_lengths": [[1, 2]]}),
    "negative window": ({}, {"window": (-1, 0)}),
    "window": ({}, {"window": 3}),
    "scale nan": ({}, {"scale": float("nan")}),
    "scale inf": ({}, {"scale": np.float32("inf")}),
    "scale text": ({}, {"scale": "1"}),
    "scale large": ({}, {"scale": 1e39}),
    "softcap": ({}, {"softcap": 0.0}),
    "offset": ({}, {"query_offset": 1.5}),
    "causal": ({}, {"causal": "top-left"}),
    "layout": ({}, {"layout": "bsd"}),
    "precision": ({}, {"precision": "fp16"}),
    "out_dtype": ({}, {"out_dtype": "int8"}),
    "out_dtype float8": ({}, {"out_dtype": "float8_e4m3fn"}),
    "kernel": ({}, {"kernel": 3}),
    "progress": ({}, {"progress": 3}),
    "dropout alone": ({}, {"dropout": 0.1}),
    "dropout 1": ({}, {"dropout": (1.0, 7)}),
    "dropout nan": ({}, {"dropout": (float("nan"), 7)}),
    "seed negative": ({}, {"dropout": (0.1, -1)}),
    "seed dtype": ({}, {"dropout": (0.1, zeros())}),
    "seed text": ({}, {"dropout": (0.1, "7")}),
    "shift": ({}, {"dropout": (0.1, 7, (0, 0, -1, 0))}),
    "block mask kind": ({}, {"block_mask": zeros(1, 1, dtype=bool)}),
    "block mask rows": ({}, {"block_mask": BlockMask.causal(4, 5, 2, 2)}),
    "block mask columns": ({}, {"block_mask": BlockMask.causal(6, 4, 2, 2)}),
    "block mask heads": ({}, {"block_mask": BlockMask.from_dense(np.ones((3, 3, 3)), 2, 2)}),
    "out shape": ({}, {"out": zeros(2, 6, 4, 8)}),
    "out dtype": ({}, {"out": OUT.astype(np.float64)}),
    "out read-only": ({}, {"out": np.frombuffer(bytes(OUT.nbytes), np.float32).reshape(OUT.shape)}),
    "out stride 0": ({}, {"out": np.lib.stride_tricks.as_strided(OUT, OUT.shape, (0, *OUT.strides[1:]))}),
    "out over itself": ({}, {"out": np.lib.stride_tricks.as_strided(OUT, OUT.shape, (288, 48, 8, 4))}),
    "lse without return_lse": ({}, {"out": (OUT, LSE)}),
    "three outs": ({}, {"out": (OUT, LSE, LSE)}),
    "workspace": ({}, {"workspace": zeros(16)}),
    "workspace gaps": ({}, {"workspace": zeros(16, dtype=np.uint8)[::2]}),
    "another library's name": ({}, {"is_causal": True}),
    "misspelt": ({}, {"windows": 1}),
    "KV cache": ({}, {"k_cache": K}),
    "paged": ({}, {"block_table": K}),
    "one of two": ({}, {"cu_seqlens_q": [0, 6]}),
}


@pytest.mark.parametrize("case", FORWARD)
def test_message(case):
    changed, options = FORWARD[case]
    check_message(f"forward: {case}", "forward", QKV | changed, options)


PACKED_ERRORS = {
    "decreasing": {"cu_seqlens_q": [0, 4, 2]},
    "from 1": {"cu_seqlens_k": [1, 2, 5]},
    "beyond": {"cu_seqlens_k": [0, 2, 6]},
    "counts": {"cu_seqlens_k": [0, 5]},
    "empty": {"cu_seqlens_q": []},
    "lengths too": {"key_lengths": [2, 3]},
    "layout too": {"layout": "bhsd"},
    "slopes": {"alibi_slopes": zeros(3, 4)},
    "bias too short": {"bias": zeros(4, 3, 5)},
}


@pytest.mark.parametrize("case", PACKED_ERRORS)
def test_message_packed(case):
    check_message(f"packed: {case}", "forward", PACKED, CUMULATIVE | PACKED_ERRORS[case])


BACKWARD_ERRORS = {
    "lse axes": ({"lse": zeros(2, 6, 4)}, {}),
    "lse dtype": ({"lse": LSE.astype(np.float16)}, {}),
    "dout shape": ({"dout": OUT[:, :5]}, {}),
    "grads kind": ({}, {"grads": [Q, K, V]}),
    "dbias of nothing": ({}, {"grads": Gradients(dbias=zeros(6, 5))}),
    "dbias shape": ({}, {"bias": zeros(6, 5), "grads": Gradients(dbias=zeros(1, 5))}),
    "dq over q": ({}, {"grads": Gradients(dq=Q)}),
    "dk dtype": ({}, {"grads": Gradients(dk=K.astype(np.float16))}),
    "dq and dk alike": (
        {"k": Q.copy(), "v": zeros(2, 6, 4, 3)},
        {"grads": Gradients(*[zeros(2, 6, 4, 8)] * 2)},
    ),
}


@pytest.mark.parametrize("case", BACKWARD_ERRORS)
def test_message_backward(case):
    changed, options = BACKWARD_ERRORS[case]
    check_message(f"backward: {case}", "backward", BACKWARD | changed, options)


def test_every_message_has_its_case():
    cases = {"forward": FORWARD, "packed": PACKED_ERRORS, "backward": BACKWARD_ERRORS}
    assert set(MESSAGES) == {f"{table}: {case}" for table, rows in cases.items() for case in rows}


def test_out_overlaps_each_input():
    """Every input is compared with the target: none can be forgotten."""
    memory = zeros(4096)
    for name in ("q", "k", "v", "bias", "alibi_slopes", "sink"):
        shape = {"bias": (4, 6, 5), "alibi_slopes": (4,), "sink": (4,)}.get(name) or QKV[name].shape
        inside = memory[: int(np.prod(shape))].reshape(shape)
        arrays_, options = (QKV | {name: inside}, {}) if name in QKV else (QKV, {name: inside})
        with pytest.raises(CuflashError, match=f"^attention: out overlaps {name} in memory"):
            check("forward", arrays_, options | {"out": memory[: OUT.size].reshape(OUT.shape)})
    with pytest.raises(CuflashError, match=r"^attention: workspace overlaps q in memory"):
        check("forward", QKV, {"workspace": Q.view(np.uint8).reshape(-1)})


class OnDevice:
    """Stands for an array on a CUDA device, where there is none."""

    def __init__(self, array, device):
        self.array, self.device = array, device


def test_devices(monkeypatch):
    monkeypatch.setattr(
        messages, "convert", lambda x: (x.array, x.device) if isinstance(x, OnDevice) else arrays.convert(x)
    )
    with pytest.raises(CuflashError) as caught:
        check("forward", QKV | {"k": OnDevice(K, 0)})
    assert str(caught.value) == (
        "attention: k is on cuda:0, q on the host\n"
        "  q (batch 2, len_q 6, heads 4, head_dim 8) float32 on the host\n"
        "  k (batch 2, len_k 5, heads_k 2, head_dim 8) float32 on cuda:0!\n"
        "  All arrays of a call live on one device: cupy.asarray copies to the GPU, cupy.asnumpy back."
    )
    on_gpu = {name: OnDevice(array, 0) for name, array in QKV.items()}
    with pytest.raises(CuflashError) as caught:
        check("forward", on_gpu, {"bias": OnDevice(zeros(6, 5), 1)})
    assert str(caught.value) == (
        "attention: bias is on cuda:1, q on cuda:0\n"
        "  q (batch 2, len_q 6, heads 4, head_dim 8) float32 on cuda:0\n"
        "  bias (len_q 6, len_k 5) float32 on cuda:1!\n"
        "  All arrays of a call live on one device; one call over several GPUs is planned, not there yet."
    )
    problem, operands = check("forward", on_gpu, {"key_lengths": [5, 3]})
    assert problem.has_key_lengths and list(operands.key_lengths) == [5, 3]


class CudaTensor:
    """What DLPack sees of a tensor on a GPU."""

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        raise AssertionError("not read without CuPy")


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CuflashError, match=r"^attention: k is on a CUDA device, and CuPy cannot be imported"):
        check("forward", QKV | {"k": CudaTensor()})
    assert cuflash.attention(Q, K, V).shape == (2, 6, 4, 3)


def test_public_functions_refuse():
    with pytest.raises(CuflashError, match=r"^attention_vjp: kernel is 'fwd_02_tiled'\n"):
        cuflash.attention_vjp(Q, K, V, kernel="fwd_02_tiled")
    with pytest.raises(CuflashError, match=r"^attention_vjp: there is no option out= here\n"):
        cuflash.attention_vjp(Q, K, V, out=OUT)
    with pytest.raises(CuflashError, match=r"^attention: there is no option deterministic= here\n"):
        cuflash.attention(Q, K, V, deterministic=True)
    with pytest.raises(CuflashError, match=r"no forward kernel is called 'fwd_02_tild'\n.*fwd_02_tiled"):
        cuflash.attention(Q, K, V, kernel="fwd_02_tild")
    with pytest.raises(AttributeError, match=r"JVP\) is planned, not there yet"):
        _ = cuflash.attention_jvp


def test_problem_of_a_plain_call():
    problem, operands = check("forward", QKV, {"causal": True, "window": (3, None), "scale": 0})
    assert (problem.batch, problem.len_q, problem.len_k) == (2, 6, 5)
    assert (problem.heads, problem.heads_k, problem.head_dim, problem.head_dim_v) == (4, 2, 8, 3)
    assert (problem.scale, problem.causal, problem.window, problem.group) == (0.0, True, (3, None), 2)
    assert problem.gradients == () and problem.out_dtype == problem.dtype == "float32"
    assert operands.q is Q and operands.out is None
    assert hash(problem) == hash(replace(problem))
    assert check("forward", QKV)[0].scale == pytest.approx(8**-0.5, rel=1e-15)
    assert check("forward", QKV, {"dropout": (0.0, 7)})[0].dropout is None


def test_zero_sizes_are_ordinary():
    for shape in ((0, 6, 4, 8), (2, 0, 4, 8), (2, 6, 0, 8)):
        q = zeros(*shape)
        problem, _ = check("forward", {"q": q, "k": q, "v": q}, {"bias": zeros(*shape[:1], 1, 1, shape[1])})
        assert 0 in (problem.batch, problem.len_q, problem.heads)
    problem, _ = check("forward", QKV | {"k": K[:, :0], "v": V[:, :0]}, {"key_lengths": [0, 0]})
    assert problem.len_k == 0
    problem, _ = check(
        "forward", {n: a[:0] for n, a in PACKED.items()}, {"cu_seqlens_q": [0], "cu_seqlens_k": [0]}
    )
    assert problem.batch == 0 and problem.packed


@given(
    layout=st.sampled_from(["bshd", "bhsd", "packed"]),
    sizes=st.tuples(*[st.integers(1, 4)] * 6),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    flips=st.tuples(*[st.booleans()] * 4),
)
def test_canonical_views(layout, sizes, dtype, flips):
    """Every layout and sign of stride gives views of the caller's memory in the same canonical order."""
    batch, len_q, len_k, heads_k, head_dim, head_dim_v = sizes
    dtype = arrays.numpy_dtype(dtype)
    shapes = {
        "q": (batch, len_q, 2 * heads_k, head_dim),
        "k": (batch, len_k, heads_k, head_dim),
        "v": (batch, len_k, heads_k, head_dim_v),
        "out": (batch, len_q, 2 * heads_k, head_dim_v),
        "dout": (batch, len_q, 2 * heads_k, head_dim_v),
    }
    flip = tuple(slice(None, None, -1 if f else 1) for f in flips)
    canonical = {n: np.arange(np.prod(s)).reshape(s).astype(dtype)[flip] for n, s in shapes.items()}
    accumulator = np.float64 if dtype == np.float64 else np.float32
    canonical["lse"] = np.arange(batch * 2 * heads_k * len_q, dtype=accumulator).reshape(
        batch, 2 * heads_k, len_q
    )
    options = {
        "bias": np.zeros((2 * heads_k, 1, 1), dtype),
        "alibi_slopes": np.zeros(2 * heads_k, accumulator),
    }
    given_arrays = canonical
    if layout == "bhsd":
        given_arrays = {n: a.swapaxes(1, 2) if n != "lse" else a for n, a in canonical.items()}
        options["layout"] = "bhsd"
    if layout == "packed":
        canonical = {n: a[:1] for n, a in canonical.items()}
        given_arrays = {n: a[0] for n, a in canonical.items()}
        options |= {"cu_seqlens_q": [0, len_q, len_q], "cu_seqlens_k": [0, 0, len_k]}
    problem, operands = check("backward", given_arrays, options)
    for name, array in canonical.items():
        view = getattr(operands, name)
        assert view.shape == array.shape and np.shares_memory(view, array)
        np.testing.assert_array_equal(view, array)
        strides = tuple(s // array.itemsize for s in view.strides)
        assert problem.spec(name).strides == strides and problem.spec(name).dtype == array.dtype.name
    assert problem.batch == (2 if layout == "packed" else batch)
    assert problem.gradients == ("dq", "dk", "dv", "dbias", "dalibi_slopes")
    assert operands.bias.shape == (1, 2 * heads_k, 1, 1) and operands.alibi_slopes.shape == (1, 2 * heads_k)
    assert [name for name, _ in problem.specs] == sorted(name for name, _ in problem.specs)


def test_targets_become_operands():
    buffer = zeros(2, 4, 6, 3).swapaxes(1, 2)
    _, operands = check("forward", QKV, {"out": (buffer, LSE), "return_lse": True})
    assert operands.out is buffer and operands.lse is LSE
    grads = Gradients(dk=zeros(*K.shape), dbias=zeros(6, 5))
    problem, operands = check(
        "backward", BACKWARD, {"bias": zeros(6, 5), "grads": grads, "deterministic": True}
    )
    assert set(operands.grads) == {"dk", "dbias"} and operands.grads["dbias"].shape == (1, 1, 6, 5)
    slopes = zeros(1, 4)
    grads = Gradients(dalibi_slopes=zeros(1, 4))
    _, operands = check("backward", BACKWARD, {"alibi_slopes": slopes, "grads": grads})
    assert np.shares_memory(operands.grads["dalibi_slopes"], grads.dalibi_slopes)
    assert problem.deterministic and problem.spec("dk") is not None and problem.spec("dq") is None


def test_lengths():
    for value in ([2, 6], (2, 6), np.array([2, 6], np.uint8), np.array([2, 6], np.int32), range(2, 10, 4)):
        _, operands = check("forward", QKV, {"query_lengths": value})
        assert operands.query_lengths.dtype in (np.int32, np.int64) and list(operands.query_lengths) == [2, 6]
    problem, _ = check("forward", PACKED, CUMULATIVE | {"bias": zeros(2, 1, 9, 3)})
    assert problem.batch == 2 and problem.len_q == 6


def test_block_mask_covers_what_kernels_look_up():
    """A mask without its last empty columns, and packed sequences whose lengths only the device knows."""
    short = BlockMask(2, 2, [0, 1, 2, 3], [0, 0, 1])
    assert check("forward", QKV, {"block_mask": short})[1].block_mask.shape == (1, 1, 3, 3)
    ends = spec((3,), "int32")
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "block_mask": BlockMask.causal(4, 4, 2, 2)}
    _, operands = check("forward", PACKED, options, specs=True)
    assert operands.block_mask.shape == (1, 1, 3, 3) and operands.block_mask.n_kept == 3


def test_dlpack():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {n: torch.arange(float(a.size)).reshape(a.shape).to(dtype) for n, a in QKV.items()}
        problem, operands = check(
            "forward", {n: t.transpose(1, 2) for n, t in tensors.items()}, {"layout": "bhsd"}
        )
        assert problem.dtype == str(dtype).removeprefix("torch.")
        assert isinstance(operands.q, np.ndarray)
        tensors["q"][1, 2, 3, 4] = 7
        assert operands.q[1, 2, 3, 4] == 7, "the memory is shared"
        del tensors
        assert operands.k[0, 0, 0, 1] == 1, "the array keeps the tensor's memory alive"
    with pytest.raises(
        CuflashError, match=r"^attention: q \(torch.Tensor\) cannot be read in place: .*detach"
    ):
        check("forward", QKV | {"q": torch.zeros(2, 6, 4, 8, requires_grad=True)})
    with pytest.raises(
        CuflashError, match=r"^attention: q has a dtype that NumPy cannot hold .* float8 is planned"
    ):
        check("forward", QKV | {"q": torch.zeros(2, 6, 4, 8, dtype=torch.float8_e4m3fn)})


@pytest.mark.gpu
def test_dlpack_on_a_gpu():
    cupy = pytest.importorskip("cupy")
    torch = pytest.importorskip("torch")
    tensors = {n: torch.zeros(a.shape, dtype=torch.bfloat16, device="cuda") for n, a in QKV.items()}
    problem, operands = check("forward", tensors)
    assert problem.dtype == "bfloat16" and isinstance(operands.q, cupy.ndarray)
    assert operands.q.data.ptr == tensors["q"].data_ptr()
    with pytest.raises(CuflashError, match=r"^attention: k is on the host, q on cuda:0"):
        check("forward", tensors | {"k": K})


def test_specs():
    q = spec((2, 6, 4, 8), "bfloat16")
    k = spec((2, 5, 2, 8), "bfloat16", strides=(160, 16, 8, 1))
    problem, _ = check("forward", {"q": q, "k": k, "v": k}, specs=True)
    assert problem.spec("q") == q and problem.spec("k").strides == (160, 16, 8, 1)
    assert problem.spec("q").align == 256
    with pytest.raises(CuflashError, match=r"^'bf16' is no dtype\n"):
        spec((2, 3), "bf16")
    with pytest.raises(CuflashError, match=r"^None is no dtype\n"):
        spec((2, 3), None)


def test_overlaps_itself():
    base = np.zeros(64, np.float32)

    def view(shape, strides):
        return np.lib.stride_tricks.as_strided(base, shape, [4 * s for s in strides])

    for shape, strides in (
        ((2, 2), (3, 2)),
        ((4, 4), (4, 1)),
        ((4, 4), (1, 4)),
        ((1, 3), (0, 1)),
        ((0, 3), (0, 0)),
    ):
        assert not arrays.overlaps_itself(view(shape, strides)), (shape, strides)
    for shape, strides in (((2, 3), (2, 1)), ((2, 2), (0, 1)), ((3, 3), (2, 1)), ((2, 2), (1, 1))):
        assert arrays.overlaps_itself(view(shape, strides)), (shape, strides)
    assert not arrays.overlaps_itself(base[::-1])


def test_import_is_light():
    """import cuflash brings neither CuPy nor anything else that is slow to load."""
    code = (
        "import sys, cuflash; print(*[m for m in ('cupy', 'ml_dtypes', 'rich', 'torch') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


class Odd:
    """Nothing that any option takes; == raises, as with arrays of more than one element."""

    def __eq__(self, other):
        raise RuntimeError("==")

    __hash__ = None


ODD = {
    "object": Odd(), "array": np.zeros(3), "no array": np.zeros(0), "dtype": np.dtype("float64"),
    "set": {1}, "bytes": b"x", "complex": 1j, "huge": 10**400, "function": len, "type": int,
}  # fmt: skip
OPTIONS = sorted({*check_options.DEFAULTS, "return_lse", "deterministic", "out"} - {"kernel"})


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("option", OPTIONS)
def test_any_object_is_refused_in_words(option, odd):
    if (option, odd) in {("progress", "function"), ("progress", "type"), ("out_dtype", "dtype")}:
        return
    with pytest.raises(CuflashError, match=r"^attention: .*\n  "):
        check("forward", QKV, {option: ODD[odd]})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dropout": (np.nextafter(np.longdouble(1), 0), 7)}, "dropout has p = "),
        ({"softcap": 1e-50}, "softcap is 1e-50, too small for float32"),
        ({"softcap": 3e38}, "softcap is 3e+38, beyond float32"),
        ({"scale": -3e38}, "scale is -3e+38, beyond float32"),
        ({"query_offset": 2**60 + 1}, "query_offset lies from -2^60 to 2^60"),
        ({"window": (10**400, -1)}, "right is a whole number from 0"),
    ],
)
def test_numbers_that_kernels_cannot_hold(options, said):
    with pytest.raises(CuflashError, match=re.escape(said)):
        check("forward", QKV, options)


class Exporter:
    """Hands over a NumPy array by DLPack, or fails to."""

    def __init__(self, error):
        self.error = error

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        raise self.error


@pytest.mark.parametrize("error", [KeyError("x"), BufferError("no"), RuntimeError("no"), IndexError("i")])
def test_an_exporter_that_fails(error):
    with pytest.raises(CuflashError, match=r"q .*Exporter. cannot be read in place"):
        check("forward", QKV | {"q": Exporter(error)})


def test_a_pending_minus_of_torch_is_not_lost():
    torch = pytest.importorskip("torch")
    with pytest.raises(CuflashError, match=r"resolve_neg"):
        check("forward", QKV | {"q": torch._neg_view(torch.ones(Q.shape))})


@pytest.mark.parametrize(
    "arguments",
    [
        (7, "float32"), ((1.5,), "float32"), (("x",), "float32"), (np.zeros(2), "float32"),
        ((-1,), "float32"), ((2,), "float32", (1, 1)), ((2,), "float32", "x"), ((1 << 63,), "float32"),
        ((1,), "float32", (10**40,)), ((2,), np), ((2,), "none"),
    ],
)  # fmt: skip
def test_a_spec_that_is_no_array(arguments):
    with pytest.raises(CuflashError):
        spec(*arguments)
