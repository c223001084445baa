"""Published form of a MambaVision: its weights by the names of its code, and a slow reference of the whole model."""

import json

import torch
from by_hand import below, scanned
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d, gelu, layer_norm, relu, silu, softplus

WIDTH, STEM, STATE, TAPS, CLASSES, ACROSS, POSITIONS = 32, 6, 3, 3, 5, 4, 16
DEPTHS, HEADS = [1, 2, 3, 2], [1, 2, 4, 8]
SIDE = 16 * ACROSS
CONFIG = {
    "model_type": "mambavision", "architectures": ["MambaVisionModelForImageClassification"], "dim": WIDTH // 4,
    "in_dim": STEM, "depths": DEPTHS, "num_heads": HEADS, "window_size": [8, 8, ACROSS, ACROSS // 2], "mlp_ratio": 2,
    "drop_path_rate": 0.2, "auto_map": {"AutoConfig": "configuration_mambavision.MambaVisionConfig"},
    "id2label": {str(at): f"class {at}" for at in range(CLASSES)},
}  # fmt: skip
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
    """A mixer's output for u (length, width), one step after the other; the bias of Δ counts twice."""
    x, z = (u @ w["in_proj.weight"].T).chunk(2, dim=-1)
    x, z = (silu(around(half, w[f"conv1d_{name}.weight"])) for half, name in ((x, "x"), (z, "z")))
    rank = w["dt_proj.weight"].shape[1]
    step, b, c = (x @ w["x_proj.weight"].T).split([rank, STATE, STATE], dim=-1)
    delta = softplus(step @ w["dt_proj.weight"].T + 2 * w["dt_proj.bias"])
    y = scanned(x.unsqueeze(-1), b, c, delta, -w["A_log"].exp(), w["D"]).squeeze(-1)
    return torch.cat([y, z], dim=-1) @ w["out_proj.weight"].T


def attended(u: Tensor, w: dict[str, Tensor], heads: int) -> Tensor:
    """Softmax attention over all positions, head by head."""
    q, k, v = (u @ w["qkv.weight"].T + w["qkv.bias"]).chunk(3, dim=-1)
    size, read = q.shape[1] // heads, []
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        read.append((q[:, own] @ k[:, own].T / size**0.5).softmax(-1) @ v[:, own])
    return torch.cat(read, dim=-1) @ w["proj.weight"].T + w["proj.bias"]


def layer_normed(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return layer_norm(x, x.shape[1:], w[f"{name}.weight"], w[f"{name}.bias"])


def widened(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """A feed-forward part's output."""
    return gelu(x @ w["mlp.fc1.weight"].T + w["mlp.fc1.bias"]) @ w["mlp.fc2.weight"].T + w["mlp.fc2.bias"]


def normed(x: Tensor, w: dict[str, Tensor], name: str, eps: float = 1e-5) -> Tensor:
    """Batch norm of a map (1, channels, height, width)."""
    own = (w[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
    return batch_norm(x, *own, eps=eps)


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
                u = layer_normed(stream, own, "norm1")
                part = below(own, "mixer.")
                y = mixed(u, part) if mixes(stage, number) else attended(u, part, HEADS[stage])
                stream = stream + scales[0] * y
                stream = stream + scales[1] * widened(layer_normed(stream, own, "norm2"), own)
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
