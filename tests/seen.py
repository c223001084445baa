"""Results as a terminal shows them, and the brightness of colours."""

import io
from typing import Any

from rich.console import Console, Group


def render(result: Any, width: int = 100, **options: Any) -> str:
    """Return a terminal's whole view of a result."""
    console = Console(file=io.StringIO(), width=width, force_jupyter=False, **options)
    console.print(Group(*result.in_terminal(console, full=True)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def luminance(colour: str) -> float:
    """WCAG's relative luminance of "#rrggbb"."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
