"""Accuracy on texts with typing errors, at growing rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import TEXT_MODELS, Data
from ssmscope.api.limits import DROP
from ssmscope.api.options import Cache, LabelWords, Limit, Range, Seed, Template
from ssmscope.attacks.names import check_asked
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.attacks.noise.result import NoiseCurve
    from ssmscope.core.model import Model
    from ssmscope.data.pixels import PixelData
    from ssmscope.data.text import TextData

RATES = (0.02, 0.05, 0.1, 0.2, 0.4)


def check_rates(*, rates: Sequence[float], **others: Any) -> None:
    """Raise InputError if a rate is given twice, or `check_asked` does."""
    if twice := [rate for rate in rates if list(rates).count(rate) > 1]:
        raise InputError(f"rates names {twice[0]:g} twice; give each once")
    check_asked(**others)


@analysis(
    "noise",
    reads=Data("texts", series=True),
    question="How many typing errors does it stand?",
    models=TEXT_MODELS,
    check=check_rates,
    sharded=True,
    scores={"noise.drop": DROP, "noise.drop[RATE %]": DROP},
    dimensions=(Dimension("Typing errors", r"noise\.drop", "average drop of accuracy"),),
)
def character_noise(
    model: Model,
    data: TextData | PixelData,
    *,
    change: Annotated[
        Literal["gaussian", "dropped", "shifted"] | None,
        "Change of series: noise, steps replaced by the mean, or shifts; by default noise. Texts have typing errors.",
    ] = None,
    rates: Annotated[Sequence[float], "Probabilities of a typing error in a letter.", Range(0, 1)] = RATES,
    template: Template = None,
    words: LabelWords = None,
    limit: Limit = None,
    cache: Cache = None,
    seed: Seed = 0,
) -> NoiseCurve:
    """Measure accuracy on texts whose letters have typing errors with growing probability.

    An error swaps a letter with the next one, leaves it out, doubles it, or takes a neighbouring key, with equal
    probability; a letter without the partner that its error needs is doubled, and one that a swap takes has no error of
    its own: the result gives the errors per letter. A higher rate has the errors of a lower one that no swap takes, and
    a text the same errors in every sample of its data. Within a template only the content is changed.

    Labelled series (`labelled_series`) have Gaussian noise of the rate times each channel's standard deviation, steps
    that are replaced by the channels' mean with that probability, or are moved by up to that share of their length.

    Every number has a 95 % interval over examples: Wilson's of accuracies and other shares, else a bootstrap, all from
    the same resamples. A drop is relative, 1 − accuracy / clean accuracy.

    Args:
        template: by default, like the words, the first of a known data set's own (`TASK_PROMPTS`).

    Raises:
        InputError: a rate given twice, data that do not fit the model, and what `Template` and `Evaluator` refuse.
    """
    from ssmscope.attacks.curves import no_drop, questions
    from ssmscope.attacks.noise.measure import measure
    from ssmscope.attacks.noise.result import NoiseCurve
    from ssmscope.attacks.noise.typos import typed

    steps = tuple(sorted(map(float, rates)))
    if model.reads == "series":
        from ssmscope.attacks.noise.series import noise_in_series

        if template is not None or words is not None:
            raise InputError("template and words are of texts; leave them out for series")
        return noise_in_series(model, data, change, steps, limit, seed)
    if change is not None:
        raise InputError(f"change={change} is of series, and {model.name} reads {model.reads}; leave it out")
    asked = questions(model, data, template=template, words=words, limit=limit, cache=cache, seed=seed)
    made = [[typed(content, rate, seed) for content in asked.contents] for rate in steps]
    written = [[text for text, _ in row] for row in made]
    letters = sum(letter.isalpha() for content in asked.contents for letter in content)
    errors = [sum(count for _, count in row) / max(letters, 1) for row in made]
    texts = asked.wrapped(text for row in (asked.contents, *written) for text in row)
    answers, odds = asked.answered(texts, 1 + len(steps))
    found = measure(asked.labels, answers, odds, steps, errors, asked.contents, written, seed)
    return NoiseCurve(
        provenance=asked.provenance(model, seed, rates=list(steps)),
        classes=asked.classes,
        **found,
        notes=tuple(no_drop(found["clean"])),
    )
