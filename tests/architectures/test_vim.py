"""Vision Mamba: its published code's checkpoints, against a slow reference that reads an image patch by patch."""

import argparse

import numpy as np
import pytest
import torch
from by_hand import below, convolved, normed, scanned
from examples import relative
from loud import TrueFloat64
from PIL import Image
from refusals import refusal, refuses
from torch import Tensor
from torch.nn.functional import silu, softplus
import ssmscope
from ssmscope.api.inputs import TEXTS, Texts
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.mixers import adapter_for
from ssmscope.errors import InputError
from ssmscope.interp.attention.maps import strongest
from ssmscope.loading.layouts import plan_vim
from ssmscope.ops import survival

WIDTH, STATE, RANK, TAPS, DEPTH, CLASSES = 12, 3, 2, 4, 2, 5
INNER = 2 * WIDTH
FORMS = {"apart": (32, 7, 224), "overlapping": (32, 13, 224), "larger": (32, 12, 384)}
"""Patch size, patches across, and the width of the images."""
NO_TEXTS = {**dict.fromkeys(TEXTS), "max_tokens": 2000}
MEAN, SPREAD = torch.tensor([0.485, 0.456, 0.406]).double(), torch.tensor([0.229, 0.224, 0.225]).double()


def stored(size: int = 56, grid: int = 4) -> dict[str, Tensor]:
    """Random weights by the names of the published code."""
    torch.manual_seed(0)
    weights = {
        "cls_token": torch.randn(1, 1, WIDTH), "pos_embed": torch.randn(1, grid**2 + 1, WIDTH) / 2,
        "patch_embed.proj.weight": torch.randn(WIDTH, 3, size, size) / size,
        "patch_embed.proj.bias": torch.randn(WIDTH), "head.weight": torch.randn(CLASSES, WIDTH),
        "head.bias": torch.randn(CLASSES), "norm_f.weight": 1 + torch.randn(WIDTH) / 3,
    }  # fmt: skip
    for layer in range(DEPTH):
        at = f"layers.{layer}."
        weights[at + "norm.weight"] = 1 + torch.randn(WIDTH) / 3
        weights[at + "mixer.in_proj.weight"] = torch.randn(2 * INNER, WIDTH) / 2
        weights[at + "mixer.out_proj.weight"] = torch.randn(WIDTH, INNER) / 4
        for back in ("", "_b"):
            weights[at + f"mixer.A{back}_log"] = torch.rand(INNER, STATE)
            weights[at + f"mixer.D{back}"] = torch.randn(INNER)
            weights[at + f"mixer.conv1d{back}.weight"] = torch.randn(INNER, 1, TAPS) / 2
            weights[at + f"mixer.conv1d{back}.bias"] = torch.randn(INNER) / 2
            weights[at + f"mixer.x_proj{back}.weight"] = torch.randn(RANK + 2 * STATE, INNER) / 3
            weights[at + f"mixer.dt_proj{back}.weight"] = torch.randn(INNER, RANK)
            weights[at + f"mixer.dt_proj{back}.bias"] = torch.randn(INNER) - 2
    return weights


def one_way(x: Tensor, w: dict[str, Tensor], back: str) -> Tensor:
    """Mamba's recurrence on x (length, channels), one step after the other."""
    x = silu(convolved(x, w[f"conv1d{back}.weight"], w[f"conv1d{back}.bias"]))
    step, b, c = (x @ w[f"x_proj{back}.weight"].T).split([RANK, STATE, STATE], dim=-1)
    delta = softplus(step @ w[f"dt_proj{back}.weight"].T + w[f"dt_proj{back}.bias"])
    return scanned(x.unsqueeze(-1), b, c, delta, -w[f"A{back}_log"].exp(), w[f"D{back}"]).squeeze(-1)


def reference(weights: dict[str, Tensor], image: Tensor, step: int) -> Tensor:
    """Logits of an image (height, width, colours) in [0, 1], in float64 (Vim, Algorithm 1)."""
    w = {name: weight.double() for name, weight in weights.items()}
    kernel, coloured = w["patch_embed.proj.weight"], ((image - MEAN) / SPREAD).permute(2, 0, 1)
    size = kernel.shape[-1]
    starts = range(0, image.shape[0] - size + 1, step)
    patches = [
        (kernel * coloured[:, y : y + size, x : x + size]).sum((1, 2, 3)) + w["patch_embed.proj.bias"]
        for y in starts
        for x in starts
    ]
    middle = len(patches) // 2
    stream = torch.stack([*patches[:middle], w["cls_token"][0, 0], *patches[middle:]]) + w["pos_embed"][0]
    for layer in range(DEPTH):
        at = f"layers.{layer}."
        own = below(w, at + "mixer.")
        x, z = (normed(stream, w[at + "norm.weight"]) @ own["in_proj.weight"].T).chunk(2, dim=-1)
        y = (one_way(x, own, "") + one_way(x.flip(0), own, "_b").flip(0)) / 2
        stream = stream + (y * silu(z)) @ own["out_proj.weight"].T
    return w["head.weight"] @ normed(stream[middle], w["norm_f.weight"]) + w["head.bias"]


def written(path, weights: dict[str, Tensor]):
    """Write them as the published code does, with the other contents of its files."""
    file = path / "vim.pth"
    torch.save({"model": weights, "epoch": 3, "args": argparse.Namespace(lr=0.1), "optimizer": {"state": {}}}, file)
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ssmscope.load(written(tmp_path_factory.mktemp("vim"), stored()), dtype="float64")


@pytest.fixture(scope="module")
def batch(model):
    torch.manual_seed(1)
    return model.encode(values=torch.rand(2, model.config.image_size[0] ** 2, model.channels).double())


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_the_references(form, tmp_path):
    size, grid, width = FORMS[form]
    weights = stored(size, grid)
    model = ssmscope.load(written(tmp_path, weights), dtype="float64")
    step = (width - size) // (grid - 1)
    assert model.config.patch == [size, step] and model.config.image_size == [grid, grid] and model.num_layers == DEPTH
    image = np.random.default_rng(0).integers(0, 256, (width, width, 3), dtype=np.uint8)
    batch = model.encode(values=image.reshape(-1, 3))
    Image.fromarray(image).save(tmp_path / "image.png")
    by_name = Texts().read({**NO_TEXTS, "image": [str(tmp_path / "image.png")]}, {}, [model])
    assert torch.equal(by_name.values, batch.values)
    assert batch.lengths == [grid**2 + 1] and batch.tokens[0][0] == "0,0" and batch.tokens[0][-1] == "[class]"
    expected = reference(weights, torch.from_numpy(image).double() / 255, step)
    with TrueFloat64():
        assert relative(model.logits(batch)[0], expected) < 1e-6  # the normalisation is in weights of float32
    with torch.no_grad():  # the model's own pass
        assert relative(model.module(input_values=batch.values).logits[0], expected) < 1e-6


@pytest.mark.parametrize(
    ("size", "grid", "step"),
    [(64, 6, 64), (60, 5, 41), (32, 7, 32), (50, 3, 50), (50, 2, 50), (217, 8, 1), (224, 4, 224)],
)
def test_the_step_is_the_largest_that_a_published_width_gives(size, grid, step):
    """The step is at most a patch; if no width gives one, patches are adjacent."""
    plan = plan_vim(stored(size, grid), "m")
    assert plan.build().config.patch == [size, step] and not plan.tied


def test_no_more_layers_than_tensors():
    weights = stored()
    for more, said in (
        (0, None),
        (1, f"m is not a Vim that can be read: it has a layer {len(weights) + 1} and {len(weights) + 1} ten"),
    ):
        name = f"layers.{len(weights) + more}.norm.weight"
        found = refusal(plan_vim, {**weights, name: torch.zeros(WIDTH)}, "m")
        assert found is None if said is None else (found or "").startswith(said)


def test_every_layer_is_a_linear_map_of_the_image(model, batch):
    """The class token stands in the middle."""
    trace = model.trace(batch)
    for index, mixer in enumerate(model.mixers):
        layer, linearized = trace.layers[index], trace.linearized[index]
        assert isinstance(linearized, LinearizedLayer) and linearized.parts == ("forward", "backward")
        with torch.no_grad():
            own = mixer(layer.u)
        assert relative(linearized.matvec(linearized.u) + linearized.bias, own) < 1e-10
        assert relative(adapter_for(mixer).output(mixer, layer), own) < 1e-10
        for part, order in zip(linearized.parts, (r.order for r in layer.recurrences)):
            place = order.argsort()
            bidirectional = place[None, :] > place[:, None]
            found = linearized.attention("ssm", part=part)[0, 0]
            assert not found[bidirectional].any() and found[~bidirectional].all()
        assert torch.equal(layer.recurrences[0].order, torch.tensor([*range(8), 16, *range(8, 16)]))
        assert torch.equal(layer.recurrences[1].order, layer.recurrences[0].order.flip(0))


def test_survival_is_at_the_class_token(model, batch):
    """The class token reads states forwards of the patches above it, and backwards of those below."""
    layer = model.trace(batch).layers[0]
    found, norms = layer.survival(), []
    for recurrence in layer.recurrences:
        order = recurrence.order[: int((recurrence.order == 16).nonzero()) + 1]
        left = survival.remaining_reference(recurrence.at(order)).flatten(3).norm(dim=-1)
        norms.append(torch.zeros(2, 17, left.shape[2]).double().index_copy(1, order, left))
    both = torch.cat(norms, dim=2)
    torch.testing.assert_close(found, both.sum(2) / both.sum((1, 2))[:, None])
    assert (found > 0).all() and relative(layer.survival(0), found) > 0.1
    signed = layer.survival(signed=True)
    torch.testing.assert_close(signed.sum(1), torch.ones(2).double())


def test_what_can_be_asked(model, batch):
    explained = ssmscope.explain(model, batch, methods=["gradxinput", "lrp", "occlusion", "survival", "random"])
    assert set(explained.to_frame()["method"]) == {"gradxinput", "lrp", "occlusion", "survival", "random"}
    assert all(row.converged for text in explained for row in text.attributions if row.method == "lrp")
    heatmap = ssmscope.heatmap(model, batch)
    assert heatmap.to_frame().notna().any().any()
    assert model.images_of(batch).shape == (2, 4, 4, 3)
    attended = ssmscope.attention(model, batch, parts=True)
    bidirectional = np.triu(np.ones((17, 17), dtype=bool), 1)
    assert all(text.bidirectional and text.maps[0].values[bidirectional].any() for text in attended)
    assert "maps of layers that read both ways" in attended.verdict()
    assert attended.tables()[0].columns == ("strongest for the last query",)
    assert "patches (2, 16, 3)" in str(pytest.raises(InputError, model.encode, values=torch.rand(2, 16, 3)).value)
    lens = ssmscope.lens_show(model, batch)
    assert [text.final for text in lens.texts] == [(name,) for name, _ in model.answers_of(model.logits(batch))]
    keys = strongest(attended[0].maps[0], 0, attended[0], 17)
    assert {key for key, _ in keys} == set(range(17))
    for asked in (ssmscope.stability, ssmscope.influence):
        refuses("read their input both ways, and .* needs layers that read earlier tokens alone", asked, model, batch)
    refuses("cannot continue from its states", model.run, batch, model.run(batch).states)
    with pytest.raises(InputError, match="16 tokens were given; the model reads 17"):
        model.logits(model.encode(values=torch.rand(15, model.channels)))


@pytest.mark.parametrize("change, words", [
    ({"pos_embed": None}, "lacks pos_embed"),
    ({"cls_token": None, "cls_token_head": torch.zeros(1, 1, WIDTH)}, "lacks cls_token"),
    ({"pos_embed": torch.zeros(1, 16, WIDTH)}, r"its positions \(1, 16, 12\); square patches"),
    ({"pos_embed": torch.zeros(1, 2, WIDTH)}, r"its positions \(1, 2, 12\); square patches"),
    ({"patch_embed.proj.weight": torch.zeros(WIDTH, 1, 56, 56)}, r"its patches are \(12, 1, 56, 56\)"),
    ({"layers.0.mixer.conv1d.weight": torch.zeros(3)}, r"its layers.0.mixer.conv1d.weight is \(3,\)"),
    ({"head.weight": torch.zeros(0, WIDTH)}, r"its head.weight is \(0, 12\)"),
    ({"patch_embed.proj.bias": torch.zeros(3)}, r"not a Vim that can be read: its patches are \(12, 3, 56, 56\)"),
    ({"layers.5000000.norm.weight": torch.zeros(WIDTH)}, "a layer 5000000 and"),
    ({"layers.1.norm.bias": torch.zeros(WIDTH)}, "has no place for backbone.layers.1.norm.bias"),
    ({"rope.freqs_cos": torch.zeros(3)}, "has no place for rope.freqs_cos"),
    ({"layers.1.mixer.D_b": torch.zeros(3)}, "layers.1.mixer.D_b is 3"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(change, words, tmp_path):
    weights = {name: t for name, t in {**stored(), **change}.items() if t is not None}
    refuses(words, ssmscope.load, written(tmp_path, weights))
