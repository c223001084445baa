"""Passes over a layer's terms that no gradient flows through, by Triton kernels (`passes_kernels`) on a GPU; optional.

Each reads its inputs once, whatever their floating type, where torch writes what it makes on the way. Without triton,
and where gradients are asked for, torch does it.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from ssmscope.scans import native
from ssmscope.scans.launching import Kernels, bound, on

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONVOLVED = 32, 128  # steps and channels of a convolution that a program takes
CONVOLVED_TWICE = 16, 128  # where it gives two types of it
CONVOLVED_BACK = 32, 64  # of its gradient
KEYS = 128  # positions whose keys a program decays
LEFT = 32, 32, 2  # positions and channels that it does at a time, and warps
PROJECT = KEYS, 64, 32, 4, 4  # rows, channels and their inputs that a program multiplies at a time, warps, stages
MOST = 2**14  # channels of a norm
NARROW = 64  # states of a channel, at most
WIDE = 256  # of a head, at most
NORMS = (
    *("MambaRMSNorm", "FalconMambaRMSNorm", "Mamba2RMSNorm", "BambaRMSNorm", "GraniteMoeHybridRMSNorm"),
    *("JambaRMSNorm", "FalconH1RMSNorm"),
)
"""The libraries' norms that are `rms_norm` of their weight and `variance_epsilon`."""

_summed: MutableMapping[Tensor, tuple[int, Tensor]] = WeakTensorKeyDictionary()
"""The version that a Δ had when it was made, and its sums over each `KEYS` steps, (batch, chunks, channels)."""


def applicable(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these: of a floating type, on one GPU, channels side by side, without gradients."""
    given = [t for t in tensors if t is not None]
    first = given[0]
    if first.device.type != "cuda" or torch.is_grad_enabled() or not first.numel() or torch.compiler.is_compiling():
        return False
    plain = native.are_plain(given, first.device, DTYPES) and all(t.stride(-1) == 1 for t in given)
    return plain and available(first.device)


def silu_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """SiLU(causal convolution) of `x` (batch, length, channels) by `weight` (channels, taps) and `bias` (channels,);
    `wide`: what is of x's type in float32."""
    return _convolved(x, weight, bias, x.new_empty(x.shape, dtype=torch.float32 if wide else x.dtype), None)


def silu_convolution_and_wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`silu_convolution`, and its copy in float32."""
    wide = x.new_empty(x.shape, dtype=torch.float32)
    return _convolved(x, weight, bias, x.new_empty(x.shape), wide), wide


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, wide: Tensor | None) -> Tensor:
    bias = x.new_zeros(x.shape[2]) if bias is None else bias
    grid, sizes = cut(x, weight, *(CONVOLVED if wide is None else CONVOLVED_TWICE))
    terms = (x, weight.contiguous(), bias, y, y if wide is None else wide)
    with on(x):
        bound(kernels.loaded().convolve, **sizes, BOTH=wide is not None)(grid, *terms, x.shape[1], *x.stride()[:2])
    return y


def cut(x: Tensor, weight: Tensor, steps: int, most: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The programs of a convolution's kernels, each of so many steps of at most so many channels, and the constants
    that these are compiled for."""
    batch, length, channels = x.shape
    width = min(_power(channels, 16), most)
    sizes = {"CHANNELS": channels, "TAPS": weight.shape[1], "STEPS": steps, "WIDTH": width, "num_warps": 4}
    return (batch, -(-length // steps), -(-channels // width)), sizes


def gated(y: Tensor, z: Tensor) -> Tensor:
    """y ⊙ SiLU(z) of (batch, length, channels), in z's type."""
    batch, length, channels = z.shape
    out, width = z.new_empty(z.shape), min(_power(channels, 16), 1024)
    with on(z):
        bound(kernels.loaded().gate, CHANNELS=channels, WIDTH=width, num_warps=4)(
            (batch, length, -(-channels // width)), y, z, out, length, *y.stride()[:2], *z.stride()[:2]
        )
    return out


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
    """weight · RMSNorm(y ⊙ SiLU(z)) of (batch, length, channels) over each `size` neighbours, in z's type."""
    batch, length, channels = z.shape
    out, width = z.new_empty(z.shape), _power(size, 16)
    sizes = {"CHANNELS": channels, "SIZE": size, "WIDTH": width, "num_warps": 8 if width > 2048 else 4}
    with on(z):
        bound(kernels.loaded().norm, **sizes)(
            (batch, length, channels // size), y, z, weight, out, length, eps, *y.stride()[:2], *z.stride()[:2]
        )
    return out


def softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ) of (batch, length, channels) in float32."""
    batch, length, channels = x.shape
    out, width = x.new_empty(x.shape, dtype=torch.float32), min(_power(channels, 16), 1024)
    with on(x):
        bound(kernels.loaded().softplus, CHANNELS=channels, WIDTH=width, num_warps=4)(
            (batch, length, -(-channels // width)), x, out, length, *x.stride()[:2]
        )
    return out


def projected_softplus(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """log(1 + eᵛ) in float32 of v = x weightᵀ + bias, (batch, length, channels), of 16 bits; v is not rounded. Its sums
    over `KEYS` steps, which `left` asks for, are kept as long as it is."""
    flat, (channels, inner) = x.reshape(-1, x.shape[-1]), weight.shape
    out = x.new_empty(*x.shape[:-1], channels, dtype=torch.float32)
    rows, width, depth, warps, stages = PROJECT
    sums = out.new_empty(-(-len(flat) // rows), channels)
    sizes = {"CHANNELS": channels, "INNER": inner, "ROWS": rows, "WIDTH": width, "DEPTH": depth}
    with on(x):
        bound(kernels.loaded().project_and_softplus, **sizes, num_warps=warps, num_stages=stages)(
            (-(-len(flat) // rows), -(-channels // width)),
            *(flat, weight.contiguous(), bias, out, sums, len(flat), flat.stride(0)),
        )
    if (x.shape[0] == 1 or x.shape[1] % KEYS == 0) and not out.is_inference():
        _summed[out] = out._version, sums.view(x.shape[0], -1, channels)
    return out


def widened(x: Tensor) -> Tensor:
    """(batch, length, channels) in float32; torch's own copy of bfloat16 is half as fast."""
    batch, length, channels = x.shape
    out, width = x.new_empty(x.shape, dtype=torch.float32), min(_power(channels, 16), 1024)
    with on(x):
        bound(kernels.loaded().widen, CHANNELS=channels, WIDTH=width, num_warps=4)(
            (batch, length, -(-channels // width)), x, out, length, *x.stride()[:2]
        )
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """weight · RMSNorm(x) of (…, channels): the norm rounded to x's type, and times the weight as torch multiplies."""
    channels = x.shape[-1]
    out = x.new_empty(x.shape, dtype=x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype))
    flat, width = x.reshape(-1, channels), _power(channels, 16)
    rows = max(1, 2048 // width)
    sizes = {"CHANNELS": channels, "ROWS": rows, "WIDTH": width, "WEIGHTED": weight is not None}
    with on(x):
        bound(kernels.loaded().rms_norm, **sizes, num_warps=8 if width > 4096 else 4)(
            (-(-len(flat) // rows),), flat, x if weight is None else weight, out, len(flat), eps, flat.stride(0)
        )
    return out


def add_and_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + added of (…, channels), and `rms_norm` of that in the weight's type, in one pass."""
    channels = x.shape[-1]
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, added.dtype))
    out = x.new_empty(x.shape, dtype=weight.dtype)
    flat, also, width = x.reshape(-1, channels), added.reshape(-1, channels), _power(channels, 16)
    rows = max(1, 2048 // width)
    sizes = {"CHANNELS": channels, "ROWS": rows, "WIDTH": width, "num_warps": 8 if width > 4096 else 4}
    with on(x):
        bound(kernels.loaded().add_and_norm, **sizes)(
            (-(-len(flat) // rows),),
            *(flat, also, weight, total, out, len(flat), eps, flat.stride(0), also.stride(0)),
        )
    return total, out


def lengths(x: Tensor) -> Tensor:
    """The lengths (batch, length, heads) of vectors (batch, length, heads, width), in float32."""
    batch, length, heads, width = x.shape
    out, padded = x.new_empty(batch, length, heads, dtype=torch.float32), _power(width, 16)
    rows = max(1, 4096 // padded)
    with on(x):
        bound(kernels.loaded().lengths, WIDTH=width, ROWS=rows, PADDED=padded, num_warps=4)(
            (-(-out.numel() // rows),), x, out, out.numel(), heads, length, *x.stride()[:3]
        )
    return out


def left(x: Tensor, delta: Tensor, A: Tensor, b: Tensor, *, each: bool) -> Tensor:
    """‖R_s‖ (`ssmscope.survival`) of a recurrence of heads of width 1 with decays Δ A: of `each` channel (batch,
    length, channels), or their sums (batch, length). Shapes as in `ssm.Recurrence`; Δ and A float32, no Δ below 0."""
    (batch, length, channels), (groups, state) = delta.shape, b.shape[2:]
    after = _after(delta)
    share = channels // groups
    steps, most, warps = LEFT
    block = min(most, _power(share))
    programs = groups * -(-share // block)
    out = delta.new_empty((batch, length, channels) if each else (programs, batch, length))
    sizes = {"N": state, "STATES": _power(state), "BLOCK": block, "STEPS": steps, "TILES": KEYS // steps}
    with on(x):
        bound(kernels.loaded().left, **sizes, EACH=each, num_warps=warps)(
            (batch, after.shape[1], programs),
            *(x, delta, (2 / math.log(2) * A).mT.contiguous(), b, after, out, length, channels, groups),
            *(*x.stride()[:3], *delta.stride(), *b.stride()),
        )
    return out if each else out.sum(0)


def left_of_heads(x: Tensor, delta: Tensor, A: Tensor, b: Tensor, *, each: bool) -> Tensor:
    """As `left`, of heads of any width with one decay each, A (heads, 1)."""
    batch, length, heads, width = x.shape
    after = _after(delta)
    out = delta.new_empty((batch, length, heads) if each else (heads, batch, length))
    sizes = {"P": width, "WIDTH": _power(width), "STEPS": KEYS, "EACH": each, "num_warps": 4}
    with on(x):
        bound(kernels.loaded().left_of_heads, **sizes)(
            (batch, after.shape[1], heads),
            *(x, delta, A.squeeze(-1) / math.log(2), lengths(b), after, out, length, heads, b.shape[2]),
            *(*x.stride()[:3], *delta.stride()),
        )
    return out if each else out.sum(0)


def _after(delta: Tensor) -> Tensor:
    """The sums of Δ (batch, length, channels) behind each `KEYS` positions, (batch, chunks, channels)."""
    batch, length, channels = delta.shape
    chunks = -(-length // KEYS)
    version, totals = _summed.get(delta, (-1, delta))
    if version < 0 or delta._version != version:
        padded = pad(delta, (0, 0, 0, chunks * KEYS - length)) if length % KEYS else delta
        totals = padded.unflatten(1, (chunks, KEYS)).sum(2)
    after, many = totals.new_empty(totals.shape), _power(chunks)
    block = max(1, min(_power(channels), 4096 // many))
    with on(delta):
        bound(kernels.loaded().later_sums, CHUNKS=many, BLOCK=block, num_warps=4)(
            (batch, -(-channels // block)), totals, after, chunks, channels
        )
    return after


def _power(size: int, least: int = 1) -> int:
    return max(least, 1 << max(size - 1, 0).bit_length())


kernels = Kernels("ssmscope.scans.passes_kernels", "the Triton passes", lambda one: gated(one[0], one[0]))
available, why_not = kernels.available, kernels.why_not
