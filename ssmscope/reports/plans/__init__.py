"""Plans that ship with the package."""

from __future__ import annotations

from pathlib import Path

ORDER = ("quick", "baleen", "diff-mamba")


def shipped_plans() -> dict[str, Path]:
    """Return the plans' files by name."""
    folder = Path(__file__).parent
    return {name: folder / f"{name}.yaml" for name in ORDER}
