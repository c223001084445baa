"""Implicit attention of a model's layers on texts: maps, their readouts, and the result that holds them.

Once its gates are known, a layer of a state-space model is linear in its input, and so an attention map without a
softmax: what its output at query t takes from key s, with a sign, and zero where s comes after t.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from markupsafe import Markup

from ssmscope.api.results import TABLE_ROWS, OverTexts, Result
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.attention.maps import causal, strongest_keys
from ssmscope.outline import Outlined
from ssmscope.render.blocks import Block, OfTokens, Prose, TokenRows
from ssmscope.render.numbers import number_runs
from ssmscope.render.table import MAX_COMPARED_ROWS, Table, frame_table

SOFTMAX = "attention"
"""Suffix of the number of a softmax attention layer."""
SOFTMAX_NOTE = (
    "A hybrid's layers of attention are shown too, as in “12 attention”: their softmax weights, which are positive and "
    "add up to 1, before values and projection. The implicit maps of the other layers have signs, and are on another "
    "scale."
)
KEYS_PER_QUERY = 64
"""Number of a query's strongest keys in the table."""


@dataclass(frozen=True)
class Readouts:
    """Readouts of a map: where the mass |weight| of each row lies, as means over queries; NaN where undefined.

    p(t, s) = |w(t, s)| / Σ_s |w(t, s)|, where the sum has the state before the first token too. Rows without any mass
    are left out.
    """

    distance: float
    """Mean attention distance, Σ_s p(t, s) (t − s), in tokens, without the state before the first token."""
    recent: float
    """Share on the query itself and the k − 1 tokens before it."""
    sink: float
    """Share on the first k tokens and on the state before them."""
    outside: float
    """Share outside the marked span, over the queries after it: irrelevant context."""


@dataclass(frozen=True, eq=False)
class AttentionMap(Outlined):
    """One map of one text: the weight of each key in the layer's output at each query."""

    layer: str
    """Number of the layer ("12 attention" for softmax attention), or "rollout"."""
    part: str
    """ "" for the whole layer, else the name of one of its summands."""
    head: str
    """"mean" (the signed mean), "abs" (the mean of absolute values), "3" for a head, "0–95" for a group of channels."""
    values: np.ndarray
    """(queries, keys) float32, zero where the key comes after the query. In a pooled map the mean over the pairs of a
    cell in which the key does not come after the query."""
    sink: np.ndarray | None
    """(queries,) float32: the weight of the state before the first token, where that is not zero."""
    readouts: Readouts

    @property
    def softmax(self) -> bool:
        """True for softmax attention: weights are not negative, and those of a query sum to 1."""
        return self.layer.endswith(f" {SOFTMAX}")


@dataclass(frozen=True, eq=False)
class AttendedText(OfTokens):
    """One text and its maps."""

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    """Word index of each token; None for special tokens."""
    queries: np.ndarray
    """(queries,) int64: the position of each row of a map; in a pooled map the last one of the cell."""
    edges: np.ndarray | None
    """(cells + 1,) int64: first positions of the cells of a pooled map, and the length; None for single tokens."""
    span: tuple[int, int] | None
    """Marked tokens, from the first to the one after the last."""
    maps: tuple[AttentionMap, ...]
    answer: str
    probability: float
    pixels: np.ndarray | None = None
    """(height, width, channels) float32 for an image whose pixels are the tokens."""
    bidirectional: bool = False
    """True if queries read keys that come after them."""

    @property
    def whole(self) -> bool:
        """True if the maps have a row and a column for every token."""
        return self.edges is None and len(self.queries) == len(self.tokens)


@dataclass(frozen=True)
class ImplicitAttention(Result, OverTexts[AttendedText], kind="attention"):
    """Implicit attention of one or several texts."""

    texts: tuple[AttendedText, ...]
    level: str
    """"ssm" or "block"; "gradient" for attention × gradient."""
    heads: str
    """"mean", "abs" or "all"."""
    top: int
    """Number of tokens that the readouts `recent` and `sink` count."""

    def token_rows(self) -> TokenRows:
        """Return the chosen queries of every text (of whole maps, the last one), coloured by their weights."""
        from ssmscope.interp.attention.views import query_rows

        return query_rows(self)

    @property
    def headline(self) -> str:
        names = list(dict.fromkeys(each.layer for text in self.texts for each in text.maps))
        whole = [int(name) for name in names if name.isdigit()]
        parts = [f"layer{'s' if len(whole) > 1 else ''} {number_runs(whole)}"] if whole else []
        parts += [name for name in names if not name.isdigit()]
        return f"Implicit attention of {self.model_name}: {self.level_name}, {', '.join(parts) or 'no maps'}"

    @property
    def level_name(self) -> str:
        """Level, as the views call it."""
        return "attention × gradient" if self.level == "gradient" else f"{self.level} level"

    def verdict(self, at: int = 0) -> str:
        distances = [one.readouts.distance for text in self for one in text.maps]
        known = [value for value in distances if not math.isnan(value)]
        if not known:
            why = "of layers that read both ways" if any(text.bidirectional for text in self) else "without mass"
            return f"{self.level_name}, {len(distances)} maps {why}"
        number = f"{len(known)} maps" if len(known) > 1 else "one map"
        return f"attends {np.mean(known):.1f} tokens back on average, {self.level_name}, {number}"

    @classmethod
    def compare(cls, results: Sequence[ImplicitAttention], labels: Sequence[Sequence[str]]) -> Table:
        frames = [result.summary().assign(model=label) for result, (label,) in zip(results, labels)]
        every = pd.concat(frames)
        empty = [name for name in ("part", "outside") if every[name].isin(["", math.nan]).all()]
        return frame_table(every.drop(columns=empty), heads=["model"], limit=MAX_COMPARED_ROWS)

    def map(
        self, text: int = 0, *, layer: int | str | None = None, head: int | str | None = None, part: str = ""
    ) -> np.ndarray:
        """Return the values (queries, keys) of the first map that fits the given names.

        Raises:
            InputError: when there is no such text or map.
        """
        if not -len(self) <= text < len(self):
            raise InputError(f"there is no text {text}; allowed are 0 to {len(self) - 1}")
        asked = {"layer": layer, "head": head, "part": part}
        wanted = {name: str(value) for name, value in asked.items() if value is not None}
        maps = self.texts[text].maps
        for each in maps:
            if all(getattr(each, name) == value for name, value in wanted.items()):
                return each.values
        for name, value in wanted.items():
            known = list(dict.fromkeys(getattr(each, name) for each in maps))
            if value not in known:
                shown = ", ".join(map(repr, known[:8])) + ", …" * (len(known) > 8)
                near = did_you_mean(value, known)
                raise InputError(f"text {text} has no map of {name} {value!r}; allowed are {shown or 'none'}{near}")
        raise InputError(f"text {text} has no map of {', '.join(f'{n} {value!r}' for n, value in wanted.items())}")

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import small_map

        values = self.texts[0].maps[0].values
        return small_map("implicit attention of the first map", values) if values.ndim == 2 else super().sketch(at)

    def to_frame(self) -> pd.DataFrame:
        """Return a row per text, map, query and key, with the `KEYS_PER_QUERY` strongest keys of every query.

        Columns model, text, layer, part, head, query, query_token, key, key_token, weight; the key −1 is the state
        before the first token, which has no token. Of a pooled map queries and keys are the first positions of their
        cells. The strongest key of a query comes first, ties by position.
        """
        parts = []
        for number, text in enumerate(self.texts):
            tokens = np.array([*text.tokens, None], dtype=object)  # The index −1 finds the last.
            seen = causal(text)
            for each in text.maps:
                rows, found, weights = strongest_keys(each.values, each.sink, seen, KEYS_PER_QUERY)
                queries, keys = text.queries[rows], found
                if text.edges is not None:
                    queries = text.edges[np.searchsorted(text.edges, queries, side="right") - 1]
                    keys = np.where(found < 0, -1, text.edges[found])
                columns = {
                    **{"text": number, "layer": each.layer, "part": each.part, "head": each.head},
                    **{"query": queries, "query_token": pd.array(tokens[queries], dtype="string")},
                    **{"key": keys, "key_token": pd.array(tokens[keys], dtype="string"), "weight": weights},
                }
                parts.append(pd.DataFrame(columns))
        names = ["text", "layer", "part", "head", "query", "query_token", "key", "key_token", "weight"]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=names)

    def summary(self) -> pd.DataFrame:
        """Return a row per text and map: columns model, text, layer, part, head, distance, recent, sink, outside."""
        read = ["distance", "recent", "sink", "outside"]
        rows = [
            (self.model_name, at, each.layer, each.part, each.head, *(getattr(each.readouts, name) for name in read))
            for at, text in enumerate(self.texts)
            for each in text.maps
        ]
        return pd.DataFrame(rows, columns=["model", "text", "layer", "part", "head", *read])

    def blocks(self) -> Iterable[Block]:
        from ssmscope.interp.attention import views

        yield Prose(self.headline, "title")
        if self.level != "gradient" and any(each.softmax for text in self for each in text.maps):
            yield Prose(SOFTMAX_NOTE, "note")
        yield from views.maps_blocks(self)
        yield replace(views.readouts(self), brief=TABLE_ROWS)
