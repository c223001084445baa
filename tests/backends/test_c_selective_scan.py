"""The selective scan's C kernel against a loop in float64, and how it is compiled and cached."""

import platform
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ssmscope.backends.c import compiler, selective_scan

NAMES = ("x", "b", "c", "initial", "delta", "A")
pytestmark = pytest.mark.skipif(selective_scan.why_not() is not None, reason=f"{selective_scan.why_not()}")


def draw(batch=2, length=40, heads=70, state=16):
    g = torch.Generator().manual_seed(0)
    x, b, c = (torch.randn(batch, length, *last, generator=g) for last in ((heads, 1), (1, state), (1, state)))
    initial = torch.randn(batch, heads, 1, state, generator=g)
    delta = 5 * torch.rand(batch, length, heads, generator=g) ** 3
    return dict(zip(NAMES, (x, b, c, initial, delta, -16 * torch.rand(heads, state, generator=g))))


def leaves_of(terms):
    return {name: t.clone().requires_grad_() for name, t in terms.items()}


def run(terms, *, expected=False):
    assert selective_scan.fits(*terms.values())
    return selective_scan.scan(*terms.values(), expected=expected, retention=True)


def reference(terms, *, expected=False):
    x, b, c, H, delta, A = (t.double() for t in terms.values())
    v = delta[..., None] * A
    a = 1 / (1 - v) if expected else v.exp()
    outputs = []
    for t in range(x.shape[1]):
        H = a[:, t, :, None] * H + (delta[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((H * c[:, t, :, None]).sum(-1))
    return torch.stack(outputs, 1), H, a.mean((-1, -2))


def gradients(out, leaves):
    y, final, _ = out
    weights = torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape)
    return torch.autograd.grad((y * weights).sum() + (final**2).sum(), list(leaves.values()))


def near(ours, exact, tolerance=1e-5):
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    assert (ours - exact).abs().max() <= tolerance * exact.abs().max()


def check(terms, expected=False):
    """Compare values, the mean decay and gradients with the loop's."""
    leaves = leaves_of(terms)
    out, exact = run(leaves, expected=expected), reference(leaves, expected=expected)
    assert all(map(torch.equal, out, run(terms, expected=expected))) and not out[2].requires_grad
    near(out[0], exact[0])
    near(out[1], exact[1])
    near(out[2], exact[2], 1e-6)
    every = dict(zip(NAMES, gradients(exact, leaves)))
    for ours, slow in zip(gradients(out, leaves), every.values()):
        near(ours, slow.double())
    for names in (("x",), ("x", "initial"), ("initial",)):  # With all else constant no states are walked again.
        some = {name: leaves[name].detach().requires_grad_() for name in names}
        for name, ours in zip(names, gradients(run({**terms, **some}, expected=expected), some)):
            near(ours, every[name].double())


SHAPES = [(2, 1, 3, 16), (1, 7, 100, 5), (3, 16, 1, 1), (2, 17, 64, 33), (1, 300, 3, 5), (2, 64, 65, 16)]


@pytest.mark.parametrize("expected", [False, True], ids=["exp", "expected"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, expected):
    check(draw(*shape), expected)


def test_states_of_a_channel_with_one_decay():
    """Decays may be 0 or 1, and only some slabs of channels have one decay."""
    terms = draw(2, 100, 130)
    terms["A"][:, 1:] = terms["A"][:, :1]
    terms["delta"][:, ::3] = 0.0
    terms["delta"][:, 41::3] = 1e6
    check(terms)
    terms["A"][70, 3] = -0.25
    check(terms)
    check(terms, expected=True)


def test_decays_of_every_strength():
    terms = draw(2, 100)
    terms["delta"][:, ::3] = 0.0  # decay 1
    terms["delta"][:, 41::3] = 1e6  # decay 0, but 1 where A is 0; chunks before this one are bounded
    terms["A"][:, 0] = 0.0
    check(terms)
    terms = draw()
    terms["A"][:, ::2] *= -0.02  # states that grow
    check(terms)


def decays_are_exp():
    """Compare decays with exp, as if Δ A were rounded twice: the kernel multiplies by 8 / ln 2 too."""

    def decay(v, A):
        one = torch.ones(1, 1, 1, 1)
        terms = dict(x=torch.zeros(1, 1, len(v), 1), b=one, c=one, initial=one.expand(1, len(v), 1, 1))
        return run({**terms, "delta": (v / A).view(1, 1, -1), "A": torch.full((len(v), 1), A)})[0].flatten().double()

    v = torch.cat([torch.linspace(-87, 88, 4001), torch.tensor([-1e-9, 1e-9])])
    beyond = torch.tensor([-88.0, -1e9, -3e38, 89.0, 1e9, 3e38, torch.nan])
    for A in (-1.0, 2.0):
        for with_beyond in (v, torch.cat([v, beyond])):  # bounded tiles take a shorter way
            error = decay(with_beyond, A)[: len(v)] / v.double().exp() - 1
            assert (error.abs() <= 2e-7 + 2**-23 * v.double().abs()).all()
        small, large, nan = decay(beyond, A).split([3, 3, 1])
        assert decay(torch.tensor([-94.0, 94.0]), A).tolist() == [0, torch.inf]
        assert (small <= 1.2e-38).all() and (large == torch.inf).all() and nan.isnan()
    assert decay(torch.zeros(1), -1.0).item() == 1.0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86 processors")
@pytest.mark.parametrize("flags", ["", "-mno-avx512f", "-mno-avx"])
def test_vectors_of_every_length(flags, tmp_path, monkeypatch):
    if flags:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("CC", " ".join(compiler.find_compiler()) + f" {flags}")
        other = selective_scan._library.__wrapped__()
        assert not isinstance(other, str), other
        monkeypatch.setattr(selective_scan, "_library", lambda: other)
    check(draw(state=5))
    decays_are_exp()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(name, value):
    terms = draw()
    terms[name][(0,) * (terms[name].ndim - 1)][0] = value
    ours, exact = run(terms), reference(terms)
    assert all(torch.equal(part.isfinite(), slow.isfinite()) for part, slow in zip(ours, exact))
    leaves = leaves_of(draw())
    y, grad_y = run(leaves)[0], torch.zeros(2, 40, 70, 1)
    grad_y[0, 10, 3] = value
    grads = dict(zip(NAMES, torch.autograd.grad((y * grad_y).sum(), list(leaves.values()))))
    assert not grads["x"][0, :11, 3].isfinite().any() and grads["x"][0, 11:].isfinite().all()
    assert grads["delta"][0, :, 2].isfinite().all() and grads["x"][1].isfinite().all()


def test_any_strides_and_no_initial_state():
    terms = draw()
    strided = dict(terms)
    for name in ("x", "delta"):
        strided[name] = terms[name].transpose(1, 2).contiguous().transpose(1, 2)
    strided["b"], strided["c"] = torch.cat([terms["b"], terms["c"]], dim=-1).split(16, dim=-1)
    for name in ("A", "initial"):
        strided[name] = terms[name].transpose(0, -1).contiguous().transpose(0, -1)
    assert all(map(torch.equal, run(terms), run(strided)))
    one = terms["delta"][:, :, :1]
    spread, held = one.expand(-1, -1, 70).requires_grad_(), one.repeat(1, 1, 70).requires_grad_()
    grads = [torch.autograd.grad(run({**terms, "delta": t})[0].sum(), t)[0] for t in (spread, held)]  # of stride 0
    assert torch.equal(*grads)
    x = terms["x"].requires_grad_()
    zero, none = (run({**terms, "initial": t}) for t in (torch.zeros(2, 70, 1, 16), None))
    assert all(map(torch.equal, zero, none))
    none[0].register_hook(lambda grad: torch._neg_view(grad))  # a negation that only the tensor's flag tells of
    of_zero, of_none = (torch.autograd.grad(out[0].sum(), x)[0] for out in (zero, none))
    assert torch.equal(of_zero, -of_none)


def test_neither_threads_nor_the_batch_change_a_bit():
    leaves = leaves_of(draw(3, 400, 320))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2, 3):
            torch.set_num_threads(threads)
            results.append((*(out := run(leaves)), *gradients(out, leaves)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other))
    rows = []
    for part in (slice(None), slice(1, 2)):
        terms = {name: t if name == "A" else t[part] for name, t in leaves.items()}
        y, final, kept = run(terms)
        rows.append((y, final, kept, *torch.autograd.grad(y.sum() + final.sum(), list(terms.values())[:5])))
    assert all(torch.equal(together[1:2], alone) for together, alone in zip(*rows))


def test_it_is_differentiable_once():
    leaves = leaves_of(draw())
    (grad,) = torch.autograd.grad(run(leaves)[0].square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_terms_that_it_does_not_fit():
    terms = draw()
    fits = lambda **changed: selective_scan.fits(*{**terms, **changed}.values())  # noqa: E731
    assert fits() and fits(initial=None) and not fits(delta=None)
    assert not any(fits(**{name: t.double()}) or fits(**{name: t[..., :0]}) for name, t in terms.items())
    assert not fits(x=terms["x"].expand(-1, -1, -1, 3)) and not fits(b=terms["b"].expand(-1, -1, 2, -1))
    assert not fits(A=terms["A"][:, 0]) and not fits(A=terms["A"][:, :1]) and not fits(b=terms["b"][:1])


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A C file that compiles in no time, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "answer.h").write_text("enum { ANSWER = 42 };")
    (tmp_path / "answer.c").write_text('#include "answer.h"\nint answer(void) { return ANSWER; }')
    return tmp_path / "answer.c"


def test_a_library_is_compiled_once_and_again_where_something_changed(source, monkeypatch):
    with ThreadPoolExecutor(4) as pool:
        assert [library.answer() for library in pool.map(compiler.load, [source] * 4)] == [42] * 4
    (built,) = (source.parent / "cache" / "ssmscope").iterdir()
    assert built.suffix == ".so" and built.stat().st_mode & 0o077 == 0
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
        assert compiler.load(source).answer() == 42
    whole = built.read_bytes()
    built.rename(built.with_suffix(".loaded"))
    built.write_bytes(whole[: len(whole) // 2])  # loading it would end the process
    assert compiler.load(source).answer() == 42 and built.read_bytes() == whole
    source.with_name("answer.h").write_text("enum { ANSWER = 43 };")
    assert compiler.load(source).answer() == 43


@pytest.mark.parametrize("cache", ["others may write", "link", "file"])
def test_a_cache_that_is_not_ours_alone_is_not_used(source, cache):
    directory, elsewhere = source.parent / "cache" / "ssmscope", source.parent / "elsewhere"
    directory.parent.mkdir(), elsewhere.mkdir()
    if cache == "others may write":
        directory.mkdir(), directory.chmod(0o777)
    elif cache == "link":
        directory.symlink_to(elsewhere)
    else:
        directory.touch()
    assert compiler.load(source).answer() == 42 and not list(source.parent.rglob("*.so"))


def test_compilers_that_cannot_do_everything(source, monkeypatch):
    limited = source.with_name("limited")
    real = " ".join(compiler.find_compiler())
    limited.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec {real} "$@"\n')
    limited.chmod(0o700)
    monkeypatch.setenv("CC", str(limited))
    assert compiler.load(source).answer() == 42
    source.write_text("int answer(void) { return NOTHING; }")
    with pytest.raises(compiler.Unavailable, match=r"limited could not compile answer.c: ."):
        compiler.load(source)
