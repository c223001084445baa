"""The scan of the delta rule, as matrix products over chunks (Gated Delta Networks, Yang et al. 2024, section 3).

H_t = a_t H_{t-1} (I − β_t b_t b_tᵀ) + β_t x_t b_tᵀ writes the difference between x_t and what the decayed memory holds
under b_t: H_t = a_t H_{t-1} + u_t b_tᵀ with u_t = β_t (x_t − a_t H_{t-1} b_t). Within a chunk that starts from H_0 the
u_t therefore solve a triangular system, g_t being the sum of log a up to t,

    u_t + Σ_{s<t} β_t e^{g_t − g_s} (b_tᵀ b_s) u_s = β_t x_t − β_t e^{g_t} H_0 b_t,

whose two right sides are solved for all chunks at once (the WY representation of the products of the transitions);
a pass over the chunks then carries H.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ssmscope.scans.exponents import smallest_exponent
from ssmscope.scans.scalar import SEGMENT, segment_sums

CHUNK = 32  # steps of one triangular system


def scan(
    log_a: Float[Tensor, "batch length heads"],
    beta: Float[Tensor, "batch length heads"],
    b: Float[Tensor, "batch length heads state"],
    c: Float[Tensor, "batch length heads state"],
    x: Float[Tensor, "batch length heads width"],
    initial: Float[Tensor, "batch heads width state"],
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "batch length heads width"], Float[Tensor, "batch heads width state"]]:
    """y_t = H_t c_t and the final H of the delta rule, differentiable in every term."""
    outputs, H = [x[:, :0]], initial
    with torch.autocast(x.device.type, enabled=False):  # erased and written must cancel to full precision
        for start in range(0, x.shape[1], SEGMENT):
            piece = slice(start, start + SEGMENT)
            y, H = _segment(log_a[:, piece], beta[:, piece], b[:, piece], c[:, piece], x[:, piece], H, chunk)
            outputs.append(y)
    return torch.cat(outputs, dim=1), H


def _segment(
    log_a: Tensor, beta: Tensor, b: Tensor, c: Tensor, x: Tensor, H: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    length, width, state = x.shape[1], x.shape[-1], b.shape[-1]
    chunk = min(chunk, length)
    missing = -length % chunk  # steps that hold the state
    log_a, beta = (pad(t, (0, 0, 0, missing)) for t in (log_a, beta))
    b, c, x = (pad(t, (0, 0, 0, 0, 0, missing)) for t in (b, c, x))
    log_a, beta = (rearrange(t, "b (k q) h -> b k h q", q=chunk) for t in (log_a, beta))
    b, c, x = (rearrange(t, "b (k q) h n -> b k h q n", q=chunk) for t in (b, c, x))

    floor = smallest_exponent(x.dtype)
    decay = segment_sums(log_a).clamp(min=floor).exp().tril()
    from_start = log_a.cumsum(-1).clamp(min=floor).exp().unsqueeze(-1)
    beta = beta.unsqueeze(-1)
    overlap = beta * decay * (b @ b.mT)  # read below the diagonal only
    sides = torch.cat([beta * x, beta * from_start * b], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, sides, upper=False, unitriangular=True)
    written, erased = solved.split([width, state], dim=-1)

    inner, read = decay * (c @ b.mT), from_start * c
    kept, to_end = from_start[..., -1:, :], decay[..., -1, :, None] * b
    outputs = []
    for k in range(x.shape[1]):
        u = written[:, k] - erased[:, k] @ H.mT
        outputs.append(read[:, k] @ H.mT + inner[:, k] @ u)
        H = kept[:, k] * H + u.mT @ to_end[:, k]
    y = rearrange(torch.stack(outputs, dim=1), "b k h q p -> b (k q) h p")
    return y[:, :length], H


def keys_left(
    log_a: Float[Tensor, "batch length heads"],
    beta: Float[Tensor, "batch length heads"],
    b: Float[Tensor, "batch length heads state"],
    chunk: int = CHUNK,
) -> Iterator[tuple[slice, Float[Tensor, "batch chunk heads state"]]]:
    """k_sᵀ = b_sᵀ ∏_{s<r≤T} a_r (I − β_r b_r b_rᵀ) of chunks of positions, the last first: what the key that was
    written at s has become by the end.

    With P_s the product of the transitions after s, P_{s−1} = a_s (P_s − β_s b_s k_sᵀ). Within a chunk that ends with P
    the keys therefore solve a triangular system, g the sums of log a,

        k_s + Σ_{r>s} β_r e^{g_r − g_s} (b_sᵀ b_r) k_r = e^{g_end − g_s} Pᵀ b_s.
    """
    floor = smallest_exponent(b.dtype)
    P = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device).expand(b.shape[0], b.shape[2], -1, -1)
    with torch.autocast(b.device.type, enabled=False):
        for stop in range(b.shape[1], 0, -chunk):
            part = slice(max(stop - chunk, 0), stop)
            a, keys = rearrange(log_a[:, part], "b q h -> b h q"), rearrange(b[:, part], "b q h n -> b h q n")
            strength = rearrange(beta[:, part], "b q h -> b h 1 q")
            # from before the chunk on: row 0 is the chunk's start, row s + 1 what is after s
            decay = segment_sums(pad(a, (1, 0))).clamp(min=floor).exp().tril().mT
            overlap = strength * decay[..., 1:, 1:] * (keys @ keys.mT)  # read above the diagonal only
            sides = decay[..., 1:, -1:] * keys @ P
            left = torch.linalg.solve_triangular(overlap, sides, upper=True, unitriangular=True)
            P = decay[..., :1, -1:] * P - (decay[..., :1, 1:] * strength * keys.mT) @ left
            yield part, rearrange(left, "b h q n -> b q h n")
