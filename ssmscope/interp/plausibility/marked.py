"""The tokens of a text that people marked as the reason for its label."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from ssmscope.core.tokenizing import tokenize
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.data.rationales import Spans


def marked_tokens(model: Model, text: str, spans: Spans | None) -> Bool[np.ndarray, " tokens"] | None:
    """Which of the tokens that the model reads of a text people marked: those that share a character that is no space
    with a marked span. Special tokens are never marked. None without a rationale, or with one that no token is of.

    Raises:
        InputError: a tokenizer that does not say which characters a token is of.
    """
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
