"""Records of a trained model: `training.json` and the model card, `README.md`."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, Template

from ssmscope.core.bootstrap import MAX_DRAWS_HELD
from ssmscope.data.language import bits_per_character
from ssmscope.data.prompts import TASK_PROMPTS
from ssmscope.training.data import QUESTIONS
from ssmscope.training.selectivity import FLAT

if TYPE_CHECKING:
    from ssmscope.training.objectives import Score

PARTS = {"train": "train", "validation": "validation", "test": "test", "unseen": "test, unseen prompts"}
"""Names of the parts that are measured."""

MAX_HEADS = 32
"""Largest number of heads of a Mamba-2; where there are more, they are the channels of a Mamba."""

Z95 = 1.959963984540054
"""97.5 % quantile of the standard normal."""


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Compute the 95 % score interval of a proportion (Wilson 1927), which stays within [0, 1].

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)
    """
    p, z = correct / total, Z95
    centre = p + z * z / (2 * total)
    spread = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # At the ends the two terms cancel up to rounding.
    low = (centre - spread) / scale if correct > 0 else 0.0
    high = (centre + spread) / scale if correct < total else 1.0
    return low, high


def bootstrap_interval(
    numerator: np.ndarray, denominator: np.ndarray, *, seed: int = 0, resamples: int = 2000
) -> tuple[float, float]:
    """Compute the 95 % percentile interval of Σ numerator / Σ denominator over resampled examples (Efron 1979)."""
    draw = np.random.default_rng(seed)
    found: list[float] = []
    step = max(1, MAX_DRAWS_HELD // len(numerator))
    while len(found) < resamples:
        rows = draw.integers(0, len(numerator), (min(step, resamples - len(found)), len(numerator)))
        found += (numerator[rows].sum(1) / np.maximum(denominator[rows].sum(1), 1)).tolist()
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def score_record(score: Score, characters: np.ndarray | None = None, *, seed: int = 0) -> dict[str, Any]:
    """Return accuracy with its 95 % interval, and the mean cross-entropy in nats.

    The interval is Wilson's if every example has one answer, else a bootstrap over examples, because answers within one
    are not independent. `groups` has the same for every group of the score. With `characters`, the number per example
    (examples,), bits per character are added.
    """
    right, asked = int(score.right.sum()), int(score.asked.sum())
    once = asked == len(score.asked) and bool((score.asked == 1).all())
    interval = wilson_interval(right, asked) if once else bootstrap_interval(score.right, score.asked, seed=seed)
    found: dict[str, Any] = {
        "accuracy": score.accuracy,
        "interval": list(interval),
        "correct": right,
        "examples": len(score.asked),
        "cross_entropy": score.cross_entropy,
    }
    if not once:
        found["asked"] = asked
        found["cross_entropy_interval"] = list(bootstrap_interval(score.loss, score.asked, seed=seed))
    if characters is not None:
        found["characters"] = int(characters.sum())
        found["bits_per_character"] = bits_per_character(score.loss, characters)
        ends = bootstrap_interval(score.loss, characters, seed=seed)
        found["bits_per_character_interval"] = [end / math.log(2) for end in ends]
    if score.groups:
        found["groups"] = {name: score_record(group, seed=seed) for name, group in score.groups.items()}
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that determine the weights."""
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


def model_card(record: Mapping[str, Any]) -> str:
    """Write the README.md of a trained model from its training record."""
    layers = (record.get("selectivity") or {"layers": []})["layers"]
    tasks = record["data"]["train"].get("tasks", {})
    prompted = record["kind"] == "instructions" and record["test"] is not None
    return _template().render(
        record=record,
        parts=PARTS,
        measured={shown: record[name] for name, shown in PARTS.items() if record.get(name) is not None},
        example=_example(record),
        prompts=list(_prompts(record)) if prompted else [],
        chance=list(_at_chance(record)) if prompted else [],
        layers=layers,
        units="channels" if layers and len(layers[0]["variation"]) > MAX_HEADS else "heads",
        divergent=any("kl" in layer for layer in layers),
        flat=FLAT,
        untrained=[name for name, part in tasks.items() if not part["split"].startswith("train")],
        exp=math.exp,
        median=np.median,
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    loader = PackageLoader("ssmscope.training")
    environment = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)  # Markdown, not HTML.
    return environment.get_template("card.md")


def _example(record: Mapping[str, Any]) -> str:
    """Return a line of Python that runs the model."""
    kind = record["kind"]
    if kind == "pixels":
        return "model.trace(values=pixels).answers  # (images, height · width, channels) uint8"
    if kind == "instructions":
        task = next(iter(record["data"]["train"]["tasks"]))
        prompt = json.dumps(TASK_PROMPTS[task].templates[0], ensure_ascii=False)
        return f'model.trace({prompt}.replace("{{content}}", "a text")).answers'
    examples = {
        "text": "a text to classify",
        "language": "a text to go on from",
        "questions": "Clara walked to the attic . Where is Clara ?",
    }
    asked = "questions" if record["data"]["train"]["name"] in QUESTIONS else kind
    example = examples.get(asked, "tokens with spaces between")
    return f'model.trace("{example}").{"retention" if record.get("decoder") else "answers"}'


def _prompts(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yield task, prompt, whether it was trained on, and the score, for every task and prompt of the test."""
    measured = {"yes": record["test"], "no": record.get("unseen")}
    for task in record["data"]["test"]["tasks"]:
        for known, part in measured.items():
            if part is None:
                continue
            group = part["groups"][task]
            yield task, f"all {len(group['groups'])}", known, group
            for number, each in group["groups"].items():
                prompt = TASK_PROMPTS[task].templates[int(number) - 1].replace("\n", "⏎")
                yield task, f"{number}: {prompt}", known, each


def _at_chance(record: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield the tasks that are not above chance, with their most frequent answers and these answers' shares."""
    for task, entry in record["data"]["test"]["tasks"].items():
        word, most = max(entry["classes"].items(), key=lambda pair: pair[1])
        share = most / sum(entry["classes"].values())
        if record["test"]["groups"][task]["interval"][0] <= share:
            yield task, word, share
