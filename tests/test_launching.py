"""Launches of Triton kernels: what a kernel is handed, and when triton itself must look for its code."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import os
import struct
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssmscope.scans import driver, launching, nvrtc, passes
from ssmscope.scans.driver import LOST, SETTING
from ssmscope.scans.launching import Bound

CONSTANTS = {"WIDTH": 64, "EVEN": True, "num_warps": 4}
TAKEN = ("u64 .ptr .global .align 1", "u64 .ptr .global .align 16", "u64", "u32", "f32", "u64", "u64")
"""What its code takes: its terms, and where triton would have two kinds of scratch."""


class Kernel:
    """A triton kernel of three tensors and two numbers: notes what is compiled of it, and what triton launches."""

    arg_names = ("x", "y", "out", "length", "step", "EVEN", "WIDTH")

    def __init__(self, taken: tuple[str, ...] = TAKEN, **metadata: Any) -> None:
        self.pre_run_hooks: list[Any] = []
        self.own: list[tuple[Any, ...]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.metadata = {"num_warps": 4, "num_ctas": 1, "shared": 512, "launch_pdl": False, **metadata}
        parameters = ",\n".join(f".param .{kind} add_param_{n}" for n, kind in enumerate(taken))
        self.ptx = (
            f".version 8.7\n.visible .entry add(\n{parameters}\n)\n.reqntid 128 {{ ld.param.b64 %rd1, [add_param_0]; }}"
        )
        self.code: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*terms: Any, **constants: Any) -> Any:
            assert constants == CONSTANTS
            self.own.append((grid, *terms))

        return launch

    def warmup(self, *terms: Any, grid: tuple[int, ...], **constants: Any) -> Any:
        """The code, of its own where the length is 1, as triton compiles it."""
        assert constants == CONSTANTS
        self.asked.append((grid, *terms))
        kinds = ("*fp32", "*bf16", "*fp32", "constexpr" if terms[3] == 1 else "i32", "fp32", "constexpr", "constexpr")
        signature = dict(zip(self.arg_names, kinds, strict=True))
        ptx = self.ptx.replace(".param .u32 add_param_3,\n", "" if terms[3] == 1 else ".param .u32 add_param_3,\n")
        code = SimpleNamespace(
            name="add",
            kernel=b"code",
            asm={"ptx": ptx},
            src=SimpleNamespace(signature=signature),
            metadata=SimpleNamespace(**self.metadata),
        )
        return self.code.setdefault(terms[3] == 1, code)


class Driver:
    """CUDA's driver, which notes launches: blocks, threads and shared memory, stream, function, and what it takes."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.answers: list[int] = []
        self.contexts: list[int | None] = []
        word = ctypes.c_void_p
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, word)(self.launch)

    def launch(self, setting: int, function: int, given: int, more: None) -> int:
        time.sleep(1e-4)  # in which other threads go on
        if self.answers and (answer := self.answers.pop(0)):
            return answer
        sizes = SETTING.unpack(ctypes.string_at(setting, SETTING.size))
        assert sizes[-2:] == (0, 0) and more is None
        formats = "=QQQf" if function == 2 else "=QQQif"  # the second code is for a length of 1
        places = (ctypes.c_void_p * len(formats)).from_address(given)  # and one for triton's scratch
        laid = b"".join(ctypes.string_at(place, struct.calcsize(f"={one}")) for place, one in zip(places, formats[1:]))
        assert ctypes.string_at(places[len(formats) - 1], 8) == bytes(8)
        self.seen.append((*sizes[:-2], function, *struct.unpack(formats, laid)))
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = 77
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.contexts.append(context.value)
        return 0


@pytest.fixture
def gpu(monkeypatch) -> Any:
    """A stand-in for triton 3.6, its hooks, a GPU, and its driver."""
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    loaded: list[tuple[Any, ...]] = []

    def load_binary(*given: Any) -> tuple[int, ...]:
        loaded.append(given)
        return 0, len(loaded), 32, 0, 1024

    active = SimpleNamespace(utils=SimpleNamespace(load_binary=load_binary))
    fake = SimpleNamespace(
        __version__="3.6.0",
        JITFunction=Kernel,
        knobs=SimpleNamespace(runtime=hooks),
        runtime=SimpleNamespace(driver=SimpleNamespace(active=active)),
        current=0,
        loaded=loaded,
        driver=Driver(),
    )
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setattr(driver, "library", lambda: fake.driver)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(launching, "_begun", set())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    return fake


def test_the_same_kind_of_terms_takes_the_same_code(gpu):
    kernel = Kernel()
    launch, (x, y) = Bound(kernel, CONSTANTS), (torch.ones(64), torch.ones(64, dtype=torch.bfloat16))
    launch((5,), x, y, x, 64, 0.5)
    for other in (x, torch.ones(3)):
        launch((2, 9), other, y, x, 64, 0.5)
        assert gpu.driver.seen[-1][7:] == (100, 1, other.data_ptr(), y.data_ptr(), x.data_ptr(), 64, 0.5)
    launch((2, 9, 0), x, y, x, 64, 0.5)
    assert len(kernel.asked) == 1 and not kernel.own
    assert gpu.loaded == [("add", b"code", 512, 0)]
    assert [seen[:7] for seen in gpu.driver.seen] == [(5, 1, 1, 128, 1, 1, 512)] + 2 * [(2, 9, 1, 128, 1, 1, 512)]


def test_other_kinds_of_terms_do_not(gpu):
    kernel = Kernel()
    launch, x = Bound(kernel, CONSTANTS), torch.ones(64)
    kinds = [
        (x, x, x, 64, 16.0),
        (x, x, x, 1, 16.0),
        (x.bfloat16(), x, x, 64, 16.0),
        (x, x[1:], x, 64, 16.0),  # starts at 4 bytes after a multiple of 16
        (x[1:], x, x, 64, 16.0),
        (x, x[1:], x.bfloat16(), 64, 16.0),
    ]
    for number in (1, 2):
        for terms in kinds:
            launch((1,), *terms)
            numbers = terms[4:] if terms[3] == 1 else terms[3:]  # the code for a length of 1 is not given it
            assert gpu.driver.seen[-1][8:] == (1 + (terms[3] == 1), *[t.data_ptr() for t in terms[:3]], *numbers)
        assert len(kernel.asked) == len(kinds) and len(gpu.driver.seen) == number * len(kinds)
    gpu.current = 1
    for _ in range(2):
        launch((1,), *kinds[0])
    assert len(kernel.asked) == len(kinds) + 1 and gpu.driver.seen[-1][7:9] == (101, 3)
    assert [given[3] for given in gpu.loaded] == [0, 0, 1] and not kernel.own


@pytest.mark.parametrize("why", ["version", "interpreted", "watched", "hooked", "hip"])
def test_triton_launches_what_it_must_see(why, gpu, monkeypatch):
    kernel = Kernel()
    if why == "version":
        gpu.__version__ = "4.0.0"
    elif why == "interpreted":
        gpu.JITFunction = int
    elif why == "watched":
        gpu.knobs.runtime.launch_enter_hook.calls.append(print)
    elif why == "hooked":
        kernel.pre_run_hooks.append(print)
    else:
        monkeypatch.setattr(torch.version, "hip", "7.0")
    launch, x = Bound(kernel, CONSTANTS), torch.ones(64)
    for _ in range(3):
        launch((1,), x, x, x, 64, 0.5)
    assert len(kernel.own) == 3 and not kernel.asked and not gpu.driver.seen


@pytest.mark.parametrize(
    ("taken", "metadata"),
    [
        ((*TAKEN[:3], "u64", *TAKEN[4:]), {}),
        (TAKEN[:4], {}),
        ((*TAKEN, "u32"), {}),
        ((*TAKEN[:5], "align 64 .b8"), {}),
        ((), {}),
        (TAKEN, {"num_ctas": 2}),
        (TAKEN, {"launch_pdl": True}),
        (TAKEN, {"global_scratch_size": 128}),
        (TAKEN, {"tensordesc_meta": [object()]}),
    ],
)
def test_triton_launches_what_takes_more_than_its_terms(taken, metadata, gpu):
    kernel, x = Kernel(taken, **metadata), torch.ones(64)
    launch = Bound(kernel, CONSTANTS)
    for _ in range(3):
        launch((1,), x, x, x, 64, 0.5)
    assert len(kernel.own) == 3 and len(kernel.asked) == 1 and not gpu.driver.seen


def test_triton_launches_what_a_hook_keeps_it_from_compiling(gpu, monkeypatch):
    kernel, x = Kernel(), torch.ones(64)
    monkeypatch.setattr(kernel, "warmup", lambda *terms, **more: None)
    Bound(kernel, CONSTANTS)((1,), x, x, x, 64, 0.5)
    assert len(kernel.own) == 1 and not gpu.driver.seen


def test_a_thread_without_a_context_is_given_the_codes(gpu):
    launch, x = Bound(Kernel(), CONSTANTS), torch.ones(64)
    gpu.driver.answers = [LOST]
    launch((1,), x, x, x, 64, 0.5)
    assert gpu.driver.contexts == [77] and len(gpu.driver.seen) == 1
    gpu.driver.answers = [LOST, LOST]
    with pytest.raises(RuntimeError, match="CUDA's driver gave error 201"):
        launch((1,), x, x, x, 64, 0.5)
    gpu.driver.answers = [1]
    with pytest.raises(RuntimeError, match="CUDA's driver gave error 1$"):
        launch((1,), x, x, x, 64, 0.5)


def test_threads_do_not_write_into_each_others_launches(gpu):
    launch, tensors = Bound(Kernel(), CONSTANTS), [torch.ones(64) for _ in range(200)]

    def run(x: torch.Tensor) -> None:
        launch((1,), x, x, x, 64, 0.5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, tensors))
    assert sorted(seen[9:12] for seen in gpu.driver.seen) == sorted(3 * (x.data_ptr(),) for x in tensors)


def test_kinds_are_forgotten_before_they_fill_memory(gpu, monkeypatch):
    monkeypatch.setattr(launching, "KINDS", 3)
    kernel = Kernel()
    launch, x = Bound(kernel, CONSTANTS), torch.ones(64)
    for length in range(2, 12):
        launch((1,), x, x, x, length, 0.5)
        assert gpu.driver.seen[-1][12] == length
    assert len(launch.ready) <= 3 and len(kernel.asked) == 10 and len(gpu.loaded) == 1


def test_tensors_come_before_numbers(gpu):
    x = torch.ones(64)
    with pytest.raises(TypeError, match="tensors come before numbers"):
        Bound(Kernel(), CONSTANTS)((1,), x, 64, x, x, 16)


def test_kernels_of_some_work_are_compiled_side_by_side(gpu, monkeypatch):
    meeting, held = Barrier(3, timeout=60), []
    kernels = [Kernel() for _ in range(3)]
    launches = [Bound(kernel, CONSTANTS) for kernel in kernels]
    gpu.runtime.driver.active.utils.load_binary = lambda *given: (0, 1, 32, 0, 1024)

    def work() -> None:
        for launch in (*launches, launches[0]):
            x = torch.ones(64)
            held.append(weakref.ref(x))
            launch((1,), x, x, x, 64, 0.5)

    def warmup(kernel: Kernel, *terms: Any, **more: Any) -> None:
        meeting.wait()
        kernel.asked.append(terms)
        assert not any(x() is not None for x in held)

    with monkeypatch.context() as patched:
        patched.setattr(Kernel, "warmup", warmup)
        launching.compiled_ahead("work", work)
    assert [kernel.asked for kernel in kernels] == [[(*3 * (torch.float32,), 64, 0.5)]] * 3 and not gpu.driver.seen
    launching.compiled_ahead("work", lambda: pytest.fail("the same work again"))
    work()
    assert len(gpu.driver.seen) == 4
    before = [len(kernel.asked) for kernel in kernels]
    launching.compiled_ahead("other work", work)  # whose kernels are there
    assert [len(kernel.asked) for kernel in kernels] == before and len(gpu.driver.seen) == 4


def test_work_that_fails_as_it_is_planned_leaves_launches_as_they_were(gpu):
    launch, x = Bound(Kernel(), CONSTANTS), torch.ones(64)

    def work() -> None:
        launch((1,), x, x, x, 64, 0.5)
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        launching.compiled_ahead("work", work)
    assert not gpu.driver.seen
    launch((1,), x, x, x, 64, 0.5)
    assert len(gpu.driver.seen) == 1


def test_where_all_kernels_were_run_the_smallest_is_tried(gpu, monkeypatch):
    tried, ones = [], torch.ones
    monkeypatch.setattr(torch, "ones", lambda *sizes, device: ones(*sizes))
    own = (lambda one: tried.append("attempt")), (lambda one: tried.append("least"))
    cases = [((9, 0), "3.6.2", "least"), ((9, 0), "3.7.0", "attempt"), ((8, 6), "3.6.0", "attempt")]
    for capability, gpu.__version__, expected in cases:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)  # noqa: B023
        assert launching.Kernels("none", "kernels", *own)._try(0) is None
        assert tried.pop() == expected and not tried
        assert nvrtc.Program([Path("none.cu")], "kernels", *own)._try(0) is None  # whatever triton is
        assert tried.pop() == ("least" if capability == (9, 0) else "attempt") and not tried
    assert launching.Kernels("none", "kernels", print).least is launching._doubled


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: make test-kernels")
def test_code_compiled_for_an_h100_is_handed_its_terms(tmp_path):
    """Every kind of launch that there is, without a GPU; see the script."""
    own = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | own  # a GPU that is there would be tried before the script is
    script = Path(__file__).with_name("compiled_offline.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    launched = dict(line.split() for line in run.stdout.splitlines())
    kernels = {
        "summed",
        "gate",
        "rms_norm",
        "left",
        "left_of_heads",
        "norm_back",
        "back",
        "walk_back",
        "near",
        "products",
    }
    assert kernels <= launched.keys() and len(launched) >= 25


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
