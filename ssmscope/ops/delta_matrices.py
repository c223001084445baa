"""Attention matrices of the delta rule, whose transitions are no decays: a triangular system per head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ssmscope.ops import triangle, wide
from ssmscope.ops.exponents import smallest_exponent
from ssmscope.ops.recurrence import DeltaRecurrence


def matrices(r: DeltaRecurrence) -> Float[Tensor, "batch heads t s"]:
    """Return α of every head (Gated Delta Networks, Yang et al. 2024, section 3, with the whole sequence as one chunk).

    With Γ[t, s] = ∏_{s<r≤t} a_r, each step writes u_t = β_t (x_t − Σ_{s<t} Γ[t, s] (b_t·b_s) u_s) and reads
    Σ_{s≤t} Γ[t, s] (c_t·b_s) u_s, so α = tril(C Bᵀ ⊙ Γ) (I + tril(diag(β) B Bᵀ ⊙ Γ, −1))⁻¹ diag(β).

    The generalised rule looks up f_t = Σ_{s<t} Γ[t, s] β_s ((e_t·b_s) x_s − (e_t·r_s) f_s) at t (see
    `ssmscope.ops.delta_rule`) and removes it: with M_uw = tril(U Wᵀ ⊙ Γ) and β within r and b,
    α = M_cb − M_cr (I + tril(M_er, −1))⁻¹ tril(M_eb, −1).
    """
    if r.e is not None:
        return _generalised(r)
    log_a, strength = _decay_and_strength(r)
    b, c = (rearrange(t, "b t h n -> b h t n") for t in r.by_head())
    beta = rearrange(strength, "b t h -> b h t")
    if log_a.shape[-1] > 1:
        among, reads = (_decayed(rearrange(log_a, "b t h n -> b h t n"), b, t) for t in (b, c))
    else:
        gamma = _products(rearrange(log_a, "b t h 1 -> b h t"))
        among, reads = b @ b.mT * gamma, c @ b.mT * gamma
    system = torch.tril(beta.unsqueeze(-1) * among, -1) + torch.eye(b.shape[2], dtype=b.dtype, device=b.device)
    solved = torch.linalg.solve_triangular(system, reads, upper=False, left=False, unitriangular=True)
    return solved.tril() * beta.unsqueeze(-2)


def _decay_and_strength(r: DeltaRecurrence) -> tuple[Tensor, Tensor]:
    assert r.log_a is not None and r.beta is not None
    return r.log_a, r.beta


def _generalised(r: DeltaRecurrence) -> Tensor:
    (b, c), (e, along), (log_a, beta) = r.by_head(), r.removal(), _decay_and_strength(r)
    log_a = log_a.expand(*log_a.shape[:3], r.shape[-1])
    written, removed = (t * beta.unsqueeze(-1) for t in (b, along))
    log_a, written, removed, c, e = (rearrange(t, "b t h n -> b h t n") for t in (log_a, written, removed, c, e))
    reads, of_reads, found, of_found = (
        _decayed(log_a, w, u) for u, w in ((c, written), (c, removed), (e, written), (e, removed))
    )
    solved = torch.linalg.solve_triangular(of_found, found.tril(-1), upper=False, unitriangular=True)
    return (reads - of_reads @ solved).tril()


def _decayed(log_a: Tensor, b: Tensor, c: Tensor) -> Float[Tensor, "batch heads t s"]:
    """Return Σ_n c_t[n] b_s[n] ∏_{s<r≤t} a_r[n], as one chunk of `wide.within`."""
    length = b.shape[2]
    missing = (1 << max(length - 1, 0).bit_length()) - length
    log_a, b, c = (pad(t, (0, 0, 0, missing)) for t in (log_a, b, c))
    return wide.within(log_a, b, c, smallest_exponent(b.dtype))[0][..., :length, :length]


def _products(log_a: Float[Tensor, "batch heads length"]) -> Float[Tensor, "batch heads t s"]:
    """Return ∏_{s<r≤t} a_r, with 1 on the diagonal and 0 above."""
    a = rearrange(log_a.exp(), "b h t -> (b h) t 1")
    strict = triangle.differentiable(a, a, torch.ones_like(a))
    strict = strict + torch.eye(strict.shape[-1], dtype=a.dtype, device=a.device)
    return rearrange(strict, "(b h) t s -> b h t s", b=len(log_a))


def rows(r: DeltaRecurrence, positions: Sequence[int]) -> Float[Tensor, "batch heads rows s"]:
    """Return the rows of α at these positions, by the adjoint recurrence: v_t = c_t, α[t, s] = β_s v_sᵀ b_s and v_{s−1}
    = a_s (v_s − β_s (v_sᵀ r_s) e_s), r = e = b but in the generalised rule, from each row's own position backwards."""
    (b, c), (e, along), (log_a, beta) = r.by_head(), r.removal(), _decay_and_strength(r)
    batch, length, heads, state = b.shape
    a = log_a.exp()
    begins = torch.tensor(list(positions), device=b.device)
    v = b.new_zeros(batch, heads, len(positions), state)
    found = [b.new_zeros(batch, heads, len(positions))] * length
    for s in range(max(positions), -1, -1):
        v = torch.where((begins == s)[:, None], c[:, s, :, None], v)
        weight = beta[:, s, :, None] * (v @ b[:, s, :, :, None]).squeeze(-1)
        found[s] = weight
        removed = weight if r.e is None else beta[:, s, :, None] * (v @ along[:, s, :, :, None]).squeeze(-1)
        v = a[:, s, :, None] * (v - removed.unsqueeze(-1) * e[:, s, :, None])
    return torch.stack(found, dim=-1)


def pooled_rows(r: DeltaRecurrence, edge: Tensor) -> Float[Tensor, "batch heads cells s"]:
    """Return Σ α[t, s] over the rows of each cell, by the adjoint recurrence of `rows` for all cells at once: each adds
    c_t at the steps of its own rows."""
    (b, c), (e, along), (log_a, beta) = r.by_head(), r.removal(), _decay_and_strength(r)
    batch, length, heads, state = b.shape
    a = log_a.exp()
    cells = len(edge) - 1
    cell = torch.repeat_interleave(torch.arange(cells), edge.diff()).tolist()
    v = b.new_zeros(batch, heads, cells, state)
    found = b.new_zeros(batch, heads, cells, length)
    for s in range(length - 1, -1, -1):
        first = cell[s]  # The cells before it hold nothing yet.
        v[:, :, first] += c[:, s]
        active = v[:, :, first:]
        weight = beta[:, s, :, None] * (active @ b[:, s, :, :, None]).squeeze(-1)
        found[:, :, first:, s] = weight
        removed = weight if r.e is None else beta[:, s, :, None] * (active @ along[:, s, :, :, None]).squeeze(-1)
        active -= removed.unsqueeze(-1) * e[:, s, :, None]
        active *= a[:, s, :, None]
    return found
