"""Steps of the generalisation bound's proof (the paper's appendices C to E), on random and on extreme models."""

import math

import numpy as np
import pytest
from ssmscope.probes.bound.terms import log_lower_bound, log_sums, softplus

SSM = dict[str, np.ndarray]
"""Parameters A (channels, state), W_B and W_C (state, channels), p (), q and w (channels,)."""


def drawn(random: np.random.Generator, abscissa: float, channels: int = 4, state: int = 3) -> SSM:
    A = abscissa - random.random((channels, state))
    A[:, 0] = abscissa
    W_B, W_C = random.normal(size=(2, state, channels))
    q, w = random.normal(size=(2, channels))
    return {"A": A, "W_B": W_B, "W_C": W_C, "p": np.array(random.normal()), "q": q, "w": w}


def nearby(model: SSM, random: np.random.Generator, names: str, size: float) -> SSM:
    """Return the model with some parameters moved, none of A upwards."""
    moved = {
        name: value + size * random.normal(size=value.shape) for name, value in model.items() if name in names.split()
    }
    if "A" in moved:
        moved["A"] = np.minimum(moved["A"], model["A"].max())
    return model | moved


def run(model: SSM, u: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return ∏ e^{Δ A} of the last t steps (time, channels, state), x_T (channels, state) and the output wᵀ y_T."""
    delta = np.logaddexp(0, model["p"] + u @ model["q"])
    passed = np.concatenate([[0.0], np.cumsum(delta[:0:-1])])
    products = np.exp(passed[:, None, None] * model["A"])
    writes = delta[:, None, None] * u[:, :, None] * (u @ model["W_B"].T)[:, None, :]
    x = (products[::-1] * writes).sum(0)
    return products, x, float(model["w"] @ x @ model["W_C"] @ u[-1])


def bounds(model: SSM, other: SSM, u: np.ndarray) -> tuple[float, float]:
    """Return the right side of Lemma E.5 without t ρ^t, and that of Lemma E.7, with the distances of two models as
    covers and norms that bound both."""
    B_u = float(np.linalg.norm(u, axis=1).max())
    B_B, B_C = (max(np.linalg.norm(one[name], 2) for one in (model, other)) for name in ("W_B", "W_C"))
    B_w, B_q, B_A = (
        max(np.linalg.norm(one[name].ravel(), kind) for one in (model, other))
        for name, kind in (("w", 2), ("q", 2), ("A", np.inf))
    )
    M_delta = softplus(max(float(one["p"]) for one in (model, other)) + B_q * B_u)
    S1, S2 = (math.exp(each) for each in log_sums(log_rho(model, other, u), len(u)))
    _, x, _ = run(other, u)
    apart = {name: model[name] - other[name] for name in model}
    eps_A, eps_step = abs(apart["A"]).max(), abs(apart["p"]) + abs(u @ apart["q"]).max()
    eps_B, eps_C = np.linalg.norm(u @ apart["W_B"].T, axis=1).max(), np.linalg.norm(x @ apart["W_C"])
    through = B_w * B_C * B_u
    output = through * B_u * M_delta * S1 * eps_B + through * B_B * B_u**2 * M_delta**2 * S2 * eps_A
    output += through * B_B * B_u**2 * (S1 + M_delta * B_A * S2) * eps_step
    output += B_w * B_u * eps_C + abs(apart["w"] @ x @ other["W_C"] @ u[-1])
    return M_delta * eps_A + B_A * eps_step, output


def log_rho(model: SSM, other: SSM, u: np.ndarray) -> float:
    """Return s_A times the step that makes most of it, over both models."""
    s_A, reach = max(one["A"].max() for one in (model, other)), np.linalg.norm(u, axis=1).max()
    sign = 1 if s_A > 0 else -1
    steps = [softplus(float(one["p"]) + sign * float(np.linalg.norm(one["q"])) * reach) for one in (model, other)]
    return s_A * (max(steps) if s_A > 0 else min(steps))


@pytest.mark.parametrize("abscissa", [-0.3, 0.0, 0.05])
def test_a_model_nearby_answers_nearby(abscissa: float) -> None:
    """Lemmas E.5 and E.7, which put C.1 to C.8, E.3, E.4 and E.6 together, whatever is moved and how far."""
    random = np.random.default_rng(0)
    for names in ("A", "W_B", "W_C", "p", "q", "w", "A W_B W_C p q w"):
        for size in (1e-4, 0.1, 1.0):
            u = random.normal(size=(12, 4))
            model = drawn(random, abscissa)
            other = nearby(model, random, names, size)
            step, output = bounds(model, other, u)
            (products, _, y), (others, _, z) = run(model, u), run(other, u)
            apart, rho = abs(products - others).reshape(12, -1).max(1), math.exp(log_rho(model, other, u))
            assert (apart <= np.arange(12) * rho ** np.arange(12) * step * (1 + 1e-9)).all()
            assert abs(y - z) <= output * (1 + 1e-9)


@pytest.mark.parametrize("name", ["A", "W_B", "W_C", "p", "w"])
def test_no_term_of_the_bound_is_too_large(name: str) -> None:
    """With one channel and one state, a long step and s_A > 0 the two sides of Lemma E.7 agree as a change vanishes."""
    model = {name: np.full((1, 1), value) for name, value in (("A", 0.01), ("W_B", 0.7), ("W_C", 1.3))}
    model |= {"p": np.array(14.0), "q": np.zeros(1), "w": np.array([0.8])}
    other = model | {name: model[name] - 1e-6}
    u = np.full((7, 1), 1.5)
    assert abs(run(model, u)[2] - run(other, u)[2]) == pytest.approx(bounds(model, other, u)[1], rel=1e-4)


@pytest.mark.parametrize("s_A", [0.0, 0.2])
def test_the_lower_bound_holds_for_inputs_that_are_all_1_and_many_examples(s_A: float) -> None:
    """Theorem 4.1, on appendix G's models (Eq. 87; a step Δ = 1 needs p = ln(e − 1)): on equal inputs the complexity of
    all w y with |w| ≤ B_w is B_w |y| E|Σ σ| / m. For an odd m it is above the bound, for an even m below it, and for
    inputs that are all 0, which are in [−1, 1] too, it is 0."""
    B_w, length = 3.0, 10
    model = {"A": np.full((1, 1), math.log1p(s_A)), "W_B": np.ones((1, 1)), "W_C": np.ones((1, 1))}
    model |= {"p": np.array(math.log(math.e - 1)), "q": np.zeros(1), "w": np.ones(1)}
    reached = run(model, np.ones((length, 1)))[2]
    for m in (1, 2, 7, 8, 301, 400):
        signs = sum(math.comb(m, k) * abs(2 * k - m) for k in range(m + 1)) / 2**m
        complexity, bound = B_w * reached * signs / m, math.exp(log_lower_bound(s_A, B_w, length=length, examples=m))
        assert (complexity > bound) == (m % 2 == 1)
    assert complexity == pytest.approx(bound, rel=1e-3)
    assert run(model, np.zeros((length, 1)))[2] == 0
