"""A model's own library in every mode in which it serves: cached steps, padding, batches, prefill in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssmscope.api.options import note
from ssmscope.core.intercept import evaluating
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.probes.parity.measure import ROUNDING_FACTOR, copied
from ssmscope.probes.parity.result import Compared

PROMPT, PADDING, WRITTEN, CHUNK = 37, 7, 24, 16
"""Tokens of the prompt, of its padding, of what is written, and of a chunk of prefill."""
REFUSALS = (ValueError, TypeError, RuntimeError, AttributeError, LookupError)
"""Errors with which libraries refuse a mode."""


def own_modes(model: Model, seed: int) -> tuple[Compared, ...]:
    """Return the logits of the library's own code, in each mode, against this package's run of the same tokens. A mode
    that the library refuses is noted. Errors are rms(difference) / rms by token, allowed as in `measure.compared`.
    Raises InputError if all are refused."""
    random = np.random.default_rng(seed)
    ids, other = (random.integers(3, model.vocabulary, (1, n)).tolist() for n in (PROMPT, PROMPT + PADDING))
    rounded = copied(model, next(model.module.parameters()).dtype)
    found = []
    for name, run in _modes(model, torch.tensor(ids), torch.tensor(other)):
        try:
            with evaluating(model.module), torch.no_grad():
                text, logits = run()
        except REFUSALS as error:
            note(f"{name} is refused: {' '.join(str(error).split())[:100]}")
            continue
        batch, start = model.encode(ids=text), len(text) - len(logits)
        exact, near = (each.logits(batch)[0, start:].double() for each in (model, rounded))
        size = exact.square().mean().sqrt()
        errors, rounding = ((t - exact).square().mean(-1).sqrt() / size for t in (logits.double(), near))
        errors = errors.nan_to_num(nan=float("inf"))
        allowed = ROUNDING_FACTOR * (float(rounding.max()) + torch.finfo(logits.dtype).eps)
        over = np.flatnonzero((errors > allowed).cpu().numpy())
        at = int(over[0]) + start if over.size else -1
        shown = batch.tokens[0][at] if over.size else ""
        found.append(
            Compared(name, float(errors.max()), allowed, len(over), len(errors), 0 if over.size else -1, at, shown)
        )
    if not found:
        raise InputError(f"the library of {model.name} refuses every mode; its own code cannot be compared")
    return tuple(found)


def _modes(model: Model, ids: Tensor, other: Tensor) -> Iterator[tuple[str, Callable[[], tuple[list[int], Tensor]]]]:
    """Yield names of modes, and functions that return a text and the logits of its last tokens."""
    module, device = model.module, model.device
    ids, other = ids.to(device), other.to(device)
    pad = torch.full((1, PADDING), 3, device=device)
    padded, mask = torch.cat([pad, ids], 1), torch.cat([torch.zeros_like(pad), torch.ones_like(ids)], 1)

    def written(x: Tensor, real: Tensor, skip: int = 0, **more: Any) -> tuple[list[int], Tensor]:
        how = dict(max_new_tokens=WRITTEN, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0)
        kept = dict(return_dict_in_generate=True, output_logits=True)
        out = module.generate(input_ids=x, attention_mask=real, **how, **kept, **more)
        return out.sequences[0, skip:-1].tolist(), torch.stack([each[0] for each in out.logits])

    whole = torch.ones_like(ids)
    yield "logits of one pass", lambda: (ids[0].tolist(), module(input_ids=ids, use_cache=False).logits[0])
    yield "logits of cached steps", lambda: written(ids, whole)
    yield "logits of prefill in chunks", lambda: written(ids, whole, prefill_chunk_size=CHUNK)
    yield "logits of left padding, alone", lambda: written(padded, mask, PADDING)
    both = torch.cat([padded, other]), torch.cat([mask, torch.ones_like(other)])
    yield "logits of left padding, in a batch", lambda: written(*both, PADDING)
