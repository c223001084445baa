"""Kind of model that a checkpoint holds, judged by its configuration alone, and the kinds that an analysis supports."""

from __future__ import annotations

import json
from pathlib import Path

from ssmscope.api.analysis import Analysis
from ssmscope.api.inputs import KINDS, LANGUAGE_MODEL, PIXEL_CLASSIFIER, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def supported_kinds(analysis: Analysis) -> tuple[str, ...]:
    """Return the kinds of models that an analysis supports."""
    return analysis.models or tuple(KINDS)


def kind_of(where: Path, *, tokenizer: bool = False) -> str | None:
    """Return the kind of the model in a directory or file; None if unknown, as for a directory of checkpoints.

    Args:
        where: the directory or file.
        tokenizer: True if a tokenizer is given separately.
    """
    if where.is_file():  # A single file is a selective SSM, a classifier.
        return TEXT_CLASSIFIER if tokenizer else TOKEN_CLASSIFIER
    try:
        config = json.loads((where / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    tokenizer = tokenizer or any((where / name).exists() for name in TOKENIZER_FILES)
    if any("SequenceClassification" in str(name) for name in config.get("architectures") or []):
        if config.get("channels") is not None:
            return PIXEL_CLASSIFIER
        return TEXT_CLASSIFIER if tokenizer else TOKEN_CLASSIFIER
    return LANGUAGE_MODEL if tokenizer else TOKEN_MODEL
