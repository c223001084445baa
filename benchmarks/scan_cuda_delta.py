"""The gated delta rule on a GPU in each precision, beside flash-linear-attention's Triton kernels and torch alone.

    python benchmarks/scan_cuda_delta.py
    python benchmarks/scan_cuda_delta.py --shapes 1x8192x32x128x128x16

Ours is `ssm.scan` from float32 terms and from x, b and c in bfloat16, and what is left of every token
(`survival.left_norms`); flash-linear-attention's is `chunk_gated_delta_rule` from bfloat16 terms, where the package can
be imported (it is tuned on first use, some minutes).
Columns as in `scan_cuda_mamba2`, and so is the limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from scan_cuda_mamba2 import CHUNK, PRODUCTS, error, plain, weights_like
from timing import in_a_row

import ssmscope.models  # noqa: F401  (makes the mixers readable)
from ssmscope import ssm, survival
from ssmscope.scans import delta_fused
from ssmscope.training.fitting import matrix_products

SHAPES = ("1x8192x32x128x128x16", "8x2048x32x128x128x16")
"""Batch × length × heads × width × states × heads of keys: Qwen3-Next's layers."""
NAMES = ("x", "b", "c", "log_a", "beta")
OURS = (("highest", torch.float32), ("high", torch.float32), ("medium", torch.float32), ("medium", torch.bfloat16))
Work = Callable[[], list[torch.Tensor]]


def recurrence(shape: str) -> ssm.DeltaRecurrence:
    batch, length, heads, width, states, groups = map(int, shape.split("x"))
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(batch, length, *sizes, generator=g, device="cuda")

    b, c = (torch.nn.functional.normalize(normal(groups, states), dim=-1) for _ in range(2))
    log_a = -torch.nn.functional.softplus(normal(heads, 1) - 4)
    return ssm.DeltaRecurrence(
        x=normal(heads, width), b=b, c=c * states**-0.5, log_a=log_a, beta=normal(heads).sigmoid()
    )


def ours(r: ssm.DeltaRecurrence, what: str) -> Work:
    if what == "forward + backward":
        leaves = {name: getattr(r, name).detach().requires_grad_() for name in NAMES}
        whole, weights = replace(r, **leaves), weights_like(r.x)
        return lambda: [*torch.autograd.grad(ssm.scan(whole).y, [*leaves.values()], weights)]
    with_left = what == "survival"
    return torch.no_grad()(lambda: [survival.left_norms(r) if with_left else ssm.scan(r).y])


def limit(r: ssm.DeltaRecurrence, what: str, products: int, bandwidth: float, rate: float) -> float:
    """Milliseconds that the card needs at least: inputs read and outputs written once, or products of chunks."""
    assert r.b is not None
    width, states = r.x.shape[-1], r.b.shape[-1]
    columns, keys = {"forward": (2, 2), "survival": (1, 1), "forward + backward": (5, 6)}[what]
    size = r.x.element_size() * (columns * r.x.numel() + keys * r.b.numel())
    work = 4 * CHUNK * (states + width) + 6 * states * width
    if what == "survival":
        work = 2 * CHUNK * (states + states) + 4 * states * states
    elif what != "forward":
        work += CHUNK * (10 * states + 8 * width) + 12 * states * width
    return 1e3 * max(size / (bandwidth * 1e12), products * r.x[..., 0].numel() * work / (rate * 1e12))


def theirs(scan: Callable, r: ssm.DeltaRecurrence, what: str) -> Work:
    backward, dtype = what == "forward + backward", torch.bfloat16
    terms = {"x": r.x.to(dtype), "b": r.b.to(dtype), "c": r.c.to(dtype), "log_a": r.log_a, "beta": r.beta.to(dtype)}
    leaves = {name: t.detach().clone().requires_grad_(backward) for name, t in terms.items()}
    weights = weights_like(r.x).to(dtype)

    def run() -> list[torch.Tensor]:
        y, _ = scan(leaves["c"], leaves["b"], leaves["x"], leaves["log_a"].squeeze(-1), leaves["beta"], scale=1.0)
        return [*torch.autograd.grad(y, [*leaves.values()], weights)] if backward else [y]

    return run


def table(shape: str, peer: Callable | None, bandwidth: float, rate: float) -> None:
    r = recurrence(shape)
    for what in ("forward", "survival", "forward + backward"):
        exact = plain(ours(r.to(torch.float64), what))()

        def row(how: str, work: Work, least: float | None = None) -> None:
            wrong = error(work(), exact)  # noqa: B023
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            taken = in_a_row(work)
            held = (torch.cuda.max_memory_allocated() - base) / 2**30
            end = "" if least is None else f"{least:>9.3f}"
            print(f"{shape:<21} {what:<19} {how:<21} {taken:>9.3f} {wrong:>9.1e} {held:>7.2f} {end}", flush=True)  # noqa: B023

        for precision, dtype in OURS if what != "survival" else OURS[:1]:
            given = replace(r, **{name: getattr(r, name).to(dtype) for name in ("x", "b", "c")})
            with matrix_products(precision):
                least = limit(given, what, PRODUCTS[precision], bandwidth, rate)
                row(f"ours, {precision}{'' if dtype == torch.float32 else ', 16 bits'}", ours(given, what), least)
        if peer is not None and what != "survival":
            try:
                row("theirs, bfloat16", theirs(peer, r, what))
            except RuntimeError as refusal:  # of its backward pass, where Triton would give wrong numbers
                print(f"{shape:<21} {what:<19} theirs: {refusal}")
        row("torch", plain(ours(r, what)))


def flash_linear_attention(refused: bool) -> Callable | None:
    """Its scan; where Triton is between 3.4 and 3.7 on a Hopper GPU its gradients are wrong, and it refuses them."""
    try:
        from fla.ops.common import chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as missing:
        print(f"flash-linear-attention is not measured: {missing}")
        return None
    if refused:
        chunk_o.TRITON_ABOVE_3_7_1 = True
    return chunk_gated_delta_rule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="batch x length x heads x width x states x groups")
    parser.add_argument("--bandwidth", type=float, default=4.8, help="TB/s of this card's memory")
    parser.add_argument("--refused", action="store_true", help="time their backward pass even where they refuse it")
    parser.add_argument("--rate", type=float, default=790.0, help="Tflop/s of its matrix products in bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    why = delta_fused.why_not() or "in use"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels: {why}")
    peer = flash_linear_attention(options.refused)
    print(f"\n{'':<63} {'ms':>9} {'error':>9} {'GiB':>7} {'limit, ms':>9}")
    for shape in options.shapes:
        table(shape, peer, options.bandwidth, options.rate)


if __name__ == "__main__":
    main()
