"""Launches of compiled kernels by CUDA's driver. What a kernel takes lies in memory of one thread, where numbers are
written before each launch: nothing is made for it, and the driver reads them before the launch comes back.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable
from typing import Any

LOST = 201  # the driver's word for a thread that has no context yet
SETTING = struct.Struct("=7I4x2QI4x")  # CUlaunchConfig: blocks, threads, shared memory, stream, no attributes

pointer: Callable[[Any], Any] = ctypes.c_void_p.from_param  # an argument, made once rather than in each call


@functools.cache
def library() -> ctypes.CDLL:
    """CUDA's driver.

    Raises:
        OSError: there is none, or one before CUDA 11.8, which has no such launch.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "cuLaunchKernelEx"):
        raise OSError("the driver is older than CUDA 11.8")
    return driver


def check(code: int) -> None:
    """Refuse, as a RuntimeError, what the driver says unless all is well."""
    if code:
        raise RuntimeError(f"CUDA's driver gave error {code}")


def current_context() -> ctypes.c_void_p:
    """The context of this thread.

    Raises:
        RuntimeError: the driver refuses.
    """
    context = ctypes.c_void_p()
    check(library().cuCtxGetCurrent(ctypes.byref(context)))
    return context


def mend(code: int, context: ctypes.c_void_p, again: Callable[[], int]) -> None:
    """After a launch that the driver refused with this code: in a thread without a context once more, in this one.

    Raises:
        RuntimeError: the driver refuses for another reason, or again.
    """
    if code == LOST:
        check(library().cuCtxSetCurrent(context))
        code = again()
    check(code)


def addresses(buffer: bytearray, places: Iterable[int]) -> Any:
    """Where in memory these places of a buffer are, as the driver takes what a kernel is given."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    found = [start + place for place in places]
    return (ctypes.c_void_p * len(found))(*found)


class Ready:
    """A kernel as one thread launches it, from what lies in memory for it.

    Args:
        function: the driver's handle of the kernel.
        context: in which it is.
        threads: of a block.
        shared: bytes of shared memory of a block.
        laid: what the kernel takes, to be written by the caller.
        places: where in it each argument begins.
    """

    def __init__(
        self,
        function: int,
        context: ctypes.c_void_p,
        threads: int,
        shared: int,
        laid: bytearray,
        places: Iterable[int],
    ) -> None:
        self.laid, self._rest = laid, (threads, 1, 1, shared)
        self._setting = bytearray(SETTING.size)
        self._set: tuple[tuple[int, ...], int] | None = None
        self._given = (
            pointer(addresses(self._setting, [0])[0]),
            pointer(function),
            pointer(addresses(laid, places)),
            None,
        )
        self._launch, self._context = library().cuLaunchKernelEx, context

    def __call__(self, blocks: tuple[int, ...], stream: int) -> None:
        """Launch so many blocks along three axes, of what is laid, on a stream.

        Raises:
            RuntimeError: the driver refuses.
        """
        if self._set != (blocks, stream):
            SETTING.pack_into(self._setting, 0, *blocks, *self._rest, stream, 0, 0)
            self._set = blocks, stream
        if code := self._launch(*self._given):
            mend(code, self._context, lambda: self._launch(*self._given))


class Beside:
    """A stream beside others, of the GPU whose context this thread has: between `begin` and `end`, what is launched on
    it need not wait for what comes on the other.

    Args:
        stream: the driver's handle of it.
    """

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self._begun, self._done = _event(), _event()

    def begin(self, current: int) -> None:
        """What is launched on this stream from now on waits for what is on the current one.

        Raises:
            RuntimeError: the driver refuses.
        """
        _order(self._begun, current, self.stream)

    def end(self, current: int) -> None:
        """What is launched on the current stream from now on waits for what is on this one.

        Raises:
            RuntimeError: the driver refuses.
        """
        _order(self._done, self.stream, current)


def _event() -> ctypes.c_void_p:
    """A mark in a stream, which does not take the time."""
    event = ctypes.c_void_p()
    check(library().cuEventCreate(ctypes.byref(event), 2))
    return event


def _order(event: ctypes.c_void_p, first: int, then: int) -> None:
    """One stream waits for what is on another."""
    driver = library()
    check(driver.cuEventRecord(event, ctypes.c_void_p(first)))
    check(driver.cuStreamWaitEvent(ctypes.c_void_p(then), event, 0))
