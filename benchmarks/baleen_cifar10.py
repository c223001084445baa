"""Baleen against Mamba-2 on CIFAR-10 under position attacks: the runs that are missing, and the table over seeds.

    python benchmarks/baleen_cifar10.py train --pilot --out runs/baleen --gpus 0,1 --each 2
    python benchmarks/baleen_cifar10.py train mamba2 chosen baleen-e-0 baleen-b-0 --out runs/baleen --gpus 0,1
    python benchmarks/baleen_cifar10.py table

Every run is one `analyze train` command of 100 epochs, the same for all but the architecture and its own options. What
is finished is a line of benchmarks/results/baleen-cifar10.jsonl, and is not run again; what the minutes cut short goes
on from its checkpoint in --out the next time. The pilot is of 15 epochs and one seed and goes into a file of its own;
`chosen` are the Baleen-B and the Baleen-E with a KL (β > 0) that were most accurate in it on clean validation images.

A model is tested on all 10,000 test images, clean and with the pixels of one region replaced by N(0, 1) noise, over the
raw pixels in [0, 1] ("raw") and in units of the training pixels' own mean and spread by channel ("normalised"). The
table gives means over seeds and 95 % t intervals, and what they say of every arm less Mamba-2.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import running
import verdicts

RESULTS = Path(__file__).parent / "results"
SEEDS = (0, 1, 2)
RECIPE = "--data cifar10 --epochs {epochs} --set learning_rate=2e-3 --set precision=tf32"
SOFT = "--set samples=soft --set tau=1 --set prior_from=0.9"
ARMS = {
    "mamba2": "mamba2",
    "mamba": "mamba",
    "gla": "gla",
    "rwkv": "rwkv",
    "baleen-e": "baleen-e --set beta=0.005",
    "baleen-e-0": "baleen-e --set beta=0",
    "baleen-e-small": "baleen-e --set beta=0.0005",
    "baleen-e-large": "baleen-e --set beta=0.05",
    "baleen-e-paper": "baleen-e --set beta=0.5",
    "baleen-e-printed": "baleen-e --set beta=0.005 --set kl=printed",
    "baleen-e-head": "baleen-e --set beta=0.005 --set prior_per=head",
    "baleen-b": "baleen-b --set beta=0.01",
    "baleen-b-0": "baleen-b --set beta=0",
    "baleen-b-sum": "baleen-b --set beta=0.01 --set kl_over=sum",
    "baleen-b-soft": f"baleen-b --set beta=0.01 {SOFT}",
    "baleen-b-soft-0": "baleen-b --set beta=0 --set samples=soft --set tau=1",
    "baleen-b-soft-1": f"baleen-b --set beta=1 {SOFT}",
    "baleen-b-soft-sum": f"baleen-b --set beta=0.01 {SOFT} --set kl_over=sum",
}
SHOWN = {
    "mamba2": "Mamba-2",
    "mamba": "Mamba",
    "gla": "GLA",
    "rwkv": "RWKV-4",
    "baleen-e-paper": "Baleen-E, β = .5",
    "baleen-e": "Baleen-E, β = .005",
    "baleen-e-0": "Baleen-E, β = 0",
    "baleen-b": "Baleen-B, β = .01, hard",
    "baleen-b-soft": "Baleen-B, β = .01, soft",
    "baleen-b-soft-0": "Baleen-B, β = 0, soft",
}
"""Arms of the documentation's table."""
CHOSEN = "chosen"
REGIONS = ((0, 32), (0, 96), (928, 1024), (992, 1024))
NOISES = ("raw", "normalised")


def results_file(pilot: bool) -> Path:
    return RESULTS / ("baleen-cifar10-pilot.jsonl" if pilot else "baleen-cifar10.jsonl")


def chosen() -> list[str]:
    """The Baleen-B and Baleen-E with β > 0 of the highest validation accuracy in the pilot."""
    tried = {record["arm"]: record["validation"] for record in running.read(results_file(True))}
    families = [[arm for arm in tried if ARMS[arm].startswith(f"{kind} ")] for kind in ("baleen-b", "baleen-e")]
    with_kl = [[arm for arm in family if beta(arm) > 0] for family in families]
    return [max(family, key=tried.__getitem__) for family in with_kl if family]


def beta(arm: str) -> float:
    return float(ARMS[arm].partition("beta=")[2].split()[0])


def control(arm: str) -> str:
    """Return the same arm without the KL: β = 0."""
    return f"{ARMS[arm].split()[0]}{'-soft' if 'samples=' in ARMS[arm] else ''}-0"


def command(arm: str, seed: int, epochs: int) -> str:
    return f"{ARMS[arm]} {RECIPE.format(epochs=epochs)} --compile --seed {seed}"


def train(arguments: argparse.Namespace) -> None:
    """Train the missing runs, seed by seed so that all arms have as many."""
    epochs, seeds = (15, SEEDS[:1]) if arguments.pilot else (100, arguments.seeds)
    arms: list[str] = []
    for arm in arguments.arms or (list(ARMS) if arguments.pilot else ["mamba2", CHOSEN]):
        found = [a for best in chosen() for a in (best, control(best))] if arm == CHOSEN else [arm]
        arms += [a for a in found if a not in arms]
    file = results_file(arguments.pilot)
    done = {(record["arm"], record["seed"]) for record in running.read(file)}
    jobs = []
    for seed in seeds:
        for arm in arms:
            out, line = arguments.out / f"{arm}-{epochs}-{seed}", command(arm, seed, epochs)
            measured = out.with_suffix(".json")

            def ended(seconds: float, arm: str, seed: int, line: str, measured: Path) -> None:
                record = {"arm": arm, "seed": seed, "command": f"analyze train {line}", "seconds": round(seconds)}
                running.add(file, {**record, **json.loads(measured.read_text())})

            jobs.append(
                running.Job(
                    out.name,
                    [
                        ["-m", "ssmscope", "train", *shlex.split(line), "--out", str(out)],
                        [__file__, "measure", "--out", str(out), "--into", str(measured)],
                    ],
                    out.with_suffix(".log"),
                    partial(done.__contains__, (arm, seed)),
                    ended=partial(ended, arm=arm, seed=seed, line=line, measured=measured),
                )
            )
    running.run(jobs, arguments.gpus.split(",") * arguments.each, arguments.minutes)


def measure(arguments: argparse.Namespace) -> None:
    """The accuracies of a trained model, clean and under both noises, and whether it selects."""
    import torch
    import ssmscope
    from ssmscope.core.mixers import fast_scan
    from ssmscope.data.pixels import load_pixels
    from ssmscope.zoo.training.card import Selectivity

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ssmscope.load(arguments.out.absolute(), dtype="float32", device=device)
    test, train_pixels = load_pixels("cifar10", "test"), load_pixels("cifar10", "train").pixels.reshape(-1, 3) / 255
    mean, spread = (torch.tensor(v, dtype=torch.float32) for v in (train_pixels.mean(0), train_pixels.std(0)))
    values = torch.from_numpy(test.pixels).float() / 255
    labels = torch.from_numpy(test.labels)
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def accuracy(values: torch.Tensor) -> float:
        right = 0
        with fast_scan(model.module):
            for start in range(0, len(values), 256):
                part = slice(start, start + 256)
                logits = model.module(input_values=values[part].to(device)).logits
                right += int((logits.argmax(-1).cpu() == labels[part]).sum())
        return right / len(values)

    attacked: dict[str, dict[str, float]] = {}
    for name, drawn in zip(NOISES, (noise, mean + spread * noise), strict=True):
        attacked[name] = {}
        for start, stop in REGIONS:
            spoiled = values.clone()
            spoiled[:, start:stop] = drawn[:, start:stop]
            attacked[name][f"{start}:{stop}"] = accuracy(spoiled)
    watched = Selectivity(model.module)
    with torch.no_grad(), fast_scan(model.module, visit=watched.visit):
        for start in range(0, 1024, 256):
            model.module(input_values=values[start : start + 256].to(device))
    record = json.loads((arguments.out / "training.json").read_text())
    found = {
        "epochs": record["epochs_run"],
        "best_epoch": record["best_epoch"],
        "parameters": record["parameters"],
        "validation": record["validation"]["accuracy"],
        "clean": accuracy(values),
        **attacked,
        "selectivity": watched.records(),
        "precision": record["precision"],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": record["versions"],
    }
    arguments.into.write_text(json.dumps(found))


def columns(record: dict[str, Any]) -> dict[str, float]:
    found = {"validation": record["validation"], "clean": record["clean"]}
    for noise in NOISES:
        found |= {f"{noise} {region}": value for region, value in record[noise].items()}
        found[f"{noise} mean"] = statistics.mean(record[noise].values())
    return found


def table(arguments: argparse.Namespace) -> None:
    """Means over seeds with 95 % t intervals, and what they say of each arm less Mamba-2."""
    by_arm: dict[str, dict[int, dict[str, float]]] = {}
    for record in running.read(results_file(arguments.pilot)):
        by_arm.setdefault(record["arm"], {})[record["seed"]] = columns(record)
    if not by_arm:
        print("no results yet")
        return
    names = list(next(iter(next(iter(by_arm.values())).values())))
    print("| arm | seeds | " + " | ".join(names) + " |\n|---|---|" + "---|" * len(names))
    for arm, seeds in by_arm.items():
        cells = (running.told([r[n] for r in seeds.values()]) for n in names)
        print(f"| {arm} | {len(seeds)} | " + " | ".join(cells) + " |")
    print("", *verdict_table(), sep="\n")


def shown() -> dict[str, list[dict[str, Any]]]:
    """Return the records of the arms that have all seeds."""
    found = {(record["arm"], record["seed"]): record for record in running.read(results_file(False))}
    arms = {arm: [found[arm, seed] for seed in SEEDS if (arm, seed) in found] for arm in SHOWN}
    return {arm: records for arm, records in arms.items() if len(records) == len(SEEDS)}


def docs_table() -> list[str]:
    """Return the lines of the documentation's table: accuracies clean and under noise of every arm that has all
    seeds."""
    return running.arms_table({arm: [_shown_columns(each) for each in found] for arm, found in shown().items()}, SHOWN)


PAPER = {"mamba": 0.057, "gla": 0.151, "rwkv": -0.047, "baleen-e-paper": 0.157, "baleen-b": 0.147}
"""Differences from Mamba-2 of the paper's averages, which count the clean accuracy (Table 3)."""
MARGIN = 0.05
"""Margin of accuracy, set after these runs."""


def verdict_table() -> list[str]:
    """Return what the runs say of each arm less Mamba-2: accuracy averaged over the regions and the clean images, under
    noise of the raw pixels, as the paper has it."""
    runs = {
        arm: [[statistics.mean([each["clean"], *each["raw"].values()]) for each in found]]
        for arm, found in shown().items()
    }
    others = {f"{SHOWN[arm]} − Mamba-2": found for arm, found in runs.items() if arm != "mamba2"}
    papers = {f"{SHOWN[arm]} − Mamba-2": value for arm, value in PAPER.items()}
    return verdicts.against(runs["mamba2"], others, MARGIN, papers)


def _shown_columns(record: dict[str, Any]) -> dict[str, float]:
    regions = {region: record["raw"][region] for region in ("0:32", "0:96", "928:1024", "992:1024")}
    averages = (statistics.mean(record[noise].values()) for noise in NOISES)
    return {
        "clean": record["clean"],
        **regions,
        **dict(zip(("average", "average, pixel noise"), averages, strict=True)),
    }


def main() -> None:
    found = running.verbs(__doc__, train, measure, table)
    for name in ("train", "table"):
        found[name].add_argument("--pilot", action="store_true", help="15 epochs, one seed")
    of = found["train"]
    of.add_argument("arms", nargs="*", choices=[*ARMS, CHOSEN], help="by default of the pilot all")
    of.add_argument("--gpus", default="0", help="their numbers, with commas between them; empty for the CPU")
    of.add_argument("--each", type=int, default=1, help="runs at a time on a GPU, which one fills")
    of.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    running.start(found)


if __name__ == "__main__":
    main()
