"""The page of families: every model type that can be read, from the registry, with what was run with it.

A hook of mkdocs. `tools/record_families.py` runs a small model of each type and writes `families.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGE, RECORD = "families.md", Path(__file__).with_name("families.json")
DEMAND = (
    *("qwen3_5_text", "qwen3_5_moe_text", "nemotron_h", "lfm2", "lfm2_moe", "lfm3", "zamba2", "minimax"),
    *("bailing_hybrid", "falcon_h1", "ssm-rwkv7"),
)
"""Types in the order of their downloads from the hub, as surveys of June and July 2026 counted them; others follow by
name."""
QUESTIONS = {
    "heatmap": "heatmap",
    "attention": "attention",
    "lrp": "lrp",
    "stability": "stability",
    "continues": "from states",
}
ABOUT = (
    "Every model type whose layers are read, the most downloaded first. For each a small random model was run on the "
    "releases of transformers that have it ({releases}): *difference* is the largest difference of its logits through "
    "the layers as they are read from its own, in float64 and relative to the largest logit; it is 0 for models that "
    "always run this way. The contract tests ask more. [What can be loaded](loading.md) says from which files."
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """The page as Markdown."""
    recorded: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORD.read_text(encoding="utf-8"))
    kinds = {kind for rows in recorded.values() for kind in rows}
    ordered = [*(kind for kind in DEMAND if kind in kinds), *sorted(kinds - {*DEMAND})]
    reasons: list[str] = []
    lines = [
        f"| model type | its layers | read in | releases | difference | {' | '.join(QUESTIONS.values())} |",
        "|" + "---|" * (5 + len(QUESTIONS)),
    ]
    for kind in ordered:
        found = {release: rows[kind] for release, rows in recorded.items() if kind in rows}
        latest = found[max(found)]
        answers = [_answer({each[name] for each in found.values()}, found, name, reasons) for name in QUESTIONS]
        file = f"`{latest['adapter'].replace('.', '/')}.py`"
        worst = max(each["difference"] for each in found.values())
        where = ", ".join(release.partition(".")[0] for release in found)
        cells = [f"`{kind}`", latest["layers"], file, where, f"{worst:.0e}" if worst else "0", *answers]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    about = ABOUT.format(releases=" and ".join(recorded))
    return "\n\n".join(["# Families", about, "\n".join(lines), "Refused:", "\n".join(notes)]) + "\n"


def _answer(said: set[str], found: dict[str, dict[str, Any]], name: str, reasons: list[str]) -> str:
    """A cell: yes, or the numbers of the reasons, with the release where the releases differ."""
    cells = []
    for release, each in found.items():
        reason = each[name]
        if reason != "yes" and reason not in reasons:
            reasons.append(reason)
        cell = "yes" if reason == "yes" else f"no ({reasons.index(reason) + 1})"
        cells.append(cell if len(said) == 1 else f"{release.partition('.')[0]}: {cell}")
    return ", ".join(dict.fromkeys(cells))
