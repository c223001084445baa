"""Measures of agreement with people by name, and the allowed sizes of a rationale."""

from __future__ import annotations

from ssmscope.errors import InputError

MEASURES = {"token_f1": "token F1", "iou_f1": "IOU F1", "auprc": "AUPRC"}
"""Measures by name, with their names in the views; the higher the better."""


def check_top(top: float | None) -> None:
    """Raise InputError if a size of rationales is neither a number of tokens nor a share of them."""
    if top is not None and not 0 < top < 1 and (top < 1 or top % 1):
        raise InputError(f"top is {top!r}; allowed is a whole number of tokens from 1 on or a share between 0 and 1")
