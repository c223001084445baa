"""Selectivity of gates: the share of heads whose Δ, or 1 − a, varies over tokens, by hand and in its users."""

from types import SimpleNamespace

import pytest
import torch
import ssmscope
from ssmscope import ops
from ssmscope.data.text import text_data
from ssmscope.interp.explain.scored_text import kind_of
from ssmscope.interp.gates import GateVariation, note_on_gates
from ssmscope.interp.methods import METHODS

TEXTS = ["A gripping film , beautifully acted .", "dull and far too long for what it wants to say"]
CIRCLE = [1.0, 1.0 + 2**0.5, 1.0, 1.0 - 2**0.5]
"""Of mean 1 and standard deviation 1."""


def layer(*heads: list[float], of: str = "delta") -> SimpleNamespace:
    """A layer of two texts of two tokens, whose heads have these four gates."""
    gates = torch.tensor(heads, dtype=torch.float64).T.reshape(2, 2, len(heads))
    x = torch.zeros(2, 2, len(heads), 3, dtype=torch.float64)
    b = torch.zeros(2, 2, 1, 1, dtype=torch.float64)
    if of == "delta":
        gated = {"delta": gates, "A": -torch.ones(len(heads), 1, dtype=torch.float64)}
    else:
        gated = {"log_a": torch.log1p(-gates).unsqueeze(-1)}
    return SimpleNamespace(u=torch.zeros(2, 2, 5), recurrences=(ops.Recurrence(x, b, b, **gated),))


def share(*layers: SimpleNamespace, mask: list[list[int]] | None = None) -> float | None:
    found = GateVariation(torch.tensor([[1, 1], [1, 1]] if mask is None else mask, dtype=torch.bool))
    for number, each in enumerate(layers):
        found.visit(number, range(2), each)
    return found.share()


def varying(size: float, scale: float = 0.01) -> list[float]:
    """Four gates with this coefficient of variation."""
    return [scale * (1 + size * (each - 1)) for each in CIRCLE]


@pytest.mark.parametrize("of", ["delta", "log_a"])
def test_a_head_selects_from_a_variation_of_a_tenth(of):
    assert share(layer(varying(0.099), varying(0.101), varying(0.5), of=of)) == pytest.approx(2 / 3)
    assert share(layer(varying(0.0), varying(0.09), of=of)) == 0


def test_heads_of_all_layers_count_alike():
    assert share(layer(varying(0.5)), layer(varying(0.0), varying(0.0), varying(0.5))) == pytest.approx(2 / 4)


def test_texts_that_are_visited_apart_are_judged_together():
    """Each text's tokens are alike, the texts are not."""
    found = GateVariation(torch.ones(2, 2, dtype=torch.bool))
    r = layer([0.1, 0.1, 0.3, 0.3]).recurrences[0]
    for row in (0, 1):
        own = ops.Recurrence(r.x[[row]], r.b[[row]], r.c[[row]], delta=r.delta[[row]], A=r.A)
        found.visit(0, [row], SimpleNamespace(u=torch.zeros(1, 2, 5), recurrences=(own,)))
    assert found.share() == 1


def test_padding_and_layers_that_never_forget_do_not_count():
    assert share(layer([0.1, 0.1, 0.1, 9.0])) == 1
    assert share(layer([0.1, 0.1, 0.1, 9.0]), mask=[[1, 1], [1, 0]]) == 0
    assert share(layer([0.0] * 4, of="log_a")) is None
    assert share(layer([0.0] * 4, of="log_a"), layer(varying(0.5))) == 1


def test_the_note_names_the_methods_that_read_the_gates():
    steady, selecting = ssmscope.load("demo/sst2-mamba"), ssmscope.load("demo/sst2-mamba2")
    reading = [name for name in METHODS if kind_of(METHODS[name]).gate]
    assert reading == ["survival", "self-retention", "self-write"]
    methods = ["survival", "self-write"]
    (note,) = note_on_gates(steady, steady.encode(TEXTS), methods)
    assert note.endswith("so survival and self-write say where a token stands rather than what it is")
    found = GateVariation(steady.encode(TEXTS).mask)
    steady.trace(TEXTS, visit=found.visit)
    assert f"in {100 * found.share():.0f} % of the heads" in note and found.share() < 0.2
    (alone,) = note_on_gates(steady, steady.encode(TEXTS), ["survival"])
    assert alone.endswith("so survival says where a token stands rather than what it is")
    assert note_on_gates(steady, steady.encode(TEXTS), []) == []
    assert note_on_gates(selecting, selecting.encode(TEXTS), methods) == []


@pytest.mark.parametrize(("demo", "hardly"), [("sst2-mamba", True), ("sst2-mamba2", False)])
def test_what_reads_the_gates_says_so(demo, hardly):
    model = ssmscope.load(f"demo/{demo}")
    data = text_data("two", "test", TEXTS, [1, 0], ("negative", "positive"), [[(2, 10)], [(0, 4)]])
    said = "the gates hardly select"
    assert (said in str(ssmscope.heatmap(model, TEXTS)).lower()) is hardly
    for measure in (ssmscope.fidelity, ssmscope.plausibility):
        found = measure(model, data, methods=["survival", "gradxinput"])
        assert any(note.startswith(said) for note in found.notes) is hardly
        assert (said in str(found)) is hardly
        assert not measure(model, data, methods=["gradxinput"]).notes
    assert (said in str(ssmscope.explain(model, TEXTS)).lower()) is hardly
    assert said not in str(ssmscope.explain(model, TEXTS, methods=["lrp"])).lower()
    found = ssmscope.heatmap(model, data, score="retention")
    assert any("gates hardly select" in note and "so retention says" in note for note in found.notes) is hardly
