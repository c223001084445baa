"""Scan with one decay per head, as matrix products over chunks (SSD; Mamba-2, Dao & Gu 2024, section 6)."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from ssmscope import backends
from ssmscope.backends.shapes import Inputs, Keys, Memory, PerHead
from ssmscope.ops.recurrence import smallest_exponent

STEPS_PER_CHUNK = 32
STEPS_PER_SHORT_CHUNK = 16
MIN_NUMBERS_PER_STATE = 2048
"""Numbers of a head's state below which chunks are short, as products of states are cheap."""
STEPS_PER_SEGMENT = 1024


def segment_sums(log_a: Float[Tensor, "*batch length"]) -> Float[Tensor, "*batch length length"]:
    """Return Σ_{s<r≤t} log a_r at [t, s], and 0 above the diagonal. Every sum starts at its own s, so no digits are
    lost to the difference of two long sums."""
    length = log_a.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=log_a.device).tril(-1)
    spread = log_a.unsqueeze(-1).expand(*log_a.shape, length)
    return torch.where(below, spread, 0.0).cumsum(-2)


def scan(
    log_a: PerHead, b: Keys, c: Keys, x: Inputs, initial: Memory | None = None, delta: PerHead | None = None
) -> tuple[Inputs, Memory]:
    """Return y_t = c_tᵀ H_t and the final H of H_t = a_t H_{t-1} + Δ_t x_t b_tᵀ; Δ is 1 and H_0 is 0 when absent."""
    if backend := backends.find("ssd", log_a, b, c, x, initial, delta):
        return backend.scan(log_a, b, c, x, initial, delta)
    if initial is None:
        initial = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[3])
    x = x if delta is None else x * delta.unsqueeze(-1)
    outputs, H = [x[:, :0]], initial
    for start in range(0, x.shape[1], STEPS_PER_SEGMENT):
        part = slice(start, start + STEPS_PER_SEGMENT)
        y, H = _segment(log_a[:, part], b[:, part], c[:, part], x[:, part], H)
        outputs.append(y)
    return torch.cat(outputs, dim=1), H


def _segment(log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, width = x.shape
    groups, state = b.shape[2:]
    few = width * state < MIN_NUMBERS_PER_STATE
    chunks = -(-length // (STEPS_PER_SHORT_CHUNK if few else STEPS_PER_CHUNK))
    chunk = -(-length // chunks)
    if missing := chunk * chunks - length:  # Added steps have decay 1 and write nothing.
        log_a = pad(log_a, (0, 0, 0, missing))
        b, c, x = (pad(t, (0, 0, 0, 0, 0, missing)) for t in (b, c, x))

    log_a = rearrange(log_a.clamp(min=smallest_exponent(x.dtype)), "b (k q) h -> b k h q", q=chunk)
    b, c = (rearrange(t, "b (k q) g n -> b k g q n", q=chunk) for t in (b, c))
    x = rearrange(x, "b (k q) (g h) p -> b k g h q p", q=chunk, g=groups)

    # Outputs within a chunk are (c bᵀ ∘ decay) x.
    decay = rearrange(segment_sums(log_a).exp(), "b k (g h) t s -> b k g h t s", g=groups)
    inner = (c @ b.mT).tril().unsqueeze(3) * decay
    y = inner @ x

    # The writing of each chunk decays to its end; a pass over the chunks gives the state at each one's start.
    total = log_a.sum(-1).exp()
    to_end = decay[..., -1, :]
    added = rearrange(x * to_end.unsqueeze(-1), "b k g h q p -> b k g (h p) q") @ b
    added = rearrange(added, "b k g (h p) n -> b k (g h) p n", p=width)
    before = []
    for new, held in zip(added.unbind(1), total[..., None, None].unbind(1)):  # Indexing would fill whole gradients.
        before.append(H)
        H = torch.addcmul(new, held, H)

    # The state at a chunk's start adds to the chunk's outputs.
    carried = rearrange(torch.stack(before, dim=1), "b k (g h) p n -> b k g n (h p)", g=groups)
    read = rearrange(c @ carried, "b k g q (h p) -> b k g h q p", p=width)
    from_start = rearrange(log_a.cumsum(-1).exp(), "b k (g h) q -> b k g h q 1", g=groups)
    y = torch.addcmul(y, read, from_start)
    y = rearrange(y, "b k g h q p -> b (k q) (g h) p")
    return y[:, :length], H
