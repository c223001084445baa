"""States rounded while they are carried, exactly as a runtime that keeps them in few bits would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from ssmscope import ops
from ssmscope.core.edits import Edit, Site
from ssmscope.ops import Recurrence, Scan

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ZERO = "set to zero"
"""Control: nothing of the state is kept."""
BITS = {"bfloat16": 16, "float16": 16, "e4m3": 8, "e5m2": 8, "int8": 8, "int4": 4, ZERO: 0}
SHARED_AXES = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}
"""Axes of a state (batch, heads, width, state) that share a scale."""
MIN_SCALE = 1e-12
WORDS = {2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class Rounding:
    """Rounding of a carried state after every so many tokens. Numbers of 8 and 4 bits are scaled so that the largest of
    those that share a scale is the format's largest. With a seed it goes up or down at random, with the probability
    that keeps the mean."""

    format: str
    per: str = "head"
    every: int = 1
    seed: int | None = None

    @property
    def name(self) -> str:
        return self.format + f" per {self.per}" * (0 < self.bits < 16)

    @property
    def bits(self) -> int:
        return BITS[self.format]


def rounded(
    H: Float[Tensor, "batch heads width state"], how: Rounding, generator: torch.Generator | None = None
) -> Float[Tensor, "batch heads width state"]:
    """Return a state as it is read again after it was kept; with a generator it is rounded stochastically."""
    if how.format == ZERO:
        return torch.zeros_like(H)
    dtype = DTYPES.get(how.format)
    largest = 2.0 ** (how.bits - 1) - 1 if dtype is None else torch.finfo(dtype).max
    scale: Any = 1.0
    if how.bits < 16:
        scale = H.abs().amax(dim=SHARED_AXES[how.per], keepdim=True).clamp(min=MIN_SCALE) / largest
    x = H / scale
    drawn = None if generator is None else torch.rand(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    if dtype is not None:
        return _in_dtype(x, dtype, drawn) * scale
    return (x.round() if drawn is None else torch.floor(x + drawn)).clamp(-largest, largest) * scale


def _in_dtype(x: Tensor, dtype: torch.dtype, drawn: Tensor | None) -> Tensor:
    kept = x.to(dtype)
    nearest = kept.to(x.dtype)
    if drawn is None:
        return nearest
    # The other neighbour: the bits of a float, after its sign, count its magnitudes.
    inward = (nearest.abs() > x.abs()).to(torch.int8)
    other = (kept.view(WORDS[kept.element_size()]) + 1 - 2 * inward).view(dtype).to(x.dtype)
    share = ((x - nearest) / (other - nearest)).nan_to_num(0.0)
    return torch.where(drawn < share, other, nearest)


def carried(
    recurrences: Sequence[Recurrence],
    initial: Sequence[Tensor | None],
    how: Rounding,
    heads: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """Return the outputs y of recurrences whose states, or those of some heads, are rounded after every `how.every`
    tokens; a recurrence that joins the one before it shares its memory, which is their sum."""
    pieces, states, groups = list[list[Tensor]](), [*initial], ops.by_memory(recurrences, range(len(recurrences)))
    for start in range(0, recurrences[0].shape[1], how.every):
        found = [ops.scan(r.between(start, start + how.every), H) for r, H in zip(recurrences, states)]
        pieces.append([scan.y for scan in found])
        states = [None] * len(found)
        for group in groups:
            memory = torch.stack([found[at].state for at in group]).sum(0)
            chosen = slice(None) if heads is None else [*heads]
            memory[:, chosen] = rounded(memory, how, generator)[:, chosen]
            states[group[0]] = memory
    return tuple(torch.cat(each, dim=1) for each in zip(*pieces))


def state_rounded(how: Rounding, layers: tuple[int, ...] | None = None, heads: tuple[int, ...] | None = None) -> Edit:
    """Return the edit of one run in which the states of some layers and heads, by default all, are rounded while they
    are carried."""
    generator = None if how.seed is None else torch.Generator().manual_seed(how.seed)

    def change(scans: tuple[Scan, ...], site: Site) -> tuple[Scan, ...]:
        assert site.trace is not None
        recurrences = site.trace.recurrences
        outputs = carried(recurrences, site.trace.initial or (None,) * len(scans), how, heads, generator)
        return tuple(scan._replace(y=y) for scan, y in zip(scans, outputs))

    options = {"format": how.name, "every": how.every, "seed": how.seed, "heads": heads}
    return Edit("state rounded", "scans", change, layers, options=options)
