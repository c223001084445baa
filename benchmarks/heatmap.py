"""What a selection heatmap costs beside a plain forward pass, and its memory on a long text.

    python benchmarks/heatmap.py         # about two minutes

A Mamba-1 of mamba-130m's shape. The plain pass is the same model with the same scan and the same last-position
logits, without a trace; the passes alternate, so that a drift of the machine's speed falls on both.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
from timing import THREADS, machine, mamba_130m

import ssmscope
from ssmscope.mixers import fast_scan


def cost(length: int, repeats: int) -> None:
    model = ssmscope.load(mamba_130m())
    batch = model.encode(ids=torch.randint(0, 1000, (length,), generator=torch.Generator().manual_seed(0)).tolist())

    def plain():
        with torch.no_grad(), fast_scan(model.module, mask=batch.mask):
            return model._call(batch, last_only=True)

    def heatmap():
        return ssmscope.selection_heatmap(model.trace(batch, keep_inputs=False))

    plain(), heatmap()
    taken: dict[str, list[float]] = {"plain": [], "heatmap": []}
    for _ in range(repeats):
        for name, run in (("plain", plain), ("heatmap", heatmap)):
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    extra = statistics.median(h / p for h, p in zip(taken["heatmap"], taken["plain"], strict=True)) - 1
    medians = {name: statistics.median(values) for name, values in taken.items()}
    print(
        f"L = {length:>5}: forward {medians['plain']:.3f} s, heatmap {medians['heatmap']:.3f} s, "
        f"median of the paired ratios {extra:+.1%}",
        flush=True,
    )


def memory(length: int) -> None:
    """Peak memory of a whole process that makes the heatmap of one long text with the full 50,280-word vocabulary."""
    model = ssmscope.load(mamba_130m(vocabulary=50_280))
    ids = torch.randint(0, 50_280, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    start = time.perf_counter()
    result = ssmscope.selection_heatmap(model.trace(ids=ids, keep_inputs=False))
    taken = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"L = {len(result[0].tokens):>5}: heatmap {taken:.1f} s, peak memory of the process {peak:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-only", type=int, metavar="LENGTH", help="only the peak memory at this length")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.memory_only:
        memory(options.memory_only)
        return
    print(machine())
    for length in (256, 1024):
        cost(length, options.repeats)
    subprocess.run([sys.executable, __file__, "--memory-only", "8192"], check=True)


if __name__ == "__main__":
    main()
