"""Layers that people copy into networks of their own, read by the names of their parts: S4D, LRU, Mamba both ways, and
VMamba's over images; and modules whose positions are other than they seem, which are refused."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from loud import loud
from own_layers import LRU, S4D, SS2D, BothWays, CopiedMamba
from refusals import refused, refuses
from torch import Tensor, nn
import ssmscope
from ssmscope.core.mixers import adapter_for

F64 = torch.float64


class Multiplied(BothWays):
    def __init__(self, width: int) -> None:
        super().__init__(width, 0)


class Averaged(BothWays):
    def __init__(self, width: int) -> None:
        super().__init__(width, 0.5)


class Reversed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = CopiedMamba(width)

    def forward(self, u: Tensor) -> Tensor:
        return self.inner(u.flip(1)).flip(1)


class InPlace(CopiedMamba):
    """Writes into its input, which the network adds its output to."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.mul_(0.5)
        return y


class Network(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module], normed: bool = True, first: bool = False) -> None:
        super().__init__()
        self.enter, self.head, self.first = nn.Linear(3, 12), nn.Linear(12, 4), first
        self.layers = nn.ModuleList(make(12) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(12) if normed else nn.Identity() for _ in range(2))

    def forward(self, series: Tensor) -> Tensor:
        x = self.enter(series)
        for norm, layer in zip(self.norms, self.layers):
            y = layer(norm(x).mT if self.first else norm(x))
            y = y[0] if isinstance(y, tuple) else y
            x = x + (y.mT if self.first else y)
        return self.head(x)


def made(make: Callable[[int], nn.Module], **options: bool) -> Network:
    torch.manual_seed(0)
    return loud(Network(make, **options)).double().eval()


series = pytest.fixture(lambda: torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(0), dtype=F64))


def package(name: str, kind: str, **fields: int) -> Callable[[int], nn.Module]:
    def make(width: int) -> nn.Module:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"{name} is not installed")
        found = getattr(importlib.import_module(name), kind)
        if kind == "S6":
            fields_ = importlib.import_module("minimamba.config").MambaConfig(d_model=width, n_layer=1, vocab_size=9)
            return found(fields_)
        return found(width, **fields)

    return make


CAUSAL: dict[str, tuple[Callable[[int], nn.Module], bool]] = {
    "copied Mamba": (CopiedMamba, False), "S4D": (S4D, True),
    "S4D of rows": (lambda width: S4D(width, transposed=False), False), "LRU": (LRU, False),
    "LRU_pytorch": (lambda width: package("LRU_pytorch", "LRU", out_features=width, state_features=9)(width), False),
    "s5": (package("s5", "S5", state_width=8), False), "minimamba": (package("minimamba.s6", "S6"), False),
}  # fmt: skip
"""Layers by name, and whether their input has the channels first."""


@pytest.mark.parametrize("name", CAUSAL)
def test_a_layer_is_read_by_its_parts(name: str, series: Tensor) -> None:
    make, first = CAUSAL[name]
    module = made(make, first=first)
    precise = name not in ("LRU_pytorch", "s5", "minimamba")  # These compute in single precision.
    module, series = (module, series) if precise else (module.float(), series.float())
    if name == "s5":
        module = made(make).float()
    close = dict(rtol=1e-8, atol=1e-8) if precise else dict(rtol=1e-3, atol=1e-3)
    model = ssmscope.load(module, at=-1, example=series)
    own = module(series)
    torch.testing.assert_close(model.logits(model.encode(series)), own[:, -1], **close)
    short = model.encode([series[0, :6], series[1]])
    expected = torch.stack([module(series[:1, :6])[0, -1], own[1, -1]])
    torch.testing.assert_close(model.logits(short), expected, **close)
    assert model.continues
    states = model.run(model.encode(series[:, :5])).states
    torch.testing.assert_close(model.run(model.encode(series[:, 5:]), states).logits, own[:, -1], **close)
    assert ssmscope.heatmap(model, series)[0].tokens[:2] == ("step 0", "step 1")


def test_a_complex_states_retention_is_its_rates_modulus(series: Tensor) -> None:
    for make, first in ((LRU, False), (S4D, True)):
        module = made(make, first=first)
        layer = module.layers[0]
        rate = (
            -layer.nu_log.exp() if make is LRU else -layer.kernel.log_A_real.exp() * layer.kernel.log_dt.exp()[:, None]
        )
        trace = ssmscope.load(module, at=-1, example=series).trace(series)
        np.testing.assert_allclose(trace.retention[0], rate.exp().mean().item(), rtol=1e-6)


@pytest.mark.parametrize("step", [0, 4, 10])
def test_a_knocked_out_step_is_read_by_no_later_one(series: Tensor, step: int) -> None:
    module = made(LRU)
    model = ssmscope.load(module, at=-1, example=series, labels=list("abcd"))

    def cut(x: Tensor) -> Tensor:
        x = module.enter(x)
        for norm, layer in zip(module.norms, module.layers):
            x = x + layer(norm(x), without=step)
        return module.head(x)[:, -1].softmax(-1)

    clean, expected = module(series[:1])[:, -1].softmax(-1), cut(series[:1])
    answer = int(clean.argmax())
    found = ssmscope.knockout(model, series[:1], from_=str(step), level="ssm").to_frame()
    change = float(found["change"].iloc[0])
    assert change == pytest.approx(float(expected[0, answer] / clean[0, answer] - 1), abs=1e-6)


@pytest.mark.parametrize("make", [BothWays, Averaged])
def test_a_pair_of_both_directions_is_one_layer(make: type[BothWays], series: Tensor) -> None:
    module = made(make)
    model = ssmscope.load(module, at=3, example=series)
    assert model.num_layers == 2 and not model.continues
    torch.testing.assert_close(model.logits(model.encode(series)), module(series)[:, 3])
    short = model.encode([series[0, :6], series[1]])
    torch.testing.assert_close(model.logits(short)[0], module(series[:1, :6])[0, 3])
    one, other = model.trace(series).layers[0].recurrences
    assert one.order is None and other.order.tolist() == [*range(10, -1, -1)]
    gone = ssmscope.explain(model, series[:1], methods=["occlusion"], option={"occlusion": {"baseline": "zero"}})
    hidden = series[:1].clone()
    hidden[0, 9] = 0
    best = int(module(series[:1])[0, 3].argmax())
    lost = module(series[:1])[0, 3, best] - module(hidden)[0, 3, best]
    assert gone[0].attributions[0].scores[9] == pytest.approx(lost.item(), abs=1e-6)


@pytest.mark.parametrize(("make", "said"), [
    (Multiplied, "runs its layer layers.0.mamba_rev on the reversed input of layers.0.mamba_fwd, and layers.0"),
    (Reversed, "hands the positions to its layer layers.0.inner in another order"),
    (InPlace, "one writes into its input"),
])  # fmt: skip
def test_what_is_not_what_it_seems_is_refused(make: type[nn.Module], said: str, series: Tensor) -> None:
    refuses(said, ssmscope.load, made(make, normed=make is not InPlace), at=-1, example=series)


def test_what_the_module_is_called_with(series: Tensor) -> None:
    class Wants(Network):
        def forward(self, batch: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:  # type: ignore[override]
            return {"out": super().forward(batch["x"].movedim(1, 2) * scale)[:, -1]}

    torch.manual_seed(0)
    module = loud(Wants(CopiedMamba)).double().eval()
    model = ssmscope.load(
        module, inputs=lambda x: ({"x": x.movedim(1, 2)}, 0.5), answer=lambda output: output["out"], example=series,
        labels=list("abcd"),
    )  # fmt: skip
    torch.testing.assert_close(model.logits(model.encode(series)), Network.forward(module, series * 0.5)[:, -1])
    by_name = lambda x: {"batch": {"x": x.movedim(1, 2)}, "scale": 0.5}  # noqa: E731
    again = ssmscope.load(module, inputs=by_name, answer=lambda output: output["out"], example=series)
    torch.testing.assert_close(again.logits(again.encode(series)), model.logits(model.encode(series)))


class Images(nn.Module):
    """Patches of 4 pixels, two layers, and where asked a second stage of half the height and width."""

    def __init__(self, stages: int = 1, first: bool = False) -> None:
        super().__init__()
        self.patch_embed, self.first = nn.Conv2d(3, 8, 4, 4), first
        self.stages = nn.ModuleList(nn.ModuleList(SS2D(8) for _ in range(2)) for _ in range(stages))
        self.down, self.head = nn.Conv2d(8, 8, 2, 2), nn.Linear(8, 5)

    def forward(self, images: Tensor, without: tuple[int, int] | None = None) -> Tensor:
        x = self.patch_embed(images).movedim(1, -1)
        for number, stage in enumerate(self.stages):
            x = self.down(x.movedim(-1, 1)).movedim(1, -1) if number else x
            for layer in stage:
                x = x + layer(x, without)
        return self.head(x.mean((1, 2)))


images = pytest.fixture(lambda: torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0), dtype=F64))


def image_model(stages: int = 1, **options: str) -> tuple[Images, ssmscope.Model]:
    torch.manual_seed(0)
    module = loud(Images(stages)).double().eval()
    example = torch.randn(1, 3, 16, 24, dtype=F64)
    return module, ssmscope.load(module, inputs="floats", example=example, labels=list("abcde"), **options)


def test_tokens_of_images_are_the_layers_positions(images: Tensor) -> None:
    module, model = image_model()
    batch = model.encode(images)
    assert model.reads == "pixels" and batch.tokens[0][:7] == ("0,0", "0,1", "0,2", "0,3", "0,4", "0,5", "1,0")
    torch.testing.assert_close(model.logits(batch), module(images))
    torch.testing.assert_close(model.logits(model.encode(images.movedim(1, -1))), module(images))
    assert adapter_for(module.stages[0][0]).flat(module.stages[0][0], images.movedim(1, -1)).shape == (2, 384, 3)
    trace = model.trace(images)
    assert trace.pixels.shape == (2, 4, 6, 3) and trace.retention.shape == (2, 2, 24)
    orders = [each.order[:5].tolist() for each in trace.layers[0].recurrences]
    assert orders == [[0, 1, 2, 3, 4], [0, 6, 12, 18, 1], [23, 22, 21, 20, 19], [23, 17, 11, 5, 22]]
    assert "images" in ssmscope.heatmap(model, images).headline


def test_scores_of_patches_are_the_modules_own(images: Tensor) -> None:
    module, model = image_model()
    found = ssmscope.explain(model, images, methods=["gradxinput", "occlusion"])
    logits = module(images)
    best = logits.argmax(1)
    x = images.clone().requires_grad_()
    module(x).gather(1, best[:, None]).sum().backward()
    products = (x.grad * x.detach()).unflatten(2, (4, 4)).unflatten(-1, (6, 4)).sum((1, 3, 5)).flatten(1)
    for row in range(2):
        by = {each.method: each.scores for each in found[row].attributions}
        np.testing.assert_allclose(by["gradxinput"], products[row], atol=1e-6)
        hidden = images.clone()
        hidden[row, :, 4:8, 8:12] = images[row].mean((1, 2))[:, None, None]
        lost = logits[row, best[row]] - module(hidden)[row, best[row]]
        assert by["occlusion"][8] == pytest.approx(lost.item(), abs=1e-6)


def test_a_knocked_out_patch_is_read_by_no_other(images: Tensor) -> None:
    module, model = image_model()
    clean, cut = module(images[:1]).softmax(-1), module(images[:1], without=(1, 2)).softmax(-1)
    answer = int(clean.argmax())
    edits = ssmscope.knockout(model, images[:1], from_="8", to="0:8,9:24", level="ssm").to_frame()
    change = float(edits["change"].iloc[0])
    assert change == pytest.approx(float(cut[0, answer] / clean[0, answer] - 1), abs=1e-6)


def test_stages_are_read_one_at_a_time(images: Tensor) -> None:
    refuses(r"layer stages.1.0 of Images reads 6 positions where stages.0.0 has 24: .*layers=", image_model, 2)
    for stage, tokens in ((0, 24), (1, 6)):
        module, model = image_model(2, layers=f"stages.{stage}")
        assert model.num_layers == 2 and model.trace(images).retention.shape == (2, 2, tokens)
        torch.testing.assert_close(model.logits(model.encode(images)), module(images))
    refuses("no part 'stage', which layers names.*did you mean", image_model, 2, layers="stage")


def test_what_grids_do_not_have_is_refused(images: Tensor) -> None:
    _, model = image_model()
    for ask in (
        lambda: ssmscope.stability(model, images),
        lambda: model.encode(images[:, :, :8]),
        lambda: model.encode(images[:, :2]),
    ):
        refused(ask)


def test_a_state_dict_of_mambapy_is_refused_with_how_it_is_read(tmp_path: Path) -> None:
    torch.save(
        {"mamba.layers.0.mixer.A_log": torch.zeros(4, 2), "embedding.weight": torch.zeros(5, 2)}, tmp_path / "a.pt"
    )
    refuses("load mambapy's module itself, or .* as backbone.embedding for embedding", ssmscope.load, tmp_path / "a.pt")


def test_a_model_of_rwkv7_hf_is_read_with_its_weights(series: Tensor) -> None:
    library = pytest.importorskip("rwkv7_hf.modeling_rwkv7")
    torch.manual_seed(0)
    config = library.RWKV7Config(vocab_size=40, hidden_size=32, num_hidden_layers=2, head_dim=16, intermediate_size=64)
    module = library.RWKV7ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    model = ssmscope.load(module)
    ids = torch.tensor([[1, 7, 3, 9, 30, 2]])
    torch.testing.assert_close(model.logits(model.encode(ids=ids)), module(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
    assert model.num_layers == 2 and ssmscope.heatmap(model.trace(ids=ids)).headline
