"""Whatever is typed after a verb, it answers or refuses in one line: never a traceback, never half a file. Each verb
that is registered is fuzzed, a new one by being added. `SSMSCOPE_FUZZ=2000` sets the number of examples a verb (`make
fuzz`), `SSMSCOPE_FUZZ_PARTS=10` into how many tests they are divided, so that workers share a slow verb; the few of an
ordinary run are always the same."""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import transformers
from exhaustive import ALL
from fuzz.judged import TooLong, judge, shown, told
from fuzz.lines import QUICK, lines, placed, verbs
from fuzz.world import World, build
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from ssmscope.reports import serving

EXAMPLES = int(os.environ.get("SSMSCOPE_FUZZ", "4" if ALL else "2"))
PARTS = int(os.environ.get("SSMSCOPE_FUZZ_PARTS", "1"))
VERBS = verbs()
FUZZED = settings(
    max_examples=-(-EXAMPLES // PARTS), deadline=None, database=None, derandomize="SSMSCOPE_FUZZ" not in os.environ,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink] if "SSMSCOPE_FUZZ" in os.environ else [Phase.generate],
)  # fmt: skip
world = pytest.fixture(scope="module")(lambda tmp_path_factory: build(tmp_path_factory.mktemp("world")))


@pytest.fixture(autouse=True)
def surroundings(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small data sets, libraries that keep quiet, and no page that is served without end, or put on the hub."""
    monkeypatch.setenv("SSMSCOPE_DATA", str(world.root / "data"))
    monkeypatch.setattr(serving, "serve", lambda live, *, host, port: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **options: huggingface_hub.RepoUrl("a/b"))
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda *_, **options: None)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("verb", VERBS)
def test_answers_or_refuses(verb: str, part: int, world: World) -> None:
    ends: Counter[int] = Counter()

    @FUZZED
    @given(st.data())
    def example(data: st.DataObject) -> None:
        line = data.draw(lines(verb, VERBS[verb], world))
        with tempfile.TemporaryDirectory() as folder:
            arguments = placed(line, Path(folder))
            note(shown(arguments))
            try:
                ends[judge(verb, arguments, Path(folder)).code] += 1
            except TooLong as error:  # of which hypothesis, which catches exceptions alone, would not say the example
                raise AssertionError(str(error)) from error

    example()
    print(told(verb, ends))
    assert ends[0] and ends[2] or EXAMPLES < 100 * PARTS, "of so many, some are answered and some refused"


def test_every_verb_is_fuzzed() -> None:
    assert {"heatmap", "lens fit", "lens show", "train", "report", "serve"} <= set(VERBS)
    options = {name: {each.name for each in parameters} for name, parameters in VERBS.items()}
    unknown = {name: set(base) for name, base in QUICK.items() if name not in VERBS or not set(base) <= options[name]}
    assert not unknown, "these keep no run short: there is no such option"
