"""The scan of the generalised delta rule, as matrix products over chunks (RWKV-7, Peng et al. 2025, section 3).

H_t = a_t H_{t-1} (I − β_t e_t r_tᵀ) + β_t x_t b_tᵀ looks up what the decayed memory holds under e_t and takes it away
along r_t. With f_t = a_t H_{t-1} e_t what is found, H_t = a_t H_{t-1} + β_t (x_t b_tᵀ − f_t r_tᵀ). Within a chunk that
starts from H_0 the f_t therefore solve a triangular system, Γ being the decays,

    f_t + Σ_{s<t} β_s (e_tᵀ Γ_{s<…≤t} r_s) f_s = H_0 Γ_{≤t} e_t + Σ_{s<t} β_s (e_tᵀ Γ_{s<…≤t} b_s) x_s.

Where e = r = b it is the system of `ssmscope.scans.delta`. Products of decays are those of `ssmscope.scans.wide`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ssmscope.scans import wide
from ssmscope.scans.delta import by_head
from ssmscope.scans.exponents import smallest_exponent
from ssmscope.scans.scalar import SEGMENT

CHUNK = 32  # steps of one triangular system


def scan(
    log_a: Float[Tensor, "batch length heads #state"],
    beta: Float[Tensor, "batch length heads"],
    b: Float[Tensor, "batch length groups state"],
    c: Float[Tensor, "batch length groups state"],
    x: Float[Tensor, "batch length heads width"],
    e: Float[Tensor, "batch length heads state"],
    r: Float[Tensor, "batch length heads state"],
    initial: Float[Tensor, "batch heads width state"],
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "batch length heads width"], Float[Tensor, "batch heads width state"]]:
    """y_t = H_t c_t and the final H, differentiable in every term."""
    b, c = (by_head(t, x.shape[2]) for t in (b, c))
    outputs, H = [x[:, :0]], initial
    with torch.autocast(x.device.type, enabled=False):  # taken away and written must cancel to full precision
        for start in range(0, x.shape[1], SEGMENT):
            terms = [t[:, start : start + SEGMENT] for t in (log_a, beta.unsqueeze(-1), b, c, x, e, r)]
            y, H = _segment(terms, H, chunk)
            outputs.append(y)
    return torch.cat(outputs, dim=1), H


def _segment(terms: list[Tensor], H: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    log_a, beta, b, c, x, e, r = terms
    length, width = x.shape[1], x.shape[-1]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    missing = -length % chunk  # steps that hold the state
    padded = (pad(t, (0, 0, 0, 0, 0, missing)) for t in (log_a, beta * b, c, x, e, beta * r))
    log_a, b, c, x, e, r = (rearrange(t, "b (k q) h n -> b k h q n", q=chunk) for t in padded)

    written, removed = _products(log_a, b, e, c), _products(log_a, r, e, c)
    from_start, to_end = written.from_start, written.to_end
    sides = torch.cat([written.found.tril(-1) @ x, from_start * e], dim=-1)
    solved = torch.linalg.solve_triangular(removed.found, sides, upper=False, unitriangular=True)
    of_written, of_before = solved.split([width, sides.shape[-1] - width], dim=-1)

    read, kept, b, r = from_start * c, from_start[..., -1:, :], to_end * b, to_end * r
    outputs = []
    for k in range(x.shape[1]):
        found = of_written[:, k] + of_before[:, k] @ H.mT
        outputs.append(read[:, k] @ H.mT + written.read[:, k] @ x[:, k] - removed.read[:, k] @ found)
        H = kept[:, k] * H + x[:, k].mT @ b[:, k] - found.mT @ r[:, k]
    y = rearrange(torch.stack(outputs, dim=1), "b k h q p -> b (k q) h p")
    return y[:, :length], H


class _Products(NamedTuple):
    """Of chunks (…, chunk, state): e_tᵀ Γ_{s<…≤t} b_s and c_tᵀ Γ_{s<…≤t} b_s, (…, chunk, chunk), zero for s > t, and
    the decays from the chunk's start through t and from t, exclusive, to its end."""

    found: Tensor
    read: Tensor
    from_start: Tensor
    to_end: Tensor


def _products(log_a: Tensor, b: Tensor, e: Tensor, c: Tensor) -> _Products:
    floor = smallest_exponent(b.dtype)
    log_a = log_a.expand_as(b)
    found, *_ = wide.within(log_a, b, e, floor)
    read, from_start, to_end = wide.within(log_a, b, c, floor)
    return _Products(found, read, from_start.clamp(min=floor).exp(), to_end.clamp(min=floor).exp())


def keys_left(
    log_a: Float[Tensor, "batch length heads #state"],
    beta: Float[Tensor, "batch length heads"],
    b: Float[Tensor, "batch length groups state"],
    e: Float[Tensor, "batch length heads state"],
    r: Float[Tensor, "batch length heads state"],
    chunk: int = CHUNK,
) -> Iterator[tuple[slice, Float[Tensor, "batch chunk heads state"]]]:
    """k_sᵀ = b_sᵀ ∏_{s<t≤T} a_t (I − β_t e_t r_tᵀ) of chunks of positions, the last first: what the key that was
    written at s has become by the end.

    With P_s the product of the transitions after s and l_sᵀ = r_sᵀ P_s, P_{s−1} = a_s (P_s − β_s e_s l_sᵀ). Within a
    chunk that ends with P the l_s solve a triangular system, of which the keys are made:

        l_s + Σ_{t>s} β_t (r_sᵀ Γ_{s<…≤t} e_t) l_t = (Γ_{s<…≤end} P)ᵀ r_s,
        k_s = (Γ_{s<…≤end} P)ᵀ b_s − Σ_{t>s} β_t (b_sᵀ Γ_{s<…≤t} e_t) l_t.
    """
    b = by_head(b, beta.shape[2])
    P = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device).expand(b.shape[0], b.shape[2], -1, -1)
    with torch.autocast(b.device.type, enabled=False):
        for stop in range(b.shape[1], 0, -chunk):
            part = slice(max(stop - chunk, 0), stop)
            before = (1 << (stop - part.start - 1).bit_length()) - (stop - part.start)  # steps that change nothing
            terms = (rearrange(t[:, part], "b q h n -> b h q n") for t in (log_a, b, beta.unsqueeze(-1) * e, r))
            a, keys, looked_up, along = (pad(t, (0, 0, before, 0)) for t in terms)
            among = _products(a, along, looked_up, looked_up)
            of_keys = _products(a, keys, looked_up, looked_up).found.tril(-1)
            sides = (among.to_end * along) @ P
            left = torch.linalg.solve_triangular(among.found.mT, sides, upper=True, unitriangular=True)
            found = (among.to_end * keys) @ P - of_keys.mT @ left
            P = among.from_start[..., -1, :, None] * P - (among.from_start * looked_up).mT @ left
            yield part, rearrange(found[..., before:, :], "b h q n -> b q h n")
