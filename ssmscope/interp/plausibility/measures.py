"""The measures of agreement with people by name, and which sizes a rationale may have."""

from __future__ import annotations

from ssmscope.errors import InputError

MEASURES = {"token_f1": "token F1", "iou_f1": "IOU F1", "auprc": "AUPRC"}
"""The measures by name, and how the views call them; the higher the better."""


def check_top(top: float | None) -> None:
    """Refuse a size of rationales that is neither a number of tokens nor a share of them.

    Raises:
        InputError: as said.
    """
    if top is not None and not 0 < top < 1 and (top < 1 or top % 1):
        raise InputError(f"top is {top!r}; allowed is a whole number of tokens from 1 on or a share between 0 and 1")
