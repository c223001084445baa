"""Time the items that a user waits for, each with the peer that a user would take instead, in one run, as a Markdown
table.

    SSMSCOPE_DATA=… python benchmarks/waiting.py                        # a CPU: models of mamba-130m's width, demos
    python benchmarks/waiting.py --device cuda                          # a GPU: models of 7 billion parameters
    python benchmarks/waiting.py --setups mamba-130m --items run heatmap --only ours --json runs/new.jsonl
    python benchmarks/waiting.py --compare runs/old.jsonl runs/new.jsonl

Ours and the peer take turns in one process, after a call of each that is not counted; the table has medians. A peer
that is called once (--peer-repeats 1) is not warmed up. The first call of a process is timed in a process of its own,
from the loaded model on; on a GPU with empty caches of compiled kernels, and again with those that this left. With
--json every item is a line with all its seconds, wall and CPU; `--compare` pools the lines of two such files. The
script uses what any version of the package has, so that PYTHONPATH chooses the version that is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from items import SETUPS, Item, items_of
from shapes import SHAPES
from timing import Seconds, machine
import ssmscope

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
"""The directory that keeps compiled kernels."""


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Item]]:
    """The items that are asked for, each with its setup."""
    for setup in options.setups or SETUPS[options.device]:
        found = items_of(setup, options.device)
        yield from ((setup, item) for item in found if not options.items or item.name in options.items)


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of a call, or the seconds that it says."""
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronise()
    start, before = time.perf_counter(), cpu_seconds()
    said = run()
    synchronise()
    if isinstance(said, Seconds):
        return said, said
    return time.perf_counter() - start, cpu_seconds() - before


def cpu_seconds() -> float:
    """Return the seconds of this process and of those that it waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def in_turn(item: Item, options: argparse.Namespace) -> dict[str, Any]:
    """All seconds of an item: ours and the peer's call by call in turn."""
    sides = {"ours": (item.ours, options.repeats), "theirs": (item.theirs, options.peer_repeats)}
    left = {"ours": ("ours",), "peer": ("theirs",)}.get(options.only, ("ours", "theirs"))
    sides = {side: (run, n) for side, (run, n) in sides.items() if side in left and run is not None and n}
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(-1, max((n for _, n in sides.values()), default=0)):
        for side, (run, n) in sides.items():
            if (number < 0 and (side == "ours" or n > 1)) or 0 <= number < n:
                seconds = timed(run)
                if number >= 0:
                    found[side].append(seconds)
    parts = {"ours": 1, "theirs": item.parts}
    return {side: [[part * parts[side] for part in pair] for pair in pairs] for side, pairs in found.items()}


def first_calls(setup: str, item: Item, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The first call of a process, in a process of its own."""
    wanted = ["--device", options.device, "--threads", str(options.threads), "--setups", setup, "--items", item.name]
    with tempfile.TemporaryDirectory() as folder:
        empty = {name: str(Path(folder, name)) for name in CACHES} if options.device == "cuda" else {}
        for said in ("empty caches", "warm caches") if empty else ("",):
            found: dict[str, Any] = {"what": ", ".join(filter(None, [f"{item.what}, first call of a process", said]))}
            for side in ("ours", "theirs"):
                if options.only in ("both", {"ours": "ours", "theirs": "peer"}[side]) and getattr(item, side):
                    command = [sys.executable, __file__, *wanted, "--first", side]
                    ran = subprocess.run(command, env={**os.environ, **empty}, stdout=subprocess.PIPE, check=True)
                    found[side] = [json.loads(ran.stdout.splitlines()[-1])]
            yield {**found, "peer": item.peer}


def shown(row: dict[str, Any], clock: int) -> str:
    middle = {
        side: statistics.median(each[clock] for each in row[side]) for side in ("ours", "theirs") if row.get(side)
    }
    ours, theirs = middle.get("ours"), middle.get("theirs")
    ratio = f"{theirs / ours:.1f}" if ours and theirs else "–"
    cells = [f"{each:.3f} s" if each else "–" for each in (ours, theirs)]
    return f"| {row['what']} | {cells[0]} | {row['peer']} | {cells[1]} | {ratio} |"


def compare(files: Sequence[Path], clock: int) -> None:
    """The ratio of two files' medians, item by item, and their geometric mean."""
    pooled: list[dict[str, list[float]]] = []
    for file in files:
        pooled.append({})
        for row in map(json.loads, file.read_text().splitlines()):
            pooled[-1].setdefault(row["what"], []).extend(each[clock] for each in row.get("ours", []))
    old, new = ({what: statistics.median(seconds) for what, seconds in each.items() if seconds} for each in pooled)
    print(f"| what | {files[0].stem} | {files[1].stem} | ratio |\n|---|---|---|---|")
    ratios = {what: new[what] / old[what] for what in old if what in new}
    for what, ratio in ratios.items():
        print(f"| {what} | {old[what]:.3f} s | {new[what]:.3f} s | {ratio:.2f} |")
    print(f"| geometric mean | | | {statistics.geometric_mean(ratios.values()):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--setups", nargs="+", choices=[*SHAPES, "demos", "training", "process"])
    parser.add_argument("--items", nargs="+", help="run, heatmap, gradxinput, lrp, attention, ig, fidelity, prompts …")
    parser.add_argument("--only", choices=["both", "ours", "peer"], default="both")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-repeats", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="of the table")
    parser.add_argument("--no-first", action="store_true", help="leave out first calls")
    parser.add_argument("--json", type=Path, help="a file that gets a line an item")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--first", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    clock = ("wall", "cpu").index(options.clock)
    if options.compare:
        return compare(options.compare, clock)
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of the processes that are started
    if options.first:
        _, item = next(each for each in chosen(options) if each[1].first)
        return print(json.dumps(timed(getattr(item, options.first))))
    print(ssmscope.__file__, file=sys.stderr)
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if options.device == "cuda" else machine()
    print(f"{where}\n\n| what | ours | peer | peer's | ratio |\n|---|---|---|---|---|")
    for setup, item in chosen(options):
        rows = [{"what": item.what, "peer": item.peer, **in_turn(item, options)}]
        for row in [*rows, *(first_calls(setup, item, options) if item.first and not options.no_first else ())]:
            print(shown(row, clock), flush=True)
            if options.json:
                with options.json.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
