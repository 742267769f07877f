"""Axes of the arrays of a call: their names, their number, their lengths."""

from __future__ import annotations

from cuflash.messages import Call

_SCORES = ("batch", "heads", "len_q", "len_k")

VECTORS = {
    "q": ("batch", "len_q", "heads", "head_dim"),
    "k": ("batch", "len_k", "heads_k", "head_dim"),
    "v": ("batch", "len_k", "heads_k", "head_dim_v"),
    "out": ("batch", "len_q", "heads", "head_dim_v"),
}
VECTORS |= {"dout": VECTORS["out"], "dq": VECTORS["q"], "dk": VECTORS["k"], "dv": VECTORS["v"]}
PER_ROW = ("lse", "dlse")
# what an axis is called when two arrays disagree about its length
_PHRASES = {
    "len_q": "{} query rows",
    "len_k": "{} key rows",
    "tokens_q": "{} query tokens",
    "tokens_k": "{} key tokens",
    "heads": "{} heads",
    "heads_k": "{} key heads",
    "batch": "batch {}",
}


def name_axes(call: Call, packed: bool, swapped: bool) -> None:
    """Names of the axes of every array, in the caller's order."""
    for name, array in call.arrays.items():
        if name in VECTORS:
            axes = VECTORS[name]
            if packed:
                axes = (axes[1].replace("len", "tokens"), *axes[2:])
            elif swapped:
                axes = (axes[0], axes[2], axes[1], axes[3])
        elif name in PER_ROW:
            axes = ("heads", "tokens_q") if packed else ("batch", "heads", "len_q")
        elif name in ("bias", "mask"):
            axes = _SCORES[max(0, 4 - array.ndim) :]
        elif name == "alibi_slopes":
            axes = ("heads",) if array.ndim == 1 else ("batch", "heads")
        elif name == "sink":
            axes = ("heads",)
        else:  # dbias, dsink, dalibi_slopes follow their argument; workspace has one axis
            axes = call.axes.get(name[1:], ("bytes",))
        call.axes[name] = axes


def check_ranks(call: Call, packed: bool) -> None:
    """Every array has as many axes as its role."""
    for name, array in call.arrays.items():
        axes = call.axes[name]
        if array.ndim == len(axes):
            continue
        wants = f"({', '.join(axes)})"
        do = f"{name} needs {wants}."
        if name in VECTORS and packed and array.ndim == 4:
            do = f"Packed sequences need {wants}; without cu_seqlens_q and cu_seqlens_k it is four axes."
        elif name in VECTORS and not packed and array.ndim == 3:
            do = f"{name} needs {wants}; packed sequences also need cu_seqlens_q and cu_seqlens_k."
        elif name in ("bias", "mask"):
            do = f"{name} broadcasts to the scores {wants}, aligned right: at most four axes."
        call.fail(
            f"{name} has {array.ndim} {'axis' if array.ndim == 1 else 'axes'}, needs {len(axes)}",
            do, show=(name,), mark=((name, "rank"),),
        )  # fmt: skip


def check_shapes(call: Call, packed: bool, lengths: dict, targets: dict) -> None:
    """Bind every axis to the first array that has it; all others must agree."""
    if packed:
        call.sizes["batch"] = (lengths["cu_seqlens_q"].shape[0] - 1, "cu_seqlens_q")
    first = ("q", "k", "v")  # the others are judged by these
    apart = (*first, "bias", "mask", "dbias", "workspace")
    for name in (*first, *(name for name in call.arrays if name not in apart)):
        array = call.arrays[name]
        for axis, (label, n) in enumerate(zip(call.axes[name], array.shape, strict=True)):
            bound, by = call.sizes.setdefault(label, (n, name))
            broadcast = label == "batch" and n == 1 and name in ("alibi_slopes", "dalibi_slopes")
            if bound != n and not broadcast:
                _fail_shape(call, name, axis, label, n, bound, by)
    for name in ("head_dim", "head_dim_v"):
        n, by = call.sizes[name]
        if n == 0:
            call.fail(
                f"{by} has {name} 0",
                f"{name} is at least 1.",
                show=(by,),
                mark=((by, call.axes[by].index(name)),),
            )
    heads, heads_k = call.sizes["heads"][0], call.sizes["heads_k"][0]
    if heads % heads_k if heads_k else heads:
        bshd = call.axes["q"] == VECTORS["q"]
        hint = ' Arrays laid out (batch, heads, len, dim) need layout="bhsd".' if bshd else ""
        call.fail(
            f"{heads} query heads are no multiple of {heads_k} key heads",
            "heads must be a multiple of heads_k: each key head serves as many query heads." + hint,
            show=("q", "k"),
            mark=(("q", call.axes["q"].index("heads")), ("k", call.axes["k"].index("heads_k"))),
        )  # fmt: skip
    for name in ("dbias", "dalibi_slopes"):
        if name in targets and call.arrays[name].shape != call.arrays[name[1:]].shape:
            call.fail(
                f"{name} has another shape than {name[1:]}",
                f"{name} has the shape of {name[1:]}.",
                show=(name[1:], name),
            )


def _fail_shape(call: Call, name: str, axis: int, label: str, n: int, bound: int, by: str) -> None:
    phrase = _PHRASES.get(label, label + " {}").format(n)
    mark = ((name, axis),)
    if by == "cu_seqlens_q":
        call.fail(
            f"{name} has {phrase}, cu_seqlens_q has {bound} sequences",
            "Options with a batch axis have one entry per sequence.", show=(name,), mark=mark,
        )  # fmt: skip
    do = {
        "k": "q and k need the same batch and head_dim.",
        "v": "k and v need the same batch, length and heads.",
    }
    if name == "k" and "batch" not in call.axes["k"]:
        do = {"k": "q and k need the same head_dim."}
    if name == "v" and "batch" not in call.axes["v"]:
        do = {"v": "k and v need the same tokens and heads."}
    wants = ", ".join(
        f"{a} {call.sizes.get(a, (size,))[0]}"
        for a, size in zip(call.axes[name], call.arrays[name].shape, strict=True)
    )
    call.fail(
        f"{name} has {phrase}, {by} has {bound}",
        do.get(name, f"{name} needs ({wants})."),
        show=tuple(dict.fromkeys(("q", "k", "v", name))), mark=mark,
    )  # fmt: skip


def check_scores(call: Call, packed: bool, longest_q: int, longest_k: int) -> None:
    """bias and mask broadcast to the scores; when packed, axes beyond 1 reach the longest sequence."""
    batch, heads = call.sizes["batch"][0], call.sizes["heads"][0]
    scores = dict(zip(_SCORES, (batch, heads, longest_q, longest_k), strict=True))
    for name in ("bias", "mask"):
        if name not in call.arrays:
            continue
        for at, (label, n) in enumerate(zip(call.axes[name], call.arrays[name].shape, strict=True)):
            if n in (1, scores[label]) or (packed and label.startswith("len") and n > scores[label]):
                continue
            source = "of the longest sequence" if packed else "from q and k"
            got = ", ".join(f"{axis} {size}" for axis, size in scores.items())
            longer = ", or, along a length, more" if packed else ""
            call.fail(
                f"{name} does not broadcast to the scores",
                f"Give {name} a shape whose every axis is 1 or the scores' length{longer}.",
                show=(name, f"scores ({got}) {source}"), mark=((name, at),),
            )  # fmt: skip
