"""Training loop: steps, epochs, the best weights, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from ssmscope.api.checkpoint import load_state, random_states, restore_random_states, save_state
from ssmscope.core.intercept import is_own, override_forward
from ssmscope.core.mixers import adapter_for, fast_scan, mixers
from ssmscope.core.progress import progress_bar
from ssmscope.errors import InputError
from ssmscope.ops.compiling import compilable, compiling
from ssmscope.zoo.baleen import anneal_prior
from ssmscope.zoo.diff_mamba import Subtraction
from ssmscope.zoo.selective import SelectiveSSM
from ssmscope.zoo.training.objectives import Arrays, Objective
from ssmscope.zoo.training.tracking import STEPS_BETWEEN_LOGS, Log, epoch_numbers, ignore

UNDECAYED = ("A_log", "D", "dt_bias", "dt_proj.bias")
MAX_GRADIENT_DIFFERENCE = 1e-3
"""Largest difference of a compiled or recorded step's gradients, relative to each parameter's norm."""
PROGRESS = ("epoch", "step", "loss_sum", "best", "history")
"""Attributes of a `Fit` that a checkpoint keeps as they are."""
STEPS_BETWEEN_CHECKS = 50
"""Steps between checks of the loss on a GPU, because each check waits for all queued work."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fit: `weights` and `extra` (the objective's module) of the best epoch (from 1), on the CPU."""

    weights: dict[str, Tensor]
    extra: dict[str, Tensor]
    best_epoch: int
    history: list[dict[str, float]]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Group parameters for AdamW: matrices with weight decay; biases, norms, A, D and Δ's bias without."""
    decayed, undecayed = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in module.named_parameters():
        (undecayed if parameter.ndim < 2 or name.endswith(UNDECAYED) else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]


def schedule(step: int, steps: int, warmup: float, shape: str = "cosine") -> float:
    """Compute the learning rate as a share of its peak: a linear rise, then half a cosine to 0 or a `constant`."""
    rising = max(round(warmup * steps), 1) if shape == "cosine" else round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    if shape == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """Set the precision of torch's float32 matrix products (`torch.set_float32_matmul_precision`), and restore it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def prior_in(epoch: int, options: Mapping[str, Any], prior: float) -> float:
    """Compute the prior keep probability in an epoch (from 0) (GSAT, Miao et al. 2022), which moves from `prior_from`
    by `prior_step` (0.1) towards `prior` every `prior_every` (10) epochs."""
    start, every = options["prior_from"], options["prior_every"] or 10
    gone = (options["prior_step"] or 0.1) * (epoch // every)
    return max(start - gone, prior) if start > prior else min(start + gone, prior)


def monitored(module: nn.Module) -> dict[str, float]:
    """Return numbers to report next to the loss: s_A, the norms and the largest embedding of a selective SSM, the mean
    λ of a Differential Mamba."""
    found = {}
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, SelectiveSSM):
                largest = module.get_input_embeddings().weight.norm(dim=1).max().item()
                found = {"spectral_abscissa": part.spectral_abscissa, **part.norms(), "norm_u": largest}
        weights = [float(m.current_lambda()) for m in module.modules() if isinstance(m, Subtraction)]
    return found | ({"mean_lambda": sum(weights) / len(weights)} if weights else {})


@contextmanager
def compiled_parts(module: nn.Module) -> Iterator[None]:
    """Run a model's norms and the functions marked `compilable` compiled where gradients are enabled, within the
    context and in this thread alone; the first call of each takes seconds. A model compiled as a whole has had the
    right loss and wrong gradients, so gradients are compared with those of plain torch first."""
    norms = [part for part in module.modules() if type(part).__name__.endswith(("RMSNorm", "RMSNormGated"))]
    with compiling(), override_forward([(norm, partial(_normed, norm)) for norm in norms]):
        yield


def _normed(norm: nn.Module, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kind: Any = type(norm)
    return compilable(kind.forward)(norm, *args, **kwargs) if is_own(norm, below) else below(*args, **kwargs)


WARM_UP_STEPS = 3
"""Steps before a recording, in which libraries initialize."""


def can_record_training(module: nn.Module, device: torch.device) -> bool:
    """Return True if a model's step on this device can be recorded: its passes never wait for the GPU, as the families
    of all its layers declare in `RECORDABLE_TRAINING`."""
    config: Any = getattr(module, "config", None)
    kind = getattr(getattr(config, "backbone", config), "model_type", None)
    known = (getattr(adapter_for(each), "RECORDABLE_TRAINING", ()) for each in mixers(module))
    return device.type == "cuda" and config is not None and all(kind in types for types in known)


class Recording:
    """Training step, from a batch on a GPU to the gradients, recorded as a CUDA graph and replayed.

    A small model's step consists of hundreds of short kernels, whose launches dominate; a recording is launched as one.
    Shapes and Python numbers stay as they were, so only steps of fixed shapes are recorded (`Objective.settled`), and a
    changed prior needs a new recording. Gradients are in the parameters' `grad`, which must stay the same tensors: they
    are overwritten, never accumulated. Random numbers come from the generators at each call.
    """

    def __init__(
        self,
        loss_of: Callable[[Mapping[str, Tensor]], Tensor],
        parameters: Sequence[nn.Parameter],
        batch: Mapping[str, Tensor],
    ) -> None:
        def forget_gradients() -> None:
            for parameter in parameters:
                parameter.grad = None

        self.batch = {name: tensor.clone() for name, tensor in batch.items()}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_STEPS):
                forget_gradients()
                loss_of(self.batch).backward()
        torch.cuda.current_stream().wait_stream(aside)
        forget_gradients()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            loss = loss_of(self.batch)
            loss.backward()
        self.loss = loss.detach()

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of `batch`, a tensor that the next call overwrites."""
        for name, tensor in batch.items():
            self.batch[name].copy_(tensor)
        self.graph.replay()
        return self.loss


class Fit:
    """Run of training, which can be interrupted at any step and continued from its checkpoint, if that exists. The
    console gets a progress bar and one line per epoch."""

    def __init__(
        self,
        module: Any,
        objective: Objective,
        options: Mapping[str, Any],
        checkpoint: Path,
        console: Console,
        log: Log = ignore,
    ) -> None:
        self.module, self.objective = module, objective
        self.options, self.checkpoint, self.console, self.log = options, checkpoint, console, log
        self.device = next(module.parameters()).device
        self.trained = {"weights": module} | ({"extra": objective.extra} if objective.extra is not None else {})
        groups = [each for part in self.trained.values() for each in parameter_groups(part, options["weight_decay"])]
        chosen: dict[str, Any] = {"lr": options["learning_rate"], "fused": self.device.type == "cuda"}
        self.optimizer: torch.optim.Optimizer
        if options["optimizer"] == "adam":
            everything = [parameter for group in groups for parameter in group["params"]]
            self.optimizer = torch.optim.Adam(everything, weight_decay=options["weight_decay"], **chosen)
        else:
            self.optimizer = torch.optim.AdamW(groups, **chosen)
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.epoch, self.step, self.loss_sum = 0, 0, torch.zeros((), dtype=torch.float64, device=self.device)
        self.best: dict[str, Any] | None = None
        self.history: list[dict[str, float]] = []
        self.recording: Recording | None = None
        self.recorded_prior: float | None = None

    @property
    def steps(self) -> int:
        """Number of steps from the beginning."""
        return self.epoch * len(self.objective.batches(self.epoch)) + self.step

    def run(self) -> Outcome:
        """Train to the end, from the checkpoint if there is one. Raise InputError if the loss is no longer finite, or
        the checkpoint cannot be read."""
        if self.checkpoint.exists():
            self._restore(load_state(self.checkpoint))
            self.console.print(f"continuing in epoch {self.epoch + 1} after {self.step} steps")
        with ExitStack() as stack:
            stack.enter_context(fast_scan(self.module))
            stack.enter_context(matrix_products("high" if self.options["precision"] == "tf32" else "highest"))
            if self.options["compile"] and self._compiles():
                stack.enter_context(compiled_parts(self.module))
            self._record()
            bar = stack.enter_context(progress_bar(self.console))
            while self.epoch < self.options["epochs"] and not self._out_of_patience():
                self._run_epoch(bar)
        assert self.best is not None
        return Outcome(self.best["weights"], self.best.get("extra", {}), self.best["epoch"], self.history)

    def _compiles(self) -> bool:
        """Return True if compiled parts give the gradients of plain torch, tried on the first batch of this epoch."""
        rows = self.objective.batches(self.epoch)[0]
        states, gradients = random_states(), list[list[Tensor]]()
        self.module.train()
        for context in (nullcontext(), compiled_parts(self.module)):
            restore_random_states(states)
            self.optimizer.zero_grad(set_to_none=True)
            with context, matrix_products("highest"):
                self.objective.loss(self.module, rows).backward()
            gradients.append(self._gradients())
        restore_random_states(states)
        self.optimizer.zero_grad(set_to_none=True)
        plain, compiled = gradients
        return self._agree(plain, compiled, "compiled gradients are {} from those of plain torch", "not compiled")

    def _agree(self, expected: list[Tensor], found: list[Tensor], said: str, otherwise: str) -> bool:
        """Return True if gradients are close, relative to each parameter's norm, and print how close."""
        each = [(a - b).norm() / b.norm().clamp(min=1e-12) for b, a in zip(expected, found)]
        apart = torch.stack(each).max().item()  # Unlike Python's maximum, NaN if one of the numbers is.
        agrees = apart < MAX_GRADIENT_DIFFERENCE
        self.console.print(said.format(f"{apart:.1e}") + ("" if agrees else f": {otherwise}"))
        return agrees

    def _gradients(self) -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]

    def _record(self) -> None:
        """Record a step for replay if the model allows it and, on this epoch's first batch, gradients agree."""
        objective = self.objective
        self.recording = None
        if not (self.options["compile"] and objective.settled and can_record_training(self.module, self.device)):
            return
        assert isinstance(objective, Arrays)
        rows = objective.batches(self.epoch)[0]
        batch, states = objective.taken("train", rows), random_states()
        self.recorded_prior = self._anneal()
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        objective.loss_of(self.module, batch).backward()
        expected = self._gradients()
        recording = Recording(lambda taken: objective.loss_of(self.module, taken), self.parameters, batch)
        restore_random_states(states)
        recording(batch)
        said = "recorded gradients are {} from those of single kernels"
        if self._agree(expected, self._gradients(), said, "not played back"):
            self.recording = recording
        else:
            self.optimizer.zero_grad(set_to_none=True)
        restore_random_states(states)

    def _anneal(self) -> float | None:
        """Set the prior of this epoch if it is annealed."""
        if self.options["prior_from"] is None:
            return None
        config = getattr(self.module.config, "backbone", None) or self.module.config
        prior = prior_in(self.epoch, self.options, config.prior or 0.5)
        anneal_prior(self.module, prior)
        return prior

    def _run_epoch(self, bar: Progress) -> None:
        if self._anneal() != self.recorded_prior and self.recording is not None:
            self._record()
        order, epochs = self.objective.batches(self.epoch), self.options["epochs"]
        task = bar.add_task(f"epoch {self.epoch + 1}/{epochs}", total=len(order), completed=self.step)
        saved = time.monotonic()
        self.module.train()
        for rows in order[self.step :]:
            self._train_step(rows, self.epoch * len(order) + self.step, epochs * len(order))
            self.step += 1
            bar.advance(task)
            if time.monotonic() - saved >= 60 * self.options["checkpoint_minutes"] and self.step < len(order):
                save_state(self.checkpoint, self._state())
                saved = time.monotonic()
        self._close_epoch(len(order))
        bar.remove_task(task)

    def _train_step(self, rows: list[int], step: int, steps: int) -> None:
        options = self.options
        share = schedule(step, steps, options["warmup"], options["schedule"])
        for group in self.optimizer.param_groups:
            group["lr"] = options["learning_rate"] * share
        if self.recording is not None:
            assert isinstance(self.objective, Arrays)
            loss = self.recording(self.objective.taken("train", rows))
        else:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.objective.loss(self.module, rows)
        self.loss_sum += loss.detach()
        if self.device.type == "cpu" or self.step % STEPS_BETWEEN_CHECKS == 0:
            self._check_loss(loss)
        if self.recording is None:
            loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, options["clip"])
        self.optimizer.step()
        if self.log is not ignore and step % STEPS_BETWEEN_LOGS == 0:
            done = {"learning_rate": options["learning_rate"] * share, "epoch": (step + 1) / steps * options["epochs"]}
            self.log(step + 1, {"loss": loss.item(), **done})

    def _check_loss(self, loss: Tensor) -> None:
        if not math.isfinite(value := loss.item()):
            raise InputError(
                f"the loss is {value} in epoch {self.epoch + 1}, step {self.step + 1}; "
                f"lower learning_rate=… ({self.options['learning_rate']}) or clip=… ({self.options['clip']})"
            )

    def _close_epoch(self, steps: int) -> None:
        self._check_loss(self.loss_sum)
        entry = {"epoch": self.epoch + 1, "training_loss": self.loss_sum.item() / steps, **monitored(self.module)}
        told = f"epoch {self.epoch + 1}/{self.options['epochs']}  training loss {entry['training_loss']:.4f}"
        better, rank = True, tuple[float, ...]()
        if self.objective.parts["validation"] is not None:
            score = self.objective.score(self.module, "validation")
            entry |= {"validation_accuracy": score.accuracy, "validation_loss": score.cross_entropy}
            entry |= {f"validation_accuracy_{name}": group.accuracy for name, group in score.groups.items()}
            rank = (-score.cross_entropy,) if self.objective.by_loss else (score.accuracy, -score.cross_entropy)
            better = self.best is None or rank > tuple(self.best["rank"])
            told += f"  validation loss {score.cross_entropy:.4f}  accuracy {score.accuracy:.4f}"
            told += "".join(f"  {name} {group.accuracy:.4f}" for name, group in score.groups.items())
            told += "  (best so far)" if better else ""
        for name in ("spectral_abscissa", "mean_lambda"):
            told += f"  {name} {entry[name]:.4f}" if name in entry else ""
        self.history.append(entry)
        self.log(self.steps, epoch_numbers(entry))
        self.epoch, self.step, self.loss_sum = self.epoch + 1, 0, torch.zeros_like(self.loss_sum)
        if better:
            copies = {name: _copied(part) for name, part in self.trained.items()}
            self.best = {"epoch": self.epoch, "rank": list(rank), **copies}
        save_state(self.checkpoint, self._state())
        self.console.print(told)

    def _out_of_patience(self) -> bool:
        patience = self.options["patience"]
        return patience is not None and self.best is not None and self.epoch - self.best["epoch"] >= patience

    def _state(self) -> dict[str, Any]:
        parts = {**self.trained, "optimizer": self.optimizer}
        states = {name: part.state_dict() for name, part in parts.items()}
        return {**states, "random": random_states(), **{name: getattr(self, name) for name in PROGRESS}}

    def _restore(self, state: Mapping[str, Any]) -> None:
        for name, part in {**self.trained, "optimizer": self.optimizer}.items():
            part.load_state_dict(state[name])
        for name in PROGRESS:
            setattr(self, name, state[name])
        self.loss_sum = self.loss_sum.to(self.device)
        restore_random_states(state["random"])


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in module.state_dict().items()}
