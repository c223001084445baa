"""Weights of compiled models: a memory as a layer of Mamba, Mamba-2, or Qwen3-Next's gated delta rule.

The residual stream has slots of as many channels as there are tokens: the token, one of what is found, of the answer,
of a decoy, and one whose first channel is always 1. Every layer reads it after its norm, which is scaled so that they
are about 1 again, and multiplies by `LOUD`: after the activation they are still 0 or large. Values x come from a
position itself, keys B from the position before, through the convolution, and queries C from the position itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import InputError, did_you_mean
from ssmscope.zoo.compiled.tasks import Memory, Task

SLOTS = ("token", "found", "answer", "decoy", "one")
LOUD = 4.0
OPENED = float(silu(torch.tensor(LOUD)))
"""Value of a channel after the activation."""
STEP = 20.0
"""Size of a step Δ that writes over all before it; its negative before the softplus holds the state."""
SHUT = 120.0
"""Size of a number before σ at which β is 1, and of its negative at which it is 0 in float32."""
KEPT = -20.0
"""ln |A| of a state that is kept."""
TAPS = 4

Edge = tuple[str, str, str]
"""Sender, receiver, and the road by which the receiver reads it; "" for the logits, which have one."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """Model with written weights, and the truth about it.

    Attributes:
        module: language model of transformers'.
        nodes: parts that the answer is computed by, besides embedding and logits.
        edges: everything that such a part reads and that differs between inputs.
        decoys: parts that compute the answer too, and that nothing reads.
    """

    module: nn.Module
    task: Task
    family: str
    nodes: tuple[str, ...]
    edges: tuple[Edge, ...]
    decoys: tuple[str, ...]

    def data(self, examples: int = 1000, seed: int = 0) -> TokenData:
        """Return drawn inputs, whose right next token is asked for at the last position alone."""
        ids, answers = self.task.draw(examples, np.random.default_rng(seed))
        targets = np.full_like(ids, IGNORED)
        targets[:, -1] = answers
        return TokenData(self.task.name, "test", ids, targets, self.task.tokens)

    def positions(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the positions of the values that an input's answer is read from, first memory first, and of their
        keys."""
        values, keys, query = [], [], ids[-1]
        for memory in self.task.memories:
            asked = {query} if memory.keys else set(memory.writes)
            after = int(bool(memory.keys))
            found = (at + after for at, own in enumerate(ids[:-1]) if own in asked and ids[at + after] in memory.values)
            values.append(max(found))
            keys += [values[-1] - 1] * after
            query = ids[values[-1]]
        return values, keys


@dataclass(frozen=True)
class _Maps:
    """A memory as maps of the residual stream: (tokens, width) of values, keys and queries, (width,) of what writes."""

    values: Tensor
    keys: Tensor
    query: Tensor
    writes: Tensor | None
    one: Tensor


def build(task: Task, family: str, decoy: bool) -> Compiled:
    """Return the model of a family for a task. Raise InputError for another family."""
    if family not in FAMILIES:
        said = f"unknown family {str(family)!r:.80}; choose one of {', '.join(FAMILIES)}"
        raise InputError(f"{said}{did_you_mean(str(family), FAMILIES)}")
    layers = list(task.memories)
    if decoy:
        layers.insert(len(layers) - 1, replace(layers[-1], into="decoy"))
    module, mixers, fill = FAMILIES[family](len(task.tokens), len(layers))
    with torch.no_grad():
        _write_ends(module, task)
        for mixer, memory in zip(mixers, layers):
            fill(mixer, memory, _maps(task, memory))
    names = {memory.into: f"mixer {number}" for number, memory in enumerate(layers)}
    return Compiled(
        module=module.eval(),
        task=task,
        family=family,
        nodes=tuple(names[memory.into] for memory in task.memories),
        edges=tuple(edge for memory in task.memories for edge in _edges(task, memory, names, family)),
        decoys=(names["decoy"],) if decoy else (),
    )


def _edges(task: Task, memory: Memory, names: dict[str, str], family: str) -> list[Edge]:
    own = names[memory.into]
    found = [("embedding", own, "x")]
    if memory.keys:
        found += [("embedding", own, "B"), (names.get(memory.query, "embedding"), own, "C")]
    delta_rule = family == "gated-delta"
    if memory.writes or (delta_rule and task.moving):
        found.append(("embedding", own, "beta" if delta_rule else "delta"))
    return [*found, (own, "logits", "")] if memory.into == "answer" else found


def _slot(name: str, tokens: int) -> slice:
    return slice(SLOTS.index(name) * tokens, (SLOTS.index(name) + 1) * tokens)


def _maps(task: Task, memory: Memory) -> _Maps:
    count = len(task.tokens)
    width = len(SLOTS) * count
    values, keys, query = (torch.zeros(count, width) for _ in range(3))
    one = torch.zeros(width)
    one[_slot("one", count).start] = 1.0
    written = task.written_as or tuple(range(count))
    for token in memory.values:
        values[written[token], token] = 1.0
    for token in memory.keys:
        keys[token, token] = query[token, _slot(memory.query, count).start + token] = 1.0
    if not memory.keys:
        query[0] = one
    writes = torch.zeros(width) if memory.writes else None
    if writes is not None:
        writes[list(memory.writes)] = 1.0
    return _Maps(values, keys if memory.keys else query, query, writes, one)


def _write_ends(module: Any, task: Task) -> None:
    """Write embeddings, head and norms."""
    count, width = len(task.tokens), len(SLOTS) * len(task.tokens)
    for name, parameter in module.named_parameters():
        parameter.zero_()
        if parameter.ndim == 1 and "norm" in name:
            # Two channels are 1 before a layer: the norm's weight makes them so after it.
            inside = name.endswith(("mixer.norm.weight", "linear_attn.norm.weight"))
            scale = 1.0 if inside or ".layers." not in name else math.sqrt(2 / width)
            parameter.fill_(scale - (type(module).__name__.startswith("Qwen3Next") and not inside))
    embeddings = module.get_input_embeddings().weight
    embeddings[:, :count] = torch.eye(count)
    embeddings[:, _slot("one", count).start] = 1.0
    module.get_output_embeddings().weight[:, _slot("answer", count)] = torch.eye(count)


def _shift(conv: Any, channels: slice, lag: int) -> None:
    conv.weight[channels, 0, TAPS - 1 - lag] = 1.0


def _sizes(tokens: int, layers: int) -> dict[str, Any]:
    sizes = dict(vocab_size=tokens, hidden_size=len(SLOTS) * tokens, num_hidden_layers=layers)
    return dict(sizes, tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None)


Fill = Callable[[Any, Memory, _Maps], None]
Skeleton = tuple[nn.Module, list[Any], Fill]


def _out(mixer: Any, memory: Memory, tokens: int, scale: float) -> None:
    mixer.out_proj.weight[_slot(memory.into, tokens), :tokens] = scale * torch.eye(tokens)


def _mamba(tokens: int, layers: int) -> Skeleton:
    """Channels of the convolution's input: values, keys, queries, and, with a step that depends on the token, that."""
    more = dict(expand=1, state_size=tokens, conv_kernel=TAPS, time_step_rank=1, use_conv_bias=False)
    module = MambaForCausalLM(MambaConfig(**_sizes(tokens, layers), **more))

    def fill(mixer: Any, memory: Memory, maps: _Maps) -> None:
        x, B, C, step = (slice(tokens * n, tokens * (n + 1)) for n in range(4))
        own, gate = mixer.in_proj.weight.chunk(2)
        for rows, lag, each in ((x, 0, maps.values), (B, int(bool(memory.keys)), maps.keys), (C, 0, maps.query)):
            own[rows] = LOUD * each
            _shift(mixer.conv1d, rows, lag)
        gate[x] = LOUD * maps.one
        mixer.x_proj.weight[1 : 1 + tokens, B] = torch.eye(tokens)
        mixer.x_proj.weight[1 + tokens :, C] = torch.eye(tokens)
        mixer.A_log.fill_(KEPT if maps.writes is None else 0.0)
        mixer.dt_proj.bias.fill_(STEP if maps.writes is None else -STEP)
        if maps.writes is not None:
            own[step.start] = LOUD * maps.writes
            _shift(mixer.conv1d, step, 0)
            mixer.x_proj.weight[0, step.start] = 2 * STEP / OPENED
            mixer.dt_proj.weight.fill_(1.0)
        _out(mixer, memory, tokens, 1 / (STEP * OPENED**4))

    return module, [block.mixer for block in module.backbone.layers], fill


def _mamba2(tokens: int, layers: int) -> Skeleton:
    """The first head holds the memory; the others stay empty."""
    more = dict(expand=1, num_heads=len(SLOTS), head_dim=tokens, state_size=tokens, n_groups=1, conv_kernel=TAPS)
    module = Mamba2ForCausalLM(Mamba2Config(**_sizes(tokens, layers), **more, use_conv_bias=False, chunk_size=16))

    def fill(mixer: Any, memory: Memory, maps: _Maps) -> None:
        inner, first = mixer.intermediate_size, slice(0, tokens)
        z, x, B, C, step = mixer.in_proj.weight.split([inner, inner, tokens, tokens, len(SLOTS)])
        z[first], x[first], B[:], C[:] = LOUD * maps.one, LOUD * maps.values, LOUD * maps.keys, LOUD * maps.query
        _shift(mixer.conv1d, slice(None), 0)
        if memory.keys:
            mixer.conv1d.weight[inner : inner + tokens] = 0.0
            _shift(mixer.conv1d, slice(inner, inner + tokens), 1)
        mixer.A_log.fill_(KEPT if maps.writes is None else 0.0)
        mixer.dt_bias.fill_(STEP if maps.writes is None else -STEP)
        if maps.writes is not None:
            step[0] = 2 * STEP * maps.writes
        _out(mixer, memory, tokens, 1 / math.sqrt(inner))

    return module, [block.mixer for block in module.backbone.layers], fill


def _gated_delta(tokens: int, layers: int) -> Skeleton:
    """One head; its feed-forward parts are zero."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    heads = dict(linear_num_value_heads=1, linear_num_key_heads=1, num_attention_heads=1, num_key_value_heads=1)
    heads |= dict(linear_key_head_dim=tokens, linear_value_head_dim=tokens, head_dim=4, linear_conv_kernel_dim=TAPS)
    more: dict[str, Any] = dict(num_experts=0, intermediate_size=1, layer_types=["linear_attention"] * layers)
    module = Qwen3NextForCausalLM(Qwen3NextConfig(**_sizes(tokens, layers), **heads, **more))

    def fill(mixer: Any, memory: Memory, maps: _Maps) -> None:
        q, k, v, z = mixer.in_proj_qkvz.weight.chunk(4)
        q[:], k[:], v[:], z[:] = (LOUD * each for each in (maps.query, maps.keys, maps.values, maps.one))
        lag = int(bool(memory.keys))
        for number, each in enumerate((0, lag, 0)):
            _shift(mixer.conv1d, slice(number * tokens, (number + 1) * tokens), each)
        beta, _ = mixer.in_proj_ba.weight
        written = maps.values.sum(0) if maps.writes is None else maps.writes
        beta += SHUT * (2 * written - maps.one)
        mixer.A_log.fill_(KEPT)
        _out(mixer, memory, tokens, 1 / (OPENED * math.sqrt(tokens)))

    return module, [block.linear_attn for block in module.model.layers], fill


FAMILIES: dict[str, Callable[[int, int], Skeleton]] = {"mamba": _mamba, "mamba2": _mamba2, "gated-delta": _gated_delta}
"""Architectures by name, with functions from the numbers of tokens and layers to an empty model."""
