"""Fit of a tuned lens in its directory: one model run per batch for all layers, checkpoints, and a measurement."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from ssmscope.api import checkpoint as stored
from ssmscope.api.provenance import record_provenance
from ssmscope.api.results import SUFFIXES
from ssmscope.api.writing import complete_all_sets, write_whole
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.bootstrap import estimate, ratio, resampled_sums
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.progress import duration, on_stderr, progress_bar
from ssmscope.errors import InputError
from ssmscope.probes.lens.data import LensData, Rows, rows_of, shuffled_batches, split_rows
from ssmscope.probes.lens.lenses import RECORD, chosen_states, slices, translated, untrained_lens
from ssmscope.probes.lens.result import Evaluation, LayerFit, LensFit
from ssmscope.probes.long_rows import ANNOUNCED_SECONDS

MOMENTUM = 0.9
PROGRESS = ("step", "epoch", "place", "loss_sum", "best", "history")
"""Attributes of a fit that its checkpoint keeps, besides the tensors."""
PLAN = Path("checkpoint", "plan.json")
"""File with the plan of a fit that has started."""
SHORT_SECONDS = 120.0
"""Time, in seconds, of a fit that is offered in place of a longer one."""
MAX_CHOOSING_TOKENS = 16_384
"""Maximum number of held-out tokens that choose the step; the others give the numbers."""


class Divergences(NamedTuple):
    """KL(model ‖ lens) in nats per layer and position, and its gradient with respect to the head's input."""

    kl: Float[Tensor, "layers chosen"]
    gradient: Float[Tensor, "layers chosen width"] | None


def divergences(normed: Tensor, head: nn.Linear, *, gradient: bool = False) -> Divergences:
    """Compute KL(p ‖ q_i) = Σ_v p_v (log p_v − log q_iv) per position of the head's input (streams, chosen, width),
    with p the model's own distribution, that of the last row: the loss of a tuned lens (Belrose et al., 2023). Its
    gradient with respect to lens i's logits is q_i − p. Logits exist only for a few positions at a time."""
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
    for together in by_length(rows.lengths, tokens_at_once(model.device, (layers + 1) * model.width), rows=chosen):
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
    found = [Sums(np.empty((len(rows), layers)), np.empty(len(rows))) for _ in lenses]
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
        tuned: Any,
        rows: tuple[Rows, Rows],
        options: dict[str, Any],
        checkpoint: Path,
        console: Console,
    ) -> None:
        self.model, self.unembed, (self.train, self.choosing) = model, tuned.unembed, rows
        self.options, self.checkpoint, self.console = options, checkpoint, console
        shape = (len(tuned), self.unembed.unembedding.in_features)
        zeros = partial(torch.zeros, dtype=torch.float32, device=model.device)
        self.weight, self.bias = nn.Parameter(zeros(*shape, shape[1])), nn.Parameter(zeros(*shape))
        adam = options["optimizer"] == "adam"
        # In torch, momentum makes SGD's steps 1 / (1 − momentum) times as long as the learning rate.
        self.rate = options["learning_rate"] * (1 if adam else 1 - MOMENTUM)
        make: Any = torch.optim.Adam if adam else torch.optim.SGD
        own = dict(betas=(MOMENTUM, 0.999), amsgrad=True) if adam else dict(momentum=MOMENTUM, nesterov=True)
        self.optimizer = make([self.weight, self.bias], lr=self.rate, weight_decay=options["weight_decay"], **own)
        self.step = self.epoch = self.place = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self.best: dict[str, Any] | None = None
        self.history: list[dict[str, Any]] = []

    def run(self, bar: Progress) -> tuple[Tensor, Tensor]:
        """Fit to the end, from the checkpoint if there is one, and return the best weights and biases."""
        if self.checkpoint.exists():
            self._restore(stored.load_state(self.checkpoint))
            self.console.print(f"continuing after {self.step} steps")
        elif self.best is None:
            self._announce()
            self._evaluate()
        steps, every = self.options["steps"], self.options["look_every"]
        task = bar.add_task("steps of the fit", total=steps, completed=self.step)
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
                stored.save_state(self.checkpoint, self._state())
                saved = time.monotonic()
        bar.remove_task(task)
        assert self.best is not None
        return self.best["weight"].to(self.weight.device), self.best["bias"].to(self.bias.device)

    def _announce(self) -> None:
        """Say how long the fit takes at most, from a trial of a step that changes nothing."""
        first = self._order()[0]
        tried = first[: -(-len(first) // 8)]
        for _ in range(2):  # The first run is slow.
            began = time.perf_counter()
            self._gradients(tried)
            took = time.perf_counter() - began
            if took > ANNOUNCED_SECONDS:
                break
        self.optimizer.zero_grad(set_to_none=True)
        tokens, part = (sum(self.train.lengths[row] for row in rows) for rows in (first, tried))
        step, steps, every = took * tokens / part, self.options["steps"], self.options["look_every"]
        # A look has no backward pass, which takes about as long as two forward ones.
        look = step / 3 * sum(self.choosing.lengths) / tokens
        seconds = steps * step + (1 - -steps // every) * look
        if seconds >= ANNOUNCED_SECONDS:
            fewer = int((SHORT_SECONDS - 2 * look) / (step + look / every))
            advice = f"; steps={fewer} takes {duration(SHORT_SECONDS)}" if 0 < fewer < steps else ""
            advice += ", batch_tokens=… makes a step shorter"
            self.console.print(f"at most {steps:,} steps, about {duration(seconds)}{advice}")

    def _order(self) -> list[list[int]]:
        return shuffled_batches(self.train.lengths, self.options["batch_tokens"], self.options["seed"], self.epoch)

    def _train_step(self, chosen: list[int]) -> None:
        """Take one step on the sum of the layers' mean KL; no two layers share a parameter."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * (1 - self.step / self.options["steps"])
        loss = self._gradients(chosen)
        if not math.isfinite(loss):
            rate = self.options["learning_rate"]
            raise InputError(f"the KL divergence is {loss} in step {self.step + 1}; lower learning_rate=… ({rate})")
        nn.utils.clip_grad_norm_([self.weight, self.bias], self.options["clip"])
        self.optimizer.step()
        self.loss_sum += loss

    def _gradients(self, chosen: list[int]) -> float:
        """Compute the gradients of a batch's loss, and return it."""
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
        return loss

    def _evaluate(self) -> None:
        """Measure the lens on the rows that choose the step, and keep the best weights so far."""
        lens = (self.weight.detach(), self.bias.detach())
        (sums,) = measure(self.model, self.unembed, self.choosing, self.options["positions"], [lens])
        found = float(sums.means.mean())
        if not math.isfinite(found):
            raise InputError(f"the held-out KL divergence is {found} after {self.step} steps; lower learning_rate=…")
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


def fit(
    model: Model,
    data: LensData,
    out: Path,
    validation: LensData | None,
    *,
    options: Mapping[str, Any],
    seed: int,
    checkpoint_minutes: float,
    progress: bool,
) -> LensFit:
    """Fit a lens into `out`, or continue its fit there, and return its record; see `fit_lens`."""
    rows = rows_of(model, data)
    if validation is None:
        train, held = split_rows(rows, options["held_out"], seed)
    else:
        train, held = rows, rows_of(model, validation)
    parts = (train, *split_held_out(held))
    about = dict(zip(("train", "choosing", "measured"), (part.described() for part in parts)))
    plan = {"fingerprint": model.fingerprint, "options": dict(options), "seed": seed, "data": about}
    console = on_stderr(progress)
    if _is_finished(out, plan):
        stored.clear(out / PLAN)
        console.print(f"{out} already holds this fit, finished: nothing to do")
    else:
        settings = {**options, "seed": seed, "checkpoint_minutes": checkpoint_minutes}
        with stored.continued(out / PLAN):
            if not _is_finished(out, plan):  # Another process may have finished it.
                _fit(model, parts, plan, settings, out, console)
    return _with_views(out)


def _with_views(out: Path) -> LensFit:
    """Return the record of a finished fit, and write its table, figure and page if they are missing."""
    record = LensFit.load(out / RECORD)
    name = Path(RECORD).stem
    if not all(os.path.exists(out / f"{name}.{suffix}") for suffix in SUFFIXES):
        try:
            record.save(out, name)
        except InputError as error:
            raise InputError(f"{error}; the lens is whole and stays, and the same command adds its figures") from error
    return record


def split_held_out(held: Rows) -> tuple[Rows, Rows]:
    """Split held-out rows into every second one up to `MAX_CHOOSING_TOKENS`, to choose the step, and the rest."""
    if len(held) < 2:
        raise InputError(f"{held.name} ({held.split}) has {len(held)} row; held out must be at least 2")
    used = np.cumsum(held.lengths[::2])
    chosen = range(0, 2 * max(1, int((used <= MAX_CHOOSING_TOKENS).sum())), 2)
    return held.take(chosen), held.take([row for row in range(len(held)) if row not in chosen])


def _is_finished(out: Path, plan: Mapping[str, Any]) -> bool:
    """Return True if `out` holds this fit, finished; False for a new fit and for one to be continued."""
    if out.is_dir():
        complete_all_sets(out)  # A kill may have interrupted the writing of figures.
    if os.path.exists(out / RECORD):
        _compare(out, LensFit.load(out / RECORD).provenance, plan)
        return True
    if os.path.exists(out / PLAN):
        _compare(out, stored.read_json(out / PLAN), plan)
        return False
    if not stored.is_new(out, (out / PLAN).parent):
        raise InputError(f"{out} exists and holds no lens of ours; give a new or empty directory")
    return False


def _compare(out: Path, found: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    known, asked = (json.loads(json.dumps({key: one.get(key) for key in plan})) for one in (found, plan))
    for key in plan:
        if known[key] == asked[key]:
            continue
        if key == "options" and known[key]:
            name = next(name for name in asked[key] if known[key].get(name) != asked[key][name])
            was = f"{name} was {known[key].get(name)!r} and is now {asked[key][name]!r}"
        else:
            was = {"fingerprint": "another model"}.get(key, f"another {key}")
        raise InputError(f"{out} holds another fit ({was}); give a new directory, or remove it")


def _fit(
    model: Model,
    parts: tuple[Rows, ...],
    plan: Mapping[str, Any],
    settings: dict[str, Any],
    out: Path,
    console: Console,
) -> None:
    tuned, (train, choosing, measured) = untrained_lens(model), parts
    if not (out / PLAN).exists():
        stored.write_json(out / PLAN, plan)
    checkpoint = out / PLAN.parent / stored.STATE
    fitting = LensFitting(model, tuned, (train, choosing), settings, checkpoint, console)
    with progress_bar(console) as bar:
        weight, bias = fitting.run(bar)
    both = [(weight, bias), (torch.zeros_like(weight), torch.zeros_like(bias))]
    worth = measure(model, tuned.unembed, measured, settings["positions"], both)
    assert fitting.best is not None
    provenance = record_provenance(model.source, options=plan["options"], seed=plan["seed"])
    record = LensFit(
        provenance={**provenance, "data": plan["data"]},
        positions=settings["positions"],
        best_step=fitting.best["step"],
        history=tuple(Evaluation(**each) for each in fitting.history),
        **compare_lenses(*worth, seed=plan["seed"]),
    )
    for layer, translator in enumerate(tuned):
        translator.weight.copy_(weight[layer])
        translator.bias.copy_(bias[layer])
    _save(out, tuned.cpu(), record)
    console.print(record.headline)


def _save(out: Path, tuned: Any, record: LensFit) -> None:
    """Write the files of tuned-lens, then lens.json, each whole or absent."""
    with tempfile.TemporaryDirectory(prefix="lens-", dir=out / PLAN.parent) as staging:
        try:
            tuned.save(staging)
        except RuntimeError as error:  # torch reports a full disk this way.
            raise OSError(str(error).splitlines()[0]) from error
        write_whole(Path(staging, RECORD), record.to_json())
        for file in sorted(Path(staging).iterdir(), key=lambda file: file.name == RECORD):
            os.replace(file, out / file.name)
    stored.finish(out / PLAN.parent)


def compare_lenses(tuned: Sums, logit: Sums, *, seed: int) -> dict[str, Any]:
    """Return the numeric fields of a `LensFit` from the sums of both lenses on the same rows."""
    layers = tuned.kl.shape[1]
    columns = np.concatenate([tuned.kl, logit.kl, tuned.asked[:, None]], axis=1)
    sums = resampled_sums(columns, seed=seed)
    means = ratio(sums[:, :-1], sums[:, -1:])
    mine, theirs = means[:, :layers], means[:, layers:]
    return {
        "layers": tuple(
            LayerFit(i, estimate(own), estimate(other), estimate(other - own))
            for i, (own, other) in enumerate(zip(mine.T, theirs.T))
        ),
        **{"tuned": estimate(mine.mean(1)), "logit": estimate(theirs.mean(1))},
        **{"measured": int(tuned.asked.sum()), "rows": len(tuned.asked)},
    }
