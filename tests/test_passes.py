"""The Triton kernels of passes without gradients, and of the hash of weights, against plain torch in float64.

On a machine with a GPU the compiled kernels are tested; elsewhere the same kernels in triton's interpreter, where
triton is installed and TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import pytest
import torch
from scan_checks import DEVICE, triton_only
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu

from ssmscope import fingerprint, survival
from ssmscope.fingerprint import hashes, versions
from ssmscope.scans import passes, word_sums
from ssmscope.ssm import Recurrence

needs_kernels = triton_only(
    passes, lambda: passes.left(torch.ones(1, 1, 1, 1), *torch.ones(2, 1, 1, 1), torch.ones(1, 1, 1, 1), each=True)
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def near(ours: Tensor, exact: Tensor, tolerance: float = 1e-6) -> None:
    assert ours.shape == exact.shape
    assert (ours.double() - exact).abs().max() <= tolerance * exact.abs().max()


def library_norms() -> list[type]:
    """Of the norms that are computed here those of the libraries' Mamba models, which every release has."""
    from transformers.models import bamba, falcon_mamba, jamba, mamba, mamba2

    files = [
        bamba.modeling_bamba,
        falcon_mamba.modeling_falcon_mamba,
        jamba.modeling_jamba,
        mamba.modeling_mamba,
        mamba2.modeling_mamba2,
    ]
    found = [getattr(file, name) for file in files for name in passes.NORMS if hasattr(file, name)]
    assert len(found) == 5
    return found


@needs_kernels
@pytest.mark.parametrize(("length", "channels", "taps"), [(1, 1, 1), (33, 20, 4), (70, 130, 3)])
def test_convolution(length, channels, taps):
    x, weight, bias = drawn(2, length, 2 * channels)[..., channels:], drawn(channels, taps), drawn(channels, seed=1)
    exact = conv1d(pad(x.double().mT, (taps - 1, 0)), weight.double().unsqueeze(1), bias.double(), groups=channels).mT
    near(passes.silu_convolution(x, weight, bias), silu(exact))
    near(passes.silu_convolution(x, weight, None), silu(exact - bias.double()))
    narrow, wide = passes.silu_convolution_and_wide(x.bfloat16(), weight, bias)
    assert torch.equal(narrow.float(), wide) and wide.dtype == torch.float32
    assert torch.equal(passes.silu_convolution(x.bfloat16(), weight, bias, wide=True), wide)
    near(wide, silu(exact), 2**-6)


@needs_kernels
@pytest.mark.parametrize(("length", "channels", "size"), [(1, 3, 3), (9, 40, 40), (5, 40, 10)])
def test_gates_and_norms(length, channels, size):
    y, z, weight = drawn(2, length, channels), drawn(2, length, 2 * channels, seed=1)[..., :channels], drawn(channels)
    exact = y.double() * silu(z.double())
    near(passes.gated(y, z), exact)
    groups = exact.unflatten(-1, (-1, size))
    normed = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
    near(passes.gated_norm(y, z, weight, 1e-5, size), normed * weight.double())


@needs_kernels
@pytest.mark.parametrize("channels", [1, 40, 1030])
def test_softplus(channels):
    x = 40 * drawn(2, 3, 2 * channels)[..., channels:]
    ours, exact = passes.softplus(x), x.double().exp().log1p().where(x < 30, x.double())
    assert ((ours - exact).abs() <= 1e-6 * x.abs().clamp(min=1) * exact + 1e-37).all()
    assert passes.softplus(x.bfloat16()).dtype == torch.float32


@needs_kernels
@pytest.mark.parametrize(("inner", "channels"), [(3, 5), (80, 140)])
def test_projections_and_their_softplus(inner, channels):
    x, weight, bias = (drawn(*shape).bfloat16() for shape in ((2, 70, inner), (channels, inner), (channels,)))
    v = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    near(passes.projected_softplus(x, weight, bias), torch.nn.functional.softplus(v, threshold=1e3), 1e-5)


@needs_kernels
@pytest.mark.parametrize(("batch", "length", "kept"), [(1, 1, 1), (1, 300, 1), (2, 256, 1), (2, 70, 0)])
def test_sums_of_steps_are_kept_with_them(batch, length, kept):
    """As `left` would sum them, until the steps change or are gone."""
    x, weight, bias = (drawn(*shape).bfloat16() for shape in ((batch, length, 3), (140, 3), (140,)))
    before = len(passes._summed)
    delta = passes.projected_softplus(x, weight, bias)
    assert len(passes._summed) == before + kept
    later = [delta[:, at:].double().sum(1) for at in range(passes.KEYS, length + passes.KEYS, passes.KEYS)]
    near(passes._after(delta), torch.stack(later, 1))
    delta.mul_(2)
    near(passes._after(delta), 2 * torch.stack(later, 1))
    del delta
    assert len(passes._summed) == before


@needs_kernels
def test_wide_copies():
    x = drawn(2, 3, 2100).bfloat16()[..., 1050:]
    assert torch.equal(passes.widened(x), x.float())


@needs_kernels
@pytest.mark.parametrize("channels", [1, 40, 3000])
def test_norms(channels):
    x, weight = drawn(2, 5, channels + 3)[..., 1 : channels + 1], drawn(channels, seed=1)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    near(passes.rms_norm(x, weight, 1e-5), normed * weight.double())
    near(passes.rms_norm(x, None, 1e-5), normed)


@needs_kernels
@pytest.mark.parametrize("kind", library_norms(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32], ids=str)
def test_norms_of_libraries(kind, given):
    """In half precision too, up to sums' last digits: what is rounded where is theirs."""
    norm = kind(48, eps=1e-4).to(DEVICE, torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = drawn(2, 7, 48).to(given)
    theirs, ours = norm(x), passes.rms_norm(x, norm.weight, 1e-4)
    assert ours.dtype == theirs.dtype
    off = (ours - theirs).abs() > 1e-6 * theirs.abs()
    assert DEVICE == "cpu" or off.float().mean() < 0.02  # the interpreter cuts digits off
    near(ours, theirs.double(), 2**-6)


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (2, 5, 3, 64), (1, 4, 2, 100)])
def test_lengths(shape):
    x = drawn(*shape[:2], 2 * shape[2], shape[3])[:, :, ::2]
    near(passes.lengths(x), torch.linalg.vector_norm(x.double(), dim=-1))


@needs_kernels
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("length", [1, passes.KEYS, 2 * passes.KEYS + 7])
@pytest.mark.parametrize("strength", [0.01, 1.0, 300.0])  # hardly any decay, some, and below the smallest float
def test_what_is_left(length, groups, strength):
    r = Recurrence(
        x=drawn(2, length, 6, 1),
        b=drawn(2, length, groups, 5, seed=1),
        c=drawn(2, length, groups, 5, seed=2),
        delta=drawn(2, length, 6, seed=3).abs(),
        A=-strength * drawn(6, 5, seed=4).abs(),
    )
    exact = survival.left_norms(r.to(torch.float64))
    near(passes.left(r.x, r.delta, r.A, r.b, each=True), exact, 1e-5)
    near(passes.left(r.x, r.delta, r.A, r.b, each=False), exact.sum(2), 1e-5)


@needs_kernels
@pytest.mark.parametrize("length", [1, 2 * passes.KEYS + 7])
@pytest.mark.parametrize("strength", [0.01, 300.0])
def test_what_is_left_of_heads(length, strength):
    r = Recurrence(
        x=drawn(2, length, 6, 5),
        b=drawn(2, length, 2, 7, seed=1),
        c=drawn(2, length, 2, 7, seed=2),
        delta=drawn(2, length, 6, seed=3).abs(),
        A=-strength * drawn(6, 1, seed=4).abs(),
    )
    exact = survival.left_norms(r.to(torch.float64))
    near(passes.left_of_heads(r.x, r.delta, r.A, r.b, each=True), exact, 1e-5)
    near(passes.left_of_heads(r.x, r.delta, r.A, r.b, each=False), exact.sum(2), 1e-5)


@needs_kernels
@pytest.mark.parametrize("kinds", [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
def test_a_sum_and_its_norm(kinds):
    """Rounded where a library's block rounds: the sum, then what its norm reads; the interpreter cuts digits off."""
    kind, added = kinds
    x, f, weight = drawn(2, 5, 40).to(kind), drawn(2, 5, 43, seed=1)[..., 2:42].to(added), drawn(40, seed=2).to(added)
    total, normed = passes.add_and_rms_norm(x, f, weight, 1e-5)
    assert total.dtype == (x + f).dtype and normed.dtype == added
    near(total, (x + f).double(), 1e-6 if total.dtype == torch.float32 else 2**-7)
    near(normed, passes.rms_norm((x + f).to(added), weight, 1e-5).double(), 1e-6 if added == torch.float32 else 2**-6)


def weights(device: str) -> dict[str, Tensor]:
    ROW = fingerprint.ROW
    made = {f"{size}": drawn(size, seed=size).to(device) for size in (1, 5, ROW, 3 * ROW + 1, 5 * ROW)}
    return made | {"half": drawn(7).bfloat16().to(device), "bytes": torch.arange(5, dtype=torch.uint8, device=device)}


@needs_kernels
def test_one_launch_gives_the_hash(monkeypatch):
    flat = [value.view(torch.int32) for value in weights(DEVICE).values() if value.element_size() == 4]
    factors = fingerprint._factors(torch.device(DEVICE))
    alone = torch.stack([fingerprint._sum_of_words(words, *factors) for words in flat])
    assert torch.equal(word_sums.sums(flat, *factors), alone)


def test_a_hash_is_its_definition(monkeypatch):
    rows, columns = (t.tolist() for t in fingerprint._factors(torch.device("cpu")))
    value = weights("cpu")[f"{3 * fingerprint.ROW + 1}"]
    words = value.view(torch.int32).tolist()
    expected = sum(w * rows[i // fingerprint.ROW] * columns[i % fingerprint.ROW] for i, w in enumerate(words))
    assert hashes({"w": value})["w"] % 2**64 == expected % 2**64
    monkeypatch.setattr(fingerprint, "AT_ONCE", fingerprint.ROW)
    assert hashes({"w": value})["w"] % 2**64 == expected % 2**64


def test_a_hash_sees_every_change():
    before = hashes(weights("cpu"))
    for name, value in weights("cpu").items():
        for changed in (value.flip(0), -value if value.is_floating_point() else value + 1):
            if not torch.equal(changed, value):
                assert hashes({name: changed})[name] != before[name], name


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_a_fingerprint_is_the_same_on_a_gpu():
    assert hashes(weights("cuda")) == hashes(weights("cpu")) == versions(weights("cuda"))
