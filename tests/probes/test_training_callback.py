"""Health of the states during training, against what stability and the traces say."""

import math

import pytest
import torch
from examples import TEXTS, random_example
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope.core.model import Model


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


def test_it_is_called_every_so_many_steps() -> None:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

    module, seen, state = random_example("mamba2"), [], TrainerState()
    callback = ssmscope.training_callback(TEXTS, every=3, log=seen.append)
    trainer = CallbackHandler([callback], module, None, None, None)
    for step in range(1, 7):
        with torch.no_grad():
            module.get_input_embeddings().weight.mul_(1.1)
        state.global_step = step
        trainer.on_step_end(TrainingArguments, state, TrainerControl())
    assert [each["step"] for each in state.log_history] == [3, 6] and len(seen) == 2
    assert seen[0]["states/norm"] != seen[1]["states/norm"] and seen[0]["states/selecting"] >= 0
    refuses("every is 0", ssmscope.training_callback, TEXTS, every=0)
    with torch.no_grad():
        next(iter(module.parameters())).fill_(math.nan)
    refuses("damaged", trainer.on_step_end, TrainingArguments, state, TrainerControl())
