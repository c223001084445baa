"""Random recurrences of every kind, and their attention matrices by the definition, channel by channel, in float64."""

import itertools

import torch
from torch import Tensor
from ssmscope import ops
from ssmscope.ops import DeltaRecurrence, Recurrence

FORMS = {
    "mamba": (6, 1, 1, 3), "mamba, two groups": (6, 1, 2, 3), "mamba-2": (6, 4, 2, 5), "linear attention": (6, 1, 6, 1),
    "gla": (4, 3, 4, 5), "delta": (4, 3, 2, 5), "delta, a decay per state": (4, 3, 2, 5),
}  # fmt: skip
"""Heads, width, groups of b and c, and state of each kind."""
AROUND = ("nothing", "left", "taps", "both")


def draw(kind: str, length: int, *, batch: int = 2, seed: int = 0, dtype=torch.float64) -> Recurrence:
    heads, width, groups, state = FORMS[kind]
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=dtype)

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=dtype)

    x = normal(batch, length, heads, width)
    b, c = normal(batch, length, groups, state), normal(batch, length, groups, state)
    D = normal(heads) if kind.startswith("mamba,") else normal(heads, width)
    if kind == "gla":
        return Recurrence(x, b, c, log_a=-uniform(batch, length, heads, state), D=D)
    if kind.startswith("delta"):
        b, beta = torch.nn.functional.normalize(b, dim=-1), uniform(batch, length, heads)
        return DeltaRecurrence(
            x, b, c, log_a=-uniform(batch, length, heads, 1 if kind == "delta" else state), beta=beta, D=D
        )
    A = -uniform(heads, 1 if kind == "mamba-2" else state)
    return Recurrence(x, b, c, delta=uniform(batch, length, heads), A=A, D=D)


def surroundings(r: Recurrence, which: str, *, reach: int = 4, narrow: bool = False) -> dict[str, Tensor]:
    batch, length, heads, width, _ = r.shape
    width = 1 if narrow else width
    g = torch.Generator().manual_seed(1)
    left = torch.randn(batch, length, heads, width, generator=g, dtype=r.b.dtype)
    taps = torch.randn(batch, length, reach, heads, width, generator=g, dtype=r.b.dtype)
    given = {"left": left, "taps": taps}
    return {n: t for n, t in given.items() if which in (n, "both")}


def channels(r: Recurrence, skip: bool, left: Tensor | None = None, taps: Tensor | None = None) -> Tensor:
    """Every channel's matrix, (batch, heads, width, t, s), entry by entry."""
    batch, length, heads, width, _ = r.shape
    M = ops.attention_reference(r).unsqueeze(2).expand(-1, -1, width, -1, -1).clone()
    if skip and r.D is not None:
        D = r.D if r.D.ndim == 2 else r.D[:, None].expand(heads, width)
        M = M + torch.eye(length, dtype=M.dtype) * D[..., None, None]
    if taps is not None:
        taps, spread = taps.expand(batch, length, -1, heads, width), torch.zeros_like(M)
        for s in range(length):
            for i in range(min(taps.shape[2], length - s)):
                spread[..., s] += M[..., s + i] * taps[:, s, i][..., None]
        M = spread
    if left is not None:
        M = M * left.expand(batch, length, heads, width).permute(0, 2, 3, 1)[..., None]
    return M


def means(M: Tensor, groups: int) -> Tensor:
    return M.reshape(len(M), groups, -1, *M.shape[-2:]).mean(2)


def in_cells(mean: Tensor, cells: int) -> Tensor:
    """Return the mean over the pairs t ≥ s of every cell, by a product with a membership matrix."""
    length = mean.shape[-1]
    edge = [i * length // cells for i in range(cells + 1)]
    within = torch.tensor([[a <= t < b for t in range(length)] for a, b in itertools.pairwise(edge)]).to(mean)
    pairs = within @ torch.ones(length, length).tril().to(mean) @ within.T
    return within @ mean.tril() @ within.T / pairs.clamp(min=1)


def near(ours: Tensor, exact: Tensor, tolerance: float = 1e-12) -> None:
    assert ours.shape == exact.shape
    if exact.numel():
        assert (ours - exact).abs().max() <= tolerance * exact.abs().max().clamp(min=1e-30)
