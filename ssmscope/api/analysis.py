"""What an analysis declares, once, and the calls of analyses that command line, plans, Ray jobs and pages make of it.

    @analysis("heatmap", reads=Texts(), question="What is in its memory?")
    def selection_heatmap(model: Model, texts: TextsLike, *,
                          top: Annotated[int, "how many tokens are named", Range(1)] = 5) -> SelectionHeatmap:
        \"""One line that is the verb's help.\"""

The function's first parameter is a model, or several where it is declared so, then comes what it reads, and its
options are keyword-only. They are checked whenever it is called, from Python too, so that the same is refused in the
same words everywhere; a trace alone stands for model and texts where it is all that is needed. A `Call` names the
models and inputs by what somebody types: it can be checked without running, run, sent to another process, and written
as a command line.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ssmscope.api import registry
from ssmscope.api.inputs import Input
from ssmscope.api.options import Option, options_of
from ssmscope.api.writing import check_writable
from ssmscope.core.shipped import DTYPES
from ssmscope.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from ssmscope.api.results import Result

P = ParamSpec("P")
R = TypeVar("R")

CACHE = "answers.sqlite"
"""Where a call keeps the model's answers beside its results, so that a killed one continues."""


@dataclass(frozen=True)
class Analysis:
    """An analysis as its function declares it.

    Attributes:
        name: the verb; "lens show" is one within a group.
        function: what runs, with its options checked.
        reads: what it reads beside the models; None for nothing.
        options: by name.
        question: what it answers, in the words of a user.
        several: whether it takes several models at once.
        pair: makes one result of two models' results, where it takes one model, or two; None where it does not.
        models: the kinds of models that it can do (`ssmscope.reports.kinds`); empty for all.
        kinds: the kinds of results that it gives.
        dtype: in which the models are loaded; None for that of `load`.
        check: refuses options that contradict each other.
        loads: whether it gets the models loaded; else it gets what names them.
        writes: whether it writes its own files into the directory that it is given as `out`, and cannot do without.
        then: the command line to try next, with {model} and {out} in it, of one that writes its own files.
        sharded: whether it goes over a data set by `ssmscope.api.sharding.over`.
    """

    name: str
    function: Callable[..., Any]
    reads: Input | None
    options: Mapping[str, Option]
    question: str
    several: bool
    pair: Callable[[Sequence[Any]], Any] | None
    models: tuple[str, ...]
    kinds: tuple[str, ...]
    dtype: str | None
    check: Callable[..., None] | None
    loads: bool
    writes: bool
    then: str
    sharded: bool

    @property
    def module(self) -> str:
        """The package that declares it."""
        return self.function.__module__

    @property
    def most(self) -> float:
        """How many models it takes at most."""
        return math.inf if self.several else 1 if self.pair is None else 2

    @property
    def inputs(self) -> Mapping[str, Option]:
        """The options that say what is read."""
        return {} if self.reads is None else self.reads.options

    def of_each(self, function: Callable[..., Any], given: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """What a function gives of one model, or of two as one result.

        Args:
            given: the models, and what they read.

        Raises:
            InputError: no model, more than two, or a batch or trace, which is of one model.
        """
        models, *rest = given
        if not 1 <= len(models) <= 2:
            raise InputError(f"{self.name} takes one model, or two; {len(models)} were given")
        if any(hasattr(each, "input_ids") or (isinstance(each, Mapping) and "input_ids" in each) for each in rest):
            raise InputError("a batch, or a trace, is of one model; give two models the texts themselves")
        found = [function(model, *rest, **options) for model in models]
        assert self.pair is not None
        return found[0] if len(found) == 1 else self.pair(found)

    def checked(self, given: Mapping[str, Any], models: int = 1) -> dict[str, Any]:
        """Options that were given, as the function gets them; what is no option stays as it is.

        Args:
            models: of how many models it is, which a `check` with a parameter of this name gets.

        Raises:
            InputError: one that is not allowed, or that contradicts another.
        """
        found = {name: self.options[name].accept(v) if name in self.options else v for name, v in given.items()}
        if self.check is not None:
            values = {name: option.default for name, option in self.options.items() if not option.required}
            values |= {name: value for name, value in found.items() if name in self.options}
            if "models" in inspect.signature(self.check).parameters:
                values["models"] = models
            self.check(**values)
        return found


def analysis(
    name: str,
    *,
    reads: Input | None = None,
    question: str = "",
    several: bool = False,
    pair: Callable[[Sequence[Any]], Any] | None = None,
    models: tuple[str, ...] = (),
    kinds: tuple[str, ...] = (),
    dtype: str | None = None,
    check: Callable[..., None] | None = None,
    loads: bool = True,
    writes: bool = False,
    then: str = "",
    sharded: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare a function an analysis, see `Analysis`; by default its results are of the kind of its name."""

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            alone = _is_trace(args[0]) if len(args) == 1 else False  # a trace says what its model did
            # What can be read once is, since several models, or steps, may read it.
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)  # type: ignore[assignment]
            given: Any = (None, *args) if alone else args
            first = args[0] if args else kwargs.get("models")
            number = len(first) if several and isinstance(first, Sequence) else 1
            options = declared.checked(kwargs, number)
            from ssmscope.core.intercept import out_of_inference

            with out_of_inference():
                if pair is not None and isinstance(given[0], list | tuple):
                    return declared.of_each(function, given, options)
                return function(*given, **options)

        declared = Analysis(
            name=name,
            function=called,
            reads=reads,
            options=options_of(function),
            question=question,
            several=several,
            pair=pair,
            models=models,
            kinds=(*(kinds or (name.replace(" ", "-"),)), *((registry.PAIR,) if pair is not None else ())),
            dtype=dtype,
            check=check,
            loads=loads,
            writes=writes,
            then=then,
            sharded=sharded,
        )
        called.analysis = declared  # type: ignore[attr-defined]
        registry.add(declared)
        return called

    return declare


def _is_trace(value: Any) -> bool:
    trace = sys.modules.get("ssmscope.core.trace")  # there is none before the module is imported
    return trace is not None and isinstance(value, trace.Trace)


@dataclass(frozen=True)
class Call:
    """One analysis of one or several models, everything by what somebody types.

    Attributes:
        name: the analysis.
        models: names, directories, files or hub ids.
        inputs, options: all of them, with defaults, as plain values.
        tokenizer, device, dtype: as `load` takes them; dtype "auto" is the analysis's own, or `load`'s.
    """

    name: str
    models: tuple[str, ...]
    inputs: Mapping[str, Any]
    options: Mapping[str, Any]
    tokenizer: str | None = None
    device: str = "cpu"
    dtype: str = "auto"

    @classmethod
    def of(
        cls,
        name: str,
        models: Sequence[str],
        given: Mapping[str, Any],
        *,
        tokenizer: str | None = None,
        device: str = "cpu",
        dtype: str = "auto",
    ) -> Call:
        """A call from what was typed or stands in a plan, values as texts or as themselves; nothing runs.

        Raises:
            InputError: whatever the analysis would refuse without looking at a model.
        """
        found = registry.analysis_of(name)
        known = {**found.inputs, **found.options}
        for each in given:
            if each not in known:
                raise InputError(
                    f"{name} has no option {each!r:.80}; it has {', '.join(known)}{did_you_mean(each, known)}"
                )
        values = {}
        for each, option in known.items():
            if given.get(each) is not None:
                values[each] = option.read(given[each])
            elif option.required:
                raise InputError(f"missing option '{option.flags[0]}'")
            else:
                values[each] = option.default
        call = cls(
            name,
            tuple(models),
            {each: values[each] for each in found.inputs},
            {each: values[each] for each in found.options},
            tokenizer,
            device,
            dtype,
        )
        call.check()
        return call

    @property
    def analysis(self) -> Analysis:
        return registry.analysis_of(self.name)

    def check(self) -> None:
        """Refuse what the analysis would refuse without looking at a model; nothing runs.

        Raises:
            InputError: as said.
        """
        declared = self.analysis
        if not 1 <= len(self.models) <= declared.most:
            allowed = {1: "one model", 2: "one model, or two"}.get(int(min(declared.most, 3)), "one or more models")
            raise InputError(f"{self.name} takes {allowed}")
        if not declared.loads and (self.tokenizer, self.device, self.dtype) != (None, "cpu", "auto"):
            unused = "tokenizer" if self.tokenizer is not None else "device" if self.device != "cpu" else "dtype"
            raise InputError(f"{self.name} has no option {unused!r}: it loads its models itself; leave it out")
        if self.dtype not in ("auto", *DTYPES):
            raise InputError(f"dtype {self.dtype!r:.80} is unknown: choose one of auto, {', '.join(DTYPES)}")
        if declared.dtype is not None and self.dtype not in ("auto", declared.dtype, "float64"):
            raise InputError(f"{self.name} needs {declared.dtype}, or float64; leave dtype {self.dtype} out")
        if declared.reads is not None:
            declared.reads.check(self.inputs, self.options)
        declared.checked(self.options, len(self.models))

    def run(self, out: Path | None = None, formats: Sequence[str] | None = None) -> tuple[Result, ...]:
        """Load the models, run the analysis, and give its results; they are saved in `out` where that is given, in the
        formats that are asked for (see `ssmscope.api.results.FORMATS`).

        Raises:
            InputError: whatever is wrong with the models, inputs or options; then nothing is left in `out`. Also where
                `out` is not given to an analysis that writes its own files.
        """
        from ssmscope.api.results import SUFFIXES, Result, checked_formats, save_together
        from ssmscope.api.sharding.parts import keeping
        from ssmscope.architectures.loading.load import load
        from ssmscope.core.progress import pulse

        self.check()
        check_writable(out)
        declared = self.analysis
        formats = checked_formats(SUFFIXES if formats is None else formats)
        if declared.writes and out is None:
            raise InputError(f"{self.name} writes files of its own; give the directory for them as out")
        loaded: list[Any] = list(self.models)
        if declared.loads:
            dtype = declared.dtype if self.dtype == "auto" else self.dtype
            setting = {"tokenizer": self.tokenizer, "device": self.device, "dtype": dtype}
            loaded = [load(name, **setting) for name in self.models]
        groups = [[model] for model in loaded] if declared.pair is not None else [loaded]
        calls: list[list[Any]] = [[group if declared.several else group[0]] for group in groups]
        options = dict(self.options)
        with pulse(self.name, bool(options.get("progress", True))):
            if declared.reads is not None:
                inputs = declared.reads.once(self.inputs) if len(calls) > 1 else self.inputs
                for arguments, group in zip(calls, groups):
                    arguments.append(declared.reads.read(inputs, self.options, group))
                options |= declared.reads.read_besides(self.inputs, self.options, loaded)
            if declared.writes:
                options["out"] = out
            with _kept_answers(options, out) as options, keeping(out if declared.sharded else None):
                each = [declared.function(*arguments, **options) for arguments in calls]
                found = each[0] if len(each) == 1 or declared.pair is None else declared.pair(each)
                results = (found,) if isinstance(found, Result) else tuple(found)
                if out is not None and not declared.writes:
                    save_together({result.kind: result for result in results}, out, formats)
        return results

    def every(self) -> Iterator[tuple[Option, Any]]:
        """All inputs and options with their values."""
        declared = self.analysis
        for known, values in ((declared.inputs, self.inputs), (declared.options, self.options)):
            yield from ((option, values[name]) for name, option in known.items())

    @property
    def arguments(self) -> list[str]:
        """What is typed after `analyze`; options that are their defaults are left out."""
        typed = [*self.name.split(), *self.models]
        for option, value in self.every():
            if value is not None and (option.required or not option.is_default(value)):
                typed += option.typed(value)
        typed += ["--tokenizer", self.tokenizer] if self.tokenizer is not None else []
        typed += ["--device", self.device] if self.device != "cpu" else []
        return typed + (["--dtype", self.dtype] if self.dtype != "auto" else [])

    @property
    def command(self) -> str:
        """The shell line that makes the results again."""
        return shlex.join(["analyze", *self.arguments])


@contextmanager
def _kept_answers(options: dict[str, Any], out: Path | None) -> Iterator[dict[str, Any]]:
    """The options, with a cache in `out` where the analysis keeps answers and was given no other place.

    A file that this run made goes again, with the directory, where the input is refused after all; it stays where only
    the disk was in the way.
    """
    if out is None or options.get("cache", out) is not None:
        yield options
        return
    file = Path(out) / CACHE
    known = os.path.exists(file)
    new = [place for place in (Path(out), *Path(out).parents) if not os.path.lexists(place)]
    try:
        yield {**options, "cache": file}
    except InputError as error:
        if not known and not isinstance(error.__cause__, OSError):
            traceback.clear_frames(error.__traceback__)  # which hold the file open: Windows deletes no such file
            for tail in ("", "-wal", "-shm"):
                file.with_name(file.name + tail).unlink(missing_ok=True)
            for place in new:
                with suppress(OSError):
                    place.rmdir()
        raise


def first_line(function: Callable[..., Any]) -> str:
    """The first paragraph of a function's docstring, on one line."""
    return " ".join(inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].split())
