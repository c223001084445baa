"""Mamba-1's scan on a GPU: ours, mamba_ssm's CUDA kernels where they are installed, and what the card allows at best.

    python benchmarks/scan_cuda.py                                    # about two minutes on an H200
    python benchmarks/scan_cuda.py --bandwidth 3.0 --clock 1.98       # limits of an H100
    python benchmarks/scan_cuda.py --shapes 1x1024x1536x16 --skip-layers

First the scan itself, each shape in a process of its own, so that none meets what another left: milliseconds as called
one after the other, ours and theirs in turn; `here` the same where torch computes gradients in the calling thread
(`torch.autograd.set_multithreading_enabled(False)`), as the machine may take longer to wake its other one than short
kernels take; `of 24` those of one scan of 24 whose gradients are asked for at once, as a model's are, which wakes that
thread once for all; `kernels` those of the kernels alone, recorded as a CUDA graph; the largest error of outputs or
gradients relative to float64 (by torch); the most memory held beside the terms. mamba_ssm takes channels before steps
and gives no final state, ours is given what a convolution leaves, steps before channels. The limit is the larger of two
times: to read and write each input, output and gradient once, and to take each decay's exponential once a pass. Then
one Mamba layer, whose projections have width 1, against transformers without the kernels of mamba_ssm.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import torch
from timing import mamba_130m, relative, seconds

import ssmscope.models  # noqa: F401  (makes the mixers readable)
from ssmscope import ssm
from ssmscope.mixers import fast_scan, mixers
from ssmscope.scans import fused

SHAPES = ("8x2048x5120x16", "1x8192x5120x16", "1x1024x1536x16", "64x256x1536x16", "1x65536x1536x16")
LAYERS = ("256x1025x64x64", "8x1024x1536x16")
"""Batch x length x channels x states."""
STACK = 24
TERMS = ("x", "b", "c", "delta", "A")
Tensors = Sequence[torch.Tensor]


def sizes(shape: str) -> tuple[int, int, int, int]:
    batch, length, channels, states = map(int, shape.split("x"))
    return batch, length, channels, states


def synchronised(run: Callable[[], object], calls: int = 1) -> Callable[[], None]:
    def whole() -> None:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()

    return whole


def recurrence(batch: int, length: int, channels: int, states: int, device: str) -> ssm.Recurrence:
    g = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device)

    return ssm.Recurrence(
        x=normal(batch, length, channels, 1),
        b=normal(batch, length, 1, states),
        c=normal(batch, length, 1, states),
        delta=torch.nn.functional.softplus(normal(batch, length, channels) - 4),  # decays from 0.3 to 0.999
        A=-torch.arange(1, states + 1, device=device).float().expand(channels, -1).contiguous(),
    )


def ours(r: ssm.Recurrence, gradients: bool, retention: bool = False, scans: int = 1) -> Callable[[], Tensors]:
    """y of the last of so many scans of the same terms, or the gradients of the weighted sum of all of them by every
    term of each, (batch, length, …) first."""
    own = [{name: getattr(r, name).detach().requires_grad_(gradients) for name in TERMS} for _ in range(scans)]
    terms, leaves = [replace(r, **each) for each in own], [t for each in own for t in each.values()]
    weights = [_weights(r).unsqueeze(-1)] * scans

    def run() -> Tensors:
        found = [ssm.scan(scan, retention=retention).y for scan in terms]
        return torch.autograd.grad(found, leaves, weights) if gradients else found[-1:]

    return run


def mamba_ssm(r: ssm.Recurrence, gradients: bool, scans: int = 1) -> Callable[[], Tensors] | None:
    """The same by mamba_ssm, its terms (batch, …, length); None where it is not installed."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError:
        return None
    turned = [r.x.squeeze(-1), r.b.squeeze(2), r.c.squeeze(2), r.delta]
    made = [*(t.detach().transpose(1, 2).contiguous() for t in turned), r.A]
    own = [[t.detach().requires_grad_(gradients) for t in made] for _ in range(scans)]
    leaves, weights = [t for each in own for t in each], [_weights(r).transpose(1, 2).contiguous()] * scans

    def run() -> Tensors:
        found = [selective_scan_fn(x, delta, A, b, c) for x, b, c, delta, A in own]
        return torch.autograd.grad(found, leaves, weights) if gradients else found[-1:]

    return run


def _weights(r: ssm.Recurrence) -> torch.Tensor:
    steps = torch.linspace(-1, 1, r.x.shape[1], device=r.x.device, dtype=r.x.dtype)
    return steps[:, None].expand(r.x.shape[:3]).contiguous()


def alike(theirs: Tensors) -> Tensors:
    """mamba_ssm's results in our order of dimensions."""
    return [t.transpose(1, 2) if t.ndim == 3 else t for t in theirs]


def recorded(run: Callable[[], object]) -> Callable[[], object]:
    """The kernels of a run, as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def milliseconds(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Of a call of each: the median over `repeats` turns, in which each is called as often one after the other as takes
    20 ms, so that the first calls do not count for much and the machine's other work meets all alike."""
    calls = [max(10, round(0.2 / seconds(synchronised(run, 10), 1))) for run in runs]
    turns = [[seconds(synchronised(run, n), 1, 0) / n for run, n in zip(runs, calls)] for _ in range(repeats)]
    return [1e3 * statistics.median(taken) for taken in zip(*turns)]


def limit(shape: str, gradients: bool, bandwidth: float, clock: float) -> tuple[float, float]:
    """Milliseconds for the bytes at `bandwidth` TB/s, and for the exponentials at 16 a clock cycle and processor."""
    batch, length, channels, states = sizes(shape)
    wide, narrow = batch * length * channels, batch * length * states
    numbers = 3 * wide + 2 * narrow  # x, Δ, y, b, c
    if gradients:
        numbers += 5 * wide + 4 * narrow  # x, Δ, ȳ, x̄, Δ̄, b, c, b̄, c̄
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    taken = (1 + gradients) * wide * states / (16 * processors * clock * 1e9)
    return 1e3 * 4 * numbers / (bandwidth * 1e12), 1e3 * taken


def called(r: ssm.Recurrence, gradients: bool, repeats: int) -> dict[str, tuple[Callable[[], Tensors], list[float]]]:
    """What is compared, and milliseconds as called: in torch's thread, in the calling one, and of one of STACK."""
    makers: dict[str, Callable] = {
        "ours": partial(ours, r, gradients),
        "mamba_ssm": partial(mamba_ssm, r, gradients),
    }
    if not gradients:
        makers["ours with retention"] = partial(ours, r, gradients, retention=True)
    present = {name: run for name, make in makers.items() if (run := make()) is not None}
    taken = milliseconds([*present.values()], repeats)
    with torch.autograd.set_multithreading_enabled(False):
        here = milliseconds([*present.values()], repeats) if gradients else taken
    stacked = [time / STACK for time in milliseconds([makers[name](scans=STACK) for name in present], 3)]
    torch.cuda.empty_cache()
    return {name: (run, times) for (name, run), *times in zip(present.items(), taken, here, stacked)}


def scans(shape: str, repeats: int, bandwidth: float, clock: float) -> None:
    r = recurrence(*sizes(shape), "cuda")
    label = " × ".join(f"{n:,}" for n in sizes(shape))
    passes = ((False, "forward"), (True, "forward + backward"))
    runs = [called(r, gradients, repeats) for gradients, _ in passes]  # before graphs are recorded
    for (gradients, what), present in zip(passes, runs):
        exact = [t.flatten(2) if t.ndim > 3 else t for t in ours(r.to(torch.float64), gradients)()]
        torch.cuda.empty_cache()
        alone = milliseconds([recorded(run) for run, _ in present.values()], repeats)
        for (name, (run, times)), kernels in zip(present.items(), alone):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found = run() if name.startswith("ours") else alike(run())
            held = (torch.cuda.max_memory_allocated() - before) / 2**30
            error = max(relative(a.reshape(b.shape), b) for a, b in zip(found, exact, strict=True))
            numbers = f"{' '.join(f'{time:>9.3f}' for time in (*times, kernels))} {error:>11.1e} {held:>7.1f}"
            print(f"{label:<24} {what:<20} {name:<20} {numbers}", flush=True)
        by_bytes, by_exponentials = limit(shape, gradients, bandwidth, clock)
        print(f"{label:<24} {what:<20} {'limit':<20} {max(by_bytes, by_exponentials):>9.3f}", end=" ")
        print(f"(bytes {by_bytes:.3f}, exponentials {by_exponentials:.3f})", flush=True)


def layer(shape: str, repeats: int, device: str) -> None:
    """One Mamba layer through `ssm.scan` and through transformers, forward, and forward with all gradients."""
    batch, length, channels, states = sizes(shape)
    model = mamba_130m(layers=1, vocabulary=1, width=1, expand=channels, state=states).to(device)
    mixer = mixers(model)[0]
    u = torch.randn(batch, length, 1, generator=torch.Generator(device).manual_seed(1), device=device)
    weights = torch.linspace(-1, 1, length, device=device)[:, None]
    parameters = [p for p in mixer.parameters() if p.requires_grad]

    def forward_of(context: Callable):
        with torch.no_grad(), context():
            return [mixer(u)]

    def backward_of(context: Callable):
        inputs = u.clone().requires_grad_()
        with context():
            return torch.autograd.grad((mixer(inputs) * weights).mean(), [inputs, *parameters], allow_unused=True)

    for what, run in (("forward", forward_of), ("forward + backward", backward_of)):
        found, expected = run(lambda: fast_scan(model)), list[torch.Tensor]()
        fast = seconds(synchronised(lambda: run(lambda: fast_scan(model))), repeats)  # noqa: B023
        slow = seconds(synchronised(lambda: expected.extend(run(nullcontext))), 1, warm_up=0)  # noqa: B023
        pairs = zip(found, expected, strict=True)
        error = max(relative(a, b) for a, b in pairs if b is not None and b.norm() > 0)
        label = " × ".join(f"{n:,}" for n in sizes(shape))
        print(f"{label:<24} {what:<20} {1e3 * fast:>10.2f} {1e3 * slow:>12.1f} {slow / fast:>8.1f}x {error:>12.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="batch x length x channels x states")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that the card copies at, bytes both ways")
    parser.add_argument("--clock", type=float, default=1.98, help="GHz")
    parser.add_argument("--skip-layers", action="store_true", help="leave out the comparison with transformers")
    options = parser.parse_args()
    how = options.repeats, options.bandwidth, options.clock
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; benchmarks/scan.py measures on a CPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32, kernels: {fused.why_not() or 'in use'}")
    print(f"\n{'ssm.scan':<66} {'ms':>9} {'here':>9} {'of 24':>9} {'kernels':>9} {'rel. error':>11} {'GiB':>7}")
    for shape in options.shapes:
        alone = get_context("spawn").Process(target=scans, args=(shape, *how))
        alone.start()
        alone.join()
        if alone.exitcode:
            raise SystemExit(alone.exitcode)
    if options.skip_layers:
        return
    print(f"\n{'a layer':<45} {'ours (ms)':>10} {'library (ms)':>12} {'ratio':>9} {'rel. error':>12}")
    for shape in LAYERS:
        layer(shape, options.repeats, "cuda")


if __name__ == "__main__":
    main()
