"""Attention by dumb loops over single numbers, from the words of the contract alone: what test_reference
compares the specification with.  Only the dropout words come from the package."""

import math

import numpy as np

from cuflash import philox


def rows_of(options, side, b, length):
    """(first row, number of rows) of sequence b on side "q" or "k"."""
    cumulative = options.get(f"cu_seqlens_{side}")
    if cumulative is not None:
        return int(cumulative[b]), int(cumulative[b + 1]) - int(cumulative[b])
    lengths = options.get({"q": "query_lengths", "k": "key_lengths"}[side])
    return 0, length if lengths is None else int(lengths[b])


def broadcast_at(array, b, h, i, j):
    """array[b, h, i, j] of an array that broadcasts to the scores from the right."""
    index = (b, h, i, j)[4 - array.ndim :]
    return array[tuple(0 if n == 1 else at for n, at in zip(array.shape, index, strict=True))]


def is_kept(block_mask, b, h, i, j):
    indptr = block_mask.indptr
    plane = indptr[b if indptr.shape[0] > 1 else 0, h if indptr.shape[1] > 1 else 0]
    row = i // block_mask.block_q
    return j // block_mask.block_k in block_mask.indices[plane[row] : plane[row + 1]].tolist()


def score(options, q_row, k_row, b, h, i, j, offset):
    """The score of one pair, -inf where hidden.  q_row and k_row are vectors (head_dim,)."""
    where = i + offset
    left, right = options.get("window", (None, None))
    hidden = (
        (options.get("causal") and j > where)
        or (left is not None and j < where - left)
        or (right is not None and j > where + right)
        or (options.get("mask") is not None and not broadcast_at(options["mask"], b, h, i, j))
        or (options.get("block_mask") is not None and not is_kept(options["block_mask"], b, h, i, j))
    )
    if hidden:
        return -math.inf
    scale = options.get("scale")
    scale = 1 / math.sqrt(len(q_row)) if scale is None else scale
    s = scale * math.fsum(x * y for x, y in zip(q_row.tolist(), k_row.tolist(), strict=True))
    if options.get("softcap") is not None:
        s = options["softcap"] * math.tanh(s / options["softcap"])
    if options.get("alibi_slopes") is not None:
        slopes = np.atleast_2d(options["alibi_slopes"])
        s -= float(slopes[b if len(slopes) > 1 else 0, h]) * abs(where - j)
    if options.get("bias") is not None:
        s += float(broadcast_at(options["bias"], b, h, i, j))
    return s


def attention(q, k, v, **options):
    """(out, lse) in float64: q (batch, len_q, heads, head_dim) or (tokens, heads, head_dim)."""
    packed = "cu_seqlens_q" in options
    if options.get("layout") == "bhsd":
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    if packed:
        q, k, v = q[None], k[None], v[None]
    q, k, v = (x.astype("float64") for x in (q, k, v))
    heads, heads_k = q.shape[2], k.shape[2]
    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((q.shape[0], heads, q.shape[1]), -math.inf)
    n_sequences = len(options["cu_seqlens_q"]) - 1 if packed else q.shape[0]
    for b in range(n_sequences):
        at = 0 if packed else b
        q_start, len_q = rows_of(options, "q", b, q.shape[1])
        k_start, len_k = rows_of(options, "k", b, k.shape[1])
        offset = options.get("query_offset")
        offset = len_k - len_q if offset is None else offset
        for h in range(heads):
            h_k = h * heads_k // heads
            for i in range(len_q):
                row = [
                    score(options, q[at, q_start + i, h], k[at, k_start + j, h_k], b, h, i, j, offset)
                    for j in range(len_k)
                ]
                logits = row + ([float(options["sink"][h])] if options.get("sink") is not None else [])
                m = max(logits, default=-math.inf)
                if m == -math.inf:
                    continue
                lse[at, h, q_start + i] = m + math.log(math.fsum(math.exp(s - m) for s in logits))
                for j, s in enumerate(row):
                    weight = math.exp(s - lse[at, h, q_start + i])
                    if options.get("dropout") is not None:
                        weight *= dropout_weight(options["dropout"], b, h, i, j)
                    out[at, q_start + i, h] += weight * v[at, k_start + j, h_k]
    if packed:
        return out[0], lse[0]
    return (out.transpose(0, 2, 1, 3) if options.get("layout") == "bhsd" else out), lse


def dropout_weight(dropout, b, h, i, j):
    """0 or 1 / (1 - p) for one score."""
    p, seed, (batch0, head0, i0, j0) = (*dropout, (0, 0, 0, 0))[:3]
    counter = [np.asarray(n, np.uint64) for n in ((j + j0) // 4, i + i0, h + head0, b + batch0)]
    word = int(philox.philox_4x32_10(tuple(counter), (seed % 2**32, seed // 2**32))[(j + j0) % 4])
    return 1 / (1 - p) if word >= min(round(p * 2**32), 2**32 - 1) else 0.0
