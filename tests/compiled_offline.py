"""Our Triton kernels compiled for an H100 where there is no GPU, and launched on a driver that notes what it is given.

Run by test_launching.py, as triton must not interpret. What kernels would write stays as it is; what is looked at is
whether each launch goes to the driver, with the blocks, threads, shared memory and terms that triton would hand it,
and whether a map's launches, once made, are made again so. A line for each kernel says how often it was launched.
"""

from __future__ import annotations

import collections
import ctypes
import struct
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import test_delta_fused
import test_scalar_fused
import torch
import triton
from triton.backends.compiler import GPUTarget

from ssmscope.matrices import fused
from ssmscope.scans import driver, fused_parts, launching, passes, word_sums

FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}
STREAM, ASIDE = 5, 6
launches: collections.Counter[str] = collections.Counter()
expected: tuple[str, tuple[Any, ...]] = ("", ())
made: list[tuple[str, tuple[str, tuple[Any, ...]]]] = []
again: list[tuple[str, tuple[str, tuple[Any, ...]]]] = []
order: list[Any] = []


@ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
def launched(setting: int, function: int, given: int, more: None) -> int:
    global expected
    if again:
        name, (formats, (*values,)) = again.pop(0)
        values[7] = ASIDE if name in ("near", "levels") else STREAM
        expected = formats, tuple(values)
        order.append(name)
    sizes = driver.SETTING.unpack(ctypes.string_at(setting, driver.SETTING.size))
    places = (ctypes.c_void_p * len(expected[0])).from_address(given)
    found = [struct.unpack(one, ctypes.string_at(at, struct.calcsize(one)))[0] for at, one in zip(places, expected[0])]
    if order and order[-1] == "gather":  # its first term is a table of nothing here, which torch says is nowhere
        found[0] = expected[1][len(sizes) + 1]
    same = (*sizes, function, *found) == expected[1]
    if not same:
        print(f"expected {expected[1]}, found {(*sizes, function, *found)}", file=sys.stderr, flush=True)
    return 0 if same else 1


def expect(kernel: Any, compiled: Any, grid: tuple[int, ...], terms: tuple[Any, ...]) -> None:
    """By what triton says of the code: of its signature all but constants, then its kinds of scratch."""
    global expected
    formats, values = "", []
    for (_, kind), term in zip(compiled.src.signature.items(), terms):
        if kind != "constexpr":
            pointer = kind.startswith("*")
            formats += "Q" if pointer else FORMATS[kind]
            values.append(term.data_ptr() if pointer else term)
            if kind == "fp32":
                values[-1] = struct.unpack("f", struct.pack("f", term))[0]
    blocks = (*grid, 1, 1)[:3]
    sizes = (*blocks, 32 * compiled.metadata.num_warps, 1, 1, compiled.metadata.shared, STREAM, 0, 0)
    more = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0].count(".param") - len(formats)
    expected = formats + "Q" * more, (*sizes, 42, *values, *[0] * more)


def watch(bound: Any, grid: tuple[int, ...], *terms: Any) -> None:
    if getattr(launching._thread, "planned", None) is not None:
        launch(bound, grid, *terms)
        return
    expect(bound.kernel, bound.kernel.warmup(*terms, grid=grid, **bound.constants), grid, terms)
    launch(bound, grid, *terms)
    launches[bound.kernel.__name__] += 1
    made.append((bound.kernel.__name__, expected))


class GPU:
    """What triton asks of its driver to compile for an H100; what launches is not there."""

    utils = SimpleNamespace(load_binary=lambda name, code, shared, device: (1, 42, 64, 0, 1024))

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def context(at: Any) -> int:
    at._obj.value = 7
    return 0


def record(event: Any, stream: Any) -> int:
    order.append(("record", stream.value))
    return 0


def wait(stream: Any, event: Any, flags: int) -> int:
    order.append(("wait", stream.value))
    return 0


triton.runtime.driver.set_active(GPU())
cuda = SimpleNamespace(cuLaunchKernelEx=launched, cuCtxGetCurrent=context, cuCtxSetCurrent=lambda context: 0)
cuda.cuEventCreate, cuda.cuEventRecord, cuda.cuStreamWaitEvent = lambda event, flags: 0, record, wait
driver.library = lambda: cuda
torch.version.hip, torch.cuda.current_device, torch.cuda.device = None, lambda: 0, lambda index: nullcontext()
torch._C._cuda_getCurrentRawStream = lambda device: STREAM
fused._stream = lambda index: SimpleNamespace(cuda_stream=ASIDE)
launch = launching.Bound.__call__
launching.Bound.__call__ = watch


def make_again() -> None:
    """A map twice in the same memory: the second time from what is known of the first."""
    b, c = torch.randn(2, 2, 2 * fused.TILE, 1, 1)
    delta, A = b[..., 0].abs(), c[0, :1, 0]
    kept: dict[str, torch.Tensor] = {}
    new_empty = torch.Tensor.new_empty

    def same(t: torch.Tensor, *sizes: Any, **how: Any) -> torch.Tensor:
        return kept.setdefault(f"{sizes} {how}", new_empty(t, *sizes, **how))

    made.clear()
    with patch.object(torch.Tensor, "new_empty", same), patch.object(fused, "NEAR", 2):
        first = fused.mean(b, c, delta, A)
        again[:] = made
        with patch.object(launching.Bound, "__call__", side_effect=AssertionError("not known")):
            assert fused.mean(b, c, delta, A) is first
    assert not again and len(made) == 9
    assert order == [
        *("sums", "prepare", ("record", STREAM), ("wait", ASIDE), "near", "levels"),
        *("starts", "bounds", "factors", "products", ("record", ASIDE), ("wait", STREAM), "gather"),
    ]


def main() -> None:
    torch.set_float32_matmul_precision("medium")  # whose kernels are compiled soonest
    x, z, one = torch.randn(2, 7, 68), torch.randn(2, 7, 68), torch.ones(1, 1, 1, 1)
    weight, taps = torch.randn(68), torch.randn(68, 4)
    with torch.no_grad():
        for a, b in ((x, z), (x[..., 1:65], z[..., 1:65]), (x.bfloat16(), z.bfloat16())):
            passes.gated(a, b)
        passes.rms_norm(x, weight, 1e-5)
        passes.add_and_rms_norm(x, z, weight, 1e-6)
        passes.gated_norm(x, z, weight, 1e-5, 34)
        passes.silu_convolution_and_wide(x, taps, None)
        passes.softplus(x)
        passes.projected_softplus(x, torch.randn(68, 68), weight)
        passes.lengths(x.view(2, 7, 4, 17))
        passes.left(one, one[0], one[0, 0], one, each=True)
        passes.left(x[..., None], x.abs(), -taps.abs(), torch.randn(2, 7, 1, 4), each=False)
        passes.left_of_heads(
            x.view(2, 7, 4, 17), x[..., :4].abs(), -taps[:4, :1].abs(), torch.randn(2, 7, 2, 4), each=True
        )
    word_sums.sums([x.detach().view(torch.int32).flatten()], torch.arange(1, 3), torch.arange(1, 5))
    wide = [t.requires_grad_() for t in (x, z, weight)]
    fused_parts.gated_norm(*wide, eps=1e-5).sum().backward()
    for tests in (test_scalar_fused, test_delta_fused):
        tests.run(tests.draw(1, 1, 2, 2, 1, 1))
        y, *_ = tests.run({name: t.requires_grad_() for name, t in tests.draw(2, 70, 4, 2, 5, 4).items()})
        y.sum().backward()
    launching._doubled(one)
    fused._attempt(one)
    make_again()
    for name, count in sorted(launches.items()):
        print(name, count)


if __name__ == "__main__":
    main()
