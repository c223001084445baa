"""Mistakes that `make mutants` tries: the kinds, the exceptions, and the replacement of a function."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest
import torch
from exhaustive import ALL

from ssmscope import ops
from ssmscope.ops import recurrence
from ssmscope.render import numbers

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def mistakes(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module("plausible_mistakes")
    sys.modules.pop("plausible_mistakes", None)


@pytest.mark.parametrize(
    ("code", "others"),
    [
        ("a < b", ["a <= b"]),
        ("a + b", ["a - b", "a"]),
        ("a / b", ["a * b", "a"]),
        ("'a' + b", []),
        ("a and b", ["a or b", "a", "b"]),
        ("not a", ["a"]),
        ("a if b else c", ["a if not b else c"]),
        ("max(a, b)", ["min(a, b)"]),
        ("f(a, b)", ["f(b, a)"]),
        ("x.mean(1)", ["x.sum(1)"]),
        ("torch.exp(x)", ["torch.log(x)", "x"]),
        ("x.sqrt()", ["x"]),
        ("sorted(x)", ["list(x)"]),
        ("torch.where(a, b, c)", ["torch.where(a, c, b)"]),
        ("2", ["3", "1"]),
        ("True", ["False"]),
    ],
)
def test_what_could_stand_in_a_nodes_place(mistakes, code, others):
    node = ast.parse(code, mode="eval").body
    assert [ast.unparse(each) for each in mistakes.variants(node)] == others


@pytest.mark.parametrize(
    ("code", "is_left_out"),
    [
        ("raise InputError(1 + 1)", True),
        ("'''A docstring.'''", True),
        ("step = max(1, MAX_NUMBERS_HELD // heads)", True),
        ("step = max(1, heads)", False),
        ("print(1 + 1)", False),
    ],
)
def test_what_is_no_computation_is_left_out(mistakes, code, is_left_out):
    (statement,) = ast.parse(code).body
    assert mistakes.skipped(statement) is is_left_out
    assert mistakes.skipped(ast.parse("print(1 + 1)", mode="eval").body)


def test_mutants_that_are_written_alike_have_numbers(mistakes):
    """`zero[0, 0]` of one function: an excuse for the first index is none for the second."""
    name = "core/affine.py:_affine_at_zero: 0 -> 1 in zero[0, 0]"
    alike = [each for each in mistakes.mutants_of("core/affine.py") if each.name.startswith(name)]
    assert [each.name for each in alike] == [name, f"{name} #2"]
    assert alike[0].node.col_offset < alike[1].node.col_offset
    names = [each.name for each in mistakes.mutants_of("core/affine.py")]
    assert len({*names}) == len(names)


def test_a_mutant_takes_its_functions_place(mistakes):
    every = {mutant.name: mutant for mutant in mistakes.mutants_of("render/numbers.py")}
    assert not any(":__repr__" in name for name in every)
    mutant = every["render/numbers.py:counted: count != 1 -> count == 1"]
    own, source = numbers.counted.__code__, Path(numbers.__file__).read_text()
    try:
        mistakes.put_in_place(mutant)
        assert (numbers.counted(1, "text"), numbers.counted(2, "text")) == ("1 texts", "2 text")
    finally:
        numbers.counted.__code__ = own
    assert numbers.counted(1, "text") == "1 text" and Path(numbers.__file__).read_text() == source


def test_a_mutant_of_a_decorator_takes_its_place_in_what_is_decorated(mistakes):
    every = {mutant.name: mutant for mutant in mistakes.mutants_of("ops/recurrence.py")}
    where = "ops/recurrence.py:scan_in_order: recurrence.order is None"
    one = torch.ones(1, 2, 1, 1)
    r = ops.Recurrence(one, one, one, log_a=0 * one)
    own = {function: function.__code__ for function in (recurrence.scan_in_order, ops.scan, ops.scan_reference)}
    try:
        mistakes.put_in_place(every[f"{where} -> recurrence.order is not None"])
        for scan in (ops.scan, ops.scan_reference):
            with pytest.raises(AttributeError):
                scan(r)
    finally:
        for function, code in own.items():
            function.__code__ = code
    assert ops.scan(r).y.flatten().tolist() == ops.scan_reference(r).y.flatten().tolist() == [1, 2]


@pytest.mark.skipif(not ALL, reason="it makes every mutant: set SSMSCOPE_EXHAUSTIVE=all")
def test_every_excuse_is_for_a_mistake_that_is_tried(mistakes):
    excused = [line.partition("  #")[0] for line in (TOOLS / "equivalent_mutants.txt").read_text().splitlines()]
    assert len(set(excused)) == len(excused)
    files = {name.partition(":")[0] for name in excused}
    assert set(excused) <= {mutant.name for file in files for mutant in mistakes.mutants_of(file)}
