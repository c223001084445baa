"""Health of the states during training: numbers of a model, and a callback of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ssmscope.core.model import Model
from ssmscope.core.take_trace import as_batch
from ssmscope.errors import InputError, check_whole
from ssmscope.interp.gates import GateVariation
from ssmscope.probes.stability import stability


def state_numbers(module: Any, texts: Sequence[Any], tokenizer: Any = None) -> dict[str, float]:
    """Return how a model's states fare on texts: `growth`, the largest mean log-gain per token of any layer;
    `half_life`, the median over layers of their median, in tokens, and `half_life_95`, the longest of their 95 %
    quantiles; `norm`, the largest mean norm of a layer's states at the texts' end; and `selecting`, the share of heads
    whose gate varies over tokens by a tenth or more.

    Args:
        module: transformers model, which may be in training; its mode and gradients stay.
        texts: texts, or token ids where there is no tokenizer, of two tokens or more.
        tokenizer: reads the texts.

    Raises InputError as `ssmscope.stability`, and for weights that are NaN or infinite.
    """
    model = Model(module, tokenizer, "training")
    batch = as_batch(model, texts)
    found, gates = stability(model, batch), GateVariation(batch.mask)
    model.trace(batch, keep_inputs=False, retention=False, visit=gates.visit)
    lives, share = np.array([layer.quantiles for layer in found.layers]), gates.share()
    return {
        "growth": max(layer.growth.value for layer in found.layers),
        "half_life": float(np.median(lives[:, 2])),
        "half_life_95": float(lives[:, -1].max()),
        "norm": float(found.norms[:, -1, 0].max()),
        "selecting": float("nan") if share is None else share,
    }


def training_callback(
    texts: Sequence[Any], *, every: int = 100, log: Callable[[dict[str, float]], Any] | None = None
) -> Any:
    """Return a callback for transformers' Trainer that measures `state_numbers` every so many steps.

    They go into the trainer's `state.log_history`, with the prefix "states/".

    Args:
        texts: texts, or token ids, on which they are measured.
        every: number of steps between measurements.
        log: function that is also called with them, such as `wandb.log`.
    """
    from transformers import TrainerCallback

    check_whole(1, every=every)
    if not isinstance(texts, Sequence) or not texts:
        raise InputError(f"texts are {texts!r:.60}; give texts, or token ids")
    if not (log is None or callable(log)):
        raise InputError(f"log is {log!r:.60}; give a function, such as wandb.log")

    class States(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
            if state.global_step % every:
                return
            tokenizer = given.get("processing_class", given.get("tokenizer"))
            numbers = {f"states/{name}": value for name, value in state_numbers(model, texts, tokenizer).items()}
            state.log_history.append({**numbers, "step": state.global_step})
            if log is not None:
                log(numbers)

    return States()
