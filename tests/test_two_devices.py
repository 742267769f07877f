"""Several GPUs in one process: arrays on a device that is not current, both in turn and at once."""

import threading

import numpy as np
import pytest

import cuflash
from cuflash import BlockMask, CuflashError, attention, attention_backward, attention_vjp
from cuflash.devices import gpu_count

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_count() < 2, reason="needs a CUDA device: a second one"),
]
NEAR, FAR = 0, 1


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def drawn(dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    q = random.standard_normal((2, 130, 4, 64)).astype(dtype)
    k, v = (random.standard_normal((2, 97, 2, 64)).astype(dtype) for _ in "kv")
    return q, k, v, random.standard_normal(q.shape).astype(dtype)


def sent(cupy, device, *arrays):
    with cupy.cuda.Device(device):
        moved = [cupy.asarray(array) for array in arrays]
        cupy.cuda.Device(device).synchronize()
    return moved


def both_passes(cupy, device, arrays, **options):
    """(out, lse, dq, dk, dv) on the host, of a call made while the near device is current."""
    *qkv, dout = sent(cupy, device, *arrays)
    with cupy.cuda.Device(NEAR):
        out, lse, vjp = attention_vjp(*qkv, return_lse=True, deterministic=True, **options)
        gradients = vjp(dout)
        results = [out, lse, gradients.dq, gradients.dk, gradients.dv]
        assert cupy.cuda.Device().id == NEAR, "the current device is left as it was"
    assert {array.device.id for array in results} == {device}
    cupy.cuda.Device(device).synchronize()
    return [array.get() for array in results]


def near_result(cupy, *arrays, **options):
    """out on the host, as the near device computes it by itself: the far one owes the same bits.

    That they are right is asked elsewhere; here every call has to reach the device of its arrays.
    """
    with cupy.cuda.Device(NEAR):
        out = attention(*sent(cupy, NEAR, *arrays), **options).get()
    assert np.isfinite(out).all() and out.any()
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"key_lengths": [97, 5], "query_lengths": [0, 130]},
        {"dropout": (0.25, 11), "window": (20, 20), "softcap": 3.0},
        {"block_mask": BlockMask.causal(130, 97, 32, 32)},
    ],
    ids=["causal", "host lengths", "dropout", "block mask"],
)
def test_the_far_device_gives_the_same_bits(cupy, options):
    near, far = (both_passes(cupy, device, drawn(), **options) for device in (NEAR, FAR))
    for a, b in zip(near, far, strict=True):
        assert np.array_equal(a, b)


def test_devices_in_turn_keep_to_themselves(cupy):
    """Warm calls of one shape: each device has its own prepared calls, modules and numbers."""
    arrays = {device: drawn(seed=device)[:3] for device in (NEAR, FAR)}
    there = {device: sent(cupy, device, *arrays[device]) for device in arrays}
    want = {device: near_result(cupy, *arrays[device], causal=True) for device in arrays}
    for device in (NEAR, FAR, NEAR, FAR, FAR, NEAR):
        out = attention(*there[device], causal=True)
        assert out.device.id == device
        cupy.cuda.Device(device).synchronize()
        assert np.array_equal(out.get(), want[device])


def test_the_stream_is_the_far_devices_own(cupy):
    """Work goes to the current stream of the arrays' device, after what was put there before."""
    arrays = drawn()
    q, k, v, _ = sent(cupy, FAR, *arrays)
    with cupy.cuda.Device(FAR):
        big = cupy.zeros((4096, 4096), np.float32)
        target = cupy.full_like(q, np.nan)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for _ in range(20):
                big = big + 1  # keeps the stream busy while q still holds NaN
            late = cupy.full_like(q, np.nan)
            late[...] = q
            with cupy.cuda.Device(NEAR):
                attention(late, k, v, causal=True, out=target)
        stream.synchronize()
    assert np.array_equal(target.get(), near_result(cupy, *arrays[:3], causal=True))


def test_threads_on_both_devices_at_once(cupy):
    wrong = []
    wanted = {device: near_result(cupy, *drawn(seed=10 + device)[:3], causal=True) for device in (NEAR, FAR)}

    def work(device):
        arrays, want = drawn(seed=10 + device), wanted[device]
        qkv = sent(cupy, device, *arrays[:3])
        with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
            for turn in range(30):
                out = attention(*qkv, causal=True)
                stream.synchronize()
                if not np.array_equal(out.get(), want):
                    wrong.append((device, turn))

    threads = [threading.Thread(target=work, args=(device,)) for device in (NEAR, FAR, NEAR, FAR)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_packed_lengths_on_the_far_device(cupy):
    random = np.random.default_rng(3)
    q, k, v = (random.standard_normal((60, 4, 32)).astype(np.float32) for _ in "qkv")
    cu_seqlens = np.array([0, 7, 7, 50])
    there = sent(cupy, FAR, q, k, v, cu_seqlens)
    out = attention(*there[:3], cu_seqlens_q=there[3], cu_seqlens_k=there[3])
    cupy.cuda.Device(FAR).synchronize()
    lengths = sent(cupy, NEAR, cu_seqlens)[0]
    want = near_result(cupy, q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    assert np.array_equal(out.get(), want)


def test_what_is_beside_attention_runs_there_too(cupy):
    q, k, v, _ = drawn()
    far = sent(cupy, FAR, q, k, v)
    pairs = [
        (cuflash.attention_weights(*far[:2], rows=[0, 100]), cuflash.attention_weights(q, k, rows=[0, 100])),
        (cuflash.key_importance(*far[:2]), cuflash.key_importance(q, k)),
        (cuflash.row_stats(*far[:2]).entropy, cuflash.row_stats(q, k).entropy),
        tuple(cuflash.dropout_mask(1, 2, 9, 70, (0.5, 4), device=where) for where in (FAR, None)),
    ]
    for found, want in pairs:
        assert found.device.id == FAR
        np.testing.assert_allclose(found.get().astype(np.float64), want.astype(np.float64), rtol=0, atol=5e-5)


def test_arrays_on_two_devices_are_refused(cupy):
    q, k, v, dout = drawn()
    near, far = sent(cupy, NEAR, q, k, v, dout), sent(cupy, FAR, q, k, v, dout)
    with pytest.raises(CuflashError, match=r"k is on cuda:1, q on cuda:0"):
        attention(near[0], far[1], near[2])
    with pytest.raises(CuflashError, match=r"cuda:1"):
        attention(*near[:3], out=far[0])
    out, lse = attention(*near[:3], return_lse=True)
    with pytest.raises(CuflashError, match=r"dout is on cuda:1"):
        attention_backward(far[3], *near[:3], out, lse)


def test_torch_tensors_on_the_far_device(cupy):
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("this torch has no second CUDA device")
    arrays = drawn()
    far = [torch.from_numpy(array).to(f"cuda:{FAR}") for array in arrays[:3]]
    torch.cuda.synchronize(FAR)
    out = attention(*far, causal=True)
    assert out.device.id == FAR
    cupy.cuda.Device(FAR).synchronize()
    assert np.array_equal(out.get(), near_result(cupy, *arrays[:3], causal=True))
