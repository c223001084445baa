"""Mamba-2's scan on a GPU in each precision, beside mamba_ssm's Triton kernels, torch alone and the card's limit.

    python benchmarks/scan_cuda_mamba2.py                    # some minutes: mamba_ssm's kernels are tuned on first use
    python benchmarks/scan_cuda_mamba2.py --shapes 1x2048x24x64x128 --bandwidth 3.0

Ours is `ssm.scan` with retention; mamba_ssm's is `mamba_chunk_scan_combined` with chunks of 256, where the package can
be imported; both from float32 terms (TF32 inside mamba_ssm's) and from x, b, c and Δ in bfloat16. Milliseconds of many
calls in a row, median of three; the largest error of outputs, or of gradients, relative to their largest value, from
float64 by torch with the terms in float32; the most memory held. The limit is the longer of two times: inputs read and
outputs written once, and products of chunks of 64 steps at the rate of 16-bit numbers, as often as the precision
multiplies.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch
from timing import in_a_row

import ssmscope.models  # noqa: F401  (makes the mixers readable)
from ssmscope import ssm
from ssmscope.scans import scalar_fused
from ssmscope.scans.building import SWITCH
from ssmscope.training.fitting import matrix_products

SHAPES = ("8x2048x80x64x128", "1x8192x80x64x128", "1x2048x24x64x128", "32x256x24x64x128")
"""Batch × length × heads × width × states, one group."""
NAMES = ("x", "b", "c", "delta")
CHUNK = 64
PRODUCTS = {"highest": 3, "high": 1, "medium": 1}  # of 16-bit numbers for one
OURS = (("highest", torch.float32), ("high", torch.float32), ("medium", torch.float32), ("medium", torch.bfloat16))


def recurrence(shape: str, device: str) -> ssm.Recurrence:
    batch, length, heads, width, states = map(int, shape.split("x"))
    g = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=g, device=device)

    return ssm.Recurrence(
        x=normal(batch, length, heads, width),
        b=normal(batch, length, 1, states),
        c=normal(batch, length, 1, states),
        delta=torch.nn.functional.softplus(normal(batch, length, heads) - 4),
        A=-(1 + 15 * torch.rand(heads, 1, generator=g, device=device)),  # decays from 0.5 to 0.999
    )


def limits(r: ssm.Recurrence, backward: bool, products: int, bandwidth: float, rate: float) -> float:
    """Milliseconds that the card needs at least."""
    batch, length, heads, width, states = r.shape
    steps = batch * length * heads
    passes = 5 if backward else 2  # x and y; and x, ȳ and x̄
    read = r.x.element_size() * (passes * steps * width + (2 if backward else 1) * 2 * r.b.numel())
    work = products * steps * width * (2 * CHUNK + 4 * states)
    if backward:
        work += products * steps * width * (4 * CHUNK + 10 * states)
    return 1e3 * max(read / (bandwidth * 1e12), work / (rate * 1e12))


def of_type(r: ssm.Recurrence, dtype: torch.dtype) -> ssm.Recurrence:
    return replace(r, **{name: getattr(r, name).to(dtype) for name in NAMES})


def ours(r: ssm.Recurrence, backward: bool) -> Callable[[], list[torch.Tensor]]:
    if not backward:

        def forward() -> list[torch.Tensor]:
            with torch.no_grad():
                return [ssm.scan(r, retention=True).y]

        return forward
    leaves = {name: getattr(r, name).detach().requires_grad_() for name in NAMES}
    whole, weights = replace(r, **leaves), weights_like(r.x)
    return lambda: [*torch.autograd.grad(ssm.scan(whole).y, [*leaves.values()], weights)]


def theirs(scan: Callable, r: ssm.Recurrence, backward: bool, dtype: torch.dtype) -> Callable[[], list[torch.Tensor]]:
    assert r.delta is not None and r.A is not None
    r = of_type(r, dtype)
    A, weights = r.A.squeeze(-1), weights_like(r.x)
    leaves = {name: getattr(r, name).detach().clone().requires_grad_(backward) for name in NAMES}

    def run() -> list[torch.Tensor]:
        y = scan(leaves["x"], leaves["delta"], A, leaves["b"], leaves["c"], 256)
        return [*torch.autograd.grad(y, [*leaves.values()], weights)] if backward else [y]

    return run


def weights_like(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(1), device=x.device).to(x.dtype)


def plain(work: Callable[[], list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
    """The same by torch alone."""

    def switched() -> list[torch.Tensor]:
        with patch.dict(os.environ, {SWITCH: "0"}):
            return work()

    return switched


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=True))


def table(shape: str, peer: Callable | None, bandwidth: float, rate: float) -> None:
    r = recurrence(shape, "cuda")
    for backward in (False, True):
        exact = plain(ours(r.to(torch.float64), backward))()
        torch.cuda.empty_cache()

        def row(how: str, work: Callable[[], list[torch.Tensor]], limit: float | None = None) -> None:
            wrong = error(work(), exact)  # noqa: B023
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            taken = in_a_row(work)
            held = (torch.cuda.max_memory_allocated() - base) / 2**30
            least = "" if limit is None else f"{limit:>9.3f}"
            what = "forward + backward" if backward else "forward"  # noqa: B023
            print(f"{shape:<18} {what:<19} {how:<24} {taken:>9.3f} {wrong:>9.1e} {held:>7.2f} {least}", flush=True)

        for precision, dtype in OURS:
            of = of_type(r, dtype)
            with matrix_products(precision):
                limit = limits(of, backward, PRODUCTS[precision], bandwidth, rate)
                row(f"ours, {precision}, {str(dtype).removeprefix('torch.')}", ours(of, backward), limit)
        for dtype in (torch.float32, torch.bfloat16):
            if peer is None:
                break
            row(f"mamba_ssm, {str(dtype).removeprefix('torch.')}", theirs(peer, r, backward, dtype))
        row("torch", plain(ours(r, backward)))


def mamba_ssm() -> Callable | None:
    try:
        return importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    except ImportError as missing:
        print(f"mamba_ssm is not measured: {missing}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="batch x length x heads x width x states")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that a copy reads and writes on this card")
    parser.add_argument("--rate", type=float, default=790.0, help="Tflop/s of its matrix products in bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; benchmarks/scan.py measures on a CPU")
    why = scalar_fused.why_not() or "in use"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels: {why}")
    peer = mamba_ssm()
    print(f"\n{'':<63} {'ms':>9} {'error':>9} {'GiB':>7} {'limit, ms':>9}")
    for shape in options.shapes:
        table(shape, peer, options.bandwidth, options.rate)


if __name__ == "__main__":
    main()
