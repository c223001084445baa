"""Facts written into the state while a model writes, in models of which we know what they will say.

    python benchmarks/planted_writing.py                                # some ten minutes on a core
    python benchmarks/planted_writing.py --models mamba2 --seeds 0

A model reads pairs of a key and a value in any order and then writes them in the order of the keys: what it writes next
is known, and each value is recalled. While it writes, one fact that it has not come to is exchanged: to the states of
all layers is added what distinguishes the states of two other prompts, which have the same keys in the same places,
other values, and for this key the one value or the other, once as much has been written after them. That answer must
become the other value, and no other answer may change. A Gaussian direction that is as long in every layer is added in
its place.

The fact is written after two pairs, when no convolution's tail holds a token of the prompt. After one pair the tails
still hold what the prompt's last token has read, and it may not be in a state yet: there the fact is written into the
states alone, and into the states and the tails. Prompts are drawn apart from those of the training.

Each model's result is a line of benchmarks/results/planted-writing.jsonl and is not measured again. Results of other
`--steps` are printed alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import running
import torch
from planted import MODELS
from torch import Tensor
from torch.nn.functional import cross_entropy
import ssmscope
from ssmscope.core.edits import Site, new_state
from ssmscope.core.lasting_edits import LastingEdit, while_writing
from ssmscope.core.trace import LayerState

RESULTS = Path(__file__).parent / "results" / "planted-writing.jsonl"
KEYS, VALUES = 6, 8
SIGN = KEYS + VALUES
"""The token after the pairs; keys are the first tokens, values come next."""
BATCH = 64
PAIRS = 2
"""Written pairs after which the fact is written: four tokens, one more than a convolution's tail holds."""
SEEDS = range(6)
PROMPTS = 500
STEPS = 2000
"""Maximum number of training steps."""


def prompts(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The prompts, (count, 2 · KEYS + 1), and the value of each key, (count, KEYS)."""
    order = random.permuted(np.tile(np.arange(KEYS), (count, 1)), axis=1)
    values = KEYS + random.integers(0, VALUES, (count, KEYS))
    pairs = np.stack([order, np.take_along_axis(values, order, axis=1)], axis=2).reshape(count, -1)
    return np.concatenate([pairs, np.full((count, 1), SIGN)], axis=1), values


def answers(values: np.ndarray) -> np.ndarray:
    """The pairs that a model has to write: every key and its value."""
    return np.stack([np.broadcast_to(np.arange(KEYS), values.shape), values], axis=2).reshape(len(values), -1)


def trained(name: str, seed: int, steps: int) -> ssmscope.Model:
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model = ssmscope.load(MODELS[name](vocab_size=SIGN + 1, num_hidden_layers=2))
    model.module.generation_config.eos_token_id = None
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.module.train()
    recent: list[float] = []
    for _ in range(steps):
        first, values = prompts(random, BATCH)
        ids = torch.from_numpy(np.concatenate([first, answers(values)], axis=1))
        with ssmscope.fast_scan(model.module):
            logits = model.module(ids[:, :-1]).logits[:, 2 * KEYS :]
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 2 * KEYS + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent[-19:], loss.item()]
        if max(recent) < 0.003 and len(recent) == 20:
            break
    model.module.eval()
    return model


def measured(model: ssmscope.Model, random: np.random.Generator, count: int) -> dict[str, Any]:
    """Return what a fact changes in the solved prompts, written after PAIRS pairs into all layers or into one, beside
    random directions, and after one pair into the states alone and with the convolutions' tails. If none is solved,
    only that is returned."""
    texts, values = prompts(random, count)
    plain = said(model, texts)
    right = (plain == answers(values)).all(1)
    texts, plain = texts[right], plain[right]
    found: dict[str, Any] = {"prompts": count, "solved": float(right.mean())}
    if not len(texts):
        return found
    layers = len(model.run(model.encode(ids=texts[:1].tolist()), last_only=True).states)
    for pairs in (PAIRS, 1):
        key = random.integers(pairs + 1, KEYS, len(texts))  # The next answer may have been looked up already.
        old = plain[np.arange(len(texts)), 2 * key + 1]
        new = KEYS + (old - KEYS + random.integers(1, VALUES, len(texts))) % VALUES
        donors = np.where((texts >= KEYS) & (texts < SIGN), KEYS + random.integers(0, VALUES, texts.shape), texts)
        fact = exchanged(model, donors, key, old, new, pairs)
        if pairs == PAIRS:
            drawn = [like(each, torch.Generator().manual_seed(layer)) for layer, each in enumerate(fact)]
            edits = {"fact": added(fact, pairs), "random": added(drawn, pairs)}
            edits |= {f"layer {layer}": added(fact, pairs, layers=(layer,)) for layer in range(layers)}
        else:
            edits = {"early": added(fact, pairs), "early, with tails": added(fact, pairs, tails=True)}
        for name, edit in edits.items():
            found[name] = changed(said(model, texts, edit), plain, key, new, pairs)
    return found


def said(model: ssmscope.Model, texts: np.ndarray, *edits: LastingEdit) -> np.ndarray:
    return np.array(model.generate(ids=texts.tolist(), max_new_tokens=2 * KEYS, edits=edits).ids)


def exchanged(
    model: ssmscope.Model, texts: np.ndarray, key: np.ndarray, old: np.ndarray, new: np.ndarray, pairs: int
) -> list[LayerState]:
    """Return what the states of all layers have more, after so many written pairs, with each text's new value."""
    rows = np.arange(len(texts))[:, None]
    places = (texts[:, : 2 * KEYS : 2, None] == np.arange(KEYS)).argmax(1) * 2 + 1  # of each key's value
    found = []
    for value in (new, old):
        versions = texts.copy()
        versions[rows[:, 0], places[rows[:, 0], key]] = value
        written = answers(versions[rows, places])[:, : 2 * pairs]
        batch = model.encode(ids=np.concatenate([versions, written], axis=1).tolist())
        found.append(model.run(batch, last_only=True).states)
    return [LayerState(one.conv - two.conv, tuple(a - b for a, b in zip(one.ssm, two.ssm))) for one, two in zip(*found)]


def added(
    differences: list[LayerState], pairs: int, layers: tuple[int, ...] | None = None, tails: bool = False
) -> LastingEdit:
    """Add to the states, and to the convolutions' tails, when the last token of so many pairs has been read."""

    def change(state: LayerState, site: Site) -> LayerState:
        more = differences[site.layer]
        ssm = tuple(H + difference for H, difference in zip(state.ssm, more.ssm))
        return replace(state, ssm=ssm, conv=state.conv + more.conv if tails else state.conv)

    edit = new_state(-1, change, layers=layers, name="fact written")
    return while_writing(edit, start=2 * pairs - 1, stop=2 * pairs)


def like(difference: LayerState, generator: torch.Generator) -> LayerState:
    """Return a Gaussian direction for every text, of the norm of its states' difference in this layer."""
    drawn = [torch.randn(each.shape, generator=generator) for each in difference.ssm]
    scale = norm(difference.ssm) / norm(drawn)
    return LayerState(difference.conv, tuple(each * scale.view(-1, *[1] * (each.ndim - 1)) for each in drawn))


def norm(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=1).norm(dim=1)


def changed(made: np.ndarray, plain: np.ndarray, key: np.ndarray, new: np.ndarray, pairs: int) -> dict[str, float]:
    """Return the shares of answers that became the new value and that changed, and of the other answers still to come
    that changed."""
    rows, at = np.arange(len(made)), 2 * key + 1
    differ = made != plain
    others = differ.copy()
    others[rows, at] = False
    return {
        "becomes the other value": float((made[rows, at] == new).mean()),
        "changes": float(differ[rows, at].mean()),
        "others change": float(others[:, 2 * pairs + 1 :: 2].sum() / (len(made) * (KEYS - pairs - 1))),
    }


NAMES = {"mamba2": "Mamba-2", "mamba": "Mamba", "diff-mamba": "Diff-Mamba"}
COLUMNS = {
    "becomes the other value": ("fact", "becomes the other value"),
    "other answers change": ("fact", "others change"),
    "random: answer changes": ("random", "changes"),
    "random: others change": ("random", "others change"),
    "in layer 0 alone": ("layer 0", "becomes the other value"),
    "in layer 1 alone": ("layer 1", "becomes the other value"),
    "after one pair": ("early", "becomes the other value"),
    "after one pair, with tails": ("early, with tails", "becomes the other value"),
}


def docs_table() -> list[str]:
    """Return what facts change, in per cent, the lowest and the highest of the seeds."""
    rows = ["| | solved | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for name in MODELS:
        own = [each for each in running.read(RESULTS) if each["model"] == name]
        cells = [[each["solved"] for each in own], *([each[a][b] for each in own] for a, b in COLUMNS.values())]
        rows += [f"| {NAMES[name]} | {' | '.join(map(spread, cells))} |"] * bool(own)
    return rows


def spread(shares: Sequence[float]) -> str:
    low, high = (f"{100 * share:.1f}" for share in (min(shares), max(shares)))
    return low if low == high else f"{low} – {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    kept = options.steps == STEPS
    done = {(each["model"], each["seed"]) for each in running.read(RESULTS)} if kept else set()
    for name in options.models:
        for seed in (each for each in options.seeds if (name, each) not in done):
            model = trained(name, seed, options.steps)
            found = measured(model, np.random.default_rng([seed, 2]), PROMPTS)
            if "fact" not in found:
                print(f"{name} {seed}: no prompt of {PROMPTS} is solved after {options.steps} steps", flush=True)
                continue
            if kept:
                running.add(RESULTS, {"model": name, "seed": seed, **found})
            print(name, seed, found["fact"] if kept else found, flush=True)
    if kept:
        print("\n".join(docs_table()))


if __name__ == "__main__":
    main()
