"""The scan with a decay per state by Triton kernels (`fused_kernels`), for float32 on a GPU; silent when absent.

Triton comes with torch's builds for CUDA; it compiles the kernels on first use, in some seconds, and keeps them in its
own cache. The forward pass keeps the states before every `CHECK`-th step; the backward pass recomputes what lies
between. Without triton, or with SSMSCOPE_NATIVE=0, `why_not` says so and `diagonal.scan` stays with torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import native
from ssmscope.scans.exponents import smallest_exponent

CHECK = 16  # steps; the states before them are what the backward pass needs
TILE = 256  # states of one program's tile at most, unless a single channel has more: 8 registers of each thread
FILL = 2048  # programs that keep a GPU busy: with fewer, tiles get smaller
MOST = 4096  # states of a channel; with more, torch is as fast


def available(device: torch.device | str = "cuda") -> bool:
    """Whether scans in float32 on this GPU run through the Triton kernels; compiles one when that was not yet tried."""
    return why_not(device) is None


def why_not(device: torch.device | str = "cuda") -> str | None:
    """Why the Triton kernels are not in use on this device, in one line, or None when they are."""
    if os.environ.get(native.SWITCH) == "0":
        return f"{native.SWITCH}=0"
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return "they run on GPUs only"
    loaded = _library()
    if isinstance(loaded, str):
        return loaded
    return _tried(torch.cuda.current_device() if device.index is None else device.index)


def applicable(x: Tensor, b: Tensor, c: Tensor, initial: Tensor, delta: Tensor, A: Tensor) -> bool:
    """Whether `scan` takes these terms: width 1, a decay per state, float32, on one GPU."""
    state = b.shape[3]
    if x.device.type != "cuda" or x.shape[3] != 1 or A.shape[-1] != state or not 1 <= state <= MOST:
        return False
    terms = (x, b, c, initial, delta, A)
    plain = all(t.device == x.device and native.is_plain(t, "cuda") for t in terms)
    return plain and not torch.compiler.is_compiling() and available(x.device)


def scan(
    x: Tensor, b: Tensor, c: Tensor, initial: Tensor, delta: Tensor, A: Tensor, *, expected: bool, retention: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `diagonal.scan`, where `applicable`; the same numbers in every run on the same kind of GPU."""
    terms = (x, b, c, initial, delta, A)
    if torch.is_grad_enabled() and any(t.requires_grad for t in terms):
        y, final, kept = _Scan.apply(*terms, expected, retention)
        return y, final, kept if retention else None
    y, final, kept, _ = _forward(*terms, expected, retention, keep=False)
    return y, final, kept


class _Plan(NamedTuple):
    """How a scan is cut into programs: `blocks` a group, each of `block` channels by `states` (a power of two)."""

    batch: int
    length: int
    heads: int
    groups: int
    state: int
    states: int
    block: int
    blocks: int
    warps: int

    @property
    def programs(self) -> int:
        return self.batch * self.groups * self.blocks

    @property
    def chunks(self) -> int:
        return -(-self.length // CHECK)

    def sizes(self, expected: bool) -> dict[str, Any]:
        """The constants that the kernels are compiled for."""
        sizes = {"N": self.state, "STATES": self.states, "BLOCK": self.block, "CHECK": CHECK, "num_warps": self.warps}
        return {**sizes, "FLOOR": smallest_exponent(torch.float32), "EXPECTED": expected}


def _plan(x: Tensor, b: Tensor) -> _Plan:
    batch, length, heads, _ = x.shape
    groups, state = b.shape[2:]
    share, states = heads // groups, 1 << max(state - 1, 0).bit_length()
    block = min(max(1, TILE // states), 1 << max(share - 1, 0).bit_length())
    while block > 1 and batch * groups * -(-share // block) < FILL:
        block //= 2
    warps = min(max(1, block * states // TILE), 8)
    return _Plan(batch, length, heads, groups, state, states, block, -(-share // block), warps)


def _forward(x, b, c, initial, delta, A, expected: bool, retention: bool, keep: bool):
    """y, the final state, the mean decays or None, and the states at the chunks' starts or None."""
    plan = _plan(x, b)
    initial, A = initial.contiguous(), A.contiguous()
    y = x.new_empty(x.shape)
    final = torch.empty_like(initial)
    starts = x.new_empty(plan.chunks, *initial.shape) if keep else None
    kept = x.new_empty(plan.blocks * plan.groups, *x.shape[:2]) if retention else None
    if plan.programs and plan.length:
        with _on(x):
            _loaded().forward[(plan.programs,)](
                *(x, delta, A, b, c, initial, y, final, y if starts is None else starts, y if kept is None else kept),
                *(initial.numel(), *plan[:4], *x.stride()[:3], *delta.stride(), *b.stride(), *c.stride()),
                **plan.sizes(expected),
                KEEP=keep,
                RETAIN=retention,
            )
    else:
        final.copy_(initial)
    return y, final, kept.sum(0) / A.numel() if kept is not None else None, starts


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, c, initial, delta, A, expected, retention):
        y, final, kept, starts = _forward(x, b, c, initial, delta, A, expected, retention, keep=True)
        ctx.save_for_backward(x, b, c, delta, A, starts)
        ctx.expected = expected
        if kept is None:
            kept = x.new_empty(0)
        ctx.mark_non_differentiable(kept)
        return y, final, kept

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, grad_final, _):
        x, b, c, delta, A, starts = ctx.saved_tensors
        plan = _plan(x, b)
        A, grad_final = A.contiguous(), grad_final.contiguous()
        grad_x, grad_delta = x.new_empty(x.shape), x.new_empty(delta.shape)
        if not plan.programs or not plan.length:
            zeros = (torch.zeros_like(t) for t in (b, c))
            return grad_x, *zeros, grad_final, grad_delta, torch.zeros_like(A), None, None
        grad_initial = torch.empty_like(grad_final)
        grad_A = x.new_empty(plan.batch, *A.shape)
        grad_b, grad_c = (x.new_empty(plan.blocks, *b.shape) for _ in range(2))
        before = x.new_empty(plan.programs, CHECK, plan.block, plan.states)
        with _on(x):
            _loaded().backward[(plan.programs,)](
                *(x, delta, A, b, c, grad_y, starts, grad_final),
                *(before, grad_x, grad_delta, grad_A, grad_b, grad_c, grad_initial),
                *(grad_final.numel(), *plan[:4], *x.stride()[:3], *delta.stride(), *b.stride(), *c.stride()),
                *grad_y.stride()[:3],
                **plan.sizes(ctx.expected),
            )
        return grad_x, grad_b.sum(0), grad_c.sum(0), grad_initial, grad_delta, grad_A.sum(0), None, None


def _on(t: Tensor):
    """Triton launches on the current GPU, which need not be the tensor's."""
    return torch.cuda.device(t.device) if t.device.type == "cuda" else contextlib.nullcontext()


def _loaded() -> ModuleType:
    library = _library()
    if isinstance(library, str):
        raise RuntimeError(f"the Triton scan is not available: {library}")
    return library


@functools.cache
def _library() -> ModuleType | str:
    """The module of the kernels, or why there is none."""
    try:
        from ssmscope.scans import fused_kernels
    except ImportError as error:
        return " ".join(f"triton cannot be imported: {error}".split())
    return fused_kernels


@functools.cache
def _tried(index: int) -> str | None:
    """Why this GPU does not run the kernels: triton needs a C compiler, and a GPU that it knows."""
    device = torch.device("cuda", index)
    one = torch.ones(1, 1, 1, 1, device=device)
    try:
        _forward(one, one, one, one, one[..., 0], one[0, 0], False, False, keep=False)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return " ".join(f"triton cannot run on {torch.cuda.get_device_name(device)}: {error}".split())
    return None
