"""Everything that views show of hand-made explanations and attention."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import attended
import numpy as np
import pytest
import torch
from described import briefly, check, described, of_figure, spread, whole
from ssmscope.errors import InputError
from ssmscope.interp.attention import figure as attention_figure
from ssmscope.interp.explain.result import Explanation
from ssmscope.interp.explain.scored_text import Attribution, ExplainedText, Scores, kind_of
from ssmscope.interp.methods import METHODS
from ssmscope.interp.paired import Paired

NAN = math.nan
ABOUT = {"model": "own", "data": {"name": "sst2", "split": "test", "examples": 1234}}
OTHER = {**ABOUT, "model": "other"}
TOKENS = ("[CLS]", " A", " won", "der", " film", ",", " but", " very", " long", ".", " ", "[SEP]")
WORDS = (None, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, None)
LABELS = [("x",), ("y",)]


def refused(call: Callable[..., Any], **given: Any) -> str:
    with pytest.raises(InputError) as error:
        call(**given)
    return f"{given}: {error.value}"


def attribution(name: str, seed: int, **more: Any) -> Attribution:
    scores = spread(len(TOKENS), low=-1.2, high=1, seed=seed).astype(np.float32)
    given = dict(delta=None, steps=None, converged=None, kind=kind_of(METHODS[name] if name in METHODS else None))
    return Attribution(name, scores, **{**given, **more})


def explained(*made: Attribution, **more: Any) -> ExplainedText:
    return ExplainedText(TOKENS, WORDS, "yes", 0.75, "yes − no", 1.23456, made, **more)


def explanation(*texts: ExplainedText, top: int = 3, **more: Any) -> Explanation:
    methods = tuple(dict.fromkeys(each.method for text in texts for each in text.attributions))
    return Explanation(texts=texts, methods=methods, top=top, provenance=more or ABOUT)


def explanations() -> Iterator[str]:
    nothing = replace(attribution("lrp", 0), scores=np.zeros(len(TOKENS), np.float32), baseline="zero", note="a note")
    made = (
        attribution("ig", 1, delta=0.25, steps=64, converged=False, baseline="the mean embedding"),
        attribution("survival", 2, delta=0.25),
        nothing,
        attribution("shap", 3, converged=False, error=0.125, steps=200),
        replace(attribution("lrp", 8), scores=np.arange(12, dtype=np.float32) - 4),
        attribution("lime", 4, converged=False, error=math.inf, delta=4.0),
    )
    second = explained(
        attribution("ig", 5, delta=12.4, steps=16, converged=False, baseline="the mean embedding"),
        attribution("lrp", 6, delta=0.001, converged=True, steps=0),
    )
    ordinary = tuple(at for at, _ in enumerate(TOKENS))
    third = replace(second, words=ordinary, target="x" * 60, value=-0.000123456)
    result = explanation(explained(*made), second, third)
    yield from whole(result, result.compare([result], [("z",)]), result.summary(), result.highest())


def one_explanation() -> Iterator[str]:
    result = explanation(explained(attribution("ig", 7, delta=0.5, converged=True)), top=9)
    yield from whole(result, result.highest(2))
    few = replace(attribution("ig", 8), scores=np.array([0.5, -0.25, 0.125, 0.75], "f4"))
    short = ExplainedText(TOKENS[:4], (None, 0, 1, 1), "yes", NAN, "t", 0.5, (few,))
    yield from whole(explanation(short))
    yield from briefly(explanation(replace(short, words=(None, None, None, 0))))
    yield from briefly(explanation(replace(explained(attribution("ig", 9)), words=(None,) * 11 + (0,))))


def explained_images() -> Iterator[str]:
    pixels = spread(2, 6, 3, seed=1).astype(np.float32)
    one = explained(attribution("survival", 9), attribution("ig", 10), pixels=pixels)
    yield from whole(explanation(one))
    yield from briefly(explanation(one, explained(attribution("ig", 11))))


def explanations_of_two_models() -> Iterator[str]:
    first = explanation(explained(attribution("ig", 11), attribution("survival", 12)))
    other = explanation(explained(attribution("survival", 13), attribution("lrp", 14)), **OTHER)
    yield from whole(Paired({"model": "own, other"}, (first, other)))
    yield from whole(Paired({"model": "own, own"}, (first, first)))
    limits = [np.array(scores, "f4") for scores in ([9.0, 10.0, 3.0, 2.0], [8.0, 10.0, 2.0, 2.5])]
    own = [
        ExplainedText(TOKENS[:4], WORDS[:4], "y", 0.5, "y", 0.5, (replace(attribution("ig", 1), scores=each),))
        for each in limits
    ]
    yield from briefly(Paired({"model": "own, own"}, tuple(map(explanation, own))))
    nothing = replace(attribution("lrp", 1), scores=np.zeros(len(TOKENS), np.float32))
    yield from briefly(Paired({"model": "own, own"}, (explanation(explained(nothing)),) * 2))
    alone = [explanation(explained(attribution(name, 15))) for name in ("ig", "lrp")]
    yield from briefly(Paired({"model": "own, own"}, tuple(alone)))
    tokens = (" a", "won", "der", " FILM", ",", " but", " very", " long", ".", " ", "</s>")
    parts = ExplainedText(tokens, (*range(10), None), "no", 0.25, "no", 0.5, ())
    for size in (0.1, -0.1):
        scores = (size * np.arange(1, 12)).astype("f4")
        own = replace(parts, attributions=(replace(attribution("ig", 16), scores=scores),))
        short = replace(attribution("ig", 17), scores=(size * np.arange(12, 0, -1)).astype("f4"))
        yield from briefly(Paired({"model": "own, b"}, (explanation(explained(short)), explanation(own, model="b"))))
    yield refused(Paired({}, (first, explanation(replace(own, tokens=(*tokens[:-2], "x", "</s>"))))).rows)
    yield refused(Paired({}, (explanation(replace(own, pixels=np.ones((2, 5, 1)))), first)).rows)


def attention_of_texts() -> Iterator[str]:
    whole_maps = attended.make_text(9, maps=3, span=(2, 5), sink=True)
    softmax = attended.make_map(9, np.arange(9), None, seed=7, layer="12 attention")
    part = attended.make_map(9, np.arange(9), None, seed=8, layer="1", part="kept\t", head="3")
    whole_maps = replace(whole_maps, maps=(*whole_maps.maps, softmax, part))
    result = attended.make(whole_maps, attended.make_text(6, maps=1, span=(1, 2)), heads="abs")
    other = attended.make(attended.make_text(5, maps=2, span=(1, 3)), model="b")
    yield from whole(result, result.compare([result, other], LABELS), result.summary(), picture=True)
    yield attended.make(*(attended.make_text(length, maps=1) for length in range(4, 11))).headline


def attention_of_queries() -> Iterator[str]:
    rows = attended.make_text(9, maps=2, rows=[3, 8], span=(2, 5))
    alone = attended.make_text(7, maps=1, rows=[6], sink=True, head="5")
    result = attended.make(rows, alone, attended.make_text(4), heads="all", level="ssm")
    yield from whole(result, result.compare([result], [("x",)]), picture=True)
    yield from whole(attended.make(alone, heads="all", level="gradient"))
    softmax = attended.make_map(7, np.array([6]), None, seed=7, layer="12 attention")
    yield from briefly(attended.make(replace(alone, maps=(softmax,)), level="gradient"))
    yield from described([result.token_rows(), attended.make(alone).token_rows()])
    none = attended.make_text(5, maps=0)
    some = (attended.make_text(7, rows=[3]), none), (none, attended.make_text(7, rows=[6]))
    yield from described([attended.make(*texts).token_rows() for texts in some])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssmscope.interp.attention.triangles.DOTS_PER_INCH", 3)  # two of nine weights share a dot
        yield next(of_figure(attended.make(attended.make_text(9)).figure()))
        patch.setattr(attention_figure, "MAPS_PER_FIGURE", 3)
        yield from of_figure(attended.make(rows).figure())
        yield next(of_figure(attended.make(attended.make_text(4, maps=4)).figure()))
    yield from briefly(attended.make(attended.make_text(7, rows=[3]), none))
    yield from briefly(attended.make(attended.make_text(7, rows=[6]), none))
    yield from briefly(attended.make(attended.make_text(7, rows=[3]), attended.make_text(7, rows=[6])))
    for room in (1, 2, 3, 4):
        yield f"{[attention_figure._shown(text, room).about for text in (rows, alone, attended.make_text(5, maps=3))]}"


def pooled_attention() -> Iterator[str]:
    cells = attended.make_text(11, maps=2, cells=4, sink=True, head="0–95")
    result = attended.make(cells, attended.make_text(8, maps=1, cells=3, layer="rollout"))
    yield from whole(result, picture=True)


def attention_both_ways() -> Iterator[str]:
    one = replace(attended.make_text(6, maps=2), bidirectional=True)
    unknown = [replace(each, readouts=replace(each.readouts, distance=NAN)) for each in one.maps]
    one = replace(one, maps=tuple(unknown))
    yield from whole(attended.make(one))
    yield from briefly(attended.make(replace(one, bidirectional=False)))
    yield from briefly(attended.make(one, attended.make_text(5)))


def attention_without_maps() -> Iterator[str]:
    yield from whole(attended.make(attended.make_text(5, maps=0), level="gradient"), picture=True)
    yield from whole(attended.make(), picture=True)
    hostile = attended.make_text(tokens=("<s>", *attended.HOSTILE), sink=True)
    hostile.maps[0].values[-1, 3:] = 0
    yield from (line for line in briefly(attended.make(hostile)) if line.startswith("0 |"))
    yield from described([attended.make(hostile).token_rows()])
    none = attended.make_text(5, maps=1)
    empty = replace(none.maps[0], values=np.zeros((0, 5), np.float32))
    yield from whole(attended.make(replace(none, maps=(empty,), queries=np.zeros(0, np.int64))))


def attention_of_images() -> Iterator[str]:
    tokens = tuple(str(at) for at in range(20)) + ("[CLS]",)
    one = attended.make_text(tokens=tokens, maps=2, rows=[4, 20], pixels=attended.IMAGE)
    yield from whole(attended.make(one, heads="mean"), picture=True)
    yield from described([attended.make(one).token_rows()])


def attention_of_two_models() -> Iterator[str]:
    first = attended.make(attended.make_text(9, maps=2, sink=True), model="a")
    first[0].maps[1].values[:, 0] *= 100
    other = attended.make(attended.make_text(9, maps=2, rows=[8]), model="b")
    yield from whole(Paired({"model": "a, b"}, (first, other)))
    apart = attended.make(attended.make_text(9, rows=[8], layer="7"), model="a")
    alone = attended.make(attended.make_text(9, rows=[8]), model="b")
    yield from briefly(Paired({"model": "a, b"}, (apart, alone)))
    pooled = attended.make(attended.make_text(9, cells=4, layer="7"), model="a")
    yield from briefly(Paired({"model": "a, b"}, (pooled, alone)))
    tokens = ("<s>", " I", " we", "nt", " into", " THIS", " film", " exp", "ecting")
    split = replace(alone[0], tokens=tokens, words=(None, 0, 1, 1, 2, 3, 4, 5, 5))
    joined = replace(attended.make_text(7, maps=2, rows=[6]))
    yield from briefly(Paired({"model": "a, b"}, (attended.make(joined), replace(alone, texts=(split,)))))
    yield refused(Paired({}, (first, replace(alone, texts=(replace(split, queries=np.array([7])),)))).rows)


def what_is_not_there() -> Iterator[str]:
    text = attended.make_text(3, maps=0)
    assert text.whole and not attended.make_text(3, maps=0, cells=1).whole and not attended.make_text(3, rows=[2]).whole
    for count in (0, 8, 9):
        maps = [
            attended.make_map(3, text.queries, None, seed=at, layer=str(at), head=f"h{at % 2}") for at in range(count)
        ]
        result = attended.make(replace(text, maps=tuple(maps)), replace(text, maps=tuple(maps[::-1])))
        for given in ({"layer": "x"}, {"layer": 0, "head": "h1"}, {"part": "kept"}, {"text": 2}, {"text": -3}):
            yield refused(result.map, **given)
    assert result.map(-1, layer=8) is maps[8].values and result.map(-2, head="h1") is maps[1].values
    assert result.map(1) is maps[8].values and result.map(0) is maps[0].values
    explained_twice = explanation(
        explained(attribution("ig", 1)), explained(attribution("lrp", 2), attribution("ig", 3))
    )
    first, second = explained_twice.texts
    assert explained_twice.attribution() is first.attributions[0]
    assert explained_twice.attribution(-1, "ig") is second.attributions[1]
    assert (
        explained_twice.attribution(-2) is first.attributions[0]
        and explained_twice.attribution(1) is second.attributions[0]
    )
    for given in ({"text": 2}, {"text": -3}, {"method": "lrp"}, {"text": 1, "method": "igg"}):
        yield refused(explained_twice.attribution, **given)
    scores = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, math.nan]])
    found = Scores(scores, delta=torch.tensor([0.5, 0.25]), steps=torch.tensor([7, 8]), baseline="zero", note="n")
    yield f"{Attribution.of('ig', found, 1, 2)} {Attribution.of('ig', Scores(scores), 0, 3)}"
    yield refused(Attribution.of, name="ig", found=Scores(scores), row=1, length=3)


CASES: dict[str, Callable[[], Iterator[str]]] = {
    case.__name__.replace("_", "-"): case
    for case in (explanations, one_explanation, explained_images, explanations_of_two_models, attention_of_texts)
    + (attention_of_queries, pooled_attention, attention_both_ways, attention_without_maps)
    + (attention_of_images, attention_of_two_models, what_is_not_there)
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_shown(name: str) -> None:
    check(name, CASES[name]())
