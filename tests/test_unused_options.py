"""Options that have no effect in a mode of a verb are refused there in one line, and have their effect elsewhere."""

from pathlib import Path

import pytest
from refusals import refuses
import ssmscope
from ssmscope.api.analysis import Call
from ssmscope.data.text import text_data

PAIRS = [{"clean": f"the {one} film is good", "corrupted": f"the {one} film is bad"} for one in ("old", "new", "long")]
TEXTS = {"clean": "a", "corrupted": "b"}


@pytest.mark.parametrize(("verb", "given", "name"), [
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
])  # fmt: skip
def test_they_are_refused_before_a_model_is_loaded(verb: str, given: dict, name: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("clean,corrupted\na b,a c\n")
    own = {key: str(tmp_path / "p.csv") if value == "{pairs}" else value for key, value in given.items()}
    refuses(f"^{name}=… has no effect with", Call.of, verb, ["no/such"], own)


@pytest.mark.parametrize(("verb", "given", "name"), [
    ("steer", {"data": PAIRS, "length": 64}, "length"),
    ("steer", {"data": PAIRS, "max_tokens": 64}, "max_tokens"),
    ("ablate", {"data": PAIRS, "length": 64}, "length"),
    ("ablate", {"data": PAIRS, "max_tokens": 64}, "max_tokens"),
    ("ablate", {"data": "sst2", "length": 64, "limit": 3}, "length"),
])  # fmt: skip
def test_sizes_of_what_is_not_read(verb: str, given: dict, name: str) -> None:
    refuses(f"^{name}=… has no effect with", lambda: getattr(ssmscope, verb)("demo/sst2-mamba2", **given))


def test_they_have_their_effect_elsewhere() -> None:
    model = ssmscope.load("demo/books-mamba2")
    refuses("max_tokens=… has no effect with demo/books-mamba2", ssmscope.ablate, model, "books", max_tokens=64)
    data = text_data("d", "all", ["the old house stood on", "a small boy ran"], [0, 1], (" the", " a"))
    frame = [(text, data.label_names[label]) for text, label in zip(data.texts, data.labels)]
    refuses("row 1 of given has|tokens; allowed", ssmscope.evaluate, model, frame, max_tokens=2)
    refuses("series=… has no effect with demo/books-mamba2", ssmscope.evaluate, model, frame, series="s.npz")
    assert len(ssmscope.evaluate(model, frame, max_tokens=50).scores) == 2
