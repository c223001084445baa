"""The jobs of a plan: its command lines with all that their results depend on, under one key each."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmscope.errors import InputError
from ssmscope.reports.code import code_of
from ssmscope.reports.fingerprints import Fingerprints
from ssmscope.reports.kinds import ONLY, kind_of
from ssmscope.reports.plan import Line, Plan, PlannedModel
from ssmscope.reports.sources import check_model, check_sources

READ = (
    "data", "validation", "file", "filler", "image", "lens", "questions", "embeddings", "masked_lm", "encoder",
    "semantic", "synonyms", "tokenizer",
)  # fmt: skip
"""The options that name files or data sets, whose content decides the result."""
WITHOUT_EFFECT = ("progress", "cache")
"""The options that change no number."""


@dataclass(frozen=True)
class Job:
    """One command line, to be run once.

    Attributes:
        key: 16 hex digits of the SHA-256 of all that the result depends on.
        arguments: what is typed after `analyze`.
        models: the names that the report shows.
        sources: what stands for the models on the command line.
        options: with defaults.
        cpus, gpus: what it needs of a cluster.
        threads: how many threads torch uses, None for as many as it does anyhow.
    """

    key: str
    verb: str
    heading: str
    arguments: tuple[str, ...]
    models: tuple[str, ...]
    sources: tuple[str, ...]
    options: Mapping[str, Any]
    cpus: float
    gpus: float
    threads: int | None

    @property
    def command(self) -> str:
        """The shell line that makes the result again."""
        return shlex.join(["analyze", *self.arguments])


@dataclass(frozen=True)
class Jobs:
    """The jobs of a plan in its order; `models` is what is known of each model, by name."""

    every: tuple[Job, ...]
    models: Mapping[str, Mapping[str, Any]]

    def to_run(self) -> list[Job]:
        """Each key once, those of one model after one another so that it is loaded once."""
        once = {job.key: job for job in self.every}
        order = {sources: i for i, sources in enumerate(dict.fromkeys(job.sources for job in once.values()))}
        return sorted(once.values(), key=lambda job: order[job.sources])


def make_jobs(plan: Plan) -> Jobs:
    """The jobs of a plan; its models, data and files are looked at, nothing is loaded and nothing runs.

    Raises:
        InputError: a model, data or a file that cannot be found or read, a verb that cannot do a model and is not
            restricted by `for`, or nothing that is left to do.
    """
    check_sources(plan)

    from ssmscope.models.load import locate, trained_on

    prints = Fingerprints()
    places = {model.name: locate(model.model) for model in plan.models}
    known = {model.name: _known(model, places[model.name], prints) for model in plan.models}
    jobs = []
    for line in plan.lines:
        models = [model for model in line.models if _wanted(line, known[model.name]["kind"])]
        if len(models) < len(line.models):
            continue
        options = {**line.options, "data": _data(line, trained_on)} if "data" in line.options else line.options
        key = _key(line, [known[model.name] for model in models], _contents(options, prints))
        jobs.append(_job(key, line, models))
    if not jobs:
        kinds = ", ".join(f"{name} is a {each['kind'] or 'model of no known kind'}" for name, each in known.items())
        raise InputError(f"no analysis of the plan is for these models: {kinds}")
    return Jobs(tuple(jobs), known)


def _known(model: PlannedModel, place: Path, prints: Fingerprints) -> dict[str, Any]:
    check_model(model.model, place)
    try:
        files = prints.of_model(place)
    except OSError as error:
        raise InputError(f"the files of {model.model} cannot be read: {error.strerror or error}") from error
    return {"model": model.model, "kind": kind_of(place, tokenizer=model.tokenizer is not None), "files": files}


def _wanted(line: Line, kind: str | None) -> bool:
    if line.kinds is not None:
        return kind in line.kinds
    able = ONLY.get(line.verb)
    if able is None or kind is None or kind in able:
        return True
    names = ", ".join(model.name for model in line.models)
    raise InputError(
        f"{line.where} cannot do {names}, of kind {kind}; it does {', '.join(able)}: name its models, or write "
        f"'for: [{', '.join(able)}]' beside it"
    )


def _data(line: Line, trained_on: Any) -> str | None:
    """The data that a verb takes, by default what the model learnt from."""
    given = line.options["data"]
    if given is not None or line.verb == "loss":
        return given or (None if line.options["file"] else "wikitext2")
    return trained_on(line.models[0].model)


def _contents(options: Mapping[str, Any], prints: Fingerprints) -> dict[str, list[str | None]]:
    """What the files and data sets hold that a job reads, by option."""
    found = {}
    for name in READ:
        value = options.get(name)
        if value is None:
            continue
        try:
            found[name] = [prints.of_data(each) for each in (value if isinstance(value, list) else [value])]
        except OSError as error:
            raise InputError(f"{name} {value} cannot be read: {error.strerror or error}") from error
    return found


def _key(line: Line, models: Iterable[Mapping[str, Any]], contents: Mapping[str, Any]) -> str:
    essence = {
        "verb": line.verb,
        "options": {name: value for name, value in line.options.items() if name not in WITHOUT_EFFECT},
        "models": [[model["model"], model["files"]] for model in models],
        "contents": contents,
        "code": code_of(line.function),
    }
    return hashlib.sha256(json.dumps(essence, sort_keys=True).encode()).hexdigest()[:16]


def _job(key: str, line: Line, models: Sequence[PlannedModel]) -> Job:
    cpus, gpus = line.resources.get("cpus"), line.resources.get("gpus")
    on_gpu = str(line.options.get("device", "")).startswith("cuda")
    return Job(
        key,
        line.verb,
        line.heading,
        line.arguments,
        tuple(model.name for model in models),
        tuple(model.model for model in models),
        line.options,
        cpus=1.0 if cpus is None else cpus,
        gpus=float(on_gpu) if gpus is None else gpus,
        threads=None if cpus is None else max(1, int(cpus)),
    )
