"""Time of a patch grid over pairs, next to single grids and TransformerLens's, on one thread, in CPU seconds.

    python benchmarks/patch_grids.py measure --out runs/grids --into benchmarks/results/patch-grids.jsonl
    python benchmarks/patch_grids.py table

A random model of mamba2-130m's shape, 6 layers, reads `PAIRS` pairs of `LENGTH` random tokens that differ in the token
at `FIRST`. Every layer's value at every token from there on is patched from the clean into the corrupted run. All sides
run in one process, one after the other; TransformerLens (`transformer-lens` 4.3 on transformers 5, `make
test-beside-others`) runs through its bridge, all pairs in a batch, as `generic_activation_patch` does. The chunk of the
model's own forward is as long as the texts: with the published 256 it fills up to 256 tokens. TransformerLens has no
grid of states: its `hook_ssm_state` changes what one position reads, and no later state.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import running
import timing
import torch

RESULTS = Path(__file__).parent / "results" / "patch-grids.jsonl"
PAIRS, LENGTH, FIRST, LAYERS = 64, 16, 4, 6
SITES = {"residual": "resid_pre", "output": "mixer_out", "state": None}
"""Sites of `patch`, and TransformerLens's names of them."""


def drawn_model() -> Any:
    from shapes import mamba2_130m

    torch.manual_seed(0)
    kind, config = mamba2_130m()
    config.num_hidden_layers, config.chunk_size = LAYERS, LENGTH
    return kind(config).eval()


def drawn_pairs() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(PAIRS):
        ids = draw.integers(5, 1000, LENGTH)
        other = ids.copy()
        other[FIRST] = 5 + (ids[FIRST] - 4) % 995
        rows.append({"clean": ids.tolist(), "corrupted": other.tolist(), "target": 10, "contrast": 20})
    return rows


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and what it returned."""
    start = time.process_time()
    found = run()
    return round(time.process_time() - start, 2), found


def bridge_of(module: Any, folder: Path) -> Any:
    """Return the model as TransformerLens runs it."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer
    from ssmscope.core.known_models import demos

    module.config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(demos()["demo/babi-mamba2"])  # It asks for one, and encodes nothing.
    return TransformerBridge.boot_transformers(str(folder), hf_model=copy.deepcopy(module), tokenizer=tokenizer)


def by_transformer_lens(bridge: Any, pairs: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return the differences of logits of TransformerLens's patched runs, (pairs, layers, positions)."""
    import pandas as pd
    from transformer_lens.patching import generic_activation_patch, layer_pos_patch_setter

    clean, corrupted = (torch.tensor([row[side] for row in pairs]) for side in ("clean", "corrupted"))
    right, wrong = pairs[0]["target"], pairs[0]["contrast"]
    cells = [(layer, at) for layer in range(LAYERS) for at in range(FIRST, LENGTH)]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(clean, names_filter=lambda hook: hook.endswith(f"hook_{name}"))
        found = generic_activation_patch(
            bridge, corrupted, cache, lambda logits: logits[:, -1, right] - logits[:, -1, wrong],
            layer_pos_patch_setter, name, None, pd.DataFrame(cells, columns=["layer", "pos"]), reduce="none",
        )  # fmt: skip
    return found.values.double().numpy().reshape(LAYERS, LENGTH - FIRST, len(pairs)).transpose(2, 0, 1)


def measure(arguments: argparse.Namespace) -> None:
    """Time the grids of all sites."""
    import ssmscope
    from ssmscope.data.pairs import read_pairs
    from ssmscope.interp.pairs import encode_pairs
    from ssmscope.interp.patch.over_pairs import PairGrids, position_classes

    torch.set_num_threads(1)
    module, pairs = drawn_model(), drawn_pairs()
    arguments.out.mkdir(parents=True, exist_ok=True)
    bridge, model, data = bridge_of(module, arguments.out), ssmscope.load(module), read_pairs(pairs)
    model.run(model.encode(ids=pairs[0]["clean"]))  # Not timed: what a first run prepares.

    def grid(site: str) -> np.ndarray:
        encoded = encode_pairs(model, data)
        grids = PairGrids(encoded, "denoise")
        return grids.grid(site, position_classes(encoded, data)) + grids.base[:, None, None]

    def single(site: str) -> np.ndarray:
        own = [{"answer": row["target"], "contrast": row["contrast"]} for row in pairs]
        texts = [{side: row[side] for side in ("clean", "corrupted")} for row in pairs]
        options = {"site": site, "positions": list(range(FIRST, LENGTH))}
        found = [ssmscope.patch(model, **text, **each, **options) for text, each in zip(texts, own)]
        return np.stack([one.effects("difference")[:-1] for one in found])

    for site, name in SITES.items():
        record: dict[str, Any] = {"site": site, "pairs": PAIRS}
        record["grid"], ours = timed(lambda site=site: grid(site))
        record["cells"] = int(np.isfinite(ours[0]).sum())
        record["single"], ones = timed(lambda site=site: single(site))
        size = float(np.nanmax(ours) - np.nanmin(ours))
        record["off_single"] = float(np.abs(ours[..., : ones.shape[2]] - ones).max()) / size
        if name is not None:
            record["theirs"], other = timed(lambda name=name: by_transformer_lens(bridge, pairs, name))
            record["off_theirs"] = float(np.abs(ours - other).max()) / size
        versions = {"transformers": version("transformers"), "transformer_lens": version("transformer-lens")}
        running.add(arguments.into, {**record, **versions, "machine": timing.machine()})


def grids_table() -> list[str]:
    """Return the lines of the table of CPU seconds."""
    lines = ["| | grid | 64 single ones | TransformerLens | theirs by ours |", "|---" * 5 + "|"]
    for r in running.read(RESULTS):
        theirs = [f"{r['theirs']:.0f}", f"{r['theirs'] / r['grid']:.1f}"] if "theirs" in r else ["none", "–"]
        cells = [f"{r['grid']:.0f}", f"{r['single']:.0f}", *theirs]
        lines.append(f"| {r['site']} | {' | '.join(cells)} |")
    return lines


def table(arguments: argparse.Namespace) -> None:
    """Print the table."""
    print(*grids_table(), sep="\n")


def main() -> None:
    running.start(running.verbs(__doc__, measure, table))


if __name__ == "__main__":
    main()
