"""Patching and knockout on models of which we know where the answer stands: trained on associative recall.

    python benchmarks/planted.py         # three seeds of each architecture, some minutes each on two cores

A key and its value stand once among other pairs, and the key comes again at the end; the corrupted text has another
value. What was put into the state behind the value must flip the answer, what is put in before it must not, and of all
tokens the value's edges must be those whose loss costs the answer.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

import ssmscope
from ssmscope.cuts import cut_edges
from ssmscope.models.diff_mamba import DiffMambaConfig, DiffMambaForCausalLM
from ssmscope.tasks.mad import associative_recall

LENGTH, VOCABULARY, WIDTH, LAYERS = 16, 16, 64, 2
TWO = dict(head_dim=16, num_heads=8, n_groups=1, state_size=16, chunk_size=16)
SIZES = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, expand=2, use_cache=False)
MODELS = {
    "mamba2": lambda: Mamba2ForCausalLM(Mamba2Config(**SIZES, **TWO)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SIZES, state_size=16)),
    "diff-mamba": lambda: DiffMambaForCausalLM(DiffMambaConfig(**SIZES, **TWO)),
}


def trained(name: str, seed: int, steps: int, batch: int = 64) -> tuple[ssmscope.Model, float]:
    """A model that was trained until it solves the task, and its accuracy on new sequences."""
    torch.manual_seed(seed)
    model = ssmscope.load(MODELS[name]())
    train, test = associative_recall(
        length=LENGTH, vocabulary=VOCABULARY, train_examples=20_000, test_examples=1000, seed=seed
    )
    ids, targets = torch.from_numpy(train.ids), torch.from_numpy(train.targets)
    model.module.train()
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        rows = torch.randint(0, len(ids), (batch,))
        with ssmscope.fast_scan(model.module):
            logits = model.module(ids[rows]).logits
        loss = cross_entropy(logits.flatten(0, 1), targets[rows].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99 and loss.item() < 0.002:
            break
    model.module.eval()
    found = model.logits(model.encode(ids=test.ids.tolist())).argmax(-1).numpy()
    where = test.targets >= 0
    return model, float((found == test.targets)[where].mean())


def examples(model: ssmscope.Model, seed: int, count: int) -> list[tuple[list[int], list[int], int]]:
    """Clean and corrupted sequences that end with a key which came once before, and the place of its value; the model
    solves both."""
    _, test = associative_recall(length=LENGTH, vocabulary=VOCABULARY, train_examples=1, test_examples=2000, seed=seed)
    random = np.random.default_rng(seed)
    found = []
    for row in test.ids.tolist():
        prompt, answer = row[:-1], row[-1]
        places = [at for at in range(0, len(prompt) - 1, 2) if prompt[at] == prompt[-1]]
        if len(places) != 1:
            continue
        other = int(random.choice([v for v in range(VOCABULARY // 2, VOCABULARY) if v != answer]))
        changed = list(prompt)
        changed[places[0] + 1] = other
        said = model.run(model.encode(ids=[prompt, changed]), last_only=True).logits.argmax(-1).tolist()
        if said == [answer, other]:
            found.append((prompt, changed, places[0] + 1))
        if len(found) == count:
            break
    return found


def measure(name: str, seed: int, steps: int, count: int) -> str:
    start = time.perf_counter()
    model, accuracy = trained(name, seed, steps)
    taken = time.perf_counter() - start
    flips: dict[str, list[bool]] = {"all": [], "best": [], "before": []}
    of_layers, lost, first = [], [], []
    solved = examples(model, seed, count)
    for clean, corrupted, place in solved:
        differences = ssmscope.patch(model, clean=clean, corrupted=corrupted, site="state").values[..., 1]
        flips["before"] += (differences[:, :place] > 0).flatten().tolist()
        flips["all"] += (differences[-1, place:] > 0).tolist()
        of_layers.append((differences[:-1, place:] > 0).mean(1))
        length = len(clean)
        batch = model.encode(ids=[clean] * length)
        cut = cut_edges(
            torch.eye(length, dtype=torch.bool), batch.mask & (torch.arange(length) == length - 1), level="block"
        )
        answer = int(model.run(model.encode(ids=clean), last_only=True).logits.argmax())
        logits = model.run(batch, edits=cut, last_only=True).logits
        lost.append(int(logits[place].argmax()) != answer)
        first.append(int(logits.log_softmax(-1)[:, answer].argmin()) == place)
    layers = " ".join(f"{100 * share:.0f} %" for share in np.mean(of_layers, axis=0))
    shares = [100 * float(np.mean(each)) for each in (flips["all"], flips["before"], lost, first)]
    return (
        f"| {name} | {seed} | {100 * accuracy:.1f} % | {len(solved)} | {shares[0]:.1f} % | {layers} "
        f"| {shares[1]:.1f} % | {shares[2]:.1f} % | {shares[3]:.1f} % | {taken:.0f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--examples", type=int, default=100)
    options = parser.parse_args()
    print(
        "| model | seed | accuracy | solved | behind, all layers | layer by layer | before | knockout loses | finds |"
    )
    for name in options.models.split(","):
        for seed in range(options.seeds):
            print(measure(name, seed, options.steps, options.examples), flush=True)


if __name__ == "__main__":
    main()
