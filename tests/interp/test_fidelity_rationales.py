"""Fidelity on data with rationales: plausibility is measured too, the same as alone."""

from dataclasses import replace

import numpy as np
import pytest
from bags import bag, by_word, texts
from refusals import refuses
from ssmscope.errors import InputError
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.fidelity.measures import MEASURES
from ssmscope.interp.plausibility import plausibility

WORDS = ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")


def test_plausibility_stands_beside():
    weights = dict(zip(WORDS, np.linspace(1, 0.1, 10)))
    marked = [((0, 1),), None, ((2, 3), (4, 5))]
    data = texts("a b c d", "b c d", "j a b i", rationales=marked)
    found = fidelity_auc(
        bag(weights), data, methods={"own": by_word(weights), "last": by_word({w: -v for w, v in weights.items()})}
    )
    assert found.measures == (*MEASURES, "token_f1", "iou_f1", "auprc") and found.marked == 0.375
    # 37.5 % of 4 tokens are 1.5, rounded to 2: a, b of the first text, and what is marked of the third
    assert found.estimate("own", "token_f1").value == pytest.approx((2 / 3 + 1) / 2)
    assert found.estimate("own", "auprc").value == 1 and found.best("auprc") == ("own",)
    assert found.estimate("last", "auprc").value < 0.6
    assert np.isnan(found.values[:, 1, 5:]).all() and np.isfinite(found.values[:, 1, :5]).all()
    assert "1 of 3 texts have no rationale; plausibility leaves them out" in found.notes
    assert found.rankings.shape == (20, 8) and np.isfinite(found.rankings).all()
    frame = found.to_frame().set_index(["method", "measure"])["texts"]
    assert frame["own", "auprc"] == 2 and frame["own", "delta"] == 3
    assert "token F1" in str(found) and found.figure() is not None


def test_plausibility_alone_is_the_same():
    weights = dict(zip(WORDS, np.linspace(1, 0.1, 10)))
    data = texts("a b c d", "b c d", "j a b i", rationales=[((0, 1),), None, ((2, 3), (4, 5))])
    methods = {"own": by_word(weights), "last": by_word({w: -v for w, v in weights.items()})}
    beside = fidelity_auc(bag(weights), data, methods=methods)
    found = plausibility(bag(weights), data, methods=methods)
    assert found.methods == ("own", "last") and found.texts == (0, 2) and found.left_out == 1
    assert found.values == pytest.approx(beside.values[:, [0, 2], len(MEASURES) :])
    assert found.share == beside.marked and found.provenance["data"] == beside.provenance["data"]
    for top, size in ((2, 2), (2.0, 2), (0.5, 0.5)):
        assert plausibility(bag(weights), data, methods=methods, top=top).top == size
    assert plausibility(bag(weights), data, methods=methods, batch_size=1).values == pytest.approx(found.values)
    refuses("no text of toy .test. has a rationale", plausibility, bag(weights), texts("a b c d"), methods=methods)
    with pytest.raises(InputError, match="top is 1.5; allowed is a whole number of tokens"):
        plausibility(bag(weights), data, methods=methods, top=1.5)


def test_long_texts_are_left_out_of_plausibility():
    weights = dict(zip(WORDS, np.linspace(1, 0.1, 10)))
    data = texts("a b c", "b a", "j a b i c", rationales=[((0, 1),), ((2, 3),), ((0, 1),)])
    model, method = bag(weights), by_word(weights)

    def of(**options):
        return plausibility(model, data, methods={"own": method}, **options)

    # A special token follows each text.
    assert [of(max_tokens=most).texts for most in (3, 4, 5, 6)] == [(1,), (0, 1), (0, 1), (0, 1, 2)]
    assert [of(max_tokens=most).left_out for most in (3, 6)] == [2, 0]
    refuses("name each once", plausibility, model, data, methods=["gradxinput", "gradxinput"])
    with pytest.raises(InputError, match=r"toy \(test\) has no example"):
        plausibility(model, replace(data, texts=(), labels=(), rationales=()), methods={"own": method})
    refuses("a column 'rationale' or an ERASER folder, and texts", of, max_tokens=2)
    found = of(limit=2, seed=3, top=1)
    assert found.provenance["data"]["examples"] == 2 and found.provenance["options"]["top"] == 1
    assert found.provenance["seed"] == 3 and found.provenance["model"] == "bag" and found.top == 1
    for top, size in ((1.0, 1), (3.0, 3), (0.5, 0.5)):
        result = of(top=top)
        given = result.provenance["options"]["top"]
        assert (result.top, given) == (size, size) and type(result.top) is type(given) is type(size)
    assert of().values[0, :, 2].tolist() == pytest.approx([1, 1, 0.2])  # j is the lowest of five
