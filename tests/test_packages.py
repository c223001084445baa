"""The page of other packages: what it says is called can be called, is named by the verbs, and is run by its tests."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from ssmscope.attacks.offline import textattack
from ssmscope.cli import app
from ssmscope.cli.command import command_of

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "packages.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and "/test_" in line or "`test_" in line
]
CALLED = sorted({name for row in ROWS for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", row[3])})
NAMED = {
    "explain": "captum",
    "fidelity": "captum",
    "plausibility": "captum",
    "sanity": "captum",
    "lens fit": "tuned-lens",
    "lens show": "tuned-lens",
    "words": "TextAttack",
    "prompts": "PromptBench",
    "evaluate": "lm-evaluation-harness",
}
"""Verbs, and the package that their help names."""


@pytest.mark.parametrize("name", CALLED)
def test_what_is_called_is_there(name: str) -> None:
    package, *path = name.split(".")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package in ("textattack", "promptbench"):
        textattack()  # Without it their import reads the network.
    for length in range(len(path), -1, -1):
        try:
            found = importlib.import_module(".".join([package, *path[:length]]))
        except ModuleNotFoundError:
            continue
        break
    for part in path[length:]:
        found = getattr(found, part)
    assert callable(found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0] or row[2][:20])
def test_the_test_is_there(row: list[str]) -> None:
    file, _, function = row[4].strip("`").partition("::")
    assert not function or re.search(rf"def {function}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert (ROOT / "tests" / file).is_file()


def test_the_page_lists_every_package_of_an_analysis() -> None:
    packages = {row[0] for row in ROWS}
    assert {"captum", "tuned-lens", "TextAttack", "PromptBench", "mamba_ssm", "lm-evaluation-harness"} <= packages
    assert len(CALLED) > 12


@pytest.mark.parametrize("verb", NAMED)
def test_the_help_names_the_package(verb: str) -> None:
    command = command_of(app)
    for part in verb.split():
        command = command.commands[part]  # type: ignore[attr-defined]
    said = f"{command.help} {' '.join(getattr(each, 'help', None) or '' for each in command.params)}"
    assert NAMED[verb] in " ".join(said.split())
