"""Figure of a tuned lens: KL by layer compared with the logit lens, and the progress of the fit."""

from __future__ import annotations

from matplotlib.figure import Figure
from ssmscope.core.bootstrap import Estimate
from ssmscope.probes.lens.result import LensFit
from ssmscope.render import figure as plot


def draw(result: LensFit, frame: plot.Frame) -> Figure:
    """Draw the KL of both lenses by layer, and by step on the held-out rows that choose the step."""
    legend = [(plot.handle(0), "tuned lens"), (plot.handle(1), "logit lens")]
    below = f"{result.measured_on}, 95 % bootstrap intervals"
    sheet = plot.Sheet(frame, result.headline, below, legend)
    axes, progress = sheet.panels(2.5, across=2, widths=(1.8, 1))
    last = len(result.layers)
    model = Estimate(0.0, 0.0, 0.0)  # After the last block both lenses are the model itself.
    for number, name in enumerate(("tuned", "logit")):
        plot.line(axes, range(last + 1), [*(getattr(one, name) for one in result.layers), model], number)
    axes.set(xlim=(-0.3, last + 0.3), ylim=(0, None), ylabel="KL(model ‖ lens), nats")
    axes.set_xlabel(f"layer: the input of block i (0 the embeddings; {last} the model)")
    plot.integers(axes.xaxis)
    steps, held_out = zip(*((each.step, each.held_out) for each in result.history))
    progress.plot(steps, held_out, color=plot.COLOURS[0], linewidth=1.6)
    kept = held_out[steps.index(result.best_step)]
    progress.plot([result.best_step], [kept], "o", color=plot.COLOURS[0], markersize=5, clip_on=False)
    progress.set(ylim=(0, None), xlabel="step", title=f"mean of the layers; kept: step {result.best_step}")
    plot.integers(progress.xaxis, 5)
    return sheet.figure
