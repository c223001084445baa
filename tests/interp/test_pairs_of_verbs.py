"""Ablation and steering of pairs: shares of the answer, by runs made by hand and by patching."""

import json

import numpy as np
import pytest
import torch
import ssmscope
from ssmscope.api.analysis import Call
from ssmscope.core.edits import Edit, recorded
from ssmscope.data.pairs import is_pairs, read_pairs
from ssmscope.errors import InputError
from ssmscope.interp.pairs import ScoredPairs, encode_pairs
from ssmscope.interp.patch.over_pairs import PairGrids, partners_of
from ssmscope.zoo.compiled import compiled, pairs_of

PLACES = [("attic", "library"), ("kitchen", "cellar"), ("pantry", "stable"), ("bakery", "attic")]
TEXT = "Clara walked to the {} . Where is Clara ?"
ROWS = [{"clean": TEXT.format(a), "corrupted": TEXT.format(b)} for a, b in PLACES]
model = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/babi-mamba2"))


def test_ablation_by_the_corrupted_text_is_patching_with_noise(model) -> None:
    data = read_pairs(ROWS)
    pairs = encode_pairs(model, data)
    grids = PairGrids(pairs, "noise", partners_of(pairs, data))
    layers, changes = grids.grid("output", {"text": [tuple(range(n)) for n in pairs.clean.lengths]})
    assert layers == [0, 1, 2, 3, 4, 5]
    changes = changes[..., 0]
    found = ssmscope.ablate(model, ROWS, what="layer", by="resample")
    assert found.metric == "share" and found.measures == ("share",) and found.plain == pytest.approx(1, abs=1e-6)
    expected = changes.sum(0) / (grids.other - grids.base).sum()
    assert expected.max() > 0.5
    assert found.harms[:, 0, 0] == pytest.approx(expected, abs=1e-5)


def test_ablation_by_the_mean_of_the_clean_texts(model, tmp_path) -> None:
    pairs = encode_pairs(model, read_pairs(ROWS))
    kept: dict[int, torch.Tensor] = {}
    model.run(pairs.clean, edits=recorded("output", kept))
    mean = kept[3][pairs.clean.mask].mean(0)
    edit = Edit("mean", "output", lambda value, site: mean.expand_as(value), (3,))
    logits = model.run(pairs.clean, edits=edit, last_only=True).logits
    ends = pairs.plain(pairs.clean), pairs.plain(pairs.corrupted)
    lost = ends[0] - pairs.measure(logits, range(4)).numpy()
    found = ssmscope.ablate(model, ROWS, what="layer")
    unit = next(number for number, unit in enumerate(found.units) if unit.layer == 3)
    assert found.harms[unit, 0, 0] == pytest.approx(lost.sum() / (ends[0] - ends[1]).sum(), abs=1e-5)
    assert found.harms[unit, 0, 1] < found.harms[unit, 0, 0] < found.harms[unit, 0, 2]
    assert "share worse by" in found.headline and "4 pairs of the data" in found.to_text()
    assert list(found.to_frame().columns)[4:] == ["share", "share_low", "share_high", "can_go"]
    found.save(tmp_path, "ablate", ("json", "csv", "png", "html"))
    assert ssmscope.Result.load(tmp_path / "ablate.json") == found


def test_the_layer_that_is_read_is_found_and_the_decoy_can_go() -> None:
    made = compiled("recall", "gated-delta", decoy=True)
    found = ssmscope.ablate(ssmscope.load(made.module), pairs_of("recall", 12), what="layer", by="resample")
    assert found.harms[:, 0, 0] == pytest.approx([0, 1], abs=1e-3) and found.can_go == (0,)


def test_a_direction_of_one_half_steers_the_other(model, tmp_path) -> None:
    found = ssmscope.steer(model, data=ROWS, layer=4, strengths=[0.0, 4.0], random=2)
    pairs = ScoredPairs.of(model, read_pairs(ROWS))
    kept: dict[str, dict[int, torch.Tensor]] = {"clean": {}, "corrupted": {}}
    for side, into in kept.items():
        model.run(getattr(pairs.pairs, side), edits=recorded("residual", into, layers=[4]))
    change = (kept["clean"][4] - kept["corrupted"][4])[:, -1]
    moved = 0.0
    for rows, others in (([0, 2], [1, 3]), ([1, 3], [0, 2])):
        mean = change[others].mean(0)
        edit = Edit("add", "residual", lambda value, site, mean=mean: value + 4 * mean, (4,))
        logits = model.run(pairs.pairs.corrupted.rows(rows), edits=edit, last_only=True).logits
        moved += float((pairs.pairs.measure(logits, rows).numpy() - pairs.corrupted[rows]).sum())
    assert moved > 0.1 * pairs.whole.sum()
    assert found.probability[0, :, 0] == pytest.approx([0, moved / pairs.whole.sum()], abs=1e-4)
    assert found.by_direction[0] == pytest.approx(found.probability[0, :, 0])
    assert torch.tensor(found.direction[0]) == pytest.approx(change.mean(0).double(), abs=1e-5)
    assert "share of the way to the clean run" in found.headline and found.to_frame().columns[3] == "share"
    found.save(tmp_path, "steer", ("json", "csv", "png", "html"))
    assert ssmscope.Result.load(tmp_path / "steer.json") == found


def test_pairs_may_be_steered_by_other_texts(model) -> None:
    options = {
        "toward": ["Bob is here ."], "away": ["Where is Bob ?"], "layer": 2, "strengths": [0.0, 1.0], "random": 1,
    }  # fmt: skip
    found = ssmscope.steer(model, data=ROWS[:1], **options)
    batch = model.encode(ROWS[0]["corrupted"])
    single = ssmscope.steer(model, batch, data=None, **options)
    assert np.allclose(found.direction[0], single.direction[0])
    assert found.probability.shape == (3, 2, 3) and found.answers == (PLACES[0][0],)


def test_both_verbs_take_files_of_pairs(model, tmp_path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    assert is_pairs(path) and is_pairs("recall") and is_pairs(ROWS)
    texts = tmp_path / "texts.csv"
    texts.write_text("text,label\nclean and corrupted,1\n", encoding="utf-8")
    assert not any(map(is_pairs, (texts, "sst2", None, tmp_path / "no.csv", [("a", 1)], 3)))
    (ablated,) = Call.of("ablate", ["demo/babi-mamba2"], {"data": str(path), "what": "layer"}).run()
    assert ablated.metric == "share" and ablated.provenance["data"]["examples"] == 4
    options = {"data": str(path), "strengths": "0,1", "random": "1"}
    (steered,) = Call.of("steer", ["demo/babi-mamba2"], options).run()
    assert steered.measure == "share" and len(steered.answers) == 4


@pytest.mark.parametrize("name", ["ablate", "steer"])
def test_what_does_not_go_with_pairs_is_refused(model, name: str) -> None:
    refused = {
        "ablate": (({"metric": "accuracy"}, "leave metric=… out"), ({"split": "test"}, "pairs have no splits")),
        "steer": (
            ({"answer": "attic"}, "which have their answers"),
            ({"toward": ["a"]}, "no text to steer to or from"),
            ({"limit": 1}, "has one pair"),
            ({"texts": "Where is Clara ?"}, "leave the texts out"),
            ({"data": None, "toward": ["a"], "away": ["b"]}, "no text; give text"),
        ),
    }
    for options, said in refused[name]:
        with pytest.raises(InputError, match=said):
            getattr(ssmscope, name)(model, **{"data": ROWS, **options})
    with pytest.raises(InputError, match="pair 1 of the data: both texts have the same tokens"):
        getattr(ssmscope, name)(model, data=[{"clean": "Where is Clara ?", "corrupted": "Where is Clara ?"}] * 2)
