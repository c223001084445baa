"""Kernels on a GPU: whether they can be had, and how they are launched. Here those of Triton; `nvrtc` has CUDA's.

Triton comes with torch's builds for CUDA; it compiles the kernels on first use, in some seconds, and keeps them in its
own cache. Without it, or with SSMSCOPE_NATIVE=0, `Kernels.why_not` says so and the work stays with torch. Its own
launch takes the host longer than many a kernel takes the GPU, and before version 3.7 a C compiler on first use: `bound`
has CUDA's driver launch what is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import operator
import re
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmscope.scans.building import SWITCH, switched_off
from ssmscope.scans.driver import Ready, current_context

SLOTS = {"*": "Q", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f"}
"""How what triton calls these is laid in memory."""
SIZES = {"i": 32, "I": 32, "f": 32, "q": 64, "Q": 64}  # in bits
DIRECT = ("3.4", "3.5", "3.6", "3.7", "3.8", "3.9")
"""Versions of triton whose compiled kernels are launched as `Bound` does."""
KNOWN, COMPILER = ((9, 0),), "3.6"
"""Compute capabilities of GPUs on which all kernels were run, and the version of triton that compiled them there."""
ALIGNED = 16  # bytes of which tensors mostly start at a multiple
KINDS = 1024  # of terms that a kernel is launched with: more are forgotten


class Kernels:
    """The Triton kernels of one module.

    Args:
        module: that defines them, which importing brings triton.
        name: what they are called in messages.
        attempt: runs one of them on a small tensor of ones, (1, 1, 1, 1), on a GPU.
        least: what is run instead where all of them were before (`was_run`), to see that the compiler works; by default
            the smallest kernel of Triton.
    """

    def __init__(
        self, module: str, name: str, attempt: Callable[[Tensor], Any], least: Callable[[Tensor], Any] | None = None
    ) -> None:
        self.module, self.name, self.attempt, self.least = module, name, attempt, least or _doubled
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

    def was_run(self, index: int) -> bool:
        """Whether all of the kernels were run on GPUs like this one, compiled as here."""
        compiler = sys.modules["triton"].__version__.rpartition(".")[0]
        return compiler == COMPILER and torch.cuda.get_device_capability(index) in KNOWN

    def _try(self, index: int) -> str | None:
        """Why this GPU does not run the kernels: triton, say, needs a C compiler, and a GPU that it knows."""
        device = torch.device("cuda", index)
        attempt = self.least if self.was_run(index) else self.attempt
        try:
            attempt(torch.ones(1, 1, 1, 1, device=device))
        except self.faults() as error:
            return " ".join(f"{self.name} cannot run on {torch.cuda.get_device_name(device)}: {error}".split())
        return None


def _doubled(one: Tensor) -> None:
    with on(one):
        kernel = importlib.import_module("ssmscope.scans.trial_kernels").doubled
        bound(kernel, num_warps=1)((1,), one, torch.empty_like(one))


def on(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current GPU, which need not be the tensor's."""
    there = t.device.type != "cuda" or t.device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if there else torch.cuda.device(t.device)


def are_aligned(places: Iterable[int]) -> bool:
    """Whether all places in memory are such as machine code takes for granted where it can."""
    return functools.reduce(operator.or_, places, 0) % ALIGNED == 0


class Known(NamedTuple):
    """A launch of which all is known but where its tensors are, in the thread that asked for it."""

    ready: Ready
    laid: struct.Struct
    blocks: tuple[int, ...]

    def __call__(self, places: Sequence[int], stream: int) -> None:
        """Launch it on a stream, of tensors at these places in memory, multiples of 16 where those were that it is
        known from.

        Raises:
            RuntimeError: the driver refuses.
        """
        self.laid.pack_into(self.ready.laid, 0, *places)
        self.ready(self.blocks, stream)


class Bound:
    """A Triton kernel with its constants: `bound(grid, *terms)` does what `kernel[grid](*terms, **constants)` does.

    Triton looks anew at each launch which machine code its arguments want, and before version 3.7 has a C compiler make
    a launcher for each kind of them. The code depends on the current GPU, on tensors' types and whether they start at a
    multiple of 16 bytes, and on numbers: with each of these triton is asked once, and its code launched by the driver.
    Where kernels are interpreted, watched by hooks, not those of a known triton on CUDA, or take what they are given in
    another way than is known here, all launches are triton's own.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.ready: dict[tuple[Hashable, ...], tuple[Ready, struct.Struct] | tuple[()]] = {}
        self.loaded: dict[tuple[int, int], tuple[Any, int, ctypes.c_void_p]] = {}
        self.direct = _is_direct(kernel)
        self.tensors = 0  # that it takes; not yet known

    def __call__(self, grid: tuple[int, ...], *terms: Any) -> None:
        """Launch `grid` programs, their numbers along up to three axes, on the current stream.

        Args:
            grid: how many.
            terms: tensors on the current GPU, and then numbers.

        Raises:
            TypeError: a tensor after a number.
            RuntimeError: the driver refuses.
        """
        if (planned := getattr(_thread, "planned", None)) is not None:
            # of tensors only what triton asks for: held, those of a long piece of work would take more than it does
            planned.setdefault(self, (grid, [t.dtype if isinstance(t, Tensor) else t for t in terms]))
            return
        found, places = self._found(grid, terms)
        if not found:
            self.kernel[grid](*terms, **self.constants)
        elif 0 not in grid:
            ready, laid = found
            laid.pack_into(ready.laid, 0, *places)
            ready((*grid, 1, 1)[:3], torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))

    def compile(self, device: int, grid: tuple[int, ...], terms: Sequence[Any]) -> None:
        """Have triton compile it on a GPU, and keep it, for numbers like these and for tensors of these types, which
        start where most do."""
        with torch.cuda.device(device):
            self.kernel.warmup(*terms, grid=grid, **self.constants)

    def known(self, grid: tuple[int, ...], *terms: Any) -> Known | None:
        """What launches as this call would, in this thread, of other tensors like these and with these numbers; None
        where triton launches, or there is nothing to do."""
        found, _ = self._found(grid, terms)
        return Known(*found, (*grid, 1, 1)[:3]) if found and 0 not in grid else None

    def _found(
        self, grid: tuple[int, ...], terms: tuple[Any, ...]
    ) -> tuple[tuple[Ready, struct.Struct] | tuple[()], list[int]]:
        """What launches the code for these terms in this thread, nothing where that is triton's; where tensors are."""
        self.tensors = self.tensors or _leading(terms)
        if not self.direct or watched():
            return (), []
        device, tensors, numbers = torch.cuda.current_device(), terms[: self.tensors], terms[self.tensors :]
        places = [t.data_ptr() for t in tensors]
        key = (device, get_ident(), numbers, *[t.dtype for t in tensors])
        if not are_aligned(places):
            key = (*key, *[place % ALIGNED == 0 for place in places])
        found = self.ready.get(key)
        if found is None:
            found = self._prepared(grid, terms, device)
            if len(self.ready) >= KINDS:
                self.ready.clear()
            self.ready[key] = found
        return found, places

    def _prepared(
        self, grid: tuple[int, ...], terms: tuple[Any, ...], device: int
    ) -> tuple[Ready, struct.Struct] | tuple[()]:
        """What launches the code for these terms in this thread, and how the places of tensors are laid; nothing where
        it takes something else than terms and constants, or triton has not compiled it when asked."""
        compiled = self.kernel.warmup(*terms, grid=grid, **self.constants)
        if not hasattr(compiled, "asm") or not _is_plain(compiled.metadata):
            return ()
        kinds = [compiled.src.signature[name] for name in self.kernel.arg_names[: len(terms)]]
        given = [(kind[:1] if kind.startswith("*") else kind, term) for kind, term in zip(kinds, terms)]
        laid = [(SLOTS.get(kind, ""), term) for kind, term in given if kind != "constexpr"]  # else in the code
        taken, own = _taken(compiled.asm["ptx"]), len(laid)
        if taken[:own] != [SIZES.get(slot) for slot, _ in laid] or any(bits != 64 for bits in taken[own:]):
            return ()
        slots = bytearray(8 * len(taken))  # those behind the terms are for triton's scratch, which is not needed: 0
        for place, (slot, term) in enumerate(laid[self.tensors :], self.tensors):
            struct.pack_into(f"={slot}", slots, 8 * place, term)
        sizes = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        ready = Ready(*self._loaded(compiled, device), *sizes, slots, range(0, len(slots), 8))
        return ready, struct.Struct(f"={self.tensors}Q")

    def _loaded(self, compiled: Any, device: int) -> tuple[int, ctypes.c_void_p]:
        """The driver's function of compiled code on a GPU, and its context there, which this thread has then. The code
        is kept, as it is known by its place in memory."""
        key = id(compiled), device
        if key not in self.loaded:
            load = sys.modules["triton"].runtime.driver.active.utils.load_binary
            given = compiled.name, compiled.kernel, compiled.metadata.shared, device
            self.loaded[key] = compiled, load(*given)[1], current_context()
        return self.loaded[key][1:]


@functools.lru_cache(maxsize=1024)
def bound(kernel: Any, **constants: Hashable) -> Bound:
    """A kernel with these constants."""
    return Bound(kernel, constants)


_thread = threading.local()
"""Has the launches of a thread that plans."""
_begun: set[Hashable] = set()
"""What was compiled ahead."""


def compiled_ahead(key: Hashable, work: Callable[[], Any]) -> None:
    """Compile the kernels that some work will launch side by side, the first time that it is known by a key: triton
    leaves Python's lock to others for half of the time. The work is then done without its kernels, so that what they
    would write is not set.

    Raises:
        Exception: what triton raises where it cannot compile one.
    """
    if key in _begun:
        return
    if len(_begun) >= KINDS:
        _begun.clear()
    _begun.add(key)
    planned: dict[Bound, tuple[tuple[int, ...], list[Any]]] = {}
    _thread.planned = planned
    try:
        work()
    finally:
        _thread.planned = None
    new = [kernel for kernel in planned if kernel.direct and not kernel.ready]
    if len(new) > 1 and not watched():
        device = torch.cuda.current_device()
        with warnings.catch_warnings(), ThreadPoolExecutor(len(new)) as pool:  # triton sets filters, in each thread
            for _ in pool.map(lambda kernel: kernel.compile(device, *planned[kernel]), new):
                pass


def _leading(terms: tuple[Any, ...]) -> int:
    """How many tensors there are, all of them before the numbers."""
    count = sum(isinstance(t, Tensor) for t in terms)
    if not all(isinstance(t, Tensor) for t in terms[:count]):
        raise TypeError("tensors come before numbers in a kernel's terms")
    return count


def _taken(ptx: str) -> list[int]:
    """The bits of each argument of the kernel of this assembly; 0 of what is no number or pointer."""
    entry = re.search(r"\.entry[^(]*\(([^)]*)\)", ptx)
    found = [re.match(r"\s*\.param\s+\.[a-z](\d+)\s", each) for each in (entry[1] if entry else "").split(",")]
    return [0 if each is None else int(each[1]) for each in found]


def _is_plain(metadata: Any) -> bool:
    """Whether code is launched with nothing but blocks, threads and shared memory."""
    more = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size", "tensordesc_meta")
    return metadata.num_ctas == 1 and not any(getattr(metadata, name, None) for name in more)


def _is_direct(kernel: Any) -> bool:
    """Whether a kernel's compiled code can be launched: not interpreted, for CUDA, by a known triton."""
    triton = sys.modules["triton"]
    known = triton.__version__.rpartition(".")[0] in DIRECT
    return known and isinstance(kernel, triton.JITFunction) and not kernel.pre_run_hooks and torch.version.hip is None


def watched() -> bool:
    """Whether a profiler wants to see triton's launches."""
    knobs = sys.modules["triton"].knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
