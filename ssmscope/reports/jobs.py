"""Jobs of a plan: its calls, each with a key of everything that its result depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssmscope.api.analysis import Call
from ssmscope.api.inputs import Texts
from ssmscope.errors import InputError
from ssmscope.reports.keys import Fingerprints, json_options, key_of
from ssmscope.reports.plan import Plan, PlannedCall, PlannedModel
from ssmscope.reports.sizes import Expected
from ssmscope.reports.sources import check_model, check_sources, kind_of


@dataclass(frozen=True)
class Job:
    """One call to run: its key (16 hex digits of the SHA-256 of everything the result depends on), its models'
    shown names, the CPUs and GPUs that it needs of a cluster, torch's `threads`, None for the default, and what it
    is expected to cost, None without a budget."""

    key: str
    heading: str
    call: Call
    models: tuple[str, ...]
    cpus: float
    gpus: float
    threads: int | None
    expected: Expected | None = None

    @property
    def verb(self) -> str:
        return self.call.name

    @property
    def command(self) -> str:
        return self.call.command

    @property
    def options(self) -> dict[str, Any]:
        return json_options(self.call)


@dataclass(frozen=True)
class Jobs:
    """Jobs of a plan in its order; `models` has each model's id, kind and fingerprint by name."""

    every: tuple[Job, ...]
    models: Mapping[str, Mapping[str, Any]]

    def to_run(self) -> list[Job]:
        """Return one job per key, ordered by model so that each model is loaded once."""
        once = {job.key: job for job in self.every}
        order = {names: i for i, names in enumerate(dict.fromkeys(job.call.models for job in once.values()))}
        return sorted(once.values(), key=lambda job: order[job.call.models])


def make_jobs(plan: Plan) -> Jobs:
    """Make the jobs of a plan; models, data and files are checked, but nothing is loaded or run. Raise InputError for a
    model, data or file that cannot be found or read, a verb that does not support a model and is not restricted by
    `for`, or a plan without any job."""
    check_sources(plan)

    from ssmscope.loading.load import locate, trained_on

    prints = Fingerprints()
    places = {model.name: locate(model.model) for model in plan.models}
    known = {model.name: _known(model, places[model.name], prints) for model in plan.models}
    jobs = []
    for planned in plan.calls:
        models = [model for model in planned.models if _wanted(planned, known[model.name]["kind"])]
        if len(models) < len(planned.models):
            continue
        call = _with_data(planned.call, trained_on, known[planned.models[0].name]["kind"])
        jobs.append(_job(key_of(call, [known[model.name] for model in models], prints), planned, call))
    if not jobs:
        kinds = ", ".join(f"{name} is a {each['kind'] or 'model of no known kind'}" for name, each in known.items())
        raise InputError(f"no analysis of the plan is for these models: {kinds}")
    return Jobs(tuple(jobs), known)


def _known(model: PlannedModel, place: Path, prints: Fingerprints) -> dict[str, Any]:
    from ssmscope.loading.load import locate
    from ssmscope.loading.pretrained import base_of, is_adapter

    check_model(model.model, place)
    try:
        files = prints.of_model(place)
        if is_adapter(place):
            files += prints.of_model(base_of(place, model.model, locate))
    except OSError as error:
        raise InputError(f"the files of {model.model} cannot be read: {error.strerror or error}") from error
    return {"model": model.model, "kind": kind_of(place, tokenizer=model.tokenizer is not None), "files": files}


def _wanted(planned: PlannedCall, kind: str | None) -> bool:
    if planned.kinds is not None:
        return kind in planned.kinds
    can = planned.call.analysis.models
    if kind is None or kind in can:
        return True
    names = ", ".join(model.name for model in planned.models)
    raise InputError(
        f"{planned.where} does not support {names}, of kind {kind}; it supports {', '.join(can)}: list its models, or "
        f"add 'for: [{', '.join(can)}]'"
    )


def _with_data(call: Call, trained_on: Callable[[str], str | None], kind: str | None) -> Call:
    """Fill in the default data of a call: the data that its model, of the given kind, was trained on."""
    reads = call.analysis.reads
    if isinstance(reads, Texts) or call.inputs.get("data", "") is not None or not (reads and reads.wants_data(kind)):
        return call
    return replace(call, inputs={**call.inputs, "data": trained_on(call.models[0])})


def _job(key: str, planned: PlannedCall, call: Call) -> Job:
    from ssmscope.loading.load import chosen_device

    cpus, names = planned.resources.get("cpus"), tuple(model.name for model in planned.models)
    gpus = planned.resources.get("gpus", float(chosen_device(call.device).startswith("cuda")))
    threads = None if cpus is None else max(1, int(cpus))
    return Job(key, planned.heading, call, names, 1.0 if cpus is None else cpus, gpus, threads, planned.expected)
