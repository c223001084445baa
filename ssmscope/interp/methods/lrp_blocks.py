"""Relevance through the attention, feed-forward parts and experts of other libraries' blocks, which run as they are.

    attention: softmax(q kᵀ) is frozen, and the output is linear in v (XAI for Transformers, Ali et al. 2022); of what
        latent attention makes its keys and values of, what becomes keys is,
    feed-forward: W₃ (act(g) ⊙ h) has the half rule of output gates, W₂ act(h) is W₂ (h [act(h) / h]),
    experts: which of them run, and by what each is weighted, is frozen,
    soft caps of logits: cap tanh(l / cap) is l [cap tanh(l / cap) / l], as an activation.

Nothing of it is written out: outputs of the projections of q and k and of routers are constants, an activation is its
factor, and the gradient of a gated part is halved, as both of its factors carry all of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ssmscope.architectures import LATER
from ssmscope.core.intercept import observe, override_forward
from ssmscope.core.linearized import as_diagonal
from ssmscope.errors import InputError

Handler = Callable[..., Any]

FAMILIES = tuple(f"transformers.models.{name}." for name in LATER)
ADDING = re.compile(
    r"(Layer|Block|MLP|Mlp|FeedForward|MoE|Moe|Experts|Attention|Attention2|RotaryEmbedding|Router|Gating|Model|"
    r"ForCausalLM|ForSequenceClassification)$"
)
"""Classes of these families that are linear in what passes them once the rules for their parts hold."""
CONSTANT = ("q_proj", "q_b_proj", "k_proj", "g_proj", "router", "gate", "shared_expert_gate")
"""Parts of attention and experts whose output is frozen."""
ADAPTERS = ("linear_q_adapter_list", "linear_k_adapter_list")
"""Lists of parts that add to q and k (Zamba2)."""
ACTIVATIONS = ("act_fn", "activation")
GATED = ("gate_proj", "gate_up_proj", "input_linear", "w1", "proj_up_gate")
OUT = ("down_proj", "output_linear", "w2", "proj_down")
WRITTEN_OUT = {
    "Lfm2MLP": ("w1", "w3", "w2"),
    "Lfm2MoeMLP": ("w1", "w3", "w2"),
    "Lfm3MLP": ("w1", "w3", "w2"),
    "RecurrentGemmaMlp": ("gate_proj", "up_proj", "down_proj"),
}
"""Feed-forward parts W₃ (act(g) ⊙ h) whose activation is a function, or that have a bias behind their product, by their
class, with the names of what makes g and h, and of W₃."""
CAPS = ("output_logit_soft_cap", "logits_soft_cap")
"""Fields of configurations with the soft cap of logits."""


def of_families(module: nn.Module) -> bool:
    """Whether a module is one of another library's blocks for whose parts there are rules."""
    kind = type(module)
    return kind.__module__.startswith(FAMILIES) and bool(ADDING.search(kind.__name__))


def is_family_norm(module: nn.Module) -> bool:
    """Whether a module is such a block's norm by the root mean square."""
    return type(module).__module__.startswith(FAMILIES) and type(module).__name__.endswith("RMSNorm")


def frozen_parts(module: nn.Module, half: bool) -> list[tuple[nn.Module, Handler]]:
    """The parts of such a block, itself among them, that are run otherwise than as they are, with their handlers.

    Raises:
        InputError: for a gated feed-forward part with a bias behind its product, and for latent attention with biases.
    """
    parts = dict(module.named_children())
    found: list[tuple[nn.Module, Handler]] = _latent(module, parts) if "kv_b_proj" in parts else []
    found += [(parts[name], _constant) for name in CONSTANT if name in parts]
    found += [(each, _constant) for name in ADAPTERS if name in parts for each in parts[name].children()]
    activation = next((parts[name] for name in ACTIVATIONS if name in parts), None)
    if type(module).__name__ in WRITTEN_OUT:
        found += [] if activation is None else [(activation, lambda below, c: below(c))]
        return [*found, (module, partial(_through_gated, module, activation or silu, half))]
    if activation is None and any(callable(getattr(module, name, None)) for name in ACTIVATIONS):
        raise InputError(f"lrp has no rule for a {type(module).__name__}, whose activation is no module")
    if activation is None:
        return found
    gated = any(hasattr(module, name) for name in GATED)
    found.append((activation, partial(_bent, half or not gated)))
    if gated and half:
        if any(getattr(parts.get(name), "bias", None) is not None for name in OUT):
            raise InputError(
                f"lrp has no half rule for a {type(module).__name__} with a bias behind its gate: half=False"
            )
        found.append((module, halved))
    return found


def _latent(attention: Any, parts: dict[str, nn.Module]) -> list[tuple[nn.Module, Handler]]:
    """What freezes the keys of latent attention, and its keys alone."""
    rank, key = attention.kv_lora_rank, attention.qk_nope_head_dim
    latent, split = parts["kv_a_proj_with_mqa"], parts["kv_b_proj"]
    if any(getattr(part, "bias", None) is not None for part in (latent, split)):
        raise InputError(f"lrp has no rule for a {type(attention).__name__} with biases before its keys and values")

    def rotated(below: Callable[..., Any], x: Tensor) -> Tensor:
        y = below(x)
        return torch.cat([y[..., :rank], y[..., rank:].detach()], dim=-1)

    def keys(below: Callable[..., Any], x: Tensor) -> Tensor:
        y = below(x).unflatten(-1, (attention.num_heads, -1))
        return torch.cat([y[..., :key].detach(), y[..., key:]], dim=-1).flatten(-2)

    return [(latent, rotated), (split, keys)]


@contextmanager
def caps_frozen(module: Any) -> Iterator[None]:
    """Within, logits behind a soft cap (xLSTM, RecurrentGemma) are the head's, each times what the cap makes of it,
    frozen."""
    heads = [part for part in module.modules() if hasattr(part, "lm_head")]
    heads = [part for part in heads if any(getattr(part.config, name, None) for name in CAPS)]
    if not heads:
        yield
        return
    (capping,) = heads
    seen: list[Tensor] = []

    def capped(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = below(*args, **kwargs)
        logits = seen.pop().to(output.logits)
        factor = torch.where(logits == 0, 1, output.logits / torch.where(logits == 0, 1, logits))
        output.logits = logits * factor.detach()
        return output

    noted = observe(after=[(capping.lm_head, lambda head, logits: seen.append(logits))])
    with noted, override_forward([(capping, capped)]):
        yield


def _constant(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _mapped(below(*args, **kwargs), Tensor.detach)


def halved(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A part's output with half of its gradient."""
    return _mapped(below(*args, **kwargs), lambda y: (y + y.detach()) / 2)


def _bent(carries: bool, below: Callable[..., Any], c: Tensor) -> Tensor:
    """act(c) as c [act(c) / c], or all of it frozen."""
    c_frozen = c.detach()
    return c * as_diagonal(below, c_frozen) if carries else below(c_frozen)


def _through_gated(module: Any, act: Callable[[Tensor], Tensor], half: bool, below: Handler, x: Tensor) -> Tensor:
    g, h, project = (getattr(module, name) for name in WRITTEN_OUT[type(module).__name__])
    return project(gated(act, g(x), h(x), half))


def gated(act: Callable[[Tensor], Tensor], g: Tensor, h: Tensor, half: bool) -> Tensor:
    """act(g) ⊙ h with the half rule (MambaLRP), or with its gate frozen."""
    y = h * act(g.detach())
    return (y + h.detach() * g * as_diagonal(act, g.detach())) / 2 if half else y


def runs_its_parts(handler: Handler) -> bool:
    """Whether a handler of `frozen_parts` runs the parts of its module, which have rules of their own."""
    return getattr(handler, "func", handler) in (halved, _through_gated)


def _mapped(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, tuple):
        return tuple(_mapped(each, change) for each in output)
    return change(output) if isinstance(output, Tensor) and output.is_floating_point() else output
