"""Mixture of classification tasks as prompts that a language model answers with a label word.

Every example of SST-2, WNLI and SNLI is put into the prompt templates of its task (`ssmscope.data.prompts`); the answer
is the word of its class. The last templates of a task are held out of training, to compare a trained model on seen and
unseen prompts.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.prompts import CONTENT, TASK_PROMPTS, answered, content_of
from ssmscope.data.text import SOURCES, TextData, load_text
from ssmscope.data.tokens import fingerprint_of
from ssmscope.errors import InputError, did_you_mean

TASKS = ("sst2", "wnli", "snli")
UNSEEN_TEMPLATES = 2
"""Number of templates per task, the last ones, that are held out of training."""


@dataclass(frozen=True)
class InstructionData:
    """Prompts (`texts`), and for each its task, class (an index into the task's words), template (an index) and example
    (0, 0, …, 1, …). `split` is `train`, `validation`, `test` or `unseen` (test examples in held-out templates), and
    `sources` the split of each task's data set that the examples come from."""

    name: str
    split: str
    sources: Mapping[str, str]
    texts: tuple[str, ...]
    labels: tuple[int, ...]
    tasks: tuple[str, ...]
    templates: tuple[int, ...]
    examples: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def first(self) -> np.ndarray:
        """Index of every example's first prompt, (examples,)."""
        return np.unique(self.examples, return_index=True)[1]

    @cached_property
    def answers(self) -> tuple[str, ...]:
        """Label word that answers each prompt."""
        return tuple(TASK_PROMPTS[task].words[label] for task, label in zip(self.tasks, self.labels))

    @property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of prompts and answers."""
        return fingerprint_of([self.texts, self.answers], ensure_ascii=False)

    def drawn(self, *seed: int) -> list[int]:
        """Draw one prompt of every example and return their indices; the same `seed` numbers give the same prompts."""
        counts = np.diff(np.append(self.first, len(self)))
        return (self.first + np.random.default_rng(seed).integers(counts)).tolist()


def template_numbers(task: str, *, unseen: bool) -> range:
    """Return the indices of the templates held out of training, or of those used in it."""
    every = range(len(TASK_PROMPTS[task].templates))
    return every[-UNSEEN_TEMPLATES:] if unseen else every[:-UNSEEN_TEMPLATES]


def instruction_data(parts: Sequence[TextData], split: str, *, unseen: bool = False) -> InstructionData:
    """Put every text into each training template of its task, or into each held-out one (`unseen`)."""
    numbered = enumerate((part.name, *each) for part in parts for each in zip(part.texts, part.labels))
    rows = [
        (TASK_PROMPTS[task].templates[at].replace(CONTENT, content_of(task, text)), label, task, at, number)
        for number, (task, text, label) in numbered
        for at in template_numbers(task, unseen=unseen)
    ]
    columns: Any = tuple(zip(*rows)) or ((),) * 5
    return InstructionData("instruct", split, {part.name: part.split for part in parts}, *columns)


def roles(task: str, splits: Collection[str]) -> tuple[str, str | None, str | None]:
    """Return a task's splits for training, for choosing the epoch (None: a share of the training split) and for testing
    (None: no test). Without `train`, `validation` is for training; without `test`, for testing."""
    if not {"train", "validation"} & {*splits}:
        raise InputError(f"{task} has no split to train on: there are {', '.join(sorted(splits)) or 'none'}")
    train = "train" if "train" in splits else "validation"
    left = "validation" if train == "train" and "validation" in splits else None
    return (train, left, "test") if "test" in splits else (train, None, left)


def splits_of(task: str) -> tuple[str, ...]:
    """Return the available splits of a data set: those in `$SSMSCOPE_DATA` if that is set, else the hub's."""
    folder, known = os.environ.get("SSMSCOPE_DATA"), SOURCES[task].splits
    return tuple(split for split in known if not folder or Path(folder, task, f"{split}.parquet").exists())


def chosen_tasks(mixture: str | None) -> tuple[str, ...]:
    """Parse a comma-separated list of tasks; None stands for all of `TASKS`."""
    names = TASKS if mixture is None else tuple(name.strip() for name in mixture.split(","))
    for name in names:
        if name not in TASKS:
            raise InputError(
                f"'{name}' is not a task of the mixture; choose from {', '.join(TASKS)}, with commas between them"
                f"{did_you_mean(name, TASKS)}"
            )
    if len({*names}) < len(names):
        raise InputError(f"the mixture {mixture} names a task twice; name every task once")
    return names


def load_mixture(
    mixture: str | None = None, *, examples: int = 10_000, held_out: float = 0.1, share: float = 1.0, seed: int = 0
) -> dict[str, InstructionData | None]:
    """Load the parts `train`, `validation`, `test` and `unseen` of a mixture of tasks; an empty part is None. At most
    `examples` per task are for training, of which a `share` is used, and a tenth as many for choosing the epoch:
    `held_out` from the training examples if the task has no split for it."""
    found: dict[str, list[TextData]] = {"train": [], "validation": [], "test": []}
    for task in chosen_tasks(mixture):
        trained, choosing, tested = roles(task, splits_of(task) or SOURCES[task].splits)
        train, part = load_text(task, trained), None
        if choosing is not None:
            part = load_text(task, choosing)
        elif held_out:
            train, part = train.divide(held_out, seed=seed)
        if part is not None:
            found["validation"].append(part.sample(max(examples // 10, 1), seed=seed))
        if tested is not None:
            found["test"].append(load_text(task, tested))
        found["train"].append(train.sample(max(round(share * min(len(train), examples)), 1), seed=seed))
    made = {part: instruction_data(texts, part) if texts else None for part, texts in found.items()}
    made["unseen"] = instruction_data(found["test"], "unseen", unseen=True) if found["test"] else None
    return made


def label_tokens(tokenizer: Any, tasks: Collection[str]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return the token of every class's word as it follows a prompt after a space, by task and template index. A word
    that is not exactly one token there, or two words of the same token, raise InputError."""
    found = {}
    for task, at, template in ((name, *each) for name in tasks for each in enumerate(TASK_PROMPTS[name].templates)):
        prompt, words = template.replace(CONTENT, "a text"), TASK_PROMPTS[task].words
        texts = [prompt, *(answered(prompt, word) for word in words)]
        before, *longer = tokenize(tokenizer, texts, add_special_tokens=False)["input_ids"]
        for word, whole in zip(words, longer):
            if whole[:-1] != before:
                raise InputError(
                    f"the label word '{word}' of {task} is not one token after prompt {at + 1}; use a tokenizer that "
                    "knows it as a whole, or one of a larger vocabulary"
                )
        found[task, at] = tuple(whole[-1] for whole in longer)
        if len({*found[task, at]}) < len(words):
            raise InputError(f"two label words of {task} are the same token; use one that separates them")
    return found


def spoken(data: InstructionData) -> list[str]:
    """Return every prompt with its answer, as training text for a tokenizer."""
    return list(map(answered, data.texts, data.answers))
