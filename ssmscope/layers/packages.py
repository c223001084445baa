"""Layers of packages that networks are built around: mamba_ssm, mambapy, xlstm and minGRU-pytorch.

Their classes are found by name, and none of these packages is imported. As for any adapted layer, `load` compares what
is read with the layer's own output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu, softplus

from ssmscope.core.adapted import Adapted, Terms
from ssmscope.core.forms import Form, Norm
from ssmscope.errors import InputError
from ssmscope.ops import Recurrence

TAPS = 4
"""Taps of the convolutions as these packages make them; `reach` of a class is that of its longest."""


def _convolved(mixer: Any, source: Tensor) -> Tensor:
    return silu(mixer.conv1d(source.mT)[..., : source.shape[1]].mT)


# ---- Mamba: mamba_ssm's Mamba, mambapy's MambaBlock


def _mamba_terms(mixer: Any, u: Tensor) -> Terms:
    source, z = mixer.in_proj(u).chunk(2, -1)
    x, states = _convolved(mixer, source), mixer.A_log.shape[1]
    step, B, C = mixer.x_proj(x).split([mixer.dt_proj.in_features, states, states], -1)
    norms = [getattr(mixer, f"{name}_layernorm", None) for name in ("dt", "B", "C")]
    step, B, C = (t if norm is None else norm(t) for norm, t in zip(norms, (step, B, C)))
    terms = Recurrence(
        x=x.unsqueeze(-1),
        b=B.unsqueeze(2),
        c=C.unsqueeze(2),
        delta=softplus(mixer.dt_proj(step)),
        A=-mixer.A_log.exp(),
        D=mixer.D,
    )
    return Terms(terms, conv_input=source, z=z)


def _half(mixer: Any, which: int) -> tuple[str, slice]:
    size = len(mixer.A_log)
    return "in_proj", slice(which * size, (1 + which) * size)


_MAMBA_FORM = Form(
    values=lambda mixer, _: _half(mixer, 0),
    convolution="conv1d",
    activation="silu",
    gate=lambda mixer, _: _half(mixer, 1),
)
MAMBA = Adapted(_mamba_terms, None, _MAMBA_FORM, TAPS, False, False)


# ---- Mamba-2: mamba_ssm's Mamba2


def _sizes(mixer: Any) -> list[int]:
    """Return the numbers of outputs of `in_proj` for z, x with B and C, and Δ."""
    inner = mixer.out_proj.in_features
    found = [inner, mixer.conv1d.in_channels, len(mixer.A_log)]
    if sum(found) != mixer.in_proj.out_features:
        raise InputError(f"{type(mixer).__name__} has a part beside its recurrence (d_ssm), which is not read")
    return found


def _mamba2_terms(mixer: Any, u: Tensor) -> Terms:
    z, source, step = mixer.in_proj(u).split(_sizes(mixer), -1)
    convolved, inner = _convolved(mixer, source), mixer.out_proj.in_features
    of_groups = (convolved.shape[-1] - inner) // 2
    x, B, C = convolved.split([inner, of_groups, of_groups], -1)
    delta = softplus(step + mixer.dt_bias).clamp(*getattr(mixer, "dt_limit", (0.0, float("inf"))))
    heads = len(mixer.A_log)
    terms = Recurrence(
        x=x.unflatten(-1, (heads, -1)),
        b=B.unflatten(-1, (mixer.ngroups, -1)),
        c=C.unflatten(-1, (mixer.ngroups, -1)),
        delta=delta,
        A=-mixer.A_log.exp().unsqueeze(-1),
        D=mixer.D if mixer.D.numel() == heads else mixer.D.view(heads, -1),
    )
    return Terms(terms, conv_input=source, z=z)


def _mamba2_norm(mixer: Any, _: Any) -> Norm | None:
    if not getattr(mixer, "rmsnorm", True):
        return None
    return Norm(mixer.norm.weight, eps=mixer.norm.eps, size=getattr(mixer.norm, "group_size", None))


_MAMBA2_FORM = Form(
    values=lambda mixer, _: ("in_proj", slice(mixer.out_proj.in_features, 2 * mixer.out_proj.in_features)),
    convolution="conv1d",
    channels=lambda mixer, _: slice(0, mixer.out_proj.in_features),
    activation="silu",
    norm=_mamba2_norm,
    gate=lambda mixer, _: ("in_proj", slice(0, mixer.out_proj.in_features)),
    gate_first=lambda mixer, _: not getattr(mixer, "norm_before_gate", False),
)
MAMBA2 = Adapted(_mamba2_terms, None, _MAMBA2_FORM, TAPS, False, False)


# ---- minGRU-pytorch's minGRU: in log-space its candidates are positive


def _min_gru_terms(mixer: Any, u: Tensor) -> Recurrence:
    candidate, gate = mixer.to_hidden_and_gate(u).chunk(2, -1)
    candidate = torch.where(candidate >= 0, candidate + 0.5, candidate.sigmoid())
    b = gate.sigmoid().unsqueeze(-1)
    return Recurrence(x=candidate.unsqueeze(-1), b=b, c=torch.ones_like(b), log_a=-softplus(gate).unsqueeze(-1))


MIN_GRU = Adapted(_min_gru_terms, lambda mixer, u, ys: mixer.to_out(ys[0]), None, 1, False, False)


# ---- xlstm's mLSTM layer: a matrix memory and its normaliser


def _mlstm_parts(mixer: Any, u: Tensor) -> tuple[Tensor, ...]:
    source, z = mixer.proj_up(u).chunk(2, -1)
    mixed = mixer.conv_act_fn(mixer.conv1d(source))
    q, k, v = mixer.q_proj(mixed), mixer.k_proj(mixed), mixer.v_proj(source)
    gates, cell = torch.cat([q, k, v], -1), mixer.mlstm_cell
    q, k, v = (t.unflatten(-1, (cell.config.num_heads, -1)) for t in (q, k, v))
    return q, k, v, cell.igate(gates), logsigmoid(cell.fgate(gates)), mixed, z


def _mlstm_terms(mixer: Any, u: Tensor) -> Terms:
    q, k, v, entry, log_f, _, _ = _mlstm_parts(mixer, u)
    b = k * entry.exp().unsqueeze(-1) * k.shape[-1] ** -0.5
    shared: dict[str, Any] = {"b": b, "c": q, "log_a": log_f.unsqueeze(-1)}
    return Terms([Recurrence(x=v, **shared), Recurrence(x=torch.ones_like(v[..., :1]), **shared)])


def _mlstm_output(mixer: Any, u: Tensor, ys: list[Tensor]) -> Tensor:
    q, _, _, entry, log_f, mixed, z = _mlstm_parts(mixer, u)
    summed = log_f.cumsum(1)
    largest = summed + (entry - summed).cummax(1).values  # what the package divides by, to stay in range
    norm = ys[1].abs().clamp(min=1) + EPS * largest.exp()
    h = ys[0].unflatten(-1, q.shape[2:]) / norm.unsqueeze(-1)
    h = mixer.mlstm_cell.outnorm(h.transpose(1, 2)).transpose(1, 2).flatten(2)
    return mixer.proj_down((h + mixer.learnable_skip * mixed) * mixer.ogate_act_fn(z))


EPS = 1e-6
"""Addend of the package to its normaliser, in units of the largest gate product."""
MLSTM = Adapted(_mlstm_terms, _mlstm_output, None, TAPS, False, False)
