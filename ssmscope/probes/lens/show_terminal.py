"""Terminal view of answers by layer: a line per token with the answers of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ssmscope.render.numbers import evenly_spaced
from ssmscope.render.tokens import short_token

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.probes.lens.lensed_text import Column
    from ssmscope.probes.lens.result import Trajectory

MAX_TOKENS = 40
"""Maximum number of tokens of a text in the table."""
FIXED_WIDTH, LAYER_WIDTH = 40, 12
"""Characters of all other columns, and of a layer's column."""


@dataclass(frozen=True)
class TerminalView:
    """Table per text with a line per token: the layer at which its answer settled, the final answer, and the answers of
    as many layers as fit the terminal."""

    result: Trajectory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        every = self.result.positions == "every"
        layers = evenly_spaced(self.result.layers, max((options.max_width - FIXED_WIDTH) // LAYER_WIDTH, 2))
        settled = "Settled: the layer from which on the final answer leads; bold, the layers that give it."
        yield Text(settled, style="dim")
        if len(layers) < self.result.layers:
            cut = f"{len(layers)} of {self.result.layers} layers below the model's answer; the files have all"
            yield Text(cut, style="dim")
        for number, panel in enumerate(self.result.panels):
            yield Text(f"\ntext {number}" if len(self.result.panels) > 1 else "", style="dim")
            shown = panel[:MAX_TOKENS] if every else panel
            yield _table(shown, layers, "" if every else "text")
            if len(shown) < len(panel):
                yield Text(f"{len(shown)} of {len(panel)} tokens; the files have all", style="dim")


def _table(columns: Iterable[Column], layers: Sequence[int], counted: str) -> Table:
    """Return a table with a line per column, labelled by the number of its text or by its position."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (counted, "token", "settled", *(f"layer {layer}" for layer in layers), "answer"):
        numeric = name in (counted, "settled")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True, overflow="ellipsis")
    for one in columns:
        answers = (
            Text(short_token(one.answer(layer), 10), style="bold" if one.agrees(layer) else "") for layer in layers
        )
        final = f"{short_token(one.answer(-1), 12)} {one.value('answer_probability', -1):.2f}"
        label = one.number if counted else one.position
        token = Text(short_token(one.token, 12))
        table.add_row(str(label), token, str(one.settled), *answers, Text(final, style="bold"))
    return table
