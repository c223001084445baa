"""Options that have no effect in a mode of a verb are refused there in one line, and have their effect elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

import ssmscope
from ssmscope.api.analysis import Call
from ssmscope.data.text import text_data
from ssmscope.errors import InputError

PAIRS = [{"clean": f"the {one} film is good", "corrupted": f"the {one} film is bad"} for one in ("old", "new", "long")]
TEXTS = {"clean": "a", "corrupted": "b"}


@pytest.mark.parametrize(
    ("verb", "given", "name"),
    [
        ("patch", {"data": "{pairs}", "align": ["a=b"]}, "align"),
        ("patch", {"data": "{pairs}", "site": "residual", "sites": "state"}, "site"),
        ("steer", {"text": ["a"], "vector": "v.safetensors", "site": "state"}, "site"),
        ("steer", {"text": ["a"], "vector": "v.safetensors", "method": "pca"}, "method"),
        ("steer", {"text": ["a"], "toward": ["a"], "away": ["b"], "export_strength": 2}, "export_strength"),
        ("circuit", {"data": "{pairs}", "steps": 9}, "steps"),
        ("circuit", {"data": "{pairs}", "choose": "greedy", "threshold": 0.2}, "threshold"),
        ("circuit", {"data": "{pairs}", "until": 0.5}, "until"),
        ("parity", {"self_": True, "ran_in": "float16"}, "ran_in"),
        ("precision", {"state": "bfloat16", "per": "row"}, "per"),
        ("evaluate", {"tasks": "t", "max_tokens": 9}, "max_tokens"),
        ("evaluate", {"tasks": "t", "series": "s.npz"}, "series"),
    ],
)
def test_they_are_refused_before_a_model_is_loaded(verb: str, given: dict, name: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("clean,corrupted\na b,a c\n")
    own = {key: str(tmp_path / "p.csv") if value == "{pairs}" else value for key, value in given.items()}
    with pytest.raises(InputError, match=f"^{name}=… has no effect with") as told:
        Call.of(verb, ["no/such"], own)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("verb", "given", "name"),
    [
        ("steer", {"data": PAIRS, "length": 64}, "length"),
        ("steer", {"data": PAIRS, "max_tokens": 64}, "max_tokens"),
        ("ablate", {"data": PAIRS, "length": 64}, "length"),
        ("ablate", {"data": PAIRS, "max_tokens": 64}, "max_tokens"),
        ("ablate", {"data": "sst2", "length": 64, "limit": 3}, "length"),
    ],
)
def test_sizes_of_what_is_not_read(verb: str, given: dict, name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}=… has no effect with"):
        getattr(ssmscope, verb)("demo/sst2-mamba2", **given)


def test_they_have_their_effect_elsewhere() -> None:
    model = ssmscope.load("demo/books-mamba2")
    with pytest.raises(InputError, match="max_tokens=… has no effect with demo/books-mamba2"):
        ssmscope.ablate(model, "books", max_tokens=64)
    data = text_data("d", "all", ["the old house stood on", "a small boy ran"], [0, 1], (" the", " a"))
    frame = [(text, data.label_names[label]) for text, label in zip(data.texts, data.labels)]
    with pytest.raises(InputError, match="row 1 of given has|tokens; allowed"):
        ssmscope.evaluate(model, frame, max_tokens=2)
    with pytest.raises(InputError, match="series=… has no effect with demo/books-mamba2"):
        ssmscope.evaluate(model, frame, series="s.npz")
    assert len(ssmscope.evaluate(model, frame, max_tokens=50).scores) == 2
