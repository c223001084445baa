"""Typing errors: their rates and kinds, and accuracies of models whose answers are known."""

import re

import numpy as np
import pytest
from fading import fading
from refusals import refuses
import ssmscope
from ssmscope.attacks.noise.typos import NEIGHBOURS, typed, with_typos
from ssmscope.data.text import text_data

TEXT = "The quick brown fox jumps over the lazy dog, and 12 others too. " * 40
DATA = text_data("own", "all", ["awful film so long", "fine film so short"] * 20, [1, 0] * 20, ("bad", "good"))


def test_without_errors_a_text_stays_and_letters_alone_change():
    assert with_typos(TEXT, 0.0, 1) == TEXT
    typed = with_typos(TEXT, 1.0, 1)
    kept = r"[^a-z]"
    assert "".join(re.findall(kept, typed, re.IGNORECASE)) == "".join(re.findall(kept, TEXT, re.IGNORECASE))
    assert with_typos("12, 3.", 1.0, 0) == "12, 3."


def test_every_kind_of_error_occurs_as_often():
    found = {"same": 0, "swap": 0, "drop": 0, "double": 0, "key": 0}
    for seed in range(4000):
        typed = with_typos("aq", 0.02, seed)
        near = any(typed == key + "q" for key in NEIGHBOURS["a"]) or any(typed == "a" + key for key in NEIGHBOURS["q"])
        kind = {"aq": "same", "qa": "swap", "a": "drop", "q": "drop", "aaq": "double", "aqq": "double"}.get(typed)
        assert kind or near or len(typed) >= 2  # Both letters, now and then.
        found[kind or "key"] += 1
    # Swaps need a next letter: a second letter that would be swapped is doubled.
    share = {kind: number / (2 * 4000 * 0.02) for kind, number in found.items()}
    for kind, expected in {"swap": 1 / 8, "drop": 1 / 4, "double": 3 / 8, "key": 1 / 4}.items():
        assert share[kind] == pytest.approx(expected, abs=0.12), kind


@pytest.mark.parametrize("rate", [0.1, 0.4, 1.0])
def test_errors_per_letter_are_those_of_letters_that_no_swap_takes(rate):
    """Within a word the chance p that no swap takes a letter satisfies p = 1 − p · rate / 4."""
    words, errors = 400, 0
    for seed in range(words):
        made, count = typed("etaoin" * 20, rate, seed)
        errors += count
        assert count <= 120 and (rate < 1 or made != "etaoin" * 20)
    share = rate / (1 + rate / 4)
    assert errors / (words * 120) == pytest.approx(share, abs=4 * (share / (words * 120)) ** 0.5)


def test_the_page_says_how_many_errors_there_are():
    texts = [f"{'fine' if at % 2 else 'awful'}{' film so' * at}" for at in range(2, 80)]
    data = text_data("own", "all", texts, [at % 2 for at in range(2, 80)], ("bad", "good"))
    found = ssmscope.noise(fading({"fine": -1.0, "awful": 1.0, "film": 0.0, "so": 0.0}), data, rates=[0.1, 0.4])
    letters = sum(map(str.isalpha, "".join(texts)))
    for level in found.levels:
        errors = sum(typed(text, level.rate, 0)[1] for text in texts) / letters
        assert level.errors == errors and f"{errors:.3f}" in str(found)
        # In "film so" a letter is taken by a swap of the letter before it, unless that was taken itself.
        none, swap = 1.0, level.rate / 4
        second, third = 1 - swap, 1 - swap * (1 - swap)
        share = level.rate * (none + second + third + (1 - swap * third) + none + second) / 6
        assert errors == pytest.approx(share, abs=4 * (share / letters) ** 0.5)
    assert found.headline.endswith(f"with errors in {100 * errors:.3g} % of the letters") and errors < 0.38


def test_a_higher_rate_has_the_errors_of_a_lower_one():
    words = TEXT.split(" ")
    changed = [
        {at for at, (a, b) in enumerate(zip(words, with_typos(TEXT, rate, 3).split(" "))) if a != b}
        for rate in (0.02, 0.1)
    ]
    assert changed[0] < changed[1] and len(changed[0]) == pytest.approx(0.02 * 49 * 40, rel=0.35)


def test_keys_have_their_neighbours():
    assert set(NEIGHBOURS["g"]) == set("tyfhvb") and set(NEIGHBOURS["q"]) == set("wa")
    assert all(key in NEIGHBOURS[other] for key, near in NEIGHBOURS.items() for other in near)


def test_accuracy_falls_where_the_word_that_decides_is_hit():
    model = fading({"fine": -1.0, "awful": 1.0, "film": 0.0, "so": 0.0})
    result = ssmscope.noise(model, DATA, rates=[0.0, 0.3])
    assert result.clean.value == 1 and result.levels[0].drop.value == 0
    for row, text in enumerate(DATA.texts[:2]):
        typed = with_typos(text, 0.3, 0)
        word = ("awful", "fine")[row]
        # Without the word all words weigh nothing, and the answer is the first class.
        expected = word in typed.split() or row == 1
        assert result.right[2, row] == expected
    lost = 1 - result.right[2].mean()
    assert result.levels[1].drop.value == pytest.approx(lost) and result.average_drop.value == pytest.approx(lost / 2)


def test_a_text_has_the_same_errors_in_every_sample():
    model = ssmscope.load("demo/sst2-mamba2")
    texts = ["A gripping film with a wonderful cast.", "Dull, overlong and wooden.", "It made me laugh."]
    every = ssmscope.noise(model, text_data("own", "all", texts, [1, 0, 1], ("negative", "positive")))
    last = ssmscope.noise(model, text_data("own", "all", texts[2:], [1], ("negative", "positive")))
    assert np.array_equal(every.right[:, 2:], last.right)
    assert [each.typed for each in every.mistyped] == [with_typos(e.text, e.rate, 0) for e in every.mistyped]


def test_a_rate_given_twice_is_refused():
    refuses(r"rates names 0\.1 twice", ssmscope.noise, fading({"fine": 1.0}), DATA, rates=[0.1, 0.1])
