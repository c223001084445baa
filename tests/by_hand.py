"""Parts of layers written out token by token and head by head, for references of whole models."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def normed(x: Tensor, weight: Tensor | float, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}


def convolved(x: Tensor, kernel: Tensor, bias: Tensor | float = 0) -> Tensor:
    """Convolve x (length, channels) with a kernel (channels, 1, taps), one position after the other."""
    rows = []
    for t in range(len(x)):
        rows.append(sum((kernel[:, 0, -1 - j] * x[t - j] for j in range(min(t + 1, kernel.shape[2]))), bias))
    return torch.stack(rows)  # type: ignore[arg-type]


def turned(head: Tensor, position: int, size: int, base: float, interleaved: bool = False) -> Tensor:
    """Turn a head's first `size` numbers, in pairs as complex ones, by the angle position / base^(2i / size)."""
    result = head.clone()
    for i in range(size // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + size // 2)
        angle = position * base ** (-2 * i / size)
        number = complex(head[a], head[b]) * complex(math.cos(angle), math.sin(angle))
        result[a], result[b] = number.real, number.imag
    return result


def attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float, turn: Callable[[Tensor, int], Tensor], reach: int | None = None
) -> Tensor:
    """Return what queries (length, heads, size) read of the tokens up to themselves, or of the last `reach`; heads of
    keys and values are shared by neighbouring ones of queries."""
    rows = []
    for t in range(len(q)):
        row, seen = [], range(0 if reach is None else max(0, t + 1 - reach), t + 1)
        for head in range(q.shape[1]):
            of, query = head // (q.shape[1] // k.shape[1]), turn(q[t, head], t)
            scores = torch.stack([query @ turn(k[s, of], s) for s in seen]) * scale
            row.append(scores.softmax(0) @ v[seen.start : t + 1, of])
        rows.append(torch.cat(row))
    return torch.stack(rows)


def scanned(x: Tensor, b: Tensor, c: Tensor, delta: Tensor, A: Tensor, D: Tensor) -> Tensor:
    """Run heads x (length, heads, width) with steps (length, heads) and rates A (heads, 1 or state)."""
    state, rows = torch.zeros(*x.shape[1:], b.shape[-1], dtype=x.dtype), []
    for t in range(len(x)):
        kept = (delta[t, :, None] * A).exp()[:, None] * state
        state = kept + delta[t, :, None, None] * x[t, :, :, None] * b[t]
        rows.append(state @ c[t] + D[:, None] * x[t])
    return torch.stack(rows)
