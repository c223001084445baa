"""Small random models of every architecture, and common operations on the terms of their layers."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from einops import rearrange
from exhaustive import ALL, few
from small_models import SMALL_MODELS
from torch import nn
from ssmscope import ops
from ssmscope.core.linearized import Path
from ssmscope.core.mixers import _readable_class, is_bidirectional
from ssmscope.core.model import Model
from ssmscope.ops.recurrence import straight


class Made(NamedTuple):
    """The models of an architecture as seed 0 draws them, and the state of the generator after that."""

    models: dict[str, nn.Module]
    drawn: torch.Tensor


def _made(make: Callable[[], dict[str, nn.Module]]) -> Made:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = make()
        return Made(models, torch.get_rng_state())


EXAMPLES = {name: made for made in map(_made, SMALL_MODELS.values()) for name in made.models}
"""The models of the same architecture as each small model, and itself among them, by its name."""
FEW = few(
    EXAMPLES,
    *("mamba", "mamba2", "baleen-b-mamba", "diff-mamba", "groupmamba", "gfssm", "gla", "gated-deltanet", "rwkv"),
    *("selective-ssm", "selective-ssm-language", "bamba", "jamba", "qwen3_next"),
)
"""One for every way in which layers are read: what analyses are tried on."""
HALVES = (FEW, FEW) if ALL else (FEW[::2], FEW[1::2])
"""For analyses that several tests try on them: one half for the one, the other half for the other."""
VARIANTS = frozenset(
    "baleen-b-mamba2 baleen-e-mamba baleen-b-soft-mamba2 gated-deltanet-as-mamba diff-mamba-not-normalized "
    "diff-s6-not-normalized diff-mamba1 gfssm-three-groups gfssm-without-prompts groupmamba-alone "
    "groupmamba-mamba2-one-group gla-as-mamba retnet-unrotated mamba-with-biases mamba2-one-group "
    "rwkv-deeper selective-ssm-classes falcon_h1-gate-then-norm falcon_h1-norm-then-gate "
    "xlstm-with-biases mamba3-hybrid minimax-m1 deltaproduct-ungated".split()
)
"""For which others stand: the contracts are tried on them only with `exhaustive.CONTRACTS`."""
SAME = set(
    "bailing_hybrid-unbounded granitemoehybrid lfm2_moe olmo_hybrid-negative-eigenvalues qwen3_5_moe qwen4_exp-sigmoid "
    "selective-ssm-language".split()
)
"""Models whose layers have the code of others that are tried more often: Bamba's, LFM2's, Qwen3.5's and the like."""
assert set(EXAMPLES) >= VARIANTS
HYBRIDS = tuple(
    name
    for name, made in EXAMPLES.items()
    if not is_bidirectional(made.models[name])
    and any(
        type(part).__name__.endswith("Attention")
        and _readable_class(part) is None
        and not type(part).__module__.startswith(("ssmscope.zoo.groupmamba", "transformers.models.rwkv"))
        for part in made.models[name].modules()
    )
)
"""Those in which layers of attention look back too."""
OTHER_HYBRIDS = [name for name in HYBRIDS if ALL or name not in VARIANTS | SAME]
"""Those of them whose layers have code of their own."""
TEXTS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5], [7, 8, 9], [90, 1, 2, 3, 4, 5]]


def random_example(name: str) -> nn.Module:
    """One of `EXAMPLES` as seed 0 draws it, for the caller to change: making them anew takes longer than most tests."""
    made = EXAMPLES[name]
    torch.set_rng_state(made.drawn)
    return _copied(made.models[name], {})


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy(module, memo)` in a third of its time: most of what a module holds are empty dictionaries."""
    if id(module) in memo:
        return memo[id(module)]
    made = memo[id(module)] = type(module).__new__(type(module))
    for name, value in vars(module).items():
        if name == "_modules":
            value = {each: None if part is None else _copied(part, memo) for each, part in value.items()}
        elif type(value) in (dict, OrderedDict, set) and not value:
            value = type(value)()
        elif value is not None and type(value) not in (bool, int, float, str):
            value = copy.deepcopy(value, memo)
        vars(made)[name] = value
    return made


def own_output(mixer: nn.Module, u: torch.Tensor) -> torch.Tensor:
    """Return the output of a mixer's own forward pass, with the further arguments it takes: positions, no mask and no
    cache, and no rotations, which it does not read."""
    named = list(inspect.signature(type(mixer).forward).parameters.values())[2:]
    needs = [each.name for each in named if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    given: dict[str, Any] = {"position_ids": torch.arange(u.shape[1]).unsqueeze(0)}
    more = {"use_cache": False} if "use_cache" in (each.name for each in named) else {}
    own = mixer(u, **{name: given.get(name) for name in needs}, **more)
    return own[0] if isinstance(own, tuple) else own


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def hooks(model: Model) -> int:
    """Return the number of hooks and of replaced forward passes within a model."""
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) + ("forward" in m.__dict__)
        for m in model.module.modules()
    )


def log_decay(r: ops.Recurrence) -> torch.Tensor:
    return r.log_a if r.log_a is not None else r.log_decay()


def decayed(r: ops.Recurrence, change: Callable[[torch.Tensor], torch.Tensor]) -> ops.Recurrence:
    return replace(r, A=None, log_a=change(log_decay(r)), expected=False)


def matrices(path: Path, level: str, skip: bool = True, every: int = 1) -> torch.Tensor:
    """Every channel's matrix, (batch, channels, length, length), as they are before the projection; or of every so
    many-th channel of each head."""
    path = replace(path, output_map=replace(path.output_map, scale=None))
    left, taps = path.gate_and_taps(level)
    heads, width = path.recurrence.shape[2:4]
    D = path.recurrence.D
    each = []
    for p in range(0, width, every):
        one = replace(
            path.recurrence,
            x=path.recurrence.x[..., p : p + 1],
            D=D[:, p : p + 1] if D is not None and D.ndim == 2 else D,
        )
        each.append(
            ops.attention(
                one, groups=heads, skip=skip, left=None if left is None else left[..., p : p + 1],
                taps=None if taps is None else taps[..., p : p + 1],
            )
        )  # fmt: skip
    return torch.stack(each, dim=2).flatten(1, 2)


def multiplied(path: Path, level: str, skip: bool = True) -> torch.Tensor:
    """The same from the matrices of the heads alone, as left ⊙ (α + D) · taps: much faster where heads are wide."""
    path = replace(path, output_map=replace(path.output_map, scale=None))
    left, taps = path.gate_and_taps(level)
    if (order := path.recurrence.order) is not None:  # the same in that order, put back
        left, taps = (None if t is None else t[:, order] for t in (left, taps))
        path = replace(path, recurrence=straight(path.recurrence))
    found = from_heads(path, left, taps, skip)
    return found if order is None else found[..., order.argsort(), :][..., order.argsort()]


def from_heads(path: Path, left: torch.Tensor | None, taps: torch.Tensor | None, skip: bool) -> torch.Tensor:
    (length, heads, width), D = path.recurrence.shape[1:4], path.recurrence.D
    alpha = ops.attention(replace(path.recurrence, D=None), groups=heads)
    found = alpha.unsqueeze(2).expand(-1, -1, width, -1, -1)
    if skip and D is not None:
        found = found + D.reshape(heads, -1, 1, 1) * torch.eye(length, dtype=D.dtype)
    if taps is not None:  # (batch, s, i, heads, width): what arrives at step s + i
        later = torch.zeros_like(found)
        for i in range(min(taps.shape[2], length)):
            later[..., : length - i] += found[..., i:] * rearrange(taps[:, : length - i, i], "b s h p -> b h p 1 s")
        found = later
    if left is not None:
        found = found * rearrange(left, "b t h p -> b h p t 1")
    return found.flatten(1, 2)
