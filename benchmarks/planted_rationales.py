"""Explanations of answers whose reason is known: which method finds it? Planted tasks, every architecture, three seeds.

    python benchmarks/planted_rationales.py train --out runs/planted --cores 8
    python benchmarks/planted_rationales.py add runs/texts/planted-recall-baleen-e-true-0.001-warm-*
    python benchmarks/planted_rationales.py table

A model is one `analyze train ARCH --data planted-…` command. Where its test accuracy is at least 0.95, so that the
planted reason is all but surely its own, every method's AUPRC on 200 test texts is measured as `analyze plausibility`
does, for the class that it predicts. What is finished is a line of benchmarks/results/planted-rationales.jsonl. The
first table of AUPRC is over architectures, the mean over seeds of each, with 95 % t intervals; the others are over
seeds, with an interval where there are three. `add` measures models of benchmarks/baleen_texts.py, the Baleen-E whose
gates select, which no mean over architectures has.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import running
from verdicts import Question, verdicts
from verdicts import table as told

RESULTS = Path(__file__).parent / "results" / "planted-rationales.jsonl"
SEEDS = (0, 1, 2)
TASKS = ("planted-words", "planted-recall", "planted-xor", "planted-position")
ARCHITECTURES = (
    *("mamba2", "mamba", "baleen-e", "baleen-b", "diff-mamba", "groupmamba", "gfssm", "gla", "retnet", "deltanet"),
    *("rwkv", "hybrid"),
)
RELATIVES = ("mamba2", "baleen-e", "baleen-b", "diff-mamba", "groupmamba", "gfssm", "hybrid")
FAMILIES = (RELATIVES, *((each,) for each in ARCHITECTURES if each not in RELATIVES))
SOLVED = 0.95
LIMIT = 200
SHOWN_OTHERS = 5
SELECTING = "baleen-e-true-0.001-warm"
"""Baleen-E whose gates select, trained further from Mamba-2's weights."""
SHOWN = ("lrp", "occlusion", "survival", "self-write", "self-retention")
"""Methods of the table of Baleens."""


def train(arguments: argparse.Namespace) -> None:
    """Train and measure the missing runs, seed by seed."""
    done = {(r["task"], r["architecture"], r["seed"]) for r in running.read(RESULTS)}
    jobs = []
    for seed in SEEDS:
        for architecture in ARCHITECTURES:
            for task in TASKS:
                out = arguments.out / f"{task}-{architecture}-{seed}"
                words = ["train", architecture, "--data", task, "--seed", str(seed), "--device", "cpu"]
                written = out / "measured.json"
                jobs.append(
                    running.Job(
                        out.name,
                        [
                            ["-m", "ssmscope", *words, "--out", str(out)],
                            [__file__, "measure", "--out", str(out), "--into", str(written)],
                        ],
                        out.with_suffix(".log"),
                        partial(done.__contains__, (task, architecture, seed)),
                        ended=partial(ended, task, architecture, seed, f"analyze {' '.join(words)}", written),
                    )
                )
    running.run(jobs, [""] * arguments.cores, arguments.minutes)


def ended(task: str, architecture: str, seed: int, command: str, written: Path, seconds: float) -> None:
    record = {"task": task, "architecture": architecture, "seed": seed, "command": command, "seconds": round(seconds)}
    running.add(RESULTS, {**record, **json.loads(written.read_text())})


def measure(arguments: argparse.Namespace) -> None:
    """AUPRC of every method, or why it refuses the model."""
    from ssmscope.interp.methods import METHODS

    arguments.into.write_text(json.dumps(found_of(arguments.out, tuple(METHODS))))


def add(arguments: argparse.Namespace) -> None:
    """Measure trained models by the methods of the table of Baleens, and add their lines."""
    done = {(r["task"], r["architecture"], r["seed"]) for r in running.read(RESULTS)}
    for model in arguments.models:
        task = next(task for task in TASKS if model.name.startswith(f"{task}-"))
        architecture, _, seed = model.name.removeprefix(f"{task}-").rpartition("-")
        if (task, architecture, int(seed)) not in done:
            record = json.loads((model / "training.json").read_text())
            kept = {"task": task, "architecture": architecture, "seed": int(seed), "command": record["command"]}
            running.add(RESULTS, {**kept, **found_of(model, SHOWN)})


def found_of(out: Path, methods: Sequence[str]) -> dict[str, Any]:
    """Return what a trained model's line has: accuracies, the variation of Δ, and the AUPRC of methods."""
    import ssmscope
    from ssmscope.data.text import load_text
    from ssmscope.errors import InputError

    record = json.loads((out / "training.json").read_text())
    found = {
        "parameters": record["parameters"],
        "epochs": record["epochs_run"],
        "validation": record["validation"]["accuracy"],
        "test": record["test"]["accuracy"],
        "selectivity": record["selectivity"]["layers"],
        "versions": record["versions"],
        "auprc": {},
        "refused": {},
    }
    model, data = ssmscope.load(out.absolute()), load_text(record["data"]["test"]["name"], "test")
    for method in methods if found["test"] >= SOLVED else ():
        try:
            measured = ssmscope.plausibility(model, data, methods=(method,), limit=LIMIT)
        except InputError as error:
            found["refused"][method] = str(error)
            continue
        found["auprc"][method], found["chance"] = measured.estimates[2].value, measured.chance
    return found


def table(arguments: argparse.Namespace) -> None:
    """Accuracies; the AUPRC of every method by task, over architectures; and by architecture, over seeds."""
    records = running.read(RESULTS)
    print("| test accuracy | seeds | " + " | ".join(TASKS) + " |\n|---|---|" + "---|" * len(TASKS))
    for architecture in ARCHITECTURES:
        of = [[r["test"] for r in records if (r["task"], r["architecture"]) == (t, architecture)] for t in TASKS]
        cells = (f"{min(values):.3f} – {max(values):.3f}" if values else "" for values in of)
        print(f"| {architecture} | {', '.join(str(len(v)) for v in of)} | {' | '.join(cells)} |")
    methods = sorted({method for r in solved() for method in r["auprc"]})
    print("", *reasons_table(), sep="\n")
    for task in TASKS:
        names = [a for a in ARCHITECTURES if found(methods[0], task, a)]
        print(f"\n| {task} | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
        for method in methods:
            cells = [
                running.told(v) if len(v := found(method, task, a)) > 2 else f"{statistics.mean(v):.3f}" for a in names
            ]
            print(f"| {method} | " + " | ".join(cells) + " |")


@cache
def solved() -> list[dict[str, Any]]:
    """Return the records of models that solve their task."""
    return [r for r in running.read(RESULTS) if r["auprc"] and r["architecture"] in ARCHITECTURES]


def found(method: str, task: str, architecture: str) -> list[float]:
    """Return a method's AUPRC on the models of an architecture that solve a task."""
    of = (r for r in solved() if (r["task"], r["architecture"]) == (task, architecture))
    return [r["auprc"][method] for r in of if method in r["auprc"]]


def reasons_table() -> list[str]:
    """Return the lines of the documentation's table of methods: AUPRC by task, the mean over seeds, then over
    architectures with its 95 % t interval; Mamba-2 and its relatives are one, their mean. The highest is bold."""
    methods = {method for r in solved() for method in r["auprc"]} - {"random"}
    values = {(method, task): by_family(method, task) for method in methods for task in TASKS}
    means = {at: statistics.mean(each) for at, each in values.items()}
    best = {max(methods, key=lambda method, task=task: means[method, task]) + task for task in TASKS}
    lines = ["| | words | recall | xor | position |", "|---" * 5 + "|"]
    for method in sorted(methods, key=lambda method: -sum(means[method, task] for task in TASKS)):
        cells = [running.told(values[method, task]).replace("0.", ".") for task in TASKS]
        cells = [f"**{cell}**" if method + task in best else cell for cell, task in zip(cells, TASKS)]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    chance = (statistics.mean(r["chance"] for r in solved() if r["task"] == task) for task in TASKS)
    cells = [f"{value:.3f}".removeprefix("0") for value in chance]
    return [*lines, f"| random, expected | {' | '.join(cells)} |"]


def by_family(method: str, task: str) -> list[float]:
    """Return a method's AUPRC on a task, the mean over seeds, then over a family's architectures, by family."""
    means = ([statistics.mean(v) for a in family if (v := found(method, task, a))] for family in FAMILIES)
    return [statistics.mean(each) for each in means if each]


def verdict_table() -> list[str]:
    """Return the lines of the documentation's table: what the tasks that all families solve, as one question, say of
    LRP less another method, all of which are one family; the best others are shown."""
    tasks = [task for task in TASKS if len(by_family("lrp", task)) == len(FAMILIES)]
    methods = {method for r in solved() for method in r["auprc"]} - {"random", "lrp"}
    family = {}
    for method in sorted(methods, key=lambda method: -sum(statistics.mean(by_family(method, task)) for task in tasks)):
        pairs = [zip(by_family("lrp", task), by_family(method, task), strict=True) for task in tasks]
        differences = [[one - other for one, other in each] for each in pairs]
        family[Question(f"`lrp` less `{method}`", 0.05)] = [(each, [0.0] * len(each)) for each in differences]
    return told(verdicts(family)[:SHOWN_OTHERS])


def docs_table() -> list[str]:
    """Return the lines of the documentation's table of Baleens: AUPRC over seeds on the tasks of which `SELECTING` has
    all, by method."""
    scores = {(r["task"], r["architecture"], r["seed"]): r["auprc"] for r in running.read(RESULTS)}
    names = {"mamba2": "Mamba-2", SELECTING: "Baleen-E, β = .001", "baleen-b": "Baleen-B, β = .01"}
    tasks = [task for task in TASKS if all((task, SELECTING, seed) in scores for seed in SEEDS)]
    arms = {
        arm: [
            {
                f"{task.removeprefix('planted-')}, `{method}`": scores[task, arm, seed][method]
                for task in tasks
                for method in SHOWN
                if method != "occlusion"
            }
            for seed in SEEDS
        ]
        for arm in names
    }
    return running.arms_table(arms, names)


def main() -> None:
    verbs = running.verbs(__doc__, train, measure, add, table)
    verbs["add"].add_argument("models", nargs="+", type=Path)
    verbs["train"].add_argument("--cores", type=int, default=1, help="runs at a time, one core each")
    running.start(verbs)


if __name__ == "__main__":
    main()
