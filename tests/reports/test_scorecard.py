"""Scorecards: what is compared with what, which differences hold for all rows together, and the views."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from bags import LABELS
from described import check, of_figure, of_table, tags
from fading import fading
import ssmscope
from ssmscope.api.scores import Score
from ssmscope.data.text import text_data
from ssmscope.render.figure import Frame, framed
from ssmscope.reports import card_views
from ssmscope.reports.scorecard import scorecard

NAMES = ("accuracy", "position.drop", "words.accuracy[deepwordbug]", "noise.drop", "poison.auroc[forget, window]")


def score(name: str, model: str, value: float, half: float = 0.05, *, better: str = "higher", unit: str = "") -> Score:
    return Score(name, model, value, value - half, value + half, 100, better, unit)


def shares(name: str, model: str, right: np.ndarray) -> Score:
    examples = np.stack([right, np.ones(len(right))], axis=1).astype(float)
    value = float(right.mean())
    return Score(name, model, value, value - 0.05, value + 0.05, len(right), "higher", "share", examples, "same")


def test_a_model_is_compared_with_the_first():
    every = [score(name, model, value) for name in NAMES for model, value in (("a", 0.5), ("b", 0.8), ("c", 0.2))]
    every = [replace(one, better="lower") if one.name == "position.drop" else one for one in every]
    card = scorecard(every)
    assert (card.models, card.reference, card.compared) == (("a", "b", "c"), "a", 10)
    assert [row.name for row in card.rows] == [*NAMES]
    for row in card.rows:
        first, better, worse = row.entries
        assert first.difference is None and first.state == "" and row.references[0] is None
        assert better.difference.value == pytest.approx(0.3) and worse.difference.value == pytest.approx(-0.3)
        states = ("better", "worse") if row.name != "position.drop" else ("worse", "better")
        assert (better.state, worse.state) == states


def test_rows_stand_in_the_order_of_the_report_and_those_of_an_analysis_as_it_declares_them():
    words = [f"words.accuracy[deepwordbug{more}]" for more in (", 1 word", ", 2 words", "")]
    given = ["poison.auroc[forget, window]", words[2], "noise.drop", "accuracy", *words[:2]]
    card = scorecard([score(name, "a", 0.5) for name in given])
    assert [row.name for row in card.rows] == [given[0], *words, "noise.drop", "accuracy"]


def test_attacks_on_prompts_have_the_rows_that_they_declare():
    from ssmscope.attacks.prompts import prompt_attack

    found = {each.heading: each.pattern for each in prompt_attack.analysis.dimensions}
    suffixes = ("3 suffixes", "stresstest"), ("50 suffixes", "checklist"), ("a search", "deepwordbug")
    expected = {f"Prompts, {heading}": rf"prompts\.drop\[{name}\]" for heading, name in suffixes}
    assert found.items() >= expected.items() and "Prompts, textbugger" not in found


def test_fewer_than_three_dimensions_are_no_card():
    every = [score(name, "a", 0.5) for name in NAMES]
    assert scorecard(every[:2]) is None and scorecard(every[:3]) is not None
    assert scorecard([replace(one, name="other") for one in every]) is None


def test_a_baseline_is_the_reference_of_every_model():
    every = [score(name, model, 0.5) for name in NAMES for model in ("a", "b")]
    earlier = [score(name, "a", 0.9) for name in NAMES]
    card = scorecard(every, earlier)
    assert card.reference == "the earlier report" and card.compared == 10
    assert all(entry.state == "worse" for row in card.rows for entry in row.entries)
    both = [*earlier, *(score(name, "c", 0.1) for name in NAMES)]
    assert [entry.state for entry in scorecard(every, both).rows[0].entries] == ["worse", ""]


def test_holm_reads_from_the_surest_on():
    """With m = 5 and σ of a difference 0.05 √2 / 1.96, the surest needs z = 2.58, the next 2.50, then 2.39."""
    sigma = 0.05 * math.sqrt(2) / 1.959964
    found = {}
    for zs in ((2.6, 2.52, 2.42, 0.1, 0.1), (2.6, 2.52, 2.3, 2.3, 0.1), (2.5, 2.5, 2.5, 2.5, 2.5)):
        every = [score(name, "a", 0.5) for name in NAMES]
        every += [score(name, "b", 0.5 + z * sigma) for name, z in zip(NAMES, zs)]
        rows = {row.name: row.entries[1].holds for row in scorecard(every).rows}
        found[zs] = [rows[name] for name in NAMES]
    assert list(found.values()) == [[True] * 3 + [False] * 2, [True] * 2 + [False] * 3, [False] * 5]


def test_what_stands_apart_is_not_compared():
    """Four rows that stand apart leave a family of three: z = 2.45 holds beside two others of 0.1, and not among 7."""
    sigma = 0.05 * math.sqrt(2) / 1.959964
    apart = ("poison.beyond[flip]", "fidelity[lrp]", "sanity[lrp]", "stability.growth")
    zs = dict(zip(NAMES[:3], (2.45, 0.1, 0.1))) | dict.fromkeys(apart, 2.4)
    every = [score(name, "a", 0.5) for name in zs] + [score(name, "b", 0.5 + z * sigma) for name, z in zs.items()]
    assert not any(entry.state for row in scorecard(every).rows if row.name in NAMES for entry in row.entries)
    every = [
        replace(one, apart="one search" if "poison" in one.name else "why") if one.name in apart else one
        for one in every
    ]
    card = scorecard(every)
    assert (card.compared, {row.name: row.apart for row in card.rows if row.apart}) == (
        3, {name: "one search" if "poison" in name else "why" for name in apart}
    )  # fmt: skip
    assert {row.name for row in card.rows for entry in row.entries if entry.state} == {"accuracy"}
    for row in card.rows:
        if row.apart:
            assert row.references == (None, None) and all(entry.difference is None for entry in row.entries)
    html = str(card_views.html(card))
    assert html.count("†") == 5 and html.count('class="reference"') == 3
    assert (
        "† Not compared: Poisoning, answers: one search; "
        "Explanations, fidelity, Explanations, sanity, Stability: why." in html
    )
    assert [labels[0] for labels, _ in card_views.table(card).rows if "†" in labels[0]] == [
        "Poisoning, answers †", "Explanations, fidelity †", "Explanations, sanity †", "Stability †",
    ]  # fmt: skip
    assert scorecard(every, [replace(one, value=0.1) for one in every]).compared == 6


def test_the_scale_of_logits_moves_fidelity_and_is_not_compared():
    """Half the logits answer alike and have another ΔA."""
    data = text_data("own", "test", ["good film", "bad film so", "so good so", "film bad"], [1, 0, 1, 0], LABELS)
    every, values = [], []
    for model, scale in (("a", 1.0), ("b", 0.5)):
        weights = {"good": 3.0 * scale, "bad": -3.0 * scale, "film": 0.2 * scale, "so": 0.0}
        result = ssmscope.fidelity(fading(weights), data, methods=["gradxinput"], steps=4)
        every += [replace(one, model=model) for one in result.card_scores()]
        values.append(result.estimate("gradxinput").value)
        every += [score(name, model, 0.5) for name in NAMES[:2]]
    assert abs(values[0] - values[1]) > 0.02
    (row,) = [row for row in scorecard(every).rows if row.name.startswith("fidelity")]
    assert row.apart and row.entries[1].difference is None


def test_by_chance_hardly_any_difference_is_marked():
    """In 200 cards of two equal models on the same examples, at most 5 % mark anything: 18 with 99 % confidence."""
    random, marked = np.random.default_rng(0), 0
    for _ in range(200):
        every = [shares(name, model, random.random(150) < 0.7) for name in NAMES for model in ("a", "b")]
        marked += any(entry.state for row in scorecard(every).rows for entry in row.entries)
    assert marked <= 18


def test_a_planted_loss_is_marked():
    random, marked = np.random.default_rng(1), 0
    for _ in range(50):
        every = []
        for name in NAMES:
            right = random.random(400) < 0.8
            lost = right & ~(random.random(400) < 0.2) if name == "noise.drop" else right
            every += [shares(name, "a", right), shares(name, "b", lost)]
        states = {row.name: row.entries[1].state for row in scorecard(every).rows}
        marked += states["noise.drop"] == "worse"
        assert all(state == "" for name, state in states.items() if name != "noise.drop")
    assert marked == 50


def test_axes_of_shares_are_alike_and_others_fit():
    every = [score("accuracy", "a", 0.5, unit="share"), score("position.drop", "a", -0.05, 0.1, unit="share")]
    card = scorecard([*every, score("loss", "a", 3.0, 0.5)])
    ends = {row.name: row.ends for row in card.rows}
    assert ends["accuracy"] == (0.0, 1.0) and ends["loss"] == pytest.approx((2.5 - 0.08, 3.5 + 0.08))
    low, high = ends["position.drop"]
    assert low < -0.15 and high > 0.05


def views():
    every = [score(name, model, value, unit="share") for name in NAMES for model, value in (("<a>", 0.5), ("b", 0.8))]
    return scorecard([one for one in every if (one.name, one.model) != ("noise.drop", "b")])


def test_what_is_shown():
    with framed(Frame()) as frame:
        drawn = card_views.draw(views(), frame)
    check("scorecard", (*tags(str(card_views.html(views()))), *of_table(card_views.table(views())), *of_figure(drawn)))


def test_a_share_of_none_has_wilsons_interval_in_every_view():
    """0 of 20 at 95 %: the upper end is z² / (20 + z²) = 0.1611."""
    none = np.zeros(20, dtype=bool)
    flipped = [replace(shares(name, "a", none), value=0.0, low=0.0, high=0.0) for name in NAMES[:2]]
    known = replace(flipped[1], name="noise.drop", examples=None, example_ids="")
    card = scorecard([*flipped, known])
    html = str(card_views.html(card))
    assert html.count("0.0 % [0.0, 16.1]") == 3 and html.count('class="interval"') == 3
    assert [cell.text for _, cells in card_views.table(card).rows for cell in cells] == ["0.0 % [0.0, 16.1]"] * 3
    assert card.rows[0].ends == (0.0, 1.0)
    with framed(Frame()) as frame:
        (axes,) = card_views.draw(card, frame).axes
    bars = [line.get_xdata() for line in axes.lines if line.get_linewidth() == 2.6]
    assert [bar[1] for bar in bars] == pytest.approx([3.8415 / 23.8415] * 3, abs=1e-4)


@pytest.mark.parametrize("run", ["deepwordbug", "faster-alzantot", "textfooler, 500 queries"])
def test_a_search_with_a_budget_or_any_name_has_its_rows(run: str) -> None:
    from ssmscope.attacks.words import word_attack

    patterns = [each.pattern for each in word_attack.analysis.dimensions]
    names = [f"words.accuracy[{run}{more}]" for more in (", 1 word", ", 2 words", "")]
    assert [[bool(re.fullmatch(pattern, name)) for pattern in patterns] for name in names] == np.eye(3).tolist()
