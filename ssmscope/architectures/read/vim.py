"""Vision Mamba (Vim, Zhu et al. 2024, arXiv 2401.09417): layers of Mamba that read the patches of an image both ways.

A layer is two of Mamba's recurrences on one projection (Vim, Algorithm 1): forwards and backwards, each with a
convolution, Δ, B, C, A and D of its own, gated alike: W_O (½ (y_forward + y_backward) ⊙ SiLU(z)). The class token
stands in the middle of the patches. Here it is the last position, as in every classifier of pixels, and the recurrences
come by the positions in the order of the image: each has an `order`. A learnt vector is added to each position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import PretrainedConfig, PreTrainedModel

from ssmscope.architectures.own.generation import BlocksInTurn
from ssmscope.architectures.read.linear_attention import Block
from ssmscope.architectures.read.linear_layers import chunked
from ssmscope.architectures.read.parts import (
    activated_convolution,
    as_mask,
    at_least_float32,
    causal_convolution,
    constant,
    mask_padding,
    opened_by,
    projection,
)
from ssmscope.core.affine import depthwise
from ssmscope.core.linearized import InputMap, LinearizedLayer, OutputMap, Path, as_diagonal
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.ops import Recurrence, Scan
from ssmscope.ops.order import along

MODEL_TYPES = ("ssm-vim",)
BIDIRECTIONAL = True
WAYS = ("forward", "backward")


class Way(NamedTuple):
    """The parts with which a layer reads one way, and the order of the positions on it."""

    conv1d: nn.Module
    x_proj: nn.Module
    dt_proj: nn.Module
    A_log: Tensor
    D: Tensor
    order: Tensor


class VimMixer(nn.Module):
    """Vim's mixer; its parameters have the names of the published code, with _b those of the way back."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        inner, state = config.expand * config.hidden_size, config.state_size
        self.rank, self.state, self.taps, self.middle = config.time_step_rank, state, config.conv_kernel, config.middle
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=False)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.act = nn.SiLU()
        for back in ("", "_b"):
            conv1d = nn.Conv1d(inner, inner, self.taps, padding=self.taps - 1, groups=inner)
            setattr(self, f"conv1d{back}", conv1d)
            setattr(self, f"x_proj{back}", nn.Linear(inner, self.rank + 2 * state, bias=False))
            setattr(self, f"dt_proj{back}", nn.Linear(self.rank, inner))
            rates = torch.arange(1, state + 1, dtype=torch.float32).log().expand(inner, -1)
            setattr(self, f"A{back}_log", nn.Parameter(rates.clone()))
            setattr(self, f"D{back}", nn.Parameter(torch.ones(inner)))

    def ways(self, u: Tensor, mask: Tensor | None) -> tuple[Way, Way]:
        """Forwards and backwards through an input (batch, length, width).

        Raises:
            InputError: for padding where the class token stands in the middle.
        """
        order = torch.arange(u.shape[1], device=u.device)
        if self.middle:
            if mask is not None:
                raise InputError("Vim reads whole images: their class token is in the middle, and none can be padded")
            order = torch.cat([order[: len(order[1:]) // 2], order[-1:], order[len(order[1:]) // 2 : -1]])
        own = (self.conv1d, self.x_proj, self.dt_proj, self.A_log, self.D)
        back = (self.conv1d_b, self.x_proj_b, self.dt_proj_b, self.A_b_log, self.D_b)
        return Way(*own, order), Way(*back, order.flip(0))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = as_mask(attention_mask)
        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)
        outputs = []
        for way in self.ways(hidden_states, mask):

            def read(x: Tensor, way: Way = way) -> Tensor:
                hidden = None if mask is None else mask[:, way.order]
                x = rearrange(mask_padding(x, hidden), "b t d -> b d t")
                x = mask_padding(self.act(rearrange(way.conv1d(x)[..., : x.shape[2]], "b d t -> b t d")), hidden)
                step, B, C = way.x_proj(x).split([self.rank, self.state, self.state], dim=-1)
                delta = mask_padding(softplus(way.dt_proj(step)), hidden)
                b, c = (t.unsqueeze(2).expand(-1, -1, x.shape[2], -1) for t in (B, C))
                log_a = -delta.unsqueeze(-1) * way.A_log.to(delta).exp()
                return chunked(c, b, (delta * x).unsqueeze(-1), log_a).squeeze(-1) + way.D.to(x) * x

            outputs.append(along(way.order, read, x))
        return self.out_proj((outputs[0] + outputs[1]) / 2 * self.act(z))


MIXERS: tuple[type[nn.Module], ...] = (VimMixer,)


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """The layer's terms from its input `u` (batch, length, width) and weights, as two recurrences with an order.

    `mask` (batch, length) is True at real positions. `extras` has `values`, what the convolutions read.

    Raises:
        InputError: for a state: what looks ahead does not continue.
    """
    assert isinstance(mixer, VimMixer)
    if state is not None:
        raise InputError("Vim reads whole images both ways: no run continues from its states")
    mask = as_mask(mask)
    values, z = mixer.in_proj(u).chunk(2, dim=-1)
    values, recurrences = mask_padding(values, mask), []
    for way in mixer.ways(u, mask):
        weight, bias = _taps(mixer, way)
        x = along(way.order, lambda t: activated_convolution(t, weight, bias, mixer.act), values)  # noqa: B023
        x = mask_padding(x, mask)
        step, B, C = way.x_proj(x).split([mixer.rank, mixer.state, mixer.state], dim=-1)
        recurrences.append(
            Recurrence(
                x=at_least_float32(x).unsqueeze(-1),
                b=at_least_float32(B).unsqueeze(2),
                c=at_least_float32(C).unsqueeze(2),
                delta=mask_padding(softplus(at_least_float32(way.dt_proj(step))), mask),
                A=-at_least_float32(way.A_log).exp(),
                D=at_least_float32(way.D),
                order=way.order,
            )
        )
    at = u.shape[1] - 1 if mixer.middle else None
    return LayerTrace(u, tuple(recurrences), mask=mask, z=z, reach=mixer.taps, at=at, extras={"values": values})


def _taps(mixer: VimMixer, way: Way) -> tuple[Tensor, Tensor | None]:
    return depthwise(way.conv1d, mixer.out_proj.in_features, mixer.taps, "VimMixer.conv1d")


def output(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """The mixer's output (batch, length, width) from its terms."""
    assert isinstance(mixer, VimMixer) and layer.z is not None
    forward, backward = layer.scan() if scans is None else scans
    y = (forward.y + backward.y).squeeze(-1) / 2
    return mixer.out_proj(y.to(layer.z.dtype) * mixer.act(layer.z))


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """The layer as a linear map with Δ, B, C, SiLU and the gate frozen: a path for each way."""
    assert isinstance(mixer, VimMixer) and layer.z is not None
    u, z, inner = at_least_float32(layer.u), at_least_float32(layer.z), mixer.out_proj.in_features
    enter, project = projection(mixer, "in_proj", slice(0, inner)), projection(mixer, "out_proj")
    opening = opened_by(projection(mixer, "in_proj", slice(inner, None)), mixer.act, z)
    output_map = OutputMap(lambda v: project(v, False), gate=mixer.act(z), opening=opening)
    source, paths = at_least_float32(layer.extras["values"]), []
    for name, way, recurrence in zip(WAYS, mixer.ways(layer.u, layer.mask), layer.recurrences):
        weight, bias = _taps(mixer, way)
        y = along(way.order, lambda t: causal_convolution(t, weight, bias), source)  # noqa: B023
        input_map = InputMap(
            source=source,
            enter=lambda u, biased: mask_padding(enter(u, biased), layer.mask),
            kernel=at_least_float32(weight[:, 0].flip(-1)),
            bias=None if bias is None else at_least_float32(bias),
            activation=mask_padding(as_diagonal(mixer.act, y), layer.mask),
            order=way.order,
        )
        paths.append(Path(recurrence, input_map, output_map, name=name, weight=0.5))
    return LinearizedLayer(u, tuple(paths), rest=constant(mixer, "out_proj", u))


def state_after(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...]) -> LayerState:
    """The states at the end of each way; no run continues from them."""
    return LayerState(conv=None, ssm=tuple(scan.state for scan in scans))


# ---- the models


class VimConfig(PretrainedConfig):
    """A Vim's backbone.

    Args:
        vocab_size, hidden_size, num_hidden_layers: tokens (of a classifier of images, the class token), width, layers.
        state_size, expand, conv_kernel, time_step_rank: as Mamba's.
        positions: how many positions have a learnt vector, the class token's the last; 0 for no such vectors.
        middle: whether the last token is the class token, and stands in the middle of the others.
        layer_norm_epsilon, initializer_range: of the norms; the standard deviation of embeddings at first.

    Raises:
        InputError: for a size that is no positive integer.
    """

    model_type = "ssm-vim"
    mixer = VimMixer
    intermediate_size = 0

    def __init__(
        self,
        vocab_size: int = 1,
        hidden_size: int = 192,
        num_hidden_layers: int = 24,
        state_size: int = 16,
        expand: int = 2,
        conv_kernel: int = 4,
        time_step_rank: int = 12,
        positions: int = 0,
        middle: bool = True,
        layer_norm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        **kwargs,
    ):
        sizes = dict(vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=num_hidden_layers)
        sizes |= dict(state_size=state_size, expand=expand, conv_kernel=conv_kernel, time_step_rank=time_step_rank)
        for name, value in {**sizes, "positions": positions}.items():
            if type(value) is not int or value < (name != "positions"):
                raise InputError(f"{name} {value!r} must be an integer, {int(name != 'positions')} or more")
            setattr(self, name, value)
        self.middle, self.layer_norm_epsilon, self.initializer_range = middle, layer_norm_epsilon, initializer_range
        super().__init__(**{**kwargs, "use_cache": False})


class VimModel(BlocksInTurn, PreTrainedModel):
    """Embedding, positions, blocks, norm."""

    config_class = VimConfig
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]

    def __init__(self, config: VimConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embeddings = nn.Embedding(config.vocab_size, width)
        self.position = nn.Parameter(torch.zeros(1, config.positions, width)) if config.positions else None
        self.layers = nn.ModuleList(Block(config, number) for number in range(config.num_hidden_layers))
        self.norm_f = nn.RMSNorm(width, config.layer_norm_epsilon)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / 3)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, VimMixer):
            for dt_proj in (module.dt_proj, module.dt_proj_b):
                nn.init.uniform_(dt_proj.bias, -5.0, -2.0)

    def placed(self, x: Tensor) -> Tensor:
        """The embeddings with the positions' vectors added.

        Raises:
            InputError: for another number of tokens than there are positions.
        """
        if self.position is None:
            return x
        if x.shape[1] != self.config.positions:
            raise InputError(
                f"{x.shape[1]} tokens were given; the model reads {self.config.positions}, the class token among them"
            )
        return x + self.position


AUTO = (VimModel,)


def examples() -> dict[str, nn.Module]:
    """A small random classifier of this family, of tokens; seeded by the caller."""
    from ssmscope.architectures.own.classifier import SSMClassifierConfig, SSMForSequenceClassification

    sizes: dict[str, Any] = dict(vocab_size=97, hidden_size=16, num_hidden_layers=2, state_size=3, time_step_rank=2)
    config = VimConfig(**sizes, middle=False, initializer_range=0.5)
    return {"vim": SSMForSequenceClassification(SSMClassifierConfig(backbone=config, num_labels=3))}
