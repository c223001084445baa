"""MambaVision (Hatamizadeh & Kautz 2024, arXiv 2407.08083): layers of Mamba, then of attention, on picture features.

Stages 1 and 2 are convolutions, stages 3 and 4 blocks, the first half of which have a mixer and the others softmax
attention over all positions. A mixer splits its projected input into x and z, each convolved over the position and its
neighbours on both sides:

    x = SiLU(conv(W_x u)),   z = SiLU(conv(W_z u)),   output = W_O [scan(x), z],

so that z goes beside the recurrence and is no gate. The recurrence runs from the first patch to the last; the layers
read later positions through convolutions and attention. The published code adds the bias b of Δ twice, in the linear
map and in the scan: Δ = softplus(W_Δ s + 2 b), where Mamba has b once. Trained weights need both.

The backbone here is stage 3. In a classifier of pictures the patch embedding and stages 1 and 2 make its embeddings,
16 × 16 pixels a position, and stage 4, at half the resolution, is part of the head: what is asked of layers is asked of
stage 3. Blocks read the whole map in raster order, as the published code does at the trained size, where one window is
the whole map.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, softplus
from transformers import PretrainedConfig, PreTrainedModel
from ssmscope.core.affine import depthwise
from ssmscope.core.blocks import BlockPart
from ssmscope.core.linearized import InputMap, LinearizedLayer, OutputMap, Path, as_diagonal
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.layers import parts
from ssmscope.layers.feed_forward import FeedForward
from ssmscope.layers.rotary_attention import RotaryAttention, score_mask
from ssmscope.networks.generation import BlocksInTurn
from ssmscope.ops import Recurrence, Scan

BIDIRECTIONAL = True
BLOCK_PARTS = {"LastMixing": BlockPart(linearize=lambda part, u: linearized(part, compute_terms(part, u)))}

# ---- how the mixers are read


class Mixing(nn.Module):
    """Parts of MambaVision's mixer; parameters have the names of the published code."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.taps = config.hidden_size, config.conv_kernel
        self.sizes = [config.time_step_rank, config.state_size, config.state_size]
        self.inner = width // 2
        self.in_proj = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)
        self.conv1d_x, self.conv1d_z = (
            nn.Conv1d(self.inner, self.inner, self.taps, groups=self.inner, bias=False) for _ in range(2)
        )
        self.x_proj = nn.Linear(self.inner, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(self.sizes[0], self.inner)
        self.act = nn.SiLU()
        rates = torch.arange(1, config.state_size + 1, dtype=torch.float32).log().expand(self.inner, -1)
        self.A_log, self.D = nn.Parameter(rates.clone()), nn.Parameter(torch.ones(self.inner))


class MambaVisionMixer(parts.ReadMixer, Mixing):
    """Mixer of stage 3."""


def _centred(mixer: Mixing, name: str, mask: Tensor | None, x: Tensor, biased: bool = True) -> Tensor:
    """Return a mixer's convolution of `x` (batch, length, channels) around each position, zero at padding."""
    weight, bias = depthwise(getattr(mixer, name), mixer.inner, mixer.taps, f"{type(mixer).__name__}.{name}")
    ahead = mixer.taps // 2
    x = pad(parts.mask_padding(x, mask), (0, 0, 0, ahead))
    return parts.mask_padding(parts.causal_convolution(x, weight, bias if biased else None)[:, ahead:], mask)


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms; `extras` has `convolved` and `beside`, both halves before their activations. Raise
    InputError if a state is given, as a layer that looks ahead cannot continue."""
    if state is not None:
        raise InputError("MambaVision reads whole images: no run continues from its states")
    mask = parts.as_mask(mask)
    convolved, beside = (
        _centred(mixer, name, mask, half)
        for name, half in zip(("conv1d_x", "conv1d_z"), mixer.in_proj(u).chunk(2, dim=-1))
    )
    x = parts.mask_padding(mixer.act(convolved), mask)
    step, B, C = mixer.x_proj(x).split(mixer.sizes, dim=-1)
    step = mixer.dt_proj(step) + mixer.dt_proj.bias
    recurrence = Recurrence(
        x=parts.at_least_float32(x).unsqueeze(-1),
        b=parts.at_least_float32(B).unsqueeze(2),
        c=parts.at_least_float32(C).unsqueeze(2),
        delta=parts.mask_padding(softplus(parts.at_least_float32(step)), mask),
        A=-parts.at_least_float32(mixer.A_log).exp(),
        D=parts.at_least_float32(mixer.D),
    )
    extras = {"convolved": convolved, "beside": beside}
    return LayerTrace(u, (recurrence,), mask=mask, reach=mixer.taps, extras=extras)


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms."""
    (scanned,) = layer.scan() if scans is None else scans
    beside = mixer.act(layer.extras["beside"])
    return mixer.out_proj(torch.cat([scanned.y.squeeze(-1).to(beside.dtype), beside], dim=-1))


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with Δ, B, C and both SiLU frozen. The convolutions read later positions, so the
    recurrence's is in `enter`, and maps of the block act on what it gives."""
    u, inner = parts.at_least_float32(layer.u), mixer.inner
    convolved, beside = (parts.at_least_float32(layer.extras[name]) for name in ("convolved", "beside"))
    enter_x = parts.projection(mixer, "in_proj", slice(0, inner))
    enter_z = parts.projection(mixer, "in_proj", slice(inner, None))
    project, opened = parts.projection(mixer, "out_proj"), as_diagonal(mixer.act, beside)
    conv_x, conv_z = (partial(_centred, mixer, name, layer.mask) for name in ("conv1d_x", "conv1d_z"))

    def rest_map(u: Tensor, _: Tensor, biased: bool) -> Tensor:
        return project(pad(conv_z(enter_z(u, biased), biased) * opened, (inner, 0)), biased)

    input_map = InputMap(
        source=convolved,
        enter=lambda u, biased: conv_x(enter_x(u, biased), biased),
        activation=parts.mask_padding(as_diagonal(mixer.act, convolved), layer.mask),
    )
    output_map = OutputMap(lambda v: project(pad(v, (0, inner)), False))
    path = Path(layer.recurrence, input_map, output_map)
    return LinearizedLayer(u, (path,), rest=rest_map(u, u, True), rest_map=rest_map)


# ---- the backbone


class MambaVisionConfig(PretrainedConfig):
    """Configuration of a MambaVision: of stage 3, and of the other stages if it classifies pictures.

    Args:
        vocab_size: tokens; 1, which nothing reads, for pictures.
        hidden_size, num_hidden_layers: width and blocks, of which the last half, rounded down, have attention.
        num_attention_heads, intermediate_size: heads of attention; inner width of the feed-forward parts.
        state_size, conv_kernel, time_step_rank: as Mamba's.
        layer_scale: whether what a block adds is multiplied by a learnt vector.
        layer_norm_epsilon, initializer_range: of the norms; the initial standard deviation of embeddings.
        stem_size: width of the patch embedding's first convolution.
        early_layers: blocks of stages 1 and 2.
        last_layers, last_heads: blocks of stage 4, and heads of their attention.

    Raises:
        InputError: if a size is not a positive integer, or the width is not even or not shared by the heads.
    """

    model_type = "ssm-mambavision"
    swiglu = False
    feed_forward_bias = True

    def __init__(
        self,
        vocab_size: int = 1,
        hidden_size: int = 320,
        num_hidden_layers: int = 8,
        num_attention_heads: int = 8,
        intermediate_size: int = 1280,
        state_size: int = 8,
        conv_kernel: int = 3,
        time_step_rank: int = 20,
        layer_scale: bool = False,
        layer_norm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        stem_size: int = 32,
        early_layers: Sequence[int] = (1, 3),
        last_layers: int = 4,
        last_heads: int = 16,
        **kwargs,
    ):
        sizes = dict(vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=num_hidden_layers)
        sizes |= dict(num_attention_heads=num_attention_heads, intermediate_size=intermediate_size)
        sizes |= dict(state_size=state_size, conv_kernel=conv_kernel, time_step_rank=time_step_rank)
        sizes |= dict(stem_size=stem_size, last_layers=last_layers, last_heads=last_heads)
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise InputError(f"{name} {value!r} must be an integer, 1 or more")
            setattr(self, name, value)
        if len(early_layers) != 2 or any(type(each) is not int or each < 1 for each in early_layers):
            raise InputError(f"early_layers is {early_layers!r}; allowed are two numbers of blocks, 1 or more")
        if hidden_size % 2 or hidden_size % num_attention_heads or 2 * hidden_size % last_heads:
            said = f"hidden_size {hidden_size} must be even and a multiple of {num_attention_heads} heads,"
            raise InputError(f"{said} and twice it of stage 4's {last_heads}")
        self.early_layers, self.layer_scale = list(early_layers), layer_scale
        self.layer_norm_epsilon, self.initializer_range = layer_norm_epsilon, initializer_range
        super().__init__(**{**kwargs, "use_cache": False})

    def picture_parts(self) -> tuple[type[nn.Module], type[nn.Module]]:
        """Return the classes of a picture classifier's modules before and after the backbone."""
        return FirstStages, LastStage

    def last_stage(self) -> MambaVisionConfig:
        """Return the configuration of stage 4, twice as wide."""
        found = copy.copy(self)
        for name in ("hidden_size", "intermediate_size", "time_step_rank"):
            setattr(found, name, 2 * getattr(self, name))
        found.num_hidden_layers, found.num_attention_heads = self.last_layers, self.last_heads
        return found


class MambaVisionBlock(nn.Module):
    """Block x + γ₁ mixer(norm(x)), then x + γ₂ feed-forward(norm(x)), of parts of these `kinds`: mixer, attention,
    feed-forward part."""

    kinds: tuple[Any, Any, Any] = (MambaVisionMixer, RotaryAttention, FeedForward)

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        width, eps, (mixer, attention, feed_forward) = config.hidden_size, config.layer_norm_epsilon, self.kinds
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.attends = number >= (config.num_hidden_layers + 1) // 2
        heads = {"num_heads": config.num_attention_heads}
        self.mixer: Any = attention(config, number, heads) if self.attends else mixer(config)
        self.mlp = feed_forward(config)
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.ones(width)) if config.layer_scale else None for _ in range(2))

    def forward(self, x: Tensor, attention_mask: Tensor | None, unread: Tensor, position_ids: Tensor) -> Tensor:
        """Run the block; `unread` is the `score_mask` of attention."""
        normed = self.norm1(x)
        if self.attends:
            y = self.mixer(normed, unread, position_ids, None)[0]
        else:
            y = self.mixer(normed, attention_mask=attention_mask)
        x = x + (y if self.gamma_1 is None else self.gamma_1 * y)
        y = self.mlp(self.norm2(x))
        return x + (y if self.gamma_2 is None else self.gamma_2 * y)


def block_arguments(x: Tensor, attention_mask: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the arguments of every block after the residual stream `x`."""
    mask, steps = parts.as_mask(attention_mask), torch.arange(x.shape[1], device=x.device)
    return attention_mask, score_mask(x, mask, causal=False), steps.expand(len(x), -1)


class MambaVisionModel(BlocksInTurn, PreTrainedModel):
    """Backbone of embeddings and stage 3, after which there is no norm."""

    config_class = MambaVisionConfig
    main_input_name = "input_ids"
    _no_split_modules = ["MambaVisionBlock"]
    _supports_sdpa = True
    block_class = MambaVisionBlock

    def norm(self, config: Any) -> nn.Module:
        return nn.Identity()

    def normed(self, x: Tensor) -> Tensor:
        return x

    def block_arguments(self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> tuple[Any, ...]:
        return block_arguments(x, attention_mask)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / 3)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, Mixing):
            nn.init.uniform_(module.dt_proj.bias, -2.5, -1.0)


# ---- the other stages, of classifiers of pictures

PATCH = 16
"""Side in pixels of what a position of stage 3 stands for."""
COLOR_MEANS, COLOR_DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's colours, red, green and blue."""


class LastMixing(Mixing):
    """Mixer of stage 4. Parts of stage 4 have other names than those of stage 3: what is read, shown and edited is
    found by the names of classes."""

    def forward(self, x: Tensor, attention_mask: None = None) -> Tensor:
        return output(self, compute_terms(self, x))


class LastAttending(RotaryAttention):
    """Attention of stage 4."""


class LastBlock(MambaVisionBlock):
    """Block of stage 4."""

    kinds = (LastMixing, LastAttending, FeedForward)


class ConvolutionBlock(nn.Module):
    """Block of stages 1 and 2, x + norm(conv(GELU(norm(conv(x)))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = gelu(self.norm1(self.conv1(x)), approximate="tanh")
        return x + self.norm2(self.conv2(y))


def halved(width: int, out: int) -> nn.Conv2d:
    """Return a convolution that halves both sides of a map."""
    return nn.Conv2d(width, out, 3, stride=2, padding=1, bias=False)


class FirstStages(nn.Module):
    """Patch embedding and stages 1 and 2, from pixels to the positions of stage 3."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        backbone, self.form = config.backbone, _form(config)
        width, first = backbone.hidden_size, backbone.stem_size
        self.patches = nn.Sequential(
            *(halved(3, first), nn.BatchNorm2d(first, eps=1e-4), nn.ReLU()),
            *(halved(first, width // 4), nn.BatchNorm2d(width // 4, eps=1e-4), nn.ReLU()),
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvolutionBlock(size) for _ in range(count)), halved(size, 2 * size))
            for size, count in zip((width // 4, width // 2), backbone.early_layers)
        )

    def forward(self, patches: Tensor) -> Tensor:
        """Return the embeddings (batch, positions, width) of patches (batch, positions, 16 · 16 · 3) from 0 to 1. Raise
        InputError for another number of patches."""
        height, width = self.form
        if patches.shape[1] != height * width:
            raise InputError(f"{patches.shape[1]} patches were given; the model reads {width} × {height}")
        x = rearrange(patches, "n (y x) (a b c) -> n c (y a) (x b)", y=height, a=PATCH, b=PATCH)
        mean, spread = (torch.tensor(each).to(x).view(-1, 1, 1) for each in (COLOR_MEANS, COLOR_DEVIATIONS))
        x = self.patches((x - mean) / spread)
        for stage in self.stages:
            x = stage(x)
        return rearrange(x, "n d y x -> n (y x) d")


class LastStage(nn.Module):
    """Stage 4, norm, mean over its positions and linear map to the classes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        backbone, self.form = config.backbone.last_stage(), _form(config)
        width = backbone.hidden_size
        self.reduction = halved(config.backbone.hidden_size, width)
        self.blocks = nn.ModuleList(LastBlock(backbone, number) for number in range(backbone.num_hidden_layers))
        self.norm = nn.BatchNorm2d(width)
        self.out = nn.Linear(width, config.num_labels)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (batch, classes) for the output of stage 3, (batch, positions, width)."""
        x = self.reduction(rearrange(hidden, "n (y x) d -> n d y x", y=self.form[0]))
        side = x.shape[2]
        x = rearrange(x, "n d y x -> n (y x) d")
        arguments = block_arguments(x, None)
        for block in self.blocks:
            x = block(x, *arguments)
        return self.out(self.norm(rearrange(x, "n (y x) d -> n d y x", y=side)).mean((2, 3)))


def _form(config: Any) -> tuple[int, int]:
    """Return the positions of stage 3 down and across. Raise InputError for other pictures than it reads."""
    size, patch = config.image_size, config.patch
    if config.channels != 3 * PATCH**2 or patch != [PATCH, PATCH] or size is None or size[0] % 2 or size[1] % 2:
        said = f"a MambaVision reads patches of {PATCH} × {PATCH} pixels of 3 colours, an even number down and across;"
        raise InputError(f"{said} channels are {config.channels}, image_size is {size} and patch {patch}")
    if config.backbone.hidden_size % 4:
        raise InputError(
            f"hidden_size {config.backbone.hidden_size} is not a multiple of 4, as stages double the width"
        )
    return size[0], size[1]


AUTO = (MambaVisionModel,)
