"""Triton kernels for GPUs. This file needs no triton; the modules next to it are imported where `why_not` is None."""

from __future__ import annotations

import functools

import torch

MIN_COMPUTE_CAPABILITY = (8, 0)


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Return why Triton kernels do not run on a GPU, in one line, or None where they do; tries one on first use."""
    try:
        import triton  # noqa: F401
    except Exception as error:  # A damaged installation may raise anything.
        return f"triton cannot be imported: {_first_line(error)}; install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_COMPUTE_CAPABILITY:
        has, needed = (".".join(map(str, version)) for version in (capability, MIN_COMPUTE_CAPABILITY))
        return f"{torch.cuda.get_device_name(device)} has compute capability {has}, Triton kernels need {needed}"
    return _trial(device.type)


@functools.cache
def _trial(device: str) -> str | None:
    """Return why a trial kernel does not compile or run, or None; one trial stands for all GPUs of the machine."""
    from ssmscope.backends.triton import trial

    try:
        return None if trial.doubles(device) else "a trial kernel of Triton gave a wrong result"
    except Exception as error:  # Drivers, compilers and Triton raise many types.
        return f"a trial kernel of Triton failed: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def with_contiguous_rows(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last dimension is contiguous, without a copy if it is already."""
    return t if t.stride(-1) == 1 else t.contiguous()


def tile_size(size: int) -> int:
    """Return the smallest power of two that covers `size`, at least the 16 of a product of tiles."""
    return max(16, power_of_two(size))


def power_of_two(size: int) -> int:
    """Return the smallest power of two that covers `size`."""
    return 1 << (size - 1).bit_length()
