"""What a training run was asked for: its options and data, checked, and whether a directory holds that very run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ssmscope.errors import InputError, did_you_mean
from ssmscope.tasks.text import SOURCES, TextData, load_text

ARCHITECTURES = {"mamba": None, "mamba2": None, "baleen-b": "bernoulli", "baleen-e": "exponential"}
"""What can be trained, and the random gate of those that have one."""

SIZES = {"base": "mamba2", "width": 128, "layers": 1, "state": 16, "head_width": 16, "expand": 2}
"""The sizes of a model trained from scratch, where none are given."""

TOKENIZER = {"vocabulary": 4000, "lowercase": True}
"""The tokenizer of a model trained from scratch, where nothing is given."""

GATE = ("beta", "tau", "prior", "kl")
KL = ("true", "printed")
BASES = ("mamba", "mamba2")
PRECISIONS = ("fp32", "bf16")
STORED = ("bfloat16", "float16", "float32")

RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("width", "layers", "state", "head_width", "expand", "epochs", "batch_size", "patience"),
        lambda value: value >= 1,
        "at least 1",
    ),
    (("max_length",), lambda value: value >= 2, "at least 2: a token and the end token"),
    (("vocabulary",), lambda value: value >= 8, "at least 8"),
    (("seed", "weight_decay", "beta", "checkpoint_minutes"), lambda value: value >= 0, "0 or more"),
    (("learning_rate", "clip", "tau", "prior"), lambda value: value > 0, "above 0"),
    (("held_out",), lambda value: 0 < value < 1, "between 0 and 1"),
    (
        ("warmup", "dropout", "embedding_dropout", "token_dropout", "subword_dropout", "label_smoothing"),
        lambda value: 0 <= value < 1,
        "at least 0 and below 1",
    ),
)
"""Options, what their values must satisfy, and that in words."""

FINISHED = Path("training.json")
"""The file, written last, by which a run is known to have ended."""

CLAIMED = Path("checkpoint") / "plan.json"
"""The plan of a run that has begun."""

WITHOUT_EFFECT = ("architecture", "data", "out", "device", "checkpoint_minutes", "progress", "command")
"""Arguments that are no part of the recipe: they change where and how a run goes on, not what comes out."""


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the defaults of a fresh model filled in.

    Raises:
        InputError: for an option outside its range, or one that does not go with the others.
    """
    options = dict(given)
    architecture = options["architecture"]
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"unknown architecture '{architecture}'; choose one of {', '.join(ARCHITECTURES)}"
            f"{did_you_mean(str(architecture), ARCHITECTURES)}"
        )
    for name, allowed in (("precision", PRECISIONS), ("saved_as", STORED), ("kl", KL), ("base", BASES)):
        if options[name] is not None and options[name] not in allowed:
            raise InputError(f"{name} is '{options[name]}'; choose one of {', '.join(allowed)}")
    for names, fits, range_ in RANGES:
        for name in names:
            if options[name] is not None and not fits(options[name]):
                raise InputError(f"{name} is {options[name]}; it must be {range_}")
    gate = ARCHITECTURES[architecture]
    useless = [name for name in GATE if gate is None and options[name] is not None]
    useless += [name for name in ("tau",) if gate == "exponential" and options[name] is not None]
    useless += [name for name in ("kl",) if gate == "bernoulli" and options[name] is not None]
    if gate == "bernoulli" and options["prior"] is not None and options["prior"] >= 1:
        raise InputError(f"prior is {options['prior']}; for {architecture} it is a probability below 1")
    fresh = {**SIZES, **TOKENIZER}
    if options["init_from"] is not None:
        useless += [name for name in fresh if options[name] is not None]
        if useless:
            raise InputError(f"{useless[0]} cannot be chosen for {architecture} trained from {options['init_from']}")
        return options
    if gate is None and options["base"] is not None:
        useless.append("base")
    kind = options["base"] or ("mamba" if architecture == "mamba" else "mamba2")
    if kind == "mamba" and options["head_width"] is not None:
        useless.append("head_width")
    if useless:
        raise InputError(f"{useless[0]} means nothing for {architecture} on {kind}; leave it out")
    options.update({name: value for name, value in fresh.items() if options[name] is None})
    options["base"] = kind
    if kind == "mamba":
        options["head_width"] = None
    elif options["width"] * options["expand"] % options["head_width"]:
        raise InputError(
            f"head_width {options['head_width']} does not divide width · expand = "
            f"{options['width'] * options['expand']}"
        )
    return options


def parts_of(options: Mapping[str, Any]) -> dict[str, TextData | None]:
    """The training, validation and test examples; no test where there is no labelled split for it."""
    data, split = options["data"], options["split"]
    known = SOURCES.get(data) if isinstance(data, str) else None
    if known is not None:
        split = split or "train"
    train = load_text(data, split)
    if len(train.label_names) < 2:
        raise InputError(f"{data} has one class, '{train.label_names[0]}'; a classifier needs at least two")

    def other(given: str | Path | None, which: str) -> TextData | None:
        if given is None and (known is None or which not in known.splits or which == split):
            return None
        source = data if given is None else given
        if isinstance(source, str) and source in SOURCES:
            part = load_text(source, which if which in SOURCES[source].splits else None)
            if part.label_names != train.label_names:
                raise InputError(
                    f"{source} has the classes {', '.join(part.label_names)}, but {data} has "
                    f"{', '.join(train.label_names)}; give {which} data with the same classes"
                )
            return part
        return load_text(source, label_names=train.label_names)

    validation, test = other(options["validation"], "validation"), other(options["test"], "test")
    if validation is None:
        train, validation = train.divide(options["held_out"], seed=options["seed"])
    return {"train": train, "validation": validation, "test": test}


def plan_of(options: Mapping[str, Any], parts: Mapping[str, TextData | None]) -> dict[str, Any]:
    """Everything that decides which weights come out, as plain JSON."""
    recipe = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
    data = {part: _described(texts) if texts is not None else None for part, texts in parts.items()}
    plan = {"architecture": options["architecture"], "recipe": recipe, "data": data}
    return json.loads(json.dumps(plan, default=str))


def _described(texts: TextData) -> dict[str, Any]:
    counts = Counter(texts.labels)
    return {
        "name": texts.name,
        "split": texts.split,
        "examples": len(texts),
        "classes": {name: counts[i] for i, name in enumerate(texts.label_names)},
        "fingerprint": texts.fingerprint,
    }


def is_finished(out: Path, plan: Mapping[str, Any]) -> bool:
    """Whether `out` holds this run and it has ended; False for a new run and for one to be continued.

    Raises:
        InputError: when `out` holds something else.
    """
    from ssmscope.training.checkpoint import read_json

    for file, finished in ((out / FINISHED, True), (out / CLAIMED, False)):
        if file.exists():
            compare(out, read_json(file), plan)
            return finished
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and holds no training run; give a new or empty directory")
    return False


def compare(out: Path, found: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    if all(found.get(key) == value for key, value in plan.items()):
        return
    then, now = ({**p.get("recipe", {}), "architecture": p.get("architecture")} for p in (found, plan))
    for part in plan["data"]:
        then[f"{part} data"], now[f"{part} data"] = (_shown(p.get("data", {}).get(part)) for p in (found, plan))
    name = next((name for name in now if name not in then or then[name] != now[name]), "recipe")
    raise InputError(
        f"{out} holds a run with another {name} ({then.get(name)}, now {now.get(name)}); "
        "repeat that run's options, or give another directory"
    )


def _shown(entry: Mapping[str, Any] | None) -> str:
    return "none" if entry is None else f"{entry.get('name')} {entry.get('split')} {entry.get('fingerprint')}"
