"""PyTorch's attention, and what is called through PyTorch: FlashAttention-3 and -4."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.arrays import numpy_dtype
from cuflash.bench.contenders import Prepared
from cuflash.bench.inputs import Inputs
from cuflash.bench.peer import HALF, Peer, bits_of
from cuflash.bench.shapes import Shape
from cuflash.bench.timing import capture_torch
from cuflash.errors import CuflashError

DECODE_ROWS = 16  # up to here FlashAttention-3 is asked through its KV-cache entry, which splits over keys


def to_torch(array: Any) -> Any:
    """The same memory as a torch tensor, NumPy and CuPy alike."""
    import torch

    name = array.dtype.name
    bits = array.view(bits_of(name))
    tensor = torch.from_numpy(bits) if isinstance(array, np.ndarray) else torch.from_dlpack(bits)
    return tensor.view(getattr(torch, name))


def from_torch(tensor: Any) -> Any:
    """A tensor as a NumPy or CuPy array on the same memory."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    bits = tensor.detach().contiguous().view(getattr(torch, bits_of(name)))
    if tensor.device.type == "cpu":
        return bits.numpy().view(numpy_dtype(name))
    import cupy

    return cupy.from_dlpack(bits).view(numpy_dtype(name))


class _TorchPeer(Peer):
    """Keeps the last results of set 0; a subclass says how attention is called."""

    needs: tuple[str, ...] = ("torch",)
    heads_second = True  # (batch, heads, length, dim), contiguous

    def attend(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        """The function (q, k, v) -> out."""
        raise NotImplementedError

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        yield

    def prepare(self, inputs: Inputs, fresh: bool) -> Prepared:
        import torch

        attend, n = self.attend(inputs), len(inputs.sets)
        sets = [{name: self._in_order(to_torch(x)) for name, x in one.items()} for one in inputs.sets]
        kept: dict[str, Any] = {}

        @contextlib.contextmanager
        def without_gradients() -> Iterator[None]:
            with self.around(), torch.no_grad():
                yield

        if inputs.shape.direction == "forward":

            def call(i: int) -> None:
                one = sets[i % n]
                out = attend(one["q"], one["k"], one["v"])
                if i % n == 0:
                    kept["out"] = out

            around = without_gradients
        else:
            graphs = []
            with self.around():
                for one in sets:
                    leaves = tuple(one[name].requires_grad_() for name in "qkv")
                    graphs.append((attend(*leaves), leaves, one["dout"]))

            def call(i: int) -> None:
                out, leaves, dout = graphs[i % n]
                grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
                if i % n == 0:
                    kept.update(zip(("dq", "dk", "dv"), grads, strict=True))

            around = self.around

        def results() -> dict[str, Any]:
            return {name: from_torch(self._back(tensor)) for name, tensor in kept.items()}

        on_gpu = self.place == "gpu"
        return Prepared(
            call, results, self.name, around=around, family="torch" if on_gpu else "",
            capture=capture_torch if on_gpu else None,
        )  # fmt: skip

    def _in_order(self, tensor: Any) -> Any:
        return tensor.transpose(1, 2).contiguous() if self.heads_second else tensor

    def _back(self, tensor: Any) -> Any:
        return tensor.transpose(1, 2) if self.heads_second else tensor


class Sdpa(_TorchPeer):
    """PyTorch's scaled_dot_product_attention with one backend; backend None lets PyTorch choose (CPU)."""

    does = ("scale", "bias", "mask")
    aligned = "top-left"

    def __init__(self, name: str, backend: str | None, dtypes: tuple[str, ...], place: str = "gpu",
                 score_arrays: float = 0.0) -> None:  # fmt: skip
        self.name, self.backend, self.dtypes, self.place = name, backend, dtypes, place
        self.score_arrays = score_arrays
        self.best = backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION")

    def refuses(self, shape: Shape) -> str | None:
        if shape.causal and {"bias", "mask"} & set(shape.drawn):
            return "takes causal or a mask, not both"
        return super().refuses(shape)

    def attend(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        import torch.nn.functional as F

        shape, options = inputs.shape, inputs.options
        if options.get("bias") is not None and options.get("mask") is not None:
            raise CuflashError("takes a bias or a mask, not both")
        given = options.get("bias", options.get("mask"))
        mask = None
        if given is not None:
            mask = to_torch(given) if given.dtype != bool else to_torch(given.view(np.int8)).bool()
        keywords = {"attn_mask": mask, "is_causal": shape.causal, "scale": options.get("scale")}
        if shape.heads != shape.heads_k:
            keywords["enable_gqa"] = True
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **keywords)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        if self.backend is None:
            yield
            return
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            yield


class FlashAttention3(_TorchPeer):
    """The fa3-fwd wheel: FlashAttention-3, forward only."""

    name = "fa3"
    needs = ("torch", "fa3_fwd_interface")
    directions = ("forward",)
    dtypes = HALF
    best = True
    does = ("scale", "window", "softcap")
    heads_second = False

    def attend(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        import fa3_fwd_interface as fa3

        options = inputs.options
        left, right = options.get("window", (None, None))
        keywords = {
            "causal": inputs.shape.causal,
            "softmax_scale": options.get("scale"),
            "window_size": (-1 if left is None else left, -1 if right is None else right),
            "softcap": options.get("softcap") or 0.0,
        }
        attention = fa3.flash_attn_func
        if inputs.shape.len_q <= DECODE_ROWS:
            attention = fa3.flash_attn_with_kvcache
        return lambda q, k, v: _first(attention(q, k, v, **keywords))


class FlashAttention4(_TorchPeer):
    """flash-attn-4: kernels in CuTe DSL, compiled by each process unless its cache on disk is on."""

    name = "fa4"
    needs = ("torch", "flash_attn.cute")
    dtypes = HALF
    best = compiles = True
    does = ("scale", "window", "softcap")
    heads_second = False

    def attend(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        # the child process that tries a shape leaves its compiled kernels to this one
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        from flash_attn.cute.interface import flash_attn_func

        options = inputs.options
        keywords = {
            "causal": inputs.shape.causal,
            "softmax_scale": options.get("scale"),
            "window_size": options.get("window", (None, None)),
            "softcap": options.get("softcap") or 0.0,
        }
        return lambda q, k, v: _first(flash_attn_func(q, k, v, **keywords))

    def built_for(self, shape: Shape) -> Shape:
        """Lengths are arguments of its kernels."""
        return replace(shape, batch=1, len_q=1, len_k=1, heads=shape.heads // shape.heads_k, heads_k=1)


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found
