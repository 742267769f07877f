"""Other libraries' names: against formulas written by hand, and against PyTorch and JAX where they are."""

import inspect

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import compat


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def formula(q, k, v, scale=None, bias=0.0, visible=True, softcap=None, kept=1.0):
    """(out, lse) from (batch, heads, len, dim) arrays, all scores at once, float64.

    bias, visible and kept (dropout's factors) broadcast to (batch, heads, len_q, len_k).
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    S = np.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    S = S if softcap is None else softcap * np.tanh(S / softcap)
    S = np.where(visible, S + bias, -np.inf)
    m = np.maximum(S.max(-1, keepdims=True, initial=-np.inf), -1e30)
    P = np.exp(S - m)
    total = P.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(total))[..., 0]
    return np.einsum("bhij,bhjd->bhid", kept * P / np.where(total == 0, 1, total), v), lse


def swap(*arrays):
    return [x.swapaxes(1, 2) for x in arrays]


def positions(len_q, len_k):
    return np.arange(len_q)[:, None], np.arange(len_k)[None, :]


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


# ---- flash-attn

Q, K, V = draw(2, 7, 4, 8), draw(2, 10, 2, 8, seed=1), draw(2, 10, 2, 8, seed=2)
AT, KEY = positions(7, 10)
SLOPES = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
FLASH = {
    "nothing": ({}, {}),
    "causal": ({"causal": True}, {"visible": AT + 3 >= KEY}),
    "window": ({"window_size": (2, 1)}, {"visible": (AT + 3 - 2 <= KEY) & (AT + 3 + 1 >= KEY)}),
    "left": ({"window_size": (2, -1)}, {"visible": AT + 3 - 2 <= KEY}),
    "None": ({"window_size": (None, 0)}, {"visible": AT + 3 >= KEY}),
    "softcap": ({"softcap": 1.5, "softmax_scale": 0.7}, {"softcap": 1.5, "scale": 0.7}),
    "alibi": ({"alibi_slopes": SLOPES}, {"bias": -SLOPES[:, None, None] * np.abs(AT + 3 - KEY)}),
    "deterministic": ({"deterministic": True}, {}),
}


@pytest.mark.parametrize("name", FLASH)
def test_flash_attn_func(name):
    arguments, means = FLASH[name]
    expected, expected_lse = formula(*swap(Q, K, V), **means)
    out, lse, nothing = compat.flash_attn_func(Q, K, V, return_attn_probs=True, **arguments)
    close(out.swapaxes(1, 2), expected)
    close(lse, expected_lse)
    assert nothing is None and lse.shape == (2, 4, 7)
    assert np.array_equal(compat.flash_attn_func(Q, K, V, **arguments), out)


def test_flash_attn_packed_arrays_are_read_in_place():
    qkv = draw(2, 5, 3, 4, 8)
    expected = compat.flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], causal=True)
    assert np.array_equal(compat.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    kv = np.stack([K, V], axis=2)
    out, lse, _ = compat.flash_attn_kvpacked_func(Q, kv, softcap=2.0, return_attn_probs=True)
    expected, expected_lse = formula(*swap(Q, K, V), softcap=2.0)
    close(out.swapaxes(1, 2), expected)
    close(lse, expected_lse)
    for call in (lambda: compat.flash_attn_qkvpacked_func(kv), lambda: compat.flash_attn_kvpacked_func(Q, Q)):
        with pytest.raises(cuflash.CuflashError, match="heads, head_dim"):
            call()


def test_flash_attn_varlen_func():
    q, k, v = draw(9, 4, 8), draw(11, 2, 8, seed=1), draw(11, 2, 8, seed=2)
    cu_q, cu_k = [0, 4, 4, 9], [0, 6, 8, 11]
    out, lse, _ = compat.flash_attn_varlen_func(
        q, k, v, np.array(cu_q, np.int32), np.array(cu_k, np.int32), 5, 6, causal=True, return_attn_probs=True
    )
    assert out.shape == (9, 4, 8) and lse.shape == (4, 9)
    for b in range(3):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        i, j = positions(cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b])
        visible = i + j.size - i.size >= j
        expected, expected_lse = formula(*swap(q[None, rows], k[None, keys], v[None, keys]), visible=visible)
        close(out[rows], expected[0].swapaxes(0, 1))
        close(lse[:, rows], expected_lse[0])
    with pytest.raises(cuflash.CuflashError, match="Paged keys"):
        compat.flash_attn_varlen_func(q, k, v, cu_q, cu_k, block_table=np.zeros((3, 1), np.int32))


def test_dropout_is_cuflashs_and_needs_a_seed():
    kept = cuflash.dropout_mask(2, 4, 7, 10, (0.4, 11)) / 0.6
    expected, _ = formula(*swap(Q, K, V), kept=kept)
    close(compat.flash_attn_func(Q, K, V, 0.4, seed=11).swapaxes(1, 2), expected)
    close(compat.scaled_dot_product_attention(*swap(Q, K, V), None, 0.4, enable_gqa=True, seed=11), expected)
    for call in (compat.flash_attn_func, compat.scaled_dot_product_attention):
        with pytest.raises(cuflash.CuflashError, match=r"dropout_p is 0.4, seed is None\n  Give seed="):
            call(Q, Q, Q, dropout_p=0.4)


def test_a_row_that_sees_nothing_has_lse_minus_infinity():
    out, lse, _ = compat.flash_attn_func(K, Q[:, :, :2], Q[:, :, :2], causal=True, return_attn_probs=True)
    assert not out[:, :3].any() and np.isneginf(lse[:, :, :3]).all() and np.isfinite(lse[:, :, 3:]).all()


# ---- PyTorch


def torch_arrays(dtype=np.float32):
    return draw(2, 4, 7, 8, dtype=dtype), draw(2, 4, 10, 8, dtype=dtype), draw(2, 4, 10, 6, dtype=dtype)


SDPA = {
    "nothing": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": np.random.default_rng(0).random((7, 10)) < 0.6},
    "float": {"attn_mask": draw(2, 1, 7, 10)},
    "hidden row": {"attn_mask": np.arange(7)[:, None] != np.zeros((1, 10))},
}


@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention(name):
    q, k, v = torch_arrays()
    arguments = SDPA[name]
    mask = arguments.get("attn_mask")
    i, j = positions(7, 10)
    is_bool = mask is not None and mask.dtype == bool
    visible = j <= i if arguments.get("is_causal") else mask if is_bool else True
    bias = 0 if mask is None or is_bool else mask
    expected, _ = formula(q, k, v, arguments.get("scale"), bias, visible)
    close(compat.scaled_dot_product_attention(q, k, v, **arguments), expected)


@pytest.mark.parametrize("name", SDPA)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_scaled_dot_product_attention_is_torchs(name, dtype):
    torch = pytest.importorskip("torch")
    arguments = {
        key: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for key, x in SDPA[name].items()
    }
    if name == "float":
        arguments["attn_mask"] = arguments["attn_mask"].to(getattr(torch, dtype))
    tensors = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in torch_arrays()]
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, **arguments)
    out = compat.scaled_dot_product_attention(*tensors, **arguments)
    assert isinstance(out, np.ndarray) and out.dtype.name == dtype
    tolerance = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(out.astype("f8"), expected.double().numpy(), atol=tolerance, rtol=tolerance)


def test_torch_grouped_heads_have_to_be_asked_for():
    q, k, v = draw(1, 4, 5, 8), draw(1, 2, 6, 8), draw(1, 2, 6, 8, seed=1)
    with pytest.raises(cuflash.CuflashError, match="enable_gqa=True"):
        compat.scaled_dot_product_attention(q, k, v)
    close(compat.scaled_dot_product_attention(q, k, v, enable_gqa=True), formula(q, k, v)[0])


def test_torch_axes_may_be_missing():
    q, k, v = torch_arrays()
    whole = compat.scaled_dot_product_attention(q, k, v, is_causal=True)
    for one, part in (
        (compat.scaled_dot_product_attention(q[1], k[1], v[1], is_causal=True), whole[1]),
        (compat.scaled_dot_product_attention(q[1, 2], k[1, 2], v[1, 2], is_causal=True), whole[1, 2]),
    ):
        assert one.shape == part.shape
        close(one, part)
    with pytest.raises(cuflash.CuflashError, match="without batch and heads"):
        compat.scaled_dot_product_attention(q[None], k[None], v[None])
    with pytest.raises(cuflash.CuflashError, match="query has the type str"):
        compat.scaled_dot_product_attention("q", k, v)


def test_torch_mask_and_causal_together_mean_both():
    q, k, v = torch_arrays()
    i, j = positions(7, 10)
    mask = np.arange(10) % 3 > 0
    out = compat.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    close(out, formula(q, k, v, visible=mask & (j <= i))[0])


# ---- JAX

JAX = {
    "nothing": ({}, {}),
    "causal": ({"is_causal": True}, {"visible": AT >= KEY}),
    "window": ({"local_window_size": (2, 1)}, {"visible": (AT - 2 <= KEY) & (AT + 1 >= KEY)}),
    "one window": ({"local_window_size": 2}, {"visible": abs(AT - KEY) <= 2}),
    "bias": ({"bias": draw(1, 4, 7, 10), "scale": 0.4}, {"bias": draw(1, 4, 7, 10), "scale": 0.4}),
    "mask": ({"mask": (AT + KEY)[None, None] % 3 > 0}, {"visible": (AT + KEY) % 3 > 0}),
    "keys": (
        {"key_value_seq_lengths": np.array([4, 10], np.int32)},
        {"visible": np.array([4, 10]).reshape(2, 1, 1, 1) > KEY},
    ),
    "implementation": ({"implementation": "cudnn"}, {}),
}


@pytest.mark.parametrize("name", JAX)
def test_dot_product_attention(name):
    arguments, means = JAX[name]
    expected, expected_lse = formula(*swap(Q, K, V), **means)
    out, lse = compat.dot_product_attention(Q, K, V, return_residual=True, **arguments)
    close(out.swapaxes(1, 2), expected)
    close(lse.swapaxes(1, 2), expected_lse)
    assert lse.shape == (2, 7, 4)
    assert np.array_equal(compat.dot_product_attention(Q, K, V, **arguments), out)


@pytest.mark.parametrize("name", [name for name in JAX if name != "implementation"])
def test_dot_product_attention_is_jaxs(name):
    jax = pytest.importorskip("jax")
    arguments, _ = JAX[name]
    expected = jax.nn.dot_product_attention(Q, K, V, **arguments)
    np.testing.assert_allclose(
        compat.dot_product_attention(Q, K, V, **arguments), np.asarray(expected), rtol=1e-4, atol=1e-5
    )


def test_jax_batch_may_be_missing_and_rows_past_a_length_are_zero():
    out, lse = compat.dot_product_attention(Q[1], K[1], V[1], is_causal=True, return_residual=True)
    expected, expected_lse = formula(*swap(Q[1:], K[1:], V[1:]), visible=AT >= KEY)
    close(out.swapaxes(0, 1), expected[0])
    close(lse.T, expected_lse[0])
    out = compat.dot_product_attention(Q, K, V, query_seq_lengths=np.array([3, 7], np.int32))
    assert not out[0, 3:].any()
    close(out[0, :3].swapaxes(0, 1), formula(*swap(Q, K, V))[0][0, :, :3])
    with pytest.raises(cuflash.CuflashError, match="all without batch"):
        compat.dot_product_attention(Q, K[0], V[0])


# ---- signatures


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            compat.flash_attn_func,
            "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
            "return_attn_probs seed",
        ),
        (
            compat.flash_attn_qkvpacked_func,
            "qkv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
            "return_attn_probs seed",
        ),
        (
            compat.flash_attn_kvpacked_func,
            "q kv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
            "return_attn_probs seed",
        ),
        (
            compat.flash_attn_varlen_func,
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
            "window_size softcap alibi_slopes deterministic return_attn_probs block_table seed",
        ),
        (
            compat.scaled_dot_product_attention,
            "query key value attn_mask dropout_p is_causal scale enable_gqa seed",
        ),
        (
            compat.dot_product_attention,
            "query key value bias mask scale is_causal query_seq_lengths key_value_seq_lengths "
            "local_window_size implementation return_residual",
        ),
    ],
)
def test_arguments_have_the_originals_names_and_order(function, expected):
    assert list(inspect.signature(function).parameters) == expected.split()
    assert function.__name__ in compat.__all__


def test_bfloat16_stays_bfloat16():
    x = draw(1, 4, 2, 8, dtype=ml_dtypes.bfloat16)
    assert compat.flash_attn_func(x, x, x).dtype == ml_dtypes.bfloat16
    assert cuflash.compat is compat


@pytest.mark.gpu
def test_on_a_gpu():
    import cupy

    q, k, v = cupy.asarray(Q), cupy.asarray(K), cupy.asarray(V)
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    mask = cupy.asarray(np.random.default_rng(0).random((7, 10)) < 0.6)
    for got, expected in (
        (compat.flash_attn_func(q, k, v, causal=True), compat.flash_attn_func(Q, K, V, causal=True)),
        (
            compat.flash_attn_kvpacked_func(q, cupy.stack([k, v], axis=2)),
            compat.flash_attn_func(Q, K, V),
        ),
        (
            compat.dot_product_attention(q, k, v, local_window_size=2),
            compat.dot_product_attention(Q, K, V, local_window_size=2),
        ),
        (
            compat.scaled_dot_product_attention(*heads_first, mask, enable_gqa=True),
            compat.scaled_dot_product_attention(*swap(Q, K, V), mask.get(), enable_gqa=True),
        ),
        (
            compat.onnx_attention(*heads_first, mask, softcap=2.0),
            compat.onnx_attention(*swap(Q, K, V), mask.get(), softcap=2.0),
        ),
    ):
        assert isinstance(got, cupy.ndarray)
        close(got.get(), expected)


@pytest.mark.gpu
def test_torch_tensors_on_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    tensors = [torch.from_numpy(x).cuda() for x in torch_arrays()]
    out = compat.scaled_dot_product_attention(*tensors, is_causal=True)
    close(out.get(), compat.scaled_dot_product_attention(*torch_arrays(), is_causal=True))


ODD = [np.zeros(3), [1], "x", object(), 1j, float("nan")]
NAMES = {
    "flash_attn_func": ("dropout_p", "softmax_scale", "causal", "window_size", "softcap"),
    "scaled_dot_product_attention": ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    "dot_product_attention": ("scale", "is_causal", "local_window_size", "return_residual"),
    "onnx_attention": (
        "is_causal", "left_window_size", "right_window_size", "q_num_heads", "qk_matmul_output_mode", "scale",
        "softcap", "softmax_precision", "n_outputs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
@pytest.mark.parametrize(("function", "name"), [(f, name) for f in NAMES for name in NAMES[f]])
def test_odd_arguments_are_refused_in_words(function, name, odd):
    x = np.zeros((1, 3, 2, 4), np.float32)
    with pytest.raises(cuflash.CuflashError):
        getattr(compat, function)(x, x, x, **{name: odd})
