"""How small a log-decay may be."""

import torch


def smallest_exponent(dtype: torch.dtype) -> float:
    """Log-decays are clamped here: smaller ones change nothing, and denormal numbers are 10 to 30 times slower."""
    return -700.0 if dtype == torch.float64 else -80.0
