"""One kind of interval for one accuracy, whichever verb measures it."""

import numpy as np
import pytest
from bags import LABELS, bag
import ssmscope
from ssmscope.core.bootstrap import Estimate, estimate, resampled_sums, share
from ssmscope.data.text import TextData, text_data
from ssmscope.interp.scoring import scored_examples

WEIGHTS = {"good": 2.0, "bad": -1.0, "dull": -3.0}
LINES = tuple(" ".join(("good", "bad", "dull")[(at // step) % 3] for step in (1, 3, 9)) for at in range(24))


def data(count: int = 24) -> TextData:
    """Texts of three words, of which the labels of some are wrong for the model."""
    return text_data("toy", "test", LINES[:count], [(at // 2) % 2 for at in range(count)], LABELS)


@pytest.fixture(scope="module")
def wanted() -> Estimate:
    """Accuracy as `evaluate` has it, which is Wilson's for the right answers."""
    found = ssmscope.evaluate(bag(WEIGHTS), data())
    right = int(found.values[:, 0].sum())
    assert 0 < right < 24 and found.scores[0].estimate == share(right, 24)
    return share(right, 24)


@pytest.mark.parametrize(("verb", "options"), [
    ("position", {"regions": "0:1,1:2", "replacement": "zeros"}),
    ("noise", {"rates": [0.3]}),
    ("insertion", {"insert": "dull", "places": 2}),
    ("overflow", {"filler": "bad", "lengths": [0, 3]}),
])  # fmt: skip
def test_clean_accuracy_has_the_interval_of_evaluate(verb, options, wanted):
    found = getattr(ssmscope, verb)(bag(WEIGHTS), data(), **options)
    assert found.clean == wanted
    assert "Wilson's of shares" in str(found)


def test_every_share_of_an_attack_is_wilsons_and_drops_are_not():
    found = ssmscope.insertion(bag(WEIGHTS), data(), insert="dull", places=2)
    right = found.right
    for at, place in enumerate(found.curves[0].places, 1):
        assert place.accuracy == share(int(right[at].sum()), 24)
        flipped = int((right[0] & ~right[at]).sum())  # Of two classes a right answer that changes is wrong.
        assert place.flipped == share(flipped, int(right[0].sum()))
        sums = resampled_sums(np.stack([right[at], right[0]], axis=1).astype(float))
        assert place.drop == estimate(1 - sums[:, 0] / sums[:, 1])
    assert found.curves[0].worst == share(int(right[1:].all(0).sum()), 24)


def test_one_region_has_the_interval_of_the_average():
    found = ssmscope.position(bag(WEIGHTS), data(), regions="0:2", replacement="other")
    (one,) = found.regions
    assert found.average == one.accuracy == share(round(24 * one.accuracy.value), 24)
    right = round(found.clean.value * 24)
    assert one.success == share(round(one.success.value * right), right)


def test_levels_of_accuracy_are_wilsons_and_changes_are_not(wanted):
    examples = scored_examples(bag(WEIGHTS), data())
    plain = np.zeros((24, 2, 3))
    plain[: round(24 * wanted.value), 0, 1] = 1.0
    levels, means = examples.levels(plain, 0), examples.means(plain, 0)
    assert levels[0, 1].tolist() == [wanted.value, wanted.low, wanted.high]
    assert levels[1, 1].tolist() == [0.0, 0.0, share(0, 24).high] and means[1, 1].tolist() == [0.0] * 3
    assert (levels[:, [0, 2]] == means[:, [0, 2]]).all()
