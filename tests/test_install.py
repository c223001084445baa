"""The wheel and the source distribution in an empty environment: what they hold, bring along and run. Installing reads
package indexes, so this runs where it is asked for: `make test-install`; for other interpreters `make test-install
PYTHONS="python3.10 python3.12"`."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = os.environ.get("SSMSCOPE_INSTALL", "").split()
MAX_IMPORT_SECONDS = 0.5
NAME = "ssmscope"
EXTRAS = {
    **{"attacks": "textattack", "lm-eval": "lm-eval", "notebook": "anywidget", "ray": "ray", "docs": "mkdocs"},
    "dev": "pytest",
}
"""Extras, and a package that each brings. `cuda` is built on a machine with a GPU."""
WITHOUT = {
    "words demo/sst2-mamba2 --data {data}": "pip install '.[attacks]'",
    "evaluate demo/books-mamba2 --tasks wikitext": "pip install '.[lm-eval]'",
    "fidelity demo/sst2-mamba2 --data {data} --engine ray": "pip install '.[ray]'",
}
"""Commands that need an extra, and what the line on stderr advises."""

pytestmark = pytest.mark.skipif(not PYTHONS, reason="reads package indexes: make test-install")


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SSMSCOPE", "VIRTUAL"))}
    settings = {"env": {**kept, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}, **options}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, encoding="utf-8", **settings)


def passed(*command: object, **options: object) -> str:
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def uv_install(python: Path, *arguments: object) -> str:
    """Install with uv from where pip installs, and return what uv says."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(install := importlib.util.module_from_spec(spec))
    configured = install.settings([sys.executable, "-m", "pip"])
    certificates = dict(zip(["SSL_CERT_FILE"], configured.get("cert", [])))
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", python, *install.sources(configured)]
    done = run(*command, *arguments, env={**os.environ, **certificates})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel, the source distribution, and the wheel that is built from what the latter holds."""
    folder = tmp_path_factory.mktemp("built")
    for kind in ("wheel", "sdist"):
        passed(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data") if sys.version_info >= (3, 12) else archive.extractall(
            folder / "unpacked"
        )
    (unpacked,) = (folder / "unpacked").iterdir()
    passed(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "again", cwd=unpacked)
    (again,) = (folder / "again").glob("*.whl")
    return {"wheel": wheel, "sdist": sdist, "unpacked": unpacked, "again": again}


@pytest.fixture(scope="module", params=PYTHONS, ids=lambda python: Path(python).name)
def installed(request: pytest.FixtureRequest, built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel and what it depends on."""
    place = tmp_path_factory.mktemp("environment")
    passed(request.param, "-m", "venv", "--without-pip", place)
    uv_install(place / "bin" / "python", "-c", ROOT / "constraints.txt", built["wheel"])
    return place / "bin"


def test_the_source_distribution_makes_the_same_wheel(built: dict[str, Path]) -> None:
    listed = []
    for name in ("wheel", "again"):
        with zipfile.ZipFile(built[name]) as archive:
            listed.append({each.filename: each.CRC for each in archive.infolist()})
    assert listed[0] == listed[1]
    assert not [name for name in ("README.md", "Makefile", "CITATION.cff", "AGENTS.md", "LICENSE", "tools/install.py")
                if not (built["unpacked"] / name).is_file()]  # fmt: skip


def test_the_first_command_of_the_readme_answers(installed: Path, tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = re.search(r"^TEXT \?= (.*)$", makefile, re.MULTILINE)
    line = re.search(r"bin/analyze (heatmap \S+) --text .* --out demo-output$", makefile, re.MULTILINE)
    assert text is not None and line is not None
    said = passed(installed / "analyze", *line[1].split(), "--text", text[1], "--out", "demo-output", cwd=tmp_path)
    assert "beautifully" in said
    assert {path.name for path in (tmp_path / "demo-output").iterdir() if path.name[0] != "."} == {
        f"heatmap.{suffix}" for suffix in ("json", "csv", "png", "html")
    }
    result = json.loads((tmp_path / "demo-output" / "heatmap.json").read_text(encoding="utf-8"))
    assert (
        result["provenance"]["versions"]["ssmscope"]
        == passed(installed / "python", "-c", "import ssmscope; print(ssmscope.__version__)", cwd=tmp_path).strip()
    )


def test_importing_is_quick(installed: Path, tmp_path: Path) -> None:
    code = "import time; start = time.process_time(); import ssmscope; print(time.process_time() - start)"
    assert min(float(passed(installed / "python", "-c", code, cwd=tmp_path)) for _ in range(2)) < MAX_IMPORT_SECONDS


def test_a_verb_without_its_extra_says_what_to_install(installed: Path, tmp_path: Path) -> None:
    data = tmp_path / "reviews.csv"
    data.write_text("text,label\na gripping film,positive\na dull film,negative\n", encoding="utf-8")
    for line, advice in WITHOUT.items():
        done = run(installed / "analyze", *line.format(data=data).split(), cwd=tmp_path)
        assert done.returncode == 2 and not done.stdout, line
        assert "Traceback" not in done.stderr and advice in done.stderr.splitlines()[-1], done.stderr


def test_all_extras_resolve_together_with_the_constraints(installed: Path, built: dict[str, Path]) -> None:
    """In one pass, changing nothing that the package alone brought."""
    wanted = f"{NAME}[{','.join(EXTRAS)}] @ {built['wheel'].as_uri()}"
    said = uv_install(installed / "python", "--dry-run", "-c", ROOT / "constraints.txt", wanted)
    changes = re.findall(r"^ ([+-]) ([\w.-]+)", said, re.MULTILINE)
    assert {("+", brought) for brought in EXTRAS.values()} <= set(changes)
    assert not [name for sign, name in changes if sign == "-" and name != NAME], said
