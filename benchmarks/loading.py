"""mamba-790m's shape, stored in bfloat16, on a CPU in each dtype: seconds and peak memory of loading and of a heatmap.

    python benchmarks/loading.py --into /tmp/790m            # writes 1.5 GB there, once
    python benchmarks/loading.py --into /tmp/790m --dtypes bfloat16 --tokens 256 2048

Every dtype is a process of its own, which imports first. A peak is the most memory of the process so far, pages of the
mapped file included (Linux alone tells it); the heatmap is asked for twice.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

import ssmscope


def peak() -> str:
    told = Path("/proc/self/status").read_text()
    return f"peak {int(told.partition('VmHWM:')[2].split()[0]) / 2**20:.1f} GiB"


def asked(options: argparse.Namespace) -> None:
    (dtype,) = options.dtypes
    threads = f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}"
    print(f"{dtype}, {threads}: imported, {peak()}", flush=True)
    start = time.perf_counter()
    model = ssmscope.load(options.into, dtype=dtype)
    print(f"{dtype} load: {time.perf_counter() - start:.1f} s, {peak()}", flush=True)
    for length in options.tokens:
        ids = torch.randint(5, model.vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            ssmscope.selection_heatmap(model, model.encode(ids=ids))
            seconds.append(f"{time.perf_counter() - start:.1f} s")
        print(f"{dtype} heatmap {length}: first {seconds[0]}, then {seconds[1]}, {peak()}", flush=True)


def write(into: Path, layers: int | None) -> None:
    from large import SHAPES

    kind, config = SHAPES["790m"]()
    config.num_hidden_layers = layers or config.num_hidden_layers
    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--layers", type=int, help="so many layers only")
    parser.add_argument("--asked", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.asked:
        asked(options)
        return
    if not (options.into / "config.json").exists():
        write(options.into, options.layers)
    tokens = [str(length) for length in options.tokens]
    for dtype in options.dtypes:
        words = ["--into", str(options.into), "--dtypes", dtype, "--tokens", *tokens, "--asked"]
        subprocess.run([sys.executable, __file__, *words], check=True)


if __name__ == "__main__":
    main()
