"""The options of the generalisation bound, which a table of checkpoints has too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from ssmscope.api.options import Range

Delta = Annotated[float, "δ, the probability with which the bound may fail.", Range(0, 1, strict=True)]
LossBound = Annotated[float, "c_l, the largest loss.", Range(0, strict=True)]
Lipschitz = Annotated[float, "l, the loss's Lipschitz constant.", Range(0, strict=True)]
Lengths = Annotated[Sequence[int] | None, "At which T the curves have ln C; else 41, up to 10,000 or 10 T.", Range(1)]
