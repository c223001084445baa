"""Limits of scores: the values that a score can have, and whether it is a share."""

from __future__ import annotations

import math
from typing import NamedTuple


class Limits(NamedTuple):
    """Lowest and highest value of a score; `is_share` for one that may be written in percent."""

    low: float = -math.inf
    high: float = math.inf
    is_share: bool = False

    @property
    def told(self) -> str:
        """Limits in words: "a share from 0 to 1"."""
        ends = f"from {self.low:g} to {self.high:g}"
        if math.isinf(self.low):
            ends = f"of at most {self.high:g}"
        elif math.isinf(self.high):
            ends = f"of at least {self.low:g}"
        return f"a {'share' if self.is_share else 'number'} {ends}"


ANY, NOT_NEGATIVE, CORRELATION = Limits(), Limits(0), Limits(-1, 1)
SHARE, SHARE_DIFFERENCE = Limits(0, 1, True), Limits(-1, 1, True)
DROP = Limits(high=1, is_share=True)
"""Limits of 1 − accuracy / clean accuracy, which is below 0 where the accuracy rises."""
SHARES = ("acc", "exact")
"""Beginnings of names of measures that are shares, of lm-evaluation-harness."""
