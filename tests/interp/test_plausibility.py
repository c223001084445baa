"""Agreement with human rationales: by hand, against scikit-learn, and from a file to its tokens."""

import csv
import itertools
import json
import re

import numpy as np
import pytest
from bags import LABELS
from refusals import refuses
from ssmscope.data.text import load_text, text_data
from ssmscope.errors import InputError
from ssmscope.interp.explain.result import Explanation
from ssmscope.interp.explain.scored_text import Attribution, ExplainedText
from ssmscope.interp.plausibility.measure import (
    average_precision,
    chance_precision,
    iou_f1,
    plausibility_of,
    rationale_size,
    token_f1,
)


def bits(text: str) -> np.ndarray:
    return np.array([digit == "1" for digit in text])


class TestMeasures:
    @pytest.mark.parametrize(("chosen", "marked", "tokens", "spans"), [
        ("110000", "110000", 1, 1),
        ("110000", "000011", 0, 0),
        ("110000", "100000", 2 / 3, 1),  # 1 of 2 tokens: just enough
        ("110100", "110000", 0.8, 2 / 3),
        ("111000", "100000", 0.5, 0),
        ("110011", "110000", 2 / 3, 2 / 3),  # one of two spans is right
        ("100001", "110011", 2 / 3, 1),
        ("111111", "101101", 0.8, 0),  # one span of 6 against three of 1, 2, 1
        ("011010", "111011", 0.75, 1),  # 2 of 3, 1 of 2
        ("000000", "010000", 0, 0),
        ("010000", "000000", 0, 0),
        ("000000", "000000", 0, 0),
    ])  # fmt: skip
    def test_by_hand(self, chosen, marked, tokens, spans):
        assert token_f1(bits(chosen), bits(marked)) == pytest.approx(tokens)
        assert iou_f1(bits(chosen), bits(marked)) == pytest.approx(spans)

    def test_the_threshold(self):
        assert iou_f1(bits("1110"), bits("1000"), threshold=1 / 3) == 1
        assert iou_f1(bits("1100"), bits("0110"), threshold=0.34) == 0

    def test_average_precision_is_that_of_scikit_learn(self):
        metrics = pytest.importorskip("sklearn.metrics")
        draw = np.random.default_rng(0)
        for n in (1, 2, 5, 30):
            for _ in range(40):
                marked = draw.random(n) < 0.4
                scores = draw.integers(-3, 4, n).astype(float) if draw.random() < 0.5 else draw.normal(size=n)
                if marked.any():
                    assert average_precision(scores, marked) == pytest.approx(
                        metrics.average_precision_score(marked, scores)
                    )
        assert np.isnan(average_precision(np.ones(3), np.zeros(3, dtype=bool)))

    @pytest.mark.parametrize(("n", "r"), [(1, 1), (4, 1), (5, 3), (6, 2), (4, 4)])
    def test_chance_is_the_mean_over_all_rankings(self, n, r):
        marked = np.arange(n) < r
        every = [average_precision(np.array(order, dtype=float), marked) for order in itertools.permutations(range(n))]
        assert chance_precision(n, r) == pytest.approx(np.mean(every))

    def test_sizes(self):
        assert [rationale_size(10, top) for top in (0.25, 0.28, 0.04, 3, 99)] == [2, 3, 1, 3, 10] and rationale_size(
            1, 0.3
        ) == 1


SCORES = {
    "good": [np.array([0.9, 0.8, -3.0, 0.1]), np.array([0.0, 5.0]), np.array([1.0, 2.0, 3.0, 4.0])],
    "poor": [np.array([0.0, 0.1, 3.0, 2.0]), np.array([1.0, 0.0]), np.array([4.0, 3.0, 2.0, 1.0])],
}
MARKED = [bits("1100"), None, bits("0001")]


class TestResult:
    def test_scores_and_rationales(self):
        found = plausibility_of(SCORES, MARKED)
        assert found.share == 0.375 and found.top == 0.375 and found.left_out == 1 and found.texts == (0, 2)
        # 37.5 % of 4 tokens are 1.5, rounded to 2
        frame = found.to_frame().set_index(["method", "measure"])["value"]
        assert frame["good", "token_f1"] == pytest.approx((1 + 2 / 3) / 2) and frame["good", "auprc"] == 1
        assert frame["poor", "token_f1"] == 0 and frame["poor", "iou_f1"] == 0
        assert frame["poor", "auprc"] == pytest.approx(((1 / 3 + 2 / 4) / 2 + 1 / 4) / 2)
        assert found.chance == pytest.approx((chance_precision(4, 2) + chance_precision(4, 1)) / 2)
        assert plausibility_of(SCORES, MARKED, top=1).values[0, :, 0].tolist() == [pytest.approx(2 / 3), 1]
        assert plausibility_of(SCORES, [[1, 1, 0, 0], None, [0, 0, 0, 1]]).values.tolist() == found.values.tolist()

    def test_intervals_follow_the_texts(self):
        draw = np.random.default_rng(0)
        masks = [bits("0010010000") for _ in range(50)]
        found = plausibility_of({"noise": [draw.random(10) for _ in masks]}, masks)
        low, high = found.to_frame().set_index("measure").loc["auprc", ["low", "high"]]
        assert low < found.chance < high and high - low < 0.3

    def test_of_an_explanation(self):
        def text(scores):
            parts = tuple(
                Attribution(name, np.array([9.0, *own, 9.0], dtype=np.float32), None, None, None)
                for name, own in scores.items()
            )
            size = len(parts[0].scores)
            return ExplainedText(("x",) * size, (None, *range(size - 2), None), "good", 0.9, "good", 0.9, parts)

        rows = [text({name: own[row] for name, own in SCORES.items()}) for row in range(3)]
        explained = Explanation({"model": "toy"}, tuple(rows), ("good", "poor"), 5)
        expected = plausibility_of(SCORES, MARKED)
        whole = [None if mask is None else [0, *mask, 0] for mask in MARKED]  # with special tokens
        for rationales in (MARKED, whole):
            found = plausibility_of(explained, rationales)
            assert found.values == pytest.approx(expected.values) and found.provenance["model"] == "toy"

    @pytest.mark.parametrize(("options", "says"), [
        ({"rationales": MARKED[:2]}, "2 rationales were given for 3 texts"),
        ({"rationales": [None] * 3}, "no text has a rationale"),
        ({"rationales": [bits("110"), None, None]}, "text 0 is not a 0 or 1 for each of its 4 tokens"),
        ({"rationales": [[0, 2, 0, 0], None, None]}, "text 0 is not a 0 or 1 for each of its 4 tokens"),
        ({"rationales": [bits("0000"), None, None]}, "text 0 marks no token; give None"),
        ({"top": 0}, "top is 0; allowed"),
        ({"top": 1.5}, "top is 1.5; allowed"),
        ({"explained": {}}, "no method was given"),
        ({"explained": {"x": [np.full(4, np.nan), SCORES["good"][1], SCORES["good"][2]]}}, "x gives text 0 are not 4"),
    ])  # fmt: skip
    def test_refuses(self, options, says):
        refuses(re.escape(says), plausibility_of, **{"explained": SCORES, "rationales": MARKED} | options)


TEXT = "  a gripping film , a joy "


def load(path, *rationales):
    """A file of one text with these rationales, by the suffix of its path."""
    rows = [{"text": TEXT, "label": "good", "rationale": each} for each in rationales]
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return load_text(path, label_names=LABELS)


class TestFiles:
    @pytest.mark.parametrize(("rationale", "marked"), [
        ([[4, 12]], ["gripping"]), ([[19, 25], [4, 12]], ["gripping", " a joy"]),
        ([[4, 12], [10, 17]], ["gripping film"]), ([0, 1, 1, 0, 0, 1], ["gripping", "film", "joy"]),
        ("0 1 0 0 0 0", ["gripping"]), ("gripping film", ["gripping film"]), (["gripping", "joy"], ["gripping", "joy"]),
        ([[0, 26]], ["a gripping film , a joy"]), ("", None), ([], None), ([0, 0, 0, 0, 0, 0], None),
    ])  # fmt: skip
    def test_every_form_in_every_format(self, tmp_path, rationale, marked):
        for suffix in (".jsonl", ".csv", ".parquet"):
            given = json.dumps(rationale) if suffix == ".csv" and not isinstance(rationale, str) else rationale
            data = load(tmp_path / f"x{suffix}", given)
            assert data.texts == ("a gripping film , a joy",)
            if marked is None:
                assert data.rationales is None
            else:
                (spans,) = data.rationales
                assert [data.texts[0][a:b] for a, b in spans] == marked

    def test_a_text_without_one_among_others(self, tmp_path):
        data = load(tmp_path / "x.jsonl", None, "joy", "")
        assert data.rationales == (None, ((20, 23),), None)
        assert data.take([1]).rationales == (((20, 23),),) and data.take([0]).rationales is None
        assert data.sample(2, seed=0).rationales == tuple(data.rationales[i] for i in sorted(_drawn(2)))

    def test_fingerprints(self, tmp_path):
        marked, other, plain = (load(tmp_path / "x.jsonl", each) for each in ("joy", "film", None))
        assert len({marked.fingerprint, other.fingerprint, plain.fingerprint}) == 3
        assert plain == text_data("x", "all", plain.texts, plain.labels, LABELS)

    @pytest.mark.parametrize(("rationale", "says"), [
        ("terrible", "'terrible', is not in its text; rename the column"),
        ("a", "'a', is in its text 2 times; give spans"),
        ([[4, 99]], "the span [4, 99]; allowed are [start, end] within 0 to 26"),
        ([[5, 5]], "the span [5, 5]"),
        ([[1, 2, 3]], "the span [1, 2, 3]"),
        ([0, 1], "has 2 numbers for 6 words"),
        ([0, 5], "allowed are spans [[start, end], …], a 0 or 1 for every word, or words of the text"),
        (7, "is 7; allowed are spans"),
    ])  # fmt: skip
    def test_refuses(self, tmp_path, rationale, says):
        with pytest.raises(InputError, match=re.escape(says)) as raised:
            load(tmp_path / "x.jsonl", rationale)
        assert "the rationale of row 1" in str(raised.value) and "\n" not in str(raised.value)


def _drawn(n: int) -> list[int]:
    import random

    return random.Random(0).sample(range(3), n)
