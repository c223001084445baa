"""Settings and fixtures of all tests: one thread, no colour, no network, and the way to the real data."""

import functools
import gc
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before torch is imported: the test workers already fill the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A test that would download says so at once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest
import shapes

if "SSMSCOPE_FUZZ" not in os.environ:  # what a user has checks nothing, and `train --compile` cannot compile the checks
    shapes.check([f"ssmscope.{name}" for name in shapes.CHECKED])

if "SSMSCOPE_PERTURB" in os.environ:
    import perturbing

    perturbing.perturb(pytest.MonkeyPatch(), int(os.environ["SSMSCOPE_PERTURB"]))

# No test cuts the power, and waiting for the disk takes longer than most tests.
os.fsync = lambda descriptor: None  # type: ignore[assignment]

# A run in the background of a shell ignores interrupts, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Until all tests are collected there is little but libraries and tests, which are not garbage.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Make a folder in which the workers of a run share what one of them made."""
    if hasattr(config, "workerinput"):
        os.environ["SSMSCOPE_TESTS_SHARED"] = str(Path(config.option.basetemp).parent)


FIRST = (
    *("test_recorded", "contracts/test_recorded_step", "reports/test_browser", "test_demos", "test_training"),
    *("architectures/test_adapter_folders", "training/test_kinds", "training/test_compiled_models"),
)
"""Files that take longest: a worker that began one of them last would keep the others waiting."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; each goes to one worker as a whole, which makes its fixtures once."""

    def rank(item: pytest.Item) -> int:
        name = item.nodeid.partition(".py::")[0]
        return next((i for i, each in enumerate(FIRST) if name.endswith(f"tests/{each}")), len(FIRST))

    items.sort(key=rank)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Libraries and tests are not garbage: looking for it among them took a sixth of the time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)


ROOT = Path(__file__).resolve().parents[1]
Answer = Callable[..., SimpleNamespace]


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 100 columns without colour, whatever the machine's is."""
    for variable in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(scope="session", autouse=True)
def unpainted() -> Iterator[Any]:
    """Figures are laid out as for a file, but the file is of an empty one: painting takes most of the time. Of figures
    with the same kinds of parts, one is laid out; tests of overlaps lay out what they look at themselves."""
    from ssmscope.render import pictures

    seen = set()

    def drawn(figure: Any, suffix: str) -> bytes:
        parts = {type(part).__name__ for axes in figure.axes for part in axes.get_children()}
        alike = frozenset(parts), min(len(figure.axes), 3)
        if alike not in seen:
            figure.draw_without_rendering()
            seen.add(alike)
        return _empty(suffix)

    own = pictures.encode_figure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "encode_figure", drawn)
        yield own


@pytest.fixture
def painted(unpainted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paint figures, for a test that looks at their files."""
    monkeypatch.setattr("ssmscope.render.pictures.encode_figure", unpainted)


@functools.cache
def _empty(suffix: str) -> bytes:
    from matplotlib.figure import Figure

    file = io.BytesIO()
    Figure((1, 1)).savefig(file, format=suffix)
    return file.getvalue()


@pytest.fixture(scope="session")
def real_data() -> Callable[[str, str], Path]:
    """`real_data("sst2", "test")` is that split's parquet file; the test is skipped where it is absent."""

    def find(name: str, split: str) -> Path:
        return _existing("SSMSCOPE_DATA", f"{name}/{split}.parquet")

    return find


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], Path]:
    """`oracle("majority_T25_seed1.pth")` is that published checkpoint; the test is skipped where it is absent."""

    def find(name: str) -> Path:
        return _existing("SSMSCOPE_ORACLES", name)

    return find


def _existing(variable: str, name: str) -> Path:
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"set {variable} to the folder that holds {name}")
    path = Path(folder, name)
    if not path.exists():
        pytest.skip(f"{variable} is {folder}, and {name} is not in it")
    return path


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Mamba and its tokenizer."""
    from commands import saved_mamba

    return saved_mamba(tmp_path_factory.mktemp("models") / "mamba")


@pytest.fixture(scope="module")
def untokenized(mamba: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without its tokenizer."""
    from commands import without_tokenizer

    return without_tokenizer(mamba, tmp_path_factory.mktemp("models") / "untokenized")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser; it needs playwright and Debian's chromium."""
    sync = pytest.importorskip("playwright.sync_api", reason="install playwright to test pages in a browser")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("install chromium to test pages in a browser")
    with sync.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def analyze(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Runs one command line in this process: `.code`, `.out`, `.err`, and the words of `.out`. Its progress is told
    after a minute only, so that `.err` is the same on a slow machine."""
    from ssmscope import cli
    from ssmscope.core import progress

    monkeypatch.setattr(progress, "SECONDS_BEFORE_FIRST_LINE", 60.0)

    def run(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err, words=" ".join(out.split()))

    return run


@pytest.fixture
def refusal(analyze: Answer, tmp_path: Path) -> Callable[..., str]:
    """Runs a command line that must be refused: exit code 2, one line on stderr, which is returned, and no file."""

    def run(*arguments: object) -> str:
        answer = analyze(*arguments, "--out", tmp_path / "must-not-appear")
        assert answer.code == 2 and answer.out == ""
        assert answer.err.startswith("analyze: ") and answer.err.count("\n") == 1
        assert not (tmp_path / "must-not-appear").exists()
        return answer.err

    return run
