"""Layer-wise relevance propagation for state-space models (Jafari et al., MambaLRP, 2024).

The relevance of a token is gradient × input of a network of the same value in which everything non-linear is frozen,
so that it is linear in its input and in its constants:

    activations: act(c) is c [(act(c) − act(0)) / c] + act(0), that is c [σ(c)] for SiLU,
    recurrences: decays, steps, B and C are frozen, and y is linear in x,
    output gates: y ⊙ SiLU(z) is ½ y ⊙ [SiLU(z)] + ½ [y] ⊙ z ⊙ [σ(z)], half of the relevance through each,
    norms: the scale is frozen; a mean that is subtracted is linear,

[·] being frozen: MambaLRP's three rules, and that of the norms (Ali et al., XAI for Transformers, 2022). The half rule
is for gates that are a product with z, of mixers and of SwiGLU feed-forward blocks. RWKV's receptances σ(z), a
DeltaNet's β and GLA's and Baleen's gates of the memory are no such products and are frozen, as are a GroupMamba's
attention weights and everything that determines queries and keys. An mLSTM's normaliser is frozen as the denominator of
a softmax is. `lrp_blocks` covers the other layers of hybrids. With biases, learnt initial states and the like as the
constants,

    f(x) = Σ_t relevance_t + the relevance of the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from torch.nn.utils.parametrize import type_before_parametrizations
from ssmscope.core import affine
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.blocks import UNREAD, Added, BlockPart, block_part, declared_parts
from ssmscope.core.intercept import evaluating, is_own, override_forward, twin, unhooked
from ssmscope.core.linearized import LinearizedLayer, Path, as_diagonal, is_elementwise
from ssmscope.core.mixers import adapter_for, as_returned, check_parts, entered, is_readable, linearize, mixers
from ssmscope.core.model import Model
from ssmscope.core.take_trace import few_tokens
from ssmscope.errors import InputError
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.methods.lrp_blocks import freeze_soft_caps, gated, part_handlers, runs_its_parts
from ssmscope.interp.objective import Objective, backward_bytes, kept_bytes_per_token
from ssmscope.interp.objective import objective as asked_of
from ssmscope.layers.feed_forward import ExpertRouter, FeedForward
from ssmscope.layers.parts import at_least_float32, rms_factor
from ssmscope.layers.rotary_attention import RotaryAttention, softmax_attention
from ssmscope.loading.in_memory import OwnModel
from ssmscope.networks.classifier import SSMForSequenceClassification

MAX_DELTA = 1e-4  # Largest `Scores.delta` of a converged text.
MAX_BACKWARD_BYTES = 2**33
"""Largest number of bytes that a backward pass keeps; beyond it blocks are run again."""

AFFINE_MODULES = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
)
"""Modules that are affine on maps (batch, channels, …)."""
PASSING_MODULES = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Identity, nn.Flatten, nn.Unflatten),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
)
"""Modules without parts that are linear, or that no relevance passes through."""
MAX_SUM_ERROR = 1e-3
"""Largest error of the sum of relevance, relative to the sum of absolute terms: modules with parts have to add and pass
on what these give, but for those that a family declares. In a lower precision its rounding, if that is more."""


def check_lrp(model: Model) -> None:
    """Raise InputError if a model has a module without a rule, or a forward pass that is not linear."""
    lrp(asked_of(model, few_tokens(model, 8)))


def lrp(objective: Objective, *, half: bool = True) -> Scores:
    """Return the relevance of every token of an objective's texts (MambaLRP; the rules are in the module's docstring).

    `delta` is |Σ relevance + the constants' relevance − f(x)| / |f(x)|, with f(x) from the model itself: rounding, as
    long as the rules hold for the model. Probabilities and continuations are not logits: their relevance is that of the
    logits weighted by the gradient of f by them; it adds up to no value, and the batch has no `delta`.

    Args:
        half: apply the half rule at output gates; else they are frozen, and all of the relevance goes through y.
    """
    scores, constants, ruled = propagated(objective, half)
    if objective.probability or any(len(target) > 1 for target in objective.targets):
        return Scores(scores)
    embeddings, value = objective.embeddings(), torch.zeros_like(constants)
    with torch.no_grad():
        for texts in _batches(objective):
            longest = objective.lengths[texts[-1]]
            value[texts] = objective(embeddings[texts, :longest], texts).to(value)
    limit, total = max(MAX_SUM_ERROR, affine.rounding(embeddings)), scores.flatten(1).sum(1) + constants
    missing = (total - value).abs()
    # In a lower precision two runs may differ by more than a sum that is wrong, so its own run has the value.
    wrong = missing if limit == MAX_SUM_ERROR else (total - ruled).abs()
    missed = wrong / (scores.flatten(1).abs().sum(1) + constants.abs() + value.abs())
    if bool((missed > limit).any()):
        raise InputError(
            f"the relevance of tokens and constants misses the logits of {objective.model.name} by "
            f"{float(missed.max()):.1%} of what is added: {_not_linear(objective.model.module)}"
        )
    delta = missing / value.abs().clamp(min=torch.finfo(value.dtype).tiny)
    return Scores(scores, delta=delta, converged=delta <= MAX_DELTA)


def propagated(
    objective: Objective, half: bool = True
) -> tuple[Float[Tensor, "texts length *channels"], Float[Tensor, " texts"], Float[Tensor, " texts"]]:
    """Return the relevance of tokens, of series by channel, and of constants: f's derivative by the text's 1 that
    multiplies them all; and f under the rules."""
    embeddings = objective.embeddings()
    wide = at_least_float32(embeddings)
    scores, constants, values = torch.zeros_like(objective.by_token(wide)), *wide.new_zeros(2, len(wide))
    # Rows of a user's own module run one at a time, each multiplied by its own 1.
    apart = isinstance(objective.model.module, OwnModel)
    for texts in ([text] for text in range(len(wide))) if apart else _batches(objective):
        longest = objective.lengths[texts[-1]]
        x = embeddings[texts, :longest].requires_grad_()
        one = wide.new_ones(len(texts)).requires_grad_()
        module = objective.model.module
        rules = relevance_rules(module, one, half=half)
        # The contexts last until blocks have run again.
        with torch.enable_grad(), evaluating(module), rules, objective.model.running():
            found = replace(objective, recomputes=not _fits(objective, x))(x, texts)
            by_x, by_one = torch.autograd.grad(found.sum(), (x, one), allow_unused=True)  # It may have no constants.
        values[texts] = found.detach().to(values)
        if by_x is not None:
            scores[texts, :longest] = objective.by_token(at_least_float32(by_x * x.detach()))
        if by_one is not None:
            constants[texts] = by_one
    real = objective.batch.mask.view(*scores.shape[:2], *(1,) * (scores.ndim - 2))
    return scores.masked_fill(~real, 0), constants, values


def _batches(objective: Objective) -> Iterator[list[int]]:
    return by_length(objective.lengths, tokens_at_once(objective.model.device, width=objective.model.width))


def _fits(objective: Objective, x: Tensor) -> bool:
    """Return True if there is room for what a backward pass keeps, and for float32 copies of the weights."""
    weights, tokens = objective.model.module.parameters(), x.shape[0] * x.shape[1]
    copies = sum(weight.numel() for weight in weights if at_least_float32(weight[:0]).dtype != weight.dtype)
    return tokens * kept_bytes_per_token(objective.model) + 4 * copies <= min(
        backward_bytes(objective.model), MAX_BACKWARD_BYTES
    )


# ---- the rules


def through_layer(
    layer: LinearizedLayer, u: Float[Tensor, "batch length width"], one: Float[Tensor, " batch"], half: bool
) -> Float[Tensor, "batch length width"]:
    """Compute a state-space layer's output with relevance as derivative, constants multiplied by `one`.

    Its paths are linear as they are (`LinearizedLayer.matvec`). Under the half rule half of an output
    project(shown(y) ⊙ opened) comes through y and half through the gate, with shown(y) frozen (MambaLRP, the rule of
    multiplicative gates).
    """
    constant = one.to(u.device).view(-1, 1, 1)
    nothing = torch.zeros_like(layer.u)
    output_maps: dict[int, list[Path]] = {}
    for path in layer.paths:  # Paths with the same output map add up before it.
        output_maps.setdefault(id(path.output_map), []).append(path)
    rest = layer.rest
    outputs = []
    for paths in output_maps.values():
        with torch.no_grad():
            unmoved = sum(_read(path, nothing, True) for path in paths)
        y = sum(_read(path, u, False) for path in paths) + constant * unmoved
        path, output_map = paths[0], paths[0].output_map
        inner = path.gated(y)
        if half and output_map.gate_map is not None:
            with torch.no_grad():
                shut = output_map.gate_map(nothing, True)
                shown = path.shown(y.detach())
            opened = output_map.gate_map(u, False) + constant * shut
            inner = (inner + shown * opened) / 2
            if output_map.shift is not None and rest is not None:  # Half of what the norm adds goes with the gate.
                rest = rest - output_map.project(output_map.shift * opened.detach()) / 2
        outputs.append(output_map.project(inner))
    total = torch.stack(outputs).sum(0)
    if layer.rest_map is not None:
        with torch.no_grad():
            added = layer.rest_map(nothing, torch.zeros_like(total), True)
        return total + layer.rest_map(u, total, False) + constant * added
    return total if rest is None else total + constant * rest


def _read(path: Path, u: Tensor, biased: bool) -> Tensor:
    return path.read(path.input_map.values(path.input_map.enter(u, biased), biased), biased)


def through_norm(norm: affine.NormTerms, x: Tensor, one: Tensor, *, centred: bool) -> Tensor:
    """Apply a norm with its scale frozen (XAI for Transformers), its bias multiplied by `one`: by the root mean square
    or, `centred`, a layer norm."""
    wide = at_least_float32(x)
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    eps = torch.finfo(wide.dtype).eps if norm.eps is None else norm.eps
    y = (wide * rms_factor(wide.detach(), eps)).to(x.dtype)
    y = y if norm.weight is None else y * norm.weight
    return y if norm.bias is None else y + _rest_map(one, y) * norm.bias


def through_affine(layer: nn.Module, constant: Tensor | None, x: Tensor, one: Tensor) -> Tensor:
    """Apply a linear layer; its `constant`, its output for zeros, is multiplied by `one`."""
    y = layer(x)
    return y if constant is None else y + (_rest_map(one, y) - 1) * constant.to(y)


def through_activation(act: nn.Module, x: Tensor, one: Tensor) -> Tensor:
    """Apply an activation by the identity rule, as a frozen factor of its input; its value at 0 times `one`."""
    frozen = x.detach()
    with torch.no_grad():
        constant = act(torch.zeros_like(frozen))
        factor = as_diagonal(lambda c: act(c) - act(torch.zeros_like(c)), frozen)
    return x * factor + _rest_map(one, x) * constant


def through_map(layer: nn.Module, x: Tensor, one: Tensor) -> Tensor:
    """Apply an affine layer of maps (batch, channels, height, width), its output for zeros multiplied by `one`."""
    y = layer(x)
    with torch.no_grad():
        constant = layer(torch.zeros_like(x))
    return y + (_rest_map(one, y) - 1) * constant


def through_feed_forward(block: FeedForward, x: Tensor, half: bool) -> Tensor:
    """Compute W₃ (SiLU(g) ⊙ h) with the half rule (MambaLRP), or W₂ (h [gelu(h) / h])."""
    h = block.up(x)
    if block.gate is None:
        return block.down(h * as_diagonal(gelu, h.detach()))
    return block.down(gated(silu, block.gate(x), h, half))


def through_attention(
    part: RotaryAttention,
    one: Tensor,
    below: Callable[..., Any],
    x: Tensor,
    unread: Tensor,
    position_ids: Tensor,
    padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Apply softmax attention with its weights frozen (XAI for Transformers), and return them too."""
    constant = _rest_map(one, x) - 1
    with torch.no_grad():
        q, k, _ = part.heads_of(x, position_ids, padding_mask)
        unmoved = part.heads_of(torch.zeros_like(x), position_ids, padding_mask)[2]
    v = part.heads_of(x, position_ids, padding_mask)[2] + constant.unsqueeze(-1) * unmoved
    y, weights = softmax_attention(part, q, k, v, unread.to(q.dtype), scaling=part.scale)
    y = rearrange(y, "b t h p -> b t (h p)")
    return part.out_proj(y) + constant * part.out_proj(torch.zeros_like(y)).detach(), weights


def _rest_map(one: Tensor, y: Tensor) -> Tensor:
    return one.to(y).view(-1, *[1] * (y.ndim - 1))


# ---- a network that follows them


@contextmanager
def relevance_rules(module: nn.Module, one: Float[Tensor, " batch"], *, half: bool = True) -> Iterator[None]:
    """Make the derivatives of `module` relevance within the context, without changing its outputs: derivatives by the
    input's embeddings, and by `one` (a 1 per row), by which every constant is multiplied."""
    found = mixers(module)
    if any(parameter.is_meta for parameter in module.parameters()):
        raise InputError("lrp needs every weight of a layer in memory, and some are offloaded: load the whole model")
    attention = [part for part in module.modules() if isinstance(part, RotaryAttention)]
    before = [module.embed] if isinstance(module, SSMForSequenceClassification) and hasattr(module, "embed") else []
    whole = (*found, *attention, *before, module.get_input_embeddings())
    read = {id(own) for part in whole if part is not None for own in part.modules()}
    families, declared = dict.fromkeys(map(adapter_for, found)), declared_parts(module)
    parts = [(part, rule) for part in module.modules() if id(part) not in read and (rule := block_part(part, declared))]
    others = [each for part, rule in parts for each in part_handlers(part, rule, half)]
    others += [(part, partial(_through_linearized, part, rule, one, half)) for part, rule in parts if rule.linearize]
    handled = read | {id(part) for part, handler in others if not runs_its_parts(handler)}
    rules = dict(_rules(module, handled, declared, one, half))
    handlers = [(mixer, _through_mixer(mixer, one, half)) for mixer in found]
    handlers += [(part, partial(through_attention, part, one)) for part in attention]
    handlers += [(part, lambda below, x, rule=rule: rule(x)) for part, rule in rules.items()]
    handlers += [(part, partial(_over_rule, handler, rules.get(part))) for part, handler in others]
    with ExitStack() as around:
        for adapter in families:
            if hasattr(adapter, "reading"):
                around.enter_context(adapter.reading(module))
        # The rules themselves include these modules' hooks.
        around.enter_context(unhooked(part for part in rules if not isinstance(part, FeedForward)))
        around.enter_context(freeze_soft_caps(module, [getattr(each, "SOFT_CAP", "") for each in families]))
        around.enter_context(override_forward(handlers, kept=True))  # `fast_scan` leaves the mixers alone.
        yield


def _over_rule(handler: Callable[..., Any], rule: Any, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a part's handler with its `rule` as the forward pass below it, if it has one."""
    return handler(below if rule is None else rule, *args, **kwargs)


def _through_mixer(mixer: nn.Module, one: Tensor, half: bool) -> Callable[..., Any]:
    adapter = adapter_for(mixer)

    def forward(below, *args, attention_mask=None, **kwargs):
        u = entered(mixer, args, kwargs)
        with torch.no_grad():
            named = kwargs if attention_mask is None else {**kwargs, "attention_mask": attention_mask}
            check_parts(mixer, u.detach(), attention_mask, below, args, named)
            layer = linearize(mixer, adapter.compute_terms(mixer, u.detach(), attention_mask))
        return as_returned(mixer, through_layer(layer, at_least_float32(u), one, half).to(u.dtype))

    return forward


def _through_linearized(
    part: nn.Module, rule: BlockPart, one: Tensor, half: bool, below: Any, u: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Compute the output of a part that its family reads as a linear map. Raise InputError if hooks are on it."""
    assert rule.linearize is not None
    if (parts := affine.changed_parts(part)) or not is_own(part, below):
        said = affine.described(part, parts)
        raise InputError(f"{said} may make it compute something other than its terms: remove them")
    with torch.no_grad():
        layer = rule.linearize(part, u.detach())
    return through_layer(layer, at_least_float32(u), one, half).to(u.dtype)


def _not_linear(module: nn.Module) -> str:
    """Return why the sum of relevance fails in a module of one's own: layers that are not read, tensors that modules
    with parts hold, such as learnt positions, or else its forward pass."""
    inside = {part for layer in mixers(module) for part in layer.modules()}
    outside = {path.removeprefix("module."): part for path, part in module.named_modules() if part not in inside}
    unread = [path for path, part in outside.items() if is_readable(part)]
    if unread:
        return f"its layers {', '.join(unread[:4])} are not read, and lrp needs all of them"
    held = [
        f"{type(part).__name__}.{name}"
        for part in outside.values()
        if next(part.children(), None) is not None
        for name, t in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        if t.is_floating_point()
    ]
    if held:
        return f"a forward pass of its own uses {', '.join(held[:4])}; positions are read if an nn.Embedding holds them"
    return "its own forward pass is not linear; lrp reads heads that are made of linear layers, norms and activations"


def _rules(
    module: nn.Module, read: set[int], declared: Mapping[str, BlockPart], one: Tensor, half: bool, name: str = ""
) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Return the parts that have a rule, with it, outside those in `read`; of modules with parts these have rules.
    Raise InputError for a part without a rule, by its `name`, and for one that is `declared` as `UNREAD`."""
    if id(module) in read:
        return []
    kind, what = type_before_parametrizations(module), f"lrp's {type(module).__name__}"
    rules: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
    if affine.is_linear(module):
        layer = twin(module)
        constant = affine.offset(layer, what)
        return [(module, lambda x: through_affine(layer, constant, x, one))]
    if isinstance(module, nn.Embedding | Added):  # Of positions, which are constants.
        return [(module, lambda x: _rest_map(one, y := twin(module)(x)) * y)]
    if affine.is_plain(module, AFFINE_MODULES):
        return [(module, partial(through_map, twin(module), one=one))]
    inner = affine.innermost(module)
    if isinstance(inner, nn.LayerNorm) or affine.is_norm(inner):
        terms = affine.norm_terms(twin(module), nn.RMSNorm, what)
        return [(module, partial(through_norm, terms, one=one, centred=isinstance(inner, nn.LayerNorm)))]
    if issubclass(kind, ExpertRouter):
        return [(module, lambda x: twin(module)(x.detach()))]
    if issubclass(kind, FeedForward):
        rules.append((module, lambda x: through_feed_forward(module, x, half)))
    parts, declaration = dict(module.named_children()), block_part(module, declared)
    if declaration is UNREAD or not (parts or declaration or isinstance(module, PASSING_MODULES)):
        if declaration is None and is_elementwise(module):
            return [(module, partial(through_activation, twin(module), one=one))]
        if declaration is None and (rule := _rule_of_vectors(module, one)) is not None:
            return [(module, rule)]
        where = f" ({name.removeprefix('module.')})" if name else ""
        raise InputError(
            f"lrp has no rule for {kind.__name__}{where}, which may not be linear; it reads linear layers, norms, "
            "activations, convolutions of maps, and modules that add and pass on what such parts give"
        )
    for child, part in parts.items():
        rules += _rules(part, read, declared, one, half, f"{name}.{child}" if name else child)
    return rules


def _rule_of_vectors(module: nn.Module, one: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return the rule of a module that holds nothing but vectors, by what it computes: a norm's or an affine map's;
    None for another."""
    layer = twin(module)
    if affine.norm_weight(layer) is not None:
        with suppress(InputError):
            centred = affine.norm_constants(layer)[1]
            return partial(through_norm, affine.norm_terms(layer, nn.RMSNorm), one=one, centred=centred)
        with suppress(InputError):
            return partial(through_affine, layer, affine.offset(layer), one=one)
    return None
