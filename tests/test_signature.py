"""Options read off signatures: what Python code may give beside what can be typed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import pytest

from ssmscope.api.options import REPEATED, options_of
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
