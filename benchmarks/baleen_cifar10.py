"""Baleen against Mamba-2 on CIFAR-10 under position attacks: the runs that are missing, and the table over seeds.

    python benchmarks/baleen_cifar10.py train mamba2 baleen-e baleen-e-0 --out runs/baleen --gpus 0,1 --minutes 9
    python benchmarks/baleen_cifar10.py table

Every run is one `analyze train` command of 100 epochs, the same for all but the architecture and its own options. What
is finished is a line of benchmarks/results/baleen-cifar10.jsonl, and is not run again; what the minutes cut short goes
on from its checkpoint in --out the next time. A pilot (--pilot) is of 15 epochs and one seed, and goes into a file of
its own.

A model is tested on all 10,000 test images, clean and with the pixels of one region replaced by N(0, 1) noise, over the
raw pixels in [0, 1] ("raw") and in units of the training pixels' own mean and spread by channel ("normalised"). The
table gives means over seeds and 95 % t intervals, and for every Baleen its difference from Mamba-2, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SEEDS = (0, 1, 2)
RECIPE = "--data cifar10 --epochs {epochs} --learning-rate 2e-3 --precision tf32 --compile"
ARMS = {
    "mamba2": "mamba2",
    "baleen-e": "baleen-e --beta 0.005",
    "baleen-e-0": "baleen-e --beta 0",
    "baleen-e-paper": "baleen-e --beta 0.5",
    "baleen-e-printed": "baleen-e --beta 0.005 --kl printed",
    "baleen-e-head": "baleen-e --beta 0.005 --prior-per head",
    "baleen-b": "baleen-b --beta 0.01",
    "baleen-b-0": "baleen-b --beta 0",
    "baleen-b-sum": "baleen-b --beta 0.01 --kl-over sum",
    "baleen-b-soft": "baleen-b --beta 0.01 --samples soft --tau 1 --prior-from 0.9",
    "baleen-b-soft-sum": "baleen-b --beta 0.01 --samples soft --tau 1 --prior-from 0.9 --kl-over sum",
}
REGIONS = ((0, 32), (0, 96), (928, 1024), (992, 1024))
NOISES = ("raw", "normalised")


def results_file(pilot: bool) -> Path:
    return RESULTS / ("baleen-cifar10-pilot.jsonl" if pilot else "baleen-cifar10.jsonl")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def command(arm: str, seed: int, epochs: int) -> str:
    return f"{ARMS[arm]} {RECIPE.format(epochs=epochs)} --seed {seed}"


def train(arguments: argparse.Namespace) -> None:
    """Run what is missing, seed by seed so that all arms have as many."""
    deadline = time.monotonic() + 60 * arguments.minutes
    epochs, seeds = (15, SEEDS[:1]) if arguments.pilot else (100, arguments.seeds)
    file = results_file(arguments.pilot)
    done = {(record["arm"], record["seed"]) for record in read(file)}
    waiting: queue.Queue[tuple[str, int]] = queue.Queue()
    for seed in seeds:
        for arm in arguments.arms:
            if (arm, seed) not in done:
                waiting.put((arm, seed))
    arguments.out.mkdir(parents=True, exist_ok=True)
    writing = threading.Lock()

    def go(words: list[str], log: Any, gpu: str) -> bool:
        """Whether the command ended well before the deadline."""
        process = subprocess.Popen(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}, stdout=log, stderr=log)
        try:
            return process.wait(max(deadline - time.monotonic(), 1)) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            return False

    def work(gpu: str) -> None:
        while time.monotonic() < deadline:
            try:
                arm, seed = waiting.get_nowait()
            except queue.Empty:
                return
            out = arguments.out / f"{arm}-{epochs}-{seed}"
            line = command(arm, seed, epochs)
            print(f"analyze train {line} --out {out}", flush=True)
            with out.with_suffix(".log").open("a") as log:
                words = [sys.executable, "-m", "ssmscope", "train", *shlex.split(line), "--out", str(out)]
                start = time.monotonic()
                ended = go(words, log, gpu)
                spent = out.with_suffix(".seconds")
                seconds = time.monotonic() - start + (float(spent.read_text()) if spent.exists() else 0.0)
                spent.write_text(f"{seconds:.0f}")
                measured = out.with_suffix(".json")
                test = [sys.executable, __file__, "measure", "--out", str(out), "--into", str(measured)]
                if not ended or not go(test, log, gpu):
                    continue
            record = {"arm": arm, "seed": seed, "command": f"analyze train {line}", "seconds": round(seconds)}
            with writing:
                file.parent.mkdir(exist_ok=True)
                with file.open("a") as lines:
                    lines.write(json.dumps({**record, **json.loads(measured.read_text())}) + "\n")

    gpus = arguments.gpus.split(",") * arguments.each
    workers = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def measure(arguments: argparse.Namespace) -> None:
    """The accuracies of a trained model, clean and under both noises, and whether it selects."""
    import torch

    import ssmscope
    from ssmscope.mixers import fast_scan
    from ssmscope.tasks.pixels import load_pixels
    from ssmscope.training.selectivity import selectivity

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
    batches = ({"input_values": values[i : i + 256].to(device)} for i in range(0, 1024, 256))
    record = json.loads((arguments.out / "training.json").read_text())
    found = {
        "epochs": record["epochs_run"],
        "best_epoch": record["best_epoch"],
        "parameters": record["parameters"],
        "validation": record["validation"]["accuracy"],
        "clean": accuracy(values),
        **attacked,
        "selectivity": selectivity(model.module, batches),
        "precision": record["precision"],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": record["versions"],
    }
    arguments.into.write_text(json.dumps(found))


T975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""The 97.5 % quantile of Student's t for that many seeds."""


def told(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = T975[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def columns(record: dict[str, Any]) -> dict[str, float]:
    found = {"validation": record["validation"], "clean": record["clean"]}
    for noise in NOISES:
        found |= {f"{noise} {region}": value for region, value in record[noise].items()}
        found[f"{noise} mean"] = statistics.mean(record[noise].values())
    return found


def table(arguments: argparse.Namespace) -> None:
    """Means over seeds with 95 % t intervals, and each arm's difference from Mamba-2 of the same seed."""
    by_arm: dict[str, dict[int, dict[str, float]]] = {}
    for record in read(results_file(arguments.pilot)):
        by_arm.setdefault(record["arm"], {})[record["seed"]] = columns(record)
    if not by_arm:
        print("no results yet")
        return
    names = list(next(iter(next(iter(by_arm.values())).values())))
    print("| arm | seeds | " + " | ".join(names) + " |\n|---|---|" + "---|" * len(names))
    for arm, seeds in by_arm.items():
        print(f"| {arm} | {len(seeds)} | " + " | ".join(told([r[n] for r in seeds.values()]) for n in names) + " |")
    for arm, seeds in by_arm.items():
        common = sorted(seeds.keys() & by_arm.get("mamba2", {}).keys())
        if arm != "mamba2" and common:
            cells = (told([seeds[s][n] - by_arm["mamba2"][s][n] for s in common]) for n in names)
            print(f"| {arm} − mamba2 | {len(common)} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for verb in (train, measure, table):
        sub = verbs.add_parser(verb.__name__, help=verb.__doc__)
        sub.set_defaults(run=verb)
        if verb is not table:
            sub.add_argument("--out", type=Path, required=True)
        if verb is not measure:
            sub.add_argument("--pilot", action="store_true", help="15 epochs, one seed")
        if verb is train:
            sub.add_argument("arms", nargs="+", choices=list(ARMS))
            sub.add_argument("--gpus", default="0", help="their numbers, with commas between them; empty for the CPU")
            sub.add_argument("--each", type=int, default=1, help="runs at a time on a GPU, which one fills")
            sub.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
            sub.add_argument("--minutes", type=float, default=600.0)
        if verb is measure:
            sub.add_argument("--into", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
