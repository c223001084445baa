"""Scan of a linear recurrence: its definition in a loop, and the same function fast, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from ssmscope.backends.shapes import Inputs, Memory
from ssmscope.ops import delta_rule, diagonal, ssd, wide
from ssmscope.ops.recurrence import DeltaRecurrence, Recurrence, by_head, scan_in_order
from ssmscope.outline import outlined


@outlined
class Scan(NamedTuple):
    """Result of a scan: `y` (batch, length, heads, width), the final `state` (batch, heads, width, state) and, when
    asked for, `retention` (batch, length), the mean of a_t over heads and states."""

    y: Tensor
    state: Tensor
    retention: Tensor | None


@scan_in_order
def scan_reference(recurrence: Recurrence, initial: Memory | None = None) -> Scan:
    """Run the recurrence by its definition, one step at a time (Baleen, Eq. 1). Slow; the reference for tests of
    `scan`. Shapes as in `Recurrence` and `Scan`; any floating dtype."""
    if isinstance(recurrence, DeltaRecurrence):
        return _delta_reference(recurrence, initial)
    batch, length, heads, width, state = recurrence.shape
    b, c = by_head(recurrence.b, heads), by_head(recurrence.c, heads)
    a, x = recurrence.log_decay().exp(), recurrence.written
    H = initial if initial is not None else x.new_zeros(batch, heads, width, state)
    outputs = []
    for t in range(length):
        H = a[:, t, :, None, :] * H + x[:, t, :, :, None] * b[:, t, :, None, :]
        outputs.append(einsum(H, c[:, t], "batch head width n, batch head n -> batch head width"))
    y = torch.stack(outputs, dim=1) if outputs else x.new_zeros(batch, 0, heads, width)
    return Scan(with_skip(y, recurrence.x, recurrence.D), H, a.expand(*a.shape[:3], state).mean((2, 3)))


def _delta_reference(recurrence: DeltaRecurrence, initial: Tensor | None) -> Scan:
    batch, length, heads, width, state = recurrence.shape
    (b, c), ((first, along), *more) = recurrence.by_head(), recurrence.removals()
    H = initial if initial is not None else b.new_zeros(batch, heads, width, state)
    unit = torch.eye(state, dtype=b.dtype, device=b.device)
    outputs = [recurrence.x[:, :0]]
    for t in range(length):
        beta, key = (term[:, t, ..., None] for term in (recurrence.beta.unsqueeze(-1), b))
        transition = torch.diag_embed(recurrence.log_a[:, t].exp().expand(-1, -1, state))
        transition = transition - beta * first[:, t, ..., None] @ along[:, t, ..., None].mT
        for e, r in more:
            transition = transition @ (unit - beta * e[:, t, ..., None] @ r[:, t, ..., None].mT)
        H = H @ transition + beta * recurrence.x[:, t, :, :, None] @ key.mT
        outputs.append((H @ c[:, t, :, :, None]).squeeze(-1).unsqueeze(1))
    return Scan(with_skip(torch.cat(outputs, dim=1), recurrence.x, recurrence.D), H, recurrence.mean_decay().mean(-1))


@scan_in_order
def scan(recurrence: Recurrence, initial: Memory | None = None, *, retention: bool = False) -> Scan:
    """Return outputs and final state of the recurrence, differentiable in every term and in `initial`.

    Long sequences are cut into chunks. With one decay per head, by the delta rule, and with a decay per state of wide
    heads, a chunk is matrix products; states that are single numbers and heads of width 1 are walked step by step.
    Exponentials are taken of sums over segments and never divided, so where states decay neither values nor gradients
    overflow. Decays below e⁻⁸⁰ (float32) are treated as e⁻⁸⁰, or may be 0. `ssmscope.backends` has faster
    implementations for some devices and types; there, on a GPU, products are as exact as torch's own
    (`torch.set_float32_matmul_precision`), and terms may be of 16 bits.

    Args:
        recurrence: the terms, see `Recurrence`; float32 or float64, on a GPU with one decay per head or by the delta
            rule also 16 bits.
        initial: H_0, zero when absent. A run cut in two, the second started from the first's state, is the whole run.
        retention: also return the mean of a_t over heads and states, (batch, length); no gradient flows through it.
    """
    r, kept = recurrence, None
    if r.shape[1] == 1 and not retention and is_plain_step(r):
        y, final = one_step(r, _start(r, initial))
    elif isinstance(r, DeltaRecurrence):
        one = r.one_by_one()
        y, final = delta_rule.scan(one.log_a, one.beta, one.b, one.c, one.x, _start(r, initial), one.e, one.r)
        y = y[:, r.several - 1 :: r.several]
        kept = r.mean_decay().detach().mean(-1) if retention else None
    elif r.one_decay_per_head:
        log_a = r.log_decay().squeeze(-1)
        if r.shape[4] == 1 and r.b.shape[2] == r.shape[2] and r.shape[1]:
            H = diagonal.scan_numbers(log_a.unsqueeze(-1), r.written * r.b, _start(r, initial).squeeze(-1))
            y, final = H * r.c, H[:, -1].unsqueeze(-1)
        elif diagonal.walks_channels(r) and (found := diagonal.scan_channels(r, initial)):
            y, final = found
        else:
            y, final = ssd.scan(log_a, r.b, r.c, r.x, initial, r.delta)
        kept = log_a.detach().exp().mean(-1) if retention else None
    elif r.shape[3] > 1:
        log_a = r.log_decay()
        y, final = wide.scan(log_a, r.b, r.c, r.written, _start(r, initial))
        kept = log_a.detach().exp().mean((2, 3)) if retention else None
    else:
        y, final, kept = diagonal.scan(r, initial, retention=retention)
    return Scan(with_skip(y, r.x, r.D), final, kept)


def is_plain_step(r: Recurrence) -> bool:
    """Return True if `one_step` serves the terms: without gradients, of one type that is no half, removing once."""
    if isinstance(r, DeltaRecurrence) and r.several > 1:
        return False
    return not torch.is_grad_enabled() and r.x.dtype == r.b.dtype and r.x.dtype in (torch.float32, torch.float64)


def one_step(r: Recurrence, H: Memory) -> tuple[Inputs, Memory]:
    """Return outputs without the skip and the state after a single step from H, without gradients: on a GPU by a kernel
    if there is one, else by the definition in few operations, the large ones in place."""
    if r.x.is_cuda and r.A is not None and not r.expected and (by_kernel := diagonal.scan_channels(r, H)):
        return by_kernel
    batch, _, heads, width, state = r.shape
    groups = r.b.shape[2]
    log_a = r.log_a if isinstance(r, DeltaRecurrence) else r.log_decay()
    a, before = log_a.exp().reshape(batch, heads, 1, -1), H
    H = (a.mul_(H) if a.numel() == H.numel() else a * H).contiguous()
    if isinstance(r, DeltaRecurrence):
        e, along = (t.reshape(batch, heads, state) for t in r.removal())
        found = before @ e.unsqueeze(-1) * r.beta.reshape(batch, heads, 1, 1)
        H.addcmul_(found, along.unsqueeze(2), value=-1)
    by_group = H.view(batch, groups, heads * width // groups, state)
    by_group.addcmul_(r.written.reshape(*by_group.shape[:3], 1), r.b.reshape(batch, groups, 1, state))
    y = by_group @ r.c.reshape(batch, groups, state, 1)
    return y.view(batch, 1, heads, width), H


def scan_all(
    recurrences: Sequence[Recurrence],
    initials: Sequence[Float[Tensor, "batch heads width state"] | None],
    *,
    retention: bool = False,
) -> tuple[Scan, ...]:
    """Return the `scan` of each recurrence; of one shape and with one decay per head, they run as rows of one batch,
    but for those that a CPU's kernel walks.

    Arguments as `scan`'s, for each recurrence.
    """
    forms = {_form(r) for r in recurrences}
    if len(recurrences) == 1 or len(forms) > 1 or None in forms:
        return tuple(scan(r, H, retention=retention) for r, H in zip(recurrences, initials))
    x, b, c, log_a = (torch.cat(each) for each in zip(*((r.x, r.b, r.c, r.log_decay()) for r in recurrences)))
    steps = [r.delta for r in recurrences if r.delta is not None]
    delta = torch.cat(steps) if steps else None
    initial = None
    if any(H is not None for H in initials):
        initial = torch.cat([_start(r, H) for r, H in zip(recurrences, initials)])
    joint = scan(Recurrence(x=x, b=b, c=c, delta=delta, log_a=log_a), initial)
    rows = [r.shape[0] for r in recurrences]
    kept = log_a.detach().exp().mean((2, 3)).split(rows) if retention else [None] * len(rows)
    parts = zip(recurrences, joint.y.split(rows), joint.state.split(rows), kept)
    return tuple(Scan(with_skip(y, r.x, r.D), state, decay) for r, y, state, decay in parts)


def _form(r: Recurrence) -> tuple | None:
    """Return the properties that recurrences must share to run as one batch; None for one that runs by itself."""
    if isinstance(r, DeltaRecurrence) or not r.one_decay_per_head or r.order is not None or diagonal.walks_channels(r):
        return None
    return r.shape, r.b.shape, r.x.dtype, r.b.dtype, r.c.dtype, r.x.device, r.delta is None


def with_skip(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    """Return y_t + D x_t, for (batch, length, heads, width) and `D` (heads,) or (heads, width)."""
    if D is None:
        return y
    width = x.shape[3]
    if x.is_cuda and D.ndim == 1:
        return torch.addcmul(y, x, D.unsqueeze(-1))
    D = D.repeat_interleave(width) if D.ndim == 1 and width > 1 else D.flatten()  # torch adds rows of channels faster.
    return torch.addcmul(y.flatten(2), x.flatten(2), D).view(y.shape)


def _start(recurrence: Recurrence, initial: Tensor | None) -> Tensor:
    batch, _, heads, width, state = recurrence.shape
    return recurrence.x.new_zeros(batch, heads, width, state) if initial is None else initial


def states(
    recurrence: Recurrence, positions: Sequence[int], initial: Memory | None = None
) -> Float[Tensor, "batch chosen heads width state"]:
    """Return H_t at the chosen positions (0-based, after token t was written). Raises ValueError for one outside."""
    length = recurrence.shape[1]
    outside = [p for p in positions if not 0 <= p < length]
    if outside:
        raise ValueError(f"positions {outside} are outside 0…{length - 1}")
    found: dict[int, Tensor] = {}
    start, H = 0, initial
    for position in sorted(set(positions)):
        H = scan(recurrence.between(start, position + 1), H).state
        found[position], start = H, position + 1
    return torch.stack([found[p] for p in positions], dim=1)
