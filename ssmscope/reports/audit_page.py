"""Parts of a report's page that an audit has: scorecard, worst findings, and hardest examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup
from ssmscope.api.dimensions import dimension_of
from ssmscope.render.tokens import shorten, visible
from ssmscope.render.worddiff import html_diff
from ssmscope.reports import card_views
from ssmscope.reports.hardest import EXPLAINED, PATCHED, Broken, Finding, Hard, worst_findings
from ssmscope.reports.scorecard import scorecard
from ssmscope.reports.scores import report_scores
from ssmscope.reports.store import Report

MAX_TEXT_CHARACTERS = 600
"""Maximum length of an example's text."""
Anchors = Mapping[str, str]
"""Anchors of the report's entries by key."""


def opening(report: Report, anchors: Anchors) -> Markup:
    """Render scorecard and worst findings; nothing for a report with too few scores."""
    card = scorecard(report_scores(report), report.baseline)
    if card is None:
        return Markup("")
    told = Markup(
        '<section id="_scorecard" aria-labelledby="_scorecard_heading"><h2 id="_scorecard_heading">Scorecard</h2>{}'
        "</section>"
    ).format(card_views.html(card))
    found = worst_findings(report)
    if found:
        listed = Markup("").join(_finding(one, anchors) for one in found)
        told += Markup(
            '<section id="_findings" aria-labelledby="_findings_heading"><h2 id="_findings_heading">What to look at '
            'first</h2><ol class="findings">{}</ol></section>'
        ).format(listed)
    return told


def _finding(one: Finding, anchors: Anchors) -> Markup:
    row = dimension_of(one.score.name)
    measure = "answers that change" if row is None else row.measure
    head = Markup('<a href="#{}">{}</a>: {}, {} of {}').format(
        anchors[one.entry.key], one.entry.heading, measure, card_views.shown(one.score), visible(one.score.model)
    )
    example = Markup("") if one.example is None else _example(one.example)
    return Markup('<li dir="auto"><p>{}</p>{}</li>').format(head, example)


def _example(one: Broken) -> Markup:
    text = _shortened(one.text)
    changed = None if one.attacked is None else _shortened(one.attacked)
    body = Markup(html_diff(text, changed)) if changed else Markup("{}").format(text)
    return Markup('<blockquote dir="auto">{}</blockquote><p class="note">The answer changes: {}.</p>').format(
        body, visible(one.how)
    )


def _shortened(text: str) -> str:
    return shorten(visible(text), MAX_TEXT_CHARACTERS)


# ---- the hardest examples


def closing(report: Report, anchors: Anchors) -> Markup:
    """Render a part for each of the hardest examples; nothing without any."""
    if not report.hardest:
        return Markup("")
    articles = Markup("").join(_hard(at, one, report, anchors) for at, one in enumerate(report.hardest, start=1))
    return Markup(
        '<section id="_hardest" class="analysis" aria-labelledby="_hardest_heading"><h2 id="_hardest_heading">The '
        'hardest examples</h2><p class="note">Texts answered correctly when clean, whose answers most analyses change '
        "on most models.</p>{}</section>"
    ).format(articles)


def _hard(at: int, one: Hard, report: Report, anchors: Anchors) -> Markup:
    rows = Markup("").join(_broken(each, anchors) for each in one.broken)
    links = [
        Markup('<a href="#{}">{} of {}</a>').format(anchors[key], what, visible(model))
        for what, model, key in _asked(one, report)
    ]
    told = Markup("<p>Next: {}.</p>").format(Markup(", ").join(links)) if links else Markup("")
    models = len({each.model for each in one.broken})
    return Markup(
        '<article id="_hardest--{at}" aria-labelledby="_hardest--{at}_heading"><h3 id="_hardest--{at}_heading">Example '
        '{at}: {count} of its answers change, on {models}</h3><blockquote dir="auto">{text}</blockquote>'
        '<div class="wide" tabindex="0" role="region" aria-label="What changes the answer to example {at}"><table '
        'class="texts"><thead><tr><th scope="col">model</th><th scope="col">analysis</th><th scope="col">attack</th>'
        '<th scope="col">text</th></tr></thead><tbody>{rows}</tbody></table></div>{told}</article>'
    ).format(
        at=at,
        count=len(one.broken),
        models=f"{models} model{'s' * (models > 1)}",
        text=_shortened(one.text),
        rows=rows,
        told=told,
    )


def _broken(one: Broken, anchors: Anchors) -> Markup:
    changed = Markup("") if one.attacked is None else Markup(html_diff(_shortened(one.text), _shortened(one.attacked)))
    return Markup(
        '<tr><th scope="row" dir="auto">{}</th><td><a href="#{}">{}</a></td><td dir="auto">{}</td>'
        '<td class="text" dir="auto">{}</td></tr>'
    ).format(visible(one.model), anchors[one.entry.key], one.entry.heading, visible(one.how), changed)


def _asked(one: Hard, report: Report) -> Sequence[tuple[str, str, str]]:
    """Return what was asked about a text: name, model, and key of the entry."""
    found = []
    for entry in report.entries:
        if entry.heading == EXPLAINED and one.text in (entry.options.get("text") or ()):
            found.append(("explanation", entry.models[0], entry.key))
        if entry.heading == PATCHED and entry.options.get("clean") == one.text:
            found.append(("patch", entry.models[0], entry.key))
    return found
