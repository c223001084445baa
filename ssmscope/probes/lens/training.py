"""Fit of a tuned lens in its directory: started, continued or found finished, and measured."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console

from ssmscope.api.results import SUFFIXES, record_provenance
from ssmscope.api.writing import complete_all_sets, write_whole
from ssmscope.core.bootstrap import estimate, ratio, resampled_sums
from ssmscope.core.progress import on_stderr, progress_bar
from ssmscope.errors import InputError
from ssmscope.probes.lens.data import LensData, Rows, rows_of, split_rows
from ssmscope.probes.lens.fitting import LensFitting, Sums, measure
from ssmscope.probes.lens.lenses import RECORD, untrained_lens
from ssmscope.probes.lens.result import Evaluation, LayerFit, LensFit
from ssmscope.training.checkpoint import STATE, clear, continued, finish, is_new, read_json, write_json

if TYPE_CHECKING:
    from ssmscope.core.model import Model

PLAN = Path("checkpoint", "plan.json")
"""File with the plan of a fit that has started."""

MAX_CHOOSING_TOKENS = 16_384
"""Maximum number of held-out tokens that choose the step; the others give the numbers."""


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
    given = validation is not None
    train, held = (rows, rows_of(model, validation)) if given else split_rows(rows, options["held_out"], seed)
    parts = (train, *split_held_out(held))
    about = dict(zip(("train", "choosing", "measured"), (part.described() for part in parts)))
    plan = {"fingerprint": model.fingerprint, "options": dict(options), "seed": seed, "data": about}
    console = on_stderr(progress)
    if _is_finished(out, plan):
        clear(out / PLAN)
        console.print(f"{out} already holds this fit, finished: nothing to do")
    else:
        settings = {**options, "seed": seed, "checkpoint_minutes": checkpoint_minutes}
        with continued(out / PLAN):
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
    chosen = list(range(0, 2 * max(1, int((used <= MAX_CHOOSING_TOKENS).sum())), 2))
    return held.take(chosen), held.take(sorted({*range(len(held))} - {*chosen}))


def _is_finished(out: Path, plan: Mapping[str, Any]) -> bool:
    """Return True if `out` holds this fit, finished; False for a new fit and for one to be continued."""
    if out.is_dir():
        try:
            complete_all_sets(out)  # A kill may have interrupted the writing of figures.
        except OSError as error:
            raise InputError(f"cannot write to {out}: {error.strerror or error}") from error
    if os.path.exists(out / RECORD):
        _compare(out, LensFit.load(out / RECORD).provenance, plan)
        return True
    if os.path.exists(out / PLAN):
        _compare(out, read_json(out / PLAN), plan)
        return False
    if not is_new(out, (out / PLAN).parent):
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
    parts: tuple[Rows, Rows, Rows],
    plan: Mapping[str, Any],
    settings: Mapping[str, Any],
    out: Path,
    console: Console,
) -> None:
    tuned, (train, choosing, measured) = untrained_lens(model), parts
    if not (out / PLAN).exists():
        write_json(out / PLAN, plan)
    checkpoint = out / PLAN.parent / STATE
    fitting = LensFitting(model, tuned.unembed, len(tuned), train, choosing, settings, checkpoint, console)
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
    finish(out / PLAN.parent)


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
        "tuned": estimate(mine.mean(1)),
        "logit": estimate(theirs.mean(1)),
        "measured": int(tuned.asked.sum()),
        "rows": len(tuned.asked),
    }
