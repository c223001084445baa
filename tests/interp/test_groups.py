"""Scores of sentences, lines and spans are the sums of their tokens' scores."""

import numpy as np
import pytest
from refusals import refuses
import ssmscope

TEXT = "A dull start. But what an ending!\nGo and see it"
model = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/sst2-mamba2"))


@pytest.mark.parametrize(("by", "names"), [
    (["sentence"], ["A dull start.", "But what an ending!", "Go and see it"]),
    (["line"], ["A dull start. But what an ending!", "Go and see it"]),
    (["dull", "an ending"], ["…", "dull", "an ending"]),
])  # fmt: skip
def test_parts_have_the_sums_of_their_tokens(model, by, names):
    (plain,), (text,) = (ssmscope.explain(model, [TEXT], methods=["lrp", "gradxinput"], by=each) for each in (None, by))
    assert [token for token, word in zip(text.tokens, text.words) if word is not None] == names
    for own, tokens in zip(text.attributions, plain.attributions):
        assert own.scores.sum() == pytest.approx(tokens.scores.sum(), rel=1e-4, abs=1e-5)
        special = [at for at, word in enumerate(plain.words) if word is None]
        kept = [at for at, word in enumerate(text.words) if word is None]
        np.testing.assert_allclose(own.scores[kept], tokens.scores[special])
        lowered = [token.lower().strip("Ġ▁# ") for token in plain.tokens]
        if by == ["sentence"]:
            end = lowered.index(".") + 1
            first = [at for at in range(end) if plain.words[at] is not None]
            assert own.scores[text.tokens.index(names[0])] == pytest.approx(tokens.scores[first].sum(), rel=1e-4)
        if by[0] == "dull":
            assert own.scores[text.tokens.index("dull")] == pytest.approx(
                tokens.scores[lowered.index("dull")], rel=1e-4
            )


def test_spans_stay_apart(model):
    for by, says in ((["dull", "A dull"], "spans apart"), (["house"], "has no words 'house'")):
        refuses(says, ssmscope.explain, model, [TEXT], methods=["lrp"], by=by)
