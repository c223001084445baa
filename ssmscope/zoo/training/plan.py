"""Plan of a training run: its checked options and data, and the check whether a directory holds the same run."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ssmscope.core.batching import refuse_beyond, refuse_held
from ssmscope.data.prompts import TASK_PROMPTS
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import InputError
from ssmscope.zoo.instructions import InstructionData
from ssmscope.zoo.training.architectures import ANNEALING, GATE_OPTIONS, OWN, SIZES, Architecture, named
from ssmscope.zoo.training.data import QUESTIONS, Data, kind_of, task_options
from ssmscope.zoo.training.options import OPTIONS, Allowed, defaults

TOKENIZER = {"vocabulary": 4000, "lowercase": True}
"""Default tokenizer of texts or instructions for a model trained from scratch."""

EVERY_SIZE = frozenset(name for names in SIZES.values() for name in names)
MAX_PARAMETERS = 4 * 10**9
"""Parameters of a trained model; each takes 16 bytes with AdamW."""

FINISHED = Path("training.json")
"""File that marks a finished run; it is written last."""

CLAIMED = Path("checkpoint", "plan.json")
"""Plan of a run that has begun."""

WITHOUT_EFFECT = (
    *("architecture", "data", "out", "device", "checkpoint_minutes", "progress", "log", "command"),
    *("kind", "compile"),
)
"""Arguments outside the recipe, which do not change the result."""


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the defaults of the data's kind and of a new model filled in; raise InputError if an
    option is outside its range or contradicts another."""
    options = dict(given)
    architecture = named(options["architecture"])
    kind = options["kind"] = kind_of(options["data"])
    for name, declared in OPTIONS.items():
        value, allowed = options[name], declared["allowed"]
        if value is None or allowed is None:
            continue
        if isinstance(allowed, Allowed) and not allowed.fits(value):
            raise InputError(f"{name} is {value}; it must be {allowed.words}")
        if not isinstance(allowed, Allowed) and value not in allowed:
            raise InputError(f"{name} is '{value}'; choose one of {', '.join(allowed)}")
    _check_kind(options)
    refuse_beyond({name: each["most"] for name, each in OPTIONS.items() if each["most"] is not None}, options)
    recipe = defaults(options["architecture"], kind, options["recipe"], str(options["data"]))
    of_model = {*EVERY_SIZE, "decays", "tied", *OWN}
    if options["init_from"] is not None:
        of_model.add("vocabulary")
        _check_further(options, architecture, of_model)
    else:
        _settle_model(options, architecture, recipe)
    if options["prior_from"] is None and (options["prior_step"] or options["prior_every"]):
        raise InputError("prior_step and prior_every are the schedule from prior_from; give that too")
    for name, value in recipe.items():
        if name not in of_model and options[name] is None and kind in (OPTIONS[name]["kinds"] or (kind,)):
            options[name] = value
    _refuse_size(options)
    return options


def _refuse_size(options: Mapping[str, Any]) -> None:
    """Raise InputError if a model is too large to train."""
    width, layers, expand = (options[name] or 1 for name in ("width", "layers", "expand"))
    states = 3 * width + 2 * (options["state"] or 1)
    parameters = layers * width * expand * states + 2 * width * (options["vocabulary"] or 0)
    what = f"{layers:,} layers of width {width:,} and expand {expand:,}"
    refuse_held(parameters, what, "take a smaller model", most=MAX_PARAMETERS, unit="parameters")


def _check_kind(options: Mapping[str, Any]) -> None:
    """Raise InputError for options that do not apply to the data."""
    data, kind, vocabulary = options["data"], options["kind"], options["vocabulary"]
    task = (*task_options(data), *(("vocabulary",) if kind == "text" else ()))
    for name in ("length", "examples", "pairs", "flipped", "every_token", "unit", "filler", "mixture", "vocabulary"):
        if options[name] is not None and name not in task:
            raise InputError(f"{name} does not apply to {data}; leave it out")
    for name, declared in OPTIONS.items():
        if options[name] and declared["kinds"] and kind not in declared["kinds"]:
            raise InputError(f"{name} does not apply to {data}, which is not {' or '.join(declared['kinds'])}")
    if options["prompt_weight"] and kind == "tokens" and data not in QUESTIONS:
        raise InputError(f"prompt_weight does not apply to {data}, which has no prompts; leave it out")
    least = {"text": 8, "instructions": 259}.get(kind, 2)
    if vocabulary is not None and vocabulary < least:
        raise InputError(f"vocabulary is {vocabulary}; it must be at least {least}")
    if options["padding"] and options["architecture"] != "selective":
        raise InputError(f"padding does not apply to {options['architecture']}; leave it out")
    if options["architecture"] == "selective" and kind == "pixels":
        raise InputError("the selective SSM reads tokens, and cifar10 and digits are pixels; choose another task")


def _check_further(options: Mapping[str, Any], architecture: Architecture, of_model: set[str]) -> None:
    """Raise InputError for options of a new model, or of another gate than the one that a trained model gets."""
    gate_options = (*GATE_OPTIONS, *ANNEALING) if architecture.gate else ()
    refused = sorted((of_model | {"base", "vocabulary", "lowercase"}) - {*gate_options})
    for name in (*refused, *(name for name in gate_options if name not in architecture.own)):
        if options[name] is not None:
            trained = f"{options['architecture']} trained from {options['init_from']}"
            raise InputError(f"{name} cannot be chosen for {trained}; leave it out")


def _settle_model(options: dict[str, Any], architecture: Architecture, recipe: Mapping[str, Any]) -> None:
    """Fill in the base, the sizes and the architecture's own options, and refuse those that it does not have."""
    name, bases = options["architecture"], architecture.bases
    base = options["base"] or bases[0]
    on_mamba = base in ("mamba", "mamba2")
    useless = [*(each for each in OWN if each not in architecture.own), *(["base"] * (len(bases) == 1))]
    useless += [*sorted(EVERY_SIZE - {*SIZES[base]}), *(["decays"] * (not on_mamba))]
    useless += ["tied"] * (base == "selective")
    if wrong := [each for each in useless if options[each] is not None]:
        on = f" on {base}" if len(bases) > 1 else ""
        raise InputError(f"{wrong[0]} does not apply to {name}{on}; leave it out")
    if name == "baleen-b" and options["prior"] is not None and options["prior"] >= 1:
        raise InputError(f"prior is {options['prior']}; for {name} it is a probability below 1")
    least = {"groupmamba": options["k"] or 2, "rwkv": 2}.get(name, 1)
    if options["layers"] is not None and options["layers"] < least:
        raise InputError(f"layers is {options['layers']}; for this {name} it must be at least {least}")
    fresh = {**recipe, "base": base, "layers": max(recipe["layers"], least)}
    filled = ["base", *SIZES[base], *architecture.own, *(["decays"] * on_mamba), *(["tied"] * (base != "selective"))]
    if options["kind"] in ("text", "instructions"):
        fresh, filled = fresh | TOKENIZER, [*filled, *TOKENIZER]
    options.update({each: fresh.get(each) for each in filled if options[each] is None})
    inner = options["width"] * (options["expand"] or 1)
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
    if isinstance(data, TokenData):
        return {**found, "asked": int((data.targets != IGNORED).sum())}
    if not isinstance(data, InstructionData):
        counts = np.bincount(data.labels, minlength=len(data.label_names)).tolist()
        return {**found, "classes": dict(zip(data.label_names, counts))}
    number = Counter((data.tasks[at], data.answers[at]) for at in data.first)
    tasks = {
        task: {"split": split, "classes": {word: number[task, word] for word in TASK_PROMPTS[task].words}}
        for task, split in data.sources.items()
    }
    return {**found, "examples": len(data.first), "prompts": len(data), "tasks": tasks}


def is_finished(out: Path, plan: Mapping[str, Any]) -> bool:
    """Return True if `out` holds this run and it has ended, False for a new run or one to be continued. Anything else
    in `out` raises InputError."""
    from ssmscope.api.checkpoint import is_new, read_json

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
    then, now = (
        {**run["recipe"], "architecture": run.get("architecture")}
        | {f"{part} data": _shown(run["data"].get(part)) for part in plan["data"]}
        for run in (found, plan)
    )
    name = next((name for name in now if name not in then or then[name] != now[name]), "recipe")
    raise InputError(
        f"{out} holds a run with another {name} ({then.get(name)}, now {now.get(name)}); "
        "repeat that run's options, or give another directory"
    )


def _shown(entry: Mapping[str, Any] | None) -> str:
    if not isinstance(entry, Mapping):
        return "none"
    return f"{entry.get('name')} {entry.get('split')} {entry.get('fingerprint')}"
