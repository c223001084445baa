"""Pictures in a user's axes or part of a figure hold what they hold alone, and nothing else of the process changes."""

import warnings
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
import ssmscope
from ssmscope.api.results import Result
from ssmscope.errors import InputError

RECORDED = Path(__file__).resolve().parents[1] / "recorded"
ONE_PANEL = ("words-flip/words", "loss-hybrid/loss", "lens-logit/lens-show", "patch-head/patch")
SEVERAL = ("heatmap-text/heatmap", "attention-hybrid/attention", "stability-mamba2/stability", "effect-text/effect")


def numbers(figure: Any) -> list[list[Any]]:
    """Contents of every panel of a figure: its limits, curves, images, marks and words."""
    return [
        [
            *(axes.get_xlim(), axes.get_ylim(), axes.get_xlabel(), axes.get_ylabel(), len(axes.patches)),
            *(line.get_xydata().tolist() for line in axes.lines),
            *(np.nan_to_num(np.ma.getdata(image.get_array())).tolist() for image in axes.images),
            *(np.asarray(each.get_offsets()).tolist() for each in axes.collections),
            *(text.get_text() for text in axes.texts),
        ]
        for axes in figure.findobj(Axes)
    ]


@pytest.fixture(autouse=True)
def unchanged():
    """Nothing that a user has set or opened changes."""
    settings, opened, backend = dict(matplotlib.rcParams), plt.get_fignums(), matplotlib.get_backend()
    yield
    assert (dict(matplotlib.rcParams), plt.get_fignums(), matplotlib.get_backend()) == (settings, opened, backend)


@pytest.mark.parametrize("name", ONE_PANEL)
def test_axes_hold_the_picture(name: str) -> None:
    result, figure = Result.load(RECORDED / f"{name}.json"), Figure()
    other, axes = figure.subplots(1, 2)
    other.plot([1, 2], [3, 4])
    before = numbers(figure)[0]
    assert result.figure(ax=axes) is figure
    assert numbers(figure) == [before, *numbers(result.figure())]


@pytest.mark.parametrize("name", SEVERAL)
def test_a_part_of_a_figure_holds_several_panels(name: str) -> None:
    result = Result.load(RECORDED / f"{name}.json")
    alone = result.figure()
    width, height = alone.get_size_inches()
    figure = Figure((2 * width, height), layout="constrained")
    other, part = figure.subfigures(1, 2)
    other.subplots().plot([1, 2], [3, 4])
    before = numbers(other)
    assert result.figure(ax=part) is figure
    assert numbers(part) == numbers(alone) and numbers(other) == before
    assert figure.get_size_inches().tolist() == [2 * width, height]


@pytest.mark.parametrize("name", SEVERAL)
def test_several_panels_take_the_place_of_axes(name: str) -> None:
    result = Result.load(RECORDED / f"{name}.json")
    alone = result.figure()
    width, height = alone.get_size_inches()
    figure = Figure((2 * width, height), layout="constrained")
    other, axes = figure.subplots(1, 2)
    other.plot([1, 2], [3, 4])
    before, place = numbers(figure)[0], axes.get_position()
    assert result.figure(ax=axes) is figure and axes not in figure.axes
    (part,) = figure.subfigs
    assert numbers(part) == numbers(alone)
    figure.draw_without_rendering()
    centre = part.bbox.transformed(figure.transFigure.inverted())
    assert centre.x0 <= place.x0 and place.x1 <= centre.x1 + 0.05
    assert numbers(figure)[0] == before and figure.get_size_inches().tolist() == [2 * width, height]


def test_low_axes_have_one_line_of_title() -> None:
    result = Result.load(RECORDED / "stability-mamba2/stability.json")
    figure = Figure((6, 1.6))
    result.figure(ax=figure.subplots())
    titles = [part.get_suptitle() for part in figure.findobj(SubFigure) if part.get_suptitle()]
    assert len(titles) == 1 and "\n" not in titles[0] and titles[0].startswith("Stability of ")


def test_square_maps_have_their_room_or_are_refused() -> None:
    """With less, matplotlib leaves the layout of the whole figure out, and warns."""
    result = ssmscope.attention(ssmscope.load("demo/sst2-mamba2"), "A gripping film, though thin.")
    with pytest.raises(InputError, match=r"ax is 3\.6 inches high, too low for this figure; give a height of 4\.1 in"):
        result.figure(ax=Figure((7, 3.6)).subplots())
    figure = Figure((7, 4.2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result.figure(ax=figure.subplots())
        figure.draw_without_rendering()


def test_what_does_not_fit_is_refused() -> None:
    result = Result.load(RECORDED / "heatmap-text/heatmap.json")
    with pytest.raises(InputError, match=r"several panels, .* by hand: give axes of subplots\(\), a part"):
        result.figure(ax=Figure().add_axes((0, 0, 1, 1)))
    with pytest.raises(InputError, match=r"ax is 0\.8 inches high, too low for this figure; give a height of"):
        result.figure(ax=Figure((6, 0.8)).subplots())
    with pytest.raises(InputError, match=r"ax is 0\.5 inches high, too low for this figure; give a height of"):
        result.figure(ax=Figure((8, 0.5)).subfigures())
