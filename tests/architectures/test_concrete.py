"""The mean of a relaxed gate: its closed form, its limits, its symmetry, a sample's mean."""

import itertools

import pytest
import torch
from ssmscope.zoo.baleen import MAX_LOGIT, mean_log_gate

LOGITS = torch.linspace(-30, 30, 301, dtype=torch.float64) + 0.01234


def mean_gate(logit: torch.Tensor, tau: float) -> torch.Tensor:
    return mean_log_gate(logit, tau).exp()


def test_at_tau_1_it_is_the_closed_form():
    p = LOGITS.exp()
    exact = p * (p - 1 - p.log()) / (p - 1) ** 2
    assert ((mean_gate(LOGITS, 1.0) / exact - 1).abs() < 1e-7).all()
    assert mean_gate(torch.tensor(0.99, dtype=torch.float64).logit(), 1.0).item() == pytest.approx(0.9628, abs=5e-5)


@pytest.mark.parametrize("tau", [0.3, 0.5, 2.0])
def test_it_is_the_mean_of_samples(tau):
    uniform = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000  # the noise's quantiles
    for logit in (-4.0, -0.5, 0.0, 2.0):
        sampled = torch.sigmoid((logit + uniform.logit()) / tau).mean()
        assert mean_gate(torch.tensor(logit, dtype=torch.float64), tau).item() == pytest.approx(
            float(sampled), abs=1e-5
        )


def test_hard_gates_are_kept_with_the_keep_probability():
    far = [(mean_gate(LOGITS, tau) - torch.sigmoid(LOGITS)).abs().max() for tau in (0.2, 0.1, 0.05)]
    assert far[2] < 1e-3 and all(3.5 < more / less < 4.5 for more, less in itertools.pairwise(far))  # as τ²


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_what_is_dropped_at_a_logit_is_kept_at_its_negative(tau):
    assert torch.allclose(mean_gate(LOGITS, tau) + mean_gate(-LOGITS, tau), torch.ones_like(LOGITS), atol=1e-12)
    assert (mean_log_gate(LOGITS, tau).diff() > 0).all()


def test_its_logarithm_keeps_its_digits_at_both_ends():
    far = torch.tensor([-80.0, 40.0], dtype=torch.float64)
    low, high = mean_log_gate(far, 1.0).tolist()
    assert low == pytest.approx(-80 + torch.log(torch.tensor(79.0)).item(), abs=1e-3)  # p (−1 − ln p)
    assert -high == pytest.approx(39 * torch.tensor(-40.0, dtype=torch.float64).exp().item(), rel=1e-3)
    assert torch.isfinite(mean_log_gate(torch.tensor([-1e4, 1e4, MAX_LOGIT, -MAX_LOGIT]), 0.5)).all()


def test_its_gradient_is_that_of_its_values():
    logit = torch.tensor([3.3, -1.2, 0.07, -17.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: mean_log_gate(t, 0.7), logit)


def test_the_largest_logits_are_in_the_table():
    """Logits beyond the table are as its largest, p (−1 − ln p) at τ = 1."""
    sizes = torch.tensor([MAX_LOGIT - 0.15, MAX_LOGIT - 0.05, MAX_LOGIT, MAX_LOGIT + 5], dtype=torch.float64)
    exact = -sizes.clamp(max=MAX_LOGIT) + (sizes.clamp(max=MAX_LOGIT) - 1).log()
    assert torch.allclose(mean_log_gate(-sizes, 1.0), exact, rtol=0, atol=1e-9)
    assert torch.allclose(mean_log_gate(sizes, 1.0), -exact.exp(), rtol=1e-9, atol=0)
