"""Fields of several types: the one as which a JSON value is read, and values that fit none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from ssmscope.api.jsonable import decode_fields, encode


@dataclasses.dataclass(frozen=True)
class Part:
    number: float
    more: int = 3


@dataclasses.dataclass(frozen=True)
class Own:
    """A part with its own form."""

    number: int

    def to_dict(self) -> str:
        return f"number {self.number}"

    @classmethod
    def from_dict(cls, document: str) -> Own:
        return cls(int(document.removeprefix("number ")))


@pytest.mark.parametrize(("hint", "written", "read"), [
    (dict[str, float] | None, {"a": None}, {"a": math.nan}), (list[float] | None, [1, None], [1.0, math.nan]),
    (tuple[float, ...] | str, ["inf", 2], (math.inf, 2.0)), (str | tuple[float, ...], "inf", "inf"),
    (float | str, "inf", math.inf), (float | str, "-inf", -math.inf), (float | str, "infinite", "infinite"),
    (str | float, 3, 3.0), (float | None, None, None), (float | int, 3, 3.0), (int | float, 3, 3),
    (bool | str, True, True), (Part | str, {"number": None}, Part(math.nan)),
    (str | Part, {"number": 2, "more": 5}, Part(2.0, 5)),
    (Mapping[str, Part] | None, {"a": {"number": 1}}, {"a": Part(1.0)}),
    (Sequence[Part], [{"number": 1}, {"number": 2}], [Part(1.0), Part(2.0)]),
    (tuple[Part, int], [{"number": 1}, 4], (Part(1.0), 4)), (Own, "number 5", Own(5)),
    (Any, [None, {"a": "inf"}], [None, {"a": "inf"}]), (Sequence[Any] | Mapping[str, Any], {"a": [1]}, {"a": [1]}),
    (type(None), None, None),
])  # fmt: skip
def test_a_value_is_read_as_the_first_type_that_fits(hint: Any, written: Any, read: Any) -> None:
    held = dataclasses.make_dataclass("Held", [("value", hint)])
    found = decode_fields({"value": written, "kind": "own", "class": "Held"}, held).value
    assert repr(found) == repr(read)  # NaN is written alike


@pytest.mark.parametrize(("hint", "written", "said"), [
    (tuple[float, ...], {"a": 1}, "expected tuple, not {'a': 1}"),
    (Sequence[float], {"a": 1}, "expected Sequence, not {'a': 1}"),
    (Mapping[str, float], [1], "expected Mapping, not [1]"),
    (Mapping[str, float], "abc", "expected Mapping, not 'abc'"), (int, "3", "expected int, not '3'"),
    (Part, [1], "expected the fields of Part, not [1]"), (Part, {"more": 1}, "Part lacks number"),
    (Part, {"number": 1, "b": 2, "a": 3}, "Part has no a, b"), (tuple[int, int], [1, 2, 3], "expected 2 values, not 3"),
    (tuple[int, int], [1], "expected 2 values, not 1"),
])  # fmt: skip
def test_a_value_that_fits_no_type(hint: Any, written: Any, said: str) -> None:
    held = dataclasses.make_dataclass("Held", [("value", hint)])
    with pytest.raises(ValueError) as caught:
        decode_fields({"value": written}, held)
    assert str(caught.value) == said


def test_what_is_written() -> None:
    given = (Own(2), Part(math.inf), np.array([[1, 2]], np.int8), np.float64(math.nan), {2: [np.int64(3)]}, True, "x")
    assert encode(given) == [
        "number 2", {"number": "inf", "more": 3}, {"dtype": "int8", "shape": [1, 2], "values": [[1, 2]]}, None,
        {"2": [3]}, True, "x",
    ]  # fmt: skip
    for wrong in ({1}, Part, object()):
        with pytest.raises(TypeError, match=f"a result cannot hold a {type(wrong).__name__}"):
            encode(wrong)
