"""Parts of blocks outside the layers, attention, feed-forward parts and experts, as a family declares them in its
`BLOCK_PARTS`, by the names of their classes: relevance passes through them by these rules (`lrp`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.mixers import adapter_for, mixers


@dataclass(frozen=True)
class BlockPart:
    """Part of a block, of whose own parts these names are known; linear maps and norms are read by themselves.

    Attributes:
        frozen: parts whose outputs are constants, as those of queries, keys, routers and other gates are; a list stands
            for its members, and "" for the part itself.
        act: activation, W₂ act(h), or W₃ (act(g) ⊙ h) if the part is `gated`.
        out: the layer of W₃, with its bias.
        product: the layers of g and h, where the activation may be a function; SiLU by default.
        latent: True for latent attention, of which what becomes keys is a constant.
        feed_forward: True for a feed-forward part, or experts with their router.
        linearize: function from the part and its input (batch, length, width) to its linear map, if it is read so.
    """

    frozen: tuple[str, ...] = ()
    act: str = "act_fn"
    gated: bool = False
    out: str = "down_proj"
    product: tuple[str, ...] = ()
    latent: bool = False
    feed_forward: bool = False
    linearize: Callable[[Any, Tensor], LinearizedLayer] | None = None


class Added(nn.Module):
    """Passes on a parameter that a forward pass adds to its input, so that it counts among the constants."""

    def forward(self, parameter: Tensor) -> Tensor:
        return parameter


AS_IS = BlockPart()
"""Part that is linear, or passes on what its parts give."""
CONSTANT = BlockPart(frozen=("",))
"""Part whose output does not depend on the input, as rotations of positions."""
ATTENTION = BlockPart(frozen=("q_proj", "k_proj"))
LATENT = BlockPart(frozen=("q_proj", "q_b_proj"), latent=True)
FEED_FORWARD = BlockPart(feed_forward=True)
GATED = replace(FEED_FORWARD, gated=True)
EXPERTS = replace(FEED_FORWARD, frozen=("gate",))
UNREAD = BlockPart()
"""Part that relevance cannot pass through: it is refused."""
_USUAL = {"Attention": ATTENTION, "RotaryEmbedding": CONSTANT, "MLP": GATED, "Experts": GATED}
_USUAL |= dict.fromkeys(("MoE", "SparseMoeBlock"), EXPERTS)


def of_hybrids(*names: str, **parts: BlockPart) -> dict[str, BlockPart]:
    """Return the parts of hybrids by the names of their classes, each a hybrid's name and a part's: `parts`, and what
    most hybrids of transformers have."""
    return {name + kind: part for name in names for kind, part in (_USUAL | parts).items()}


def declared_parts(module: nn.Module) -> Mapping[str, BlockPart]:
    """Return what the families of a model's layers declare in their `BLOCK_PARTS`."""
    families = dict.fromkeys(map(adapter_for, mixers(module)))
    return {name: part for each in families for name, part in getattr(each, "BLOCK_PARTS", {}).items()}


def block_part(module: nn.Module, declared: Mapping[str, BlockPart]) -> BlockPart | None:
    """Return a part as it is `declared` for its class, or the nearest that this is derived from; None if it is not."""
    kinds = type_before_parametrizations(module).__mro__
    return next((declared[kind.__name__] for kind in kinds if kind.__name__ in declared), None)
