"""Implicit attention of a model's layers on texts: maps, their readouts, and the result that holds them.

Once its gates are known, a layer of a state-space model is linear in its input, and so an attention map without a
softmax: what its output at query t takes from key s, with a sign, and zero where s comes after t.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from markupsafe import Markup
from ssmscope.api.results import TABLE_ROWS, OverTexts, Result
from ssmscope.core.bootstrap import interval_columns, with_intervals
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.attention.maps import (
    CLIP_PERCENTILE,
    MEAN_MAP,
    AttendedText,
    AttentionMap,
    MarkedShare,
    causal,
    coarse_note,
    layer_names,
    limit,
    mean_maps,
    row_limits,
    span_name,
    strongest,
    strongest_keys,
    title,
)
from ssmscope.render.blocks import Block, Picture, Prose, TokenRow, TokenRows, TokenText
from ssmscope.render.numbers import counted, number
from ssmscope.render.table import MAX_COMPARED_ROWS, Cell, Line, Table, frame_table, number_cell, table, with_interval
from ssmscope.render.token_maps import MappedText, TokenMap, token_maps
from ssmscope.render.tokens import short_token

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from ssmscope.interp.paired import Paired
    from ssmscope.render.figure import Frame

SOFTMAX_NOTE = (
    "A hybrid's layers of attention are shown too, as in “12 attention”: their softmax weights, which are positive and "
    "add up to 1, before values and projection. The implicit maps of the other layers have signs, and are on another "
    "scale."
)
NAMED_TEXTS = 3
"""Number of texts that the headline tells of."""
KEYS_PER_QUERY = 64
"""Number of a query's strongest keys in the table."""


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
        return query_rows(self)

    @property
    def headline(self) -> str:
        maps = [each for text in self.texts for each in text.maps]
        kinds = [[each for each in maps if each.softmax is kind] for kind in (False, True)]
        layers = [layer_names(each) for each in kinds if each] or ["no maps"]
        about, where = f"Implicit attention of {self.model_name}", f"{self.level_name}, {' and '.join(layers)}"
        if not maps or any(text.pixels is not None for text in self):
            return f"{about}: {where}"
        shown = [text for text in self.texts[:NAMED_TEXTS] if text.maps and len(text.queries)]
        told = [reads_most(text, self.told_row(text), 3 if len(self) == 1 else 1) for text in shown]
        if len(told) < min(len(self), NAMED_TEXTS):
            return f"{about}: {where}"
        where = self.level_name if len(layers) > 1 else where
        told = [f"text {at}: {said}" for at, said in enumerate(told)] if len(self) > 1 else told
        told += [counted(len(self) - NAMED_TEXTS, "more text")] * (len(self) > NAMED_TEXTS)
        return f"{about}: {'; '.join(told)} ({where})"

    def told_row(self, text: AttendedText) -> int:
        """Return the row that is told of a text: of whole maps that of the position asked about, else the last."""
        return self.provenance.get("position", -1) if text.whole else -1

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
        for place, text in enumerate(self.texts):
            tokens = np.array([*text.tokens, None], dtype=object)  # The index −1 finds the last.
            seen = causal(text)
            for each in text.maps:
                rows, found, weights = strongest_keys(each.values, each.sink, seen, KEYS_PER_QUERY)
                queries, keys = text.queries[rows], found
                if text.edges is not None:
                    queries = text.edges[np.searchsorted(text.edges, queries, side="right") - 1]
                    keys = np.where(found < 0, -1, text.edges[found])
                columns = {
                    **{"text": place, "layer": each.layer, "part": each.part, "head": each.head},
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
        yield Prose(self.headline, "title")
        if self.level != "gradient" and any(each.softmax for text in self for each in text.maps):
            yield Prose(SOFTMAX_NOTE, "definition")
        yield from maps_blocks(self)
        yield replace(readouts(self), brief=TABLE_ROWS)


NAMED_KEYS = 5
"""Number of keys of a query that are named."""


def reads_most(text: AttendedText, row: int, most: int) -> str:
    """Say which keys, at most `most`, the query of a row reads most, by their share of its |weight|: of a hybrid in its
    recurrent layers and in those of attention."""
    query, shown = int(text.queries[row]), mean_maps(text)
    name = f"“{short_token(text.tokens[query], 20)}”"
    name = f"the last token {name}" if query == len(text) - 1 else f"token {query} {name}"
    if len(shown) == 1:
        return f"{name} reads {_keys_read(text, shown[0], row, query, most)}"
    layers = [layer_names(each for each in text.maps if each.softmax is kind) for kind in (False, True)]
    found = [f"{_keys_read(text, each, row, query, most)} in {where}" for each, where in zip(shown, layers)]
    return f"{name} reads {', and '.join(found)}"


def _keys_read(text: AttendedText, shown: AttentionMap, row: int, query: int, most: int) -> str:
    weights = np.abs(shown.values[row]).sum() + (0.0 if shown.sink is None else abs(float(shown.sink[row])))
    found: list[str] = []
    for key, weight in filter(itemgetter(1), strongest(shown, row, text, most)):
        key_said = f"“{key_name(key, text)}”" if key >= 0 and text.edges is None else f"{key_name(key, text)}"
        key_said = "itself" if text.edges is None and key == query else key_said
        found.append(f"{key_said}{' most' * (not found)} ({100 * abs(weight) / weights:.0f} %)")
    if not found:
        return "nothing"
    rest = f", then {' and '.join(found[1:])}" if found[1:] else ""
    return f"{'tokens ' * (text.edges is not None)}{found[0]}{rest}"


def query_rows(result: ImplicitAttention) -> TokenRows:
    """Return a row for each chosen query of each text (of whole maps, the last); of several maps of a
    kind their mean |weight|."""
    texts, alone = [], True
    for text in result:
        row = result.told_row(text)
        chosen = [row] if text.whole or text.edges is not None else range(len(text.queries))
        rows = [row_of(shown, at, text) for shown in mean_maps(text) for at in chosen]
        last = bool(rows) and len(chosen) == 1 and int(text.queries[row]) == len(text) - 1
        alone &= last or not rows
        about = "; ".join(filter(None, (f"last query: {query_name(text, -1)}" if last else "", span_name(text))))
        texts.append(text_of(text, rows, about))
    name = "what the last query takes from each token" if alone else "what each chosen query takes from each token"
    marked = f"its {NAMED_KEYS} strongest keys"
    return TokenRows(tuple(texts), "map", "weight", name, marked, ("negative", "positive"))


def heads_name(result: ImplicitAttention) -> str:
    """Describe how the channels of a result's maps were combined."""
    if result.heads == "all":
        return "each head or group of channels"
    if result.level == "gradient":
        return "sum over channels"
    if result.heads == "abs":
        return "mean of absolute values over channels"
    rolled = any(map_.layer == "rollout" for text in result.texts for map_ in text.maps)
    return "absolute value of the signed mean over channels" if rolled else "signed mean over channels"


def maps_blocks(result: ImplicitAttention) -> Iterator[Block]:
    """Yield every text's maps, their mean |weight| first, and the picture, folded where a page has all texts."""
    texts = [
        _mapped(text, [*(each for each in mean_maps(text) if each.layer == MEAN_MAP), *text.maps]) for text in result
    ]
    legend = f"{heads_name(result)}; limit: the {CLIP_PERCENTILE:g}th percentile of |weight| of the row, or of the map"
    yield token_maps(texts, query_rows(result), result.level_name, legend)
    folded = bool(texts) and all(text.fits for text in texts)
    yield Picture(result.figure, result.headline, vector=False, folded=folded)


def _mapped(text: AttendedText, maps: Sequence[AttentionMap]) -> MappedText:
    seen = causal(text)

    def map_of(number: int) -> TokenMap:
        one = maps[number]
        found: list[list[tuple[int, float]]] = [[] for _ in text.queries]
        rows, *keys = (each.tolist() for each in strongest_keys(one.values, one.sink, seen, NAMED_KEYS))
        for row, key, weight in zip(rows, *keys):
            found[row].append((key, weight))
        return TokenMap(
            title(one), one.values, one.sink, *limit(one, text), row_limits(one, text), found, one.layer != MEAN_MAP
        )

    return MappedText(text_of(text, (), span_name(text)), text.queries, text.edges, seen, len(maps), map_of)


def text_of(text: AttendedText, rows: Sequence[TokenRow], about: str) -> TokenText:
    shown = (text.tokens, text.words, rows, text.answer, text.probability)
    return TokenText(*shown, about=about, span=text.span, pixels=text.pixels, series=text.series)


def row_of(map_: AttentionMap, row: int, text: AttendedText) -> TokenRow:
    """Return a row of a map over the tokens, on its own scale; every token of a cell has the cell's weight."""
    query, values = int(text.queries[row]), map_.values[row]
    if text.edges is not None:
        values = np.repeat(values, np.diff(text.edges))
    state = None if map_.sink is None else float(map_.sink[row])
    end = float(row_limits(map_, text)[row])
    signed = map_.layer != MEAN_MAP
    found = [key for key, weight in strongest(map_, row, text, NAMED_KEYS) if key >= 0 and weight]
    return TokenRow(
        f"{title(map_)}\nquery {query_name(text, row)}",
        values,
        (-end if signed else 0.0, end),
        signed,
        outside=np.arange(len(text)) > query,
        marked=found if text.edges is None and text.pixels is None else (),
        query=query if text.edges is None else None,
        state=state,
    )


def query_name(text: AttendedText, row: int) -> str:
    """Name a query by its position and its token."""
    query = int(text.queries[row])
    return f"{query} “{short_token(text.tokens[query], 20)}”"


def key_name(key: int, text: AttendedText) -> str:
    """Name a key by its token, or a cell by its positions."""
    if key < 0:
        return "[state]"
    edges = text.edges
    return short_token(text.tokens[key], 16) if edges is None else f"{edges[key]}–{edges[key + 1] - 1}"


def readouts(result: ImplicitAttention) -> Table:
    """Return a row per text and map: the readouts, and the last query's strongest keys."""
    lines = []
    for at, text in enumerate(result):
        for each in text.maps:
            found, top = each.readouts, result.top
            shares = {f"last {top}": found.recent, f"first {top}": found.sink}
            shares |= {"off the mark": found.outside} if text.span is not None else {}
            cells = {}
            if not text.bidirectional:  # Distances back are undefined for layers that look ahead.
                cells["tokens back"] = replace(number_cell(found.distance), digits=1)
                cells |= {name: replace(number_cell(share), digits=3) for name, share in shares.items()}
            keys = strongest(each, -1, text, NAMED_KEYS) if len(text.queries) else []
            named = " · ".join(f"{key_name(key, text)} {number(weight)}" for key, weight in keys)
            cells["strongest for the last query"] = Cell(text=named)
            lines.append(Line((str(at), title(each)), cells))
    note = f"{heads_name(result).capitalize()}."
    if not all(text.bidirectional for text in result):
        off = ", and off the marked tokens" if any(text.span for text in result) else ""
        note += (
            " Means over the queries of where |weight| lies: how many tokens back, and its shares on the query and the "
            f"{result.top - 1} tokens before it, on the first {result.top} and the state before them{off}."
        )
    return table(("text", "map"), lines, note=" ".join(filter(None, (note, coarse_note(result)))))


@dataclass(frozen=True)
class DataAttention(Result, kind="attention-data"):
    """Share of implicit attention on the marked tokens of a data set, by map."""

    drawn_by: ClassVar[str] = "data_figure"

    level: str
    """"ssm" or "block"; "gradient" for attention × gradient."""
    heads: str
    texts: int
    left_out: int
    """Number of texts without a marked token."""
    even: float
    """Share of the marked tokens among all that the queries read."""
    maps: tuple[MarkedShare, ...]

    def token_rows(self) -> None:
        """Return None: a data set has no rows of tokens."""

    @property
    def headline(self) -> str:
        data = self.provenance["data"]
        return f"Implicit attention of {self.model_name} over {data['name']} ({data['split']}): {self.verdict()}"

    def verdict(self, at: int = 0) -> str:
        order = sorted(self.maps, key=lambda each: -each.share.value)
        ends = [f"{with_interval(each.share)} in {title(each)}" for each in (order[0], order[-1])]
        what = "attention × gradient" if self.level == "gradient" else f"{self.level} level"
        found = f"its share on the marked tokens is {' to '.join(dict.fromkeys(ends))}; an even share is"
        return f"{found} {number(self.even, 3)} ({what}, {counted(self.texts, 'text')})"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per map: columns layer, part, head, share and the ends of its interval, even, texts."""
        names = [(each.layer, each.part, each.head) for each in self.maps]
        shares = [with_intervals(share=each.share).values() for each in self.maps]
        rows = [(*name, *share, self.even, self.texts) for name, share in zip(names, shares)]
        return pd.DataFrame(rows, columns=["layer", "part", "head", *interval_columns(["share"]), "even", "texts"])

    @classmethod
    def compare(cls, results: Sequence[DataAttention], labels: Sequence[Sequence[str]]) -> Table:
        return cls.differences(results, [label for (label,) in labels])

    @staticmethod
    def differ(results: Sequence[DataAttention], names: Sequence[str]) -> str:
        return "; ".join(f"{name}: {result.verdict()}" for name, result in zip(names, results))

    @classmethod
    def differences(cls, results: Sequence[DataAttention], names: Sequence[str]) -> Table:
        """Return the shares of several models by map."""
        shares = [{title(each): Cell(each.share) for each in result.maps} for result in results]
        rows = dict.fromkeys(row for own in shares for row in own)
        lines = [Line((row,), {name: own[row] for name, own in zip(names, shares) if row in own}) for row in rows]
        note = f"Equal weights would put {number(results[0].even, 3)} on the marked tokens."
        return table(("map",), lines, note=note)

    @classmethod
    def draw_pair(cls, pair: Paired, frame: Frame) -> Figure:
        """Draw the shares of two models in one panel."""
        drawn = importlib.import_module(f"{__package__}.{cls.drawn_by}")
        return drawn.draw_all(pair.results, pair.names, pair.headline, frame)

    def blocks(self) -> Iterable[Block]:
        yield from self.opening(*[f"{counted(self.left_out, 'text')} without marked tokens."] * bool(self.left_out))
        yield self.differences([self], ["on the marked tokens"])
