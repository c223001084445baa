"""The verbs that attack a model: position."""

from __future__ import annotations

from typing import Annotated

import typer

from ssmscope.cli.app import app
from ssmscope.command import (
    DEVICE,
    JSON,
    MODEL,
    OUT,
    SPLIT,
    TOKENIZER,
    answer,
)
from ssmscope.errors import InputError
from ssmscope.inputs import check_writable
from ssmscope.options import whole


@app.command()
def position(
    model: MODEL,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DATA", help="cifar10, digits, sst2, … or a file; else what MODEL learnt from."),
    ] = None,
    split: SPLIT = None,
    regions: Annotated[
        str | None,
        typer.Option(
            "--regions",
            metavar="A:B,…",
            help="Tokens 0:32,992:1024 or shares 0%:10%; by default the paper's, or the first and last 10 % and 25 %.",
        ),
    ] = None,
    replacement: Annotated[
        str, typer.Option("--replacement", metavar="noise|zeros|mean|other", help="other: tokens of another class.")
    ] = "noise",
    window: Annotated[
        str | None, typer.Option("--window", metavar="N|P%", help="Also slide a window so wide along the sequence.")
    ] = None,
    stride: Annotated[
        str | None, typer.Option("--stride", metavar="N|P%", help="How far apart the windows are; else their width.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", parser=whole, metavar="N", help="Only so many examples, drawn by the seed.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", parser=whole, metavar="N", help="Examples that are run together.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", parser=whole, metavar="N", help="Draws examples, noise, donors and resamples.")
    ] = 0,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """How much a classifier's accuracy drops when tokens at one place are spoiled: the position-bias attack."""
    check_writable(out)

    from ssmscope.attacks.position import position_bias
    from ssmscope.models.load import load, trained_on
    from ssmscope.tasks.labelled import KNOWN, load_labelled

    loaded = load(model, tokenizer=tokenizer, device=device)
    name = data if data is not None else trained_on(model)
    if name is None or (data is None and name not in KNOWN):
        raise InputError(f"no data; give --data, one of {', '.join(KNOWN)}, or a file with text and label")
    examples = load_labelled(name, split, label_names=loaded.labels)
    result = position_bias(
        loaded,
        examples,
        regions=regions,
        replacement=replacement,
        window=window,
        stride=stride,
        limit=limit,
        batch_size=batch_size,
        seed=seed,
    )
    answer(result, out, json)
