"""MambaVision: its published code's checkpoints, against a slow reference of the whole model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from examples import relative
from loud import TrueFloat64
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d, gelu, layer_norm, relu, silu, softplus

import ssmscope
from ssmscope.api.inputs import Texts
from ssmscope.architectures.loading import mambavision_checkpoints
from ssmscope.architectures.loading.mambavision_checkpoints import Form
from ssmscope.core.attention_layers import attention_layers, attention_modules
from ssmscope.core.mixers import adapter_for
from ssmscope.errors import InputError

WIDTH, STEM, STATE, TAPS, CLASSES, ACROSS = 32, 6, 3, 3, 5, 4
DEPTHS, HEADS = [1, 2, 3, 2], [1, 2, 4, 8]
SIDE = 16 * ACROSS
CONFIG = {
    "model_type": "mambavision", "architectures": ["MambaVisionModelForImageClassification"], "dim": WIDTH // 4,
    "in_dim": STEM, "depths": DEPTHS, "num_heads": HEADS, "window_size": [8, 8, ACROSS, ACROSS // 2], "mlp_ratio": 2,
    "drop_path_rate": 0.2, "auto_map": {"AutoConfig": "configuration_mambavision.MambaVisionConfig"},
    "id2label": {str(at): f"class {at}" for at in range(CLASSES)},
}  # fmt: skip
NO_TEXTS = {"text": None, "file": None, "ids": None, "image": None, "max_tokens": 2000}
MEAN, SPREAD = torch.tensor([0.485, 0.456, 0.406]).double(), torch.tensor([0.229, 0.224, 0.225]).double()


def mixes(stage: int, number: int) -> bool:
    """Return True if a block has a mixer: the first half of a stage's do, the middle one too."""
    return number < (DEPTHS[stage] + 1) // 2


def stored(scaled: bool = True) -> dict[str, Tensor]:
    """Random weights by the names of the published code."""
    torch.manual_seed(0)
    weights: dict[str, Tensor] = {}

    def norm(name: str, width: int, batch: bool = True) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + torch.randn(width) / 3, torch.randn(width) / 2
        if batch:
            weights[f"{name}.running_mean"] = torch.randn(width) / 2
            weights[f"{name}.running_var"] = 0.5 + torch.rand(width)
            weights[f"{name}.num_batches_tracked"] = torch.tensor(7)

    def linear(name: str, out: int, into: int, bias: bool = True) -> None:
        weights[f"{name}.weight"] = torch.randn(out, into) / into**0.5
        if bias:
            weights[f"{name}.bias"] = torch.randn(out) / 2

    def convolution(name: str, out: int, into: int, bias: bool = False) -> None:
        weights[f"{name}.weight"] = torch.randn(out, into, 3, 3) / (3 * into**0.5)
        if bias:
            weights[f"{name}.bias"] = torch.randn(out) / 2

    convolution("patch_embed.conv_down.0", STEM, 3)
    norm("patch_embed.conv_down.1", STEM)
    convolution("patch_embed.conv_down.3", WIDTH // 4, STEM)
    norm("patch_embed.conv_down.4", WIDTH // 4)
    for stage, depth in enumerate(DEPTHS):
        width = WIDTH // 4 * 2**stage
        for number in range(depth):
            at = f"levels.{stage}.blocks.{number}."
            if stage < 2:
                for part in ("1", "2"):
                    convolution(f"{at}conv{part}", width, width, bias=True)
                    norm(f"{at}norm{part}", width)
                continue
            norm(f"{at}norm1", width, batch=False)
            norm(f"{at}norm2", width, batch=False)
            linear(f"{at}mlp.fc1", 2 * width, width)
            linear(f"{at}mlp.fc2", width, 2 * width)
            if scaled:
                weights[f"{at}gamma_1"], weights[f"{at}gamma_2"] = 1 + torch.randn(2, width) / 3
            if not mixes(stage, number):
                linear(f"{at}mixer.qkv", 3 * width, width)
                weights[f"{at}mixer.qkv.weight"] *= 2  # Attention then prefers some positions.
                linear(f"{at}mixer.proj", width, width)
                continue
            inner, rank = width // 2, width // 16
            linear(f"{at}mixer.in_proj", width, width, bias=False)
            linear(f"{at}mixer.out_proj", width, width, bias=False)
            linear(f"{at}mixer.x_proj", rank + 2 * STATE, inner, bias=False)
            linear(f"{at}mixer.dt_proj", inner, rank)
            weights[f"{at}mixer.A_log"], weights[f"{at}mixer.D"] = torch.rand(inner, STATE), torch.randn(inner)
            for half in "xz":
                weights[f"{at}mixer.conv1d_{half}.weight"] = torch.randn(inner, 1, TAPS)
        if stage < 3:
            convolution(f"levels.{stage}.downsample.reduction.0", 2 * width, width)
    norm("norm", 2 * WIDTH)
    linear("head", CLASSES, 2 * WIDTH)
    return weights


def around(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve x (length, channels) with the position, the one before and the one after it."""
    rows = []
    for t in range(len(x)):
        near = [(j, t + j - 1) for j in range(TAPS) if 0 <= t + j - 1 < len(x)]
        rows.append(sum(kernel[:, 0, j] * x[s] for j, s in near))
    return torch.stack(rows)


def mixed(u: Tensor, w: dict[str, Tensor]) -> Tensor:
    """A mixer's output for u (length, width), one step after the other (Eq. 6); the bias of Δ counts twice."""
    x, z = (u @ w["in_proj.weight"].T).chunk(2, dim=-1)
    x, z = (silu(around(half, w[f"conv1d_{name}.weight"])) for half, name in ((x, "x"), (z, "z")))
    rank = w["dt_proj.weight"].shape[1]
    A, H, rows = -w["A_log"].exp(), torch.zeros(x.shape[1], STATE).double(), []
    for t in range(len(x)):
        step, b, c = (w["x_proj.weight"] @ x[t]).split([rank, STATE, STATE])
        delta = softplus(w["dt_proj.weight"] @ step + 2 * w["dt_proj.bias"])
        H = (delta[:, None] * A).exp() * H + (delta * x[t])[:, None] * b
        rows.append(H @ c + w["D"] * x[t])
    return torch.cat([torch.stack(rows), z], dim=-1) @ w["out_proj.weight"].T


def attended(u: Tensor, w: dict[str, Tensor], heads: int) -> Tensor:
    """Softmax attention over all positions, head by head."""
    q, k, v = (u @ w["qkv.weight"].T + w["qkv.bias"]).chunk(3, dim=-1)
    size, read = q.shape[1] // heads, []
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        read.append((q[:, own] @ k[:, own].T / size**0.5).softmax(-1) @ v[:, own])
    return torch.cat(read, dim=-1) @ w["proj.weight"].T + w["proj.bias"]


def normed(x: Tensor, w: dict[str, Tensor], name: str, eps: float = 1e-5) -> Tensor:
    """Batch norm of a map (1, channels, height, width)."""
    own = (w[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
    return batch_norm(x, *own, eps=eps)


def below(w: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}


def reference(weights: dict[str, Tensor], image: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of an image (height, width, colours) in [0, 1], in float64, and stage 3's input (positions, width)."""
    w = {name: weight.double() for name, weight in weights.items()}
    x = ((image - MEAN) / SPREAD).permute(2, 0, 1).unsqueeze(0)
    for convolution, norm in (("0", "1"), ("3", "4")):
        x = conv2d(x, w[f"patch_embed.conv_down.{convolution}.weight"], stride=2, padding=1)
        x = relu(normed(x, w, f"patch_embed.conv_down.{norm}", 1e-4))
    embedded = x
    for stage, depth in enumerate(DEPTHS):
        for number in range(depth if stage < 2 else 0):
            own, y = below(w, f"levels.{stage}.blocks.{number}."), x
            for part in ("1", "2"):
                y = normed(conv2d(y, own[f"conv{part}.weight"], own[f"conv{part}.bias"], padding=1), own, f"norm{part}")
                y = gelu(y, approximate="tanh") if part == "1" else y
            x = x + y
        if stage > 1:
            side = x.shape[2]
            stream = x[0].flatten(1).T
            embedded = stream if stage == 2 else embedded
            for number in range(depth):
                own = below(w, f"levels.{stage}.blocks.{number}.")
                one = torch.ones(stream.shape[1]).double()
                scales = own.get("gamma_1", one), own.get("gamma_2", one)
                u = layer_norm(stream, one.shape, own["norm1.weight"], own["norm1.bias"])
                part = below(own, "mixer.")
                y = mixed(u, part) if mixes(stage, number) else attended(u, part, HEADS[stage])
                stream = stream + scales[0] * y
                u = layer_norm(stream, one.shape, own["norm2.weight"], own["norm2.bias"])
                y = gelu(u @ own["mlp.fc1.weight"].T + own["mlp.fc1.bias"]) @ own["mlp.fc2.weight"].T
                stream = stream + scales[1] * (y + own["mlp.fc2.bias"])
            x = stream.T.unflatten(1, (side, side)).unsqueeze(0)
        if stage < 3:
            x = conv2d(x, w[f"levels.{stage}.downsample.reduction.0.weight"], stride=2, padding=1)
    return w["head.weight"] @ normed(x, w, "norm").mean((2, 3))[0] + w["head.bias"], embedded


def written(path, weights: dict[str, Tensor], config: dict | None = None, prefix: str = "model."):
    """Write them as they are on the hub: config.json, and weights of the module `model`."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    save_file({prefix + name: t.contiguous() for name, t in weights.items()}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ssmscope.load(written(tmp_path_factory.mktemp("hub") / "vision", stored()), dtype="float64")


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def batch(model, pixels):
    return model.encode(values=pixels.reshape(2, -1, 3))


@pytest.mark.parametrize("scaled", [True, False], ids=["with γ", "without γ"])
def test_logits_are_the_references(scaled, pixels, tmp_path):
    weights = stored(scaled)
    model = ssmscope.load(written(tmp_path, weights), dtype="float64")
    assert model.num_layers == 2 and model.layer_numbers == (0, 1) and model.config.image_size == [ACROSS, ACROSS]
    assert model.labels == [f"class {at}" for at in range(CLASSES)] and model.architecture == "ssm-mambavision"
    batch = model.encode(values=pixels[0].reshape(-1, 3))
    Image.fromarray(pixels[0]).save(tmp_path / "image.png")
    by_name = Texts().read({**NO_TEXTS, "image": [str(tmp_path / "image.png")]}, {}, [model])
    assert torch.equal(by_name.values, batch.values)
    assert batch.lengths == [ACROSS**2] and batch.tokens[0][-1] == "3,3" and batch.words[0][-1] == ACROSS**2 - 1
    expected, embedded = reference(weights, torch.from_numpy(pixels[0]).double() / 255)
    with TrueFloat64():
        assert relative(model.embed(batch)[0], embedded) < 1e-6
        assert relative(model.logits(batch)[0], expected) < 1e-6  # 1/255 and the colours' means are in float32
    with torch.no_grad():  # the model's own pass
        assert relative(model.module(input_values=batch.values).logits[0], expected) < 1e-6


def test_a_changed_formula_is_seen(pixels, tmp_path):
    weights = stored()
    image = torch.from_numpy(pixels[0]).double() / 255
    expected, _ = reference(weights, image)
    for name in ("2.blocks.0.mixer.dt_proj.bias", "2.blocks.1.mixer.conv1d_z.weight", "3.blocks.0.mixer.A_log"):
        changed = {**weights, f"levels.{name}": weights[f"levels.{name}"] / 2}
        model = ssmscope.load(written(tmp_path, changed), dtype="float64")
        assert relative(model.logits(model.encode(values=image.flatten(0, 1)))[0], expected) > 1e-3


@pytest.mark.parametrize("around", ["", "module.", "encoder.", "module.model."])
def test_a_file_of_a_published_model(around, model, batch, tmp_path, monkeypatch):
    """The prefixes of modules around the model are left out, and counters of batches need not be there."""
    form = Form(HEADS[2], HEADS[3], ACROSS)
    monkeypatch.setattr(mambavision_checkpoints, "PUBLISHED", {(WIDTH, *DEPTHS[2:]): form})
    file, weights = tmp_path / "mambavision_small_1k.pth.tar", stored()
    kept = {around + name: t for name, t in weights.items() if not around or "num_batches" not in name}
    torch.save({"epoch": 3, "state_dict": kept, "arch": "mamba_vision"}, file)
    assert torch.equal(ssmscope.load(file, dtype="float64").logits(batch), model.logits(batch))
    monkeypatch.undo()
    with pytest.raises(
        InputError, match="3 and 2 blocks of width 32 in stages 3 and 4, as none .*: give the hub's dir"
    ):
        ssmscope.load(file)


def test_published_models_share_their_widths():
    """The widths and blocks of the paper's Table 1, and heads of 40, 48, 64 and 49 channels."""
    for (width, _, _), form in mambavision_checkpoints.PUBLISHED.items():
        assert width // form.heads == 2 * width // form.last_heads in (40, 48, 64, 49) and form.across == 14


def test_every_mixer_is_a_linear_map_of_its_input(model, batch):
    trace, weights = model.trace(batch), {name: t.double() for name, t in stored().items()}
    assert trace.bidirectional and len(trace.layers) == 2
    for index, mixer in enumerate(model.mixers):
        layer, linearized = trace.layers[index], trace.linearized[index]
        with torch.no_grad():
            own = mixer(layer.u)
        expected = torch.stack([mixed(u, below(weights, f"levels.2.blocks.{index}.mixer.")) for u in layer.u])
        assert relative(own, expected) < 1e-6
        assert relative(linearized.matvec(linearized.u) + linearized.bias, own) < 1e-10
        assert relative(adapter_for(mixer).output(mixer, layer), own) < 1e-10
        assert linearized.rest is not None and relative(linearized.rest, own) > 0.1  # z is no gate
        whole = linearized.rest_map(layer.u, layer.u, True)
        assert relative(whole, linearized.rest) < 1e-12


def test_maps_act_on_convolved_values(model, batch):
    """The block's matrices times the convolution's output, and the skip, are the scan's output."""
    trace = model.trace(batch)
    for layer, linearized in zip(trace.layers, trace.linearized):
        (scanned,), (path,) = layer.scan(), linearized.paths
        assert torch.equal(path.input_map.source, layer.extras["convolved"])
        found = torch.stack([
            linearized_of_channel @ path.input_map.source[0, :, channel]
            for channel, linearized_of_channel in enumerate(channel_maps(path))
        ])  # fmt: skip
        assert relative(found, scanned.y[0, :, :, 0].T) < 1e-10


def channel_maps(path) -> Tensor:
    from examples import matrices

    return matrices(path, "block")[0]


def test_attention_of_stage_3_alone_is_shown(model, batch):
    """Stage 4 is part of the head: neither its mixers nor its attention are among the layers."""
    names = [*attention_modules(model.module)]
    assert names == ["backbone.layers.2.mixer"] == [*attention_layers(model.module)]
    shown = ssmscope.implicit_attention(model, batch)
    weights = next(map_ for map_ in shown[0].maps if map_.layer == "2 attention").values
    assert weights.shape == (ACROSS**2, ACROSS**2) and np.allclose(weights.sum(1), 1, atol=1e-5)
    assert np.triu(weights, 1).any()  # later positions are read
    _, stream = reference_layers(model, batch)
    own = below({name: t.double() for name, t in stored().items()}, "levels.2.blocks.2.")
    u = layer_norm(stream, stream.shape[1:], own["norm1.weight"], own["norm1.bias"])
    q, k, _ = (u @ own["mixer.qkv.weight"].T + own["mixer.qkv.bias"]).chunk(3, dim=-1)
    size = WIDTH // HEADS[2]
    expected = torch.stack([(a @ b.T / size**0.5).softmax(-1) for a, b in zip(q.split(size, 1), k.split(size, 1))])
    assert np.allclose(weights, expected.mean(0).numpy(), atol=1e-5)


def reference_layers(model, batch) -> tuple[Tensor, Tensor]:
    """Return the first picture's input of stage 3, and of its third block, by the reference's blocks."""
    w = {name: t.double() for name, t in stored().items()}
    first = stream = model.embed(batch)[0]
    for number in range(2):
        own = below(w, f"levels.2.blocks.{number}.")
        u = layer_norm(stream, stream.shape[1:], own["norm1.weight"], own["norm1.bias"])
        stream = stream + own["gamma_1"] * mixed(u, below(own, "mixer."))
        u = layer_norm(stream, stream.shape[1:], own["norm2.weight"], own["norm2.bias"])
        y = gelu(u @ own["mlp.fc1.weight"].T + own["mlp.fc1.bias"]) @ own["mlp.fc2.weight"].T + own["mlp.fc2.bias"]
        stream = stream + own["gamma_2"] * y
    return first, stream
