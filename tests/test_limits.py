"""Work that would run for months or fill the memory is refused first, with an estimate and the limit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import refuses
from ssmscope.core.batching import MAX_ITEMS_HELD, MAX_TOKENS_READ, refuse_above, refuse_held, refuse_reading
from ssmscope.errors import InputError
from ssmscope.loading.load import ModelCache, cache_models

CLASSIFIER, ASKED, PROMPTED = "demo/sst2-mamba", "demo/babi-mamba2", "demo/instruct-mamba2"
HUGE = "99999999999"
LABELLED = (CLASSIFIER, "--data", "DATA")
QUESTIONS = (ASKED, "--tasks", "qa1", "--lengths", "0")
TRAIN = ("mamba2", "--data", "majority", "--no-progress")
LENS = (PROMPTED, "--data", "TEXT", "--length", "10")
UNBOUNDED = [
    ("overflow", LABELLED, "--lengths", "99999999", "lengths is 99,999,999; allowed are up to 131,072"),
    ("overflow", LABELLED, "--lengths", HUGE, "allowed are up to"),
    ("poison", LABELLED, "--set", f"candidates={HUGE}", "candidates is"),
    ("insertion", LABELLED, "--places", "3000000", "places is 3,000,000; allowed are up to 10,000"),
    ("fidelity", LABELLED, "--steps", "3000000", "steps is 3000000; allowed is a whole number from 1 to 10,000"),
    ("fidelity", LABELLED, "--random-rankings", HUGE, "random_rankings is"),
    ("fidelity", LABELLED, "--batch-size", HUGE, "batch_size is"),
    ("position", LABELLED, "--batch-size", HUGE, "batch_size is"),
    ("words", (*LABELLED, "--recipe", "hotflip"), "--set", f"beam={HUGE}", "beam is"),
    ("snr", (ASKED, "--tasks", "qa1"), "--lengths", "3000000", "allowed is a whole number from 0 to 131,072"),
    ("snr", (ASKED, "--tasks", "qa1", "--lengths", "10"), "--examples", "3000000", "would make 90,000,000 words"),
    ("snr", (ASKED, "--tasks", "qa1", "--lengths", "0"), "--examples", HUGE, "examples is"),
    ("retrieval", (ASKED, "--tasks", "qa1"), "--lengths", HUGE, "would have the model read about 1,999,999,999,980"),
    ("retrieval", QUESTIONS, "--examples", "3000000", "would make 90,000,000 words; allowed are up to 16,777,216"),
    (
        "retrieval", (ASKED, "--examples", "2", "--tasks", "qa1"), "--lengths", "0,9999999",
        "2 contexts of 9,999,999 words would make",
    ),
    ("retrieval", QUESTIONS, "--examples", HUGE, "examples is"),
    ("stability", (CLASSIFIER,), "--length", HUGE, "length is"),
    (
        "stability", (CLASSIFIER,), "--sequences", HUGE,
        "tokens; allowed are up to 4,194,304: ask for fewer or shorter ones",
    ),
    ("influence", (CLASSIFIER,), "--length", HUGE, "length is"),
    ("influence", (CLASSIFIER, "--length", "8"), "--sequences", HUGE, "tokens; allowed are up to 4,194,304"),
    (
        "influence", (CLASSIFIER, "--length", "8", "--no-exact"), "--set", f"probes={HUGE}",
        "would have the model read about",
    ),
    ("lens fit", LENS, "--steps", HUGE, "steps is"),
    ("lens fit", LENS, "--set", f"batch_tokens={HUGE}", "batch_tokens is"),
    ("lens fit", (*LENS, "--set", "batch_tokens=10000"), "--steps", "2000000", "read about 20,000,000,000 tokens"),
    ("lens fit", LENS[:3], "--length", HUGE, "length is"),
    ("lens fit", LENS, "--set", "learning_rate=1e308", "learning_rate is"),
    ("lens fit", LENS, "--set", "weight_decay=1e308", "weight_decay is"),
    ("train", TRAIN, "--seed", HUGE, "seed is 99,999,999,999; allowed are up to 4,294,967,295"),
    ("train", TRAIN, "--length", HUGE, "length is"),
    ("train", TRAIN, "--epochs", HUGE, "epochs is"),
    ("train", (*TRAIN, "--length", "1000"), "--examples", "1000000", "sequences of 1,000 bits would make"),
    ("train", ("mamba2", "--data", "qa1", "--no-progress", "--length", "5"), "--examples", "3000000", "would make"),
    ("train", ("mamba2", "--data", "associative-recall", "--no-progress"), "--examples", HUGE, "examples is"),
    *(
        ("train", TRAIN, "--set", f"{name}={HUGE}", f"{name} is")
        for name in ("width", "layers", "state", "head_width", "expand", "batch_size")
    ),
    ("train", (*TRAIN, "--set", "layers=1000"), "--set", "width=8192", "parameters; allowed are up to 4,000,000,000"),
]  # fmt: skip
"""A verb, its other arguments, an option that asks for too much, and what is said."""


@pytest.fixture(scope="module")
def kept() -> Iterator[None]:
    with cache_models(ModelCache(8)):
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "data.csv").write_text("text,label\n" + "".join(f"a {w} film,{i % 2}\n" for i, w in enumerate("ab" * 9)))
    (folder / "text.txt").write_text("The river changes again and the wind rests .\n" * 50)
    return {"DATA": folder / "data.csv", "TEXT": folder / "text.txt"}


@pytest.mark.parametrize(
    ("verb", "base", "option", "value", "says"), UNBOUNDED, ids=[f"{v}{o}={n}" for v, _, o, n, _ in UNBOUNDED]
)
def test_unbounded_requests_are_refused(kept, files, refusal, verb, base, option, value, says) -> None:
    given = [files.get(each, each) for each in base]
    assert says in refusal(*verb.split(), *given, option, value)


def test_what_is_within_the_limits_is_not() -> None:
    refuse_above(5, a=5, b=None)
    refuse_held(MAX_ITEMS_HELD, "it", "ask for less")
    refuse_reading(MAX_TOKENS_READ, "it", "ask for less")
    refuses("b is 6; allowed are up to 5", refuse_above, 5, a=5, b=6)
    with pytest.raises(
        InputError, match="it would make 134,217,729 tokens; allowed are up to 134,217,728: ask for less"
    ):
        refuse_held(MAX_ITEMS_HELD + 1, "it", "ask for less")
    with pytest.raises(InputError, match="it would have the model read about 20,000,000,000 tokens"):
        refuse_reading(2.0 * MAX_TOKENS_READ, "it", "ask for less")
