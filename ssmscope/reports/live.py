"""HTML pieces of the live page: prediction, selection heatmap, explanation, attention of a token, effect of an edit.

Texts go in and HTML comes out, without server or script; `ssmscope.reports.serving` puts it on a page.

    live = Live([ssmscope.load("demo/sst2-mamba2")])
    live.answer(0, "A gripping film.", "A boring film.").prediction
    live.row(0, "A gripping film.", "2", layer=1, level="ssm")
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

from ssmscope.api.analyses import analysis_of
from ssmscope.api.options import Option
from ssmscope.api.results import TABLE_ROWS
from ssmscope.attacks.effect import attack_effect
from ssmscope.core.text_files import SURROGATE
from ssmscope.core.ties import descending
from ssmscope.errors import InputError, as_typed
from ssmscope.interp.attention import implicit_attention
from ssmscope.interp.attention.result import ImplicitAttention, query_rows, readouts
from ssmscope.interp.explain import explain
from ssmscope.interp.heatmap import selection_heatmap
from ssmscope.interp.heatmap.text_result import SelectionHeatmap, definitions, notes, rows, strongest
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.html import fragment
from ssmscope.render.table import table
from ssmscope.render.tokens import shorten, visible
from ssmscope.render.worddiff import html_diff

if TYPE_CHECKING:
    from pandas import DataFrame
    from ssmscope.core.model import Model
    from ssmscope.core.trace import Trace


MAX_LAYERS_SHOWN = 8
"""Maximum number of layers that are shown below their average."""
TRACES_KEPT = 4
"""Number of cached traces, so that another layer, score or token of a text needs no new run."""
PREDICTIONS_SHOWN = 10
"""Number of classes or next tokens shown per text."""
MAX_TOKEN_CHARACTERS = 60
"""Maximum length of a class or token as shown."""

# ---- options that a visitor may set, as the analyses declare them
# Left out are options that name files on the server, those that change no number, and those of `EXCLUDED_OPTIONS`.

EXCLUDED_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "heatmap": ("layers", "merge", "limit", "seed"),
    "explain": ("steps", "option", "seed"),
    "attention": ("layers", "rows", "pool", "rollout", "residual", "span", "top"),
    "effect": ("clean", "corrupted"),
}
"""Analyses of the page, and their options without a control in its forms: layer and token have controls next to the
views, tokens are clicked, and whole maps, products of layers and data sets are not shown."""


def form_options(verb: str) -> dict[str, Option]:
    """Return the options of an analysis that a visitor may set, by name."""
    known = analysis_of(verb).options.items()
    return {
        name: option
        for name, option in known
        if name not in EXCLUDED_OPTIONS[verb] and option.reads is None and not option.no_effect
    }


def choices(option: Option) -> tuple[str, ...]:
    """Return the words that an option takes, with "" if it is optional; none if it takes other values too."""
    if option.kind is not None or option.several:
        return ()
    return option.words if option.default is not None else ("", *option.words)


def shown(option: Option) -> Any:
    """Return the default as a form shows it: a bool or a text."""
    if option.is_flag:
        return bool(option.default)
    return "" if option.default is None else option.typed(option.default)[1]


def form_values(verb: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a form's values to the analysis's options, leaving out empty ones; raise InputError for wrong ones."""
    known, found = form_options(verb), {}
    for name, value in given.items():
        if name not in known:
            raise InputError(f"{verb} has no option {name!r:.80} here; there are {', '.join(known)}")
        if isinstance(value, str):
            if SURROGATE.search(value):
                raise InputError(f"{name} has half of a character (a lone surrogate): remove it")
            value = value.strip()
        if value != "":
            found[name] = known[name].read(value)
    return found


# ---- the page's pieces


@dataclass(frozen=True)
class Answer:
    """HTML pieces of one model: prediction, heatmaps of the text and of the edited text, and what the edit changes,
    each "" if empty; a refused text has only `prediction`, which says why."""

    prediction: str
    given: str = ""
    edited: str = ""
    change: str = ""


class Live:
    """Language models or text classifiers with tokenizers, which analyze typed texts of at most `max_tokens` tokens.

    A text whose trace is among the last `TRACES_KEPT` is not run again. Calls from all threads are serialized, because
    a run changes the model's layers while it lasts. Raise InputError for no model, a model of pixels, one without a
    tokenizer, or a `max_tokens` below 1."""

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
        self._traces = lru_cache(TRACES_KEPT)(self._run)
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
        """Return all pieces for a text, and for its edited version if given, by the model with that index; `layer` is
        that of the heatmaps, or "mean" for the average, `heatmap` and `effect` are options of these analyses as a form
        has them."""
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
                chosen, both = form_values("heatmap", options), self._both(number, text, edited)
                given, other = ("" if trace is None else _heatmap(trace, layer, chosen) for trace in both)
                return given, other
            except InputError as error:
                return refusal(error), ""

    def change(self, number: int, text: str, edited: str, **options: Any) -> str:
        """Return the effect of the edit, "" without one; `options` are those of the effect form."""
        if not edited.strip():
            return ""
        with self._lock:
            try:
                return _change(self.models[number], text, edited, form_values("effect", options))
            except InputError as error:
                return refusal(error)

    def explained(self, number: int, text: str, edited: str, **options: Any) -> str:
        """Return what the answers to the text, and to its edited version if given, rest on; `options` are those of the
        explanation form."""
        with self._lock:
            try:
                texts = [each for each in (text, edited) if each.strip()]
                self._both(number, text, edited)  # Texts are refused as they are elsewhere.
                found = explain(self.models[number], texts, **form_values("explain", options))
                return fragment([found.token_rows(), table(("text", "method"), found.lines())])
            except InputError as error:
                return refusal(error)

    def row(self, number: int, text: str, position: str, *, layer: int, **options: Any) -> str:
        """Return the row of a layer's implicit attention for the token at a position, or a hint if position is "";
        `options` are those of the attention form."""
        if not position.strip():
            return _piece('<p class="note">Click a token above to see what it attends to.</p>')
        with self._lock:
            try:
                chosen = form_values("attention", options)
                return _row(self.models[number], self.trace(number, text), position, layer, chosen)
            except InputError as error:
                return refusal(error)

    def trace(self, number: int, text: str) -> Trace:
        """Return the trace of the model's run on the text."""
        with self._lock:
            return self._traces(number, text)

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
    """Return an error as a line of the page."""
    line = visible(as_typed(" ".join(str(error).split())))
    return _piece(f'<p class="refusal" role="alert">{escape(line)}</p>')


def predictions(model: Model, given: Trace, edited: Trace | None = None) -> DataFrame:
    """Return the `PREDICTIONS_SHOWN` likeliest classes or next tokens of a text or its edited version, one per row,
    sorted by the probability given the text: name, given, and with an edited text edited and change."""
    import pandas as pd

    traces = [trace for trace in (given, edited) if trace is not None]
    logits = [trace.logits[0].double() for trace in traces]
    rows = [model.probabilities(each).cpu().numpy() for each in logits]
    orders = [descending(each.cpu().numpy(), float(each.abs().max())).tolist() for each in logits]
    likeliest = {i for order in orders for i in order[:PREDICTIONS_SHOWN]}
    chosen = [i for i in orders[0] if i in likeliest]
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
    return _piece(f'<div class="wide" tabindex="0"><table><tr>{head}</tr>{"".join(rows)}</table></div>')


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
    shown: list[Block] = [rows(found, every=every)]
    if found.heads or lives:
        shown.append(table(("text", "of"), list(strongest(found)), most=TABLE_ROWS))
    told = [Prose(line, "definition") for line in definitions(found)]
    return fragment([*shown, *(Prose(line, "note") for line in notes(found)), *told])


def _change(model: Model, text: str, edited: str, options: Mapping[str, Any]) -> str:
    effect = attack_effect(model, clean=text, corrupted=edited, **options)
    said = f'<p class="note">{escape(effect.answer_name)}; {escape(effect.changed_name)}</p>'
    return _piece(f'<p class="words">{html_diff(text, edited)}</p>{said}') + fragment(effect.blocks())


def _row(model: Model, trace: Trace, position: str, layer: int, options: Mapping[str, Any]) -> str:
    length, given = len(trace.tokens[0]), position.strip()
    if len(given) > 9 or not given.isdecimal() or int(given) >= length:
        raise InputError(f"there is no token {shorten(given, 20)!r}; the text has the tokens 0 to {length - 1}")
    found = implicit_attention(model, trace, layers=[layer], rows=[int(given)], **options)
    assert isinstance(found, ImplicitAttention)
    alone = [replace(found, texts=(replace(found[0], maps=(each,)),)) for each in found[0].maps]
    return fragment([*map(query_rows, alone), readouts(found)])


def _piece(inner: str) -> str:
    return f'<div class="ssmscope">{inner}</div>'
