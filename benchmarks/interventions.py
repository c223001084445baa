"""What a knockout sweep and a grid of patched runs cost, against one plain run for each of their cells.

    OMP_NUM_THREADS=1 python benchmarks/interventions.py    # half an hour on one core

Both ways run in this process, one after the other, and the seconds are those of the processor: other work on the
machine changes them little, and their ratio less. Of one run for each cell some cells, evenly apart, are timed, half of
them before the other way and half behind it, and scaled to all of them. Peak memory is that of a process of its own for
each, less what it held before (Linux).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import ssmscope
from ssmscope.cuts import cut_edges
from ssmscope.edits import new_state, recorded, replaced

HEADS = dict(head_dim=32, num_heads=8, n_groups=1, state_size=16, chunk_size=64)
SIZES = dict(vocab_size=512, hidden_size=128, expand=2, use_cache=False)
CELLS = 24
"""How many cells are run one by one."""
FAR = 0.25
"""Where the two texts of a patch begin to differ, as a share of their length."""


def texts(length: int) -> tuple[list[int], list[int]]:
    ids = torch.randint(1, 512, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    changed = list(ids)
    changed[int(FAR * length)] = (ids[int(FAR * length)] + 1) % 511 + 1
    return ids, changed


def knockout(model: ssmscope.Model, length: int) -> tuple[Callable[[], object], list[Callable[[], object]]]:
    """The sweep over windows of layers, and its cells one by one."""
    batch, layers, half = model.encode(ids=texts(length)[0]), model.num_layers, length // 2
    window = max(1, layers // 5)

    def cell(first: int) -> Callable[[], object]:
        cut = cut_edges([half], [length - 1], layers=range(first, min(layers, first + window)), level="block")
        return lambda: model.run(batch, edits=cut, last_only=True)

    every = cut_edges([half], [length - 1], level="block")
    cells = [lambda: model.run(batch, edits=every, last_only=True), *(cell(at) for at in range(layers))]
    return lambda: ssmscope.knockout(model, batch, from_=[str(half)], answer=3), cells


def grid(model: ssmscope.Model, length: int, site: str) -> tuple[Callable[[], object], list[Callable[[], object]]]:
    """The grid over layers and the tokens from the first that differs on, and its cells one by one."""
    clean, corrupted = texts(length)
    batch = model.encode(ids=corrupted)
    kept: dict = {}
    if site != "state":
        model.run(model.encode(ids=clean), edits=recorded(site, kept))
    cells: list[tuple[int | None, int]] = [
        (layer, at) for at in range(int(FAR * length), length - 1) for layer in (None, *range(model.num_layers))
    ]

    def run(layer: int | None, at: int) -> object:
        layers = None if layer is None else [layer]
        if site != "state":
            return model.run(batch, edits=replaced(site, kept, [at], layers=layers), last_only=True)
        # the clean run's state behind the token would be kept from one run: here it is the run's own, at the same price
        return model.run(batch, edits=new_state(at, lambda state, _: state, layers=layers), last_only=True)

    def whole() -> object:
        return ssmscope.patch(model, clean=clean, corrupted=corrupted, site=site, answer=3, contrast=8)

    return whole, [lambda cell=cell: run(*cell) for cell in cells]


def attribution(model: ssmscope.Model, length: int, site: str) -> tuple[Callable[[], object], list]:
    clean, corrupted = texts(length)
    options = dict(clean=clean, corrupted=corrupted, site=site, method="gradient", answer=3, contrast=8)
    return lambda: ssmscope.patch(model, **options), grid(model, length, site)[1]


CASES: dict[str, Callable[[ssmscope.Model, int], tuple[Callable[[], object], list]]] = {
    "knockout, windows of layers": knockout,
    "patch, states": lambda model, length: grid(model, length, "state"),
    "patch, outputs": lambda model, length: grid(model, length, "output"),
    "patch, residual stream": lambda model, length: grid(model, length, "residual"),
    "attribution, states": lambda model, length: attribution(model, length, "state"),
    "attribution, outputs": lambda model, length: attribution(model, length, "output"),
}


def model_of(layers: int) -> ssmscope.Model:
    torch.manual_seed(0)
    return ssmscope.load(Mamba2ForCausalLM(Mamba2Config(**SIZES, **HEADS, num_hidden_layers=layers)))


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def held(what: str) -> float:
    """What this process holds ("VmRSS"), or the most that it has held ("VmHWM"), in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1024


def memory(case: str, plain: bool, layers: int, length: int) -> float:
    """By how many MiB a process grows that does one case, after a run of the model."""
    command = [sys.executable, __file__, "--layers", str(layers), "--length", str(length), "--memory", case]
    found = subprocess.run(
        [*command, *(["--plain"] if plain else [])], capture_output=True, text=True, check=True
    ).stdout
    return float(found.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--memory", choices=CASES, help="print how much memory one case takes, and nothing else")
    parser.add_argument("--plain", action="store_true", help="of it, one cell run by itself")
    given = parser.parse_args()
    model = model_of(given.layers)
    model.run(model.encode(ids=texts(given.length)[0]))
    if given.memory:
        whole, cells = CASES[given.memory](model, given.length)
        Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
        before = held("VmRSS")
        (cells[0] if given.plain else whole)()
        print(held("VmHWM") - before)
        return
    print(f"Mamba-2 of {given.layers} layers and width 128, {given.length} tokens, {torch.get_num_threads()} thread\n")
    print("| | cells | together | one run for each cell | ratio | memory together | of one cell |\n|---|" + "---|" * 6)
    for name in given.cases:
        whole, cells = CASES[name](model, given.length)
        chosen = cells[:: max(1, len(cells) // CELLS)]
        before = sum(map(seconds, chosen[::2]))
        own = seconds(whole)
        each = (before + sum(map(seconds, chosen[1::2]))) * len(cells) / len(chosen)
        most = [memory(name, plain, given.layers, given.length) for plain in (False, True)]
        print(
            f"| {name} | {len(cells):,} | {own:.1f} s | {each:.1f} s | {own / each:.2f} | {most[0]:.0f} MiB "
            f"| {most[1]:.0f} MiB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
