"""Command lines of every verb, drawn from its own parameters: plausible ones, ones with one flaw, and wild ones."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import values
from fuzz.plans import plans
from fuzz.world import World
from hypothesis import strategies as st
from ssmscope import cli
from ssmscope.cli.command import command_of
from ssmscope.zoo.training import ARCHITECTURES

WHOLE, NUMBER = {"N", "K", "M"}, {"X", "P"}
"""What stands for a whole number and for any number in the help of an option."""

SEARCH = ("--set train", "--set candidates", "--set draws", "--set sweeps")
QUICK: Mapping[str, Mapping[str, str]] = {
    "fidelity": {"--steps": "3", "--methods": "gradxinput,self-retention", "--limit": "4"},
    "plausibility": {"--methods": "lrp,self-retention", "--limit": "4"},
    "ablate": {"--limit": "4"},
    "generate": {"--max-new-tokens": "3"},
    "knockout": {"--from": "0"},
    "patch": {"--clean": "a gripping film", "--corrupted": "a dull film", "--answer": "0", "--contrast": "1"},
    "steer": {"--toward": "a gripping film", "--away": "dull , never", "--limit": "4", "--random": "1"},
    "position": {"--limit": "4"},
    "insertion": {"--limit": "3", "--places": "2"},
    "noise": {"--limit": "3", "--rates": "0.1"},
    "overflow": {"--limit": "3", "--lengths": "0,8"},
    "poison": {"--limit": "5", "--length": "1", **dict.fromkeys(SEARCH, "1")},
    "prompts": {"--limit": "2", "--attacks": "stresstest,deepwordbug"},
    "words": {"--limit": "2"},
    "lens fit": {"--steps": "2", "--set batch_tokens": "16", "--length": "6", "--set look_every": "1", "--out": "out"},
    "snr": {"--tasks": "qa1", "--lengths": "12", "--examples": "2"},
    "retrieval": {"--tasks": "qa1", "--lengths": "0", "--examples": "2"},
    "loss": {"--length": "6", "--limit": "4", "--smooth": "1"},
    "stability": {"--length": "8", "--sequences": "2"},
    "influence": {"--sequences": "2"},
    "report": {"--out": "out"},
    "train": {"--epochs": "1", "--set width": "8", "--set layers": "1", "--set batch_size": "8", "--out": "out"},
}
"""What keeps a verb's runs short. A verb that is not named here is run with what it must be given alone."""

TASKS: Mapping[str, Mapping[str, str]] = {
    "sst2": {}, "majority": {"--length": "8", "--examples": "12"},
    "associative-recall": {"--length": "16", "--examples": "12"}, "memorization": {"--length": "8", "--examples": "12"},
    "qa1": {"--length": "12", "--examples": "12"}, "instruct": {"--set mixture": "sst2", "--examples": "4"},
    "wikitext2": {"--length": "6", "--unit": "word"},
}  # fmt: skip
"""What `train` can be given, with what keeps it small."""

MODELS: Mapping[str, Sequence[str]] = {
    "position": ("classifier", "pixels"), "fidelity": ("classifier",), "plausibility": ("classifier",),
    "ablate": ("classifier", "language"), "generate": ("language",), "knockout": ("classifier", "language"),
    "patch": ("classifier", "language"), "steer": ("classifier", "language"), "insertion": ("classifier", "language"),
    "noise": ("classifier", "language"), "overflow": ("classifier", "language"), "poison": ("classifier", "language"),
    "words": ("classifier", "language"), "prompts": ("language",), "retrieval": ("language",), "loss": ("language",),
    "snr": ("language",),
}  # fmt: skip
"""The kinds of models that a verb can work on, where it cannot on any."""

LENGTHY = {"--steps", "--epochs", "--examples", "--sequences", "--set batch_tokens", "--random-rankings"}
"""Options that ask for work in proportion to their number: the more, the longer, and nobody is to be told that."""

TEXT_OPTIONS = ("--text", "--text", "--text", "--ids", "--file", "--image")


@dataclass(frozen=True, eq=False)
class Parameter:
    """An argument or option of a verb."""

    name: str
    metavar: str
    help: str
    default: Any
    flags: tuple[str, ...]
    multiple: bool
    required: bool

    @property
    def positional(self) -> bool:
        return not self.name.startswith("-")

    @property
    def is_model(self) -> bool:
        return self.positional and self.metavar.rstrip("….2") == "MODEL"


Verbs = dict[str, tuple[Parameter, ...]]


def verbs() -> Verbs:
    """Every verb that is registered, those of groups as "lens fit", and its parameters."""
    return dict(_verbs(command_of(cli.app), ()))


def _verbs(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[Parameter, ...]]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from _verbs(inner, (*path, name))
    if not hasattr(command, "commands"):
        own = [_parameter(each) for each in command.params if each.name != "help"]
        settings = re.findall(r"^- (\w+)=(\S+): (.*)", command.epilog or "", re.MULTILINE)
        own += [Parameter(f"--set {name}", metavar, told, None, (), True, False) for name, metavar, told in settings]
        yield " ".join(path), tuple(own)


def _parameter(given: Any) -> Parameter:
    option = given.param_type_name == "option"
    return Parameter(
        name=given.opts[0], metavar=given.metavar or "", help=getattr(given, "help", None) or "", default=given.default,
        flags=(*given.opts, *given.secondary_opts) if getattr(given, "is_flag", False) else (),
        multiple=option and given.multiple, required=given.required,
    )  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A command line, whose files are yet to be put somewhere."""

    verb: str
    parts: tuple[tuple[str, values.Value | None], ...]
    """Option or "" and value; None where an option has none."""


@st.composite
def lines(draw: st.DrawFn, verb: str, parameters: Sequence[Parameter], world: World) -> Line:
    mood = draw(st.sampled_from(("plausible", "flawed", "flawed", "wild")))
    positional = [each for each in parameters if each.positional]
    options = {each.name: each for each in parameters if not each.positional}
    base = draw(_base(verb, options, world))
    chosen = [(each, None) for each in positional if each.required or draw(st.integers(0, 3)) == 0]
    chosen += [(options[name], value) for name, value in base.items() if name in options]
    chosen += [(each, None) for each in options.values() if each.required and each.name not in base]
    most = draw(st.sampled_from((0, 0, 1, 3) if mood != "wild" else (3, 8)))
    extra = draw(st.lists(st.sampled_from(list(options.values())), max_size=most)) if options else []
    chosen += [(each, None) for each in extra if each.multiple or each not in [other for other, _ in chosen]]
    flaw = draw(st.integers(0, len(chosen) - 1)) if chosen and mood == "flawed" else None
    parts: list[tuple[str, values.Value | None]] = []
    for number, (each, value) in enumerate(chosen):
        wrong = number == flaw or (mood == "wild" and draw(st.booleans()))
        if wrong and each.name not in QUICK.get(verb, {}) and draw(st.integers(0, 9)) == 0:
            continue  # not given at all
        name = "" if each.positional else each.name
        if each.flags:
            parts.append((draw(st.sampled_from(each.flags)), None))
        elif wrong:
            parts.append((name, draw(hostile(each, world))))
        else:
            parts.append((name, value if value is not None else draw(plausible(verb, each, world))))
    if mood == "wild":
        parts += [("", value) for value in draw(st.lists(values.HOSTILE, max_size=1))]
    return Line(verb, tuple(parts))


@st.composite
def _base(draw: st.DrawFn, verb: str, options: Mapping[str, Parameter], world: World) -> dict[str, values.Value]:
    """Return the arguments that a run of the verb needs in addition to a model, and those that keep it short."""
    base: dict[str, values.Value] = dict(QUICK.get(verb, {}))
    if verb == "train":
        task = draw(st.sampled_from([*TASKS, *world["labelled"], *world["lines"]]))
        return {**base, "--data": task, **TASKS.get(task, {"--length": "6"} if task in world["lines"] else {})}
    if "--text" in options:
        name = draw(st.sampled_from(TEXT_OPTIONS))
        base[name] = draw(plausible(verb, options[name], world))
        if "--length" in options and (name != "--text" or draw(st.booleans())):
            del base[name]
            base["--length"] = draw(st.sampled_from(("6", "9")))
        elif "--length" in base:
            del base["--length"]
    if "--data" in options and verb != "report" and (verb != "heatmap" or draw(st.booleans())):
        for name in TEXT_OPTIONS if verb == "heatmap" else ():
            base.pop(name, None)
        base["--data"] = draw(plausible(verb, options["--data"], world))
    if {"--template", "--words"} <= set(options) and (verb == "prompts" or draw(st.booleans())):
        base |= {"--template": "Is it good ? {content} Answer :", "--words": "negative,positive"}
    if "--out" in options and draw(st.booleans()):
        base["--out"] = "out"
    return base


@functools.cache
def plausible(verb: str, parameter: Parameter, world: World) -> st.SearchStrategy[values.Value]:
    """Values that a parameter may have, as far as its name, its metavar and its help tell."""
    if parameter.is_model:
        kinds = MODELS.get(verb, ("model",))
        return st.sampled_from([model for kind in kinds for model in world[kind]])
    if verb == "lens fit" and parameter.name == "--data" or verb == "loss" and parameter.name == "--data":
        return st.sampled_from([*world["lines"], "wikitext2"])
    if verb == "plausibility" and parameter.name == "--data":
        return st.sampled_from(world["marked"])
    if parameter.name in (own := _named(world)):
        return own[parameter.name]
    if parameter.metavar in WHOLE:
        return values.SMALL
    if parameter.metavar in NUMBER:
        return st.sampled_from(("0", "0.1", "0.5", "1", "2"))
    known = [*re.split(r"[|,…]", parameter.metavar), *re.findall(r"[\w.-]+", parameter.help)]
    known += [str(parameter.default)] * 3 * (parameter.default is not None)
    return st.sampled_from([word for word in known if word]) | values.LISTS


@functools.cache
def _named(world: World) -> dict[str, st.SearchStrategy[values.Value]]:
    """Parameters whose values are files of the world, or which would take long or listen."""
    found: dict[str, st.SearchStrategy[values.Value]] = {
        name: st.sampled_from(world[kind])
        for name, kind in (
            ("plan", "plan"), ("--model", "model"), ("--init-from", "model"), ("--tokenizer", "tokenizer"),
            ("--file", "lines"), ("--image", "image"), ("--validation", "labelled"), ("--test", "labelled"),
            ("--questions", "questions"), ("--embeddings", "vectors"), ("--synonyms", "synonyms"),
            ("--masked-lm", "bert"), ("--encoder", "bert"),
        )
    }  # fmt: skip
    return found | {
        "architecture": st.sampled_from(list(ARCHITECTURES)),
        "--text": values.SENTENCES,
        "--insert": values.SENTENCES,
        "--ids": st.lists(st.integers(0, 2).map(str), min_size=1, max_size=9).map(",".join),
        "--out": st.just("out"),
        "--cache": st.sampled_from(("answers.sqlite", "new/answers.sqlite")),
        "--lens": st.sampled_from((*world["lens"], "logit")),
        "--semantic": st.sampled_from((*world["rewritten"], "promptbench")),
        "--filler": st.sampled_from(("generated", *world["lines"])),
        "--template": st.sampled_from(("Is it good ? {content} Answer :", "{context} {question}", "{content}")),
        "--words": st.sampled_from(("negative,positive", "dull,fine")),
        "--option": st.sampled_from(
            ("ig.steps=4", "ig.baseline=zero", "smoothgrad.samples=2", "random.seed=1", "lrp.x=1")
        ),
        "--set": st.sampled_from(("text=a dull film", *(f"data={table}" for table in world["labelled"]))),
        "--data": st.sampled_from((*world["labelled"], "sst2")),
        "--device": st.sampled_from(("cpu", "auto")),
        "--dtype": st.sampled_from(("auto", "float32", "float64", "bfloat16", "float16")),
        "--host": st.just("127.0.0.1"),
        "--port": st.sampled_from(("0", "1", "65536")),
        "--engine": st.just("local"),
    }


@functools.cache
def hostile(parameter: Parameter, world: World) -> st.SearchStrategy[values.Value]:
    """Values that a parameter should not have, and some that it may."""
    name, metavar = parameter.name, parameter.metavar
    if parameter.is_model or name in ("--init-from", "--tokenizer", "--masked-lm", "--encoder"):
        return (
            values.damaged(world["model"])
            | values.damaged(world["model"])
            | values.FILES
            | values.HOSTILE
            | st.sampled_from(world["bert"])
        )
    if metavar in WHOLE:
        return (
            values.SMALL | values.HOSTILE if name in LENGTHY else values.SMALL | values.WHOLE_NUMBERS | values.HOSTILE
        )
    if metavar in NUMBER:
        return values.NUMBERS | values.HOSTILE
    if name == "--lens":
        return values.damaged(world["lens"]) | values.FILES | values.HOSTILE
    if name == "--device":
        return st.sampled_from(("meta", "cuda", "cuda:99", "mps", "cpu:7", "xla", "")) | values.HOSTILE
    if name == "plan":
        return plans(world) | plans(world) | values.FILES | values.HOSTILE
    if name == "--data":
        return values.tables() | values.FILES | values.HOSTILE
    if name in ("--text", "--clean", "--corrupted", "--insert"):
        return values.TEXTS
    if name == "--image":
        return values.images() | values.FILES | values.HOSTILE
    if metavar in ("FILE", "DIR", "PLAN", "LENS") or name in _named(world):
        return values.FILES | values.HOSTILE
    return (
        values.HOSTILE
        | values.LISTS
        | st.sampled_from(("99999999", "0,99999999", "0,-1", "0%:10%", "5:2", "all", "mean", "every", "last"))
    )


def placed(line: Line, folder: Path) -> list[str]:
    """The arguments of a command line, its files written into `folder`."""
    arguments = line.verb.split()
    for number, (option, value) in enumerate(line.parts):
        inside = folder / str(number)
        option, _, setting = option.partition(" ")
        if option:
            arguments.append(option)
        if setting:
            arguments.append(f"{setting}={value if isinstance(value, str) else ''}")
        elif isinstance(value, str):
            arguments.append(value)
        elif value is not None:
            inside.mkdir()
            arguments.append(value.place(inside))
    return arguments
