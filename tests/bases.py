"""Small Mambas and Mamba-2s, from which the papers' systems are made, and their inputs."""

from typing import Any

import pytest
import torch
from loud import loud
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
from ssmscope.layers import mamba, mamba2

SIZES: dict[str, Any] = dict(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, expand=2, conv_kernel=3, state_size=4
)  # fmt: skip
MAMBA = dict(**SIZES, time_step_rank=2)
MAMBA2 = dict(**SIZES, num_heads=4, head_dim=8, n_groups=1, chunk_size=8)
ADAPTERS = {"mamba": mamba, "mamba2": mamba2}
BASES = pytest.mark.parametrize("base", list(ADAPTERS))
IDS = torch.tensor([[3, 9, 17, 2, 40, 5, 6], [7, 7, 8, 30, 1, 0, 0]])
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])


def base_model(base: str, **options: Any) -> nn.Module:
    """Return a loud language model with these fields of its configuration."""
    torch.manual_seed(0)
    if base == "mamba":
        return loud(MambaForCausalLM(MambaConfig(**{**MAMBA, **options})))
    return loud(Mamba2ForCausalLM(Mamba2Config(**{**MAMBA2, **options})))


def check_base_weights(kind: type[nn.Module], base: str, path, **fields: Any) -> nn.Module:
    """Return the model that a class makes of a base model's directory, whose weights it must have."""
    plain = base_model(base)
    plain.save_pretrained(path)
    made = kind.from_pretrained(path, config=kind.config_class.from_dict({**plain.config.to_dict(), **fields}))
    weights = made.state_dict()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weights[name], weight), name
    return made
