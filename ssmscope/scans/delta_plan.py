"""What `delta_fused` and `delta_exact` share: how a scan by the delta rule is cut, and its terms made ready."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ssmscope.scans.scalar_fused import STEPS

AT_ONCE = 1 << 16  # steps of all sequences whose chunks' states are held


@dataclass(frozen=True)
class Plan:
    """How a scan is cut: chunks of `steps`, of each of which a program has one head."""

    batch: int
    length: int
    heads: int
    groups: int
    width: int
    state: int
    by_state: bool

    @property
    def steps(self) -> int:
        return STEPS // 2 if self.by_state or self.state > 128 else STEPS

    @property
    def chunks(self) -> int:
        return -(-self.length // self.steps)

    @property
    def programs(self) -> tuple[int]:
        return (self.batch * self.chunks * self.heads,)

    def rows(self, like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Room for so many numbers of every step and head."""
        return like.new_empty(self.batch, self.length, self.heads, size, dtype=dtype)


def sizes_of(log_a: Tensor, beta: Tensor, b: Tensor, width: int) -> tuple[int, int, int, int, int, int, bool]:
    """The fields of a `Plan` for these terms."""
    (batch, length, heads), (groups, state) = beta.shape, b.shape[2:]
    return batch, length, heads, groups, width, state, log_a.shape[-1] > 1


def segments(beta: Tensor) -> list[slice]:
    """The parts of the length whose chunks' states are held at once, of whole chunks."""
    batch, length = beta.shape[:2]
    step = max(1, AT_ONCE // batch // STEPS) * STEPS
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def whole(t: Tensor) -> Tensor:
    """The term in float32 and in one piece."""
    return t.float().contiguous()
