"""Which kind of model a checkpoint is, by its configuration alone, and which verbs cannot do a kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

TEXT_CLASSIFIER = "text-classifier"
TOKEN_CLASSIFIER = "token-classifier"
PIXEL_CLASSIFIER = "pixel-classifier"
LANGUAGE_MODEL = "language-model"
TOKEN_MODEL = "token-model"

KINDS: Mapping[str, str] = {
    TEXT_CLASSIFIER: "classes of texts",
    TOKEN_CLASSIFIER: "classes of token ids, without a tokenizer",
    PIXEL_CLASSIFIER: "classes of images",
    LANGUAGE_MODEL: "the next token of a text",
    TOKEN_MODEL: "the next of token ids, without a tokenizer",
}
"""The kinds, and what each predicts."""

_OF_TEXTS = (TEXT_CLASSIFIER, LANGUAGE_MODEL)
ONLY: Mapping[str, tuple[str, ...]] = {
    "fidelity": (TEXT_CLASSIFIER,),
    "position": (TEXT_CLASSIFIER, PIXEL_CLASSIFIER),
    "insertion": _OF_TEXTS,
    "overflow": _OF_TEXTS,
    "prompts": _OF_TEXTS,
    "words": _OF_TEXTS,
    "effect": _OF_TEXTS,
    "snr": (LANGUAGE_MODEL,),
    "retrieval": (LANGUAGE_MODEL,),
    "loss": (LANGUAGE_MODEL,),
}
"""The verbs that can do models of some kinds only; every other verb can do all."""

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
