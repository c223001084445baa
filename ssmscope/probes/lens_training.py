"""Fit a tuned lens (Belrose et al., Eliciting latent predictions, 2023) to a model, and say what it is worth.

A run can be killed at any moment and started again with the same call: it continues from its last checkpoint and, on a
CPU, ends with the very numbers of an unbroken run.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmscope.bootstrap import Estimate, estimate, ratio, resampled_sums
from ssmscope.errors import InputError, did_you_mean
from ssmscope.limits import refuse_beyond, refuse_reading
from ssmscope.results import Result, record_provenance
from ssmscope.writing import settle_all, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.model import Model
    from ssmscope.probes.lens_data import Given, Rows
    from ssmscope.probes.lens_fitting import Sums

RECORD = "lens.json"
"""The file, written last, by which a lens is known to be fitted: a `LensFit`."""

CLAIMED = Path("checkpoint", "plan.json")
"""The plan of a fit that has begun."""

OPTIMIZERS = {"sgd": 1.0, "adam": 1e-3}
"""The optimizers, and their learning rates where none is given: those of tuned-lens."""

POSITIONS = ("every", "last")
"""Where a lens is asked: at every position, or at each text's last one."""

LOOK_TOKENS = 16_384
"""How many tokens, at most, of the held-out rows are read to choose the step; all others are kept for the numbers."""


def fit_lens(
    model: Model,
    data: Given,
    out: str | Path,
    *,
    validation: Given | None = None,
    held_out: float = 0.1,
    positions: str | None = None,
    optimizer: str = "sgd",
    learning_rate: float | None = None,
    steps: int = 250,
    batch_tokens: int = 4096,
    weight_decay: float = 1e-3,
    clip: float = 1.0,
    patience: int | None = None,
    look_every: int = 10,
    seed: int = 0,
    device: str | None = None,
    checkpoint_minutes: float = 5.0,
    progress: bool = True,
) -> Path:
    """Fit a tuned lens to the model and write it to `out`: config.json and params.pt as the package tuned-lens has them
    (`ssmscope.probes.lens.load_lens`, or tuned-lens with an unembedding, reads both), and lens.json, the `LensFit`.

    Every block i has one translator of what enters it (0: the embeddings); the last block's output needs none. From
    W_i = 0, the logit lens, on it is moved towards the least KL(model ‖ lens_i), mean over positions, while the
    learning rate falls linearly to 0 (Belrose et al., 2023). Half of the held-out rows choose the step whose weights
    are kept, the logit lens being the first candidate; the other half, which took no part, gives the numbers of the
    record.

    Args:
        model: a language model, or a classifier, whose lens gives classes.
        data: rows of tokens (`ssmscope.tasks.language.language_data`), texts, labelled sequences or images, a list of
            texts, or a list of lists of token ids. Labels and targets are not read.
        out: the directory; new, empty, or of the same fit, which is then continued.
        validation: held-out data of the same kinds; by default a share of `data`.
        held_out: that share, drawn by the seed.
        positions: `every` position (default of language models), or each text's `last` (default of classifiers, whose
            head reads that one).
        optimizer: `sgd` with Nesterov momentum 0.9, as in the paper, or `adam` (AMSGrad).
        learning_rate: at the first step; 1 for sgd, in units in which momentum makes no step longer, 0.001 for adam.
        steps: at most; data that is too short for them is read again.
        batch_tokens: tokens a step.
        weight_decay: draws W_i and b_i towards the logit lens.
        clip: the gradient's largest norm, of all layers together.
        patience: looks at the held-out rows without a better one until fitting stops; None: it never does.
        look_every: steps between looks.
        seed: draws the held-out rows, the order of the others, and resamples.
        device: by default where the model is; another one gets a copy of it.
        checkpoint_minutes: a checkpoint is written at every look, and between looks after so many minutes.
        progress: whether to show it on stderr.

    Returns:
        `out`. A finished fit is left as it is.

    Raises:
        InputError: an option outside its range, data that the model cannot read or too little of it, another fit or
            something else in `out`, a model that a lens cannot read, or a divergence that is no longer finite.
    """
    options = _checked(
        {
            **{"positions": positions, "optimizer": optimizer, "learning_rate": learning_rate, "steps": steps},
            **{"batch_tokens": batch_tokens, "weight_decay": weight_decay, "clip": clip, "patience": patience},
            **{"look_every": look_every, "held_out": None if validation is not None else held_out},
        },
        model,
    )
    _within("seed", seed, 0, whole=True)
    _within("checkpoint_minutes", checkpoint_minutes, 0)
    from ssmscope.probes.lens_data import divided, rows_of

    model = _placed(model, device)
    rows = rows_of(model, data)
    train, held = (rows, rows_of(model, validation)) if validation is not None else divided(rows, held_out, seed)
    choosing, measured = _halves(held)
    plan = {
        "fingerprint": model.fingerprint,
        "options": options,
        "seed": seed,
        "data": {"train": train.described(), "choosing": choosing.described(), "measured": measured.described()},
    }
    out = Path(out)
    console = _console(progress)
    from ssmscope.training.checkpoint import clear, continued

    if _is_finished(out, plan):
        clear(out / CLAIMED)
        console.print(f"{out} holds this very fit, finished: nothing to do")
        return out
    settings = {**options, "seed": seed, "checkpoint_minutes": checkpoint_minutes}
    with continued(out / CLAIMED):
        if not _is_finished(out, plan):  # another process may have ended it just now
            _fit(model, train, choosing, measured, plan, settings, out, console)
    return out


def _within(name: str, value: Any, least: float, *, above: bool = False, whole: bool = False) -> None:
    """Raises InputError unless an option is a finite number from `least` on, or `above` it."""
    fits = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
    if not fits or not math.isfinite(value) or value < least or (above and value == least):
        kind = "whole number" if whole else "number"
        raise InputError(f"{name} is {value!r}; allowed is a {kind} {'above' if above else 'from'} {least:g}")


def _checked(options: dict[str, Any], model: Model) -> dict[str, Any]:
    """The options with their defaults filled in."""
    if options["optimizer"] not in OPTIMIZERS:
        given = options["optimizer"]
        raise InputError(
            f"unknown optimizer {given!r}; allowed are {', '.join(OPTIMIZERS)}{did_you_mean(str(given), OPTIMIZERS)}"
        )
    if options["learning_rate"] is None:
        options["learning_rate"] = OPTIMIZERS[options["optimizer"]]
    if options["positions"] is None:
        options["positions"] = "last" if model.is_classifier else "every"
    if options["positions"] not in POSITIONS:
        given = options["positions"]
        raise InputError(
            f"unknown positions {given!r}; allowed are {', '.join(POSITIONS)}{did_you_mean(str(given), POSITIONS)}"
        )
    for name in ("steps", "batch_tokens", "look_every"):
        _within(name, options[name], 1, whole=True)
    if options["patience"] is not None:
        _within("patience", options["patience"], 1, whole=True)
    refuse_beyond({"steps": 10**7, "batch_tokens": 2**24, "learning_rate": 10**6, "weight_decay": 10**6}, options)
    tokens = options["steps"] * options["batch_tokens"]
    refuse_reading(tokens, f"{options['steps']:,} steps of {options['batch_tokens']:,} tokens", "take fewer")
    for name in ("learning_rate", "clip"):
        _within(name, options[name], 0, above=True)
    _within("weight_decay", options["weight_decay"], 0)
    if options["held_out"] is not None:
        _within("held_out", options["held_out"], 0, above=True)
        if options["held_out"] >= 1:
            raise InputError(f"held_out is {options['held_out']!r}; allowed is a share above 0 and below 1")
    return options


def _placed(model: Model, device: str | None) -> Model:
    """The model, or a copy of it on another device."""
    if device is None:
        return model
    import copy
    import dataclasses

    import torch

    try:
        place = torch.empty(1, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device '{device}' cannot be used here: {str(error).splitlines()[0]}") from error
    if place == model.device:
        return model
    return dataclasses.replace(model, module=copy.deepcopy(model.module).to(place))


def _halves(held: Rows) -> tuple[Rows, Rows]:
    """Held-out rows that choose the step, every second one up to `LOOK_TOKENS`, and all others.

    Raises:
        InputError: when there is only one.
    """
    if len(held) < 2:
        raise InputError(f"{held.name} ({held.split}) has {len(held)} row; held out must be at least 2")
    chosen: list[int] = []
    room, lengths = LOOK_TOKENS, held.lengths
    for row in range(0, len(held), 2):
        if chosen and lengths[row] > room:
            break
        chosen.append(row)
        room -= lengths[row]
    return held.take(chosen), held.take(sorted({*range(len(held))} - {*chosen}))


def _is_finished(out: Path, plan: Mapping[str, Any]) -> bool:
    """Whether `out` holds this fit and it has ended; False for a new fit and for one to be continued.

    Raises:
        InputError: when `out` holds something else.
    """
    from ssmscope.training.checkpoint import is_new, read_json

    if out.is_dir():
        try:
            settle_all(out)  # the record's figures may have been cut short
        except OSError as error:
            raise InputError(f"cannot write to {out}: {error.strerror or error}") from error
    if os.path.exists(out / RECORD):
        _compare(out, LensFit.load(out / RECORD).provenance, plan)
        return True
    if os.path.exists(out / CLAIMED):
        _compare(out, read_json(out / CLAIMED), plan)
        return False
    if not is_new(out, (out / CLAIMED).parent):
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


def _console(shown: bool) -> Console:
    """Prints on stderr, or nowhere."""
    from rich.console import Console

    return Console(stderr=True, quiet=not shown, highlight=False, markup=False, soft_wrap=True)


def _fit(
    model: Model,
    train: Rows,
    choosing: Rows,
    measured: Rows,
    plan: Mapping[str, Any],
    settings: Mapping[str, Any],
    out: Path,
    console: Console,
) -> None:
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ssmscope.probes.lens import untrained
    from ssmscope.probes.lens_fitting import LensFitting, measure
    from ssmscope.training.checkpoint import STATE, write_json

    tuned = untrained(model)
    if not (out / CLAIMED).exists():
        write_json(out / CLAIMED, plan)
    fitting = LensFitting(
        model, tuned.unembed, len(tuned), train, choosing, settings, out / CLAIMED.parent / STATE, console
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        weight, bias = fitting.run(bar)
    worth = measure(
        model,
        tuned.unembed,
        measured,
        settings["positions"],
        [(weight, bias), (torch.zeros_like(weight), torch.zeros_like(bias))],
    )
    assert fitting.best is not None
    record = LensFit(
        provenance={
            **record_provenance(model.source, options=plan["options"], seed=plan["seed"]),
            "data": plan["data"],
        },
        positions=settings["positions"],
        best_step=fitting.best["step"],
        history=tuple(Look(**look) for look in fitting.history),
        **compared(*worth, seed=plan["seed"]),
    )
    for layer, translator in enumerate(tuned):
        translator.weight.copy_(weight[layer])
        translator.bias.copy_(bias[layer])
    _save(out, tuned.cpu(), record)
    console.print(record.headline)


def _save(out: Path, tuned: Any, record: LensFit) -> None:
    """tuned-lens's files, then lens.json, each whole or absent."""
    from ssmscope.training.checkpoint import finish

    with tempfile.TemporaryDirectory(prefix="lens-", dir=out / CLAIMED.parent) as staging:
        try:
            tuned.save(staging)
        except RuntimeError as error:  # as torch reports a disk that is full
            raise OSError(str(error).splitlines()[0]) from error
        content = record.to_json().encode()
        write_atomically(Path(staging, RECORD), lambda stream: stream.write(content))
        for file in sorted(Path(staging).iterdir(), key=lambda file: file.name == RECORD):
            os.replace(file, out / file.name)
    finish(out / CLAIMED.parent)


@dataclass(frozen=True)
class LayerFit:
    """What the two lenses are worth at one layer: KL(model ‖ lens) in nats, mean over held-out positions."""

    layer: int
    """i: what enters block i is read, 0 being the embeddings."""
    tuned: Estimate
    logit: Estimate
    gained: Estimate
    """logit − tuned, of the same resamples."""


@dataclass(frozen=True)
class Look:
    """The mean KL over all layers after so many steps: in training since the look before, and on held-out rows."""

    step: int
    training: float
    held_out: float


@dataclass(frozen=True)
class LensFit(Result, kind="lens-fit"):
    """What a tuned lens is worth, beside the logit lens, on held-out rows that took no part in its fit."""

    positions: str
    layers: tuple[LayerFit, ...]
    tuned: Estimate
    """The mean over the layers."""
    logit: Estimate
    measured: int
    """Positions that the numbers are means over."""
    rows: int
    """Rows that these stand in, which are what is resampled."""
    best_step: int
    """After which the weights were taken; 0: no step was better than the logit lens."""
    history: tuple[Look, ...]

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        return (
            f"Tuned lens of {model}: KL to its own answers {self.tuned.value:.3f} nats, mean of {len(self.layers)} "
            f"layers; logit lens {self.logit.value:.3f}"
        )

    def to_frame(self) -> DataFrame:
        """A row per layer.

        Columns: layer (i: what enters block i), tuned, logit, gained (logit − tuned), in nats, each with the ends of
        its 95 % interval in columns ending in _low and _high.
        """
        import pandas as pd

        rows = []
        for one in self.layers:
            row: dict[str, Any] = {"layer": one.layer}
            for name in ("tuned", "logit", "gained"):
                found = getattr(one, name)
                row |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
            rows.append(row)
        return pd.DataFrame(rows)

    def figure(self) -> Figure:
        """KL by layer of both lenses with their intervals; beside it, the fit's progress on held-out rows."""
        from ssmscope.probes.lens_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        yield Text(self.headline, style="bold")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("layer", "tuned lens", "logit lens", "gained"):
            table.add_column(heading, justify="right", no_wrap=True)
        for one in self.layers:
            table.add_row(str(one.layer), str(one.tuned), str(one.logit), str(one.gained))
        table.add_row("mean", str(self.tuned), str(self.logit), "")
        yield table
        data = self.provenance["data"]["measured"]
        where = "positions" if self.positions == "every" else "last positions"
        yield Text(
            f"\nKL(model ‖ lens) in nats over {self.measured:,} {where} of {self.rows:,} rows of {data['name']} "
            f"({data['split']}) that took no part in the fit; 95 % bootstrap intervals over rows."
        )
        yield Text(f"Layer i reads what enters block i, 0 the embeddings. Weights of step {self.best_step}.")


def compared(tuned: Sums, logit: Sums, *, seed: int) -> dict[str, Any]:
    """The numbers of a `LensFit` from what both lenses sum up to on the same rows."""
    layers = tuned.kl.shape[1]
    sums = resampled_sums(_columns(tuned, logit), seed=seed)
    means = ratio(sums[:, :-1], sums[:, -1:])
    mine, theirs = means[:, :layers], means[:, layers:]
    return {
        "layers": tuple(
            LayerFit(i, estimate(mine[:, i]), estimate(theirs[:, i]), estimate(theirs[:, i] - mine[:, i]))
            for i in range(layers)
        ),
        "tuned": estimate(mine.mean(1)),
        "logit": estimate(theirs.mean(1)),
        "measured": int(tuned.asked.sum()),
        "rows": len(tuned.asked),
    }


def _columns(tuned: Sums, logit: Sums) -> Any:
    import numpy as np

    return np.concatenate([tuned.kl, logit.kl, tuned.asked[:, None]], axis=1)
