"""Attention as one writes it with arrays: whole score matrices, in CuPy or NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.arrays import numpy_dtype
from cuflash.bench.contenders import Prepared
from cuflash.bench.inputs import Inputs
from cuflash.bench.peer import ALL, HALF, Peer


class Unfused(Peer):
    """softmax(q k^T) v with whole score matrices, in CuPy or NumPy; the backward has P from its forward."""

    score_arrays = 3.5
    does = ("scale", "query_offset")

    def __init__(
        self, name: str, place: str, needs: tuple[str, ...] = (), dtypes: tuple[str, ...] = ALL
    ) -> None:
        self.name, self.place, self.needs, self.dtypes = name, place, needs, dtypes

    def prepare(self, inputs: Inputs, fresh: bool) -> Prepared:
        n, xp, shape = len(inputs.sets), inputs.xp, inputs.shape
        group = shape.heads // shape.heads_k
        # NumPy multiplies 16-bit floats one by one; float32 is what a user would take
        element = numpy_dtype("float32" if xp is np and shape.dtype in HALF else shape.dtype)

        def by_head(x: Any) -> Any:
            x = x.transpose(0, 2, 1, 3).astype(element, copy=False)
            return xp.repeat(x, shape.heads // x.shape[1], axis=1)

        scale = inputs.problem.scale
        hidden = None
        if shape.causal:
            offset = inputs.problem.query_offset
            offset = shape.len_k - shape.len_q if offset is None else offset
            hidden = ~xp.tri(shape.len_q, shape.len_k, offset, dtype=bool)

        def probabilities(q: Any, k: Any) -> Any:
            S = xp.matmul(q, k.swapaxes(-1, -2)).astype(_wide(element), copy=False)
            S *= scale
            if hidden is not None:
                S[..., hidden] = -np.inf
            S -= S.max(axis=-1, keepdims=True)
            xp.exp(S, out=S)
            S /= S.sum(axis=-1, keepdims=True)
            return S.astype(element, copy=False)

        kept: dict[str, Any] = {}
        if shape.direction == "forward":

            def call(i: int) -> None:
                q, k, v = (by_head(inputs.sets[i % n][name]) for name in "qkv")
                out = xp.matmul(probabilities(q, k), v)
                if i % n == 0:
                    kept["out"] = out.transpose(0, 2, 1, 3)
        else:
            saved = []
            for one in inputs.sets:
                q, k, v, dout = (by_head(one[name]) for name in ("q", "k", "v", "dout"))
                saved.append((q, k, v, dout, probabilities(q, k)))

            def call(i: int) -> None:
                q, k, v, dO, P = saved[i % n]
                dV = xp.matmul(P.swapaxes(-1, -2), dO)
                dS = xp.matmul(dO, v.swapaxes(-1, -2)).astype(_wide(element), copy=False)
                dS -= (dS * P).sum(axis=-1, keepdims=True)
                dS *= P
                dS *= scale
                dS = dS.astype(element, copy=False)
                found = xp.matmul(dS, k), xp.matmul(dS.swapaxes(-1, -2), q), dV
                if i % n == 0:
                    kept.update(zip(("dq", "dk", "dv"), found, strict=True))

        def results() -> dict[str, Any]:
            if shape.direction == "forward":
                return dict(kept)
            own = {name: x.transpose(0, 2, 1, 3) for name, x in kept.items()}
            for name in ("dk", "dv"):
                b, length, _, d = own[name].shape
                own[name] = own[name].reshape(b, length, shape.heads_k, group, d).sum(axis=3)
            return own

        return Prepared(call, results, self.name, family="numpy" if xp is np else "cupy")


def _wide(element: np.dtype) -> np.dtype:
    return np.dtype("float64" if element == np.float64 else "float32")
