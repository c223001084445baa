"""Patching and knockout on models with a known place of the answer, trained on tasks that determine it.

    python benchmarks/planted.py                                    # half an hour on two cores
    python benchmarks/planted.py --tasks induction --models mamba2  # some minutes

- recall: a key and its value stand once among other pairs, and the key comes again at the end.
- induction: a token stands once among others, all of them different, and comes again at the end; the token behind it is
  the answer (A B … A).
- two-hop: who took the object, and where did that person go? Stories of qa2 (`ssmscope.data.babi`) of three to five
  facts, in which the place is changed where the person walked to it, or the person who took the object. Models are
  those of --stories, trained before (`analyze train mamba2 --data qa2 --length 1 …`, minutes on a GPU).

In the corrupted text one token is another, and so is the answer. What was put into the state behind that token must
flip the answer, what is put in before it must not, and of all tokens its edges must be those whose loss costs it. With
its edges and its taps in the convolutions cut, the answer must be lost as often as with a stranger in the token's
place, one that stands nowhere else in the text: what is left of it then is a guess.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import running
import torch
from torch.nn.functional import cross_entropy
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
import ssmscope
from ssmscope.core.cuts import cut_convolution, cut_edges
from ssmscope.core.known_models import demos
from ssmscope.data.babi import Question, questions
from ssmscope.data.stories import PERSONS, PLACES
from ssmscope.data.tokens import IGNORED
from ssmscope.zoo.diff_mamba import DiffMambaConfig, DiffMambaForCausalLM
from ssmscope.zoo.mad import associative_recall

WIDTH, BATCH = 64, 64
MAMBA2 = dict(head_dim=16, num_heads=8, n_groups=1, state_size=16, chunk_size=16)
SIZES = dict(hidden_size=WIDTH, expand=2, use_cache=False)
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "mamba2": lambda **sizes: Mamba2ForCausalLM(Mamba2Config(**SIZES, **MAMBA2, **sizes)),
    "mamba": lambda **sizes: MambaForCausalLM(MambaConfig(**SIZES, state_size=16, **sizes)),
    "diff-mamba": lambda **sizes: DiffMambaForCausalLM(DiffMambaConfig(**SIZES, **MAMBA2, **sizes)),
}


class Pair(NamedTuple):
    """A text, as ids or as words of a token each, the same with another token at one place, the answers of both, and
    the tokens that might stand in that place and are in neither text."""

    clean: list[Any]
    corrupted: list[Any]
    place: int
    answers: tuple[Any, Any]
    strangers: tuple[Any, ...]

    def encoded(self, model: ssmscope.Model) -> Pair:
        """Return the pair in the ids of a model of words."""
        ids = [model.encode(" ".join(text)).input_ids[0].tolist() for text in (self.clean, self.corrupted)]
        answers, strangers = (
            tuple(int(model.encode(word).input_ids[0]) for word in each) for each in (self.answers, self.strangers)
        )
        assert len(ids[0]) == len(self.clean)
        return Pair(ids[0], ids[1], self.place, (answers[0], answers[1]), strangers)


class Task(NamedTuple):
    """Task that models learn, with known places of the answers of pairs.

    Attributes:
        examples: from a seed, the ids and targets of a training and a test set.
        pairs: from a seed, texts of which one token is changed.
    """

    vocabulary: int
    layers: int
    steps: int
    examples: Callable[[int], tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]]
    pairs: Callable[[int], Iterator[Pair]]


LENGTH, VOCABULARY = 16, 16


def recall(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    train, test = associative_recall(
        length=LENGTH, vocabulary=VOCABULARY, train_examples=20_000, test_examples=1000, seed=seed
    )
    return (train.ids, train.targets), (test.ids, test.targets)


def values_changed(seed: int) -> Iterator[Pair]:
    """Sequences that end with a key which came once before, with another value."""
    _, test = associative_recall(length=LENGTH, vocabulary=VOCABULARY, train_examples=1, test_examples=2000, seed=seed)
    random = np.random.default_rng(seed)
    for row in test.ids.tolist():
        prompt, answer = row[:-1], row[-1]
        places = [at for at in range(0, len(prompt) - 1, 2) if prompt[at] == prompt[-1]]
        if len(places) == 1:
            other = int(random.choice([v for v in range(VOCABULARY // 2, VOCABULARY) if v != answer]))
            yield changed(prompt, places[0] + 1, other, (answer, other), range(VOCABULARY // 2, VOCABULARY))


def changed(prompt: list[Any], place: int, token: Any, answers: tuple[Any, Any], alike: Sequence[Any]) -> Pair:
    other = [token if at == place else own for at, own in enumerate(prompt)]
    return Pair(prompt, other, place, answers, tuple(each for each in alike if each not in prompt + other))


SYMBOLS, DISTINCT, ASKED = 24, 12, 4
"""Of induction: the tokens there are, how many come before the first question, and the questions of a training row."""


def copied(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that are all different, and then questions: a token of no other use, one of those before, and the token
    that followed it, which is the target."""
    rows = np.arange(count)[:, None]
    first = random.permuted(np.tile(np.arange(SYMBOLS), (count, 1)), axis=1)[:, :DISTINCT]
    asked = random.permuted(np.tile(np.arange(DISTINCT - 1), (count, 1)), axis=1)[:, :ASKED]
    parts = np.stack([np.full_like(asked, SYMBOLS), first[rows, asked], first[rows, asked + 1]], axis=2)
    ids = np.concatenate([first, parts.reshape(count, -1)], axis=1)
    targets = np.full_like(ids, IGNORED)
    targets[:, DISTINCT + 1 :: 3] = first[rows, asked + 1]
    return ids, targets


def induction(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    return copied(np.random.default_rng([seed, 0]), 20_000), copied(np.random.default_rng([seed, 1]), 1000)


def successors_changed(seed: int) -> Iterator[Pair]:
    """A B … A, and the same with another B that does not stand anywhere else."""
    random = np.random.default_rng([seed, 2])
    for row in copied(random, 2000)[0].tolist():
        prompt = row[: DISTINCT + 2]
        place = prompt.index(prompt[-1]) + 1
        other = int(random.choice([token for token in range(SYMBOLS) if token not in prompt]))
        yield changed(prompt, place, other, (prompt[place], other), range(SYMBOLS))


FACTS = 3, 5
SHIPPED = "demo/babi-mamba2", "demo/babi-diff-mamba", "demo/babi-hybrid"


def hops(seed: int) -> Iterator[tuple[Question, int, int]]:
    """Stories whose object was touched once, by being taken, with the places of that fact and of the person's walk."""
    for one in questions("qa2", length=0, examples=3000, split="test", facts=FACTS, seed=seed).examples:
        thing = one.question.split()[-2]
        touched = [at for at, fact in enumerate(one.facts) if fact.text.split()[-2] == thing]
        if len(touched) == 1:
            yield one, touched[0], next(at for at, f in enumerate(one.facts) if f.supporting and at != touched[0])


def replaced(one: Question, place: int, word: str, answers: tuple[str, str], alike: Sequence[str]) -> Pair:
    return changed(f"{one.context} {one.question}".split(), place, word, answers, alike)


def places_changed(seed: int) -> Iterator[Pair]:
    """The person of the second hop walked to a place that the story does not name otherwise."""
    random = np.random.default_rng(seed)
    for one, _, walk in hops(seed):
        other = str(random.choice([place for place in PLACES if place not in one.context]))
        yield replaced(one, one.facts[walk].last_word - 2, other, (one.answer, other), PLACES)


def persons_changed(seed: int) -> Iterator[Pair]:
    """Another person took the object, who had walked somewhere before, and is now at another place."""
    random = np.random.default_rng(seed)
    for one, taken, _ in hops(seed):
        facts = [fact.text.split() for fact in one.facts]
        walked = {fact[0]: fact[-2] for fact in facts if fact[-2] in PLACES}
        before = {fact[0] for fact in facts[:taken] if fact[-2] in PLACES}
        others = sorted(name for name in before if name != facts[taken][0] and walked[name] != one.answer)
        if others:
            name = str(random.choice(others))
            yield replaced(one, one.facts[taken].first_word, name, (one.answer, walked[name]), PERSONS)


TASKS = {
    "recall": Task(VOCABULARY, 2, 800, recall, values_changed),
    "induction": Task(SYMBOLS + 1, 2, 1200, induction, successors_changed),
}
STORIES: dict[str, Callable[[int], Iterator[Pair]]] = {"place": places_changed, "person": persons_changed}


def trained(task: Task, name: str, seed: int, steps: int) -> tuple[ssmscope.Model, float]:
    """A model that was trained until it solves the task, and its accuracy on new texts."""
    torch.manual_seed(seed)
    model = ssmscope.load(MODELS[name](vocab_size=task.vocabulary, num_hidden_layers=task.layers))
    train, test = task.examples(seed)
    ids, targets = map(torch.from_numpy, train)
    model.module.train()
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        rows = torch.randint(0, len(ids), (BATCH,))
        with ssmscope.fast_scan(model.module):
            logits = model.module(ids[rows]).logits
        loss = cross_entropy(logits.flatten(0, 1), targets[rows].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99 and loss.item() < 0.002:
            break
    model.module.eval()
    found = model.logits(model.encode(ids=test[0].tolist())).argmax(-1).numpy()
    where = test[1] != IGNORED
    return model, float((found == test[1])[where].mean())


def solved(model: ssmscope.Model, pairs: Iterator[Pair], count: int) -> list[Pair]:
    """The first pairs both of whose texts the model solves."""
    found: list[Pair] = []
    for pair in pairs:
        said = model.run(model.encode(ids=[pair.clean, pair.corrupted]), last_only=True).logits.argmax(-1).tolist()
        if said == list(pair.answers):
            found.append(pair)
        if len(found) == count:
            break
    return found


def knocked_out(model: ssmscope.Model, pair: Pair) -> list[float]:
    """Return whether the answer is lost with the token's edges to the last one, and whether no other token's edges cost
    as much; the same of its edges to all later ones; whether it is lost with these and the convolutions' taps; and in
    what share it is with strangers in the token's place."""
    answer, length = pair.answers[0], len(pair.clean)
    steps, each = torch.arange(length), torch.eye(length, dtype=torch.bool)
    last, later = (steps == length - 1).expand(length, -1), steps > steps[:, None]
    found: list[float] = []
    for reads, more in ((last, []), (later, []), (later, [cut_convolution(each, later)])):
        edits = [*more, cut_edges(each, reads, level="block")]
        logits = model.run(model.encode(ids=[pair.clean] * length), edits=edits, last_only=True).logits
        found.append(int(logits[pair.place].argmax()) != answer)
        if not more:
            found.append(int(logits.log_softmax(-1)[:, answer].argmin()) == pair.place)
    texts = [[*pair.clean[: pair.place], other, *pair.clean[pair.place + 1 :]] for other in pair.strangers]
    said = model.run(model.encode(ids=texts), last_only=True).logits.argmax(-1)
    return [*found, float((said != answer).double().mean())]


def measure(model: ssmscope.Model, pairs: Iterator[Pair], count: int) -> tuple[int, list[float]]:
    """Return how many of the first pairs the model solves, and the effects of interventions in them, in per cent."""
    flips: dict[str, list[bool]] = {"all": [], "before": []}
    of_layers, lost = [], []
    chosen = solved(model, pairs, count)
    for pair in chosen:
        right, wrong = pair.answers
        values = ssmscope.patch(
            model, clean=pair.clean, corrupted=pair.corrupted, site="state", answer=right, contrast=wrong
        ).values[..., 1]
        flips["before"] += (values[:, : pair.place] > 0).flatten().tolist()
        flips["all"] += (values[-1, pair.place :] > 0).tolist()
        of_layers.append((values[:-1, pair.place :] > 0).mean(1))
        lost.append(knocked_out(model, pair))
    behind, before = (100 * float(np.mean(each)) for each in flips.values())
    most = 100 * float(np.mean(of_layers, axis=0).max())
    return len(chosen), [behind, most, before, *(100 * np.mean(lost, axis=0)).tolist()]


def table(
    task: str, name: str, models: Iterator[tuple[str, float, ssmscope.Model, Iterator[Pair]]], count: int
) -> None:
    """A line for each seed's model, given with its accuracy and pairs, and their mean with its 95 % t interval."""
    rows = []
    for seed, accuracy, model, pairs in models:
        solves, cells = measure(model, pairs, count)
        rows.append([100 * accuracy, *cells])
        print(
            f"| {task} | {name} | {seed} | {solves} | " + " | ".join(f"{x:.1f} %" for x in rows[-1]) + " |", flush=True
        )
    if len(rows) > 1:
        print(f"| {task} | {name} | mean | | " + " | ".join(running.told(x, 1) for x in zip(*rows)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join((*TASKS, "two-hop")))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, help="at most; each task has its own number")
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument(
        "--stories", nargs="*", default=SHIPPED, help="models of two-hop stories; those of NAME-SEED go together"
    )
    options = parser.parse_args()
    print(
        "| task, what is changed | model | seed | solved | accuracy | behind, all layers | in the best layer | before "
        "| to the last: loses | finds | to all later: loses | finds | both roads: loses | stranger: loses |\n"
        + "|---" * 14
        + "|"
    )
    seeds = options.seeds.split(",")
    for name in (task for task in options.tasks.split(",") if task in TASKS):
        task = TASKS[name]
        for family in options.models.split(","):
            made = ((seed, *trained(task, family, int(seed), options.steps or task.steps)) for seed in seeds)
            table(name, family, ((seed, a, model, task.pairs(int(seed))) for seed, model, a in made), options.examples)
    groups: dict[str, list[str]] = {}
    for path in options.stories if "two-hop" in options.tasks.split(",") else ():
        name, _, number = Path(path).name.rpartition("-")
        groups.setdefault(name if number.isdigit() else path, []).append(path)
    for family, paths in groups.items():
        for what, stories in STORIES.items():
            table(f"two-hop, {what}", family, of_stories(paths, stories), options.examples)


def record(path: str) -> dict[str, Any]:
    """Return the record of a model's training."""
    return json.loads((Path(demos().get(path, Path(path))) / "training.json").read_text())


def of_stories(
    paths: Sequence[str], stories: Callable[[int], Iterator[Pair]]
) -> Iterator[tuple[str, float, ssmscope.Model, Iterator[Pair]]]:
    for path in paths:
        model, known = ssmscope.load(path), record(path)
        test = known["test"]
        yield str(known["seed"]), test["accuracy"], model, (pair.encoded(model) for pair in stories(0))


if __name__ == "__main__":
    main()
