"""Small linear layers and convolutions, and some that compute something other than their weights say."""

from typing import Any

import torch
from torch import Tensor, nn

EXACT: dict[str, Any] = dict(rtol=1e-12, atol=1e-12)


class Scaled(nn.Linear):
    """Linear layer whose output is multiplied by three, plus one."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x) + 1


class Bent(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def linear(kind: type[nn.Linear] = nn.Linear, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return kind(5, 7, bias=bias).double()


def conv(padding: int, bias: bool) -> nn.Conv1d:
    torch.manual_seed(1)
    return nn.Conv1d(6, 6, 4, groups=6, padding=padding, bias=bias).double()
