"""GroupMamba: a module of a Mamba or Mamba-2 attends to the states of the k modules {l − k + 1 … l}, its own the last.

Per token and channel (GroupMamba, Eqs. 7 to 9), with W_Q, W_K, W_V ∈ R^{N×N} shared by the channels of a module,

    q = W_Q h^l,   α_j = softmax_j(qᵀ W_K h^j / √N),   y = C^l Σ_j α_j W_V h^j + D x^l.

Eq. 7's range h^{l−k} … h^l has k + 1 states and contradicts its own case k = 1, which is the base model; read here as
k states. A module with fewer than k − 1 modules before it attends to those there are. The paper gives neither the
attention's axis nor its initial weights: here it is one query per token and channel, W_V starts as the identity.

C^l W_V is one row vector for all of the states, so a layer is one linear recurrence per module j, each read by
c_t = W_Vᵀ C^l_t, and its implicit attention is Σ_j diag(α_j) · [C^l W_V (∏ Ā^j) B̄^j], acting on x^j.

A module's output is a function of its own input and of those of the modules before it. The mixers here take them
concatenated, (batch, length, modules · width), the own last, and are thus functions of one input like every other
mixer; the terms of the borrowed recurrences are computed again from it. The blocks pass the inputs on through a memory
that the backbone opens for one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from transformers.models.mamba.modeling_mamba import MambaBlock, MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Block, Mamba2Mixer
from ssmscope import ops
from ssmscope.core.linearized import InputMap, LinearizedLayer, Path
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.layers.parts import ReadMixer, at_least_float32, constant
from ssmscope.ops import Recurrence, Scan, skip_alone
from ssmscope.ops.diagonal import scan_numbers
from ssmscope.ops.recurrence import by_head, checkpointed
from ssmscope.zoo.variants import base_of, variant

MAX_CPU_STATE_NUMBERS, MAX_STATE_NUMBERS = 2**18, 2**24
"""Numbers of a module's states in memory at a time: on a CPU as many as fit in its cache."""


class Attended(NamedTuple):
    """Attention of every channel: `weights`, the α_j, and `reads`, the C^l W_V h^j, both (batch, length, heads, width,
    modules), the module itself first, then the modules before it in their order."""

    weights: Tensor
    reads: Tensor


def attend(mixer: Any, layer: GroupTrace) -> Attended:
    """Return a layer's attention to its own and the borrowed states (GroupMamba, Eq. 7), differentiable."""
    recurrences, starts = (layer.recurrence, *layer.borrowed), initial_states(layer)
    reads = torch.stack([ops.scan(replace(r, D=None), H).y for r, H in zip(recurrences, starts)], dim=-1)
    W_Q, W_K = mixer.attention.W_Q, mixer.attention.W_K
    if W_Q is None:
        return Attended(torch.full_like(reads, 1 / len(recurrences)), reads)
    metric = at_least_float32(W_Q).mT @ at_least_float32(W_K) / len(W_Q) ** 0.5  # qᵀ W_K h / √N = h^lᵀ metric h
    scalar = all(r.one_decay_per_head for r in recurrences)
    return Attended((_scores_by_scans if scalar else _scores_by_states)(recurrences, starts, metric).softmax(-1), reads)


def _scores_by_scans(recurrences: tuple[Recurrence, ...], starts: tuple[Tensor | None, ...], metric: Tensor) -> Tensor:
    """Return h^lᵀ M h^j, (batch, length, heads, width, modules), where all states of a head decay alike, without the
    states. As h_t = a h_{t−1} + v b of every channel, with v the number that is written, the score is a state itself:

        z_t = a^l a^j z_{t−1} + v^j (h^l_tᵀ M b^j_t) + v^l (b^l_tᵀ M h^j_t) − v^l v^j (b^l_tᵀ M b^j_t),

    and what it is written are outputs of scans, of module l read by M b^j and of module j read by Mᵀ b^l."""
    own, heads = recurrences[0], recurrences[0].shape[2]
    by_own = [replace(own, c=r.b @ metric.mT, D=None) for r in recurrences]
    by_other = [replace(r, c=own.b @ metric, D=None) for r in recurrences]
    number = len(recurrences)
    outputs = [one.y for one in ops.scan_all(by_own + by_other, [starts[0]] * number + [*starts])]
    scores = []
    for r, start, of_own, of_other in zip(recurrences, starts, outputs, outputs[number:]):
        both = by_head((own.b @ metric * r.b).sum(-1, keepdim=True), heads)
        new = r.written * of_own + own.written * (of_other - r.written * both)
        z = torch.zeros_like(new[:, 0])
        if start is not None and starts[0] is not None:
            z = (starts[0] @ metric * start).sum(-1)
        scores.append(scan_numbers(own.log_decay() + r.log_decay(), new, z))
    return torch.stack(scores, dim=-1)


def _scores_by_states(recurrences: tuple[Recurrence, ...], starts: tuple[Tensor | None, ...], metric: Tensor) -> Tensor:
    """Return h^lᵀ metric h^j, (batch, length, heads, width, modules). States are computed in chunks of time, and again
    for the backward pass: those of a long text are never all in memory."""
    batch, length, heads, width, state = recurrences[0].shape
    zero = recurrences[0].x.new_zeros(batch, heads, width * state)
    H = tuple(zero if start is None else start.flatten(2) for start in starts)
    step = max(1, (MAX_CPU_STATE_NUMBERS if zero.device.type == "cpu" else MAX_STATE_NUMBERS) // zero.numel())
    run = partial(checkpointed, _chunk_of_states) if torch.is_grad_enabled() else _chunk_of_states
    parts = []
    for start in range(0, length, step):
        scores, H = run(tuple(r.between(start, start + step) for r in recurrences), H, metric)
        parts.append(scores)
    return torch.cat(parts, dim=1)


def _chunk_of_states(recurrences: tuple[Recurrence, ...], H: tuple[Tensor, ...], metric: Tensor):
    states = [_states(r, start) for r, start in zip(recurrences, H)]
    by_channel = [rearrange(each, "b t h (p n) -> b t h p n", n=len(metric)) for each in states]
    query = by_channel[0] @ metric
    scores = torch.stack([(query * each).sum(-1) for each in by_channel], dim=-1)
    return scores, tuple(each[:, -1] for each in states)


def _states(r: Recurrence, start: Tensor) -> Tensor:
    """Return H_t at every position, (batch, length, heads, width · state)."""
    written = einsum(r.written, by_head(r.b, r.shape[2]), "batch t head width, batch t head n -> batch t head width n")
    return scan_numbers(r.log_decay(), written.flatten(3), start, chunks=1 if start.device.type == "cpu" else None)


class StateAttention(nn.Module):
    """Matrices W_Q, W_K, W_V (state, state) of a module. One that `averages` the states, as the first module does,
    which has only its own, has W_V alone."""

    def __init__(self, state: int, averages: bool) -> None:
        super().__init__()
        self.W_Q = None if averages else nn.Parameter(torch.empty(state, state))
        self.W_K = None if averages else nn.Parameter(torch.empty(state, state))
        self.W_V = nn.Parameter(torch.empty(state, state))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W_V to the identity, and draw W_Q and W_K, so that states are averaged with random weights."""
        for W in (self.W_Q, self.W_K):
            if W is not None:
                nn.init.normal_(W, std=len(W) ** -0.5)
        nn.init.eye_(self.W_V)


@dataclass(frozen=True, eq=False)
class GroupTrace(LayerTrace):
    """Trace of a layer that also reads the states of the modules before it, by its own W_Vᵀ C. `u` (batch, length,
    modules · width) are the inputs of those modules and, last, its own. `recurrence` is its own, and so is its
    retention; `borrowed` are those of the modules before it, in their order, with their states before the first
    position (None for zero) and their own traces in `before`."""

    borrowed: tuple[Recurrence, ...] = ()
    borrowed_initial: tuple[Tensor | None, ...] = ()
    before: tuple[LayerTrace, ...] = ()


def initial_states(layer: GroupTrace) -> tuple[Tensor | None, ...]:
    """Return the states before the first position of a layer's own recurrence and of the borrowed ones."""
    return (None if layer.initial is None else layer.initial[0], *layer.borrowed_initial)


# ---- the layer


@dataclass(frozen=True, eq=False)
class GroupState(LayerState):
    """State from which a layer continues: its own and, in `before`, those of the modules that it borrows from."""

    before: tuple[LayerState, ...] = ()


class GroupMambaMixer(ReadMixer, MambaMixer):
    """Mamba's mixer, reading the states of a group of modules; its input is described at `compute_terms`."""


class GroupMamba2Mixer(ReadMixer, Mamba2Mixer):
    """Mamba-2's mixer, reading the states of a group of modules; its input is described at `compute_terms`."""


RECORDABLE_TRAINING = ("groupmamba-mamba2",)


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms from the inputs of its group and the weights of the group's modules.

    `u` (batch, length, modules · width) has the inputs of the modules before this one, in their order, and its own
    last; with fewer than the group has (an own input alone), those nearest to this module, which attends to no others.
    Raise InputError if it does not consist of the inputs of 1 … k modules, or of as many as `state` has."""
    base = base_of(mixer)
    number, rest = divmod(u.shape[-1], mixer.hidden_size)
    if rest or not 1 <= number <= len(mixer.before) + 1:
        raise InputError(
            f"an input of width {u.shape[-1]} is not that of 1 to {len(mixer.before) + 1} modules of width "
            f"{mixer.hidden_size}: give them concatenated, the module's own last"
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


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the base model's output (batch, length, width) for the attended states."""
    (scanned,) = layer.scan() if scans is None else scans
    if isinstance(layer, GroupTrace) and layer.borrowed:
        weights, reads = attend(mixer, layer)  # As Σ_j α_j = 1, the own read moves towards the others'.
        moved = (weights[..., 1:] * (reads[..., 1:] - reads[..., :1])).sum(-1)
        scanned = Scan(scanned.y + moved, scanned.state, scanned.retention)
    return base_of(mixer).FORM.output(mixer, layer, (scanned,))


def without(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...], part: Any) -> tuple[Scan, ...]:
    """Return the scan without the `part` of every recurrence, each weighted by the attention to it."""
    if not isinstance(layer, GroupTrace) or not layer.borrowed:
        return (scans[0]._replace(y=scans[0].y - part(0, layer.recurrence)),)
    each = [part(j, recurrence) for j, recurrence in enumerate((layer.recurrence, *layer.borrowed))]
    read = (attend(mixer, layer).weights * torch.stack(each, dim=-1)).sum(-1)
    return (scans[0]._replace(y=scans[0].y - read),)


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map of the inputs of its group: Σ_j diag(α_j) [C^l W_V (∏ Ā^j) B̄^j] with the
    attention weights α_j frozen, as a path for itself and for each module before it."""
    base, u = base_of(mixer), at_least_float32(layer.u)
    if not isinstance(layer, GroupTrace) or not layer.borrowed:
        return base.FORM.linearized(mixer, layer)
    weights, reads = attend(mixer, layer)
    recurrence = layer.recurrence
    y = (weights * reads).sum(-1)
    if recurrence.D is not None:
        D = recurrence.D if recurrence.D.ndim == 2 else recurrence.D.unsqueeze(-1)
        y = y + D * recurrence.x
    output_map, start = base.FORM.output_map(mixer, layer, y), len(layer.borrowed) * mixer.hidden_size
    output_map = replace(output_map, gate_map=_sliced(output_map.gate_map, start, None))
    flat = rearrange(weights, "b t h p j -> j b t (h p)")
    modules = (mixer, *mixer.before[len(mixer.before) - len(layer.borrowed) :])
    traces = (layer, *layer.before)
    recurrences = (replace(recurrence, D=None), *layer.borrowed)
    starts = initial_states(layer)
    number = len(layer.borrowed)
    paths = [
        Path(
            one,
            _of_slice(
                base.FORM.input_map(module, trace), (number if j == 0 else j - 1) * mixer.hidden_size, mixer.hidden_size
            ),
            output_map,
            name="own" if j == 0 else f"{number + 1 - j} before",
            initial=start,
            weight=flat[j],
        )
        for j, (one, module, trace, start) in enumerate(zip(recurrences, modules, traces, starts))
    ]
    if recurrence.D is not None:  # The skip is not a state, and not attended to.
        paths.append(Path(skip_alone(recurrence, recurrence.D), paths[0].input_map, output_map, name="own"))
    return LinearizedLayer(u, tuple(paths), rest=constant(mixer, "out_proj", u))


def _of_slice(input_map: InputMap, start: int, width: int) -> InputMap:
    """Return the input map of a module whose input is a slice of the group's."""
    return replace(input_map, enter=_sliced(input_map.enter, start, start + width))


def _sliced(of: Callable[[Tensor, bool], Tensor], start: int, stop: int | None) -> Callable[[Tensor, bool], Tensor]:
    """Return a map of the group's input that reads a slice of it."""
    return lambda u, biased: of(u[..., start:stop], biased)


def state_after(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...]) -> LayerState:
    """Return the state from which a run continues after this layer."""
    own = layer.state_after(scans)
    if not isinstance(layer, GroupTrace):
        return own
    others = zip(layer.before, layer.borrowed, layer.borrowed_initial)
    before = (one.state_after((ops.scan(read, start),)) for one, read, start in others)
    return GroupState(own.conv, own.ssm, tuple(before))


# ---- the models


class Memory:
    """Inputs of the mixers in this thread's current forward pass, first module first."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Start with no inputs, and forget them on leaving."""
        token = _inputs.set({**_inputs.get(), id(self): []})
        try:
            yield
        finally:
            _inputs.reset(token)

    @property
    def inputs(self) -> list[Tensor] | None:
        """Inputs of the current pass; None between passes."""
        return _inputs.get().get(id(self))

    def group(self, u: Tensor, k: int) -> Tensor:
        """Store a module's input, and return the last k inputs, concatenated. Raise InputError outside a forward pass,
        where earlier inputs are unknown, and on several devices."""
        inputs = self.inputs
        if inputs is None:
            raise InputError("a GroupMamba's block reads the modules before it: call the model, not the block alone")
        inputs.append(u)
        del inputs[:-k]
        if any(each.device != u.device for each in inputs):
            raise InputError("the modules of a group attend to each other's states: load a GroupMamba on one device")
        return torch.cat(inputs, dim=-1)


_inputs: ContextVar[Mapping[int, list[Tensor]]] = ContextVar("inputs", default=MappingProxyType({}))
"""Inputs that each `Memory` holds, for the forward passes of one thread."""


class _GroupBlock:
    """Base model's block whose mixer is given the inputs of its group."""

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


class GroupFields:
    """Configuration fields of a Mamba or Mamba-2 whose modules attend to each other's states.

    Args (in addition to those of `MambaConfig` or `Mamba2Config`):
        k: number of modules to whose states a module attends, its own included; the paper's default is 2. With 1 it is
            the base model without attention; with the number of layers there is one group.
        cross_attention: whether the states are weighted by attention; otherwise they are averaged (Table 4).
    """

    num_hidden_layers: int

    def __init__(self, k=2, cross_attention=True, **kwargs):
        super().__init__(**kwargs)
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.num_hidden_layers:
            raise InputError(
                f"k {k!r} is not a number of modules: give an integer from 1 (the base model) to the number of layers, "
                f"here {self.num_hidden_layers} (one group)"
            )
        self.k, self.cross_attention = k, cross_attention
        self.use_cache = False


class Group:
    """Base of models whose mixers attend to the states of the modules before them."""

    supports_gradient_checkpointing = False  # A block that is run again later has no inputs of its group.

    def __init__(self, config):
        super().__init__(config)  # type: ignore[call-arg]
        backbone = self.base_model  # type: ignore[attr-defined]
        backbone.__class__ = getattr(self, "backbone_class", type(backbone))
        backbone.memory = Memory()
        found: list[nn.Module] = []
        for block in backbone.layers:
            block.memory, mixer = backbone.memory, block.mixer
            if isinstance(mixer, Mamba2Mixer):
                block.__class__, mixer.__class__ = GroupMamba2Block, GroupMamba2Mixer
            else:
                block.__class__, mixer.__class__ = GroupMambaBlock, GroupMambaMixer
            mixer.before = tuple(found[max(0, len(found) - config.k + 1) :])  # In a tuple they are not parts of it.
            averages = not (found and config.cross_attention)
            mixer.attention = StateAttention(config.state_size, averages) if config.k > 1 else None
            found.append(mixer)

    def _init_weights(self, module):
        if isinstance(module, StateAttention):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


class GroupBackbone(Group):
    """Base of the backbones, which take no cache."""

    def forward(self, *args, cache_params=None, cache=None, use_cache=None, **kwargs):
        """Run the base model without a cache; raise InputError if one is given."""
        if cache_params is not None or cache is not None:
            raise InputError("GroupMamba has no cache: give the whole sequence")
        with self.memory.opened():  # type: ignore[attr-defined]
            return super().forward(*args, use_cache=False, **kwargs)  # type: ignore[misc]


GroupMambaConfig, GroupMambaModel, GroupMambaForCausalLM = variant(
    "Mamba", "GroupMamba", "groupmamba", GroupFields, GroupBackbone, Group
)
GroupMamba2Config, GroupMamba2Model, GroupMamba2ForCausalLM = variant(
    "Mamba2", "GroupMamba2", "groupmamba-mamba2", GroupFields, GroupBackbone, Group
)
AUTO = (GroupMambaModel, GroupMambaForCausalLM, GroupMamba2Model, GroupMamba2ForCausalLM)
