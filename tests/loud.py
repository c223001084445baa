"""Random models in which the scan matters, and true float64 for code that casts to float32."""

from typing import Any, ClassVar

import torch
from torch import nn


def loud(module: nn.Module, seed: int = 0) -> nn.Module:
    """The model with projections scaled up, biases and weights of zero drawn, and steps of about 1. As initialised, the
    scan adds so little to a layer's output that a wrong one would pass."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("norm.weight", "norm_f.weight", "A_log", "A_b_log")) or "spectral" in name:
                continue
            if name.endswith(("dt_proj.bias", "dt_bias")):
                parameter.add_(3.0)
            elif name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
            elif name.endswith((".D", ".D_b")):
                parameter.add_(4 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("ssm.A"):
                parameter.mul_(0.2).sub_(0.05)
            elif parameter.ndim > 1:
                parameter.mul_(3.0)
                if not parameter.any():  # xLSTM's output gates
                    parameter.add_(torch.randn(parameter.shape, generator=generator))
    return module.eval()


def doubled(module: nn.Module) -> nn.Module:
    """The model in float64, experts one after another: the grouped products of transformers 5 have no float64."""
    if hasattr(module, "set_experts_implementation"):
        module.set_experts_implementation("eager")
    module.double()
    for part in module.modules():
        if hasattr(part, "decay_factors"):  # kept in float32 where a MiniMax is made
            part.query_decay, part.key_decay, part.diagonal_decay = part.decay_factors(part.slope_rate)
    return module


def widened(run: Any) -> Any:
    """A function of torch's that gives float64 where float32 is asked for."""

    def wide(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return run(*[torch.float64 if each is torch.float32 else each for each in args], **kwargs)

    return wide


MAKES = "zeros ones full empty eye arange linspace tensor as_tensor rand randn softmax log_softmax cumsum".split()
CASTS = "to type softmax log_softmax cumsum new_zeros new_ones new_full new_empty new_tensor".split()
CALLS = [(torch, name) for name in dir(torch) if name in MAKES or name.endswith("_like")]
CALLS += [(torch.Tensor, name) for name in CASTS]
WIDE = {(torch.Tensor, "float"): torch.Tensor.double, **{each: widened(getattr(*each)) for each in CALLS}}


class TrueFloat64:
    """Within this context `.float()` and `.to(torch.float32)` give float64, so that a model in float64 stays there. A
    mode of torch's would see every call and size, which took a quarter of the contracts' time."""

    before: ClassVar[list[Any]] = []

    def __enter__(self) -> None:
        self.before.append([] if self.before else [vars(place).get(name) for place, name in WIDE])
        for (place, name), wide in zip(WIDE, WIDE.values() if len(self.before) == 1 else ()):
            setattr(place, name, wide)

    def __exit__(self, *_: object) -> None:
        for (place, name), own in zip(WIDE, self.before.pop()):
            delattr(place, name) if own is None else setattr(place, name, own)
