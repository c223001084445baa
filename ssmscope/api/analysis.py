"""Declaration of analyses, and the calls that the command line, plans, Ray jobs and pages make of them.
    @analysis("heatmap", reads=Texts(), question="What is in its memory?")
    def selection_heatmap(model: Model, texts: TextsLike, *,
                          top: Annotated[int, "Number of tokens named.", Range(1)] = 5) -> SelectionHeatmap:
        \"""Help of the verb, in one line.\"""

The function takes a model, or several if it is declared so, then its input; its options are keyword-only. `at=…` asks
about the answer at a position, of a model that gives one at each, where the function has no such option. Every call
checks them, from Python too, so that all callers get the same errors. A trace may replace model and texts if the
function needs nothing else. A `Call` holds models and inputs as they are typed: it can be checked without running, run,
sent to another process, and written as a command line.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, cast

from ssmscope.api.analyses import ANALYSES, analysis_of
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import COLUMNS, MODEL_KINDS, TEXTS, Input, Named, is_named
from ssmscope.api.limits import Limits
from ssmscope.api.options import Option, asked, noted, plain
from ssmscope.api.signatures import options_of
from ssmscope.api.store import removed_if_refused
from ssmscope.api.writing import check_writable
from ssmscope.core.known_models import DTYPES
from ssmscope.data.columns import check_read, reading
from ssmscope.data.labels import data_notes
from ssmscope.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from ssmscope.api.results import Result

P = ParamSpec("P")
R = TypeVar("R")

CACHE = "answers.sqlite"
"""File next to the results that stores the model's answers, so that a killed call continues."""


LOADING_OPTIONS = ("tokenizer", "device", "dtype", "labels")
"""Options that say how models are loaded."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """An analysis as its function declares it.

    Attributes:
        name: the verb; "lens show" belongs to the group "lens".
        function: the analysis, which checks its options.
        options: its options by name.
        reads: its input in addition to the models; None for none.
        kinds: kinds of its results; by default one, named as the verb.
        question: the question that it answers, in the words of a user.
        first: place among those that a newcomer tries first, from 1 on; 0 for the others.
        several: True if it takes any number of models at once.
        pair: "module:function", below `ssmscope`, that combines the results of two models, if it takes one or two.
        models: kinds of models that it supports (`ssmscope.api.inputs.MODEL_KINDS`); by default all.
        dtype: dtype in which the models are loaded; None for the default of `load`.
        check: raises InputError if options contradict each other.
        asks_at: True if the option `at` chooses the position whose answer is asked about, of a model that gives one at
            each; the function need not have it.
        loads: True if it receives loaded models, False if it receives their names.
        writes: True if it writes its own files into the directory `out`, which it requires.
        then: the command line to try next, with {model} and {out}, if it writes its own files.
        sharded: True if it goes over a data set by `ssmscope.api.sharding.parts.over`.
        scores: names of its results' scores (`Result.card_scores`), with the limits of each if given as a mapping. A
            bracket holds an option, of whose values each is a score, or in capitals what stands there.
        dimensions: rows of a scorecard that its scores have.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Option]
    reads: Input | None = None
    kinds: tuple[str, ...] = ()
    question: str = ""
    first: int = 0
    several: bool = False
    pair: str | None = None
    models: tuple[str, ...] = tuple(MODEL_KINDS)
    dtype: str | None = None
    check: Callable[..., None] | None = None
    asks_at: bool = False
    loads: bool = True
    writes: bool = False
    then: str = ""
    sharded: bool = False
    scores: Mapping[str, Limits] | Sequence[str] = ()
    dimensions: tuple[Dimension, ...] = ()

    @property
    def module(self) -> str:
        """Package that declares the analysis."""
        return self.function.__module__

    @property
    def max_models(self) -> float:
        """Maximum number of models."""
        return math.inf if self.several else 1 if self.pair is None else 2

    @functools.cached_property
    def inputs(self) -> Mapping[str, Option]:
        """Options that name the input, and its columns."""
        kinds = {each.reads.kind for each in self.options.values() if each.reads is not None}
        tables = COLUMNS if self.reads is not None or kinds & {"data", "lines", "pairs"} else {}
        return {**({} if self.reads is None else self.reads.options), **tables}

    def with_models(self, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...]:
        """Return a call's positional arguments with its models loaded, as on a command line, if the function's first
        parameter says `Model`; a trace stands for its model, None, if it says that too. Raise InputError as `load`."""
        first = next(iter(inspect.signature(self.function).parameters.values()))
        models: Any = args[0] if args else given.get(first.name)
        wanted = str(first.annotation)
        traced = models is None and "None" in wanted and any(map(_is_trace, (*args, *given.values())))
        if traced or not wanted.startswith("Model"):
            return args
        from ssmscope.core.model import Model
        from ssmscope.loading.load import load

        many = (self.several or self.pair is not None) and isinstance(models, list | tuple)
        listed = models if many else [models]
        found = [each if isinstance(each, Model) else load(each, dtype=self.dtype) for each in listed]
        if not args:
            given.pop(first.name, None)
        return (found if many else found[0], *args[1:])

    def taken(self, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...]:
        """Return a call's positional arguments with its input read, where Python gives what the command line takes: the
        name of data, a path, a table, or options of the input such as `split="validation"`. These leave `given`, the
        keyword arguments. Raise InputError for options of an input that is not read."""
        if self.reads is None or not args:
            return args
        known = inspect.signature(self.function).parameters
        main = list(known)[1]
        own = {name: given.pop(name) for name in self.inputs if name in given and name not in {*self.options, *known}}
        own |= {name: value.tolist() for name, value in own.items() if hasattr(value, "tolist")}  # Tensors of ids.
        models = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        values = {name: option.default for name, option in self.inputs.items()} | own
        options = {name: given.get(name, option.default) for name, option in self.options.items()}
        if besides := {name: given[name] for name in self.inputs if name != main and is_named(given.get(name))}:
            given |= self.reads.read_besides({**values, **besides}, options, models)
        if len(args) == 1 and main not in given:
            if not own and not isinstance(self.reads, Named):
                return args
            self.reads.check(values, options)
            return (args[0], self.reads.read(values, options, models))
        value = args[1] if len(args) > 1 else given.pop(main)
        found = self.reads.take(value, values, options, models)
        if (twice := next((name for name in own if name in (*TEXTS, "data")), None)) is not None:
            raise InputError(f"{main} and {twice} were given; give one of them")
        if own and found is value:
            raise InputError(f"{next(iter(own))} is for data that are named; {main} is a {type(value).__name__}")
        return (args[0], found, *args[2:])

    def of_each(self, function: Callable[..., Any], given: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Call the function on one model, or on two and combine their results; `given` is the list of models, then the
        input. Raise InputError for any other number of models, or if the input is a batch or trace of one model."""
        models, *rest = given
        if not 1 <= len(models) <= 2:
            raise InputError(f"{self.name} takes one model, or two; {len(models)} were given")
        if any(hasattr(each, "input_ids") or (isinstance(each, Mapping) and "input_ids" in each) for each in rest):
            raise InputError("a batch, or a trace, is of one model; give two models the texts themselves")
        found = [function(model, *rest, **options) for model in models]
        return self.combined(found)

    def combined(self, found: Sequence[Any]) -> Any:
        """Return a single result as it is, and the results of two models combined into one."""
        if len(found) == 1 or self.pair is None:
            return found[0]
        module, _, name = self.pair.partition(":")
        return getattr(importlib.import_module(f"ssmscope.{module}"), name)(found)

    def checked(self, given: Mapping[str, Any], models: int = 1) -> dict[str, Any]:
        """Convert the given options to what the function receives; other arguments stay unchanged. Raise InputError if
        an option is not allowed, or contradicts another. A `check` with a parameter `models` receives their number."""
        found = {name: self.options[name].accept(v) if name in self.options else v for name, v in given.items()}
        if self.check is not None:
            values = {name: found.get(name, each.default) for name, each in self.options.items() if not each.required}
            values |= {name: value for name, value in found.items() if name in self.options}
            if "models" in inspect.signature(self.check).parameters:
                values["models"] = models
            self.check(**values)
        return found

    def recorded(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's options as provenance records them: without seed and data, which have fields of their own."""
        own = {name: option for name, option in self.options.items() if name != "at" or not self.asks_at}
        shown = {name: option for name, option in own.items() if name != "seed" and not option.no_effect}
        shown = {
            name: each for name, each in shown.items() if each.reads is None or each.reads.kind not in ("data", "pairs")
        }
        return {name.rstrip("_"): plain(options.get(name, each.default)) for name, each in shown.items()}


def label_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return names of classes, which a command line separates by commas."""
    return tuple(name.strip() for name in given.split(",")) if isinstance(given, str) else tuple(given)


def analysis(name: str, **declaration: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare a function as an analysis, with the attributes of `Analysis`, and `settings`, the names of its options
    that are settings."""

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            with reading(cast(Any, kwargs.pop("columns", None))):
                found = answered(*args, **kwargs)
                check_read()
                return found

        def answered(*args: P.args, **kwargs: P.kwargs) -> R:
            alone = _is_trace(args[0]) if len(args) == 1 else False  # A trace holds its model's answers.
            if not alone:
                args = declared.with_models(args, kwargs)  # type: ignore[assignment]
            if args and not alone and "at" in kwargs and not has_at:
                args = (_asked_at(args[0], kwargs.pop("at")), *args[1:])  # type: ignore[assignment]
            # Several models or steps may read an iterator, which can be read only once.
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)  # type: ignore[assignment]
            given: Any = declared.taken((None, *args) if alone else args, kwargs)
            if declared.reads is not None and all(each.reads is None for each in declared.options.values()):
                check_read()
            first = args[0] if args else kwargs.get("models")
            number = len(first) if declared.several and isinstance(first, Sequence) else 1
            options = declared.checked(kwargs, number)

            from ssmscope.core.heads import reordered_names
            from ssmscope.core.intercept import out_of_inference

            lead = args[0] if args else kwargs.get("model")
            told = list(filter(None, map(reordered_names, lead if isinstance(lead, list | tuple) else [lead])))
            told += [said for each in given[1:] for said in data_notes(each)]
            token, notes = asked.set(declared.recorded(options)), noted.set(told)
            try:
                with out_of_inference():
                    if declared.pair is not None and isinstance(given[0], list | tuple):
                        return with_notes(declared.of_each(function, given, options))
                    check_call(name, function, given, options)
                    return with_notes(function(*given, **options))
            finally:
                asked.reset(token)
                noted.reset(notes)

        kinds = declaration.pop("kinds", (name.replace(" ", "-"),))
        settings = declaration.pop("settings", "").split()
        options = options_of(function, settings=settings)
        has_at = "at" in options
        options |= options_of(_position) if declaration.get("asks_at") and not has_at else {}
        declared = Analysis(name=name, function=called, options=options, kinds=kinds, **declaration)
        called.analysis = declared  # type: ignore[attr-defined]
        ANALYSES.add(name, called)
        return called

    return declare


def check_call(name: str, function: Callable[..., Any], given: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError if a function does not take these arguments, in the name of its verb and with what is alike."""
    try:
        inspect.signature(function).bind(*given, **options)
    except TypeError as error:
        known = inspect.signature(function).parameters
        alike = (did_you_mean(each, known) for each in options if each not in known)
        raise TypeError(f"{name.replace(' ', '_')}() {error}{next(alike, '')}") from None


def _position(
    *, at: Annotated[int | None, "Position whose answer is asked about, of a model with one at each."] = None
) -> None: ...


def _asked_at(models: Any, at: Any) -> Any:
    """Return a model, or several, whose answer is the one at this position, as `Model.at`; None leaves it."""
    if at is None:
        return models
    return [model.at(at) for model in models] if isinstance(models, list | tuple) else models.at(at)


def with_notes(found: Any) -> Any:
    """Return an analysis's result, or the first of several, with the notes of its run in its provenance."""
    notes = noted.get()
    if not notes:
        return found
    if isinstance(found, tuple):
        return (with_notes(found[0]), *found[1:])
    return replace(found, provenance={**found.provenance, "notes": notes})


def _is_trace(value: Any) -> bool:
    trace = sys.modules.get("ssmscope.core.trace")  # No trace exists before its module is imported.
    return trace is not None and isinstance(value, trace.Trace)


@dataclass(frozen=True)
class Call:
    """An analysis of one or several models, with all arguments as they are typed.

    Attributes:
        name: name of the analysis.
        models: names, directories, files or hub ids.
        inputs, options: all of them, with defaults, as plain values.
        tokenizer, device, dtype, labels: arguments of `load`; dtype "auto" is the analysis's own, or `load`'s.
    """

    name: str
    models: tuple[str, ...]
    inputs: Mapping[str, Any]
    options: Mapping[str, Any]
    tokenizer: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    labels: tuple[str, ...] | None = None

    @classmethod
    def of(cls, name: str, models: Sequence[str], given: Mapping[str, Any], **loading: Any) -> Call:
        """Make a call from the arguments of a command line or a plan; nothing runs. `loading` is tokenizer, device,
        dtype and labels, "A,B,…" or a list. Raise InputError if the analysis would refuse the arguments without looking
        at a model."""
        found = analysis_of(name)
        known, values = {**found.inputs, **found.options}, {}
        for each in given:
            if each not in known:
                listed = ", ".join(known)
                raise InputError(f"{name} has no option {each!r:.80}; it has {listed}{did_you_mean(each, known)}")
        for each, option in known.items():
            if given.get(each) is None and option.required:
                raise InputError(f"missing option '{option.flags[0]}'")
            values[each] = option.default if given.get(each) is None else option.read(given[each])
        inputs, options = ({each: values[each] for each in part} for part in (found.inputs, found.options))
        loading = {name: value for name, value in loading.items() if value is not None}
        if "labels" in loading:
            loading["labels"] = label_names(loading["labels"])
        call = cls(name, tuple(models), inputs, options, **loading)
        call.check()
        return call

    @property
    def analysis(self) -> Analysis:
        return analysis_of(self.name)

    def check(self) -> None:
        """Raise InputError if the analysis would refuse the call without looking at a model; nothing runs."""
        declared = self.analysis
        if not 1 <= len(self.models) <= declared.max_models:
            allowed = {1: "one model", 2: "one model, or two", math.inf: "one or more models"}
            raise InputError(f"{self.name} takes {allowed[declared.max_models]}")
        usual = {name: Call.__dataclass_fields__[name].default for name in LOADING_OPTIONS}
        unused = next((name for name, value in usual.items() if getattr(self, name) != value), None)
        if not declared.loads and unused is not None:
            raise InputError(f"{self.name} has no option {unused!r}: it loads its models itself; leave it out")
        if self.dtype not in ("auto", *DTYPES):
            raise InputError(f"dtype {self.dtype!r:.80} is unknown: choose one of auto, {', '.join(DTYPES)}")
        if declared.dtype is not None and self.dtype not in ("auto", declared.dtype, "float64"):
            raise InputError(f"{self.name} needs {declared.dtype}, or float64; leave dtype {self.dtype} out")
        with reading(self.inputs.get("columns")):
            if declared.reads is not None:
                declared.reads.check(self.inputs, self.options)
            declared.checked(self.options, len(self.models))

    def run(self, out: Path | None = None, formats: Sequence[str] | None = None) -> tuple[Result, ...]:
        """Load the models, run the analysis and return its results.

        Args:
            out: directory to save the results in; an analysis that writes its own files requires it. Nothing is left in
                it if an input is refused.
            formats: some of `ssmscope.api.results.FORMATS`.
        """
        from ssmscope.api.results import SUFFIXES, Result, checked_formats, save_together
        from ssmscope.api.sharding.parts import keeping
        from ssmscope.core.progress import pulse
        from ssmscope.loading.load import load

        self.check()
        check_writable(out)
        declared = self.analysis
        formats = checked_formats(SUFFIXES if formats is None else formats)
        if declared.writes and out is None:
            raise InputError(f"{self.name} writes its own files; give out=…, the directory for them")
        loaded: list[Any] = list(self.models)
        if declared.loads:
            dtype = declared.dtype if self.dtype == "auto" else self.dtype
            setting: dict[str, Any] = {name: getattr(self, name) for name in LOADING_OPTIONS} | {"dtype": dtype}
            loaded = [load(name, **setting) for name in self.models]
        groups = [[model] for model in loaded] if declared.pair is not None else [loaded]
        calls: list[list[Any]] = [[group if declared.several else group[0]] for group in groups]
        options = dict(self.options)
        columns = self.inputs.get("columns")
        with reading(columns), pulse(self.name, bool(options.get("progress", True))):
            if declared.reads is not None:
                inputs = declared.reads.once(self.inputs) if len(calls) > 1 else self.inputs
                for arguments, group in zip(calls, groups):
                    arguments.append(declared.reads.read(inputs, self.options, group))
                options |= declared.reads.read_besides(self.inputs, self.options, loaded)
            options |= {"out": out} if declared.writes else {}
            with _kept_answers(options, out) as options, keeping(out if declared.sharded else None):
                each = [declared.function(*arguments, **options) for arguments in calls]
                found = declared.combined(each)
                results = (found,) if isinstance(found, Result) else tuple(found)
                if out is not None and not declared.writes:
                    save_together(self.named(results), out, formats)
        return results

    def named(self, results: Sequence[Result]) -> dict[str, Result]:
        """Return results by the names of their files: the verb, such as "lens-show", and the kinds of several."""
        verb = self.name.replace(" ", "-")
        return {verb if len(results) == 1 else f"{verb}-{result.kind}": result for result in results}

    def option_values(self) -> Iterator[tuple[Option, Any]]:
        """Yield all inputs and options with their values."""
        declared = self.analysis
        for known, values in ((declared.inputs, self.inputs), (declared.options, self.options)):
            yield from ((option, values[name]) for name, option in known.items())

    @property
    def arguments(self) -> list[str]:
        """Arguments of `analyze`, without options that have their defaults."""
        typed = [*self.name.split(), *self.models]
        for option, value in self.option_values():
            if option.required or not option.is_default(value):
                typed += option.typed(value)
        typed += ["--tokenizer", self.tokenizer] if self.tokenizer is not None else []
        typed += ["--device", self.device] if self.device != "cpu" else []
        typed += ["--labels", ",".join(self.labels)] if self.labels is not None else []
        return typed + (["--dtype", self.dtype] if self.dtype != "auto" else [])

    @property
    def command(self) -> str:
        """Shell command that reproduces the results."""
        return shlex.join(["analyze", *self.arguments])


@contextmanager
def _kept_answers(options: dict[str, Any], out: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the options, with a cache in `out` if the analysis stores answers and no other place is given."""
    if out is None or options.get("cache", out) is not None:
        yield options
        return
    with removed_if_refused(Path(out) / CACHE):
        yield {**options, "cache": Path(out) / CACHE}
