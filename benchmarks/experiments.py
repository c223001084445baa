"""Experiments 1 and 2 of the generalisation paper on the selective SSM, trained here: does the spectral abscissa fall
when training succeeds, and does the generalisation gap grow with the length of the sequences?

    SSMSCOPE_DATA=… python benchmarks/experiments.py run --out runs/experiments --minutes 20
    SSMSCOPE_DATA=… python benchmarks/experiments.py figure --out runs/experiments --to docs/figures

(Generalization Error Analysis for Selective State-Space Models, section 5 and appendix B.)

`run` trains every run that is not yet there, with `train_model` and the recipes `experiment1` and `experiment2`, on a
CPU with one thread a process. Runs that are finished are left as they are, and no run is begun after the minutes, so
the same line may be given again until nothing is left. A run whose loss is no longer finite keeps what it had until
then in `diverged.json`. `figure` draws experiment1.png and experiment2.png from the finished runs, and prints the
tables that stand in docs/stability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LENGTHS = {"majority": (50, 100, 200, 300, 400, 500), "listops": (100, 200, 300)}
SEEDS = (0, 1, 2, 3, 4)
RECIPES = ("experiment1", "experiment2", "sweep")
START = 0.1
"""s_A at the start of Experiment 1."""
SWEPT = {"majority": 250, "listops": 300}
STARTS = tuple(round(0.02 * step, 2) for step in range(-5, 6))
"""The lengths, and s_A at the start, of Experiment 1's sweep (B.5)."""
DIVERGED = "diverged.json"


class Run(NamedTuple):
    """One training run, and its directory under --out. `start` is s_A at the start, of the sweep alone."""

    recipe: str
    task: str
    length: int
    seed: int
    start: float | None = None

    def directory(self, out: Path) -> Path:
        start = "" if self.start is None else f"-start{self.start:+.2f}"
        return out / self.recipe / f"{self.task}-T{self.length}{start}-seed{self.seed}"


def runs(recipes: tuple[str, ...] = RECIPES) -> list[Run]:
    """All runs, seed by seed: what the minutes cut short has fewer seeds, not fewer lengths."""
    found = [
        Run(recipe, task, length, seed)
        for recipe in recipes
        if recipe != "sweep"
        for seed in SEEDS
        for task, lengths in LENGTHS.items()
        for length in lengths
    ]
    if "sweep" in recipes:
        found += [Run("sweep", task, T, seed, start) for seed in SEEDS for task, T in SWEPT.items() for start in STARTS]
    return found


def record(run: Run, out: Path) -> dict[str, Any] | None:
    """Return the end of a run, `training.json` or `diverged.json`; None if it has not ended."""
    for name in ("training.json", DIVERGED):
        file = run.directory(out) / name
        if file.exists():
            return json.loads(file.read_text(encoding="utf-8"))
    return None


# ---- training


def train(run: Run, out: Path, deadline: float) -> str:
    """Train one run to its end, and print its result."""
    if time.time() > deadline:
        return ""
    from ssmscope.errors import InputError
    from ssmscope.training import train_model
    from ssmscope.training.checkpoint import load_state, write_json

    started = time.time()
    directory = run.directory(out)
    options: dict[str, Any] = dict(length=run.length, seed=run.seed, device="cpu", progress=False)
    if run.start is not None:
        options["spectral_abscissa"] = run.start
    try:
        recipe = "experiment1" if run.recipe == "sweep" else run.recipe
        train_model("selective", run.task, directory, recipe=recipe, **options)
    except InputError as error:
        if not str(error).startswith("the loss is "):
            raise
        state = directory / "checkpoint" / "state.pt"
        history = load_state(state)["history"] if state.exists() else []
        write_json(directory / DIVERGED, {"reason": str(error), "history": history})
    found = record(run, out)
    assert found is not None
    said = found.get("reason") or "train {:.3f}, test {:.3f}".format(*(found[p]["accuracy"] for p in ("train", "test")))
    return f"{directory}: {said} ({time.time() - started:.0f} s)"


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
    os.nice(19)


def run_all(arguments: argparse.Namespace) -> None:
    waiting = [run for run in runs(tuple(arguments.recipes)) if record(run, arguments.out) is None]
    deadline = time.time() + 60 * arguments.minutes
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), _one_thread) as pool:
        for done in as_completed([pool.submit(train, run, arguments.out, deadline) for run in waiting]):
            if done.result():
                print(done.result(), flush=True)
    left = sum(record(run, arguments.out) is None for run in waiting)
    print(f"{len(runs(tuple(arguments.recipes))) - left} runs have ended, {left} are left")


# ---- what came out


def ended(recipe: str, out: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """The records of the runs that have ended, by task and length; the lengths without one are left out."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {task: {} for task in LENGTHS}
    for run in runs((recipe,)):
        one = record(run, out)
        if one is not None:
            found[run.task].setdefault(run.length, []).append({**one, "run": run})
    return found


def losses(one: dict[str, Any]) -> np.ndarray:
    """Mean training loss of every epoch, (epochs,), with the penalty on answers that are all alike."""
    return np.array([epoch["training_loss"] for epoch in one["history"]])


def abscissae(one: dict[str, Any]) -> np.ndarray:
    """s_A at the start and after every epoch of Experiment 1, (1 + epochs,)."""
    return np.array([START, *(epoch["spectral_abscissa"] for epoch in one["history"])])


def fell(one: dict[str, Any], share: float = 0.1) -> bool:
    """Return True if training reduced the loss: the last epoch's is below that share of the first's."""
    loss = losses(one)
    return "reason" not in one and len(loss) > 1 and bool(loss[-1] < share * loss[0])


def mean(values: np.ndarray) -> tuple[float, float, float]:
    """The mean over seeds with the ends of its 95 % bootstrap interval."""
    from ssmscope.core.bootstrap import estimate, resampled_means

    found = estimate(resampled_means(np.asarray(values, dtype=float)[:, None])[:, 0])
    return found.value, found.low, found.high


def growth(one: dict[str, Any], out: Path) -> float:
    """Growth of the fastest-growing state over a whole sequence, a natural logarithm: T times the mean log-gain that
    `stability` measures on four random sequences of T tokens."""
    import ssmscope

    model = ssmscope.load(one["run"].directory(out).absolute())
    (layer,) = ssmscope.stability(model, length=one["run"].length, positions=1)
    return one["run"].length * layer.growth.value


def claim_table(out: Path) -> str:
    """Figure 1's claim: where the loss fell, did s_A, and where it did not, did s_A stay?"""
    headings = ("task", "T", "loss fell", "of these s_A < 0.1", "s_A", "T · growth")
    headings += ("loss stayed", "s_A", "T · growth")
    rows = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for task, lengths in ended("experiment1", out).items():
        for T, found in lengths.items():
            cells = [task, str(T)]
            for group in ([one for one in found if fell(one)], [one for one in found if not fell(one)]):
                ends = [abscissae(one)[-1] for one in group]
                cells.append(f"{len(group)} of {len(found)}")
                cells += [str(sum(end < START for end in ends))] * (len(cells) == 3)
                cells.append(span(ends, 3))
                cells.append(span([growth(one, out) for one in group if "reason" not in one], 1))
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def span(values: list[float], digits: int) -> str:
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values))) if values else ("–", "–")
    return low if low == high else f"{low} to {high}"


def sweep_table(out: Path) -> str:
    """Appendix B.5's question: which starts can be trained from, and where does s_A end?"""
    headings = (
        "task",
        "T",
        "s_A at the start",
        "runs",
        "first loss, median",
        "loss fell",
        "s_A at the end",
        "diverged",
    )
    rows = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for task, T in SWEPT.items():
        for start in STARTS:
            runs_of = [Run("sweep", task, T, seed, start) for seed in SEEDS]
            found = [one for one in (record(run, out) for run in runs_of) if one is not None]
            whole = [one for one in found if "reason" not in one]
            first = f"{np.median([losses(one)[0] for one in whole]):.2g}" if whole else "–"
            cells = [task, str(T), f"{start:.2f}", str(len(found)), first, str(sum(fell(one, 0.9) for one in found))]
            cells.append(span([one["history"][-1]["spectral_abscissa"] for one in whole], 3))
            cells.append(str(len(found) - len(whole)))
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows).replace("-0.", "−0.")


def trained(out: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """The runs of Experiment 2 without those that diverged."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {task: {} for task in LENGTHS}
    for task, lengths in ended("experiment2", out).items():
        for T, records in lengths.items():
            kept = [one for one in records if "reason" not in one]
            if kept:
                found[task][T] = kept
    return found


def measured(found: list[dict[str, Any]], name: str) -> np.ndarray:
    """Training and test accuracy or cross-entropy of every run, (runs, 2)."""
    return np.array([[one[part][name] for part in ("train", "test")] for one in found])


def unseen(one: dict[str, Any], out: Path) -> float:
    """The accuracy on 1,000 unseen sequences of majority, a quarter of whose ones became zeros as in training: the test
    set has none flipped, and so another distribution."""
    import torch

    import ssmscope
    from ssmscope.data.sequences import majority

    run: Run = one["run"]
    fresh, _ = majority(run.length, seed=1000 + run.seed)
    model = ssmscope.load(run.directory(out).absolute())
    with torch.no_grad():
        answers = model.logits(model.encode(ids=fresh.ids.tolist())).argmax(-1)
    return float((answers.numpy() == fresh.labels).mean())


def gap_table(out: Path) -> str:
    """Figure 2 as numbers: accuracies and generalisation gaps by length, then how the gaps change with the length."""
    headings = ("task", "T", "runs", "training accuracy", "test accuracy", "gap in accuracy", "gap in loss")
    headings += ("accuracy, unseen and flipped", "s_A at the end")
    rows = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    slopes = []
    for task, lengths in trained(out).items():
        for T, found in lengths.items():
            accuracy, loss = measured(found, "accuracy"), measured(found, "cross_entropy")
            numbers = (*accuracy.T, accuracy[:, 0] - accuracy[:, 1], loss[:, 1] - loss[:, 0])
            cells = ["{:.3f} ({:.3f} to {:.3f})".format(*mean(values)) for values in numbers]
            fresh = np.array([unseen(one, out) for one in found]) if task == "majority" else np.array([])
            cells.append("{:.3f} ({:.3f} to {:.3f})".format(*mean(fresh)) if len(fresh) else "–")
            cells.append(span([one["history"][-1]["spectral_abscissa"] for one in found], 3))
            rows.append(f"| {task} | {T} | {len(accuracy)} | {' | '.join(cells)} |")
        each = {seed: slope(lengths, seed) for seed in SEEDS}
        whole = np.array([pair for pair in each.values() if pair is not None])
        if len(whole):
            said = ["{:+.3f} ({:+.3f} to {:+.3f})".format(*mean(column)) for column in whole.T]
            slopes.append(f"{task}, per 100 tokens: gap in accuracy {said[0]}, gap in loss {said[1]}")
    return "\n".join(rows + ["", *slopes]).replace("-0.", "−0.")


def slope(lengths: dict[int, list[dict[str, Any]]], seed: int) -> tuple[float, float] | None:
    """Growth of one seed's gaps in accuracy and in loss per 100 tokens: the least-squares line over the lengths; None
    where a length is missing."""
    runs_of = {T: [one for one in found if one["run"].seed == seed] for T, found in lengths.items()}
    if not all(runs_of.values()) or len(runs_of) < 2:
        return None
    gaps = [(measured(found, "accuracy"), measured(found, "cross_entropy")) for found in runs_of.values()]
    T = np.array(list(runs_of)) / 100
    accuracy = np.polyfit(T, [float(a[0, 0] - a[0, 1]) for a, _ in gaps], 1)[0]
    return float(accuracy), float(np.polyfit(T, [float(c[0, 1] - c[0, 0]) for _, c in gaps], 1)[0])


# ---- the figures

INK, SOFT, GRID = "#1b1f24", "#57606a", "#e6e9ed"
TRAINING, TEST = "#2065a8", "#d1540a"
BLUES = ("#a9cfe8", "#6fb0d9", "#4190c8", "#2065a8", "#104a87", "#08306b")


def plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(which="both", colors=SOFT, labelsize=8.5)
    axes.set_axisbelow(True)
    axes.grid(color=GRID)


def heading(figure: Any, title: str, below: str) -> None:
    width, height = figure.get_size_inches()
    figure.text(0.2 / width, 1 - 0.27 / height, title, size=11, color=INK, va="center")
    figure.text(0.2 / width, 1 - 0.52 / height, below, size=8.5, color=SOFT, va="center")


def draw_first(out: Path) -> Any:
    """Training loss and s_A against epochs, a line a run; dashed where the loss did not fall."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    found = ended("experiment1", out)
    figure = Figure(figsize=(9.0, 6.2), facecolor="white")
    number = sum(len(one) for lengths in found.values() for one in lengths.values())
    below = f"selective SSMs of 16 channels and 4 states, {number} runs; dashed: the loss did not fall"
    heading(figure, "Experiment 1: training from an unstable start, s_A = 0.1", below)
    grid = figure.subplots(2, 2, sharex=True, gridspec_kw=dict(left=0.085, right=0.875, bottom=0.08, top=0.855))
    known = sorted({T for lengths in LENGTHS.values() for T in lengths})
    colours = dict(zip(known, BLUES))
    for column, (task, lengths) in enumerate(found.items()):
        upper, lower = grid[:, column]
        for T, records in lengths.items():
            for one in records:
                style = dict(color=colours[T], linewidth=1.3, linestyle="-" if fell(one) else (0, (4, 2)))
                loss, abscissa = losses(one), abscissae(one)
                upper.plot(range(1, len(loss) + 1), loss, **style)
                lower.plot(range(len(abscissa)), abscissa, **style)
        upper.set_yscale("log")
        upper.set_title({"majority": "Majority", "listops": "ListOps"}[task], size=10, color=INK)
        lower.axhline(0, color=SOFT, linewidth=1)
        lower.axhline(START, color=SOFT, linewidth=1, linestyle=":")
        lower.set_xlabel("epoch", color=SOFT, size=9)
    for row, name in enumerate(("training loss", "spectral abscissa s_A")):
        grid[row, 0].set_ylabel(name, color=SOFT, size=9)
    for axes in grid.flat:
        plain(axes)
    low, high = zip(*(axes.get_ylim() for axes in grid[1]))
    for axes in grid[1]:
        axes.set_ylim(min(low), max(high))
    lines = [Line2D([], [], color=colours[T], linewidth=2, label=f"T = {T}") for T in known]
    figure.legend(handles=lines, loc="center left", bbox_to_anchor=(0.885, 0.5), fontsize=8.5, frameon=False)
    return figure


def draw_second(out: Path) -> Any:
    """Training and test accuracy against the length: the mean over seeds with its interval, and every seed."""
    from matplotlib.figure import Figure

    found = trained(out)
    figure = Figure(figsize=(9.0, 3.9), facecolor="white")
    number = sum(len(one) for lengths in found.values() for one in lengths.values())
    below = f"{number} runs of 100 epochs; bars: 95 % bootstrap intervals of the mean over seeds; points: the seeds"
    heading(figure, "Experiment 2: accuracy against length, trained from s_A = 0", below)
    grid = figure.subplots(1, 2, gridspec_kw=dict(left=0.075, right=0.985, bottom=0.13, top=0.77, wspace=0.17))
    for axes, (task, lengths) in zip(grid, found.items()):
        plain(axes)
        if not lengths:
            continue
        for at, (name, colour, marker) in enumerate((("training", TRAINING, "o"), ("test", TEST, "s"))):
            places, means = [], []
            for T, records in lengths.items():
                values = measured(records, "accuracy")[:, at]
                place = T + (2 * at - 1) * max(lengths) / 120  # side by side
                axes.plot([place] * len(values), values, ".", color=colour, alpha=0.35, markersize=6, linewidth=0)
                places.append(place)
                means.append(mean(values))
            value, low, high = np.array(means).T
            bars = dict(color=colour, marker=marker, markersize=4.5, linewidth=1.5, capsize=3)
            axes.errorbar(places, value, yerr=(value - low, high - value), label=name, **bars)
        classes = {"majority": 2, "listops": 10}[task]
        axes.axhline(1 / classes, color=SOFT, linewidth=1, linestyle=":", label="chance")
        axes.set_title({"majority": "Majority", "listops": "ListOps"}[task], size=10, color=INK, loc="left")
        axes.set_xticks(list(lengths))
        axes.set_xlabel("length T in tokens", color=SOFT, size=9)
        axes.set_ylabel("accuracy", color=SOFT, size=9)
        place = dict(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.2)
        axes.legend(fontsize=8.5, frameon=False, **place)
    return figure


def save(figure: Any, path: Path) -> None:
    """Save a PNG of 64 colours, a third of the size of one with all colours."""
    import io

    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def figures(arguments: argparse.Namespace) -> None:
    arguments.to.mkdir(parents=True, exist_ok=True)
    if any(record(run, arguments.out) is not None for run in runs(("sweep",))):
        print(f"sweep\n\n{sweep_table(arguments.out)}\n")
    for name, draw, table in (("experiment1", draw_first, claim_table), ("experiment2", draw_second, gap_table)):
        if not any(ended(name, arguments.out).values()):
            print(f"{name}: no run has ended in {arguments.out}")
            continue
        save(draw(arguments.out), arguments.to / f"{name}.png")
        print(f"{name}\n\n{table(arguments.out)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    training = commands.add_parser("run", help="train what is not yet there")
    training.add_argument("--out", type=Path, required=True, help="a directory for the runs")
    training.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    training.add_argument("--minutes", type=float, default=60, help="after these no run is begun")
    training.add_argument("--processes", type=int, choices=(1, 2), default=1)
    training.set_defaults(act=run_all)
    drawing = commands.add_parser("figure", help="draw both figures and print their tables")
    drawing.add_argument("--out", type=Path, required=True, help="the directory of the runs")
    drawing.add_argument("--to", type=Path, required=True, help="where the figures are written")
    drawing.set_defaults(act=figures)
    arguments = parser.parse_args()
    arguments.act(arguments)


if __name__ == "__main__":
    main()
