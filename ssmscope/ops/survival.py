"""Survival of tokens: what is left in a recurrence's state of what was written at each position.

At s a recurrence writes W_s = x_s b_sᵀ (Δ_s and β_s within x_s), of which R_s = W_s ∏_{s<r≤T} M_r is left at T, M_r the
transition: a_r, a_r (I − β_r b_r b_rᵀ) of the delta rule, or a_r − β_r e_r r_rᵀ of the generalised one. The
state H_T is Σ_s R_s plus the remainder of the state before the first position. W_s has rank one and the transitions
act on its key alone, so R_s = x_s k_sᵀ with the key b_s as it is at T: one sweep from the end gives every k_s, and
‖R_s‖ = ‖x_s‖ ‖k_s‖. Where several recurrences write into one memory, R_s is the sum of theirs. Log-decays are summed
from the end, never taken as differences of sums from the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from ssmscope import backends
from ssmscope.backends.shapes import PerHead
from ssmscope.errors import InputError
from ssmscope.ops import delta_rule
from ssmscope.ops.recurrence import (
    OVER_TIME,
    DeltaRecurrence,
    Recurrence,
    by_head,
    by_memory,
    check_one_way,
    smallest_exponent,
)
from ssmscope.ops.scans import scan, scan_reference

MAX_DECAYS_HELD = {"cpu": 2**19, "cuda": 2**26}
"""Decays of states held at once: as many as a CPU's cache holds, or keep a GPU busy."""


def remaining_reference(recurrence: Recurrence) -> Float[Tensor, "batch length heads width state"]:
    """Return R_s of every s by its definition: the final state of a run that writes at s alone. Slow; the reference for
    tests of `remaining_norms` and `half_lives`."""
    x, length = recurrence.x, recurrence.x.shape[1]
    each = {n: v.repeat_interleave(length, 0) for n in OVER_TIME if (v := getattr(recurrence, n, None)) is not None}
    one = torch.eye(length, dtype=x.dtype, device=x.device)
    alone = x.unsqueeze(1) * one[..., None, None]  # (batch, s, t, heads, width)
    each["x"] = alone.flatten(0, 1)
    return scan_reference(replace(recurrence, **each)).state.unflatten(0, (len(x), length))


def remaining_norms(recurrence: Recurrence, *joining: Recurrence) -> PerHead:
    """Return ‖R_s‖ (Frobenius) of every position and head after the last position; on Mamba-1 a head is a channel. Of
    several recurrences that write into one memory, R_s is the sum of theirs. Time and memory are linear in the length:
    a decay per state costs one exponential for each, as the scan does."""
    if joining:
        return _root_of_squares(map(remaining_norms, orthogonal([recurrence, *joining])))
    written = _written_norms(recurrence)
    if isinstance(recurrence, DeltaRecurrence):
        for part, keys in _keys_left(recurrence):
            written[:, part] *= torch.linalg.vector_norm(keys, dim=-1)
        return written
    if recurrence.one_decay_per_head:
        kept, _ = _sums_from_end(recurrence.log_decay().squeeze(-1))
        kept = kept.clamp_(min=smallest_exponent(written.dtype)).exp_().to(written)
        return written * kept * by_head(_norms(recurrence.b), written.shape[2])
    timed = _timed(recurrence)
    if timed is not None and (backend := backends.find("survival", *timed, recurrence.b)):
        return backend.key_norms(*timed, recurrence.b).mul_(written)
    reached = written.shape[1]
    for part, sums in _sums_left(recurrence):
        written[:, part] *= _key_norms(recurrence, sums, part)
        reached = part.start
    written[:, :reached] = 0
    return written


def readable_norms(memory: Sequence[Recurrence], reads: Tensor) -> PerHead:
    """Return tr(R_sᵀ M R_s)^½ = ‖x_s‖ (k_sᵀ M k_s)^½ of every position and head, with M the `reads` of the recurrences
    that write into one memory: what is left of a write as it is read, which does not change if states are rescaled."""
    found = []
    for recurrence in orthogonal(memory):
        norms = torch.zeros_like(_written_norms(recurrence))
        for part, keys in _keys_left(recurrence):
            norms[:, part] = (einsum(keys, reads, "b t h n, b h n m -> b t h m") * keys).sum(-1).clamp(min=0).sqrt()
        found.append(norms.mul_(_written_norms(recurrence)))
    return _root_of_squares(found)


def reads_of(memory: Sequence[Recurrence]) -> Float[Tensor, "batch heads state state"]:
    """Return M = Σ_t c_t c_tᵀ over the positions that write; padding does not."""
    found = []
    for recurrence in memory:
        real = (_written_norms(recurrence) > 0).any(2)[..., None, None]
        c = recurrence.c * real
        found.append(by_head(einsum(c, c, "b t g n, b t g m -> b g n m").unsqueeze(1), recurrence.shape[2]).squeeze(1))
    return torch.stack(found).sum(0)


def orthogonal(recurrences: Sequence[Recurrence]) -> list[Recurrence]:
    """Return recurrences of the same memories in which the writes of one memory have orthogonal inputs of length 1, so
    that ‖Σ R_s‖² is the sum of their ‖R_s‖². With X = Q U of the inputs as columns, Σ_j x_j b_jᵀ = Σ_i q_i (Σ_j U_ij
    b_j)ᵀ. A memory with one write is returned as it is."""
    found: list[Recurrence] = []
    for memory in by_memory(recurrences, recurrences):
        if len(memory) == 1:
            found += memory
            continue
        U = torch.linalg.qr(torch.stack([r.written for r in memory], dim=-1), mode="r").R
        keys = torch.stack([by_head(r.b, r.shape[2]) for r in memory], dim=-2)
        for r, key in zip(memory, (U @ keys).unbind(-2)):
            own: dict[str, Any] = {"x": torch.ones_like(r.x[..., :1]), "b": key, "c": key, "D": None, "delta": None}
            if isinstance(r, DeltaRecurrence):
                assert r.e is not None  # The plain rule removes what it writes, and writes once.
                beta = r.beta.reshape(*r.beta.shape, *(1,) * (r.e.ndim - 3))
                own |= {"beta": torch.ones_like(r.beta), "e": beta * r.e}
            else:
                own |= {"log_a": r.log_decay(), "A": None, "expected": False}
            found.append(replace(r, **own))
    return found


def _root_of_squares(norms: Iterable[Tensor]) -> Tensor:
    found = list(norms)
    return found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found), dim=0)


def _written_norms(recurrence: Recurrence) -> PerHead:
    norms, step = torch.linalg.vector_norm(recurrence.x, dim=-1), recurrence.step
    return norms if step is None else norms * step.abs()


def left_towards_state(
    recurrence: Recurrence, initial: Tensor | None = None, state: Tensor | None = None
) -> tuple[PerHead, Float[Tensor, "batch heads"]]:
    """Return ⟨R_s, H_T⟩ of every position and head, and of what is left of the initial state: together ‖H_T‖², or
    this recurrence's part of it where H_T is given, the `state` of a memory that several write into."""
    H = scan(recurrence, initial).state if state is None else state
    found = torch.zeros_like(recurrence.x[..., 0])
    for part, keys in _keys_left(recurrence):
        read = einsum(H, keys, "b h p n, b t h n -> b t h p")
        found[:, part] = (read * recurrence.written[:, part]).sum(-1)
    if initial is None:
        return found, torch.zeros_like(found[:, 0])
    rest = scan(replace(recurrence, x=torch.zeros_like(recurrence.x)), initial).state
    return found, (rest * H).sum((2, 3))


@torch.no_grad()
def shares(
    recurrences: Sequence[Recurrence],
    *,
    initial: Sequence[Tensor | None] | None = None,
    at: int | None = None,
    signed: bool = False,
    readable: bool = False,
    per_head: bool = False,
) -> Tensor:
    """Return each position's share of the states after position `at`, by default the last one, (batch, length): the
    survival ‖R_s‖ / Σ_s' ‖R_s'‖ of every head, averaged over the heads of all memories weighted by Σ_s' ‖R_s'‖.
    Positions after `at` have none, and if nothing is left all shares are zero.

    Args:
        initial: the states before the first position, to which a share of the state may belong.
        signed: ⟨R_s, H_T⟩ / ‖H_T‖² instead, sums over heads above and below; 1 less the sum is the share of `initial`.
        readable: the `readable_norms` in place of ‖R_s‖; M is of all positions, also those after `at`.
        per_head: each head by itself, (batch, length, heads), the memories' heads one after the other.

    Raises InputError if there is no such position.
    """
    length = recurrences[0].shape[1]
    if at is not None and not 0 <= at < length:
        raise InputError(f"there is no position {at}; allowed are 0 to {length - 1}")
    cut, places = zip(*(_until(r, at) for r in recurrences))
    memories = by_memory(cut, zip(cut, initial or [None] * len(cut)))
    found, rests = [], []
    for memory, whole_text in zip(memories, by_memory(recurrences, recurrences)):
        if signed:
            H = torch.stack([scan(r, start).state for r, start in memory]).sum(0)
            lefts, starts = zip(*(left_towards_state(r, start, H) for r, start in memory))
            found.append(sum(lefts))
            rests.append(sum(starts))
        else:
            parts = [r for r, _ in memory]
            norms = readable_norms(parts, reads_of(whole_text)) if readable else remaining_norms(*parts)
            found.append(norms if per_head else norms.sum(2, keepdim=True))
    first = [each[0] for each in by_memory(cut, places)]
    left = torch.cat([_at(place, each, length) for place, each in zip(first, found)], dim=2)
    whole = left.sum(1, keepdim=True)
    if signed:
        whole = whole + torch.cat(rests, dim=1).unsqueeze(1)
    if not per_head:
        left, whole = left.sum(2), whole.sum(2)
    return left / torch.where(whole > 0, whole, 1)


@torch.no_grad()
def shares_from(recurrences: Sequence[Recurrence], first: int) -> Float[Tensor, "batch moments length"]:
    """Return `shares` after each position from `first` on: one sweep, a transition of all that is left a position."""
    length = recurrences[0].shape[1]
    if any(r.order is not None for r in recurrences):
        return torch.stack([shares(recurrences, at=at) for at in range(first, length)], dim=1)
    memories = by_memory(recurrences, map(_head_parts, orthogonal(recurrences)))
    left = sum(_left_from(parts, first) for memory in memories for parts in zip(*memory))
    assert isinstance(left, Tensor)
    whole = left.sum(2, keepdim=True)
    return left / torch.where(whole > 0, whole, 1)


def _head_parts(recurrence: Recurrence) -> Iterator[Recurrence]:
    """Yield the recurrence in parts of its heads whose keys a CPU's cache holds."""
    batch, length, heads, _, state = recurrence.shape
    device = recurrence.x.device.type
    step = max(1, MAX_DECAYS_HELD.get(device, MAX_DECAYS_HELD["cuda"]) // max(1, batch * length * state))
    whole = isinstance(recurrence, DeltaRecurrence) or step >= heads
    yield from [recurrence] if whole else (recurrence.of_heads(at, at + step) for at in range(0, heads, step))


def _left_from(memory: Sequence[Recurrence], first: int) -> Float[Tensor, "batch moments length"]:
    """Return Σ ‖R_s‖ over the heads of a memory after each position from `first` on."""
    norms = [_norms_from(r, first) for r in memory]
    return torch.stack([_root_of_squares(now).sum(2) for now in zip(*norms)], dim=1)


def _norms_from(recurrence: Recurrence, first: int) -> Iterator[PerHead]:
    """Yield ‖R_s‖ after each position from `first` on, with zeros for later s."""
    batch, length, heads, _, state = recurrence.shape
    written, own = _written_norms(recurrence), by_head(recurrence.b, heads)
    keys = recurrence.b.new_zeros(batch, length, heads, state)
    for part, found in _keys_left(recurrence.between(0, first + 1)):
        keys[:, part] = found
    decays = not isinstance(recurrence, DeltaRecurrence)
    if decays:  # Squares decay too, and sum over the states the fastest with contiguous heads.
        keys, own = (each.square().mT.contiguous() for each in (keys, own))
    for at in range(first, length):
        if at > first:
            if isinstance(recurrence, DeltaRecurrence):
                keys[:, :at] = _removed(recurrence, keys[:, :at], slice(at, at + 1))
            else:
                keys[:, :at] *= (2 * recurrence.log_decay(at, at + 1)).exp().mT.contiguous()
            keys[:, at] = own[:, at]
        now = keys[:, : at + 1]
        norms = now.sum(2).sqrt_() if decays else torch.linalg.vector_norm(now, dim=-1)
        yield pad(norms.mul_(written[:, : at + 1]), (0, 0, 0, length - at - 1))


def _until(recurrence: Recurrence, at: int | None) -> tuple[Recurrence, Tensor | None]:
    """Return the recurrence up to `at` in the order of its visits, and their positions, None if these are 0, 1, …"""
    if recurrence.order is None:
        return recurrence if at is None else recurrence.between(0, at + 1), None
    order = recurrence.order
    places = order if at is None else order[: int((order == at).nonzero()) + 1]
    return recurrence.at(places), places


def _at(places: Tensor | None, left: Tensor, length: int) -> Tensor:
    """Return values of these positions at their places, (batch, length, heads), with zeros elsewhere."""
    if places is None:
        return pad(left, (0, 0, 0, length - left.shape[1]))
    return left.new_zeros(len(left), length, left.shape[2]).index_copy(1, places.to(left.device), left)


@torch.no_grad()
def half_lives(recurrences: Sequence[Recurrence], *, per_head: bool = False) -> Tensor:
    """Return the number of positions after which half of each position's writing is left, (batch, length): the smallest
    d with Σ ‖R_s‖ at s + d at most half of Σ ‖W_s‖, the sums over the heads of all memories. Infinite if that is not
    reached before the end, and if nothing was written. `per_head`: each head by itself, (batch, length, heads), the
    memories' heads one after the other.

    Where states decay, d is found by halving: log-decays are summed over windows of 2^k positions, O(length · log²
    length) sums and O(length · log length) exponentials. A delta rule is walked step by step. Raises InputError if a
    recurrence visits the positions in another order.
    """
    check_one_way(recurrences, "a half-life")
    memories = by_memory(recurrences, recurrences)
    if per_head and len(memories) > 1:
        return torch.cat([half_lives(memory, per_head=True) for memory in memories], dim=2)
    recurrences = orthogonal(recurrences)
    written = [_written_norms(r) for r in recurrences]
    masses = (w * by_head(_norms(r.b), w.shape[2]) for r, w in zip(recurrences, written))
    whole = _together(recurrences, masses, per_head)
    walk = _walked if any(isinstance(r, DeltaRecurrence) for r in recurrences) else _halved
    found = walk(recurrences, written, whole / 2, per_head).masked_fill(whole == 0, math.inf)
    return found if per_head else found.squeeze(2)


def _together(recurrences: Sequence[Recurrence], masses: Iterable[Tensor], per_head: bool) -> Tensor:
    """Return masses (batch, length, heads) of `orthogonal` recurrences by head of the one memory that these write into,
    or summed over all heads of all memories, (batch, length, 1)."""
    found = list(map(_root_of_squares, by_memory(recurrences, masses)))
    return found[0] if per_head else torch.stack([each.sum(-1) for each in found]).sum(0).unsqueeze(2)


def _walked(recurrences: Sequence[Recurrence], written: Sequence[Tensor], half: Tensor, per_head: bool) -> Tensor:
    """Return `half_lives` by its definition, all positions a step further at a time."""
    found = torch.full_like(half, math.inf)
    keys = [r.by_head()[0] if isinstance(r, DeltaRecurrence) else by_head(r.b, r.shape[2]) for r in recurrences]
    for lag in range(1, half.shape[1]):
        keys = [_stepped(r, k[:, : half.shape[1] - lag], lag) for r, k in zip(recurrences, keys)]
        norms = [torch.linalg.vector_norm(k, dim=-1) for k in keys]
        left = _together(recurrences, (w[:, : n.shape[1]] * n for w, n in zip(written, norms)), per_head)
        now = (left <= half[:, :-lag]) & found[:, :-lag].isinf()
        found[:, :-lag] = found[:, :-lag].masked_fill(now, lag)
        if not bool(found[:, : -lag - 1].isinf().any()):
            break
    return found


def _stepped(recurrence: Recurrence, keys: Tensor, lag: int) -> Tensor:
    """Return the keys of the positions s after the transition at s + lag."""
    if not isinstance(recurrence, DeltaRecurrence):
        return keys * recurrence.log_decay(lag).exp()
    return _removed(recurrence, keys, slice(lag, None))


def _removed(recurrence: DeltaRecurrence, keys: Tensor, at: slice) -> Tensor:
    """Return keys after a delta rule's transitions at these positions, a k − β (k · e) r, and after later removals."""
    beta, (first, *more) = recurrence.beta[:, at, :, None], recurrence.removals()

    def removed(e: Tensor, r: Tensor) -> Tensor:
        return beta * (keys * e[:, at]).sum(-1, keepdim=True) * r[:, at]

    keys = recurrence.log_a[:, at].exp() * keys - removed(*first)
    for each in more:
        keys = keys - removed(*each)
    return keys


def _halved(recurrences: Sequence[Recurrence], written: Sequence[Tensor], half: Tensor, per_head: bool) -> Tensor:
    """Return `half_lives` of decays: the last position at which more than half is left, by windows that shrink."""
    length = half.shape[1]
    clocks = [_clock(r) for r in recurrences]
    start = torch.arange(length, device=half.device)[:, None].expand_as(half)
    at, sums = start, [torch.zeros_like(clock) for clock in clocks]
    for k in reversed(range(length.bit_length())):
        to = at + 2**k
        start_of = (at + 1).clamp(max=length - 1).unsqueeze(3)
        windows = (_windows(clock, k) for clock in clocks)
        ahead = [t.gather(1, start_of.expand(*start_of.shape[:2], *t.shape[2:])) for t in windows]
        further = [total + more for total, more in zip(sums, ahead)]
        blocks = [[_key_norms(r, s[:, part], part) for part in _blocks(r)] for r, s in zip(recurrences, further)]
        left = _together(recurrences, (w * torch.cat(norms, 1) for w, norms in zip(written, blocks)), per_head)
        go = (to < length) & (left > half)
        at = torch.where(go, to, at)
        sums = [torch.where(go.unsqueeze(3), new, old) for new, old in zip(further, sums)]
    return (at + 1 - start).to(half).masked_fill(at + 1 >= length, math.inf)


def _clock(recurrence: Recurrence, part: slice = slice(0, None)) -> Tensor:
    """Return the summands of every state's log-decay, Δ or the log-decay itself, (batch, part, heads, state or 1)."""
    timed = _timed(recurrence)
    return recurrence.log_decay(part.start, part.stop) if timed is None else timed[0][:, part].unsqueeze(-1)


def _windows(clock: Tensor, k: int) -> Tensor:
    """Return the sum over 2^k positions from each one on; those that wrap around the end have no meaning."""
    for i in range(k):
        clock = clock + clock.roll(-(2**i), 1)
    return clock


def _blocks(recurrence: Recurrence) -> list[slice]:
    """Return blocks of positions whose decays are held at once."""
    batch, length, heads, _, state = recurrence.shape
    device = recurrence.x.device.type
    step = max(1, MAX_DECAYS_HELD.get(device, MAX_DECAYS_HELD["cuda"]) // max(1, batch * heads * state))
    return [slice(max(stop - step, 0), stop) for stop in range(length, 0, -step)][::-1]


def _key_norms(recurrence: Recurrence, sums: Tensor, part: slice) -> Float[Tensor, "batch part heads"]:
    """Return ‖k_s‖ of the keys of some positions, which have decayed by sums of `_clock`: √Σ_n exp(2 Σ log a) b_n²."""
    timed, b = _timed(recurrence), recurrence.b[:, part]
    groups, state = b.shape[2:]
    sums = sums.unflatten(2, (groups, -1)).mT  # (batch, part, groups, state or 1, heads of one)
    sums = sums * (2 if timed is None else (2 * timed[1]).unflatten(0, (groups, -1)).mT.contiguous())
    squares = sums.clamp_(min=smallest_exponent(sums.dtype)).exp_()
    scale = _scales(b)
    total = (b / scale).square().unsqueeze(3) @ squares.expand(*squares.shape[:3], state, -1)
    return total.squeeze(3).sqrt_().mul(scale).flatten(2)


def _scales(b: Tensor) -> Tensor:
    """Return the largest magnitude of each key, (batch, length, groups, 1): the square of a small number would be 0."""
    return b.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(b.dtype).tiny)


def _norms(b: Tensor) -> Float[Tensor, "batch length groups"]:
    scale = _scales(b)
    return torch.linalg.vector_norm(b / scale, dim=-1) * scale.squeeze(-1)


def _timed(recurrence: Recurrence) -> tuple[Tensor, Tensor] | None:
    """Return Δ and A if log-decays are their products, so that sums of Δ are enough; else None."""
    r = recurrence
    return None if r.delta is None or r.A is None or r.expected else (r.delta, r.A)


def _sums_from_end(log_a: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return Σ_{r>s} log a_r, (batch, length, …), and Σ_r log a_r, (batch, 1, …), in float64, plus `after`."""
    # A GPU sums along contiguous positions in a tenth of the time.
    sums = log_a.flip(1).transpose(1, -1).to(torch.float64, memory_format=torch.contiguous_format).cumsum(-1)
    sums = sums.transpose(1, -1).flip(1)
    after = torch.zeros_like(sums[:, :1]) if after is None else after
    sums += after
    return torch.cat([sums[:, 1:], after], dim=1), sums[:, :1]


def _sums_left(recurrence: Recurrence) -> Iterator[tuple[slice, Tensor]]:
    """Yield sums of `_clock` from a block's positions to the last, the last block first, until every state is 0."""
    timed, floor = _timed(recurrence), smallest_exponent(recurrence.x.dtype)
    after: Tensor | None = None
    for part in reversed(_blocks(recurrence)):
        sums, after = _sums_from_end(_clock(recurrence, part), after)
        sums = sums.to(recurrence.x)
        slowest = sums[:, -1] if timed is None else sums[:, -1] * timed[1]
        if float(slowest.max()) < floor:
            return
        yield part, sums


def _keys_left(recurrence: Recurrence) -> Iterator[tuple[slice, Tensor]]:
    """Yield k_s of blocks of positions, the last first, (batch, block, heads, state)."""
    if isinstance(recurrence, DeltaRecurrence):
        one, several = recurrence.one_by_one(), recurrence.several
        for part, keys in delta_rule.keys_left(one.log_a, one.beta, one.b, one.e, one.r):
            written = slice(part.start // several, part.stop // several)  # At each position's last removal.
            yield written, keys[:, written.start * several + several - 1 - part.start :: several]
        return
    timed, floor = _timed(recurrence), smallest_exponent(recurrence.x.dtype)
    for part, sums in _sums_left(recurrence):
        exponents = sums if timed is None else sums * timed[1]
        yield part, exponents.clamp_(min=floor).exp_() * by_head(recurrence.b[:, part], recurrence.shape[2])
