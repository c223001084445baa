"""Activation patching: every cell is a run of its own, both ends are the two runs, and what cannot be patched."""

from __future__ import annotations

import numpy as np
import pytest
from examples import random_example
from loud import loud
from planned import tiny_model

import ssmscope
from ssmscope.analysis import Call
from ssmscope.edits import new_state, recorded, replaced
from ssmscope.errors import InputError
from ssmscope.model import Model
from ssmscope.results import Result

CLEAN, CORRUPTED = [5, 17, 3, 9, 22, 1, 4, 60], [5, 17, 30, 9, 22, 7, 4, 60]
FIRST, LAST = 2, 7
NAMES = ("mamba", "mamba2", "diff-mamba", "groupmamba", "gfssm", "rwkv", "retnet", "gated-deltanet", "bamba")
ASKED = dict(answer=3, contrast=8)


@pytest.fixture(scope="module")
def models():
    return {name: Model(loud(random_example(name)), name=name) for name in NAMES}


def difference(model, ids, edits=()) -> float:
    logits = model.run(model.encode(ids=ids), last_only=True, edits=edits).logits[0].double()
    return float(logits[3] - logits[8])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_states(models, name, direction):
    model = models[name]
    result = ssmscope.patch(model, clean=CLEAN, corrupted=CORRUPTED, direction=direction, **ASKED)
    base, source = (CORRUPTED, CLEAN) if direction == "denoise" else (CLEAN, CORRUPTED)
    assert result.values.shape == (model.num_layers + 1, LAST, 2)
    assert (result.values[:, :FIRST] == result.base).all()  # before the first difference both runs are one
    close = dict(rel=1e-3, abs=1e-4 * abs(result.base[1] - result.other[1]))
    assert difference(model, base) == pytest.approx(result.base[1], **close)
    for place in (2, 4, 6):
        kept = {}
        keep = new_state(place, lambda state, site, kept=kept: kept.setdefault(site.layer, state))
        model.run(model.encode(ids=[source]), edits=keep)
        for layer in range(model.num_layers):
            put = new_state(place, lambda _, site, kept=kept: kept[site.layer], layers=[layer])
            assert difference(model, base, put) == pytest.approx(result.values[layer, place, 1], **close)
        if name == "bamba":  # what its attention has read stays
            put = new_state(place, lambda _, site, kept=kept: kept[site.layer])
            assert difference(model, base, put) == pytest.approx(result.values[-1, place, 1], **close)
        else:  # the whole memory is the other text's tokens followed by this one's
            joined = source[: place + 1] + base[place + 1 :]
            assert difference(model, joined) == pytest.approx(result.values[-1, place, 1], **close)
    if name != "bamba":
        assert result.effects("normalised")[-1, -1] == pytest.approx(1, abs=1e-3)
    assert Result.from_dict(result.to_dict()) == result


@pytest.mark.parametrize("site", ["output", "residual", "convolution", "head"])
@pytest.mark.parametrize("name", ["mamba2", "diff-mamba", "rwkv", "bamba"])
def test_other_sites(models, name, site):
    model = models[name]
    result = ssmscope.patch(model, clean=CLEAN, corrupted=CORRUPTED, site=site, **ASKED)
    kept = {}
    place = "scans" if site == "head" else site
    model.run(model.encode(ids=CLEAN), edits=recorded(place, kept))
    close = dict(rel=1e-3, abs=1e-4 * abs(result.base[1] - result.other[1]))
    for layer in range(model.num_layers):
        for column in (1, 2):
            if site == "head":
                put = replaced("scans", kept, range(FIRST, 8), layers=[layer], heads=[column])
            else:
                put = replaced(place, kept, [FIRST + column], layers=[layer])
                column += FIRST
            assert difference(model, CORRUPTED, put) == pytest.approx(result.values[layer, column, 1], **close)
    if site == "residual":
        result = ssmscope.patch(model, clean=CLEAN, corrupted=CORRUPTED, site=site, positions="last", **ASKED)
        assert result.values.shape == (model.num_layers + 1, 1, 2) and result.positions == (LAST,)


def test_everything_patched_is_the_other_run(models):
    for model in models.values():
        kept = {}
        model.run(model.encode(ids=CLEAN), edits=recorded("residual", kept))
        put = replaced("residual", kept, layers=[0])
        assert difference(model, CORRUPTED, put) == pytest.approx(difference(model, CLEAN), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("mamba", {"corrupted": CLEAN[:5]}, "has 8 tokens and the corrupted one 5"),
        ("mamba", {"corrupted": CLEAN}, "have the same tokens"),
        ("mamba", {"corrupted": [96 - i for i in CLEAN]}, "no token in common"),
        ("mamba", {"answer": 5, "contrast": 5}, "answer and contrast are both"),
        ("mamba", {"positions": "last"}, "behind the last token no state is read"),
        ("mamba", {"positions": "99"}, "has no positions 99"),
        ("retnet", {"site": "convolution"}, "have no convolution"),
        ("mamba", {"site": "heads"}, "did you mean 'head'"),
        ("mamba", {"clean": "a b c"}, "is no whole number"),
    ],
)
def test_refused(models, name, options, says):
    with pytest.raises(InputError, match=says):
        ssmscope.patch(models[name], **{"clean": CLEAN, "corrupted": CORRUPTED, **ASKED, **options})


def test_the_verb(tmp_path):
    model = str(tiny_model(tmp_path / "tiny"))
    given = {"clean": "a good film", "corrupted": "a bad film", "answer": "good", "contrast": "bad"}
    (result,) = Call.of("patch", [model], given).run(tmp_path / "out")
    assert result.token(1, 9) == "good/bad" and result.verdict().startswith("most in layer 0, 1 “good/bad”: ")
    frame = result.to_frame()
    assert len(frame) == 2 * 2 and frame.layer.isna().sum() == 2
    np.testing.assert_allclose(frame.normalised.iloc[:2], result.effects("normalised")[0])
    assert (tmp_path / "out" / "patch.png").exists() and "All" not in result.headline
    for metric in ("difference", "probability"):
        (shown,) = Call.of("patch", [model], {**given, "metric": metric, "site": "head"}).run()
        assert shown.figure() is not None
