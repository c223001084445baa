"""MAD's fuzzy and noisy recall with its authors' objective, every next token in training (Poli et al. 2024), and their
grid of learning rates and weight decays.

    python benchmarks/mad_every_token.py train --out runs/mad --gpus 0 --each 6 --seeds 15 --minutes 25
    python benchmarks/mad_every_token.py table

Differential Mamba (appendix A.3) compares with Mamba-2 on these tasks. Every run is one `analyze train` command. What
came out is a line of benchmarks/results/mad-every-token.jsonl; a run that has one is left out.

The rule, declared before any run: for each model and task the grid is run with seeds 0 and 1. The setting with the best
validation accuracy, the mean over these two seeds, is then run with new seeds, from 10 on, and only these are compared.
Validation examples are a tenth of the training set, held out of training, and ask for the values alone, as the test
does; the test is not looked at before. The grid's own runs are not part of a comparison. Six at a time, a run took 21
to 35 seconds of an H200; 12 or 16 at a time, which NVIDIA's MPS runs side by side, 16 to 51.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path

import running
from verdicts import Question, verdicts
from verdicts import table as told

TASKS = ("fuzzy-recall", "noisy-recall")
MODELS = {
    "mamba2": "mamba2",
    "diff-mamba": "diff-mamba",
    "groupmamba": "groupmamba --set k=2",
    "gfssm": "gfssm --set state_groups=2 --set fir_taps=4",
    "diff-s6": "diff-mamba --set scope=s6",
}
STAGES = (("mamba2", "diff-mamba"), ("groupmamba", "gfssm", "diff-s6"))
"""Models whose grid and new seeds are run before the next ones'."""
RATES, DECAYS, GRID_SEEDS, FIRST, SEEDS = ("1e-4", "5e-4", "1e-3"), ("0", "0.1"), (0, 1), 10, 16
SIZES = "--set every_token=true --set layers=4 --set width=128 --epochs 30 --set batch_size=128"
RESULTS = Path(__file__).parent / "results" / "mad-every-token.jsonl"

Setting = tuple[str, str]
"""Learning rate and weight decay."""


def grid() -> list[Setting]:
    return list(product(RATES, DECAYS))


def name(task: str, model: str, setting: Setting, seed: int) -> str:
    return f"{task}-{model}-lr{setting[0]}-wd{setting[1]}-{seed}"


def validated(found: dict[str, dict], task: str, model: str) -> dict[Setting, list[float]]:
    """Return the grid's validation accuracies by setting, where both seeds have run."""
    runs = {each: [found.get(name(task, model, each, seed)) for seed in GRID_SEEDS] for each in grid()}
    return {each: [one["validation"] for one in ones if one] for each, ones in runs.items() if None not in ones}


def best(found: dict[str, dict], task: str, model: str) -> Setting | None:
    """Return the setting with the best mean validation accuracy, None until the whole grid has run."""
    scores = validated(found, task, model)
    return max(scores, key=lambda each: statistics.mean(scores[each])) if len(scores) == len(grid()) else None


def train(arguments: argparse.Namespace) -> None:
    """Train what has no line yet, stage by stage: the grid, then new seeds of the setting that it chose."""
    deadline = time.monotonic() + 60 * arguments.minutes
    for models in STAGES:
        both = list(product(TASKS, models))
        wanted = [(*each, setting, seed) for each in both for seed in GRID_SEEDS for setting in grid()]
        _run(wanted, arguments, deadline)
        found = results()
        chosen = {each: setting for each in both if (setting := best(found, *each)) is not None}
        seeds = range(FIRST, FIRST + arguments.seeds)
        _run([(*each, chosen[each], seed) for seed in seeds for each in chosen], arguments, deadline)


def _run(wanted: list[tuple[str, str, Setting, int]], arguments: argparse.Namespace, deadline: float) -> None:
    known, jobs = set(results()), []
    for task, model, setting, seed in wanted:
        run = name(task, model, setting, seed)
        options = f"--set learning_rate={setting[0]} --set weight_decay={setting[1]} --seed {seed}"
        fused = " --compile" if arguments.gpus else ""
        out = arguments.out / run
        command = f"train {MODELS[model]} --data {task} {SIZES} {options}{fused}{arguments.extra}"
        words = ["-m", "ssmscope", *shlex.split(command), "--out", str(out)]
        done, ended = partial(known.__contains__, run), partial(_keep, run, out, arguments.each)
        jobs.append(running.Job(run, [words], arguments.out / f"{run}.log", done, ended=ended))
    running.run(jobs, arguments.gpus.split(",") * arguments.each, (deadline - time.monotonic()) / 60)


def _keep(run: str, out: Path, at_once: int, seconds: float) -> None:
    found = json.loads((out / "training.json").read_text())
    kept = {"run": run, "command": found["command"].rpartition(" --out ")[0], "seconds": round(seconds)}
    kept |= {"at_once": at_once}
    kept |= {"torch": found["versions"]["torch"], "parameters": found["parameters"], "best_epoch": found["best_epoch"]}
    kept |= {"validation": found["validation"]["accuracy"]}
    kept |= {field: found["test"][field] for field in ("accuracy", "interval", "cross_entropy")}
    running.add(RESULTS, kept)


def results() -> dict[str, dict]:
    return {each["run"]: each for each in running.read(RESULTS)}


def table(arguments: argparse.Namespace) -> None:
    """Print the grid's validation accuracies and the new seeds' test accuracies."""
    print(*grid_table(), "", *seed_table(), "", *verdict_table(), "", *later_verdicts(), sep="\n")


def grid_table() -> list[str]:
    """Validation accuracy of both seeds by setting; the chosen one is bold."""
    found = results()
    heads = [f"{rate}, {decay}" for rate, decay in grid()]
    rows = [f"| task | model | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for task, model in product(TASKS, MODELS):
        scores, chosen = validated(found, task, model), best(found, task, model)
        cells = [" ".join(f"{score:.3f}" for score in scores.get(each, [])) for each in grid()]
        cells = [f"**{cell}**" if each == chosen else cell for each, cell in zip(grid(), cells)]
        if scores:
            rows.append(f"| {task} | {model} | {' | '.join(cells)} |")
    return rows


def seed_table() -> list[str]:
    """Test accuracy of the chosen setting's new seeds: the mean, the standard deviation and every seed."""
    found = results()
    rows = ["| task | model | setting | seeds | mean | sd | each |", "|---|---|---|---|---|---|---|"]
    for task, model in product(TASKS, MODELS):
        if (chosen := best(found, task, model)) is None:
            continue
        each_value = values(task, model)
        if len(each_value) > 1:
            shown = f"{statistics.mean(each_value):.3f} | {statistics.stdev(each_value):.3f}"
            each = " ".join(f"{value:.3f}" for value in each_value)
            rows.append(f"| {task} | {model} | {', '.join(chosen)} | {len(each_value)} | {shown} | {each} |")
    return rows


PAPER = {"fuzzy-recall": 0.8, "noisy-recall": 0.0}
"""The paper's gain of Diff-Mamba as a share of Mamba's accuracy (Figure 5)."""
MARGIN = 0.05


def verdict_table() -> list[str]:
    """Return the lines of the documentation's table: what the new seeds say of Diff-Mamba less Mamba-2."""
    family = {}
    for task in TASKS:
        base, other = (values(task, model) for model in ("mamba2", "diff-mamba"))
        family[Question(task, MARGIN, PAPER[task] * statistics.mean(base))] = [(other, base)]
    return told(verdicts(family))


def later_verdicts() -> list[str]:
    """Return what the new seeds say of the second stage's models less Mamba-2, as one family."""
    return told(
        verdicts(
            {
                Question(f"{task}, {model}", MARGIN): [(found, values(task, "mamba2"))]
                for task, model in product(TASKS, STAGES[1])
                if len(found := values(task, model)) > 1
            }
        )
    )


def missing(task: str, model: str) -> int:
    """Return how many of the new seeds have not run."""
    return max(0, SEEDS - len(values(task, model)))


def values(task: str, model: str) -> list[float]:
    """Return the test accuracies of the new seeds of the setting that the grid chose, in the order of the seeds."""
    found = results()
    if (chosen := best(found, task, model)) is None:
        return []
    run = name(task, model, chosen, FIRST).rpartition("-")[0]
    seeds = {int(each.rpartition("-")[2]): one for each, one in found.items() if each.rpartition("-")[0] == run}
    return [seeds[seed]["accuracy"] for seed in sorted(seeds) if seed >= FIRST]


def main() -> None:
    found = running.verbs(__doc__, train, table)
    found["train"].add_argument("--gpus", default="0", help="numbers, with commas between them; empty for the CPU")
    found["train"].add_argument("--each", type=int, default=6, help="runs at a time on a GPU")
    found["train"].add_argument("--seeds", type=int, default=SEEDS, help="new seeds of every model")
    found["train"].add_argument("--extra", default="", help="further options of every run, to try the script")
    running.start(found)


if __name__ == "__main__":
    main()
