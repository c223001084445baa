"""Scan with a decay per state and wide heads, as matrix products over all chunks at once (GLA, Yang et al. 2023).

Within a chunk y_t = Σ_{s≤t} S[t, s] x_s with S[t, s] = Σ_n c_t[n] b_s[n] ∏_{s<r≤t} a_r[n]. For t in the right and s in
the left half of a block the product of decays is one from the block's middle to t times one from s to the middle, and
that corner of S a matrix product; the halves are blocks themselves. Neither factor is a quotient of cumulative
products, so where states decay nothing overflows.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad
from ssmscope.backends.shapes import HeadKeys, Inputs, Keys, Memory
from ssmscope.ops.compiling import compilable
from ssmscope.ops.recurrence import smallest_exponent

STEPS_PER_CHUNK = 32
STEPS_PER_SEGMENT = 2048


def scan(log_a: HeadKeys, b: Keys, c: Keys, x: Inputs, initial: Memory) -> tuple[Inputs, Memory]:
    """Return y_t = c_tᵀ H_t and the final H of H_t = a_t ⊙ H_{t-1} + x_t b_tᵀ."""
    outputs, H = [x[:, :0]], initial
    for start in range(0, x.shape[1], STEPS_PER_SEGMENT):
        part = slice(start, start + STEPS_PER_SEGMENT)
        y, H = _segment(log_a[:, part], b[:, part], c[:, part], x[:, part], H)
        outputs.append(y)
    return torch.cat(outputs, dim=1), H


def _segment(log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    length, groups = b.shape[1:3]
    chunk = min(STEPS_PER_CHUNK, 1 << (length - 1).bit_length())
    missing = -length % chunk
    if missing:  # Added steps have decay 1 and write nothing.
        log_a, b, c, x = (pad(t, (0, 0, 0, 0, 0, missing)) for t in (log_a, b, c, x))
    b, c = (rearrange(t, "b (k q) g n -> b g 1 k q n", q=chunk) for t in (b, c))
    log_a, x = (rearrange(t, "b (k q) (g h) n -> b g h k q n", q=chunk, g=groups) for t in (log_a, x))
    floor = smallest_exponent(x.dtype)

    S, from_start, to_end = within(log_a, b, c, floor)
    added = x.mT @ (b * to_end.clamp(min=floor).exp())  # Each chunk's writing is decayed to its end.
    total = from_start[..., -1:, :].clamp(min=floor).exp()
    H = rearrange(H, "b (g h) p n -> b g h p n", g=groups)
    before = []
    for new, held in zip(added.unbind(3), total.unbind(3)):  # Indexing would fill whole gradients.
        before.append(H)
        H = torch.addcmul(new, held, H)
    y = S @ x + (c * from_start.clamp(min=floor).exp()) @ torch.stack(before, dim=3).mT
    return rearrange(y, "b g h k q p -> b (k q) (g h) p")[:, :length], rearrange(H, "b g h p n -> b (g h) p n")


@compilable
def within(log_a: Tensor, b: Tensor, c: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return S (…, chunk, chunk) of every chunk, and the sums of log-decays from the chunk's start through t and from
    t, exclusive, to its end, (…, chunk, state). `log_a`, `b`, `c` are (…, chunk, state)."""

    def halves(t: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the left and right halves (…, blocks, size, n) of blocks of 2 × size steps of `t` (…, chunk, n)."""
        left, right = rearrange(t, "... (m two s) n -> two ... m s n", two=2, s=size)
        return left, right

    chunk = log_a.shape[-2]
    S = rearrange((c * b).sum(-1), "... (m one) -> ... m one 1", one=1).expand(*log_a.shape[:-1], 1, 1)
    from_start, to_end = log_a, torch.zeros_like(log_a)  # The blocks have one step.
    size = 1
    while size < chunk:
        (first, second), (first_end, second_end) = halves(from_start, size), halves(to_end, size)
        read = halves(c, size)[1] * second.clamp(min=floor).exp()
        written = halves(b, size)[0] * first_end.clamp(min=floor).exp()
        upper, lower = rearrange(S, "... (m two) t s -> two ... m t s", two=2)
        S = torch.cat([pad(upper, (0, size)), torch.cat([read @ written.mT, lower], dim=-1)], dim=-2)
        whole, of_second = first[..., -1:, :], second[..., -1:, :]
        from_start = rearrange([first, second + whole], "two ... m s n -> ... (m two s) n")
        to_end = rearrange([first_end + of_second, second_end], "two ... m s n -> ... (m two s) n")
        size *= 2
    return S.squeeze(-3), from_start, to_end
