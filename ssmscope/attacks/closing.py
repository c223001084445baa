"""Last blocks of the views of attacks on data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.render.blocks import Block, Custom, Prose
from ssmscope.render.numbers import counted
from ssmscope.render.table import frame_table


def closing(result: Result, notes: Iterable[str]) -> Iterator[Block]:
    """Yield the data, the notes and, on pages, the whole table folded away."""
    data = result.provenance["data"]
    yield Prose(
        f"{counted(data['examples'], 'example')} of {data['name']} ({data['split']}); 95 % bootstrap intervals."
    )
    yield from (Prose(f"Note: {note}.", "note") for note in notes)

    def whole() -> str:
        from ssmscope.render.html import grid

        return (
            f"<details><summary>All numbers</summary>{grid(frame_table(result.to_frame(), limit=TABLE_ROWS))}</details>"
        )

    yield Custom(html=whole)
