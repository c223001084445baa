"""What the survival of every token costs beside a forward pass.

    python benchmarks/survival.py

On a Mamba-1 of mamba-130m's shape and a Mamba-2 of mamba2-130m's. The plain pass and the one with survival taken from
every layer as it runs alternate, so that a drift of the machine's speed falls on both. Times are of the processor.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from timing import THREADS, machine, mamba2_130m, mamba_130m

import ssmscope


def cost(name: str, module: torch.nn.Module, length: int, repeats: int) -> None:
    model = ssmscope.load(module)
    batch = model.encode(ids=torch.randint(0, 1000, (length,), generator=torch.Generator().manual_seed(0)).tolist())
    runs = {
        "forward": lambda: model.trace(batch, keep_inputs=False),
        "with survival": lambda: model.trace(batch, keep_inputs=False, visit=lambda i, rows, layer: layer.survival()),
        "with half-lives": lambda: model.trace(
            batch, keep_inputs=False, visit=lambda i, rows, layer: layer.half_lives()
        ),
    }
    taken: dict[str, list[float]] = {key: [] for key in runs}
    for repeat in range(repeats + 1):
        for key, run in runs.items():
            start = time.process_time()
            run()
            if repeat:
                taken[key].append(time.process_time() - start)
    forward = statistics.median(taken["forward"])
    extra = {
        key: statistics.median(a / b for a, b in zip(taken[key], taken["forward"], strict=True)) - 1 for key in runs
    }
    rest = ", ".join(f"{key} {extra[key]:+.1%}" for key in list(runs)[1:])
    print(f"{name}, L = {length:>5}: forward {forward:.3f} s, {rest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4, help="of the models")
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    for name, make in (("Mamba-1", mamba_130m), ("Mamba-2", mamba2_130m)):
        for length in (256, 1024):
            cost(name, make(layers=options.layers), length, options.repeats)


if __name__ == "__main__":
    main()
