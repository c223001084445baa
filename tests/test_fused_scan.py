"""The CUDA kernels of the scan against the definition in float64, and how they come and stay away.

On a machine with a GPU the compiled kernels are tested; elsewhere the same source, its threads emulated on the CPU.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import emulation
import pytest
import torch
from scan_checks import DEVICE, NAMES, ScanChecks, definition, draw, gradients, leaves_of, near

from ssmscope.scans import building, diagonal, fused, making, native, nvrtc


def run(terms, *, expected=False, retention=False):
    return fused.scan(*(terms[n] for n in NAMES), expected=expected, retention=retention)


WHY = fused.why_not() if DEVICE == "cuda" else None if emulation.COMPILER else "no GPU, and no C++ compiler"
needs_kernels = pytest.mark.skipif(WHY is not None, reason=f"no CUDA kernels here: {WHY}")
ENTRIES = ("run_ends<false>", "run_ends<true>", *fused.FORWARD, *fused.BACKWARD, "run_sums")


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory):
    """The compiled kernels, or emulated ones; the emulator, if there is one."""
    if DEVICE == "cuda":
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:
        emulator = emulation.Emulator(fused.kernels, ENTRIES, tmp_path_factory.mktemp("emulated"))
        patch.setattr(fused.kernels, "launch", emulator)
        yield emulator


@pytest.fixture(autouse=True)
def few_chunks(monkeypatch):
    """Two chunks wherever there are two tiles, as a single text on a large GPU has them; as many channels a lane as can
    be."""
    cut(monkeypatch, 2)


def cut(monkeypatch, chunks: int, processors: int = 0, joined: bool = True) -> None:
    monkeypatch.setattr(fused, "_chunks", lambda warps, tiles, backward, processors: min(chunks, tiles))
    monkeypatch.setattr(fused, "_processors", lambda device: processors)
    monkeypatch.setattr(fused, "_fits", lambda plan, backward, processors: joined)
    fused._planned.cache_clear()


SHAPES = [  # batch, length, heads, groups, state
    (1, 0, 5, 1, 4),
    (1, 1, 3, 1, 16),
    (1, 31, 5, 1, 16),
    (2, 40, 152, 1, 16),
    (1, 33, 14, 2, 5),
    (3, 17, 2, 1, 1),
    (1, 100, 2, 2, 2),
    (2, 2 * fused.TILE, 2, 1, 65),
    (1, 20, 2, 1, 200),
]


@needs_kernels
def test_the_least_that_is_tried_reads_and_writes_nothing():
    """Its terms are all 0, addresses too; what a pass is compiled for, so that it need not be compiled again."""
    for each in (fused._least, fused._attempt):
        each(torch.ones(1, 1, 1, 1, device=DEVICE))
    plan = fused._plan(8, 2048, 8192, 1, 16, True, 132)
    assert (plan.cd, plan.sn, plan.ln, plan.warps) == (4, 4, 4, 4)


@needs_kernels
class TestScan(ScanChecks):
    terms = dict(length=40, heads=10, state=16)
    run = staticmethod(run)

    @pytest.mark.parametrize("expected", [False, True], ids=["exp", "expected"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_values_and_gradients(self, shape, expected):
        self.are_those_of_the_definition(draw(*shape), expected)

    @pytest.mark.parametrize("expected", [False, True])
    def test_it_is_what_ssm_scan_runs(self, expected, monkeypatch):
        monkeypatch.setattr(diagonal, "_forward", lambda *_: pytest.fail("the torch path ran"))
        if DEVICE == "cpu":
            monkeypatch.setattr(native, "applicable", lambda *_: False)
            monkeypatch.setattr(fused, "applicable", lambda *_: True)
        self.is_what_ssm_scan_runs(draw(2, 20, 12, 2, 5), expected)


@needs_kernels
def test_the_decay_is_exp_down_to_the_smallest_normal_number():
    steps = torch.cat([torch.linspace(0, 79.9, 400), torch.tensor([0.0, 1e-9, 80.0, 100.0, 1e30, 3e38])])
    steps = steps.to(DEVICE)
    one = torch.ones(1, 1, 1, 1, device=DEVICE)
    A = -torch.ones(
        len(steps), 3, device=DEVICE
    )  # three states: an edge beside them, which infinite steps must not reach
    terms = dict(x=0 * one, b=one.expand(-1, -1, -1, 3), initial=torch.ones(1, len(steps), 1, 3, device=DEVICE), A=A)
    terms |= dict(x=torch.zeros(1, 1, len(steps), 1, device=DEVICE), c=terms["b"], delta=steps.view(1, 1, -1))
    y, _, _ = run(terms)
    exact = 3 * (-steps.double()).exp()
    seen = steps < 87  # smaller decays are no normal numbers
    assert (y.flatten().double() / exact - 1)[seen].abs().max() <= 1e-5  # a step of 80 is known to 5e-6 only
    near_zero = steps < 1
    assert (y.flatten().double() / exact - 1)[near_zero].abs().max() <= 5e-7
    assert y.flatten()[steps == 0].unique().item() == 3.0 and not y.flatten()[steps > 88].any()


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_nan_shows(name):
    terms = draw(2, 20, 6, 1, 5)
    at = (0,) * (2 if name == "A" else 3)
    terms[name][at] = torch.nan
    y, _, kept = run(terms, retention=True)
    assert y[0, :, 0].isnan().any()
    assert y[1].isfinite().all() == (name != "A")
    assert kept[0].isnan().any() == (name in ("delta", "A"))


@needs_kernels
def test_how_the_work_is_cut_changes_no_value(monkeypatch):
    terms = leaves_of(draw(1, 70, 36, 2, 16))
    whole = run(terms, retention=True)
    grads = gradients(whole, terms.values())
    for chunks, processors, joined in ((1, 0, False), (5, 10**6, False), (5, 10**6, True)):
        cut(monkeypatch, chunks, processors, joined)
        plan = fused._pass(terms["x"], terms["b"], None, False).plan
        assert plan.chunks == chunks and plan.cd == (1 if processors else 4)
        parts = run(terms, retention=True)
        for a, b in zip((*whole, *grads), (*parts, *gradients(parts, terms.values()))):
            near(b, a.double(), 2e-6)
    half = {n: t[:, :15] if n in ("x", "b", "c", "delta") else t for n, t in terms.items()}
    rest = {n: t[:, 15:] if n in ("x", "b", "c", "delta") else t for n, t in terms.items()}
    first = run(half)
    second = run({**rest, "initial": first[1]})
    torch.testing.assert_close(torch.cat([first[0], second[0]], dim=1), whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second[1], whole[1], rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize(
    "shape, chunks, factor",
    [
        pytest.param((1, 1, 3, 1, 16), 1, 1.0, id="one token"),
        pytest.param((2, 50, 70, 2, 5), 1, 1.0, id="one chunk"),
        pytest.param((2, 50, 70, 2, 5), 3, 1.0, id="three chunks"),
        pytest.param((2, 50, 70, 2, 5), 3, 0.0, id="no decay"),
        pytest.param((2, 50, 70, 2, 5), 3, 1e4, id="underflow"),
    ],
)
def test_one_launch_gives_the_bits_of_several(shape, chunks, factor, monkeypatch):
    terms = draw(*shape)
    terms["A"] *= factor
    leaves_of(terms)
    runs = []
    for joined in (False, True):
        cut(monkeypatch, chunks, 10**6, joined)  # several blocks of channels
        run_of = fused._pass(terms["x"], terms["b"], 1, False)
        assert run_of.back.launches.counted == joined
        assert run_of.launches.counted == (joined and run_of.plan.chunks > 1)
        out = run(terms, retention=True)
        runs.append((*out, *gradients(out, terms.values())))
    assert all(map(torch.equal, *runs))


@needs_kernels
def test_one_launch_counts_in_memory_of_its_own_where_a_graph_records_it(kernels, monkeypatch):
    terms = leaves_of(draw(1, 75, 140, 1, 16))
    once = run(terms)
    exact = (*once, *gradients(once, terms.values()))
    if DEVICE == "cpu":
        counted = kernels.counted
        monkeypatch.setattr(kernels, "recording", True)
        again = run(terms)
        assert all(map(torch.equal, (*exact[:2], *exact[3:]), (*again[:2], *gradients(again, terms.values()))))
        assert kernels.counted == counted > 0
        return
    monkeypatch.setattr(nvrtc, "_room", lambda index, stream: pytest.fail("the stream's memory"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        leaves = {name: term.detach().requires_grad_() for name, term in terms.items()}  # of this stream
        recorded = run(leaves)
        found = (*recorded[:2], *gradients(recorded, leaves.values()))
    for _ in range(2):
        graph.replay()
        assert all(map(torch.equal, (*exact[:2], *exact[3:]), found))


@needs_kernels
def test_two_runs_give_the_same_bits():
    terms = leaves_of(draw(2, 20, 12, 1, 16))
    runs = []
    for _ in range(2):
        out = run(terms, retention=True)
        runs.append((*out, *gradients(out, terms.values())))
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@needs_kernels
def test_one_output_alone():
    """The gradient of what is not asked for is none, not zeros that a kernel would have to read."""
    terms = leaves_of(draw(1, 20, 6, 1, 5))
    inputs = [terms[n] for n in NAMES]
    for i in (0, 1):
        ours = torch.autograd.grad(run(terms)[i].sum(), inputs, materialize_grads=True)
        slow = torch.autograd.grad(definition(terms)[i].sum(), inputs, materialize_grads=True)
        for a, b in zip(ours, slow):
            near(a, b.double())


@needs_kernels
def test_gradients_of_gradients_are_refused():
    terms = leaves_of(draw(1, 20, 6, 1, 5))
    (grad,) = torch.autograd.grad(run(terms)[0].square().sum(), terms["x"], create_graph=True)
    (alone,) = torch.autograd.grad(run(terms)[0].square().sum(), terms["x"])
    assert torch.equal(grad, alone)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@needs_kernels
@pytest.mark.parametrize("length", [0, 20])
def test_no_initial_state_is_zero(length):
    """Neither read nor given a gradient."""
    terms = draw(2, length, 6, 1, 5)
    terms["initial"].zero_()
    for absent in ({**terms, "initial": None}, leaves_of({n: t for n, t in terms.items() if n != "initial"})):
        given = {**absent, "initial": terms["initial"]}
        out, exact = (run({"initial": None, **t}, retention=True) for t in (absent, given))
        assert all(map(torch.equal, out, exact))
    leaves = [terms[n] for n in NAMES if n != "initial"]
    assert all(map(torch.equal, gradients(out, leaves), gradients(exact, leaves)))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("processors", [1, 10, 132])
def test_every_step_of_every_channel_has_one_program(processors, backward, monkeypatch):
    monkeypatch.undo()
    for batch, length, heads, groups, state in itertools.product(
        (1, 7), (1, 100, 5000), (14, 1536), (1, 2), (1, 5, 16, 64, 300, 512)
    ):
        plan = fused._plan(batch, length, heads, groups, state, backward, processors)
        share, wide = heads // groups, plan.cd * 32 // plan.ln * plan.warps
        assert plan.blocks * wide >= share > (plan.blocks - 1) * wide
        assert plan.chunks * plan.tiles >= plan.all_tiles > (plan.chunks - 1) * plan.tiles
        assert plan.tiles * fused.TILE >= length or plan.tiles >= fused.LEAST
        assert plan.states >= state and plan.cd * plan.sn <= 16 and plan.ln <= 32
        assert plan.programs == batch * groups * plan.blocks * plan.chunks
        assert fused._shared(backward, plan.cd, plan.sn, plan.ln, plan.warps) <= 227 * 2**10  # an H100's


def test_single_texts_are_cut_along_their_length_and_many_are_not(monkeypatch):
    monkeypatch.undo()
    for backward in (False, True):
        assert fused._plan(1, 8192, 5120, 1, 16, backward, 132).chunks > 4
        assert fused._plan(64, 256, 1536, 1, 16, backward, 132).chunks == 1
        assert fused._fits(fused._plan(1, 1024, 1536, 1, 16, backward, 132), backward, 132)
        assert not fused._fits(fused._plan(64, 256, 1536, 1, 16, backward, 132), backward, 132)
    assert fused._plan(1, 1024, 1536, 1, 16, False, 132).cd < fused._plan(1, 8192, 5120, 1, 16, False, 132).cd


def test_other_cases_stay_away(monkeypatch):
    t = {name: value.cpu() for name, value in draw().items()}
    assert not fused.applicable(*(t[n] for n in NAMES))
    assert fused.why_not("cpu") == "they run on GPUs only"
    if DEVICE == "cuda":
        on_gpu = draw()
        assert fused.applicable(*(on_gpu[n] for n in NAMES))
        for change in (
            {n: v.double() for n, v in on_gpu.items()},
            {"x": on_gpu["x"].expand(-1, -1, -1, 3), "initial": on_gpu["initial"].expand(-1, -1, 3, -1)},
            {"A": t["A"]},
            {"A": on_gpu["A"][:, :1]},
        ):
            assert not fused.applicable(*({**on_gpu, **change}[n] for n in NAMES))
    monkeypatch.setenv(native.SWITCH, "0")
    assert not fused.available() and fused.why_not() == "SSMSCOPE_NATIVE=0"


def test_without_the_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert fused.kernels.look() == "CUDA's compiler for kernels cannot be loaded: torch is not built for CUDA"
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    assert "libnvrtc.so.99 not found" in fused.kernels.look()


def test_what_is_compiled_is_kept_and_a_damaged_file_is_not_used(tmp_path, monkeypatch):
    made = []

    def compiled(compiler, text, name, options):
        made.append(options)
        return b"code %d" % len(made)

    class Compiler:
        nvrtcVersion = staticmethod(lambda major, minor: 0)

    monkeypatch.setattr(nvrtc, "_compile", compiled)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(building, "cache_directory", lambda: tmp_path)
    program = nvrtc.Program(fused.kernels.sources, "a scan", lambda one: None)
    code = [program.compiled(Compiler(), defines, 0) for defines in (("N=1",), ("N=1",), ("N=2",))]
    assert code == [b"code 1", b"code 1", b"code 2"]
    assert made[0] == ("--gpu-architecture=sm_90", "--std=c++17", "-DN=1")
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert program.compiled(Compiler(), ("N=1",), 0) == b"code 3"
    monkeypatch.setattr(building, "cache_directory", lambda: None)
    assert program.compiled(Compiler(), ("N=1",), 0) == b"code 4"


@pytest.mark.parametrize("fails", [False, True])
def test_the_kernels_of_a_pass_are_compiled_side_by_side_and_once(fails, monkeypatch):
    program, meeting, made = nvrtc.Program([Path("none.cu")], "nothing", lambda one: None), Barrier(3, timeout=60), []

    def compiled(compiler, defines, index):
        meeting.wait()  # that goes on with the third only
        made.append(defines)
        if fails and defines == ("B",):
            raise RuntimeError("no such instruction")
        return defines[0].encode()

    monkeypatch.setattr(program, "compiled", compiled)
    wanted = [("A",), ("B",), ("C",), ("A",)]
    if fails:
        with pytest.raises(RuntimeError, match="no such instruction"):
            program._compile_together(None, wanted, 0)
        return
    for _ in range(2):
        program._compile_together(None, wanted, 0)
    assert sorted(made) == [("A",), ("B",), ("C",)]
    assert program._codes == {((name,), 0): name.encode() for name in "ABC"}


DRIVER = """
#include <unistd.h>
static int calls, refused;
static long seen[1000][6];
extern "C" int cuLaunchKernelEx(const int *config, void *function, void **params, void **extra) {
    if (extra || refused-- > 0) return extra ? 1 : 201;
    usleep(100);
    const long *terms = (const long *) params[0];
    long *row = seen[__sync_fetch_and_add(&calls, 1)];
    row[0] = config[0], row[1] = (long) function;
    for (int i = 0; i < 4; i++) row[2 + i] = terms[i];
    return 0;
}
extern "C" int cuCtxSetCurrent(void *context) { return context != (void *) 77; }
extern "C" void refuse(int times) { refused = times; }
extern "C" int found(long *rows) {
    for (int i = 0; i < 6 * calls; i++) rows[i] = seen[0][i];
    int count = calls;
    calls = 0;
    return count;
}
"""


@pytest.mark.skipif(not emulation.COMPILER, reason="no C++ compiler")
def test_the_driver_is_handed_each_call_s_own_terms_also_of_threads(tmp_path, monkeypatch):
    """By a driver that notes what it is handed, and only after a while; once it has lost the context."""
    made = tmp_path / "driver.so"
    compile_to = [str(emulation.COMPILER), "-w", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(made)]
    subprocess.run(compile_to, input=DRIVER, text=True, check=True)
    driver, program = ctypes.CDLL(str(made)), nvrtc.Program([Path("none.cu")], "nothing", lambda one: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    monkeypatch.setattr(program, "loaded", lambda: (None, driver))
    monkeypatch.setattr(nvrtc.driver, "library", lambda: driver)
    addresses = {"A": 2**40 + 1, "B": 2**40 + 2}
    monkeypatch.setattr(program, "compiled", lambda compiler, defines, index: b"code")
    program._function = lambda defines, shared, index: (addresses[defines[0]], ctypes.c_void_p(77))
    kernels = [nvrtc.Launch((name,), blocks, 32, 0) for name, blocks in (("A", 3), ("B", 4))]
    how = struct.Struct("=q"), struct.pack("=q", 11)
    terms, gpu = [2**50 + i for i in range(200)], torch.device("cuda", 0)

    def seen() -> list[tuple[int, ...]]:
        rows = (ctypes.c_long * 6000)()
        return sorted(tuple(rows[6 * i : 6 * i + 6]) for i in range(driver.found(rows)))

    work = nvrtc.Launches(kernels, *how, places=8)
    driver.refuse(1)
    program.launch(work, [-1], gpu)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda term: program.launch(work, [term], gpu), terms))
    each = [(launch.blocks, addresses[launch.defines[0]]) for launch in kernels]
    assert seen() == sorted((*one, term, 0, 0, 11) for one in each for term in (-1, *terms))
    driver.refuse(2)
    with pytest.raises(RuntimeError, match="CUDA's driver gave error 201"):
        program.launch(work, [0], gpu)
    room, held = torch.zeros(8, dtype=torch.int32), torch.ones(nvrtc.MARKS + 5, dtype=torch.int32)
    monkeypatch.setattr(nvrtc, "_room", lambda index, stream: room)
    monkeypatch.setattr(nvrtc.torch, "empty", lambda size, **how: held[:size])
    work = nvrtc.Launches(kernels[:1], *how, places=16, scratch=5)
    program.launch(work, [7], gpu)
    assert seen() == [(*each[0], 7, 0, held.data_ptr(), 0)] and held.all()  # behind it the driver would find 11
    at, own = room.data_ptr(), held.data_ptr()
    work = nvrtc.Launches(kernels[:1], *how, places=8, scratch=5, counted=True)
    for recorded, expected in ((False, (at + 4 * nvrtc.MARKS, at)), (True, (own + 4 * nvrtc.MARKS, own))):
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: recorded, raising=False)  # noqa: B023
        program.launch(work, [8], gpu)
        assert seen() == [(*each[0], 8, *expected, 11)]
    assert not held[: nvrtc.MARKS].any() and held[nvrtc.MARKS :].all()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: pytest.fail("never recorded"))
    program.launch(work, [9], gpu)
    assert seen() == [(*each[0], 9, at + 4 * nvrtc.MARKS, at, 11)]


def test_the_structure_of_the_terms_is_the_source_s():
    """27 addresses and strides, 12 more for gradients, 2 of scratch, 4 places in it, and 8 sizes."""
    size = 45 * ctypes.sizeof(ctypes.c_int64) + 8 * ctypes.sizeof(ctypes.c_int32)
    x, b = torch.ones(1, 100, 8, 1), torch.ones(1, 100, 1, 16)
    passes = [fused._pass(x, b, what, False).launches for what in (0, 1, None)]
    assert {len(work.structure()) for work in passes} == {size} and {work.places for work in passes} == {39 * 8}


@pytest.mark.parametrize("sizes", [(), (3,), (2, 5, 1), (2, 0, 3), (4, 1, 6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_kernels_write_is_made_as_torch_makes_it(sizes, dtype):
    like = torch.ones(2, device=DEVICE)
    made, usual = making.maker(like)(*making.contiguous(*sizes), dtype), torch.empty(sizes, dtype=dtype, device=DEVICE)
    for what in ("shape", "dtype", "device", "layout", "requires_grad"):
        assert getattr(made, what) == getattr(usual, what)
    assert made.stride() == usual.stride() and type(made) is torch.Tensor
    other = torch.ones(2, device="meta")  # where torch's shortcut does not lead
    assert making.maker(other)(*making.contiguous(*sizes), dtype).device.type == "meta"
