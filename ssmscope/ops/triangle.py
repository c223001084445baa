"""Sums Σ_k R[t, k] (∏_{s<r<t} a[r, k]) W[s, k] for all s < t, as matrix products over halves of halves.

Split a stretch of steps at its middle m. The decay from a column s before m to a row t from m on is a product of two,
from s to m and from m to t, and neither is above 1 where states decay. So what lies below the diagonal block is the
product of two factors, P[t, k] = R[t, k] ∏_{m≤r<t} a and Q[s, k] = W[s, k] ∏_{s<r<m} a, and the halves are such
stretches again. From single steps upwards every level doubles the stretches, and turns their factors into those of the
next level by multiplying with the decay across the other half. Nothing is divided and no exponential is taken of a sum:
that keeps every digit where decays are close to 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

Steps = Float[Tensor, "maps length k"]


def reference(a: Steps, R: Steps, W: Steps) -> Float[Tensor, "maps length length"]:
    """Compute the sums by their definition, one row at a time."""
    maps, length, k = a.shape
    out = a.new_zeros(maps, length, length)
    carried = a.new_zeros(maps, length, k)  # W[s] ∏_{s<r<t} a[r]
    for t in range(length):
        out[:, t, :t] = (carried[:, :t] * R[:, t, None]).sum(-1)
        carried[:, :t] = carried[:, :t] * a[:, t, None]
        carried[:, t] = W[:, t]
    return out


def strict(a: Steps, R: Steps, W: Steps) -> Float[Tensor, "maps length length"]:
    """Return the sums for s < t. Where gradients are asked for, memory grows with length · k · log(length)."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (a, R, W)):
        return _differentiable(a, R, W)
    maps, length, _ = a.shape
    R, W = (t.clone(memory_format=torch.contiguous_format) for t in (R, W))
    out, half = a.new_zeros(maps, length, length), 1
    while half < length:
        pairs, rest = divmod(length, 2 * half)
        blocks = out[:, : length - rest, : length - rest].unflatten(2, (pairs, 2, half))
        corner = blocks.unflatten(1, (pairs, 2, half))[:, :, 1, :, :, 0].diagonal(0, 1, 3).movedim(-1, 1)
        left, right = _halves(W, pairs, half)[:, :, 0], _halves(R, pairs, half)[:, :, 1]
        corner.copy_((right * left).sum(-1).view(corner.shape) if half == 1 else right @ left.mT)
        if rest > half:  # The last stretch is cut short.
            begin, middle = length - rest, length - rest + half
            out[:, middle:, begin:middle] = R[:, middle:] @ W[:, begin:middle].mT
        a = _doubled(a, R, W, half, length)
        half *= 2
    return out


def _halves(t: Tensor, pairs: int, half: int) -> Tensor:
    return t[:, : pairs * 2 * half].unflatten(1, (pairs, 2, half))


def _doubled(a: Tensor, R: Tensor, W: Tensor, half: int, length: int) -> Tensor:
    """Turn R and W into the factors of the next level, in place, from the decays across each whole stretch of `half`
    steps, (maps, stretches, k), and return those across stretches twice as long. No row follows a last stretch that is
    cut short: nothing decays across it."""
    pairs, rest = divmod(length, 2 * half)
    first, second = a[:, : 2 * pairs].unflatten(1, (pairs, 2)).unbind(2)
    _halves(R, pairs, half)[:, :, 1] *= first.unsqueeze(2)
    _halves(W, pairs, half)[:, :, 0] *= second.unsqueeze(2)
    if rest > half:
        R[:, length - rest + half :] *= a[:, 2 * pairs, None]
    return first * second


def _differentiable(a: Tensor, R: Tensor, W: Tensor) -> Tensor:
    maps, length, k = a.shape
    size = 1 << (length - 1).bit_length()
    more = a.new_zeros(maps, size - length, k)
    a, R, W = (torch.cat([t, more], dim=1) for t in (a, R, W))
    out = a.new_zeros(maps, size, 1, 1)
    R, W, across = R.unsqueeze(2), W.unsqueeze(2), a  # (maps, stretches, steps of one, k)
    while R.shape[1] > 1:
        halves = (t.unflatten(1, (-1, 2)).unbind(2) for t in (R, W, across, out))
        (first_R, second_R), (first_W, second_W), (first_a, second_a), (upper, lower) = halves
        below = torch.cat([second_R @ first_W.mT, lower], dim=-1)
        out = torch.cat([pad(upper, (0, upper.shape[-1])), below], dim=-2)
        R = torch.cat([first_R, second_R * first_a.unsqueeze(2)], dim=2)
        W = torch.cat([first_W * second_a.unsqueeze(2), second_W], dim=2)
        across = first_a * second_a
    return out[:, 0, :length, :length]
