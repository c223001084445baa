"""Effective remembrance against runs by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
from planned import tiny_model
import ssmscope
from ssmscope.core.attention_layers import AttentionState
from ssmscope.core.cuts import cut_attention
from ssmscope.core.edits import edited
from ssmscope.core.model import Model
from ssmscope.probes.loss.remembrance import remembrances

WINDOWS = torch.randint(3, 90, (3, 13), generator=torch.Generator().manual_seed(0)).numpy()


def next_token(model: Model, ids: list[int], states: object = None) -> torch.Tensor:
    return model.run(model.encode(ids=ids), states, last_only=True).logits[0].double().softmax(-1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mamba2", "jamba", "lfm2"])
def test_it_is_the_distance_of_two_runs(name: str) -> None:
    model = Model(loud(random_example(name)))
    found = remembrances(model, WINDOWS, (3, 7), 0)
    for one in found:
        whole = [row[:-1].tolist() for row in WINDOWS]
        apart = [(next_token(model, ids) - next_token(model, ids[-one.span :])).abs().sum().item() / 2 for ids in whole]
        assert one.variation.value == pytest.approx(np.mean(apart), abs=1e-6) and np.mean(apart) > 1e-3
        if name == "lfm2":
            assert np.isnan(one.kept.value)
        else:
            kept = [model.trace(ids=ids).survival()[:, 0, : -one.span].sum(1).mean().item() for ids in whole]
            assert one.kept.value == pytest.approx(np.mean(kept), abs=1e-6)
        assert np.isnan(one.attention.value) == (name == "mamba2")


def test_attention_is_cut_off_alone() -> None:
    """The run continues from the recurrent states without the keys of before."""
    model = Model(loud(random_example("jamba")))
    ids = WINDOWS[0, :-1].tolist()
    states = model.run(model.encode(ids=ids[:8])).states
    cut = [replace(s, places=torch.zeros_like(s.places)) if isinstance(s, AttentionState) else s for s in states]
    with edited(model, cut_attention(range(8), range(8, 12))):
        found = model.logits(model.encode(ids=ids))[0, -1].double().softmax(-1)
    assert torch.allclose(found, next_token(model, ids[8:], tuple(cut)), atol=1e-6)
    assert (found - next_token(model, ids)).abs().max() > 1e-3


def test_the_verb(analyze, refusal, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a good film with bad acting , but great music .\n" * 12)
    given = ("loss", tiny_model(tmp_path / "model"), "--data", tmp_path / "text.txt", "--length", "40", "--limit", "2")
    answer = analyze(*given, "--remembers", "5,20", "--out", tmp_path / "out", "--no-progress")
    assert "of which all but the last 20 tokens move the next by" in " ".join(answer.out.split())
    result = ssmscope.Result.load(tmp_path / "out" / "loss.json")
    assert result == ssmscope.Result.from_dict(json.loads(result.to_json()))
    assert [one.span for one in result.remembrance[0]] == [5, 20] and len(result.tables()) == 2
    first, second = result.remembrance[0]
    assert first.variation.value > second.variation.value > 0 and first.kept.value > second.kept.value > 0
    assert "remembers is 40; allowed are numbers below the 40 tokens" in refusal(*given, "--remembers", "40")
    assert ssmscope.Result.from_dict({**json.loads(result.to_json()), "remembrance": []}).remembrance == ()
