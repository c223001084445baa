"""Linear recurrences: the mathematics of state-space layers, as pure functions on tensors.

A layer is one or several recurrences (Baleen, Eq. 1; Mamba, Gu & Dao 2023, Eq. 2; Mamba-2, Dao & Gu 2024, Eq. 1)

    H_t = a_t ⊙ H_{t-1} + b_t x_tᵀ,        y_t = c_tᵀ H_t + D x_t,

with `heads` independent states of shape (width, state). Mamba-1 has one head of width 1 per channel and a decay per
(channel, state); Mamba-2 has a few wide heads with one decay each. The delta rule, whose transition is not a decay per
state, is `DeltaRecurrence`.

`recurrence` has the terms, `scans` runs them (`ssd`, `wide`, `diagonal`, `delta_rule` by the shape of
the decay), `implicit_attention` computes their attention matrices (`matrices` whole, `pooled` in cells), and
`survival` each token's share of the state. Their definitions, slow and in torch alone, are `scan_reference`,
`attention_reference` and `survival.remaining_reference`. `ssmscope.backends` decides where C or Triton runs instead.
"""

from ssmscope.ops.implicit_attention import attention, attention_reference, pooled_attention
from ssmscope.ops.recurrence import OVER_TIME, DeltaRecurrence, Recurrence, by_memory, retention, skip_alone, write
from ssmscope.ops.scans import Scan, scan, scan_all, scan_reference, states

__all__ = [
    "OVER_TIME", "DeltaRecurrence", "Recurrence", "Scan", "attention", "attention_reference", "by_memory",
    "pooled_attention", "retention", "scan", "scan_all", "scan_reference", "skip_alone", "states", "write",
]  # fmt: skip
