"""Kernels on a GPU: whether they can be had, and how they are launched. Here those of Triton; `nvrtc` has CUDA's.

Triton comes with torch's builds for CUDA; it compiles the kernels on first use, in some seconds, and keeps them in its
own cache. Without it, or with SSMSCOPE_NATIVE=0, `Kernels.why_not` says so and the work stays with torch. Its own
launch takes the host longer than many a kernel takes the GPU: `bound` launches what is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import subprocess
import sys
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ssmscope.scans.building import SWITCH, switched_off

DIRECT = ("3.4", "3.5", "3.6", "3.7", "3.8", "3.9")
"""Versions of triton whose compiled kernels are launched as `Bound` does."""
KINDS = 1024  # of terms that a kernel is launched with: more are forgotten
ONCE = {1: (1, 1), 2: (1,), 3: ()}  # programs along the axes that a grid does not name


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
        if switched_off():
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


class Bound:
    """A Triton kernel with its constants: `bound(grid, *terms)` does what `kernel[grid](*terms, **constants)` does.

    Triton looks anew at each launch which machine code its arguments want. That depends on the current GPU, on tensors'
    types and whether they start at a multiple of 16 bytes, and on numbers; so the first launch with each of these is
    triton's own, and the next ones hand its compiled kernel the same kind of arguments. Where kernels are interpreted,
    watched by hooks, or not those of a known triton on CUDA, all launches are triton's own.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.compiled: dict[tuple[Hashable, ...], tuple[Any, ...]] = {}
        self.direct = _is_direct(kernel)
        self.tensors = 0  # that it takes; not yet known

    def __call__(self, grid: tuple[int, ...], *terms: Any) -> None:
        """Launch `grid` programs, their numbers along up to three axes, on the current stream.

        Args:
            grid: how many.
            terms: tensors on the current GPU, and then numbers.

        Raises:
            TypeError: a tensor after a number.
        """
        self.tensors = self.tensors or _leading(terms)
        if not self.direct or _watched():
            self.kernel[grid](*terms, **self.constants)
            return
        device, tensors, numbers = torch.cuda.current_device(), terms[: self.tensors], terms[self.tensors :]
        places = [t.data_ptr() for t in tensors]
        key = (device, numbers, *[t.dtype for t in tensors])
        if functools.reduce(operator.or_, places, 0) % 16:
            key = (*key, *[place % 16 == 0 for place in places])
        found = self.compiled.get(key)
        if found is None:
            compiled = self.kernel[grid](*terms, **self.constants)
            if compiled is not None:  # a hook of triton's can keep it from compiling
                self._keep(key, compiled, terms)
            return
        run, function, metadata, constants = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*grid, *ONCE[len(grid)], stream, function, metadata, None, None, None, *places, *numbers, *constants)

    def _keep(self, key: tuple[Hashable, ...], compiled: Any, terms: tuple[Any, ...]) -> None:
        if len(self.compiled) >= KINDS:
            self.compiled.clear()
        constants = tuple(self.constants[name] for name in self.kernel.arg_names[len(terms) :])
        self.compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata, constants)


@functools.lru_cache(maxsize=1024)
def bound(kernel: Any, **constants: Hashable) -> Bound:
    """A kernel with these constants."""
    return Bound(kernel, constants)


def _leading(terms: tuple[Any, ...]) -> int:
    """How many tensors there are, all of them before the numbers."""
    count = sum(isinstance(t, Tensor) for t in terms)
    if not all(isinstance(t, Tensor) for t in terms[:count]):
        raise TypeError("tensors come before numbers in a kernel's terms")
    return count


def _is_direct(kernel: Any) -> bool:
    """Whether a kernel's compiled code can be launched: not interpreted, for CUDA, by a known triton."""
    triton = sys.modules["triton"]
    known = triton.__version__.rpartition(".")[0] in DIRECT
    return known and isinstance(kernel, triton.JITFunction) and not kernel.pre_run_hooks and torch.version.hip is None


def _watched() -> bool:
    """Whether a profiler wants to see triton's launches."""
    knobs = sys.modules["triton"].knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
