"""GFSSM's three proposed experiments, on language: are its states bounded, and what do groups, filter and sink gain?

    python benchmarks/gfssm.py train --out runs/gfssm --gpus 1 --each 4
    python benchmarks/gfssm.py table

Every model is one `analyze train` command on WikiText-2's validation split, the same but for the part that is left out.
Each then reads the first 100,000 tokens of the test split as one stream, from its states, and once more from its first
state every 1,000 tokens. What is finished is a line of benchmarks/results/gfssm.jsonl and is not run again.

`table` gives, as means over seeds with 95 % t intervals, the loss of the next token in nats on the test split as
training cuts it and in the stream by position; what the stream costs: its loss after 1,000 tokens less that of the same
tokens from a first state; and the root mean square of the states at the end of the stream over that after 1,000 tokens,
in the group where it is largest. (MAD's tasks with the same arms: benchmarks/reference.py.)
"""

from __future__ import annotations

import argparse
import json
import shlex
from functools import partial
from pathlib import Path

import running
import verdicts

RESULTS = Path(__file__).parent / "results" / "gfssm.jsonl"
SEEDS = (0, 1, 2)
RECIPE = "--data wikitext2 --split validation --epochs 15 --set embedding_dropout=0.3"
ARMS = {
    "mamba2": "mamba2",
    "gfssm": "gfssm --set state_groups=2 --set fir_taps=4",
    "gfssm-one-group": "gfssm --set state_groups=1 --set fir_taps=4",
    "gfssm-without-filter": "gfssm --set state_groups=2 --set fir_taps=1",
    "gfssm-without-sink": "gfssm --set state_groups=2 --set fir_taps=4 --set prompt=false",
}
MARGIN = 0.05
"""In nats, set after these runs."""
STREAM = 100_000
PIECE = 1_000
"""Tokens that are read at once, and after which the comparison starts again from the first state."""
BINS = {"0:1k": (0, 1), "1k:10k": (1, 10), "10k:100k": (10, 100)}
"""Pieces by their positions."""


def train(arguments: argparse.Namespace) -> None:
    """Train and measure what is missing, seed by seed."""
    done = {(record["arm"], record["seed"]) for record in running.read(RESULTS)}
    jobs = []
    for seed in SEEDS:
        for arm, model in ARMS.items():
            out = arguments.out / f"{arm}-{seed}"
            line, measured = f"{model} {RECIPE} --seed {seed}", out.with_suffix(".json")
            jobs.append(
                running.Job(
                    out.name,
                    [
                        ["-m", "ssmscope", "train", *shlex.split(line), "--out", str(out)],
                        [__file__, "measure", "--out", str(out), "--into", str(measured)],
                    ],
                    out.with_suffix(".log"),
                    partial(done.__contains__, (arm, seed)),
                    ended=partial(_keep, arm, seed, line, measured),
                )
            )
    gpus = [str(gpu) for gpu in range(arguments.gpus)] or [""]
    running.run(jobs, gpus * arguments.each, arguments.minutes)


def _keep(arm: str, seed: int, line: str, measured: Path, seconds: float) -> None:
    record = {"arm": arm, "seed": seed, "command": f"analyze train {line}", "seconds": round(seconds)}
    running.add(RESULTS, {**record, **json.loads(measured.read_text())})


def measure(arguments: argparse.Namespace) -> None:
    """Read the stream with a trained model: mean loss by piece, and the states' root mean square after each."""
    import torch
    from torch.nn.functional import cross_entropy
    import ssmscope
    from ssmscope.probes.loss.measure import documents

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ssmscope.load(arguments.out.absolute(), dtype="float32", device=device)
    (lines,), _ = documents("wikitext2", "test")
    ids = model.encode("\n".join(lines), max_tokens=None).input_ids[0, : STREAM + 1]

    def read(piece: int, states):
        part = ids[piece * PIECE : (piece + 1) * PIECE]
        run = model.run(model.encode(ids=[part.tolist()]), states)
        following = ids[piece * PIECE + 1 : (piece + 1) * PIECE + 1].to(run.logits.device)
        return float(cross_entropy(run.logits[0].float(), following)), run.states

    streamed, fresh, sizes, states = [], [], [], None
    for piece in range(STREAM // PIECE):
        loss, states = read(piece, states)
        streamed.append(loss)
        fresh.append(read(piece, None)[0])
        sizes.append([[float(h.square().mean().sqrt()) for h in layer.ssm] for layer in states])
    record = json.loads((arguments.out / "training.json").read_text())
    found = {name: record[name] for name in ("parameters", "epochs_run", "versions")}
    found["test"] = record["test"]["cross_entropy"]
    found |= {"streamed": streamed, "fresh": fresh, "first_states": sizes[0], "last_states": sizes[-1]}
    arguments.into.write_text(json.dumps(found))


def table(arguments: argparse.Namespace) -> None:
    """Print the tables of the documentation."""
    print(*table_lines(), "", *verdict_table(), sep="\n")


def measured() -> dict[str, list[dict[str, float]]]:
    """Return what the table shows of each seed, by arm."""
    found = {(record["arm"], record["seed"]): columns(record) for record in running.read(RESULTS)}
    return {arm: [found[arm, seed] for seed in SEEDS] for arm in ARMS}


def table_lines() -> list[str]:
    """Return the lines of the documentation's table: a row per arm."""
    return running.arms_table(measured())


def verdict_table() -> list[str]:
    """Return what the runs say of each arm's loss after 10,000 tokens of the stream, in nats, less GFSSM's."""
    late = {arm: [[each["10k:100k"] for each in found]] for arm, found in measured().items()}
    others = {f"{arm} − gfssm": found for arm, found in late.items() if arm != "gfssm"}
    return verdicts.against(late["gfssm"], others, MARGIN)


def columns(record: dict) -> dict[str, float]:
    """Return what the table shows of a model."""
    streamed, fresh = record["streamed"], record["fresh"]
    found = {"test": record["test"]}
    found |= {name: sum(streamed[a:b]) / (b - a) for name, (a, b) in BINS.items()}
    found["cost of the stream"] = sum(s - f for s, f in zip(streamed[1:], fresh[1:])) / len(streamed[1:])
    states = zip(sum(record["first_states"], []), sum(record["last_states"], []))
    found["states' growth"] = max(last / first for first, last in states)
    return found


def main() -> None:
    found = running.verbs(__doc__, train, measure, table)
    found["train"].add_argument("--gpus", type=int, default=0, help="0 for the CPU")
    found["train"].add_argument("--each", type=int, default=1, help="runs at a time on a GPU, or cores")
    running.start(found)


if __name__ == "__main__":
    main()
