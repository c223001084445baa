"""Mamba-2's scan by Triton kernels against the recurrence in float64: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from backends.interpreted import DEVICE, needs_triton
from ssmscope.backends.triton import ssd

pytestmark = needs_triton
NAMES = ("log_a", "b", "c", "x", "initial", "delta")


def draw(batch=2, length=37, heads=4, groups=2, width=5, state=7, seed=0) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator).to(DEVICE)

    return {
        "log_a": -5 * uniform(batch, length, heads) ** 3, "b": normal(batch, length, groups, state),
        "c": normal(batch, length, groups, state), "x": normal(batch, length, heads, width),
        "initial": normal(batch, heads, width, state), "delta": uniform(batch, length, heads),
    }  # fmt: skip


def reference(log_a, b, c, x, initial, delta):
    """Return y and the last H of H_t = a_t H_{t-1} + Δ_t x_t b_tᵀ, y_t = H_t c_t, step by step."""
    (batch, length, heads, width), (groups, state) = x.shape, b.shape[2:]
    b, c = (t.repeat_interleave(heads // groups, dim=2) for t in (b, c))
    H = x.new_zeros(batch, heads, width, state) if initial is None else initial
    outputs = []
    for t in range(length):
        written = x[:, t] if delta is None else delta[:, t, :, None] * x[:, t]
        H = log_a[:, t, :, None, None].exp() * H + written[..., None] * b[:, t, :, None, :]
        outputs.append((H * c[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, dim=1), H


def run(scan, terms, dtype=None):
    """Return y, the last state and the gradients of all terms for fixed random gradients of both outputs."""
    leaves = {n: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for n, t in terms.items()}
    y, last = scan(*leaves.values())
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(t.shape, generator=generator).bfloat16().to(t) for t in (y, last)]  # exact in all types
    present = {n: t for n, t in leaves.items() if t is not None}
    return {"y": y, "last": last} | dict(zip(present, torch.autograd.grad((y, last), present.values(), found)))


def agree(terms, tolerance=2e-6) -> None:
    exact = run(reference, terms, torch.float64)
    for name, value in run(ssd.scan, terms).items():
        error = (value.double() - exact[name]).abs().max() / exact[name].abs().max().clamp(min=1e-30)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


SHAPES = [
    (1, 1, 1, 1, 2, 2), (2, 63, 4, 2, 5, 7), (1, 64, 6, 1, 16, 64), (1, 65, 2, 2, 80, 150), (1, 130, 2, 1, 40, 20),
    (1, 66, 9, 1, 5, 7),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_recurrence(shape):
    agree(draw(*shape))


@pytest.mark.parametrize("absent", [("initial",), ("delta",), ("initial", "delta")], ids=" and ".join)
def test_without_initial_state_or_delta(absent):
    agree(draw(1, 66, 2, 1) | dict.fromkeys(absent))


@pytest.mark.parametrize("log_a", [0.0, 0.2, -90.0, -1e6], ids=["none", "growth", "strong", "underflow"])
def test_extreme_decays(log_a):
    terms = draw(1, 67, 1, 1)
    terms["log_a"][:, ::2] = log_a
    agree(terms)


def test_a_decay_of_zero_wipes_the_state():
    terms = draw(1, 90, 2, 1)
    wiped, cut = dict(terms), {name: t[:, 40:] for name, t in terms.items() if name != "initial"} | {"initial": None}
    wiped["log_a"] = terms["log_a"].index_fill(1, torch.tensor(40, device=DEVICE), -torch.inf)
    y, last = ssd.scan(*wiped.values())
    y_cut, last_cut = reference(*(None if cut[n] is None else cut[n].double() for n in NAMES))
    torch.testing.assert_close(y[:, 40:].double(), y_cut, rtol=0, atol=2e-6 * float(y_cut.abs().max()))
    torch.testing.assert_close(last.double(), last_cut, rtol=0, atol=2e-6 * float(last_cut.abs().max()))


def test_small_digits_survive_after_long_sums():
    """Differences of sums of log-decays are exact to float32 although the sums themselves are large."""
    terms = draw(1, 64, 1, 1)
    terms["log_a"] = torch.full_like(terms["log_a"], -1e-3)
    terms["log_a"][:, 20] = -3e3
    terms["initial"] = None
    agree({name: t if name in ("log_a", "initial") else t.abs() for name, t in terms.items()}, 5e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_terms_are_read_as_they_are(dtype):
    terms = draw(1, 66, 2, 1, 16, 16)
    mixed = terms | {name: terms[name].to(dtype) for name in ("b", "c", "x")}
    found, exact = run(ssd.scan, mixed), run(reference, mixed, torch.float64)
    for name, value in found.items():
        assert value.dtype == (dtype if name in ("b", "c", "x", "y") else torch.float32)
        rounding = torch.finfo(value.dtype).eps if value.dtype == dtype else 0
        # What is of 16 bits is rounded once, when it is written.
        assert (value.double() - exact[name]).abs().max() <= (rounding + 2e-6) * exact[name].abs().max(), name


def test_views_need_no_contiguous_copies():
    terms = draw(2, 66, 2, 2, 16, 8)
    sizes = [terms[n][0, 0].numel() for n in ("x", "b", "c")]
    together = torch.cat([terms[n].flatten(2) for n in ("x", "b", "c")], dim=-1)
    views = dict(zip(("x", "b", "c"), together.split(sizes, dim=-1)))
    views = {name: view.unflatten(-1, terms[name].shape[2:]) for name, view in views.items()}
    views["log_a"], views["delta"] = (terms[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("log_a", "delta"))
    assert not any(view.is_contiguous() for view in views.values())
    plain, viewed = ssd.scan(*terms.values()), ssd.scan(*(terms | views).values())
    strided = ssd.scan(*(terms | {"x": terms["x"].mT.contiguous().mT}).values())  # copied, as its rows are apart
    for a, *others in zip(plain, viewed, strided):
        assert all(torch.equal(a, other) for other in others)


@pytest.mark.parametrize(("precision", "tolerance"), [("high", 5e-3), ("medium", 4e-2)])
def test_products_follow_torchs_precision(precision, tolerance):
    terms = draw(1, 66, 1, 1, 20, 24)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        agree(terms, tolerance)
        if DEVICE == "cuda" or precision == "medium":  # the interpreter multiplies in float32
            with pytest.raises(AssertionError, match="relative error"):
                agree(terms, 1e-5)
    finally:
        torch.set_float32_matmul_precision(before)


def test_batching_and_slabs_change_no_bit(monkeypatch):
    terms = draw(2, 66, 1, 1, 5, 7)
    whole, again = run(ssd.scan, terms), run(ssd.scan, terms)
    alone = ssd.scan(*(t[1:2] for t in terms.values()))
    assert torch.equal(alone[0], whole["y"][1:2]) and torch.equal(alone[1], whole["last"][1:2])
    monkeypatch.setattr(ssd, "MAX_KEPT_BYTES", 1)
    slabs = run(ssd.scan, terms)
    assert all(torch.equal(whole[name], again[name]) and torch.equal(whole[name], slabs[name]) for name in whole)


@pytest.mark.parametrize("name", ["x", "delta"])
def test_only_the_gradients_that_are_asked_for(name):
    terms = draw(1, 66, 2, 1)
    exact = run(lambda *leaves: (reference(*leaves)[0], leaves[4] * 0), terms, torch.float64)[name]
    terms[name].requires_grad_()
    y, _ = ssd.scan(*terms.values())
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(y))
    assert (terms[name].grad - exact).abs().max() <= 2e-6 * exact.abs().max() and terms["b"].grad is None


def test_fits():
    terms = draw()
    assert ssd.fits(*terms.values()) and ssd.fits(*(terms | {"initial": None, "delta": None}).values())
    assert not ssd.fits(*(terms | {"x": terms["x"].double()}).values())
    assert not ssd.fits(*(terms | {"x": terms["x"][:, :0]}).values()) and not ssd.fits(*draw(state=257).values())
