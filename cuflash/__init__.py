"""Exact attention for CuPy and NumPy.

    out = cuflash.attention(q, k, v, causal=True)          # (batch, len, heads, head_dim), NumPy or CuPy

Start at cuflash.attention.  A call goes through check.py, plan.py, build.py, launch.py and prepared.py;
with NumPy arrays through check.py and tiled.py.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# attention, merge and trace are functions named like their modules: imported now, so the names mean functions
from cuflash.arrays import spec
from cuflash.attention import Gradients, attention, attention_backward, attention_vjp, explain
from cuflash.blockmask import BlockMask
from cuflash.errors import CuflashError
from cuflash.merge import merge, merge_backward
from cuflash.trace import trace

if TYPE_CHECKING:
    from cuflash import compat, emulator, lab, reference
    from cuflash.ahead import warmup
    from cuflash.introspect import attention_weights, key_importance, row_stats
    from cuflash.philox import dropout_mask

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "CuflashError",
    "Gradients",
    "attention",
    "attention_backward",
    "attention_vjp",
    "attention_weights",
    "compat",
    "dropout_mask",
    "emulator",
    "explain",
    "key_importance",
    "lab",
    "merge",
    "merge_backward",
    "reference",
    "row_stats",
    "spec",
    "trace",
    "warmup",
]

# imported when first asked for: name -> module that holds it
_LATER = {
    "attention_weights": "introspect",
    "key_importance": "introspect",
    "row_stats": "introspect",
    "dropout_mask": "philox",
    "warmup": "ahead",
}
_MODULES = ("compat", "emulator", "lab", "reference")
_PLANNED = {
    "attention_jvp": "forward-mode differentiation (JVP)",
    "attention_double_backward": "differentiating the gradients again",
    "attention_decode": "attention with a KV cache",
    "attention_paged": "attention over paged keys and values",
    "attention_sharded": "one call over several GPUs",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        value = getattr(importlib.import_module(f"cuflash.{_LATER[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"cuflash.{name}")
    if name in _PLANNED:
        raise AttributeError(f"cuflash.{name}: {_PLANNED[name]} is planned, not there yet")
    raise AttributeError(f"module 'cuflash' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
