"""Objective of instructions, the label word of a language model after a prompt, and the choice by the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.functional import dropout as drop
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.babi import QuestionTokens
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import TextData
from ssmscope.data.tokens import IGNORED, SequenceData, TokenData
from ssmscope.errors import InputError
from ssmscope.zoo.instructions import InstructionData, label_tokens
from ssmscope.zoo.mad import CompressionData
from ssmscope.zoo.training.batches import drop_tokens, padded
from ssmscope.zoo.training.objectives import (
    NextTokens,
    Objective,
    Pixels,
    Questions,
    Reconstruction,
    Score,
    Sequences,
    Texts,
    Tokenized,
    regularized,
)


class Answers(Tokenized):
    """Label words after the prompts of several tasks: one prompt per example and training epoch, all in evaluation.

    The training loss is the cross-entropy of the label word among all tokens plus that of the end token after it. With
    `label_smoothing` ε the word's target is 1 − ε, and ε is divided equally among all label words of its task. With
    `prompt_weight` w, w times the mean cross-entropy of the prompt's own tokens is added.

    An answer is right if its label word is the most likely among those of its task.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise InputError("the tokenizer has no end token to end an answer with; use one that has")
        self.end_id = tokenizer.eos_token_id
        words = label_tokens(tokenizer, self.parts["train"].sources)
        self.words = {
            name: padded([words[key] for key in zip(part.tasks, part.templates)], IGNORED)[0]
            for name, part in self.given.items()
        }
        self.encoded: dict[str, list[list[int]]] = {}
        self.current: Mapping[int, list[int]] = {}

    def prompts(self, part: str) -> list[list[int]]:
        """Return the token ids of a part's prompts, computed on first use, because the test has many."""
        if part not in self.encoded:
            texts = list(self.parts[part].texts)
            self.encoded[part] = tokenize(self.tokenizer, texts, add_special_tokens=False)["input_ids"]
        return self.encoded[part]

    def batches(self, epoch: int) -> list[list[int]]:
        data: InstructionData = self.parts["train"]
        rows = data.drawn(self.options["seed"], epoch)
        if self.subwords is not None:
            cuts = self.subwords.cuts(epoch)
            self.current = {row: self.subwords.row(row, cuts) for row in rows}
        else:
            self.current = dict(enumerate(self.prompts("train")))
        lengths = [len(self.current[row]) for row in rows]
        return [[rows[at] for at in batch] for batch in self.order(lengths, epoch)]

    def loss(self, module: Any, rows: Sequence[int]) -> Tensor:
        words = self.words["train"][list(rows)]
        labels = torch.tensor([self.parts["train"].labels[row] for row in rows])
        said = words.gather(1, labels[:, None])
        whole, mask = padded(
            [[*self.current[row], word] for row, word in zip(rows, said.flatten().tolist())], self.pad_id
        )
        last = mask.sum(1) - 1
        of_prompt = torch.arange(whole.shape[1]) < last[:, None]
        dropped = drop_tokens(whole, self.options["token_dropout"] or 0.0, self.unknown_id, torch.tensor([self.pad_id]))
        each = torch.where(of_prompt, dropped, whole), mask, last, said, words, whole
        ids, mask, last, said, words, whole = (tensor.to(self.device) for tensor in each)
        with self.autocast():
            hidden = _hidden(module, self.embedded(module, ids), mask)
            head, every = module.get_output_embeddings(), torch.arange(len(rows), device=self.device)
            after_prompt, after_word = (
                head(drop(hidden[every, at], self.options["dropout"] or 0.0)).float() for at in (last - 1, last)
            )
            loss = self._word_loss(after_prompt, said, words)
            loss = loss + cross_entropy(after_word, torch.full_like(last, self.end_id))
            loss = self.with_prompt(loss, head, hidden, whole, last)
        return regularized(module, loss)

    def _word_loss(self, logits: Tensor, said: Tensor, words: Tensor) -> Tensor:
        smoothing = self.options["label_smoothing"] or 0.0
        found = logits.log_softmax(-1)
        right = found.gather(1, said).squeeze(1)
        real = words != IGNORED
        others = (found.gather(1, words.clamp(min=0)) * real).sum(1) / real.sum(1)
        return -((1 - smoothing) * right + smoothing * others).mean()

    def lengths(self, part: str) -> Sequence[int]:
        return [len(ids) for ids in self.prompts(part)]

    def answers(self, module: Any, part: str, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Compute logits (batch, classes) of the label words, −∞ for missing classes, and return class ids (batch,)."""
        prompts = self.prompts(part)
        ids, mask = (tensor.to(self.device) for tensor in padded([prompts[row] for row in rows], self.pad_id))
        hidden = _hidden(module, {"input_ids": ids}, mask)
        logits = module.get_output_embeddings()(hidden[torch.arange(len(rows), device=self.device), mask.sum(1) - 1])
        words = self.words[part][list(rows)].to(self.device)
        found = logits.float().gather(1, words.clamp(min=0)).masked_fill(words == IGNORED, -torch.inf)
        return found, torch.tensor([self.parts[part].labels[row] for row in rows], device=self.device)

    def score(self, module: Any, part: str) -> Score:
        """Score every example over its prompts; groups are tasks and, within them, prompts (numbered from 1)."""
        data: InstructionData = self.parts[part]
        rows = super().score(module, part)
        tasks, templates, examples = (np.array(x) for x in (data.tasks, data.templates, data.examples))
        groups = {}
        for task in data.sources:
            prompts = {
                str(at + 1): rows.take((tasks == task) & (templates == at))
                for at in np.unique(templates[tasks == task]).tolist()
            }
            groups[task] = _by_example(rows, examples, np.flatnonzero(tasks == task), prompts)
        return _by_example(rows, examples, np.arange(len(data)), groups)


def _hidden(module: Any, inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    return module.base_model(**inputs, attention_mask=mask, use_cache=False).last_hidden_state


def _by_example(rows: Score, examples: np.ndarray, at: np.ndarray, groups: Mapping[str, Score]) -> Score:
    first = np.unique(examples[at], return_index=True)[1]
    right, asked, loss = (np.add.reduceat(column[at], first) for column in (rows.right, rows.asked, rows.loss))
    return Score(right, asked, loss, groups)


def objective_of(
    parts: Mapping[str, Any], options: Mapping[str, Any], device: torch.device, tokenizer: Any, module: Any
) -> Objective:
    """Return the objective for these data."""
    data = parts["train"]
    if isinstance(data, CompressionData):
        return Reconstruction(parts, options, device, width=module.config.hidden_size)
    kinds: dict[type, type[Objective]] = {
        **{TextData: Texts, InstructionData: Answers, QuestionTokens: Questions, TokenData: NextTokens},
        **{PixelData: Pixels, SequenceData: Sequences},
    }
    return next(kind for of, kind in kinds.items() if isinstance(data, of))(parts, options, device, tokenizer)
