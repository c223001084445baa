"""Layers of packages that networks are built around, and of code that people copy.

Classes of packages are found by name, and none is imported; copied ones by the names of their parts, `USUAL_PARTS`. As
for any adapted layer, `load` compares what is read with the layer's own output.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu, softplus
from ssmscope.core.adapted import Adapted, Terms
from ssmscope.core.forms import Form, Norm, projection
from ssmscope.core.mixers import is_readable, read_as
from ssmscope.errors import InputError
from ssmscope.ops import Recurrence

TAPS = 4
"""Taps of the convolutions as these packages make them; `reach` of a class is that of its longest."""


def _convolved(mixer: Any, source: Tensor) -> Tensor:
    return silu(mixer.conv1d(source.mT)[..., : source.shape[1]].mT)


# ---- Mamba: mamba_ssm's Mamba, mambapy's MambaBlock, mamba-minimal; minimamba's S6 adds the bias of Δ twice


def _mamba_terms(mixer: Any, u: Tensor, biases: int = 1) -> Terms:
    source, z = mixer.in_proj(u).chunk(2, -1)
    x, states = _convolved(mixer, source), mixer.A_log.shape[1]
    step, B, C = mixer.x_proj(x).split([mixer.dt_proj.in_features, states, states], -1)
    norms = [getattr(mixer, f"{name}_layernorm", None) for name in ("dt", "B", "C")]
    step, B, C = (t if norm is None else norm(t) for norm, t in zip(norms, (step, B, C)))
    terms = Recurrence(
        x=x.unsqueeze(-1),
        b=B.unsqueeze(2),
        c=C.unsqueeze(2),
        delta=softplus(mixer.dt_proj(step) + (biases - 1) * mixer.dt_proj.bias),
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
_S6_FORM = replace(_MAMBA_FORM, gate_activation=None)
S6 = Adapted(partial(_mamba_terms, biases=2), None, _S6_FORM, TAPS, False, False)


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


# ---- VMamba's SS2D (Liu et al. 2024, arXiv 2401.10166): a grid is read in rows and columns, forwards and backwards


def _convolved_grid(mixer: Any, u: Tensor, biased: bool = True) -> Tensor:
    """Return the convolution's output (batch, length, channels) of u, without constants or with them."""
    x = projection(mixer, "in_proj", slice(0, mixer.conv2d.in_channels))(u, biased)
    x = SS2D.shaped(mixer, x).movedim(-1, 1)
    y = mixer.conv2d(x) if biased else mixer.conv2d(x) - mixer.conv2d(torch.zeros_like(x))
    return y.flatten(2).mT


def _ss2d_terms(mixer: Any, u: Tensor) -> Terms:
    rows = torch.arange(u.shape[1] * u.shape[2], device=u.device)
    columns = rows.view(u.shape[1:3]).T.flatten()
    u = u.flatten(1, 2)
    x = silu(_convolved_grid(mixer, u))
    rank, inner = mixer.dt_projs_weight.shape[2], x.shape[-1]
    A, D = -mixer.A_logs.exp().view(4, inner, -1), mixer.Ds.view(4, inner)
    found = []
    for way, order in enumerate((rows, columns, rows.flip(0), columns.flip(0))):
        step, B, C = (x @ mixer.x_proj_weight[way].T).split([rank, A.shape[-1], A.shape[-1]], -1)
        delta = softplus(step @ mixer.dt_projs_weight[way].T + mixer.dt_projs_bias[way])
        terms = {"b": B.unsqueeze(2), "c": C.unsqueeze(2), "delta": delta, "A": A[way], "D": D[way]}
        found.append(Recurrence(x=x.unsqueeze(-1), order=order, **terms))
    gated = mixer.in_proj.out_features > inner
    return Terms(found, z=mixer.in_proj(u)[..., inner:] if gated else None)


_SS2D_FORM = Form(
    values=lambda mixer, _: partial(_convolved_grid, mixer),
    activation="silu",
    norm="out_norm",
    gate=lambda mixer, layer: None if layer.z is None else ("in_proj", slice(mixer.conv2d.in_channels, None)),
)
SS2D = Adapted(_ss2d_terms, None, _SS2D_FORM, 1, True, False)


# ---- complex states: Re(C λ^(t−s) b) is a product of |λ|^(t−s) and vectors that turn with the position


def _as_complex(mixer: Any, name: str) -> Tensor:
    """Return a complex parameter, or one given by its real and imaginary parts."""
    found = getattr(mixer, name, None)
    if found is None:
        return torch.complex(getattr(mixer, f"{name}_re"), getattr(mixer, f"{name}_im"))
    return found if found.is_complex() else torch.view_as_complex(found)


# S4D (Gu et al. 2022, arXiv 2206.11893), as in the authors' minimal code: diagonal, the same at every position


def _s4d_terms(mixer: Any, u: Tensor) -> Recurrence:
    x, kernel = u.mT if mixer.transposed else u, mixer.kernel
    A = torch.complex(-kernel.log_A_real.exp(), kernel.A_imag)
    rate = A * kernel.log_dt.exp().unsqueeze(-1)
    C = 2 * torch.view_as_complex(kernel.C) * (rate.exp() - 1) / A
    log_a, b, c = (t.expand(*x.shape[:2], -1, -1) for t in (rate, torch.ones_like(C), C))
    return Recurrence(x=x.unsqueeze(-1), b=b, c=c, log_a=log_a, D=mixer.D)


def _s4d_output(mixer: Any, u: Tensor, ys: list[Tensor]) -> Tensor:
    y = mixer.output_linear(mixer.dropout(mixer.activation(ys[0].mT)))
    return y if mixer.transposed else y.mT


S4D = Adapted(_s4d_terms, _s4d_output, None, 1, False, False, lambda mixer: mixer.transposed)


# LRU (Orvieto et al. 2023, arXiv 2303.06349) and S5 (Smith et al. 2022, arXiv 2208.04933): dense B and C


def _dense_terms(u: Tensor, rate: Tensor, B: Tensor) -> Recurrence:
    """Return h_t = λ h_{t−1} + B u_t for λ = exp(`rate`)."""
    one, log_a = (t.view(-1, 1).expand(*u.shape[:2], -1, 1) for t in (torch.ones_like(rate), rate))
    return Recurrence(x=(u.to(B) @ B.T).unsqueeze(-1), b=one, c=one, log_a=log_a)


def _lru_rate(mixer: Any) -> Tensor:
    return torch.complex(-mixer.nu_log.exp(), mixer.theta_log.exp())


def _lru_terms(mixer: Any, u: Tensor) -> Recurrence:
    return _dense_terms(u, _lru_rate(mixer), mixer.gamma_log.exp().unsqueeze(-1) * _as_complex(mixer, "B"))


def _lru_output(mixer: Any, u: Tensor, ys: list[Tensor]) -> Tensor:
    skip = u * mixer.D if mixer.D.ndim == 1 else u @ mixer.D.T
    return (ys[0] @ _as_complex(mixer, "C").T).real + skip


LRU = Adapted(_lru_terms, _lru_output, None, 1, False, False)


def _s5_parts(mixer: Any) -> tuple[Tensor, Tensor, Tensor]:
    seq = mixer.seq
    if seq.liquid or seq.degree != 1:
        raise InputError("an S5 that is liquid (its decay depends on its input) or of another degree is not read")
    B, C = seq.get_BC_tilde()
    decay, B = seq.discretize(seq.Lambda, B, seq.log_step.exp())
    return decay.log(), B, C


def _s5_terms(mixer: Any, u: Tensor) -> list[Recurrence]:
    rate, B, _ = _s5_parts(mixer)
    forwards = _dense_terms(u, rate, B)
    order = torch.arange(u.shape[1], device=u.device).flip(0)
    return [forwards, replace(forwards, order=order)] if mixer.seq.bidir else [forwards]


def _s5_output(mixer: Any, u: Tensor, ys: list[Tensor]) -> Tensor:
    return (torch.cat(ys, -1) @ _s5_parts(mixer)[2].T).real + mixer.seq.D * u


S5 = Adapted(_s5_terms, _s5_output, None, 1, lambda mixer: mixer.seq.bidir, False)


# ---- code that is copied


USUAL_PARTS: dict[frozenset[str], Adapted] = {
    frozenset({"in_proj", "conv1d", "x_proj", "dt_proj", "out_proj", "A_log", "D"}): MAMBA,
    frozenset({"in_proj", "conv1d", "out_proj", "A_log", "D", "dt_bias"}): MAMBA2,
    frozenset({"in_proj", "conv2d", "x_proj_weight", "dt_projs_weight", "A_logs", "Ds", "out_proj"}): SS2D,
    frozenset({"kernel", "D", "activation", "dropout", "output_linear"}): S4D,
    frozenset({"nu_log", "theta_log", "gamma_log", "D"}): LRU,
}
"""Names of the parameters and parts of a layer, and the adapter that reads layers with such."""


def recognise(module: nn.Module) -> None:
    """Have classes of a module's parts that no adapter reads, and whose parts have usual names, read accordingly."""
    for part in module.modules():
        if type(part).__module__.startswith(("torch.", "transformers.")) or is_readable(part):
            continue
        names = {name for name, _ in [*part.named_parameters(recurse=False), *part.named_children()]}
        for needed, adapter in USUAL_PARTS.items():
            if needed <= names and not any(name.endswith("_b") or "_b_" in name for name in names):  # Of Vim's kin.
                read_as(type(part), adapter)
                break
