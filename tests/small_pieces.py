"""Small internal sizes of the recurrences, at which short inputs are cut into pieces too."""

import pytest
from ssmscope.ops import delta_rule, diagonal, implicit_attention, matrices, pooled, recurrence, ssd, survival, wide

SIZES = {
    (delta_rule, "STEPS_PER_CHUNK"): 4, (delta_rule, "STEPS_PER_SEGMENT"): 8,
    (diagonal, "MAX_NUMBERS_HELD"): {"cpu": 200, "cuda": 200}, (diagonal, "MAX_WALKED_STATE"): 0,
    (matrices, "MAX_FACTOR_COLUMNS"): 13, (matrices, "MAX_MATRIX_NUMBERS"): 400,
    (implicit_attention, "MAX_DECAYS_HELD"): 16, (implicit_attention, "MAX_ROW_NUMBERS"): 30,
    (pooled, "MAX_CELL_STATES_HELD"): 20, (pooled, "MAX_CELL_MATRIX_NUMBERS"): 20, (pooled, "MAX_PAIRS_HELD"): 20,
    (recurrence, "MAX_DECAYS_HELD"): 100, (ssd, "STEPS_PER_CHUNK"): 3, (ssd, "STEPS_PER_SEGMENT"): 6,
    (ssd, "STEPS_PER_SHORT_CHUNK"): 2, (survival, "MAX_DECAYS_HELD"): {"cpu": 50, "cuda": 50},
    (wide, "STEPS_PER_CHUNK"): 4, (wide, "STEPS_PER_SEGMENT"): 8,
}  # fmt: skip
REFUSALS = {(pooled, "MAX_EXACT_DELTA_LENGTH")}
"""Limits that are refused beyond, not sizes of pieces."""


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set every size of `SIZES` for one test."""
    for (module, name), size in SIZES.items():
        monkeypatch.setattr(module, name, size)
