"""Outlines of records: exact first values, a few lines, folded and escaped trees of bounded size."""

import re
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
import torch
import ssmscope
from ssmscope import outline
from ssmscope.core.attention_layers import AttentionState
from ssmscope.core.trace import LayerState
from ssmscope.ops import DeltaRecurrence
from ssmscope.outline import Outlined, outlined


@dataclass(frozen=True, eq=False)
class Record(Outlined):
    name: str
    values: Any
    parts: Any = None


@outlined
class Pair(NamedTuple):
    first: Any
    second: Any = None


def test_arrays_are_told_by_dtype_shape_and_first_values() -> None:
    assert outline.value(torch.tensor([[0.12345, 2.0], [3.0, 4.0]]).mT) == "float32 (2, 2): 0.123, 3, …"
    assert outline.value(np.arange(6, dtype=np.int64).reshape(2, 3)) == "int64 (2, 3): 0, 1, 2, …"
    assert outline.value(np.array([True, False])) == "bool (2,): True, False"
    assert outline.value(torch.tensor(-1.5, dtype=torch.bfloat16)) == "bfloat16 (): -1.5"
    assert outline.value(np.zeros((3, 0))) == "float64 (3, 0)"
    assert outline.value(torch.empty(2, 3, device="meta")) == "float32 (2, 3) on meta"


def test_a_record_is_a_line_or_a_line_for_each_field() -> None:
    assert repr(Record("short", 1 / 3)) == "Record(name='short', values=0.333333)"
    long = Record("x" * 300, torch.zeros(4, 5), [Record("inner", 1), Record("inner", 2)])
    assert repr(long).splitlines() == [
        "Record(", f"  name='{'x' * 87},".replace("x,", "…,"), "  values=float32 (4, 5): 0, 0, 0, …,",
        "  parts=(Record(…), Record(…)),", ")",
    ]  # fmt: skip
    assert repr(Pair((1,), {"a": 2})) == "Pair(first=(1,), second={'a': 2})"
    assert outline.value(list(range(1000))) == "(0, 1, 2, … 1,000 in all)"


def test_a_tree_is_folded_escaped_and_bounded() -> None:
    shown = Record("<b>\u202e", {"k": 1}, [Pair(torch.ones(2), "<i>")])._repr_html_()
    assert shown.count("<details>") == shown.count("</details>") == 4 and "<details open" not in shown
    assert "<b>" not in shown and "<i>" not in shown and "\u202e" not in shown and "&lt;b&gt;\\u202e" in shown
    assert "<li>first = float32 (2,): 1, 1</li>" in shown and "[0] = Pair(first=float32 (2,): 1, 1" in shown
    deep: Any = [Record("leaf", np.zeros(3))] * 100
    for _ in range(6):
        deep = [Record("node", deep)] * 100
    many = Record("all", deep)._repr_html_()
    assert len(many) < 1_000_000 and many.count("<details>") <= outline.MAX_UNFOLDED + 1 and "… 100 in all" in many


def test_what_a_run_gives_is_short_whatever_its_size() -> None:
    """A state, a run, a trace's layer and a generation are told in a few lines, their subclasses too."""
    model = ssmscope.load("demo/books-hybrid")
    batch = model.encode(ids=[[1, 2, 3, 4, 5]])
    run, trace = model.run(batch), model.trace(batch)
    assert {type(each) for each in run.states} == {LayerState, AttentionState}
    assert DeltaRecurrence.__repr__ is Outlined.__repr__
    layer = trace.layers[0]
    for found in (batch, run, *run.states, layer, layer.recurrences[0], trace.linearized[0], trace.layers):
        assert len(repr(found)) < 1000 and repr(found).count("\n") <= 16, type(found)
    conv = run.states[0].conv
    first = ", ".join(f"{each:.3g}" for each in conv[0, 0, :3].tolist())
    assert f"conv=float32 {tuple(conv.shape)}: {first}, …" in repr(run.states[0])
    layers = re.findall(r"<li>layer (\d+) = &#x27;\w+&#x27;", model._repr_html_())
    assert list(map(int, layers)) == list(range(model.num_layers))
    assert trace._repr_html_().count("<details>") > 1 and escape(repr(trace)) in trace._repr_html_()
