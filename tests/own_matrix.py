"""Layers of one's own step by step, as slow references: their memories, runs with edges cut, and relevance."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, logsigmoid, pad, silu, softplus


@dataclass
class Memory:
    """h_t = a_t h_{t−1} + x_t b_tᵀ, y_t = h_t c_t in the `order` of positions: x (batch, length, heads, width), the
    others (batch, length, heads, states), each real or complex. `share` is what a source writes, where that is known,
    `left` the factor of y."""

    x: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    D: Tensor
    order: Sequence[int]
    source: Tensor | None = None
    share: Callable[[Tensor], Tensor] | None = None
    left: Tensor | float = 1.0

    def run(self, x: Tensor) -> Tensor:
        h, found = torch.zeros((), dtype=x.dtype), {}
        for t in self.order:
            h = self.a[:, t, :, None] * h + x[:, t, ..., None] * self.b[:, t, :, None]
            found[t] = (h * self.c[:, t, :, None]).sum(-1)
        y = torch.stack([found[t] for t in range(x.shape[1])], 1)
        return y if x.is_complex() else y.real

    def attention(self, level: str) -> Tensor:
        """Weight of each position in each (batch, length, length), a 1 written there alone, the mean over channels."""
        columns = []
        for s in range(self.x.shape[1]):
            one = torch.zeros_like(self.x if level == "ssm" else self.source)
            one[:, s] = 1
            one = one if level == "ssm" else self.share(one)
            y = self.run(one)
            y = y.abs() if y.is_complex() else y  # Its frame turns with the state.
            y = y + self.D * one.real
            columns.append((y.flatten(2) * (self.left if level == "block" else 1)).mean(-1))
        return torch.stack(columns, -1)

    def left_at_end(self) -> Tensor:
        """Sizes of what is left of each position, summed over heads, (batch, length)."""
        found = {}
        kept = torch.ones(())
        for t in reversed(self.order):
            found[t] = (self.x[:, t].norm(dim=-1) * (kept * self.b[:, t]).norm(dim=-1)).sum(-1)
            kept = kept * self.a[:, t]
        return torch.stack([found[t] for t in range(self.x.shape[1])], 1)


@dataclass
class Run:
    """A run step by step, with edges from `sources` to `targets` cut in some layers, or with relevance as gradient."""

    relevance: bool = False
    sources: Sequence[int] = ()
    targets: Sequence[int] = ()
    layers: Sequence[int] = ()
    level: str = "ssm"
    memories: list[list[Memory]] = field(default_factory=list)
    backwards: bool = False

    def hold(self, t: Tensor) -> Tensor:
        return t.detach() if self.relevance else t

    def layer(self, layer: nn.Module, u: Tensor) -> Tensor:
        self.memories.append([])
        return SLOW[type(layer).__name__](layer, u, self)

    @contextmanager
    def reversed(self) -> Iterator[None]:
        self.backwards = True
        yield
        self.backwards = False

    def scan(
        self, x: Tensor, a: Tensor, b: Tensor, c: Tensor, D: Tensor | float = 0.0, order: Sequence[int] | None = None,
        source: Tensor | None = None, share: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        length, D = x.shape[1], torch.as_tensor(D)
        a, b, c = (self.hold(t.expand(*x.shape[:3], -1)) for t in (a, b, c))
        if self.backwards:
            x, a, b, c, order = *(t.flip(1) for t in (x, a, b, c)), range(length)[::-1]
        D = D.unsqueeze(-1) if D.ndim == 1 else D
        memory = Memory(x, a, b, c, D, range(length) if order is None else order, source, share)
        y = memory.run(x) + D * x
        if len(self.memories) - 1 in self.layers:
            kept, read = torch.zeros(2, length)
            kept[[*self.sources]], read[[*self.targets]] = 1, 1
            only = x * kept[:, None, None] if self.level == "ssm" else share(source * kept[:, None])
            y = y - memory.run(only) * read[:, None, None]
        self.memories[-1].append(memory)
        return y.flip(1) if self.backwards else y

    def gated(self, y: Tensor, z: Tensor, opened: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        """y ⊙ act(z), under relevance half through each; `factor` is the norm's, in `y` or after it."""
        for memory in self.memories[-1]:
            memory.left = opened * factor
        if not self.relevance:
            return y * opened
        return (y * opened.detach() + y.detach() * z * (opened / z).detach()) / 2

    def norm(self, norm: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """Its output and its factor."""
        middle = x - x.mean(-1, keepdim=True)
        factor = self.hold((middle.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight)
        return middle * factor + norm.bias, factor


def mamba(m: Any, u: Tensor, run: Run, biases: int = 1) -> Tensor:
    (inner, states), taps = m.A_log.shape, m.conv1d.weight.shape[-1]
    source, z = m.in_proj(u).split(inner, -1)
    convolved = lambda s: conv1d(pad(s.mT, (taps - 1, 0)), m.conv1d.weight, groups=inner).mT  # noqa: E731
    c = convolved(source) + m.conv1d.bias
    bend = run.hold(c.sigmoid())
    x = c * bend
    step, B, C = m.x_proj(x).split([m.dt_proj.in_features, states, states], -1)
    delta = softplus(m.dt_proj(step) + (biases - 1) * m.dt_proj.bias).unsqueeze(-1)
    terms = (delta * -m.A_log.exp()).exp(), delta * B.unsqueeze(2), C.unsqueeze(2), m.D
    share = lambda s: (convolved(s) * bend).unsqueeze(-1)  # noqa: E731
    y = run.scan(x.unsqueeze(-1), *terms, source=source, share=share).flatten(2)
    return m.out_proj(run.gated(y, z, silu(z) if biases == 1 else z))


def mamba2(m: Any, u: Tensor, run: Run) -> Tensor:
    inner, heads, states = m.out_proj.in_features, len(m.A_log), m.d_state
    z, source, step = m.in_proj(u).split([inner, m.conv1d.in_channels, heads], -1)
    convolved = lambda s: conv1d(pad(s.mT, (3, 0)), m.conv1d.weight, groups=s.shape[-1]).mT  # noqa: E731
    c = convolved(source) + m.conv1d.bias
    bend = run.hold(c.sigmoid())
    x, B, C = (c * bend).split([inner, m.ngroups * states, m.ngroups * states], -1)
    B, C = (t.unflatten(-1, (m.ngroups, -1)).repeat_interleave(heads // m.ngroups, 2) for t in (B, C))
    delta = softplus(step + m.dt_bias).clamp(*m.dt_limit).unsqueeze(-1)
    terms = (delta * -m.A_log.exp()[:, None]).exp(), delta * B, C, m.D
    values = lambda t: t[..., :inner].unflatten(-1, (heads, -1))  # noqa: E731
    share = lambda s: values(convolved(pad(s, (0, c.shape[-1] - inner))) * bend)  # noqa: E731
    y = run.scan(values(x), *terms, source=source[..., :inner], share=share).flatten(2)
    groups = (y if m.norm_before_gate else y * silu(z)).unflatten(-1, (m.ngroups, -1))
    factor = run.hold((groups.square().mean(-1, keepdim=True) + 1e-5).rsqrt().expand_as(groups).flatten(2))
    return m.out_proj(run.gated(y * factor * m.norm.weight, z, silu(z), factor * m.norm.weight))


def both(m: Any, u: Tensor, run: Run) -> Tensor:
    one = mamba(m.mamba_fwd, u, run)
    with run.reversed():
        return one + mamba(m.mamba_rev, u.flip(1), run).flip(1)


def s4d(m: Any, u: Tensor, run: Run) -> Tensor:
    x, k = u.mT if m.transposed else u, m.kernel
    A = torch.complex(-k.log_A_real.exp(), k.A_imag)
    a = (A * k.log_dt.exp()[:, None]).exp()
    y = run.scan(x.unsqueeze(-1), a, torch.ones_like(a), 2 * torch.view_as_complex(k.C) * (a - 1) / A, m.D).flatten(2)
    y = m.output_linear(m.activation(y.mT))
    return y if m.transposed else y.mT


def lru(m: Any, u: Tensor, run: Run) -> Tensor:
    a = torch.complex(-m.nu_log.exp(), m.theta_log.exp()).exp()
    B, C = (
        getattr(m, n) if hasattr(m, n) else torch.complex(getattr(m, f"{n}_re"), getattr(m, f"{n}_im")) for n in "BC"
    )
    h = states(run, m.gamma_log.exp() * (u.to(B) @ B.T), a)
    return (h @ C.T).real + u @ m.D.T


def states(run: Run, x: Tensor, a: Tensor, order: Sequence[int] | None = None) -> Tensor:
    one = torch.ones(1, 1, 1, 1)
    return run.scan(x.unsqueeze(-1), a.unsqueeze(-1), one, one, order=order).squeeze(-1)


def s5(m: Any, u: Tensor, run: Run) -> Tensor:
    s = m.seq
    a = (s.Lambda * s.log_step.exp()).exp()
    x = u.to(a) @ (((a - 1) / s.Lambda)[:, None] * torch.view_as_complex(s.B)).T
    h = states(run, x, a)
    h = torch.cat([h, states(run, x, a, range(x.shape[1])[::-1])], -1) if s.bidir else h
    return (h @ s.C.T).real + s.D * u


def unit(m: Any, u: Tensor, run: Run) -> Tensor:
    gate, x = m.gate(u).sigmoid().unsqueeze(-1), m.candidate(u)
    y = run.scan(x.unsqueeze(-1), 1 - gate, gate, torch.ones_like(gate), source=x, share=lambda s: s.unsqueeze(-1))
    return y.flatten(2)


def min_gru(m: Any, u: Tensor, run: Run) -> Tensor:
    x, gate = m.to_hidden_and_gate(u).chunk(2, -1)
    gate, x = gate.sigmoid().unsqueeze(-1), torch.where(x >= 0, x + 0.5, x.sigmoid())
    return m.to_out(run.scan(x.unsqueeze(-1), 1 - gate, gate, torch.ones_like(gate)).flatten(2))


def mlstm(m: Any, u: Tensor, run: Run) -> Tensor:
    cell, (source, z) = m.mlstm_cell, m.proj_up(u).chunk(2, -1)
    mixed = silu(m.conv1d(source))
    q, k, v = m.q_proj(mixed), m.k_proj(mixed), m.v_proj(source)
    gates = torch.cat([q, k, v], -1)
    q, k, v = (t.unflatten(-1, (cell.config.num_heads, -1)) for t in (q, k, v))
    i, log_f = cell.igate(gates), logsigmoid(cell.fgate(gates))
    terms = log_f.exp().unsqueeze(-1), i.exp().unsqueeze(-1) * k * k.shape[-1] ** -0.5, q
    y, n = run.scan(v, *terms), run.scan(torch.ones_like(v[..., :1]), *terms)
    largest = [(log_f[:, s + 1 : t + 1].sum(1) + i[:, s] for s in range(t + 1)) for t in range(u.shape[1])]
    largest = torch.stack([torch.stack([*each]).amax(0) for each in largest], 1).unsqueeze(-1)
    h = y / (torch.maximum(n.abs(), torch.ones(())) + 1e-6 * largest.exp())
    h = cell.outnorm(h.transpose(1, 2)).transpose(1, 2).flatten(2)
    return m.proj_down((h + m.learnable_skip * mixed) * silu(z))


def ss2d(m: Any, u: Tensor, run: Run) -> Tensor:
    (high, wide), inner = u.shape[1:3], m.conv2d.in_channels
    x, z = m.in_proj(u).chunk(2, -1)
    c, z = m.conv2d(x.movedim(-1, 1)).flatten(2).mT, z.flatten(1, 2)
    bend = run.hold(c.sigmoid())
    x, y, places = c * bend, 0, [*range(high * wide)]
    turned = [row * wide + column for column in range(wide) for row in range(high)]
    for way, order in enumerate((places, turned, places[::-1], turned[::-1])):
        step, B, C = (x @ m.x_proj_weight[way].T).split([m.rank, m.states, m.states], -1)
        delta = softplus(step @ m.dt_projs_weight[way].T + m.dt_projs_bias[way]).unsqueeze(-1)
        A, D = (t.unflatten(0, (4, inner))[way] for t in (m.A_logs, m.Ds))
        terms = (delta * -A.exp()).exp(), delta * B.unsqueeze(2), C.unsqueeze(2), D, order
        y = y + run.scan(x.unsqueeze(-1), *terms, source=c, share=lambda s: (s * bend).unsqueeze(-1)).flatten(2)
    shown, factor = run.norm(m.out_norm, y)
    return m.out_proj(run.gated(shown, z, silu(z), factor).unflatten(1, (high, wide)))


SLOW: dict[str, Callable[[Any, Tensor, Run], Tensor]] = {
    "CopiedMamba": mamba, "MambaBlock": mamba, "S6": lambda m, u, run: mamba(m, u, run, biases=2), "Mamba2": mamba2,
    "BothWays": both, "S4D": s4d, "LRU": lru, "S5": s5, "Unit": unit, "minGRU": min_gru, "mLSTMLayer": mlstm,
    "SS2D": ss2d,
}  # fmt: skip
"""Outputs of layers, by the names of their classes."""
