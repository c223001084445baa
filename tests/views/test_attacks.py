"""Everything that views show of hand-made attacks."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from described import Drawn, briefly, check, of_figure, results_of, spread, whole
from drawn import drawn, outside, overlapping
from ssmscope.attacks.insertion.result import InsertionCurve, InsertionSweep, Place
from ssmscope.attacks.overflow.result import Filled, OverflowCurve, StateOverflow
from ssmscope.attacks.poisoning.result import NAMES, Alarm, Poisoned, StatePoisoning, Victim
from ssmscope.attacks.poisoning.result import Cost as SearchCost
from ssmscope.attacks.position.result import Attacked, PositionBias
from ssmscope.attacks.prompts.result import AttackedPrompt, Cost, PromptAttack, PromptAttacker, notes_on
from ssmscope.attacks.words.result import AttackedText, Outcome, WordAttack, changed_words, measure
from ssmscope.core.bootstrap import Estimate

NAN = math.nan
UNKNOWN = Estimate(NAN, NAN, NAN)
ABOUT = {"model": "own", "data": {"name": "sst2", "split": "test", "examples": 1234}, "options": {}}
OTHER = {**ABOUT, "model": "other"}
LABELS = [("x",), ("y",), ("z",)]


def prompts(seed: int = 1, **more: Any) -> PromptAttack:
    made = Drawn(seed)
    templates = ("Is it good?\nText: {content}", "A <b>bad</b> one: {content}", "Never right {content}")
    kinds = ("stresstest", "deepwordbug", "semantic", "checklist")
    attacks = []
    for row, name in enumerate(kinds):
        found = [
            AttackedPrompt(templates[0].replace("good", "g<ood"), made.estimate(), made.estimate(), 1200 + row),
            AttackedPrompt(
                templates[1] if name == "checklist" else "odd\n& so", made.estimate(), made.estimate(), 7 + row
            ),
            AttackedPrompt(None, UNKNOWN, UNKNOWN, 0),
        ]
        left_out = ("a part: it needs a file", "another") if row == 1 else ()
        worst = {0: 0, 1: 1, 2: 1, 3: 1}[row]
        ran = ("a part", f"part {row}")
        attacks.append(PromptAttacker(name, tuple(found), made.estimate(), made.estimate(), worst, ran, left_out))
    given = dict(
        provenance=ABOUT,
        **dict(templates=templates, clean=made.estimates(3), average_clean=made.estimate(), attacks=tuple(attacks)),
        **dict(worst=(2, 0), cost=Cost(12345, 2345, 1234.56), notes=("a note", "another")),
    )
    return PromptAttack(**{**given, **more})


def prompt_attacks() -> Iterator[str]:
    result = prompts()
    alone = replace(result.attacks[1], prompts=result.attacks[1].prompts[:1], worst=0)
    one = prompts(2, templates=result.templates[:1], clean=result.clean[:1], attacks=(alone,), worst=(0,), notes=())
    one = replace(one, provenance={**OTHER, "options": {"as_promptbench": True}})
    nothing = replace(alone, drop=UNKNOWN, worst=None, accuracy=UNKNOWN)
    none = replace(one, attacks=(nothing, replace(nothing, name="checklist")), worst=(), provenance=OTHER)
    yield from whole(result, result.compare([result, one, none], LABELS), picture=True)
    alike = [replace(each, drop=Estimate(0.25, 0.125, 0.5)) for each in result.attacks[0].prompts[:2]]
    level = replace(result.attacks[0], prompts=(*alike, *result.attacks[0].prompts[2:]))
    mixed = replace(result, attacks=(result.attacks[2], replace(nothing, name="textfooler"), level), worst=(2,))
    yield from briefly(mixed)
    two = [replace(each, prompts=each.prompts[:2]) for each in result.attacks[:2]]
    two = replace(result, templates=result.templates[:2], clean=result.clean[:2], attacks=tuple(two), worst=(1,))
    yield from whole(two, two.compare([two], LABELS), picture=True)
    yield replace(mixed, attacks=mixed.attacks[1:], worst=(1,)).headline
    yield replace(mixed, attacks=mixed.attacks[::2], worst=(1,)).headline
    yield from whole(one, picture=True)
    yield from briefly(none)
    yield from of_figure(replace(one, attacks=(alone,) * 7).figure())
    for worst in ((3,), (1, 2), (0, 1, 2), (0, 1, 2, 3)):
        yield replace(result, worst=worst).headline
    yield replace(result, worst=(0, 1, 2, 3), attacks=(result.attacks[0],) * 4).headline


def notes_on_prompts() -> Iterator[str]:
    clean = np.array([[0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 0, 0]], bool)
    labels = np.array([0, 1, 1, 1])
    yield from notes_on(clean, labels, ["say Yes or no", "say yes", "no", "NO and YES"], ["yes", "No"])
    yield from notes_on(clean[3:4], labels, ["say Yes or no"], ["yes", "No"])
    yield from notes_on(clean[3:], labels, ["say nothing"], None)


TEXTS = (
    ("A <i>great</i> film, and don't miss it", "A <i>grate</i> flim, and don't miss it", 0.9, 0.25, 2),
    ("Fine work by the cast", "Fnie work by the cast", 0.8, 0.7, 0),
    ("An odd one", "An odd one", 0.3, 0.3, 1),
    ("So very dull\nand long", "Not so long\nand very dull", 0.6, 0.4, 2),
    ("One more of these films", "One more of those films", 0.7, 0.2, 0),
    ("", "", 0.55, 0.45, 1),
    ("Never again", "Ever again", 0.5, 0.1, 0),
    ("The end of it", "The dne of ti", 0.65, 0.35, 0),
)
PLACES = ("success", "failed", "skipped", "success", "success", "failed", "success", "success")


def examples(count: int = 8) -> tuple[AttackedText, ...]:
    found = []
    for row, ((text, attacked, before, after, answer), status) in enumerate(zip(TEXTS, PLACES)):
        label = answer if status == "failed" else 1
        words, changed = changed_words(text, attacked)
        ways = dict(row=10 * row, status=status, label=label, clean=2 if status == "skipped" else label, answer=answer)
        ways |= dict(before=before, after=after, queries=1 if status == "skipped" else 1000 + row, gradients=600 + row)
        found.append(AttackedText(**ways, words=words, changed=changed, text=text, attacked=attacked))
    return tuple(found[:count])


def words(*found: AttackedText, **more: Any) -> WordAttack:
    given = dict(provenance=ABOUT, recipe="deepwordbug", labels=("bad", "<good>", "so\tso"), examples=found)
    given |= dict(ran=("a part", "another"), left_out=("one: it needs a tagger", "two"))
    return WordAttack(**{**given, **measure(found, 0), **more})


def word_attacks() -> Iterator[str]:
    found = examples()
    result = words(*found)
    other = words(*examples(5), recipe="textfooler", provenance=OTHER, left_out=())
    same = words(*examples(6), provenance=OTHER)
    yield from whole(result, result.compare([result, other, same], LABELS), picture=True)
    yield from briefly(words(*[each for each in examples() if each.status == "failed"]))
    yield from whole(words(*[each for each in examples() if each.status == "skipped"]), picture=True)
    many = [replace(example, row=at) for at in range(21) for example in examples(2)]
    html = list(briefly(words(*many)))
    yield "\n".join(html[-60:])
    (*_, texts) = words(*many[:40]).blocks()
    yield f"{texts.html().count('<tr>')} {'attacked examples' in texts.html()}"
    for some in (result, other, words(*found[5:6], *found[2:3]), words(*found[1:3], *found[4:5])):
        yield f"{some.recipe} {some.curve.round(6).tolist()}"
    clean, outcome = np.array([0.2, 0.5, 0.3]), Outcome("a very dull one", np.array([0.6, 0.1, 0.3]), 12, 3)
    yield f"{AttackedText.of(4, 1, 'A dull one', clean, outcome)}"
    yield f"{AttackedText.of(4, 0, 'A dull one', clean, outcome._replace(gradients=7))}"
    yield f"{AttackedText.of(5, 2, 'A dull one', clean, None)}"
    pairs = (("a b c d", "b x d c"), ("a-b it’s", "a b it’s"), ("", "a"), ("a", ""))
    yield f"{[changed_words(before, after) for before, after in pairs]}"


def poisoning() -> Iterator[str]:
    def victim(model: str, planted: bool, seed: int) -> Victim:
        of = Drawn(seed)
        attacks = tuple(
            Poisoned(
                **dict(
                    name=name, trigger=None if name == "random" else f"{name}\n!", triggers=5 - at, value=0.125 * at
                ),
                **dict(asked=1200 + at, survival=of.estimate(), kept=of.estimate(), accuracy=of.estimate()),
                **dict(flipped=of.estimate(), planted=of.estimate() if planted else None),
                alarms=tuple(Alarm(of.estimate(), of.estimate()) for _ in range(2)),
            )
            for at, name in enumerate(NAMES)
        )
        planted_clean = of.estimate() if planted else None
        clean = (of.estimate(), of.estimate(), planted_clean, (0.5, 0.25), of.estimates(2))
        return Victim(model, *clean, attacks, beyond=of.estimate(low=-0.1) if planted else None)

    about = {**ABOUT, "options": {"objective": "forget", "detector": "norm"}}
    given = dict(detectors=("perplexity", "norm"), texts=(1, 200, 3000), vocabulary=12345)
    given |= dict(cost=SearchCost(1, 23456, 12.345), notes=("a note",))
    result = StatePoisoning(about, victims=(victim("own", True, 5), victim("b", False, 6)), **given)
    other = StatePoisoning(about, victims=(victim("c", False, 7),), **given)
    yield from whole(result, result.compare([result, other], LABELS[:2]), picture=True)
    yield from whole(other)


def overflow(seed: int, *places: str, lengths: tuple[int, ...] = (0, 100, 2000), gaps: bool = True) -> StateOverflow:
    made = Drawn(seed)
    curves = tuple(
        OverflowCurve(
            where,
            tuple(
                Filled(
                    **dict(tokens=tokens, added=tokens * 1.25, accuracy=made.estimate(), drop=made.estimate(low=-0.1)),
                    **dict(log_odds=made.estimate(-2, 2), shares=made.estimates(3), majority=made.estimate()),
                    entropy=made.estimate(0, 2),
                )
                for tokens in lengths
            ),
            (None, Estimate(100.0, 0.0, math.inf))[at],
        )
        for at, where in enumerate(places)
    )
    found = made.estimates(len(lengths), -0.5, 0.5) if gaps else ()
    given = dict(classes=("bad", "good", "so so"), chance=0.4567, clean=made.estimate(), filler=" and so on")
    return StateOverflow(ABOUT, curves=curves, gaps=found, notes=("a note",), **given)


def overflows() -> Iterator[str]:
    result, alone = overflow(1, "after", "before"), overflow(2, "before", lengths=(10, 3000), gaps=False)
    yield from whole(result, result.compare([result, alone, overflow(3, "before")], LABELS), picture=True)
    yield from whole(alone)
    known = replace(result.curves[1], half_length=Estimate(100.0, 0.0, 2000.0))
    yield from briefly(replace(result, curves=(known, replace(known, half_length=Estimate(2000.0, 100.0, 2000.0)))))


def attacked(made: Drawn, region: str, start: float, stop: float, **more: Any) -> Attacked:
    given = dict(region=region, start=start, stop=stop, percent=region.endswith("%"), examples=1200, left_out=0)
    given |= dict(accuracy=made.estimate(), clean=made.estimate(), drop=made.estimate(), flipped=made.estimate())
    return Attacked(**{**given, **more})


def position(seed: int, **more: Any) -> PositionBias:
    made = Drawn(seed)
    regions = tuple(
        attacked(made, f"{start}%:{start + 25}%", start, start + 25, success=made.estimate(), left_out=start // 25)
        for start in range(0, 100, 25)
    )
    windows = tuple(attacked(made, f"{start}:{start + 8}", start, start + 8) for start in range(0, 40, 8))
    windows = (*windows[:-1], replace(windows[-1], drop=UNKNOWN))
    given = dict(provenance=ABOUT, replacement="other", unit="tokens", length=40, width=None, clean=made.estimate())
    given |= dict(regions=regions, windows=windows, average=made.estimate(), average_drop=made.estimate())
    given |= dict(average_with_clean=made.estimate(), spread=0.12345, worst_regions=(2, 1), worst_windows=(3, 1))
    given |= dict(right=np.ones((5, 1200), dtype=np.int8))
    return PositionBias(**{**given, "notes": ("a note",), **more})


def positions() -> Iterator[str]:
    result = position(1)
    regions = tuple(replace(each, success=None, left_out=0, percent=False) for each in result.regions)
    noise = position(2, replacement="noise", regions=regions, spread=NAN, worst_regions=(0, 1, 2), worst_windows=())
    one = position(
        3, regions=regions[:1], worst_regions=(0,), windows=(), worst_windows=(), replacement="mean", notes=()
    )
    nothing = tuple(replace(each, drop=UNKNOWN) for each in regions)
    two = replace(one, regions=regions[:2], worst_regions=(1,))
    none = replace(
        noise, regions=nothing, worst_regions=(), average=Estimate(0.001234, 0.0, 0.002), average_drop=UNKNOWN
    )
    yield from whole(result, result.compare([result, noise, one], LABELS), picture=True)
    for each in (noise, one, none, replace(result, worst_windows=(0, 1, 2), worst_regions=(3,)), two):
        yield from briefly(each)
    small = replace(regions[1], accuracy=Estimate(0.001234, 0.0, 0.002), drop=Estimate(0.99, 0.9, 1.0))
    yield replace(noise, regions=(small, *nothing[:2], regions[0]), worst_regions=(0,)).headline


NUMBERS = ("accuracy", "drop", "flipped", "log_odds_change", "worst_here")


def curve(seed: int, phrase: str, odds: bool = True, **more: Any) -> InsertionCurve:
    made = Drawn(seed)
    places = tuple(
        Place(name, share, **dict(zip(NUMBERS, [*made.estimates(3), *(made.estimates(2, -1) if odds else ())])))
        for name, share in (("before the template", None), ("0 %", 0.0), ("50 %", 0.5), ("100 %", 1.0))
    )
    given = dict(phrase=phrase, places=places, hardest_places=(2,), lowest_odds=(1, 0) if odds else ())
    return InsertionCurve(**{**given, "worst": made.estimate(), "worst_drop": made.estimate(), **more})


def insertion(seed: int, *curves: InsertionCurve, odds: bool = True, **more: Any) -> InsertionSweep:
    made = Drawn(seed)
    about = {**ABOUT, "options": {"template": None}}
    given = dict(provenance=about, clean=made.estimate(), clean_log_odds=made.estimate(-1, 3) if odds else None)
    given |= dict(curves=curves, worst=made.estimate(), worst_drop=made.estimate(), notes=("a note",))
    return InsertionSweep(**{**given, **more})


def insertions() -> Iterator[str]:
    result = insertion(
        1, curve(1, "so\ngood"), curve(2, "a phrase of more than thirty-two letters", lowest_odds=(0, 1, 2))
    )
    alone = insertion(2, curve(3, "no", odds=False, hardest_places=(0, 1, 2)), odds=False, notes=())
    yield from whole(result, result.compare([result, alone], LABELS[:2]), picture=True)
    yield from whole(alone)
    many = insertion(3, *(curve(seed, f"phrase {seed}") for seed in range(4, 11)))
    yield from briefly(many)
    yield from briefly(replace(many, curves=many.curves[:6]))
    level = replace(many.curves[0].places[0], accuracy=Estimate(0.5, 0.4, 0.6))
    flat = replace(many.curves[0], places=(level,) * 4, hardest_places=(0, 1, 2, 3))
    yield insertion(5, flat).headline
    yield insertion(5, replace(many.curves[1], places=many.curves[1].places[:1], hardest_places=(0,))).headline


CASES: dict[str, Callable[[], Iterator[str]]] = {
    case.__name__.replace("_", "-"): case
    for case in (prompt_attacks, notes_on_prompts, word_attacks, poisoning, overflows, positions, insertions)
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_shown(name: str) -> None:
    check(name, CASES[name]())


def test_numbers_differ_at_every_place() -> None:
    assert len({*spread(5, 4).ravel().tolist()}) == 20


@pytest.mark.parametrize("case", [prompt_attacks, word_attacks, positions, insertions, poisoning])
def test_texts_of_a_figure_do_not_overlap(case: Callable[[], Iterator[str]]) -> None:
    for result in results_of(case):
        figure, texts = drawn(result)
        assert (overlapping(texts), outside(figure, texts)) == ([], [])
