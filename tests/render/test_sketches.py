"""Small pictures of a summary: what is drawn where."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from markupsafe import Markup
from ssmscope.api.results import Result
from ssmscope.attacks.position.result import PositionBias
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.blocks import TokenRow
from ssmscope.render.sketches import HEIGHT, WIDTH, bars, curve, small_map, strips


def points(drawn: Markup) -> list[tuple[float, float]]:
    found = re.findall(r'points="([^"]*)"', drawn)
    return [tuple(map(float, each.split(","))) for line in found for each in line.split()]


def rects(drawn: Markup) -> list[dict[str, str]]:
    return [dict(re.findall(r'(\w+)="([^"]*)"', each)) for each in re.findall(r"<rect [^>]*>", drawn)]


def test_a_curve_spans_the_picture():
    drawn = curve("rising", [1.0, 2.0, 3.0])
    assert points(drawn) == [(2, HEIGHT - 3), (WIDTH / 2, HEIGHT / 2), (WIDTH - 2, 3)]
    assert 'role="img" aria-label="rising"' in drawn
    fixed = points(curve("a share", [0.5], ends=(0.0, 1.0)))
    assert fixed == [(2, HEIGHT / 2)]


def test_lines_share_an_axis_and_gaps_are_left_out():
    drawn = curve("two", [0.0, float("nan"), 2.0], [4.0, 2.0])
    assert points(drawn) == [(2, 23), (WIDTH - 2, 13), (2, 3), (WIDTH - 2, 13)]
    assert drawn.count("stroke-dasharray") == 1
    assert curve("nothing", [float("nan")]) == ""


def test_bars_begin_at_zero():
    up, down = rects(bars("drops", [0.3, -0.1]))
    assert float(up["height"]) == pytest.approx(3 * float(down["height"]), abs=0.2)
    assert float(up["y"]) + float(up["height"]) == pytest.approx(float(down["y"]), abs=0.1)


def test_strips_have_the_colours_of_the_rows():
    row = TokenRow("ig", np.array([-1.0, 0.0, 1.0]), (-1.0, 1.0), signed=True)
    hidden = TokenRow("survival", np.array([0.0, 1.0]), (0.0, 1.0), outside=np.array([True, False]))
    found = rects(strips("tokens", [row, hidden]))
    assert [each["fill"] for each in found] == ["#6e2a03", "#f7f7f7", "#08306b", "#08306b"]
    assert [each["x"] for each in found] == ["0.0", "40.0", "80.0", "60.0"]


def test_a_map_leaves_out_what_is_nearly_nothing():
    found = rects(small_map("map", np.array([[1.0, 0.0], [-0.5, 0.01]])))
    assert [(each["x"], each["y"]) for each in found] == [("0.0", "0.0"), ("0.0", "6.0")]
    assert found[0]["fill"] == "#08306b"


def test_a_kind_without_a_picture_has_none():
    assert Result.sketch(SimpleNamespace()) == ""
    regions = [SimpleNamespace(drop=Estimate(drop, 0, 1)) for drop in (0.1, 0.4)]
    low, high = rects(PositionBias.sketch(SimpleNamespace(regions=regions)))
    assert float(high["height"]) == pytest.approx(4 * float(low["height"]), abs=0.3)
