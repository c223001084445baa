"""A small model of the generalisation theorem, its norms once more in numpy, and sums as exact fractions."""

import math
from fractions import Fraction

import numpy as np
import torch
from ssmscope.core.model import Model
from ssmscope.zoo.selective import SelectiveSSMConfig, SelectiveSSMForSequenceClassification


def log_fraction(number: Fraction) -> float:
    """ln of a positive rational of any size, to full precision near 1 too."""
    if abs(number - 1) < Fraction(1, 2):
        return math.log1p(float(number - 1))
    shift = number.numerator.bit_length() - number.denominator.bit_length()
    return math.log(float(number * Fraction(2) ** -shift)) + shift * math.log(2)


def exact_sums(rho: Fraction, length: int) -> tuple[Fraction, Fraction]:
    powers = [rho**t for t in range(length)]
    return sum(powers, Fraction()), sum((t * power for t, power in enumerate(powers)), Fraction())


def make(channels=3, state=2, tokens=4, rows=1, seed=0, abscissa=-0.2, scale=0.6) -> Model:
    """A small random classifier of the theorem whose numbers stay small enough for plain formulas."""
    torch.manual_seed(seed)
    config = SelectiveSSMConfig(tokens, channels, state, binary=rows == 1, num_labels=max(rows, 2))
    module = SelectiveSSMForSequenceClassification(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape))
        module.ssm.A.copy_(abscissa - torch.rand(channels, state))
        module.ssm.A[0, 0] = abscissa
    return Model(module, None, "small")


def numbers(model: Model, row: int = 0) -> dict[str, float]:
    """The norms once more, in numpy."""
    module = model.module
    A, W_B, W_C, q = (
        t.detach().double().numpy() for t in (module.ssm.A, module.ssm.W_B, module.ssm.W_C, module.ssm.q_delta)
    )
    w, table = module.head.weight.detach().double().numpy()[row], module.embedding.weight.detach().double().numpy()
    found = {
        "B_u": max(math.sqrt(sum(x * x for x in u)) for u in table),
        "B_B": math.sqrt(max(np.linalg.eigvalsh(W_B.T @ W_B))), "B_C": math.sqrt(max(np.linalg.eigvalsh(W_C.T @ W_C))),
        "B_w": math.sqrt(sum(w**2)), "B_q": math.sqrt(sum(q**2)), "B_A": max(abs(A).ravel()),
        "p": module.ssm.p_delta.item(), "s": max(A.ravel()), "N": A.shape[1], "d": A.shape[0],
    }  # fmt: skip
    for name, W in (("M_B", W_B), ("M_C", W_C), ("M_w", w), ("M_q", q), ("M_A", A)):
        found[name] = sum(abs(W).ravel())
    return found
