"""Patching, knockout, ablation and steering in pieces, at chosen places, and at the ends of their ranges."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope.core import batching
from ssmscope.core.edits import replaced
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.data.tokens import TokenData
from ssmscope.errors import InputError
from ssmscope.interp import partial_runs
from ssmscope.interp.ablate import measure as ablating
from ssmscope.interp.ablate.result import Unit
from ssmscope.interp.knockout import measure as cutting
from ssmscope.interp.knockout.result import Cut
from ssmscope.interp.patch import measure as patching
from ssmscope.interp.scoring import scored_examples

CLEAN, CORRUPTED = [5, 17, 3, 9, 22, 1, 4, 60], [5, 17, 30, 9, 22, 7, 4, 60]
PATCH_OPTIONS = dict(clean=CLEAN, corrupted=CORRUPTED, answer=3, contrast=8)
SITES = ["state", "output", "head"]


@pytest.fixture(scope="module")
def models():
    names = ("mamba2", "groupmamba", "bamba", "rwkv-deeper", "gfssm")
    return {name: Model(loud(random_example(name)), name=name) for name in names}


@pytest.mark.parametrize("site", SITES)
def test_patching_a_few_runs_at_a_time_changes_nothing(models, site, monkeypatch):
    for name in ("mamba2", "bamba") if site in ("state", "output") else ("mamba2",):
        whole = ssmscope.patch(models[name], site=site, **PATCH_OPTIONS)
        for most in (3 * 8 + 7, 4) if name == "mamba2" else (3 * 8 + 7,):
            with monkeypatch.context() as patched:
                patched.setattr(batching, "TOKENS_AT_ONCE", most)
                patched.setattr(patching, "MAX_STATE_ENDS", 2)
                found = ssmscope.patch(models[name], site=site, **PATCH_OPTIONS)
            np.testing.assert_allclose(found.values, whole.values, rtol=1e-4, atol=1e-5)
        assert np.ptp(whole.values[..., 1]) > 1e-3 and whole.attributed.shape == (0, 0)


@pytest.mark.parametrize("site", SITES)
def test_chosen_positions_are_those_of_all(models, site):
    model = models["mamba2"]
    whole = ssmscope.patch(model, site=site, method="both", **PATCH_OPTIONS)
    some = ssmscope.patch(model, site=site, method="both", positions=[5, 1, 3], **PATCH_OPTIONS)
    near = ssmscope.patch(model, site=site, method="gradient", positions=[5, 1, 3], **PATCH_OPTIONS)
    before = ssmscope.patch(model, site=site, method="both", positions="0:2", **PATCH_OPTIONS)
    assert some.positions == (1, 3, 5) and before.positions == (0, 1)
    assert (before.values == before.base).all() and not before.attributed.any() and np.isnan(before.agreement).all()
    assert some.provenance["options"]["positions"] == "5, 1, 3" and whole.provenance["options"]["positions"] is None
    if site != "head":
        np.testing.assert_allclose(some.values, whole.values[:, [1, 3, 5]], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(some.attributed, whole.attributed[:, [1, 3, 5]], rtol=1e-3, atol=1e-6)
        later = slice(1, None)
    else:  # heads are patched at all positions at once
        assert np.abs(some.values - whole.values).max() > 1e-3
        later = slice(None)
    exact = some.values[:2, later, 1] - some.base[1]
    expected = np.corrcoef(exact.ravel(), some.attributed[:, later].ravel())[0, 1]
    assert some.agreement[0] == pytest.approx(expected, rel=1e-5)  # of float32 values that subtract
    np.testing.assert_allclose(near.attributed, some.attributed)
    np.testing.assert_allclose(near.values[:2, :, 1], some.base[1] + some.attributed)
    assert np.isnan(near.values[:2, :, 0]).all() and np.isnan(near.values[2:]).all()


def test_a_value_that_nothing_reads_has_no_attribution():
    module = loud(random_example("mamba2"))
    module.backbone.layers[0].mixer.register_forward_hook(lambda *given: torch.zeros_like(given[-1]))
    result = ssmscope.patch(Model(module), site="head", method="both", **PATCH_OPTIONS)
    assert not result.attributed[0].any() and result.attributed[1].all()
    np.testing.assert_allclose(result.values[0, :, 1], result.base[1], rtol=1e-5)


def test_the_answers_of_both_texts_differ(models):
    model = models["mamba2"]
    every = [[*CLEAN[:-1], last] for last in range(40, 60)]
    predicted = model.run(model.encode(ids=every), last_only=True).logits.argmax(-1).tolist()
    at = next(at for at, each in enumerate(predicted) if each != predicted[0])
    given, right, wrong = dict(clean=every[0], corrupted=every[at]), predicted[0], predicted[at]
    found = ssmscope.patch(model, site="residual", **given)
    assert (found.answer, found.contrast) == (str(right), str(wrong))
    for options in ({"answer": wrong}, {"contrast": right}):
        refuses("answer and contrast are both '", ssmscope.patch, model, **given, **options)
    module = random_example("mamba2")
    module.lm_head.weight.data.zero_()
    with pytest.raises(InputError, match="both texts have the answer '0'; name two that differ, answer=… and contrast"):
        ssmscope.patch(Model(module), clean=CLEAN, corrupted=CORRUPTED)
    refuses("one text is the beginning of the other", ssmscope.patch, model, clean=[1, 2, 3], corrupted=[1, 2])


def test_windows_of_texts_are_padded_on_the_right():
    ids = torch.arange(12).view(2, 6)
    tokens = tuple(tuple(map(str, row)) for row in ids.tolist())
    batch = Batch(ids, torch.ones(2, 6, dtype=torch.bool), tokens, ((0, 1, 2, 3, 4, 5), (None, 1, 2, 3, 4, 5)))
    found = patching.token_windows(batch, [1, 0, 1], [0, 2, 5], [2, 6, 6])
    assert found.mask.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert found.input_ids.tolist() == [[6, 7, 8, 9], [2, 3, 4, 5], [11, 11, 11, 11]]
    assert found.tokens == (("6", "7"), ("2", "3", "4", "5"), ("11",)) and found.words[0] == (None, 1)


def test_grids_agree_by_both_correlations():
    first, second = np.array([[1.0, 2.0], [4.0, 8.0]]), np.array([[0.5, 3.0], [2.5, 9.0]])
    pearson, spearman = patching.agreement(first, second, 0.0)
    assert pearson == pytest.approx(np.corrcoef(first.ravel(), second.ravel())[0, 1]) and spearman == pytest.approx(0.8)
    with np.errstate(all="raise"):
        for pair in ((first, np.ones((2, 2))), (np.zeros((2, 2)), second)):
            assert np.isnan(patching.agreement(*pair, 0.0)).all()


class Bar:
    """A progress bar that counts."""

    def __init__(self) -> None:
        self.total, self.done = 0, 0

    def add_task(self, _, total):
        self.total += total

    def advance(self, _, by=1):
        self.done += by


@pytest.mark.parametrize("site", ["state", "output", "head"])
def test_a_progress_bar_ends_where_it_said(models, site, monkeypatch):
    bar = Bar()
    monkeypatch.setattr("ssmscope.core.progress.progress_bar", lambda: nullcontext(bar))
    ssmscope.patch(models["mamba2"], site=site, positions="1:6", **PATCH_OPTIONS)
    assert bar.total == bar.done == {"state": 3 * 4, "output": 3 * 4, "head": 2 * 6}[site]
    steered = Bar()
    monkeypatch.setattr("ssmscope.interp.steer.measure.tokens_that_fit", lambda *_, **__: 3)
    monkeypatch.setattr("ssmscope.interp.steer.measure.progress_bar", lambda: nullcontext(steered))
    given: Any = dict(toward=[[5, 1]], away=[[3, 4, 2]], strengths=(0.0, 1.0), random=2, layer=0)
    ssmscope.steer(models["mamba2"], models["mamba2"].encode(ids=[[5, 9], [7, 8, 1]]), **given)
    assert steered.total == steered.done == 3 * 2 * 2


def test_a_run_starts_at_a_layer_with_the_edits_above(models):
    ran: list[int] = []
    for name, reuse in (("mamba2", True), ("bamba", True), ("groupmamba", False)):
        model = models[name]
        batch = model.encode(ids=[CLEAN, CORRUPTED[:5]])
        assert partial_runs.can_start_at_layer(model, batch) == reuse
        run = partial_runs.PlainRun(model, batch, reuse=reuse)
        torch.testing.assert_close(run.logits, model.run(batch).logits)
        ran.clear()
        handles = [
            mixer.register_forward_hook(lambda *_, at=at: ran.append(at)) for at, mixer in enumerate(model.mixers)
        ]
        again = run.again(model.layer_numbers[1], copies=2)
        [handle.remove() for handle in handles]
        torch.testing.assert_close(again, run.logits.repeat(2, 1, 1), rtol=1e-4, atol=1e-5)
        assert ran == ([1] if reuse else list(range(model.num_layers)))
    stack, places = partial_runs.block_list(models["bamba"])
    assert len(stack) == 3 and places == [0, 2]
    lonely = Model(random_example("selective-ssm-language"))
    assert not partial_runs.can_start_at_layer(lonely, lonely.encode(ids=[CLEAN]))


@pytest.mark.parametrize(("window", "ends"), [
    (1, [(0, 0), (2, 2), (3, 3), (7, 7), (9, 9)]),
    (2, [(0, 2), (2, 3), (3, 7), (7, 9), (9, 9)]),
    (3, [(0, 2), (0, 3), (2, 7), (3, 9), (7, 9)]),
    (4, [(0, 3), (0, 7), (2, 9), (3, 9), (7, 9)]),
    (5, [(0, 3), (0, 7), (0, 9), (2, 9), (3, 9)]),
])  # fmt: skip
def test_windows_are_around_every_layer(window, ends, monkeypatch):
    monkeypatch.setattr(cutting, "roads_of", lambda _: {number: ([0], []) for number in (0, 2, 3, 7, 9)})
    monkeypatch.setattr(cutting, "parts_of", lambda *_: {0: ("a", "b"), 2: (), 3: ("b", "c"), 7: (), 9: ()})
    given: Any = None
    windows = [Cut(*own) for own in ends]
    assert list(cutting.cuts_of(given, given, "window", window)) == [Cut(0, 9), *windows]
    of_parts = [
        Cut(*own, part=name)
        for name, layers in {"a": (0,), "b": (0, 3), "c": (3,)}.items()
        for own in [(0, 9), *ends]
        if any(own[0] <= layer <= own[1] for layer in layers)
    ]
    assert list(cutting.cuts_of(given, given, "part", window)) == [Cut(0, 9), *of_parts]


def test_roads_and_parts_by_layer_number(models):
    assert cutting.roads_of(models["bamba"]) == {0: ([0], []), 1: ([], [1]), 2: ([2], [])}
    assert cutting.roads_of(models["mamba2"]) == {0: ([0], []), 1: ([1], [])}
    batch = {name: model.encode(ids=[CLEAN]) for name, model in models.items()}
    assert cutting.parts_of(models["bamba"], batch["bamba"]) == {0: ("states",), 1: ("attention",), 2: ("states",)}
    assert cutting.parts_of(models["mamba2"], batch["mamba2"]) == {0: ("one recurrence",), 1: ("one recurrence",)}
    assert list(cutting.parts_of(models["groupmamba"], batch["groupmamba"]))[0] == 0
    assert cutting.parts_of(models["groupmamba"], batch["groupmamba"])[0] == ("one recurrence",)
    assert not cutting.others_have_attention(models["bamba"]) and not cutting.others_have_attention(models["mamba2"])


def test_texts_are_named_where_no_edge_leads_back(models):
    model = models["mamba2"]
    two = model.encode(ids=[CLEAN, CORRUPTED[:6]])
    with pytest.raises(InputError, match="no edge leads from '6:8' back to '2'"):
        ssmscope.knockout(model, model.encode(ids=[CLEAN]), from_=["1", "6:8"], to="2", answer=3)
    with pytest.raises(
        InputError, match="no edge leads from '-1' of text 1 back to '5': a token reads those before it"
    ):
        ssmscope.knockout(model, two, from_=["-1"], to="5", answer=3)
    refuses("from_=… is empty", ssmscope.knockout, model, two, from_=[], answer=3)
    with pytest.raises(InputError, match="leave out by='part' or roads='convolution'"):
        ssmscope.knockout(model, two, from_=["1"], by="part", roads="convolution", answer=3)
    found = ssmscope.knockout(model, two, from_=slice(1, 3), to=[5, 4], answer=3)
    assert found.provenance["options"]["from"] == ["1:3"] and found.provenance["options"]["to"] == "5, 4"
    assert found.provenance["options"]["window"] == 1 and found.spans == (((1, 2), (1, 2)),)
    assert found.targets == ((4, 5), (4, 5)) and found.cuts == (Cut(0, 1), Cut(0, 0), Cut(1, 1))
    same = ssmscope.knockout(model, two, from_=["1:3"], to="4:6", answer=3)
    np.testing.assert_array_equal(found.logits, same.logits)
    assert ssmscope.knockout(model, two, from_=["5"], to="5", answer=3).probabilities.shape == (2, 1, 3)


def test_knockout_in_pieces_windows_by_default_and_directions(models, monkeypatch):
    model = models["mamba2"]
    batch = model.encode(ids=[CLEAN])
    whole = ssmscope.knockout(model, batch, from_=["1:7"], to="2:6", answer=3)
    monkeypatch.setattr(batching, "TOKENS_AT_ONCE", 4)
    np.testing.assert_allclose(
        ssmscope.knockout(model, batch, from_=["1:7"], to="2:6", answer=3).logits, whole.logits, rtol=1e-4
    )
    assert ssmscope.knockout(model, batch, from_=["4"], to=[2, 5], answer=3).targets == ((2, 5),)
    ahead = Model(loud(random_example("vim")), name="vim")
    assert ssmscope.knockout(ahead, ahead.encode(ids=[CLEAN]), from_=["-1"], to="1").probability[0] < 1
    roads = {9: 1, 10: 2}
    for layers, window in roads.items():
        monkeypatch.setattr(cutting, "roads_of", lambda _, layers=layers: {at: ([0], []) for at in range(layers)})
        found = ssmscope.knockout(model, batch, from_=["2"], answer=3)
        assert found.provenance["options"]["window"] == window and len(found.cuts) == layers + 1
    assert cutting.others_have_attention(Model(random_example("mamba2attn")))
    monkeypatch.setattr("ssmscope.interp.scoring.MAX_HEADS", 5)
    with pytest.raises(InputError, match="the 6 heads of mamba2 are single channels; leave out by 'head'"):
        ssmscope.knockout(model, batch, from_=["2"], by="head", answer=3)


def test_sets_of_parts_are_chosen_run_by_run():
    sets = [[Unit(2, 1, head=0), Unit(0, head=2)], [], [Unit(2)], [Unit(0, 0)]]
    found = ablating.chosen_of(sets, 2, 3, 2)
    assert sorted(found) == [0, 2] and all(where.shape == (8, 2, 3) for where in found.values())
    second = torch.zeros(4, 2, 3, dtype=torch.bool)
    second[0, 1, 0] = second[2, :, :] = True
    first = torch.zeros(4, 2, 3, dtype=torch.bool)
    first[0, :, 2] = first[3, 0, :] = True
    assert torch.equal(found[2], second.repeat_interleave(2, 0)) and torch.equal(
        found[0], first.repeat_interleave(2, 0)
    )


IDS = np.random.default_rng(0).integers(1, 60, (7, 6))


def test_the_curve_is_ordered_on_one_half_and_measured_on_the_other(models):
    model = models["mamba2"]
    data = TokenData("drawn", "all", IDS, np.roll(IDS, -1, axis=1), tuple(map(str, range(97))))
    result = ssmscope.ablate(model, data, by="zero", steps=5, seed=3, metric="probability")
    examples, rows = scored_examples(model, data), list(range(7))

    def measured(units) -> np.ndarray:
        edits = [
            replaced("scans", {(unit.layer, 0): torch.zeros(1, 1, 6, 8)}, layers=[unit.layer], heads=[unit.head])
            for unit in units
        ]
        return examples.measured(model.run(examples.batch, edits=edits).logits, rows)

    units = [Unit(layer, head=head) for layer in range(2) for head in range(6)]
    assert result.units == tuple(units) and result.counts == (0, 2, 5, 7, 10, 12)
    plain = measured([])
    halves = np.array_split(np.random.default_rng(3).permutation(7), 2)
    single = np.stack([measured([unit]) for unit in units])
    harms = (single - plain) * np.array([1, -1, -1])
    np.testing.assert_allclose(result.plain[..., 0], plain.mean(0), rtol=1e-4)
    np.testing.assert_allclose(result.harms[..., 0], harms.mean(1), rtol=1e-2, atol=1e-5)
    order = harms[:, halves[0], 2].mean(1).argsort(kind="stable")
    assert result.order == tuple(order.tolist()) and len(halves[0]) == 4
    drawn = np.random.default_rng(3).permutation(12)
    for curve, own in zip(result.curves, (order, drawn)):
        for point, count in zip(curve, result.counts):
            expected = measured([units[at] for at in own[:count]])[halves[1]].mean(0)
            np.testing.assert_allclose(point[:, 0], expected, rtol=1e-3, atol=1e-5)
    assert result.notes == ("the curve's order is that of 4 examples, its values are those of the other 3",)


def test_ablating_one_run_at_a_time_changes_nothing(models, monkeypatch):
    data = TokenData("drawn", "all", IDS[:3], np.roll(IDS[:3], -1, axis=1), tuple(map(str, range(97))))
    whole = ssmscope.ablate(models["mamba2"], data, what="layer", by="resample", steps=2)
    monkeypatch.setattr("ssmscope.interp.scoring.tokens_that_fit", lambda *_, **__: 5)  # fewer than a row has
    small = ssmscope.ablate(models["mamba2"], data, what="layer", by="resample", steps=2)
    np.testing.assert_allclose(small.harms, whole.harms, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(small.curves, whole.curves, rtol=1e-3, atol=1e-6)


def test_a_donors_values_are_those_at_the_same_share_of_its_length(models):
    model = models["mamba2"]
    lengths = (5, 2, 9, 1)
    batch = model.encode(ids=[list(range(1, 1 + length)) for length in lengths])
    examples: Any = SimpleNamespace(model=model, batch=batch)
    runs = ablating.AblationRuns.__new__(ablating.AblationRuns)
    runs.examples, runs.by, runs.part = examples, "resample", ablating.Part("layer")
    runs.donors, runs.donated = np.array([2, 0, 3, 1]), batch
    kept = runs._recorded([0, 1, 2, 3], batch)
    found = runs._values([1, 2, 0])
    for key, values in found.items():
        assert values.shape[:2] == (3, 9)
        for row, (own, donor) in enumerate(((1, 0), (2, 3), (0, 2))):
            last = lengths[donor] - 1
            for at in range(lengths[own]):
                place = round(at * last / max(1, lengths[own] - 1))
                torch.testing.assert_close(values[row, at], kept[key][donor, place], rtol=1e-4, atol=1e-5)
    runs.by = "mean"
    assert runs._values([0]) == {}
