"""The verbs about long contexts: retrieval, what a model still finds in one, and loss, how well it uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssmscope.cli import checks
from ssmscope.cli.app import app
from ssmscope.command import DEVICE, JSON, OUT, SPLIT, TOKENIZER, answer, names
from ssmscope.errors import InputError
from ssmscope.inputs import check_writable, whole_numbers
from ssmscope.options import whole

MODELS = Annotated[
    list[str], typer.Argument(metavar="MODEL…", help="One or several: demo/NAME, a directory, a file, or a hub id.")
]
PIECE = Annotated[
    int, typer.Option("--piece", parser=whole, metavar="N", help="How many tokens of a text run at once.")
]
PROGRESS = Annotated[bool, typer.Option("--progress/--no-progress", help="Say on stderr how far it is.")]


@app.command()
@checks.checked(checks.retrieval)
def retrieval(
    models: MODELS,
    tasks: Annotated[str, typer.Option("--tasks", metavar="A,B,…", help="Of qa1 to qa5.")] = "qa1,qa2,qa3,qa4,qa5",
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="0,1000,…", help="Tokens of the contexts, by the first tokenizer.")
    ] = "0,1000,2000,4000,8000,16000",
    examples: Annotated[
        int, typer.Option("--examples", parser=whole, metavar="N", help="Questions of each task and length.")
    ] = 100,
    filler: Annotated[
        str, typer.Option("--filler", metavar="NAME", help="generated, wikitext2, or a file of text.")
    ] = "generated",
    template: Annotated[
        str | None, typer.Option("--template", metavar="TEXT", help="A prompt with {context} and {question} in it.")
    ] = None,
    spaced: Annotated[
        bool, typer.Option("--spaced/--no-spaced", help="A space before the facts' full stops and question marks.")
    ] = True,
    split: Annotated[str, typer.Option("--split", metavar="NAME", help="Of the stories.")] = "test",
    piece: PIECE = 2048,
    seed: Annotated[
        int, typer.Option("--seed", parser=whole, metavar="N", help="Draws stories, filler and resamples.")
    ] = 0,
    progress: PROGRESS = True,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """What a model still finds in a long context: accuracy by task and length; of several also their ratio."""
    steps = whole_numbers(lengths, "--lengths", "0,1000,4000")
    check_writable(out)

    from ssmscope.models.load import load
    from ssmscope.probes.retrieval import retrieval as measure

    result = measure(
        [load(model, tokenizer=tokenizer, device=device, dtype="float32") for model in models],
        tasks=names(tasks),
        lengths=steps,
        examples=examples,
        filler=filler,
        **({"template": template} if template is not None else {}),
        spaced=spaced,
        split=split,
        piece=piece,
        seed=seed,
        progress=progress,
    )
    answer(result, out, json)


@app.command()
@checks.checked(checks.loss)
def loss(
    models: MODELS,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DATA", help="wikitext2, or a file with a column text, a document each row."),
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="A .txt file instead: one long document.")
    ] = None,
    split: SPLIT = None,
    length: Annotated[int, typer.Option("--length", parser=whole, metavar="N", help="Tokens of a window.")] = 2048,
    limit: Annotated[
        int | None, typer.Option("--limit", parser=whole, metavar="N", help="Only so many windows, drawn by the seed.")
    ] = None,
    smooth: Annotated[
        int,
        typer.Option("--smooth", parser=whole, metavar="N", help="Positions that the curve is averaged over; odd."),
    ] = 101,
    unit: Annotated[str, typer.Option("--unit", metavar="nats|bits", help="Of the loss.")] = "nats",
    piece: PIECE = 2048,
    seed: Annotated[int, typer.Option("--seed", parser=whole, metavar="N", help="Draws windows and resamples.")] = 0,
    progress: PROGRESS = True,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """How well a model uses its context: the loss of the next token by its position in long texts."""
    if data is not None and file is not None:
        raise InputError("--data cannot be combined with --file; give one of them")
    if file is not None and Path(file).suffix.lower() != ".txt":
        raise InputError(f"--file {file}: give a .txt file; other data is given with --data")
    check_writable(out)

    from ssmscope.models.load import load
    from ssmscope.probes.token_loss import token_loss

    result = token_loss(
        [load(model, tokenizer=tokenizer, device=device, dtype="float32") for model in models],
        data or file or "wikitext2",
        split=split,
        length=length,
        limit=limit,
        smooth=smooth,
        unit=unit,
        piece=piece,
        seed=seed,
        progress=progress,
    )
    answer(result, out, json)
