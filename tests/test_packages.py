"""The page of other packages: what it says is called can be called, is named by the verbs, and is run by its tests."""

import ast
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssmscope.api.analyses import ANALYSES
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
ENGINES = {
    "captum": "captum", "lm_eval": "lm-evaluation-harness", "promptbench": "PromptBench", "textattack": "TextAttack",
    "tuned_lens": "tuned-lens",
}  # fmt: skip
"""Packages that compute for an analysis, by module."""


@functools.cache
def imported(module: str) -> frozenset[str]:
    """All that a module imports, in functions too; not what is for types alone."""
    tree = ast.parse(file_of(module).read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
            found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return frozenset(found)


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
        for child in ast.iter_child_nodes(node):
            yield from nodes(child)


def file_of(module: str) -> Path:
    place = ROOT.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def engines_of(verb: str) -> set[str]:
    """The packages that a verb's modules import, by whatever modules of ours in between."""
    waiting, seen, found = [ANALYSES.places[verb].partition(":")[0]], set(), set()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            found |= {name.partition(".")[0] for name in imported(module)} & ENGINES.keys()
            waiting += [name for name in imported(module) if name.startswith("ssmscope.") and file_of(name).is_file()]
    return {ENGINES[package] for package in found}


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
    assert {*ENGINES.values(), "mamba_ssm", "Diff-Mamba, as published", "Ray", "transformers", "datasets"} <= packages
    assert len(CALLED) > 16


@pytest.mark.parametrize("verb", ANALYSES)
def test_the_help_names_the_packages(verb: str) -> None:
    command = command_of(app)
    for part in verb.split():
        command = command.commands[part]  # type: ignore[attr-defined]
    said = " ".join(f"{command.help} {' '.join(getattr(each, 'help', None) or '' for each in command.params)}".split())
    engines = engines_of(verb)
    assert all(engine in said for engine in engines)
    assert ("Ray" in said) == any(each.name == "engine" for each in command.params)
    asked = {(package, verb) for package, asked in asked_by() if re.search(rf"(?<![\w ]){verb}\b", asked)}
    assert {(engine, verb) for engine in engines} <= asked


def asked_by() -> Iterator[tuple[str, str]]:
    """Every package of the page, with what asks for it."""
    package = ""
    for row in ROWS:
        package = row[0] or package
        yield package, row[2]


def test_engines_are_found_through_what_is_between() -> None:
    assert engines_of("prompts") == {"PromptBench", "TextAttack"} and engines_of("snr") == {"tuned-lens"}
    assert engines_of("fidelity") == {"captum"} and not engines_of("heatmap")
