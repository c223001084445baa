"""What is told about a trained model: `training.json` for programs and `README.md`, the model card, for people."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile


def wilson_interval(correct: int, total: int, z: float = Z95) -> tuple[float, float]:
    """The score interval of a proportion, by default at 95 % (Wilson 1927): it stays within [0, 1].

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)
    """
    p = correct / total
    centre = p + z * z / (2 * total)
    spread = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max((centre - spread) / scale, 0.0), min((centre + spread) / scale, 1.0)


def accuracy_record(correct: int, total: int, loss: float) -> dict[str, Any]:
    """An accuracy with its 95 % Wilson interval and the mean cross-entropy in nats."""
    low, high = wilson_interval(correct, total)
    return {
        "accuracy": correct / total,
        "interval": [low, high],
        "correct": correct,
        "examples": total,
        "cross_entropy": loss,
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide about the weights."""
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


def model_card(record: Mapping[str, Any]) -> str:
    """The README.md of a trained classifier, from its training record."""
    data, labels = record["data"], record["labels"]
    title = f"{record['architecture']} classifier for {data['train']['name']}"
    lines = [
        "---",
        "pipeline_tag: text-classification",
        "library_name: transformers",
        "tags: [state-space-model, ssmscope]",
        "---",
        "",
        f"# {title}",
        "",
        f"A {record['backbone']} backbone with a linear head that reads the last position; classes: "
        f"{', '.join(labels)}. {record['parameters']:,} parameters, stored in {record['saved_as']}. "
        f"{_origin(record)}",
        "",
        "```python",
        "import ssmscope",
        "",
        'model = ssmscope.load("path/to/this/directory")',
        'model.trace("a text to classify").answers',
        "```",
        "",
        "## Accuracy",
        "",
        f"Measured on the weights as they are stored here ({record['saved_as']}), read back and computed in float32; "
        "intervals are 95 % Wilson intervals over the examples.",
        "",
        "| split | accuracy | interval | examples | cross-entropy |",
        "|---|---|---|---|---|",
        *(_accuracy_row(name, record[name]) for name in ("validation", "test") if record[name] is not None),
        "",
        f"The epoch ({record['best_epoch']} of {record['epochs_run']}) was chosen by the validation accuracy, so "
        "that number is optimistic. "
        + (
            "The test split was read once, after training."
            if record["test"] is not None
            else "There was no labelled test split."
        ),
        "",
        "## Data",
        "",
        "| part | data | split | examples | classes | fingerprint |",
        "|---|---|---|---|---|---|",
        *(_data_row(part, entry) for part, entry in data.items() if entry is not None),
        "",
        f"Texts longer than {record['recipe']['max_length']} tokens are cut, with their end token kept.",
        "",
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


def _origin(record: Mapping[str, Any]) -> str:
    start = record["recipe"]["init_from"]
    return f"Trained from the weights of `{start}`." if start else "Trained from scratch."


def _accuracy_row(name: str, result: Mapping[str, Any]) -> str:
    low, high = result["interval"]
    return (
        f"| {name} | {result['accuracy']:.4f} | {low:.4f} – {high:.4f} | {result['examples']:,} "
        f"| {result['cross_entropy']:.4f} |"
    )


def _data_row(part: str, entry: Mapping[str, Any]) -> str:
    classes = ", ".join(f"{name} {count:,}" for name, count in entry["classes"].items())
    return (
        f"| {part} | {entry['name']} | {entry['split']} | {entry['examples']:,} | {classes} "
        f"| `{entry['fingerprint']}` |"
    )


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)
