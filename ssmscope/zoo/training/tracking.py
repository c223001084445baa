"""Logging of a training run to TensorBoard and Weights & Biases by transformers' callbacks.

Names are those that transformers' Trainer gives: `train/loss` and `train/learning_rate` of single steps, `eval/loss`
and `eval/accuracy` after each epoch, `test/accuracy` of the stored weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssmscope.errors import InputError, did_you_mean

TRACKERS = ("tensorboard", "wandb")
LOGS = "logs"
"""Folder of TensorBoard's files in the directory of a run."""
STEPS_BETWEEN_LOGS = 50

Log = Callable[[int, Mapping[str, Any]], None]
"""Function that logs numbers by name at a step, counted from the beginning of the training."""


def ignore(step: int, numbers: Mapping[str, Any]) -> None:
    """Log nothing."""


def trackers_of(names: str | None) -> tuple[str, ...]:
    """Return the trackers named in `names`, separated by commas. Raise InputError for unknown or missing ones."""
    found = tuple(dict.fromkeys(name.strip() for name in (names or "").split(",") if name.strip()))
    for name in found:
        if name not in TRACKERS:
            raise InputError(f"log is '{name}'; choose of {', '.join(TRACKERS)}{did_you_mean(name, TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise InputError(f"log {name} needs a package that is not installed: pip install {name}")
    if "wandb" in found and os.environ.get("WANDB_LOG_MODEL", "false").lower() not in ("false", "0"):
        raise InputError("WANDB_LOG_MODEL uploads models of transformers' Trainer alone: unset it")
    return found


@dataclass
class _Arguments:
    """The part of transformers' TrainingArguments, which sets up devices, that its callbacks read."""

    output_dir: str
    run_name: str
    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"output_dir": self.output_dir, "run_name": self.run_name, **self.options}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)


@contextmanager
def tracked(names: str | None, out: Path, module: Any, options: Mapping[str, Any]) -> Iterator[Log]:
    """Yield a function that logs to the trackers of this run, which end with the context. Raise InputError if one
    cannot begin, as W&B without an account."""
    chosen = trackers_of(names)
    if not chosen:
        yield ignore
        return
    from transformers import TrainerControl, TrainerState

    plain = {name: value for name, value in options.items() if isinstance(value, str | int | float | bool)}
    arguments, state, control = _Arguments(str(out), out.name, plain), TrainerState(), TrainerControl()
    with _beginning(chosen):
        callbacks, finish = _callbacks(chosen, out)
        for each in callbacks:
            each.on_train_begin(arguments, state, control, model=module)

    def log(step: int, numbers: Mapping[str, Any]) -> None:
        state.global_step, state.epoch = step, numbers.get("epoch")
        for each in callbacks:
            each.on_log(arguments, state, control, model=module, logs=dict(numbers))

    try:
        yield log
    finally:
        for each in callbacks:
            each.on_train_end(arguments, state, control, model=module)
        finish()


@contextmanager
def _beginning(chosen: tuple[str, ...]) -> Iterator[None]:
    """Raise InputError for the errors by which trackers refuse to begin."""
    errors: tuple[type[Exception], ...] = (OSError, ValueError)
    advice = f"make {LOGS} in the directory of the run one that can be written to"
    if "wandb" in chosen:
        import wandb

        errors, advice = (*errors, wandb.Error), "log in by wandb login, or set WANDB_MODE=offline"
    try:
        yield
    except errors as error:
        said = " ".join(str(error).split())
        raise InputError(f"log {','.join(chosen)} cannot begin ({said:.150}): {advice}") from error


def _callbacks(chosen: tuple[str, ...], out: Path) -> tuple[list[Any], Callable[[], None]]:
    """Return the trackers' callbacks, and a function that ends a run of W&B that this training begins."""
    from transformers.integrations import TensorBoardCallback, WandbCallback

    found: list[Any] = []
    finish: Callable[[], None] = _nothing
    if "tensorboard" in chosen:
        from torch.utils.tensorboard import SummaryWriter

        found.append(TensorBoardCallback(SummaryWriter(str(out / LOGS))))
    if "wandb" in chosen:
        import wandb

        found.append(WandbCallback())
        finish = wandb.finish if wandb.run is None else finish
    return found, finish


def _nothing() -> None:
    """Do nothing."""


def epoch_numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of an epoch by the names of transformers' Trainer, `eval_` for those of the validation."""
    return {name.replace("validation_", "eval_"): value for name, value in entry.items()}
