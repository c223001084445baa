"""Activation patching: every cell is a run of its own, both ends are the two runs, and refusals."""

import copy

import numpy as np
import pytest
import torch
from examples import random_example
from exhaustive import in_turns
from loud import TrueFloat64, doubled, loud
from refusals import refuses
import ssmscope
from ssmscope.api.results import Result
from ssmscope.core.edits import new_state, recorded, replaced
from ssmscope.core.model import Model
from ssmscope.core.trace import mapped, tensors
from ssmscope.errors import InputError
from ssmscope.interp.patch import measure

CLEAN, CORRUPTED = [5, 17, 3, 9, 22, 1, 4, 60], [5, 17, 30, 9, 22, 7, 4, 60]
FIRST, LAST = 2, 7
NAMES = ("mamba", "mamba2", "diff-mamba", "groupmamba", "gfssm", "rwkv", "retnet", "gated-deltanet", "bamba")
MODELS = ("mamba2", "diff-mamba", "rwkv", "bamba")
PATCH = dict(answer=3, contrast=8)
models = pytest.fixture(scope="module")(lambda: {name: Model(loud(random_example(name)), name=name) for name in NAMES})


def difference(model, ids, edits=()) -> float:
    logits = model.run(model.encode(ids=ids), last_only=True, edits=edits).logits[0].double()
    return float(logits[3] - logits[8])


@pytest.mark.parametrize(("name", "direction"), in_turns(NAMES, ["denoise", "noise"]))
def test_states(models, name, direction):
    model = models[name]
    result = ssmscope.patch(model, clean=CLEAN, corrupted=CORRUPTED, direction=direction, **PATCH)
    base, source = (CORRUPTED, CLEAN) if direction == "denoise" else (CLEAN, CORRUPTED)
    assert result.values.shape == (model.num_layers + 1, LAST, 2)
    assert (result.values[:, :FIRST] == result.base).all()  # before the first difference both runs are one
    close = dict(rel=1e-3, abs=1e-4 * abs(result.base[1] - result.other[1]))
    assert difference(model, base) == pytest.approx(result.base[1], **close)
    for place in (2, 4, 6):
        kept = {}
        keep = new_state(place, lambda state, site, kept=kept: kept.setdefault(site.layer, state))
        model.run(model.encode(ids=[source]), edits=keep)
        for row, layer in enumerate(model.layer_numbers):
            put = new_state(place, lambda _, site, kept=kept: kept[site.layer], layers=[layer])
            assert difference(model, base, put) == pytest.approx(result.values[row, place, 1], **close)
            assert result.name(row, place).startswith(f"layer {layer}, ")
        if name == "bamba":  # what its attention has read stays
            put = new_state(place, lambda _, site, kept=kept: kept[site.layer])
            assert difference(model, base, put) == pytest.approx(result.values[-1, place, 1], **close)
        else:  # the whole memory is the other text's tokens followed by this one's
            joined = source[: place + 1] + base[place + 1 :]
            assert difference(model, joined) == pytest.approx(result.values[-1, place, 1], **close)
    if name != "bamba":
        assert result.effects("normalised")[-1, -1] == pytest.approx(1, abs=1e-3)
    assert Result.from_dict(result.to_dict()) == result


@pytest.mark.parametrize(("site", "name"), in_turns(["output", "residual", "convolution", "head"], MODELS))
def test_other_sites(models, name, site):
    model = models[name]
    result = ssmscope.patch(model, clean=CLEAN, corrupted=CORRUPTED, site=site, **PATCH)
    kept = {}
    place = "scans" if site == "head" else site
    model.run(model.encode(ids=CLEAN), edits=recorded(place, kept))
    close = dict(rel=1e-3, abs=1e-4 * abs(result.base[1] - result.other[1]))
    for row, layer in enumerate(model.layer_numbers):
        for column in (1, 2):
            if site == "head":
                put = replaced("scans", kept, range(FIRST, 8), layers=[layer], heads=[column])
            else:
                put = replaced(place, kept, [FIRST + column], layers=[layer])
                column += FIRST
            assert difference(model, CORRUPTED, put) == pytest.approx(result.values[row, column, 1], **close)
    frame = result.to_frame()
    assert {*frame.layer.dropna()} == {*model.layer_numbers}
    if site == "residual":
        result = ssmscope.patch(model, clean=CLEAN, corrupted=CORRUPTED, site=site, positions="last", **PATCH)
        assert result.values.shape == (model.num_layers + 1, 1, 2) and result.positions == (LAST,)


def test_everything_patched_is_the_other_run(models):
    for model in models.values():
        kept = {}
        model.run(model.encode(ids=CLEAN), edits=recorded("residual", kept))
        put = replaced("residual", kept, layers=[0])
        assert difference(model, CORRUPTED, put) == pytest.approx(difference(model, CLEAN), rel=1e-4)


@pytest.mark.parametrize(("name", "options", "says"), [
    ("mamba", {"corrupted": CLEAN[:5]}, "one text is the beginning of the other"),
    ("mamba", {"corrupted": CLEAN}, "have the same tokens"),
    ("mamba", {"corrupted": [96 - i for i in CLEAN]}, "no token in common"),
    ("mamba", {"answer": 5, "contrast": 5}, "answer and contrast are both"),
    ("mamba", {"positions": "last"}, "after the last token no state is read"),
    ("mamba", {"positions": "99"}, "has no positions 99"),
    ("retnet", {"site": "convolution"}, "have no convolution"),
    ("mamba", {"site": "heads"}, "did you mean 'head'"),
    ("mamba", {"clean": "a b c"}, "is not a whole number"),
])  # fmt: skip
def test_refused(models, name, options, says):
    refuses(says, ssmscope.patch, models[name], **{"clean": CLEAN, "corrupted": CORRUPTED, **PATCH, **options})


LONGER = [5, 17, 30, 31, 32, 9, 22, 7, 4, 60]


def test_tokens_of_unequal_texts_correspond_from_the_start_then_from_the_end():
    model = Model(random_example("mamba2"), name="own")
    clean, corrupted = (model.encode(ids=each) for each in (CLEAN, LONGER))
    from_end = [(0, 0), (1, 1), (2, 4), (3, 5), (4, 6), (5, 7), (6, 8), (7, 9)]
    assert measure.aligned(clean, corrupted) == from_end
    assert measure.aligned(corrupted, clean) == [(b, a) for a, b in from_end]
    assert measure.aligned(clean, model.encode(ids=CORRUPTED)) == [(at, at) for at in range(8)]
    spans = measure.aligned(clean, corrupted, ["2=2:4", "4:6=6:8"])
    assert spans == [(0, 0), (1, 1), (2, 3), (3, 5), (4, 6), (5, 7), (6, 8), (7, 9)]
    assert measure.aligned(clean, corrupted, ["3=2:4"])[2:4] == [(3, 3), (4, 6)]
    for given, says in ((["2"], "write words of the clean text="), (["2=5", "4=3"], "another order")):
        refuses(says, measure.aligned, clean, corrupted, given)


@pytest.mark.parametrize(("name", "direction"), in_turns(MODELS, ["denoise", "noise"]))
def test_states_of_unequal_texts(models, name, direction):
    model = models[name]
    result = ssmscope.patch(model, clean=CLEAN, corrupted=LONGER, direction=direction, align=["2=2:4"], **PATCH)
    assert result.positions == tuple(range(7)) and result.partners == (0, 1, 3, 5, 6, 7, 8)
    denoise = direction == "denoise"
    base, source = (LONGER, CLEAN) if denoise else (CLEAN, LONGER)
    close = dict(rel=1e-3, abs=1e-4 * abs(result.base[1] - result.other[1]))
    for column in (2, 4, 6):
        own, theirs = result.positions[column], result.partners[column]
        at, before = (theirs, own) if denoise else (own, theirs)
        kept = {}
        keep = new_state(before, lambda state, site, kept=kept: kept.setdefault(site.layer, state))
        model.run(model.encode(ids=[source]), edits=keep)
        put = new_state(at, lambda _, site, kept=kept: kept[site.layer], layers=model.layer_numbers[1:2])
        assert difference(model, base, put) == pytest.approx(result.values[1, column, 1], **close)
        if name != "bamba":
            joined = source[: before + 1] + base[at + 1 :]
            assert difference(model, joined) == pytest.approx(result.values[-1, column, 1], **close)
    assert result.token(2, 9) == "3/31"


@pytest.mark.parametrize("site", ["residual", "head"])
def test_other_sites_of_unequal_texts(models, site):
    model = models["mamba2"]
    result = ssmscope.patch(model, clean=CLEAN, corrupted=LONGER, site=site, method="both", **PATCH)
    kept, own = {}, {}
    place = "scans" if site == "head" else site
    model.run(model.encode(ids=CLEAN), edits=recorded(place, kept))
    model.run(model.encode(ids=LONGER), edits=recorded(place, own))
    read = torch.tensor([dict(zip(result.partners, result.positions)).get(at, 0) for at in range(len(LONGER))])
    moved = {key: value[:, read] for key, value in kept.items()}
    close = dict(rel=1e-3, abs=1e-4 * abs(result.base[1] - result.other[1]))
    where = [result.partners[3]] if site == "residual" else list(result.partners[2:])
    heads = dict(heads=[1]) if site == "head" else {}
    column = 1 if site == "head" else 3
    put = replaced(place, moved, where, layers=[1], **heads)
    assert difference(model, LONGER, put) == pytest.approx(result.values[1, column, 1], **close)
    step = {key: value + 0.01 * (moved[key] - value) for key, value in own.items()}
    near = (difference(model, LONGER, replaced(place, step, where, layers=[1], **heads)) - result.base[1]) / 0.01
    assert result.attributed[1, column] == pytest.approx(near, rel=0.05, abs=0.02 * abs(near) + 0.02)


@pytest.mark.parametrize(("site", "name"), in_turns(["state", "output", "residual", "convolution", "head"], MODELS))
def test_attribution_is_the_first_step_towards_the_other_run(models, name, site):
    """For a source that is the base plus a thousandth of their distance, patching is its own gradient."""
    model = models[name]
    with TrueFloat64():
        model = Model(doubled(copy.deepcopy(model.module)), name=name)
        result = ssmscope.patch(model, clean=CLEAN, corrupted=CORRUPTED, site=site, method="gradient", **PATCH)
        assert not result.is_exact and (name != NAMES[1] or result.figure() is not None)
        place, step, plain = {"head": "scans"}.get(site, site), 1e-5, difference(model, CORRUPTED)
        size = np.abs(result.attributed).max()
        for column in (1, 3):
            at = FIRST + column
            runs = []
            for ids in (CLEAN, CORRUPTED):
                kept = {}
                keep = new_state(at, lambda state, site, kept=kept: kept.setdefault(site.layer, state))
                model.run(model.encode(ids=ids), edits=keep if site == "state" else recorded(place, kept))
                runs.append(kept)
            source, base = runs
            for row, layer in enumerate(model.layer_numbers):
                if site == "state":

                    def near(state, site, other=source):
                        parts = [tensors((each,)) for each in (state, other[site.layer])]
                        mixed = iter([torch.where(a == b, a, a + step * (b - a)) for a, b in zip(*parts)])
                        return mapped(state, lambda _: next(mixed))

                    put = new_state(at, near, layers=[layer])
                else:
                    mixed = {key: base[key] + step * (source[key] - base[key]) for key in base}
                    more = {"heads": [column]} if site == "head" else {}
                    put = replaced(place, mixed, range(FIRST, 8) if more else [at], layers=[layer], **more)
                slope = (difference(model, CORRUPTED, put) - plain) / step
                cell = column if site == "head" else at
                assert result.attributed[row, cell] == pytest.approx(slope, rel=1e-2, abs=1e-3 * size)


def test_attribution_is_exact_where_the_metric_is_linear(models):
    module = copy.deepcopy(models["mamba2"].module)
    module.backbone.norm_f = torch.nn.Identity()
    model = Model(module.double())
    result = ssmscope.patch(model, clean=CLEAN, corrupted=CORRUPTED, site="output", method="both", **PATCH)
    change = result.values[:-1, :, 1] - result.base[1]
    assert result.attributed[-1, LAST] == pytest.approx(
        change[-1, LAST], rel=1e-5
    )  # what the last layer adds at the end
    assert result.attributed[0, LAST] != pytest.approx(change[0, LAST], rel=1e-3)  # a layer is not a linear map
    exact, near = change[:, FIRST:].ravel(), result.attributed[:, FIRST:].ravel()
    assert result.agreement[0] == pytest.approx(np.corrcoef(exact, near)[0, 1])
    assert (result.attributed[:, :FIRST] == 0).all() and -1 <= result.agreement[1] <= 1
    assert Result.from_dict(result.to_dict()) == result
    assert "(Pearson)" in str(result) and len(result.to_frame().attributed.dropna()) == change.size


def test_a_gradient_has_no_probability(models):
    with pytest.raises(InputError, match="the gradient approximates logits; give metric='difference'"):
        ssmscope.patch(models["mamba"], clean=CLEAN, corrupted=CORRUPTED, method="gradient", metric="probability")


@pytest.mark.parametrize("site", ["state", "residual"])
def test_layers_below_are_not_run_and_nothing_changes(models, site, monkeypatch):
    asked = dict(clean=CLEAN, corrupted=CORRUPTED, site=site, **PATCH)
    for name in ("mamba2", "bamba"):
        found = ssmscope.patch(models[name], **asked)
        with monkeypatch.context() as patched:
            patched.setattr(measure, "can_start_at_layer", lambda *_: False)
            whole = ssmscope.patch(models[name], **asked)
        np.testing.assert_allclose(found.values, whole.values, rtol=1e-4, atol=1e-5)
        assert np.abs(found.values[:-1, FIRST:, 1] - found.base[1]).max() > 1e-3
