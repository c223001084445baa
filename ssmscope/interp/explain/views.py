"""Views of explanations: tokens in the colours of every method, the strongest words, and notes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from ssmscope.core.ties import descending
from ssmscope.interp.explain.scored_text import Attribution, ExplainedText
from ssmscope.interp.heatmap.text_result import FLAT_REMARK
from ssmscope.interp.heatmap.words import is_selective
from ssmscope.render.blocks import TokenRow, TokenRows, TokenText
from ssmscope.render.numbers import number
from ssmscope.render.table import Cell, Line, number_cell
from ssmscope.render.tokens import name_scores, shorten, visible

NAMED = 8
"""Largest number of words of each sign that a table names."""
AGAINST = "strongest against"
TOLD_WORDS = 2
"""Number of words of a text that a verdict names."""
TOLD_WIDTH = 60
"""Maximum number of characters of a word or sentence that a headline names."""


def rows(texts: Sequence[ExplainedText], top: int) -> TokenRows:
    """Return every text with a row per method."""
    return TokenRows(
        texts=tuple(_text(text, top) for text in texts),
        of="method",
        score="score",
        name="each method in its own range",
        marked=f"the {top} strongest, at most half of the tokens",
    )


def _text(text: ExplainedText, top: int) -> TokenText:
    made = tuple(_row(each, text, top) for each in text.attributions)
    return TokenText(
        text.tokens,
        text.words,
        made,
        text.answer,
        text.probability,
        about(text),
        pixels=text.pixels,
        series=text.series,
    )


def _row(each: Attribution, text: ExplainedText, top: int) -> TokenRow:
    either = sorted([*text.top(each, top), *text.against(each, top)])
    strongest = [either[at] for at in descending(np.abs(each.scores[either]))]
    flat, seen = is_flat(each, text), ends(each, text)
    # If all tokens were marked, none would stand out.
    marked = strongest[: 0 if flat else min(top, max(int((~text.special).sum()) // 2, 1))]
    kept, against = ([at for at in marked if (each.scores[at] > 0) == above] for above in (True, False))
    nothing = None if each.scores.any() else np.ones(len(text), dtype=bool)  # Zeros have no rank.
    said = "; ".join(filter(None, (doubt(each), "every score is 0" * (nothing is not None), FLAT_REMARK * flat)))
    used, own = ((sum(seen) / 2,) * 2, seen) if flat else (seen, None)
    return TokenRow(each.method, each.scores, used, each.signed, nothing, kept, against, remark=said, own=own)


def is_flat(each: Attribution, text: ExplainedText) -> bool:
    """Return True for a score of the gates that varies over a text's ordinary tokens by less than a tenth: noise."""
    seen = each.scores[~text.special].astype(np.float64)
    gate = "" if each.kind is None else each.kind.gate
    read = gate and text.pixels is None and each.scores.any()
    return bool(read) and not is_selective(1 - seen if gate == "kept" else seen)


def ends(each: Attribution, text: ExplainedText) -> tuple[float, float]:
    """Return the ends of a method's colours: lowest and highest score of an ordinary token, or ± the largest |score| if
    signed. A special token beyond them has the colour of the end."""
    scores = each.scores[~text.special if not text.special.all() else slice(None)].astype(np.float64)
    end = float(np.abs(scores).max())
    return (-end, end) if each.signed else (float(scores.min()), float(scores.max()))


def doubt(each: Attribution) -> str:
    """Return a remark where scores have not converged, or do not add up; else ""."""
    if each.converged is None or each.converged:
        return ""
    if each.error is not None:
        return f"not converged, ±{each.error:.1%}" if math.isfinite(each.error) else "convergence not checked"
    if each.delta is None:
        return ""
    return f"misses {each.delta:.1%}" if each.delta < 10 else f"misses {each.delta:.0f}×"


MIN_CONSTANTS = 1e-4
"""Smallest relevance of constants that is told."""


def baselines(texts: Sequence[ExplainedText], methods: Sequence[str]) -> list[str]:
    """Return notes on each method's baseline, the number of gradients that it took, and the part of constants."""
    found: dict[str, None] = {}
    for each in (each for text in texts for each in text.attributions if each.baseline):
        found[f"{each.method} compares with {'; '.join(filter(None, (each.baseline, each.note)))}."] = None
    for method in methods:
        every = [each.steps for text in texts for each in text.attributions if each.method == method and each.steps]
        if every:
            most = f" to {max(every):,}" if max(every) > min(every) else ""
            found[f"{method} took {min(every):,}{most} gradients a text."] = None
        own = [(text, each) for text in texts for each in text.attributions if each.method == method]
        beyond = sorted(part for text, each in own if not math.isnan(part := text.constants(each)))
        if max(map(abs, beyond), default=0) > MIN_CONSTANTS:
            ends = dict.fromkeys(number(each, significant=2) for each in (beyond[0], beyond[-1]))
            found[f"{method}: biases and other constants have {' to '.join(ends)} of f, tokens the rest."] = None
    return list(found)


def answer_in_words(text: ExplainedText) -> str:
    """Name what is explained and the words that are strongest for it by the first method."""
    first = text.attributions[0]
    named = [shorten(visible(text.named(first, at)).strip(), TOLD_WIDTH) for at in text.top(first, TOLD_WORDS)]
    words = ", ".join(f"“{each}”" for each in named)
    return f"{_target(text)} by {words or 'no word'}"


def rests_on(text: ExplainedText, where: str) -> str:
    """Name the token that each method scores highest, methods that agree together."""
    chosen: dict[str, list[str]] = {}
    for each in text.attributions:
        if each.method == "random":
            continue
        best = () if is_flat(each, text) else text.top(each, 1)
        token = f"“{shorten(visible(text.named(each, best[0])).strip(), TOLD_WIDTH)}”" if best else "no token"
        chosen.setdefault(token, []).append(each.method)
    ranked = sorted(chosen.items(), key=lambda item: (item[0] == "no token", -len(item[1])))
    return f"“{_target(text)}”{where} rests most on " + ", ".join(f"{token} ({', '.join(by)})" for token, by in ranked)


def about(text: ExplainedText) -> str:
    """Describe what is explained, and its value."""
    return f"explained: {_target(text, 48)}, f = {number(text.value, significant=4)}"


def _target(text: ExplainedText, width: int = 32) -> str:
    return shorten(visible(text.target.strip() or text.target), width)


def strongest(texts: Sequence[ExplainedText], top: int, label: str = "") -> Iterator[Line]:
    """Yield a row per text and method; in a comparison, with the model's `label`, also what is explained."""
    for at, text in enumerate(texts):
        sides = {"highest scores": text.top} | (
            {AGAINST: text.against} if any(each.signed for each in text.attributions) else {}
        )
        for each in text.attributions:
            cells = {"of": Cell(text=text.target), "f": number_cell(text.value)} if label else {}
            flat = is_flat(each, text)
            for name, places in sides.items():
                said = name_scores(text.tokens, each.scores, places(each, top)[:NAMED])
                cells[name] = Cell(
                    text=said and FLAT_REMARK if flat else said or "none" * (each.signed or name != AGAINST)
                )
            if text.special.any():
                cells["special tokens"] = Cell(text=_special(each, text))
            if label:
                cells["relative error of the sum"] = number_cell(math.nan if each.delta is None else each.delta)
            elif said := doubt(each):
                of = " of f(x) − f(baseline)" if each.error is None else " of the largest score"
                cells["error"] = Cell(text=said + of * (said[-1] in "%×"))
            yield Line((label, str(at), each.method) if label else (str(at), each.method), cells)


def _special(each: Attribution, text: ExplainedText) -> str:
    """Return the special tokens with the largest |score|, and the share of Σ |score| that all special tokens have."""
    places, sizes = np.flatnonzero(text.special), np.abs(each.scores.astype(np.float64))
    strongest = places[descending(sizes[places])][:NAMED].tolist()
    share = 100 * float(sizes[places].sum() / sizes.sum()) if sizes.any() else 0.0
    return f"{name_scores(text.tokens, each.scores, strongest)} ({share:.0f} % of all)"
