"""Attacks on single texts: TextAttack's own loop against ours in lockstep, on a CPU.

    SSMSCOPE_DATA=… python benchmarks/words.py                    # two demos, three recipes, 300 examples
    SSMSCOPE_DATA=… python benchmarks/words.py --recipes pwws --limit 100
    SSMSCOPE_DATA=… python benchmarks/words.py --models mamba-130m --limit 5   # random weights, a shape of timing.py

Both attack the same examples of SST-2's test split with the same parts (`ssmscope.attacks.parts`) and the same seed for
each example. TextAttack runs its `Attack` text after text, on the transformers model's own forward pass, 32 texts at a
time, padded to the longest of them (its HuggingFaceModelWrapper pads all to the tokenizer's maximum, which takes
longer). Per recipe: what was found, whether it is the same, and the times, wall and CPU, of both in this run.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from timing import machine, reader

import ssmscope
from ssmscope.attacks.parts import recipe, textattack
from ssmscope.attacks.words import word_attack
from ssmscope.attacks.words.lockstep import draw_seed
from ssmscope.attacks.words.measure import sampled_rows
from ssmscope.tasks.text import TextData, load_text

SYNONYMS = {
    "amazing": ["marvelous", "astonishing"],
    "awful": ["dreadful", "terrible"],
    "bad": ["poor", "weak", "rotten"],
    "beautiful": ["lovely", "gorgeous"],
    "best": ["finest", "greatest"],
    "better": ["finer", "nicer"],
    "big": ["large", "huge"],
    "boring": ["dull", "tedious"],
    "characters": ["figures", "roles"],
    "clever": ["smart", "witty"],
    "comedy": ["farce", "satire"],
    "dull": ["boring", "flat"],
    "enjoyable": ["pleasant", "delightful"],
    "entertaining": ["amusing", "diverting"],
    "feel": ["sense", "seem"],
    "film": ["movie", "picture"],
    "films": ["movies", "pictures"],
    "funny": ["amusing", "comical", "odd"],
    "good": ["fine", "decent", "nice"],
    "great": ["grand", "terrific", "superb"],
    "hard": ["difficult", "tough"],
    "interesting": ["engaging", "curious"],
    "kids": ["children", "youngsters"],
    "little": ["small", "tiny"],
    "look": ["appear", "seem"],
    "love": ["romance", "affection"],
    "make": ["create", "build"],
    "movie": ["film", "picture"],
    "movies": ["films", "pictures"],
    "moving": ["touching", "stirring"],
    "new": ["fresh", "recent"],
    "performances": ["portrayals", "shows"],
    "plot": ["story", "scheme"],
    "real": ["true", "genuine"],
    "sad": ["sorrowful", "unhappy"],
    "smart": ["clever", "bright"],
    "story": ["tale", "plot"],
    "strong": ["powerful", "firm"],
    "sweet": ["gentle", "charming"],
    "tale": ["story", "fable"],
    "thing": ["matter", "object"],
    "touching": ["moving", "tender"],
    "way": ["manner", "path"],
    "well": ["nicely", "properly"],
    "work": ["labor", "effort"],
    "worst": ["poorest", "weakest"],
}
"""Written for this benchmark."""


class Attacked(NamedTuple):
    """Per example its fate, the text, and how many texts were asked about; and what it took."""

    examples: list[tuple[str, str, int]]
    seconds: float
    cpu: float


def theirs(model: ssmscope.Model, data: TextData, rows: list[int], name: str, resources: dict) -> Attacked:
    """TextAttack's own loop."""
    from textattack.goal_functions import UntargetedClassification
    from textattack.models.wrappers import ModelWrapper

    class Plain(ModelWrapper):
        def __init__(self) -> None:
            self.model = model.module

        def __call__(self, texts: list[str]) -> torch.Tensor:
            batch = model.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
            with torch.no_grad():
                return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    start, cpu = time.perf_counter(), time.process_time()
    goal = UntargetedClassification(Plain(), model_batch_size=32)
    attack = recipe(name, flavour="words", **resources).attack(goal)
    found = []
    for row, text, label in zip(rows, data.texts, data.labels):
        random.seed(draw_seed(0, row))
        np.random.seed(draw_seed(0, row))
        result = attack.attack(text, label)
        fate = type(result).__name__.removesuffix("AttackResult").lower().replace("successful", "success")
        found.append((fate, result.perturbed_text(), result.num_queries))
    return Attacked(found, time.perf_counter() - start, time.process_time() - cpu)


def ours(model: ssmscope.Model, data: TextData, limit: int, name: str, resources: dict) -> Attacked:
    start, cpu = time.perf_counter(), time.process_time()
    result = word_attack(model, data, recipe=name, limit=limit, progress=False, **resources)
    taken = time.perf_counter() - start, time.process_time() - cpu
    return Attacked([(each.status, each.attacked, each.queries) for each in result.examples], *taken)


def compare(model: ssmscope.Model, data: TextData, limit: int, name: str, resources: dict) -> None:
    rows = sampled_rows(len(data), limit, 0)
    ours(model, data, 4, name, resources)
    before = ours(model, data, limit, name, resources)
    plain = theirs(model, data.take(rows), rows, name, resources)
    after = ours(model, data, limit, name, resources)
    number = len(rows)
    won = [{row for row, (fate, _, _) in zip(rows, each.examples) if fate == "success"} for each in (plain, before)]
    same = sum(a == b for a, b in zip(plain.examples, before.examples))
    queries = sum(asked for _, _, asked in plain.examples)
    print(f"{model.name}, {name}: {number} examples, {len(won[0])} successes, {queries} queries")
    print(
        f"  success sets {'equal' if won[0] == won[1] else f'differ in {len(won[0] ^ won[1])}'}; "
        f"fate, text and queries equal for {same} of {number}"
    )
    slower, cpu = max(before.seconds, after.seconds), max(before.cpu, after.cpu)
    print(f"  wall: TextAttack {plain.seconds:.2f} s, ours {before.seconds:.2f} s and {after.seconds:.2f} s")
    print(f"  CPU:  TextAttack {plain.cpu:.2f} s, ours {before.cpu:.2f} s and {after.cpu:.2f} s")
    print(
        f"  ratio of the slower of our runs: wall {plain.seconds / slower:.1f}x, CPU {plain.cpu / cpu:.1f}x", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo/sst2-mamba2,demo/sst2-mamba")
    parser.add_argument("--recipes", default="deepwordbug,pwws,checklist")
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    textattack()
    data = load_text("sst2", "test")
    with tempfile.TemporaryDirectory() as folder:
        synonyms = Path(folder, "synonyms.json")
        synonyms.write_text(json.dumps(SYNONYMS))
        for model in (reader(name, classifies=True) for name in options.models.split(",")):
            for name in options.recipes.split(","):
                compare(model, data, options.limit, name, {"synonyms": synonyms} if name == "pwws" else {})


if __name__ == "__main__":
    main()
