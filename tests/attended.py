"""Attention maps of made-up texts, drawn at random."""

import itertools

import numpy as np
from ssmscope.interp.attention.maps import AttendedText, AttentionMap
from ssmscope.interp.attention.measure import Reader
from ssmscope.interp.attention.result import ImplicitAttention

SENTENCE = (
    "I went into this film expecting very little , and for the first twenty minutes that is what I got : "
    "a slow , talky drama about a lighthouse keeper and his estranged daughter . Then something happens ."
).split()
HOSTILE = (
    *(
        "<script>alert('x')</script>", "</script>", "<!--", ' "q" $x$', "\n", "\t", "\x1b[31m", " 電影", "😀",
        "\u202eevil",
    ),
    *("[bold]no", "&amp;", "antidisestablishmentarianism-and-more"),
)  # fmt: skip


def words(length):
    taken = itertools.islice(itertools.cycle(SENTENCE), length - 1)
    return ("<s>", *(" " + word if word[0].isalnum() else word for word in taken))[:length]


def make_map(text_length, queries, edges, *, seed=0, sink=False, span=None, **names):
    """A random map that falls off with distance, over the tokens or over the cells between the edges."""
    random = np.random.default_rng(seed)
    keys = np.arange(text_length) if edges is None else edges[:-1]
    lag = queries[:, None] - keys[None]
    noise = random.normal(size=lag.shape) * 0.95 ** np.maximum(lag, 0) * 0.01
    values = np.where(lag >= 0, noise, 0).astype(np.float32)
    state = (random.normal(size=len(queries)) * 0.01).astype(np.float32) if sink else None
    names = {"layer": "0", "part": "", "head": "mean", **names}
    marked = None if span is None else np.isin(np.arange(text_length), range(*span))
    reader = Reader(queries, np.arange(text_length + 1) if edges is None else edges, marked, 4)
    return AttentionMap(**names, values=values, sink=state, readouts=reader.read(values, state))


def make_text(length=12, *, tokens=None, maps=1, rows=None, cells=None, span=None, sink=False, pixels=None, **names):
    tokens = words(length) if tokens is None else tuple(tokens)
    length = len(tokens)
    edges = None if cells is None else np.unique(np.append(np.arange(0, length, cells), length))
    queries = np.arange(length) if rows is None else np.array(rows, dtype=np.int64)
    if edges is not None:
        queries = edges[1:] - 1
    special = (None, *range(length - 1)) if pixels is None else (*range(length - 1), None)
    made = [
        make_map(length, queries, edges, seed=seed, sink=sink, span=span, **{"layer": str(seed), **names})
        for seed in range(maps)
    ]
    return AttendedText(tokens, special, queries, edges, span, tuple(made), "positive", 0.75, pixels)


def make(*texts, heads="mean", model="demo/test", level="block"):
    return ImplicitAttention(
        provenance={"model": model, "options": {}}, texts=tuple(texts), level=level, heads=heads, top=4
    )


IMAGE = np.random.default_rng(0).random((4, 5, 3)).astype(np.float32)
