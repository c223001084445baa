"""Default options by the kind of data, the architecture and named recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssmscope.data.planted import TASKS as PLANTED
from ssmscope.errors import InputError, did_you_mean

PLAIN: Mapping[str, Any] = {
    "held_out": 0.1,
    "share": 1.0,
    "decays": "standard",
    "schedule": "cosine",
    "weight_decay": 0.1,
    "warmup": 0.1,
    "clip": 1.0,
    "dropout": 0.0,
    "embedding_dropout": 0.0,
    "token_dropout": 0.0,
    "subword_dropout": 0.0,
    "label_smoothing": 0.0,
    "spread_penalty": 0.0,
    "patience": None,
    "saved_as": "float32",
}

KINDS: Mapping[str, Mapping[str, Any]] = {
    "text": {
        "decays": "spread",
        "max_length": 128,
        "epochs": 20,
        "batch_size": 32,
        "learning_rate": 4e-3,
        "dropout": 0.3,
        "embedding_dropout": 0.5,
        "token_dropout": 0.2,
        "subword_dropout": 0.2,
        "label_smoothing": 0.1,
        "patience": 8,
        "saved_as": "bfloat16",
    },
    # Baleen, section B: three layers of width 32, 100 epochs; AdamW 1e-3 with decay 0.1 and a cosine
    "pixels": {"held_out": 0.05, "epochs": 100, "batch_size": 256, "learning_rate": 1e-3, "warmup": 0.01},
    "sequences": {"held_out": 0.0, "epochs": 50, "batch_size": 32, "learning_rate": 3e-3},
    "tokens": {"epochs": 12, "batch_size": 64, "learning_rate": 2e-3},
    "language": {"epochs": 10, "batch_size": 16, "learning_rate": 2e-3, "embedding_dropout": 0.2},
    "instructions": {
        "decays": "spread",
        "tied": True,
        "examples": 10_000,
        "epochs": 24,
        "batch_size": 64,
        "learning_rate": 3e-3,
        "dropout": 0.2,
        "embedding_dropout": 0.4,
        "token_dropout": 0.1,
        "subword_dropout": 0.1,
        "label_smoothing": 0.1,
        "prompt_weight": 0.0,
        "saved_as": "bfloat16",
    },
}
"""Differences from `PLAIN` by the kind of data."""

ARRAYS = {"width": 64, "layers": 2, "state": 16, "head_width": 16, "heads": 2, "expand": 2}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "text": {"width": 128, "layers": 1, "state": 16, "head_width": 16, "heads": 4, "expand": 2},
    "pixels": {"width": 32, "layers": 3, "state": 64, "head_width": 16, "heads": 1, "expand": 2},
    "sequences": ARRAYS,
    "tokens": ARRAYS,
    "language": {"width": 128, "layers": 4, "state": 16, "head_width": 16, "heads": 4, "expand": 2},
    "instructions": {"width": 64, "layers": 2, "state": 16, "head_width": 16, "heads": 4, "expand": 2},
}
"""Sizes of a model trained from scratch, by the kind of data."""

DATA: Mapping[str, Mapping[str, Any]] = {
    # These are about 13 million tokens, read ten times: a model of two million parameters does not memorize them.
    "books": {
        **{"width": 160, "layers": 7, "state": 64, "head_width": 32, "tied": True},
        **{"length": 512, "vocabulary": 4096, "epochs": 10, "batch_size": 64, "learning_rate": 3e-3},
        **{"embedding_dropout": 0.0, "warmup": 0.02, "saved_as": "bfloat16"},
    },
    # Every word counts, so none is dropped.
    **dict.fromkeys(
        PLANTED,
        {
            **{"layers": 2, "width": 48, "epochs": 12, "batch_size": 64, "patience": None, "dropout": 0.0},
            **{"embedding_dropout": 0.0, "token_dropout": 0.0, "subword_dropout": 0.0, "label_smoothing": 0.0},
        },
    ),
}
"""Differences from the defaults of the data's kind, by the name of the data."""

# The selective SSM's authors: Adam at 1e-2 throughout, clipped at 5; d = 16 channels, N = 4 (Generalization bounds, B)
SELECTIVE: Mapping[str, Any] = {
    "learning_rate": 1e-2,
    "schedule": "constant",
    "weight_decay": 0.0,
    "warmup": 0.0,
    "clip": 5.0,
    "dropout": 0.0,
    "embedding_dropout": 0.0,
    "token_dropout": 0.0,
    "subword_dropout": 0.0,
    "label_smoothing": 0.0,
    "spread_penalty": 10.0,
    "saved_as": "float32",
    "patience": None,
}
SELECTIVE_SIZES: Mapping[str, Any] = {"width": 16, "state": 4}

RECIPES: Mapping[str, Mapping[str, Any]] = {
    # Early training from an unstable start: 10 epochs on a balanced tenth of the data (section 5 and B).
    "experiment1": {"spectral_abscissa": 0.1, "share": 0.1, "epochs": 10},
    # Training to convergence from the stability boundary, on all data.
    "experiment2": {"spectral_abscissa": 0.0, "share": 1.0, "epochs": 100},
}
"""Experiments of the generalisation paper, for the selective SSM on `majority`, `listops` and `imdb`."""


def defaults(architecture: str, kind: str, recipe: str | None, data: str = "") -> dict[str, Any]:
    """Return all options of the recipe for an architecture, a kind of data and the data's name.

    Raises:
        InputError: the recipe does not exist or belongs to another architecture.
    """
    found = {**PLAIN, **SIZES[kind], **KINDS[kind], **DATA.get(data, {})}
    if architecture == "selective":
        found |= {**SELECTIVE, **SELECTIVE_SIZES}
    if recipe is None:
        return found
    if recipe not in RECIPES:
        raise InputError(
            f"unknown recipe '{recipe}'; choose one of {', '.join(RECIPES)}{did_you_mean(recipe, RECIPES)}"
        )
    if architecture != "selective":
        raise InputError(f"the recipe '{recipe}' is the selective SSM's; leave it out for {architecture}")
    return {**found, **RECIPES[recipe]}
