"""Objectives of training for each kind of data: batches, the loss of a batch, the score of a part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.functional import dropout as drop
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.data.tokens import IGNORED
from ssmscope.errors import InputError
from ssmscope.networks.classifier import information_loss
from ssmscope.zoo.training.batches import SubwordDropout, drop_tokens, encode, epoch_order, padded

MIN_SPREAD = 0.1
"""Standard deviation of a batch's answers below which `spread_penalty` acts."""


@dataclass(frozen=True)
class Score:
    """Number of `right` answers of those `asked`, and the sum of their cross-entropies in nats, by example, and scores
    of some of the examples by name."""

    right: np.ndarray
    asked: np.ndarray
    loss: np.ndarray
    groups: Mapping[str, Score] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        return float(self.right.sum() / self.asked.sum())

    @property
    def cross_entropy(self) -> float:
        return float(self.loss.sum() / self.asked.sum())

    def take(self, at: np.ndarray) -> Score:
        return Score(self.right[at], self.asked[at], self.loss[at])


class Objective(ABC):
    """Objective on the parts of one data set.

    `extra` is a module that is trained together with the model, if any. With `by_loss` the best epoch has the lowest
    loss rather than the highest accuracy. If `settled`, all batches are `taken` in tensors of the same shapes and
    `loss_of` never waits for the GPU, so that steps can be recorded (`ssmscope.zoo.training.fitting`).
    """

    extra: nn.Module | None = None
    by_loss = settled = False

    def __init__(
        self, parts: Mapping[str, Any], options: Mapping[str, Any], device: torch.device, tokenizer: Any = None
    ) -> None:
        self.parts, self.options, self.device, self.tokenizer = parts, options, device, tokenizer
        self.given = {name: part for name, part in parts.items() if part is not None}

    def order(self, lengths: Sequence[int], epoch: int) -> list[list[int]]:
        """Return the batches of an epoch, each of examples of similar length."""
        return epoch_order(lengths, self.options["batch_size"], self.options["seed"], epoch)

    @abstractmethod
    def batches(self, epoch: int) -> list[list[int]]:
        """Return the training examples of an epoch, determined by seed and epoch; all epochs have as many batches."""

    @abstractmethod
    def loss(self, module: Any, rows: Sequence[int]) -> Tensor:
        """Compute the training loss of a batch of the current epoch."""

    @abstractmethod
    def answers(self, module: Any, part: str, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Compute logits (batch, [length,] answers) without dropout, and return targets (batch[, length])."""

    def lengths(self, part: str) -> Sequence[int]:
        """Return the number of positions of each example of a part."""
        data = self.parts[part]
        return [next(iter(data.arrays.values())).shape[1]] * len(data)

    @torch.no_grad()
    def score(self, module: Any, part: str) -> Score:
        """Score the model on a part. For speed, call it within `fast_scan`."""
        module.eval()
        lengths = self.lengths(part)
        found = np.zeros((3, len(lengths)))
        for rows in by_length(lengths, tokens_at_once(self.device)):
            logits, targets = self.answers(module, part, rows)
            asked = targets != IGNORED
            losses = cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
            right = (logits.argmax(-1) == targets) & asked
            each = (right, asked, losses.view(targets.shape))
            found[:, rows] = [t.double().reshape(len(rows), -1).sum(1).cpu().numpy() for t in each]
        return Score(*found)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options["precision"] == "bf16")

    def embedded(self, module: Any, ids: Tensor) -> dict[str, Tensor]:
        """Return the model's input for token ids, with dropout of embeddings if there is any."""
        if not self.options["embedding_dropout"]:
            return {"input_ids": ids}
        return {"inputs_embeds": drop(module.get_input_embeddings()(ids), self.options["embedding_dropout"])}

    def with_prompt(self, loss: Tensor, head: Any, hidden: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """Add `prompt_weight` times the mean cross-entropy of the prompts' own tokens, the first `lengths` of `ids`."""
        if not self.options["prompt_weight"]:
            return loss
        inner = torch.arange(1, ids.shape[1], device=self.device) < lengths[:, None]
        logits = head(hidden[:, :-1][inner]).float()
        return loss + self.options["prompt_weight"] * cross_entropy(logits, ids[:, 1:][inner])

    def classified(self, module: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute a classifier's loss: cross-entropy, a Baleen's KL, and the penalty on uniform answers."""
        logits = logits.float()
        loss = cross_entropy(logits, labels, label_smoothing=self.options["label_smoothing"] or 0.0)
        if self.options["spread_penalty"]:
            loss = loss + self.options["spread_penalty"] * (MIN_SPREAD - spread(logits)).clamp(min=0)
        return regularized(module, loss)


def regularized(module: Any, loss: Tensor) -> Tensor:
    """Add β · KL of a Baleen to the loss (Baleen, Eq. 5)."""
    divergence = information_loss(module)
    if divergence is None:
        return loss
    config = getattr(module.config, "backbone", None) or module.config
    return loss + config.kl_weight * divergence.float()


def spread(logits: Tensor) -> Tensor:
    """Compute the standard deviation over the batch of the predicted probability, for more than two classes the mean.
    The selective SSM's authors keep that of two classes above 0.1, because a model can get stuck with one answer for
    all (Honarpisheh et al., section 5); the mean is our choice for their tasks of ten classes."""
    probabilities = logits.softmax(-1)
    if len(probabilities) < 2:
        return probabilities.new_tensor(MIN_SPREAD)
    # The root has no derivative if all answers are equal, which an unstable start can cause by saturation.
    deviations = probabilities.var(0).clamp(min=1e-12).sqrt()
    return deviations[1] if logits.shape[-1] == 2 else deviations.mean()


class Tokenized(Objective):
    """Objective on texts that a tokenizer reads, with dropout of its tokens and merges."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        options, tokenizer = self.options, self.tokenizer
        dropped, self.unknown_id = options["token_dropout"], tokenizer.unk_token_id
        if dropped and self.unknown_id is None:
            raise InputError(f"token_dropout is {dropped}, but the tokenizer has no unknown token; set it to 0")
        self.pad_id = tokenizer.pad_token_id or 0
        self.subwords = None
        if skipped := options["subword_dropout"]:
            limit = options.get("max_length")
            self.subwords = SubwordDropout(self.parts["train"], tokenizer, limit, skipped, options["seed"])


class Texts(Tokenized):
    """Labelled texts, read by a tokenizer."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        special = {*self.tokenizer.all_special_ids} - {self.unknown_id}
        self.special = torch.tensor(sorted(special), dtype=torch.long)
        limit = self.options["max_length"]
        self.examples = {name: encode(part, self.tokenizer, limit) for name, part in self.given.items()}
        if self.options.get("padding") == "read":
            for rows in self.examples.values():
                rows[:] = [[*row, *[self.pad_id] * (limit - len(row))] for row in rows]
        self.current = self.examples["train"]

    def batches(self, epoch: int) -> list[list[int]]:
        if self.subwords is not None:
            self.current = self.subwords.rows(epoch)
        return self.order(list(map(len, self.current)), epoch)

    def loss(self, module: Any, rows: Sequence[int]) -> Tensor:
        ids, mask, labels = self._batch("train", self.current, rows, self.options["token_dropout"] or 0.0)
        with self.autocast():
            logits = module(**self.embedded(module, ids), attention_mask=mask).logits
        return self.classified(module, logits, labels)

    def _batch(self, part: str, examples: Any, rows: Sequence[int], dropped: float = 0.0) -> list[Tensor]:
        """Return ids and mask, padded on the right, and labels."""
        ids, mask = padded([examples[row] for row in rows], self.pad_id)
        ids = drop_tokens(ids, dropped, self.unknown_id, self.special)
        labels = torch.tensor([self.parts[part].labels[row] for row in rows])
        return [tensor.to(self.device) for tensor in (ids, mask, labels)]

    def lengths(self, part: str) -> Sequence[int]:
        return list(map(len, self.examples[part]))

    def answers(self, module: Any, part: str, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        ids, mask, labels = self._batch(part, self.examples[part], rows)
        return module(input_ids=ids, attention_mask=mask).logits, labels


class Arrays(Objective):
    """Examples of one length, all of them on the device; the answers are the arrays named `asked`."""

    asked = "labels"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.tensors = {
            name: {key: torch.from_numpy(array).to(self.device) for key, array in part.arrays.items()}
            for name, part in self.given.items()
        }

    def batches(self, epoch: int) -> list[list[int]]:
        size, number = self.options["batch_size"], len(self.parts["train"])
        draw = torch.Generator().manual_seed(self.options["seed"] * 1_000_003 + epoch)
        order = torch.randperm(number, generator=draw).tolist()
        whole = number - number % size or number  # All batches have one size; the rest comes in other epochs.
        return [order[i : i + size] for i in range(0, whole, size)]

    def taken(self, part: str, rows: Sequence[int]) -> dict[str, Tensor]:
        index = torch.tensor(rows)
        if self.device.type == "cuda":  # Pinned memory avoids waiting for queued work.
            index = index.pin_memory().to(self.device, non_blocking=True)
        return {key: tensor[index] for key, tensor in self.tensors[part].items()}

    def inputs(self, module: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's input, in training with dropout of embeddings."""
        return self.embedded(module, batch["ids"]) if module.training else {"input_ids": batch["ids"]}

    def logits(self, module: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the logits of examples that were `taken`."""
        return module(**self.inputs(module, batch)).logits

    def criterion(self, module: Any, logits: Tensor, asked: Tensor) -> Tensor:
        """Compute the training loss from logits."""
        return self.classified(module, logits, asked)

    def loss(self, module: Any, rows: Sequence[int]) -> Tensor:
        return self.loss_of(module, self.taken("train", rows))

    def loss_of(self, module: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the training loss of training examples that were `taken`."""
        with self.autocast():
            logits = self.logits(module, batch)
        return self.criterion(module, logits, batch[self.asked])

    def answers(self, module: Any, part: str, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        batch = self.taken(part, rows)
        return self.logits(module, batch), batch[self.asked]


class Sequences(Arrays):
    """Labelled sequences of token ids."""

    settled = True


class Pixels(Arrays):
    """Labelled images with one token per pixel."""

    settled = True

    def inputs(self, module: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"input_values": batch["pixels"] / 255}


class NextTokens(Arrays):
    """Next tokens of a language model, or the tokens that a task asks for."""

    settled, asked = True, "targets"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.by_loss = self.options["kind"] == "language"

    def criterion(self, module: Any, logits: Tensor, asked: Tensor) -> Tensor:
        loss = cross_entropy(logits.float().flatten(0, 1), asked.flatten(), ignore_index=IGNORED)
        return regularized(module, loss)


class Questions(Arrays):
    """Prompts of different lengths, and the one token that a language model predicts after each. With `prompt_weight`
    w, w times the mean cross-entropy of the prompts' own tokens is added."""

    def batches(self, epoch: int) -> list[list[int]]:
        return self.order(self.lengths("train"), epoch)

    def lengths(self, part: str) -> Sequence[int]:
        return self.parts[part].lengths.tolist()

    def loss_of(self, module: Any, batch: Mapping[str, Tensor]) -> Tensor:
        with self.autocast():
            hidden = module.base_model(**self.embedded(module, batch["ids"]), use_cache=False).last_hidden_state
            asked = batch["targets"] != IGNORED
            head = module.get_output_embeddings()
            loss = cross_entropy(head(hidden[asked]).float(), batch["targets"][asked])
            loss = self.with_prompt(loss, head, hidden, batch["ids"], batch["lengths"])
        return regularized(module, loss)

    def answers(self, module: Any, part: str, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        batch = self.taken(part, rows)
        hidden = module.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state
        asked = batch["targets"] != IGNORED
        return module.get_output_embeddings()(hidden[asked]), batch["targets"][asked]

    def score(self, module: Any, part: str) -> Score:
        """Score every example; groups are tasks, if there are several."""
        rows, data = super().score(module, part), self.parts[part]
        if len(data.task_names) == 1:
            return rows
        groups = {name: rows.take(data.tasks == at) for at, name in enumerate(data.task_names)}
        return replace(rows, groups=groups)

    def taken(self, part: str, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the examples cut to the longest prompt; rows are padded on the right."""
        found = super().taken(part, rows)
        longest = int(self.parts[part].lengths[list(rows)].max())
        return {key: tensor[:, :longest] if tensor.ndim == 2 else tensor for key, tensor in found.items()}


class Decoder(nn.Module):
    """Decoder of the token at every position from one hidden state and a code of the position (MAD, compression)."""

    def __init__(self, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(length, width) * width**-0.5)
        first, second, last = nn.Linear(2 * width, 4 * width), nn.Linear(4 * width, width), nn.Linear(width, vocabulary)
        self.network = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), last)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits (batch, length, vocabulary) from `hidden` (batch, width)."""
        length = len(self.position)
        state = hidden.unsqueeze(1).expand(-1, length, -1)
        return self.network(torch.cat([state, self.position.expand(len(hidden), -1, -1)], dim=-1))


class Reconstruction(NextTokens):
    """Reconstruction of every token of a sequence from the model's last hidden state."""

    settled = False

    def __init__(self, *given: Any, width: int) -> None:
        super().__init__(*given)
        data = self.parts["train"]
        self.extra = Decoder(width, data.ids.shape[1], len(data.tokens)).to(self.device)

    def logits(self, module: Any, batch: Mapping[str, Tensor]) -> Tensor:
        assert self.extra is not None
        return self.extra(module.base_model(**self.inputs(module, batch)).last_hidden_state[:, -1])
