"""Linear maps, convolutions, norms and embeddings read by what their modules compute.

A plain layer, whose forward is its class's own and has no hooks, is described by its weights, parametrised ones
included. Any other module may not be: a PEFT adapter (LoRA, DoRA, …) adds to its layer's output, a quantised layer
packs its weight, a subclass or a hook computes anything. Such a module is called instead: a linear map is f(u) − f(0),
its constant f(0), its transpose the vector-Jacobian product of f. A few random inputs check first that it is linear;
otherwise it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv2d, linear, pad
from ssmscope.core.intercept import evaluating, forward_without_transfer, has_hooks, is_changed, is_own, unhooked
from ssmscope.errors import InputError

MAX_EMBEDDED_ROWS = 2**14
ROUNDING_UNITS = 64, 4
"""Units of the last place by which two ways of computing the same may differ, in single and in half precision."""
EPSILONS = "variance_epsilon", "eps"
MERGE = "merge its PEFT adapter (peft's merge_and_unload())"


def is_plain(module: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> bool:
    """Return True if a module computes what `kind` does with its attributes: no forward of its own, and no hooks."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return (
        any(type(module).forward is each.forward for each in kinds)
        and is_own(module, forward_without_transfer(module))
        and type(module).__call__ is nn.Module.__call__
        and not has_hooks(module)
    )


def innermost(module: Any) -> Any:
    """Return the module inside PEFT adapters, or inside its trained copies."""
    names = ("base_layer", "original_module")
    while inside := [child for name, child in module.named_children() if name in names]:
        module = inside[0]
    return module


def unreadable(module: nn.Module, name: str, why: str) -> InputError:
    """Return the error for a module that cannot be read, with what to do about what makes it another than torch's."""
    if innermost(module) is not module:
        advice = MERGE
    elif is_changed(module):
        advice = "remove the hook or forward pass that was put on it"
    else:
        advice = "put a layer of torch in its place, dequantised if it is quantised"
    return InputError(f"{name}, {_kind(module)}, {why}: {advice}")


def is_linear(module: nn.Module) -> bool:
    """Return True if a module declares `in_features` and `out_features`, as linear layers and PEFT adapters do."""
    return all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))


def stored_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a state dict. Raises InputError if the model has PEFT adapters or parametrised weights."""
    weights = module.state_dict()
    strange = [name for name in weights if {"base_layer", "original_module", "parametrizations"} & {*name.split(".")}]
    if strange:
        said = f"{type(module).__name__} has PEFT adapters or parametrised weights ({strange[0]}):"
        raise InputError(f"{said} {MERGE}, or remove its parametrizations")
    return weights


def applied(module: nn.Module, x: Tensor) -> Tensor:
    """Return the module's output for `x` in evaluation mode, in the dtype of its first floating-point weight."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), x.dtype)
    with evaluating(module):
        return module(x.to(dtype))


# ---- linear layers


def linear_map(
    module: nn.Module, name: str = "the layer", rows: slice | Tensor | None = None
) -> Callable[[Tensor, bool], Tensor]:
    """Return a linear layer, or some of its outputs, as a map that omits its constant unless its second argument is
    true; `name` is the layer's in errors. Raises InputError if it does not map every position affinely."""
    chosen = slice(None) if rows is None else rows
    if is_plain(module, nn.Linear):
        weight, bias = module.weight[chosen], None if module.bias is None else module.bias[chosen]
        return lambda u, biased: linear(u, weight.to(u), bias.to(u) if biased and bias is not None else None)
    constant = offset(module, name)

    def project(u: Tensor, biased: bool) -> Tensor:
        y = applied(module, u).to(u)
        return (y if biased or constant is None else y - constant.to(u))[..., chosen]

    return project


def offset(module: nn.Module, name: str = "the layer") -> Float[Tensor, " out"] | None:
    """Return a linear layer's output for zeros, its bias; None if it is zero. Raises InputError as `linear_map`."""
    if is_plain(module, nn.Linear):
        return module.bias
    with torch.no_grad(), _quiet(module):
        constant = _affine_at_zero(module, name)
    return constant if bool(constant.any()) else None


def matrix(module: nn.Module, name: str = "the layer") -> Float[Tensor, "out in"]:
    """Return a linear layer's weight, its outputs for unit vectors less its constant; errors as `linear_map`."""
    if is_plain(module, nn.Linear):
        return module.weight
    with torch.no_grad(), _quiet(module):
        constant = _affine_at_zero(module, name)
        units = torch.eye(module.in_features, device=constant.device, dtype=constant.dtype)
        return (applied(module, units.unsqueeze(0))[0] - constant).mT.contiguous()


def _affine_at_zero(module: nn.Module, name: str) -> Tensor:
    """Return f(0), after checking that f(x + y) + f(0) = f(x) + f(y) and that every position is mapped by itself."""
    vector = None if is_linear(module) else norm_weight(module)
    if not is_linear(module) and vector is None:
        raise InputError(f"{name}, {_kind(module)}, is no linear layer that can be read: give it in_features")
    width, device = module.in_features if vector is None else len(vector), _device(module)
    x, y = _random((2, 3, width), device), 8 * _random((2, 3, width), device, seed=1)
    zero, of_x, of_y, of_both, alone = (_tried(module, u, name) for u in (torch.zeros_like(x), x, y, x + y, x[:1, :1]))
    digits = rounding(of_x)
    if of_x.shape[:-1] != x.shape[:-1]:
        raise unreadable(module, name, "is no linear map of its input, and cannot be read")
    _same(of_both + zero, of_x + of_y, digits, module, name, "linear map of its input")
    _same(zero, zero[:1, :1].expand_as(zero), digits, module, name, "linear map of every position")
    _same(of_x[:1, :1], alone, digits, module, name, "linear map of every position")
    return zero[0, 0]


def agrees_with_weight(module: nn.Module) -> bool:
    """Return True if a linear layer or convolution computes what its weight and bias say, or they are absent."""
    kind = nn.Conv1d if isinstance(innermost(module), nn.Conv1d) else nn.Linear
    if is_plain(module, kind):
        return True
    weight, bias = module.weight, module.bias
    is_number = isinstance(weight, Tensor) and weight.is_floating_point()
    if not is_number or weight.is_meta:
        return is_number
    with torch.no_grad(), _quiet(module):
        if kind is nn.Linear:
            x = _random((1, 3, weight.shape[1]), weight.device).to(weight)
            expected = linear(x, weight, bias)
        else:
            own = innermost(module)
            x = _random((1, own.in_channels, 2 * weight.shape[-1]), weight.device).to(weight)
            expected = conv1d(x, weight, bias, own.stride, own.padding, own.dilation, own.groups)
        found = _tried(module, x, "the layer")
    return found.shape == expected.shape and _apart(found, expected) <= rounding(found)


# ---- depthwise convolutions


def depthwise(
    conv: nn.Module, channels: int, taps: int, name: str = "the convolution"
) -> tuple[Float[Tensor, "channels 1 taps"], Float[Tensor, " channels"] | None]:
    """Return the weight and bias of a convolution of every channel by itself: its answer to an impulse in every
    channel, and to zeros. Raises InputError if the module is no such convolution."""
    if is_plain(conv, nn.Conv1d):
        return conv.weight, conv.bias
    device = _device(conv)
    impulse = torch.zeros(1, channels, 2 * taps - 1, dtype=torch.float32, device=device)
    impulse[..., taps - 1] = 1
    with _quiet(conv):
        zero = _tried(conv, torch.zeros_like(impulse), name)
        answer = _tried(conv, impulse, name) - zero
        padding, odd = divmod(answer.shape[-1] - taps, 2)  # The output is 2 padding − taps + 1 longer.
        if answer.shape[:2] != (1, channels) or padding < 0 or odd:
            raise unreadable(conv, name, "is no convolution of every channel, and cannot be read")
        weight = answer[0, :, padding : padding + taps].flip(-1).unsqueeze(1)
        bias = zero[0, :, 0]
        with torch.no_grad():
            x = _random((2, channels, 3 * taps), device)
            found = _tried(conv, x, name)
            expected = conv1d(x.to(found), weight.to(found), bias.to(found), padding=padding, groups=channels)
            _same(found, expected, rounding(found), conv, name, "convolution of every channel by itself")
    return weight, bias if bool(bias.any()) else None


# ---- norms


Channels = Float[Tensor, "batch length channels"]


def convolved(
    source: Channels, kernel: Tensor, tail: Tensor | None, read: Tensor | None, bias: Tensor | None = None
) -> Channels:
    """Return Σ_j kernel_j source_{t−j} + bias, with `tail` or zeros at the taps − 1 positions before the first, over
    the j that are `read`, (batch, length, taps) bool. On a CPU torch's convolution of an image of one row is several
    times as fast with contiguous channels as `conv1d`, but in float64 slower than the sum over the taps, which
    becomes one kernel when compiled."""
    taps, (batch, length, channels) = kernel.shape[1], source.shape
    padded = pad(source, (0, 0, taps - 1, 0)) if tail is None else torch.cat([tail.to(source), source], dim=1)
    if read is None and length and source.dtype is not torch.float64 and not torch.compiler.is_compiling():
        weight = kernel.to(source.dtype).flip(1).expand(channels, -1)[:, None, None]
        return conv2d(padded.mT.unsqueeze(2), weight, bias, groups=channels).squeeze(2).mT
    total = source.new_zeros(batch, length, channels) if bias is None else bias
    for j in range(taps):
        shifted = padded[:, taps - 1 - j : taps - 1 - j + length]
        total = torch.addcmul(total, shifted if read is None else shifted * read[..., j, None], kernel[:, j])
    return total


class NormTerms(NamedTuple):
    """Factor and summand of a norm, (width,) or None, and the ε under its root."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float | None


def norm_terms(
    norm: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...], name: str = "the norm"
) -> NormTerms:
    """Return the weight, bias and ε of a norm of the classes `kind`. Raises InputError if the module is none."""
    own, own_weight = innermost(norm), norm_weight(norm)
    if own_weight is None:
        raise InputError(f"{name}, {_kind(norm)}, is no norm that can be read")
    eps, centred = norm_constants(norm, name)
    kinds = (nn.LayerNorm, *(kind if isinstance(kind, tuple) else (kind,)))
    if is_plain(norm, kinds) and hasattr(own, "weight"):
        return NormTerms(norm.weight, getattr(norm, "bias", None), eps)
    width, device = own_weight.shape[-1], _device(norm)
    size = getattr(own, "group_size", width // getattr(own, "n_groups", 1))

    def normed(x: Tensor) -> Tensor:
        groups = (x - x.mean(-1, keepdim=True) if centred else x).unflatten(-1, (-1, size))
        least = torch.finfo(x.dtype).eps if eps is None else eps
        return (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + least)).flatten(-2)

    with torch.no_grad(), _quiet(norm):
        ones = _signs(norm)
        try:
            zero = applied(norm, torch.zeros_like(ones))
        except Exception:  # It may need heads or a gate; the layer's output then tells if hooks change it.
            if type(norm) in kinds and is_own(norm, forward_without_transfer(norm)):
                return NormTerms(norm.weight, getattr(norm, "bias", None), eps)
            zero = _tried(norm, torch.zeros_like(ones), name)
        of_ones = _tried(norm, ones, name)
        if of_ones.shape != ones.shape:
            raise unreadable(norm, name, "is no norm of its input, and cannot be read")
        weight, bias = ((of_ones - zero) / normed(ones).to(of_ones))[0, 0], zero[0, 0]
        x = _random((2, 3, width), device).to(ones)
        found = _tried(norm, x, name)
        # Many norms compute in float32 for any input.
        digits = max(rounding(found), ROUNDING_UNITS[0] * torch.finfo(torch.float32).eps)
        _same(found, normed(x).to(found) * weight + bias, digits, norm, name, type(own).__name__)
    return NormTerms(weight, bias if centred or bool(bias.any()) else None, eps)


def norm_weight(norm: nn.Module) -> Tensor | None:
    """Return the weight of a norm: by another name, the first vector of a module that holds nothing but vectors."""
    own: Any = innermost(norm)
    held = list(own.parameters())
    return own.weight if hasattr(own, "weight") else held[0] if held and all(t.ndim == 1 for t in held) else None


def norm_constants(norm: nn.Module, name: str = "the norm") -> tuple[float | None, bool]:
    """Return ε of a norm f, and whether it subtracts the mean. Where the module has no `eps` both are measured: if the
    mean is subtracted, f(1, 1, …) = f(0); with v the mean square of ±1, less their mean if it is subtracted, and
    r = |f(±s) − f(0)|² / |f(±1) − f(0)|², ε = v s² (1 − r) / (r − s²)."""
    own, size = innermost(norm), 2.0**-8
    for each in EPSILONS:
        if hasattr(own, each):
            return getattr(own, each), isinstance(own, nn.LayerNorm)
    signs = _signs(norm)
    with torch.no_grad(), _quiet(norm):
        given = (0 * signs, signs.abs(), signs, size * signs)
        zero, of_equal, of_signs, small = (_tried(norm, x, name).double() for x in given)
    whole = float((of_signs - zero).square().sum())
    ratio = float((small - zero).square().sum()) / (whole or 1.0)
    centred = bool((of_equal - zero).square().sum() < 1e-6 * whole)
    square = float(signs[0, 0].var(correction=0)) if centred else 1.0
    return max(0.0, square * size**2 * (1 - ratio) / (ratio - size**2)) if ratio > size**2 else 0.0, centred


def _signs(norm: nn.Module) -> Tensor:
    """Return −1, 1, −1, … at two positions, as some norms squeeze one."""
    weight: Any = norm_weight(norm)
    wide = torch.promote_types(weight.dtype, torch.float32)
    signs = torch.ones(1, 2, weight.shape[-1], dtype=wide, device=_device(norm))
    signs[..., ::2] = -1
    return signs


def is_norm(module: nn.Module) -> bool:
    """Return True if a module has what a norm by the root mean square has: a weight for each number, and ε."""
    eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    others = ("num_groups", "track_running_stats")  # Of groups of channels, of batches and instances.
    return eps and hasattr(module, "weight") and not any(hasattr(module, name) for name in others)


# ---- embeddings


def embedding_table(module: nn.Module) -> Float[Tensor, "tokens width"]:
    """Return the embedding of every token id of a model, the output of its input embeddings, without gradients."""
    table: Any = module.get_input_embeddings()
    if is_plain(table, nn.Embedding):
        return table.weight.detach()
    ids = torch.arange(table.weight.shape[0], device=_device(table))
    with torch.no_grad():
        return torch.cat([table(part.unsqueeze(0))[0] for part in ids.split(MAX_EMBEDDED_ROWS)])


# ---- trying


def _tried(module: nn.Module, x: Tensor, name: str) -> Tensor:
    try:
        found = applied(module, x)
    except Exception as error:  # Hooks and replaced forward passes may raise anything.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise unreadable(module, name, f"cannot be read by calling it ({reason})") from error
    if not isinstance(found, Tensor):
        raise unreadable(module, name, "returns no tensor, and cannot be read")
    return found


def _same(found: Tensor, expected: Tensor, digits: float, module: nn.Module, name: str, what: str) -> None:
    if found.shape != expected.shape:
        raise unreadable(module, name, f"is no {what}, and cannot be read")
    apart = _apart(found, expected)
    if apart != apart or apart == float("inf"):
        raise InputError(f"{name}, {_kind(module)}, gives numbers that are not finite: the model is damaged")
    if apart > digits:
        raise unreadable(module, name, f"is no {what} (off by {apart:.1e}), and cannot be read")


def _apart(found: Tensor, expected: Tensor) -> float:
    wide = torch.promote_types(found.dtype, torch.float32)
    size = torch.maximum(found.abs().max(), expected.abs().max()).to(wide)
    return float((found.to(wide) - expected.to(wide)).abs().max() / size) if bool(size) else 0.0


def rounding(found: Tensor) -> float:
    """Return the largest rounding difference between two ways of computing the same, in units of the largest number."""
    single, half = ROUNDING_UNITS
    if found.dtype in (torch.float16, torch.bfloat16):
        return half * torch.finfo(found.dtype).eps
    if found.dtype == torch.float32:  # The user may have lowered the precision of products.
        fewer = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}[torch.get_float32_matmul_precision()]
        return max(single * torch.finfo(found.dtype).eps, half * fewer)
    return single * torch.finfo(torch.float64).eps


def _random(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> Tensor:
    """Return roughly normal numbers, rounded to quarters so that every dtype holds their sums."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return ((4 * drawn).round() / 4).to(device)


@contextmanager
def _quiet(module: nn.Module) -> Iterator[None]:
    """Keep the global random state unchanged within the context, even if the module draws random numbers (dropout)."""
    if not any(part.training for part in module.modules()):
        yield
        return
    device = _device(module)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _device(module: nn.Module) -> torch.device:
    """Return the device that a module expects its input on; offloaded weights are fetched to the CPU."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _kind(module: nn.Module) -> str:
    return f"a {type(module).__name__} of {type(module).__module__}"


# ---- a mixer's own forward pass and what is read of it, where its parts have hooks: these may change anything, and the
# forward pass need not call the part that a hook is on, as some releases multiply by a convolution's weight instead.

Compute = Callable[[Tensor], Any]
"""Function from a mixer's input to its output, or to a tuple that begins with it."""


def changed_parts(mixer: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a mixer, by name, that have hooks or another forward pass."""
    named = mixer.named_modules()
    return {name: part for name, part in named if name and (is_changed(part) or _backward_hooks(part))}


def _backward_hooks(part: nn.Module) -> list[Any]:
    return [*part._backward_hooks.values(), *part._backward_pre_hooks.values()]


def described(mixer: nn.Module, parts: Mapping[str, nn.Module]) -> str:
    """Return the beginning of an error: "MambaMixer of layer 2: hooks, or a forward pass, put on act"."""
    number = getattr(mixer, "layer_idx", getattr(mixer, "layer_id", None))
    where = type(mixer).__name__ + ("" if number is None else f" of layer {number}")
    more = f" and {len(parts) - 3} others" if len(parts) > 3 else ""
    return f"{where}: hooks, or a forward pass, put on {', '.join(list(parts)[:3]) or 'it'}{more}"


def same_outcome(
    mixer: nn.Module, parts: Mapping[str, nn.Module], theirs: Compute, ours: Compute, u: Tensor, mask: Tensor | None
) -> bool:
    """Return True if a mixer's own forward pass and what is read of it agree, or its hooks change neither. This
    compares outputs at real positions, `mask` (batch, length), and, where enabled, the gradients by this input."""
    found = [_outcome(compute, mixer, u, mask) for compute in (theirs, ours)]
    if all(map(agree, *found)):
        return True
    if any(map(_backward_hooks, parts.values())):  # They cannot be skipped.
        return False
    with unhooked(parts.values()):
        bare = [_outcome(compute, mixer, u, mask) for compute in (theirs, ours)]
    return all(agree(a, b, rounding=True) for pair in zip(found, bare) for a, b in zip(*pair))


def agree(found: Tensor, expected: Tensor, *, rounding: bool = False) -> bool:
    """Return True if two ways of computing the same gave the same numbers; with `rounding`, up to the last digits."""
    eps = max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps)  # Many layers compute in float32.
    allowed = 16 * eps if rounding or eps > 1e-5 else 4 * eps**0.5
    apart, size = (found - expected).detach().abs(), expected.detach().abs()
    return not apart.numel() or bool(apart.max() <= allowed * size.max())


def _outcome(compute: Compute, mixer: nn.Module, u: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the output at real positions and, if gradients are enabled, the gradient of the sum of its squares."""
    real = slice(None) if mask is None else mask.bool().to(u.device)
    devices = [u.device] if u.device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=mixer.training):
        if mixer.training:  # Both runs draw the same numbers.
            torch.manual_seed(0)
        v = u.detach().requires_grad_(torch.is_grad_enabled())
        y = compute(v)
        y = (y[0] if isinstance(y, tuple) else y)[real]
        if not y.requires_grad:
            return [y] if not torch.is_grad_enabled() else [y, torch.zeros_like(u)[real]]
        (gradient,) = torch.autograd.grad(y.square().sum(), v, allow_unused=True, materialize_grads=True)
    return [y.detach(), gradient[real]]
