"""Fitting loop of a tuned lens: all layers at once, one model run per batch, and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssmscope.core import batching
from ssmscope.errors import InputError
from ssmscope.probes.lens.data import Rows, shuffled_batches
from ssmscope.probes.lens.lenses import chosen_states, slices, tokens_at_once, translated
from ssmscope.training.checkpoint import load_state, save_state

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model

MOMENTUM = 0.9
PROGRESS = ("step", "epoch", "place", "loss_sum", "best", "history")
"""Attributes of a fit that its checkpoint keeps, besides the tensors."""


class Divergences(NamedTuple):
    """KL(model ‖ lens) in nats per layer and position, and its gradient with respect to the head's input."""

    kl: Float[Tensor, "layers chosen"]
    gradient: Float[Tensor, "layers chosen width"] | None


def divergences(
    normed: Float[Tensor, "streams chosen width"], head: nn.Linear, *, gradient: bool = False
) -> Divergences:
    """Compute KL(p ‖ q_i) = Σ_v p_v (log p_v − log q_iv) per position, with p the model's own distribution, that of the
    last row: the loss of a tuned lens (Belrose et al., 2023). Its gradient with respect to lens i's logits is q_i − p;
    times the head's weight, that with respect to the head's input. Logits exist only for a few positions at a time."""
    rows, count, _ = normed.shape
    kl = normed.new_empty(rows - 1, count)
    slopes = torch.empty_like(normed[:-1]) if gradient else None
    with torch.no_grad():
        for part in slices(count, rows * head.out_features, normed.device):
            logs = head(normed[:, part]).log_softmax(-1)
            p = logs[-1].exp()
            kl[:, part] = ((logs[-1] - logs[:-1]) * p).sum(-1)
            if slopes is not None:
                slopes[:, part] = logs[:-1].exp_().sub_(p) @ head.weight
    return Divergences(kl, slopes)


def batches_of(model: Model, rows: Rows, chosen: Sequence[int], layers: int) -> Iterator[tuple[list[int], Batch]]:
    for together in batching.by_length(rows.lengths, tokens_at_once(model, layers), rows=chosen):
        yield together, rows.batch(model, together)


class Sums(NamedTuple):
    """KL(model ‖ lens) summed over each row's positions, (rows, layers), and the number of positions, (rows,)."""

    kl: np.ndarray
    asked: np.ndarray

    @property
    def means(self) -> np.ndarray:
        return self.kl.sum(0) / self.asked.sum()


def measure(
    model: Model, unembed: Any, rows: Rows, positions: str, lenses: Sequence[tuple[Tensor, Tensor]]
) -> list[Sums]:
    """Measure the KL of each lens, given by its weights and biases stacked over layers, on the rows."""
    layers = len(lenses[0][0])
    found = [Sums(np.zeros((len(rows), layers)), np.zeros(len(rows))) for _ in lenses]
    for chosen, batch in batches_of(model, rows, range(len(rows)), layers):
        hidden = chosen_states(model, batch, positions)
        counts = np.array(batch.lengths if positions == "every" else [1] * len(chosen))
        owner = np.repeat(np.arange(len(chosen)), counts)
        for sums, lens in zip(found, lenses):
            with torch.no_grad():
                normed = unembed.final_norm(translated(hidden, *lens))
            kl = divergences(normed, unembed.unembedding).kl.double().cpu().numpy()
            total = np.zeros((len(chosen), layers))
            np.add.at(total, owner, kl.T)
            sums.kl[chosen], sums.asked[chosen] = total, counts
    return found


class LensFitting:
    """Fit that can be interrupted at any step and resumed from its checkpoint."""

    def __init__(
        self,
        model: Model,
        unembed: Any,
        layers: int,
        train: Rows,
        choosing: Rows,
        options: Mapping[str, Any],
        checkpoint: Path,
        console: Console,
    ) -> None:
        self.model, self.unembed, self.train, self.choosing = model, unembed, train, choosing
        self.options, self.checkpoint, self.console = options, checkpoint, console
        width = unembed.unembedding.in_features
        self.weight = nn.Parameter(torch.zeros(layers, width, width, dtype=torch.float32, device=model.device))
        self.bias = nn.Parameter(torch.zeros(layers, width, dtype=torch.float32, device=model.device))
        adam = options["optimizer"] == "adam"
        # In torch, momentum makes SGD's steps 1 / (1 − momentum) times as long as the learning rate.
        self.rate = options["learning_rate"] * (1 if adam else 1 - MOMENTUM)
        kind: Any = torch.optim.Adam if adam else torch.optim.SGD
        own = dict(betas=(MOMENTUM, 0.999), amsgrad=True) if adam else dict(momentum=MOMENTUM, nesterov=True)
        self.optimizer = kind([self.weight, self.bias], lr=self.rate, weight_decay=options["weight_decay"], **own)
        self.step = self.epoch = self.place = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self.best: dict[str, Any] | None = None
        self.history: list[dict[str, Any]] = []

    def run(self, bar: Progress) -> tuple[Tensor, Tensor]:
        """Fit to the end, from the checkpoint if there is one, and return the best weights and biases."""
        if self.checkpoint.exists():
            self._restore(load_state(self.checkpoint))
            self.console.print(f"continuing after {self.step} steps")
        elif self.best is None:
            self._evaluate()
        steps, every = self.options["steps"], self.options["look_every"]
        task = bar.add_task("fitting the lens", total=steps, completed=self.step)
        order = self._order()
        saved = time.monotonic()
        patience = self.options["patience"]
        while self.step < steps and (patience is None or self._evaluations_since_best() < patience):
            if self.place == len(order):
                self.epoch, self.place = self.epoch + 1, 0
                order = self._order()
            self._train_step(order[self.place])
            self.step, self.place = self.step + 1, self.place + 1
            bar.advance(task)
            if self.step % every == 0 or self.step == steps:
                self._evaluate()
            if self.step % every == 0 or time.monotonic() - saved >= 60 * self.options["checkpoint_minutes"]:
                save_state(self.checkpoint, self._state())
                saved = time.monotonic()
        bar.remove_task(task)
        assert self.best is not None
        return self.best["weight"].to(self.weight.device), self.best["bias"].to(self.bias.device)

    def _order(self) -> list[list[int]]:
        return shuffled_batches(self.train.lengths, self.options["batch_tokens"], self.options["seed"], self.epoch)

    def _train_step(self, chosen: list[int]) -> None:
        """Take one step on the sum of the layers' mean KL; no two layers share a parameter."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * (1 - self.step / self.options["steps"])
        self.optimizer.zero_grad(set_to_none=True)
        every = self.options["positions"] == "every"
        count = sum(self.train.lengths[row] for row in chosen) if every else len(chosen)
        layers = len(self.weight)
        loss = 0.0
        for _, batch in batches_of(self.model, self.train, chosen, layers):
            hidden = chosen_states(self.model, batch, self.options["positions"])
            normed = self.unembed.final_norm(translated(hidden, self.weight, self.bias))
            kl, gradient = divergences(normed.detach(), self.unembed.unembedding, gradient=True)
            assert gradient is not None
            torch.autograd.backward(normed[:-1], gradient / count)
            loss += float(kl.double().sum()) / (count * layers)
        if not math.isfinite(loss):
            rate = self.options["learning_rate"]
            raise InputError(f"the KL divergence is {loss} in step {self.step + 1}; lower learning_rate ({rate})")
        nn.utils.clip_grad_norm_([self.weight, self.bias], self.options["clip"])
        self.optimizer.step()
        self.loss_sum += loss

    def _evaluate(self) -> None:
        """Measure the lens on the rows that choose the step, and keep the best weights so far."""
        lens = (self.weight.detach(), self.bias.detach())
        (sums,) = measure(self.model, self.unembed, self.choosing, self.options["positions"], [lens])
        found = float(sums.means.mean())
        if not math.isfinite(found):
            raise InputError(f"the held-out KL divergence is {found} after {self.step} steps; lower learning_rate")
        since = self.step - (self.history[-1]["step"] if self.history else 0)
        training = float(self.loss_sum) / since if since else math.nan
        self.history.append({"step": self.step, "training": training, "held_out": found})
        self.loss_sum.zero_()
        better = self.best is None or found < self.best["held_out"]
        if better:
            weight, bias = (tensor.to("cpu", copy=True) for tensor in lens)
            self.best = {"step": self.step, "held_out": found, "weight": weight, "bias": bias}
        told = (
            f"step {self.step}/{self.options['steps']}  held-out KL {found:.4f} nats, mean of {len(self.weight)} layers"
        )
        self.console.print(told + "  (best so far)" * bool(better and self.step))

    def _evaluations_since_best(self) -> int:
        return sum(self.best is not None and each["step"] > self.best["step"] for each in self.history)

    def _state(self) -> dict[str, Any]:
        tensors = {"weight": self.weight.detach(), "bias": self.bias.detach()}
        return {**tensors, "optimizer": self.optimizer.state_dict(), **{name: getattr(self, name) for name in PROGRESS}}

    def _restore(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.weight.copy_(state["weight"])
            self.bias.copy_(state["bias"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in PROGRESS:
            setattr(self, name, state[name])
