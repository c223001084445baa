"""CUDA kernels of our own, compiled by NVRTC, which comes with torch's builds for CUDA: a second each on first use,
those of one pass side by side, and kept in the user's cache directory. Without it, or with SSMSCOPE_NATIVE=0,
`Program.why_not` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import building, driver
from ssmscope.scans.driver import SETTING, addresses, check, pointer
from ssmscope.scans.launching import KNOWN, Kernels

SHARED = 8  # its attribute for the shared memory that a block may have
PLENTY = 48 * 2**10  # bytes of it that need no leave
MARKS, ROOM = 2**12, 2**21  # numbers for blocks of a launch to count with, and behind them for its scratch
PLACES = struct.Struct("=2q")  # where scratch is, and where blocks count


class Launch(NamedTuple):
    """A kernel and how much of it runs: `blocks` of `threads`, each block with `shared` bytes of shared memory.
    `defines` are NAME=VALUE, what the source is compiled with."""

    defines: tuple[str, ...]
    blocks: int
    threads: int
    shared: int


class Launches:
    """Kernels that run one after the other, given the same structure.

    Args:
        launches: the kernels.
        terms: how the structure begins, with numbers of each call; what is left up to `places` is 0.
        sizes: how it ends.
        places: the byte where `PLACES` stands, between both.
        scratch: how many numbers of it there are.
        counted: whether it is one kernel whose blocks count with MARKS numbers; its scratch is at most ROOM.
    """

    def __init__(
        self,
        launches: Iterable[Launch],
        terms: struct.Struct,
        sizes: bytes,
        *,
        places: int,
        scratch: int = 0,
        counted: bool = False,
    ) -> None:
        self.launches, self.terms, self.sizes = tuple(launches), terms, sizes
        self.places, self.scratch, self.counted = places, scratch, counted

    def structure(self) -> bytearray:
        """With 0 for what is not the same in all calls."""
        return bytearray(self.places + PLACES.size) + self.sizes

    def held(self, device: torch.device) -> tuple[Tensor, int, int]:
        """What holds scratch for one call, where it is, and where blocks count, with zeros."""
        numbers = torch.empty(self.counted * MARKS + self.scratch, dtype=torch.int32, device=device)
        start = numbers.data_ptr()
        if not self.counted:
            return numbers, start, 0
        numbers[:MARKS].zero_()
        return numbers, start + 4 * MARKS, start


class _Ready(NamedTuple):
    """What launches kernels from one thread: the driver's function, the context, what it takes of each, where the
    structure lies, what it takes of that, and the stream's scratch, if that is laid in it."""

    launch: Callable[..., int]
    context: ctypes.c_void_p
    kernels: list[tuple[Any, Any]]
    laid: bytearray
    given: Any
    room: Tensor | None


class Program(Kernels):
    """The kernels of CUDA C++ files, each a program of its own, compiled when it is first launched.

    Args:
        sources: the files, one behind the other; in the last `kernel` takes one structure.
        name: what they are called in messages.
        attempt: runs one of them on a small tensor of ones, (1, 1, 1, 1), on a GPU.
        least: the same of the one that is compiled soonest, for GPUs where all of them were run before; else `attempt`.
    """

    def __init__(
        self,
        sources: Sequence[Path],
        name: str,
        attempt: Callable[[Tensor], Any],
        least: Callable[[Tensor], Any] | None = None,
    ) -> None:
        super().__init__(str(sources[-1]), name, attempt, least or attempt)
        self.sources = sources
        self._codes: dict[tuple[tuple[str, ...], int], bytes] = {}
        self._function = functools.cache(self._load)
        self._ready = functools.lru_cache(256)(self._prepare)

    def look(self) -> Any:
        """NVRTC and the driver, or why there is one of them only; `found` keeps the answer."""
        try:
            return _nvrtc(), driver.library()
        except OSError as error:
            return " ".join(f"CUDA's compiler for kernels cannot be loaded: {error}".split())

    def was_run(self, index: int) -> bool:
        """Whether all of the kernels were run on GPUs like this one."""
        return torch.cuda.get_device_capability(index) in KNOWN

    def faults(self, *others: type[Exception]) -> tuple[type[Exception], ...]:
        """What goes wrong where a kernel cannot be compiled or launched."""
        return (RuntimeError, OSError, *others)

    def launch(self, work: Launches, terms: Sequence[int], device: torch.device) -> None:
        """Run the kernels on the device's current stream. A kernel whose blocks count does that in memory of the
        stream, and has its scratch there; where it is recorded, in memory of its own, as graphs may run at once.

        Args:
            terms: the structure's numbers of this call.

        Raises:
            RuntimeError: a kernel cannot be compiled, or not launched.
        """
        index = device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(device):
                return self.launch(work, terms, device)
        stream = torch._C._cuda_getCurrentRawStream(index)  # as a Stream it would take longer than the launch
        # the default stream, 0, is never recorded
        shared = work.counted and not (stream and torch._C._cuda_isCurrentStreamCapturing())
        ready = self._ready(work, index, stream, get_ident(), shared)
        work.terms.pack_into(ready.laid, 0, *terms)
        if not shared and (work.scratch or work.counted):
            _held, *places = work.held(device)
            PLACES.pack_into(ready.laid, work.places, *places)
        for setting, function in ready.kernels:
            if code := ready.launch(setting, function, ready.given, None):
                given = setting, function, ready.given, None
                driver.mend(code, ready.context, functools.partial(ready.launch, *given))

    def _prepare(self, work: Launches, index: int, stream: int, thread: int, shared: bool) -> _Ready:
        """For one thread: another would write its terms between these and the launch, which reads them. `shared`: with
        the stream's scratch."""
        compiler, cuda = self.loaded()
        kernels, context = [], ctypes.c_void_p()
        self._compile_together(compiler, [launch.defines for launch in work.launches], index)
        for launch in work.launches:
            function, context = self._function(launch.defines, launch.shared, index)
            setting = SETTING.pack(launch.blocks, 1, 1, launch.threads, 1, 1, launch.shared, stream, 0, 0)
            kernels.append((pointer(setting), pointer(function)))
        laid, room = work.structure(), None
        if shared:
            room = _room(index, stream)
            PLACES.pack_into(laid, work.places, room.data_ptr() + 4 * MARKS, room.data_ptr())
        return _Ready(cuda.cuLaunchKernelEx, context, kernels, laid, pointer(addresses(laid, [0])), room)

    def _load(self, defines: tuple[str, ...], shared: int, index: int) -> tuple[int | None, ctypes.c_void_p]:
        """The kernel on a GPU, which must be the current one, and the context that it is in."""
        _, cuda = self.loaded()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.synchronize(index)  # makes torch's context, and has it current
        context = driver.current_context()
        check(cuda.cuModuleLoadData(ctypes.byref(module), self._codes[defines, index]))
        check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"kernel"))
        if shared > PLENTY:
            check(cuda.cuFuncSetAttribute(function, SHARED, shared))
        return function.value, context

    def _compile_together(self, compiler: ctypes.CDLL, wanted: Iterable[tuple[str, ...]], index: int) -> None:
        """The code of kernels that there is none of yet, side by side: NVRTC leaves Python's lock to others."""
        missing = [defines for defines in dict.fromkeys(wanted) if (defines, index) not in self._codes]
        if not missing:
            return
        with ThreadPoolExecutor(len(missing)) as pool:
            codes = pool.map(lambda defines: self.compiled(compiler, defines, index), missing)
            for defines, code in zip(missing, codes, strict=True):
                self._codes[defines, index] = code

    def compiled(self, compiler: ctypes.CDLL, defines: tuple[str, ...], index: int) -> bytes:
        """Machine code for the GPU of this number, from the user's cache where it is there."""
        major, minor = torch.cuda.get_device_capability(index)
        options = (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *(f"-D{one}" for one in defines))
        text = b"".join(source.read_bytes() for source in self.sources)
        version = ctypes.c_int(), ctypes.c_int()
        compiler.nvrtcVersion(*map(ctypes.byref, version))
        parts = (text, options, *(part.value for part in version))
        directory = building.cache_directory()
        name = f"{self.sources[-1].stem}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.cubin"
        if directory is not None and (found := _read(directory / name)):
            return found
        code = _compile(compiler, text, self.sources[-1].name, options)
        if directory is not None:
            with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="build-", dir=directory) as work:
                made = Path(work, name)
                made.write_bytes(hashlib.sha256(code).digest() + code)
                made.chmod(0o600)
                os.replace(made, directory / name)
        return code


@functools.lru_cache(16)
def _room(index: int, stream: int) -> Tensor:
    """For the kernels of one stream, which follow each other: 8 MiB, MARKS zeros, which kernels leave 0, and then
    numbers of any value."""
    return torch.zeros(MARKS + ROOM, dtype=torch.int32, device=torch.device("cuda", index))


def _read(path: Path) -> bytes | None:
    """The code kept there; None where there is none, or a damaged one, or another user's."""
    try:
        kept = path.read_bytes() if building.is_only_ours(path) else b""
    except OSError:
        return None
    return kept[32:] if hashlib.sha256(kept[32:]).digest() == kept[:32] else None


def _compile(compiler: ctypes.CDLL, text: bytes, name: str, options: Sequence[str]) -> bytes:
    program, size, given = ctypes.c_void_p(), ctypes.c_size_t(), [one.encode() for one in options]
    if compiler.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None):
        raise RuntimeError("NVRTC does not start")
    try:
        if compiler.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given)):
            compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(program, log)
            raise RuntimeError(" ".join(log.value.decode(errors="replace").split())[:300])
        compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc() -> ctypes.CDLL:
    """NVRTC of the CUDA that torch is built for: as the loader finds it, or from the package beside torch."""
    if torch.version.cuda is None:
        raise OSError("torch is not built for CUDA")
    file = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    beside = Path(torch.__file__).parent.parent.glob(f"nvidia/*/lib/{file}")
    for path in (file, *map(str, beside)):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise OSError(f"{file} not found")
