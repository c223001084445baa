"""Cost of an architecture compared with Mamba-2 of the same sizes: seconds of a forward pass and of a step of training,
and the peak of memory, by the length of the sequences (Baleen's "linear-time" kernel; Differential Mamba, Tables 7, 8).

    python benchmarks/cost.py                                            # on the CPU: 4 layers of width 256
    python benchmarks/cost.py --width 1024 --layers 48 --lengths 512,1024,2048,4096,8192 --batch 1   # a GPU, 370 M

Random weights and tokens; scans by `fast_scan`, as `analyze train` has them. A step is the cross-entropy of every next
token, for a Baleen with its divergence, and all gradients; the optimizer's own work is left out, it depends on the
number of parameters alone. Every architecture is timed in turn, so often (--rounds); the ratio is the median of the
rounds' ratios, in brackets the lowest and the highest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import timing
import torch
from torch.nn.functional import cross_entropy
from ssmscope.core.mixers import fast_scan
from ssmscope.zoo.training.architectures import OWN, Tokens
from ssmscope.zoo.training.build import language_model
from ssmscope.zoo.training.objectives import regularized

MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {"architecture": "mamba2"},
    "baleen-b": {"architecture": "baleen-b"},
    "baleen-e": {"architecture": "baleen-e"},
    "diff-mamba, hybrid": {"architecture": "diff-mamba", "differential_layers": "hybrid"},
    "diff-mamba": {"architecture": "diff-mamba"},
    "groupmamba, k = 2": {"architecture": "groupmamba", "k": 2},
    "gfssm": {"architecture": "gfssm"},
}


def build(name: str, arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = dict(width=arguments.width, layers=arguments.layers, state=arguments.state, head_width=arguments.head_width)
    given = {"base": "mamba2", "expand": 2, "tied": True, **sizes, **MODELS[name]}
    options = {**dict.fromkeys((*OWN, "decays")), **given}
    return language_model(options, Tokens(arguments.vocabulary), None).to(arguments.device)


def forward(model: torch.nn.Module, ids: torch.Tensor) -> None:
    with torch.no_grad(), fast_scan(model):
        model(input_ids=ids)


def step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    with fast_scan(model):
        logits = model(input_ids=ids).logits
    regularized(model, cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())).backward()
    model.zero_grad(set_to_none=True)


def measured(run: Callable[[], None], device: str) -> tuple[float, float]:
    """Seconds, and on a GPU the peak of memory in GiB."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30
    return time.perf_counter() - start, 0.0


def rows(models: dict[str, torch.nn.Module], ids: torch.Tensor, arguments: argparse.Namespace) -> None:
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for what, training in (("forward", False), ("step", True)):
        for once in range(arguments.rounds + 1):  # the first compiles and warms up
            for name, model in models.items():
                model.train(training)
                work = step if training else forward
                try:
                    found = measured(lambda: work(model, ids), arguments.device)  # noqa: B023
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    found = float("nan"), float("nan")
                if once:
                    taken.setdefault((name, what), []).append(found)
    for name, model in models.items():
        cells = [f"{name}", f"{sum(p.numel() for p in model.parameters()):,}", f"{ids.shape[0]} × {ids.shape[1]}"]
        for what in ("forward", "step"):
            ratios = [mine / base for (mine, _), (base, _) in zip(taken[name, what], taken["mamba2", what])]
            middle = statistics.median(seconds for seconds, _ in taken[name, what])
            cells.append(f"{middle:.4f}")
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")
            if arguments.device == "cuda":
                cells.append(f"{max(memory for _, memory in taken[name, what]):.2f}")
        print("|", " | ".join(cells), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS).replace(", ", " "), help="with commas between them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--state", type=int, default=64)
    parser.add_argument("--head-width", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--lengths", default="256,1024")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(timing.THREADS)
    print(torch.cuda.get_device_name() if arguments.device == "cuda" else timing.machine())
    peak = arguments.device == "cuda"
    head = ["model", "parameters", "batch × tokens"]
    for what in ("forward", "step"):
        head += [f"{what}, s", "× Mamba-2"] + ["GiB"] * peak
    print("|", " | ".join(head), "|")
    print("|", " | ".join("---" for _ in head), "|")
    asked = [name for name in MODELS if name == "mamba2" or name.replace(", ", " ") in arguments.models.split(",")]
    models = {name: build(name, arguments) for name in asked}
    for length in map(int, arguments.lengths.split(",")):
        ids = torch.randint(arguments.vocabulary, (arguments.batch, length), device=arguments.device)
        rows(models, ids, arguments)


if __name__ == "__main__":
    main()
