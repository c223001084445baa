"""Launches of Triton kernels: what a kernel is handed, and when triton itself must look for its code."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssmscope.scans import launching, passes
from ssmscope.scans.launching import Bound

CONSTANTS = {"WIDTH": 64, "EVEN": True, "num_warps": 4}


class Kernel:
    """A triton kernel of three tensors and two numbers: notes its own launches, and those of its code."""

    arg_names = ("x", "y", "out", "length", "step", "EVEN", "WIDTH")

    def __init__(self) -> None:
        self.pre_run_hooks: list[Any] = []
        self.own: list[tuple[Any, ...]] = []
        self.handed: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*terms: Any, **constants: Any) -> Any:
            assert constants == CONSTANTS
            self.own.append((grid, *terms))
            return SimpleNamespace(run=lambda *a: self.handed.append(a), function=7, packed_metadata=(4, 1, 0))

        return launch


@pytest.fixture
def triton(monkeypatch):
    """A stand-in for triton 3.6, its hooks, and a GPU."""
    runtime = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    fake = SimpleNamespace(__version__="3.6.0", JITFunction=Kernel, knobs=SimpleNamespace(runtime=runtime), gpu=0)
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.gpu)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: 100 + gpu, raising=False)
    return fake


def test_the_same_kind_of_terms_takes_the_same_code(triton):
    kernel = Kernel()
    launch, (x, y) = Bound(kernel, CONSTANTS), (torch.ones(64), torch.ones(64, dtype=torch.bfloat16))
    launch((5,), x, y, x, 64, 16)
    assert len(kernel.own) == 1 and not kernel.handed
    for other in (x, torch.ones(3)):
        launch((2, 9), other, y, x, 64, 16)
    assert len(kernel.own) == 1
    rest = (y.data_ptr(), x.data_ptr(), 64, 16, True, 64)  # constants as the kernel names them
    assert kernel.handed[0] == (2, 9, 1, 100, 7, (4, 1, 0), None, None, None, x.data_ptr(), *rest)
    assert len(kernel.handed) == 2


def test_other_kinds_of_terms_do_not(triton):
    kernel = Kernel()
    launch, x = Bound(kernel, CONSTANTS), torch.ones(64)
    kinds = [
        (x, x, x, 64, 16),
        (x, x, x, 1, 16),
        (x.bfloat16(), x, x, 64, 16),
        (x, x[1:], x, 64, 16),  # starts at 4 bytes after a multiple of 16
        (x[1:], x, x, 64, 16),
        (x, x[1:], x.bfloat16(), 64, 16),
    ]
    for terms in kinds:
        launch((1,), *terms)
    assert len(kernel.own) == len(kinds) and not kernel.handed
    for terms in kinds:
        launch((1,), *terms)
    assert len(kernel.own) == len(kinds) == len(kernel.handed)
    triton.gpu = 1
    launch((1,), *kinds[0])
    launch((1,), *kinds[0])
    assert len(kernel.own) == len(kinds) + 1 and kernel.handed[-1][3] == 101


@pytest.mark.parametrize("why", ["version", "interpreted", "watched", "hooked", "hip"])
def test_triton_launches_what_it_must_see(why, triton, monkeypatch):
    kernel = Kernel()
    if why == "version":
        triton.__version__ = "4.0.0"
    elif why == "interpreted":
        triton.JITFunction = int
    elif why == "watched":
        triton.knobs.runtime.launch_enter_hook.calls.append(print)
    elif why == "hooked":
        kernel.pre_run_hooks.append(print)
    else:
        monkeypatch.setattr(torch.version, "hip", "7.0")
    launch, x = Bound(kernel, CONSTANTS), torch.ones(64)
    for _ in range(3):
        launch((1,), x, x, x, 64, 16)
    assert len(kernel.own) == 3 and not kernel.handed


def test_kinds_are_forgotten_before_they_fill_memory(triton, monkeypatch):
    monkeypatch.setattr(launching, "KINDS", 3)
    kernel = Kernel()
    launch, x = Bound(kernel, CONSTANTS), torch.ones(64)
    for length in range(10):
        launch((1,), x, x, x, length, 16)
    assert len(launch.compiled) <= 3 and len(kernel.own) == 10


def test_tensors_come_before_numbers(triton):
    x = torch.ones(64)
    with pytest.raises(TypeError, match="tensors come before numbers"):
        Bound(Kernel(), CONSTANTS)((1,), x, 64, x, x, 16)


@pytest.mark.skipif(not torch.cuda.is_available() or passes.why_not() is not None, reason="no Triton kernels here")
def test_on_a_gpu_the_code_is_the_right_one():
    """Of tensors anywhere in memory, on any stream, and recorded."""
    y, z = (torch.randn(2, 3, 68, device="cuda") for _ in range(2))
    for shift in (0, 0, 1, 1, 4, 0, 1):
        for dtype in (torch.float32, torch.bfloat16):
            a, b = (t.to(dtype)[..., shift : shift + 64] for t in (y, z))
            with torch.no_grad():
                ours = passes.gated(a, b)
            exact = a.double() * torch.nn.functional.silu(b.double())
            assert (ours.double() - exact).abs().max() <= (1e-6 if dtype == torch.float32 else 8e-3) * exact.abs().max()
    expected, stream = passes.gated(y, z), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = passes.gated(y, z)
    stream.synchronize()
    assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = passes.gated(y, z)
    y.mul_(2)
    graph.replay()
    assert torch.equal(recorded, passes.gated(y, z)) and not torch.equal(recorded, expected)


OF_TEXTS = {"batch", "length", "chunks", "span", "segments", "blocks", "tiles", "depth", "splits", "first_chunk"}
"""What kernels call numbers that change from text to text, or from batch to batch."""
ALIGNED = {("products", "length"), ("gather", "length")}
"""Those by which rows of a matrix start at a multiple of 16 bytes or not, which is worth machine code of its own."""


@pytest.mark.parametrize(
    "path", sorted(Path(launching.__file__).parents[1].rglob("*_kernels.py")), ids=lambda path: path.stem
)
def test_no_kernel_is_compiled_for_one_text(path):
    """Triton would compile anew for a number that is 1, or that 16 divides, unless it is told not to."""
    for kernel in ast.parse(path.read_text()).body:
        is_function = isinstance(kernel, ast.FunctionDef) and not kernel.name.startswith("_")
        if not is_function or any(isinstance(one, ast.Return) for one in ast.walk(kernel)):
            continue  # those that give something, or have such a name, are parts of kernels
        numbers = {a.arg for a in kernel.args.args if a.annotation is None}
        told = {one.value for one in ast.walk(kernel.decorator_list[0]) if isinstance(one, ast.Constant)}
        assert {(kernel.name, name) for name in numbers & OF_TEXTS - told} <= ALIGNED, kernel.name
