"""Products with a linear layer's weight by oneDNN, which most builds of torch have and keep for 16 bits: of float32 and
a large weight it is faster than torch's own on some machines, and taken on these; optional, silent when absent."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ssmscope.scans import building
from ssmscope.scans.native import is_plain

ONEDNN = "oneDNN"
PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
LEAST = 2**20
"""Numbers of a weight that is worth oneDNN's preparation, once for each number of rows."""


@cache
def faster() -> bool:
    """Whether oneDNN is faster on this machine. That is a matter of the processor, and of the releases that torch was
    built with: of four products of mamba-130m's size at 1,024 rows torch's own took .75 to .92 of its time on a Zen 3,
    .86 to .97 on a Xeon with AVX-512, and above 1 on other machines with AVX-512. So it is measured, once for each
    processor and release of torch, in a fifth of a second; the answer is kept where compiled kernels are, for all
    processes to have the same digits. Where nothing can be kept it is no."""
    directory = building.cache_directory()
    if directory is None:
        return False
    parts = (torch.__version__, torch.__config__.show(), building.processor())
    kept = directory / f"products-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"
    try:
        if not kept.exists():
            with tempfile.NamedTemporaryFile("w", dir=directory) as made:
                made.write(ONEDNN if _measured() else "torch")
                made.flush()
                with contextlib.suppress(FileExistsError):  # another process was sooner, and is believed
                    os.link(made.name, kept)
        return kept.read_text() == ONEDNN
    except OSError:
        return False


def _measured() -> bool:
    """Whether oneDNN takes at least a twentieth less for a product, and for its gradient to the inputs."""
    x, weight = torch.ones(256, 1024, **PLAIN), torch.ones(1024, 1024, **PLAIN)
    least = [float("inf")] * 2
    with torch.no_grad():
        for _ in range(5):
            for place, of in enumerate((linear, lambda x, weight: _found(x, weight, None))):
                start = time.perf_counter()
                of(of(x, weight), weight.T)
                least[place] = min(least[place], time.perf_counter() - start)
    return least[1] < 0.95 * least[0]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias, (…, outputs), of `x` (…, inputs) and `weight` (outputs, inputs), with gradients of any order; as
    torch's `linear` to rounding, and that itself where oneDNN's is not `applicable`."""
    if not applicable(x, weight, bias):
        return linear(x, weight, bias)
    terms = (x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        return _Product.apply(*terms)
    return _found(*terms)


def worthwhile(weight: Tensor) -> bool:
    """Whether products with this weight may gain: float32, on a CPU where oneDNN is `faster`, large, outside of
    compiling."""
    if weight.numel() < LEAST or not is_plain(weight, "cpu") or torch.compiler.is_compiling():
        return False
    return available() and faster()


def applicable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN takes these: a weight that is `worthwhile`, float32, outside of autocasting."""
    if not worthwhile(weight) or x.ndim < 2 or not x.numel():
        return False
    if torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.enabled:
        return False
    if bias is not None and not (is_plain(bias, "cpu") and bias.is_contiguous()):
        return False  # oneDNN reads a bias's numbers side by side, wherever they are
    return is_plain(x, "cpu")


@cache
def available() -> bool:
    """Whether this build of torch has oneDNN, and hands products to it."""
    x, weight = torch.eye(2, **PLAIN), torch.arange(6, **PLAIN).view(3, 2)
    try:
        with torch.no_grad():
            return torch.equal(_found(x, weight, torch.ones(3, **PLAIN)), weight.T + 1)
    except (AttributeError, RuntimeError):
        return False


def _found(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        return _found(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            product(grad, weight.T) if ctx.needs_input_grad[0] else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )
