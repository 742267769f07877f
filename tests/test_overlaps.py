"""Launches that may start before the one before them has ended: programmatic dependent launch."""

import ctypes

import pytest

import cuflash
from cuflash import backends, build, devices, rows

HOPPER_BACKWARD = [row for row in rows.BACKWARD if any(step.overlaps for step in row.steps)]


def explain(device="sm_90a", head_dim=64, **options):
    q = cuflash.spec((2, 512, 8, head_dim), "bfloat16")
    return cuflash.explain(q, q, q, device=device, backward=True, **options)


def test_kernel_and_last_pass_overlap_on_hopper():
    found = explain()
    assert [launch.overlaps for launch in found.launches] == [False, True, True]
    lines = [line for line in str(found).splitlines() if "starts while the one before ends" in line]
    assert len(lines) == 2


def test_nothing_overlaps_before_hopper_or_at_the_start_of_a_call():
    assert not any(launch.overlaps for launch in explain("sm_80").launches)
    for row in HOPPER_BACKWARD:
        assert not row.steps[0].overlaps, row.name


def test_kernels_that_overlap_wait():
    """Wherever the flag stands the kernel has the instruction: without it, it would read too soon."""
    steps = {step.entry: step for row in HOPPER_BACKWARD for step in row.steps if step.overlaps}
    assert {"bwd_06_specialize", "pass_query_tiles__close"} <= set(steps)
    for step in steps.values():
        assert "previous_kernel_wait();" in build.expand(step.file), step.entry


def test_what_the_driver_is_asked(monkeypatch):
    """Sizes, stream and one attribute: programmatic stream serialization allowed."""
    asked = []

    def launch_ex(reference, function, parameters, extra):
        config = ctypes.cast(reference, ctypes.POINTER(backends._Config)).contents
        one = config.attributes[0]
        grid, block = ([getattr(config, f"{name}_{axis}") for axis in "xyz"] for name in ("grid", "block"))
        attribute = config.n_attributes, one.id, one.value
        asked.append(
            (
                grid,
                block,
                config.shared_bytes,
                config.stream,
                attribute,
                function.value,
                parameters.value,
                extra,
            )
        )
        return 0

    monkeypatch.setattr(backends.driver, "function", {"cuLaunchKernelEx": launch_ex}.get)
    launch = backends.Overlapping((77, 2, 3, 4, 128, 1, 1, 50_000))
    assert launch(1234, 99) == 0 and launch(5678, 98) == 0
    sizes, attribute = ([2, 3, 4], [128, 1, 1], 50_000), (1, 6, 1)
    assert asked == [
        (*sizes, 1234, attribute, 77, 99, None),
        (*sizes, 5678, attribute, 77, 98, None),
    ]
    assert (ctypes.sizeof(backends._Config), ctypes.sizeof(backends._Attribute)) == (56, 72)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_on_a_gpu(head_dim):
    """Calls one after the other and replays of a graph give what a kernel without overlaps gives."""
    import cupy

    if devices.gpu(0).arch != 90:
        pytest.skip("needs sm_90")
    draw = cupy.random.RandomState(0).standard_normal
    shape = (4, 640, 16, head_dim)
    q, k, v, dout = (draw(shape, dtype=cupy.float32).astype(cupy.float16) for _ in range(4))
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    expected = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, kernel="bwd_04_pipeline")[:3]
    found = cuflash.explain(q, k, v, causal=True, backward=True)
    assert any(launch.overlaps for launch in found.launches)

    grads = cuflash.Gradients(*(cupy.empty_like(x) for x in (q, k, v)))
    workspace = cupy.empty(found.workspace_bytes, cupy.uint8)

    def call():
        cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, grads=grads, workspace=workspace)

    def right():
        for x, y in zip(grads[:3], expected, strict=True):
            difference = abs(x.astype(cupy.float32) - y.astype(cupy.float32)).max()
            assert float(difference) < 0.02 * float(abs(y).max())  # NaN fails

    for _ in range(50):
        call()
    right()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    for x in grads[:3]:
        x.fill(float("nan"))
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        graph.launch(stream)
    stream.synchronize()
    right()
