"""Reports to show: real results of the shipped models on a few texts, and heatmaps made up for what texts can hold."""

import os
import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import numpy as np
from filelock import FileLock
from markupsafe import Markup
import ssmscope
from ssmscope.api.results import Result
from ssmscope.data.text import text_data
from ssmscope.interp.heatmap.scored_text import ScoredText
from ssmscope.interp.heatmap.text_result import SelectionHeatmap
from ssmscope.render.blocks import Picture
from ssmscope.render.html import image_html
from ssmscope.render.tokens import visible
from ssmscope.reports.page import render
from ssmscope.reports.store import DONE, FAILED, MISSING, Report, ReportEntry

MODELS = ("demo/sst2-mamba2", "demo/sst2-baleen-e")
TEXTS = (
    "A gripping, beautifully acted film with a moving end.",
    "Dull & overlong; the plot <b>never</b> starts.",
    "It made me laugh, and then it made me think.",
    "A waste of a fine cast.",
)
DATA = text_data("own", "test", TEXTS, (1, 0, 1, 0), ("negative", "positive"))
PROMPTS = dict(attacks=["stresstest", "checklist"], template=["Is it good? {content}", "Review: {content}"])
CHEAP = {"ig": {"steps": 4, "cap": 12}}
"""Too few gradients to converge: a report says so."""
T = TypeVar("T")
PROVENANCE = {"date": "2026-01-02T03:04:05+00:00", "plan": "title: tests\nmodels: [demo/…]\n", "versions": {"a": "1"}}


def entry(
    verb: str, *results: Result, heading: str | None = None, models: Sequence[str] = MODELS[:1], **more
) -> ReportEntry:
    """Return an entry, finished unless `state` says otherwise."""
    given = dict(
        command=f"analyze {verb} {' '.join(models)} --text 'it'\"'\"'s <fine>' --out out", options={"limit": 4},
        key=f"{abs(hash((verb, heading, models, str(more)))):016x}"[:16], state=DONE, seconds=1.25, error=None,
        traceback=None,
    )  # fmt: skip
    return ReportEntry(verb=verb, heading=heading or verb, models=tuple(models), results=results, **(given | more))


def failed(verb: str, error: str, traceback: str, **more) -> ReportEntry:
    return entry(verb, state=FAILED, error=error, traceback=traceback, seconds=None, **more)


def shared(make: Callable[[], T]) -> Callable[[], T]:
    """Return the value of a function, made once in all test workers: the first one writes it down for the others."""

    @lru_cache(maxsize=1)
    @wraps(make)
    def once() -> T:
        if "SSMSCOPE_TESTS_SHARED" not in os.environ:
            return make()
        folder = Path(os.environ["SSMSCOPE_TESTS_SHARED"])
        with FileLock(folder / f"reported-{make.__name__}.lock"):
            kept = folder / f"reported-{make.__name__}"
            if not kept.exists():
                kept.write_bytes(pickle.dumps(make()))
            return pickle.loads(kept.read_bytes())

    return once


@shared
def small() -> Report:
    """One model by a few quick analyses, one of them twice with another option."""
    model = ssmscope.load(MODELS[0])
    trace = model.trace(list(TEXTS))
    entries = [
        entry("heatmap", ssmscope.heatmap(trace, layers="all"), heading="What is kept"),
        entry("attention", ssmscope.attention(model.trace(list(TEXTS[:2])))),
        entry("stability", ssmscope.stability(model, list(TEXTS))),
    ]
    for seed in (0, 1):
        found = ssmscope.position(model, DATA, regions="0%:25%,75%:100%", seed=seed)
        entries.append(entry("position", found, options={"limit": 4, "seed": seed}))
    found = ssmscope.fidelity(model, DATA, methods=["self-retention", "ig"], option=CHEAP, steps=4)
    return Report("A small report", (*entries, entry("fidelity", found)), PROVENANCE)


@shared
def real() -> Report:
    """Two models by most analyses, one failure, one entry that has not run."""
    entries = []
    for name in MODELS:
        model = ssmscope.load(name)
        trace = model.trace(list(TEXTS))
        alone = dict(models=(name,))
        for score in ("retention", "write"):
            found = ssmscope.heatmap(trace, score=score, layers="all", scale="row")
            entries.append(entry("heatmap", found, heading="What is kept", options={"score": score}, **alone))
        entries += [
            entry("attention", ssmscope.attention(model.trace(list(TEXTS[:2]))), **alone),
            entry(
                "explain",
                ssmscope.explain(model, list(TEXTS[:2]), methods=["ig", "self-retention"], option=CHEAP),
                **alone,
            ),
            entry(
                "fidelity",
                ssmscope.fidelity(model, DATA, methods=["self-retention", "ig"], option=CHEAP, steps=4),
                **alone,
            ),
            entry("position", ssmscope.position(model, DATA, regions="0%:25%,75%:100%"), **alone),
            entry("stability", ssmscope.stability(model, list(TEXTS)), **alone),
            entry("prompts", ssmscope.prompts(model, DATA, **PROMPTS), **alone),
        ]
    model = ssmscope.load(MODELS[0])
    entries += [
        entry("influence", ssmscope.influence(model, list(TEXTS[:1]))),
        entry("insertion", ssmscope.insertion(model, DATA, places=3)),
        entry("effect", ssmscope.effect(model, clean=TEXTS[0], corrupted=TEXTS[0].replace("moving", "dull"))),
    ]
    entries.append(failed("words", "no file <b>glove</b>", 'Traceback:\n  File "<x>", line 1', models=MODELS[:1]))
    entries.append(entry("words", models=MODELS[1:], state=MISSING, seconds=None))
    order = {each.heading: number for number, each in enumerate(entries[::-1])}
    entries.sort(key=lambda each: -order[each.heading])
    return Report('Two <sentiment> classifiers & "more"', tuple(entries), PROVENANCE)


@shared
def rendered() -> str:
    """The page of the real report, with one picture of each shape of a file."""
    return without_pictures(real(), but=1)


def without_pictures(report: Report, but: int = 0) -> str:
    """The page with empty images, but for the first few that are vectors and that are not: drawing is most of the
    work."""
    left = {True: but, False: but}

    def image(picture: Picture) -> Markup:
        left[picture.vector] -= 1
        if left[picture.vector] >= 0:
            return image_html(picture)
        return Markup('<img class="figure" alt="{}" src="data:,">').format(visible(picture.alt))

    with patch("ssmscope.reports.page.image_html", image):
        return render(report)


def heatmap(
    texts: Sequence[Sequence[str]], *, model: str = "made/up", layers: int = 2, answer: str = "positive",
    score: str = "retention", seed: int = 0,
) -> SelectionHeatmap:  # fmt: skip
    """A heatmap of any tokens, its scores drawn."""
    random = np.random.default_rng(seed)
    made = []
    for tokens in texts:
        scores = random.random((layers, len(tokens))).astype(np.float32)
        words = tuple(range(len(tokens)))
        mean = scores.mean(0).astype(np.float32)
        kept = tuple(np.argsort(-mean, kind="stable")[:3].tolist())
        made.append(ScoredText(tuple(tokens), words, scores, mean, kept, answer, 0.75))
    provenance = {"model": model, "fingerprint": f"of {model}", "options": {}, "seed": None}
    return SelectionHeatmap(provenance, tuple(made), score, tuple(range(layers)), 3, True)


def report(*entries: ReportEntry, title: str = "A report") -> Report:
    return Report(title, entries, PROVENANCE)
