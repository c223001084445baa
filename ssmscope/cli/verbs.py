"""Verbs made from declarations: analyses from the registry, other verbs from a function and its options."""

from __future__ import annotations

import inspect
import shlex
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ssmscope.api import registry
from ssmscope.api.analysis import Analysis, Call
from ssmscope.api.inputs import Texts
from ssmscope.api.options import Option
from ssmscope.api.sharding.workers import on_engine
from ssmscope.api.signatures import options_of
from ssmscope.api.writing import check_writable
from ssmscope.cli.command import DEVICE, DTYPE, JSON, MODEL, OUT, TOKENIZER, Verbs, console, shipped
from ssmscope.errors import InputError

PANELS = {"interp": "Interpret", "probes": "Probe", "attacks": "Attack"}
"""Heading of the help for the analyses of each package."""

SEVERAL = "One or several: demo/NAME, a directory, a file, or a hub id."
PAIR = "demo/NAME, a directory, a file, or a hub id; two are shown with their difference."
FORMATS_HELP = "Some of csv, png, html, svg, pdf, tex, md; json is always written."


def _common(
    *,
    model: MODEL,
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help=SEVERAL, autocompletion=shipped)],
    pair: Annotated[list[str], typer.Argument(metavar="MODEL…", help=PAIR, autocompletion=shipped)],
    needed_out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory for the files.")],
    out: OUT = None,
    json: JSON = False,
    formats: Annotated[str | None, typer.Option("--formats", metavar="A,B,…", help=FORMATS_HELP)] = None,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
    dtype: DTYPE = "auto",
) -> None: ...


def parameter(option: Option) -> inspect.Parameter:
    """Return an option as a parameter for typer, which passes values on as text for `Call.of` to read."""
    kind: Any = bool if option.is_flag else list[str] if option.repeated or option.nested else str
    settings: dict[str, Any] = {} if option.is_flag else {"metavar": option.metavar, "parser": lambda value: value}
    default = option.default
    if not option.required and default is not None and not option.is_flag:
        typed = option.typed(default)[1::2]
        default = typed if option.repeated or option.nested else typed[0]
    default = None if default == [] else default
    given: Any = Annotated[
        kind if option.required or default is not None else kind | None,
        typer.Option("/".join(option.flags), help=option.help, **settings),
    ]
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.required else default,
        annotation=given,
    )


def verb(analysis: Analysis) -> Callable[..., None]:
    """Return the function that answers the verb of an analysis, with the signature that typer reads."""
    engine = options_of(on_engine) if analysis.sharded else {}

    def answer(**given: Any) -> None:
        out, json, formats = given.pop("out"), given.pop("json"), given.pop("formats", None)
        call = _call(analysis, given)
        if given.get("engine") == "ray" and isinstance(analysis.reads, Texts) and call.inputs["data"] is None:
            raise InputError("--engine ray needs --data; give that too, or leave it out")
        check_writable(out)
        chosen = None if formats is None else [each.strip() for each in formats.split(",")]
        if chosen is not None and out is None:
            raise InputError("--formats needs --out DIR; give that too")
        with on_engine(**{name: option.read(given[name]) for name, option in engine.items()}):
            results = call.run(out, chosen)
        _print(call, results, out, json, chosen)
        if analysis.writes and not json:
            model = shlex.quote(call.models[0])
            then = analysis.then.format(model=model, out=shlex.quote(str(out)))
            print(f"\nSaved in {out}" + f"; try: {then}" * bool(then))

    shared = inspect.signature(_common, eval_str=True).parameters
    several, model = analysis.max_models > 1, "models" if analysis.several else "pair"
    first = shared[model].replace(name="models") if several else shared["model"]
    own = [parameter(each) for each in (*analysis.inputs.values(), *analysis.options.values())]
    files = [shared["needed_out"].replace(name="out")] if analysis.writes else [shared["out"]]
    names = ["json", *["formats"] * (not analysis.writes), *["tokenizer", "device", "dtype"] * analysis.loads]
    parameters = [first, *own, *files, *(shared[name] for name in names), *map(parameter, engine.values())]
    answer.__doc__ = help_of(analysis)
    answer.analysis = analysis  # type: ignore[attr-defined]
    return _signed(answer, parameters)


def declared(function: Callable[..., None], more: Mapping[str, Option] | None = None) -> Callable[..., None]:
    """Return the function of a verb that is not an analysis, with the signature that typer reads.

    Its keyword-only options are declared like those of an analysis; typer reads the parameters with its own marks.

    Args:
        more: options in place of its `**options`.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    options: dict[str, Option] = {}
    parameters: list[inspect.Parameter] = []
    typers = [name for name, hint in hints.items() if not isinstance(getattr(hint, "__metadata__", ("",))[0], str)]
    own = options_of(function, without=typers)
    for each in inspect.signature(function).parameters.values():
        if each.name in typers:
            parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name]))
        else:
            found = {each.name: own[each.name]} if each.name in own else dict(more or {})
            options |= found
            parameters += map(parameter, found.values())

    def answer(**given: Any) -> None:
        for name, option in options.items():
            given[name] = option.read(None if given[name] in ([], ()) else given[name])
        function(**given)

    answer.__name__, answer.__doc__ = function.__name__, function.__doc__
    return _signed(answer, parameters)


def _signed(answer: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    answer.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    answer.__annotations__ = {each.name: each.annotation for each in parameters}
    return answer


def _call(analysis: Analysis, given: dict[str, Any]) -> Call:
    models = given["models"] if analysis.max_models > 1 else [given["model"]]
    own = {name: None if given[name] in ([], ()) else given[name] for name in (*analysis.inputs, *analysis.options)}
    setting = {name: given[name] for name in ("tokenizer", "device", "dtype") if name in given}
    return Call.of(analysis.name, models, own, **setting)


def help_of(analysis: Analysis) -> str:
    """Return the help of an analysis: the first paragraph of its function's docstring."""
    return inspect.cleandoc(analysis.function.__doc__ or "").partition("\n\n")[0]


def add_to(app: typer.Typer) -> None:
    """Add the verbs of all analyses to the application; "lens show" goes into the group lens."""
    groups: dict[str, typer.Typer] = {}
    for name, analysis in registry.analyses().items():
        group, _, leaf = name.rpartition(" ")
        panel = PANELS.get(analysis.module.split(".")[1])
        if group and group not in groups:
            groups[group] = typer.Typer(
                cls=Verbs, help=_group_help(analysis), context_settings={"help_option_names": ["-h", "--help"]}
            )
            app.add_typer(groups[group], name=group, rich_help_panel=panel)
        groups.get(group, app).command(leaf, rich_help_panel=panel)(verb(analysis))


def _group_help(analysis: Analysis) -> str:
    """Return the first paragraph of the docstring of the package that declares a group of verbs."""
    return inspect.cleandoc(sys.modules[analysis.module].__doc__ or "").partition("\n\n")[0]


def _print(call: Call, results: tuple[Any, ...], out: Path | None, json: bool, formats: Sequence[str] | None) -> None:
    """Print the results as text or JSON, and the paths of their files."""
    from ssmscope.api.results import SUFFIXES, checked_formats

    suffixes = checked_formats(SUFFIXES if formats is None else formats)
    files = [out / f"{name}.{s}" for name in call.named(results) for s in suffixes] if out is not None else []
    for number, result in enumerate(results):
        if json:
            print(result.to_json())
        else:
            if number:
                print()
            console().print(result)
    if files and not call.analysis.writes:
        print("\nFiles:", *files, sep="\n  ", file=sys.stderr if json else sys.stdout)
