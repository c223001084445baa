"""The verb `train`."""

from __future__ import annotations

import json as json_module
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from ssmscope.api.writing import check_writable
from ssmscope.cli import command
from ssmscope.cli.command import JSON
from ssmscope.zoo.training import ARCHITECTURES, train_model


def train(
    architecture: Annotated[str, typer.Argument(metavar="ARCH", help=f"One of {', '.join(ARCHITECTURES)}.")],
    data: Annotated[
        str, typer.Option("--data", metavar="NAME", help="A data set, a generated task, or a file; see above.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Directory for the model, by default runs/NAME-ARCH.")
    ] = None,
    json: JSON = False,
    **options: Any,
) -> None:
    """Fit a model to a task, or turn a trained Mamba or Mamba-2 into a Baleen. A killed run continues.

    NAME is one of the following. Text classification: sst2, imdb, rotten_tomatoes, snli, wnli, planted-words,
    planted-recall, planted-xor or planted-position (whose decisive words are known), or a csv, tsv, jsonl or parquet
    file with text and label. Image classification: cifar10 or digits. Classification of sequences: majority or listops.
    Recall of tokens: associative-recall, mqar, fuzzy-recall, noisy-recall, selective-copying, compression,
    memorization, qa1 to qa5, babi (all five of them), needle, multi-key, multi-value, variables or common-words.
    Instructions: instruct (prompts for sst2, wnli and snli). Language modelling: wikitext2, books or a .txt file.
    """
    out = Path("runs", f"{Path(data).stem}-{architecture}") if out is None else out
    check_writable(out)
    line = shlex.join(["analyze", *command.given])
    try:
        train_model(architecture, data, out, **options, command=line)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues from the last checkpoint") from None
    record = (out / "training.json").read_text(encoding="utf-8")
    if json:
        print(record, end="")
        return
    measured = json_module.loads(record)
    for split in ("train", "validation", "test"):
        if measured.get(split) is not None:
            print(f"{split} accuracy {_accuracy(measured[split])}")
            if measured["kind"] == "language":
                print(f"{split} perplexity {math.exp(measured[split]['cross_entropy']):.2f}")
            if "bits_per_character" in measured[split]:
                print(f"{split} bits per character {measured[split]['bits_per_character']:.4f}")
    first, last = measured["history"][0], measured["history"][-1]
    for name in ("spectral_abscissa", "mean_lambda"):
        if name in last:
            print(f"{name.replace('_', ' ')} {first[name]:.4f} after one epoch, {last[name]:.4f} after all")
    print(f"Saved in {out}{_next_step(out, measured)}")


def _next_step(out: Path, record: Mapping[str, Any]) -> str:
    from ssmscope.zoo.training.data import MIXED_QUESTIONS, QUESTIONS

    kind, name = record["kind"], record["data"]["train"]["name"]
    if name in QUESTIONS:
        known = "" if name == MIXED_QUESTIONS else f" --tasks {name}"  # Words of other tasks may be unknown to it.
        return f"; try: analyze retrieval {shlex.quote(str(out))}{known} --lengths 0,500"
    if kind == "pixels":
        return f"; try: analyze position {shlex.quote(str(out))}"
    if kind == "instructions":
        return f"; try: analyze prompts {shlex.quote(str(out))} --data sst2 --limit 200"
    if kind in ("text", "language"):
        return f'; try: analyze heatmap {shlex.quote(str(out))} --text "…"'
    return f"; try: analyze heatmap {shlex.quote(str(out))} --ids 0,1,1,0"


def _accuracy(measured: Mapping[str, Any]) -> str:
    low, high = measured["interval"]
    return f"{measured['accuracy']:.3f} (95 % interval {low:.3f} to {high:.3f}, {measured['examples']:,} examples)"
