"""The C kernel of the scan against the definition in float64, and how it comes and stays away."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import pytest
import scan_checks
import torch
from scan_checks import NAMES, ScanChecks, gradients, leaves_of
from warm import TORCH

from ssmscope.scans import building, diagonal, native

needs_kernel = pytest.mark.skipif(not native.available(), reason=f"no C kernel here: {native.why_not()}")
draw = partial(scan_checks.draw, device="cpu")


def run(terms, *, expected=False, retention=False):
    return diagonal.scan(*(terms[n] for n in NAMES), None, expected=expected, retention=retention)


@pytest.fixture
def kernel_only(monkeypatch):
    """The torch path fails the test."""
    monkeypatch.setattr(diagonal, "_forward", lambda *_: pytest.fail("the torch path ran"))


SHAPES = [  # batch, length, heads, groups, state
    (1, 0, 5, 1, 4),
    (2, 1, 16, 1, 16),
    (1, 17, 64, 1, 3),
    (3, 100, 7, 1, 16),
    (1, 100, 150, 1, 4),
    (2, 33, 65, 1, 33),
    (1, 64, 1, 1, 1),
    (2, 100, 80, 1, 1),
    (1, 32, 48, 1, 64),
]


@needs_kernel
@pytest.mark.usefixtures("kernel_only")
class TestScan(ScanChecks):
    terms = dict(length=50, heads=70, state=16, device="cpu")
    run = staticmethod(run)

    @pytest.mark.parametrize("expected", [False, True], ids=["exp", "expected"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_values_and_gradients(self, shape, expected):
        self.are_those_of_the_definition(draw(*shape), expected)

    def test_it_is_what_ssm_scan_runs(self):
        self.is_what_ssm_scan_runs(draw(2, 30, 12, 1, 16), False)


@needs_kernel
def test_the_decay_is_exp(kernel_only):
    steps = torch.cat([torch.linspace(0, 79.9, 4000), torch.tensor([0.0, 1e-9, 80.0, 100.0, 1e30, 3e38])])
    one = torch.ones(1, 1, 1, 1)
    terms = dict(x=0 * one, b=one, c=one, A=-torch.ones(1, 1))

    def decays(steps, sign=1.0):
        count = len(steps)
        y, _, _ = run(
            {
                "x": torch.zeros(1, 1, count, 1),
                "b": one,
                "c": one,
                "initial": torch.ones(1, count, 1, 1),
                "delta": steps.view(1, 1, -1),
                "A": sign * terms["A"].expand(count, 1),
            }
        )
        return y.flatten().double()

    exact = (-steps.double()).clamp(min=-80).exp()
    allowed = 2e-7 + 2**-24 * steps.double().clamp(max=80)  # as if A were rounded once more
    assert ((decays(steps) / exact - 1).abs() <= allowed).all()
    assert decays(torch.zeros(1)).item() == 1.0
    growing = torch.linspace(0, 88, 1000)  # a positive A, which training may reach
    assert (decays(growing, -1.0) / growing.double().exp() - 1).abs().max() <= 2e-7
    assert (decays(torch.tensor([89.0, 1e9]), -1.0) == torch.inf).all()


@needs_kernel
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(name, value, kernel_only):
    terms = draw(2, 40, 20, 1, 16)
    terms["b"], terms["c"] = terms["b"].abs() + 0.1, terms["c"].abs() + 0.1
    at = (0,) * (2 if name == "A" else 3)
    terms[name][at] = value
    y, final, kept = run(terms, retention=True)
    sign = -1 if name == "A" and value == torch.inf else 1
    if sign * value == torch.inf and name in ("delta", "A"):  # a decay of 0 and a decay of infinity
        return
    assert not y[0].isfinite().all()
    assert y[1].isfinite().all() == (name != "A")
    if name in ("delta", "A"):
        assert not kept[0].isfinite().all()


@needs_kernel
def test_the_number_of_threads_changes_nothing(kernel_only):
    terms = leaves_of(draw(3, 100, 300, 1, 16))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = run(terms, retention=True)
            results.append([*out, *gradients(out, terms.values())])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert torch.equal(a, b)


def test_other_cases_stay_with_torch(monkeypatch):
    monkeypatch.setattr(native, "scan", lambda *_, **__: pytest.fail("the C kernel ran"))
    t = draw()
    run({name: value.double() for name, value in t.items()})
    run({**t, "x": t["x"].expand(-1, -1, -1, 3), "initial": t["initial"].expand(-1, -1, 3, -1)})  # width 3
    run({**t, "b": t["b"].expand(-1, -1, 2, -1), "c": t["c"].expand(-1, -1, 2, -1)})  # two groups
    log_a = t["delta"][..., None] * t["A"]
    diagonal.scan(t["x"], t["b"], t["c"], t["initial"], None, None, log_a, expected=False, retention=False)
    monkeypatch.setenv(native.SWITCH, "0")
    assert not native.available() and native.why_not() == "SSMSCOPE_NATIVE=0"
    run(t)


# What a fresh process does: one scan, and a line about the kernel.
PROBE = """
import torch
from ssmscope.scans import diagonal, native
one = torch.ones(1, 3, 1, 1)
h = torch.zeros(1, 1, 1, 1)
y, _, _ = diagonal.scan(one, one, one, h, one[..., 0], -one[0, 0], None, expected=False, retention=False)
torch.testing.assert_close(y[0, 1], 1 + torch.tensor([[-1.0]]).exp())
print(native.why_not())
"""


def probe(cache: Path, **environment: str) -> Callable[[], str]:
    """Start that process; the function waits for its end and gives what it printed."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("CC", native.SWITCH)}
    out, err = TemporaryFile("w+"), TemporaryFile("w+")
    given = {**inherited, "XDG_CACHE_HOME": str(cache), **environment}
    process = TORCH.start(PROBE, env=given, stdout=out, stderr=err)

    def said() -> str:
        status = process.wait()
        with out, err:
            out.seek(0), err.seek(0)
            printed, complaint = out.read(), err.read()
        assert status == 0, complaint
        assert complaint == ""
        return printed.strip()

    return said


def test_it_stays_away_silently(tmp_path):
    off, failing = probe(tmp_path, SSMSCOPE_NATIVE="0"), probe(tmp_path, CC="/bin/false")
    assert off() == "SSMSCOPE_NATIVE=0"
    assert failing() == "/bin/false could not compile the scan"
    assert not list(tmp_path.rglob("*.so"))


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O9")
    assert native.kernels.look() == "no C compiler: no-such-compiler not found"


def test_a_wheel_brings_kernels_for_levels_of_processors(tmp_path, monkeypatch):
    v4, v3 = (building.file_of(native.SOURCE, "scan", level) for level in building.LEVELS)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(building, "BROUGHT", tmp_path)
    for file in (v4, v3, building.file_of(building.HEADERS[0], "scan", "x86-64-v3")):  # the last one of another source
        (tmp_path / file).touch()

    def found(flags):
        monkeypatch.setattr(building, "_flags", lambda: flags)
        return [file.name for file in building.brought(native.SOURCE, "scan")]

    older, newer = building.LEVELS["x86-64-v3"], building.LEVELS["x86-64-v4"]
    assert found(older | newer) == [v4, v3] and found(older | {"avx512f"}) == [v3]
    assert found(newer) == [] and found(older - {"fma"}) == []
    monkeypatch.setenv("CC", "cc")
    assert found(older | newer) == []


def test_a_wheel_brings_every_c_file():
    package = native.SOURCE.parents[1]
    hook = package.parent / "build_kernels.py"
    if not hook.exists():
        pytest.skip("this is no checkout")
    named = hook.read_text("utf-8")
    assert all(f'"{file.relative_to(package).as_posix()}"' in named for file in package.rglob("*.c"))


@pytest.fixture
def compiled_once(monkeypatch):
    """A compiler that takes no time: it gives the kernels that there are."""
    native.available()
    compiler = building._compiler()
    directory = building.cache_directory()
    file = f"{native.kernels.file}-{building._key(compiler, native.SOURCE)}.so"
    if directory is not None and (directory / file).exists():
        made = directory / file

        def copied(compiler, source, name, to, choices=()):
            assert source == native.SOURCE
            return Path(shutil.copy(made, to))

        monkeypatch.setattr(building, "_compile", copied)


@needs_kernel
@pytest.mark.usefixtures("compiled_once")
def test_the_kernels_of_a_wheel_need_no_compiler(tmp_path, monkeypatch):
    wheel, cache = tmp_path / "wheel", tmp_path / "cache"
    for directory in (wheel, cache):
        directory.mkdir()
    monkeypatch.setattr(building, "BROUGHT", wheel)
    monkeypatch.setattr(building, "_flags", lambda: building.LEVELS["x86-64-v3"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    brought = wheel / building.file_of(native.SOURCE, "scan", "x86-64-v3")
    building._compile(building._compiler(), native.SOURCE, "scan", brought)
    monkeypatch.setattr("shutil.which", lambda command: None)
    monkeypatch.delenv("CC", raising=False)
    assert not isinstance(native.kernels.look(), str)
    monkeypatch.setattr(building, "BROUGHT", cache)
    (cache / brought.name).write_bytes(b"damaged")
    assert native.kernels.look() == "no C compiler: cc, gcc, clang not found"
    assert not (cache / "ssmscope").exists()


@needs_kernel
@pytest.mark.usefixtures("compiled_once")
def test_several_processes_compile_at_once_and_leave_one_file(tmp_path, monkeypatch):
    for said in [probe(tmp_path) for _ in range(3)]:
        assert said() == "None"
    (built,) = (tmp_path / "ssmscope").iterdir()
    assert built.suffix == ".so" and not built.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    damaged = built.with_suffix(".copy")
    damaged.write_bytes(b"damaged")
    damaged.chmod(0o700)
    damaged.replace(built)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not isinstance(native.kernels.look(), str)
    assert built.stat().st_size > 1000


@needs_kernel
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("cache", ["others may write", "a link", "a file"])
def test_a_cache_that_is_not_ours_alone_is_not_used(tmp_path, cache, monkeypatch):
    directory, elsewhere = tmp_path / "ssmscope", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if cache == "others may write":
        directory.mkdir()
        directory.chmod(0o777)
    elif cache == "a link":
        directory.symlink_to(elsewhere)
    else:
        directory.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not isinstance(native.kernels.look(), str)
    assert not list(tmp_path.rglob("*.so"))


def test_a_relative_cache_is_ignored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert building.cache_directory() == tmp_path / "home" / ".cache" / "ssmscope"
    assert not Path("relative").exists()


def test_the_switch_is_read_whatever_the_environment_keeps(monkeypatch):
    for kept in (building._SETTINGS, None):
        monkeypatch.setattr(building, "_SETTINGS", kept)
        for value, off in (("0", True), ("1", False), ("", False)):
            monkeypatch.setenv(building.SWITCH, value)
            assert building.switched_off() is off
        monkeypatch.delenv(building.SWITCH)
        assert not building.switched_off()
