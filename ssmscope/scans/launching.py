"""Kernels on a GPU: whether they can be had, and how they are launched. Here those of Triton; `nvrtc` has CUDA's.

Triton comes with torch's builds for CUDA; it compiles the kernels on first use, in some seconds, and keeps them in its
own cache. Without it, or with SSMSCOPE_NATIVE=0, `Kernels.why_not` says so and the work stays with torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssmscope.scans.building import SWITCH


class Kernels:
    """The Triton kernels of one module.

    Args:
        module: that defines them, which importing brings triton.
        name: what they are called in messages.
        attempt: runs one of them on a small tensor of ones, (1, 1, 1, 1), on a GPU.
    """

    def __init__(self, module: str, name: str, attempt: Callable[[Tensor], Any]) -> None:
        self.module, self.name, self.attempt = module, name, attempt
        self.found = functools.cache(self.look)
        self._tried = functools.cache(self._try)

    def available(self, device: torch.device | str = "cuda") -> bool:
        """Whether the kernels run on this GPU; compiles one when that was not yet tried."""
        return self.why_not(device) is None

    def why_not(self, device: torch.device | str = "cuda") -> str | None:
        """Why the kernels are not in use on this device, in one line, or None when they are."""
        if os.environ.get(SWITCH) == "0":
            return f"{SWITCH}=0"
        device = torch.device(device)
        if device.type != "cuda" or not torch.cuda.is_available():
            return "they run on GPUs only"
        found = self.found()
        if isinstance(found, str):
            return found
        return self._tried(torch.cuda.current_device() if device.index is None else device.index)

    def look(self) -> Any:
        """The module of the kernels, or why there is none; `found` keeps the answer."""
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            return " ".join(f"triton cannot be imported: {error}".split())

    def loaded(self) -> Any:
        """The module of the kernels.

        Raises:
            RuntimeError: there is none.
        """
        found = self.found()
        if isinstance(found, str):
            raise RuntimeError(f"{self.name} is not available: {found}")
        return found

    def faults(self, *others: type[Exception]) -> tuple[type[Exception], ...]:
        """What goes wrong where triton cannot compile or launch a kernel."""
        return (self.loaded().triton.errors.TritonError, RuntimeError, OSError, subprocess.SubprocessError, *others)

    def _try(self, index: int) -> str | None:
        """Why this GPU does not run the kernels: triton, say, needs a C compiler, and a GPU that it knows."""
        device = torch.device("cuda", index)
        try:
            self.attempt(torch.ones(1, 1, 1, 1, device=device))
        except self.faults() as error:
            return " ".join(f"{self.name} cannot run on {torch.cuda.get_device_name(device)}: {error}".split())
        return None


def on(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current GPU, which need not be the tensor's."""
    there = t.device.type != "cuda" or t.device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if there else torch.cuda.device(t.device)
