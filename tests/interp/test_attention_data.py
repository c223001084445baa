"""Share of implicit attention on the marked tokens of a data set: the sums of single maps, even shares, refusals."""

import json

import numpy as np
import pytest
from refusals import refuses
import ssmscope
from ssmscope.api.results import Result

FILM, CLOCK = "A gripping film, with a long and tedious middle.", "The clock is slow."
ROWS = [
    {"text": FILM, "label": "a", "needle": [[2, 10], [29, 36]], "other": ["film"]},
    {"text": "Nothing is marked here.", "label": "b", "needle": None},
    {"text": CLOCK, "label": "b", "needle": [0, 1, 0, 0]},
]
model = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/babi-diff-mamba", dtype="float32"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def marked(model, text: str, *spans: tuple[int, int]) -> list[int]:
    offsets = model.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return [at for at, (start, stop) in enumerate(offsets) if any(start < b and stop > a for a, b in spans)]


@pytest.mark.parametrize("options", [{"rows": "last"}, {}, {"gradient": True}, {"rollout": True}, {"parts": True}])
def test_shares_are_those_of_single_maps(model, file, options):
    found = ssmscope.attention(model, data=file, relevant="needle", **options)
    assert (found.texts, found.left_out) == (2, 1)
    shares, even = [], []
    for text, spans in ((FILM, [(2, 10), (29, 36)]), (CLOCK, [(4, 9)])):
        places, one = marked(model, text, *spans), ssmscope.attention(model, text, **options)[0]
        later = one.queries > places[-1]
        weights = [np.abs(each.values[later].astype(float)) for each in one.maps]
        weights = [each[each.any(1)] for each in weights]  # No gradient reaches some queries.
        shares.append([(each[:, places].sum(1) / each.sum(1)).mean() for each in weights])
        even.append((len(places) / (one.queries[later] + 1)).mean())
    assert [each.share.value for each in found.maps] == pytest.approx(np.mean(shares, axis=0), rel=1e-5)
    assert [(each.layer, each.part) for each in found.maps] == [(each.layer, each.part) for each in one.maps]
    assert found.even == pytest.approx(np.mean(even)) and found.maps[0].share.has_interval


def test_all_formats_and_another_column(model, file, tmp_path):
    found = ssmscope.attention(model, ssmscope.load_text(file, rationale="needle"), rows="last")
    paths = found.save(tmp_path, "attention")
    assert Result.load(paths["json"]) == found
    assert found.to_frame()["share"].tolist() == [each.share.value for each in found.maps]
    top = max(found.maps, key=lambda each: each.share.value)
    assert f"{top.share.value:.3f}" in found.headline and f"in layer {top.layer} to" in found.headline
    other = ssmscope.attention([model, model], data=file, relevant="other", rows="last")
    assert other.results[0].texts == 1 and other.results[0].even != found.even
    assert len(other.to_frame()) == 2 * len(found.maps) and other.figure() and "layer 5" in other.to_text()


@pytest.mark.parametrize("options, message", [
    ({"text": "A film."}, "relevant=… needs data=…"),
    ({"data": "rows", "span": "0:2"}, "those of a data set are marked in a column"),
    ({"text": "A film.", "relevant": None, "limit": 3}, "limit=… is the number of texts"),
    ({"data": "rows", "relevant": "nedle"}, "no column 'nedle'; it has text, label, needle, other.*'needle'"),
    ({"data": "rows", "relevant": None}, "has marked tokens: give a file with a column 'rationale'"),
    ({"data": "planted-position"}, "planted-position has no column 'needle'"),
])  # fmt: skip
def test_what_cannot_be_is_refused(model, file, options, message):
    given = {"relevant": "needle", **options}
    given |= {"data": file} if given.get("data") == "rows" else {}
    refuses(message, ssmscope.attention, model, **{name: value for name, value in given.items() if value is not None})
