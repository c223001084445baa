"""Attention matrices of the delta rule, whose transitions are no decays: a triangular system per head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ssmscope.ops import wide
from ssmscope.ops.recurrence import DeltaRecurrence, smallest_exponent


def matrices(r: DeltaRecurrence) -> Float[Tensor, "batch heads t s"]:
    """Return α of every head (Gated Delta Networks, Yang et al. 2024, section 3, with the whole sequence as one chunk).

    With Γ[t, s] = ∏_{s<r≤t} a_r, each step writes u_t = β_t (x_t − Σ_{s<t} Γ[t, s] (b_t·b_s) u_s) and reads
    Σ_{s≤t} Γ[t, s] (c_t·b_s) u_s, so α = tril(C Bᵀ ⊙ Γ) (I + tril(diag(β) B Bᵀ ⊙ Γ, −1))⁻¹ diag(β).

    The generalised rule looks up f_t = Σ_{s<t} Γ[t, s] β_s ((e_t·b_s) x_s − (e_t·r_s) f_s) at t (see
    `ssmscope.ops.delta_rule`) and removes it: with M_uw = tril(U Wᵀ ⊙ Γ) and β within r and b,
    α = M_cb − M_cr (I + tril(M_er, −1))⁻¹ tril(M_eb, −1).
    """
    (b, c), (e, along), beta = r.by_head(), r.removal(), r.beta.unsqueeze(-1)
    log_a = rearrange(r.log_a, "b t h n -> b h t n")
    if r.e is not None:
        written, removed, c, e = (rearrange(t, "b t h n -> b h t n") for t in (b * beta, along * beta, c, e))
        pairs = ((c, written), (c, removed), (e, written), (e, removed))
        reads, of_reads, found, of_found = (_decayed(log_a, w, u) for u, w in pairs)
        solved = torch.linalg.solve_triangular(of_found, found.tril(-1), upper=False, unitriangular=True)
        return (reads - of_reads @ solved).tril()
    b, c, beta = (rearrange(t, "b t h n -> b h t n") for t in (b, c, beta))
    among, reads = (_decayed(log_a, b, t) for t in (b, c))
    system = torch.tril(beta * among, -1) + torch.eye(b.shape[2], dtype=b.dtype, device=b.device)
    solved = torch.linalg.solve_triangular(system, reads, upper=False, left=False, unitriangular=True)
    return solved.tril() * beta.mT


def _decayed(log_a: Tensor, b: Tensor, c: Tensor) -> Float[Tensor, "batch heads t s"]:
    """Return Σ_n c_t[n] b_s[n] ∏_{s<r≤t} a_r[n], as one chunk of `wide.within`."""
    length = b.shape[2]
    missing = (1 << max(length - 1, 0).bit_length()) - length
    log_a, b, c = (pad(t, (0, 0, 0, missing)) for t in (log_a, b, c))
    return wide.within(log_a, b, c, smallest_exponent(b.dtype))[0][..., :length, :length]


def rows(r: DeltaRecurrence, positions: Sequence[int]) -> Float[Tensor, "batch heads rows s"]:
    """Return the rows of α at these positions."""
    own, place = torch.tensor(list(positions)).unique(return_inverse=True)
    return _sums_of_rows(r, {position: row for row, position in enumerate(own.tolist())})[:, :, place]


def pooled_rows(r: DeltaRecurrence, edge: Tensor) -> Float[Tensor, "batch heads cells s"]:
    """Return Σ α[t, s] over the rows of each cell."""
    cells = torch.repeat_interleave(torch.arange(len(edge) - 1), edge.diff())
    return _sums_of_rows(r, dict(enumerate(cells.tolist())))


def _sums_of_rows(r: DeltaRecurrence, sums: Mapping[int, int]) -> Float[Tensor, "batch heads sums s"]:
    """Return sums of rows of α, where `sums` has the number of each row's sum, which grows with the rows, by the
    adjoint recurrence: v_t = c_t, α[t, s] = β_s v_sᵀ b_s and v_{s−1} = a_s (v_s − β_s (v_sᵀ r_s) e_s), r = e = b but in
    the generalised rule, backwards from each row's own position."""
    (b, c), (e, along) = r.by_head(), r.removal()
    batch, length, heads, state = b.shape
    a, count, found = r.log_a.exp(), 1 + max(sums.values()), []
    v = b.new_zeros(batch, heads, 0, state)  # The sums whose rows have begun are the last ones.
    for s in range(length - 1, -1, -1):
        if s in sums:
            v = pad(v, (0, 0, 1, 0)) if count - v.shape[2] > sums[s] else v
            v = torch.cat([v[:, :, :1] + c[:, s, :, None], v[:, :, 1:]], dim=2)
        weight = r.beta[:, s, :, None] * (v @ b[:, s, :, :, None]).squeeze(-1)
        found.append(pad(weight, (count - v.shape[2], 0)))
        removed = weight if r.e is None else r.beta[:, s, :, None] * (v @ along[:, s, :, :, None]).squeeze(-1)
        v = a[:, s, :, None] * (v - removed.unsqueeze(-1) * e[:, s, :, None])
    return torch.stack(found[::-1], dim=-1)
