"""Tokenization of many texts at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from ssmscope.core.reading import SURROGATE
from ssmscope.core.tokenizing import tokenize
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model


def token_rows(model: Model, texts: Sequence[str], *, blank: bool = False) -> list[list[int]]:
    """Return the token ids of every text as the model reads them, with the tokenizer's special tokens.

    A language model's rows drop those at the end, which would come between the text and its continuation. With `blank`
    a text may have no token of its own.

    Raises:
        InputError: for a model without a tokenizer, or a text that it cannot read.
    """
    model.check_tokenizer()
    if not texts:
        return []
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {number} is {text!r:.40} ({type(text).__name__}), not a text; give a list of texts")
        half = SURROGATE.search(text)
        if half is not None:
            raise InputError(f"text {number} has U+{ord(half.group()):04X}, which is not a character: remove it")
    found = tokenize(model.tokenizer, list(texts), return_attention_mask=False, return_token_type_ids=False)
    rows: list[list[int]] = found["input_ids"]
    longest = max(range(len(rows)), key=lambda row: len(rows[row]))
    start, end = _added(model, texts[longest])
    for number, row in enumerate(rows):
        if len(row) <= start + end and not blank:
            which = f"text {number}" if len(rows) > 1 else "the text"
            raise InputError(
                f"{which} ({texts[number][:40]!r}) has no token that the tokenizer of {model.name} knows: give at "
                "least one word"
            )
    if end and not model.is_classifier:
        rows = [row[:-end] for row in rows]
    check_vocabulary(model, max((max(row) for row in rows if row), default=0))
    return rows


def check_vocabulary(model: Model, highest: int) -> None:
    """Raise InputError if the highest of some token ids is outside the model's vocabulary."""
    if highest >= model.vocabulary:
        raise InputError(
            f"the tokenizer gives id {highest}, outside the vocabulary 0…{model.vocabulary - 1} of {model.name}"
        )


def _added(model: Model, text: str) -> tuple[int, int]:
    """Count the special tokens that the tokenizer puts before and after a text; the counts are the same for all."""
    special = tokenize(model.tokenizer, text, return_special_tokens_mask=True)["special_tokens_mask"]
    start = sum(1 for _ in takewhile(bool, special))
    return start, sum(1 for _ in takewhile(bool, reversed(special[start:])))
