"""Plan of a training run: its checked options and data, and the check whether a directory holds the same run."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssmscope.architectures.own.baleen import KL_OVER, PRIOR_PER, SAMPLES
from ssmscope.architectures.own.diff_layers import LAMBDA_FORMS
from ssmscope.core.limits import refuse_beyond, refuse_held
from ssmscope.data.instructions import InstructionData
from ssmscope.data.prompts import TASK_PROMPTS
from ssmscope.data.text import TextData
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import InputError
from ssmscope.training.architectures import ANNEALING, GATE_OPTIONS, GATES, OWN, SIZES, named
from ssmscope.training.data import QUESTIONS, Data, kind_of, task_options
from ssmscope.training.recipes import defaults

TOKENIZER = {"vocabulary": 4000, "lowercase": True}
"""Default tokenizer of texts or instructions for a model trained from scratch."""

CHOICES = {
    "precision": ("fp32", "tf32", "bf16"),
    "saved_as": ("bfloat16", "float16", "float32"),
    "kl": ("true", "printed"),
    "samples": SAMPLES,
    "kl_over": KL_OVER,
    "prior_per": PRIOR_PER,
    "base": ("mamba2", "mamba"),
    "schedule": ("cosine", "constant"),
    "decays": ("standard", "spread"),
    "unit": ("word", "byte"),
    "scope": ("block", "s6"),
    "differential_layers": ("full", "hybrid"),
    "lambda_form": LAMBDA_FORMS,
}

RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        (
            *("width", "layers", "state", "head_width", "heads", "expand", "k", "state_groups", "fir_taps"),
            *("epochs", "batch_size", "patience", "length", "examples", "pairs", "prior_every"),
        ),
        lambda value: value >= 1,
        "at least 1",
    ),
    (("max_length",), lambda value: value >= 2, "at least 2: a token and the end token"),
    (
        ("seed", "weight_decay", "beta", "checkpoint_minutes", "spread_penalty", "prompt_weight"),
        lambda value: value >= 0,
        "0 or more",
    ),
    (("learning_rate", "clip", "tau", "prior", "prior_step"), lambda value: value > 0, "above 0"),
    (("prior_from",), lambda value: 0 < value < 1, "above 0 and below 1"),
    (("share",), lambda value: 0 < value <= 1, "above 0 and at most 1"),
    (("flipped",), lambda value: 0 <= value <= 1, "from 0 to 1"),
    (
        ("held_out", "warmup", "dropout", "embedding_dropout", "token_dropout", "subword_dropout", "label_smoothing"),
        lambda value: 0 <= value < 1,
        "at least 0 and below 1",
    ),
)
"""Options, the condition on their values, and the condition in words."""

MAX_SIZES = {
    **{"width": 2**16, "layers": 1000, "state": 2**12, "head_width": 2**16, "heads": 2**12, "expand": 64, "k": 1000},
    **{"state_groups": 2**10, "fir_taps": 2**10, "vocabulary": 2**22, "length": 2**20, "max_length": 2**20},
    **{"examples": 2**27, "pairs": 2**18, "epochs": 10**6, "batch_size": 2**20},
}
"""Upper limits of sizes, beyond which a run would exhaust the memory or never end."""

MAX_PARAMETERS = 4 * 10**9
"""Parameters of a trained model; each takes 16 bytes with AdamW."""

OF_KIND = {
    "lowercase": ("text", "instructions"),
    "max_length": ("text",),
    "token_dropout": ("text", "instructions"),
    "subword_dropout": ("text", "instructions"),
    "label_smoothing": ("text", "pixels", "sequences", "instructions"),
    "dropout": ("text", "pixels", "sequences", "instructions"),
    "embedding_dropout": ("text", "language", "tokens", "sequences", "instructions"),
    "prompt_weight": ("instructions", "tokens"),
    "tied": ("language", "tokens", "instructions"),
    "spread_penalty": ("text", "sequences"),
}
"""Kinds of data that an option applies to, for options that do not apply to all."""

FINISHED = Path("training.json")
"""File that marks a finished run; it is written last."""

CLAIMED = Path("checkpoint", "plan.json")
"""Plan of a run that has begun."""

WITHOUT_EFFECT = (
    *("architecture", "data", "out", "device", "checkpoint_minutes", "progress", "command"),
    *("kind", "compile"),
)
"""Arguments outside the recipe, which do not change the result."""


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the defaults of the data's kind and of a new model filled in.

    Raises:
        InputError: an option is outside its range or contradicts another.
    """
    options = dict(given)
    architecture = named(options["architecture"])
    kind = options["kind"] = kind_of(options["data"])
    for name, allowed in CHOICES.items():
        if options[name] is not None and options[name] not in allowed:
            raise InputError(f"{name} is '{options[name]}'; choose one of {', '.join(allowed)}")
    for names, fits, range_ in RANGES:
        for name in names:
            if options[name] is not None and not fits(options[name]):
                raise InputError(f"{name} is {options[name]}; it must be {range_}")
    _check_kind(options)
    refuse_beyond(MAX_SIZES, options)
    recipe = defaults(options["architecture"], kind, options["recipe"], str(options["data"]))
    sizes = {name for names in SIZES.values() for name in names}
    fresh = sizes | {"base", "decays", "tied", "vocabulary", "lowercase", *OWN}
    if options["init_from"] is not None:
        converting = (*GATE_OPTIONS, *ANNEALING) if options["architecture"] in GATES else ()
        useless = [name for name in sorted(fresh - {*converting}) if options[name] is not None]
        useless += _foreign_gate_options(options)
        if useless:
            raise InputError(
                f"{useless[0]} cannot be chosen for {options['architecture']} trained from {options['init_from']}"
            )
    else:
        _settle_model(options, architecture, recipe, sizes)
    if options["prior_from"] is None and (options["prior_step"] or options["prior_every"]):
        raise InputError("prior_step and prior_every are the schedule from prior_from; give that too")
    for name, value in recipe.items():
        of_the_model = name in sizes or name in OWN or name in ("decays", "tied")
        of_the_model |= name == "vocabulary" and options["init_from"] is not None
        if not of_the_model and name in options and options[name] is None and _fits(name, kind):
            options[name] = value
    _refuse_size(options)
    return options


def _refuse_size(options: Mapping[str, Any]) -> None:
    """Raise InputError if a model is too large to train."""
    width, layers, expand = (options[name] or 1 for name in ("width", "layers", "expand"))
    inner = width * expand
    states = 3 * width + 2 * (options["state"] or 1)
    parameters = layers * inner * states + 2 * width * (options["vocabulary"] or 0)
    what = f"{layers:,} layers of width {width:,} and expand {expand:,}"
    refuse_held(parameters, what, "take a smaller model", most=MAX_PARAMETERS, unit="parameters")


def _fits(name: str, kind: str) -> bool:
    return kind in OF_KIND.get(name, (kind,))


def _check_kind(options: Mapping[str, Any]) -> None:
    """Raise InputError for options that do not apply to the data."""
    task = task_options(options["data"])
    for name in ("length", "examples", "pairs", "flipped", "unit", "filler", "mixture"):
        if options[name] is not None and name not in task:
            raise InputError(f"{name} does not apply to {options['data']}; leave it out")
    if options["vocabulary"] is not None and options["kind"] != "text" and "vocabulary" not in task:
        raise InputError(f"vocabulary does not apply to {options['data']}; leave it out")
    for name, kinds in OF_KIND.items():
        if options[name] and options["kind"] not in kinds:
            raise InputError(f"{name} does not apply to {options['data']}, which is no {' or '.join(kinds)}")
    if options["prompt_weight"] and options["kind"] == "tokens" and options["data"] not in QUESTIONS:
        raise InputError(f"prompt_weight does not apply to {options['data']}, which has no prompts; leave it out")
    least = {"text": 8, "instructions": 259}.get(options["kind"], 2)
    if options["vocabulary"] is not None and options["vocabulary"] < least:
        raise InputError(f"vocabulary is {options['vocabulary']}; it must be at least {least}")
    if options["architecture"] == "selective" and options["kind"] == "pixels":
        raise InputError("the selective SSM reads tokens, and cifar10 and digits are pixels; choose another task")


def _foreign_gate_options(options: Mapping[str, Any]) -> list[str]:
    """Return the given options of random gates that this architecture's gate does not have."""
    if options["architecture"] not in GATES:
        return []
    own = named(options["architecture"]).own
    return [name for name in (*GATE_OPTIONS, *ANNEALING) if options[name] is not None and name not in own]


def _settle_model(options: dict[str, Any], architecture: Any, recipe: Mapping[str, Any], sizes: set[str]) -> None:
    """Fill in the base, the sizes and the architecture's own options.

    Raises:
        InputError: the architecture does not have one of the given options.
    """
    name = options["architecture"]
    base = options["base"] or architecture.bases[0]
    useless = [option for option in OWN if options[option] is not None and option not in architecture.own]
    if options["base"] is not None and len(architecture.bases) == 1:
        useless.append("base")
    useless += [size for size in sorted(sizes) if options[size] is not None and size not in SIZES[base]]
    if options["decays"] is not None and base not in ("mamba", "mamba2"):
        useless.append("decays")
    if options["tied"] is not None and base == "selective":
        useless.append("tied")
    if useless:
        on = f" on {base}" if len(architecture.bases) > 1 else ""
        raise InputError(f"{useless[0]} does not apply to {name}{on}; leave it out")
    if name == "baleen-b" and options["prior"] is not None and options["prior"] >= 1:
        raise InputError(f"prior is {options['prior']}; for {name} it is a probability below 1")
    options["base"] = base
    least = {"groupmamba": options["k"] or 2, "rwkv": 2}.get(name, 1)
    if options["layers"] is not None and options["layers"] < least:
        raise InputError(f"layers is {options['layers']}; for this {name} it must be at least {least}")
    fresh = {**recipe, "layers": max(recipe["layers"], least)}
    options.update({size: fresh[size] for size in SIZES[base] if options[size] is None})
    for option, value in architecture.own.items():
        if options[option] is None:
            options[option] = recipe.get(option, value)
    if base not in ("mamba", "mamba2"):
        options["decays"] = None
    elif options["decays"] is None:
        options["decays"] = recipe["decays"]
    if options["tied"] is None and base != "selective":
        options["tied"] = recipe.get("tied")
    if options["kind"] in ("text", "instructions"):
        options.update({key: value for key, value in TOKENIZER.items() if options[key] is None})
    width = options["width"]
    inner = width * (options["expand"] or 1)
    if base == "mamba2" and inner % options["head_width"]:
        raise InputError(f"head_width {options['head_width']} does not divide width · expand = {inner}")
    if base == "attention" and inner % options["heads"]:
        raise InputError(f"{options['heads']} heads do not divide width · expand = {inner}")


def plan_of(options: Mapping[str, Any], parts: Mapping[str, Data | None]) -> dict[str, Any]:
    """Return everything that determines the weights, as plain JSON."""
    recipe = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT and value is not None}
    data = {part: _described(examples) if examples is not None else None for part, examples in parts.items()}
    plan = {"architecture": options["architecture"], "recipe": recipe, "data": data}
    return json.loads(json.dumps(plan, default=str))


def _described(data: Data) -> dict[str, Any]:
    found = {"name": data.name, "split": data.split, "examples": len(data), "fingerprint": data.fingerprint}
    if isinstance(data, InstructionData):
        return {**found, "examples": len(data.first), "prompts": len(data), "tasks": _tasks(data)}
    if isinstance(data, TokenData):
        return {**found, "asked": int((data.targets != IGNORED).sum())}
    counts = Counter(data.labels if isinstance(data, TextData) else np.asarray(data.labels).tolist())
    return {**found, "classes": {name: counts[i] for i, name in enumerate(data.label_names)}}


def _tasks(data: InstructionData) -> dict[str, Any]:
    """Return the split of each task's examples and their number in every class."""
    answers = data.answers
    counts = Counter((data.tasks[at], answers[at]) for at in data.first)
    return {
        task: {"split": split, "classes": {word: counts[task, word] for word in TASK_PROMPTS[task].words}}
        for task, split in data.sources.items()
    }


def is_finished(out: Path, plan: Mapping[str, Any]) -> bool:
    """Return True if `out` holds this run and it has ended, False for a new run or one to be continued.

    Raises:
        InputError: `out` holds something else.
    """
    from ssmscope.training.checkpoint import is_new, read_json

    for file, finished in ((out / FINISHED, True), (out / CLAIMED, False)):
        if os.path.exists(file):
            compare(out, read_json(file), plan)
            return finished
    if not is_new(out, (out / CLAIMED).parent):
        raise InputError(f"{out} exists and holds no training run; give a new or empty directory")
    return False


def compare(out: Path, found: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Raise InputError if the plan found in `out` differs from this plan."""
    if all(found.get(key) == value for key, value in plan.items()):
        return
    if not all(isinstance(found.get(key), Mapping) for key in ("recipe", "data")):
        raise InputError(f"{out} holds a damaged record of a run; remove it, or give another directory")
    then, now = ({**p.get("recipe", {}), "architecture": p.get("architecture")} for p in (found, plan))
    for part in plan["data"]:
        then[f"{part} data"], now[f"{part} data"] = (_shown(p.get("data", {}).get(part)) for p in (found, plan))
    name = next((name for name in now if name not in then or then[name] != now[name]), "recipe")
    raise InputError(
        f"{out} holds a run with another {name} ({then.get(name)}, now {now.get(name)}); "
        "repeat that run's options, or give another directory"
    )


def _shown(entry: Mapping[str, Any] | None) -> str:
    if not isinstance(entry, Mapping):
        return "none"
    return f"{entry.get('name')} {entry.get('split')} {entry.get('fingerprint')}"
