"""Scan with a decay per state and heads of width 1 (Mamba, Gu & Dao 2023, Algorithm 2).

The states of all steps would take `state` times the room of the input, so some steps are held at a time, and walked
again in the backward pass.
"""

from __future__ import annotations

from functools import partial

import torch
from einops import einsum
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ssmscope import backends
from ssmscope.backends.shapes import ChannelMemory, Channels, Inputs, Memory
from ssmscope.ops import elementwise
from ssmscope.ops.recurrence import Recurrence, by_head
from ssmscope.ops.recurrence import retention as mean_decay

MAX_NUMBERS_HELD = {"cpu": 2**19, "cuda": 2**26}
"""Numbers of all states and steps held at once: as many as a CPU's cache holds, or keep a GPU busy."""
MAX_WALKED_STATE = 128
"""Numbers per channel up to which a CPU walks the states of heads with one decay."""


def scan(
    r: Recurrence, initial: ChannelMemory | None, *, retention: bool
) -> tuple[Channels, ChannelMemory, Tensor | None]:
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


def walks_channels(r: Recurrence) -> bool:
    """Return True if a CPU should walk these heads with one decay by the kernel of width 1, every channel a head of its
    own: with small states that is faster than products over chunks."""
    small = r.shape[4] <= MAX_WALKED_STATE
    return small and r.A is not None and not r.expected and r.x.dtype is torch.float32 and r.x.device.type == "cpu"


def scan_channels(r: Recurrence, initial: Memory | None) -> tuple[Inputs, Memory] | None:
    """Return outputs without the skip and the final state, or None where no kernel serves the terms."""
    batch, length, heads, width, state = r.shape
    assert r.delta is not None and r.A is not None
    H = None if initial is None else initial.reshape(batch, heads * width, 1, state)
    x, delta = r.x.reshape(batch, length, heads * width, 1), r.delta.repeat_interleave(width, dim=2)
    terms = (x, r.b, r.c, H, delta, r.A.repeat_interleave(width, dim=0).expand(-1, state))
    if backend := backends.find("selective_scan", *terms):
        y, final, _ = backend.scan(*terms, expected=False, retention=False)
        return y.view(r.x.shape), final.view(batch, heads, width, state)
    return None


def _segment(r: Recurrence, H: Tensor, *, chunks: int | None) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state of some steps that start from H (batch, heads, state)."""
    heads = r.shape[2]
    states = elementwise.scan(r.log_decay(), r.written * by_head(r.b, heads), H, chunks)
    y = einsum(states, by_head(r.c, heads), "b t h n, b t h n -> b t h").unsqueeze(-1)
    return y, states[:, -1]
