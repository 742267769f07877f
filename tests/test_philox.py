"""Dropout's words: published vectors, an independent scalar version, and the mask attention applies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import philox, reference

# known answers of philox4x32-10 published with Random123 (kat_vectors): counter, key, words
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(int(word, 16) for word in text.split())


def scalar_philox(counter, key):
    """The paper's definition on Python integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return tuple(c)


@pytest.mark.parametrize("vector", VECTORS)
def test_known_answers(vector):
    counter, key, expected = map(words, vector)
    got = philox.philox_4x32_10(tuple(np.array([word], np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in got) == expected == scalar_philox(counter, key)


WORD = st.integers(0, 2**32 - 1)


@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_any_counter_and_key(counter, key):
    got = philox.philox_4x32_10(tuple(np.asarray(word, np.uint64) for word in counter), key)
    assert tuple(int(word) for word in got) == scalar_philox(counter, key)


@given(
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**64 - 1),
    st.one_of(st.none(), st.tuples(*[st.integers(0, 2**32 - 1)] * 4)),
)
def test_every_number_of_a_mask(p, seed, shift):
    batch0, head0, i0, j0 = shift or (0, 0, 0, 0)
    keep = cuflash.dropout_mask(2, 2, 3, 6, (p, seed) if shift is None else (p, seed, shift))
    assert keep.shape == (2, 2, 3, 6) and keep.dtype == bool
    smallest = min(round(p * 2**32), 2**32 - 1)
    for b, h, i, j in np.ndindex(keep.shape):
        counter = [n % 2**32 for n in ((j + j0) // 4, i + i0, h + head0, b + batch0)]
        word = scalar_philox(counter, (seed % 2**32, seed // 2**32))[(j + j0) % 4]
        assert keep[b, h, i, j] == (word >= smallest)


def test_a_shard_draws_its_piece_of_the_whole(monkeypatch):
    whole = cuflash.dropout_mask(3, 4, 20, 30, (0.4, 99))
    shard = cuflash.dropout_mask(2, 1, 7, 11, (0.4, 99, (1, 3, 5, 6)))
    assert np.array_equal(shard, whole[1:, 3:, 5:12, 6:17])
    monkeypatch.setattr(philox, "WORDS_AT_ONCE", 50)
    assert np.array_equal(cuflash.dropout_mask(3, 4, 20, 30, (0.4, 99)), whole)


def test_how_much_is_kept():
    for p in (0.0, 0.1, 0.5, 0.99):
        kept = cuflash.dropout_mask(1, 2, 300, 500, (p, 4)).mean()
        assert kept == pytest.approx(1 - p, abs=5 * (p * (1 - p) / 300_000) ** 0.5)
    almost_all = cuflash.dropout_mask(1, 1, 100, 100, (1 - 2**-40, 4))
    assert almost_all.sum() <= 1  # the threshold is at most 2^32 - 1


def test_seeds_heads_and_rows_are_unlike():
    masks = [cuflash.dropout_mask(2, 2, 8, 64, (0.5, seed)) for seed in (0, 1, 2**32, 2**63)]
    rows = np.concatenate([mask.reshape(-1, 64) for mask in masks])
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_it_is_the_mask_attention_applies():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 5, 3, 4)), rng.standard_normal((2, 9, 3, 4))
    v = np.broadcast_to(np.eye(9)[None, :, None, :], (2, 9, 3, 9))  # out is the dropped weights
    out = reference.attention(q, k, v, dropout=(0.5, 31))
    assert np.array_equal(out.swapaxes(1, 2) > 0, cuflash.dropout_mask(2, 3, 5, 9, (0.5, 31)))


@pytest.mark.parametrize(
    "sizes, dropout, said",
    [
        ((1, 1, 2, -3), (0.5, 1), "len_k is -3"),
        ((1, 1.5, 2, 3), (0.5, 1), "heads is 1.5"),
        ((1, 1, 10**400, 3), (0.5, 1), "whole numbers from 0 to 2^32 - 1"),
        ((1, 1, 2, 3), None, "None"),
        ((1, 1, 2, 3), (1.0, 1), "p = 1.0"),
        ((1, 1, 2, 3), (0.5, -1), "-1"),
        ((1, 1, 2, 3), (0.5, 2**64), str(2**64)),
        ((1, 1, 2, 3), (0.5, 1, (0, 0, 0)), "shift"),
    ],
)
def test_bad_input(sizes, dropout, said):
    for device in ("cuda", True, np.zeros(2), 1.5):
        with pytest.raises(cuflash.CuflashError, match="dropout_mask: device is "):
            cuflash.dropout_mask(1, 1, 2, 3, (0.5, 1), device=device)
    with pytest.raises(cuflash.CuflashError, match="dropout_mask: ") as error:
        cuflash.dropout_mask(*sizes, dropout)
    assert said in str(error.value)


@pytest.mark.gpu
def test_the_same_bits_on_the_gpu():
    import cupy

    for dropout in ((0.3, 2**63 + 5), (0.5, 7, (1, 2, 3, 5)), (0.0, 1)):
        on_device = cuflash.dropout_mask(2, 3, 33, 70, dropout, device=0)
        assert isinstance(on_device, cupy.ndarray)
        assert np.array_equal(on_device.get(), cuflash.dropout_mask(2, 3, 33, 70, dropout))
