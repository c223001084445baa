"""Lines and tables of results that tests/views does not show whole, in a report."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from described import check, of_table
from stand_ins import Stand, beside, e, said
from ssmscope.api import analyses as registry
from ssmscope.api.results import Result
from ssmscope.attacks.noise.result import NoiseLevel
from ssmscope.interp.attention.maps import MarkedShare
from ssmscope.interp.attention.result import DataAttention
from ssmscope.interp.circuit.result import Circuit
from ssmscope.interp.generate.result import SourceMap, Writing, WrittenText
from ssmscope.probes.parity.result import Compared
from ssmscope.probes.precision.result import Arm


def test_every_kind_that_words_its_verdict_is_shown_here_or_among_the_views() -> None:
    tests = Path(__file__).parents[1]
    texts = [path.read_text() for path in (tests / "attended.py", Path(__file__), *(tests / "views").glob("test_*.py"))]
    for kind, home in registry.result_homes().items():
        importlib.import_module(home)
        own = Result._kinds[kind]
        if (own.headline, own.verdict) != (Result.headline, Result.verdict):
            assert any(re.search(rf"\b{own.__name__}\(|Stand\(\s*\"{kind}\"", text) for text in texts), kind


def headline(result: Stand) -> str:
    return result.real.headline.fget(result)


def writings() -> Iterator[str]:
    def text(kept: float) -> Any:
        nothing = SourceMap("survival", np.zeros((2, 4), np.float32), signed=False)
        left = np.array([kept, 0.0, 1 - kept, 0.0], np.float32)
        shown = dict(tokens=(" a", " b", " c", " d"), words=(0, 1, 2, 3), first=2, text=" c d", maps=(nothing,))
        log_p, lives = np.array([-1.0, -2.0]), np.ones((3, 4), np.float32)
        numbers = dict(log_probabilities=log_p, entropies=np.array([0.5, 1.0]), left=left, half_lives=lives)
        return WrittenText(**shown, **numbers, ended_by="length")

    one, both = (Writing({"model": "own"}, tuple(map(text, kept)), top=3) for kept in ((0.25,), (0.25, 0.75)))
    yield from (said(one), said(both), one.headline, both.headline, *of_table(beside(both)))


def circuits() -> Iterator[str]:
    edges = dict(senders=("embedding", "layer 0"), receivers=("layer 0", "logits"), roads=("B", ""))
    numbers = dict(faithfulness=np.array([0.9, 0.8, 1.0]), random=np.array([0.25]), curve=np.zeros((0, 2)))
    edges |= dict(scores=np.array([[-0.5, -0.75, -0.25], [-1.0, -1.25, -0.75]]), kept=np.array([True, True]))
    given = dict(pairs=3, method="exact", nodes=(), clean=2.0, corrupted=-2.0)
    result = Circuit({"model": "own"}, **given, **edges, **numbers)
    yield from (result.headline, said(result), f"{result.circuit[0]}")


def patched_pairs() -> Iterator[str]:
    values = np.array([[[0.25, 0.125, 0.375]], [[-0.75, -1.0, -0.5]]])
    given = dict(sites=("state", "output"), layers=(0, 1), classes=("subject",), pairs=4, values=values)
    result = Stand("patch-pairs", model_name="own", **given)
    for name in ("strongest", "name"):
        setattr(result, name, getattr(result.real, name).__get__(result))
    yield headline(result)


def noise() -> Iterator[str]:
    def result(*drops: float) -> Stand:
        levels = tuple(
            NoiseLevel(rate, errors, accuracy=e(0.8 - drop), drop=e(drop, drop - 0.05, drop + 0.05), flipped=e(0.0))
            for rate, errors, drop in zip((0.05, 0.2), (0.05, 0.1912), drops)
        )
        average = e(float(np.mean(drops)), 0.1, 0.3)
        return Stand("noise", levels=levels, average_drop=average, clean=e(0.8, 0.7, 0.9), change="typed")

    yield from (said(result(0.1, 0.3)), headline(result(0.1, 0.3)))
    yield from of_table(beside(result(0.25, 0.5), result(0.125, 0.625)))


def parities() -> Iterator[str]:
    for fault, errors in (("", (0.125, 0.0)), ("D is forgotten", (0.125, 0.5)), ("", (0.5,))):
        tensors = tuple(
            Compared(f"layers.{at}.state.0", error, 0.25, int(error > 0.25), 3, 0, 7, "the")
            for at, error in enumerate(errors)
        )
        yield headline(Stand("parity", file="a.safetensors", ran_in="float32", tensors=tensors, fault=fault))
    modes = tuple(
        Compared(f"logits of {mode}", error, 0.25, int(error > 0.25), 3, 0, 7, "the")
        for mode, error in (("one pass", 0.125), ("left padding, alone", 0.5), ("a prefix reused", 1.0))
    )
    for shown in (modes, modes[:1]):
        yield headline(Stand("parity", file="transformers 5", ran_in="float32", tensors=shown, fault=""))


def precisions() -> Iterator[str]:
    for changes in ((0.0, 0.001, 0.5), (0.5, 1.0, 2.0)):
        arms = tuple(
            Arm(name, bits, 1, False, e(change, change, change), e(0.0), e(0.5), e(0.0), ())
            for (name, bits), change in zip((("bfloat16", 16), ("int8", 8), ("int4", 4)), changes)
        )
        yield headline(Stand("precision", arms=arms))


def states() -> Iterator[str]:
    names, shapes = ("layers.0.state.0", "layers.0.conv", "layers.3.state.0"), ((2, 3), (4,), (2, 5))
    norms = np.array([[1.0, 9.0, 2.0], [0.5, 9.0, 4.0]])
    yield headline(Stand("states", rows=((0, 2, "a"), (0, 4, "film")), names=names, shapes=shapes, norms=norms))


def attention_of_data() -> Iterator[str]:
    maps = [MarkedShare(str(at), "", "mean", e(value, value - 0.1, value + 0.1)) for at, value in enumerate((0.3, 0.5))]
    result = DataAttention({"model": "own"}, "block", "mean", 9, 0, 0.25, tuple(maps))
    yield from (said(result), *of_table(beside(result)))


def explained_positions() -> Iterator[str]:
    def text(*scores: float) -> Any:
        each = SimpleNamespace(method="ig", scores=np.array(scores))
        return SimpleNamespace(attributions=[each], series=None, top=lambda one, size: highest(one.scores))

    def highest(scores: np.ndarray) -> list[int]:
        return [int(scores.argmax())] * bool(scores.max() > 0)

    rows = text(1, 0, 0, 0), text(0, 2, 0, 0), text(0, 0, -1, 0), text(3, 0, 0, 1)
    yield said(Stand("explain-positions", rows, methods=("ig",)))


def test_what_is_said() -> None:
    cases = (writings, circuits, patched_pairs, noise, parities, precisions, states, attention_of_data)
    check("verdicts", (line for case in (*cases, explained_positions) for line in case()))
