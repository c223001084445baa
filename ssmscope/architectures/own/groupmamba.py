"""GroupMamba: a module of a Mamba or Mamba-2 attends to the states of the k modules {l − k + 1 … l}, its own the last.

Per token and channel (GroupMamba, Eqs. 7 to 9), with W_Q, W_K, W_V ∈ R^{N×N} shared by the channels of a module,

    q = W_Q h^l,   α_j = softmax_j(qᵀ W_K h^j / √N),   y = C^l Σ_j α_j W_V h^j + D x^l.

Eq. 7's range h^{l−k} … h^l has k + 1 states and contradicts its own case k = 1, which is the base model; read here as
k states. A module with fewer than k − 1 modules before it attends to those there are. The paper gives neither the
attention's axis nor its initial weights: here it is one query per token and channel, W_V starts as the identity.

C^l W_V is one row vector for all of the states, so a layer is one linear recurrence per module j, each read by
c_t = W_Vᵀ C^l_t, and its implicit attention is Σ_j diag(α_j) · [C^l W_V (∏ Ā^j) B̄^j], acting on x^j.

A module's output is a function of its own input and of those of the modules before it. The mixers here take them side
by side, (batch, length, modules · width), the own last, and thereby are functions of one input like every other mixer;
the terms of the borrowed recurrences are computed again from it. The blocks hand the inputs on through a memory that
the backbone opens for the time of one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    Mamba2Model,
    MambaConfig,
    MambaForCausalLM,
    MambaModel,
)
from transformers.models.mamba.modeling_mamba import MambaBlock, MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Block, Mamba2Mixer

from ssmscope import ops
from ssmscope.architectures.own.generation import MAMBA2_TIED, WholeSequences
from ssmscope.architectures.read import mamba, mamba2
from ssmscope.architectures.read.parts import ReadMixer, at_least_float32, constant
from ssmscope.core.linearized import InputMap, LinearizedLayer, Path
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.ops import Recurrence, Scan, skip_alone

# How many numbers of a module's states are in memory at a time: on a CPU what stays in its cache.
CPU_STATES, STATES = 2**18, 2**24

# ---- the states of all positions, and what they attend to


def all_states(
    recurrence: Recurrence, initial: Float[Tensor, "batch heads width state"] | None = None
) -> Float[Tensor, "batch length heads width state"]:
    """H_t at every position, by doubling: pass i makes every H_t the sum of the last 2ⁱ writes, decayed.

    Takes log₂(length) passes over all of the states and only ever multiplies decays, so that nothing overflows.
    """
    b = recurrence.b.repeat_interleave(recurrence.shape[2] // recurrence.b.shape[2], dim=2)
    H = einsum(recurrence.written, b, "batch t head width, batch t head n -> batch t head width n")
    a = recurrence.log_decay().exp().unsqueeze(3)
    if initial is not None:
        H = torch.cat([H[:, :1] + a[:, :1] * initial.unsqueeze(1), H[:, 1:]], dim=1)
    step, length = 1, H.shape[1]
    while step < length:
        H = torch.cat([H[:, :step], H[:, step:] + a[:, step:] * H[:, :-step]], dim=1)
        a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step]], dim=1)
        step *= 2
    return H


class Attended(NamedTuple):
    """What every channel attends to: `weights`, the α_j, and `reads`, the C^l W_V h^j, both (batch, length, heads,
    width, modules), the module itself first, then the modules before it in their order."""

    weights: Tensor
    reads: Tensor


def _attend_chunk(recurrences: tuple[Recurrence, ...], initial: tuple[Tensor, ...], metric: Tensor):
    states = torch.stack([all_states(r, H) for r, H in zip(recurrences, initial)])
    read = recurrences[0].c.repeat_interleave(states.shape[3] // recurrences[0].c.shape[2], dim=2)
    query = einsum(states[0], metric, "batch t head width m, m n -> batch t head width n")
    scores = einsum(query, states, "batch t head width n, j batch t head width n -> batch t head width j")
    reads = einsum(read, states, "batch t head n, j batch t head width n -> batch t head width j")
    return scores.softmax(-1), reads, states[:, :, -1]


def attend(mixer: nn.Module, layer: GroupTrace) -> Attended:
    """The attention of a layer to its own and the borrowed states (GroupMamba, Eq. 7), differentiable.

    States are computed in chunks of time, and again for the backward pass: those of a long text are never all there.
    """
    W_Q, W_K = (at_least_float32(W) for W in (mixer.attention.W_Q, mixer.attention.W_K))
    metric = einsum(W_Q, W_K, "i m, i n -> m n") / W_Q.shape[0] ** 0.5  # qᵀ W_K h / √N = h^lᵀ metric h
    recurrences = (layer.recurrence, *layer.borrowed)
    batch, length, heads, width, state = layer.recurrence.shape
    zero = layer.recurrence.x.new_zeros(batch, heads, width, state)
    H = tuple(zero if start is None else start for start in _starts(layer))
    at_once = CPU_STATES if zero.device.type == "cpu" else STATES
    step = max(1, at_once // (batch * heads * width * state))
    parts = []
    for start in range(0, length, step):
        chunk = tuple(r.between(start, start + step) for r in recurrences)
        if torch.is_grad_enabled():
            weights, reads, last = checkpoint(
                _attend_chunk, chunk, H, metric, use_reentrant=False, preserve_rng_state=False
            )
        else:
            weights, reads, last = _attend_chunk(chunk, H, metric)
        H = tuple(last.unbind(0))
        parts.append((weights, reads))
    return Attended(*(torch.cat(part, dim=1) for part in zip(*parts)))


# ---- the layer


class StateAttention(nn.Module):
    """The matrices W_Q, W_K, W_V (state, state) of a module. The first has no other to attend to, and only W_V."""

    def __init__(self, state: int, first: bool) -> None:
        super().__init__()
        self.W_Q = None if first else nn.Parameter(torch.empty(state, state))
        self.W_K = None if first else nn.Parameter(torch.empty(state, state))
        self.W_V = nn.Parameter(torch.empty(state, state))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """States are handed on as they are, in a mean whose weights are random."""
        for W in (self.W_Q, self.W_K):
            if W is not None:
                nn.init.normal_(W, std=W.shape[0] ** -0.5)
        nn.init.eye_(self.W_V)


@dataclass(frozen=True, eq=False)
class GroupTrace(LayerTrace):
    """A layer that reads the states of the modules before it, too.

    `u` (batch, length, modules · width) are the inputs of those modules and, last, its own. `recurrence` is the layer's
    own, and so is its retention; the `borrowed` are those of the modules before it, in their order, with their states
    before the first position (None where zero) and their own traces in `before`. All are read by this layer's W_Vᵀ C.
    """

    borrowed: tuple[Recurrence, ...] = ()
    borrowed_initial: tuple[Tensor | None, ...] = ()
    before: tuple[LayerTrace, ...] = ()


@dataclass(frozen=True, eq=False)
class GroupState(LayerState):
    """From where a layer continues: its own state and, in `before`, those of the modules that it borrows from."""

    before: tuple[LayerState, ...] = ()


class GroupMambaMixer(ReadMixer, MambaMixer):
    """Mamba's mixer, reading the states of a group of modules; its input is described at `compute_terms`."""


class GroupMamba2Mixer(ReadMixer, Mamba2Mixer):
    """Mamba-2's mixer, reading the states of a group of modules; its input is described at `compute_terms`."""


MIXERS: tuple[type[nn.Module], ...] = (GroupMambaMixer, GroupMamba2Mixer)
MODEL_TYPES = ("groupmamba", "groupmamba-mamba2")


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """The layer's terms from the inputs of its group and the weights of the group's modules.

    `u` (batch, length, modules · width): the inputs of the modules before this one, in their order, and its own last;
    with fewer than the group has (an own input alone), those nearest to this module, which attends to no others.
    `mask` (batch, length) is True at real positions; `state` is where a run continues from.

    Raises:
        InputError: when `u` does not consist of the inputs of 1 … k modules, or not of as many as `state` has.
    """
    base = _base(mixer)
    number, rest = divmod(u.shape[-1], mixer.hidden_size)
    if rest or not 1 <= number <= len(mixer.before) + 1:
        raise InputError(
            f"an input of width {u.shape[-1]} is not that of 1 to {len(mixer.before) + 1} modules of width "
            f"{mixer.hidden_size}: give theirs side by side, the module's own last"
        )
    *others, own = u.split(mixer.hidden_size, dim=-1)
    layer = base.compute_terms(mixer, own, mask, state)
    if mixer.attention is None:
        return layer

    starts: tuple[LayerState | None, ...] = (None,) * len(others)
    if state is not None:
        assert isinstance(state, GroupState)
        if len(state.before) != len(others):
            raise InputError(f"the state is that of {len(state.before) + 1} modules, the input that of {number}")
        starts = state.before
    modules = mixer.before[len(mixer.before) - len(others) :]
    before = tuple(base.compute_terms(m, x, mask, start) for m, x, start in zip(modules, others, starts))

    W_V = at_least_float32(mixer.attention.W_V)
    c = einsum(layer.recurrence.c, W_V, "batch t group m, m n -> batch t group n")
    return GroupTrace(
        **{
            **vars(layer),
            "u": u,
            "recurrences": (replace(layer.recurrence, c=c),),
            "initial": None if state is None else state.ssm,
            "borrowed": tuple(replace(one.recurrence, c=c, D=None) for one in before),
            "borrowed_initial": tuple(None if start is None else start.ssm[0] for start in starts),
            "before": before,
        }
    )


def output(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """The mixer's output (batch, length, width) from its terms: the base model's, of the attended states' read."""
    (scanned,) = layer.scan() if scans is None else scans
    if isinstance(layer, GroupTrace) and layer.borrowed:
        weights, reads = attend(mixer, layer)  # Σ_j α_j = 1: the own read moves towards the others'
        moved = (weights[..., 1:] * (reads[..., 1:] - reads[..., :1])).sum(-1)
        scanned = Scan(scanned.y + moved, scanned.state, scanned.retention)
    return _base(mixer).output(mixer, layer, (scanned,))


def without(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...], part: Any) -> tuple[Scan, ...]:
    """The scan less the `part` of every recurrence that is read, as much of it as is attended to."""
    if not isinstance(layer, GroupTrace) or not layer.borrowed:
        return (scans[0]._replace(y=scans[0].y - part(0, layer.recurrence)),)
    each = [part(j, recurrence) for j, recurrence in enumerate((layer.recurrence, *layer.borrowed))]
    read = (attend(mixer, layer).weights * torch.stack(each, dim=-1)).sum(-1)
    return (scans[0]._replace(y=scans[0].y - read),)


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """The layer as a linear map of the inputs of its group: Σ_j diag(α_j) [C^l W_V (∏ Ā^j) B̄^j] with the attention
    weights α_j frozen; a part for itself and for each module before it."""
    base, u = _base(mixer), at_least_float32(layer.u)
    if not isinstance(layer, GroupTrace) or not layer.borrowed:
        width = mixer.hidden_size
        own = replace(layer, u=layer.u[..., -width:])
        return replace(base.linearized(mixer, own), u=u[..., -width:])
    weights, reads = attend(mixer, layer)
    recurrence = layer.recurrence
    y = (weights * reads).sum(-1)
    if recurrence.D is not None:
        D = recurrence.D if recurrence.D.ndim == 2 else recurrence.D.unsqueeze(-1)
        y = y + D * recurrence.x
    output_map = base.output_map(mixer, layer, y)
    output_map = replace(output_map, opening=_sliced(output_map.opening, len(layer.borrowed) * mixer.hidden_size, None))
    flat = rearrange(weights, "b t h p j -> j b t (h p)")
    modules = (mixer, *mixer.before[len(mixer.before) - len(layer.borrowed) :])
    traces = (layer, *layer.before)
    recurrences = (replace(recurrence, D=None), *layer.borrowed)
    starts = _starts(layer)
    number = len(layer.borrowed)
    paths = [
        Path(
            one,
            _of_slice(
                base.input_map(module, trace), (number if j == 0 else j - 1) * mixer.hidden_size, mixer.hidden_size
            ),
            output_map,
            name="own" if j == 0 else f"{number + 1 - j} before",
            initial=start,
            weight=flat[j],
        )
        for j, (one, module, trace, start) in enumerate(zip(recurrences, modules, traces, starts))
    ]
    if recurrence.D is not None:  # it is no state, and not attended to
        paths.append(Path(skip_alone(recurrence, recurrence.D), paths[0].input_map, output_map, name="own"))
    return LinearizedLayer(u, tuple(paths), rest=constant(mixer, "out_proj", u))


def _of_slice(input_map: InputMap, start: int, width: int) -> InputMap:
    """The entry of a module whose input is a slice of the group's."""
    return replace(input_map, enter=_sliced(input_map.enter, start, start + width))


def _sliced(of: Callable[[Tensor, bool], Tensor], start: int, stop: int | None) -> Callable[[Tensor, bool], Tensor]:
    """A map of the group's input that reads a slice of it."""
    return lambda u, biased: of(u[..., start:stop], biased)


def state_after(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...]) -> LayerState:
    """Where a run continues from after this layer."""
    base = _base(mixer)
    own = base.state_after(mixer, layer, scans)
    if not isinstance(layer, GroupTrace):
        return own
    others = zip(layer.before, layer.borrowed, layer.borrowed_initial)
    before = (base.state_after(mixer, one, (ops.scan(read, start),)) for one, read, start in others)
    return GroupState(own.conv, own.ssm, tuple(before))


def _starts(layer: GroupTrace) -> tuple[Tensor | None, ...]:
    return (None if layer.initial is None else layer.initial[0], *layer.borrowed_initial)


def _base(mixer: nn.Module) -> Any:
    return mamba if isinstance(mixer, MambaMixer) else mamba2


# ---- the models


class Memory:
    """The mixers' inputs of the forward pass that is under way in this thread, first module first."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Empty within the context; nothing is kept after it."""
        token = _inputs.set({**_inputs.get(), id(self): []})
        try:
            yield
        finally:
            _inputs.reset(token)

    @property
    def inputs(self) -> list[Tensor] | None:
        """What is kept; None between passes."""
        return _inputs.get().get(id(self))

    def group(self, u: Tensor, k: int) -> Tensor:
        """Keep a module's input; the last k inputs side by side.

        Raises InputError outside a forward pass, where those before this one are unknown, and on several devices.
        """
        inputs = self.inputs
        if inputs is None:
            raise InputError("a GroupMamba's block reads the modules before it: call the model, not the block alone")
        inputs.append(u)
        del inputs[:-k]
        if any(each.device != u.device for each in inputs):
            raise InputError("the modules of a group attend to each other's states: load a GroupMamba on one device")
        return torch.cat(inputs, dim=-1) if len(inputs) > 1 else u


_inputs: ContextVar[Mapping[int, list[Tensor]]] = ContextVar("inputs", default=MappingProxyType({}))
"""What each `Memory` keeps, of the forward passes of one thread."""


class _GroupBlock:
    """A block whose mixer is given the inputs of its group; otherwise the base model's."""

    def forward(self, hidden_states, cache_params=None, *args, attention_mask=None, **kwargs):
        residual = hidden_states
        u = self.norm(hidden_states.to(dtype=self.norm.weight.dtype))  # type: ignore[attr-defined]
        if self.residual_in_fp32:  # type: ignore[attr-defined]
            residual = residual.to(torch.float32)
        u = self.memory.group(u, self.config.k)  # type: ignore[attr-defined]
        return residual + self.mixer(u, attention_mask=attention_mask)  # type: ignore[attr-defined]


class GroupMambaBlock(_GroupBlock, MambaBlock):
    """Mamba's block in a group."""


class GroupMamba2Block(_GroupBlock, Mamba2Block):
    """Mamba-2's block in a group."""


class _GroupFields:
    """The field that a GroupMamba configuration has beside its base model's."""

    k: int
    num_hidden_layers: int

    def _set(self, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.num_hidden_layers:
            raise InputError(
                f"k {k!r} is no number of modules: give an integer from 1 (the base model) to the number of layers, "
                f"here {self.num_hidden_layers} (one group)"
            )
        self.k = k
        self.use_cache = False


class GroupMambaConfig(MambaConfig, _GroupFields):
    """A Mamba whose modules attend to each other's states.

    Args (beside those of `MambaConfig`):
        k: how many modules' states a module attends to, its own included; the paper's default is 2. With 1 it is the
            base model and has no attention; with the number of layers there is one group.
    """

    model_type = "groupmamba"

    def __init__(self, k=2, **kwargs):
        super().__init__(**kwargs)
        self._set(k)


class GroupMamba2Config(Mamba2Config, _GroupFields):
    """A Mamba-2 whose modules attend to each other's states; arguments as `GroupMambaConfig` beside those of
    `Mamba2Config`."""

    model_type = "groupmamba-mamba2"

    def __init__(self, k=2, **kwargs):
        super().__init__(**kwargs)
        self._set(k)


class _Group:
    """A base model whose mixers attend to the states of the modules before them."""

    supports_gradient_checkpointing = False  # a block run again, later, would not find its group's inputs

    def __init__(self, config):
        super().__init__(config)  # type: ignore[call-arg]
        on_mamba2 = isinstance(config, Mamba2Config)
        backbone = self.base_model  # type: ignore[attr-defined]
        backbone.__class__ = GroupMamba2Model if on_mamba2 else GroupMambaModel
        backbone.memory = Memory()
        found: list[nn.Module] = []
        for block in backbone.layers:
            block.__class__ = GroupMamba2Block if on_mamba2 else GroupMambaBlock
            block.memory = backbone.memory
            mixer = block.mixer
            mixer.__class__ = GroupMamba2Mixer if on_mamba2 else GroupMambaMixer
            mixer.before = tuple(found[max(0, len(found) - config.k + 1) :])  # a tuple: they are no parts of it
            mixer.attention = StateAttention(config.state_size, first=not found) if config.k > 1 else None
            found.append(mixer)

    def _init_weights(self, module):
        if isinstance(module, StateAttention):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


class _GroupBackbone(_Group):
    def forward(self, *args, cache_params=None, cache=None, use_cache=None, **kwargs):
        """As the base model's, always without a cache.

        Raises:
            InputError: when given a cache.
        """
        if cache_params is not None or cache is not None:
            raise InputError("GroupMamba has no cache: give the whole sequence")
        with self.memory.opened():  # type: ignore[attr-defined]
            return super().forward(*args, use_cache=False, **kwargs)  # type: ignore[misc]


class GroupMambaModel(_GroupBackbone, MambaModel):
    """Mamba's backbone with grouped modules."""

    config_class = GroupMambaConfig


class GroupMambaForCausalLM(WholeSequences, _Group, MambaForCausalLM):
    """Mamba's language model with grouped modules."""

    config_class = GroupMambaConfig


class GroupMamba2Model(_GroupBackbone, Mamba2Model):
    """Mamba-2's backbone with grouped modules."""

    config_class = GroupMamba2Config


class GroupMamba2ForCausalLM(WholeSequences, _Group, Mamba2ForCausalLM):
    """Mamba-2's language model with grouped modules."""

    config_class = GroupMamba2Config
    _tied_weights_keys = MAMBA2_TIED


AUTO = (GroupMambaModel, GroupMambaForCausalLM, GroupMamba2Model, GroupMamba2ForCausalLM)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    small = dict(vocab_size=97, expand=2, conv_kernel=4)
    one = dict(**small, hidden_size=16, state_size=3, time_step_rank=2)
    two = dict(**small, hidden_size=24, state_size=6, num_heads=6, head_dim=8, n_groups=2, chunk_size=8)
    models: dict[str, nn.Module] = {
        "groupmamba": GroupMambaForCausalLM(GroupMambaConfig(**one, num_hidden_layers=3)),
        "groupmamba-alone": GroupMambaForCausalLM(GroupMambaConfig(**one, num_hidden_layers=2, k=1)),
        "groupmamba-mamba2": GroupMamba2ForCausalLM(GroupMamba2Config(**two, num_hidden_layers=3)),
        "groupmamba-mamba2-one-group": GroupMamba2ForCausalLM(GroupMamba2Config(**two, num_hidden_layers=3, k=3)),
    }
    for model in models.values():
        for name, parameter in model.named_parameters():
            if ".attention." in name:
                nn.init.normal_(parameter, std=0.3 if name.endswith("W_V") else 0.05)
    return models
