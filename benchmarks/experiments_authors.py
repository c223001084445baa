"""Experiments 1 and 2 of the generalisation paper as its authors ran them; `authors_logs.py` compares with theirs.

    python benchmarks/experiments_authors.py tokens --to runs/imdb.npz
    python benchmarks/experiments_authors.py train --imdb runs/imdb.npz --device cuda --minutes 25

(Generalization Error Analysis for Selective State-Space Models, section 5 and appendix B.)

Their logs, by epoch, fix what the paper leaves out: W_B, W_C, q, p, the head and the embeddings start from N(0, 1);
Adam at 1e-2 has weight decay 1e-5 as a term of the loss (entries of A without a gradient move by 1e-2 a step); the
last, smaller batch counts; sizes, batches and epochs are in their names. The learning rate stays as it is: after up to
22 epochs without a lower loss their steps are as large as before. Three arms:

- authors: their start; texts are padded to T and the padding is read as tokens, as they do;
- held: their start; the state stays as it is at padding;
- scaled: the start of `analyze train selective` (W_B, W_C, q from N(0, 1/d), p = 0), padding held;
- small steps: as authors, of the first seeds from 5 on whose mean step Δ over the vocabulary is below 1.4
  (`train --small-steps`: reviews of 350 tokens from s_A = 0.1).

A run is that of `analyze train selective` with `--set optimizer=adam`, `weight_decay=1e-5` and `held_out=0`, and with
`start=normal` and `padding=read` in the arm authors, but all seeds and arms of one length are trained in one stack:
only the last state is read, and it is a sum over tokens. A test compares a stack with `analyze train`. Their tokenizer
of reviews is BERT's, with 30,522 tokens; here it is one of byte pairs with as many, trained on the reviews. A line of
benchmarks/results/experiments-authors.jsonl is a run, and a run that has one is left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import running
from stacked import DECAY, Examples, Stack, Store, fit, state

RESULTS = Path(__file__).parent / "results" / "experiments-authors.jsonl"
ARMS = {"authors": ("normal", "read"), "held": ("normal", "held"), "scaled": ("scaled", "held")}
"""Start and padding of each arm; `held` is of reviews alone, as sequences have no padding of unlike lengths."""
SMALL, SMALL_STEP = "small steps", 1.4
SEEDS = (0, 1, 2, 3, 4)
CLASSES = {"majority": 2, "imdb": 2, "listops": 10}
WIDTH = {"majority": 4, "imdb": 16, "listops": 16}
STATE = 4
BATCH = {"majority": 64, "imdb": 256, "listops": 64}
EPOCHS = {"experiment1": dict.fromkeys(CLASSES, 10), "experiment2": {"majority": 40, "imdb": 30, "listops": 50}}
LENGTHS = {
    "experiment1": {"majority": range(50, 351, 50), "imdb": range(300, 601, 50), "listops": range(100, 701, 100)},
    "experiment2": {"majority": range(25, 401, 25), "listops": range(100, 1001, 100), "imdb": range(100, 2001, 100)},
}
SWEPT = {"majority": 250, "imdb": 500, "listops": 300}
STARTS = tuple(round(0.02 * step, 2) for step in range(-5, 6))


class Run(NamedTuple):
    """One training run; `start` is s_A at the start."""

    recipe: str
    task: str
    length: int
    start: float
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.task}-T{self.length}-start{self.start:+.2f}-{self.arm}-seed{self.seed}"


def stacks(recipe: str, task: str) -> list[list[Run]]:
    """All runs of a recipe (experiment1 with its sweep) on a task, those of one length and s_A together; of the longest
    sweep of lengths the multiples of 500 first."""
    if recipe == "experiment1":
        cells = [(T, 0.1) for T in LENGTHS[recipe][task]]
        cells += [(SWEPT[task], start) for start in STARTS if start != 0.1]
    else:
        cells = [(T, 0.0) for T in sorted(LENGTHS[recipe][task], key=lambda T: (T % 500 > 0 and task == "imdb", T))]
    arms = [arm for arm in ARMS if task == "imdb" or arm != "held"]
    return [[Run(recipe, task, *cell, arm, seed) for arm in arms for seed in SEEDS] for cell in cells]


# ---- data


def tokens(arguments: argparse.Namespace) -> None:
    """Write the reviews' token ids to a file, of which every length is cut."""
    from ssmscope.core.tokenizing import tokenize
    from ssmscope.data.text import load_text
    from ssmscope.zoo.tokenizers import train_tokenizer

    longest = max(LENGTHS["experiment2"]["imdb"])
    parts = {name: load_text("imdb", name) for name in ("train", "test")}
    tokenizer = train_tokenizer(parts["train"].texts, vocabulary=30_522, max_length=longest)
    kept: dict[str, Any] = {"vocabulary": len(tokenizer), "pad": tokenizer.pad_token_id, "end": tokenizer.cls_token_id}
    for name, data in parts.items():
        ids = tokenize(tokenizer, list(data.texts), truncation=True, max_length=longest)["input_ids"]
        kept[f"{name}_ids"] = np.concatenate([np.array(row, dtype=np.uint16) for row in ids])
        kept[f"{name}_lengths"] = np.array([len(row) for row in ids], dtype=np.int32)
        kept[f"{name}_labels"] = np.array(data.labels, dtype=np.int8)
    np.savez_compressed(arguments.to, **kept)


def reviews(file: Mapping[str, Any], split: str, length: int) -> Examples:
    """Return the reviews of a file of `tokens` cut to `length` tokens with their end token, padded on the right."""
    lengths, ids = file[f"{split}_lengths"], file[f"{split}_ids"]
    ends = lengths.cumsum()
    found = np.full((len(lengths), length), int(file["pad"]), dtype=np.int16)
    for row, end, number in zip(found, ends, lengths):
        kept = min(number, length)
        row[:kept] = ids[end - number : end - number + kept]
        row[kept - 1] = int(file["end"])
    return Examples(found, np.minimum(lengths, length), file[f"{split}_labels"].astype(np.int64), int(file["pad"]))


def generated(task: str, length: int, seed: int) -> tuple[Examples, Examples]:
    """Return the training and test set of majority or ListOps."""
    from ssmscope.zoo.training.data import parts_of

    parts, _ = parts_of(settled(Run("experiment2", task, length, 0.0, "authors", seed)))
    found = []
    for name in ("train", "test"):
        data: Any = parts[name]
        found.append(Examples(data.ids, np.full(len(data), data.ids.shape[1]), data.labels))
    return found[0], found[1]


def settled(run: Run) -> dict[str, Any]:
    """Return the options of `analyze train` for a run on generated sequences."""
    import inspect

    from ssmscope.zoo.training import train_model
    from ssmscope.zoo.training.plan import checked

    given = {name: parameter.default for name, parameter in inspect.signature(train_model).parameters.items()}
    given |= {"architecture": "selective", "data": run.task, "out": Path(), "seed": run.seed, "length": run.length}
    given |= {
        "spectral_abscissa": run.start,
        "start": ARMS.get(run.arm, ARMS["authors"])[0],
        "width": WIDTH[run.task],
        "state": STATE,
    }
    given |= {"optimizer": "adam", "weight_decay": DECAY, "batch_size": BATCH[run.task]}
    return checked({**given, "epochs": EPOCHS[run.recipe][run.task]})


def train(arguments: argparse.Namespace) -> None:
    """Train what has no line yet, a stack at a time."""
    import torch

    deadline = time.monotonic() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    summed = torch.compile(state, dynamic=True) if arguments.compile else state
    file = dict(np.load(arguments.imdb)) if arguments.imdb else {}
    for recipe in arguments.recipes:
        for task in arguments.tasks:
            small = arguments.small_steps and task == "imdb"
            for runs in [small_steps(int(file["vocabulary"]))] if small else stacks(recipe, task)[: arguments.first]:
                known = {each["run"] for each in running.read(RESULTS)}
                runs = [run for run in runs if run.name not in known]
                if runs and time.monotonic() < deadline:
                    _train(runs, file, arguments, summed)


def small_steps(vocabulary: int) -> list[Run]:
    """Return the runs of the arm small steps."""
    from torch.nn.functional import softplus

    def step(run: Run) -> float:
        start = start_of(run, vocabulary).state_dict()
        return float(softplus(start["ssm.p_delta"] + start["embedding.weight"] @ start["ssm.q_delta"]).mean())

    every = (Run("experiment1", "imdb", 350, 0.1, SMALL, seed) for seed in count(len(SEEDS)))
    return list(islice((run for run in every if step(run) < SMALL_STEP), len(SEEDS)))


def _train(runs: list[Run], file: Mapping[str, Any], arguments: argparse.Namespace, summed: Callable) -> None:
    """Train one stack, and write a line for each of its runs."""
    began = time.monotonic()
    task, recipe, length = runs[0].task, runs[0].recipe, runs[0].length
    seeds, rows = [run.seed for run in runs], None
    if task == "imdb":
        train_set, test_set = (reviews(file, split, length) for split in ("train", "test"))
        parts = [[train_set] * len(runs), [test_set] * len(runs)]
        if recipe == "experiment1":
            rows = [_tenth(train_set, seed) for seed in seeds]
    else:
        drawn = {seed: generated(task, length, seed) for seed in dict.fromkeys(seeds)}
        parts = [[drawn[seed][part] for seed in seeds] for part in (0, 1)]
    store = Store(parts[0], rows, arguments.device)
    vocabulary = int(file["vocabulary"]) if task == "imdb" else {"majority": 2, "listops": 16}[task]
    reads = [run.arm == SMALL or ARMS[run.arm][1] == "read" or task != "imdb" for run in runs]
    stack = Stack([start_of(run, vocabulary) for run in runs], reads, arguments.device, summed)
    history = fit(stack, store, seeds, BATCH[task], arguments.epochs or EPOCHS[recipe][task])
    scores = stack.score(store), stack.score(Store(parts[1], None, arguments.device))
    seconds = round(time.monotonic() - began, 1)
    for at, run in enumerate(runs):
        whole = len(history[at]) == 1 + (arguments.epochs or EPOCHS[recipe][task])
        kept = {"run": run.name, **run._asdict(), "stack_seconds": seconds, "stack": len(runs)}
        kept |= {"train": scores[0][at], "test": scores[1][at]} if whole else {"diverged": len(history[at])}
        # Experiment 2 has hundreds of epochs; of these the first and the last are kept with the results.
        shown = (
            history[at]
            if recipe == "experiment1"
            else [history[at][e] for e in sorted({0, min(1, len(history[at]) - 1), len(history[at]) - 1})]
        )
        with (arguments.out / "histories.jsonl").open("a") as lines:
            lines.write(json.dumps({"run": run.name, "epochs": history[at]}) + "\n")
        running.add(RESULTS, {**kept, "epochs": shown})
    print(f"{recipe} {task} T {length} s_A {runs[0].start} {len(runs)} runs {seconds} s", flush=True)


def _tenth(data: Examples, seed: int) -> np.ndarray:
    """Return the rows of a balanced tenth of the reviews."""
    random = np.random.default_rng(seed)
    each = len(data.labels) // 20
    return np.sort(np.concatenate([random.permutation(np.flatnonzero(data.labels == c))[:each] for c in (0, 1)]))


def start_of(run: Run, vocabulary: int) -> Any:
    """Return the model of a run before training, the one of `analyze train` on generated sequences."""
    from ssmscope.api.checkpoint import seed_everything
    from ssmscope.data.tokens import SequenceData
    from ssmscope.zoo.documents import symbol_tokenizer
    from ssmscope.zoo.training.build import build

    classes = tuple(map(str, range(CLASSES[run.task])))
    nothing = np.zeros((0, 0), dtype=np.int64)
    data = SequenceData(run.task, "train", nothing, nothing, tuple(map(str, range(vocabulary))), classes)
    tokenizer = symbol_tokenizer(data.tokens)
    seed_everything(run.seed)
    options = {**settled(run._replace(task="majority")), "width": WIDTH[run.task]}
    return build(options, data, tokenizer)[1]


def main() -> None:
    found = running.verbs(__doc__, tokens, train)
    found["tokens"].add_argument("--to", type=Path, required=True)
    verb = found["train"]
    verb.add_argument("--imdb", type=Path, help="the file that `tokens` wrote, for reviews")
    verb.add_argument("--device", default="cuda")
    verb.add_argument("--compile", action="store_true", help="fuse the sum over tokens")
    verb.add_argument("--recipes", nargs="+", choices=list(EPOCHS), default=list(EPOCHS))
    verb.add_argument("--tasks", nargs="+", choices=list(CLASSES), default=list(CLASSES))
    verb.add_argument("--small-steps", action="store_true", help="the arm of that name, on reviews, alone")
    verb.add_argument("--first", type=int, help="so many lengths and starts only, to try the script")
    verb.add_argument("--epochs", type=int, help="fewer epochs, to try the script")
    running.start(found)


if __name__ == "__main__":
    main()
