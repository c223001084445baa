"""Texts written under edits, by hand, and their likelihood under the unedited model from one run of each whole text."""

import numpy as np
import pytest
from examples import random_example
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope.api.results import Result
from ssmscope.core.edits import new_state
from ssmscope.core.lasting_edits import while_writing
from ssmscope.core.model import Model
from ssmscope.data.tokens import TokenData
from ssmscope.errors import InputError
from ssmscope.interp.edited_texts import edited_texts
from ssmscope.interp.steer.measure import mean_difference, steering_edit
from ssmscope.render.table import Table

TEXTS, TOWARD, AWAY = [[7, 8, 9, 2, 40], [30, 2, 7]], [[5, 17, 3], [9, 22, 1, 4]], [[60, 2, 7]]


@pytest.fixture(scope="module")
def models():
    return {name: Model(loud(random_example(name)), name=name) for name in ("mamba", "mamba2", "bamba")}


def mean_log_p(model, prompt, ids) -> float:
    logits = model.run(model.encode(ids=[[*prompt, *ids]])).logits[0].double().log_softmax(-1)
    return float(np.mean([logits[len(prompt) - 1 + n, token].item() for n, token in enumerate(ids)]))


@pytest.mark.parametrize("site", ["residual", "state"])
def test_steered_texts(models, site):
    model = models["mamba2"]
    options = dict(toward=TOWARD, away=AWAY, site=site, layer=1, strengths=[-2, 0, 3], random=1, generate=5)
    result = ssmscope.steer(model, model.encode(ids=TEXTS), **options)
    direction = mean_difference(model, TOWARD, AWAY, site, 1)
    assert [(text.prompt, text.edit) for text in result.written] == [
        (row, edit) for row in (0, 1) for edit in ("none", "strength −2", "strength 3")
    ]
    for text in result.written:
        edit = steering_edit(site, 1, direction, {"none": 0, "strength −2": -2, "strength 3": 3}[text.edit])
        edits = [edit] if site == "state" else [edit, while_writing(edit)]
        alone = model.generate(ids=[TEXTS[text.prompt]], max_new_tokens=5, edits=edits)
        assert text.text == alone.texts[0] and text.tokens == 5
        assert text.own == pytest.approx(np.mean(alone.log_probabilities[0]), rel=1e-4, abs=1e-4)
        unedited = mean_log_p(model, TEXTS[text.prompt], alone.ids[0])
        assert text.unedited == pytest.approx(unedited, rel=1e-4, abs=1e-4)
        if text.edit == "none":
            assert text.own == pytest.approx(text.unedited, abs=1e-4)
    assert len({text.text for text in result.written}) > 2 and "strength −2" in str(result)
    assert Result.from_dict(result.to_dict()) == result


@pytest.mark.parametrize("site", ["state", "output", "residual", "head"])
def test_patched_texts(site):
    model = ssmscope.load("demo/babi-mamba2")
    clean, corrupted = (f"Clara walked to the {place} . Where is Clara ?" for place in ("attic", "cellar"))
    result = ssmscope.patch(model, clean=clean, corrupted=corrupted, site=site, generate=2)
    plain, *patched, other = result.written
    assert (plain.text.split()[0], other.text.split()[0], other.prompt) == ("cellar", "attic", 1)
    assert plain.edit == other.edit == "none" and len(patched) == (1 if site == "head" else 2)
    assert patched[0].edit == result.name(*result.strongest(1)[0][0])
    assert all(text.text.split()[0] == "attic" and text.unedited < text.own - 2 for text in patched)
    lines = [row for table in result.tables() if table.heads == ("text", "edit") for row, _ in table.rows]
    assert lines[0] == ("corrupted", "none") and lines[-1] == ("clean", "none")


def test_all_layers_patched_is_the_other_texts_memory():
    model = ssmscope.load("demo/babi-mamba2")
    clean, corrupted = (f"Clara walked to the {place} . Where is Clara ?" for place in ("attic", "cellar"))
    result = ssmscope.patch(model, clean=clean, corrupted=corrupted, generate=3)
    at = result.positions[result.strongest(1)[0][0][1]]
    batch, states = model.encode(clean), {}
    model.run(batch, edits=new_state(at, lambda state, site: states.setdefault(site.layer, state)), last_only=True)
    edit = new_state(at, lambda state, site: states[site.layer])
    (written,) = model.generate(corrupted, max_new_tokens=3, edits=edit).texts
    assert result.written[2].text == written and result.written[2].edit.startswith("all layers, ")


@pytest.mark.parametrize("by", ["mean", "zero"])
def test_ablated_texts(models, by):
    model, ids = models["mamba2"], np.random.default_rng(0).integers(1, 60, (3, 8))
    data = TokenData("drawn", "all", ids, np.roll(ids, -1, axis=1), tuple(map(str, range(97))))
    result = ssmscope.ablate(model, data, what="layer", by=by, generate=4)
    prompt = ids[0, :4].tolist()
    plain, without, *_ = result.written
    assert plain.text == model.generate(ids=[prompt], max_new_tokens=4).texts[0]
    worst = result.units[result.ranked[0]]
    assert without.edit == f"without {worst.name}"
    if by == "zero":
        edit = ssmscope.Edit("zero", "output", lambda value, site: 0 * value, (worst.layer,))
        found = model.generate(ids=[prompt], max_new_tokens=4, edits=while_writing(edit, prompt=True))
        assert without.text == found.texts[0] and without.own == pytest.approx(np.mean(found.log_probabilities[0]))
        assert without.unedited == pytest.approx(mean_log_p(model, prompt, found.ids[0]), rel=1e-4)
    given = ssmscope.ablate(model, data, what="layer", by=by, generate=2, prompt=[[5, 17, 3], [9]])
    assert given.written[0].text == model.generate(ids=[[5, 17, 3]], max_new_tokens=2).texts[0]
    assert {text.prompt for text in given.written} == {0, 1}


def test_refused(models):
    ids = np.ones((2, 4), dtype=np.int64)
    data = TokenData("ones", "all", ids, ids, tuple(map(str, range(97))))
    for options, says in (
        ({"prompt": [[5]]}, "give generate=…"),
        ({"by": "resample", "generate": 2}, "by='mean' or by='zero'"),
    ):
        refuses(says, ssmscope.ablate, models["mamba2"], data, what="layer", **options)
    with pytest.raises(InputError, match="writes nothing"):
        ssmscope.steer(
            ssmscope.load("demo/sst2-mamba2"), "A film.", toward=["Good."], away=["Bad."], generate=2, data=None
        )


def test_nothing_is_shown_unless_asked_for(models):
    model = models["mamba"]
    assert edited_texts(model, model.encode(ids=TEXTS), {}, 1)[1].prompt == 1
    result = ssmscope.steer(model, model.encode(ids=TEXTS), toward=TOWARD, away=AWAY, layer=1, random=1)
    assert result.written == () and sum(isinstance(block, Table) for block in result.blocks()) == 1
