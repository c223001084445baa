"""Steps of `analyze train` on a GPU, on random data: the CIFAR-10 classifier and the language model of books."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import peers
import torch
from rich.console import Console
from timing import Seconds
from ssmscope.data.pixels import PixelData
from ssmscope.data.tokens import TokenData
from ssmscope.zoo.training.answering import objective_of
from ssmscope.zoo.training.architectures import Tokens
from ssmscope.zoo.training.build import build, language_model
from ssmscope.zoo.training.fitting import Fit, matrix_products
from ssmscope.zoo.training.plan import checked
from ssmscope.zoo.training.run import train_model

BATCH, WARM_UP, STEPS = 64, 10, 30


class Timed(Fit):
    """A fit whose one epoch is some steps to warm up and some that are timed."""

    seconds = float("nan")

    def _run_epoch(self, bar: Any) -> None:
        rows = self.objective.batches(0)
        for number in range(WARM_UP + STEPS):
            if number == WARM_UP:
                torch.cuda.synchronize()
                begun = time.perf_counter()
            self._train_step(rows[number % len(rows)], number, WARM_UP + STEPS)
        torch.cuda.synchronize()
        self.seconds = (time.perf_counter() - begun) / STEPS
        self.epoch, self.best = self.options["epochs"], {"weights": {}, "extra": {}, "epoch": 1}


def settled(architecture: str, data: str) -> dict[str, Any]:
    """The options of a recipe, as `--compile --set precision=tf32` has them."""
    given = {name: parameter.default for name, parameter in inspect.signature(train_model).parameters.items()}
    given |= {"architecture": architecture, "data": data, "out": Path(), "batch_size": BATCH}
    return checked(given | {"precision": "tf32", "compile": True})


def step_of_trainer(module: Any, data: Any, options: dict[str, Any]) -> Callable[[], Seconds]:
    def run() -> Seconds:
        parts = {"train": data, "validation": None, "test": None}
        objective = objective_of(parts, options, torch.device("cuda"), None, module)
        with TemporaryDirectory() as directory:
            fit = Timed(module, objective, options, Path(directory, "state"), Console(stderr=True))
            fit.run()
        return Seconds(fit.seconds)

    return run


def plain_step(module: Any, inputs: dict[str, Any], labels: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def run() -> None:
        with matrix_products("high"):
            peers.training_step(module, inputs, labels, optimizer)

    return run


def of_cifar10() -> tuple[Callable[[], Seconds], Callable[[], None]]:
    """Three layers of width 32 and state 64 on 1,025 tokens: the trainer's Baleen-E, and transformers' Mamba-2."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (8 * BATCH, 1024, 3)).astype(np.uint8)
    names = tuple("abcdefghij")
    data = PixelData("random", "train", pixels, rng.integers(0, 10, 8 * BATCH), names, (32, 32))
    torch.manual_seed(0)
    options = {name: settled(name, "cifar10") for name in ("baleen-e", "mamba2")}
    gated, plain = (build(each, data, None)[1].to("cuda").train() for each in options.values())
    inputs = {"input_values": torch.from_numpy(pixels[:BATCH]).to("cuda") / 255}
    labels = torch.from_numpy(data.labels[:BATCH]).to("cuda")
    return step_of_trainer(gated, data, options["baleen-e"]), plain_step(plain, inputs, labels)


def of_books() -> tuple[Callable[[], Seconds], Callable[[], None]]:
    """Seven layers of width 160 on rows of 512 tokens, of 4,096 different ones."""
    options = settled("mamba2", "books")
    length, vocabulary = options["length"], options["vocabulary"]
    drawn = np.random.default_rng(0).integers(0, vocabulary, (8 * BATCH, length + 1))
    ids, targets = drawn[:, :-1], drawn[:, 1:]
    data = TokenData("random", "train", ids, targets, tuple(map(str, range(vocabulary))))
    torch.manual_seed(0)
    module, plain = (language_model(options, Tokens(vocabulary), None).to("cuda").train() for _ in range(2))
    inputs, labels = (torch.from_numpy(each[:BATCH].copy()).to("cuda") for each in (ids, targets))
    return step_of_trainer(module, data, options), plain_step(plain, {"input_ids": inputs}, labels)
