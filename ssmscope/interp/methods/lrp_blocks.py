"""Relevance through attention, feed-forward parts and experts, as families declare them (`core.blocks`).

    attention: softmax(q kᵀ) is frozen, and the output is linear in v (XAI for Transformers, Ali et al. 2022); in
        latent attention the part that becomes keys is frozen,
    feed-forward: W₃ (act(g) ⊙ h) has the half rule of output gates, W₂ act(h) is W₂ (h [act(h) / h]),
    experts: their choice and their weights are frozen,
    soft caps of logits: cap tanh(l / cap) is l [cap tanh(l / cap) / l], as an activation.

The blocks are not rewritten: outputs of the projections of q and k and of routers are constants, an activation is its
factor, and the gradient of a gated part is halved, since both of its factors carry all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from ssmscope.core.blocks import BlockPart
from ssmscope.core.intercept import observe, override_forward
from ssmscope.core.linearized import as_diagonal
from ssmscope.errors import InputError

Handler = Callable[..., Any]


def part_handlers(module: nn.Module, part: BlockPart, half: bool) -> list[tuple[nn.Module, Handler]]:
    """Return the parts of a block's part, itself included, that need a handler, with their handlers."""
    parts = {"": module, **dict(module.named_children())}
    found: list[tuple[nn.Module, Handler]] = _latent(module, parts) if part.latent else []
    frozen = [parts[name] for name in part.frozen if name in parts]
    found += [(own, _constant) for each in frozen for own in (each if isinstance(each, nn.ModuleList) else [each])]
    activation = parts.get(part.act)
    if part.product:
        found += [] if activation is None else [(activation, lambda below, c: below(c))]
        return [*found, (module, partial(_through_gated, module, part, activation or silu, half))]
    if activation is None and callable(getattr(module, part.act, None)):
        raise InputError(f"lrp has no rule for a {type(module).__name__}, whose activation is not a module")
    if activation is None:
        return found
    found.append((activation, partial(_bent, half or not part.gated)))
    if part.gated and half:
        biased = getattr(parts.get(part.out), "bias", None) is not None
        found += [(parts[part.out], halved_before)] if biased else [(module, halved)]
    return found


def _latent(attention: Any, parts: dict[str, nn.Module]) -> list[tuple[nn.Module, Handler]]:
    """Return handlers that freeze the keys of latent attention, and only the keys."""
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
def freeze_soft_caps(module: Any, fields: Collection[str]) -> Iterator[None]:
    """Replace, within the context, a soft cap of logits, which one of these `fields` of a configuration gives, by a
    frozen factor."""
    heads = [part for part in module.modules() if hasattr(part, "lm_head")]
    heads = [part for part in heads if any(getattr(part.config, name, None) for name in fields)]
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
    """Return a part's output with half of its gradient."""
    return _mapped(below(*args, **kwargs), lambda y: (y + y.detach()) / 2)


def halved_before(below: Callable[..., Any], x: Tensor) -> Any:
    """Return a part's output with half of the gradient of its input, and all of that of its own bias."""
    return below((x + x.detach()) / 2)


def _bent(carries: bool, below: Callable[..., Any], c: Tensor) -> Tensor:
    """Return act(c) as c [act(c) / c], or entirely frozen."""
    c_frozen = c.detach()
    return c * as_diagonal(below, c_frozen) if carries else below(c_frozen)


def _through_gated(
    module: nn.Module, part: BlockPart, act: Callable[[Tensor], Tensor], half: bool, below: Handler, x: Tensor
) -> Tensor:
    g, h, project = (getattr(module, name) for name in (*part.product, part.out))
    return project(gated(act, g(x), h(x), half))


def gated(act: Callable[[Tensor], Tensor], g: Tensor, h: Tensor, half: bool) -> Tensor:
    """Return act(g) ⊙ h with the half rule (MambaLRP), or with its gate frozen."""
    y = h * act(g.detach())
    return (y + h.detach() * g * as_diagonal(act, g.detach())) / 2 if half else y


def runs_its_parts(handler: Handler) -> bool:
    """Return True if a handler of `part_handlers` runs its module, or the parts of it, by rules of their own."""
    return getattr(handler, "func", handler) in (halved, halved_before, _through_gated)


def _mapped(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, tuple):
        return tuple(_mapped(each, change) for each in output)
    return change(output) if isinstance(output, Tensor) and output.is_floating_point() else output
