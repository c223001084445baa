"""Linear recurrences: the mathematics under every state-space layer, as pure functions on tensors.

A layer is one or several recurrences (Baleen, Eq. 1; Mamba, Gu & Dao 2023, Eq. 2; Mamba-2, Dao & Gu 2024, Eq. 1)

    H_t = a_t ⊙ H_{t-1} + b_t x_tᵀ,        y_t = c_tᵀ H_t + D x_t,

with `heads` independent states of shape (width, state). Mamba-1 has one head of width 1 per channel and a decay per
(channel, state); Mamba-2 has a few wide heads with one decay each. The delta rule, whose transition is no decay per
state, is `DeltaRecurrence`. `scan_reference` is the definition in a loop;
`scan` is the same function, fast, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from ssmscope.errors import InputError
from ssmscope.matrices import pooled as cells_of_matrices
from ssmscope.matrices import rows as rows_of_matrices
from ssmscope.matrices import whole as matrices
from ssmscope.matrices.terms import around_of
from ssmscope.orders import check_one_way, map_in_order, scan_in_order
from ssmscope.scans import delta, diagonal, removal, scalar, single, wide
from ssmscope.scans.diagonal import scaled, with_skip

OVER_TIME = ("x", "b", "c", "delta", "log_a", "beta", "e", "r")
"""The terms that have a value for each step, (batch, length, …)."""


@dataclass(frozen=True, eq=False)
class Recurrence:
    """The terms of H_t = a_t ⊙ H_{t-1} + b_t x_tᵀ, y_t = c_tᵀ H_t + D x_t for a batch of sequences.

    The decay is a_t = exp(log_a_t). It is given either whole, as `log_a`, or by its factors: `delta` (Δ_t) and `A`, so
    that log a_t = Δ_t A, never stored for all t. With `delta`, the written term is b_t x_tᵀ = Δ_t B_t x_tᵀ, where `b`
    holds B_t. With `expected` the decay is the mean of exp(Δ A) over Δ ~ Exponential(mean `delta`),
    a_t = 1 / (1 + |A| Δ_t) (Baleen-E at inference).

    Shapes: `x` (batch, length, heads, width); `b`, `c` (batch, length, groups, state), groups divide heads and head h
    reads group h // (heads / groups); `delta` (batch, length, heads); `A` (heads, state) or (heads, 1), negative;
    `log_a` (batch, length, heads, state) or (…, 1), ≤ 0 where the state decays; `D` (heads,) or (heads, width); `order`
    (length,), the positions as the state comes by them, from the first to the last where it is None.

    Raises:
        ValueError: when shapes disagree, or neither or both forms of the decay are given.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    delta: Tensor | None = None
    A: Tensor | None = None
    log_a: Tensor | None = None
    D: Tensor | None = None
    expected: bool = False
    order: Tensor | None = None

    def __post_init__(self) -> None:
        batch, length, heads, _ = self.x.shape
        groups, state = self.b.shape[2:]
        if self.b.shape != self.c.shape or self.b.shape[:2] != (batch, length) or heads % groups:
            raise ValueError(
                f"b {tuple(self.b.shape)} and c {tuple(self.c.shape)} must both be (batch, length, groups, state) "
                f"with groups dividing the {heads} heads of x {tuple(self.x.shape)}"
            )
        if (self.A is None) == (self.log_a is None):
            raise ValueError("give the decay once: either A (with delta) or log_a")
        if self.A is not None and self.delta is None:
            raise ValueError("A needs delta: the log-decay is their product")
        if self.expected and self.A is None:
            raise ValueError("the expected decay 1 / (1 + |A| delta) needs A and delta, not log_a")
        if self.delta is not None and self.delta.shape != (batch, length, heads):
            raise ValueError(f"delta {tuple(self.delta.shape)} must be {(batch, length, heads)}")
        decay = self.A if self.A is not None else self.log_a
        leading = (heads,) if self.A is not None else (batch, length, heads)
        if decay is None or decay.shape[:-1] != leading or decay.shape[-1] not in (1, state):
            raise ValueError(
                f"the decay {tuple(decay.shape) if decay is not None else None} must be {(*leading, state)}, "
                "or 1 in place of the state size"
            )

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(batch, length, heads, width, state)."""
        return (*self.x.shape, self.b.shape[-1])

    @property
    def one_decay_per_head(self) -> bool:
        """Whether all states of a head decay alike, as in Mamba-2."""
        decay = self.A if self.A is not None else self.log_a
        assert decay is not None
        return decay.shape[-1] == 1

    @property
    def written(self) -> Tensor:
        """The input as the state sees it, Δ_t x_t, (batch, length, heads, width)."""
        return self.x if self.delta is None else scaled(self.x, self.delta)

    def log_decay(self, start: int = 0, stop: int | None = None) -> Tensor:
        """log a_t for start ≤ t < stop, (batch, time, heads, state) or (…, 1)."""
        if self.log_a is not None:
            return self.log_a[:, start:stop]
        assert self.delta is not None and self.A is not None
        log_a = self.delta[:, start:stop, :, None] * self.A
        return -torch.log1p(-log_a) if self.expected else log_a

    def kept(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The mean of a_t over states for start ≤ t < stop, (batch, time, heads)."""
        return self.log_decay(start, stop).exp().mean(-1)

    def replaced(self, start: int = 0, stop: int | None = None) -> Tensor:
        """1 − `kept`, computed without cancellation."""
        return -torch.expm1(self.log_decay(start, stop)).mean(-1)

    def between(self, start: int, stop: int | None = None) -> Recurrence:
        """The recurrence restricted to start ≤ t < stop."""
        cut: dict[str, Any] = self._each(lambda value: value[:, start:stop])
        if (order := self.order) is not None:
            cut["order"] = order[(order >= start) & (order < self.x.shape[1] if stop is None else order < stop)] - start
        return replace(self, **cut)

    def at(self, positions: Tensor) -> Recurrence:
        """The terms at these positions alone, one after the other."""
        return replace(self, **self._each(lambda value: value[:, positions.to(value.device)]), order=None)

    def of_heads(self, start: int, stop: int) -> Recurrence:
        """The recurrence restricted to the heads start ≤ h < stop; they read one group, or a group each."""
        heads = self.x.shape[2]
        share, stop = heads // self.b.shape[2], min(stop, heads)
        first, last = start // share, (stop - 1) // share
        groups = torch.arange(start, stop, device=self.b.device) // share
        chosen = slice(first, first + 1) if first == last else groups
        cut = self._each(lambda v: v[:, :, start:stop]) | self._each(lambda v: v[start:stop], ("A", "D"))
        return replace(self, **cut | {"b": self.b[:, :, chosen], "c": self.c[:, :, chosen]})

    def of_rows(self, start: int, stop: int) -> Recurrence:
        """The recurrence restricted to the sequences start ≤ i < stop of the batch."""
        return replace(self, **self._each(lambda value: value[start:stop]))

    @property
    def step(self) -> Tensor | None:
        """By how much x_t is multiplied when it is written, (batch, length, heads): Δ_t; None where by 1."""
        return self.delta

    def to(self, *args, **kwargs) -> Recurrence:
        """The recurrence with every tensor moved or cast, as `Tensor.to`."""
        return replace(self, **self._each(lambda value: value.to(*args, **kwargs), (*OVER_TIME, "A", "D")))

    def _each(self, change: Callable[[Tensor], Tensor], names: Sequence[str] = OVER_TIME) -> dict[str, Any]:
        """The terms of these names that there are, changed."""
        return {name: change(value) for name in names if (value := getattr(self, name, None)) is not None}


@dataclass(frozen=True, eq=False)
class DeltaRecurrence(Recurrence):
    """The terms of the delta rule, H_t = a_t (I − β_t b_t b_tᵀ) H_{t-1} + β_t b_t x_tᵀ, y_t = c_tᵀ H_t + D x_t
    (Gated Delta Networks, Yang et al. 2024, section 3): what the memory holds under the key b_t is exchanged for x_t,
    by the share β_t where b_t has length 1.

    Its retention is the mean eigenvalue of the transition, a_t (1 − β_t ‖b_t‖² / state): one of the state's directions
    is exchanged, the others decay. A decay per state (Kimi Linear, Zhang et al. 2025, section 3) comes first,
    H_t = (I − β_t b_t b_tᵀ) Diag(a_t) H_{t-1} + β_t b_t x_tᵀ.

    In the generalised rule (RWKV-7, Peng et al. 2025, section 3) what is found under one key, `e`, is taken away along
    another, `r`, and neither need be the key that is written:

        H_t = (I − β_t r_t e_tᵀ) Diag(a_t) H_{t-1} + β_t b_t x_tᵀ.

    Shapes as in `Recurrence`; `log_a` (batch, length, heads, 1 or state), `beta` (batch, length, heads), `e` and `r`
    (batch, length, heads, state), both or neither, b where absent. `delta`, `A` and `expected` stay unset.

    Raises:
        ValueError: for shapes that disagree, no `beta`, one of `e` and `r` alone, or a decay not given as `log_a`.
        InputError: from `log_decay`, as the states do not decay one by one.
    """

    beta: Tensor | None = None
    e: Tensor | None = None
    r: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = (*self.x.shape[:3], self.b.shape[-1])
        if (self.e is None) != (self.r is None) or any(t is not None and t.shape != wanted for t in (self.e, self.r)):
            raise ValueError(f"a generalised delta rule has both keys, e and r, of shape {wanted}")
        if self.beta is None or self.beta.shape != self.x.shape[:3]:
            raise ValueError(f"a delta rule needs its write strength beta, of shape {tuple(self.x.shape[:3])}")
        if self.log_a is None or self.delta is not None:
            raise ValueError("a delta rule's decay is given as log_a, without delta")

    @property
    def written(self) -> Tensor:
        """β_t x_t, (batch, length, heads, width)."""
        assert self.beta is not None
        return self.x * self.beta.unsqueeze(-1)

    @property
    def step(self) -> Tensor | None:
        """β_t, (batch, length, heads)."""
        return self.beta

    def log_decay(self, start: int = 0, stop: int | None = None) -> Tensor:
        raise InputError(
            "a delta rule's transition, a (I − β b bᵀ), mixes the states: what reads one decay per state cannot read it"
        )

    def kept(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The mean eigenvalue of the transition for start ≤ t < stop, (batch, time, heads)."""
        assert self.log_a is not None
        return self.log_a[:, start:stop].exp().mean(-1) - self._exchanged(start, stop)

    def replaced(self, start: int = 0, stop: int | None = None) -> Tensor:
        """1 − `kept`, computed without cancellation."""
        assert self.log_a is not None
        return -torch.expm1(self.log_a[:, start:stop]).mean(-1) + self._exchanged(start, stop)

    def by_head(self) -> tuple[Tensor, Tensor]:
        """`b` and `c` of every head, (batch, length, heads, state)."""
        heads = self.x.shape[2]
        return delta.by_head(self.b, heads), delta.by_head(self.c, heads)

    def removal(self) -> tuple[Tensor, Tensor]:
        """`e` and `r` of every head, (batch, length, heads, state)."""
        b, _ = self.by_head()
        return (b, b) if self.e is None or self.r is None else (self.e, self.r)

    def _exchanged(self, start: int, stop: int | None) -> Tensor:
        """β_t r_tᵀ Diag(a_t) e_t / state."""
        assert self.beta is not None and self.log_a is not None
        own = self.b.square() if self.e is None or self.r is None else self.e * self.r
        a, along = self.log_a[:, start:stop].exp(), own[:, start:stop]
        along = along.mean(-1, keepdim=True) if a.shape[-1] == 1 else along
        return self.beta[:, start:stop] * (a * delta.by_head(along, self.x.shape[2])).mean(-1)


class Scan(NamedTuple):
    """What a scan gives: `y` (batch, length, heads, width), the final `state` (batch, heads, width, state) and, when it
    was asked for, `retention` (batch, length), the mean of a_t over heads and states."""

    y: Tensor
    state: Tensor
    retention: Tensor | None


@scan_in_order
def scan_reference(recurrence: Recurrence, initial: Float[Tensor, "batch heads width state"] | None = None) -> Scan:
    """The definition, one step at a time (Baleen, Eq. 1). Slow; what `scan` is tested against.

    Shapes as in `Recurrence` and `Scan`; any floating dtype.
    """
    if isinstance(recurrence, DeltaRecurrence):
        return _delta_reference(recurrence, initial)
    batch, length, heads, width, state = recurrence.shape
    share = heads // recurrence.b.shape[2]
    b, c = (t.repeat_interleave(share, dim=2) for t in (recurrence.b, recurrence.c))
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
    assert recurrence.beta is not None and recurrence.log_a is not None
    (b, c), (e, r) = recurrence.by_head(), recurrence.removal()
    H = initial if initial is not None else b.new_zeros(batch, heads, width, state)
    unit = torch.eye(state, dtype=b.dtype, device=b.device)
    outputs = [recurrence.x[:, :0]]
    for t in range(length):
        beta, key, found, along = (term[:, t, ..., None] for term in (recurrence.beta.unsqueeze(-1), b, e, r))
        transition = recurrence.log_a[:, t, :, :, None].exp() * (unit - beta * found @ along.mT)
        H = H @ transition + beta * recurrence.x[:, t, :, :, None] @ key.mT
        outputs.append((H @ c[:, t, :, :, None]).squeeze(-1).unsqueeze(1))
    return Scan(with_skip(torch.cat(outputs, dim=1), recurrence.x, recurrence.D), H, recurrence.kept().mean(-1))


@scan_in_order
def scan(
    recurrence: Recurrence,
    initial: Float[Tensor, "batch heads width state"] | None = None,
    *,
    retention: bool = False,
) -> Scan:
    """Outputs and final state of the recurrence, differentiable in every term and in `initial`.

    With one decay per head the sequence is cut into chunks that are matrix products (the chunked algorithm of Mamba-2,
    Dao & Gu 2024, section 6), or, where a state is a single number, that are walked side by side. A decay per state has
    matrix products too where heads are wide (GLA); with heads of width 1 (Mamba-1) chunks of steps run in place on
    buffers that stay in the cache, or through kernels of C or CUDA, with the chunks' states recomputed in the
    backward pass. Exponentials are taken of sums over segments and never divided, so where states decay neither values
    nor gradients overflow. Decays below e⁻⁸⁰ (float32) are treated as e⁻⁸⁰, or on a GPU may be 0. With one decay per
    head, or by the delta rule, on a GPU, products are as exact as torch's own: `torch.set_float32_matmul_precision`
    chooses 22 bits ("highest", the default), the 11 of TF32 ("high") or 8 ("medium"), and terms may be of 16 bits.

    Args:
        recurrence: the terms, see `Recurrence`; float32 or float64, on a GPU with one decay per head or by the delta
            rule also 16 bits.
        initial: H_0, zero when absent. A run cut in two, the second started from the first's state, is the whole run.
        retention: also give the mean of a_t over heads and states, (batch, length), summed from the decays that the
            scan computes anyway (no gradient flows through it).
    """
    if isinstance(recurrence, DeltaRecurrence):
        assert recurrence.log_a is not None and recurrence.beta is not None
        terms = (recurrence.log_a, recurrence.beta, recurrence.b, recurrence.c, recurrence.x)
        start = _start(recurrence, initial)
        if recurrence.e is not None and recurrence.r is not None:
            y, final = removal.scan(*terms, recurrence.e, recurrence.r, start)
        else:
            y, final = delta.scan(*terms, start)
        kept = recurrence.kept().detach().mean(-1) if retention else None
    elif recurrence.one_decay_per_head:
        log_a = recurrence.log_decay().squeeze(-1)
        _, length, heads, _, state = recurrence.shape
        if state == 1 and recurrence.b.shape[2] == heads and length:
            H = single.scan(log_a, recurrence.written * recurrence.b, _start(recurrence, initial).squeeze(-1))
            y, final = with_skip(H * recurrence.c, recurrence.x, recurrence.D), H[:, -1].unsqueeze(-1)
        else:
            r = recurrence
            y, final = scalar.scan(log_a, r.b, r.c, r.x, initial, r.delta, r.D)
        return Scan(y, final, log_a.detach().exp().mean(-1) if retention else None)
    elif recurrence.x.shape[3] > 1:
        log_a = recurrence.log_decay()
        y, final = wide.scan(log_a, recurrence.b, recurrence.c, recurrence.written, _start(recurrence, initial))
        kept = log_a.detach().exp().mean((2, 3)) if retention else None
    else:
        r = recurrence
        factors = (r.x, r.b, r.c, initial, r.delta, r.A, r.log_a, r.D)
        return Scan(*diagonal.scan(*factors, expected=r.expected, retention=retention))
    return Scan(with_skip(y, recurrence.x, recurrence.D), final, kept)


def _start(recurrence: Recurrence, initial: Tensor | None) -> Tensor:
    """H_0, zero when absent."""
    batch, _, heads, width, state = recurrence.shape
    return recurrence.x.new_zeros(batch, heads, width, state) if initial is None else initial


def states(
    recurrence: Recurrence,
    positions: Sequence[int],
    initial: Float[Tensor, "batch heads width state"] | None = None,
) -> Float[Tensor, "batch chosen heads width state"]:
    """H_t at the chosen positions (0-based, after token t was written), in the order given.

    Raises:
        ValueError: for a position outside the sequence.
    """
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


def attention_reference(recurrence: Recurrence) -> Float[Tensor, "batch heads length length"]:
    """α[t, s] of every head, without D, one column at a time: what each step reads of a 1 that is written at s alone
    (Differential Mamba, Eq. 8). Slow; what `attention` is tested against.
    """
    batch, length, heads, _, _ = recurrence.shape
    columns = []
    for s in range(length):
        x = recurrence.x.new_zeros(batch, length, heads, 1)
        x[:, s] = 1
        columns.append(scan_reference(replace(recurrence, x=x, D=None)).y.squeeze(-1))
    empty = recurrence.x.new_zeros(batch, heads, 0, 0)
    return rearrange(torch.stack(columns, dim=-1), "b t h s -> b h t s") if columns else empty


@map_in_order
def attention(
    recurrence: Recurrence,
    *,
    groups: int = 1,
    absolute: bool = False,
    skip: bool = False,
    rows: Sequence[int] | None = None,
    left: Float[Tensor, "batch length heads #width"] | None = None,
    taps: Float[Tensor, "batch length reach heads #width"] | None = None,
) -> Float[Tensor, "batch groups rows length"]:
    """The implicit attention matrix α[t, s] = c_tᵀ (∏_{s<r≤t} a_r) b_s Δ_s, so that y = α x (Differential Mamba,
    Eq. 8), as the signed mean over channels.

    Differentiable in every term, on a CPU as on a GPU; without gradients float32 goes through kernels of C on a CPU
    (`ssmscope.matrices.native`) and of Triton on a GPU (`ssmscope.matrices.fused`), where there are any.

    Args:
        recurrence: the terms; `x` has no part in α and gives only the number of channels.
        groups: into how many groups of neighbouring heads the channels are divided, each with its mean: 1 is the mean
            over all, the number of heads gives every head by itself.
        absolute: the mean of absolute values, which is not the absolute value of the signed mean; it makes every
            channel's matrix, and takes as many times longer.
        skip: add D to the diagonal.
        rows: these rows only, 0-based, in the order given: O(length · heads · state) each.
        left: a factor of each output channel, as a gate.
        taps: by what the input at s is multiplied when it arrives at step s + i, the coefficients of what stands before
            the recurrence, as a convolution. With these two the matrix is that of left ⊙ (α + D) · taps.

    Raises:
        ValueError: when the groups do not divide the heads, a row is outside the sequence, or `left` or `taps` disagree
            with the recurrence.
    """
    around = around_of(recurrence.x, groups, left, taps)
    if rows is None:
        return matrices.whole(recurrence, groups, absolute, skip, around)
    length = recurrence.shape[1]
    outside = [t for t in rows if not 0 <= t < length]
    if outside or not len(rows):
        raise ValueError(f"rows {outside or list(rows)}: give at least one, each from 0 to {length - 1}")
    return rows_of_matrices.rows(recurrence, rows, groups, absolute, skip, around)


def pooled_attention(
    recurrence: Recurrence,
    cells: int,
    *,
    groups: int = 1,
    skip: bool = False,
    left: Float[Tensor, "batch length heads #width"] | None = None,
    taps: Float[Tensor, "batch length reach heads #width"] | None = None,
) -> Float[Tensor, "batch groups cells cells"]:
    """`attention` in `cells` × `cells` cells: the mean over the pairs of each cell in which s ≤ t.

    The matrix is never held: its factors are summed within cells, which is exact, and multiplied then. Memory grows
    with the cells, not with the length. Cell i holds the positions from ⌊i · length / cells⌋ on. No gradient
    flows through it.

    Args: as `attention`; there is no mean of absolute values, which are no products of factors.

    Raises:
        ValueError: as `attention`, and for cells that are not from 1 to the length.
    """
    check_one_way([recurrence], "a pooled map")
    around = around_of(recurrence.x, groups, left, taps)
    if not 1 <= cells <= recurrence.shape[1]:
        raise ValueError(f"{cells} cells: give from 1 to the length, {recurrence.shape[1]}")
    with torch.no_grad():
        return cells_of_matrices.pooled(recurrence, cells, groups, skip, around)


def skip_alone(recurrence: Recurrence, D: Tensor) -> Recurrence:
    """A recurrence that only passes its input on, multiplied by D."""
    batch, length, heads, _ = recurrence.x.shape
    nothing = recurrence.x.new_zeros(batch, length, 1, 1)
    return Recurrence(x=recurrence.x, b=nothing, c=nothing, log_a=recurrence.x.new_zeros(batch, length, heads, 1), D=D)


def retention(recurrence: Recurrence, *, per_head: bool = False) -> Tensor:
    """Mean of a_t over states and heads, (batch, length), or per head (batch, length, heads) (Baleen, Eq. 10).

    1 means that token t leaves the memory as it was, 0 that it clears it.
    """
    return _over_time(recurrence, recurrence.kept, per_head)


def write(recurrence: Recurrence, *, per_head: bool = False) -> Tensor:
    """1 − retention, computed without cancellation: how much of the memory token t replaces. Shapes as `retention`."""
    return _over_time(recurrence, recurrence.replaced, per_head)


def _over_time(recurrence: Recurrence, quantity: Callable[[int, int], Tensor], per_head: bool) -> Tensor:
    batch, length, heads, _, state = recurrence.shape
    step = max(1, 2**22 // max(1, batch * heads * state))  # at most 16 MB of decays at once
    parts = [quantity(start, start + step) for start in range(0, length, step)]
    kept = torch.cat(parts, dim=1) if parts else recurrence.x.new_zeros(batch, 0, heads)
    return kept if per_head else kept.mean(-1)
