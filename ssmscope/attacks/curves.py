"""What accuracy curves over changed texts have in common: the examples, what answers them, and its log-odds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from ssmscope.core.tokenizing import tokenize
from ssmscope.data.prompts import TASK_PROMPTS, TaskPrompts, content_of
from ssmscope.data.text import SOURCES, TextData
from ssmscope.errors import InputError
from ssmscope.evaluation import Evaluator, Template
from ssmscope.interp.classes import class_ids, word_ids

if TYPE_CHECKING:
    from ssmscope.core.model import Model


@dataclass(frozen=True)
class Questions:
    """Labelled texts, what they are wrapped in, and what answers them.

    Attributes:
        data: the examples that are used.
        contents: their texts; within a template, pairs of a known data set have the names of their sentences.
        labels: (examples,) int64, their classes as the evaluator numbers them.
        classes: the classes' names in that order.
        template: what a text is wrapped in; None for the text alone.
        evaluator: gives the scores of the classes.
    """

    data: TextData
    contents: tuple[str, ...]
    labels: np.ndarray
    classes: tuple[str, ...]
    template: Template | None
    evaluator: Evaluator

    @property
    def before(self) -> str:
        """What the template has before the text."""
        return self.template.before if self.template is not None else ""

    @property
    def after(self) -> str:
        """What the template has after the text."""
        return self.template.after if self.template is not None else ""


def questions(
    model: Model,
    data: TextData,
    *,
    template: str | None = None,
    words: Sequence[str] | None = None,
    scoring: str = "likelihood",
    limit: int | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
) -> Questions:
    """The examples of `data` as a model is asked them.

    A language model needs a template and a word for each class, in the order of the data's; of a known data set it has
    the first one and the words of its own (`TASK_PROMPTS`) where none is given.

    Raises:
        InputError: data of another kind or without examples, a model of pixels or without a tokenizer, a language model
            without a template or words, another number of words than classes, classes that do not match, and what
            `Template` and `Evaluator` refuse.
    """
    if not isinstance(data, TextData):
        raise InputError(f"data is {type(data).__name__}; allowed are labelled texts")
    if not len(data):
        raise InputError(f"{data.name} ({data.split}) has no example")
    if model.channels is not None:
        raise InputError(f"{model.name} reads pixels, but {data.name} holds texts")
    model.check_classes(f"accuracy on {data.name}")
    model.check_tokenizer()
    if limit is not None:
        data = data.sample(limit, seed=seed)
    known = data.name in SOURCES and data.label_names == SOURCES[data.name].labels
    if model.is_classifier:
        labels, classes = class_ids(model, data), tuple(model.labels or ())
    else:
        classes, own = data.label_names, TASK_PROMPTS.get(data.name) if known else None
        template, words = _prompt(model, data, own, template, words)
        labels = word_ids(data, words)
    if len(classes) < 2:
        raise InputError(f"there is only the class {', '.join(classes)}; an answer needs two classes to choose from")
    wrapped = Template(template) if template is not None else None
    named = known and wrapped is not None
    contents = tuple(content_of(data.name, text) for text in data.texts) if named else data.texts
    evaluator = Evaluator(model, words=words, scoring=scoring, cache=cache)
    return Questions(data, contents, labels, classes, wrapped, evaluator)


def _prompt(
    model: Model, data: TextData, own: TaskPrompts | None, template: str | None, words: Sequence[str] | None
) -> tuple[str, tuple[str, ...]]:
    """A language model's template and words."""
    if own is not None:
        template = own.templates[0] if template is None else template
        words = own.words if words is None else words
    if template is None:
        raise InputError(
            f"{model.name} is a language model: give a template that asks for the class, such as "
            "'Review: {content} Sentiment:', or '{content}' for texts that ask themselves"
        )
    names = ", ".join(data.label_names[:12])
    if words is None:
        raise InputError(f"{model.name} is a language model: give the words that it says for {names}, in this order")
    return template, tuple(words)


def true_log_odds(
    scores: Float[np.ndarray, "*settings examples classes"], labels: Int[np.ndarray, " examples"]
) -> Float[np.ndarray, "*settings examples"]:
    """log p / (1 − p) of the true class, p = softmax(scores): its score less the log-sum-exp of the others'.

    The unit is the natural logarithm; `scores` are logits or log-likelihoods, `labels` the true classes.
    """
    true = np.arange(scores.shape[-1]) == np.asarray(labels)[:, None]
    others = np.logaddexp.reduce(np.where(true, -np.inf, scores), axis=-1)
    return np.where(true, scores, 0.0).sum(-1) - others


def unknown_tokens(model: Model, text: str) -> tuple[int, int]:
    """How many tokens a text has for the model's tokenizer, special ones left out, and how many of them it does not
    know."""
    ids = tokenize(model.tokenizer, text, add_special_tokens=False)["input_ids"]
    unknown = model.tokenizer.unk_token_id
    return len(ids), 0 if unknown is None else sum(i == unknown for i in ids)
