"""Options read off signatures: values from Python code in addition to typed ones."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import pytest
from refusals import refused, refuses
from ssmscope.api import options
from ssmscope.api.signatures import options_of
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.api.results import Result


def function(
    *,
    lens: Annotated[str | Result | None, "One."] = None,
    lenses: Annotated[Sequence[str | Result | None] | None, "Several.", options.REPEATED] = None,
    filler: Annotated[str | list[str], "A name, or sentences."] = "generated",
    rows: Annotated[Sequence[str | Sequence[int]], "Texts, or token ids.", options.REPEATED] = (),
    answer: Annotated[int | str | None, "A name, or a token id."] = None,
    methods: Annotated[Sequence[str] | Mapping[str, Callable[..., float]], "By name, or themselves."] = (),
) -> None: ...


of_python = pytest.fixture(lambda: options_of(function))


def a_result() -> object:
    """Return an instance of a class of the package by its name, as if imported after the options were read."""
    return type("Result", (), {"__module__": "ssmscope.api.results"})()


OBJECTS = [
    ("lens", a_result()), ("lenses", [a_result(), None, "a"]), ("filler", ["The wind rests ."]),
    ("filler", ("The wind rests .",)), ("rows", [[1, 2], [3]]), ("methods", {"mine": len}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OBJECTS)
def test_objects_are_of_python_alone(of_python: dict[str, options.Option], name: str, value: object) -> None:
    assert of_python[name].accept(value) == value
    with pytest.raises(InputError):
        of_python[name].read(value)


def test_a_class_of_another_package_is_no_object(of_python: dict[str, options.Option]) -> None:
    stranger = type("Result", (), {"__module__": "elsewhere"})()
    for name in ("lens", "lenses"):
        with pytest.raises(InputError):
            of_python[name].accept(stranger)


def test_what_can_be_typed_is_read_alike(of_python: dict[str, options.Option]) -> None:
    for read in ("accept", "read"):
        assert getattr(of_python["answer"], read)(5) == 5 and getattr(of_python["answer"], read)("5") == "5"
        assert getattr(of_python["lenses"], read)(["a", "b"]) == ["a", "b"]
        with pytest.raises(InputError, match="answer is True"):
            getattr(of_python["answer"], read)(True)


@pytest.mark.parametrize(("given", "whole", "said", "inside", "outside"), [
    (options.Range(1), True, "a whole number from 1 on", [1, 2], [0]),
    (options.Range(0, 1), False, "a number from 0 to 1", [0, 0.5, 1], [-0.1, 1.1]),
    (options.Range(0, 1, strict=True), False, "a number above 0 and below 1", [0.5], [0, 1]),
    (options.Range(0, strict=True), False, "a number above 0", [0.1, 1e9], [0, -1]),
    (options.Range(high=5, strict=True), True, "a whole number below 5", [4, -9], [5]),
    (options.Range(2, 10_000), True, "a whole number from 2 to 10,000", [2, 10_000], [1, 10_001]),
    (options.Range(), False, "a number", [-1e9, 1e9], []),
], ids=str)  # fmt: skip
def test_a_range_says_what_it_allows(given: options.Range, whole: bool, said: str, inside: list, outside: list) -> None:
    assert given.describe(whole) == said
    assert all(value in given for value in inside) and not any(value in given for value in outside)


def of_every_kind(
    *positional: object,
    words: Annotated[None | Literal["a", "b"] | Literal["c"], "Words."] = None,
    layers: Annotated[Literal["mean", "all"] | Sequence[int], "Words or numbers.", options.Range(0)] = "mean",
    steps: Annotated[
        Sequence[Literal["first", "last"] | int | Literal["mid"]], "Numbers and words among them.", options.Range(2, 9)
    ] = (2, 9),
    rate: Annotated[float | int, "A number.", options.Range(0, 1, strict=True)] = 0.5,
    rates: Annotated[float | Sequence[float], "One number or several."] = (0.5,),
    flag: Annotated[bool, "A flag."] = True,
    from_: Annotated[str, "A text.", options.Metavar("SPAN"), options.NO_EFFECT],
    texts: Annotated[Sequence[str] | None, "Texts.", options.REPEATED] = None,
    file: Annotated[str | Path | None, "A file.", options.Reads("file", ("-",))] = None,
    lens: Annotated[Path | None, "A folder.", options.Reads("folder")] = None,
    model: Annotated[str | Path | None, "A model.", options.Reads("model")] = None,
    goal: Annotated[str | None, "A word of a table.", options.OneOf("core.known_models:DTYPES", ("most",))] = None,
    goals: Annotated[Sequence[str], "Words of a table.", options.OneOf("core.known_models:DTYPES")] = (),
    option: Annotated[Mapping[str, Mapping[str, object]] | None, "Options of methods.", options.REPEATED] = None,
    documented: int | None = None,
    named: str | Path = "x",
) -> None:
    """Do nothing.

    Args:
        words: told in the signature.
        documented: a number of `things`,
            told in two lines.
        named: a name.

    Raises:
        nothing: at all.
    """


every = pytest.fixture(lambda: options_of(of_every_kind))

FROM_0 = "allowed are mean, all or a whole number from 0 on, or several"
FROM_2_TO_9 = "allowed are first, last, mid or a whole number from 2 to 9, or several"


@pytest.mark.parametrize(("name", "kind", "several", "single", "metavar", "flags", "allowed"), [
    ("words", None, False, None, "a|b|c", ("--words",), "allowed are a, b or c"),
    ("layers", int, True, None, "mean|all|N,…", ("--layers",), FROM_0),
    ("steps", int, True, None, "NAME,…", ("--steps",), FROM_2_TO_9),
    ("rate", float, False, float, "X", ("--rate",), "allowed is a number above 0 and below 1"),
    ("rates", float, True, float, "X,…", ("--rates",), "allowed are a number, or several"),
    ("flag", bool, False, bool, "", ("--flag", "--no-flag"), "allowed is true or false"),
    ("from_", str, False, str, "SPAN", ("--from",), "allowed is a text"),
    ("texts", str, True, None, "TEXT", ("--texts",), "allowed are a text, or several"),
    ("file", Path, False, Path, "FILE", ("--file",), "allowed is a file"),
    ("lens", Path, False, Path, "FILE", ("--lens",), "allowed is a directory"),
    ("model", str, False, str, "TEXT", ("--model",), "allowed is a text"),
    ("goal", str, False, str, "NAME", ("--goal",), None),
    ("goals", str, True, None, "NAME,…", ("--goals",), None),
    ("option", None, False, None, "METHOD.NAME=VALUE", ("--option",), None),
    ("documented", int, False, int, "N", ("--documented",), "allowed is a whole number"),
    ("named", str, False, str, "NAME", ("--named",), "allowed is a text"),
])  # fmt: skip
def test_what_a_signature_says_of_an_option(every, name, kind, several, single, metavar, flags, allowed) -> None:
    option = every[name]
    assert (option.kind, option.several, option.single) == (kind, several, single)
    assert (option.metavar, option.flags) == (metavar, flags)
    if allowed is not None:
        assert option.allowed == allowed


def test_helps_marks_and_defaults_are_each_options_own(every: dict[str, options.Option]) -> None:
    assert (every["documented"].help, every["named"].help) == ("a number of things, told in two lines.", "a name.")
    assert (every["words"].help, every["layers"].help) == ("Words.", "Words or numbers.")
    assert [name for name, each in every.items() if each.required] == ["from_"]
    assert [name for name, each in every.items() if each.no_effect] == ["from_"]
    assert [name for name, each in every.items() if each.repeated] == ["texts", "option"]
    assert [name for name, each in every.items() if each.nested] == ["option"]
    assert [name for name, each in every.items() if each.is_flag] == ["flag"]
    assert [name for name, each in every.items() if each.reads] == ["file", "lens", "model"]
    assert (every["words"].words, every["layers"].words, every["steps"].words) == (("a", "b", "c"), ("mean", "all"), ())
    assert (every["steps"].elements, every["steps"].range) == (("first", "last", "mid"), options.Range(2, 9))
    assert list(every) == list(inspect.signature(of_every_kind).parameters)[1:]
    assert "rates" not in options_of(of_every_kind, without=["rates"])
    known = every["goals"].one_of.words()
    assert every["goal"].one_of.words() == [*known, "most"] and every["goal"].allowed.endswith(f"{known[-1]}, most")


@pytest.mark.parametrize(("name", "given", "read"), [
    ("words", "b", "b"), ("words", None, None), ("layers", "all", "all"), ("layers", "3", [3]),
    ("layers", " 3, 0 ", [3, 0]), ("goals", "float32, float64", ["float32", "float64"]), ("layers", (3, 0), [3, 0]),
    ("steps", "first,5,last", ["first", 5, "last"]), ("rate", "0.25", 0.25), ("rates", "0.25", 0.25),
    ("rates", 0.25, 0.25), ("rates", [0.25], [0.25]), ("rates", "0.25,0.5", [0.25, 0.5]), ("flag", "true", True),
    ("flag", "false", False), ("flag", False, False), ("texts", "a, b", ["a, b"]),
    ("texts", ["a, b", "c"], ["a, b", "c"]), ("file", "a/b", Path("a/b")), ("model", Path("a/b"), "a/b"),
    ("goal", "most", "most"), ("goals", "float32,float64", ["float32", "float64"]),
    ("option", "ig.max-steps = 3", {"ig": {"max_steps": 3}}), ("option", "ig.a.b=x", {"ig": {"a.b": "x"}}),
    ("option", ["ig.a=true", "lrp.a=0.5", "ig.b=x=y"], {"ig": {"a": True, "b": "x=y"}, "lrp": {"a": 0.5}}),
    ("option", {"ig": {"a": [1]}}, {"ig": {"a": [1]}}), ("documented", " -7 ", -7),
])  # fmt: skip
def test_values_have_the_options_type(every: dict[str, options.Option], name: str, given: object, read: object) -> None:
    found = every[name].read(given)
    assert found == read and type(found) is type(read)
    if isinstance(read, list):
        assert list(map(type, found)) == list(map(type, read))


@pytest.mark.parametrize(("name", "given", "said"), [
    ("words", "ba", "unknown words 'ba'; allowed are a, b, c"),
    ("layers", "men", "a whole number from 0 on, or several; did you mean 'mean'?"),
    ("layers", [0, -1], "layers is -1; allowed are"),
    ("layers", [], "layers is empty; allowed are"),
    ("layers", None, "layers is not given; allowed are"),
    ("layers", 1.5, "layers is 1.5; allowed are"),
    ("steps", [2, 10], "steps is 10; allowed are"),
    ("steps", [1], "steps is 1; allowed are"),
    ("rate", "nan", "rate is 'nan'; allowed is"),
    ("rate", 1, "rate is 1.0; allowed is"),
    ("rate", "half", "rate is 'half'; allowed is"),
    ("rate", True, "rate is True; allowed is"),
    ("flag", 1, "flag is 1; write true or false"),
    ("flag", "yes", "flag is 'yes'; write true or false"),
    ("from_", None, "from_ is not given; allowed is a text"),
    ("rates", "0.1,x", "rates is 'x'; allowed are a number, or several"),
    ("texts", [3], "texts is 3; allowed are a text, or several"),
    ("file", 3, "file is 3; allowed is a file"),
    ("goal", "mst", "unknown goal 'mst'; allowed are"),
    ("steps", "frist", "allowed are first, last, mid or a whole number"),
    ("goals", ["float3"], "unknown among goals: 'float3'; allowed are"),
    ("goals", ["most"], "unknown among goals: 'most'; allowed are"),
    ("option", "ig.steps", "option 'ig.steps': write METHOD.NAME=VALUE"),
    ("option", "ig=3", "option 'ig=3': write METHOD.NAME=VALUE"),
    ("option", ".steps=3", "option '.steps=3': write METHOD.NAME=VALUE"),
    ("option", "ig.=3", "option 'ig.=3': write METHOD.NAME=VALUE"),
    ("option", {"ig": 3}, "give a mapping of methods to their options"),
    ("documented", "1234567890123456789", "documented is '1234567890123456789'; allowed is a whole number"),
    ("documented", True, "documented is True; allowed is a whole number"),
    ("documented", 2.0, "documented is 2.0; allowed is a whole number"),
    ("documented", "", "documented is ''; allowed is a whole number"),
])  # fmt: skip
def test_wrong_values_are_refused_with_what_is_allowed(every, name, given, said) -> None:
    assert said in refused(lambda: every[name].read(given))


@pytest.mark.parametrize(("name", "value", "typed"), [
    ("flag", True, ["--flag"]),
    ("flag", False, ["--no-flag"]),
    ("from_", "a b", ["--from", "a b"]),
    ("layers", "mean", ["--layers", "mean"]),
    ("layers", [3, 0], ["--layers", "3,0"]),
    ("rates", (0.25,), ["--rates", "0.25"]),
    ("texts", ["a, b", "c"], ["--texts", "a, b", "--texts", "c"]),
    ("file", Path("a/b"), ["--file", "a/b"]),
    ("option", {"ig": {"a": True, "b": 2}, "lrp": {"c": "x"}},
     ["--option", "ig.a=true", "--option", "ig.b=2", "--option", "lrp.c=x"]),
])  # fmt: skip
def test_a_typed_value_is_read_as_it_was(
    every: dict[str, options.Option], name: str, value: object, typed: list[str]
) -> None:
    option = every[name]
    assert option.typed(value) == typed
    if not option.is_flag:
        found = option.read(typed[1::2] if option.repeated else typed[1])
        assert found == (list(value) if name == "layers" and value != "mean" else value) or found == value[0]


def test_a_default_is_the_same_as_a_list_and_as_a_tuple(every: dict[str, options.Option]) -> None:
    assert every["steps"].is_default([2, 9]) and every["steps"].is_default((2, 9))
    assert not every["steps"].is_default([9, 2]) and not every["steps"].is_default([2])
    assert every["layers"].is_default("mean") and not every["layers"].is_default(["mean"])
    assert not every["layers"].is_default(["m", "e", "a", "n"]) and not every["steps"].is_default("29")


def no_help(*, one: int = 3) -> None: ...
def no_type(*, one: Annotated[dict[str, int], "A help."] = None) -> None: ...  # type: ignore[assignment]
def two_types(*, one: Annotated[int | bool, "A help."] = 3) -> None: ...
def no_union(*, one: Annotated[Callable[..., int], "A help."] = len) -> None: ...
def number_first(*, one: Annotated[int, 3] = 3) -> None: ...


@pytest.mark.parametrize(("declared", "said"), [
    (no_help, r"needs Annotated\[TYPE, HELP\]"), (number_first, r"needs Annotated\[TYPE, HELP\]"),
    (no_type, "has the types"), (two_types, "has the types"), (no_union, "has the types|cannot be"),
])  # fmt: skip
def test_a_signature_that_no_option_can_have_is_refused(declared: Callable[..., None], said: str) -> None:
    with pytest.raises(TypeError, match=f"the option one {said}"):
        options_of(declared)


def test_layers_are_chosen_by_their_numbers_in_the_model() -> None:
    assert options.chosen_layers("all", [1, 4, 6]) == (0, 1, 2)
    assert options.chosen_layers([6, 1], [1, 4, 6]) == (2, 0)
    for layers, numbers, said in (
        ([2, 5], [0, 1, 2], "there is no layer 5; this model has the layers 0 to 2"),
        ([1, 0], [1, 4, 6], "there is no layer 0; this model's state-space layers are 1, 4, 6"),
        ([4, 4], [1, 4, 6], r"layers is \[4, 4\]; name each once; this model's"),
    ):
        refuses(said, options.chosen_layers, layers, numbers)


def test_texts_become_the_values_that_they_look_like() -> None:
    values = ("true", "false", "True", "3", "-3", "0.5", "1e3", "x")
    found = [options.as_value(text) for text in values]
    assert found == [True, False, "True", 3, -3, 0.5, 1000.0, "x"]
    assert [type(each) for each in found] == [bool, bool, str, int, int, float, float, str]
    assert options.plain([Path("a"), (1, Path("b"))]) == ["a", [1, "b"]]


def of_the_rest(
    *,
    twice: Annotated[Path | str | os.PathLike | None, "A path.", options.REPEATED] = None,
    functions: Annotated[Sequence[str] | Mapping[str, Callable[..., float]], "By name, or themselves."] = (),
    known: Annotated[str | Path, "A known name, or a file.", options.Reads("data")] = "a",
    lines: Annotated[Path | str, "A known name, or a file.", options.Reads("lines")] = "a",
    ready: Annotated[Result | str | None, "A result, or its name."] = None,
    pair: Annotated[Sequence[str | list[int]], "Texts, or token ids."] = (),
    number: float = 0.5,
    a_list: list[str] | str | None = None,
) -> None:
    """Do nothing.

    Args:
        number: a number.
        a_list: names, or
            a name: of a file.
    """


def test_types_that_an_option_leaves_to_python() -> None:
    rest = options_of(of_the_rest)
    kinds = {name: (each.kind, each.single, each.several) for name, each in rest.items()}
    assert kinds == {
        "twice": (Path, Path, False), "functions": (str, None, True), "known": (str, str, False),
        "lines": (str, str, False), "ready": (str, str, False), "pair": (str, None, True),
        "number": (float, float, False), "a_list": (str, str, False),
    }  # fmt: skip
    assert (rest["number"].metavar, rest["a_list"].metavar, rest["known"].metavar) == ("X", "NAME", "TEXT")
    assert (rest["number"].help, rest["a_list"].help) == ("a number.", "names, or a name: of a file.")
    assert rest["functions"].accept({"a": len}) == {"a": len} and rest["pair"].accept([[1], "a"]) == [[1], "a"]
    assert rest["a_list"].accept(["a"]) == ["a"] and rest["pair"].accept(["a"]) == ["a"]
    assert rest["known"].accept([("a", 1)]) == [("a", 1)] and rest["known"].accept(["a"]) == ["a"]
    for name, wrong in (("ready", ["a"]), ("known", [1]), ("lines", ["a"]), ("number", {"a": 1})):
        with pytest.raises(InputError, match=f"{name} is "):
            rest[name].accept(wrong)
