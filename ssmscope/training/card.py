"""What is told about a trained model: `training.json` for programs and `README.md`, the model card, for people."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.core.bootstrap import AT_ONCE
from ssmscope.data.documents import bits_per_character
from ssmscope.data.prompts import TASK_PROMPTS
from ssmscope.training.data import QUESTIONS
from ssmscope.training.selectivity import FLAT

if TYPE_CHECKING:
    from ssmscope.training.objectives import Score

PARTS = {"train": "train", "validation": "validation", "test": "test", "unseen": "test, unseen prompts"}
"""What is measured, and what it is called."""

MOST_HEADS = 32  # of a Mamba-2 of ours: where there are more, they are a Mamba's channels

Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """The score interval of a proportion at 95 % (Wilson 1927): it stays within [0, 1].

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)
    """
    p, z = correct / total, Z95
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
    found: list[float] = []
    step = max(1, AT_ONCE // len(numerator))
    while len(found) < resamples:
        rows = draw.integers(0, len(numerator), (min(step, resamples - len(found)), len(numerator)))
        found += (numerator[rows].sum(1) / np.maximum(denominator[rows].sum(1), 1)).tolist()
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def score_record(score: Score, characters: np.ndarray | None = None, *, seed: int = 0) -> dict[str, Any]:
    """Accuracy with its 95 % interval and the mean cross-entropy in nats.

    The interval is Wilson's where every example is asked once, else a bootstrap over examples: the answers within one
    are not independent. `groups` has the same of every group of the score. With the `characters` that the examples
    stand for, (examples,), also bits per character.
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
        _use(record),
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
            _accuracy_row(shown, record[name], perplexity=bool(language))
            for name, shown in PARTS.items()
            if record.get(name) is not None
        ),
        "",
        *_bits(record),
        *_by_prompt(record),
        *_by_task(record),
        _chosen_by(record)
        + (
            "The test split was read once, after training."
            if record["test"] is not None
            else f"There was no {'labelled ' if classifies else ''}test split."
        ),
        "",
        *_selection(record),
        "## Data",
        "",
        f"| part | data | split | examples | {_counted(record)} | fingerprint |",
        "|---|---|---|---|---|---|",
        *(_data_row(part, entry) for part, entry in data.items() if entry is not None),
        "",
        *_cut(record),
        *_without_training_split(record),
        "## Recipe",
        "",
        f"Seed {record['seed']}, precision {record['precision']}, on {record['device']}.",
        "",
        "```",
        *record.get("commands_before", ()),
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
    if record["kind"] == "instructions":
        return "with a head that names the next token: after a prompt a label word, after that the end token."
    if record["labels"] is None:
        return "with a head that names the next token."
    reads = "; pixels are embedded by a linear map, and a class token stands last" if record["kind"] == "pixels" else ""
    return f"backbone with a linear head that reads the last position{reads}; classes: {', '.join(record['labels'])}."


def _use(record: Mapping[str, Any]) -> str:
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


def _intervals(record: Mapping[str, Any]) -> str:
    if record["kind"] == "instructions":
        return (
            "An answer is right where its label word is the most likely of its task's. Every example is asked with "
            "each prompt; intervals are 95 % bootstrap intervals over the examples, for a single prompt 95 % Wilson "
            "intervals. Cross-entropies are those among the task's label words, in nats."
        )
    measured = [record[name] for name in PARTS if record.get(name) is not None]
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


def _bits(record: Mapping[str, Any]) -> list[str]:
    """What it costs to tell the documents' characters."""
    measured = {PARTS[name]: record[name] for name in PARTS if "bits_per_character" in (record.get(name) or ())}
    if not measured:
        return []
    rows = (
        "| {} | {:.4f} | {:.4f} – {:.4f} | {:,} |".format(
            name, entry["bits_per_character"], *entry["bits_per_character_interval"], entry["characters"]
        )
        for name, entry in measured.items()
    )
    length = record["recipe"]["length"]
    return [
        "| split | bits per character | interval | characters |",
        "|---|---|---|---|",
        *rows,
        "",
        f"In rows of {length} tokens, before each of which the model is at its start; the end tokens between documents "
        "are asked for too and count as no character. Intervals are 95 % bootstrap intervals over rows.",
        "",
    ]


def _selection(record: Mapping[str, Any]) -> list[str]:
    """Whether the model selects, layer by layer."""
    found = record.get("selectivity") or {"layers": []}
    if not found["layers"]:
        return []
    divergent = any("kl" in layer for layer in found["layers"])
    units = "channels" if len(found["layers"][0]["variation"]) > MOST_HEADS else "heads"
    lines = [
        "## Selection",
        "",
        f"Over the tokens of the {PARTS[found['part']]} examples: how much Δ varies (its standard deviation by its "
        f"mean), the share of {units} where that is {FLAT} or more, half-lives (ln 2 by the mean of −log a, in tokens)"
        + (", and the divergence from the prior by token, in nats. " if divergent else ". ")
        + f"Below {FLAT} a model does not select: what its gates say of tokens is noise.",
        "",
        f"| layer | Δ's variation, median (least – most) | {units} that select | half-life, median (least – most) |"
        + (" KL |" if divergent else ""),
        "|---|---|---|---|" + ("---|" if divergent else ""),
    ]
    for layer in found["layers"]:
        cells = [f"{layer['layer']}", _middle(layer["variation"]), f"{100 * layer['selective']:.0f} %"]
        cells += [_middle(layer["half_life"]), *([f"{layer['kl']:.3f}"] if "kl" in layer else [])]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _middle(values: Sequence[float]) -> str:
    return f"{np.median(values):.3g} ({min(values):.3g} – {max(values):.3g})"


def _by_prompt(record: Mapping[str, Any]) -> list[str]:
    """The accuracy on the test examples of every task and prompt, and what a model that never looks would have."""
    measured = {name: record[name] for name in ("test", "unseen") if record.get(name) is not None}
    if record["kind"] != "instructions" or not measured:
        return []
    lines = ["| task | prompt | trained on | test accuracy | interval |", "|---|---|---|---|---|"]
    chance = []
    for task, entry in record["data"]["test"]["tasks"].items():
        for name, part in measured.items():
            group, known = part["groups"][task], "yes" if name == "test" else "no"
            lines.append(f"| {task} | all {len(group['groups'])} | {known} {_accuracy_cells(group)}")
            for number, each in group["groups"].items():
                prompt = TASK_PROMPTS[task].templates[int(number) - 1].replace("\n", "⏎")
                lines.append(f"| {task} | {number}: {prompt} | {known} {_accuracy_cells(each)}")
        word, most = max(entry["classes"].items(), key=lambda pair: pair[1])
        share = most / sum(entry["classes"].values())
        if record["test"]["groups"][task]["interval"][0] <= share:
            chance.append(f"On {task} the model is no better than saying '{word}' every time ({share:.4f}). ")
    return [*lines, "", "".join(chance) + "⏎ is a line break.", ""]


def _by_task(record: Mapping[str, Any]) -> list[str]:
    """The accuracy on the test examples of every task of a mixture."""
    groups = (record["test"] or {}).get("groups")
    if record["kind"] == "instructions" or not groups:
        return []
    rows = (f"| {task} {_accuracy_cells(entry)}" for task, entry in groups.items())
    return ["| task | test accuracy | interval |", "|---|---|---|", *rows, ""]


def _accuracy_cells(entry: Mapping[str, Any]) -> str:
    low, high = entry["interval"]
    return f"| {entry['accuracy']:.4f} | {low:.4f} – {high:.4f} |"


def _counted(record: Mapping[str, Any]) -> str:
    if record["kind"] == "instructions":
        return "prompts of each example; of each task and class"
    return "of each class" if record["labels"] else "tokens asked for"


def _cut(record: Mapping[str, Any]) -> list[str]:
    longest = record["recipe"].get("max_length")
    return [] if longest is None else [f"Texts longer than {longest} tokens are cut, with their end token kept.", ""]


def _without_training_split(record: Mapping[str, Any]) -> list[str]:
    tasks = record["data"]["train"].get("tasks", {})
    missing = [name for name, part in tasks.items() if not part["split"].startswith("train")]
    if not missing:
        return []
    return [f"Of {', '.join(missing)} the validation split was trained on: there was no training split at hand.", ""]


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
    if "tasks" in entry:
        asked = f"{entry['prompts'] / entry['examples']:g}; " + "; ".join(
            f"{task} ({part['split']}) " + ", ".join(f"{word}: {count:,}" for word, count in part["classes"].items())
            for task, part in entry["tasks"].items()
        )
    elif "classes" in entry:
        asked = ", ".join(f"{name}: {count:,}" for name, count in entry["classes"].items())
    else:
        asked = f"{entry['asked']:,}"
    return (
        f"| {part} | {entry['name']} | {entry['split']} | {entry['examples']:,} | {asked} | `{entry['fingerprint']}` |"
    )


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)
