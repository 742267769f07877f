"""WordPiece, lower case: text to token ids, as BERT's uncased models were trained on it.

Three steps, each a function below: `normalize` (control characters out, accents off, lower case), `words`
(split at spaces; every punctuation mark and every CJK character is a word of its own), `pieces` (longest
match first in the vocabulary, later pieces written "##...").

Source: Devlin et al., "BERT", 2019, and Schuster and Nakajima, "Japanese and Korean Voice Search", 2012.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from cuflash.errors import CuflashError

MAX_WORD = 100  # characters; a longer word is one [UNK], as in training

# Blocks of CJK ideographs. Kana and Hangul are not among them: those scripts go through the vocabulary as
# words do.
CJK_BLOCKS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


def is_cjk(char: str) -> bool:
    return any(first <= ord(char) <= last for first, last in CJK_BLOCKS)


def is_punctuation(char: str) -> bool:
    """Unicode's punctuation, and every ASCII mark: $ + < ~ and others, which Unicode calls symbols."""
    return unicodedata.category(char).startswith("P") or ("!" <= char <= "~" and not char.isalnum())


def normalize(text: str) -> str:
    """Control characters removed, spaces made plain, accents off, lower case.

    >>> normalize("Caf\\u00e9\\tD\\u00c9J\\u00c0\\x00 vu")
    'cafe deja vu'
    """
    plain = []
    for char in text:
        if char.isspace():
            plain.append(" ")
        elif char != "\ufffd" and not unicodedata.category(char).startswith("C"):
            plain.append(char)
    # NFD writes e-acute as e and a mark of category Mn; dropping the marks leaves the letter.
    decomposed = unicodedata.normalize("NFD", "".join(plain))
    # Lower case letter by letter: str.lower() on a whole word would write a last sigma differently.
    return "".join(char.lower() for char in decomposed if unicodedata.category(char) != "Mn")


def words(text: str) -> Iterator[str]:
    """Words of normalized text: cut at spaces, around punctuation and around CJK characters.

    >>> list(words("don't panic."))
    ['don', "'", 't', 'panic', '.']
    """
    word = ""
    for char in text:
        alone = is_punctuation(char) or is_cjk(char)
        if word and (alone or char.isspace()):
            yield word
            word = ""
        if alone:
            yield char
        elif not char.isspace():
            word += char
    if word:
        yield word


class WordPiece:
    """The tokenizer of one vocabulary: a text file, one token a line, the line number is the id.

    >>> tokenizer = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "att", "##ention"])
    >>> tokenizer.tokens("Attention?")
    ['att', '##ention', '[UNK]']
    >>> tokenizer.encode("Attention")
    [2, 4, 5, 3]
    """

    def __init__(self, vocabulary: Iterable[str]):
        self.vocabulary = list(vocabulary)
        self.id_of = {token: i for i, token in enumerate(self.vocabulary)}
        missing = [token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if token not in self.id_of]
        if missing:
            raise CuflashError(
                f"WordPiece: the vocabulary lacks {' '.join(missing)}; got {len(self.vocabulary)} tokens. "
                "Give BERT's vocab.txt."
            )

    @classmethod
    def from_file(cls, path: str | Path) -> WordPiece:
        return cls(Path(path).read_text(encoding="utf-8").splitlines())

    def pieces(self, word: str) -> list[str]:
        """One word as the longest known prefix, then the longest known "##" piece of the rest, and so on.

        A word with any part that is not in the vocabulary, or longer than MAX_WORD characters, is one [UNK].
        """
        found: list[str] = []
        start = 0
        while start < len(word) <= MAX_WORD:
            prefix = "##" if start else ""
            for end in range(len(word), start, -1):
                piece = prefix + word[start:end]
                if piece in self.id_of:
                    found.append(piece)
                    start = end
                    break
            else:
                return ["[UNK]"]
        return found or ["[UNK]"]

    def tokens(self, text: str) -> list[str]:
        """Tokens of a text, without [CLS] and [SEP].  A "[MASK]" inside a text is text, not special."""
        return [piece for word in words(normalize(text)) for piece in self.pieces(word)]

    def encode(self, text: str, max_length: int | None = None) -> list[int]:
        """Ids of a text between [CLS] and [SEP], cut to `max_length` ids in all ([SEP] is kept)."""
        ids = [self.id_of[token] for token in self.tokens(text)]
        if max_length is not None:
            ids = ids[: max(max_length - 2, 0)]
        return [self.id_of["[CLS]"], *ids, self.id_of["[SEP]"]]

    def batch(self, texts: Iterable[str], max_length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Several texts, padded to the longest.

        Returns ids (batch, len) int64, filled up with [PAD], and lengths (batch,) int64.
        """
        rows = [self.encode(text, max_length) for text in texts]
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        ids = np.full((len(rows), int(lengths.max(initial=0))), self.id_of["[PAD]"], dtype=np.int64)
        for row, target in zip(rows, ids, strict=True):
            target[: len(row)] = row
        return ids, lengths
