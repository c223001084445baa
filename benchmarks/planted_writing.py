"""Facts written into the state while a model writes, in models of which we know what they will say.

    python benchmarks/planted_writing.py                            # some minutes on a core
    python benchmarks/planted_writing.py --models mamba2 --seeds 0 --json results/planted-writing.jsonl

A model reads pairs of a key and a value in any order and then writes them in the order of the keys: what it writes next
is known, and each value is recalled. Once it has written the first pair, one fact that it has not come to is exchanged:
to the states of all layers is added what distinguishes the states of two other prompts, which have the same keys in the
same places, other values, and for this key the one value or the other. That answer must become the other value, and no
other answer may change. The states are those of when these prompts, too, have written their first pair ("fact"), or
those of the text's own two versions when the fact has just passed the convolutions ("at its place"): what a model moves
after that is not in them. A Gaussian direction that is in every layer as long is added in place of the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from planted import MODELS
from torch import Tensor
from torch.nn.functional import cross_entropy

import ssmscope
from ssmscope.core.edits import Site, new_state
from ssmscope.core.lasting_edits import while_writing
from ssmscope.core.trace import LayerState

KEYS, VALUES = 6, 8
SIGN = KEYS + VALUES
"""The token after the pairs; keys are the first tokens, values come next."""
BATCH = 64
REACH = 3
"""Tokens that a convolution reads before its own: a fact is in the state once so many have come after it."""
FIRST = 2
"""Tokens that are written before the fact is."""


def prompts(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The prompts, (count, 2 · KEYS + 1), and the value of each key, (count, KEYS)."""
    order = random.permuted(np.tile(np.arange(KEYS), (count, 1)), axis=1)
    values = KEYS + random.integers(0, VALUES, (count, KEYS))
    pairs = np.stack([order, np.take_along_axis(values, order, axis=1)], axis=2).reshape(count, -1)
    return np.concatenate([pairs, np.full((count, 1), SIGN)], axis=1), values


def answers(values: np.ndarray) -> np.ndarray:
    """What is to be written: every key and its value."""
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


def after_fact(model: ssmscope.Model, texts: np.ndarray, places: np.ndarray) -> list[LayerState]:
    """The states of all layers when the value of each text's fact, at `places`, has passed the convolutions."""
    cut = [text[: place + 1 + REACH].tolist() for text, place in zip(texts, np.broadcast_to(places, len(texts)))]
    return list(model.run(model.encode(ids=cut), last_only=True).states)


def added(differences: list[tuple[Tensor, ...]]) -> Any:
    def change(state: LayerState, site: Site) -> LayerState:
        return replace(state, ssm=tuple(H + d for H, d in zip(state.ssm, differences[site.layer])))

    return while_writing(new_state(-1, change, name="fact written"), start=FIRST - 1, stop=FIRST)


def measured(model: ssmscope.Model, random: np.random.Generator, count: int) -> dict[str, Any]:
    """Shares of solved prompts whose answer became the other value, and of their other answers that changed."""
    texts, values = prompts(random, count)
    plain = np.array(model.generate(ids=texts.tolist(), max_new_tokens=2 * KEYS, batch_size=count).ids)
    right = (plain == answers(values)).all(1)
    texts, values, plain = texts[right], values[right], plain[right]
    key = random.integers(2, KEYS, len(texts))  # The next answer may have been looked up already.
    rows = np.arange(len(texts))
    old = values[rows, key]
    new = KEYS + (old - KEYS + random.integers(1, VALUES, len(texts))) % VALUES
    places = (texts[:, : 2 * KEYS : 2] == key[:, None]).argmax(1) * 2 + 1
    donors = np.where((texts >= KEYS) & (texts < SIGN), KEYS + random.integers(0, VALUES, texts.shape), texts)
    first = (texts[:, : 2 * KEYS : 2] == 0).argmax(1) * 2 + 1
    facts, own = (
        exchanged(
            model, np.concatenate([each, [[0, value] for value in each[rows, first]]], axis=1), places, old, new, at
        )
        for each, at in ((donors, texts.shape[1] + FIRST), (texts, places))
    )
    generator = torch.Generator().manual_seed(int(random.integers(2**31)))
    drawn = [tuple(like(d, generator) for d in each) for each in facts]
    found: dict[str, Any] = {"prompts": count, "solved": float(right.mean())}
    asked = np.zeros_like(plain, dtype=bool)
    asked[rows, 2 * key + 1] = True
    for name, differences in (("fact", facts), ("at its place", own), ("random", drawn)):
        made = model.generate(ids=texts.tolist(), max_new_tokens=2 * KEYS, edits=added(differences))
        said = np.array(made.ids)
        found[f"{name}: becomes the other value"] = float((said[asked] == new).mean())
        found[f"{name}: changes"] = float((said[asked] != old).mean())
        found[f"{name}: other answers change"] = float((said != plain)[:, FIRST:][~asked[:, FIRST:]].mean())
    return found


def exchanged(
    model: ssmscope.Model, texts: np.ndarray, places: np.ndarray, old: np.ndarray, new: np.ndarray, at: Any
) -> list[tuple[Tensor, ...]]:
    """What the states have more, `at` these places, of texts with the new value than of those with the old one."""
    found = []
    for value in (new, old):
        versions = texts.copy()
        versions[np.arange(len(texts)), places] = value
        found.append(after_fact(model, versions, at))
    return [tuple(a - b for a, b in zip(one.ssm, two.ssm)) for one, two in zip(*found)]


def like(difference: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian directions of the same norm, for every text."""
    drawn = torch.randn(difference.shape, generator=generator)
    norms = (t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1)) for t in (difference, drawn))
    return drawn * next(norms) / next(norms)


def lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in options.models:
        for seed in options.seeds:
            model = trained(name, seed, options.steps)
            yield {"model": name, "seed": seed, **measured(model, np.random.default_rng([seed, 1]), options.examples)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mamba2", "mamba"], choices=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--json", type=Path, help="File to which every line is added.")
    options = parser.parse_args()
    for line in lines(options):
        print(json.dumps(line), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
