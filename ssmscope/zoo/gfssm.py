"""GFSSM (arXiv 2408.00244): the state of a Mamba or Mamba-2 in Q groups that take turns, after a short filter.

The filtered input is s_t = Σ_j k_j x_{t−j}. Of the Q states h_i only the one whose turn it is, i = t mod Q, makes a
step, h_i ← Ā_t h_i + B̄_t s_tᵀ; the others hold; all are read, y_t = C_tᵀ Σ_i h_i + D s_t. Each h_i starts from a
learnable prompt h_{i,0}, the attention sink. As matrices, with L[t, s] = C_tᵀ (∏_{s<r≤t, r≡s mod Q} Ā_r) B̄_s and its
shifts L_j = L Zʲ, y = (Σ_j k_j L_j) x + Σ_i C_tᵀ (∏_{r≤t, r≡i mod Q} Ā_r) h_{i,0}, and D on the diagonal of L.

A layer therefore is Q recurrences on the whole time axis. Off its turn a recurrence has Δ = 0, which holds the state
and writes nothing. The paper defines no skip: here D reads s_t, as everything else in the layer does. The filter is
(1, 0, 0, 0) and the prompts are zero at first: with Q = 1 that is the base model.

Under a constant transition a, grouping makes a group's state change as a^{t/Q} in place of a^t. Memory lasts Q times as
long and growth has a Q-th of the exponent; what was unbounded stays so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor, nn
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from ssmscope.core.linearized import LinearizedLayer, OutputMap, Path
from ssmscope.core.trace import LayerState, LayerTrace, last_inputs
from ssmscope.errors import InputError
from ssmscope.layers import parts
from ssmscope.layers.parts import causal_convolution
from ssmscope.ops import Recurrence, Scan
from ssmscope.zoo.variants import base_of, variant

# ---- the layer


class Grouping(nn.Module):
    """Parameters that a GFSSM layer adds to its base: the filter's taps `fir` (1, taps), k_0 first, and the states
    before the first token, `prompt` (groups, heads, width, state), None without prompts."""

    def __init__(self, config: Any, mixer: Any) -> None:
        super().__init__()
        self.groups = config.state_groups
        heads, width = (mixer.intermediate_size, 1)
        if isinstance(mixer, Mamba2Mixer):
            heads, width = mixer.num_heads, mixer.head_dim
        self.fir = nn.Parameter(torch.empty(1, config.fir_taps))
        self.prompt = None
        if config.prompt:
            self.prompt = nn.Parameter(torch.empty(self.groups, heads, width, mixer.ssm_state_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the filter to the identity and the prompts to zero."""
        nn.init.eye_(self.fir)
        if self.prompt is not None:
            nn.init.zeros_(self.prompt)


class GFSSMMambaMixer(parts.ReadMixer, MambaMixer):
    """Mamba's mixer with grouped states."""


class GFSSMMixer(parts.ReadMixer, Mamba2Mixer):
    """Mamba-2's mixer with grouped states."""


@dataclass(frozen=True, eq=False)
class GroupedState(LayerState):
    """State from which a layer continues. `ssm` holds the groups' states in the order of their next turns, so that a
    segment of any length continues with the right group; `fir` (batch, taps − 1, channels) the filter's last inputs."""

    fir: Tensor


def turns(mask: Tensor | None, batch: int, length: int, groups: int) -> Int[Tensor, "batch length"]:
    """Return the group that each token steps: its number among the row's real positions, from 0, modulo `groups`."""
    if mask is None:
        return (torch.arange(length) % groups).expand(batch, length)
    return (mask.cumsum(1) - 1) % groups


def grouped(recurrence: Recurrence, turn: Int[Tensor, "batch length"], groups: int) -> tuple[Recurrence, ...]:
    """Return one recurrence per group over all positions: it steps by the Δ and A of `recurrence` where `turn` is the
    group's number, and holds its state elsewhere. The first one has the skip D: the outputs sum to the layer's."""
    delta = recurrence.delta
    assert delta is not None
    own = (delta * (turn == group).to(delta).unsqueeze(-1) for group in range(groups))
    return tuple(replace(recurrence, delta=step, D=None if group else recurrence.D) for group, step in enumerate(own))


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the base model's terms with the filtered input and one recurrence per group. `extras` has the filter's
    taps `k`, its input `x` (batch, length, channels) and, in a run that continues, `x_tail`, the inputs before that."""
    layer = base_of(mixer).compute_terms(mixer, u, mask, state)
    recurrence, grouping = layer.recurrence, mixer.grouping
    batch, length, heads, width, _ = recurrence.shape

    k = parts.at_least_float32(grouping.fir).squeeze(0)
    x = rearrange(recurrence.x, "b t h p -> b t (h p)")
    extras = {"k": k, "x": x}
    if state is not None:
        assert isinstance(state, GroupedState)
        extras["x_tail"] = state.fir
    s = causal_convolution(x, rearrange(k.flip(0), "j -> 1 1 j"), None, extras.get("x_tail"))
    recurrence = replace(recurrence, x=rearrange(s, "b t (h p) -> b t h p", h=heads))

    initial = state.ssm if state is not None else None
    if state is None and grouping.prompt is not None:
        initial = tuple(h.expand(batch, *h.shape) for h in parts.at_least_float32(grouping.prompt))
    turn = turns(layer.mask, batch, length, grouping.groups).to(u.device)
    recurrences = grouped(recurrence, turn, grouping.groups)
    reach = layer.reach + len(k) - 1
    return replace(layer, recurrences=recurrences, initial=initial, turn=turn, reach=reach, extras=extras)


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the base model's output (batch, length, width) for the sum of the groups' outputs."""
    return base_of(mixer).FORM.output(mixer, layer, scans)


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map: a path per group of states, after the filter, with the prompts as its sink."""
    form, initial = base_of(mixer).FORM, layer.initial or (None,) * len(layer.recurrences)
    input_map = form.input_map(mixer, layer)
    filtered: dict[str, Any] = {"filter": layer.extras["k"], "filter_tail": layer.extras.get("x_tail")}

    def paths(output_map: OutputMap) -> tuple[Path, ...]:
        return tuple(
            Path(recurrence, input_map, output_map, name=f"group {group}", initial=H, **filtered)
            for group, (recurrence, H) in enumerate(zip(layer.recurrences, initial))
        )

    return form.linearized(mixer, layer, paths)


def state_after(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...]) -> GroupedState:
    """Return the state from which a run continues, given each row's number of real positions."""
    base = replace(layer, reach=mixer.conv_kernel_size).state_after(scans)
    states = torch.stack(base.ssm, dim=1)
    batch, groups = states.shape[:2]
    length = layer.u.shape[1]
    past = layer.mask.sum(1) if layer.mask is not None else torch.full((batch,), length, device=states.device)
    order = (past[:, None] + torch.arange(groups, device=states.device)) % groups  # The groups by their next turns.
    states = states[torch.arange(batch, device=states.device)[:, None], order]
    tail = last_inputs(layer.extras["x"], len(layer.extras["k"]), layer.extras.get("x_tail"), layer.mask)
    return GroupedState(conv=base.conv, ssm=tuple(states.unbind(1)), fir=tail)


# ---- the models


class GroupingFields:
    """Configuration fields of a Mamba or Mamba-2 with grouped states after a filter.

    Args (in addition to those of `MambaConfig` or `Mamba2Config`):
        state_groups: Q, the number of states that take turns. (`n_groups` are Mamba-2's groups of heads that share B
            and C.)
        fir_taps: the number of the filter's taps k_j; 1 leaves only a scale. The paper's filter has 4.
        prompt: whether the states before the first token are learnt; otherwise they are zero.
    """

    def __init__(self, state_groups=2, fir_taps=4, prompt=True, **kwargs):
        super().__init__(**kwargs)
        for name, value in (("state_groups", state_groups), ("fir_taps", fir_taps)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} {value!r} is not a number of {name.split('_')[1]}: give one from 1 on")
        self.state_groups, self.fir_taps, self.prompt = state_groups, fir_taps, prompt
        self.use_cache = False


class Grouped:
    """Base of models whose mixers have grouped states."""

    def __init__(self, config):
        super().__init__(config)  # type: ignore[call-arg]
        backbone = self.base_model  # type: ignore[attr-defined]
        backbone.__class__ = getattr(self, "backbone_class", type(backbone))
        for block in backbone.layers:
            block.mixer.__class__ = GFSSMMixer if isinstance(block.mixer, Mamba2Mixer) else GFSSMMambaMixer
            block.mixer.grouping = Grouping(config, block.mixer)

    def _init_weights(self, module):
        if isinstance(module, Grouping):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


GFSSMConfig, GFSSMModel, GFSSMForCausalLM = variant("Mamba2", "GFSSM", "gfssm", GroupingFields, Grouped, Grouped)
GFSSMMambaConfig, GFSSMMambaModel, GFSSMMambaForCausalLM = variant(
    "Mamba", "GFSSMMamba", "gfssm-mamba", GroupingFields, Grouped, Grouped
)
AUTO = (GFSSMModel, GFSSMForCausalLM, GFSSMMambaModel, GFSSMMambaForCausalLM)
