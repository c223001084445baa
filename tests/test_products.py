"""Linear layers' products by oneDNN, against torch's own and float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from ssmscope.mixers import fast_scan, weights_constant
from ssmscope.models import mamba
from ssmscope.scans import products
from ssmscope.scans.products import product

needs_onednn = pytest.mark.skipif(not products.available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch):
    """As where oneDNN is faster."""
    monkeypatch.setattr(products, "faster", lambda: True)


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the inputs that oneDNN took, whatever the size of the weight."""
    made = []
    products.available()  # which asks it once
    inner = products._found
    monkeypatch.setattr(products, "LEAST", 1)
    monkeypatch.setattr(products, "_found", lambda x, *rest: made.append(tuple(x.shape)) or inner(x, *rest))
    return made


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


INPUTS = {
    "rows": lambda: drawn(7, 40),
    "batch": lambda: drawn(2, 5, 40),
    "more dimensions": lambda: drawn(2, 3, 5, 40),
    "transposed": lambda: drawn(2, 40, 5).transpose(1, 2),
    "of wider rows": lambda: drawn(2, 5, 81)[..., 1:41],
    "every other": lambda: drawn(2, 5, 80)[..., ::2],
    "one row for all": lambda: drawn(2, 1, 40).expand(2, 5, 40),
}
WEIGHTS = {
    "as stored": lambda: drawn(24, 40),
    "transposed": lambda: drawn(40, 24).T,
    "of wider rows": lambda: drawn(24, 60)[:, :40],
    "every other": lambda: drawn(24, 80)[:, ::2],
}
BIASES = {"none": lambda: None, "as stored": lambda: drawn(24), "every other": lambda: drawn(48)[::2]}


@needs_onednn
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("x", INPUTS)
def test_values_wherever_the_numbers_lie(calls, x, weight, bias):
    x, weight, bias = INPUTS[x](), WEIGHTS[weight](), BIASES[bias]()
    found = product(x, weight, bias)
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == exact.shape and (found - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert bool(calls) == (bias is None or bias.is_contiguous())


@needs_onednn
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)])
def test_gradients_and_gradients_of_gradients(calls, wanted):
    terms = [drawn(2, 5, 40), drawn(24, 40), drawn(24)]
    upstream, again = drawn(2, 5, 24, seed=1), [drawn(*t.shape, seed=2) for t in terms]

    def gradients(of, dtype):
        given = [t.to(dtype).requires_grad_(i in wanted) for i, t in enumerate(t.clone() for t in terms)]
        asked = [given[i] for i in wanted]
        y = (of(*given) ** 2 * upstream.to(dtype)).sum()
        first = torch.autograd.grad(y, asked, create_graph=True)
        second = sum((g * again[i].to(dtype)).sum() for g, i in zip(first, wanted))
        return [*first, *torch.autograd.grad(second, asked)]

    for ours, exact in zip(gradients(product, torch.float32), gradients(linear, torch.float64), strict=True):
        assert (ours - exact).abs().max() <= 5e-6 * exact.abs().max()
    assert calls


@needs_onednn
def test_large_products_beside_any_rows_and_on_any_threads():
    """To rounding: some releases of oneDNN add in another order where rows are few."""
    weight, x = drawn(1024, 1024), drawn(300, 1024)
    assert products.worthwhile(weight)
    exact, threads = linear(x.double(), weight.double()), torch.get_num_threads()
    assert torch.equal(product(x, weight), products._found(x, weight, None))
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (2, 3, 17, 64, 299, 300):
                off = product(x[:rows], weight) - exact[:rows]
                assert off.abs().max() <= 2e-6 * exact.abs().max()
    finally:
        torch.set_num_threads(threads)


@needs_onednn
def test_what_it_does_not_take_stays_with_torch(calls, monkeypatch):
    x, weight, bias = drawn(3, 40), drawn(24, 40), drawn(24)
    for terms in ((x.double(), weight.double(), bias.double()), (x[0], weight, bias), (x[:0], weight, bias)):
        assert torch.equal(product(*terms), linear(*terms))
    with torch.autocast("cpu"):
        assert torch.equal(product(x, weight, bias), linear(x, weight, bias))
    assert torch.equal(torch.vmap(lambda row: product(row, weight))(x.unsqueeze(1)), linear(x, weight).unsqueeze(1))
    _, tangent = torch.func.jvp(lambda x: product(x, weight), (x,), (x,))
    assert torch.allclose(tangent, linear(x, weight))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert torch.equal(product(x, weight, bias), linear(x, weight, bias))
    monkeypatch.undo()
    assert not calls


@needs_onednn
def test_a_small_weight_stays_with_torch(calls, monkeypatch):
    x, weight = drawn(3, 40), drawn(24, 40)
    monkeypatch.setattr(products, "LEAST", weight.numel() + 1)
    assert torch.equal(product(x, weight), linear(x, weight)) and not calls


@pytest.fixture
def unmeasured(monkeypatch, tmp_path):
    """As a user has it for whom nothing was measured yet."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    products.faster.cache_clear()
    yield tmp_path / "ssmscope"
    products.faster.cache_clear()


@needs_onednn
@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_one_is_taken_as_measured_once(unmeasured, monkeypatch, faster):
    x, weight = drawn(300, 1024), drawn(1024, 1024)
    monkeypatch.setattr(products, "_measured", lambda: faster)
    assert torch.equal(product(x, weight), products._found(x, weight, None) if faster else linear(x, weight))
    monkeypatch.setattr(products, "_measured", lambda: not faster)  # as another process might, in another minute
    products.faster.cache_clear()
    assert products.worthwhile(weight) == faster
    assert len(list(unmeasured.iterdir())) == 1


@needs_onednn
def test_what_another_process_measured_meanwhile_holds(unmeasured, monkeypatch):
    def slowly() -> bool:
        monkeypatch.setattr(products, "_measured", lambda: False)
        assert not products.faster.__wrapped__()
        return True

    monkeypatch.setattr(products, "_measured", slowly)
    assert not products.faster()
    assert len(list(unmeasured.iterdir())) == 1


@needs_onednn
def test_where_nothing_can_be_kept_torchs_own_is_taken(unmeasured, monkeypatch):
    monkeypatch.setattr(products, "_measured", lambda: pytest.fail("measured in vain"))
    monkeypatch.setattr(products.building, "cache_directory", lambda: None)
    assert not products.worthwhile(drawn(1024, 1024))


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_measurement_says_one_or_the_other(unmeasured, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        products.available.cache_clear()
        assert products.available()
        products.faster()
    finally:
        torch.set_default_dtype(before)
    assert products.faster() in (True, False)
    kept = next(unmeasured.iterdir())
    assert kept.read_text() == (products.ONEDNN if products.faster() else "torch")


def test_without_onednn_torch_does_it(monkeypatch):
    def absent(*terms):
        raise AttributeError("no such operator")

    monkeypatch.setattr(products, "LEAST", 1)
    monkeypatch.setattr(products, "_found", absent)
    products.available.cache_clear()
    try:
        assert not products.available()
        assert torch.equal(product(drawn(3, 40), drawn(24, 40)), linear(drawn(3, 40), drawn(24, 40)))
    finally:
        products.available.cache_clear()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    return mamba.examples()["mamba-with-biases"].eval()


@needs_onednn
@pytest.mark.parametrize("outer", [fast_scan, weights_constant])
def test_a_models_layers_run_through_it(calls, model, outer):
    inputs = torch.arange(9).view(1, 9)
    expected = model(inputs).logits
    outer_layers = [p for name, p in model.named_modules() if name.endswith(("in_proj", "out_proj"))]
    seen = []
    with outer(model):
        inner = weights_constant if outer is fast_scan else fast_scan
        with inner(model):
            logits = model(inputs).logits
            assert len(calls) == len(outer_layers) + 1  # and the head
            asked = [part.weight for part in outer_layers]
            found = torch.autograd.grad(logits.sum() + sum(w.sum() for w in asked), asked)
            assert all(torch.equal(g, torch.ones_like(g)) for g in found), "a weight has a gradient by the logits"
        handle = outer_layers[0].register_forward_hook(lambda part, args, output: seen.append(1))
        model(inputs)
        handle.remove()
    assert seen and (logits - expected).abs().max() <= 2e-6 * expected.abs().max()


@needs_onednn
def test_a_forward_pass_that_somebody_put_there_runs(calls, model):
    inputs = torch.arange(9).view(1, 9)
    head = model.get_output_embeddings()
    with fast_scan(model):
        before = model(inputs).logits
    of_layers = len(calls) - 1
    head.forward = lambda x: 2 * linear(x, head.weight)
    with fast_scan(model):
        after = model(inputs).logits
    assert len(calls) == 2 * of_layers + 1
    assert (after - 2 * before).abs().max() <= 4e-6 * before.abs().max()
