"""The C kernels of attention matrices against the definition in float64, and where they stay away."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from exhaustive import ALL
from torch import Tensor

from ssmscope import ssm
from ssmscope.matrices import native, pooled, rows, triangle, whole
from ssmscope.matrices.terms import Around
from ssmscope.ssm import Recurrence

needs_kernel = pytest.mark.skipif(not native.available(), reason=f"no C kernels here: {native.why_not()}")


@pytest.fixture
def kernel_only(monkeypatch):
    """The torch path fails the test where terms are float32."""

    def guard(module, name):
        original = getattr(module, name)

        def run(*arguments):
            given = getattr(arguments[0], "b", arguments[0])  # a recurrence, or a tensor
            if given.dtype == torch.float32:
                pytest.fail("the torch path ran")
            return original(*arguments)

        monkeypatch.setattr(module, name, run)

    guard(triangle, "add")
    guard(rows, "_row")
    guard(pooled, "cells_of")


def draw(
    length: int, heads: int, state: int, groups: int = 1, *, batch: int = 1, reach: int = 0, expected: bool = False
) -> tuple[Recurrence, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(length + heads)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    r = Recurrence(
        normal(batch, length, heads, 1),
        normal(batch, length, groups, state),
        normal(batch, length, groups, state),
        delta=5 * torch.rand(batch, length, heads, generator=g) ** 3,
        A=-4 * torch.rand(heads, state, generator=g),
        D=normal(heads),
        expected=expected,
    )
    given = {"left": normal(batch, length, heads, 1), "taps": normal(batch, length, reach, heads, 1)}
    return r, given if reach else {}


def double(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.double() for n, t in given.items()}


def near(ours: Tensor, exact: Tensor, tolerance: float = 1e-5) -> None:
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    if exact.numel():
        assert (ours - exact).abs().max() <= tolerance * exact.abs().max().clamp(min=1e-30)


def in_cells(matrix: Tensor, cells: int) -> Tensor:
    edge = pooled.edges(matrix.shape[-1], cells)
    place = torch.nn.functional.one_hot(torch.repeat_interleave(torch.arange(cells), edge.diff()), cells).to(matrix)
    return place.mT @ matrix @ place / pooled.causal_pairs(edge).clamp(min=1)


SHAPES = [  # length, heads, state, groups of b and c, batch: around the kernels' blocks of 80, 48 and 64 steps
    (0, 20, 4, 1, 2),
    (1, 20, 4, 1, 1),
    (6, 33, 2, 1, 1),
    (47, 16, 16, 1, 1),
    (65, 17, 33, 1, 1),
    (80, 64, 4, 2, 2),
    (81, 50, 1, 1, 1),
    (129, 24, 5, 1, 1),
    (325, 70, 16, 1, 1),
]


@needs_kernel
@pytest.mark.parametrize("reach", [0, 1, 2, 4] if ALL else [0, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_those_of_float64(shape, reach, kernel_only):
    length, heads, state, groups, batch = shape
    r, given = draw(length, heads, state, groups, batch=batch, reach=min(reach, length))
    exact, precise = r.to(torch.float64), double(given)
    for absolute, skip in itertools.product((False, True), repeat=2):
        options = {"absolute": absolute, "skip": skip}
        near(ssm.attention(r, **options, **given), ssm.attention(exact, **options, **precise))
        if length:
            options["rows"] = [length // 2, length - 1]
            near(ssm.attention(r, **options, **given), ssm.attention(exact, **options, **precise))
    for cells in {1, length // 40, length // 7, length // 4} - {0}:
        if length // cells < max(reach, 1):
            continue
        for skip in (False, True):
            ours = ssm.pooled_attention(r, cells, skip=skip, **given)
            slow = ssm.pooled_attention(exact, cells, skip=skip, **precise)
            sizes = in_cells(ssm.attention(exact, absolute=True, skip=skip, **precise), cells)
            assert (ours - slow).abs().max() <= 1e-6 * sizes.max()


@needs_kernel
@pytest.mark.parametrize("groups", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("reach", [0, 3])
def test_groups(groups, reach, kernel_only):
    """Of several groups of b and c, of few channels, and of one."""
    r, given = draw(90, 64, 4, 2, reach=reach)
    exact, precise = r.to(torch.float64), double(given)
    for options in ({}, {"absolute": True, "skip": True}, {"rows": [80]}):
        slow = ssm.attention(exact, groups=groups, **options, **precise)
        near(ssm.attention(r, groups=groups, **options, **given), slow)
    ours = ssm.pooled_attention(r, 9, groups=groups, skip=True, **given)
    near(ours, ssm.pooled_attention(exact, 9, groups=groups, skip=True, **precise))


@needs_kernel
@pytest.mark.parametrize("reach", [0, 3])
def test_expected_decays(reach, kernel_only):
    r, given = draw(150, 20, 3, reach=reach, expected=True)
    exact, precise = r.to(torch.float64), double(given)
    for options in ({}, {"absolute": True}, {"rows": [149]}):
        near(ssm.attention(r, **options, **given), ssm.attention(exact, **options, **precise))
    near(ssm.pooled_attention(r, 9, **given), ssm.pooled_attention(exact, 9, **precise))


@needs_kernel
def test_wide_heads_that_nothing_stands_around(kernel_only):
    """A decay per state of a head of width 3: one matrix a head, from the mean of its D."""
    r, _ = draw(90, 20, 4)
    wide = replace(r, x=r.x.expand(-1, -1, -1, 3), D=torch.randn(20, 3))
    near(ssm.attention(wide, skip=True), ssm.attention(wide.to(torch.float64), skip=True))
    near(ssm.pooled_attention(wide, 7, skip=True), ssm.pooled_attention(wide.to(torch.float64), 7, skip=True))


@needs_kernel
def test_any_strides(kernel_only):
    r, given = draw(100, 40, 8, reach=4)
    projected = torch.cat([r.b, r.c], dim=-1)
    b, c = projected.split(8, dim=-1)
    across = r.delta.transpose(1, 2).contiguous().transpose(1, 2)  # channels first, as a convolution leaves them
    strided = replace(r, b=b, c=c, delta=across, A=r.A.T.contiguous().T)
    moved = {n: t.transpose(1, -2).contiguous().transpose(1, -2) for n, t in given.items()}
    for absolute in (False, True):
        one = ssm.attention(r, absolute=absolute, **given)
        assert torch.equal(one, ssm.attention(strided, absolute=absolute, **moved))
    assert torch.equal(ssm.attention(r, rows=[70]), ssm.attention(strided, rows=[70]))
    assert torch.equal(ssm.pooled_attention(r, 9, **given), ssm.pooled_attention(strided, 9, **moved))
    same_taps = given["taps"][:, :1].expand(-1, 100, -1, -1, -1)  # a convolution's are the same at every step
    held = same_taps.contiguous()
    assert torch.equal(ssm.attention(r, taps=same_taps), ssm.attention(r, taps=held))


@needs_kernel
def test_the_number_of_threads_changes_nothing(kernel_only):
    r, given = draw(400, 100, 16, reach=4)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found = [ssm.attention(r, **given), ssm.attention(r, absolute=True), ssm.attention(r, rows=[390])]
            results.append([*found, ssm.pooled_attention(r, 100, **given)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert torch.equal(a, b)


@needs_kernel
def test_extreme_steps(kernel_only):
    r, given = draw(200, 32, 4, reach=4)
    r.delta[:, ::3] = 0.0  # nothing written, nothing lost
    r.delta[:, 1::3] = 1e6  # everything lost
    r.A[:, 0] = 0.0
    exact, precise = r.to(torch.float64), double(given)
    for options in ({}, {"absolute": True}, {"rows": [199]}):
        near(ssm.attention(r, **options, **given), ssm.attention(exact, **options, **precise))
    near(ssm.pooled_attention(r, 20, **given), ssm.pooled_attention(exact, 20, **precise))


@needs_kernel
@pytest.mark.parametrize("name", ["b", "c", "delta"])
def test_what_is_not_finite_shows(name, kernel_only):
    r, _ = draw(90, 32, 4)
    getattr(r, name)[0, 40] = torch.nan
    for absolute in (False, True):
        matrix = ssm.attention(r, absolute=absolute)
        assert matrix[0, 0, 40, 40].isnan() and matrix[0, 0, :40, :40].isfinite().all()
    assert ssm.pooled_attention(r, 9)[0, 0, 4, 4].isnan()
    row = 40 if name == "c" else 60
    assert ssm.attention(r, rows=[row])[0, 0, 0, 40].isnan()


@needs_kernel
def test_above_the_diagonal_is_nothing(kernel_only):
    r, given = draw(170, 32, 4, reach=4)
    for absolute in (False, True):
        assert not ssm.attention(r, absolute=absolute, skip=True, **given)[0, 0].triu(1).any()
    assert not ssm.pooled_attention(r, 20, skip=True, **given)[0, 0].triu(1).any()


def test_other_cases_stay_with_torch(monkeypatch):
    for name in ("whole", "pooled", "row"):
        monkeypatch.setattr(native, name, lambda *_: pytest.fail("the C kernels ran"))
    r, given = draw(12, 32, 4, reach=4)

    def every(r, **given):
        ssm.attention(r, **given)
        ssm.pooled_attention(r, 3, **given)
        ssm.attention(r, rows=[5], **given)

    every(r.to(torch.float64), **double(given))
    every(Recurrence(r.x, r.b, r.c, log_a=r.delta[..., None] * r.A, D=r.D), **given)
    every(replace(r, b=r.b.expand(-1, -1, 32, -1), c=r.c.expand(-1, -1, 32, -1)), **given)  # a group for each head
    wide = replace(r, x=r.x.expand(-1, -1, -1, 3))
    ssm.attention(wide, **given)  # whose channels differ in what stands around them
    asked = replace(r, A=r.A.clone().requires_grad_())
    ssm.attention(asked, **given).sum().backward()
    assert asked.A.grad is not None and asked.A.grad.isfinite().all()
    assert ssm.attention(asked, rows=[5]).requires_grad
    long_taps = {"taps": torch.randn(1, 40, 17, 32, 1)}
    ssm.attention(draw(40, 32, 4)[0], **long_taps)
    ssm.pooled_attention(draw(40, 32, 4)[0], 2, **long_taps)
    monkeypatch.setenv("SSMSCOPE_NATIVE", "0")
    assert not native.available() and native.why_not() == "SSMSCOPE_NATIVE=0"
    every(r, **given)


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O9")
    assert native.kernels.look() == "no C compiler: no-such-compiler not found"


@needs_kernel
def test_no_memory_says_so(monkeypatch):
    class Failing:
        ssm_whole = ssm_singles = ssm_pooled = staticmethod(lambda *_: 1)

    monkeypatch.setattr(native.kernels, "found", lambda: Failing())
    r, _ = draw(12, 32, 4)
    for make in (lambda: native.whole(r, 1, False, False, Around()), lambda: native.whole(r, 1, True, False, Around())):
        with pytest.raises(MemoryError, match="attention matrix"):
            make()
    with pytest.raises(MemoryError, match="attention matrix"):
        native.pooled(r, pooled.edges(12, 3), 1, False, Around())


def test_segments():
    r, _ = draw(3, 60, 2, 3)
    assert native.segments(r, 0, 60) == [(0, 20), (20, 40), (40, 60)]
    assert native.segments(r, 15, 30) == [(15, 20), (20, 30)]
    assert native.segments(r, 20, 40) == [(20, 40)]
    assert whole.is_diagonal(r)
