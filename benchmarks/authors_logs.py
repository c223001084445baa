"""Results of Experiments 1 and 2 of the generalisation paper: our runs (`experiments_authors.py`) beside theirs.

SSMSCOPE_ORACLES=… python benchmarks/authors_logs.py logs      # keep what the documentation shows of their logs
SSMSCOPE_ORACLES=… python benchmarks/authors_logs.py tables
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import running
import verdicts
from experiments_authors import ARMS, CLASSES, EPOCHS, RESULTS, SMALL, STARTS
from verdicts import Question

LOGS = RESULTS.with_name("experiments-authors-logs.jsonl")
"""Numbers of the authors' own runs that the documentation shows."""
LOGGED = {
    "spectral_abscissa": "s_A",
    "norm_p": "L_p",
    "norm_q": "B_q",
    "norm_W_B": "B_B",
    "norm_W_B_entrywise": "M_B",
    "norm_W_C": "B_C",
    "norm_W_C_entrywise": "M_C",
    "norm_A": "B_A",
    "norm_u": "B_u",
    "training_loss": "Loss",
}
"""Our names of the columns of the authors' logs."""


def authors(recipe: str, task: str) -> dict[tuple[int, float], list[dict[str, Any]]]:
    """Return the authors' runs of a recipe on a task by length and s_A at the start, as lines of our results: epochs,
    and for experiment2 the accuracies of their summaries. A log of one epoch is a run that diverged."""
    import pandas as pd

    root = Path(os.environ["SSMSCOPE_ORACLES"], "paper002", "results")
    root /= {"experiment1": "stability_margin_T", "experiment2": "length_independence"}[recipe] + f"/{task}"
    found: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for file in sorted((root / "epochs").glob("log_*.csv")):
        length, start = re.match(r"log_T_(\d+)_sA_([-\d.]+)_", file.name).groups()  # type: ignore[union-attr]
        log = pd.read_csv(file)
        names = {ours: theirs for ours, theirs in LOGGED.items() if theirs in log}
        epochs = [{ours: float(row[theirs]) for ours, theirs in names.items()} for _, row in log.iterrows()]
        one: dict[str, Any] = {"epochs": epochs, **({"diverged": 1} if len(log) == 1 else {})}
        found.setdefault((int(length), float(start)), []).append(one)
    for file in sorted((root / "significance").glob("sig_*.csv")):
        for _, row in pd.read_csv(file).iterrows():
            scored = {part.lower(): {"accuracy": float(row[f"{part} Accuracy"])} for part in ("Train", "Test")}
            found[int(row["T"]), 0.0].append({"epochs": [], **scored})
    return found


def told(values: Sequence[float], digits: int = 3) -> str:
    """The mean and standard deviation over runs."""
    values = [value for value in values if np.isfinite(value)]
    if not values:
        return "–"
    spread = f" ({np.std(values, ddof=1):.{digits}f})" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def comparison(recipe: str, task: str) -> list[str]:
    """Our arms beside the authors' logs at each length and s_A at the start: runs and those that diverged, then the
    mean over the others, with its standard deviation in round brackets; of losses the median."""
    ours: dict[tuple[int, float], dict[str, list[dict[str, Any]]]] = {}
    for one in running.read(RESULTS):
        if (one["recipe"], one["task"]) == (recipe, task):
            ours.setdefault((one["length"], one["start"]), {}).setdefault(one["arm"], []).append(one)
    theirs = authors(recipe, task)
    heads = ["T", "start", "runs of", "number", "diverged", "s_A", "‖W_B‖_F", "‖W_B‖₁,₁", "at the end"]
    heads += ["‖W_C‖_F", "‖q‖₂"]
    heads += ["first loss", "last loss", "training accuracy", "test accuracy"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cell in sorted(ours):
        for whose, runs in {"the authors": theirs.get(cell, []), **ours[cell]}.items():
            logs = [one["epochs"] for one in runs if one["epochs"]]
            whole = [one["epochs"] for one in runs if one["epochs"] and "diverged" not in one]
            number, failed = len(logs), sum("diverged" in one for one in runs)
            cells = [str(cell[0]), f"{cell[1]:.2f}", whose, str(number), str(failed)]
            cells.append(told([log[-1]["spectral_abscissa"] for log in whole]))
            cells.append(
                told([log[0]["norm_W_B"] for log in logs], 2) + " → " + told([log[-1]["norm_W_B"] for log in whole], 2)
            )
            for end, source in ((0, logs), (-1, whole)):
                cells.append(told([log[end]["norm_W_B_entrywise"] for log in source], 1))
            cells += [told([log[-1][name] for log in whole], 2) for name in ("norm_W_C", "norm_q")]
            for at in (1, -1):
                values = [log[at]["training_loss"] for log in whole]
                cells.append(f"{np.median(values):.3g}" if values else "–")
            cells += [told([one[part]["accuracy"] for one in runs if part in one]) for part in ("train", "test")]
            rows.append(running.with_minus(f"| {' | '.join(cells)} |"))
    return rows


SHOWN = ((300, 0.1),)
"""Lengths of reviews and starts of the documentation's table."""


def logs(arguments: argparse.Namespace) -> None:
    """Keep what the documentation shows of the authors' runs: before training, after one epoch and after the last."""
    LOGS.unlink(missing_ok=True)
    for recipe in EPOCHS:
        for task in CLASSES if recipe == "experiment2" else ("imdb",):
            for (length, start), found in sorted(authors(recipe, task).items()):
                for one in found:
                    epochs = [one["epochs"][at] for at in ((0, 1, -1) if len(one["epochs"]) > 1 else ())]
                    kept = epochs[-1:] if recipe == "experiment2" else epochs or one["epochs"]
                    kept = [{key: float(f"{epoch[key]:.6g}") for key in KEPT if key in epoch} for epoch in kept]
                    name = {"recipe": recipe, "task": task, "length": length, "start": start}
                    running.add(LOGS, {**name, **one, "epochs": kept})


KEPT = ("spectral_abscissa", "norm_W_B_entrywise", "norm_W_C", "training_loss")


def both(recipe: str, task: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the authors' runs of a recipe on a task, and ours of all arms."""
    theirs, ours = (
        [one for one in running.read(file) if (one["recipe"], one["task"]) == (recipe, task)]
        for file in (LOGS, RESULTS)
    )
    return theirs, ours


def docs_table() -> list[str]:
    """Return the lines of the documentation's table: s_A and norms on reviews after the first epoch and the last, the
    mean and standard deviation of our arms' runs that did not diverge and of the authors'."""
    theirs, ours = both("experiment1", "imdb")
    heads = ("T", "runs of", "number", "diverged", "s_A", "‖W_B‖₁,₁", "‖W_C‖_F", "test accuracy")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cell in SHOWN:
        for arm in (None, *ARMS):
            of_arm = theirs if arm is None else [one for one in ours if one["arm"] == arm]
            runs = [one for one in of_arm if (one["length"], one["start"]) == cell]
            whole = [one for one in runs if "diverged" not in one]
            cells = [str(cell[0]), arm or "*their logs*", str(len(runs)), str(len(runs) - len(whole))]
            cells.append(told([one["epochs"][-1]["spectral_abscissa"] for one in whole]))
            for norm in ("norm_W_B_entrywise", "norm_W_C"):
                ends = (told([one["epochs"][at][norm] for one in whole], 1) for at in (0, -1))
                cells.append(" → ".join(ends))
            cells.append(told([one["test"]["accuracy"] for one in whole if "test" in one]))
            rows.append(running.with_minus(f"| {' | '.join(cells)} |"))
    return rows


SAFE, LOST = 58, 70
"""Logarithms of the first epoch's loss that divide the runs."""


def recovery_table() -> list[str]:
    """Return how many runs on reviews from s_A = 0.1, at all T, end below a loss of 1, by the logarithm of the loss of
    their first epoch; a run without a finite one overflowed."""
    theirs, ours = both("experiment1", "imdb")
    arms = {
        "*their logs*": theirs,
        **{arm: [one for one in ours if one["arm"] == arm] for arm in ("authors", "held", SMALL)},
    }
    rows = [f"| ln of the first loss | {' | '.join(arms)} |", "|---" * (len(arms) + 1) + "|"]
    bounds = {f"to {SAFE}": (-np.inf, SAFE), f"{SAFE} to {LOST}": (SAFE, LOST), f"from {LOST}": (LOST, np.inf)}
    for name, (low, high) in {**bounds, "overflows": (np.inf, np.inf)}.items():
        cells = []
        for runs in arms.values():
            losses = [
                (np.inf, np.inf)
                if "diverged" in one
                else (np.log(one["epochs"][1]["training_loss"]), one["epochs"][-1]["training_loss"])
                for one in runs
                if one["start"] == max(STARTS)
            ]
            chosen = [last for first, last in losses if low <= first < high or first == low == high]
            cells.append(f"{sum(last < 1 for last in chosen)} of {len(chosen)}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


MEASURES: Mapping[str, Callable[[dict[str, Any]], float]] = {
    "s_A": lambda one: one["epochs"][-1]["spectral_abscissa"],
    "‖W_B‖₁,₁": lambda one: one["epochs"][-1]["norm_W_B_entrywise"],
    "‖W_C‖_F": lambda one: one["epochs"][-1]["norm_W_C"],
    "training accuracy": lambda one: one["train"]["accuracy"],
    "test accuracy": lambda one: one["test"]["accuracy"],
}
"""Measures that are compared after the last epoch of Experiment 2."""


def spread_table() -> list[str]:
    """Return at how many T of Experiment 2 the mean of our runs in the arm authors lies within two of the authors'
    standard deviations of their mean, and how many of these differences the verdict rules call different."""
    rows = [f"| | {' | '.join(MEASURES)} | different |", "|---" * (len(MEASURES) + 2) + "|"]
    cells: dict[tuple[str, str], dict[Question, verdicts.Arms]] = {}
    for task in CLASSES:
        theirs, ours = both("experiment2", task)
        ours = [one for one in ours if one["arm"] == "authors"]
        for T in sorted({one["length"] for one in ours} & {one["length"] for one in theirs}):
            for name, value in MEASURES.items():
                arms = _values(ours, T, value), _values(theirs, T, value)
                cells.setdefault((task, name), {})[Question(f"{task}, {name}, T = {T}", 0)] = [arms]
    found = verdicts.verdicts({question: arms for each in cells.values() for question, arms in each.items()})
    differs = {each.question.name for each in found if each.words == "different"}
    for task in CLASSES:
        near, names = [], [question.name for name in MEASURES for question in cells[task, name]]
        for name in MEASURES:
            pairs = [arms[0] for arms in cells[task, name].values()]
            close = [abs(np.mean(one) - np.mean(other)) <= 2 * np.std(other, ddof=1) for one, other in pairs]
            near.append(f"{sum(close)} of {len(close)}")
        rows.append(f"| {task} | {' | '.join(near)} | {len(differs & {*names})} of {len(names)} |")
    return rows


def _values(runs: Sequence[dict[str, Any]], length: int, value: Callable[[dict[str, Any]], float]) -> list[float]:
    """Return a measure of the runs of a length that did not diverge and have it."""
    found = []
    for one in runs:
        if one["length"] == length and "diverged" not in one:
            with suppress(KeyError, IndexError):
                found.append(value(one))
    return found


def tables(arguments: argparse.Namespace) -> None:
    """Print our arms beside the authors' logs."""
    for recipe in EPOCHS:
        for task in CLASSES:
            print(f"{recipe}, {task}", "", *comparison(recipe, task), "", sep="\n")


def main() -> None:
    running.start(running.verbs(__doc__, logs, tables))


if __name__ == "__main__":
    main()
