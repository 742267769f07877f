"""Arrays on a device that is not current, on a machine without one: see fake_cupy.py.

What two GPUs compute is asked by test_two_devices.py; here, where each step would run.
"""

import fake_cupy
import numpy as np
import pytest

import cuflash
from cuflash import BlockMask, CuflashError, attention, attention_backward, attention_vjp, reference

NEAR, FAR = 0, 1


@pytest.fixture
def cupy(monkeypatch):
    fake_cupy.forget()
    yield fake_cupy.install(monkeypatch)
    fake_cupy.forget()


def sent(device, *shapes, dtype=np.float32):
    """Arrays of a device, which is current no longer."""
    with fake_cupy.Device(device):
        rng = np.random.default_rng(0)
        return [fake_cupy.new(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def qkv(device):
    return sent(device, (2, 50, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64))


def are_far(*arrays):
    return all(array.device.id == FAR for array in arrays) and fake_cupy.CURRENT == [NEAR]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key_lengths": [40, 5], "query_lengths": [0, 50]},
        {"dropout": (0.25, 11), "window": (20, 20), "softcap": 3.0},
        {"block_mask": BlockMask.causal(50, 40, 32, 32)},
        {"kernel": "fwd_02_tiled"},
    ],
    ids=["plain", "host lengths", "dropout", "block mask", "named"],
)
def test_kernels_start_on_the_device_and_stream_of_the_arrays(cupy, options):
    q, k, v = qkv(FAR)
    for _ in "a cold call, and warm ones":
        out, lse = attention(q, k, v, return_lse=True, **options)
        assert are_far(out, lse)
    options.pop("kernel", None)
    gradients = attention_backward(out, q, k, v, out, lse, deterministic=True, **options)
    assert are_far(gradients.dq, gradients.dk, gradients.dv)
    out, vjp = attention_vjp(q, k, v, **options)
    assert are_far(out, vjp(out).dk)
    assert set(cupy.launches) == {(FAR, 100 + FAR)} and len(cupy.launches) > 20


def test_calls_of_one_shape_keep_to_their_devices(cupy):
    there = {device: qkv(device) for device in (NEAR, FAR)}
    for device in (NEAR, FAR, NEAR, FAR, FAR, NEAR):
        cupy.launches.clear()
        assert attention(*there[device], causal=True).device.id == device
        assert set(cupy.launches) == {(device, 100 + device)} and fake_cupy.CURRENT == [NEAR]


def test_a_launch_that_fails_leaves_the_current_device_as_it_was(cupy, monkeypatch):
    def fail(*_):
        raise OSError("out of resources")

    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", fail)
    with pytest.raises(CuflashError, match="could not be launched on device 1"):
        attention(*qkv(FAR))
    assert fake_cupy.CURRENT == [NEAR]


def test_arrays_on_two_devices_are_refused(cupy):
    near, far = qkv(NEAR), qkv(FAR)
    target = sent(FAR, near[0].shape)[0]
    out, lse = attention(*near, return_lse=True)
    cupy.launches.clear()
    with pytest.raises(CuflashError, match=r"k is on cuda:1, q on cuda:0"):
        attention(near[0], far[1], near[2])
    with pytest.raises(CuflashError, match=r"out is on cuda:1"):
        attention(*near, out=target)
    with pytest.raises(CuflashError, match=r"dout is on cuda:1"):
        attention_backward(target, *near, out, lse)
    with pytest.raises(CuflashError, match=r"cuda:0, cuda:1"):
        cuflash.merge([out, target], [lse, lse])
    assert not cupy.launches


def test_what_is_beside_attention_runs_there_too(cupy):
    q, k, v = qkv(FAR)
    host = [array.get() for array in (q, k, v)]
    weights = cuflash.attention_weights(q, k, rows=[0, 49])
    stats = cuflash.row_stats(q, k)
    assert are_far(weights, *stats, cuflash.key_importance(q, k))
    np.testing.assert_array_equal(weights.get(), cuflash.attention_weights(*host[:2], rows=[0, 49]))
    np.testing.assert_array_equal(stats.entropy.get(), cuflash.row_stats(*host[:2]).entropy)
    assert are_far(cuflash.dropout_mask(1, 2, 9, 70, (0.5, 4), device=FAR))
    outs, lses = sent(FAR, q.shape, q.shape), sent(FAR, (2, 4, 50), (2, 4, 50))
    out, lse = cuflash.merge(outs, lses)
    douts, dlses = cuflash.merge_backward(outs[0], None, outs, lses, outs[0], lses[0])
    assert are_far(out, lse, *douts, *dlses)
    assert set(cupy.launches) == {(FAR, 100 + FAR)}


def test_the_specification_runs_there_too(cupy):
    q, k, v = qkv(FAR)
    host = [array.get() for array in (q, k, v)]
    bias = sent(FAR, (50, 40))[0]
    options = dict(causal=True, dropout=(0.5, 3))
    out, lse, vjp = reference.attention_vjp(q, k, v, return_lse=True, bias=bias, **options)
    found = vjp(out)
    assert are_far(out, lse, found.dq, found.dbias)
    want, _, wanted_vjp = reference.attention_vjp(*host, return_lse=True, bias=bias.get(), **options)
    np.testing.assert_allclose(out.get(), want, atol=1e-12)
    np.testing.assert_allclose(found.dbias.get(), wanted_vjp(want).dbias, atol=1e-12)
    target = sent(FAR, q.shape)[0]
    assert are_far(reference.attention(q, k, v, out=target)) and are_far(target)
    onnx = [array.swapaxes(1, 2) for array in (q, k, v)]
    past = onnx[1], onnx[2]
    outputs = cuflash.compat.onnx_attention(*onnx, None, *past, is_causal=1, n_outputs=4)
    assert are_far(*outputs)
