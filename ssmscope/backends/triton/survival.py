"""Norms of decayed keys with a decay per state, on a GPU: what is left at the end of each position's key.

Sums of steps run from the end, over pieces of `STEPS` positions in float64 and within a piece in float32. None is a
difference of sums from the beginning.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.backends.triton.survival_kernels import key_norms_of_piece

STEPS = 64
"""Positions of a program."""
MAX_CHANNELS_PER_PROGRAM = 32
WARPS_PER_PROGRAM = 4


def fits(delta: Tensor, A: Tensor, b: Tensor) -> bool:
    """Return True for what `key_norms` takes: float32, a decay per state, no empty dimension."""
    return all(t.dtype == torch.float32 and t.numel() > 0 for t in (delta, A, b)) and A.shape[-1] == b.shape[-1]


def key_norms(
    delta: Float[Tensor, "batch length heads"],
    A: Float[Tensor, "heads state"],
    b: Float[Tensor, "batch length groups state"],
) -> Float[Tensor, "batch length heads"]:
    """Return ‖k_s‖ of k_s = exp(A S_s) ⊙ b_s with S_s = Σ_{s<r≤T} Δ_r, each head with the b of its group."""
    (batch, length, heads), (groups, state) = delta.shape, b.shape[2:]
    delta = delta if delta.stride(2) == 1 else delta.contiguous()
    later = _later_sums(delta)
    slowest = A.amax(1, keepdim=True)  # Its squares would be 0 for norms below exp(−43).
    rates = (A - slowest).mT.contiguous() * (2 / math.log(2))
    block = min(MAX_CHANNELS_PER_PROGRAM, 1 << (heads // groups - 1).bit_length())
    norms = delta.new_empty(delta.shape)
    key_norms_of_piece[groups * -(-heads // groups // block), later.shape[1], batch](
        delta, slowest.squeeze(1) / math.log(2), rates, b, later, norms, length, heads, groups,
        *delta.stride()[:2], *b.stride(), N=state, STEPS=STEPS, BLOCK=block, num_warps=WARPS_PER_PROGRAM,
    )  # fmt: skip
    return norms


def _later_sums(delta: Tensor) -> Float[Tensor, "batch pieces heads"]:
    """Return Σ Δ after each piece of `STEPS` positions; pieces are counted back from the last position."""
    pieces = -(-delta.shape[1] // STEPS)
    whole = delta[:, delta.shape[1] - (pieces - 1) * STEPS :].unflatten(1, (pieces - 1, STEPS))
    sums = whole.sum(2).double().flip(1).cumsum(1).flip(1)
    return torch.cat([sums, sums.new_zeros(len(delta), 1, delta.shape[2])], dim=1).float()
