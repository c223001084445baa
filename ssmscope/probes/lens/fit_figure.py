"""Figure of a tuned lens: KL by layer compared with the logit lens, and the progress of the fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from ssmscope.core.bootstrap import Estimate
from ssmscope.render.figure import COLOURS, INK, SOFT, Sheet, handle, line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.probes.lens.result import LensFit


def draw(result: LensFit) -> Figure:
    """Draw at the left the KL of both lenses by layer with 95 % bands, at the right the KL by step on the held-out rows
    that choose the step."""
    title = ("Tuned lens of ", result.model_name, "")
    below = f"{result.measured_on}, 95 % bootstrap intervals"
    sheet = Sheet(8.6, 3.9, title, below, [(handle(0), "tuned lens"), (handle(1), "logit lens")], left=0.22)
    _layers(sheet.panel(0.7, sheet.top, 4.4, 2.45), result)
    _progress(sheet.panel(5.95, sheet.top, 2.4, 2.45), result)
    return sheet.figure


def _layers(axes: Axes, result: LensFit) -> None:
    last = len(result.layers)
    model = Estimate(0.0, 0.0, 0.0)  # After the last block both lenses are the model itself.
    line(axes, range(last + 1), [*(one.tuned for one in result.layers), model], 0)
    line(axes, range(last + 1), [*(one.logit for one in result.layers), model], 1)
    axes.set(xlim=(-0.3, last + 0.3), ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.set_xlabel(f"layer: the input of block i (0 the embeddings; {last} the model)", color=SOFT, size=9)
    axes.set_ylabel("KL(model ‖ lens), nats", color=SOFT, size=9)


def _progress(axes: Axes, result: LensFit) -> None:
    steps = [each.step for each in result.history]
    axes.plot(steps, [each.held_out for each in result.history], color=COLOURS[0], linewidth=1.6)
    best = next(each for each in result.history if each.step == result.best_step)
    axes.plot([best.step], [best.held_out], "o", color=COLOURS[0], markersize=5, clip_on=False)
    above = best.held_out < max(each.held_out for each in result.history) / 5  # The label must not cross the curve.
    axes.annotate(
        f"kept: step {best.step}", (best.step, best.held_out), (0, 7 if above else -7), textcoords="offset points",
        ha="right" if best.step > max(steps) / 2 else "left", va="bottom" if above else "top", size=8, color=INK,
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("step", color=SOFT, size=9)
    axes.set_title("mean of the layers while fitting", loc="left", size=9, color=INK)
