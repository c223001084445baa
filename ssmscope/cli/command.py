"""Verbs of `analyze` and their common options, and the running of a command line with its exit codes and errors."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from ssmscope.api.analyses import ANALYSES, analyses
from ssmscope.api.analysis import LOADING_OPTIONS, Analysis, Call
from ssmscope.api.inputs import Texts
from ssmscope.api.options import Option
from ssmscope.api.sharding.workers import on_engine
from ssmscope.api.signatures import options_of
from ssmscope.api.writing import DISK_FULL_ERRORS, check_writable
from ssmscope.cli.settings import Verb, named_values, settings_help
from ssmscope.core.known_models import demos
from ssmscope.core.progress import worded_by
from ssmscope.core.text_files import SURROGATE
from ssmscope.errors import InputError, as_typed, did_you_mean, ran_out_of_memory

if TYPE_CHECKING:
    from rich.console import Console


# UsageError and ClickException belong to typer or to click, depending on typer's version.
_USAGE_ERROR: Any = typer.BadParameter.__base__
_CLICK_ERROR: Any = _USAGE_ERROR.__base__


PIPED_COLUMNS = 120
"""Columns of an answer if stdout is not a terminal; tables with intervals need more than rich's 80."""


class Verbs(TyperGroup):
    """Group of verbs that names the nearest verb for an unknown one."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return verbs panel by panel, those of analyses in the order of their table; typer lists groups last."""
        panels = [FIRST, *PANELS.values(), OUTSIDE, MAKING]
        verbs = {name: self.commands[name] for name in super().list_commands(ctx)}
        order = list(dict.fromkeys(name.partition(" ")[0] for name in ANALYSES))
        at = {name: order.index(name) if name in order else len(order) for name in verbs}
        at |= {name: each.first - len(order) for name, each in analyses().items() if each.first}
        panel = {name: getattr(each, "rich_help_panel", None) or MAKING for name, each in verbs.items()}
        return sorted(verbs, key=lambda name: (panels.index(panel[name]) if panel[name] in panels else 0, at[name]))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            verbs = ", ".join(self.commands)
            raise InputError(f"no verb {args[0]!r}; there are {verbs}{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


# ---- options shared by several verbs


def shipped(incomplete: str) -> list[str]:
    """Return the shipped models whose name begins like this, to complete a line in a shell."""
    return [name for name in demos() if name.startswith(incomplete)]


MODEL = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="demo/NAME, a directory, a file, a hub id, or code to run, FILE.py:NAME.",
        autocompletion=shipped,
    ),
]
OUT = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Directory for VERB.json, .csv, .png and .html.")
]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
FULL = Annotated[bool, typer.Option("--full", help="Print definitions, and more rows of long tables.")]
TOKENIZER = Annotated[
    str | None, typer.Option("--tokenizer", metavar="NAME", help="A directory or hub id, if MODEL has no tokenizer.")
]
DEVICE = Annotated[
    str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1 or mps; auto takes a GPU if there is one.")
]
DTYPE = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16, float16 or float64; auto is float32 on a CPU, and as stored on a GPU.",
    ),
]

LABELS = Annotated[
    str | None,
    typer.Option("--labels", metavar="A,B,…", help="Names of a classifier's classes, in the order of its logits."),
]


def console(**options: Any) -> Console:
    """Return a console on stdout, with a fixed width if that is not a terminal."""
    from rich.console import Console

    piped = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS
    return Console(width=piped, **options)


def show(heads: Sequence[str], rows: Iterable[Sequence[Any]], *notes: str, title: str = "") -> None:
    """Print a table, with its title above and notes below."""
    from rich.table import Column, Table
    from rich.text import Text

    columns = (Column(head, no_wrap=head not in ("command", "models")) for head in heads)
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    for each in ([Text(title, style="bold")] if title else []) + [table, *map(Text, notes)]:
        console(highlight=False).print(each)


# ---- verbs made from declarations: analyses from the registry, others from a function and its options

FIRST, MAKING = "Start with these", "Models, pages and training"
"""Headings of the help for what a newcomer tries first, and for verbs that are no analyses."""
PANELS = {
    "interp": "What does the answer rest on, and what can be changed?",
    "probes": "How good is it, and how far back does it look?",
    "attacks": "How easily does it break?",
}
"""Heading of the help for the other analyses of each room."""
OUTSIDE = "From installed packages"
"""Heading of the help for the analyses of other packages."""

SEVERAL = "One or several: demo/NAME, a directory, a file, a hub id, or code to run, FILE.py:NAME."
PAIR = "demo/NAME, a directory, a file, a hub id, or code to run, FILE.py:NAME; two are shown with their difference."
FORMATS_HELP = "Some of csv, png, html, svg, pdf, tex, md; json is always written."


def _common(
    *,
    model: MODEL,
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help=SEVERAL, autocompletion=shipped)],
    pair: Annotated[list[str], typer.Argument(metavar="MODEL…", help=PAIR, autocompletion=shipped)],
    needed_out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory for the files.")],
    out: OUT = None,
    json: JSON = False,
    full: FULL = False,
    formats: Annotated[str | None, typer.Option("--formats", metavar="A,B,…", help=FORMATS_HELP)] = None,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
    dtype: DTYPE = "auto",
    labels: LABELS = None,
) -> None: ...


def parameters_of(options: Iterable[Option]) -> list[inspect.Parameter]:
    """Return options as parameters for typer, with one, `set`, in place of all settings."""
    told = "A setting, listed below; may be repeated."
    one: Any = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=told)]
    shared = inspect.Parameter("set", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=one)
    own = [parameter(each) for each in options if not each.setting]
    return [*own, *[shared] * any(each.setting for each in options)]


def _with_settings(given: dict[str, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    """Return typed arguments with the settings that --set names in place of `set`."""
    known_settings[:] = known = [name for name, each in options.items() if each.setting]
    if not known:
        return given
    typed = named_values(given.pop("set") or (), known)
    return {**given, **{name: options[name].default for name in known}, **typed}


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
        full = given.pop("full")
        given = _with_settings(given, analysis.options)
        call = _call(analysis, given)
        if given.get("engine") == "ray" and isinstance(analysis.reads, Texts) and call.inputs["data"] is None:
            raise InputError("--engine ray needs --data; give that too, or leave it out")
        check_writable(out)
        chosen = None if formats is None else [each.strip() for each in formats.split(",")]
        if chosen is not None and out is None:
            raise InputError("--formats needs --out DIR; give that too")
        with on_engine(**{name: option.read(given[name]) for name, option in engine.items()}):
            results = call.run(out, chosen)
        _print(call, results, out, json, chosen, full)
        if analysis.writes and not json:
            model = shlex.quote(call.models[0])
            then = analysis.then.format(model=model, out=shlex.quote(str(out)))
            print(f"\nSaved in {out}" + f"; try: {then}" * bool(then))
        if any(each.failed for each in results):
            raise typer.Exit(1)

    shared = inspect.signature(_common, eval_str=True).parameters
    several, model = analysis.max_models > 1, "models" if analysis.several else "pair"
    first = shared[model].replace(name="models") if several else shared["model"]
    own = parameters_of([*analysis.inputs.values(), *analysis.options.values()])
    files = [shared["needed_out"].replace(name="out")] if analysis.writes else [shared["out"]]
    names = ["json", "full", *["formats"] * (not analysis.writes), *LOADING_OPTIONS * analysis.loads]
    parameters = [first, *own, *files, *(shared[name] for name in names), *map(parameter, engine.values())]
    answer.__doc__ = help_of(analysis)
    answer.analysis = analysis  # type: ignore[attr-defined]
    return _signed(answer, parameters, analysis.options)


def declared(function: Callable[..., None], more: Mapping[str, Option] | None = None) -> Callable[..., None]:
    """Return the function of a verb that is not an analysis, with the signature that typer reads.

    Its keyword-only options are declared like those of an analysis; typer reads the parameters with its own marks.

    Args:
        more: options in place of its `**options`.
    """
    signed = inspect.signature(function, eval_str=True).parameters
    options: dict[str, Option] = {}
    parameters: list[inspect.Parameter] = []
    marks = {name: getattr(each.annotation, "__metadata__", ("",))[0] for name, each in signed.items()}
    typers = [name for name, mark in marks.items() if not isinstance(mark, str)]
    own = options_of(function, without=typers)
    for each in signed.values():
        if each.name in typers:
            parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            found = {each.name: own[each.name]} if each.name in own else dict(more or {})
            options |= found
            parameters += parameters_of(found.values())

    def answer(**given: Any) -> None:
        given = _with_settings(given, options)
        for name, option in options.items():
            given[name] = option.read(None if given[name] in ([], ()) else given[name])
        function(**given)

    answer.__name__, answer.__doc__ = function.__name__, function.__doc__
    return _signed(answer, parameters, options)


def _signed(
    answer: Callable[..., None], parameters: list[inspect.Parameter], options: Mapping[str, Option]
) -> Callable[..., None]:
    answer.epilog = settings_help(options.values())  # type: ignore[attr-defined]
    answer.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    answer.__annotations__ = {each.name: each.annotation for each in parameters}
    return answer


def _call(analysis: Analysis, given: dict[str, Any]) -> Call:
    models = given["models"] if analysis.max_models > 1 else [given["model"]]
    own = {name: None if given[name] in ([], ()) else given[name] for name in (*analysis.inputs, *analysis.options)}
    setting = {name: given[name] for name in LOADING_OPTIONS if name in given}
    return Call.of(analysis.name, models, own, **setting)


def help_of(analysis: Analysis) -> str:
    """Return the help of an analysis: the first paragraph of its function's docstring."""
    return inspect.cleandoc(analysis.function.__doc__ or "").partition("\n\n")[0]


def from_elsewhere(function: Any) -> Callable[..., None]:
    """Return the verb of a function declared with `@verb`."""
    module, _, name = function.verb.answer.partition(":")
    answer = getattr(importlib.import_module(module), name)
    return declared(answer, options_of(function, without=function.verb.without, settings=function.verb.settings))


def add_to(app: typer.Typer) -> None:
    """Add the verbs of all analyses to the application; "lens show" goes into the group lens."""
    groups: dict[str, typer.Typer] = {}
    for name, analysis in analyses().items():
        group, _, leaf = name.rpartition(" ")
        package, _, room = analysis.module.partition(".")
        panel = PANELS[room.partition(".")[0]] if package == "ssmscope" else OUTSIDE
        panel, told = FIRST if analysis.first else panel, analysis.question or None
        if group and group not in groups:
            groups[group] = typer.Typer(
                cls=Verbs, help=_group_help(analysis), context_settings={"help_option_names": ["-h", "--help"]}
            )
            app.add_typer(groups[group], name=group, rich_help_panel=panel, short_help=told)
        answer: Any = verb(analysis)
        groups.get(group, app).command(leaf, cls=Verb, rich_help_panel=panel, short_help=told, epilog=answer.epilog)(
            answer
        )


def _group_help(analysis: Analysis) -> str:
    """Return the first paragraph of the docstring of the package that declares a group of verbs."""
    return inspect.cleandoc(sys.modules[analysis.module].__doc__ or "").partition("\n\n")[0]


def _print(
    call: Call, results: tuple[Any, ...], out: Path | None, json: bool, formats: Sequence[str] | None, full: bool
) -> None:
    """Print the results as text or JSON, and the paths of their files."""
    from rich.console import Group
    from ssmscope.api.results import SUFFIXES, checked_formats

    suffixes = checked_formats(SUFFIXES if formats is None else formats)
    names = call.named(results)
    for number, result in enumerate(results):
        for note in result.provenance.get("notes", ()):
            print(in_its_words(f"analyze: {note}"), file=sys.stderr)
        if json:
            print(result.to_json())
        else:
            if number:
                print()
            screen = console()
            screen.print(Group(*result.in_terminal(screen, full=full, more="--full")))
    if out is not None and not call.analysis.writes:
        files = [f"{out / name}.{', .'.join(suffixes)}" for name in names]
        print("\nFiles:", "; ".join(files), file=sys.stderr if json else sys.stdout)


# ---- running a command line

given: list[str] = []
"""Current command line, for the model card."""
known_settings: list[str] = []
"""Settings of the current command line's verb."""


def in_its_words(message: str) -> str:
    """Return a message with options and settings as the current command line's verb takes them."""
    return as_typed(message, known_settings)


@functools.cache
def command_of(app: typer.Typer) -> Any:
    """Return the application as a command, made once because that takes longer than most refusals."""
    return typer.main.get_command(app)


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    given[:], known_settings[:] = arguments, ()
    command = command_of(app)
    try:
        check_arguments(arguments)
        context = command.make_context("analyze", list(arguments) or ["--help"])
        with context, worded_by(in_its_words):
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except InputError as error:
        return _refuse(in_its_words(str(error)))
    except _CLICK_ERROR as error:
        return _refuse(_usage_message(error, arguments))
    except (KeyboardInterrupt, typer.Abort) as end:
        print("; ".join(["analyze: interrupted", *map(str, end.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # The reader, as in `analyze … | head`, has read enough.
        _discard_stdout()
        return 1
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        return _refuse(f"this needs more memory than there is ({str(error).partition(chr(10))[0] or 'none left'})")
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        _discard_stdout()
        print(f"analyze: cannot write: {error.strerror}; make room", file=sys.stderr)
        return 1
    return 0


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise InputError for an argument that is not UTF-8, unless it names an existing file."""
    for before, argument in zip(("", *arguments), arguments):
        if SURROGATE.search(argument) and not os.path.lexists(argument):
            named = before if before.startswith("--") else argument.partition("=")[0]
            named = named if named.startswith("--") and not SURROGATE.search(named) else "an argument"
            raise InputError(f"{named} is not valid UTF-8; give it in UTF-8")


def _discard_stdout() -> None:
    """Redirect stdout to nowhere, so that exit flushes nothing into a closed pipe or to a full disk."""
    with suppress(OSError):  # The stream may have no file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    line = " ".join(message.split())
    print("analyze:", "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr)
    return 2


def _usage_message(error: Any, arguments: Sequence[str]) -> str:
    """Return the message of a usage error, with the nearest options and a pointer to the help."""
    message = str(error.format_message()).strip()
    if message.startswith("No such option") and error.ctx is not None:
        options = [name for parameter in error.ctx.command.params for name in parameter.opts if name[:1] == "-"]
        near = did_you_mean(error.option_name, [*options, "--help"])
        name = error.option_name.lstrip("-").replace("-", "_")
        if f"\n- {name}=" in (error.ctx.command.epilog or ""):
            near = f"; it is a setting: --set {name}=…"
        elif error.option_name in ("--no-progress", "--progress"):
            near = ": only verbs with a progress bar have it; 2>/dev/null hides what this one tells"
        message = f"no option {error.option_name}{near}"
    verb = arguments[0] if arguments and arguments[0].isidentifier() else ""
    return f"{message[:1].lower()}{message[1:].rstrip('.')} (see {' '.join(filter(None, ('analyze', verb)))} --help)"
