"""Random models in which the scan matters, and true float64 for code that casts to float32."""

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


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


class TrueFloat64(TorchFunctionMode):
    """Within this mode `.float()` and `.to(torch.float32)` give float64, so that a model in float64 stays there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # Every call of torch comes through here, so what is not cast is handed on at once.
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.Tensor.to:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if func is torch.Tensor.type and args[1:] == (torch.float32,):
            return args[0].double()
        if not kwargs:
            return func(*args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
