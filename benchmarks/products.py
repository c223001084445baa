"""Models of mamba-130m's and mamba2-130m's shape on a CPU beside their own matrix products: the same calls of torch's
linear layers on as many rows, and of their gradients, alone. The models' own large ones go through oneDNN where torch
has it (`ssmscope.scans.products`) and it is faster, so that a ratio can be below 1.

    python benchmarks/products.py                       # three minutes on two idle cores
    python benchmarks/products.py --family mamba2 --threads 1 --layers 4

Both run in turn in one process, and the fastest of each counts. `forward + backward` is once for the gradients of the
inputs, as explanations ask for them, and once for those of the weights too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from timing import machine, mamba2_130m, mamba_130m
from torch import Tensor, nn
from torch.nn.functional import linear

import ssmscope.models  # noqa: F401  (makes the mixers readable)
from ssmscope.mixers import fast_scan, weights_constant
from ssmscope.scans import native, passes_native, scalar_native

FAMILIES = {"mamba": mamba_130m, "mamba2": mamba2_130m}
WAYS = ("forward", "forward + backward to the inputs", "forward + backward, weights too")


def products(model: nn.Module, length: int, way: str) -> Callable[[], None]:
    """The products alone, of inputs that were drawn before."""
    g = torch.Generator().manual_seed(length)
    layers = [part.weight.detach() for part in model.modules() if isinstance(part, nn.Linear)]
    inputs = {width: torch.randn(length, width, generator=g) for width in {n for w in layers for n in w.shape}}

    def run() -> None:
        for weight in layers:
            linear(inputs[weight.shape[1]], weight)
        for weight in reversed(layers if way != WAYS[0] else []):
            back = inputs[weight.shape[0]]
            back @ weight
            if way == WAYS[2]:
                back.T @ inputs[weight.shape[1]]

    return run


def whole(model: nn.Module, length: int, way: str) -> Callable[[], Sequence[Tensor]]:
    """The model itself, through `fast_scan`."""
    g = torch.Generator().manual_seed(length)
    embeds = torch.randn(1, length, model.config.hidden_size, generator=g)
    weights = torch.randn(1, length, model.config.vocab_size, generator=g)
    read = [p for name, p in model.named_parameters() if "embeddings" not in name]

    def run() -> Sequence[Tensor]:
        inputs = embeds.clone().requires_grad_(way != WAYS[0])
        with torch.set_grad_enabled(way != WAYS[0]), fast_scan(model):
            if way != WAYS[1]:
                logits = model(inputs_embeds=inputs, use_cache=False).logits
            else:
                with weights_constant(model):
                    logits = model(inputs_embeds=inputs, use_cache=False).logits
            if way == WAYS[0]:
                return [logits]
            asked = [inputs, *(read if way == WAYS[2] else [])]
            return torch.autograd.grad((logits * weights).mean(), asked, allow_unused=True)

    return run


def fastest(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The least wall seconds of each, in turn."""
    least = [float("inf")] * len(runs)
    for i in range(repeats + 1):
        for place, run in enumerate(runs):
            start = time.perf_counter()
            run()
            if i:  # the first is to warm up
                least[place] = min(least[place], time.perf_counter() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--threads", type=int, action="append", help="2 and 1 by default")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads((options.threads or [2])[0])
    print(machine())
    for kernels in (native.kernels, scalar_native.kernels, passes_native.kernels):
        print(f"{kernels.name}: {kernels.why_not() or 'in use'}")
    print(f"{'':<54} {'threads':>7} {'products (s)':>12} {'model (s)':>10} {'ratio':>6}")
    for family in options.family or FAMILIES:
        model = FAMILIES[family](layers=options.layers)
        for threads in options.threads or (2, 1):
            torch.set_num_threads(threads)
            for length in options.lengths:
                for way in WAYS:
                    runs = (products(model, length, way), whole(model, length, way))
                    alone, ours = fastest(runs, options.repeats)
                    what = f"{family}, {options.layers} layers, {length:,}: {way}"
                    print(
                        f"{what:<66}"[:66] + f" {threads:>2} {alone:>12.3f} {ours:>10.3f} {ours / alone:>6.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
