"""Titles, labels and ticks of panels get no more than their room, and what fits stays as it is."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from ssmscope.render.layout import FittedLayout

LONG = "one two three four five six seven eight nine ten"


def laid_out(figure: Figure) -> list[Axes]:
    figure.set_layout_engine(FittedLayout())
    figure.draw_without_rendering()
    return figure.axes


def test_a_label_is_broken_at_the_next_panel_and_not_where_it_has_room() -> None:
    figure = Figure((6.0, 2.5))
    for axes in figure.subplots(1, 2):
        axes.set(xlabel=LONG)
        axes.set_title(LONG, loc="left")
    for axes in laid_out(figure):
        for text in (axes.get_xlabel(), axes.get_title("left")):
            assert "\n" in text and text.replace("\n", " ") == LONG
    wide = Figure((6.0, 2.5))
    wide.subplots().set(xlabel=LONG, ylabel=LONG[:12])
    (axes,) = laid_out(wide)
    assert (axes.get_xlabel(), axes.get_ylabel()) == (LONG, LONG[:12])


def test_a_second_layout_changes_nothing_and_own_lines_are_kept() -> None:
    figure = Figure((3.0, 3.0))
    figure.subplots().set(xlabel=f"a\n{LONG}", ylabel=LONG)
    (axes,) = laid_out(figure)
    label, height = axes.get_xlabel(), axes.get_ylabel()
    assert label.startswith("a\n") and label.count("\n") > 1 and "\n" in height
    figure.draw_without_rendering()
    assert (axes.get_xlabel(), axes.get_ylabel()) == (label, height)


def test_ticks_of_a_logarithmic_axis_are_thinned_only_where_they_overlap() -> None:
    for width, overlap in ((8.0, False), (1.6, True)):
        figure = Figure((width, 2.0))
        axes = figure.subplots()
        axes.set(xscale="log", xlim=(1, 1e8))
        axes.xaxis.set_major_locator(LogLocator(numticks=9))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        laid_out(figure)
        assert (len([at for at in axes.get_xticks() if 1 <= at <= 1e8]) < 9) == overlap
        shown = [label for at, label in zip(axes.get_xticks(), axes.get_xticklabels()) if 1 <= at <= 1e8]
        ends = [label.get_window_extent() for label in shown]
        assert all(box.x1 < after.x0 for box, after in zip(ends, ends[1:]))
