"""Docs: the pages about verbs cover all options, and tables are what was measured."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import ssmscope
from ssmscope.api import analyses as registry

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
hook = pytest.fixture(scope="module")(lambda: loaded("verbs"))
reference = pytest.fixture(scope="module")(lambda: loaded("reference"))


def loaded(name: str) -> ModuleType:
    """A file of docs, as mkdocs loads it."""
    for package in ("mkdocs", "griffe"):
        pytest.importorskip(package, reason=f"the documentation needs {package}: pip install '.[docs]'")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(DOCS)
        return importlib.import_module(name)


def test_every_verb_has_a_page_with_all_its_options(hook: ModuleType) -> None:
    verbs = hook.verbs()
    assert {"heatmap", "fidelity", "lens", "report"} <= set(verbs)
    for name, command in verbs.items():
        page = hook.page(name, command)
        assert page.startswith(f"# analyze {name}\n")
        for each in getattr(command, "commands", {name: command}).values():
            assert " ".join(each.help.split()[:4]) in " ".join(page.split())
            options = [p.opts[0] for p in each.params if p.param_type_name == "option"]
            assert not [option for option in options if not re.search(rf"^\| `{option}[ `]", page, flags=re.MULTILINE)]


def test_a_verbs_page_has_the_defaults_and_the_function(hook: ModuleType) -> None:
    page = hook.page("fidelity", hook.verbs()["fidelity"])
    assert "| `--steps N` | Number of steps from no hidden token to all. | `20` |" in page
    assert "| `--mode replace|delete` |" in page and "| `--json` | Print JSON and nothing else. | off |" in page
    assert "ssmscope.fidelity(\n    model: Model,\n    data: TextData | PixelData,\n    *,\n" in page
    assert "    steps: int = 20,\n" in page and "**Raises**" in page
    assert "analyze fidelity [OPTIONS] MODEL\n" in page
    assert "analyze snr [OPTIONS] MODEL…\n" in hook.page("snr", hook.verbs()["snr"])


def test_the_api_reference_is_what_the_package_lists(reference: ModuleType) -> None:
    page = reference.page()
    described = re.findall(r"^::: (\S+)\n    options:\n      heading: ssmscope\.(\w+)$", page, flags=re.MULTILINE)
    packages = re.findall(r"^### ssmscope\.(\w+)$", page, flags=re.MULTILINE)
    assert sorted([name for _, name in described] + packages + ["__version__"]) == sorted(ssmscope.__all__)
    assert [name for _, name in described[:4]] == ["load", "Model", "Trace", "Result"]
    for path, name in described:
        module, _, own = path.rpartition(".")
        assert getattr(importlib.import_module(module), own) is getattr(ssmscope, name)
        assert getattr(ssmscope, name).__doc__
    assert set(registry.names()) <= {name for _, name in described}


def test_types_are_those_without_the_words_for_the_command_line(reference: ModuleType) -> None:
    from ssmscope.interp import heatmap

    given = inspect.signature(heatmap.selection_heatmap).parameters
    plain = {name: reference.plain(each.annotation, vars(heatmap)) for name, each in given.items()}
    assert plain["model"] == "Model | None" and plain["top"] == "int"
    assert plain["layers"] == "Literal['mean', 'all'] | Sequence[int]"


def test_guides_are_pages(hook: ModuleType) -> None:
    assert not [guide for guide in hook.GUIDES.values() if not (DOCS / guide).is_file()]
    assert not set(hook.GUIDES) - set(hook.verbs())


@pytest.mark.usefixtures("painted")
def test_the_pictures_of_the_readme_are_what_the_models_give(tmp_path: Path) -> None:
    PIL = pytest.importorskip("PIL.Image")
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    pictures.main(tmp_path)
    shown = re.findall(r"\(docs/figures/(\S+)\.png\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(pictures.PICTURES)
    for name in pictures.PICTURES:
        kept, made = (
            np.asarray(PIL.open(folder / f"{name}.png").convert("RGB"), float)
            for folder in (DOCS / "figures", tmp_path)
        )
        assert kept.shape == made.shape
        assert abs(kept - made).mean() < 1, f"{name}.png shows something else: run python docs/pictures.py"


def test_text_means_itself(hook: ModuleType) -> None:
    markdown = pytest.importorskip("markdown")
    said = "a*b*c __x__ <b> [y](z) |D| Σ_t and `k_v*`"
    shown = markdown.markdown(hook._escaped(said), extensions=["tables"])
    assert shown == "<p>a*b*c __x__ &lt;b&gt; [y](z) |D| Σ_t and <code>k_v*</code></p>"


def test_the_tables_of_the_pages_are_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("tables")
    found = list(tables.marked())
    shown = {f"{script}.{function}": lines for _, script, function, lines in found}
    assert len(shown) == len(found) > 25
    assert shown["mad_every_token.verdict_table"].splitlines()[2].startswith("| fuzzy-recall | 17, 18 | +0.046")
    assert [name for name, lines in shown.items() if tables.drawn(*name.split(".")) != lines] == []
    measured = re.compile(r"could have seen|(?:^\|.*)?\| *[*~]*[−+-]?(?:\d*\.\d|\d[\d,]* (?:\[|±|of \d))")
    assert (
        measured.match("| a | 80 [9, 100] |") and measured.match("| a | **−.5 s** |") and measured.match("| 3 of 5 |")
    )
    for page in DOCS.rglob("*.md"):
        drawn = tables.MARKED.sub("", page.read_text(encoding="utf-8"))
        kept = re.sub(r"^The paper's [^|]*:\n\n(\|.*\n)+", "", drawn, flags=re.MULTILINE)
        by_hand = [line for line in kept.splitlines() if measured.match(line)]
        assert not by_hand, f"{page.name} has a table of measured numbers that no script draws: {by_hand[0]}"


def test_what_serves_otherwise_is_shown_without_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = importlib.import_module("serving").docs_table()
    assert "\n".join(table) in (ROOT / "ssmscope/probes/parity/guide.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/serving.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["transformers"][0].isdigit()]  # Other libraries need a GPU.
    over = [each for row in rows for each in row["modes"].values() if each["error"] > each["allowed"]]
    assert over and min(each["without"] for each in over) > 5e-5  # Where nothing differs they print at most 1.2e-5.
    wrong = {
        (row["transformers"][0], row["model"], mode)
        for row in rows
        for mode in row["modes"]
        if "without" in row["modes"][mode]
    }
    left = {
        ("5", model, f"left padding, {how}")
        for model in ("rwkv", "xlstm", "minimax")
        for how in ("alone", "in a batch")
    }
    alone = {
        ("4", model, "left padding, alone")
        for model in ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "qwen3_next")
    }
    limited = {("5", "mamba2-one-group", f"cached steps{how}") for how in ("", ", in a batch")}
    assert left | alone | limited | {("5", "jamba", "prefill in chunks")} <= wrong
    whole = {
        ("5", "mamba2", "cached steps"),
        ("4", "mamba2-one-group", "cached steps"),
        ("4", "mamba2", "left padding, in a batch"),
    }
    assert not whole & wrong  # Without a limit, and in the release before.


def test_no_verdict_is_typed() -> None:
    """What is said of two methods follows from a table by the rules of `benchmarks/verdicts.py`."""
    typed = re.compile(
        r"\bno (?:advantage|gain|effect|measurable|difference)\b|\bnor does\b|\bgains measurably\b|\bnone differs\b"
        r"|\b(?:no|any) more (?:faithful|robust|accurate)\b|\bequally (?:well|good|accurate|faithful)\b"
        r"|\bafter a (?:Bonferroni )?correction\b|(?<!token )(?<!training )\bdoes not matter\b",
        re.IGNORECASE,
    )
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md"]
    assert len(pages) > 25 and not [page.name for page in pages if typed.search(page.read_text(encoding="utf-8"))]


def test_extras_are_installed_from_the_checkout() -> None:
    """There is no package index that has this project: the project's name with an extra would find nothing."""
    folders = ("ssmscope", "docs", "notebooks", "tests", "benchmarks")
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    texts += [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md", ".ipynb")]
    named = "ssmscope" + "["
    assert not [path for path in texts if named in path.read_text(encoding="utf-8")]
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    known = re.findall(r"^(\w+) = \[", declared.partition("\n[project.scripts]")[0], re.MULTILINE)
    for path in texts:
        for found in re.findall(r"pip install '\.\[(\w+)\]'", path.read_text(encoding="utf-8")):
            assert found in known, path
