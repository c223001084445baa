"""Scan of the delta rule, as matrix products over chunks, and its attention matrices (Gated Delta Networks, Yang et al.
2024, section 3; RWKV-7, Peng et al. 2025, section 3).

H_t = H_{t-1} (a_t − β_t e_t r_tᵀ) + β_t x_t b_tᵀ looks up the memory's value under e_t and removes it along r_t. With
the value found, f_t = H_{t-1} e_t, H_t = a_t H_{t-1} + β_t (x_t b_tᵀ − f_t r_tᵀ). Within a chunk that starts from H_0
the f_t therefore solve a triangular system, Γ being the decays,

f_t + Σ_{s<t} β_s (e_tᵀ Γ_{s<…<t} r_s) f_s = H_0 Γ_{<t} e_t + Σ_{s<t} β_s (e_tᵀ Γ_{s<…<t} b_s) x_s.

In the plain rule r is b, and b looks up the decayed memory: Γ_{≤t} b_t stands for Γ_{<t} e_t. The two right sides are
solved for all chunks at once (the WY representation of the products of the transitions); a pass over the chunks then
carries H. With a decay per state (Kimi Linear, Zhang et al. 2025, section 3) Γ stands within the products over states,
see `ssmscope.ops.wide`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from ssmscope import backends
from ssmscope.backends.shapes import Decays, Inputs, Keys, Memory, PerHead, Removed
from ssmscope.ops import wide
from ssmscope.ops.recurrence import DeltaRecurrence, by_head, smallest_exponent
from ssmscope.ops.ssd import segment_sums

STEPS_PER_CHUNK = 32
"""Steps of one triangular system."""
STEPS_PER_SEGMENT = 1024
"""Steps whose systems are held at once."""


def scan(
    log_a: Decays, beta: PerHead, b: Keys, c: Keys, x: Inputs, initial: Memory, e: Removed = None, r: Removed = None
) -> tuple[Inputs, Memory]:
    """Return y_t = H_t c_t and the final H, differentiable in every term; e and r are b where absent."""
    if e is None and (backend := backends.find("delta_rule", log_a, beta, b, c, x, initial)):
        return backend.scan(log_a, beta, b, c, x, initial)
    b, c = by_head(b, x.shape[2]), by_head(c, x.shape[2])
    strength = beta.unsqueeze(-1)
    removed = strength * (b if r is None else r)
    terms = (log_a, b if e is None else e, removed if r is None else strength * b, removed, c, x)
    outputs, H = [x[:, :0]], initial
    with torch.autocast(x.device.type, enabled=False):  # Removed and written values must cancel.
        for start in range(0, x.shape[1], STEPS_PER_SEGMENT):
            part = [t[:, start : start + STEPS_PER_SEGMENT] for t in terms]
            y, H = _segment(part, H, plain=r is None)
            outputs.append(y)
    return torch.cat(outputs, dim=1), H


def _segment(terms: list[Tensor], H: Tensor, *, plain: bool) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state of some steps, with β within b and r, which are the same in the plain rule."""
    log_a, e, b, r, c, x = terms
    length, width = x.shape[1], x.shape[-1]
    chunk = min(STEPS_PER_CHUNK, 1 << (length - 1).bit_length())
    padded = (pad(t, (0, 0, 0, 0, 0, -length % chunk)) for t in (log_a, e, b, r, c, x))  # Added steps hold the state.
    log_a, e, b, r, c, x = (rearrange(t, "b (k q) h n -> b k h q n", q=chunk) for t in padded)

    key = e if plain else _earlier(e)
    (found_r, read_r), from_start, to_end = _decayed(log_a, r, key, c)
    found_b, read_b, at_start = found_r, read_r, from_start
    if not plain:
        found_b, read_b = _decayed(log_a, b, key, c)[0]
        found_r, found_b, at_start = map(_later, (found_r, found_b, from_start))
    sides = torch.cat([found_b.tril(-1) @ x, at_start * e], dim=-1)
    # The system's matrix is read below the diagonal only.
    solved = torch.linalg.solve_triangular(found_r, sides, upper=False, unitriangular=True)
    of_written, of_before = solved.split([width, sides.shape[-1] - width], dim=-1)

    read, kept, b, r = from_start * c, from_start[..., -1:, :], to_end * b, to_end * r
    outputs = []
    for k in range(x.shape[1]):
        found = of_written[:, k] + of_before[:, k] @ H.mT
        if plain:
            y, added = read_r[:, k] @ (x[:, k] - found), (x[:, k] - found).mT @ r[:, k]
        else:
            y = read_b[:, k] @ x[:, k] - read_r[:, k] @ found
            added = x[:, k].mT @ b[:, k] - found.mT @ r[:, k]
        outputs.append(read[:, k] @ H.mT + y)
        H = kept[:, k] * H + added
    y = rearrange(torch.stack(outputs, dim=1), "b k h q p -> b (k q) h p")
    return y[:, :length], H


def _decayed(log_a: Tensor, b: Tensor, *readers: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return, for chunks (…, chunk, state), c_tᵀ Γ b_s with Γ = ∏_{s<r≤t} a_r for each of the readers c, zero for s >
    t; and the decays from the chunk's start through t and from t, exclusive, to its end, (…, chunk, state or 1)."""
    floor = smallest_exponent(b.dtype)
    if log_a.shape[-1] > 1:
        each = [wide.within(log_a, b, c, floor) for c in readers]
        _, from_start, to_end = each[0]
        return [S for S, *_ in each], from_start.clamp(min=floor).exp(), to_end.clamp(min=floor).exp()
    decay = segment_sums(log_a.squeeze(-1)).clamp(min=floor).exp().tril()
    from_start = log_a.cumsum(-2).clamp(min=floor).exp()
    return [decay * (c @ b.mT) for c in readers], from_start, decay[..., -1, :, None]


def _earlier(t: Tensor) -> Tensor:
    """Return terms (…, chunk, n) a step earlier: what e reads before its own step's decay is read a step before."""
    return pad(t[..., 1:, :], (0, 0, 0, 1))


def _later(t: Tensor) -> Tensor:
    """Return what was read a step earlier, (…, chunk, n), at its own step; the first has no decay before it, 1."""
    return pad(t[..., :-1, :], (0, 0, 1, 0), value=1.0)


def keys_left(
    log_a: Decays, beta: PerHead, b: Keys, e: Removed = None, r: Removed = None
) -> Iterator[tuple[slice, Float[Tensor, "batch chunk heads state"]]]:
    """Yield k_sᵀ = b_sᵀ ∏_{s<t≤T} (a_t − β_t e_t r_tᵀ), the key written at s as it is at the end, of chunks of
    positions, the last first.

    With P_s the product of the transitions after s and l_sᵀ = r_sᵀ P_s, P_{s−1} = a_s P_s − β_s e_s l_sᵀ. Within a
    chunk that ends with P the l_s solve a triangular system, of which the keys are made (they are the keys if r is b):

        l_s + Σ_{t>s} β_t (r_sᵀ Γ_{s<…<t} e_t) l_t = (Γ_{s<…≤end} P)ᵀ r_s,
        k_s = (Γ_{s<…≤end} P)ᵀ b_s − Σ_{t>s} β_t (b_sᵀ Γ_{s<…<t} e_t) l_t.
    """
    if e is None and (backend := backends.find("delta_rule", log_a, beta, b)):
        yield slice(0, b.shape[1]), backend.keys_left(log_a, beta, b)
        return
    b = by_head(b, beta.shape[2])
    looked_up = beta.unsqueeze(-1) * (b if e is None else e)
    P = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device).expand(b.shape[0], b.shape[2], -1, -1)
    with torch.autocast(b.device.type, enabled=False):
        for stop in range(b.shape[1], 0, -STEPS_PER_CHUNK):
            part = slice(max(stop - STEPS_PER_CHUNK, 0), stop)
            before = (1 << (stop - part.start - 1).bit_length()) - (stop - part.start)  # Added steps change nothing.
            terms = (rearrange(t[:, part], "b q h n -> b h q n") for t in (log_a, b, looked_up, b if r is None else r))
            a, keys, found, along = (pad(t, (0, 0, before, 0)) for t in terms)
            key = found if r is None else _earlier(found)
            (among,), from_start, to_end = _decayed(a, along, key)
            among, at_start = (among, from_start) if r is None else (_later(among), _later(from_start))
            sides = (to_end * along) @ P  # The system's matrix is read above the diagonal only.
            left = torch.linalg.solve_triangular(among.mT, sides, upper=True, unitriangular=True)
            following = from_start[..., -1, :, None] * P - (at_start * found).mT @ left
            if r is not None:
                left = (to_end * keys) @ P - _later(_decayed(a, keys, key)[0][0]).tril(-1).mT @ left
            P = following
            yield part, rearrange(left[..., before:, :], "b h q n -> b q h n")


# ---- attention matrices: the transitions are not decays, so a triangular system per head


def matrices(r: DeltaRecurrence) -> Float[Tensor, "batch heads t s"]:
    """Return α of every head (Gated Delta Networks, Yang et al. 2024, section 3, with the whole sequence as one chunk).

    With Γ[t, s] = ∏_{s<r≤t} a_r, each step writes u_t = β_t (x_t − Σ_{s<t} Γ[t, s] (b_t·b_s) u_s) and reads
    Σ_{s≤t} Γ[t, s] (c_t·b_s) u_s, so α = tril(C Bᵀ ⊙ Γ) (I + tril(diag(β) B Bᵀ ⊙ Γ, −1))⁻¹ diag(β).

    The generalised rule looks up f_t = Σ_{s<t} Γ[t−1, s] β_s ((e_t·b_s) x_s − (e_t·r_s) f_s) at t (see
    `ssmscope.ops.delta_rule`) and removes it: with M_uw = tril(U Wᵀ ⊙ Γ), of e with Γ[t−1, s], and β within r and b,
    α = M_cb − M_cr (I + tril(M_er, −1))⁻¹ tril(M_eb, −1).
    """
    if r.several > 1:
        last = slice(r.several - 1, None, r.several)
        return matrices(r.one_by_one())[..., last, last]
    (b, c), (e, along), beta = r.by_head(), r.removal(), r.beta.unsqueeze(-1)
    log_a = rearrange(r.log_a, "b t h n -> b h t n")
    if r.e is not None:
        written, removed, c, e = (rearrange(t, "b t h n -> b h t n") for t in (b * beta, along * beta, c, e))
        pairs = ((c, written), (c, removed), (_earlier(e), written), (_earlier(e), removed))
        reads, of_reads, *looked_up = (_decayed_pairs(log_a, w, u) for u, w in pairs)
        found, of_found = map(_later, looked_up)
        solved = torch.linalg.solve_triangular(of_found, found.tril(-1), upper=False, unitriangular=True)
        return (reads - of_reads @ solved).tril()
    b, c, beta = (rearrange(t, "b t h n -> b h t n") for t in (b, c, beta))
    among, reads = (_decayed_pairs(log_a, b, t) for t in (b, c))
    # The system's matrix is read below the diagonal only.
    solved = torch.linalg.solve_triangular(beta * among, reads, upper=False, left=False, unitriangular=True)
    return solved.tril() * beta.mT


def _decayed_pairs(log_a: Tensor, b: Tensor, c: Tensor) -> Float[Tensor, "batch heads t s"]:
    """Return Σ_n c_t[n] b_s[n] ∏_{s<r≤t} a_r[n], as one chunk of `wide.within`."""
    length = b.shape[2]
    missing = (1 << (length - 1).bit_length()) - length
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
    """Return sums of rows of α, where `sums` has each row's number, by the adjoint recurrence backwards from the row:
    v_t = c_t, α[t, s] = β_s v_sᵀ b_s and v_{s−1} = a_s v_s − β_s (v_sᵀ r_s) e_s."""
    if r.several > 1:
        last = r.several - 1
        at_last = {position * r.several + last: sum_ for position, sum_ in sums.items()}
        return _sums_of_rows(r.one_by_one(), at_last)[..., last :: r.several]
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
        v = a[:, s, :, None] * v - removed.unsqueeze(-1) * e[:, s, :, None]
    return torch.stack(found[::-1], dim=-1)
