"""Norms of a selective SSM's weights that enter the generalisation bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ssmscope.architectures.own.selective import SelectiveSSM
from ssmscope.core.affine import embedding_table, matrix, offset
from ssmscope.core.heads import linear_head
from ssmscope.errors import InputError
from ssmscope.probes.bound.terms import Norms, capacity, largest_pairs

if TYPE_CHECKING:
    from ssmscope.core.model import Model


class TheoremModel(NamedTuple):
    """Model that the theorem covers: one selective SSM between embeddings (tokens, channels) and a head (rows,
    channels)."""

    mixer: SelectiveSSM
    embeddings: Tensor
    head: Tensor
    bias: bool
    """True if the head has a bias, unlike the theorem's output wᵀy[T]."""


def theorem_model(model: Model) -> TheoremModel | None:
    """Return the parts of a model that the theorem covers; None for several layers, another layer or pixel inputs."""
    mixers = model.mixers
    head = linear_head(model.module)
    if len(mixers) != 1 or not isinstance(mixers[0], SelectiveSSM) or model.channels is not None or head is None:
        return None
    constant = offset(head, "the head")
    bias = constant is not None and bool(constant.any())
    return TheoremModel(mixers[0], embedding_table(model.module), matrix(head, "the head"), bias)


def norms_of(parts: TheoremModel, row: int) -> Norms:
    """Compute the norms (Assumptions 3.1, 3.2 and 3.4) with w = row `row` of the head, in float64.

    Raises:
        InputError: weights that are not finite.
    """
    mixer = parts.mixer
    A, W_B, W_C, q, p, w, table = map(
        _to_double, (mixer.A, mixer.W_B, mixer.W_C, mixer.q_delta, mixer.p_delta, parts.head[row], parts.embeddings)
    )
    named = {"A": A, "W_B": W_B, "W_C": W_C, "q": q, "p": p, "the head": w, "the embedding": table}
    broken = next((name for name, t in named.items() if not bool(t.isfinite().all())), None)
    if broken is not None:
        raise InputError(f"{broken} of the selective SSM has numbers that are not finite; the model is damaged")
    return Norms(
        channels=A.shape[0],
        state=A.shape[1],
        abscissa=A.max().item(),
        p=p.item(),
        B_u=table.norm(dim=1).max().item(),
        B_B=torch.linalg.matrix_norm(W_B, 2).item(),
        B_C=torch.linalg.matrix_norm(W_C, 2).item(),
        B_w=w.norm().item(),
        B_q=q.norm().item(),
        B_A=A.abs().max().item(),
        M_B=W_B.abs().sum().item(),
        M_C=W_C.abs().sum().item(),
        M_w=w.abs().sum().item(),
        M_q=q.abs().sum().item(),
        M_A=A.abs().sum().item(),
    )


def worst_row(parts: TheoremModel, length: int) -> int:
    """Return the row of the head with the largest capacity at `length`; the theorem is for scalar outputs."""
    W = _to_double(parts.head)
    if len(W) == 1:
        return 0
    candidates = largest_pairs(W.norm(dim=1).numpy(), W.abs().sum(1).numpy())
    if len(candidates) == 1:
        return candidates[0]
    return max(candidates, key=lambda row: capacity(norms_of(parts, row), length).log)


def _to_double(t: Tensor | nn.Parameter) -> Tensor:
    return t.detach().cpu().double()
