"""Plan of a report: models, their analyses, and the resulting calls, all checked."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssmscope.api.analyses import analyses
from ssmscope.api.analysis import LOADING_OPTIONS, Analysis, Call
from ssmscope.api.inputs import MODEL_KINDS
from ssmscope.errors import InputError, did_you_mean
from ssmscope.reports.plain_yaml import read_yaml
from ssmscope.reports.requirements import requirement_texts
from ssmscope.reports.sizes import Expected, Size, read_budget, read_hardest, read_size

PLAN_KEYS = ("title", "models", "analyses", "variables", "require", "budget", "hardest")
MODEL_KEYS = ("model", "name", *LOADING_OPTIONS, "resources")
ANALYSIS_KEYS = ("name", "models", "matrix", "overrides", "together", "for", "resources", "size")
RESOURCES = ("cpus", "gpus")
REPORT_OPTIONS = ("out", "json", "cache")
"""Options that the report sets itself."""
WRITING_OPTIONS = ("save", "export")
"""Options that write files outside the results."""

MAX_JOBS = 10_000
"""Maximum number of jobs of a plan."""
MAX_RESOURCE = 100_000.0
"""Maximum number of CPUs or GPUs of a job."""

_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_UNSET = object()


SHIPPED_PLANS = {
    name: Path(__file__).with_name("plans") / f"{name}.yaml" for name in ("quick", "audit", "baleen", "diff-mamba")
}
"""Files of the plans that ship with the package, by name."""


@dataclass(frozen=True)
class PlannedModel:
    """Model of a plan: its argument on the command line, its name in the report, and defaults of its jobs."""

    model: str
    name: str
    tokenizer: str | None = None
    device: str | None = None
    dtype: str | None = None
    labels: tuple[str, ...] | None = None
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedCall:
    """One call of a plan; `where` names it in messages, and `kinds` restricts the models to which it applies."""

    where: str
    heading: str
    models: tuple[PlannedModel, ...]
    kinds: tuple[str, ...] | None
    call: Call
    resources: Mapping[str, float]
    size: Size | None = None
    """Size that a budget chooses; None if the call's size is given."""
    expected: Expected | None = None
    """None without a budget."""


@dataclass(frozen=True)
class Plan:
    """A parsed plan: its calls in order, the text from which it was read, and the requirements as written."""

    title: str
    models: tuple[PlannedModel, ...]
    calls: tuple[PlannedCall, ...]
    text: str
    require: tuple[str, ...] = ()
    budget: float | None = None
    """Seconds that the whole plan may take; None if no size depends on it."""
    hardest: int = 0
    """Number of the hardest examples that are explained after the analyses."""


def read_plan(
    text: str, *, name: str = "report", models: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Plan:
    """Read and check a plan; nothing is loaded or run.

    Args:
        text: the YAML.
        name: title if the plan has none.
        models: models to use instead of the plan's own.
        variables: values of the plan's `$name` variables.

    Raises:
        InputError: if anything is wrong, including option values that the command line would refuse.
    """
    document = read_yaml(text)
    if not isinstance(document, dict):
        raise InputError(f"a plan is a mapping with {', '.join(PLAN_KEYS)}, not {_shown(document)}")
    _known(document, PLAN_KEYS, "the plan")
    document = _filled(document, variables or {})
    if not isinstance(title := document.get("title") or name, str):
        raise InputError(f"title is {_shown(title)}; give a text")
    given = _models(list(models) or document.get("models"))
    reader = _Reader(given)
    analyses = document.get("analyses")
    if not isinstance(analyses, list) or not analyses:
        raise InputError(f"analyses is {_shown(analyses)}; give a list of verbs with their options")
    calls: list[PlannedCall] = []
    for number, item in enumerate(analyses, start=1):
        if not _has_unset(item):
            calls += reader.calls(item, f"analysis {number}", MAX_JOBS - len(calls))
    if not calls:
        raise InputError("every analysis of the plan needs a variable that is not set; give it with --set NAME=VALUE")
    require, budget = requirement_texts(document.get("require")), read_budget(document.get("budget"))
    return Plan(title, tuple(given), tuple(calls), text, require, budget, read_hardest(document.get("hardest")))


# ---- variables


def _filled(document: dict[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Fill in the document's variables; those without a value become a mark that `_has_unset` finds."""
    declared = document.get("variables") or {}
    if not isinstance(declared, dict) or any(isinstance(value, dict) for value in declared.values()):
        raise InputError(f"variables is {_shown(declared)}; give a mapping of names to values, or to nothing")
    for name in given:
        if name not in declared:
            has = f"it has {', '.join(declared)}" if declared else "it has none"
            raise InputError(f"the plan has no variable {name!r}; {has}{did_you_mean(name, declared)}")
    values = {**declared, **given}

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            filled = {key: fill(item) for key, item in value.items()}
            return {key: item for key, item in filled.items() if key != "columns" or item is not _UNSET}
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, str) and value.startswith("$$"):
            return value[1:]
        found = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            return value
        if found[1] not in values:
            raise InputError(
                f"{value!r} names a variable that the plan does not declare; declare it under variables, or write "
                f"'${value}' for the text{did_you_mean(found[1], values)}"
            )
        return _UNSET if values[found[1]] is None else values[found[1]]

    filled = {key: fill(value) for key, value in document.items() if key != "variables"}
    missing = next((key for key in ("title", "models", "require") if _has_unset(filled.get(key))), None)
    if missing is not None:
        raise InputError(f"{missing} needs a variable that is not set; give it with --set NAME=VALUE")
    return filled


def _has_unset(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_unset, value.values()))
    return any(map(_has_unset, value)) if isinstance(value, list) else value is _UNSET


# ---- models and analyses


def _models(given: Any) -> list[PlannedModel]:
    if not isinstance(given, list) or not given:
        raise InputError(f"models is {_shown(given)}; give a list of models, or --model on the command line")
    found = [_model(item, f"model {number}") for number, item in enumerate(given, start=1)]
    names = [each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two models are called {twice!r}; give one of them another name")
    return found


def _model(item: Any, where: str) -> PlannedModel:
    fields = {"model": item} if isinstance(item, str) else item
    if not isinstance(fields, dict):
        raise InputError(f"{where} is {_shown(item)}; give a name, or a mapping with {', '.join(MODEL_KEYS)}")
    _known(fields, MODEL_KEYS, where)
    texts = {key: value for key, value in fields.items() if key != "resources" and value is not None}
    texts = {key: _setting(key, value, where) for key, value in texts.items()}
    if "model" not in texts:
        raise InputError(f"{where} lacks 'model': demo/NAME, a directory, a file, or a hub id")
    if texts["model"].startswith("-"):
        raise InputError(f"{where} is {texts['model']!r:.80}, which would be an option on the command line")
    return PlannedModel(**{"name": texts["model"], **texts}, resources=_resources(fields.get("resources"), where))


def _resources(given: Any, where: str) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InputError(f"{where}: resources is {_shown(given)}; give a mapping with {' and '.join(RESOURCES)}")
    _known(given, RESOURCES, f"{where}, resources")
    found = {}
    for key, value in given.items():
        try:
            found[key] = float(value)
        except (TypeError, ValueError):
            found[key] = math.nan
        if isinstance(value, bool) or not 0 <= found[key] <= MAX_RESOURCE:
            raise InputError(f"{where}: {key} is {_shown(value)}; give a number of at least 0")
        if 1 < found[key] != int(found[key]):
            raise InputError(f"{where}: {key} is {_shown(value)}; above 1 only whole numbers are allowed")
    return found


class _Reader:
    """Reader of the plan's analyses of the given models."""

    def __init__(self, models: Sequence[PlannedModel]) -> None:
        self.models = {model.name: model for model in models}
        self.verbs = analyses()

    def calls(self, item: Any, where: str, most: int) -> list[PlannedCall]:
        """Return the calls of one analysis, at most `most`."""
        fields = {item: None} if isinstance(item, str) else item
        if not isinstance(fields, dict):
            raise InputError(f"{where} is {_shown(item)}; give a verb, or a mapping of a verb to its options")
        verb = self._verb(fields, where)
        where = f"{where} ({verb.name})"
        options = self._options(verb, fields[verb.name], where)
        matrix = self._matrix(verb, fields.get("matrix"), options, where)
        chosen = self._chosen(fields.get("models"), where)
        overrides = self._overrides(verb, fields.get("overrides"), chosen, matrix, where)
        kinds = _kinds(fields.get("for"), where)
        together = fields.get("together")
        if not (together is None or isinstance(together, bool)):
            raise InputError(f"{where}: together is {_shown(together)}; write true or false")
        if together and verb.max_models == 1:
            able = ", ".join(name for name, one in self.verbs.items() if one.max_models > 1)
            raise InputError(f"{where} takes one model at a time, so it cannot be together; these can: {able}")
        if together and overrides:
            raise InputError(f"{where}: overrides have no meaning with together; leave them out")
        heading = verb.name if fields.get("name") is None else _text("name", fields["name"], where)
        resources = _resources(fields.get("resources"), where)
        size = read_size(fields.get("size"), verb.options, {*options, *matrix}, where)
        groups = [tuple(chosen)] if together else [(model,) for model in chosen]
        if len(groups) * math.prod(len(values) for values in matrix.values()) > most:
            raise InputError(f"{where}: the plan has more than {MAX_JOBS:,} jobs; split it into several")
        calls = []
        for values, group in itertools.product(itertools.product(*matrix.values()), groups):
            every = {**options, **dict(zip(matrix, values)), **overrides.get(group[0].name, {})}
            needs = {**_most(group), **resources}
            calls.append(PlannedCall(where, heading, group, kinds, _call(verb, group, every, where), needs, size))
        return calls

    def _verb(self, fields: Mapping[str, Any], where: str) -> Analysis:
        named = [key for key in fields if key not in ANALYSIS_KEYS]
        verbs, known = [key for key in named if key in self.verbs], ", ".join(self.verbs)
        if not named:
            raise InputError(f"{where} names no verb; there are {known}")
        if not verbs:
            near = did_you_mean(named[0], self.verbs)
            raise InputError(f"{where}: no verb {named[0]!r:.80}; there are {known}{near}")
        if len(verbs) > 1:
            raise InputError(f"{where} names the verbs {' and '.join(verbs)}; make an item of the list of each")
        _known({key: None for key in named if key not in verbs}, ANALYSIS_KEYS, f"{where} ({verbs[0]})")
        return self.verbs[verbs[0]]

    @staticmethod
    def _options(verb: Analysis, given: Any, where: str) -> dict[str, Any]:
        if given is None:
            return {}
        if not isinstance(given, dict):
            raise InputError(f"{where}: the options are {_shown(given)}; give a mapping of names to values")
        found: dict[str, Any] = {}
        for key, value in given.items():
            name = key.replace("-", "_")
            known = (*verb.inputs, *verb.options, *LOADING_OPTIONS)
            name = f"{name}_" if f"{name}_" in known else name  # `from` is `from_` in Python.
            if name in REPORT_OPTIONS:
                raise InputError(f"{where}: the option {key!r} is set by the report itself; leave it out")
            if name in WRITING_OPTIONS and name in known:
                raise InputError(f"{where}: the option {key!r} writes a file of its own; give it to {verb.name} alone")
            if name not in known:
                has = f"it has {', '.join(known)}{did_you_mean(name, known)}"
                raise InputError(f"{where}: {verb.name} has no option {key!r:.80}; {has}")
            if name in found:
                raise InputError(f"{where}: the option {name} is given twice, with hyphens and with underscores")
            found[name] = value
        return found

    def _matrix(self, verb: Analysis, given: Any, options: Mapping[str, Any], where: str) -> dict[str, list[Any]]:
        found = self._options(verb, given, f"{where}, matrix")
        for name, values in found.items():
            if name in options:
                raise InputError(f"{where}: {name} is given both as an option and in the matrix; give it once")
            if not isinstance(values, list) or not values:
                raise InputError(f"{where}, matrix: {name} is {_shown(values)}; give a list of values")
        return found

    def _chosen(self, given: Any, where: str) -> list[PlannedModel]:
        if given is None:
            return list(self.models.values())
        names = given if isinstance(given, list) else [given]
        if not names:
            raise InputError(f"{where}: models is an empty list; leave it out for all models")
        return [self._named(name, where, "models") for name in dict.fromkeys(map(_word, names))]

    def _named(self, name: str, where: str, key: str) -> PlannedModel:
        if name not in self.models:
            known = f"{', '.join(self.models)}{did_you_mean(name, self.models)}"
            raise InputError(f"{where}, {key}: no model of the plan is called {name!r:.80}; there are {known}")
        return self.models[name]

    def _overrides(
        self, verb: Analysis, given: Any, chosen: Sequence[PlannedModel], matrix: Mapping[str, Any], where: str
    ) -> dict[str, dict[str, Any]]:
        if given is None:
            return {}
        if not isinstance(given, dict):
            raise InputError(f"{where}: overrides is {_shown(given)}; give a mapping of models to options")
        found = {}
        for name, options in given.items():
            model = self._named(name, where, "overrides")
            if model not in chosen:
                raise InputError(f"{where}, overrides: {name!r} is not among the models of this analysis")
            found[name] = self._options(verb, options, f"{where}, overrides of {name}")
            both = next((option for option in found[name] if option in matrix), None)
            if both is not None:
                raise InputError(f"{where}: the matrix and the overrides of {name} both give {both}; give it once")
        return found


def _text(name: str, value: Any, where: str) -> str:
    """Return the value, or raise InputError if it is blank or not text."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: {name} is {_shown(value)}; give a text")
    return value


def _setting(name: str, value: Any, where: str) -> Any:
    """Return a text, or the labels in a list, which may be numbers."""
    if name == "labels" and isinstance(value, list | tuple):
        return tuple(_text(name, each if isinstance(each, str) else json.dumps(each), where) for each in value)
    return _text(name, value, where)


def _kinds(given: Any, where: str) -> tuple[str, ...] | None:
    if given is None:
        return None
    kinds = tuple(map(_word, given if isinstance(given, list) else [given]))
    wrong = next((kind for kind in kinds if kind not in MODEL_KINDS), None)
    if wrong is not None or not kinds:
        near = did_you_mean(wrong or "", MODEL_KINDS)
        raise InputError(f"{where}: for is {_shown(given)}; allowed are {', '.join(MODEL_KINDS)}{near}")
    return kinds


def _call(verb: Analysis, models: Sequence[PlannedModel], options: Mapping[str, Any], where: str) -> Call:
    setting = {}
    for name in LOADING_OPTIONS:
        values = {getattr(model, name) for model in models}
        if len(values) > 1 and name not in options:
            raise InputError(f"{where}: with together all models need the same {name}")
        value = options.get(name, next(iter(values)))
        if value is not None:
            setting[name] = _setting(name, value, where)
    own = {name: value for name, value in options.items() if name not in LOADING_OPTIONS}
    try:
        if own.get("file") == "-":
            raise InputError("file is '-', and a plan has no standard input; give the name of a file")
        return Call.of(verb.name, [model.model for model in models], own, **setting)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _most(models: Sequence[PlannedModel]) -> dict[str, float]:
    """Return the resources that models need together: the maximum of each over the models."""
    given = [each for model in models for each in model.resources.items()]
    return {key: max(value for name, value in given if name == key) for key, _ in given}


def _known(fields: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    unknown = next((key for key in fields if key not in allowed), None)
    if unknown is not None:
        known = f"{', '.join(allowed)}{did_you_mean(unknown, allowed)}"
        raise InputError(f"{where} has the unknown key {unknown!r:.80}; allowed are {known}")


def _word(value: Any) -> str:
    return value if isinstance(value, str) else _shown(value)


def _shown(value: Any) -> str:
    """Format a value of the wrong type for a message."""
    if value is None or value is _UNSET:
        return "nothing"
    return f"{value!r:.60}" if not isinstance(value, dict) else f"a mapping with {', '.join(value)!r:.60}"
