"""Readings of single positions from log-probabilities made by hand, and where a word begins after a prompt."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refuses

pytest.importorskip("tuned_lens")

from ssmscope.errors import InputError  # noqa: E402
from ssmscope.probes.snr import reading  # noqa: E402
from ssmscope.probes.snr.measure import columns_of, measure  # noqa: E402
from ssmscope.probes.snr.reading import NO_TOKEN, Needles, Prompts, _read, _Reader, check_readable, read_needles  # noqa: E402
from ssmscope.zoo.documents import word_tokenizer  # noqa: E402

NEEDLES = np.array([3, 1, 0])
DISTRACTORS = np.array([[0, 5], [4, NO_TOKEN], [NO_TOKEN, NO_TOKEN]])


def logs(layers: int = 4) -> torch.Tensor:
    """Log-probabilities (layers, three examples, six tokens), some of them alike."""
    raw = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (layers, 3, 6)))
    raw[1, 0, :3] = raw[1, 0, 3]
    raw[2, 1, 5] = raw[2, 1, 1]
    return raw.log_softmax(-1)


def test_every_reading_the_slow_way():
    found = _read(logs(), NEEDLES, DISTRACTORS)
    assert {values.shape for values in found.values()} == {(3, 4)}
    for layer, rows in enumerate(logs().tolist()):
        for example, own in enumerate(rows):
            needle = own[NEEDLES[example]]
            assert found["needle"][example, layer] == pytest.approx(needle)
            above, alike = sum(each > needle for each in own), sum(each == needle for each in own)
            assert found["rank"][example, layer] == 1 + above + (alike - 1) / 2
            others = [own[token] for token in DISTRACTORS[example] if token != NO_TOKEN]
            if not others:
                assert math.isnan(found["distractor"][example, layer])
                assert math.isnan(found["candidate"][example, layer])
                continue
            assert found["distractor"][example, layer] == pytest.approx(max(others))
            share = math.exp(needle) / (math.exp(needle) + sum(map(math.exp, others)))
            assert found["candidate"][example, layer] == pytest.approx(share)
    assert set(_read(logs(), NEEDLES, DISTRACTORS[:, :0])) == {"needle", "rank"}


def prompts() -> Prompts:
    return Prompts(((1, 2), (3,), (4, 5, 6)), NEEDLES, DISTRACTORS, 0)


@pytest.fixture
def lens(monkeypatch):
    """A model and a lens of three layers, whose log-probabilities are `logs`."""

    def encode(ids):
        return SimpleNamespace(rows=[prompts().rows.index(tuple(row)) for row in ids])

    monkeypatch.setattr(reading, "chosen_states", lambda model, batch, positions: logs()[:, batch.rows])
    monkeypatch.setattr(reading, "tokens_at_once", lambda device, kept: 4 if kept == 4 * 7 else 1)

    class Lens:
        def __len__(self):
            return 3

        def slices(self, count):
            return (slice(at, at + 1) for at in range(count))

        def log_probs(self, hidden):
            return hidden

    return SimpleNamespace(encode=encode, name="m", device=None, width=7), Lens()


def test_examples_are_read_in_batches_and_slices(lens):
    done: list[int] = []
    found = read_needles(*lens, prompts(), done.append)
    whole = _read(logs(), NEEDLES, DISTRACTORS)
    for name, values in whole.items():
        np.testing.assert_allclose(getattr(found, name), values)
    assert found.tokens.tolist() == [2, 1, 3] and found.choices.tolist() == [3, 2, 1] and done == [2, 1]


@pytest.mark.parametrize(("name", "value", "refused"), [
    ("needle", -math.inf, True), ("needle", math.nan, True), ("distractor", -math.inf, True),
    ("distractor", math.nan, False), ("candidate", math.nan, False),
])  # fmt: skip
def test_one_number_that_is_not_finite(lens, monkeypatch, name, value, refused):
    own = reading._read

    def read(logs, needles, distractors):
        found = own(logs, needles, distractors)
        if 3 in needles:
            found[name][0, 1] = value
        return found

    monkeypatch.setattr(reading, "_read", read)
    if refused:
        refuses("m gives log-probabilities that are not finite", read_needles, *lens, prompts(), lambda _: None)
    else:
        assert np.isnan(getattr(read_needles(*lens, prompts(), lambda _: None), name)[0, 1])


def test_columns_are_in_the_order_of_the_metrics():
    """Examples have distractors, none, or both alike."""
    nan = math.nan
    read = Needles(
        np.log([[0.5], [0.25], [0.125]]), np.log([[0.125], [nan], [0.125]]), np.array([[0.75], [nan], [0.5]]),
        np.array([[1.0], [2], [1.5]]), np.array([4, 8, 3]), np.array([3, 1, 5]),
    )  # fmt: skip
    expected = [
        [0.5, 0.125, math.log(4), 0.75, 1, 1, 1, 0.5], [0.25, nan, nan, nan, nan, 2, 0, nan],
        [0.125, 0.125, 0, 0.5, 0, 1.5, 0, 0.125],
    ]  # fmt: skip
    np.testing.assert_allclose(columns_of(read)[:, 0], expected)
    (curve,), _ = measure(["m"], [Needles(*(np.repeat(v, 2, 1) if v.ndim > 1 else v for v in vars(read).values()))], 0)
    assert (curve["examples"], curve["tokens"]) == (3, 5.0) and curve["chance"] == pytest.approx((1 / 3 + 1 / 5) / 2)
    assert curve["average"].value == pytest.approx(0.875 / 3) and len(curve["layers"]) == 2


@pytest.mark.parametrize(("prompt", "text", "first"), [
    ("attic", "attic cellar", 1), ("attic ", "attic cellar", 1), ("to a", "to a cellar", 2),
    (" attic", " attic cellar", 1), ("to\n", "to\ncellar", 1),
])  # fmt: skip
def test_a_word_after_a_prompt_has_one_space_before_it(prompt, text, first):
    found = _Reader("m", word_tokenizer(["attic to a cellar"]))._encode(prompt, "cellar")
    assert (found.text, found.first, len(found.ids)) == (text, first, first + 1)
    assert found.spans[first] == (len(text) - 6, len(text))


def test_what_a_model_must_have():
    asked = []
    given = dict(is_classifier=False, check_classes=asked.append, check_tokenizer=asked.append, name="m")
    with pytest.raises(InputError, match="m needs a fast tokenizer, whose offsets say where an answer begins"):
        check_readable(SimpleNamespace(**given, tokenizer=SimpleNamespace()))
    assert asked == ["a needle", "questions"]
    check_readable(SimpleNamespace(**given, tokenizer=SimpleNamespace(is_fast=True)))


def test_unknown_words_are_those_of_the_prompt():
    tokenizer = word_tokenizer(["attic to a cellar"])
    reader = _Reader("m", tokenizer)
    whole = reader._encode("to <unk> zebra a lion", "cellar")
    assert reader._unknown(whole) == 2
    tokenizer.unk_token = None
    assert reader._unknown(whole) == 0
