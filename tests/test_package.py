"""The package as it is installed: quick to import, known to transformers, complete in a wheel."""

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from exhaustive import few
from warm import PLAIN, TORCH, Warm
import ssmscope
from ssmscope.api import analyses as registry
from ssmscope.cli import app
from ssmscope.cli.command import command_of

ROOT = Path(__file__).resolve().parents[1]

KNOWS_OURS = """
from transformers import AutoConfig, AutoModelForSequenceClassification
config = AutoConfig.for_model("ssm-classifier", backbone={"model_type": "baleen-mamba", "vocab_size": 11,
    "hidden_size": 8, "state_size": 2, "num_hidden_layers": 1})
print(type(AutoModelForSequenceClassification.from_config(config)).__name__)
"""


def python(code: str, warm: Warm = PLAIN) -> str:
    """Return the output of a process that has imported nothing, or nothing of transformers and ssmscope."""
    done = warm.run(code, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "first",
    few(
        [
            "import ssmscope.loading, transformers",
            "import transformers, ssmscope.loading",
            "import ssmscope, transformers; ssmscope.load",
            "import ssmscope, transformers; ssmscope.loading",
            "import ssmscope.networks.classifier",
        ],
        "import transformers, ssmscope.loading",
        "import ssmscope, transformers; ssmscope.load",
    ),
)
def test_transformers_knows_our_models(first: str) -> None:
    """It does once ssmscope.loading is imported, by whatever and in any order."""
    assert python(f"{first}\n{KNOWS_OURS}", TORCH).endswith("SSMForSequenceClassification")


def test_importing_transformers_does_not_import_our_models() -> None:
    """They take seconds, which only those who load a model shall wait."""
    tell = "print([m for m in sys.modules if m.startswith('ssmscope.')], 'torch' in sys.modules)"
    alone, behind = python(f"import sys, transformers\n{tell}\nimport ssmscope\n{tell}").splitlines()
    assert alone.startswith("[] ")
    assert python(f"import sys, ssmscope, transformers\n{tell}") == behind == alone


def test_importing_the_package_imports_nothing_heavy_and_no_finder() -> None:
    code = "import sys, ssmscope; print([f for f in sys.meta_path if 'ssmscope' in type(f).__module__])"
    assert python(code) == "[]"
    heavy = {"torch", "transformers", "numpy", "pandas", "matplotlib", "typer"}
    assert python(f"import sys, ssmscope; print({heavy} & set(sys.modules))") == "set()"


def test_every_public_name_is_there() -> None:
    assert set(ssmscope.__all__) <= set(dir(ssmscope))
    for name in ssmscope.__all__:
        assert getattr(ssmscope, name) is not None
    with pytest.raises(AttributeError, match="laod"):
        _ = ssmscope.laod


def test_verbs_are_names_of_their_functions() -> None:
    """Every verb of `analyze --help`, and those of groups."""
    commands = command_of(app).commands
    for name, command in commands.items():
        for verb in [f"{name}_{own}" for own in getattr(command, "commands", {})] or [name]:
            assert verb in dir(ssmscope) and getattr(ssmscope, verb) is not None
    for name, analysis in registry.analyses().items():
        assert getattr(ssmscope, name.replace(" ", "_")) is analysis.function


def test_a_function_has_one_public_name() -> None:
    """Its verb's; type checkers are told the same names."""
    found = [id(value) for name in ssmscope.__all__ if inspect.isfunction(value := getattr(ssmscope, name))]
    assert len(found) == len(set(found))
    told = Path(ssmscope.__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
    assert set(re.findall(r"(?: as |^)(\w+)(?:$| =|:)", told, re.MULTILINE)) == set(ssmscope.__all__)


def test_the_table_of_analyses_lists_all_that_are_declared() -> None:
    declared = {}
    for file in (Path(ssmscope.__file__).parent).glob("*/*/__init__.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "analysis":
                    declared[ast.literal_eval(call.args[0])] = f"ssmscope.{file.parts[-3]}.{file.parts[-2]}:{node.name}"
    assert dict(registry.ANALYSES.places) == declared
    assert [analysis.name for analysis in registry.analyses().values()] == list(registry.ANALYSES)


def test_there_is_one_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", ssmscope.__version__)
    assert "version =" not in (ROOT / "pyproject.toml").read_text().partition("[project]")[2].partition("[tool")[0]
    if (ROOT / "pyproject.toml").exists():
        assert importlib.metadata.version("ssmscope") == ssmscope.__version__


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == ssmscope.__version__ and cited["title"] == "ssmscope"
    assert {"cff-version", "message", "authors", "license", "abstract"} <= set(cited)
    assert all({"type", "title", "authors"} <= set(paper) for paper in cited["references"])
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d+\.\d+\.\d+)", changes, re.MULTILINE)[0] == ssmscope.__version__


def test_addresses_of_the_project_are_in_its_readme() -> None:
    """Nothing is invented: whoever follows a link of the package index finds what the README names too."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    addresses = importlib.metadata.metadata("ssmscope").get_all("Project-URL") or []
    assert not [each for each in addresses if each.partition(", ")[2] not in readme]


def test_the_code_for_assistants_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 90
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, names := {})
    assert names["again"].to_frame().equals(names["heatmap"].to_frame())
    cells = re.findall(r"^\|[^|]*\| (.*) \|$", page, re.MULTILINE)
    named = {verb for cell in cells for verb in re.findall(r"`([\w ]+)`", cell)}
    assert named == {*registry.ANALYSES, "report", "serve"}


BROUGHT = {"huggingface_hub": "transformers", "markupsafe": "jinja2", "nltk": "textattack", "traitlets": "anywidget"}
"""Packages that are imported, and the declared one that cannot be without them."""
NAMES = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}
OPTIONAL = set(
    "accelerate anywidget gguf lm-eval peft promptbench ray scikit-learn textattack torchao triton wandb".split()
)
"""Packages of extras, or of the user's, which are asked for before they are imported."""


def test_what_is_imported_is_declared_and_nothing_else() -> None:
    found = set()
    for file in (ROOT / "ssmscope").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.partition(".")[0] for name in names}
    found -= {*sys.stdlib_module_names, "ssmscope", ""}
    assert set(BROUGHT) <= found
    packages = {BROUGHT.get(name, NAMES.get(name, name)).replace("_", "-") for name in found}
    declared = importlib.metadata.requires("ssmscope") or []
    core = {re.split(r"[<=>!;\[ ]", line)[0].lower() for line in declared if "extra ==" not in line}
    # captum's attributions are looked up by name.
    assert packages | {"captum"} == core | OPTIONAL


def test_constraints_pin_every_dependency() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {re.split(r"[<=>; ]", line)[0] for line in lines}
    declared = importlib.metadata.requires("ssmscope") or []
    core = {re.split(r"[<=>!;\[ ]", line)[0].lower() for line in declared if "extra ==" not in line}
    dev = {re.split(r"[<=>!;\[ ]", line)[0].lower() for line in declared if re.search(r"extra == .dev", line)}
    assert core and dev and core | dev <= pinned
    assert not [line for line in lines if "://" in line or line.startswith("-")]


def test_the_wheel_carries_the_demo_models(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("ssmscope/")}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ssmscope").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == wanted
    assert any(name.startswith("ssmscope/demo/") and name.endswith(".safetensors") for name in packed)
