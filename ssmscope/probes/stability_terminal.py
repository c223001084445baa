"""The stability of a model in words, with a row of numbers for every layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ssmscope.probes.stability import LayerStability, Stability


def view(result: Stability) -> Iterator[RenderableType]:
    """The verdict, a table by layer, and what its columns mean."""
    continuous = any(layer.abscissa is not None for layer in result.layers)
    table = Table(title=Text(result.headline), title_justify="left", box=None, pad_edge=False)
    several = result.unit == "recurrences"
    headings = ["layer", "verdict", *(["s_A"] if continuous else []), "growth", "step", "any step"]
    headings += ["half-life", "5 % to 95 %", "never", "norm"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("layer", "verdict") else "right", no_wrap=True)
    for one in result.layers:
        low, _, median, _, high = map(tokens, one.quantiles)
        cells = [one.name, one.verdict, *([number(one.spectral_abscissa)] if continuous else [])]
        cells += [number(one.growth.value), number(one.largest_gain), number(one.possible_gain)]
        cells += [median, f"{low} to {high}", share(one), number(result.norms[one.layer, -1, 0])]
        table.add_row(*map(Text, cells))
    yield table
    yield Text(f"\nOn {result.inputs}. {in_words(result)}")
    gains = "Natural logarithms: growth, the mean gain of a step of the layer's slowest state; step, the largest gain"
    text = f"{gains} of a step on these inputs; any step, over all inputs ({'; '.join(bounds(result))})."
    if continuous:
        text += " s_A, the spectral abscissa, is the largest entry of the continuous A."
    if several:
        text += " A layer's several recurrences are numbered after the dot."
    yield Text(text)
    yield Text(
        f"Half-life: tokens until half of a state is gone, the median of the layer's states. never: states that keep "
        f"half beyond the longest text ({result.longest:,} tokens). norm: of all the layer's states at the last token."
    )
    yield from (Text(f"Note: {note}.") for note in result.notes)


def in_words(result: Stability) -> str:
    """The verdict as sentences."""
    counts = {name: number for name, number in result.counts().items() if number}
    if len(result.layers) == 1:
        return f"The model is {result.verdict}: {result.layers[0].why}."
    listed = ", ".join(f"{number} {name}" for name, number in counts.items())
    worst = next(layer for layer in result.layers if layer.verdict == result.verdict)
    what = result.unit.removesuffix("s") if counts[result.verdict] == 1 else result.unit
    some = "The" if counts[result.verdict] == 1 else "Of the"
    if len(counts) == 1:
        return f"The model is {result.verdict}, in every one of its {len(result.layers)} {result.unit}: {worst.why}."
    return f"The model is {result.verdict} ({listed}). {some} {result.verdict} {what}, {worst.name}: {worst.why}."


def bounds(result: Stability) -> list[str]:
    """Why no step can grow by more."""
    return list(dict.fromkeys(layer.bounded_by for layer in result.layers))


def number(value: float) -> str:
    """A number of four digits; a dash where there is none."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.3g}".replace("-", "−")


def tokens(half_life: float) -> str:
    """A half-life in tokens."""
    if math.isinf(half_life):
        return "∞"
    return f"{half_life:,.0f}" if half_life >= 100 else f"{half_life:.2g}" if half_life < 10 else f"{half_life:.1f}"


def share(layer: LayerStability) -> str:
    """The share of a layer's states that outlast the text."""
    total = layer.heads * layer.states
    if layer.never in (0, total):
        return f"{layer.never:,}" if layer.never == 0 else "all"
    percent = 100 * layer.never / total
    return f"{percent:.1f} %" if percent >= 0.05 else f"{layer.never:,}"
