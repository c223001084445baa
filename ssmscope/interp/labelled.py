"""The labelled texts that explanations are measured on: their batches, their marked tokens, and the scores of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.data.text import TextData
from ssmscope.errors import InputError
from ssmscope.interp.plausibility.marked import marked_tokens

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model


def check_classifier(model: Model, data: Any, what: str) -> None:
    """Refuse a model that is no classifier of texts, and data that are no labelled texts.

    Args:
        what: is measured.

    Raises:
        InputError: as said.
    """
    model.check_classes(what)
    if not model.is_classifier:
        raise InputError(f"{model.name} is no classifier: {what} is of the class that a classifier predicts")
    if model.channels is not None or not isinstance(data, TextData):
        given = "a model of pixels" if model.channels is not None else f"data of {type(data).__name__}"
        raise InputError(f"{given} was given; {what} is measured on classifiers of texts and labelled texts")
    model.check_tokenizer()
    if not len(data):
        raise InputError(f"{data.name} ({data.split}) has no example")


def read_texts(model: Model, data: TextData) -> tuple[list[int], list[int], list[np.ndarray | None]]:
    """Per text its tokens, those that are not special, and which of the latter people marked."""
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
        masks.append(mask if mask is not None and mask.any() else None)
    return lengths, sizes, masks


def scored(name: str, scores: Any, batch: Batch) -> tuple[list[np.ndarray], np.ndarray | None]:
    """A method's scores of the non-special tokens of every text, and which texts it converged on."""
    values = scores.scores.detach().double().cpu().numpy()
    if values.shape != tuple(batch.mask.shape):
        raise InputError(f"the method {name} gives scores of shape {values.shape} for {tuple(batch.mask.shape)} tokens")
    own = [
        row[: len(words)][[word is not None for word in words]] for row, words in zip(values, batch.words, strict=True)
    ]
    if not all(np.isfinite(row).all() for row in own):
        raise InputError(f"the scores of the method {name} are not finite: the model is damaged, or overflows")
    return own, None if scores.converged is None else scores.converged.detach().cpu().numpy().astype(bool)
