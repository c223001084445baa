"""What a tuned lens is worth, as a picture: KL by layer beside the logit lens, and the progress of the fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ssmscope.bootstrap import Estimate
from ssmscope.interp.views.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.probes.lens_training import LensFit

INK, SOFT, TUNED, LOGIT, GRID = "#1b1f24", "#57606a", "#2065a8", "#d1540a", "#e6e9ed"
WIDTH, HEIGHT = 8.6, 3.9
TITLE = 88
"""As many characters as fit in the title."""


def draw(result: LensFit) -> Figure:
    """At the left the KL of both lenses by layer with bands of 95 %, at the right that on the held-out rows which chose
    the step, by step."""
    figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="white")
    style: dict[str, Any] = dict(va="center", parse_math=False)  # names are the user's: a $ in them starts no formula
    model = shorten(visible(str(result.provenance.get("model", "a model"))), TITLE - 14)
    data = result.provenance["data"]["measured"]
    source = shorten(visible(f"{data['name']} ({data['split']})"), 40)
    where = "positions" if result.positions == "every" else "last positions"
    described = f"{result.measured:,} {where} in {result.rows:,} rows of {source} that took no part in the fit"
    figure.text(0.2 / WIDTH, 1 - 0.28 / HEIGHT, f"Tuned lens of {model}", size=11, color=INK, **style)
    figure.text(0.2 / WIDTH, 1 - 0.54 / HEIGHT, f"{described}, 95 % bootstrap intervals", size=8.5, color=SOFT, **style)
    _layers(figure.add_axes((0.7 / WIDTH, 0.6 / HEIGHT, 4.4 / WIDTH, 2.45 / HEIGHT)), result)
    _progress(figure.add_axes((5.95 / WIDTH, 0.6 / HEIGHT, 2.4 / WIDTH, 2.45 / HEIGHT)), result)
    return figure


def _layers(axes: Axes, result: LensFit) -> None:
    _plain(axes)
    places = [one.layer for one in result.layers]
    series: tuple[tuple[str, str, str, list[Estimate]], ...] = (
        ("logit lens", LOGIT, "s", [one.logit for one in result.layers]),
        ("tuned lens", TUNED, "o", [one.tuned for one in result.layers]),
    )
    for name, colour, marker, found in series:
        # behind the last block both are the model itself
        values = [*(e.value for e in found), 0.0]
        at = [*places, len(places)]
        low, high = [*(e.low for e in found), 0.0], [*(e.high for e in found), 0.0]
        axes.fill_between(at, low, high, color=colour, alpha=0.22, linewidth=0)
        axes.plot(at, values, color=colour, marker=marker, markersize=4, linewidth=1.6, label=name)
    axes.set_xlim(-0.3, len(places) + 0.3)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    last = len(places)
    axes.set_xlabel(f"layer: what enters block i (0 the embeddings; {last} the model)", color=SOFT, size=9)
    axes.set_ylabel("KL(model ‖ lens), nats", color=SOFT, size=9)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2)


def _progress(axes: Axes, result: LensFit) -> None:
    _plain(axes)
    steps, held = [look.step for look in result.history], [look.held_out for look in result.history]
    axes.plot(steps, held, color=TUNED, linewidth=1.6)
    best = next(look for look in result.history if look.step == result.best_step)
    axes.plot([best.step], [best.held_out], "o", color=TUNED, markersize=5, clip_on=False)
    axes.annotate(
        f"kept: step {best.step}", (best.step, best.held_out), (0, 7), textcoords="offset points",
        ha="right" if best.step > max(steps) / 2 else "left", size=8, color=INK,
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("step", color=SOFT, size=9)
    axes.set_title("mean of the layers while fitting", loc="left", size=9, color=INK)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT, labelsize=8.5)
    axes.set_axisbelow(True)
    axes.grid(color=GRID)
