"""The scan with a decay per state and heads of width 1 (Mamba, Gu & Dao 2023, Algorithm 2).

The states of all steps would take `state` times the room of the input, so some steps are held at a time, and walked
again in the backward pass.
"""

from __future__ import annotations

from functools import partial

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ssmscope import backends
from ssmscope.ops import elementwise
from ssmscope.ops.recurrence import Recurrence, by_head
from ssmscope.ops.recurrence import retention as mean_decay

MAX_NUMBERS_HELD = {"cpu": 2**19, "cuda": 2**26}
"""Numbers of all states and steps that are held at once: what stays in a CPU's cache, and what keeps a GPU busy."""


def scan(
    r: Recurrence, initial: Float[Tensor, "batch heads 1 state"] | None, *, retention: bool
) -> tuple[Float[Tensor, "batch length heads 1"], Float[Tensor, "batch heads 1 state"], Tensor | None]:
    """Return outputs without the skip, the final state and, with `retention`, the mean decay of every step."""
    if r.log_a is None:
        terms = (r.x, r.b, r.c, initial, r.delta, r.A)
        if backend := backends.find("selective_scan", *terms):
            return backend.scan(*terms, expected=r.expected, retention=retention)
    batch, length, heads, _, state = r.shape
    H = r.x.new_zeros(batch, heads, state) if initial is None else initial.squeeze(2)
    device = r.x.device.type
    step = max(1, MAX_NUMBERS_HELD.get(device, MAX_NUMBERS_HELD["cuda"]) // max(1, batch * heads * state))
    run = partial(_segment, chunks=1 if device == "cpu" else None)
    if torch.is_grad_enabled() and step < length:
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    outputs = [r.x[:, :0]]
    for start in range(0, length, step):
        y, H = run(r.between(start, start + step), H)
        outputs.append(y)
    return torch.cat(outputs, dim=1), H.unsqueeze(2), mean_decay(r).detach() if retention else None


def _segment(r: Recurrence, H: Tensor, *, chunks: int | None) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state of some steps that start from H (batch, heads, state)."""
    heads = r.shape[2]
    states = elementwise.scan(r.log_decay(), r.written * by_head(r.b, heads), H, chunks)
    y = einsum(states, by_head(r.c, heads), "b t h n, b t h n -> b t h").unsqueeze(-1)
    return y, states[:, -1]
