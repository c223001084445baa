"""What is told about a trained model: `training.json` for programs and `README.md`, the model card, for people."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ssmscope.training.objectives import Score

Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile


def wilson_interval(correct: int, total: int, z: float = Z95) -> tuple[float, float]:
    """The score interval of a proportion, by default at 95 % (Wilson 1927): it stays within [0, 1].

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)
    """
    p = correct / total
    centre = p + z * z / (2 * total)
    spread = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # at the ends the two terms cancel, all but their rounding
    low = (centre - spread) / scale if correct > 0 else 0.0
    high = (centre + spread) / scale if correct < total else 1.0
    return low, high


def bootstrap_interval(
    numerator: np.ndarray, denominator: np.ndarray, *, seed: int = 0, resamples: int = 2000
) -> tuple[float, float]:
    """The 95 % percentile interval of Σ numerator / Σ denominator over resampled examples (Efron 1979)."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(resamples):
        rows = draw.integers(0, len(numerator), len(numerator))
        found.append(numerator[rows].sum() / max(denominator[rows].sum(), 1))
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def score_record(score: Score, *, seed: int = 0) -> dict[str, Any]:
    """Accuracy with its 95 % interval and the mean cross-entropy in nats.

    The interval is Wilson's where every example is asked once, else a bootstrap over examples: the answers within one
    are not independent.
    """
    right, asked = int(score.right.sum()), int(score.asked.sum())
    once = asked == len(score.asked) and bool((score.asked == 1).all())
    interval = wilson_interval(right, asked) if once else bootstrap_interval(score.right, score.asked, seed=seed)
    found = {
        "accuracy": score.accuracy,
        "interval": list(interval),
        "correct": right,
        "examples": len(score.asked),
        "cross_entropy": score.cross_entropy,
    }
    if once:
        return found
    return {
        **found,
        "asked": asked,
        "cross_entropy_interval": list(bootstrap_interval(score.loss, score.asked, seed=seed)),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide about the weights."""
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


PIPELINES = {"text": "text-classification", "pixels": "image-classification", "sequences": "text-classification"}


def model_card(record: Mapping[str, Any]) -> str:
    """The README.md of a trained model, from its training record."""
    data, kind = record["data"], record["kind"]
    classifies = bool(record["labels"])
    language = {"| perplexity ": "|---"} if kind == "language" else {}
    lines = [
        "---",
        f"pipeline_tag: {PIPELINES.get(kind, 'text-generation')}",
        "library_name: transformers",
        "tags: [state-space-model, ssmscope]",
        "---",
        "",
        f"# {record['architecture']} {_what(record)} for {data['train']['name']}",
        "",
        f"A {record['backbone']} {_shape(record)} {record['parameters']:,} parameters, stored in "
        f"{record['saved_as']}. {_origin(record)}",
        "",
        "```python",
        "import ssmscope",
        "",
        'model = ssmscope.load("path/to/this/directory")',
        _use(kind, decoded=bool(record.get("decoder"))),
        "```",
        "",
        "## Accuracy",
        "",
        f"Measured on the weights as they are stored here ({record['saved_as']}), read back and computed in float32. "
        + _intervals(record),
        "",
        f"| split | accuracy | interval | examples | cross-entropy {''.join(language)}|",
        f"|---|---|---|---|---{''.join(language.values())}|",
        *(
            _accuracy_row(name, record[name], perplexity=bool(language))
            for name in ("train", "validation", "test")
            if record.get(name) is not None
        ),
        "",
        _chosen_by(record)
        + (
            "The test split was read once, after training."
            if record["test"] is not None
            else f"There was no {'labelled ' if classifies else ''}test split."
        ),
        "",
        "## Data",
        "",
        f"| part | data | split | examples | {'of each class' if classifies else 'tokens asked for'} | fingerprint |",
        "|---|---|---|---|---|---|",
        *(_data_row(part, entry) for part, entry in data.items() if entry is not None),
        "",
        *_cut(record),
        "## Recipe",
        "",
        f"Seed {record['seed']}, precision {record['precision']}, on {record['device']}.",
        "",
        "```",
        record["command"],
        "```",
        "",
        "| option | value |",
        "|---|---|",
        *(f"| {name} | {_shown(value)} |" for name, value in record["recipe"].items()),
        "",
        "## Versions",
        "",
        ", ".join(f"{name} {version}" for name, version in record["versions"].items()) + ".",
        "",
    ]
    return "\n".join(lines)


def _what(record: Mapping[str, Any]) -> str:
    if record["labels"]:
        return "classifier"
    return "encoder" if record.get("decoder") else "language model"


def _shape(record: Mapping[str, Any]) -> str:
    if record.get("decoder"):
        return (
            f"whose last hidden state is read by a decoder ({record['decoder']:,} parameters, `decoder.safetensors`), "
            "which names every token of the sequence. The accuracies are the decoder's; the model's own head on its "
            "tokens was not trained."
        )
    if record["labels"] is None:
        return "with a head that names the next token."
    reads = "; pixels are embedded by a linear map, and a class token stands last" if record["kind"] == "pixels" else ""
    return f"backbone with a linear head that reads the last position{reads}; classes: {', '.join(record['labels'])}."


def _use(kind: str, *, decoded: bool) -> str:
    if kind == "pixels":
        return "model.trace(values=pixels).answers  # (images, height · width, channels) uint8"
    example = {"text": "a text to classify", "language": "a text to go on from"}.get(kind, "tokens with spaces between")
    return f'model.trace("{example}").{"retention" if decoded else "answers"}'


def _intervals(record: Mapping[str, Any]) -> str:
    measured = [record[name] for name in ("train", "validation", "test") if record.get(name) is not None]
    if not any("asked" in entry for entry in measured):
        return "Intervals are 95 % Wilson intervals over the examples; cross-entropies are in nats."
    return (
        "Accuracies are over the tokens that are asked for; intervals are 95 % bootstrap intervals over the examples. "
        "Cross-entropies are in nats a token."
    )


def _chosen_by(record: Mapping[str, Any]) -> str:
    if record["validation"] is None:
        return f"The weights are those of the last epoch ({record['epochs_run']}). "
    by = "cross-entropy" if record["kind"] == "language" else "accuracy"
    return (
        f"The epoch ({record['best_epoch']} of {record['epochs_run']}) was chosen by the validation {by}, so that "
        "number is optimistic. "
    )


def _cut(record: Mapping[str, Any]) -> list[str]:
    longest = record["recipe"].get("max_length")
    return [] if longest is None else [f"Texts longer than {longest} tokens are cut, with their end token kept.", ""]


def _origin(record: Mapping[str, Any]) -> str:
    start = record["recipe"].get("init_from")
    return f"Trained from the weights of `{start}`." if start else "Trained from scratch."


def _accuracy_row(name: str, result: Mapping[str, Any], *, perplexity: bool = False) -> str:
    low, high = result["interval"]
    return (
        f"| {name} | {result['accuracy']:.4f} | {low:.4f} – {high:.4f} | {result['examples']:,} "
        f"| {result['cross_entropy']:.4f} |" + (f" {math.exp(result['cross_entropy']):.2f} |" if perplexity else "")
    )


def _data_row(part: str, entry: Mapping[str, Any]) -> str:
    if "classes" in entry:
        asked = ", ".join(f"{name}: {count:,}" for name, count in entry["classes"].items())
    else:
        asked = f"{entry['asked']:,}"
    return (
        f"| {part} | {entry['name']} | {entry['split']} | {entry['examples']:,} | {asked} | `{entry['fingerprint']}` |"
    )


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)
