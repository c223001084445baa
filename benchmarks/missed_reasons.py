"""Does an explanation that misses the reason go with a wrong answer (Baleen, Figure 2b)? Models stopped while they
still err.

    python benchmarks/missed_reasons.py train --out runs/missed --cores 2
    python benchmarks/missed_reasons.py table

A model is one `analyze train` command, of one epoch on `planted-recall`, so that its reason is known and it errs. Its
predicted class is explained on 500 test texts. The overlap is the token F1 of the highest tokens, as many as are
planted, with the planted ones. Compared are a seed's mean over the texts that it answers right with that over the
others, in the first five seeds that err. What is finished is a line of benchmarks/results/missed-reasons.jsonl.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import running
from verdicts import Question, verdicts
from verdicts import table as told

RESULTS = Path(__file__).parent / "results" / "missed-reasons.jsonl"
ARMS = {"mamba2": "Mamba-2", "baleen-e --set beta=0.001": "Baleen-E, β = .001"}
SEEDS, METHODS = (0, 1, 2, 3, 4, 5), ("lrp", "ig", "occlusion", "survival", "self-write")
TEXTS, ERRING, MARGIN = 500, 5, 0.05


def train(arguments: argparse.Namespace) -> None:
    """Train and measure the missing runs, seed by seed."""
    done = {(record["arm"], record["seed"]) for record in running.read(RESULTS)}
    jobs = []
    for seed in SEEDS:
        for arm in ARMS:
            out = arguments.out / f"{arm.split()[0]}-{seed}"
            words = ["train", *arm.split(), *f"--data planted-recall --epochs 1 --seed {seed}".split()]
            written = out / "measured.json"

            def ended(seconds: float, arm: str = arm, seed: int = seed, written: Path = written) -> None:
                record = {"arm": arm, "seed": seed, "seconds": round(seconds), **json.loads(written.read_text())}
                running.add(RESULTS, record)

            jobs.append(
                running.Job(
                    out.name,
                    [
                        ["-m", "ssmscope", *words, "--device", "cpu", "--out", str(out)],
                        [__file__, "measure", "--out", str(out), "--into", str(written)],
                    ],
                    out.with_suffix(".log"),
                    lambda of=(arm, seed): of in done,
                    ended=ended,
                )
            )
    running.run(jobs, [""] * arguments.cores, arguments.minutes)


def measure(arguments: argparse.Namespace) -> None:
    """Measure a model's mean overlap by method, of the texts that it answers right and of the others."""
    arguments.into.write_text(json.dumps(overlaps(arguments.out.absolute())))


def overlaps(folder: Path) -> dict[str, Any]:
    """Return a trained model's record: how many texts it answers right and wrong, and their mean overlap by method."""
    import ssmscope
    from ssmscope.data.text import load_text

    model, data = ssmscope.load(folder), load_text("planted-recall", "test").sample(TEXTS, seed=0)
    found = ssmscope.plausibility(model, data, methods=METHODS)
    logits = [model.run(model.encode([data.texts[row]])).logits[0] for row in found.texts]
    right = np.array([int(each.argmax()) == data.labels[row] for each, row in zip(logits, found.texts)])
    means = {
        name: [float(scores[right].mean()), float(scores[~right].mean())]
        for name, scores in zip(found.methods, found.values[..., 0])
    }
    return {"right": int(right.sum()), "wrong": int((~right).sum()), "overlap": {} if right.all() else means}


def docs_table() -> list[str]:
    """Return the lines of the documentation's table: the mean overlap where an answer is right, less where it is
    wrong."""
    records = {(record["arm"], record["seed"]): record["overlap"] for record in running.read(RESULTS)}
    family = {}
    for arm, name in ARMS.items():
        for method in METHODS:
            both = [found[method] for seed in SEEDS if (found := records.get((arm, seed)))][:ERRING]
            differences = [right - wrong for right, wrong in both]
            family[Question(f"{name}, `{method}`", MARGIN)] = [(differences, [0.0] * len(differences))]
    return told(verdicts(family))


def table(arguments: argparse.Namespace) -> None:
    """Print the table."""
    print("\n".join(docs_table()))


def main() -> None:
    found = running.verbs(__doc__, train, measure, table)
    found["train"].add_argument("--cores", type=int, default=1, help="runs at a time, one core each")
    running.start(found)


if __name__ == "__main__":
    main()
