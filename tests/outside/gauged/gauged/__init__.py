"""The layers of the how-to between parts of their own: a gated product that is written out, and a narrow linear map."""

from typing import Any

from leaky import FORM, LeakyConfig, LeakyMixer, compute_terms
from torch import Tensor, nn
from torch.nn.functional import silu
from ssmscope.core.blocks import AS_IS, BlockPart
from ssmscope.layers.linear_attention import Block, LinearAttentionModel, family

__all__ = ["BLOCK_PARTS", "FORM", "GaugedConfig", "GaugedForCausalLM", "compute_terms"]

BLOCK_PARTS = {
    "Product": BlockPart(gated=True, product=("opens", "carries"), out="closes", feed_forward=True),
    "Narrow": AS_IS,
}


class GaugedMixer(LeakyMixer):
    """Layer of the how-to by another name."""


class Product(nn.Module):
    """W₃ (SiLU(W₁ x) ⊙ W₂ x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.opens, self.carries, self.closes = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.closes(silu(self.opens(x)) * self.carries(x))


class Narrow(nn.Module):
    """B A x, two linear maps that are no feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 2), nn.Linear(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class GaugedBlock(Block):
    """Block of the how-to's model, and then x + product(norm(x)) + narrow(x)."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        self.product_norm = nn.RMSNorm(config.hidden_size)
        self.product, self.narrow = Product(config.hidden_size), Narrow(config.hidden_size)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = super().forward(x, *args)
        return x + self.product(self.product_norm(x)) + self.narrow(x)


class GaugedConfig(LeakyConfig):
    """Configuration of the how-to's model."""

    model_type = "gauged"
    mixer = GaugedMixer


class GaugedBackbone(LinearAttentionModel):
    """Backbone of these blocks."""

    block_class = GaugedBlock


GaugedModel, GaugedForCausalLM = family(GaugedConfig, backbone=GaugedBackbone)
