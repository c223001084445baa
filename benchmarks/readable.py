"""Survival and readable, the share that is read: what rescaled states change, and which finds a planted pair.

python benchmarks/readable.py demo/sst2-mamba --data sst2            # rows of x_proj: B_n · s_n, C_n / s_n
python benchmarks/readable.py runs/planted-recall --data planted-recall --reasons
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
import ssmscope
from ssmscope.core.bootstrap import estimate, resampled_means
from ssmscope.interp.labelled import marked_tokens
from ssmscope.interp.plausibility.measure import average_precision, chance_precision

SCORES = {"survival": False, "readable": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", default="sst2")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--reasons", action="store_true")
    given = parser.parse_args()
    model = ssmscope.load(given.model, dtype="float32")
    data = ssmscope.load_text(given.data).sample(given.limit, seed=0)
    (reasons if given.reasons else rescaling)(model, data)


def shares(model, data) -> Iterator[dict[str, np.ndarray]]:
    """Yield both scores of every text's ordinary tokens, means over layers."""
    for text in data.texts:
        trace = model.trace(text)
        own = np.array([word is not None for word in trace.words[0]])
        yield {name: trace.survival(readable=how).mean(0)[0].cpu().numpy()[own] for name, how in SCORES.items()}


def rescaling(model, data) -> None:
    """Print in how many texts the top token stays the same when each state of a Mamba is given another unit, and the
    largest change of a share and of a logit."""
    before, logits = list(shares(model, data)), model.trace(list(data.texts)).logits
    random = np.random.default_rng(0)
    with torch.no_grad():
        for mixer in model.mixers:
            rank, states = mixer.dt_proj.in_features, mixer.A_log.shape[1]
            scale = torch.from_numpy(np.exp(random.normal(0, 1, states))).float()[:, None]
            mixer.x_proj.weight[rank : rank + states] *= scale
            mixer.x_proj.weight[rank + states :] /= scale
    after, moved = list(shares(model, data)), model.trace(list(data.texts)).logits
    print("largest change of a logit", float((moved - logits).abs().max()))
    for name in SCORES:
        same = np.mean([one[name].argmax() == other[name].argmax() for one, other in zip(before, after)])
        change = max(np.abs(one[name] - other[name]).max() for one, other in zip(before, after))
        print(name, "same top token in", f"{same:.3f};", "largest change of a share", f"{change:.4f}")


def reasons(model, data) -> None:
    """Print the AUPRC of both scores for planted reasons, with the expected one of a random order."""
    found, chance = [], []
    for row, (text, scores) in enumerate(zip(data.texts, shares(model, data))):
        own = np.array([word is not None for word in model.encode([text]).words[0]])
        mask = marked_tokens(model, text, data.rationales[row])[own]
        found.append([average_precision(scores[name], mask) for name in SCORES])
        chance.append(chance_precision(len(mask), int(mask.sum())))
    rows = resampled_means(np.array(found), seed=0)
    print({name: str(estimate(column)) for name, column in zip(SCORES, rows.T)}, f"random {np.mean(chance):.3f}")


if __name__ == "__main__":
    main()
