"""Norms of decayed keys with a decay per state, on a GPU: what is left at the end of each position's key.

Sums of steps run from the end, over pieces of `STEPS` positions in float64 and within a piece in float32. None is a
difference of sums from the beginning.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from ssmscope.backends.shapes import Keys, PerHead

STEPS = 64
"""Positions of a program."""
MAX_CHANNELS_PER_PROGRAM = 32
WARPS_PER_PROGRAM = 4


def fits(delta: Tensor, A: Tensor, b: Tensor) -> bool:
    """Return True for what `key_norms` takes: float32, a decay per state, no empty dimension."""
    return all(t.dtype == torch.float32 and t.numel() > 0 for t in (delta, A, b)) and A.shape[-1] == b.shape[-1]


def key_norms(delta: PerHead, A: Float[Tensor, "heads state"], b: Keys) -> PerHead:
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


# ---- the kernel


@triton.jit(do_not_specialize=["length"])
def key_norms_of_piece(
    delta, slowest, rates, b, later, norms, length, heads, groups,
    delta_row, delta_step, b_row, b_step, b_group, b_state,
    N: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the norms of BLOCK channels of a group at one piece of STEPS positions, the last one first. `slowest`
    (heads,) is max_n A / log 2 and `rates` (N, heads) are twice the distances of A / log 2 from it; `later` (batch,
    pieces, heads) are the sums of Δ after each piece. The grid is (blocks of channels, pieces, batch)."""
    row, piece, pieces = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    share = heads // groups
    blocks = tl.cdiv(share, BLOCK)
    group = tl.program_id(0) // blocks
    own = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    d, known, later_steps = group * share + own, own < share, tl.arange(0, STEPS)
    t = length - 1 - (pieces - 1 - piece).to(tl.int64) * STEPS - later_steps
    real = (t >= 0)[:, None] & known[None, :]
    following = delta + row * delta_row + (t + 1)[:, None] * delta_step + d[None, :]
    sums = tl.cumsum(tl.load(following, mask=real & (later_steps > 0)[:, None], other=0.0), axis=0)
    sums += tl.load(later + (row * pieces + piece) * heads + d, mask=known, other=0.0)[None, :]
    b += row * b_row + t * b_step + group * b_group
    squares = tl.zeros((STEPS, BLOCK), tl.float32)
    for n in range(N):
        rate = tl.load(rates + n * heads + d, mask=known, other=0.0)
        key = tl.load(b + n * b_state, mask=t >= 0, other=0.0)
        squares += tl.exp2(rate[None, :] * sums) * (key * key)[:, None]
    kept = tl.exp2(tl.load(slowest + d, mask=known, other=0.0)[None, :] * sums)
    tl.store(norms + (row * length + t[:, None]) * heads + d[None, :], kept * tl.sqrt(squares), mask=real)
