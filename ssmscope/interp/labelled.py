"""Labelled examples: their classes, and the sizes, marked tokens and scores of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from ssmscope.api.options import note
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.labels import COLUMNS, is_unnamed, match_labels
from ssmscope.data.pixels import PixelData
from ssmscope.data.rows import Spans
from ssmscope.data.text import TextData
from ssmscope.data.tokens import SequenceData
from ssmscope.errors import InputError


def encoded_rows(model: Model, data: TextData | PixelData, rows: Sequence[int]) -> Batch:
    """Return some examples of texts, images or series as one batch."""
    if isinstance(data, PixelData):
        return model.encode(values=data.pixels[list(rows)])
    return model.encode([data.texts[row] for row in rows])


LABEL = "label"
"""Target that stands for each text's own label."""


def row_targets(model: Model, data: TextData | PixelData, rows: Sequence[int], target: Any) -> Any:
    """Return the targets of an `objective` of some examples: `target`, or for "label" each example's class, of a
    language model the label's name, after a space unless the text ends in one."""
    if target != LABEL:
        return target
    if model.is_classifier:
        return class_ids(model, data)[list(rows)].tolist()
    assert isinstance(data, TextData)
    gaps = ["" if data.texts[row][-1:].isspace() else " " for row in rows]
    return [gap + data.label_names[data.labels[row]] for gap, row in zip(gaps, rows)]


def target_name(options: Mapping[str, Any]) -> str:
    """Name the target of an analysis's options in a sentence."""
    target = options.get("target")
    if target is None:
        return "the predicted answer"
    return "each text's label" if target == LABEL else f"“{target}”"


def check_classifier(model: Model, data: Any, what: str, *, numbers: bool = False, next_tokens: bool = False) -> None:
    """Raise InputError unless the model is a classifier of texts, or with `numbers` of images or series, or with
    `next_tokens` a language model, and data are labelled such."""
    if next_tokens and model.gives == "next tokens" and isinstance(data, TextData) and len(data):
        return model.check_tokenizer()
    model.check_classes(what)
    if numbers and model.channels is not None:
        return check_series(model, data, what)
    if not model.is_classifier:
        raise InputError(f"{model.name} is not a classifier: {what} needs a predicted class")
    if model.channels is not None or not isinstance(data, TextData):
        given = f"a model of {model.reads}" if model.channels is not None else f"data of {type(data).__name__}"
        raise InputError(f"{given} was given; {what} needs a classifier of texts and labelled texts (load_text)")
    model.check_tokenizer()
    if not len(data):
        raise InputError(f"{data.name} ({data.split}) has no example")
    return None


def check_series(model: Model, data: Any, what: str) -> None:
    """Raise InputError unless the model is a classifier of series or images that it reads as numbers, and data are
    labelled ones that fit it."""
    model.check_classes(what)
    if not isinstance(data, PixelData):
        said = f"data of {type(data).__name__} was given, and {model.name} reads {model.reads};"
        raise InputError(f"{said} {what} needs labelled ones (labelled_series)")
    if data.channels != model.channels:
        raise InputError(f"{data.name} has {data.channels} channels at each step, {model.name} reads {model.channels}")
    if not len(data):
        raise InputError(f"{data.name} ({data.split}) has no example")


def marked_tokens(model: Model, text: str, spans: Spans | None) -> Bool[np.ndarray, " tokens"] | None:
    """Return a mask of the model's tokens that people marked: those that share a character, other than a space, with a
    marked span. Special tokens are never marked. None without a rationale, or with one that covers no token."""
    if spans is None:
        return None
    if not getattr(model.tokenizer, "is_fast", False):
        raise InputError(
            f"the tokenizer of {model.name} does not say which characters a token is of: rationales need one that does"
        )
    marked = np.zeros(len(text), dtype=bool)
    for start, stop in spans:
        marked[start:stop] = True
    marked &= np.array([not character.isspace() for character in text], dtype=bool)
    encoded = tokenize(model.tokenizer, text, return_offsets_mapping=True, return_special_tokens_mask=True)
    places = zip(encoded["offset_mapping"], encoded["special_tokens_mask"])
    found = np.array([not special and bool(marked[start:stop].any()) for (start, stop), special in places], dtype=bool)
    return found if found.any() else None


def read_texts(model: Model, data: TextData | PixelData) -> tuple[list[int], list[int], list[np.ndarray | None]]:
    """Return each text's numbers of tokens and of ordinary tokens, and a mask of the latter that people marked. Images
    or series have as many as the first, and no marks."""
    if isinstance(data, PixelData):
        ((words,), many) = encoded_rows(model, data, [0]).words, len(data)
        return [len(words)] * many, [sum(word is not None for word in words)] * many, [None] * many
    lengths, sizes, masks = [], [], []
    for row, text in enumerate(data.texts):
        try:
            (words,) = model.encode([text]).words
        except InputError as error:
            raise InputError(f"row {row + 1} of {data.name} ({data.split}): {error}") from error
        own = np.array([word is not None for word in words], dtype=bool)
        mask = marked_tokens(model, text, data.rationales[row]) if data.rationales is not None else None
        mask = None if mask is None else mask[own]
        lengths.append(len(words))
        sizes.append(int(own.sum()))
        masks.append(mask)
    return lengths, sizes, masks


def token_scores(
    name: str, scores: Any, batch: Batch, *, finite: bool = True
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Return a method's scores of the non-special tokens of every text, and the texts on which it converged."""
    values = scores.scores.detach().double().cpu().numpy()
    values = values.sum(2) if values.ndim == 3 and batch.values is not None else values  # of a series' channels
    if values.shape != tuple(batch.mask.shape):
        raise InputError(f"the method {name} gives scores of shape {values.shape} for {tuple(batch.mask.shape)} tokens")
    own = [row[: len(words)][[word is not None for word in words]] for row, words in zip(values, batch.words)]
    if finite and not all(np.isfinite(row).all() for row in own):
        raise InputError(f"the scores of the method {name} are not finite: the model is damaged, or overflows")
    return own, None if scores.converged is None else scores.converged.detach().cpu().numpy().astype(bool)


def class_ids(model: Model, data: PixelData | TextData | SequenceData) -> Int[np.ndarray, " examples"]:
    """Return labels as a classifier numbers its classes (`match_labels`); a match that is not by name is noted. Raise
    InputError where classes do not match."""
    model.check_classes(f"accuracy on {data.name}")
    ours, theirs = list(data.label_names), list(model.labels or ())
    labels = np.asarray(data.labels, dtype=np.int64)
    if (odd := labels[(labels < 0) | (labels >= len(ours))]).size:
        raise InputError(f"{data.name} ({data.split}) has the class {odd[0]}, and names of {len(ours)}, from 0 on")
    column = getattr(data, "label_column", "")
    numbers = None if column else ours
    found = match_labels(ours, theirs, data.name, column or COLUMNS[0], as_written=not column, numbers=numbers)
    if found is not None:
        if found.how:
            note(found.how)
        return np.array([found.classes[name] for name in ours])[labels]
    given, known = (", ".join(names[:12]) for names in (ours, theirs))
    advice = "give data of these"
    if len(ours) == len(theirs):
        named = ",".join(ours[:12])
        advice += f"; if {given} mean the same, in this order, give labels=[…] (--labels {named})"
    if is_unnamed(theirs):
        advice = "say which is which by labels=[…] (--labels A,B,…), in the order of its logits"
    raise InputError(f"{data.name} has the classes {given}; {model.name} tells apart {known}: {advice}")


def word_ids(data: TextData, words: Sequence[str]) -> Int[np.ndarray, " examples"]:
    """Return the examples' labels as the numbers of a language model's answer words, (examples,) int64."""
    if len(words) != len(data.label_names):
        raise InputError(
            f"words are {', '.join(words)}; {data.name} has {len(data.label_names)} classes, "
            f"{', '.join(data.label_names[:12])}: give one for each, in this order"
        )
    return np.asarray(data.labels, dtype=np.int64)
