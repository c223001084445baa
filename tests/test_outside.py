"""Packages outside the checkout, written from the how-tos: what they add is found everywhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from warm import TRANSFORMERS
from ssmscope.reports.scores import read_scores

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HOW_TO = {
    page.stem: page for page in sorted((DOCS / "how-to").glob("*.md")) if "pyproject.toml" in page.read_text("utf-8")
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the how-tos, written from their pages, and those of tests/outside, outside the checkout and
    installed into `site`."""
    root = tmp_path_factory.mktemp("outside")
    for name, page in HOW_TO.items():
        assert "pyproject.toml" in blocks(page, root / name)
    shutil.copytree(ROOT / "tests" / "outside", root, dirs_exist_ok=True)
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    found = [file.parent for file in root.glob("*/pyproject.toml")]
    subprocess.run([sys.executable, *install, "--target", root / "site", *found], check=True)
    return root


@pytest.fixture(scope="module")
def passed(packages: Path) -> list[str]:
    """The tests of the how-tos and the contracts of a family outside, all of which pass in one process."""
    tests = [*map(str, packages.glob("*/tests/test_*.py"))]
    assert len(tests) == 2
    tests += [str(ROOT / "tests" / "contracts" / f"test_{of}.py") for of in ("architectures", "edits", "linearized")]
    options = ["-vv", "-c", str(ROOT / "pyproject.toml"), "-k", "leaky or test_remaining.py or test_order.py"]
    return re.findall(r"^(\S+::\S+).* PASSED", run(packages, PYTEST, *tests, *options), re.MULTILINE)


def test_the_tests_of_the_how_tos_pass(packages: Path, passed: list[str]) -> None:
    for file in packages.glob("*/tests/test_*.py"):
        named = re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert named and {*named} <= {name.partition("::")[2].partition("[")[0] for name in passed}, file


def test_what_is_outside_is_found_everywhere(packages: Path, passed: list[str]) -> None:
    """A family, an analysis, attacks and a method, without a line changed here: in the help, in contracts (lrp's rules
    among them), in reports and, as a page, in the documentation."""
    assert sum("leaky" in name for name in passed) >= 25
    (packages / "reviews.csv").write_text("text,label\na gripping film,positive\na dull film,negative\n")
    calls = ["remaining: {text: A gripping film., top: 1}"]
    calls += [f"{verb}: {{data: reviews.csv}}" for verb in ("evaluate", "noise", "order")]
    plan = f"models: [demo/sst2-mamba2]\nanalyses: [{', '.join(f'{{{call}}}' for call in calls)}]\n"
    (packages / "plan.yaml").write_text(f"{plan}require: ['order.drop <= 1 at 95 %']\n")
    attacks = (
        "prompts demo/instruct-mamba2 --template {content}. --words negative,positive --attacks politeness",
        "words demo/sst2-mamba2 --recipe keyboard",
    )
    lines = [f"{line} --data reviews.csv" for line in attacks] + ["report plan.yaml --out out --json", "--help"]
    lines.append("explain demo/sst2-mamba2 --text good --methods gradnorm,lrp")
    analyze = "import sys; from ssmscope.cli import run; code = max(run(line.split()) for line in sys.argv[1:])"
    page = "import verbs; print(verbs.page('order', verbs.verbs()['order']))"
    page += "; from ssmscope.api.dimensions import dimensions; print(*dimensions()); sys.exit(code)"
    printed = run(packages, f"{analyze}; sys.path.insert(0, {str(DOCS)!r}); {page}", *lines)
    assert all(word in printed for word in ("politeness", "keyboard", "gradnorm", "From installed packages"))
    assert '"verb": "remaining"' in printed and '"state": "done"' in printed
    assert "Words in another order" in (packages / "out" / "index.html").read_text(encoding="utf-8")
    assert read_scores(packages / "out")[-1].name == "order.drop"
    assert "most is left of" in (packages / "out" / "index.html").read_text(encoding="utf-8")
    kept = {path.suffix for path in (packages / "out").glob("results/*/remaining.*")}
    assert kept == {".json", ".csv", ".png", ".html"}
    assert "--orders N" in printed and "heading='Prompts, politeness'" in printed


BLOCK = """
import torch, gauged
from loud import loud
from ssmscope.core.edits import block_parts
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.methods.lrp import lrp, propagated
from ssmscope.interp.objective import objective

torch.manual_seed(0)
model = Model(loud(gauged.GaugedForCausalLM(gauged.GaugedConfig())).double())
batch = model.encode(ids=[[5, 17, 3, 9, 22]])
of = objective(model, batch, target=7)
for half in (True, False):
    missed = lrp(of, half=half).scores.sum(1) + propagated(of, half)[1] - model.logits(batch)[0, -1, 7]
    print("missed", *missed.abs().tolist())
print("feeds", *block_parts(model.module, "feed-forward"))
del gauged.BLOCK_PARTS
try:
    lrp(of)
except InputError as error:
    print("refused", error)
print("feeds", *block_parts(model.module, "feed-forward"))
"""

PARTS = ("product",), ("product", "narrow")
"""Feed-forward parts that are declared, and those that are found by what they consist of."""


def test_a_block_is_read_as_its_family_declares_it(packages: Path) -> None:
    """Relevance is conserved through a product that is refused without the declaration, which also says which parts are
    feed-forward."""
    lines = [line.partition(" ") for line in run(packages, BLOCK).splitlines()]
    found = {word: [text for one, _, text in lines if one == word] for word in ("missed", "feeds", "refused")}
    assert all(float(text) < 1e-12 for line in found["missed"] for text in line.split()) and len(found["missed"]) == 2
    assert re.search(r"misses the logits of \S+ by \d+\.\d% .* is not linear", *found["refused"])
    feeds = [[f"backbone.layers.{number}.{part}" for number in (0, 1) for part in parts] for parts in PARTS]
    assert [line.split() for line in found["feeds"]] == feeds


def test_the_how_tos_count_their_lines() -> None:
    """They give the length of a reader's code, for an analysis at most 120 lines in addition to its test."""
    for page, files in {
        "an-analysis": (("package", "remaining/(?!gradnorm)"), ("test", "tests/test_remaining.py")),
        "a-layer": (("file", "leaky/__init__.py"),),
        "an-attack": (("analysis", "order/(?!attacks)"), ("test", "tests/test_order.py")),
    }.items():
        text = HOW_TO[f"add-{page}"].read_text(encoding="utf-8")
        for what, place in files:
            bodies = re.findall(rf'^```\w+ title="{place}[^"]*"\n(.*?)^```$', text, flags=re.M | re.S)
            lines = sum(body.count("\n") for body in bodies)
            assert re.search(rf"{what}\b[\w ():.\[\]-]*\b{lines} lines", text), f"{what} of {page}: {lines} lines"
            assert what != "package" or lines <= 120


def blocks(page: Path, root: Path) -> list[str]:
    """Write the code blocks that have a file's name, and return the names."""
    found = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for name, body in found:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        assert not (root / name).exists(), f"{page.name} writes over {name}"
        (root / name).write_text(body, encoding="utf-8")
    return [name for name, _ in found]


PYTEST = "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"


def run(root: Path, code: str, *arguments: str) -> str:
    """Run code with what is installed in `site`, and return what it prints."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    first = f"import sys; sys.path[:0] = [{str(root / 'site')!r}, {str(ROOT / 'tests')!r}]\n"
    done = TRANSFORMERS.run(first + code, *arguments, cwd=root, env=variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
