"""The scan of the delta rule, as matrix products over chunks (Gated Delta Networks, Yang et al. 2024, section 3).

H_t = a_t H_{t-1} (I − β_t b_t b_tᵀ) + β_t x_t b_tᵀ writes the difference between x_t and what the decayed memory holds
under b_t: H_t = a_t H_{t-1} + u_t b_tᵀ with u_t = β_t (x_t − a_t H_{t-1} b_t). Within a chunk that starts from H_0 the
u_t therefore solve a triangular system, g_t being the sum of log a up to t,

    u_t + Σ_{s<t} β_t e^{g_t − g_s} (b_tᵀ b_s) u_s = β_t x_t − β_t e^{g_t} H_0 b_t,

whose two right sides are solved for all chunks at once (the WY representation of the products of the transitions);
a pass over the chunks then carries H. With a decay per state (Kimi Linear, Zhang et al. 2025, section 3), a_t scales
the columns of H_{t-1}, and e^{g_t − g_s} stands within the products over states, see `ssmscope.scans.wide`. In float32
on a GPU kernels of Triton do it (`delta_fused`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ssmscope.scans import delta_exact, delta_fused, wide
from ssmscope.scans.exponents import smallest_exponent
from ssmscope.scans.scalar import SEGMENT, segment_sums

CHUNK = 32  # steps of one triangular system


def scan(
    log_a: Float[Tensor, "batch length heads #state"],
    beta: Float[Tensor, "batch length heads"],
    b: Float[Tensor, "batch length groups state"],
    c: Float[Tensor, "batch length groups state"],
    x: Float[Tensor, "batch length heads width"],
    initial: Float[Tensor, "batch heads width state"],
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "batch length heads width"], Float[Tensor, "batch heads width state"]]:
    """y_t = H_t c_t and the final H of the delta rule, differentiable in every term.

    On a GPU products are as exact as torch's own, `torch.get_float32_matmul_precision()` (see `delta_fused`).
    """
    if delta_fused.applicable(log_a, beta, b, c, x, initial):
        return delta_fused.scan(log_a, beta, b, c, x, initial)
    b, c = (by_head(t, x.shape[2]) for t in (b, c))
    outputs, H = [x[:, :0]], initial
    with torch.autocast(x.device.type, enabled=False):  # erased and written must cancel to full precision
        for start in range(0, x.shape[1], SEGMENT):
            piece = slice(start, start + SEGMENT)
            y, H = _segment(log_a[:, piece], beta[:, piece], b[:, piece], c[:, piece], x[:, piece], H, chunk)
            outputs.append(y)
    return torch.cat(outputs, dim=1), H


def by_head(t: Tensor, heads: int) -> Tensor:
    """A term of groups, (batch, length, groups, …), of each of the heads."""
    share = heads // t.shape[2]
    return t.repeat_interleave(share, dim=2) if share > 1 else t


def _segment(
    log_a: Tensor, beta: Tensor, b: Tensor, c: Tensor, x: Tensor, H: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    length, width, state = x.shape[1], x.shape[-1], b.shape[-1]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    missing = -length % chunk  # steps that hold the state
    log_a, b, c, x = (pad(t, (0, 0, 0, 0, 0, missing)) for t in (log_a, b, c, x))
    beta = rearrange(pad(beta, (0, 0, 0, missing)), "b (k q) h -> b k h q 1", q=chunk)
    log_a, b, c, x = (rearrange(t, "b (k q) h n -> b k h q n", q=chunk) for t in (log_a, b, c, x))

    (among, inner), from_start, to_end = _decayed(log_a, b, b, c)
    overlap = beta * among  # read below the diagonal only
    sides = torch.cat([beta * x, beta * from_start * b], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, sides, upper=False, unitriangular=True)
    written, erased = solved.split([width, state], dim=-1)

    read, kept, to_end = from_start * c, from_start[..., -1:, :], to_end * b
    outputs = []
    for k in range(x.shape[1]):
        u = written[:, k] - erased[:, k] @ H.mT
        outputs.append(read[:, k] @ H.mT + inner[:, k] @ u)
        H = kept[:, k] * H + u.mT @ to_end[:, k]
    y = rearrange(torch.stack(outputs, dim=1), "b k h q p -> b (k q) h p")
    return y[:, :length], H


def _decayed(log_a: Tensor, b: Tensor, *readers: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Of chunks (…, chunk, state): c_tᵀ Γ b_s with Γ = ∏_{s<r≤t} a_r for each of the readers c, (…, chunk, chunk), zero
    for s > t; and the decays from the chunk's start through t and from t, exclusive, to its end, (…, chunk, state or
    1)."""
    floor = smallest_exponent(b.dtype)
    if log_a.shape[-1] > 1:
        each = [wide.within(log_a, b, c, floor) for c in readers]
        _, from_start, to_end = each[0]
        return [S for S, *_ in each], from_start.clamp(min=floor).exp(), to_end.clamp(min=floor).exp()
    decay = segment_sums(log_a.squeeze(-1)).clamp(min=floor).exp().tril()
    from_start = log_a.cumsum(-2).clamp(min=floor).exp()
    return [decay * (c @ b.mT) for c in readers], from_start, decay[..., -1, :, None]


def keys_left(
    log_a: Float[Tensor, "batch length heads #state"],
    beta: Float[Tensor, "batch length heads"],
    b: Float[Tensor, "batch length groups state"],
    chunk: int = CHUNK,
) -> Iterator[tuple[slice, Float[Tensor, "batch chunk heads state"]]]:
    """k_sᵀ = b_sᵀ ∏_{s<r≤T} a_r (I − β_r b_r b_rᵀ) of chunks of positions, the last first: what the key that was
    written at s has become by the end.

    With P_s the product of the transitions after s, P_{s−1} = a_s (P_s − β_s b_s k_sᵀ). Within a chunk that ends with P
    the keys therefore solve a triangular system, Γ the decays,

        k_s + Σ_{r>s} β_r (b_sᵀ Γ_{s<…≤r} b_r) k_r = (Γ_{s<…≤end} P)ᵀ b_s.
    """
    if delta_fused.applicable(log_a, beta, b):
        yield from delta_exact.keys_left(log_a, beta, b)
        return
    b = by_head(b, beta.shape[2])
    P = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device).expand(b.shape[0], b.shape[2], -1, -1)
    with torch.autocast(b.device.type, enabled=False):
        for stop in range(b.shape[1], 0, -chunk):
            part = slice(max(stop - chunk, 0), stop)
            before = (1 << (stop - part.start - 1).bit_length()) - (stop - part.start)  # steps that change nothing
            a, keys = (pad(rearrange(t[:, part], "b q h n -> b h q n"), (0, 0, before, 0)) for t in (log_a, b))
            strength = pad(rearrange(beta[:, part], "b q h -> b h q 1"), (0, 0, before, 0))
            (among,), from_start, to_end = _decayed(a, keys, keys)
            overlap = (strength * among).mT  # read above the diagonal only
            left = torch.linalg.solve_triangular(overlap, (to_end * keys) @ P, upper=True, unitriangular=True)
            P = from_start[..., -1, :, None] * P - (from_start * strength * keys).mT @ left
            yield part, rearrange(left[..., before:, :], "b h q n -> b q h n")
