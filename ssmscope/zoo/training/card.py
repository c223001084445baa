"""Files of a trained model: its weights, their scores, `training.json` and the model card, `README.md`."""

from __future__ import annotations

import copy
import json
import math
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Mamba2ForCausalLM
from ssmscope.api.checkpoint import read_json, write_json
from ssmscope.api.writing import write_whole
from ssmscope.core.bootstrap import MAX_DRAWS_HELD, wilson_interval
from ssmscope.core.known_models import demos
from ssmscope.core.mixers import fast_scan, mixers
from ssmscope.core.trace import LayerTrace
from ssmscope.data.prompts import TASK_PROMPTS
from ssmscope.data.tokenizer import save_tokenizer
from ssmscope.loading.load import load
from ssmscope.loading.pretrained import quiet
from ssmscope.networks.generation import MAMBA2_TIED
from ssmscope.ops import Recurrence
from ssmscope.zoo.baleen import MIXERS, bernoulli_kl, exponential_kl, prior_of
from ssmscope.zoo.documents import bits_per_character
from ssmscope.zoo.training.data import QUESTIONS
from ssmscope.zoo.training.fitting import Outcome
from ssmscope.zoo.training.objectives import Objective, Score
from ssmscope.zoo.training.plan import FINISHED

EXTRA = "decoder.safetensors"
"""Weights of the decoder of the compression task, which is trained together with the model."""

PARTS = {"train": "train", "validation": "validation", "test": "test", "unseen": "test, unseen prompts"}
"""Names of the parts that are measured."""

FLAT = 0.1
"""Coefficient of variation of Δ below which a head's selection is noise."""

MAX_HEADS = 32
"""Largest number of heads of a Mamba-2; where there are more, they are the channels of a Mamba."""


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
    """Return accuracy with its 95 % interval, and the mean cross-entropy in nats, also of every group of the score. The
    interval is Wilson's if every example has one answer, else a bootstrap over examples, because answers within one are
    not independent. With `characters`, the number per example (examples,), bits per character are added."""
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
    loader = PackageLoader("ssmscope.zoo.training")
    environment = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)  # Markdown, not HTML.
    return environment.get_template("card.md").render(
        record=record,
        parts=PARTS,
        measured={shown: record[name] for name, shown in PARTS.items() if record.get(name) is not None},
        example=_example(record),
        prompts=list(_prompts(record)) if prompted else [],
        chance=list(_at_chance(record)) if prompted else [],
        layers=layers,
        selecting=float(np.mean([layer["selective"] for layer in layers])) if layers else 0.0,
        units="channels" if layers and len(layers[0]["variation"]) > MAX_HEADS else "heads",
        divergent=any("kl" in layer for layer in layers),
        flat=FLAT,
        untrained=[name for name, part in tasks.items() if not part["split"].startswith("train")],
        exp=math.exp,
        median=np.median,
    )


def _example(record: Mapping[str, Any]) -> str:
    """Return a line of Python that runs the model."""
    kind = record["kind"]
    if kind == "pixels":
        return "model.trace(values=pixels).answers  # (images, height · width, channels) uint8"
    if kind == "instructions":
        task = next(iter(record["data"]["train"]["tasks"]))
        prompt = json.dumps(TASK_PROMPTS[task].templates[0], ensure_ascii=False)
        return f'model.trace({prompt}.replace("{{content}}", "a text")).answers'
    examples = {"text": "a text to classify", "language": "a text to go on from"}
    example = examples.get(kind, "tokens with spaces between")
    if record["data"]["train"]["name"] in QUESTIONS:
        example = "Clara walked to the attic . Where is Clara ?"
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


def save(out: Path, module: Any, tokenizer: Any, saved_as: str, extra: Mapping[str, torch.Tensor]) -> None:
    stored = copy.deepcopy(module).cpu().to(getattr(torch, saved_as))
    if type(stored) is Mamba2ForCausalLM:
        stored._tied_weights_keys = MAMBA2_TIED
    with quiet():
        stored.save_pretrained(str(out))
    if tokenizer is not None:
        save_tokenizer(tokenizer, out)
    if extra:
        half = {name: tensor.to(getattr(torch, saved_as)).contiguous() for name, tensor in extra.items()}
        save_file(half, out / EXTRA)


def measure(out: Path, objective: Objective, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Measure the weights in `out`, read back, in float32: accuracies, and selectivity on the first of the parts."""
    model = load(out.absolute(), dtype="float32", device=device)  # A relative "demo/…" would name a shipped model.
    if objective.extra is not None:
        objective.extra.load_state_dict({name: t.float() for name, t in load_file(out / EXTRA).items()})
    found: dict[str, Any] = {}
    # Sequences are about the gap of training and test accuracies, instructions about that of seen and unseen prompts.
    more = {"sequences": ("train", "validation", "test"), "instructions": ("validation", "test", "unseen")}
    for name in more.get(options["kind"], ("validation", "test")):
        part = objective.parts[name]
        if part is None:
            found[name] = None
            continue
        watched = Selectivity(model.module)
        with fast_scan(model.module, visit=None if "selectivity" in found else watched.visit):
            score = objective.score(model.module, name)
        found[name] = score_record(score, getattr(part, "characters", None), seed=options["seed"])
        found.setdefault("selectivity", {"part": name, "layers": watched.records()})
    return found


def commands_before(source: str | Path | None) -> list[str]:
    """Return the commands that made the model that a run starts from, if its directory records them."""
    file = demos().get(str(source), Path(str(source))) / FINISHED
    if source is None or not file.is_file():
        return []
    record = read_json(file)
    return [*record.get("commands_before", ()), *([record["command"]] if "command" in record else ())]


def describe(
    out: Path,
    result: Mapping[str, Any],
    module: Any,
    outcome: Outcome,
    options: Mapping[str, Any],
    device: torch.device,
    command: str,
) -> None:
    """Write README.md, then training.json, which marks the run as finished."""
    config = module.config
    classifies = options["kind"] in ("text", "sequences", "pixels")
    record = {
        **result,
        "kind": options["kind"],
        "backbone": (getattr(config, "backbone", None) or config).model_type,
        "labels": [config.id2label[i] for i in range(config.num_labels)] if classifies else None,
        "parameters": sum(p.numel() for p in module.parameters()),
        "decoder": sum(tensor.numel() for tensor in outcome.extra.values()) or None,
        **{name: options[name] for name in ("saved_as", "precision", "seed")},
        "device": device.type,
        "best_epoch": outcome.best_epoch,
        "epochs_run": len(outcome.history),
        "history": outcome.history,
        "command": command,
        "commands_before": commands_before(options["init_from"]),
        "versions": versions(),
    }
    write_whole(out / "README.md", model_card(record))
    write_json(out / FINISHED, record)


def _divergence(mixer: Any, recurrence: Recurrence) -> Tensor:
    """Compute the KL of every token and head, (batch, length, heads)."""
    assert recurrence.delta is not None
    prior = prior_of(mixer)
    if mixer.baleen.gate == "exponential":
        return exponential_kl(recurrence.delta.double(), torch.as_tensor(prior).to(recurrence.delta), mixer.baleen.kl)
    A = -mixer.A_log.double().exp()
    A = A if A.ndim == 2 else A.unsqueeze(-1)
    return bernoulli_kl(recurrence.delta.double().unsqueeze(-1) * A, prior).mean(-1)


class Selectivity:
    """Observer of a model in evaluation, for every layer with a time step Δ and over all tokens.

    `records` returns by head (by channel for Mamba): `variation`, standard deviation / mean of Δ over tokens;
    `half_life`, ln 2 / mean of −log a, in tokens; `selective`, the share of heads that vary by `FLAT` or more; for a
    Baleen `kl`, the divergence from its prior, a mean over tokens and heads in nats. Gates are those of evaluation.
    """

    def __init__(self, module: Any) -> None:
        self.mixers = mixers(module)
        self.sums: dict[int, dict[str, Any]] = {}

    def visit(self, index: int, layer: LayerTrace, _: Any) -> None:
        if len(layer.recurrences) != 1 or layer.recurrence.delta is None:
            return
        delta, log_a = layer.recurrence.delta.double(), layer.recurrence.log_decay().double().mean(-1)
        values = {"delta": delta, "squared": delta.square(), "log_a": log_a}
        if isinstance(self.mixers[index], MIXERS):
            values["kl"] = _divergence(self.mixers[index], layer.recurrence)
        real = torch.ones_like(delta[..., 0], dtype=torch.bool) if layer.mask is None else layer.mask.bool()
        sums = self.sums.setdefault(index, dict.fromkeys(("tokens", *values), 0))
        sums["tokens"] += int(real.sum())
        for name, value in values.items():
            # Padding has Δ = 0, where the divergence is infinite.
            sums[name] = sums[name] + value.where(real.unsqueeze(-1), 0.0).sum((0, 1))

    def records(self) -> list[dict[str, Any]]:
        return [_record(index, sums) for index, sums in sorted(self.sums.items())]


def _record(index: int, sums: Mapping[str, Any]) -> dict[str, Any]:
    means = {name: total / sums["tokens"] for name, total in sums.items()}
    variation = (means["squared"] - means["delta"].square()).clamp(min=0).sqrt() / means["delta"]
    record = {
        "layer": index,
        "variation": [round(v, 4) for v in variation.tolist()],
        "half_life": [round(v, 2) for v in (math.log(2) / (-means["log_a"]).clamp(min=1e-12)).tolist()],
        "selective": float((variation >= FLAT).double().mean()),
    }
    return record | ({"kl": float(means["kl"].mean())} if "kl" in means else {})
