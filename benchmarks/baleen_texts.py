"""Baleen against Mamba-2 on texts: is what its gates say more faithful? Trained and measured with three seeds.

    python benchmarks/baleen_texts.py train sst2 rotten_tomatoes snli imdb --out runs/texts --cores 8
    python benchmarks/baleen_texts.py table

Every model is one `analyze train` command, two layers of width 48 from scratch, the same for all arms of a data set but
for the architecture and β, and from Mamba-2's weights of the same seed for the warm arms; every measurement one
`analyze fidelity` command on test texts. What is finished is a line of benchmarks/results/baleen-texts.jsonl and is not
run again. The β of a data set is the one of the highest mean validation accuracy over the seeds. The table gives ΔA
(least minus most relevant first; larger is more faithful) × 100, means over seeds and 95 % t intervals, and of
each Baleen the difference from Mamba-2, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import running

RESULTS = Path(__file__).parent / "results" / "baleen-texts.jsonl"
SEEDS = (0, 1, 2)
SIZES = "--layers 2 --width 48 --vocabulary 5000 --subword-dropout 0.1"
RECIPES = {
    "sst2": "--data sst2 --epochs 16",
    "rotten_tomatoes": "--data rotten_tomatoes --epochs 16",
    "snli": "--data snli --split validation --epochs 16",
    "imdb": "--data imdb --share 0.4 --max-length 400 --epochs 6 --batch-size 64",
}
LIMITS = {"sst2": 300, "rotten_tomatoes": 300, "snli": 300, "imdb": 100}
BETAS = {"baleen-e": ("0.005", "0.05", "0.5"), "baleen-b": ("0.01", "0.1", "1")}
ARMS = {
    "mamba2": "mamba2",
    **{f"{kind} β={beta}": f"{kind} --beta {beta}" for kind, betas in BETAS.items() for beta in ("0", *betas)},
    **{f"{kind} warm": f"{kind} --beta {betas[0]} --init-from" for kind, betas in BETAS.items()},
}
METHODS = ("survival", "self-retention", "self-write", "ig", "gradxinput", "gradcam", "lrp")


def command(data: str, arm: str, seed: int, out: Path, device: str) -> str:
    """The words of `analyze train`."""
    start = f" {shlex.quote(str(out / name(data, 'mamba2', seed)))}" if arm.endswith("warm") else f" {SIZES}"
    return f"{ARMS[arm]}{start} {RECIPES[data]} --device {device} --seed {seed}"


def fidelity_command(data: str, out: Path, device: str) -> str:
    """The words of `analyze fidelity`, of a trained model; in float32 on a GPU too, though stored in bfloat16."""
    where = "" if device == "cpu" else f" --device {device} --dtype float32"
    methods = ",".join(METHODS)
    return f"fidelity {out} --data {data} --split test --limit {LIMITS[data]} --methods {methods}{where}"


def name(data: str, arm: str, seed: int) -> str:
    return f"{data}-{arm.replace(' β=', '-').replace(' ', '-')}-{seed}"


def train(arguments: argparse.Namespace) -> None:
    """Train and measure what is missing."""
    done = {(r["data"], r["arm"], r["seed"]) for r in results() if r["delta"]}
    device = "cuda" if arguments.gpus else "cpu"
    jobs: list[running.Job] = []
    for data in arguments.data:
        for seed in SEEDS:
            for arm in ARMS:
                key = (data, arm, seed)
                out = arguments.out / name(*key)
                line = f"train {command(data, arm, seed, arguments.out, device)}"
                trained = (out / "training.json").exists
                needs = frozenset({name(data, "mamba2", seed)} if arm.endswith("warm") else ())
                log = out.with_suffix(".log")
                words = ["-m", "ssmscope", *shlex.split(line), "--out", str(out)]
                jobs.append(running.Job(out.name, [words], log, trained, needs))
    for data in arguments.data:
        for seed in SEEDS:
            for arm in ARMS:
                key = (data, arm, seed)
                out = arguments.out / name(*key)
                line = fidelity_command(data, out, device)
                written = out / "fidelity.json"
                words = ["-m", "ssmscope", *shlex.split(line), "--out", str(out / "fidelity")]
                keep = [__file__, "measure", "--out", str(out), "--into", str(written)]
                jobs.append(
                    running.Job(
                        f"{out.name} fidelity",
                        [words, keep],
                        out.with_suffix(".fidelity.log"),
                        partial(done.__contains__, key),
                        frozenset({out.name}),
                        partial(ended, key, f"analyze {line}", written),
                    )
                )
    gpus = [str(gpu) for gpu in range(arguments.gpus)]
    running.run(jobs, (gpus or [""]) * arguments.cores, arguments.minutes)


def ended(key: tuple[str, str, int], line: str, written: Path, seconds: float) -> None:
    data, arm, seed = key
    record = {"data": data, "arm": arm, "seed": seed, "fidelity_command": line, "fidelity_seconds": round(seconds)}
    running.add(RESULTS, {**record, **json.loads(written.read_text())})


def measure(arguments: argparse.Namespace) -> None:
    """What a line of the results says of a trained model: its accuracies, whether it selects, ΔA of each method."""
    from ssmscope.interp.fidelity.result import Fidelity

    record = json.loads((arguments.out / "training.json").read_text())
    found = Fidelity.load(arguments.out / "fidelity" / "fidelity.json")
    deltas = found.estimates[:, found.measures.index("delta")]
    kept = {
        "command": record["command"],
        "epochs": record["epochs_run"],
        "best_epoch": record["best_epoch"],
        "parameters": record["parameters"],
        "validation": record["validation"]["accuracy"],
        "test": record["test"]["accuracy"],
        "texts": len(found.texts),
        "delta": dict(zip([*found.methods, "random"], deltas[:, 0].tolist(), strict=True)),
        "selectivity": record["selectivity"]["layers"],
        "versions": record["versions"],
    }
    arguments.into.write_text(json.dumps(kept))


def results() -> list[dict[str, Any]]:
    """The latest line of every model; those that were trained and not measured have no `delta`."""
    return list({(r["data"], r["arm"], r["seed"]): r for r in running.read(RESULTS)}.values())


def chosen(records: Iterable[dict[str, Any]], kind: str) -> str | None:
    """Of a kind the arm with β > 0 whose mean validation accuracy over the seeds is highest, none while some miss."""
    means = {}
    for beta in BETAS[kind]:
        arm = f"{kind} β={beta}"
        found = [r["validation"] for r in records if r["arm"] == arm]
        if len(found) == len(SEEDS):
            means[arm] = sum(found) / len(found)
    return max(means, key=means.__getitem__) if means else None


def table(arguments: argparse.Namespace) -> None:
    """Per data set the accuracies and ΔA × 100, mean ± half of the 95 % t interval over seeds."""
    records = results()
    for data in RECIPES:
        of_data = [r for r in records if r["data"] == data]
        if not of_data:
            continue
        best = {chosen(of_data, kind) for kind in BETAS}
        arms = [arm for arm in ARMS if arguments.all or arm in best or arm == "mamba2" or arm.endswith(("=0", "warm"))]
        methods = [*METHODS, "random"]
        print(f"\n{data}, {LIMITS[data]} texts\n")
        print("| arm | seeds | validation | test | selects | " + " | ".join(methods) + " |")
        print("|---|---|---|---|---|" + "---|" * len(methods))
        plain = {r["seed"]: r for r in of_data if r["arm"] == "mamba2"}
        for arm in arms:
            found = [r for r in of_data if r["arm"] == arm]
            if found:
                shares = [sum(s["selective"] for s in r["selectivity"]) / len(r["selectivity"]) for r in found]
                cells = [running.told([r[part] for r in found]) for part in ("validation", "test")]
                cells += [f"{sum(shares) / len(shares):.2f}"]
                measured = [r["delta"] for r in found if r["delta"]]
                cells += [running.told([100 * delta[m] for delta in measured], 1) if measured else "" for m in methods]
                print(f"| {arm} | {len(found)} | " + " | ".join(cells) + " |")
        for arm in arms:
            found = [r for r in of_data if r["arm"] == arm and r["seed"] in plain and r["delta"]]
            if found and arm != "mamba2":
                cells = [running.told([r[p] - plain[r["seed"]][p] for r in found]) for p in ("validation", "test")]
                cells += [""] + [
                    running.told([100 * (r["delta"][m] - plain[r["seed"]]["delta"][m]) for r in found], 1)
                    for m in methods
                ]
                print(f"| {arm} − mamba2 | {len(found)} | " + " | ".join(cells) + " |")


def main() -> None:
    found = running.verbs(__doc__, train, measure, table)
    found["train"].add_argument("data", nargs="+", choices=list(RECIPES))
    found["train"].add_argument("--cores", type=int, default=1, help="runs at a time, one core each")
    found["train"].add_argument("--gpus", type=int, default=0, help="run on them, --cores at a time on each")
    found["table"].add_argument("--all", action="store_true", help="every β, not only the chosen")
    running.start(found)


if __name__ == "__main__":
    main()
