"""Selectivity of a model's gates: does what they let into the state depend on the token?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ssmscope import ops

if TYPE_CHECKING:
    from torch import Tensor
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model
    from ssmscope.core.trace import LayerTrace

MIN_VARIATION = 0.1
"""Coefficient of variation over tokens from which a gate selects; below it, its scores are noise."""
MIN_SELECTING_SHARE = 0.5
"""Share of the heads that select, from which a model does."""
TEXTS_JUDGED = 32


class GateVariation:
    """Observer of how much each head's gate, Δ or 1 − a where there is no Δ, varies over all tokens.

    Layers that never forget (a = 1), as a plain delta rule, have no such gate and are left out.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.sums: dict[tuple[int, int], Any] = {}

    def visit(self, index: int, rows: Sequence[int], layer: LayerTrace) -> None:
        real = self.mask[list(rows), : layer.u.shape[1]].unsqueeze(-1)
        for part, recurrence in enumerate(layer.recurrences):
            gate = ops.write(recurrence, per_head=True) if recurrence.delta is None else recurrence.delta
            gate = gate.detach().double().where(real.to(gate.device), 0.0)
            found = (real.sum().item(), gate.sum((0, 1)).cpu(), gate.square().sum((0, 1)).cpu())
            before = self.sums.get((index, part), (0, 0, 0))
            self.sums[index, part] = tuple(old + new for old, new in zip(before, found, strict=True))

    def share(self) -> float | None:
        """Return the share of all layers' heads whose gate varies by `MIN_VARIATION` or more; None without gates."""
        selecting = heads = 0
        for tokens, total, squares in self.sums.values():
            mean = total / tokens
            deviation = (squares / tokens - mean.square()).clamp(min=0).sqrt()
            forgets = mean > 0
            heads += int(forgets.sum())
            selecting += int((deviation >= MIN_VARIATION * mean)[forgets].sum())
        return selecting / heads if heads else None


def note_on_gates(model: Model, batch: Batch, reading: Sequence[str]) -> list[str]:
    """Return a note on the scores that are read off the gates if these hardly select on these texts, else nothing."""
    if not reading:
        return []
    found = GateVariation(batch.mask)
    model.trace(batch, keep_inputs=False, visit=found.visit)
    share = found.share()
    if share is None or share >= MIN_SELECTING_SHARE:
        return []
    return [
        f"the gates hardly select: over tokens they vary by a tenth or more in {100 * share:.0f} % of the heads, so "
        f"{' and '.join(reading)} {'say' if len(reading) > 1 else 'says'} where a token stands rather than what it is"
    ]
