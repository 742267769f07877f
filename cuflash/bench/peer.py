"""What a peer is: another library's attention as a contender.

A peer gets the same arrays (without a copy where the library allows), in the axis order it likes best, made
beforehand.  It refuses in a sentence what it does not do.  Nothing is imported before it is needed.
"""

from __future__ import annotations

import importlib.util

from cuflash.arrays import numpy_dtype
from cuflash.bench.contenders import Prepared
from cuflash.bench.inputs import Inputs
from cuflash.bench.shapes import Shape

HALF = ("float16", "bfloat16")
ALL = (*HALF, "float32", "float64")


class Peer:
    """A contender of another library.

    module: where the list PEERS has it.  place: "gpu" or "cpu".  needs: modules that must be importable.
    does: options it takes beyond causal.  aligned: where its causal diagonal ends when len_q and len_k
    differ.  score_arrays: how many float32 arrays of len_q x len_k it holds per head.  compiles: it builds
    something for every shape, and is tried by several children.  best: it may be the fastest there is.
    """

    name: str
    kind = "peer"
    module = "cuflash.bench.peers"
    place = "gpu"
    needs: tuple[str, ...] = ()
    directions: tuple[str, ...] = ("forward", "backward")
    dtypes: tuple[str, ...] = ALL
    does: tuple[str, ...] = ("scale",)
    aligned = "bottom-right"
    score_arrays = 0.0
    compiles = False
    best = False

    def missing(self) -> str | None:
        """The module that is not installed, in words."""
        for module in self.needs:
            try:
                found = importlib.util.find_spec(module)
            except (ImportError, ValueError):
                found = None
            if found is None:
                return f"{module} is not installed"
        return None

    def refuses(self, shape: Shape) -> str | None:
        """What it does not do, before anything is tried."""
        if shape.direction not in self.directions:
            return f"has no {shape.direction}"
        if shape.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {shape.dtype}"
        for name in (*dict(shape.settings), *shape.drawn):
            if name not in ("causal", *self.does):
                return f"does no {name}"
        offset = dict(shape.settings).get("query_offset")
        if shape.causal and (shape.len_q != shape.len_k or offset is not None):
            own = 0 if self.aligned == "top-left" else shape.len_k - shape.len_q
            wanted = shape.len_k - shape.len_q if offset is None else offset
            if own != wanted:
                return f"its causal mask is {self.aligned}"
        return None

    def built_for(self, shape: Shape) -> Shape:
        """What a compiled kernel of it depends on: shapes for which this is equal share one."""
        return shape

    def needed_bytes(self, shape: Shape) -> float:
        """Of scores, roughly; 0 for what never holds them."""
        scores = shape.batch * shape.heads * shape.len_q * shape.len_k
        return 4 * scores * self.score_arrays * (1 if shape.direction == "forward" else 1.7)

    def prepare(self, inputs: Inputs, fresh: bool) -> Prepared:
        raise NotImplementedError


def bits_of(dtype: str) -> str:
    """An integer dtype of the same size: bfloat16 travels as bits, which every library exchanges."""
    return f"int{8 * numpy_dtype(dtype).itemsize}"
