"""Patching over pairs: every cell is the mean of the cells of single calls."""

import numpy as np
import pytest
import torch
from refusals import refuses
import ssmscope
from ssmscope.core.edits import recorded, replaced
from ssmscope.errors import InputError
from ssmscope.zoo.compiled import compiled, pairs_of

PLACES = [("attic", "library"), ("kitchen", "office")]
TEXT = "Clara walked to the {} . Where ?"
ROWS = [{"clean": TEXT.format(a), "corrupted": TEXT.format(b), "place": a} for a, b in PLACES]
model = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/babi-mamba2"))


@pytest.mark.parametrize(
    ("direction", "sites"), [("denoise", ["state", "output", "residual"]), ("noise", ["state", "residual"])]
)
def test_cells_are_means_of_single_calls(model, direction: str, sites: list[str]) -> None:
    rows = [{name: row[name] for name in ("clean", "corrupted")} for row in ROWS]
    found = ssmscope.patch(model, data=rows, sites=sites, direction=direction)
    for site in sites:
        single = [ssmscope.patch(model, **row, site=site, direction=direction) for row in rows]
        whole = np.array([one.other[1] - one.base[1] for one in single])
        own = [at for at, each in enumerate(found.sites) if each == site]
        for column, place in enumerate(map(int, found.classes)):
            if place not in single[0].positions:
                assert np.isnan(found.values[own, column]).all()
                continue
            at = single[0].positions.index(place)
            change = np.stack([one.values[:-1, at, 1] - one.base[1] for one in single])
            expected = change.sum(0) / whole.sum()
            assert np.allclose(found.values[own, column, 0], expected, atol=1e-4), (site, place)


@pytest.mark.parametrize(("direction", "sites"), [("denoise", ["state", "output"]), ("noise", ["state", "residual"])])
def test_texts_of_unequal_length_are_aligned_as_two_texts_are(model, direction: str, sites: list[str]) -> None:
    longer = "Bob walked to the garden . " + TEXT
    rows = [{"clean": longer.format("attic"), "corrupted": "Tom walked to the cellar . " + TEXT.format("library")}]
    rows += [{"clean": TEXT.format("kitchen"), "corrupted": "Bob went back to the garden . " + TEXT.format("office")}]
    named = [{**row, "place": place} for row, place in zip(rows, ("attic", "kitchen"))]
    found = ssmscope.patch(model, data=named, sites=sites, direction=direction)
    for site in sites:
        single = [ssmscope.patch(model, **row, site=site, direction=direction) for row in rows]
        assert any(one.partners for one in single)
        change = []
        for one, row in zip(single, named):
            token = next(at for at, each in enumerate(one.clean) if row["place"] in each)
            change.append(one.values[:-1, one.positions.index(token), 1] - one.base[1])
        whole = sum(one.other[1] - one.base[1] for one in single)
        own = [at for at, each in enumerate(found.sites) if each == site]
        assert np.allclose(found.values[own, 0, 0], np.sum(change, 0) / whole, atol=1e-4), site
        assert np.abs(found.values[own, 0, 0]).max() > 0.01
    without = ssmscope.patch(model, data=rows, site="output")
    assert without.classes == ("changed", "last") and np.isfinite(without.values).all()
    with pytest.raises(InputError, match="pair 1 of the data: one text is the beginning of the other"):
        ssmscope.patch(model, data=[{"clean": "Bob went", "corrupted": "Bob went to", "target": "a", "contrast": "b"}])


def test_columns_of_the_data_are_patched_as_one_class(model, tmp_path) -> None:
    found = ssmscope.patch(model, data=ROWS, sites=["output", "state"])
    assert found.classes == ("place", "last") and set(found.sites) == {"output", "state"}
    states = [at for at, site in enumerate(found.sites) if site == "state"]
    assert np.isnan(found.values[states, 1, 0]).all()  # After the last token no state is read.
    batches = [model.encode([row[name] for row in ROWS]) for name in ("corrupted", "clean")]
    kept: dict[int, torch.Tensor] = {}
    model.run(batches[1], edits=recorded("output", kept))
    place = next(at for at, token in enumerate(batches[1].tokens[0]) if "attic" in token)
    edit = replaced("output", kept, [place], layers=[1])
    right = batches[1]
    ids = [model.run(batch, last_only=True).logits.argmax(-1) for batch in (right, batches[0])]
    runs = [model.run(batches[0], last_only=True, edits=each).logits.double() for each in ((), edit)]
    plain, patched = (run.gather(1, ids[0][:, None]) - run.gather(1, ids[1][:, None]) for run in runs)
    clean = model.run(right, last_only=True).logits.double()
    whole = clean.gather(1, ids[0][:, None]) - clean.gather(1, ids[1][:, None]) - plain
    row = found.sites.index("output") + 1
    assert found.values[row, 0, 0] == pytest.approx(float((patched - plain).sum() / whole.sum()), abs=1e-5)
    found.save(tmp_path, "patch", ("json", "csv", "png"))
    assert ssmscope.Result.load(tmp_path / "patch.json") == found


def test_the_memory_that_holds_the_answer_is_found_and_the_decoy_is_not() -> None:
    made = compiled("recall", "gated-delta", decoy=True)
    found = ssmscope.patch(ssmscope.load(made.module), data=pairs_of("recall", 12), sites=["state", "output"])
    best = {
        (site, layer) for site, layer, at in zip(found.sites, found.layers, found.values) if np.nanmax(at[:, 0]) > 0.5
    }
    assert best == {("output", 1)} | {("state", 1)}


def test_options_of_one_text_are_refused_with_pairs(model) -> None:
    for options, said in (
        ({"data": ROWS, "clean": "a"}, "clean=… has no effect with pairs"),
        ({"data": ROWS, "generate": 3}, "generate=… has no effect with pairs"),
        ({"data": ROWS, "method": "gradient"}, "method=… has no effect with pairs"),
        ({"data": ROWS, "site": "head"}, "heads are patched in two texts"),
        ({"clean": "a"}, "give two texts"),
        ({"clean": "a", "corrupted": "b", "sites": ["state"]}, "are for pairs"),
        ({"data": ROWS, "sites": ["attention"]}, "have no attention"),
    ):
        refuses(said, ssmscope.patch, model, **options)
