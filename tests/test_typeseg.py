"""A published model that transformers knows nothing of: docs/published-model.md as it stands, and its numbers."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ssmscope

pytest.importorskip("typeseg", reason="typeseg is not installed: see make test-foreign")
PAGE = Path(__file__).parents[1] / "docs" / "published-model.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.S | re.M):
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_logits_are_its_own(page: dict[str, Any]) -> None:
    from typeseg import _numpy_backend, _tokenize

    arrays = np.load(page["HERE"] / "mamba_al.npz").items()
    weights = _numpy_backend.Weights({name.replace("__", "/"): array for name, array in arrays})
    for text in (page["BEFORE"] + page["FENCE"] + page["WORDS"], "<p>Grüße, <b>Welt</b></p>\n"):
        own = _numpy_backend.mamba_forward(weights, _tokenize.text_to_bytes(text))
        for place in (0, 11, -1):
            model = page["tagger"].at(place)
            found = model.logits(model.encode(ids=[page["ids_of"](text)]))[0].numpy()
            np.testing.assert_allclose(found, own[place], atol=5e-5)


def test_the_fence_is_held_and_cutting_it_matters(page: dict[str, Any]) -> None:
    model, batch, fence = page["model"], page["batch"], page["fence"]
    assert model.answers_of(model.logits(batch))[0][0] == "python"
    held = page["lifts"].set_index(["layer", "position"])["lift"]
    assert held[2, fence[0]] == pytest.approx(70.3, rel=0.02) and held[2, fence[1]] == pytest.approx(439, rel=0.02)
    survival = model.trace(batch).survival(page["at"])[2, 0, : page["at"] + 1].double()
    near = [at for at in range(fence[1] - 12, fence[1] + 13) if at not in (fence[1],) and at <= page["at"]]
    assert held[2, fence[1]] == pytest.approx(float(survival[fence[1]] / np.median(survival[near])), rel=1e-4)
    change = (page["cut"]["logit_cut"] - page["cut"]["logit"]).tolist()
    assert change[3] == pytest.approx(-2.13, abs=0.02) and change[5] == pytest.approx(1.53, abs=0.02)
    assert max(abs(change[at]) for at in (1, 2, 4, 6)) < 0.05
    words = page["BEFORE"] + "words go \n" + page["WORDS"]
    logits = [model.logits(each)[0] for each in (batch, model.encode(ids=[page["ids_of"](words)]))]
    assert float(logits[1][logits[0].argmax()] - logits[0].max()) == pytest.approx(-5.5, abs=0.1)


@pytest.mark.parametrize("further", [10, 30, 50])
def test_the_style_is_not(page: dict[str, Any], further: int) -> None:
    before, mark = "<html><head>\n", "<style>\n"
    rules = "color: red; margin: 0 auto; p { padding: 2px; } .a > b { top: 1px; }\n</style></head></html>\n"
    at, marked = len(before + mark) + further, [*range(len(before), len(before + mark) - 1)]
    model = page["tagger"].at(at)
    batch = model.encode(ids=[page["ids_of"](before + mark + rules)])
    assert model.answers_of(model.logits(batch))[0][0] == "css"
    lifts = ssmscope.heatmap(model, batch, at=at).lifts().set_index(["layer", "position"])["lift"]
    assert max(float(np.mean([lifts[layer, place] for place in marked])) for layer in range(6)) < 5.6
    cut = ssmscope.knockout(model, batch, from_=[marked], to=[at], level="ssm").to_frame()
    assert (cut["logit_cut"] - cut["logit"]).abs().max() < 0.11
