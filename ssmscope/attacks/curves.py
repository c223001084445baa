"""Questions to a model about labelled examples, for all attacks that measure accuracy on changed texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from ssmscope.api.provenance import call_options, record_provenance
from ssmscope.core.bootstrap import Estimate, estimate, ratio, resampled_sums
from ssmscope.core.model import Model
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.prompts import TASK_PROMPTS, TaskPrompts, content_of
from ssmscope.data.text import SOURCES, TextData
from ssmscope.errors import InputError
from ssmscope.evaluation import Evaluator, Template
from ssmscope.interp.labelled import class_ids, word_ids


@dataclass(frozen=True)
class Questions:
    """Labelled texts, the template around them (None for none), and the evaluator that scores their classes. `contents`
    are the texts; within a template, pairs of a known data set have the names of their sentences. `labels` are class
    ids in the evaluator's numbering, that of `classes`."""

    data: TextData
    contents: tuple[str, ...]
    labels: np.ndarray
    classes: tuple[str, ...]
    template: Template | None
    evaluator: Evaluator

    @property
    def options(self) -> dict[str, Any]:
        """Template and words as provenance records them."""
        words = self.evaluator.words
        return {
            "template": None if self.template is None else self.template.text,
            "words": None if words is None else list(words),
        }

    def wrapped(self, contents: Iterable[str]) -> list[str]:
        """Return texts within the template."""
        return [self.before + content + self.after for content in contents]

    def answered(self, texts: Sequence[str], *shape: int) -> tuple[np.ndarray, np.ndarray]:
        """Return class ids, and log-odds of the true class, for all examples in so many forms: (*shape, examples)."""
        scores = self.evaluator.scores(texts).reshape(*shape, len(self.data), len(self.classes))
        return self.evaluator.answers(scores), true_log_odds(scores, self.labels)

    def provenance(self, model: Model, seed: int, **options: Any) -> dict[str, Any]:
        """Return a result's provenance; `options` replace the call's."""
        named = call_options(**options, **self.options)
        return record_provenance(model.source, options=named, seed=seed, data=self.data)

    @property
    def before(self) -> str:
        """The template's part before the text."""
        return self.template.before if self.template is not None else ""

    @property
    def after(self) -> str:
        """The template's part after the text."""
        return self.template.after if self.template is not None else ""


def check_data(data: Any) -> None:
    """Raise InputError if data are not labelled texts, or have no example."""
    if not isinstance(data, TextData):
        raise InputError(f"data is {type(data).__name__}; allowed are labelled texts (load_text)")
    if not len(data):
        raise InputError(f"{data.name} ({data.split}) has no example")


def questions(
    model: Model,
    data: Any,
    *,
    template: str | None = None,
    words: Sequence[str] | None = None,
    scoring: str = "likelihood",
    normalise: bool = False,
    limit: int | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
) -> Questions:
    """Return the examples of `data` with everything that a model needs to answer them. A language model needs a
    template and a word for each class, in the order of the data's classes. By default these are the first template and
    the words of a known data set (`TASK_PROMPTS`)."""
    check_data(data)
    if model.channels is not None:
        raise InputError(f"{model.name} reads {model.reads}, but {data.name} holds texts")
    model.check_classes(f"accuracy on {data.name}")
    model.check_tokenizer()
    if limit is not None:
        data = data.sample(limit, seed=seed)
    if model.is_classifier:
        labels, classes = class_ids(model, data), tuple(model.labels or ())
    else:
        classes, (template, words) = data.label_names, _prompt(model, data, template, words)
        labels = word_ids(data, words)
    if len(classes) < 2:
        raise InputError(f"there is only the class {', '.join(classes)}; an answer needs two classes to choose from")
    wrapped = Template(template) if template is not None else None
    named = _is_known(data) and wrapped is not None
    contents = tuple(content_of(data.name, text) for text in data.texts) if named else data.texts
    evaluator = Evaluator(model, words=words, scoring=scoring, normalise=normalise, cache=cache)
    return Questions(data, contents, labels, classes, wrapped, evaluator)


def _is_known(data: TextData) -> bool:
    """Return True for data of a known name with the classes of that name, not for a file of that name."""
    return data.name in SOURCES and data.label_names == SOURCES[data.name].labels


def own_prompts(data: TextData) -> TaskPrompts | None:
    """Return a known data set's own templates and words."""
    return TASK_PROMPTS.get(data.name) if _is_known(data) else None


def _prompt(
    model: Model, data: TextData, template: str | None, words: Sequence[str] | None
) -> tuple[str, tuple[str, ...]]:
    if own := own_prompts(data):
        template, words = template or own.templates[0], own.words if words is None else words
    if template is None:
        raise InputError(
            f"{model.name} is a language model: give template=…, which asks for the class, such as "
            "'Review: {content} Sentiment:', or '{content}' for texts that ask themselves"
        )
    if words is None:
        names = ", ".join(data.label_names[:12])
        raise InputError(f"{model.name} is a language model: give words=…, what it says for {names}, in this order")
    return template, tuple(words)


def true_log_odds(
    scores: Float[np.ndarray, "*settings examples classes"], labels: Int[np.ndarray, " examples"]
) -> Float[np.ndarray, "*settings examples"]:
    """Compute log p / (1 − p) of the true class, natural logarithm, from logits or log-likelihoods."""
    true = np.arange(scores.shape[-1]) == np.asarray(labels)[:, None]
    others = np.logaddexp.reduce(np.where(true, -np.inf, scores), axis=-1)
    return np.where(true, scores, 0.0).sum(-1) - others


def shifts(
    answers: Int[np.ndarray, "steps+1 examples"],
    labels: Int[np.ndarray, " examples"],
    odds: Float[np.ndarray, "steps+1 examples"] | None,
    seed: int,
    *further: np.ndarray,
) -> tuple[np.ndarray, dict[str, np.ndarray], list[np.ndarray]]:
    """Compute numbers in resamples of the examples from class ids and log-odds, those of the clean texts first: right
    clean answers (resamples, 1), the fields of `Flips` (resamples, steps), and sums of `further` (rows, examples)."""
    hits = answers == labels
    columns = [hits[:1], hits[1:], hits[0] & (answers[1:] != answers[0]), *further]
    columns += [] if odds is None else [odds[1:] - odds[0]]
    sums = resampled_sums(np.concatenate(columns).T.astype(np.float64), seed=seed)
    clean, right, flipped, *rest = np.split(sums, np.cumsum([len(each) for each in columns[:-1]]), axis=1)
    parts = {"accuracy": right / len(labels), "drop": 1 - ratio(right, clean), "flipped": ratio(flipped, clean)}
    return clean, parts | ({} if odds is None else {"log_odds_change": rest.pop() / len(labels)}), rest


def at_step(parts: Mapping[str, Float[np.ndarray, "resamples steps"]], step: int, **shares: float) -> dict[str, Any]:
    """Return the estimates of one step, by their fields; `shares` are those of so many examples."""
    return {name: estimate(part[:, step], of=shares.get(name)) for name, part in parts.items()}


def no_drop(clean: Estimate) -> list[str]:
    """Return the note on a clean accuracy of 0."""
    return [] if clean.value else ["the clean accuracy is 0: there is no drop to measure"]


def unknown_tokens(model: Model, text: str) -> tuple[int, int]:
    """Count a text's tokens, without special ones, and those of them that the tokenizer does not know."""
    ids = tokenize(model.tokenizer, text, add_special_tokens=False)["input_ids"]
    unknown = model.tokenizer.unk_token_id
    return len(ids), 0 if unknown is None else sum(i == unknown for i in ids)
