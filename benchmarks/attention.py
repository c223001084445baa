"""The implicit attention matrices of a layer on a CPU: what they cost, against a matrix product of as many
multiply-adds and against the vectorised way, every pair (t, s) by itself.

    python benchmarks/attention.py                  # about two minutes
    python benchmarks/attention.py --full           # the vectorised way at every length, an hour
    python benchmarks/attention.py --lengths 256 1024 --skip-pooled --skip-wide

The layers have mamba-130m's shape (1536 channels, 16 states) and mamba2-130m's (24 heads of width 64, 128 states).
Numbers of the vectorised way that are marked ~ are extrapolated by the square of the length.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import time
from collections.abc import Callable

import torch
from timing import THREADS, machine, relative, seconds
from torch import Tensor

from ssmscope import ssm
from ssmscope.matrices import native

LENGTHS = (256, 512, 1024, 2048, 4096)
VECTORISED = 256  # the longest that the vectorised way is measured at unless asked for more
PRECISE = 1024  # the longest that is compared with float64
CHANNELS, STATES = 1536, 16
PAIRS = 2**24  # numbers that the vectorised way holds at once


def mamba(length: int) -> ssm.Recurrence:
    """Steps and decays as at initialisation: Δ from 0.001 to 0.1 and A from −1 to −16."""
    g = torch.Generator().manual_seed(length)
    low, high = torch.tensor([1e-3, 1e-1]).log()
    delta = (low + (high - low) * torch.rand(1, length, CHANNELS, generator=g)).exp()
    b, c = (torch.randn(1, length, 1, STATES, generator=g) for _ in range(2))
    A = -torch.arange(1.0, STATES + 1).expand(CHANNELS, STATES).contiguous()
    x = torch.zeros(1, 1, 1, 1).expand(1, length, CHANNELS, 1)  # has no part in a matrix
    return ssm.Recurrence(x, b, c, delta=delta, A=A, D=torch.ones(CHANNELS))


def mamba2(length: int) -> ssm.Recurrence:
    g = torch.Generator().manual_seed(length)
    b, c = (torch.randn(1, length, 1, 128, generator=g) for _ in range(2))
    delta = 0.1 * torch.rand(1, length, 24, generator=g)
    A = -(1 + 15 * torch.rand(24, 1, generator=g))
    x = torch.zeros(1, 1, 1, 1).expand(1, length, 24, 64)
    return ssm.Recurrence(x, b, c, delta=delta, A=A, D=torch.ones(24))


def surroundings(r: ssm.Recurrence) -> dict[str, Tensor]:
    """A gate, and a convolution's four coefficients times an activation's slopes."""
    _, length, heads, width, _ = r.shape
    g = torch.Generator().manual_seed(1)
    left = torch.randn(1, length, heads, width, generator=g)
    return {"left": left, "taps": torch.randn(1, length, 4, heads, width, generator=g)}


def vectorised(r: ssm.Recurrence) -> Tensor:
    """c_t exp(A Σ_{s<r≤t} Δ_r) b_s Δ_s of all pairs and channels, some rows at a time; the mean over channels."""
    assert r.delta is not None and r.A is not None
    _, length, heads, _, state = r.shape
    sums = r.delta[0].cumsum(0)
    out = r.b.new_zeros(length, length)
    for t in range(length):
        step = max(1, PAIRS // (heads * state))
        for first in range(0, t + 1, step):
            s = slice(first, min(first + step, t + 1))
            decay = ((sums[t] - sums[s])[..., None] * r.A).exp_()
            out[t, s] = torch.einsum("shn,n,sn,sh->s", decay, r.c[0, t, 0], r.b[0, s, 0], r.delta[0, s]) / heads
    return out


def product(length: int) -> Callable[[], Tensor]:
    """A matrix product of as many multiply-adds as the matrix has below its diagonal."""
    a, b = torch.randn(length, CHANNELS * STATES // 2), torch.randn(CHANNELS * STATES // 2, length)
    return lambda: a @ b


def peak(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """MiB that `run` takes at most beside its result, and the result; NaN where the system does not say."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again unseen
    try:
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before = _status("VmRSS")
        result = run()
        return max(0.0, (_status("VmHWM") - before) / 1024 - result.numel() * result.element_size() / 2**20), result
    except OSError:
        return float("nan"), run()


def _status(name: str) -> int:
    """In kB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


def whole(lengths: list[int], repeats: int, full: bool) -> None:
    print("\nMean over 1536 channels of 16 states, whole")
    print(
        f"{'L':>6} {'ours (s)':>10} {'vectorised (s)':>15} {'ratio':>8} {'product (s)':>12} {'ours/it':>8} "
        f"{'error':>9} {'rel. norm':>10} {'MiB more':>9}"
    )
    known = 0.0  # seconds per pair of the longest that was measured
    for length in sorted(lengths):
        r = mamba(length)
        make, multiply = functools.partial(ssm.attention, r), product(length)
        taken = [(seconds(make, 1), seconds(multiply, 1)) for _ in range(repeats)]
        ours, theirs = (min(each) for each in zip(*taken))
        extra, matrix = peak(make)
        mark = "~"
        if full or length <= VECTORISED or not known:
            start = time.perf_counter()
            slow = vectorised(r)
            known, mark = (time.perf_counter() - start) / length**2, ""
            assert relative(matrix[0, 0], slow) < 1e-4
        errors = "        -          -"
        if length <= PRECISE:
            exact = ssm.attention(r.to(torch.float64))
            largest = ((matrix - exact).abs().max() / exact.abs().max()).item()
            errors = f"{largest:>9.1e} {relative(matrix.double(), exact):>10.1e}"
        slow_s = known * length**2
        print(
            f"{length:>6} {ours:>10.3f} {mark + format(slow_s, '.1f'):>15} {slow_s / ours:>7.0f}x {theirs:>12.3f} "
            f"{ours / theirs:>8.2f} {errors} {extra:>9.0f}",
            flush=True,
        )


def line(what: str, make: Callable[[], Tensor], repeats: int) -> None:
    extra, _ = peak(make)
    print(f"{what:<66} {seconds(make, repeats, 0):>9.3f} s {extra:>7.0f} MiB more", flush=True)


def forms(name: str, r: ssm.Recurrence, repeats: int, *, absolute_around: bool) -> None:
    length, around = r.shape[1], surroundings(r)
    print(f"\n{name}, L = {length:,}")
    line("whole", lambda: ssm.attention(r), repeats)
    line("whole with a gate and a convolution of 4", lambda: ssm.attention(r, skip=True, **around), repeats)
    line("whole, of absolute values", lambda: ssm.attention(r, absolute=True), repeats)
    if absolute_around:
        both = {"absolute": True, "skip": True, **around}
        line("whole, of absolute values, with both", lambda: ssm.attention(r, **both), repeats)
    line("the last row", lambda: ssm.attention(r, rows=[length - 1]), repeats)
    line("the last row with both", lambda: ssm.attention(r, rows=[length - 1], skip=True, **around), repeats)


def cells(name: str, r: ssm.Recurrence, repeats: int, count: int = 512) -> None:
    length = r.shape[1]
    print(f"\n{name}, L = {length:,}")
    line("the last row", lambda: ssm.attention(r, rows=[length - 1]), repeats)
    line(f"{count} x {count} cells", lambda: ssm.pooled_attention(r, count), repeats)
    around = surroundings(r)
    make = lambda: ssm.pooled_attention(r, count, skip=True, **around)  # noqa: E731
    line(f"{count} x {count} cells with a gate and a convolution of 4", make, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--full", action="store_true", help="measure the vectorised way at every length")
    parser.add_argument("--skip-pooled", action="store_true", help="leave out the texts of 16,384 and 65,536 tokens")
    parser.add_argument("--skip-wide", action="store_true", help="leave out Mamba-2's shape")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    print(machine())
    print(f"kernels of C: {native.why_not() or 'in use'}")
    whole(options.lengths, options.repeats, options.full)
    forms("Mamba-1's shape", mamba(1024), options.repeats, absolute_around=True)
    if not options.skip_wide:
        forms("Mamba-2's shape", mamba2(1024), options.repeats, absolute_around=False)
    for length in () if options.skip_pooled else (16384, 65536):
        cells("Mamba-1's shape", mamba(length), 1)
        if not options.skip_wide:
            cells("Mamba-2's shape", mamba2(length), 1)


if __name__ == "__main__":
    main()
