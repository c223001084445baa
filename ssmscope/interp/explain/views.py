"""Views of explanations: tokens in the colours of every method, the strongest words, and notes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.render.blocks import TokenRow, TokenRows, TokenText
from ssmscope.render.numbers import number
from ssmscope.render.table import Cell, Line, number_cell
from ssmscope.render.token_figure import draw_rows
from ssmscope.render.tokens import name_scores, shorten, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.interp.explain.result import Attribution, ExplainedText, Explanation
    from ssmscope.render.figure import Frame

NAMED = 8
"""Largest number of words of each sign that a table names."""


def rows(result: Explanation) -> TokenRows:
    """Return every text with a row per method."""
    return TokenRows(
        texts=tuple(_text(text, result.top) for text in result),
        of="method",
        score="score",
        name="each method in its own range",
        marked=f"the {result.top} strongest, at most half of the tokens",
    )


def _text(text: ExplainedText, top: int) -> TokenText:
    made = tuple(_row(each, text, top) for each in text.attributions)
    return TokenText(text.tokens, text.words, made, text.answer, text.probability, about(text), pixels=text.pixels)


def _row(each: Attribution, text: ExplainedText, top: int) -> TokenRow:
    strongest = [*text.top(each, top), *text.against(each, top)]
    strongest.sort(key=lambda at: (-abs(each.scores[at]), at))
    # If all tokens were marked, none would stand out.
    marked = strongest[: min(top, max(int((~text.special).sum()) // 2, 1))]
    kept, against = ([at for at in marked if (each.scores[at] > 0) == above] for above in (True, False))
    nothing = None if each.scores.any() else np.ones(len(text), dtype=bool)  # Zeros have no rank.
    said = "; ".join(filter(None, (doubt(each), "every score is 0" * (nothing is not None))))
    return TokenRow(each.method, each.scores, ends(each, text), each.signed, nothing, kept, against, remark=said)


def ends(each: Attribution, text: ExplainedText) -> tuple[float, float]:
    """Return the ends of a method's colours: from the lowest score to the highest or, of a signed method, as far as the
    largest |score| on both sides of zero. All tokens that are drawn take part, of an image its pixels alone."""
    scores = (each.scores if text.pixels is None else each.scores[~text.special]).astype(np.float64)
    end = float(np.abs(scores).max())
    return (-end, end) if each.signed else (float(scores.min()), float(scores.max()))


def doubt(each: Attribution) -> str:
    """Return a remark where scores have not converged, or do not add up; else ""."""
    if each.converged is None or each.converged:
        return ""
    if each.rounding:
        return f"stopped at the rounding of {each.rounding}, ±{each.error:.1%}"
    if each.error is not None:
        return f"not converged, ±{each.error:.1%}" if math.isfinite(each.error) else "convergence not checked"
    if each.delta is None:
        return ""
    return f"misses {each.delta:.1%}" if each.delta < 10 else f"misses {each.delta:.0f}×"


def baselines(result: Explanation) -> list[str]:
    """Return a note per method with a baseline, on what it compares every text with; and on the number of gradients
    that methods took."""
    found: dict[str, None] = {}
    for each in (each for text in result for each in text.attributions if each.baseline):
        found[f"{each.method} compares with {'; '.join(filter(None, (each.baseline, each.note)))}."] = None
    for method in result.methods:
        every = [each.steps for text in result for each in text.attributions if each.method == method and each.steps]
        if every:
            most = f" to {max(every):,}" if max(every) > min(every) else ""
            found[f"{method} took {min(every):,}{most} gradients a text."] = None
    return list(found)


def about(text: ExplainedText) -> str:
    """Describe what is explained, and its value."""
    return f"explained: {shorten(visible(text.target), 48)}, f = {number(text.value, significant=4)}"


def strongest(result: Explanation, label: str = "") -> Iterator[Line]:
    """Yield a row per text and method: the words of the highest scores, for a signed method those most against what is
    explained, special tokens, and the error of the sum. In a comparison of models, whose label comes first, also what
    is explained."""
    for at, text in enumerate(result):
        for each in text.attributions:
            cells = {"of": Cell(text=text.target), "f": number_cell(text.value)} if label else {}
            sides = {"highest scores": text.top} | ({"strongest against": text.against} if each.signed else {})
            for name, places in sides.items():
                cells[name] = Cell(
                    text=name_scores(text.tokens, each.scores, places(each, result.top)[:NAMED]) or "none"
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
    strongest = places[np.argsort(-sizes[places], kind="stable")][:NAMED].tolist()
    share = 100 * float(sizes[places].sum() / sizes.sum()) if sizes.any() else 0.0
    return f"{name_scores(text.tokens, each.scores, strongest)} ({share:.0f} % of all)"


def draw(result: Explanation, frame: Frame, *, start: int = 0) -> Figure:
    """Draw every text with a row of coloured tokens per method; long texts as a strip over positions per method,
    images as a map next to each. One figure holds 8 texts, from number `start` on."""
    return draw_rows(rows(result), f"Explanation of {result.model_name}", frame, start=start)
