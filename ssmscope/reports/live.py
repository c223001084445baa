"""HTML pieces of the live page: prediction, selection heatmap, attention of a token, effect of an edit.

Texts go in and HTML comes out, without server or script; `ssmscope.reports.serving` puts it on a page.

    live = Live([ssmscope.load("demo/sst2-mamba2")])
    live.answer(0, "A gripping film.", "A boring film.").prediction
    live.row(0, "A gripping film.", "2", layer=1, level="ssm")
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.api.results import TABLE_ROWS
from ssmscope.attacks.effect import attack_effect
from ssmscope.errors import InputError, as_typed
from ssmscope.interp.attention import implicit_attention
from ssmscope.interp.attention.maps import strongest
from ssmscope.interp.heatmap import selection_heatmap, views
from ssmscope.interp.heatmap.result import SelectionHeatmap
from ssmscope.render import numbers
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.colours import SIGNED, SIGNED_ON_DARK, STEPS, ink, signed_levels, signed_shades
from ssmscope.render.html import fragment
from ssmscope.render.table import table
from ssmscope.render.tokens import shorten, spell_tokens, visible
from ssmscope.render.worddiff import html_diff
from ssmscope.reports import forms

if TYPE_CHECKING:
    from pandas import DataFrame

    from ssmscope.core.model import Model
    from ssmscope.core.trace import Trace
    from ssmscope.interp.attention.result import AttendedText, AttentionMap

MAX_LAYERS_SHOWN = 8
"""Maximum number of layers that are shown below their average."""
TRACES_KEPT = 4
"""Number of cached traces, so that another layer, score or token of a text needs no new run."""
PREDICTIONS_SHOWN = 10
"""Number of classes or next tokens shown per text."""
KEYS_NAMED = 5
"""Number of strongest keys named per row."""
MAX_TOKEN_CHARACTERS = 60
"""Maximum length of a class or token as shown."""


@dataclass(frozen=True)
class Answer:
    """HTML pieces of one model, each "" if empty; a refused text has only `prediction`, which says why."""

    prediction: str
    given: str = ""
    """Heatmap of the text."""
    edited: str = ""
    """Heatmap of the edited text."""
    change: str = ""


class Live:
    """Models that analyze typed texts.

    A text whose trace is among the last `TRACES_KEPT` is not run again. Calls from all threads are serialized, because
    a run changes the model's layers while it lasts.

    Args:
        models: language models or text classifiers with their tokenizers.
        max_tokens: maximum number of tokens of a text, counted by each model's tokenizer.

    Raises:
        InputError: for no model, a model of pixels, one without a tokenizer, or a `max_tokens` below 1.
    """

    def __init__(self, models: Sequence[Model], *, max_tokens: int = 1024) -> None:
        if not models:
            raise InputError("no model was given; give one or two")
        if max_tokens < 1:
            raise InputError(f"--max-tokens is {max_tokens}; allowed is a whole number from 1 on")
        for model in models:
            if model.channels is not None:
                raise InputError(f"{model.name} reads pixels; give a model of text, e.g. demo/sst2-mamba2")
            if model.tokenizer is None:
                raise InputError(f"{model.name} has no tokenizer; give one with --tokenizer NAME")
        self.models, self.max_tokens = tuple(models), max_tokens
        self._traces: OrderedDict[tuple[int, str], Trace] = OrderedDict()
        self._lock = threading.RLock()

    def answer(
        self,
        number: int,
        text: str,
        edited: str = "",
        *,
        layer: str = "mean",
        heatmap: Mapping[str, Any] | None = None,
        effect: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Return all pieces for a text, and for its edited version if given, by the model with that index.

        Args:
            layer: layer of the heatmaps, or "mean" for the average of all layers.
            heatmap, effect: options of these analyses as a form has them (`ssmscope.reports.forms`).
        """
        with self._lock:
            try:
                given, other = self._both(number, text, edited)
                prediction = _prediction(self.models[number], given, other)
            except InputError as error:
                return Answer(refusal(error))
            above, below = self.heatmaps(number, text, edited, layer=layer, **(heatmap or {}))
            return Answer(prediction, above, below, self.change(number, text, edited, **(effect or {})))

    def heatmaps(self, number: int, text: str, edited: str = "", *, layer: str, **options: Any) -> tuple[str, str]:
        """Return only the two heatmaps of an `answer`; `options` are those of the heatmap form."""
        with self._lock:
            try:
                chosen = forms.chosen("heatmap", options)
                given, other = self._both(number, text, edited)
                return _heatmap(given, layer, chosen), "" if other is None else _heatmap(other, layer, chosen)
            except InputError as error:
                return refusal(error), ""

    def change(self, number: int, text: str, edited: str, **options: Any) -> str:
        """Return the effect of the edit, "" without one; `options` are those of the effect form."""
        if not edited.strip():
            return ""
        with self._lock:
            try:
                return _change(self.models[number], text, edited, forms.chosen("effect", options))
            except InputError as error:
                return refusal(error)

    def row(self, number: int, text: str, position: str, *, layer: int, **options: Any) -> str:
        """Return the row of a layer's implicit attention for the token at a position, or a hint if position is "".

        `options` are those of the attention form.
        """
        if not position.strip():
            return _piece('<p class="soft">Click a token above to see what it attends to.</p>')
        with self._lock:
            try:
                chosen = forms.chosen("attention", options)
                return _row(self.models[number], self.trace(number, text), position, layer, chosen)
            except InputError as error:
                return refusal(error)

    def trace(self, number: int, text: str) -> Trace:
        """Return the trace of the model's run on the text.

        Raises:
            InputError: if the text is empty, too long, or has something unknown to the tokenizer.
        """
        with self._lock:
            key = (number, text)
            if key not in self._traces:
                trace = self._run(number, text)
                while len(self._traces) >= TRACES_KEPT:
                    self._traces.popitem(last=False)
                self._traces[key] = trace
            self._traces.move_to_end(key)
            return self._traces[key]

    def _both(self, number: int, text: str, edited: str) -> tuple[Trace, Trace | None]:
        given = self.trace(number, text)
        if not edited.strip():
            return given, None
        try:
            return given, self.trace(number, edited)
        except InputError as error:
            raise InputError(f"the edited text: {error}") from error

    def _run(self, number: int, text: str) -> Trace:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError("the text has half of a character (a lone surrogate): remove it")
        model = self.models[number]
        return model.trace(model.encode(text, max_tokens=self.max_tokens))


def refusal(error: InputError) -> str:
    """Format an error as a line of the page."""
    line = visible(as_typed(" ".join(str(error).split())))
    return _piece(f'<p class="refusal" role="alert">{escape(line)}</p>')


def predictions(model: Model, given: Trace, edited: Trace | None = None) -> DataFrame:
    """Return the `PREDICTIONS_SHOWN` likeliest classes or next tokens of a text or its edited version, one per row.

    Rows are sorted by the probability given the text. Columns: name, given, and with an edited text also edited and
    change (edited − given). Each trace has one text.
    """
    import pandas as pd

    rows = [
        model.probabilities(trace.logits[0].double()).cpu().numpy() for trace in (given, edited) if trace is not None
    ]
    likeliest = {int(i) for row in rows for i in np.argsort(-row, kind="stable")[:PREDICTIONS_SHOWN]}
    chosen = sorted(likeliest, key=lambda i: (-rows[0][i], i))
    labels = model.labels
    names = [labels[i] if labels is not None else model.tokenizer.decode([i]) for i in chosen]
    frame = pd.DataFrame({"name": pd.array(names, dtype="string"), "given": rows[0][chosen]})
    if edited is not None:
        frame["edited"] = rows[1][chosen]
        frame["change"] = frame["edited"] - frame["given"]
    return frame


def _prediction(model: Model, given: Trace, edited: Trace | None) -> str:
    frame = predictions(model, given, edited)
    what = "class" if model.is_classifier else "next token"
    sides = [side for side in ("given", "edited") if side in frame]
    titles = ["p"] if edited is None else ["p of the text", "p of the edited text", "change"]
    head = "".join(f"<th>{title}</th>" for title in (what, *titles))
    best = {side: int(frame[side].to_numpy().argmax()) for side in sides}
    rows = []
    for at, entry in enumerate(frame.to_dict("records")):
        cells = f"<td>{escape(visible(shorten(str(entry['name']), MAX_TOKEN_CHARACTERS)))}</td>"
        for side in sides:
            bold = ' class="best"' if best[side] == at else ""
            cells += f'<td{bold}><i style="width:{60 * entry[side]:.1f}px"></i>{entry[side]:.3f}</td>'
        if edited is not None:
            cells += f"<td>{_signed(entry['change'])}</td>"
        rows.append(f"<tr>{cells}</tr>")
    table = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    return _piece(f'<div class="wide">{table}</div>')


def _signed(change: float) -> str:
    text = f"{change:+.3f}"
    return "0.000" if float(text) == 0 else text.replace("-", "−")


def _heatmap(trace: Trace, layer: str, options: Mapping[str, Any]) -> str:
    lives = bool(options.get("half_lives"))
    # The analysis checks the layer; half-lives are those of each layer.
    of: Any = [int(layer)] if layer.isdecimal() else "all" if lives else layer
    found = selection_heatmap(None, trace, layers=of, **options)
    assert isinstance(found, SelectionHeatmap)
    every = bool(found.heads) or len(found.layers) <= MAX_LAYERS_SHOWN
    shown: list[Block] = [views.rows(found, every=every)]
    if found.heads or lives:
        shown.append(table(("text", "of"), list(views.strongest(found)), most=TABLE_ROWS))
    return fragment([*shown, *(Prose(line, "note") for line in views.notes(found))])


def _change(model: Model, text: str, edited: str, options: Mapping[str, Any]) -> str:
    effect = attack_effect(model, before=text, after=edited, **options)
    said = f'<p class="soft">{escape(effect.answer_name)}; {escape(effect.changed_name)}</p>'
    return _piece(f'<p class="words">{html_diff(text, edited)}</p>{said}') + effect._repr_html_()


# ---- the row of a token


def _row(model: Model, trace: Trace, position: str, layer: int, options: Mapping[str, Any]) -> str:
    length = len(trace.tokens[0])
    given = position.strip()
    if len(given) > 9 or not given.isdecimal() or int(given) >= length:
        raise InputError(f"there is no token {shorten(given, 20)!r}; the text has the tokens 0 to {length - 1}")
    at = int(given)
    found = implicit_attention(model, trace, layers=[layer], rows=[at], **options)
    return _piece("".join(_of_map(found[0], map_, at, found.level) for map_ in found[0].maps))


def _of_map(text: AttendedText, map_: AttentionMap, at: int, level: str) -> str:
    """Format the only row of a map, that of the token `at`: scale, coloured tokens and strongest keys."""
    end = max(float(np.abs(map_.values[0]).max()), 0.0 if map_.sink is None else abs(float(map_.sink[0])))
    shade = signed_levels(map_.values[0], end)
    tokens = spell_tokens(text.tokens, text.words)
    pieces = [] if map_.sink is None else [_token("state", "state", float(map_.sink[0]), end, "")]
    for key, (gap, token) in enumerate(tokens):
        space = " " if gap else ""
        if key > at:
            pieces.append(f'{space}<span class="after">{escape(token)}</span><wbr>')
        else:
            place = "query" if key == at else ""
            pieces.append(
                space + _token(token, f"position {key}", float(map_.values[0, key]), end, place, int(shade[key]))
            )
    of = "".join(f", {each}" for each in (map_.part, f"head {map_.head}" * map_.head[:1].isdigit()) if each)
    told = (
        f"query {at} “{escape(tokens[at][1])}” · layer {map_.layer}{escape(of)}, {level} level"
        f" · strongest: {_named(map_, text, tokens)}"
    )
    scale = f'<p class="soft"><span class="scale">−{numbers.number(end)} <i></i> {numbers.number(end)}</span></p>'
    return f'{scale}<p class="tokens">{"".join(pieces)}</p><p class="soft told">{told}</p>'


def _token(token: str, where: str, weight: float, end: float, name: str, shade: int | None = None) -> str:
    shade = int(signed_levels(np.array([weight]), end)[0]) if shade is None else shade
    names = f' class="{name}"' if name else ""
    return (
        f'<span data-l="{shade}"{names} title="{where}&#10;weight {numbers.number(weight)}">{escape(token)}</span><wbr>'
    )


def _named(map_: AttentionMap, text: AttendedText, tokens: Sequence[tuple[bool, str]]) -> str:
    def name(key: int) -> str:
        return "state" if key < 0 else f"{key} “{escape(shorten(tokens[key][1], MAX_TOKEN_CHARACTERS))}”"

    found = strongest(map_, 0, text, KEYS_NAMED)
    return ", ".join(f"{name(key)} {numbers.number(weight)}" for key, weight in found)


def _piece(inner: str) -> str:
    """Wrap HTML with the style that it needs to stand anywhere on a page."""
    return f'<div class="ssmscope-live"><style>{_style()}</style>{inner}</div>'


@lru_cache(maxsize=1)
def _style() -> str:
    return _STYLE.replace("LIGHT;", _shade_rules(SIGNED)).replace("DARK;", _shade_rules(SIGNED_ON_DARK))


def _shade_rules(stops: tuple[str, ...]) -> str:
    prefix = ".ssmscope-live"
    rules = [
        f'{prefix} [data-l="{level}"] {{ background: {colour}; color: {ink(colour)} }}'
        for level, colour in enumerate(signed_shades(stops), start=-STEPS)
    ]
    return "\n".join([*rules, f"{prefix} .scale i {{ background: linear-gradient(90deg, {', '.join(stops)}) }}"])


_STYLE = """
.ssmscope-live { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --mark: #d1540a; --bar: #4f97cb;
  --gone: #a40e26; --new: #116329; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
LIGHT;
@media (prefers-color-scheme: dark) {
.ssmscope-live { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0f141a; --mark: #ff9f4a;
  --gone: #ff938a; --new: #6fdd8b; }
DARK;
}
.ssmscope-live p { margin: 0 0 10px; }
.ssmscope-live .soft { color: var(--soft); font-size: 13px; }
.ssmscope-live .refusal { border-left: 4px solid var(--mark); padding: 2px 12px; overflow-wrap: anywhere; }
.ssmscope-live .wide { overflow-x: auto; }
.ssmscope-live table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
.ssmscope-live th, .ssmscope-live td { padding: 3px 20px 3px 0; text-align: left; border: 0;
  border-bottom: 1px solid var(--line); color: var(--ink); }
.ssmscope-live th { color: var(--soft); font-weight: 500; }
.ssmscope-live td i { display: inline-block; height: 9px; margin-right: 6px; background: var(--bar); }
.ssmscope-live .best { font-weight: 700; }
.ssmscope-live .scale i { display: inline-block; width: 120px; height: 10px; margin: 0 3px; border-radius: 2px; }
.ssmscope-live .tokens { line-height: 2; overflow-wrap: anywhere; }
.ssmscope-live .tokens span { padding: 2px 3px; margin: 0 1px; border-radius: 3px; white-space: pre-wrap;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.ssmscope-live .after { color: var(--soft); }
.ssmscope-live .query { outline: 2px solid var(--mark); }
.ssmscope-live .told, .ssmscope-live .words { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.ssmscope-live .words { white-space: pre-wrap; }
.ssmscope-live .words del { color: var(--gone); text-decoration: line-through; }
.ssmscope-live .words ins { color: var(--new); text-decoration: underline; }
"""
