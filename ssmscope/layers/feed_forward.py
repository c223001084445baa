"""Feed-forward parts of our own models, and experts in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu
from ssmscope.layers.parts import at_least_float32


class FeedForward(nn.Module):
    """Feed-forward part W₃ (swish(W₁ x) ⊙ W₂ x), or W₂ gelu(W₁ x) for RetNet; its inner width is by default the
    configuration's `intermediate_size`. Its linear maps have biases if the configuration has `feed_forward_bias`."""

    def __init__(self, config: Any, inner: int | None = None) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size if inner is None else inner
        bias = getattr(config, "feed_forward_bias", False)
        self.gate = nn.Linear(width, inner, bias) if config.swiglu else None
        self.up = nn.Linear(width, inner, bias)
        self.down = nn.Linear(inner, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)) if self.gate is None else silu(self.gate(x)) * self.up(x))


class ExpertRouter(nn.Module):
    """Router of DeepSeek-V3 (2024, section 2.1.2): scores σ(W x), chosen by scores with a bias, in the best groups.

    Of `expert_groups` groups of experts only the `chosen_groups` are read whose two highest scores have the largest
    sum, and of their experts the `experts_per_token` with the highest scores. The weight of a chosen expert is its
    score without the bias, divided by the sum of those that are chosen, times `expert_scale`.
    """

    bias: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.count, self.groups, self.chosen = config.experts_per_token, config.expert_groups, config.chosen_groups
        self.scale = config.expert_scale
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("bias", torch.zeros(config.num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the scores to differ as tokens of unit size do."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weights of experts (batch, length, experts), 0 for those that are not chosen."""
        scores = torch.sigmoid(linear(at_least_float32(x), at_least_float32(self.weight)))
        wanted = scores + self.bias.to(scores)
        by_group = wanted.unflatten(-1, (self.groups, -1))
        if self.chosen < self.groups:
            best = by_group.topk(2, dim=-1).values.sum(-1).topk(self.chosen, dim=-1).indices
            left_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, False)
            wanted = by_group.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
        chosen = wanted.topk(self.count, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.count > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter(-1, chosen, weights * self.scale)


class RoutedExperts(nn.Module):
    """Sum of the experts that a token's router chooses, by its weights, and of one that all tokens share."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = ExpertRouter(config)
        self.experts = nn.ModuleList(FeedForward(config, config.expert_size) for _ in range(config.num_experts))
        self.shared = FeedForward(config, config.shared_size) if config.shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        weights, tokens = self.router(x).flatten(0, 1), x.flatten(0, 1)
        y = torch.zeros_like(tokens, dtype=weights.dtype)
        for number, expert in enumerate(self.experts):
            those = weights[:, number].nonzero()[:, 0]
            if len(those):
                y = y.index_add(0, those, expert(tokens[those]) * weights[those, number, None])
        y = y.to(x.dtype).view_as(x)
        return y if self.shared is None else y + self.shared(x)
