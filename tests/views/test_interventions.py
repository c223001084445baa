"""Everything that views show of hand-made changes of texts, interventions and measures of explanations."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from described import Drawn, briefly, check, results_of, spread, whole
from drawn import ONE_COLUMN, TEXT_WIDTH, assert_fits
from ssmscope.attacks.effect.result import AttackEffect, Side
from ssmscope.interp.ablate.result import Ablation, Unit
from ssmscope.interp.fidelity.result import Fidelity, fidelity_table
from ssmscope.interp.heatmap.scored_text import ScoredText
from ssmscope.interp.knockout.result import Cut, Knockout
from ssmscope.interp.paired import Paired
from ssmscope.interp.patch.result import METRICS, Patching
from ssmscope.interp.plausibility.result import Plausibility
from ssmscope.interp.sanity.result import SanityCheck
from ssmscope.interp.steer.result import Steering

NAN = math.nan
ABOUT = {"model": "own", "data": {"name": "sst2", "split": "test", "examples": 1234}}
OTHER = {**ABOUT, "model": "other"}
TOKENS = ("[CLS]", " A", " won", "der", " film", ",", " but", " very", " long", ".", " ", "[SEP]")
WORDS = (None, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, None)
LABELS = [("x",), ("y",)]


def side(tokens: int, changed: tuple[int, ...], layers: int, seed: int, **more: Any) -> Side:
    names = tuple(f" t{at}" if at else "[CLS]" for at in range(tokens))
    retention = spread(layers, tokens, low=0.2, high=0.9, seed=seed).astype(np.float32)
    attention = spread(layers, tokens, low=0.0, high=0.3, seed=seed + 1).astype(np.float32)
    given = dict(rationale=(), answer="yes", probability=0.75)
    text = ScoredText(names, (None, *range(tokens - 1)), retention, retention.mean(0), **{**given, **more})
    mask = np.isin(np.arange(tokens), changed)
    return Side(text, mask, attention, spread(layers, seed=seed + 2).astype(np.float32))


def effect(layers: int, **more: Any) -> AttackEffect:
    pairs = np.array([[0, 0], [1, 1], [3, 4], [4, 5]])
    distance = spread(layers + 1, 4, seed=4).astype(np.float32)
    distance[:, 0], distance[-1, 1:] = 0, (0.8, 0.3, 0.6)
    given = dict(
        clean=side(5, (2,), layers, 10),
        corrupted=side(6, (2, 3), layers, 20, answer="n\no", probability=0.625),
        **dict(pairs=pairs, layers=tuple(range(2, 2 + layers)), by_layer=True, size=3, distance=distance),
        **dict(hidden_cosine=spread(layers + 1, seed=5), state_cosine=spread(layers, seed=6), kept=0.125),
    )
    return AttackEffect(provenance=ABOUT, **{**given, **more})


def effect_by_layer() -> Iterator[str]:
    result = effect(2)
    cosine = np.array([NAN, 0.5])
    other = replace(result, state_cosine=cosine, provenance=OTHER)
    yield from whole(result, result.compare([result, other], LABELS), result.summary())


def effect_of_an_insertion() -> Iterator[str]:
    yield from briefly(effect(8, by_layer=False))
    pairs = np.array([[0, 0], [1, 1], [2, 3], [3, 4]])
    before, after = side(4, (), 2, 40, answer="a" * 32), side(5, (2,), 2, 50, answer="b" * 33)
    long = replace(after.text, tokens=tuple("x" * (38 + at) for at in range(5)))
    yield from briefly(effect(2, clean=before, corrupted=replace(after, text=long), pairs=pairs))


def effect_of_a_removal() -> Iterator[str]:
    kept = [0, 2, 3, 4, 5, 6, 7, 9]
    pairs = np.array([[place, number] for number, place in enumerate(kept)])
    distance = spread(3, 8, seed=4).astype(np.float32)
    of_two = dict(clean=side(10, (1, 8), 2, 60), corrupted=side(8, (), 2, 70), pairs=pairs, distance=distance)
    yield from whole(effect(2, **of_two, state_cosine=np.array([NAN, 0.5])))


def effects_of_two_models() -> Iterator[str]:
    first, other = effect(2, by_layer=False), replace(effect(3, by_layer=False), provenance=OTHER)
    yield from briefly(Paired({"model": "own, other"}, (first, other)))


def effect_on_many_layers() -> Iterator[str]:
    flat = side(5, (), 11, 30)
    mean = (0.5 + 0.001 * np.arange(5)).astype(np.float32)
    flat = replace(flat, text=replace(flat.text, mean=mean))
    same = np.stack([np.arange(5)] * 2, axis=1)
    distance = np.zeros((12, 5), np.float32)
    kept = dict(clean=flat, corrupted=flat, pairs=same, distance=distance, by_layer=False)
    yield from whole(effect(11, **kept, state_cosine=np.full(11, NAN)))


def effect_without_a_difference_inside() -> Iterator[str]:
    result = effect(9, by_layer=True)
    distance = result.distance.copy()
    distance[-1] = 0
    yield from whole(replace(result, distance=distance, size=2))
    attention = np.zeros_like(result.clean.attention)
    nothing = [replace(each, attention=attention[:, : len(each)]) for each in (result.clean, result.clean)]
    pairs = np.array([[0, 0], [1, 1], [2, 2], [3, 3]])
    kept = replace(result, clean=nothing[0], corrupted=nothing[1], pairs=pairs, by_layer=False)
    yield from briefly(kept)
    special = [replace(each, text=replace(each.text, words=(None,) * len(each))) for each in nothing]
    yield from briefly(replace(kept, clean=special[0], corrupted=special[1]))


def ablation() -> Iterator[str]:
    made = Drawn(1)
    units = tuple(Unit(at // 2, head=at % 2) for at in range(15))
    harms = made.ends(15, 3, low=-0.1, high=0.5)
    given = dict(what="head", by="resample", metric="loss", units=units, plain=made.ends(3), harms=harms)
    given |= dict(order=tuple(range(14, -1, -1)), counts=(0, 3, 15), curves=made.ends(2, 3, 3), notes=("a note",))
    result = Ablation(provenance=ABOUT, **given)
    skips = replace(
        result,
        **dict(what="skip", by="zero", metric="probability", units=(Unit(3), Unit(4, 1, "kept")), notes=()),
        **dict(harms=np.array([[[0.1, 0.01, 0.2]] * 3, [[0.0, -0.1, 0.02]] * 3])),
    )
    unclear = replace(skips, harms=skips.harms - 0.02)
    level = replace(skips, harms=skips.harms - 0.01)
    yield from whole(
        result,
        result.compare([result, skips, unclear, level], [*LABELS, ("z",), ("a",)]),
        result.together(),
        picture=True,
    )
    yield from briefly(skips)
    yield f"verdict: {unclear.verdict()}; {level.verdict()}"


def knockout() -> Iterator[str]:
    heads = tuple(Cut(at % 3, at % 3, head=at) for at in range(14))
    cuts = (Cut(0, 2), Cut(0, 2, part="kept"), Cut(0, 1), Cut(1, 2), *heads)
    made = Drawn(2)
    given = dict(tokens=(("a", "b", "c"),) * 2, answers=("yes\n", "no"), sources=("a" * 25, "b"), target="c" * 40)
    given |= dict(spans=(((0,), (0,)), ((1,), (1,))), targets=((2,), (2,)), by="head", roads="states", attends=True)
    given |= dict(cuts=cuts, probability=np.array([0.5, 0.25]), logit=np.array([3.0, 4.0]))
    cells = spread(2, 2, len(cuts), seed=1)
    given |= dict(probabilities=cells, logits=spread(2, 2, len(cuts), low=-5, high=5, seed=2))
    result = Knockout(
        provenance={**ABOUT, "options": {"window": 2}}, changes=made.ends(2, len(cuts), low=-1, high=1), **given
    )
    few = [replace(result, cuts=cuts[:count], changes=result.changes[:, :count]) for count in (2, 3)]
    ranked = result.changes.copy()
    ranked[:, 2:4] = [[0.9, -0.1, 1.0], [0.8, 0.7, 1.1]]
    heads = (Cut(1, 1), Cut(1, 1, head=0), Cut(1, 1, head=3))
    order = [0, 2, 1, 3]
    turned = result.changes[:, order]
    turned[:, 2] = [0.99, 0.9, 1.1]
    few.append(replace(result, cuts=tuple(cuts[at] for at in order), changes=turned))
    many = dict(answers=("yes",) * 5, probability=np.full(5, 0.5))
    for each in (*few, replace(few[1], cuts=heads), replace(result, changes=ranked, **many)):
        yield f"verdict: {each.verdict()}"
        yield from briefly(each)
    other = replace(result, by="window", roads="convolution", attends=False, answers=("yes",), provenance=OTHER)
    other = replace(other, cuts=cuts[:4], changes=result.changes[:1, :4], sources=("a",), probability=np.array([0.5]))
    other = replace(other, probabilities=cells[:1, :1, :4], logits=cells[:1, :1, 4:8])
    yield from whole(result, result.compare([result, other], LABELS), picture=True)
    yield from briefly(replace(other, roads="both"))


def patching(site: str = "state", metric: str = "normalised", **more: Any) -> Patching:
    heads = site == "head"
    values = np.stack([spread(3, 5, seed=1), spread(3, 5, low=-2, high=2, seed=2)], axis=-1)
    attributed = np.empty((0, 5)) if heads else spread(2, 5, low=-1, high=1, seed=3)
    given = dict(
        provenance=ABOUT,
        **dict(clean=(" good", " a", " film", "x" * 50, "\n"), corrupted=(" bad", " a", " filming", "x" * 50, "\n")),
        **dict(site=site, direction="denoise", metric=metric, positions=(0, 1, 2, 3, 4), answer="y" * 25),
        **dict(contrast="no\n" + "n" * 18, base=np.array([0.5, -1.25]), other=np.array([0.9, 1.5]), values=values),
        **dict(attributed=attributed, agreement=(0.875, -0.5)),
    )
    return Patching(**{**given, **more})


def patches() -> Iterator[str]:
    by_metric = [patching(metric=metric) for metric in METRICS]
    yield from whole(
        by_metric[0],
        by_metric[0].compare([*by_metric, patching("head")], [(m,) for m in (*METRICS, "h")]),
        picture=True,
    )
    yield from whole(replace(by_metric[1], direction="noise"))
    yield from briefly(by_metric[2])
    damaged = by_metric[1].values.copy()
    damaged[0, 1], damaged[1, 3, 1] = NAN, by_metric[1].base[1]
    yield from briefly(replace(by_metric[1], values=damaged))


def patched_heads_and_approximations() -> Iterator[str]:
    values = patching("head").values
    values[:, 0, 1] = (-1.0, -1.0, 1.0)
    yield from whole(patching("head", values=values))
    values = patching().values.copy()
    values[..., 0], values[-1] = NAN, NAN
    yield from whole(patching("residual", "difference", values=values))
    yield from whole(
        patching("output", values=np.abs(values) * -1, positions=(1, 0, 3, 2, 4), attributed=np.empty((0, 5)))
    )
    yield f"approximated: {patching().approximated().tolist()} {patching(metric='difference').approximated().tolist()}"


def steering(**more: Any) -> Steering:
    made = Drawn(3)
    given = dict(
        **dict(
            provenance=ABOUT, site="state", layer=3, strengths=(-2.5, 0.0, 1.0, 4.0), answers=("yes", "no\n", "yes")
        ),
        **dict(norm=1.23456, direction=(np.ones(3),), classifies=True),
        **dict(probability=np.stack([made.ends(4), made.ends(4), made.ends(4, low=-1)])),
        **dict(by_direction=spread(4, 4), costs=made.ends(3, 4, 3)),
    )
    return Steering(**{**given, **more})


def steered() -> Iterator[str]:
    result = steering()
    result.probability[2, :, 0] = (0.1, -0.6, 0.2, 0.3)
    small = np.abs(result.probability) * 0.009
    without = steering(
        **dict(site="residual", answers=("no\n" + "x" * 20,), costs=np.empty((3, 4, 0, 3)), classifies=False),
        **dict(strengths=(-2.5, -0.5, 1.0, 4.0), probability=small, by_direction=spread(2, 4)),
    )
    yield from whole(result, result.compare([result, without], LABELS), picture=True)
    yield from whole(without)
    few = replace(without, answers=("yes", "no"), probability=result.probability * [[[0.009]], [[1.0]], [[1.0]]])
    yield from briefly(few)
    yield from briefly(replace(without, classifies=False, costs=result.costs))


def sanity() -> Iterator[str]:
    made = Drawn(4)
    given = dict(methods=("ig", "lrp"), parts=("trained", "head", "layer 1", "layer 0"), texts=1)
    values = spread(2, 4, 3, 2, low=-1, seed=1)
    values[0, 1, 2] = NAN
    yield from whole(SanityCheck(ABOUT, **given, values=values, estimates=made.ends(2, 4, 2, low=-1)), picture=True)


def plausibility() -> Iterator[str]:
    made = Drawn(5)
    given = dict(methods=("ig", "lrp", "survival"), texts=(2, 5, 7, 8), share=0.2345, chance=0.34567, left_out=1200)
    result = Plausibility(ABOUT, values=spread(3, 4, 3), estimates=made.estimates(9), top=0.155, **given)
    counted = replace(result, top=4, left_out=0, estimates=made.estimates(9), provenance=OTHER)
    yield from whole(result, result.compare([result, counted], LABELS))
    yield from briefly(counted)


def fidelity(seed: int, *more_measures: str, data: str = "sst2", model: str = "own", **more: Any) -> Fidelity:
    made, methods = Drawn(seed), more.pop("methods", ("ig", "lrp", "survival"))
    measures = ("delta", "morf", "lerf", "comprehensiveness", "sufficiency", *more_measures)
    rows = len(methods) + 1
    about = {"model": model, "data": {"name": data, "split": "test", "examples": 4}}
    about |= {"options": {"mode": "replace", "replacement": "mean"}}
    values = spread(rows - 1, 4, len(measures), seed=seed)
    values[:, 1, -1] = NAN
    random = spread(4, len(measures), seed=seed + 1)
    random[1, -1] = NAN
    given = dict(
        **dict(methods=methods, measures=measures, value="probability", texts=np.array([3, 5, 8, 9])),
        **dict(predicted=np.array([0, 2, 1, 2]), clean=spread(4, seed=9), values=values, random=random),
        **dict(rankings=spread(5, len(measures), seed=8), estimates=made.ends(rows, len(measures), low=-0.3)),
        **dict(paired=made.ends(rows * (rows - 1) // 2, len(measures), low=-1), shares=np.array([0.0, 0.1, 0.5])),
        **dict(curve=made.ends(rows, 2, 3), marked=0.25, notes=("a note",)),
    )
    return Fidelity(about, **{**given, **more})


def fidelities() -> Iterator[str]:
    result, other = fidelity(1, "knockout", "knockout-0", "knockout-3", "auprc"), fidelity(2, "token_f1", model="other")
    compared = result.compare([result, other], LABELS)
    yield from whole(result, compared, result.curves(), result.differences(), picture=True)
    for style in ("markdown", "latex", "csv"):
        yield result.table(style=style)


def fidelity_in_words() -> Iterator[str]:
    for seed in range(3, 8):
        methods = ("ig", "lrp", "a", "b", "c")[: seed - 2]
        deleted = (
            {"mode": "delete", "replacement": "zero"} if seed % 2 else {"mode": "replace", "replacement": "[MASK]"}
        )
        result = fidelity(seed, methods=methods, notes=())
        clear = result.paired.copy()
        clear[:, 0] = [0.5, 0.1 * (seed - 4), 0.9]
        result = replace(result, provenance={**result.provenance, "options": deleted}, paired=clear, value="logit")
        yield from briefly(result)
    for filled in ("zero", "pad"):
        about = {**result.provenance, "options": {"mode": "replace", "replacement": filled}}
        yield from briefly(replace(result, provenance=about, paired=-clear))


def fidelity_tables() -> Iterator[str]:
    one, two = fidelity(1), fidelity(2, data="imdb")
    for result in (one, two):
        result.estimates[-1] = result.estimates[0] = result.estimates[:, :1].max(0) + (0.0, -0.1, 0.1)
    other = fidelity(3, model="other", methods=("lrp", "lime"))
    fewer = fidelity(4, model="other", methods=("a", "lrp"), data="imdb")
    for results in ([one], [one, two], [one, two, other], [other, one], [other, fewer]):
        for measure in ("delta", "morf"):
            for style in ("markdown", "csv", "latex"):
                yield fidelity_table(results, measure=measure, style=style)


def differences_of_fidelity() -> Iterator[str]:
    result = fidelity(4)
    for first in result.rows:
        for other in result.rows:
            yield f"{first} − {other}: {result.difference(first, other, 'morf')!r}"
    estimates = result.estimates.copy()
    estimates[1:3, :, 0] = estimates[0, :, 0]
    alike = replace(result, estimates=estimates)
    yield f"{alike.best('delta')} {alike.verdict()}"
    for methods in (("ig",), ("ig", "lrp")):
        few = fidelity(5, methods=methods)
        apart = replace(few, paired=np.abs(few.paired))
        yield f"{apart.headline}; {replace(few, paired=-apart.paired).headline}"
    yield f"{result.best('delta')} {result.best('morf')} {result.estimate('random', 'lerf')}"


CASES: dict[str, Callable[[], Iterator[str]]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        effect_by_layer, effect_of_an_insertion, effect_of_a_removal, effects_of_two_models, effect_on_many_layers,
    )
    + (effect_without_a_difference_inside, ablation, knockout, patches)
    + (patched_heads_and_approximations, steered, sanity, plausibility, fidelities, fidelity_in_words)
    + (fidelity_tables, differences_of_fidelity)
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_shown(name: str) -> None:
    check(name, CASES[name]())


@pytest.mark.parametrize("width", [ONE_COLUMN, TEXT_WIDTH])
@pytest.mark.parametrize(("case", "at"), [(fidelities, 0), (knockout, 3)])
def test_figures_fit_a_column(case: Callable[[], Iterator[str]], at: int, width: float) -> None:
    assert_fits(results_of(case)[at], width)
