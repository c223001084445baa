"""Everything that views show of hand-made heatmaps, and of pairs of them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from described import Drawn, briefly, check, described, in_lines, spread, whole
from ssmscope.core.bootstrap import Estimate
from ssmscope.interp.heatmap.result import DataHeatmap, KeptGroup, KeptLayer
from ssmscope.interp.heatmap.scored_text import ScoredText
from ssmscope.interp.heatmap.text_result import Head, SelectionHeatmap, rows
from ssmscope.interp.heatmap.words import KeptWord
from ssmscope.interp.paired import Paired

TOKENS = ("[CLS]", " A", " won", "der", "ful", " film", ",", " but", " long", " ", ".")
WORDS = (None, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7)
INFINITE = math.inf


def text(layers: int, seed: int, *, signed: bool = False, **more: Any) -> ScoredText:
    """A text whose special token has the largest score of all."""
    low, high = (-2.5, 2.0) if signed else (0.0, 0.16)
    scores = spread(layers, len(TOKENS), low=low, high=high, seed=seed)
    scores[:, 0] = 3.0 + np.arange(layers)
    given = dict(rationale=(2, 5, 8), answer="positive", probability=0.8765)
    scores = scores.astype(np.float32)
    return ScoredText(TOKENS, WORDS, scores, scores.mean(0), **{**given, **more})


def heatmap(*texts: ScoredText, **more: Any) -> SelectionHeatmap:
    layers = tuple(range(1, 1 + len(texts[0].scores)))
    given = dict(provenance={"model": "own", "options": {}}, score="survival", layers=layers, size=3, by_layer=True)
    return SelectionHeatmap(texts=texts, **{**given, **more})


def lives(layers: int, *medians: float) -> np.ndarray:
    found = np.array([[value] * len(TOKENS) for value in medians], np.float32)
    found[:, :4] = spread(layers, 4, low=1, high=99, seed=5)
    found[:, 0] = 0.5
    return found


def shown_by_layer() -> Iterator[str]:
    heads = spread(2, len(TOKENS), high=0.4, seed=9).astype(np.float32)
    first = text(
        3, 1, half_lives=lives(3, 7, 40, INFINITE), flat=(False, True, False, False), standing=((), (5, 2), (8,)),
        heads=heads,
    )  # fmt: skip
    second = replace(text(3, 2, rationale=(7,), answer="neg\native", probability=0.5), tokens=TOKENS)
    result = heatmap(
        first, second, layers=(0, 2, 3), reach=3, heads=(Head(2, 5, 0.7512), Head(0, 11, 0.25)), attends=True
    )
    other = heatmap(text(1, 3), layers=(4,), provenance={"model": "other"})
    yield from whole(result, result.compare([result, other], [("x",), ("y",)]), result.top(2), picture=True)
    yield from described([rows(result, every=False), rows(replace(result, contrast="sst2"), every=False)])
    yield f"{replace(result, texts=()).verdict()}"
    for medians in ((4, 4), (4, 5), (4, 5, 6), (4, 5, 6, 7), (4, 4, 4, 4)):
        one = text(len(medians), 1, half_lives=lives(len(medians), *medians))
        yield f"{heatmap(one).verdict()}"


def at_a_position() -> Iterator[str]:
    one = text(1, 4, half_lives=lives(1, 3.4), heads=spread(1, len(TOKENS), seed=8).astype(np.float32))
    at = 2 + int(one.mean[2:].argmax())  # the highest of all is the last that is seen
    return whole(heatmap(one, at=at, layers=(5,), shared=False, heads=(Head(5, 0, 1.25),), by_layer=False))


def z_scores() -> Iterator[str]:
    made = [text(2, seed, signed=True, rationale=(8, 2), standing=((2,), (8, 5))) for seed in (5, 6)]
    return whole(heatmap(*made, contrast="sst2", by_layer=False, reach=2))


def z_scores_on_their_own_scales() -> Iterator[str]:
    flat = text(2, 7, signed=True, flat=(True, False, True))
    return whole(heatmap(flat, contrast="sst2", score="retention", shared=False))


def retention_of_many() -> Iterator[str]:
    made = [text(2, seed, rationale=(seed - 3,) if seed % 2 else ()) for seed in range(5, 10)]
    made[1] = replace(made[1], flat=(True, True, False), standing=((), (3, 2)))
    result = heatmap(*made, score="retention", layers=(0, 1), by_layer=False)
    yield from whole(result, result.compare([result], [("x",)]))
    yield from (replace(result, texts=result.texts[:count]).verdict() for count in (2, 3, 4))


def nothing_stands_out() -> Iterator[str]:
    yield from briefly(heatmap(text(2, 11, rationale=(), flat=(True, False, False)), score="write", reach=40))
    yield from briefly(heatmap(text(2, 12, rationale=()), through=True))
    yield from briefly(heatmap(text(2, 12, rationale=(), flat=(False, False, True), standing=((), ()))))
    special = replace(text(2, 12, rationale=()), words=(None,) * len(TOKENS))
    yield from briefly(heatmap(special))
    yield from briefly(heatmap(replace(special, flat=(True, False, True))))


def lifts() -> Iterator[str]:
    made = [replace(text(2, seed), scores=10 ** (1.2 * text(2, seed, signed=True).scores)) for seed in (15, 16)]
    made[1].scores[1, 4] = 10.0
    for texts in (made, made[1:]):
        yield from briefly(heatmap(*texts, score="lift"))
    yield from in_lines(heatmap(*made, at=4).lifts(2))


def many_words() -> Iterator[str]:
    tokens = tuple(f" word{at}" + "x" * 22 for at in range(10))
    scores = spread(1, 10, high=0.5, seed=3).astype(np.float32)
    one = ScoredText(tokens, tuple(range(10)), scores, scores[0], tuple(range(9, 0, -1)), "yes", math.nan)
    one = replace(one, heads=scores[::-1])
    return whole(heatmap(one, layers=(7,), heads=(Head(7, 1, 0.5),)))


def images() -> Iterator[str]:
    pixels = spread(2, 5, 1, seed=2).astype(np.float32)
    one = replace(text(2, 13, rationale=()), pixels=pixels, flat=(True, False, True))
    yield from whole(heatmap(one, reach=4, score="retention"))
    yield from whole(heatmap(replace(one, flat=()), replace(one, flat=(False, True, False))))
    yield from briefly(heatmap(one, text(2, 14)))


def over_data(seed: int, *, words: int = 20, **more: Any) -> DataHeatmap:
    made, found = Drawn(seed), []
    for at in range(words):
        value = round(4 - 0.2 * at + 0.07 * seed * (at % 3), 4)
        kept = Estimate(value, value - 0.5 * ((at + 1) % 3), value + 0.4 * ((at + 1) % 3))
        found.append(KeptWord(f"word{(3 * at) % 23} \n"[: 5 + 3 * (at % 3)] + str(at), 1000 + at, 2000 + 7 * at, kept))
    names = ("all", "class a\tb", "answered right", "answered wrong")
    groups = tuple(
        KeptGroup(name, 3000 - 100 * at, *made.estimates(4), tuple(f"w{at}{n}" for n in range(4 * (at % 2))))
        for at, name in enumerate(names)
    )
    layers = tuple(
        KeptLayer(
            at, life, spread(heads, low=1, high=300, seed=at), ("h i", "j", "k", "l")[: at + 1], made.estimates(3)
        )
        for at, life, heads in ((0, 12.4, 23), (2, INFINITE, 4), (3, 7.6, 0))
    )
    example = heatmap(text(2, 3), text(2, 4, rationale=()))
    given = dict(
        provenance={"model": f"own {seed}", "data": {"name": "sst2", "split": "test", "examples": 4321}},
        **dict(score="survival", layers=(0, 2, 3), texts=4321, words=tuple(found), least=5, named=12345),
        **dict(groups=groups, tenths=made.estimates(3), by_layer=layers, timed=64, examples=(example,)),
        **dict(picked=("the longest", "the shortest"), notes=("A note.", "Another.")),
    )
    return DataHeatmap(**{**given, **more})


def of_data() -> Iterator[str]:
    first, other = over_data(1), over_data(2, words=17)
    yield from whole(first, first.compare([first, other], [("x",), ("y",)]), picture=True)


def of_few_words() -> Iterator[str]:
    layers = over_data(1).by_layer
    lives = (INFINITE, 3.0, math.nan, 5.0, 8.0, 300.0)
    for words, known in ((0, 4), (1, 5), (3, 6)):
        by_layer = tuple(replace(layers[0], number=at, half_life=life) for at, life in enumerate(lives[:known]))
        few = over_data(3, words=words, by_layer=by_layer, timed=0, examples=(), score="write", notes=())
        yield from briefly(few)
    unknown = over_data(3, words=3, by_layer=(replace(layers[0], half_life=math.nan),))
    yield f"{unknown.verdict()}"


def pair(*results: Any) -> Paired:
    name = ", ".join(result.model_name for result in results)
    return Paired({"model": name}, tuple(results))


def of_two_models() -> Iterator[str]:
    heads = spread(1, len(TOKENS), high=0.3, seed=4).astype(np.float32)
    first = heatmap(text(2, 21, heads=heads), text(2, 22), heads=(Head(2, 1, 0.5),))
    other = heatmap(
        *(text(3, seed, answer="negative", probability=0.25 * seed - 5.5) for seed in (23, 24)),
        provenance={"model": "other"},
    )
    yield from whole(pair(first, other))
    yield from whole(pair(first, replace(other, layers=(4, 5, 6), by_layer=False, provenance={"model": "own"})))


def of_two_tokenizers() -> Iterator[str]:
    parts = ("a", "won", "##d", "erful", "FI", "lm", ",", "", "but", "long", ".", "[SEP]")
    words = (0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 7, None)
    parts = tuple(part.removeprefix("##") for part in parts)
    scores = spread(2, len(parts), high=0.3, seed=25).astype(np.float32)
    flat = (False, True, False)
    apart = ScoredText(
        parts, words, scores, scores.mean(0), (1, 4), "negative", 0.625, flat=flat, standing=((9,), (4,))
    )
    other = heatmap(apart, provenance={"model": "other"})
    yield from whole(pair(heatmap(text(2, 26)), other))
    yield from briefly(pair(other, heatmap(text(2, 27))))
    signed = heatmap(text(2, 28, signed=True), contrast="sst2")
    scores = spread(2, len(parts), low=-4, high=2, seed=29).astype(np.float32)
    apart = replace(apart, scores=scores, mean=scores.mean(0), flat=())
    yield from whole(pair(signed, replace(other, texts=(apart,), contrast="sst2")))
    kept = [replace(each, score="retention", at=None) for each in (heatmap(text(2, 26)), other)]
    yield from briefly(pair(*kept))
    yield from briefly(pair(*(replace(each, at=6) for each in (heatmap(text(2, 26)), heatmap(text(2, 29))))))


def of_parts_of_two_models() -> Iterator[str]:
    """Places in the middle of a word, and words whose ends are many."""
    first, other = heatmap(text(2, 26), at=3), heatmap(text(2, 29))
    yield from briefly(pair(first, other))
    yield from briefly(pair(heatmap(text(2, 26), by_layer=False), other))
    long = [f" {'abcdefghij'[at:]}{at}" for at in range(10)] * 2
    halves = tuple(part for word in long for part in (word[: len(word) // 2], word[len(word) // 2 :]))
    scores = [spread(1, size, seed=size).astype(np.float32) for size in (20, 40)]
    words = ScoredText(tuple(long), tuple(range(20)), scores[0], scores[0][0], (3,), "yes", 0.5)
    split = ScoredText(halves, tuple(at // 2 for at in range(40)), scores[1], scores[1][0], (4,), "yes", 0.5)
    yield from briefly(pair(heatmap(words), heatmap(split)))
    apart = replace(split, words=tuple(range(40)))
    at = replace(heatmap(apart), at=22)
    yield from briefly(pair(at, replace(heatmap(words), at=11)))


def of_images_of_two_models() -> Iterator[str]:
    pixels = spread(2, 5, 3, seed=2).astype(np.float32)
    made = (heatmap(replace(text(2, seed), pixels=pixels), provenance={"model": str(seed)}) for seed in (1, 2))
    return whole(pair(*made))


def of_data_of_two_models() -> Iterator[str]:
    same = KeptWord("same", 3, 4, Estimate(1.0, 1.0, 1.0))
    made = over_data(1, examples=()), over_data(2, words=17, notes=(), timed=0)
    return whole(pair(*(replace(each, words=(*each.words, same)) for each in made)), picture=True)


CASES: dict[str, Callable[[], Iterator[str]]] = {
    f"heatmap-{case.__name__.replace('_', '-')}": case
    for case in (shown_by_layer, at_a_position, z_scores, z_scores_on_their_own_scales, retention_of_many)
    + (nothing_stands_out, lifts, many_words, images, of_data, of_few_words, of_two_models, of_two_tokenizers)
    + (of_parts_of_two_models, of_images_of_two_models, of_data_of_two_models)
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_shown(name: str) -> None:
    check(name, CASES[name]())
