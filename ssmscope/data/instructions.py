"""A mixture of classification tasks as prompts that a language model answers with a label word.

Every example of SST-2, WNLI and SNLI is put into the prompts of its task (`ssmscope.data.prompts`), and the answer is
the word of its class. The last prompts of a task are kept out of training, so that a trained model can be compared on
prompts that it has seen and on prompts that it has not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ssmscope.core.tokenizing import tokenize
from ssmscope.data.prompts import TASK_PROMPTS, content_of
from ssmscope.data.text import SOURCES, TextData, load_text
from ssmscope.errors import InputError, did_you_mean

TASKS = ("sst2", "wnli", "snli")
UNSEEN = 2
"""How many prompts of every task, the last ones, are kept out of training."""


@dataclass(frozen=True)
class InstructionData:
    """Prompts and the class that each asks for; the prompts of one example follow one another.

    Attributes:
        name: `instruct`.
        split: `train`, `validation`, `test` or `unseen` (the test examples in the prompts kept out of training).
        sources: the split of every task's data set that the examples are from.
        texts: the prompts.
        labels: one class id a prompt, an index into the words of its task.
        tasks: one name a prompt.
        templates: one number a prompt, an index into `TASK_PROMPTS[task].templates`.
        examples: one number a prompt, that of its example: 0, 0, …, 1, …
    """

    name: str
    split: str
    sources: Mapping[str, str]
    texts: tuple[str, ...]
    labels: tuple[int, ...]
    tasks: tuple[str, ...]
    templates: tuple[int, ...]
    examples: tuple[int, ...]

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self.texts)

    @cached_property
    def first(self) -> np.ndarray:
        """The number of every example's first prompt, (examples,)."""
        return np.unique(self.examples, return_index=True)[1]

    @cached_property
    def answers(self) -> tuple[str, ...]:
        """The label word that each prompt asks for."""
        return tuple(TASK_PROMPTS[task].words[label] for task, label in zip(self.tasks, self.labels))

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of the SHA-256 of prompts and answers."""
        content = json.dumps([self.texts, self.answers], ensure_ascii=False).encode("utf-8", "surrogatepass")
        return hashlib.sha256(content).hexdigest()[:16]

    def drawn(self, *seed: int) -> list[int]:
        """One prompt of every example, the same for the same numbers in `seed`."""
        counts = np.diff(np.append(self.first, len(self)))
        return (self.first + np.random.default_rng(seed).integers(counts)).tolist()


def seen_templates(task: str) -> range:
    """The numbers of the prompts that are trained on."""
    return range(len(TASK_PROMPTS[task].templates) - UNSEEN)


def unseen_templates(task: str) -> range:
    """The numbers of the prompts that are kept out of training."""
    return range(len(TASK_PROMPTS[task].templates))[-UNSEEN:]


def instruction_data(parts: Sequence[TextData], split: str, *, unseen: bool = False) -> InstructionData:
    """Every text of every part in each prompt of its task that is trained on, or in each that is not (`unseen`)."""
    rows: list[tuple[str, int, str, int, int]] = []
    number = 0
    for part in parts:
        numbers = unseen_templates(part.name) if unseen else seen_templates(part.name)
        for text, label in zip(part.texts, part.labels):
            content = content_of(part.name, text)
            for at in numbers:
                prompt = TASK_PROMPTS[part.name].templates[at].replace("{content}", content)
                rows.append((prompt, label, part.name, at, number))
            number += 1
    columns: Any = tuple(zip(*rows)) or ((),) * 5
    return InstructionData("instruct", split, {part.name: part.split for part in parts}, *columns)


class Roles(NamedTuple):
    """Which split of a data set is trained on, which chooses the epoch (None: a share of the first), and which tests
    (None: nothing does)."""

    train: str
    validation: str | None
    test: str | None


def roles(task: str, splits: Collection[str]) -> Roles:
    """What a task's `splits` are used for. Without `train`, `validation` is trained on; without `test`, it tests.

    Raises:
        InputError: when there is nothing to train on.
    """
    if not {"train", "validation"} & {*splits}:
        raise InputError(f"{task} has no split to train on: there are {', '.join(sorted(splits)) or 'none'}")
    train = "train" if "train" in splits else "validation"
    left = "validation" if train == "train" and "validation" in splits else None
    return Roles(train, left, "test") if "test" in splits else Roles(train, None, left)


def splits_of(task: str) -> tuple[str, ...]:
    """The splits of a data set that can be had: those in `$SSMSCOPE_DATA` where that is set, else the hub's."""
    known = SOURCES[task].splits
    folder = os.environ.get("SSMSCOPE_DATA")
    if not folder:
        return known
    return tuple(split for split in known if Path(folder, task, f"{split}.parquet").exists())


def chosen_tasks(mixture: str | None) -> tuple[str, ...]:
    """The tasks that are named, with commas between them; all of `TASKS` for None.

    Raises:
        InputError: an unknown task, or one that is named twice.
    """
    names = TASKS if mixture is None else tuple(name.strip() for name in mixture.split(","))
    for name in names:
        if name not in TASKS:
            raise InputError(
                f"'{name}' is no task of the mixture; choose of {', '.join(TASKS)}, with commas between them"
                f"{did_you_mean(name, TASKS)}"
            )
    if len({*names}) < len(names):
        raise InputError(f"the mixture {mixture} names a task twice; name every task once")
    return names


def load_mixture(
    mixture: str | None = None, *, examples: int = 10_000, held_out: float = 0.1, share: float = 1.0, seed: int = 0
) -> dict[str, InstructionData | None]:
    """The parts `train`, `validation`, `test` and `unseen` of a mixture of tasks; None where a part has no example.

    Args:
        mixture: the tasks, with commas between them; by default all.
        examples: the most of a task to train on; a tenth as many at most choose the epoch.
        held_out: the share of a task's training examples that chooses the epoch where the task has no split for that.
        share: of the training examples that are used.
        seed: draws all of these.

    Raises:
        InputError: an unknown task, data that cannot be read, or a share that leaves a part or a class empty.
    """
    found: dict[str, list[TextData]] = {"train": [], "validation": [], "test": []}
    for task in chosen_tasks(mixture):
        role = roles(task, splits_of(task) or SOURCES[task].splits)
        train = load_text(task, role.train)
        if role.validation is not None:
            found["validation"].append(load_text(task, role.validation).sample(max(examples // 10, 1), seed=seed))
        elif held_out:
            train, part = train.divide(held_out, seed=seed)
            found["validation"].append(part.sample(max(examples // 10, 1), seed=seed))
        if role.test is not None:
            found["test"].append(load_text(task, role.test))
        found["train"].append(train.sample(max(round(share * min(len(train), examples)), 1), seed=seed))
    made = {part: instruction_data(texts, part) if texts else None for part, texts in found.items()}
    made["unseen"] = instruction_data(found["test"], "unseen", unseen=True) if found["test"] else None
    return made


class LabelTokens(NamedTuple):
    """By task and number of a prompt: the token of every class's word after that prompt."""

    ids: Mapping[tuple[str, int], tuple[int, ...]]

    def of(self, data: InstructionData) -> list[tuple[int, ...]]:
        """One entry a prompt."""
        return [self.ids[key] for key in zip(data.tasks, data.templates)]


def label_tokens(tokenizer: Any, tasks: Collection[str]) -> LabelTokens:
    """The tokens of the label words as they follow each prompt of these tasks, a space between the two.

    Raises:
        InputError: a word that is not one token of its own there, or two that are the same.
    """
    found = {}
    for task in tasks:
        for at, template in enumerate(TASK_PROMPTS[task].templates):
            prompt = template.replace("{content}", "a text")
            before = _ids(tokenizer, prompt)
            words = []
            for word in TASK_PROMPTS[task].words:
                whole = _ids(tokenizer, prompt + ("" if prompt[-1].isspace() else " ") + word)
                if whole[:-1] != before:
                    raise InputError(
                        f"the label word '{word}' of {task} is not one token after prompt {at + 1}; use a tokenizer "
                        "that knows it as a whole, or one of a larger vocabulary"
                    )
                words.append(whole[-1])
            if len({*words}) < len(words):
                raise InputError(f"two label words of {task} are the same token; use a tokenizer that knows them apart")
            found[task, at] = tuple(words)
    return LabelTokens(found)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenize(tokenizer, text, add_special_tokens=False)["input_ids"]


def spoken(data: InstructionData) -> list[str]:
    """Every prompt with its answer, as a model should go on: what a tokenizer is trained on."""
    return [text + ("" if text[-1].isspace() else " ") + word for text, word in zip(data.texts, data.answers)]
