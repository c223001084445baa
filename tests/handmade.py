"""Layers whose terms are drawn: distinct numbers everywhere, and large ones where nothing may be read; and the reach of
outputs whose norms are given by distance."""

from collections.abc import Sequence

import numpy as np
import torch
from ssmscope import ops
from ssmscope.core.trace import LayerTrace
from ssmscope.probes.influence.measure import Blocks
from ssmscope.probes.influence.reach import Reach, reach_of

WIDTH, STATE, HEADS, GROUPS, LENGTH = 3, 5, 4, 2, 3


def drawn_layer(
    seed: int, mask: list[list[int]] | None, *, turn: list[list[int]] | None = None, kind: str = "A"
) -> LayerTrace:
    """A layer of small numbers on two texts of three tokens; where the mask is 0 they are a thousand times as large.
    With `turn` it has two recurrences; steps that are not the second's own are far smaller or larger."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(2, LENGTH, *shape, generator=random, dtype=torch.float64)

    real = torch.tensor(mask or [[1] * LENGTH] * 2, dtype=torch.bool)
    recurrences: list[ops.Recurrence] = []
    for number in range(1 if turn is None else 2):
        terms = {"x": draw(HEADS, WIDTH), "b": draw(GROUPS, STATE), "c": draw(GROUPS, STATE)}
        delta = 0.2 + 5 * draw(HEADS).abs()
        for values in (*terms.values(), delta):
            values[~real] *= 1000
        if turn is not None and number:
            own = torch.tensor(turn) == number
            delta[~own] *= torch.tensor([1e-5, 1e5]).repeat(HEADS // 2).double()
        A = torch.tensor([[-0.2 - head - state / 9 for state in range(STATE)] for head in range(HEADS)]).double()
        A = A * (1 + number)
        if kind in ("A", "expected"):
            recurrences.append(ops.Recurrence(**terms, delta=delta, A=A, expected=kind == "expected"))
        elif kind == "log_a":
            recurrences.append(ops.Recurrence(**terms, log_a=delta.unsqueeze(-1) * A))
        else:
            recurrences.append(ops.DeltaRecurrence(**terms, log_a=-delta.unsqueeze(-1), beta=3 * draw(HEADS).abs()))
    turns = None if turn is None else torch.tensor(turn)
    return LayerTrace(torch.zeros(2, LENGTH, 7), tuple(recurrences), None if mask is None else real, turn=turns)


def steps_of(traces: Sequence[LayerTrace], place: int = 0) -> list[tuple[ops.Recurrence, int, int]]:
    """The recurrence, text and position of every step that it takes."""
    return [
        (trace.recurrences[place], text, t)
        for trace in traces
        for text in range(2)
        for t in range(LENGTH)
        if (trace.mask is None or trace.mask[text, t]) and (trace.turn is None or trace.turn[text, t] == place)
    ]


NOISE = 2.0**-20
"""Norms below it are noise."""


def text(*norms: float) -> Blocks:
    """One text's last position, from its own token on back."""
    row = np.array([norms[::-1]])
    return Blocks(np.array([len(norms) - 1]), row, np.zeros_like(row))


def reach(*texts: Sequence[float], **fit) -> Reach:
    return reach_of("output", [text(*norms) for norms in texts], exact=True, noise=NOISE, **fit)


def halving(count: int, start: float = 1.0) -> list[float]:
    return [start * 0.5**d for d in range(count)]
