"""Attention under the names and argument orders of other libraries.

Each function translates its arguments and calls `cuflash.attention`: arrays may be of any kind which that
takes, the result is NumPy or CuPy.  They compute the forward; `cuflash.attention_vjp` takes the same choices
under cuflash's names and gives gradients.  Where an original has a known fault the contract of cuflash
stands, and the docstring says so.

| function | original |
|---|---|
| `flash_attn_func`, `flash_attn_varlen_func` | flash-attn 2 |
| `flash_attn_qkvpacked_func`, `flash_attn_kvpacked_func` | flash-attn 2 |
| `scaled_dot_product_attention` | torch.nn.functional |
| `dot_product_attention` | jax.nn |
| `onnx_attention` | the operator Attention of ONNX, opsets 23 to 25 |
"""

from cuflash.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from cuflash.compat.jax_nn import dot_product_attention
from cuflash.compat.onnx_operator import onnx_attention
from cuflash.compat.torch_functional import scaled_dot_product_attention

__all__ = [
    "dot_product_attention",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "onnx_attention",
    "scaled_dot_product_attention",
]
