"""Our scan on a GPU: by Triton kernels, by torch alone, and against transformers' own slow path.

    python benchmarks/scan_cuda.py                              # about half a minute on an H200
    python benchmarks/scan_cuda.py --tile 128 256 512 --check 16 32    # how the kernels' work may be cut

First `ssm.scan` itself: milliseconds, the largest error of outputs or gradients relative to float64 (by torch), and the
most memory that was held. Then one Mamba layer, whose projections have width 1, against transformers without the
kernels of mamba_ssm: same inputs, same run, ratio of seconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from timing import mamba_130m, relative, seconds

import ssmscope.models  # noqa: F401  (makes the mixers readable)
from ssmscope import ssm
from ssmscope.mixers import fast_scan, mixers
from ssmscope.scans import fused, native

SHAPES = {"training": (256, 1025, 64, 64), "mamba-130m": (8, 1024, 1536, 16)}
"""Batch, length, channels, states."""
TERMS = ("x", "b", "c", "delta", "A")


def synchronised(run: Callable[[], object]) -> Callable[[], None]:
    def whole() -> None:
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


def forward(r: ssm.Recurrence) -> list[torch.Tensor]:
    with torch.no_grad():
        return [*ssm.scan(r, retention=True)]


def gradients(r: ssm.Recurrence) -> list[torch.Tensor]:
    leaves = {name: getattr(r, name).detach().requires_grad_() for name in TERMS}
    out = ssm.scan(replace(r, **leaves))
    weights = torch.linspace(-1, 1, out.y.shape[1], device=out.y.device, dtype=out.y.dtype)[:, None, None]
    return [*torch.autograd.grad((out.y * weights).sum() + out.state.sum(), [*leaves.values()])]


def by_torch(run: Callable[[], object]) -> Callable[[], object]:
    def switched() -> object:
        before = os.environ.get(native.SWITCH)
        os.environ[native.SWITCH] = "0"
        try:
            return run()
        finally:
            os.environ.pop(native.SWITCH) if before is None else os.environ.update({native.SWITCH: before})

    return switched


def scans(name: str, cuts: list[tuple[int, int]], repeats: int, device: str) -> None:
    r = recurrence(*SHAPES[name], device)
    for what, run in (("forward", forward), ("forward + backward", gradients)):
        exact = run(r.to(torch.float64))

        def row(how: str, work: Callable[[], list[torch.Tensor]], repeats: int) -> None:
            torch.cuda.reset_peak_memory_stats()
            error = max(relative(a, b) for a, b in zip(work(), exact, strict=True))  # noqa: B023
            held = torch.cuda.max_memory_allocated() / 2**30
            taken = 1e3 * seconds(synchronised(work), repeats)
            print(f"{name:<12} {what:<20} {how:<24} {taken:>10.2f} {error:>12.1e} {held:>10.1f}", flush=True)  # noqa: B023

        for tile, check in cuts if fused.available() else ():
            fused.TILE, fused.CHECK = tile, check
            row(f"kernels, {tile} by {check}", lambda: run(r), repeats)  # noqa: B023
        row("torch", by_torch(lambda: run(r)), 1)  # noqa: B023


def layer(name: str, repeats: int, device: str) -> None:
    """One Mamba layer through `ssm.scan` and through transformers, forward, and forward with all gradients."""
    batch, length, channels, states = SHAPES[name]
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
        print(f"{name:<12} {what:<20} {1e3 * fast:>10.2f} {1e3 * slow:>12.1f} {slow / fast:>8.1f}x {error:>12.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tile", type=int, nargs="+", default=[fused.TILE], help="states of one program")
    parser.add_argument(
        "--check", type=int, nargs="+", default=[fused.CHECK], help="steps between states that are kept"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--skip-layers", action="store_true", help="leave out the comparison with transformers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; benchmarks/scan.py measures on a CPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32, kernels: {fused.why_not() or 'in use'}")
    used = fused.TILE, fused.CHECK
    print(f"\n{'ssm.scan':<58} {'ms':>10} {'rel. error':>12} {'GiB':>10}")
    for name in SHAPES:
        scans(name, [*itertools.product(options.tile, options.check)], options.repeats, "cuda")
    fused.TILE, fused.CHECK = used
    if options.skip_layers:
        return
    print(f"\n{'a layer':<33} {'ours (ms)':>10} {'library (ms)':>12} {'ratio':>9} {'rel. error':>12}")
    for name in SHAPES:
        layer(name, options.repeats, "cuda")


if __name__ == "__main__":
    main()
