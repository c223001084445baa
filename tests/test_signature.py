"""Options read off signatures: what Python code may give beside what can be typed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import pytest

from ssmscope.api.options import REPEATED, Range
from ssmscope.api.signatures import options_of
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.api.results import Result


def function(
    *,
    lens: Annotated[str | Result | None, "One."] = None,
    lenses: Annotated[Sequence[str | Result | None] | None, "Several.", REPEATED] = None,
    filler: Annotated[str | list[str], "A name, or sentences."] = "generated",
    rows: Annotated[Sequence[str | Sequence[int]], "Texts, or token ids.", REPEATED] = (),
    answer: Annotated[int | str | None, "A name, or a token id."] = None,
    methods: Annotated[Sequence[str] | Mapping[str, Callable[..., float]], "By name, or themselves."] = (),
) -> None: ...


OPTIONS = options_of(function)


def a_result() -> object:
    """Of a class of the package that has the name, as one that was imported after the options were read."""
    return type("Result", (), {"__module__": "ssmscope.api.results"})()


OBJECTS = [
    ("lens", a_result()),
    ("lenses", [a_result(), None, "a"]),
    ("filler", ["The wind rests ."]),
    ("filler", ("The wind rests .",)),
    ("rows", [[1, 2], [3]]),
    ("methods", {"mine": len}),
]


@pytest.mark.parametrize(("name", "value"), OBJECTS)
def test_objects_are_of_python_alone(name: str, value: object) -> None:
    assert OPTIONS[name].accept(value) == value
    with pytest.raises(InputError):
        OPTIONS[name].read(value)


def test_a_class_of_another_package_is_no_object() -> None:
    stranger = type("Result", (), {"__module__": "elsewhere"})()
    for name in ("lens", "lenses"):
        with pytest.raises(InputError):
            OPTIONS[name].accept(stranger)


def test_what_can_be_typed_is_read_alike() -> None:
    for read in ("accept", "read"):
        assert getattr(OPTIONS["answer"], read)(5) == 5 and getattr(OPTIONS["answer"], read)("5") == "5"
        assert getattr(OPTIONS["lenses"], read)(["a", "b"]) == ["a", "b"]
        with pytest.raises(InputError, match="answer is True"):
            getattr(OPTIONS["answer"], read)(True)


@pytest.mark.parametrize(
    ("given", "whole", "said", "inside", "outside"),
    [
        (Range(1), True, "a whole number from 1 on", [1, 2], [0]),
        (Range(0, 1), False, "a number from 0 to 1", [0, 0.5, 1], [-0.1, 1.1]),
        (Range(0, 1, strict=True), False, "a number above 0 and below 1", [0.5], [0, 1]),
        (Range(0, strict=True), False, "a number above 0", [0.1, 1e9], [0, -1]),
        (Range(high=5, strict=True), True, "a whole number below 5", [4, -9], [5]),
        (Range(2, 10_000), True, "a whole number from 2 to 10,000", [2, 10_000], [1, 10_001]),
        (Range(), False, "a number", [-1e9, 1e9], []),
    ],
    ids=str,
)
def test_a_range_says_what_it_allows(given: Range, whole: bool, said: str, inside: list, outside: list) -> None:
    assert given.describe(whole) == said
    assert all(value in given for value in inside) and not any(value in given for value in outside)
