"""The loop that fits a classifier: steps, epochs, the best weights, checkpoints."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.functional import dropout as drop

from ssmscope.errors import InputError
from ssmscope.model import fast_scan
from ssmscope.models.baleen import information_loss
from ssmscope.tasks.batches import Examples, collate, drop_tokens, epoch_order, length_order
from ssmscope.training.checkpoint import load_state, random_states, restore_random_states, save_state

EVALUATION_BATCH = 64
UNDECAYED = ("A_log", "D", "dt_bias", "dt_proj.bias")


@dataclass(frozen=True)
class Vocabulary:
    """The ids that batches need: of padding, of the unknown token (None if there is none), of special tokens."""

    pad_id: int
    unknown_id: int | None
    special_ids: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What a fit ended with. `weights` are on the CPU, of the best epoch (the first is 1)."""

    weights: dict[str, Tensor]
    best_epoch: int
    history: list[dict[str, float]]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters for AdamW in two groups: matrices with decay; biases, norms, A, D and Δ's bias without."""
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        kept = parameter.ndim < 2 or name.endswith(UNDECAYED)
        (undecayed if kept else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]


def schedule(step: int, steps: int, warmup: float) -> float:
    """The learning rate at `step` of `steps` as a share of its peak: linear to the peak, then half a cosine to 0."""
    rising = max(round(warmup * steps), 1)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


def evaluate(module: nn.Module, examples: Examples, vocabulary: Vocabulary, device: torch.device) -> tuple[int, float]:
    """The number of right answers and the mean cross-entropy in nats. Needs `fast_scan` around it to be fast."""
    module.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for rows in length_order([len(ids) for ids in examples.ids], EVALUATION_BATCH):
            batch = collate(examples, rows, vocabulary.pad_id).to(device)
            logits = module(input_ids=batch.ids, attention_mask=batch.mask).logits.float()
            right += int((logits.argmax(-1) == batch.labels).sum())
            loss += float(cross_entropy(logits, batch.labels, reduction="sum"))
    return right, loss / len(examples.labels)


class Fit:
    """One run of training, which can be left at any step and taken up again from its checkpoint.

    Args:
        module: an `SSMForSequenceClassification` on its device.
        training: gives the training examples of an epoch; as many in every epoch, the same for the same epoch.
        validation: what the best epoch is chosen by.
        options: the keyword arguments of `train_classifier`.
        checkpoint: the file to continue from, if it is there, and to write to.
        console: for the progress bar and one line per epoch.
    """

    def __init__(
        self,
        module: Any,
        training: Callable[[int], Examples],
        validation: Examples,
        vocabulary: Vocabulary,
        options: Mapping[str, Any],
        checkpoint: Path,
        console: Console,
    ) -> None:
        self.module, self.training, self.validation, self.vocabulary = module, training, validation, vocabulary
        self.options, self.checkpoint, self.console = options, checkpoint, console
        self.device = next(module.parameters()).device
        self.special = torch.tensor(vocabulary.special_ids, dtype=torch.long)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(module, options["weight_decay"]), lr=options["learning_rate"]
        )
        self.epoch, self.step, self.loss_sum = 0, 0, 0.0
        self.best: dict[str, Any] | None = None
        self.history: list[dict[str, float]] = []

    def run(self) -> Outcome:
        """Train to the end, from the checkpoint if there is one.

        Raises:
            InputError: when the loss is no longer finite, or the checkpoint cannot be read.
        """
        if self.checkpoint.exists():
            self._restore(load_state(self.checkpoint))
            self.console.print(f"continuing in epoch {self.epoch + 1} after {self.step} steps")
        with ExitStack() as stack:
            stack.enter_context(fast_scan(self.module))
            bar = stack.enter_context(_progress(self.console))
            while self.epoch < self.options["epochs"] and not self._out_of_patience():
                self._run_epoch(bar)
        assert self.best is not None
        return Outcome(self.best["weights"], self.best["epoch"], self.history)

    def _run_epoch(self, bar: Progress) -> None:
        examples = self.training(self.epoch)
        lengths = [len(ids) for ids in examples.ids]
        order = epoch_order(lengths, self.options["batch_size"], self.options["seed"], self.epoch)
        epochs = self.options["epochs"]
        task = bar.add_task(f"epoch {self.epoch + 1}/{epochs}", total=len(order), completed=self.step)
        saved = time.monotonic()
        self.module.train()
        for rows in order[self.step :]:
            self._train_step(examples, rows, self.epoch * len(order) + self.step, epochs * len(order))
            self.step += 1
            bar.advance(task)
            if time.monotonic() - saved >= 60 * self.options["checkpoint_minutes"] and self.step < len(order):
                save_state(self.checkpoint, self._state())
                saved = time.monotonic()
        bar.remove_task(task)
        self._close_epoch(len(order))

    def _train_step(self, examples: Examples, rows: list[int], step: int, steps: int) -> None:
        options = self.options
        batch = collate(examples, rows, self.vocabulary.pad_id)
        if options["token_dropout"]:
            assert self.vocabulary.unknown_id is not None
            dropped = drop_tokens(batch.ids, options["token_dropout"], self.vocabulary.unknown_id, self.special)
            batch = batch._replace(ids=dropped)
        batch = batch.to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = options["learning_rate"] * schedule(step, steps, options["warmup"])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=options["precision"] == "bf16"):
            embedded = drop(self.module.get_input_embeddings()(batch.ids), options["embedding_dropout"])
            logits = self.module(inputs_embeds=embedded, attention_mask=batch.mask).logits
        loss = cross_entropy(logits.float(), batch.labels, label_smoothing=options["label_smoothing"])
        divergence = information_loss(self.module.backbone)
        if divergence is not None:
            loss = loss + self.module.config.backbone.kl_weight * divergence.float()
        value = loss.item()
        if not math.isfinite(value):
            raise InputError(
                f"the loss is {value} in epoch {self.epoch + 1}, step {self.step + 1}; "
                f"lower learning_rate ({options['learning_rate']}) or clip ({options['clip']})"
            )
        self.loss_sum += value
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), options["clip"])
        self.optimizer.step()

    def _close_epoch(self, steps: int) -> None:
        right, loss = evaluate(self.module, self.validation, self.vocabulary, self.device)
        accuracy = right / len(self.validation.labels)
        entry = {
            "epoch": self.epoch + 1,
            "training_loss": self.loss_sum / steps,
            "validation_accuracy": accuracy,
            "validation_loss": loss,
        }
        self.history.append(entry)
        self.epoch, self.step, self.loss_sum = self.epoch + 1, 0, 0.0
        better = self.best is None or (accuracy, -loss) > (self.best["accuracy"], -self.best["loss"])
        if better:
            weights = {k: v.detach().to("cpu", copy=True) for k, v in self.module.state_dict().items()}
            self.best = {"epoch": self.epoch, "accuracy": accuracy, "loss": loss, "weights": weights}
        save_state(self.checkpoint, self._state())
        self.console.print(
            f"epoch {self.epoch}/{self.options['epochs']}  training loss {entry['training_loss']:.4f}  "
            f"validation loss {loss:.4f}  accuracy {accuracy:.4f}{'  (best so far)' if better else ''}"
        )

    def _out_of_patience(self) -> bool:
        return self.best is not None and self.epoch - self.best["epoch"] >= self.options["patience"]

    def _state(self) -> dict[str, Any]:
        return {
            "weights": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": random_states(),
            "epoch": self.epoch,
            "step": self.step,
            "loss_sum": self.loss_sum,
            "best": self.best,
            "history": copy.deepcopy(self.history),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.step, self.loss_sum = state["epoch"], state["step"], state["loss_sum"]
        self.best, self.history = state["best"], list(state["history"])
        restore_random_states(state["random"])


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet or not console.is_terminal,
        transient=True,
    )
