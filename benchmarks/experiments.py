"""Experiments 1 and 2 of the generalisation paper on the selective SSM, trained here: does the spectral abscissa fall
when training succeeds, and does the generalisation gap grow with the length of the sequences?

    SSMSCOPE_DATA=… python benchmarks/experiments.py train --out runs/experiments --cores 2 --minutes 20
    SSMSCOPE_DATA=… python benchmarks/experiments.py figure --to docs/figures

(Generalization Error Analysis for Selective State-Space Models, section 5 and appendix B.)

`train` does every run that has no line in benchmarks/results/experiments.jsonl yet, on a CPU with one core each, with
the recipes `experiment1` and `experiment2`; on IMDb Experiment 2 has 20 epochs instead of 100. A run whose loss is no
longer finite keeps what it had until then. `figure` draws experiment1.png and experiment2.png from these lines;
`tables` prints the tables of docs/stability.md.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import running

RESULTS = Path(__file__).parent / "results" / "experiments.jsonl"
LENGTHS = {
    "majority": (50, 100, 200, 300, 400, 500),
    "imdb": (100, 200, 300, 350, 400, 500),
    "listops": tuple(range(100, 1001, 100)),
}
TITLES = {"majority": "Majority", "imdb": "IMDb", "listops": "ListOps"}
CLASSES = {"majority": 2, "imdb": 2, "listops": 10}
SEEDS = (0, 1, 2, 3, 4)
RECIPES = ("experiment1", "experiment2", "sweep")
START = 0.1
"""s_A at the start of Experiment 1."""
SWEPT = {"majority": 250, "imdb": 500, "listops": 300}
STARTS = tuple(round(0.02 * step, 2) for step in range(-5, 6))
"""The lengths, and s_A at the start, of Experiment 1's sweep (B.5)."""
MEASURES = ("accuracy", "cross_entropy")
EPOCHS = {("experiment2", "imdb"): 20}
"""Epochs of a recipe on a task, where they are fewer than the paper's."""


class Run(NamedTuple):
    """One training run. `start` is s_A at the start, of the sweep alone."""

    recipe: str
    task: str
    length: int
    seed: int
    start: float | None = None

    @property
    def name(self) -> str:
        start = "" if self.start is None else f"-start{self.start:+.2f}"
        return f"{self.recipe}-{self.task}-T{self.length}{start}-seed{self.seed}"


def runs(recipes: tuple[str, ...] = RECIPES) -> list[Run]:
    """All runs, seed by seed: what the minutes cut short has fewer seeds, not fewer lengths."""
    found = [
        Run(recipe, task, length, seed)
        for seed in SEEDS
        for recipe in recipes
        if recipe != "sweep"
        for task, lengths in LENGTHS.items()
        for length in lengths
    ]
    if "sweep" in recipes:
        found += [Run("sweep", task, T, seed, start) for seed in SEEDS for task, T in SWEPT.items() for start in STARTS]
    return found


def records(recipe: str) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Return what the runs of a recipe ended with, by task and length; the lengths without one are left out."""
    kept = {each["run"]: each for each in running.read(RESULTS)}
    found: dict[str, dict[int, list[dict[str, Any]]]] = {task: {} for task in LENGTHS}
    for run in runs((recipe,)):
        if run.name in kept:
            found[run.task].setdefault(run.length, []).append({**kept[run.name], "seed": run.seed, "start": run.start})
    return found


# ---- training


def train(arguments: argparse.Namespace) -> None:
    """Train what has no line yet."""
    done, jobs = {each["run"] for each in running.read(RESULTS)}, []
    for number, run in enumerate(runs()):
        if run.recipe in arguments.recipes and run.task in arguments.tasks:
            into = arguments.out / f"{run.name}.json"
            words = [__file__, "measure", "--number", str(number), "--out", str(arguments.out / run.name)]
            ended = partial(_keep, run, into)
            log = into.with_suffix(".log")
            jobs.append(
                running.Job(
                    run.name, [[*words, "--into", str(into)]], log, partial(done.__contains__, run.name), ended=ended
                )
            )
    running.run(jobs, [""] * arguments.cores, arguments.minutes)


def _keep(run: Run, into: Path, seconds: float) -> None:
    running.add(RESULTS, {"run": run.name, "seconds": round(seconds), **json.loads(into.read_text())})


def measure(arguments: argparse.Namespace) -> None:
    """Train the run of this number to its end, and write what came out."""
    from ssmscope.api.checkpoint import load_state
    from ssmscope.errors import InputError
    from ssmscope.zoo.training import train_model

    run = runs()[arguments.number]
    options: dict[str, Any] = {"seed": run.seed, "device": "cpu", "progress": False}
    options["max_length" if run.task == "imdb" else "length"] = run.length
    if run.start is not None:
        options["spectral_abscissa"] = run.start
    if (run.recipe, run.task) in EPOCHS:
        options["epochs"] = EPOCHS[run.recipe, run.task]
    try:
        recipe = "experiment1" if run.recipe == "sweep" else run.recipe
        train_model("selective", run.task, arguments.out, recipe=recipe, **options)
    except InputError as error:
        if not str(error).startswith("the loss is "):
            raise
        state = arguments.out / "checkpoint" / "state.pt"
        found: dict[str, Any] = {
            "diverged": str(error),
            "epochs": _told(load_state(state)["history"] if state.exists() else []),
        }
    else:
        record = json.loads((arguments.out / "training.json").read_text())
        found = {"epochs": _told(record["history"])}
        found |= {
            part: {name: record[part][name] for name in MEASURES} for part in ("train", "test") if record.get(part)
        }
        if run.recipe == "experiment1":
            found["growth"] = growth(run, arguments.out)
        if run.recipe == "experiment2" and run.task == "majority":
            found["unseen"] = unseen(run, arguments.out)
        if run.recipe == "experiment2":
            found["epochs"] = found["epochs"][-1:]
            if "train" not in found:
                found["train"] = score(run, arguments.out, "train")
    arguments.into.write_text(json.dumps(found))


def _told(history: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the mean training loss of every epoch, with the penalty on answers that are all alike, and the weights'
    norms after it."""
    wanted = [name for name in NORMS if name in history[0]] if history else []
    return [{name: float(f"{epoch[name]:.6g}") for name in wanted} for epoch in history]


def growth(run: Run, directory: Path) -> float:
    """Growth of the fastest growing state over a whole sequence, a natural logarithm: T times the mean log-gain that
    `stability` measures on four random sequences of T tokens."""
    import ssmscope

    (layer,) = ssmscope.stability(ssmscope.load(directory.absolute()), length=run.length, positions=1)
    return run.length * layer.growth.value


def score(run: Run, directory: Path, split: str) -> dict[str, float]:
    """Accuracy and cross-entropy on a split of labelled texts, cut as in training, which scores its own split only
    where it holds no part of it out."""
    import torch
    import ssmscope
    from ssmscope.core.batching import by_length, tokens_at_once
    from ssmscope.data.text import load_text
    from ssmscope.zoo.training.batches import encode

    model, data = ssmscope.load(directory.absolute()), load_text(run.task, split)
    ids, labels = encode(data, model.tokenizer, run.length), torch.as_tensor(data.labels)
    right, loss = 0, 0.0
    for rows in by_length([len(row) for row in ids], tokens_at_once(model.device)):
        with torch.no_grad():
            logits = model.logits(model.encode(ids=[ids[row] for row in rows]))
        right += int((logits.argmax(-1) == labels[rows]).sum())
        loss += float(torch.nn.functional.cross_entropy(logits, labels[rows], reduction="sum"))
    return dict(zip(MEASURES, (right / len(ids), loss / len(ids))))


def unseen(run: Run, directory: Path) -> float:
    """The accuracy on 1,000 unseen sequences of majority, a quarter of whose ones became zeros as in training: the test
    set has none flipped, and so another distribution."""
    import torch
    import ssmscope
    from ssmscope.zoo.sequences import majority

    fresh, _ = majority(run.length, seed=1000 + run.seed)
    model = ssmscope.load(directory.absolute())
    with torch.no_grad():
        answers = model.logits(model.encode(ids=fresh.ids.tolist())).argmax(-1)
    return float((answers.numpy() == fresh.labels).mean())


# ---- what came out


def losses(one: dict[str, Any]) -> np.ndarray:
    """(epochs,) training losses."""
    return np.array([epoch["training_loss"] for epoch in one["epochs"]])


def abscissae(one: dict[str, Any]) -> np.ndarray:
    """(1 + epochs,) s_A at the start and after every epoch of Experiment 1."""
    return np.array([START, *(epoch["spectral_abscissa"] for epoch in one["epochs"])])


def fell(one: dict[str, Any], share: float = 0.1) -> bool:
    """Whether training reduced the loss: the last epoch's is below that share of the first's."""
    loss = losses(one)
    return "diverged" not in one and len(loss) > 1 and bool(loss[-1] < share * loss[0])


def mean(values: np.ndarray) -> tuple[float, float, float]:
    """The mean over seeds with the ends of its 95 % bootstrap interval."""
    from ssmscope.core.bootstrap import estimate, resampled_means

    found = estimate(resampled_means(np.asarray(values, dtype=float)[:, None])[:, 0])
    return found.value, found.low, found.high


def claim_table() -> list[str]:
    """Figure 1's claim: where the loss fell, did s_A? Neighbouring T of which the loss fell in as large a share of the
    runs are one row."""
    rows = ["| task | T | loss fell | of these s_A < 0.1 | s_A at the end | T · growth |", "|---" * 6 + "|"]
    for task, lengths in records("experiment1").items():
        shares = groupby(lengths.items(), key=lambda item: sum(map(fell, item[1])) / len(item[1]))
        for _, group in shares:
            items = list(group)
            every = [one for _, found in items for one in found]
            fallen = [one for one in every if fell(one)]
            ends = [abscissae(one)[-1] for one in fallen]
            cells = [task, span([T for T, _ in items], 0), f"{len(fallen)} of {len(every)}"]
            cells += [str(sum(end < START for end in ends)), span(ends, 3), span([one["growth"] for one in fallen], 1)]
            rows.append(running.with_minus(f"| {' | '.join(cells)} |"))
    return rows


def span(values: list[float], digits: int) -> str:
    low, high = (f"{end:,.{digits}f}" for end in (min(values), max(values))) if values else ("–", "–")
    return low if low == high else f"{low} to {high}"


def sweep_table() -> list[str]:
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
    for task, lengths in records("sweep").items():
        for T, every in lengths.items():
            for start in STARTS:
                found = [one for one in every if one["start"] == start]
                whole = [one for one in found if "diverged" not in one]
                first = f"{np.median([losses(one)[0] for one in whole]):.2g}" if whole else "–"
                cells = [task, str(T), f"{start:.2f}", str(len(found)), first]
                cells += [str(sum(fell(one, 0.9) for one in found))]
                cells += [span([abscissae(one)[-1] for one in whole], 3), str(len(found) - len(whole))]
                rows.append(running.with_minus(f"| {' | '.join(cells)} |"))
    return rows


NORMS = {
    "spectral_abscissa": "s_A",
    "norm_p": "abs(p)",
    "norm_q": "‖q‖₂",
    "norm_W_B": "‖W_B‖₂",
    "norm_W_B_entrywise": "‖W_B‖₁,₁",
    "norm_W_C": "‖W_C‖₂",
    "norm_W_C_entrywise": "‖W_C‖₁,₁",
    "norm_A": "max abs(A)",
    "norm_u": "max ‖u‖₂",
    "training_loss": "loss",
}
"""Columns of the paper's Table 3 by their names in a run's history."""


def trained() -> dict[str, dict[int, list[dict[str, Any]]]]:
    """The runs of Experiment 2 without those that diverged."""
    return {
        task: {T: kept for T, found in lengths.items() if (kept := [one for one in found if "diverged" not in one])}
        for task, lengths in records("experiment2").items()
    }


def measured(found: list[dict[str, Any]], name: str) -> np.ndarray:
    """(runs, 2): training and test accuracy or cross-entropy of every run."""
    return np.array([[one[part][name] for part in ("train", "test")] for one in found])


def gap_table() -> list[str]:
    """Figure 2 as numbers: accuracies and generalisation gaps by length."""
    headings = ("task", "T", "runs", "training accuracy", "test accuracy", "gap in accuracy", "gap in loss")
    headings += ("accuracy, unseen and flipped", "s_A at the end")
    rows = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for task, lengths in trained().items():
        for T, found in lengths.items():
            accuracy, loss = measured(found, "accuracy"), measured(found, "cross_entropy")
            numbers = (*accuracy.T, accuracy[:, 0] - accuracy[:, 1], loss[:, 1] - loss[:, 0])
            cells = ["{:.3f} ({:.3f} to {:.3f})".format(*mean(values)) for values in numbers]
            fresh = np.array([one["unseen"] for one in found if "unseen" in one])
            cells.append("{:.3f} ({:.3f} to {:.3f})".format(*mean(fresh)) if len(fresh) else "–")
            cells.append(span([one["epochs"][-1]["spectral_abscissa"] for one in found], 3))
            rows.append(running.with_minus(f"| {task} | {T} | {len(accuracy)} | {' | '.join(cells)} |"))
    return rows


def slope_table() -> list[str]:
    """Figure 2's claim: the change of the gaps per 100 tokens, the mean over seeds with its 95 % t interval."""
    rows = ["| task | gap in accuracy | gap in loss |", "|---|---|---|"]
    for task, lengths in trained().items():
        pairs = [pair for seed in SEEDS if (pair := slope(lengths, seed)) is not None]
        if pairs:
            cells = " | ".join(running.told(column) for column in zip(*pairs))
            rows.append(running.with_minus(f"| {task} | {cells} |"))
    return rows


def slope(lengths: dict[int, list[dict[str, Any]]], seed: int) -> tuple[float, float] | None:
    """Growth of one seed's gaps in accuracy and in loss per 100 tokens, by a least-squares line over the lengths; None
    where a length is missing."""
    runs_of = {T: [one for one in found if one["seed"] == seed] for T, found in lengths.items()}
    if not all(runs_of.values()) or len(runs_of) < 2:
        return None
    gaps = [(measured(found, "accuracy"), measured(found, "cross_entropy")) for found in runs_of.values()]
    T = np.array(list(runs_of)) / 100
    accuracy = np.polyfit(T, [float(a[0, 0] - a[0, 1]) for a, _ in gaps], 1)[0]
    return float(accuracy), float(np.polyfit(T, [float(c[0, 1] - c[0, 0]) for _, c in gaps], 1)[0])


def figure(arguments: argparse.Namespace) -> None:
    """Draw the figures."""
    import experiment_figures

    experiment_figures.draw(arguments.to)


def tables(arguments: argparse.Namespace) -> None:
    """Print the tables of the documentation."""
    for table in (claim_table, sweep_table, gap_table, slope_table):
        print(table.__doc__, *table(), sep="\n", end="\n\n")


def main() -> None:
    found = running.verbs(__doc__, train, measure, figure, tables)
    found["train"].add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    found["train"].add_argument("--tasks", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    found["train"].add_argument("--cores", type=int, default=1, help="runs at a time, one core each")
    found["measure"].add_argument("--number", type=int, required=True, help="the run's place in `runs()`")
    found["figure"].add_argument("--to", type=Path, required=True, help="where the figures are written")
    running.start(found)


if __name__ == "__main__":
    main()
