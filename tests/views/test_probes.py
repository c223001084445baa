"""Everything that views show of hand-made probes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from described import Drawn, briefly, check, results_of, spread, whole
from drawn import ONE_COLUMN, TEXT_WIDTH, assert_fits
from ssmscope.core.bootstrap import Estimate
from ssmscope.probes.bound.result import GeneralizationBound
from ssmscope.probes.bound.terms import LINEAR_P, Gap, LayerTerms, Norms, capacity, gap, log_lower_bound
from ssmscope.probes.checkpoints.result import Checkpoint, StabilityTable
from ssmscope.probes.evaluate.result import Benchmarks, TaskScore
from ssmscope.probes.influence.reach import Decay, Reach
from ssmscope.probes.influence.result import Influence
from ssmscope.probes.influence.similarity import Similarity
from ssmscope.probes.lens.result import STATISTICS, Evaluation, LayerFit, LensedText, LensFit, Trajectory
from ssmscope.probes.loss.result import Summary, TokenLoss
from ssmscope.probes.retrieval.result import Cell, Ratio, Retrieval
from ssmscope.probes.snr.measure import LayerDifference, LayerSNR, SNRCurve, SNRDifference
from ssmscope.probes.snr.result import LensedModel, NeedleSNR
from ssmscope.probes.stability.result import LayerStability, Stability

NAN, INFINITE = math.nan, math.inf
UNKNOWN = Estimate(NAN, NAN, NAN)
ABOUT = {"model": "own", "data": {"name": "sst2", "split": "test", "examples": 1234}}
OTHER = {**ABOUT, "model": "other"}
LABELS = [("x",), ("y",), ("z",), ("a",), ("b",), ("c",)]


def decay(rate: Estimate, length: Estimate, r2: float = 0.95) -> Decay:
    return Decay(rate, length, -1.5, r2, 2, 6, "text")


FALLS = decay(Estimate(0.25, 0.2, 0.3), Estimate(4.0, 3.3, 5.0))
LEVEL = decay(Estimate(-0.01, -0.02, 0.01), Estimate(INFINITE, 50.0, INFINITE), 0.41)
TOO_FEW = decay(UNKNOWN, UNKNOWN, NAN)
POOR = decay(Estimate(0.5, 0.4, 0.6), Estimate(2.0, 1.5, 2.5), 0.85)


def reach(place: str, seed: int, of: Decay = FALLS, **more: Any) -> Reach:
    made, distances = Drawn(seed), 7
    within = made.ends(distances)
    held = [[1, 3, 4], [2, 5, 6], [1, 7, 9], [NAN] * 3, [3, 4, 8], [5, 6, 7], [4, 8, 10]]
    context = [
        [2, 5, INFINITE], [3, 6, 7], [1, INFINITE, INFINITE], [NAN] * 3, [4, 7, INFINITE], [6, 8, INFINITE],
        [5, 9, INFINITE],
    ]  # fmt: skip
    given = dict(
        **dict(place=place, exact=False, pairs=np.arange(9, 2, -1), log_norm=made.ends(distances, low=-3)),
        **dict(norm=made.ends(distances), share=made.ends(distances), quantiles=spread(distances, 5, seed=seed)),
        **dict(error=np.array([NAN, 0.05, 0.125, 0.75, 0.57, NAN, 0.6]), noisy=spread(distances, seed=seed + 1)),
        **dict(within=within, decay=of, context=np.array(context), held=np.array(held)),
    )
    return Reach(**{**given, **more})


def influence(*reaches: Reach, layers: tuple[str, ...] = ("0", "2"), **more: Any) -> Influence:
    made, places = Drawn(9), ("embeddings", *layers, "output")
    similarity = Similarity(places, made.ends(len(places), 3, low=-0.2), made.ends(len(layers), 3))
    about = {**ABOUT, "options": {"length": None, "probes": 32}}
    given = dict(
        provenance=about, of="hidden", positions="last", unit="tokens", lengths=np.array([7, 3, 1, 4, 6, 9, 11])
    )
    given |= dict(recent=2, reaches=reaches, similarity=similarity, notes=("a note",))
    return Influence(**{**given, **more})


def influences() -> Iterator[str]:
    result = influence(reach("output", 1), reach("0", 2, LEVEL), reach("2", 3, POOR))
    unknown = np.full((7, 3), NAN)
    poor = influence(
        reach("output", 4, POOR, context=unknown), reach("2", 5, context=unknown), unit="pixels", of="logits"
    )
    poor = replace(poor, positions="all", lengths=np.array([784, 784, 784, 784, 784]), recent=5)
    near = np.array([[1.0, 2.0, 3.0]] * 7)
    one = influence(reach("output", 6, LEVEL, exact=True, context=near, error=np.zeros(7)), lengths=np.array([1]))
    one = replace(one, positions="chosen", notes=(), provenance={**OTHER, "options": {"length": 20, "probes": None}})
    none = influence(reach("output", 7, TOO_FEW, context=unknown, held=unknown, error=np.full(7, NAN)), recent=40)
    drawn = replace(one, unit="pixels", lengths=np.array([20, 20]), reaches=(reach("output", 8, TOO_FEW),))
    yield from whole(result, result.compare([result, poor, one, none], LABELS), result.summary(), picture=True)
    yield from whole(poor, poor.compare([one, one], LABELS), poor.distances(2), picture=True)
    mixed = replace(result, reaches=(result.output, poor.reaches[1]), lengths=np.array([2, 2, 1, 2, 2, 2, 2]))
    for each in (one, none, drawn, mixed):
        yield from briefly(each)


NORMS = dict(channels=8, state=4, p=0.5, B_u=0.75, B_B=1.5, B_C=1.25, B_w=0.625, B_q=0.375, B_A=1.1)
SUMS = dict(M_B=2.5, M_C=3.5, M_w=1.75, M_q=0.875, M_A=9.0)


def bound(abscissa: float, examples: int = 5000, length: int = 40, **more: Any) -> GeneralizationBound:
    norms = Norms(abscissa=abscissa, **{**NORMS, **SUMS, **more.pop("norms", {})})
    found = capacity(norms, length)
    of = dict(delta=0.05, loss_bound=2.0, lipschitz=1.5)
    lower = log_lower_bound(abscissa, norms.B_w, length=length, examples=examples)
    given = dict(provenance=ABOUT, length=length, examples=examples, **of, norms=norms, row=2, rows=3, capacity=found)
    given |= dict(gap=gap(found.log, examples=examples, **of), log_linear=3.25, log_lower=lower)
    given |= dict(lengths=np.array([2, 40, 1000]), curves=spread(3, 3, low=1, high=20), notes=("a note",))
    return GeneralizationBound(**{**given, **more})


def layer_terms(layer: int, part: int, parts: int, **more: Any) -> LayerTerms:
    given = dict(channels=16, state=4, abscissa=-0.5, B_A=2.0, B_x=1.5, B_b=0.75, B_c=0.625, delta_min=0.01)
    given |= dict(M_delta=0.9, half_range=0.3, log_rho=-0.005)
    return LayerTerms(layer, part, parts, **{**given, **more})


def bounds() -> Iterator[str]:
    vacuous, grows, level = bound(-0.25), bound(0.1, rows=2), bound(0.0, rows=1)
    holds = bound(-0.5, 10**18, 400, norms=dict(B_u=0.01, M_B=0.1, M_C=0.1))
    said = replace(holds, gap=Gap(0.0123456, False, 12.5))
    large = replace(holds, gap=Gap(2.0, False, 13.0))
    small = replace(vacuous, gap=Gap(2.0, True, 12.5))
    linear = bound(0.0, norms=dict(B_A=0.0, B_q=0.0, p=LINEAR_P, M_A=0.0, M_q=0.0))
    layers = (layer_terms(0, 0, 1), layer_terms(1, 0, 2, abscissa=NAN, B_A=NAN), layer_terms(1, 1, 2, log_rho=0.01))
    outside = bound(-0.5, norms={}, capacity=None, gap=None, layers=layers, inputs="3 texts", curves=spread(3, 3))
    outside = replace(outside, norms=None, log_linear=NAN, log_lower=NAN, rows=0, examples=None, provenance=OTHER)
    without = replace(outside, layers=(replace(layers[1], half_range=NAN), replace(layers[1], part=1)))
    every = [vacuous, grows, level, said, outside, large]
    yield from whole(vacuous, vacuous.compare(every, LABELS), vacuous.curve(), picture=True)
    yield from whole(outside, outside.curve(), picture=True)
    yield from briefly(without)
    yield from briefly(replace(outside, layers=layers[:1]))
    of_few = [replace(vacuous, gap=Gap(2.0, True, needed)) for needed in (13.5, 14.0, 14.5)]
    for each in (grows, level, said, large, small, linear, *of_few):
        yield from (line for line in briefly(each) if line.startswith(("headline", "text", "note")))
    for p, B_A, B_q in (
        (LINEAR_P + 1e-4, 0.0, 0.0), (LINEAR_P - 1e-4, 0.0, 0.0), (LINEAR_P, 1e-3, 0.0), (LINEAR_P, 0.0, 1e-3),
        (LINEAR_P, 1.5e-6, 0.0), (LINEAR_P, 1e-6, 0.0), (LINEAR_P, 0.0, 1e-6), (LINEAR_P, 0.0, 1.5e-6),
        (LINEAR_P + 2.4e-6, 0.0, 0.0),
    ):  # fmt: skip
        near = bound(0.0, norms=dict(B_A=B_A, B_q=B_q, p=p))
        yield f"{near.is_linear_attention}"


def layer_stability(layer: int, seed: int, behaviour: str, **more: Any) -> LayerStability:
    heads = 3
    given = dict(
        part=0, parts=1, states=4, why=f"a state grows by {seed}", never=5, growth=Drawn(seed).estimate(-0.1, 0.1)
    )
    given |= dict(abscissa=spread(heads, low=-2, seed=seed), largest=spread(heads, low=-1, high=0.1, seed=seed + 1))
    given |= dict(possible=spread(heads, low=-1, high=0.2, seed=seed + 2), bounded_by=f"bound {seed}")
    given |= dict(mean=spread(heads, low=-1, high=0, seed=seed + 3), half_life=spread(heads, low=1, high=99, seed=seed))
    given |= dict(quantiles=(1.23, 9.87, 45.6, 1234.5, INFINITE))
    return LayerStability(layer=layer, behaviour=behaviour, **{**given, **more})


def stability(*layers: LayerStability, **more: Any) -> Stability:
    numbers = len(dict.fromkeys(one.layer for one in layers))
    given = dict(provenance=ABOUT, inputs="3 texts", given=True, texts=3, longest=1234, behaviour=layers[0].behaviour)
    given |= dict(layers=layers, positions=np.array([0, 10, 1233]), norms=Drawn(7).ends(numbers, 3, high=50.0))
    return Stability(**{**given, "notes": ("a note",), **more})


def stabilities() -> Iterator[str]:
    result = stability(
        layer_stability(0, 1, "marginal"),
        layer_stability(3, 2, "stable", never=12),
        layer_stability(4, 3, "marginal", never=0, possible=None, abscissa=None),
        layer_stability(5, 4, "unstable", quantiles=(1e5, 2e6, 3e7, 4e8, INFINITE), states=9000, never=1),
        behaviour="marginal",
    )
    parts = stability(
        layer_stability(2, 5, "stable", parts=2, abscissa=None),
        layer_stability(2, 6, "stable", parts=2, part=1, abscissa=None),
        layer_stability(3, 7, "unstable", abscissa=None),
        behaviour="unstable",
        provenance=OTHER,
    )
    both = stability(*(layer_stability(at, 8 + at, "stable") for at in range(2)), notes=())
    yield from whole(result, result.compare([result, parts, both], LABELS), result.heads(), picture=True)
    yield from whole(parts)
    for each in (both, stability(*both.layers, layer_stability(2, 3, "stable")), stability(both.layers[1])):
        yield from briefly(each)


def checkpoints() -> Iterator[str]:
    norms = Norms(abscissa=-0.5, **NORMS, **SUMS)
    known = dict(abscissa=-0.5, largest_gain=-0.25, possible_gain=-0.125, growth=0.0625, architecture="mamba")
    rows = (
        Checkpoint("/runs/a/first", "", fingerprint="f", behaviour="stable", **known, norms=norms),
        Checkpoint("/runs/a/" + "x" * 40, "no config.json"),
        Checkpoint("/runs/b", "", behaviour="unstable", **{**known, "abscissa": NAN, "growth": 0.5}),
    )
    bounded = dict(length=4000, log_capacity=12.3456, log_capacity_printed=2.34567, bound=0.789, vacuous=False)
    with_bound = (
        replace(rows[0], **bounded),
        replace(rows[0], name="/runs/c", **{**bounded, "vacuous": True}),
        *rows[1:],
    )
    curves = np.array([[1.0, 2.0], [NAN, NAN], [NAN, NAN]])
    given = {"given": ["a", "b", "c"]}
    result = StabilityTable({**ABOUT, **given}, rows, np.array([10, 1000]), curves)
    many = StabilityTable(given, with_bound, np.array([10, 1000]), spread(4, 2))
    yield from whole(result, result.curve(), result.compare([result], LABELS))
    yield from whole(many, many.curve())
    outside = tuple(replace(row, norms=None, abscissa=NAN) for row in rows)
    yield from whole(StabilityTable({"given": ["a"] * 3}, outside, np.array([10]), np.full((3, 1), NAN)))
    yield from (
        table.verdict(at) for table in (result, replace(many, provenance={"given": ["a"] * 4})) for at in range(3)
    )
    for names in (("/a/b/c", "d/e"), ("x/a", "x/b"), ("/x/a", "/x/a"), ("/x/a/b", "/x/c"), ("x/y", "x/y")):
        yield f"{replace(result, rows=tuple(Checkpoint(name, 'none') for name in names)).names}"


def retrieval(models: tuple[str, ...], tasks: tuple[str, ...], lengths: tuple[int, ...]) -> Retrieval:
    made, shape = Drawn(len(models)), (len(models), len(tasks), len(lengths))
    cells = tuple(
        tuple(
            tuple(Cell(made.random.integers(9, 999) / 8, *made.estimates(2), made.estimate(-3, 0)) for _ in lengths)
            for _ in tasks
        )
        for _ in models
    )
    ratios = (
        Estimate(123.4, 1.5, INFINITE), Estimate(0.5, 0.4, 0.9), Estimate(1.25, 0.9, 1.5), UNKNOWN,
        Estimate(2.0, 1.1, 3.0),
    )  # fmt: skip
    found = iter([Ratio(one, p) for one, p in zip(3 * ratios, (0.01, 0.049, 0.001, NAN, 0.05) * 3)])
    apart = tuple(tuple(tuple(next(found) for _ in lengths) for _ in tasks) for _ in models[1:])
    right = spread(*shape, 7, seed=3) < 0.6
    about = {"model": ", ".join(models), "data": {"split": "test"}, "options": {"filler": "pg"}}
    chance = tuple(1 / (at + 3) for at in range(len(tasks)))
    return Retrieval(about, models, tasks, lengths, chance, cells, apart, right, right.astype("f4"), ("a note",))


def retrievals() -> Iterator[str]:
    result = retrieval(("own", "b", "c"), ("qa1", "qa2"), (0, 1000, 16000))
    alone = retrieval(("d",), ("qa1",), (500,))
    yield from whole(result, result.compare([result, alone], [("x", "y", "z"), ("w",)]), picture=True)
    yield from whole(alone, alone.compare([result, alone], [("x",), ("w",)]))
    for value, low, high in ((99.5, 1.0, 200.0), (100.0, 1.1, 200.4), (0.5, 0.4, 1.0), (0.25, 0.1, 0.9)):
        yield Ratio(Estimate(value, low, high), 0.01).written


def needles(
    layers: dict[str, int], lengths: tuple[int | None, ...], tasks: tuple[str, ...] = ("all", "qa1")
) -> NeedleSNR:
    made = Drawn(len(layers))
    fields = ("needle", "distractor", "ratio", "log_ratio", "candidate", "beats", "rank", "leads")

    def of(count: int) -> tuple[LayerSNR, ...]:
        return tuple(LayerSNR(at, at / count, **dict(zip(fields, made.estimates(8)))) for at in range(count + 1))

    curves = tuple(
        SNRCurve(name, task, length, 5 + at, 30.0, NAN if at else 0.25, of(count), made.estimate())
        for length in lengths
        for at, task in enumerate(tasks)
        for name, count in layers.items()
    )
    names = list(layers)
    differences = ()
    if len(names) == 2:
        apart = tuple(LayerDifference(at, at / 3, *made.estimates(2, -0.5)) for at in range(layers[names[0]] + 1))
        differences = tuple(
            SNRDifference(*names, task, length, apart, made.estimate(-0.005, 0.005))
            for length in lengths
            for task in tasks
        )
    lensed = tuple(LensedModel(name, f"lens of {name}", count) for name, count in layers.items())
    return NeedleSNR({"model": ", ".join(names)}, lensed, "tokens", curves, differences, ("one", "two"))


def snr() -> Iterator[str]:
    two = needles({"own": 3, "other" * 5: 3}, (100, 2000))
    yield f"{two.curve().model} {two.curve(task='qa1').task} {two.curve(length=2000).length}"
    alone = needles({"own": 30}, (None,), ("some\nquestions" * 2,))
    yield from whole(two, two.compare([two, alone], [("x", "y"), ("z",)]), picture=True)
    yield from whole(alone, alone.compare([two], [("x",)]))
    many = needles({"a": 2, "b": 2, "c": 2, "d": 2, "e": 4}, (100,))
    small = tuple(
        replace(curve, layers=tuple(replace(each, needle=each.needle.times(0.009)) for each in curve.layers))
        for curve in many.curves
    )
    apart = [
        replace(two.differences[at], first=first, second=second) for at, (first, second) in enumerate(("ac", "bd"))
    ]
    apart = [replace(each, task="all", length=100) for each in apart]
    yield from briefly(replace(many, curves=small, differences=tuple(apart), notes=()))
    yield from briefly(needles({"own": 2, "other": 3}, (100,), ("qa1",)))


def losses(models: tuple[str, ...], length: int, bins: tuple[tuple[int, int], ...], slope: bool = True) -> TokenLoss:
    made = Drawn(len(models))

    def summary(low: float) -> Summary:
        own = made.estimate(low, 5.0)
        return Summary(own, made.estimate(-1, 0) if slope else UNKNOWN, made.estimates(len(bins), low, 6.0))

    positions = tuple(range(1, length + 1, 4))
    curves = made.ends(len(models), len(positions), low=1, high=3)
    curves[:, 0, 0] = 9.0 + np.arange(len(models))
    about = {"model": ", ".join(models), "data": {"name": "wikitext2", "windows": 12 if slope else 1}}
    summaries, apart = [summary(1.0) for _ in models], [summary(-1.0) for _ in models[1:]]
    raw = spread(len(models), length, low=1, high=9)
    return TokenLoss(
        about, models, "nats", 4, positions, raw, bins, tuple(summaries), tuple(apart), curves, ("a note",) * slope
    )


def loss() -> Iterator[str]:
    result = losses(("own", "b", "c"), 41, ((0, 1), (1, 8), (8, 40), (1024, 2048)))
    alone = losses(("d",), 13, ((0, 2), (2, 13)), slope=False)
    yield from whole(result, result.compare([result, alone], [("x", "y", "z"), ("w",)]), result.summary(), picture=True)
    yield from whole(alone, alone.summary())
    level = replace(alone, curves=np.full_like(alone.curves, 2.0))
    yield f"{result.shown} {alone.shown} {level.shown} {level.outside!r} {result.outside!r} {alone.outside!r}"
    for ends in ((-0.5, NAN, NAN), (-0.5, -0.75, 0.0), (0.5, 0.0, 0.75), (0.5, 0.25, 0.75)):
        yield replace(alone, summaries=(replace(alone.summaries[0], slope=Estimate(*ends)),)).headline
    below = result.curves.copy()
    below[0, 2, 0], below[1, 3, 0] = 0.01, 0.02
    yield replace(result, curves=below).outside


def lensed(tokens: tuple[str, ...], seed: int, positions: tuple[int, ...]) -> LensedText:
    read, layers = len(positions), 3
    numbers = {name: spread(layers + 1, read, high=0.9, seed=seed + at) for at, name in enumerate(STATISTICS)}
    numbers["cross_entropy"][:, -1] = NAN
    top = np.random.default_rng(seed).integers(0, 3, (layers + 1, read))
    top[-1], top[-2, 0] = np.arange(read) % 3, 0
    answers = tuple(tuple((" good", "bad\n", "")[each] for each in row) for row in top.tolist())
    words = tuple(range(len(tokens)))
    return LensedText(tokens, words, np.array(positions), **numbers, top=top, answers=answers)


def trajectories() -> Iterator[str]:
    first = lensed((" A", " <b>", "film", " that", "ends"), 1, (1, 3, 4))
    second = lensed((" One", "more"), 2, (0, 1))
    result = Trajectory(ABOUT, "tuned lens x", "every", "answer_probability", False, (first, second))
    last = tuple(lensed(text.tokens, seed, (len(text) - 1,)) for seed, text in enumerate((first, second), start=3))
    of_classes = Trajectory(OTHER, "logit lens", "last", "entropy", True, last)
    yield from whole(result, result.compare([result, of_classes], LABELS), picture=True)
    yield from whole(of_classes)
    yield from briefly(replace(of_classes, texts=last[:1]))


def lens_fits() -> Iterator[str]:
    made = Drawn(5)
    layers = tuple(LayerFit(at, *made.estimates(3)) for at in range(3))
    about = {**ABOUT, "data": {"measured": {"name": "wikitext2", "split": "test"}}}
    given = dict(layers=layers, tuned=made.estimate(), logit=made.estimate(), measured=12345, rows=1234, best_step=700)
    result = LensFit(about, positions="every", **given, history=(Evaluation(0, NAN, 0.5), Evaluation(700, 0.4, 0.3)))
    last = replace(result, positions="last", tuned=made.estimate())
    yield from whole(result, result.compare([result, last], LABELS), picture=True)
    yield from briefly(last)


def benchmarks() -> Iterator[str]:
    scores = (
        TaskScore("a", "acc", Estimate(0.71234, 0.7, 0.75), True, 5, 1200),
        TaskScore("a", "norm", Estimate(1.0, NAN, NAN), True, 0, 0),
        TaskScore("b", "ppl", Estimate(12.345678, 12.0, 12.5), False, 25, 1),
        TaskScore("b", "log", Estimate(-12.345678, -12.5, -12.0), True, 1, 10),
    )
    result = Benchmarks({**ABOUT, "versions": {"lm-eval": "0.4"}}, scores)
    yield from whole(result, result.compare([result, replace(result, scores=scores[1:])], LABELS), picture=True)
    yield from briefly(replace(result, scores=scores[::2]))


CASES: dict[str, Callable[[], Iterator[str]]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        influences, bounds, stabilities, checkpoints, retrievals, snr, loss, trajectories, lens_fits, benchmarks,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_shown(name: str) -> None:
    check(name, CASES[name]())


@pytest.mark.parametrize("width", [ONE_COLUMN, TEXT_WIDTH])
@pytest.mark.parametrize(("case", "at"), [(checkpoints, 0), (lens_fits, 0), (snr, 0), (stabilities, 0)])
def test_figures_fit_a_column(case: Callable[[], Iterator[str]], at: int, width: float) -> None:
    assert_fits(results_of(case)[at], width)
