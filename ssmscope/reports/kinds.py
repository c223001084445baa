"""Which kind of model a checkpoint is, by its configuration alone, and which verbs cannot do a kind."""

from __future__ import annotations

import json
from pathlib import Path

from ssmscope.api.analysis import Analysis
from ssmscope.api.inputs import KINDS, LANGUAGE_MODEL, PIXEL_CLASSIFIER, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL


def able(analysis: Analysis) -> tuple[str, ...]:
    """The kinds of models that an analysis can do."""
    return analysis.models or tuple(KINDS)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def kind_of(where: Path, *, tokenizer: bool = False) -> str | None:
    """The kind of the model in a directory or file; None for what its configuration does not say, such as a directory
    of checkpoints.

    Args:
        where: the directory or file.
        tokenizer: whether a tokenizer is given besides.
    """
    if where.is_file():
        return TEXT_CLASSIFIER if tokenizer else TOKEN_CLASSIFIER  # a selective SSM, which classifies
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
