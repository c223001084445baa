"""The jobs of a plan: its calls with all that their results depend on, under one key each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssmscope.api.analysis import Call
from ssmscope.api.inputs import Texts
from ssmscope.errors import InputError
from ssmscope.reports.code import code_of
from ssmscope.reports.fingerprints import Fingerprints
from ssmscope.reports.kinds import able, kind_of
from ssmscope.reports.plan import Line, Plan, PlannedModel
from ssmscope.reports.sources import check_model, check_sources


@dataclass(frozen=True)
class Job:
    """One call, to be run once.

    Attributes:
        key: 16 hex digits of the SHA-256 of all that the result depends on.
        models: the names that the report shows.
        cpus, gpus: what it needs of a cluster.
        threads: how many threads torch uses, None for as many as it does anyhow.
    """

    key: str
    heading: str
    call: Call
    models: tuple[str, ...]
    cpus: float
    gpus: float
    threads: int | None

    @property
    def verb(self) -> str:
        return self.call.name

    @property
    def command(self) -> str:
        """The shell line that makes the result again."""
        return self.call.command

    @property
    def options(self) -> dict[str, Any]:
        """Inputs and options with defaults, as plain values."""
        return plain(self.call)


@dataclass(frozen=True)
class Jobs:
    """The jobs of a plan in its order; `models` is what is known of each model, by name."""

    every: tuple[Job, ...]
    models: Mapping[str, Mapping[str, Any]]

    def to_run(self) -> list[Job]:
        """Each key once, those of one model after one another so that it is loaded once."""
        once = {job.key: job for job in self.every}
        order = {names: i for i, names in enumerate(dict.fromkeys(job.call.models for job in once.values()))}
        return sorted(once.values(), key=lambda job: order[job.call.models])


def make_jobs(plan: Plan) -> Jobs:
    """The jobs of a plan; its models, data and files are looked at, nothing is loaded and nothing runs.

    Raises:
        InputError: a model, data or a file that cannot be found or read, a verb that cannot do a model and is not
            restricted by `for`, or nothing that is left to do.
    """
    check_sources(plan)

    from ssmscope.architectures.loading.load import locate, trained_on

    prints = Fingerprints()
    places = {model.name: locate(model.model) for model in plan.models}
    known = {model.name: _known(model, places[model.name], prints) for model in plan.models}
    jobs = []
    for line in plan.lines:
        models = [model for model in line.models if _wanted(line, known[model.name]["kind"])]
        if len(models) < len(line.models):
            continue
        call = _with_data(line.call, trained_on)
        jobs.append(_job(key_of(call, [known[model.name] for model in models], prints), line, call))
    if not jobs:
        kinds = ", ".join(f"{name} is a {each['kind'] or 'model of no known kind'}" for name, each in known.items())
        raise InputError(f"no analysis of the plan is for these models: {kinds}")
    return Jobs(tuple(jobs), known)


def _known(model: PlannedModel, place: Path, prints: Fingerprints) -> dict[str, Any]:
    from ssmscope.architectures.loading.adapter_folder import base_of, is_adapter
    from ssmscope.architectures.loading.load import locate

    check_model(model.model, place)
    try:
        files = prints.of_model(place)
        if is_adapter(place):
            files += prints.of_model(base_of(place, model.model, locate))
    except OSError as error:
        raise InputError(f"the files of {model.model} cannot be read: {error.strerror or error}") from error
    return {"model": model.model, "kind": kind_of(place, tokenizer=model.tokenizer is not None), "files": files}


def _wanted(line: Line, kind: str | None) -> bool:
    if line.kinds is not None:
        return kind in line.kinds
    can = able(line.call.analysis)
    if kind is None or kind in can:
        return True
    names = ", ".join(model.name for model in line.models)
    raise InputError(
        f"{line.where} cannot do {names}, of kind {kind}; it does {', '.join(can)}: name its models, or write "
        f"'for: [{', '.join(can)}]' beside it"
    )


def _with_data(call: Call, trained_on: Callable[[str], str | None]) -> Call:
    """The call with the data that it reads by default: what its model learnt from."""
    if isinstance(call.analysis.reads, Texts) or call.inputs.get("data", "") is not None:
        return call
    return replace(call, inputs={**call.inputs, "data": trained_on(call.models[0])})


def _contents(call: Call, prints: Fingerprints) -> dict[str, list[str | None]]:
    """What the files and data sets hold that a call reads, by option."""
    found = {}
    named = [(each.name, value) for each, value in call.every() if each.reads is not None]
    for name, value in [*named, ("tokenizer", call.tokenizer)]:
        if value is None:
            continue
        try:
            found[name] = [
                prints.of_data(str(each)) for each in (value if isinstance(value, list | tuple) else [value])
            ]
        except OSError as error:
            raise InputError(f"{name} {value} cannot be read: {error.strerror or error}") from error
    return found


def key_of(call: Call, models: Iterable[Mapping[str, Any]], prints: Fingerprints) -> str:
    """The key of a call's job: of its every option but those without effect, and of the content of all that it reads.

    Args:
        models: the name and the files' fingerprint of each of its models, as "model" and "files".

    Raises:
        InputError: a file that cannot be read.
    """
    without = {option.name for option, _ in call.every() if option.no_effect}
    essence = {
        "analysis": call.name,
        "options": {name: value for name, value in plain(call).items() if name not in without},
        "models": [[model["model"], model["files"]] for model in models],
        "contents": _contents(call, prints),
        "code": code_of(call.analysis.function),
    }
    return hashlib.sha256(json.dumps(essence, sort_keys=True).encode()).hexdigest()[:16]


def _job(key: str, line: Line, call: Call) -> Job:
    cpus, gpus = line.resources.get("cpus"), line.resources.get("gpus")
    from ssmscope.architectures.loading.load import chosen_device

    on_gpu = chosen_device(call.device).startswith("cuda")
    return Job(
        key,
        line.heading,
        call,
        tuple(model.name for model in line.models),
        cpus=1.0 if cpus is None else cpus,
        gpus=float(on_gpu) if gpus is None else gpus,
        threads=None if cpus is None else max(1, int(cpus)),
    )


def plain(call: Call) -> dict[str, Any]:
    """All that a call says beside its models, as values that JSON knows."""
    every = {option.name: _plain(value) for option, value in call.every()}
    return {**every, "tokenizer": call.tokenizer, "device": call.device, "dtype": call.dtype}


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
