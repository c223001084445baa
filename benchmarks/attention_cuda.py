"""The mean implicit attention of a Mamba-1 layer on a GPU, against the TF32 matrix product of as many multiply-adds.

    python benchmarks/attention_cuda.py                        # about a minute on an H200
    python benchmarks/attention_cuda.py --lengths 2048 --kernels # where the time goes

One layer of mamba-130m's width (1536 channels of 16 states), float32. The matrix product has L²/2 · channels · states
multiply-adds, in the faster of two shapes. Both are timed in calls one after the other, as maps of all layers are made,
and in single ones on an idle card, of which the host's part counts too. Decays are drawn three ways: `slow`, where no
state is forgotten and all the work is done; `typical`, with steps about 0.03 and decays from 0.3 to 0.999; `fast`, with
steps 20 times that. Errors are against float64, made row by row from the states of all columns, up to a length of 1024:
the largest relative to the largest entry, and the norm's.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from timing import in_a_row

from ssmscope import ssm
from ssmscope.matrices import fused

CHANNELS, STATES = 1536, 16
KINDS = {"slow": 1e-3, "typical": 1.0, "fast": 20.0}


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median by events, after two runs to warm up."""
    taken = []
    for k in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if k >= 2:
            taken.append(start.elapsed_time(end))
    return sorted(taken)[len(taken) // 2]


def terms(length: int, kind: str) -> tuple[torch.Tensor, ...]:
    """b, c (1, length, 1, states), Δ (1, length, channels), A (channels, states)."""
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    b, c = normal(1, length, 1, STATES), normal(1, length, 1, STATES)
    delta = KINDS[kind] * torch.nn.functional.softplus(normal(1, length, CHANNELS) - 4)
    A = -torch.arange(1, STATES + 1, device="cuda").float().expand(CHANNELS, -1).contiguous()
    return b, c, delta, A


def exact(b: torch.Tensor, c: torch.Tensor, delta: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """The matrix (length, length) in float64: every column's own state, (columns, channels, states), step by step."""
    b, c, delta, A = b[0, :, 0].double(), c[0, :, 0].double(), delta[0].double(), A.double()
    length, channels = delta.shape
    H = delta.new_zeros(length, channels, A.shape[1])
    out = delta.new_zeros(length, length)
    for t in range(length):
        H[:t] *= torch.exp(delta[t, :, None] * A)
        H[t] = delta[t, :, None] * b[t]
        out[t, : t + 1] = H[: t + 1].sum(1) @ c[t] / channels
    return out


def product(length: int, repeats: int) -> tuple[float, float]:
    """Milliseconds of the TF32 product, the faster of a square result and of the attention's own shape: in a row, and
    alone."""
    work = CHANNELS * STATES
    found = []
    for rows, inner, columns in ((length, work, length // 2), (2 * length, work // 8, 2 * length)):
        P, Q = torch.randn(rows, inner, device="cuda"), torch.randn(columns, inner, device="cuda")
        found.append((in_a_row(lambda: P @ Q.T), milliseconds(lambda: P @ Q.T, repeats)))  # noqa: B023
    return min(row for row, _ in found), min(alone for _, alone in found)


def measured(run: Callable[[], torch.Tensor], repeats: int) -> tuple[torch.Tensor, tuple[float, float], float]:
    """The matrix, milliseconds in a row and alone, and peak GiB on top of what was held before."""
    out = run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    taken = in_a_row(run) if repeats > 1 else float("nan"), milliseconds(run, repeats)
    return out, taken, (torch.cuda.max_memory_allocated() - held) / 2**30


def errors(ours: torch.Tensor, slow: torch.Tensor | None) -> str:
    if slow is None:
        return f"{'':>10} {'':>10}"
    difference = ours[0, 0].double() - slow
    return f"{difference.abs().max() / slow.abs().max():>10.1e} {difference.norm() / slow.norm():>10.1e}"


def compare(length: int, kind: str, repeats: int, by_torch: bool) -> None:
    drawn = terms(length, kind)
    slow = exact(*drawn) if length <= 1024 else None
    base = product(length, repeats)

    def row(how: str, run: Callable[[], torch.Tensor], repeats: int) -> None:
        out, taken, memory = measured(run, repeats)
        times = " ".join(f"{ms:>9.3f} {limit:>9.3f} {ms / limit:>7.2f}" for ms, limit in zip(taken, base))
        print(f"{length:>6} {kind:<8} {how:<8} {times} {errors(out, slow)} {memory:>8.3f}", flush=True)

    for precision in fused.PRECISIONS:
        row(precision, lambda: fused.mean(*drawn, precision=precision), repeats)  # noqa: B023
    if by_torch and hasattr(ssm, "attention"):
        b, c, delta, A = drawn
        r = ssm.Recurrence(x=delta[..., None], b=b, c=c, delta=delta.requires_grad_(), A=A)  # gradients: not fused
        row("torch", lambda: ssm.attention(r).detach(), 1)


def kernels(lengths: list[int]) -> None:
    """Microseconds of each kernel."""
    for length, kind, precision in itertools.product(lengths, KINDS, fused.PRECISIONS):
        drawn = terms(length, kind)
        for _ in range(2):
            fused.mean(*drawn, precision=precision)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            fused.mean(*drawn, precision=precision)
            torch.cuda.synchronize()
        taken = ", ".join(
            f"{e.key[:20]} {e.device_time_total:.0f}" for e in profile.key_averages() if e.device_time_total
        )
        print(f"{length:>6} {kind:<8} {precision:<8} {taken}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=[*KINDS])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--torch", action="store_true", help="also the matrix by torch alone, which takes seconds")
    parser.add_argument("--kernels", action="store_true", help="microseconds of each kernel, nothing else")
    options = parser.parse_args()
    if why := fused.why_not():
        raise SystemExit(f"the kernels cannot be used: {why}")
    torch.backends.cuda.matmul.allow_tf32 = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {CHANNELS} channels, {STATES} states")
    if options.kernels:
        kernels(options.lengths)
        return
    head = f"{'length':>6} {'decays':<8} {'by':<8} {'ms':>9} {'TF32 ms':>9} {'ratio':>7}"
    head += f" {'alone, ms':>9} {'TF32 ms':>9} {'ratio':>7}"
    print(f"{head} {'max error':>10} {'norm error':>10} {'GiB':>8}")
    for length, kind in itertools.product(options.lengths, options.kinds):
        compare(length, kind, options.repeats, options.torch)


if __name__ == "__main__":
    main()
