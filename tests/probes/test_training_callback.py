"""Health of the states during training, against what stability and the traces say."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from examples import TEXTS, random_example
from loud import loud

import ssmscope
from ssmscope.core.model import Model
from ssmscope.errors import InputError


def test_the_numbers_are_those_of_the_model() -> None:
    module = loud(random_example("mamba2")).train()
    found = ssmscope.state_numbers(module, TEXTS)
    assert module.training and not any(each.grad is not None for each in module.parameters())
    model = Model(module)
    trace = model.trace(ids=TEXTS)
    assert found["growth"] == pytest.approx(
        max(layer.growth.value for layer in ssmscope.stability(model, model.encode(ids=TEXTS)).layers)
    )
    lives = []
    for layer in trace.layers:
        real = layer.recurrence.log_decay()[trace.mask].double()
        lives.append(math.log(2) / -real.mean(0).flatten())
    medians = sorted(each.median().item() for each in lives)
    assert medians[0] * 0.5 < found["half_life"] < medians[-1] * 2
    delta = torch.stack([layer.recurrence.delta[trace.mask] for layer in trace.layers], 1).double()
    varies = delta.std(0, unbiased=False) / delta.mean(0)
    assert found["selecting"] == pytest.approx((varies >= 0.1).double().mean().item())
    norms = [state.norm().item() for state in (run.ssm[0] for run in model.run(model.encode(ids=TEXTS[:1])).states)]
    assert ssmscope.state_numbers(module, TEXTS[:1])["norm"] == pytest.approx(max(norms), rel=1e-4)


def test_the_trainer_calls_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    module, seen = random_example("mamba2"), []
    rows = [{"input_ids": torch.tensor(TEXTS[0]), "labels": torch.tensor(TEXTS[0])}] * 4
    callback = ssmscope.training_callback(TEXTS, every=2, log=seen.append)
    how = transformers.TrainingArguments(str(tmp_path), max_steps=4, report_to=[], use_cpu=True, save_strategy="no")
    trainer = transformers.Trainer(module, how, train_dataset=rows, callbacks=[callback])
    trainer.train()
    logged = [each for each in trainer.state.log_history if "states/norm" in each]
    assert [each["step"] for each in logged] == [2, 4] and len(seen) == 2
    assert seen[0]["states/norm"] != seen[1]["states/norm"]


def test_it_is_called_every_so_many_steps() -> None:
    callback, module = ssmscope.training_callback(TEXTS, every=3), random_example("mamba2")
    state = SimpleNamespace(global_step=4, log_history=[])
    callback.on_step_end(None, state, None, model=module)
    assert state.log_history == []
    state.global_step = 6
    callback.on_step_end(None, state, None, model=module)
    assert state.log_history[0]["step"] == 6 and state.log_history[0]["states/selecting"] >= 0
    with pytest.raises(InputError, match="every is 0"):
        ssmscope.training_callback(TEXTS, every=0)
    with torch.no_grad():
        next(iter(module.parameters())).fill_(math.nan)
    with pytest.raises(InputError, match="damaged"):
        callback.on_step_end(None, state, None, model=module)
