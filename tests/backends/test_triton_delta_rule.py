"""The delta rule's Triton kernels against the recurrence in float64: on a GPU, else in Triton's interpreter."""

from typing import Any

import pytest
import torch
from backends.interpreted import DEVICE, needs_triton
from exhaustive import in_turns
from torch import Tensor

pytest.importorskip("triton")
from ssmscope.backends.triton import delta_rule  # noqa: E402

pytestmark = needs_triton
TOLERANCE = 5e-6  # relative to the largest value


def make_terms(length: int, seed: int = 0, **sizes: Any) -> list[Tensor]:
    """log_a, β, b, c, x and a first memory; keys have unit norm and β is in (0, 1)."""
    sizes = {"batch": 1, "heads": 2, "groups": 1, "width": 8, "state": 8, "by_state": False} | sizes
    batch, heads, state = sizes["batch"], sizes["heads"], sizes["state"]
    g = torch.Generator().manual_seed(seed)
    log_a = -0.1 * torch.rand(batch, length, heads, state if sizes["by_state"] else 1, generator=g)
    beta = torch.rand(batch, length, heads, generator=g)
    b, c = torch.randn(2, batch, length, sizes["groups"], state, generator=g)
    x = torch.randn(batch, length, heads, sizes["width"], generator=g)
    initial = torch.randn(batch, heads, sizes["width"], state, generator=g)
    return [t.to(DEVICE) for t in (log_a, beta, b / b.norm(dim=-1, keepdim=True), c, x, initial)]


def by_definition(log_a: Tensor, beta: Tensor, b: Tensor, c: Tensor, x: Tensor, H: Tensor) -> tuple[Tensor, ...]:
    """y, the final memory and what is left of every key, step by step in float64."""
    log_a, beta, b, c, x, H = (t.double().cpu() for t in (log_a, beta, b, c, x, H))
    b, c = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (b, c))
    eye = torch.eye(b.shape[-1], dtype=b.dtype)
    transitions = log_a.exp().unsqueeze(-1) * (eye - beta[..., None, None] * b[..., :, None] * b[..., None, :])
    outputs = []
    for t in range(x.shape[1]):
        H = H @ transitions[:, t] + beta[:, t, :, None, None] * x[:, t, :, :, None] * b[:, t, :, None, :]
        outputs.append((H @ c[:, t, :, :, None]).squeeze(-1))
    after, left = eye.expand_as(transitions[:, 0]), []
    for t in reversed(range(x.shape[1])):
        left.append((b[:, t, :, None, :] @ after).squeeze(-2))
        after = transitions[:, t] @ after
    return torch.stack(outputs, 1), H, torch.stack(left[::-1], 1)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found.double().cpu() - expected).abs().max() / expected.abs().max()).item()


def check(terms: list[Tensor], tolerance: float = TOLERANCE) -> None:
    y, final, left = by_definition(*terms)
    found_y, found_final = delta_rule.scan(*terms)
    assert found_y.dtype == terms[4].dtype and found_final.dtype == terms[5].dtype and error(found_y, y) < tolerance
    assert error(found_final, final) < tolerance
    assert error(delta_rule.keys_left(*terms[:3]), left) < TOLERANCE


@pytest.mark.parametrize(("length", "by_state"), in_turns([1, 31, 33, 64, 130], [True, False]))
def test_lengths(length, by_state):
    check(make_terms(length, heads=1, by_state=by_state))


@pytest.mark.parametrize(
    ("sizes", "by_state"),
    in_turns([(1, 4, 2, 20, 24), (2, 3, 3, 70, 1), (2, 1, 1, 1, 150), (1, 2, 1, 64, 128)], [False, True]),
)
def test_sizes(sizes, by_state):
    sizes = dict(zip(("batch", "heads", "groups", "width", "state"), sizes, strict=True))
    check(make_terms(40, by_state=by_state, **sizes))


@pytest.mark.parametrize("by_state", [False, True])
def test_strong_decay(by_state):
    """Chunks lose far more than float32 can hold, next to steps that lose little, and one step forgets everything."""
    terms = make_terms(100, heads=1, by_state=by_state)
    terms[0][:, ::3] *= 1000
    terms[0][:, 5] = -5000.0
    terms[0][:, 70] = -torch.inf
    check(terms)


@pytest.mark.parametrize("norm, beta", [(1.0, 1.0), (0.9, 2.0)])
def test_equal_keys_written_at_full_strength(norm, beta):
    """The inverse is bounded while powers of its matrix grow like binomials, which a sum over powers cannot cancel."""
    terms = make_terms(70)
    terms[1][:] = beta
    terms[2][:] = norm * (terms[2][:, :1] + 1e-3 * terms[2])
    terms[2] /= terms[2].norm(dim=-1, keepdim=True) / norm
    terms[0] *= 0.01
    check(terms)


def test_growing_states():
    terms = make_terms(70, heads=1, by_state=True)
    terms[0] *= -0.3
    check(terms)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_16_bits_round_the_output_alone(dtype, tolerance):
    terms = [t.to(dtype) for t in make_terms(70)]
    check([*terms[:5], terms[5].float()], tolerance)


def test_views():
    terms = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in make_terms(40, batch=2, groups=2)]
    terms[3] = terms[3].repeat_interleave(2, dim=-1)[..., ::2]
    terms[4] = terms[4][:, :, :1].expand_as(terms[4])
    check(terms)


def test_segments_change_nothing(monkeypatch):
    """Chunks that are solved in several rounds give the same numbers as all in one."""
    terms = make_terms(300, heads=1, batch=2)
    whole = *delta_rule.scan(*terms), delta_rule.keys_left(*terms[:3])
    monkeypatch.setattr(delta_rule, "MAX_SCRATCH_BYTES", 75_000)
    parts = *delta_rule.scan(*terms), delta_rule.keys_left(*terms[:3])
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_gradients_and_other_types_are_left_to_torch():
    terms = make_terms(4)
    assert not delta_rule.fits(*[t.double() for t in terms]) and not delta_rule.fits(*make_terms(4, state=257))
    assert not delta_rule.fits(*[t[:, :0] for t in terms[:5]], terms[5])
    terms[4].requires_grad_()
    assert not delta_rule.fits(*terms)
    with torch.no_grad():
        assert delta_rule.fits(*terms)
