"""Long inputs are worked in pieces, whose sizes change nothing."""

import re
from pathlib import Path

import pytest
import torch
from small_pieces import REFUSALS, SIZES, make_small
from torch import Tensor
from ssmscope import ops
from ssmscope.ops import DeltaRecurrence, Recurrence, survival

FOLDER = Path(ops.__file__).parent
LENGTH = 37


def drawn(kind: str) -> Recurrence:
    heads, width, groups, state = {"channels": (6, 1, 1, 3), "heads": (4, 3, 2, 3), "wide": (4, 3, 2, 3)}.get(
        kind, (3, 2, 3, 3)
    )
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x, D = normal(2, LENGTH, heads, width), normal(heads)
    b, c = normal(2, LENGTH, groups, state), normal(2, LENGTH, groups, state)
    if kind in ("channels", "heads"):
        A, delta = -normal(heads, state if kind == "channels" else 1).abs(), 0.3 * normal(2, LENGTH, heads).abs()
        return Recurrence(x, b, c, delta=delta, A=A, D=D)
    log_a = -0.2 * normal(2, LENGTH, heads, 1 if kind == "delta" else state).abs()
    if kind == "wide":
        return Recurrence(x, b, c, log_a=log_a, D=D)
    keys = torch.nn.functional.normalize(normal(3, 2, LENGTH, heads, state), dim=-1)
    more = {"e": keys[1], "r": keys[2]} if kind == "generalised delta" else {}
    return DeltaRecurrence(x, keys[0], c, log_a=log_a, beta=normal(2, LENGTH, heads).sigmoid(), D=D, **more)


RECURRENCES = ["channels", "heads", "wide", "delta", "delta by state", "generalised delta"]


def everything(r: Recurrence) -> dict[str, Tensor]:
    """Compute everything that is worked in pieces."""
    heads, width, state = r.shape[2:]
    initial = torch.linspace(-1, 1, 2 * heads * width * state, dtype=torch.float64).view(2, heads, width, state)
    found = {"retention": ops.retention(r), "write": ops.write(r), "norms": survival.remaining_norms(r)}
    found |= zip(("y", "state", "kept"), ops.scan(r, initial, retention=True))
    found["half-lives"] = survival.half_lives([r]).nan_to_num(posinf=-1.0)
    found["towards"], found["rest"] = survival.left_towards_state(r, initial)
    for groups in (1, heads):
        found[f"map {groups}"] = ops.attention(r, groups=groups, skip=True)
        found[f"absolute {groups}"] = ops.attention(r, groups=groups, absolute=True)
        found[f"rows {groups}"] = ops.attention(r, groups=groups, rows=[36, 4, 16, 31])
        found[f"cells {groups}"] = ops.pooled_attention(r, 5, groups=groups, skip=True)
    return found


@pytest.mark.parametrize("kind", RECURRENCES)
def test_small_pieces_change_nothing(kind, monkeypatch):
    r = drawn(kind)
    whole = everything(r)
    make_small(monkeypatch)
    for name, found in everything(r).items():
        torch.testing.assert_close(found, whole[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_every_size_of_a_piece_is_set_small():
    named = {
        (path.stem, name)
        for path in FOLDER.glob("*.py")
        for name in re.findall(r"^((?:MAX|STEPS|POSITIONS|LARGEST)_[A-Z_]+)\b.*=", path.read_text(), re.M)
    }
    known = {(module.__name__.rpartition(".")[2], name) for module, name in (*SIZES, *REFUSALS)}
    assert named == known
