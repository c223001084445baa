"""The reference runs behind the shipped CIFAR-10, instruct and babi models and the tables in docs/: their training and
their results.

    python benchmarks/reference.py train mad books instruct --out runs/reference --gpus 0,1,2,3 --minutes 10
    python benchmarks/reference.py table
    python benchmarks/reference.py position --out runs/reference --limit 2000
    python benchmarks/reference.py prompts --out runs/reference --cores 2

Every run is one `analyze train` command, printed as it starts. What came out is a line of
benchmarks/results/reference.jsonl, from which docs/ has its tables; a run that has one is left out. Runs are divided
among the GPUs, two (--each) at a time on each (with --gpus '' as many at a time on the CPU, where cifar10 takes days).
What the minutes cut short goes on the next time, so the first line may be given again until nothing is left. A run that
starts from another one's weights waits for that one.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import running
import verdicts

CIFAR = ("mamba2", "baleen-e", "baleen-b", "mamba", "gla", "rwkv")
COMPARED = ("mamba2", "diff-mamba")
QUESTIONED = {"mamba2": "mamba2", "hybrid": "diff-mamba --set differential_layers=hybrid", "diff-mamba": "diff-mamba"}
ABLATED = {
    "diff-s6": "diff-mamba --set scope=s6",
    "diff-mamba-hybrid": "diff-mamba --set differential_layers=hybrid",
    "diff-mamba-without-norm": "diff-mamba --set normalize=false",
    "diff-mamba-scalar": "diff-mamba --set lambda_form=scalar",
    "diff-s6-without-norm": "diff-mamba --set scope=s6 --set normalize=false",
    "diff-s6-scalar": "diff-mamba --set scope=s6 --set lambda_form=scalar",
    "diff-s6-scalar-without-norm": "diff-mamba --set scope=s6 --set lambda_form=scalar --set normalize=false",
    "diff-mamba-scalar-without-norm": "diff-mamba --set lambda_form=scalar --set normalize=false",
    "diff-mamba-exponential": "diff-mamba --set lambda_form=exponential",
}
"""Differential Mamba's Table 2."""
MAD = {
    **{name: name for name in COMPARED},
    **ABLATED,
    "gfssm": "gfssm --set state_groups=2 --set fir_taps=4",
    "gfssm-one-group": "gfssm --set state_groups=1 --set fir_taps=4",
    "gfssm-without-filter": "gfssm --set state_groups=2 --set fir_taps=1",
    "gfssm-without-sink": "gfssm --set state_groups=2 --set fir_taps=4 --set prompt=false",
    **{f"groupmamba-k{k}": f"groupmamba --set k={k}" for k in (2, 4)},
    **{f"groupmamba-k{k}-averaged": f"groupmamba --set k={k} --set cross_attention=false" for k in (2, 4)},
}
GROUPED = {"mamba2": "mamba2", **{name: model for name, model in MAD.items() if name.startswith("groupmamba")}}
"""GroupMamba's Tables 3 and 4: k by cross-attention, beside the base."""
BOOKS = {**QUESTIONED, **GROUPED}
"""Differential Mamba's Figures 3 and 7, and GroupMamba's k."""
TASKS = ("fuzzy-recall", "compression", "associative-recall", "noisy-recall", "selective-copying", "memorization")
"""MAD's; what is ablated is trained on the first two."""
LOSS = "--data books --length 4096 --device auto"
"""The loss by position in windows of eight times the rows that were trained on."""
SEEDS = (0, 1, 2)
RESULTS = Path(__file__).parent / "results" / "reference.jsonl"
PROMPTS = RESULTS.with_name("prompts.jsonl")
ATTACKS = ("stresstest", "checklist", "deepwordbug", "textbugger")
"""Those of Baleen's Table 4."""
WAYS = {"ours": "", "promptbench": " --as-promptbench"}
PROMPTED = {"mamba2": "mamba2", "baleen-e": "baleen-e --set beta=0.005", "baleen-b": "baleen-b --set beta=0.01"}
"""Trained further from one Mamba-2 for as long."""
BASE = "instruct-base-"


def runs(sets: list[str], compiled: bool, out: Path) -> dict[str, str]:
    """The commands by the name of their directory."""
    fused = " --compile" if compiled else ""
    found = {}
    if "cifar10" in sets:
        for seed in SEEDS:
            for name in CIFAR if seed == 0 else CIFAR[:3]:
                found[f"cifar10-{name}-{seed}"] = f"{name} --data cifar10 --epochs 50{fused} --seed {seed}"
    if "mad" in sets:
        sizes = "--set layers=4 --set width=128 --epochs 30 --set batch_size=128 --set learning_rate=1e-3"
        for task in TASKS:
            for seed in SEEDS:
                for name, model in MAD.items():
                    if name not in ABLATED or task in TASKS[:2]:
                        found[f"{task}-{name}-{seed}"] = f"{model} --data {task} {sizes}{fused} --seed {seed}"
    if "wikitext2" in sets:
        for seed in SEEDS:
            for name in COMPARED:
                options = f"--split validation --epochs 15 --set embedding_dropout=0.3 --seed {seed}"
                found[f"wikitext2-{name}-{seed}"] = f"{name} --data wikitext2 {options}"
    if "books" in sets:
        for name, model in BOOKS.items():
            for seed in SEEDS:
                options = f"--epochs 4 --set precision=tf32{fused} --seed {seed}"
                found[f"books-{name}-{seed}"] = f"{model} --data books {options}"
    if "babi" in sets:
        sizes = "--set width=96 --set layers=6 --set state=32 --set head_width=32 --set tied=true --set vocabulary=4000"
        recipe = "--set prompt_weight=0.2 --epochs 16 --set batch_size=128 --set saved_as=bfloat16"
        for seed in SEEDS:
            for name, model in QUESTIONED.items():
                options = f"--length 1000 --filler wikitext2 {sizes} {recipe} --seed {seed}"
                found[f"babi-{name}-{seed}"] = f"{model} --data babi {options}"
    if "instruct" in sets:
        for seed in SEEDS:
            base = f"{BASE}{seed}"
            found[base] = f"mamba2 --data instruct --seed {seed}"
            for name, model in PROMPTED.items():
                further = (
                    f"--init-from {shlex.quote(str(out / base))} --epochs 6 --set learning_rate=2e-3 --seed {seed}"
                )
                found[f"instruct-{name}-{seed}"] = f"{model} --data instruct {further}"
    return found


def train(arguments: argparse.Namespace) -> None:
    known, jobs = {record["run"] for record in running.read(RESULTS)}, []
    for name, command in runs(arguments.sets, bool(arguments.gpus), arguments.out).items():
        out = arguments.out / name
        commands = [["-m", "ssmscope", "train", *shlex.split(command), "--out", str(out)]]
        if name.startswith("books-"):
            commands.append(["-m", "ssmscope", "loss", str(out), *shlex.split(LOSS), "--out", str(out)])
        needs = frozenset({f"{BASE}{name[-1]}"} if "--init-from" in command else ())
        done = partial(known.__contains__, name)
        if name.startswith(BASE):
            further = {f"instruct-{arm}-{name[-1]}" for arm in PROMPTED}
            done = (lambda: True) if further <= known else (out / "training.json").exists
        ended = partial(record, name, out)
        jobs.append(running.Job(name, commands, out.with_suffix(".log"), done, needs, ended))
    running.run(jobs, arguments.gpus.split(",") * arguments.each, arguments.minutes)


def record(name: str, out: Path, seconds: float) -> None:
    """Add the outcome of a run to the results."""
    found = json.loads((out / "training.json").read_text())
    command = found["command"].rpartition(" --out ")[0]
    kept = {"run": name, "command": command, "seconds": round(seconds), "torch": found["versions"]["torch"]}
    kept |= {"parameters": found["parameters"], "epochs": found["epochs_run"]}
    kept |= {field: found["test"][field] for field in ("accuracy", "interval", "cross_entropy")}
    if name.startswith("books-"):
        kept["validation"] = [epoch["validation_loss"] for epoch in found["history"]]
        loss = json.loads((out / "loss.json").read_text())
        edges = [f"{first + 1:,}–{last:,}" for first, last in loss["bins"]]
        kept["by_position"] = dict(zip(edges, (each["value"] for each in loss["summaries"][0]["bins"]), strict=True))
    running.add(RESULTS, kept)


def groups() -> dict[str, list[dict]]:
    """Return the records of each run's seeds, by the run's name without its seed."""
    found: dict[str, list[dict]] = {}
    for each in sorted(running.read(RESULTS), key=lambda each: each["run"]):
        found.setdefault(each["run"].rpartition("-")[0], []).append(each)
    return found


def table(arguments: argparse.Namespace) -> None:
    """Test accuracy and cross-entropy: each seed, and the mean with its 95 % t interval over seeds."""
    print("| run | parameters | epochs | test accuracy of each seed | mean | test cross-entropy |")
    print("|---|---|---|---|---|---|")
    for name, records in groups().items():
        accuracies, losses = ([each[field] for each in records] for field in ("accuracy", "cross_entropy"))
        each = ", ".join(f"{a:.4f}" for a in accuracies)
        size, epochs = records[0]["parameters"], records[0]["epochs"]
        print(f"| {name} | {size:,} | {epochs} | {each} | {running.told(accuracies)} | {running.told(losses)} |")
    tables = (mad_table, gfssm_table, gfssm_verdicts, grouped_table, grouped_verdicts, books_table)
    for lines in (each() for each in tables):
        print("", *lines, sep="\n")


def mad_table() -> list[str]:
    """Return the table of MAD's tasks in docs/differential-mamba.md."""
    return accuracies(*COMPARED, *ABLATED, tasks=("fuzzy-recall", "compression"))


def gfssm_table() -> list[str]:
    """Return the table of MAD's tasks in docs/gfssm.md, the two that are not at their ceiling."""
    names = ("mamba2", *(name for name in MAD if name.startswith("gfssm")))
    return accuracies(*names, tasks=("fuzzy-recall", "compression"))


def accuracies(*names: str, tasks: Sequence[str] = TASKS) -> list[str]:
    """Test accuracy on MAD's tasks, mean ± 95 % t interval over seeds."""
    found = groups()
    rows = [f"| model | {' | '.join(tasks)} |", "|---" * (1 + len(tasks)) + "|"]
    for name in names:
        cells = [[each["accuracy"] for each in found.get(f"{task}-{name}", [])] for task in tasks]
        if any(cells):
            rows.append(f"| {name} | {' | '.join(running.told(cell) if len(cell) > 1 else '' for cell in cells)} |")
    return rows


def grouped_table() -> list[str]:
    """Return the table of docs/groupmamba.md: parameters on fuzzy recall, accuracy on MAD's tasks and, where there is
    one, perplexity on books."""
    found = {record["run"]: record for record in running.read(RESULTS)}

    def measured(arm: str, seed: int) -> dict[str, float]:
        records = {data: found.get(f"{data}-{arm}-{seed}") for data in (*TASKS, "books")}
        return {
            data: math.exp(record["cross_entropy"]) if data == "books" else record["accuracy"]
            for data, record in records.items()
            if record
        }

    arms = {arm: [measured(arm, seed) for seed in SEEDS] for arm in GROUPED}
    sizes = {arm: found[run]["parameters"] for arm in GROUPED if (run := f"{TASKS[0]}-{arm}-0") in found}
    names = {arm: arm.replace("groupmamba-k", "k = ").replace("-", ", ") for arm in GROUPED if arm != "mamba2"}
    return running.arms_table(arms, names, sizes)


MARGIN = 0.05
"""Margin of accuracy, set after these runs."""


def grouped_verdicts() -> list[str]:
    """Return what the runs say of GroupMamba's arms less Mamba-2."""
    return verdict_table("mamba2", [name for name in GROUPED if name != "mamba2"])


def gfssm_verdicts() -> list[str]:
    """Return what the runs say of GFSSM's arms less GFSSM."""
    return verdict_table("gfssm", ["mamba2", *(name for name in MAD if name.startswith("gfssm-"))])


def verdict_table(base: str, others: Sequence[str]) -> list[str]:
    """Return the verdicts on the two of MAD's tasks that Mamba-2 does not solve, as one question of each arm."""
    found = groups()
    runs = {
        arm: [[each["accuracy"] for each in found[f"{task}-{arm}"]] for task in TASKS[:2]]
        for arm in (base, *others)
        if all(f"{task}-{arm}" in found for task in TASKS[:2])
    }
    return verdicts.against(runs[base], {f"{arm} − {base}": each for arm, each in runs.items() if arm != base}, MARGIN)


def books_table() -> list[str]:
    """Return Differential Mamba's Figures 7 and 3 on books as a table: validation loss after each epoch, test
    perplexity and loss by position; no lines until Mamba-2 has all seeds."""
    found = {record["run"]: record for record in running.read(RESULTS)}

    def measured(record: dict) -> dict[str, float]:
        epochs = {f"epoch {epoch}": loss for epoch, loss in enumerate(record["validation"], 1)}
        return epochs | {"perplexity": math.exp(record["cross_entropy"])} | record["by_position"]

    records = {arm: [found.get(f"books-{arm}-{seed}") for seed in SEEDS] for arm in QUESTIONED}
    arms = {arm: [measured(record) for record in runs] for arm, runs in records.items() if None not in runs}
    return running.arms_table(arms) if "mamba2" in arms else []


def position(arguments: argparse.Namespace) -> None:
    """`analyze position` on every CIFAR-10 run."""
    for name in sorted(path.parent.name for path in arguments.out.glob("*/training.json")):
        if name.startswith("cifar10-"):
            model, into = str(arguments.out / name), str(arguments.out / name / "position")
            limit = ["--limit", str(arguments.limit)] if arguments.limit else []
            command = ["position", model, "--data", "cifar10", *limit, "--out", into]
            print("analyze", *command, flush=True)
            subprocess.run([sys.executable, "-m", "ssmscope", *command], check=True)


def prompts(arguments: argparse.Namespace) -> None:
    """Attack the prompts of every instruct run (Baleen's Table 4), in our way and in PromptBench's."""
    known, jobs = {(record["run"], record["way"]) for record in running.read(PROMPTS)}, []
    for way, option in WAYS.items():
        for seed in SEEDS:
            for arm in PROMPTED:
                name = f"instruct-{arm}-{seed}"
                model, into = arguments.out / name, arguments.out / name / f"prompts-{way}"
                options = f"--data sst2 --limit 200 --attacks {','.join(ATTACKS)}{option}"
                words = ["-m", "ssmscope", "prompts", str(model), *options.split(), "--out", str(into)]
                done, ended = partial(known.__contains__, (name, way)), partial(_keep_drops, name, way, options, into)
                jobs.append(running.Job(f"{name} {way}", [words], into.with_suffix(".log"), done, ended=ended))
    running.run(jobs, [""] * arguments.cores, arguments.minutes)


def _keep_drops(name: str, way: str, options: str, into: Path, seconds: float) -> None:
    found = json.loads((into / "prompts.json").read_text())
    kept = {"run": name, "way": way, "command": f"analyze prompts {name} {options}", "seconds": round(seconds)}
    kept |= {"clean": found["average_clean"]["value"], "templates": len(found["templates"])}
    drops = {attack["name"]: attack["drop"]["value"] for attack in found["attacks"]}
    running.add(PROMPTS, {**kept, "drops": drops, "fingerprint": found["provenance"]["fingerprint"]})


def prompt_table() -> list[str]:
    """Return the table of docs/robustness.md: clean accuracy and drops in %, mean ± 95 % t interval over seeds. Models
    that lack a seed are left out."""
    lines = [f"| | | clean | {' | '.join(ATTACKS)} |", "|---|---|---|" + "---|" * len(ATTACKS)]
    for way, found in _prompted().items():
        for at, (name, values) in enumerate(found.items()):
            clean, *drops = zip(*values)
            cells = [running.told(clean), *(running.told(drop, 1) for drop in drops)]
            lines.append(f"| {way if at == 0 else ''} | {name} | {' | '.join(cells)} |".replace("| -", "| −"))
    return lines


def _prompted() -> dict[str, dict[str, list[list[float]]]]:
    """Return clean accuracy and the drops in % of each seed, by way and arm."""
    found = {(record["run"], record["way"]): record for record in running.read(PROMPTS)}
    rows: dict[str, dict[str, list[list[float]]]] = {way: {} for way in WAYS}
    for way in WAYS:
        for arm in PROMPTED:
            records = [found.get((f"instruct-{arm}-{seed}", way)) for seed in SEEDS]
            if None not in records:
                rows[way][arm] = [[each["clean"], *(100 * each["drops"][one] for one in ATTACKS)] for each in records]
    return rows


PAPERS = (statistics.mean((-37.8, -32.1, 9.3, -18.1)), statistics.mean((-44.6, -27.3, -18.5, -17.0)))
"""Drops in % on SST-2 of Baleen-E and of Baleen-B less Mamba-2's, attack by attack (Table 4)."""


def prompt_verdicts() -> list[str]:
    """Return what our way of attacking says of the Baleens less Mamba-2: the mean drop over the attacks, in %."""
    runs = {arm: [[statistics.mean(each[1:]) for each in found]] for arm, found in _prompted()["ours"].items()}
    others = {f"{arm} − mamba2": found for arm, found in runs.items() if arm != "mamba2"}
    return verdicts.against(runs["mamba2"], others, 5.0, dict(zip(others, PAPERS, strict=True)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for verb in (train, table, position, prompts):
        sub = verbs.add_parser(verb.__name__)
        sub.set_defaults(run=verb)
        if verb is not table:
            sub.add_argument("--out", type=Path, required=True)
        if verb is train:
            sub.add_argument("sets", nargs="+", choices=["cifar10", "mad", "wikitext2", "books", "instruct", "babi"])
            sub.add_argument("--gpus", default="0", help="numbers, with commas between them; empty for the CPU")
            sub.add_argument("--each", type=int, default=2, help="runs at a time on a GPU")
        if verb is position:
            sub.add_argument("--limit", type=int)
        if verb is prompts:
            sub.add_argument("--cores", type=int, default=1, help="runs at a time, one core each")
        if verb in (train, prompts):
            sub.add_argument("--minutes", type=float, default=600.0, help="then what runs is cut short")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
