"""What the tests of scan kernels share: terms, the definition in float64, and checks of scans with a decay per state.

Triton's kernels are tested as compiled on a machine with a GPU; elsewhere the same kernels in triton's interpreter,
where triton is installed and TRITON_INTERPRET=1 is set (`make test-kernels`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exhaustive import ALL
from torch import Tensor

from ssmscope import ops
from ssmscope.ops import Recurrence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "b", "c", "initial", "delta", "A")
Terms = dict[str, Tensor]
slow_interpreted = pytest.mark.skipif(
    DEVICE == "cpu" and not ALL, reason="slow where it is interpreted: SSMSCOPE_EXHAUSTIVE=all runs it"
)
"""The mark of tests, or of one's values, that only a GPU and an exhaustive run try."""


def triton_only(module: Any, smallest: Callable[[], object], library: Callable[[], Any] | None = None) -> Any:
    """The mark of tests that need a module's Triton kernels, with the reason where there are none.

    Args:
        module: says `why_not` they cannot run on the GPU.
        smallest: runs a kernel, to see whether the interpreter works.
        library: gives the module with the kernels, or why there is none; by default `module.kernels.found`.
    """
    why = module.why_not() if DEVICE == "cuda" else _not_interpreted((library or module.kernels.found)(), smallest)
    return pytest.mark.skipif(why is not None, reason=f"no Triton kernels here: {why}")


def _not_interpreted(library: Any, smallest: Callable[[], object]) -> str | None:
    if isinstance(library, str):
        return library
    if not library.INTERPRETED:
        return "no GPU; with TRITON_INTERPRET=1 the kernels are interpreted"
    try:
        smallest()
    except library.triton.runtime.errors.InterpreterError as error:  # that of triton 3.6.0 needs numpy below 2.4
        return f"triton's interpreter does not work here: {error}"
    return None


def says_that_triton_is_absent(monkeypatch: pytest.MonkeyPatch, kernels: Any, package: Any) -> None:
    """Without triton the kernels say why they are not there."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, f"{package.__name__}.fused_kernels", raising=False)
    monkeypatch.delattr(package, "fused_kernels", raising=False)
    why = kernels.look()
    assert isinstance(why, str) and why.startswith("triton cannot be imported")


def near(ours: Tensor, exact: Tensor, tolerance: float = 1e-5) -> None:
    """In float32, and as near as a share of the largest value; there may be none."""
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    if exact.numel():
        assert (ours - exact).abs().max() <= tolerance * exact.abs().max()


def gradients(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    """Of a weighted sum of a scan's output and the squares of its final state."""
    y, final = out[:2]
    weights = torch.sin(torch.arange(y.numel(), dtype=torch.float64, device=y.device)).view(y.shape)
    return torch.autograd.grad((y * weights).sum() + (final**2).sum(), list(inputs), materialize_grads=True)


# ---- scans of one channel a head, with a decay per state


def draw(
    batch: int = 2,
    length: int = 37,
    heads: int = 6,
    groups: int = 1,
    state: int = 4,
    *,
    seed: int = 0,
    device: str = DEVICE,
) -> Terms:
    """Random terms of a scan."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    return {
        "x": normal(batch, length, heads, 1),
        "b": normal(batch, length, groups, state),
        "c": normal(batch, length, groups, state),
        "initial": normal(batch, heads, 1, state),
        "delta": 5 * torch.rand(batch, length, heads, generator=g).to(device) ** 3,
        "A": -16 * torch.rand(heads, state, generator=g).to(device),
    }


def leaves_of(terms: Terms) -> Terms:
    return {name: term.requires_grad_() for name, term in terms.items()}


def definition(terms: Terms, *, expected: bool = False) -> ops.Scan:
    """In float64."""
    t = {name: value.double() for name, value in terms.items()}
    initial = t.pop("initial")
    return ops.scan_reference(Recurrence(**t, expected=expected), initial)


class ScanChecks:
    """Checks of a scan.

    Attributes:
        run: `run(terms, expected=, retention=)` gives y, the final state, and the retention or None.
        terms: batch, length, heads, groups and state of random terms, and their device.
    """

    run: Callable[..., tuple[Any, ...]]
    terms: dict[str, Any]

    def are_those_of_the_definition(self, terms: Terms, expected: bool) -> None:
        """Values and gradients."""
        y, final, kept = self.run(terms, expected=expected, retention=True)
        exact = definition(terms, expected=expected)
        near(y, exact.y)
        near(final, exact.state)
        near(kept, exact.retention, 1e-6)
        assert self.run(terms)[2] is None

        leaves = leaves_of(terms)
        again = self.run(leaves, expected=expected, retention=True)
        assert all(map(torch.equal, (y, final, kept), again))
        self.same_gradients(again, definition(leaves, expected=expected), leaves)

    @staticmethod
    def same_gradients(out: Any, exact: ops.Scan, leaves: Terms) -> None:
        inputs = [leaves[name] for name in NAMES]
        for name, ours, slow in zip(NAMES, gradients(out, inputs), gradients(exact, inputs)):
            assert torch.isfinite(ours).all(), name
            near(ours, slow.double())

    def test_any_strides(self) -> None:
        terms = draw(**self.terms)
        state, heads = terms["b"].shape[-1], terms["x"].shape[2]
        plain = self.run(terms, retention=True)
        strided = dict(terms)
        for name in ("x", "delta"):  # channels first, as a convolution leaves them
            strided[name] = terms[name].transpose(1, 2).contiguous().transpose(1, 2)
        strided["b"], strided["c"] = torch.cat([terms["b"], terms["c"]], dim=-1).split(state, dim=-1)
        for name in ("A", "initial"):
            strided[name] = terms[name].transpose(0, -1).contiguous().transpose(0, -1)
        assert all(map(torch.equal, plain, self.run(strided, retention=True)))
        one_step = terms["delta"][:, :, :1]
        spread = {**terms, "delta": one_step.expand(-1, -1, heads).requires_grad_()}
        held = {**terms, "delta": one_step.repeat(1, 1, heads).requires_grad_()}
        grads = [torch.autograd.grad(self.run(t)[0].sum(), t["delta"])[0] for t in (spread, held)]  # of stride 0
        assert torch.equal(*grads)

    def test_extreme_decays(self) -> None:
        terms = draw(**self.terms)
        terms["delta"][:, ::3] = 0.0  # decay 1
        terms["delta"][:, 1::3] = 1e6  # decay 0
        terms["A"][:, 0] = 0.0
        leaves = leaves_of(terms)
        out, exact = self.run(leaves, retention=True), definition(leaves)
        near(out[0], exact.y)
        near(out[2], exact.retention, 1e-6)
        self.same_gradients(out, exact, leaves)

    def test_gradients_show_nan(self) -> None:
        terms = leaves_of(draw(**self.terms))
        y = self.run(terms)[0]
        at = torch.zeros_like(y)
        at[0, 10, 3] = torch.nan
        grads = dict(zip(NAMES, torch.autograd.grad(y, [terms[n] for n in NAMES], at)))
        assert grads["x"][0, :11, 3].isnan().all() and grads["x"][0, 11:, 3].isfinite().all()
        assert grads["delta"][0, :, 2].isfinite().all() and grads["b"][0, :11].isnan().all()

    def is_what_ssm_scan_runs(self, terms: Terms, expected: bool) -> None:
        parts = {name: terms[name] for name in ("x", "b", "c", "delta", "A")}
        r = Recurrence(**parts, D=terms["x"][0, 0, :, 0].cos(), expected=expected)
        ours = ops.scan(r, terms["initial"], retention=True)
        for a, b in zip(ours, ops.scan_reference(r.to(torch.float64), terms["initial"])):
            near(a, b)
        leaves = [t.requires_grad_() for t in (r.x, r.D)]
        exact = ops.scan_reference(r.to(torch.float64), terms["initial"])
        for a, b in zip(gradients(ops.scan(r, terms["initial"]), leaves), gradients(exact, leaves)):
            near(a, b.double())
