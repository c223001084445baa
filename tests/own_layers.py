"""Layers as people write and copy them into networks of their own, most of which are read by the names of their
parts."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu, softplus
import ssmscope


class Unit(nn.Module):
    """A minimal GRU, which is to be adapted, with `unit_terms`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.candidate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, u: Tensor) -> Tensor:
        gate, candidate = self.gate(u).sigmoid(), self.candidate(u)
        h, found = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = (1 - gate[:, t]) * h + gate[:, t] * candidate[:, t]
            found.append(h)
        return torch.stack(found, 1)


def unit_terms(layer: Any, u: Tensor) -> ssmscope.Recurrence:
    log_a = logsigmoid(-layer.gate(u)).unsqueeze(-1)
    b = -torch.expm1(log_a)
    return ssmscope.Recurrence(x=layer.candidate(u).unsqueeze(-1), b=b, c=torch.ones_like(b), log_a=log_a)


class S4DKernel(nn.Module):
    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        self.C, self.log_dt = nn.Parameter(torch.randn(width, states, 2)), nn.Parameter(torch.rand(width) * 2 - 2)
        self.log_A_real = nn.Parameter(torch.full((width, states), 0.5).log())
        self.A_imag = nn.Parameter(math.pi * torch.arange(states).float().repeat(width, 1))

    def forward(self, L: int) -> Tensor:  # noqa: N803
        A = torch.complex(-self.log_A_real.exp(), self.A_imag)
        step = A * self.log_dt.exp()[:, None]
        C = torch.view_as_complex(self.C) * (step.exp() - 1) / A
        return 2 * torch.einsum("hn,hnl->hl", C, torch.exp(step[..., None] * torch.arange(L, device=A.device))).real


class S4D(nn.Module):
    """The authors' minimal layer: channels first unless it is told otherwise, and a state that is never given."""

    def __init__(self, width: int, transposed: bool = True) -> None:
        super().__init__()
        self.transposed, self.D, self.kernel = transposed, nn.Parameter(torch.randn(width)), S4DKernel(width)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(0.2)
        self.output_linear = nn.Sequential(nn.Conv1d(width, 2 * width, 1), nn.GLU(dim=-2))

    def forward(self, u: Tensor) -> tuple[Tensor, None]:
        u = u if self.transposed else u.mT
        length, kernel = u.shape[-1], self.kernel(L=u.shape[-1])
        both = torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(u, n=2 * length)
        y = torch.fft.irfft(both, n=2 * length)[..., :length] + u * self.D[:, None]
        y = self.output_linear(self.dropout(self.activation(y)))
        return (y if self.transposed else y.mT), None


class LRU(nn.Module):
    def __init__(self, width: int, states: int = 12) -> None:
        super().__init__()
        self.nu_log, self.theta_log = (nn.Parameter(v) for v in (torch.rand(states) * 2 - 3, torch.rand(states)))
        self.gamma_log, self.D = nn.Parameter(torch.rand(states) - 1), nn.Parameter(torch.randn(width, width) / 4)
        self.B_re, self.B_im = (nn.Parameter(torch.randn(states, width) / 4) for _ in range(2))
        self.C_re, self.C_im = (nn.Parameter(torch.randn(width, states) / 4) for _ in range(2))

    def forward(self, u: Tensor, without: int | None = None) -> Tensor:
        """Step by step; from the step `without` on, later ones do not read it."""
        rate = torch.exp(torch.complex(-self.nu_log.exp(), self.theta_log.exp()))
        B, C = torch.complex(self.B_re, self.B_im), torch.complex(self.C_re, self.C_im)
        h, found = u.new_zeros(u.shape[0], len(rate), dtype=B.dtype), []
        for t in range(u.shape[1]):
            kept, h = rate * h, rate * h + self.gamma_log.exp() * (u[:, t].to(B) @ B.T)
            found.append((h @ C.T).real + u[:, t] @ self.D.T)
            h = kept if t == without else h
        return torch.stack(found, 1)


class CopiedMamba(nn.Module):
    """mamba-minimal's block."""

    def __init__(self, width: int, states: int = 6, rank: int = 3) -> None:
        super().__init__()
        inner = self.inner = 2 * width
        self.rank, self.states = rank, states
        self.in_proj, self.out_proj = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * states, bias=False), nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.randn(inner))

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.in_proj(x).chunk(2, -1)
        x = silu(self.conv1d(x.mT)[..., : x.shape[1]].mT)
        step, B, C = self.x_proj(x).split([self.rank, self.states, self.states], -1)
        y = scanned(x, softplus(self.dt_proj(step)), -self.A_log.exp(), B, C, self.D)
        return self.out_proj(y * silu(z))


def scanned(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, without: int | None = None) -> Tensor:
    h, found = x.new_zeros(*x.shape[::2], A.shape[1]), []
    for t in range(x.shape[1]):
        kept = torch.exp(delta[:, t, :, None] * A) * h
        h = kept + (delta[:, t] * x[:, t])[..., None] * B[:, t, None]
        found.append((h * C[:, t, None]).sum(-1) + D * x[:, t])
        h = kept if t == without else h
    return torch.stack(found, 1)


class BothWays(nn.Module):
    """Two Mambas, one on the reversed input, added or averaged; or something else."""

    def __init__(self, width: int, share: float = 1.0, made: Callable[[int], nn.Module] = CopiedMamba) -> None:
        super().__init__()
        self.share, self.mamba_fwd, self.mamba_rev = share, made(width), made(width)

    def forward(self, u: Tensor) -> Tensor:
        one, other = self.mamba_fwd(u), self.mamba_rev(u.flip(1)).flip(1)
        return one * other if self.share == 0 else self.share * (one + other)


class SS2D(nn.Module):
    """VMamba's layer: a grid read in rows and columns, forwards and backwards."""

    def __init__(self, width: int, states: int = 4, rank: int = 2) -> None:
        super().__init__()
        inner, self.rank, self.states = 2 * width, rank, states
        self.in_proj, self.out_proj = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.conv2d, self.out_norm = nn.Conv2d(inner, inner, 3, padding=1, groups=inner), nn.LayerNorm(inner)
        self.x_proj_weight = nn.Parameter(torch.randn(4, rank + 2 * states, inner) / inner**0.5)
        self.dt_projs_weight = nn.Parameter(torch.randn(4, inner, rank))
        self.dt_projs_bias = nn.Parameter(torch.randn(4, inner) - 1)
        self.A_logs = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(4 * inner, 1))
        self.Ds = nn.Parameter(torch.randn(4 * inner))

    def forward(self, u: Tensor, without: tuple[int, int] | None = None) -> Tensor:
        """With `without` no other position reads this one."""
        (batch, high, wide), inner = u.shape[:3], self.conv2d.in_channels
        x, z = self.in_proj(u).chunk(2, -1)
        x = silu(self.conv2d(x.movedim(-1, 1)))
        places, y = torch.arange(high * wide, device=u.device).view(high, wide), 0
        for way in range(4):
            line = x.flatten(2) if way % 2 == 0 else x.transpose(2, 3).flatten(2)
            at = places.flatten() if way % 2 == 0 else places.T.flatten()
            line, at = (line.flip(-1), at.flip(0)) if way > 1 else (line, at)
            v = line.mT
            step, B, C = (v @ self.x_proj_weight[way].T).split([self.rank, self.states, self.states], -1)
            delta = softplus(step @ self.dt_projs_weight[way].T + self.dt_projs_bias[way])
            own = slice(way * inner, (way + 1) * inner)
            cut = None if without is None else int((at == places[without]).nonzero())
            found = scanned(v, delta, -self.A_logs[own].exp(), B, C, self.Ds[own], cut)
            y = y + torch.zeros_like(found).index_copy(1, at, found)
        return self.out_proj(self.out_norm(y).view(batch, high, wide, -1) * silu(z))


class Mamba2(nn.Module):
    """mamba_ssm's layer step by step, with its parts and fields; its own code needs a GPU."""

    def __init__(self, width: int, rmsnorm: bool = True, before: bool = False, limit: float = math.inf) -> None:
        super().__init__()
        self.ngroups, self.d_state, self.headdim, self.rmsnorm, self.norm_before_gate = 2, 5, 4, rmsnorm, before
        inner = 2 * width
        heads, both = inner // self.headdim, 2 * self.ngroups * self.d_state
        self.dt_limit = (0.0, limit)
        self.in_proj, self.out_proj = nn.Linear(width, 2 * inner + both + heads, bias=False), nn.Linear(inner, width)
        self.conv1d = nn.Conv1d(inner + both, inner + both, 4, groups=inner + both, padding=3)
        self.dt_bias, self.D = nn.Parameter(torch.randn(heads)), nn.Parameter(torch.randn(heads))
        self.A_log, self.norm = nn.Parameter(torch.rand(heads)), nn.RMSNorm(inner, eps=1e-5)
        self.norm.group_size = inner // self.ngroups

    def forward(self, u: Tensor, inference_params: Any = None) -> Tensor:
        inner, both = self.out_proj.in_features, self.ngroups * self.d_state
        z, source, step = self.in_proj(u).split([inner, self.conv1d.in_channels, len(self.A_log)], -1)
        x, B, C = silu(self.conv1d(source.mT)[..., : u.shape[1]].mT).split([inner, both, both], -1)
        x, step = x.unflatten(-1, (len(self.A_log), -1)), softplus(step + self.dt_bias).clamp(*self.dt_limit)
        B, C = (t.unflatten(-1, (2, -1)).repeat_interleave(len(self.A_log) // 2, 2) for t in (B, C))
        H, found = u.new_zeros(*x.shape[:1], *x.shape[2:], self.d_state), []
        for t in range(u.shape[1]):
            kept = torch.exp(-step[:, t] * self.A_log.exp())[..., None, None]
            H = kept * H + (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
            found.append((H @ C[:, t, ..., None]).squeeze(-1) + self.D[:, None] * x[:, t])
        y = torch.stack(found, 1).flatten(2)
        normed = lambda v: (  # noqa: E731
            torch.rms_norm(v.unflatten(-1, (self.ngroups, -1)), [inner // 2], eps=1e-5).flatten(-2) * self.norm.weight
        )
        if not self.rmsnorm:
            return self.out_proj(y * silu(z))
        return self.out_proj(normed(y) * silu(z) if self.norm_before_gate else normed(y * silu(z)))


Mamba2.__module__ = "mamba_ssm.modules.mamba2"
