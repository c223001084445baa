"""Lines and tables of results that tests/views does not show, in a report: every number is distinct."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from stand_ins import Stand, beside, e, said, shown

from ssmscope.api import analyses as registry
from ssmscope.api.results import Result
from ssmscope.attacks.noise.result import NoiseLevel
from ssmscope.interp.attention.maps import MarkedShare
from ssmscope.interp.attention.result import DataAttention
from ssmscope.interp.generate.result import SourceMap, Writing, WrittenText
from ssmscope.probes.parity.result import Compared, Parity
from ssmscope.probes.precision.result import Arm, Precision
from ssmscope.probes.states.result import StateNorms


def test_every_kind_that_words_its_verdict_is_shown_here_or_among_the_views() -> None:
    tests = Path(__file__).parents[1]
    texts = [path.read_text() for path in (tests / "attended.py", *(tests / "views").glob("test_*.py"))]
    for kind, home in registry.result_homes().items():
        importlib.import_module(home)
        own = Result._kinds[kind]
        if (own.headline, own.verdict) != (Result.headline, Result.verdict):
            shown = any(re.search(rf"\b{own.__name__}\(", text) for text in texts)
            assert shown or "Test" + kind.title().replace("-", "") in globals(), kind


class TestGenerate:
    def text(self, kept: float) -> Any:
        nothing = SourceMap("survival", np.zeros((2, 4), np.float32), signed=False)
        left = np.array([kept, 0.0, 1 - kept, 0.0], np.float32)
        shown = dict(tokens=(" a", " b", " c", " d"), words=(0, 1, 2, 3), first=2, text=" c d", maps=(nothing,))
        log_p, lives = np.array([-1.0, -2.0]), np.ones((3, 4), np.float32)
        numbers = dict(log_probabilities=log_p, entropies=np.array([0.5, 1.0]), left=left, half_lives=lives)
        return WrittenText(**shown, **numbers, ended_by="length")

    def test_both(self) -> None:
        one = Writing({"model": "own"}, (self.text(0.25),), top=3)
        assert said(one) == "writes 2 tokens at −1.50 nats a token; 0.250 of the states at the end is of the prompt"
        both = Writing({"model": "own"}, (self.text(0.25), self.text(0.75)), top=3)
        assert said(both) == "writes 4 tokens at −1.50 nats a token; 0.500 of the states at the end is of the prompt"
        assert one.headline == (
            "Writing of own: “c d”; half of what a token writes is left after 1 token; the prompt holds 25 % of the "
            "states at the end, “a” most of it"
        )
        assert both.headline == one.headline.replace("“c d”;", "“c d” and 1 more text;")
        table = beside(both)
        assert table.columns == ("written", "tokens", "nats a token", "entropy", "prompt at the end")
        assert shown(table)[1] == ("a", "1", " c d", "2", "−1.500", "0.7500", "0.7500")


class TestCircuit:
    def test_verdict(self) -> None:
        from ssmscope.interp.circuit.result import Circuit

        edges = dict(senders=("embedding", "layer 0"), receivers=("layer 0", "logits"), roads=("B", ""))
        scores = np.array([[-0.5, -0.75, -0.25], [-1.0, -1.25, -0.75]])
        given = dict(
            faithfulness=np.array([0.9, 0.8, 1.0]),
            random=np.array([0.25]),
            curve=np.zeros((0, 2)),
            clean=2.0,
            corrupted=-2.0,
        )
        result = Circuit(
            {"model": "own"},
            pairs=3,
            method="exact",
            nodes=(),
            **edges,
            scores=scores,
            kept=np.array([True, True]),
            **given,
        )
        assert result.headline == (
            "Circuit of own: 2 of 2 edges keep 0.900 [0.800, 1.000] of the answer (random circuits 0.250); most is "
            f"carried by {result.circuit[0].name}"
        )
        assert result.circuit[0].receiver == "logits" and said(result) in result.headline


class TestPatchPairs:
    def test_verdict(self) -> None:
        values = np.array([[[0.25, 0.125, 0.375]], [[-0.75, -1.0, -0.5]]])
        given = dict(sites=("state", "output"), layers=(0, 1), classes=("subject",), pairs=4, values=values)
        result = Stand("patch-pairs", model_name="own", **given)
        for name in ("strongest", "name"):
            setattr(result, name, getattr(result.real, name).__get__(result))
        headline = result.real.headline.fget(result)
        assert headline == "Patching of 4 pairs on own: most in output of layer 1 at subject: −0.750 [−1.000, −0.500]"


class TestNoise:
    def result(self, *drops: float) -> Stand:
        levels = tuple(
            NoiseLevel(rate, errors, accuracy=e(0.5), drop=e(drop, drop - 0.05, drop + 0.05), flipped=e(0.0))
            for rate, errors, drop in zip((0.05, 0.2), (0.05, 0.1912), drops)
        )
        return Stand(
            "noise",
            levels=levels,
            average_drop=e(float(np.mean(drops)), 0.1, 0.3),
            clean=e(0.8, 0.7, 0.9),
            change="typed",
        )

    def test_verdict(self) -> None:
        assert said(self.result(0.1, 0.3)) == (
            "average drop 20.0 % [10.0, 30.0], 30.0 % with errors in 19.1 % of the letters"
        )

    def test_table(self) -> None:
        table = beside(self.result(0.25, 0.5), self.result(0.125, 0.625))
        assert table.columns == (
            "clean accuracy ↑", "drop at 5 %, % ↓", "drop at 20 %, % ↓", "average drop, % ↓",
        )  # fmt: skip

    def test_headline_is_at_the_highest_rate(self) -> None:
        nothing = e(0.0)
        levels = tuple(
            NoiseLevel(rate, errors, accuracy=e(accuracy), drop=nothing, flipped=nothing)
            for rate, accuracy, errors in ((0.05, 0.75, 0.05), (0.2, 0.5, 0.1912))
        )
        result = Stand("noise", clean=e(0.875), levels=levels, change="typed")
        assert result.real.headline.fget(result) == (
            "Typing errors on own: accuracy 0.875 clean, 0.500 with errors in 19.1 % of the letters"
        )


class TestParity:
    def result(self, fault: str, *errors: float) -> Stand:
        tensors = tuple(
            Compared(f"layers.{at}.state.0", error, 0.25, int(error > 0.25), 3, 0, 7, "the")
            for at, error in enumerate(errors)
        )
        return Stand("parity", file="a.safetensors", ran_in="float32", tensors=tensors, fault=fault)

    def headline(self, *given: Any) -> str:
        result = self.result(*given)
        return Parity.headline.fget(result)

    def test_headline(self) -> None:
        same = "Parity of own: a.safetensors is of the same model: 2 tensors agree, with at most 0.500 of the error"
        assert self.headline("", 0.125, 0.0).startswith(same)
        assert self.headline("D is forgotten", 0.125, 0.5) == (
            "Parity of own: a.safetensors first differs in the state of layer 1, after token 7 'the' of text 0, "
            "by 0.500 of "
            "its size, 2 × what float32 allows; likely, D is forgotten"
        )
        assert self.headline("", 0.5).endswith("no known fault explains it")

    def test_modes_that_differ_are_named(self) -> None:
        modes = tuple(
            Compared(f"logits of {mode}", error, 0.25, int(error > 0.25), 3, 0, 7, "the")
            for mode, error in (("one pass", 0.125), ("left padding, alone", 0.5), ("a prefix reused", 1.0))
        )
        result = Stand("parity", file="transformers 5", ran_in="float32", tensors=modes, fault="")
        assert Parity.headline.fget(result) == (
            "Parity of own: transformers 5 differs in 2 of 3 modes (left padding, alone; a prefix reused), by up to 1 "
            "of the logits' size, 4 × what rounding allows"
        )
        result = Stand("parity", file="transformers 5", ran_in="float32", tensors=modes[:1], fault="")
        assert "is of the same model: 1 mode agrees, with at most 0.500 of" in Parity.headline.fget(result)


class TestPrecision:
    def headline(self, **changes: float) -> str:
        arms = tuple(
            Arm(name, bits, 1, False, e(changes[name], changes[name], changes[name]), e(0.0), e(0.5), e(0.0), ())
            for name, bits in (("bfloat16", 16), ("int8", 8), ("int4", 4))
        )
        return Precision.headline.fget(Stand("precision", arms=arms))

    def test_headline(self) -> None:
        assert self.headline(bfloat16=0.0, int8=0.001, int4=0.5).startswith(
            "Precision of own: the state may be kept in int8 ("
        )
        assert ", but int4 costs" in self.headline(bfloat16=0.0, int8=0.001, int4=0.5)
        assert "every rounding may cost" in self.headline(bfloat16=0.5, int8=1.0, int4=2.0)


class TestStates:
    def test_headline(self) -> None:
        found = Stand(
            "states",
            rows=((0, 2, "a"), (0, 4, "film")),
            names=("layers.0.state.0", "layers.0.conv", "layers.3.state.0"),
            shapes=((2, 3), (4,), (2, 5)),
            norms=np.array([[1.0, 9.0, 2.0], [0.5, 9.0, 4.0]]),
        )
        assert StateNorms.headline.fget(found) == (
            "States of own: 20 numbers in 3 tensors after each token; the largest norm is 4, in layer 3 after "
            "token 4 'film'"
        )


class TestAttentionData:
    def test_both(self) -> None:
        maps = [
            MarkedShare(str(at), "", "mean", e(value, value - 0.1, value + 0.1)) for at, value in enumerate((0.3, 0.5))
        ]
        result = DataAttention({"model": "own"}, "block", "mean", 9, 0, 0.25, tuple(maps))
        assert said(result) == (
            "its share on the marked tokens is 0.500 [0.400, 0.600] in layer 1 to 0.300 [0.200, 0.400] in layer 0; an "
            "even share is 0.250 (block level, 9 texts)"
        )
        table = beside(result)
        assert table.columns == ("a",) and [row for (row,), _ in table.rows] == ["layer 0", "layer 1"]


class TestExplainPositions:
    def test_verdict(self) -> None:
        def text(*scores: float) -> Any:
            each = SimpleNamespace(method="ig", scores=np.array(scores))
            return SimpleNamespace(attributions=[each], series=None, top=lambda one, size: highest(one.scores))

        def highest(scores: np.ndarray) -> list[int]:
            return [int(scores.argmax())] * bool(scores.max() > 0)

        told = "2 of 4 answers rest most on their own token, 1 on an earlier one, 1 on no token, 3.0 tokens away on"
        rows = text(1, 0, 0, 0), text(0, 2, 0, 0), text(0, 0, -1, 0), text(3, 0, 0, 1)
        assert said(Stand("explain-positions", rows, methods=("ig",))) == f"{told} average (ig)"
