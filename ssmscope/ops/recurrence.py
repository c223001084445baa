"""Terms of a linear recurrence, as one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from ssmscope.errors import InputError
from ssmscope.outline import Outlined

MAX_DECAYS_HELD = 2**22
checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Keep only the inputs of a function that draws no random numbers, and run it again in the backward pass."""
OVER_TIME = ("x", "b", "c", "delta", "log_a", "beta", "e", "r")


@dataclass(frozen=True, eq=False)
class Recurrence(Outlined):
    """Terms of H_t = a_t ⊙ H_{t-1} + b_t x_tᵀ, y_t = c_tᵀ H_t + D x_t for a batch of sequences.

    The decay is a_t = exp(log_a_t). It is given either whole, as `log_a`, or by its factors: `delta` (Δ_t) and `A`, so
    that log a_t = Δ_t A, never stored for all t. With `delta`, the written term is b_t x_tᵀ = Δ_t B_t x_tᵀ, where `b`
    holds B_t. With `expected` the decay is the mean of exp(Δ A) over Δ ~ Exponential(mean `delta`),
    a_t = 1 / (1 + |A| Δ_t) (Baleen-E at inference).

    Shapes: `x` (batch, length, heads, width); `b`, `c` (batch, length, groups, state), groups divide heads and head h
    reads group h // (heads / groups); `delta` (batch, length, heads); `A` (heads, state) or (heads, 1), negative;
    `log_a` (batch, length, heads, state) or (…, 1), ≤ 0 where the state decays; `D` (heads,) or (heads, width); `order`
    (length,), the positions in the order in which the state visits them, from the first to the last if it is None. A
    recurrence that `joins` the one before it is a further write of each position into the same memory: both have the
    same transitions, and the memory's state is the sum of theirs. Raises ValueError if shapes disagree, or neither or
    both forms of the decay are given.
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
    joins: bool = False

    def __post_init__(self) -> None:
        batch, length, heads, _ = self.x.shape
        groups, state = self.b.shape[2:]
        if self.b.shape != self.c.shape or self.b.shape[:2] != (batch, length) or heads % groups:
            said = f"b {tuple(self.b.shape)} and c {tuple(self.c.shape)} must both be (batch, length, groups, state)"
            raise ValueError(f"{said} with groups dividing the {heads} heads of x {tuple(self.x.shape)}")
        if (self.A is None) == (self.log_a is None):
            raise ValueError("give the decay once: either A (with delta) or log_a")
        if self.A is not None and self.delta is None:
            raise ValueError("A needs delta: the log-decay is their product")
        if self.expected and self.A is None:
            raise ValueError("the expected decay 1 / (1 + |A| delta) needs A and delta, not log_a")
        if self.delta is not None and self.delta.shape != (batch, length, heads):
            raise ValueError(f"delta {tuple(self.delta.shape)} must be {(batch, length, heads)}")
        decay = self.A if self.A is not None else self.log_a
        assert decay is not None
        leading = (heads,) if self.A is not None else (batch, length, heads)
        if decay.shape[:-1] != leading or decay.shape[-1] not in (1, state):
            said = f"the decay {tuple(decay.shape)} must be {(*leading, state)},"
            raise ValueError(f"{said} or 1 in place of the state size")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Sizes (batch, length, heads, width, state)."""
        return (*self.x.shape, self.b.shape[-1])

    @property
    def one_decay_per_head(self) -> bool:
        """True if all states of a head decay alike, as in Mamba-2."""
        decay = self.A if self.A is not None else self.log_a
        assert decay is not None
        return decay.shape[-1] == 1

    @property
    def written(self) -> Tensor:
        """Input as it is written into the state, Δ_t x_t, (batch, length, heads, width)."""
        return self.x if self.delta is None else self.x * self.delta.unsqueeze(-1)

    def log_decay(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return log a_t for start ≤ t < stop, (batch, time, heads, state) or (…, 1)."""
        if self.log_a is not None:
            return self.log_a[:, start:stop]
        assert self.delta is not None and self.A is not None
        log_a = self.delta[:, start:stop, :, None] * self.A
        return -torch.log1p(-log_a) if self.expected else log_a

    def mean_decay(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the mean of a_t over states for start ≤ t < stop, (batch, time, heads)."""
        return self.log_decay(start, stop).exp().mean(-1)

    def one_minus_mean_decay(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return 1 − `mean_decay`, computed without cancellation."""
        return -torch.expm1(self.log_decay(start, stop)).mean(-1)

    def between(self, start: int, stop: int | None = None) -> Recurrence:
        """Return the recurrence restricted to start ≤ t < stop."""
        cut: dict[str, Any] = self._each(lambda value: value[:, start:stop])
        if (order := self.order) is not None:
            cut["order"] = order[(order >= start) & (order < (len(order) if stop is None else stop))] - start
        return replace(self, **cut)

    def at(self, positions: Tensor) -> Recurrence:
        """Return the terms at these positions alone, one after the other."""
        return replace(self, **self._each(lambda value: value[:, positions.to(value.device)]), order=None)

    def of_heads(self, start: int, stop: int) -> Recurrence:
        """Return the recurrence restricted to the heads start ≤ h < stop, which read one group, or one each."""
        heads = self.x.shape[2]
        share, stop = heads // self.b.shape[2], min(stop, heads)
        first, last = start // share, (stop - 1) // share
        groups = torch.arange(start, stop, device=self.b.device) // share
        chosen = slice(first, first + 1) if first == last else groups
        cut = self._each(lambda v: v[:, :, start:stop]) | self._each(lambda v: v[start:stop], ("A", "D"))
        return replace(self, **cut | {"b": self.b[:, :, chosen], "c": self.c[:, :, chosen]})

    def of_width(self, place: int) -> Recurrence:
        """Return the recurrence of one channel of every head."""
        D = self.D if self.D is None or self.D.ndim == 1 else self.D[:, place : place + 1]
        return replace(self, x=self.x[..., place : place + 1], D=D)

    def of_rows(self, start: int, stop: int) -> Recurrence:
        """Return the recurrence restricted to the sequences start ≤ i < stop of the batch."""
        return replace(self, **self._each(lambda value: value[start:stop]))

    @property
    def step(self) -> Tensor | None:
        """Factor of x_t when it is written, Δ_t (batch, length, heads); None where it is 1."""
        return self.delta

    def to(self, *args, **kwargs) -> Recurrence:
        """Return the recurrence with every tensor moved or cast, as `Tensor.to`."""
        return replace(self, **self._each(lambda value: value.to(*args, **kwargs), (*OVER_TIME, "A", "D")))

    def _each(self, change: Callable[[Tensor], Tensor], names: Sequence[str] = OVER_TIME) -> dict[str, Any]:
        return {name: change(value) for name in names if (value := getattr(self, name, None)) is not None}


@dataclass(frozen=True, eq=False)
class DeltaRecurrence(Recurrence):
    """Terms of the delta rule, H_t = a_t (I − β_t b_t b_tᵀ) H_{t-1} + β_t b_t x_tᵀ, y_t = c_tᵀ H_t + D x_t (Gated Delta
    Networks, Yang et al. 2024, section 3): the memory's value under the key b_t is exchanged for x_t, by the share β_t
    where b_t has length 1.

    Its retention is the mean eigenvalue of the transition, a_t (1 − β_t ‖b_t‖² / state): one direction of the state is
    exchanged, the others decay. A decay per state (Kimi Linear, Zhang et al. 2025, section 3) comes first,
    H_t = (I − β_t b_t b_tᵀ) Diag(a_t) H_{t-1} + β_t b_t x_tᵀ.

    In the generalised rule (RWKV-7, Peng et al. 2025, section 3; Comba, Hu et al. 2025) the value found under one key,
    `e`, before the decay is removed along another, `r`, and neither need be the key that is written:

        H_t = (Diag(a_t) − β_t r_t e_tᵀ) H_{t-1} + β_t b_t x_tᵀ.

    A position may remove several times (DeltaProduct, Siems et al. 2025, section 4): the later removals' factors
    I − β_t r_ti e_tiᵀ are then applied one after the other.

    Shapes as in `Recurrence`; `log_a` (batch, length, heads, 1 or state), `beta` (batch, length, heads), `e` and `r`
    (batch, length, heads, state) or (batch, length, heads, removals, state), both or neither, b where absent. Without
    `log_a` nothing decays; `delta`, `A` and `expected` stay unset. Raises ValueError if shapes disagree, `beta` or one
    of `e` and `r` is missing, or `delta` is given. Raises InputError from `log_decay`, as the states do not decay one
    by one.
    """

    log_a: Tensor = None  # type: ignore[assignment]
    beta: Tensor = None  # type: ignore[assignment]
    e: Tensor | None = None
    r: Tensor | None = None

    def __post_init__(self) -> None:
        if vars(self)["log_a"] is None and self.A is None:
            object.__setattr__(self, "log_a", torch.zeros_like(self.x[..., :1]))
        super().__post_init__()
        keys, wanted = (self.e, self.r), (*self.x.shape[:3], self.b.shape[-1])
        if any(t is not None and (t.ndim not in (4, 5) or (*t.shape[:3], t.shape[-1]) != wanted) for t in keys) or (
            len({None if t is None else t.shape for t in keys}) > 1
        ):
            raise ValueError(f"a generalised delta rule has both keys, e and r, of shape {wanted}")
        if self.beta is None or self.beta.shape != self.x.shape[:3]:
            raise ValueError(f"a delta rule needs its write strength beta, of shape {tuple(self.x.shape[:3])}")
        if self.delta is not None:
            raise ValueError("a delta rule's decay is given as log_a, without delta")

    @property
    def written(self) -> Tensor:
        """Written input, β_t x_t, (batch, length, heads, width)."""
        return self.x * self.beta.unsqueeze(-1)

    @property
    def step(self) -> Tensor | None:
        """Write strength β_t, (batch, length, heads)."""
        return self.beta

    def log_decay(self, start: int = 0, stop: int | None = None) -> Tensor:
        raise InputError("a delta rule's transition, a (I − β b bᵀ), mixes the states: it is not a decay per state")

    def mean_decay(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the mean eigenvalue of the transition for start ≤ t < stop, (batch, time, heads)."""
        return self.log_a[:, start:stop].exp().mean(-1) - self._exchanged(start, stop)

    def one_minus_mean_decay(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return 1 − `mean_decay`, computed without cancellation."""
        return -torch.expm1(self.log_a[:, start:stop]).mean(-1) + self._exchanged(start, stop)

    def by_head(self) -> tuple[Tensor, Tensor]:
        """Return `b` and `c` of every head, (batch, length, heads, state)."""
        heads = self.x.shape[2]
        return by_head(self.b, heads), by_head(self.c, heads)

    @property
    def several(self) -> int:
        """Number of removals at a position."""
        return 1 if self.e is None or self.e.ndim == 4 else self.e.shape[3]

    def removal(self) -> tuple[Tensor, Tensor]:
        """Return `e` and `r` of every head, (batch, length, heads, state), where a position removes once."""
        ((e, r),) = self.removals()
        return e, r

    def removals(self) -> list[tuple[Tensor, Tensor]]:
        """Return `e` and `r` of every head, (batch, length, heads, state), of each removal in turn. The first `e` looks
        up before the decay: where the keys are `b`, it is a ⊙ b."""
        if self.e is None or self.r is None:
            b, _ = self.by_head()
            return [(self.log_a.exp() * b, b)]
        if self.e.ndim == 4:
            return [(self.e, self.r)]
        return list(zip(self.e.unbind(3), self.r.unbind(3)))

    def one_by_one(self) -> DeltaRecurrence:
        """Return the same memory with a position for each removal, without D: the first decays, the last writes and
        reads. Of once-removing terms these are themselves."""
        if self.e is None or self.r is None or self.e.ndim == 4:
            return self

        def only_at(t: Tensor, place: int) -> Tensor:
            nothing = torch.zeros_like(t)
            return torch.stack([t if i == place else nothing for i in range(self.several)], dim=2).flatten(1, 2)

        b, c = self.by_head()
        return DeltaRecurrence(
            x=only_at(self.x, self.several - 1),
            b=only_at(b, self.several - 1),
            c=only_at(c, self.several - 1),
            log_a=only_at(self.log_a, 0),
            beta=self.beta.repeat_interleave(self.several, dim=1),
            e=self.e.transpose(2, 3).flatten(1, 2),
            r=self.r.transpose(2, 3).flatten(1, 2),
        )

    def _exchanged(self, start: int, stop: int | None) -> Tensor:
        """Return the trace of Diag(a_t) less that of the transition, over the state: β_t b_tᵀ Diag(a_t) b_t / state, or
        β_t Σ_i l_tiᵀ Diag(a_t) e_ti, the first without a_t, with l_i = r_i − β Σ_{j>i} (r_i · e_j) l_j."""
        beta, a = self.beta[:, start:stop], self.log_a[:, start:stop].exp()
        if self.e is None or self.r is None:
            own = self.b[:, start:stop].square()
            along = own.mean(-1, keepdim=True) if a.shape[-1] == 1 else own
            return beta * (a * by_head(along, self.x.shape[2])).mean(-1)
        (first, along), *more = ((e[:, start:stop], r[:, start:stop]) for e, r in self.removals())
        later: list[tuple[Tensor, Tensor]] = []

        def left(r: Tensor) -> Tensor:
            """Return r after the later removals."""
            shared = ((r * e).sum(-1, keepdim=True) * after for e, after in later)
            return r - beta.unsqueeze(-1) * sum(shared)

        for e, r in reversed(more):
            later.append((e, left(r)))
        return beta * (first * left(along) + a * sum(e * after for e, after in later)).mean(-1)


def smallest_exponent(dtype: torch.dtype) -> float:
    """Return the least log-decay: smaller ones change nothing, and denormal numbers are 10 to 30 times slower."""
    return -700.0 if dtype == torch.float64 else -80.0


def by_head(t: Tensor, heads: int) -> Tensor:
    """Return a term of groups, (batch, length, groups, …), for each of the heads."""
    share = heads // t.shape[2]
    return t.repeat_interleave(share, dim=2) if share > 1 else t


def skip_alone(recurrence: Recurrence, D: Tensor) -> Recurrence:
    """Return a recurrence that only passes its input on, multiplied by D."""
    batch, length, heads, _ = recurrence.x.shape
    nothing = recurrence.x.new_zeros(batch, length, 1, 1)
    return Recurrence(x=recurrence.x, b=nothing, c=nothing, log_a=recurrence.x.new_zeros(batch, length, heads, 1), D=D)


def retention(recurrence: Recurrence, *, per_head: bool = False) -> Tensor:
    """Return the mean of a_t over states and heads, (batch, length), or per head (batch, length, heads) (Baleen, Eq.
    10). 1 means that token t leaves the memory as it was, 0 that it clears it."""
    return _over_time(recurrence, recurrence.mean_decay, per_head)


def write(recurrence: Recurrence, *, per_head: bool = False) -> Tensor:
    """Return 1 − `retention`, the share of the memory that token t replaces, computed without cancellation."""
    return _over_time(recurrence, recurrence.one_minus_mean_decay, per_head)


def _over_time(recurrence: Recurrence, quantity: Callable[[int, int], Tensor], per_head: bool) -> Tensor:
    batch, length, heads, _, state = recurrence.shape
    step = max(1, MAX_DECAYS_HELD // max(1, batch * heads * state))
    parts = [quantity(start, start + step) for start in range(0, length, step)]
    kept = torch.cat(parts, dim=1) if parts else recurrence.x.new_zeros(batch, 0, heads)
    return kept if per_head else kept.mean(-1)


T = TypeVar("T")


def by_memory(recurrences: Sequence[Any], each: Iterable[T]) -> list[list[T]]:
    """Group what belongs to each of the recurrences by the memory that these write into."""
    found: list[list[T]] = []
    for recurrence, own in zip(recurrences, each):
        if recurrence.joins and found:
            found[-1].append(own)
        else:
            found.append([own])
    return found


def straight(recurrence: Any) -> Any:
    """Return a recurrence with its positions in the order in which its state visits them."""
    return recurrence if recurrence.order is None else recurrence.at(recurrence.order)


def along(order: Tensor | None, compute: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """Compute a function of (batch, length, …) on the positions in this order, and put the result back."""
    return compute(t) if order is None else compute(t[:, order])[:, order.argsort()]


def check_one_way(recurrences: Any, what: str) -> None:
    """Raise InputError if a state visits the positions in another order, for a question that then has no answer."""
    if any(recurrence.order is not None for recurrence in recurrences):
        raise InputError(f"the layer reads its input both ways, and {what} needs a layer that only reads it forwards")


def scan_in_order(run: Callable[..., T]) -> Callable[..., T]:
    """Extend a scan to recurrences with an order: outputs and retention are at their positions."""

    @wraps(run)
    def scanned(recurrence: Any, initial: Tensor | None = None, **options: Any) -> Any:
        if recurrence.order is None:
            return run(recurrence, initial, **options)
        found: Any = run(straight(recurrence), initial, **options)
        place = recurrence.order.argsort()
        kept = None if found.retention is None else found.retention[:, place]
        return found._replace(y=found.y[:, place], retention=kept)

    return scanned


def map_in_order(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Extend an attention map to recurrences with an order."""

    @wraps(run)
    def mapped(recurrence: Any, **options: Any) -> Tensor:
        order, rows = recurrence.order, options.get("rows")
        if order is None:
            return run(recurrence, **options)
        place = order.argsort()
        around = {name: t[:, order] for name in ("left", "taps") if (t := options.get(name)) is not None}
        inside = range(len(order))  # A row outside stays outside.
        chosen = None if rows is None else [int(place[t]) if t in inside else t for t in rows]
        found = run(straight(recurrence), **{**options, **around, "rows": chosen})[..., place]
        return found if rows is not None else found[:, :, place]

    return mapped
