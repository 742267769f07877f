"""JAX's attention, and FlashAttention-3's backward, whose only wheel is for JAX."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from cuflash import cache
from cuflash.arrays import numpy_dtype
from cuflash.bench.contenders import Prepared
from cuflash.bench.inputs import Inputs
from cuflash.bench.peer import HALF, Peer, bits_of
from cuflash.bench.shapes import Shape
from cuflash.bench.timing import AwaitedClock
from cuflash.errors import CuflashError


def _jax() -> Any:
    """JAX without its habit of taking three quarters of the GPU's memory at once.

    What the child process that tries a shape compiles is kept on disk for this one.
    """
    first = "jax" not in sys.modules
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if first and jax.config.jax_compilation_cache_dir is None:
        folder = cache.wanted_directory() or cache.temporary_directory()
        jax.config.update("jax_compilation_cache_dir", str(folder / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return jax


def to_jax(array: Any) -> Any:
    """A JAX array with the same numbers."""
    jax = _jax()
    bits = jax.dlpack.from_dlpack(array.view(bits_of(array.dtype.name)))
    return jax.lax.bitcast_convert_type(bits, getattr(jax.numpy, array.dtype.name))


def from_jax(array: Any) -> Any:
    """A JAX array on a GPU as a CuPy array."""
    import cupy

    jax, name = _jax(), str(array.dtype)
    bits = jax.lax.bitcast_convert_type(array, getattr(jax.numpy, bits_of(name)))
    return cupy.from_dlpack(bits.block_until_ready()).view(numpy_dtype(name))


class _JaxPeer(Peer):
    """Jitted calls on JAX's own stream, timed by the processor's clock around a whole burst."""

    needs: tuple[str, ...] = ("jax",)
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    aligned = "top-left"
    compiles = True

    def functions(self, inputs: Inputs) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(q, k, v) -> (out, what the backward needs), and (that, dout) -> (dq, dk, dv)."""
        raise NotImplementedError

    def prepare(self, inputs: Inputs, fresh: bool) -> Prepared:
        jax = _jax()
        if not any(device.platform == "gpu" for device in jax.devices()):
            raise CuflashError("JAX sees no GPU")
        forward, backward = self.functions(inputs)
        n = len(inputs.sets)
        inputs.xp.cuda.runtime.deviceSynchronize()
        sets = [{name: to_jax(x) for name, x in one.items()} for one in inputs.sets]
        kept: dict[str, Any] = {}
        last: list[Any] = [()]
        precision = "highest" if inputs.shape.dtype == "float32" else "default"
        if inputs.shape.direction == "forward":

            def call(i: int) -> None:
                one = sets[i % n]
                last[0] = out = forward(one["q"], one["k"], one["v"])[0]
                if i % n == 0:
                    kept["out"] = out
        else:
            with jax.default_matmul_precision(precision):
                saved = [forward(one["q"], one["k"], one["v"])[1] for one in sets]

            def call(i: int) -> None:
                last[0] = grads = backward(saved[i % n], sets[i % n]["dout"])
                if i % n == 0:
                    kept.update(zip(("dq", "dk", "dv"), grads, strict=True))

        return Prepared(
            call,
            lambda: {name: from_jax(array) for name, array in kept.items()},
            self.name,
            clock=AwaitedClock(lambda: jax.block_until_ready(last[0])),
            around=lambda: jax.default_matmul_precision(precision),
        )


class JaxAttention(_JaxPeer):
    """jax.nn.dot_product_attention, implementation "xla" or "cudnn"."""

    def __init__(self, name: str, implementation: str, dtypes: tuple[str, ...], score_arrays: float) -> None:
        self.name, self.implementation, self.dtypes = name, implementation, dtypes
        self.score_arrays = score_arrays

    def functions(self, inputs: Inputs) -> tuple[Callable[..., Any], Callable[..., Any]]:
        jax, causal, scale = _jax(), inputs.shape.causal, inputs.options.get("scale")

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, implementation=self.implementation
            )

        if inputs.shape.direction == "forward":
            return jax.jit(lambda q, k, v: (attend(q, k, v),)), lambda saved, dout: ()
        return jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)), jax.jit(lambda saved, dout: saved(dout))


class FlashAttention3Jax(_JaxPeer):
    """The flash-attn3-jax wheel, called through its foreign functions; self-attention only."""

    name = "fa3_jax"
    needs = ("jax", "flash_attn3_jax_lib")
    dtypes = HALF
    best = True
    aligned = "bottom-right"

    def refuses(self, shape: Shape) -> str | None:
        if max(shape.head_dim, shape.head_dim_v) > 128:
            return "takes head_dim up to 128"
        return super().refuses(shape)

    def functions(self, inputs: Inputs) -> tuple[Callable[..., Any], Callable[..., Any]]:
        jax = _jax()
        import flash_attn3_jax_lib.flash_api as api

        jnp, shape = jax.numpy, inputs.shape
        for name, target in api.get_ffi_registrations().items():
            with contextlib.suppress(Exception):  # registered already
                jax.ffi.register_ffi_target(name, target, platform="CUDA")
        scale = inputs.options.get("scale") or 1 / math.sqrt(shape.head_dim)
        common = {
            "softmax_scale_val": scale, "softmax_scale_has_value": True, "is_causal": shape.causal,
            "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "sm_margin": 0,
        }  # fmt: skip
        no_ints, no_floats = jnp.array([], jnp.int32), jnp.array([], jnp.float32)
        Spec = jax.ShapeDtypeStruct
        # Of the backward's float32 workspaces, filled by blocks of 64, 80 or 128 rows: up to 127 rows more.
        rows = -(-(shape.len_q + 127) // 128) * 128

        def forward(q: Any, k: Any, v: Any) -> Any:
            b, length, h, _ = q.shape
            none = jnp.zeros((0,), q.dtype)
            results = (
                Spec(q.shape, q.dtype), Spec((b, h, length), jnp.float32), Spec((1,) * 4, jnp.float32),
                Spec((1,) * 3, jnp.float32),
            )  # fmt: skip
            out, lse, *_ = jax.ffi.ffi_call("flash_mha_fwd", results)(
                q, k, v, none, none, none, *[no_ints] * 8, none, none, no_ints, *[no_floats] * 3, no_ints,
                max_seqlen_q=length, max_seqlen_q_has_value=True, max_seqlen_k=k.shape[1],
                max_seqlen_k_has_value=True, pack_gqa_val=False, pack_gqa_has_value=False, attention_chunk=0,
                is_rotary_interleaved=False, num_splits=1, **common,
            )  # fmt: skip
            return out, (q, k, v, out, lse)

        def backward(saved: Any, dout: Any) -> Any:
            q, k, v, out, lse = saved
            b, length, h, _ = q.shape
            results = (
                *(Spec(x.shape, x.dtype) for x in (q, k, v)),
                *[Spec((b, h, rows), jnp.float32)] * 2,
            )
            return jax.ffi.ffi_call("flash_mha_bwd", results)(
                dout, q, k, v, out, lse, *[no_ints] * 4, max_seqlen_q_val=length, max_seqlen_q_has_value=True,
                max_seqlen_k_val=k.shape[1], max_seqlen_k_has_value=True, deterministic=False, **common,
            )[:3]  # fmt: skip

        return jax.jit(forward), jax.jit(backward)
