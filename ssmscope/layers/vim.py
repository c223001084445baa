"""Vision Mamba (Vim, Zhu et al. 2024, arXiv 2401.09417): layers of Mamba that read an image's patches both ways.

A layer is two of Mamba's recurrences on one projection (Vim, Algorithm 1): forwards and backwards, each with a
convolution, Δ, B, C, A and D of its own, gated alike: W_O (½ (y_forward + y_backward) ⊙ SiLU(z)). The class token
is in the middle of the patches. Here it is the last position, as in every classifier of pixels, and each recurrence has
an `order`, in which it visits the positions. A learnt vector is added to each position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import PretrainedConfig, PreTrainedModel
from ssmscope.core.affine import depthwise
from ssmscope.core.blocks import Added
from ssmscope.core.forms import Form
from ssmscope.core.linearized import LinearizedLayer, OutputMap, Path, as_diagonal
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.layers import parts
from ssmscope.layers.linear_attention import Block
from ssmscope.networks.generation import BlocksInTurn
from ssmscope.ops import Recurrence, Scan
from ssmscope.ops.recurrence import along

BIDIRECTIONAL = True
DIRECTIONS = ("forward", "backward")


class Direction(NamedTuple):
    """Parts with which a layer reads in one direction, and the order of positions in it."""

    conv1d: nn.Module
    x_proj: nn.Module
    dt_proj: nn.Module
    A_log: Tensor
    D: Tensor
    order: Tensor


class VimMixer(parts.ReadMixer, nn.Module):
    """Vim's mixer; its parameters have the names of the published code, with _b for the backward direction."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        inner, state = config.expand * config.hidden_size, config.state_size
        self.rank, self.state, self.taps, self.middle = config.time_step_rank, state, config.conv_kernel, config.middle
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=False)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.act = nn.SiLU()
        for back in ("", "_b"):
            conv1d = nn.Conv1d(inner, inner, self.taps, groups=inner)
            setattr(self, f"conv1d{back}", conv1d)
            setattr(self, f"x_proj{back}", nn.Linear(inner, self.rank + 2 * state, bias=False))
            setattr(self, f"dt_proj{back}", nn.Linear(self.rank, inner))
            rates = torch.arange(1, state + 1, dtype=torch.float32).log().expand(inner, -1)
            setattr(self, f"A{back}_log", nn.Parameter(rates.clone()))
            setattr(self, f"D{back}", nn.Parameter(torch.ones(inner)))

    def directions(self, u: Tensor, mask: Tensor | None) -> tuple[Direction, Direction]:
        """Return both directions, forward first, through an input (batch, length, width). Raise InputError if there is
        padding and the class token is in the middle."""
        order = torch.arange(u.shape[1], device=u.device)
        if self.middle:
            if mask is not None:
                raise InputError("Vim reads whole images: their class token is in the middle, and none can be padded")
            order = torch.cat([order[: len(order[1:]) // 2], order[-1:], order[len(order[1:]) // 2 : -1]])
        own = (self.conv1d, self.x_proj, self.dt_proj, self.A_log, self.D)
        back = (self.conv1d_b, self.x_proj_b, self.dt_proj_b, self.A_b_log, self.D_b)
        return Direction(*own, order), Direction(*back, order.flip(0))


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms, two recurrences with an order; `extras` has `values`, the convolutions' input. Raise
    InputError if a state is given, as a layer that looks ahead cannot continue."""
    if state is not None:
        raise InputError("Vim reads whole images in both directions: no run continues from its states")
    mask = parts.as_mask(mask)
    values, z = mixer.in_proj(u).chunk(2, dim=-1)
    values, recurrences = parts.mask_padding(values, mask), []
    for direction in mixer.directions(u, mask):
        weight, bias = _taps(mixer, direction)
        x = along(direction.order, lambda t: parts.causal_convolution(t, weight, bias, act=mixer.act), values)  # noqa: B023
        x = parts.mask_padding(x, mask)
        step, B, C = direction.x_proj(x).split([mixer.rank, mixer.state, mixer.state], dim=-1)
        recurrences.append(
            Recurrence(
                x=parts.at_least_float32(x).unsqueeze(-1),
                b=parts.at_least_float32(B).unsqueeze(2),
                c=parts.at_least_float32(C).unsqueeze(2),
                delta=parts.mask_padding(softplus(parts.at_least_float32(direction.dt_proj(step))), mask),
                A=-parts.at_least_float32(direction.A_log).exp(),
                D=parts.at_least_float32(direction.D),
                order=direction.order,
            )
        )
    at = u.shape[1] - 1 if mixer.middle else None
    return LayerTrace(u, tuple(recurrences), mask=mask, z=z, reach=mixer.taps, at=at, extras={"values": values})


def _taps(mixer: VimMixer, direction: Direction) -> tuple[Tensor, Tensor | None]:
    return depthwise(direction.conv1d, mixer.out_proj.in_features, mixer.taps, "VimMixer.conv1d")


FORM = Form(
    values=lambda mixer, _: ("in_proj", slice(0, mixer.out_proj.in_features)),
    gate=lambda mixer, _: ("in_proj", slice(mixer.out_proj.in_features, None)),
    gate_activation="act",
)


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms."""
    scans = layer.scan() if scans is None else scans
    return FORM.output(mixer, layer, tuple(scan._replace(y=scan.y / 2) for scan in scans))


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with Δ, B, C, SiLU and the gate frozen: a path for each direction."""
    source, directions = parts.at_least_float32(layer.extras["values"]), mixer.directions(layer.u, layer.mask)
    plain = replace(FORM.input_map(mixer, layer), source=source)

    def paths(output_map: OutputMap) -> tuple[Path, ...]:
        found = []
        for name, direction, recurrence in zip(DIRECTIONS, directions, layer.recurrences):
            weight, bias = _taps(mixer, direction)
            kernel, bias = weight[:, 0].flip(-1), None if bias is None else parts.at_least_float32(bias)
            own = replace(plain, kernel=parts.at_least_float32(kernel), bias=bias, order=direction.order)
            diagonal = parts.mask_padding(as_diagonal(mixer.act, own.values(source, True)), layer.mask)
            found.append(Path(recurrence, replace(own, activation=diagonal), output_map, name=name, weight=0.5))
        return tuple(found)

    return FORM.linearized(mixer, layer, paths)


# ---- the models


class VimConfig(PretrainedConfig):
    """Configuration of a Vim's backbone.

    Args:
        vocab_size, hidden_size, num_hidden_layers: tokens (of a classifier of images, the class token), width, layers.
        state_size, expand, conv_kernel, time_step_rank: as Mamba's.
        positions: number of positions with a learnt vector, the class token's the last; 0 for no such vectors.
        middle: whether the last token is the class token, which is read in the middle of the others.
        layer_norm_epsilon, initializer_range: of the norms; the initial standard deviation of embeddings.

    Raises:
        InputError: if a size is not a positive integer.
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
    """Backbone of embedding, positions, blocks and norm."""

    config_class = VimConfig
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]
    block_class = Block

    def blocks(self, config: Any) -> list[nn.Module]:
        count, width = config.positions, config.hidden_size
        self.position, self.added = nn.Parameter(torch.zeros(1, count, width)) if count else None, Added()
        return super().blocks(config)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / 3)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, VimMixer):
            for dt_proj in (module.dt_proj, module.dt_proj_b):
                nn.init.uniform_(dt_proj.bias, -5.0, -2.0)

    def add_positions(self, x: Tensor) -> Tensor:
        """Return the embeddings with the positions' vectors added. Raise InputError if their numbers differ."""
        if self.position is None:
            return x
        if x.shape[1] != self.config.positions:
            raise InputError(
                f"{x.shape[1]} tokens were given; the model reads {self.config.positions}, the class token among them"
            )
        return x + self.added(self.position)


AUTO = (VimModel,)
