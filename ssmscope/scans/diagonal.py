"""The scan with a decay per state, in chunks of steps on buffers that stay in the cache (Mamba-1).

The forward pass keeps only the states at the chunks' starts; the backward pass recomputes a chunk's decays and states
and runs the adjoint recurrence λ_t = c_t ȳ_tᵀ + a_{t+1} ⊙ λ_{t+1}, from which every gradient is one product:
b̄_t = Σ λ_t x_t, c̄_t = Σ ȳ_t H_t, x̄_t = λ_t b_t, ∂/∂ log a_t = Σ_width λ_t ⊙ a_t ⊙ H_{t-1}.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ssmscope.scans import fused, native
from ssmscope.scans.compiling import piece
from ssmscope.scans.exponents import smallest_exponent

CHUNK = 16  # steps whose decays and states are held at once


def with_skip(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    """y_t + D x_t, of (batch, length, heads, width) and `D` (heads,) or (heads, width); in y itself where it can be."""
    if D is None:
        return y
    if D.ndim == 1:
        D = rearrange(D, "head -> head 1")
    if not torch.is_grad_enabled() and all(native.is_plain(t, "cpu") for t in (y, x, D)):
        return y.addcmul_(x, D)  # memory that was not touched before is slow
    return skipped(y, x, D)


@piece
def skipped(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
    """`with_skip` for `D` (heads, width or 1), as a tensor of its own."""
    return torch.addcmul(y, x, D)


@piece
def scaled(x: Tensor, step: Tensor) -> Tensor:
    """step_t x_t, of `x` (batch, length, heads, width) and `step` (batch, length, heads)."""
    return x * step.unsqueeze(-1)


def scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Tensor | None,
    delta: Tensor | None,
    A: Tensor | None,
    log_a: Tensor | None,
    D: Tensor | None = None,
    *,
    expected: bool,
    retention: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y_t = c_tᵀ H_t + D x_t, the final H, and the mean decay per step, of H_t = a_t ⊙ H_{t-1} + x_t b_tᵀ.

    Shapes as in `ssm.Recurrence`, `D` (heads,) or (heads, 1), nothing where absent; with `delta` what is written is
    Δ_t x_t. log a is `log_a`, or Δ A (`expected`: −log(1 − Δ A)). Mamba-1's case in float32 runs through
    kernels, where they can be compiled: of C on a CPU, of CUDA on a GPU.
    """
    if log_a is None and delta is not None and A is not None and fused.applicable(x, b, c, initial, delta, A):
        if D is None or fused.adds_skip(D, x, b, c, initial, delta, A):
            return fused.scan(x, b, c, initial, delta, A, D, expected=expected, retention=retention)
        y, final, kept = fused.scan(x, b, c, initial, delta, A, expected=expected, retention=retention)
        return skipped(y, x, D.reshape(-1, 1)), final, kept
    inside: Tensor | None = None
    if initial is None:
        initial = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1])
    if log_a is None and delta is not None and A is not None and native.applicable(x, b, c, initial, delta, A):
        inside = D if native.adds_skip(D, x) else None
        y, final, kept = native.scan(x, b, c, initial, delta, A, inside, expected=expected, retention=retention)
    else:
        y, final, kept = _without_skip(x, b, c, initial, delta, A, log_a, expected=expected, retention=retention)
    return y if D is None or inside is not None else skipped(y, x, D.reshape(-1, 1)), final, kept


def _without_skip(x, b, c, initial, delta, A, log_a, *, expected: bool, retention: bool):
    if delta is not None:
        x = scaled(x, delta)
    terms = (x, b, c, initial, delta, A, log_a)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        y, final, kept = _Scan.apply(*terms, expected, retention)
        return y, final, kept if retention else None
    with torch.no_grad():
        y, final, kept, _ = _forward(_Terms(*terms, expected=expected), retention, keep=False)
    return y, final, kept


class _Terms:
    """The terms of one scan, time first, and the buffers in which chunks are worked."""

    def __init__(self, x, b, c, initial, delta, A, log_a, *, expected: bool) -> None:
        self.batch, self.length, self.heads, self.width = x.shape
        self.groups, self.state = b.shape[2:]
        self.x, self.b, self.c = (t.transpose(0, 1) for t in (x, b, c))
        self.initial, self.expected = initial, expected
        self.delta = delta.transpose(0, 1) if delta is not None and log_a is None else None
        self.A = A
        self.log_a = log_a.transpose(0, 1) if log_a is not None else None
        self.floor = smallest_exponent(x.dtype)
        self.decays = x.new_empty(CHUNK, self.batch, self.heads, 1, self.state)
        self.states = x.new_empty(CHUNK, self.batch, self.heads, self.width, self.state)
        self.decay_steps, self.state_steps = self.decays.unbind(0), self.states.unbind(0)

    def chunks(self) -> list[tuple[int, int]]:
        return [(start, min(start + CHUNK, self.length)) for start in range(0, self.length, CHUNK)]

    def by_group(self, t: Tensor) -> Tensor:
        """(time, batch, heads, width, …) as (time, batch, groups, heads of the group × width, …)."""
        return t.reshape(t.shape[0], self.batch, self.groups, -1, *t.shape[4:])

    def fill_decays(self, start: int, stop: int) -> Tensor:
        """a_t for start ≤ t < stop into the buffer, (time, batch, heads, 1, state)."""
        out = self.decays[: stop - start]
        flat = out.squeeze(3)
        if self.log_a is not None:
            torch.clamp(self.log_a[start:stop], min=self.floor, out=flat)
            return out.exp_()
        assert self.delta is not None
        torch.mul(self.delta[start:stop].unsqueeze(-1), self.A, out=flat)
        if self.expected:
            return out.neg_().add_(1).reciprocal_()
        return out.clamp_(min=self.floor).exp_()

    def fill_states(self, start: int, stop: int, H: Tensor) -> Tensor:
        """H_t for start ≤ t < stop into the buffer; the decays must be in theirs. Gives the last state."""
        out = self.states[: stop - start]
        x = rearrange(self.x[start:stop], "t b (g h) p -> t b g h p 1", g=self.groups)
        b = rearrange(self.b[start:stop], "t b g n -> t b g 1 1 n")
        torch.mul(x, b, out=out.view(stop - start, self.batch, self.groups, -1, self.width, self.state))
        for a, new in zip(self.decay_steps, self.state_steps[: stop - start]):
            H = new.addcmul_(a, H)
        return H


def _forward(terms: _Terms, retention: bool, keep: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    t = terms
    y = t.x.new_empty(t.length, t.batch, t.heads, t.width)
    spans = t.chunks()
    starts = t.x.new_empty(len(spans), *t.initial.shape) if keep else None
    kept = t.x.new_empty(t.length, t.batch) if retention else None
    ones = t.x.new_full((t.heads * t.state,), 1 / (t.heads * t.state))
    H = t.initial
    for k, (start, stop) in enumerate(spans):
        if starts is not None:
            starts[k] = H
        a = t.fill_decays(start, stop)
        if kept is not None:
            torch.mv(a.view(-1, ones.numel()), ones, out=kept[start:stop].view(-1))
        H = t.fill_states(start, stop, H)
        read = t.by_group(t.states[: stop - start]) @ t.c[start:stop].unsqueeze(-1)
        y[start:stop] = read.view(stop - start, t.batch, t.heads, t.width)
        H = H.clone()  # its buffer is used again
    return y.transpose(0, 1), H, kept.transpose(0, 1) if kept is not None else None, starts


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, c, initial, delta, A, log_a, expected, retention):
        y, final, kept, starts = _forward(_Terms(x, b, c, initial, delta, A, log_a, expected=expected), retention, True)
        ctx.save_for_backward(x, b, c, initial, delta, A, log_a, starts)
        ctx.expected = expected
        if kept is None:
            kept = x.new_empty(0)
        ctx.mark_non_differentiable(kept)
        return y, final if final is not initial else final.clone(), kept

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, grad_final, _):
        x, b, c, initial, delta, A, log_a, starts = ctx.saved_tensors
        t = _Terms(x, b, c, initial, delta, A, log_a, expected=ctx.expected)
        grads = _backward(t, starts, grad_y.transpose(0, 1), grad_final)
        back = [g.transpose(0, 1) if g is not None else None for g in grads[:3]]
        grad_delta = grads[4].transpose(0, 1) if grads[4] is not None else None
        grad_log_a = grads[6].transpose(0, 1) if grads[6] is not None else None
        return (*back, grads[3], grad_delta, grads[5], grad_log_a, None, None)


def _backward(t: _Terms, starts: Tensor, grad_y: Tensor, grad_final: Tensor):
    """Gradients of (x, b, c, initial, delta, A, log_a); time first; None where the term is absent."""
    grad_x, grad_b, grad_c = (torch.empty_like(term, memory_format=torch.contiguous_format) for term in (t.x, t.b, t.c))
    grad_delta = torch.empty_like(t.delta, memory_format=torch.contiguous_format) if t.delta is not None else None
    grad_A = torch.zeros_like(t.A) if t.log_a is None else None
    grad_log_a = torch.empty_like(t.log_a, memory_format=torch.contiguous_format) if t.log_a is not None else None
    adjoint = torch.empty_like(t.states)
    adjoint_steps = adjoint.unbind(0)
    previous = torch.empty_like(t.states)
    carried = grad_final.clone()  # a_{t+1} ⊙ λ_{t+1} at the chunk's end
    for k in range(len(t.chunks()) - 1, -1, -1):
        start, stop = t.chunks()[k]
        steps = stop - start
        a = t.fill_decays(start, stop)
        t.fill_states(start, stop, starts[k])
        here, lam = t.states[:steps], adjoint[:steps]
        prior = previous[:steps]
        prior[0] = starts[k]
        prior[1:] = here[:-1]

        gy = t.by_group(grad_y[start:stop].unsqueeze(-1))
        torch.mul(gy, t.c[start:stop].unsqueeze(-2), out=t.by_group(lam))
        adjoint_steps[steps - 1].add_(carried)
        for i in range(steps - 2, -1, -1):
            adjoint_steps[i].addcmul_(t.decay_steps[i + 1], adjoint_steps[i + 1])
        torch.mul(t.decay_steps[0], adjoint_steps[0], out=carried)

        grad_c[start:stop] = (gy.mT @ t.by_group(here)).squeeze(-2)
        xs = t.by_group(t.x[start:stop].unsqueeze(-1))
        grad_b[start:stop] = (xs.mT @ t.by_group(lam)).squeeze(-2)
        grad_x[start:stop] = (t.by_group(lam) @ t.b[start:stop].unsqueeze(-1)).view(grad_x[start:stop].shape)

        lam.mul_(prior).mul_(a)  # ∂/∂ log a, before the sum over the width
        grad_log = lam.sum(3) if t.width > 1 else lam.squeeze(3)
        if grad_log_a is not None:
            grad_log_a[start:stop] = grad_log
            continue
        assert t.delta is not None and grad_delta is not None
        if t.expected:  # d(−log(1 − ΔA)) / d(ΔA) = a
            grad_log = grad_log * a.squeeze(3)
        torch.sum(grad_log * t.A, dim=-1, out=grad_delta[start:stop])
        grad_A += (grad_log * t.delta[start:stop].unsqueeze(-1)).sum((0, 1))
    return grad_x, grad_b, grad_c, carried, grad_delta, grad_A, grad_log_a
