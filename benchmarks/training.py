"""A step of `analyze train` on a GPU: tokens a second, and beside it what the card allows.

    python benchmarks/training.py                     # the language model of the recipe for books: 1.9 M parameters
    python benchmarks/training.py --architecture baleen-e --profile

Random tokens in the recipe's sizes; the steps are the trainer's own, with its data, gradient clipping and optimizer, as
`--compile --precision tf32` has them: pieces compiled, and recorded as a CUDA graph where that can be. The limits are
the time of as many multiply-adds as the step's matrix products have (six a weight and token), at the rate of a large
product in TF32, and the time to write and read every activation, and every gradient of one, once.
"""

from __future__ import annotations

import argparse
import inspect
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import timing
import torch
from rich.console import Console

from ssmscope.tasks.tokens import TokenData
from ssmscope.training.architectures import Tokens
from ssmscope.training.build import language_model
from ssmscope.training.choice import objective_of
from ssmscope.training.fitting import Fit, matrix_products
from ssmscope.training.plan import checked
from ssmscope.training.run import train_model

WARM = 10


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Timed(Fit):
    """An epoch is some steps to warm up, and some that are timed."""

    seconds, steps, profile = float("nan"), 50, False

    def _run_epoch(self, bar: Any) -> None:
        rows = self.objective.batches(0)
        for number in range(WARM + self.steps):
            if number == WARM:
                synchronise()
                begun = time.perf_counter()
            self._train_step(rows[number % len(rows)], number, WARM + self.steps)
        synchronise()
        self.seconds = (time.perf_counter() - begun) / self.steps
        if self.profile:
            self._profiled(rows)
        self.epoch, self.best = self.options["epochs"], {"weights": {}, "extra": {}, "epoch": 1}

    def _profiled(self, rows: list[list[int]]) -> None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for number in range(10):
                self._train_step(rows[number % len(rows)], number, 10)
            synchronise()
        events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
        print(f"busy {sum(event.self_device_time_total for event in events) / 1e4:.2f} ms a step")
        for event in events[:40]:
            print(f"    {event.self_device_time_total / 1e4:7.3f} ms {event.count / 10:6.1f} × {event.key[:110]}")


def settled(arguments: argparse.Namespace) -> dict[str, Any]:
    """The trainer's options, those of its recipe where none is given."""
    given = {name: parameter.default for name, parameter in inspect.signature(train_model).parameters.items()}
    given |= {"architecture": arguments.architecture, "data": "books", "out": Path()}
    given |= {"batch_size": arguments.batch, "precision": arguments.precision, "compile": not arguments.plain}
    return checked(given)


def limits(parameters: int, tokens: int, options: dict[str, Any]) -> tuple[float, float]:
    """Seconds that a step's products take at the rate of a large one, and that its activations take."""
    side = 8192
    a = torch.randn(side, side, device="cuda")
    with matrix_products("high"):
        product = _seconds(lambda: a @ a)
    copied = torch.randn(2**28, device="cuda")
    bandwidth = 8 * copied.numel() / _seconds(copied.clone)
    inner = options["width"] * options["expand"]
    projected = 2 * inner + 2 * options["state"] + inner // options["head_width"]
    each = 2 * options["width"] + projected + (inner + 2 * options["state"]) + 2 * inner
    numbers = tokens * (options["layers"] * each + options["vocabulary"])
    return 6 * parameters * tokens / (2 * side**3 / product), 4 * 4 * numbers / bandwidth


def _seconds(run: Any, times: int = 10) -> float:
    run()
    synchronise()
    begun = time.perf_counter()
    for _ in range(times):
        run()
    synchronise()
    return (time.perf_counter() - begun) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="mamba2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="tf32")
    parser.add_argument("--plain", action="store_true", help="without --compile")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    options = settled(arguments)
    length, vocabulary = options["length"], options["vocabulary"]
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, vocabulary, (8 * arguments.batch, length + 1))
    data = TokenData(
        name="random",
        split="train",
        ids=drawn[:, :-1],
        targets=drawn[:, 1:],
        tokens=tuple(map(str, range(vocabulary))),
    )
    torch.manual_seed(0)
    module = language_model(options, Tokens(vocabulary), None).to(arguments.device)
    parts = {"train": data, "validation": None, "test": None}
    objective = objective_of(parts, options, torch.device(arguments.device), None, module)
    with TemporaryDirectory() as directory:
        fit = Timed(module, objective, options, Path(directory, "state"), Console(stderr=True))
        fit.steps, fit.profile = arguments.steps, arguments.profile
        fit.run()
    tokens = arguments.batch * length
    parameters = sum(parameter.numel() for parameter in module.parameters())
    how = f"{arguments.precision}, {'plain' if arguments.plain else 'compiled'}"
    card = f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if arguments.device == "cuda" else ""
    print(f"{card or timing.machine()}: {arguments.architecture}, {parameters:,} parameters")
    print(f"{arguments.batch} × {length} tokens, {how}: {1e3 * fit.seconds:.2f} ms a step", end=", ")
    print(f"{tokens / fit.seconds / 1e6:.3f} million tokens a second")
    if arguments.device == "cuda":
        products, activations = limits(parameters, tokens, options)
        print(
            f"limits: {1e3 * products:.2f} ms of matrix products, {1e3 * activations:.2f} ms of activations", flush=True
        )


if __name__ == "__main__":
    main()
