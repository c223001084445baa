"""Small language models that read words, and slow references of what the evaluator gives."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from examples import FEW, random_example
from loud import doubled, loud
from ssmscope.core.model import Model
from ssmscope.evaluation import Template
from ssmscope.zoo.documents import symbol_tokenizer

LABELS = ("good", "bad", "not", "very", "so", "is", "it", ":", ".")
FILLING = tuple(f"w{number}" for number in range(97 - len(LABELS)))
LANGUAGE = [name for name in FEW if name == "selective-ssm-language" or not name.startswith("selective")]
"""The example architectures that are language models, all of 97 tokens."""


def language_model(name: str, dtype: torch.dtype = torch.float32) -> Model:
    """An example model with a word for each of its tokens."""
    module = loud(random_example(name))
    module = doubled(module) if dtype == torch.float64 else module.to(dtype)
    return Model(module, symbol_tokenizer([*FILLING, *LABELS]), name)


def sentences(count: int, shortest: int, longest: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(FILLING, draw.integers(shortest, longest + 1))) for _ in range(count)]


WORDS = ("good", "bad", "not")
PHRASES = ("good", "bad", "not bad", "not so good", "very good", "very bad is it")
TEMPLATES = [
    Template("w1 w2 w3 w4 w5 w6 w7 w8 w9 {content} :"),
    Template("w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 {content} is it"),
    Template("{content} it is :"),
]
CONTENTS = ["w3", *sentences(3, 1, 20), *("w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 " + end for end in ("w5", "w5 w5", "w6"))]
TEXTS = [template.fill(content) for template in TEMPLATES for content in CONTENTS]


def labels_of(model: Model, words) -> list[list[int]]:
    return [model.tokenizer(word)["input_ids"] for word in words]


def slow_likelihoods(
    forward: Callable[[list[int]], torch.Tensor], rows: Sequence[Sequence[int]], labels: Sequence[Sequence[int]],
    normalise: bool = False,
) -> np.ndarray:  # fmt: skip
    """Compute likelihoods text by text and class by class, from the logits (length, vocabulary) that `forward` gives of
    token ids."""
    scores = np.empty((len(rows), len(labels)))
    for at, row in enumerate(rows):
        for label, ids in enumerate(labels):
            logs = forward([*row, *ids]).double().log_softmax(-1)
            total = sum(logs[len(row) - 1 + place, token].item() for place, token in enumerate(ids))
            scores[at, label] = total / len(ids) if normalise else total
    return scores
