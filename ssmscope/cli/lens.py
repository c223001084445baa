"""The verbs that ask what a model knows in each layer: lens (fit, show) and snr."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmscope.cli import checks
from ssmscope.cli.app import app
from ssmscope.command import (
    DEVICE,
    FILE,
    IDS,
    IMAGE,
    JSON,
    MAX_TOKENS,
    MODEL,
    OUT,
    SPLIT,
    TEXT,
    TOKENIZER,
    Given,
    Verbs,
    answer,
    names,
)
from ssmscope.errors import InputError
from ssmscope.inputs import check_writable, whole_numbers
from ssmscope.options import number, whole

if TYPE_CHECKING:
    from ssmscope.model import Model
    from ssmscope.probes.lens_data import Given as LensData

LENS = Annotated[
    Path | None, typer.Option("--lens", metavar="LENS", help="The directory of a tuned lens; else the logit lens.")
]
LOGIT = "logit"
"""What stands for the logit lens among several lenses."""
CHOSEN = ("validation", "test", "train")
"""A lens is fitted on the first of these splits that a known data set has: as in the paper, on no training text."""

lens = typer.Typer(
    cls=Verbs,
    help="What a model would answer if it stopped after an earlier layer: fit a tuned lens, or show one's answers.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(lens, name="lens")


@lens.command("fit")
@checks.checked(checks.lens_fit)
def lens_fit(
    model: MODEL,
    out: Annotated[Path, typer.Option("--out", metavar="LENS", help="The directory of the lens.")],
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="DATA", help="wikitext2, sst2, cifar10, … or a file; else what MODEL learnt from."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME", help="Of a known data set; by default validation, else test."),
    ] = None,
    validation: Annotated[
        str | None, typer.Option("--validation", metavar="FILE", help="Held-out data; by default a share of DATA.")
    ] = None,
    held_out: Annotated[float, typer.Option("--held-out", parser=number, metavar="X", help="That share.")] = 0.1,
    length: Annotated[
        int, typer.Option("--length", parser=whole, metavar="N", help="Tokens of a row, of a language model's text.")
    ] = 256,
    positions: Annotated[
        str | None,
        typer.Option(
            "--positions", metavar="every|last", help="Where the lens reads; of a classifier by default last."
        ),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option("--optimizer", metavar="sgd|adam", help="sgd with Nesterov momentum, as in the paper, or adam."),
    ] = "sgd",
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate", parser=number, metavar="X", help="At the first step; 1 for sgd, 0.001 for adam."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", parser=whole, metavar="N", help="At most.")] = 250,
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", parser=whole, metavar="N", help="Tokens of a step.")
    ] = 4096,
    weight_decay: Annotated[
        float, typer.Option("--weight-decay", parser=number, metavar="X", help="Draws the lens to the logit lens.")
    ] = 1e-3,
    clip: Annotated[
        float, typer.Option("--clip", parser=number, metavar="X", help="The gradient's largest norm.")
    ] = 1.0,
    patience: Annotated[
        int | None, typer.Option("--patience", parser=whole, metavar="N", help="Looks without a better one, then stop.")
    ] = None,
    look_every: Annotated[
        int, typer.Option("--look-every", parser=whole, metavar="N", help="Steps between looks at held-out rows.")
    ] = 10,
    checkpoint_minutes: Annotated[
        float, typer.Option("--checkpoint-minutes", parser=number, metavar="X", help="Between checkpoints, at most.")
    ] = 5.0,
    seed: Annotated[
        int, typer.Option("--seed", parser=whole, metavar="N", help="Draws held-out rows, their order and resamples.")
    ] = 0,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """Fit a tuned lens to a model's own answers, layer by layer. A killed run continues."""
    check_writable(out)

    from ssmscope.models.load import load, trained_on
    from ssmscope.probes.lens_training import RECORD, LensFit, fit_lens

    loaded = load(model, tokenizer=tokenizer, device=device)
    name = data if data is not None else trained_on(model)
    if name is None or (data is None and name not in _known(loaded)):
        raise InputError(f"no data; give --data, one of {', '.join(_known(loaded))}, or a file")
    try:
        fit_lens(
            loaded,
            _rows(loaded, name, split, length),
            out,
            validation=_rows(loaded, validation, None, length) if validation is not None else None,
            held_out=held_out,
            positions=positions,
            optimizer=optimizer,
            learning_rate=learning_rate,
            steps=steps,
            batch_tokens=batch_tokens,
            weight_decay=weight_decay,
            clip=clip,
            patience=patience,
            look_every=look_every,
            seed=seed,
            checkpoint_minutes=checkpoint_minutes,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues from the last checkpoint") from None
    found = LensFit.load(out / RECORD)
    try:
        found.save(out, Path(RECORD).stem)
    except InputError as error:
        raise InputError(f"{error}; the lens is whole and stays, and the same command adds its figures") from error
    answer(found, None, json)
    if not json:
        print(
            f'\nSaved in {out}; try: analyze lens show {shlex.quote(model)} --lens {shlex.quote(str(out))} --text "…"'
        )


@lens.command("show")
@checks.checked(checks.lens_show)
def lens_show(
    model: MODEL,
    lens: LENS = None,
    text: TEXT = None,
    file: FILE = None,
    ids: IDS = None,
    image: IMAGE = None,
    positions: Annotated[
        str | None, typer.Option("--positions", metavar="every|last", help="By default where the lens was fitted.")
    ] = None,
    statistic: Annotated[
        str,
        typer.Option(
            "--statistic",
            metavar="NAME",
            help="Shown in colour: answer_probability, top_probability, entropy, cross_entropy or kl.",
        ),
    ] = "answer_probability",
    max_tokens: MAX_TOKENS = 2048,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """What the model would answer after each layer, token by token."""
    given = Given(text, file, ids, image, max_tokens)
    check_writable(out)

    from ssmscope.models.load import load
    from ssmscope.probes.trajectory import trajectory

    loaded = load(model, tokenizer=tokenizer, device=device)
    answer(
        trajectory(loaded, given.encoded(loaded), lens=lens, positions=positions, statistic=statistic),
        out,
        json,
    )


@app.command()
@checks.checked(checks.snr)
def snr(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Language models: demo/NAME, directories, or hub ids.")
    ],
    lens: Annotated[
        list[str] | None,
        typer.Option(
            "--lens", metavar="LENS", help="The tuned lens of each MODEL, in their order (logit: none); repeatable."
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="A,B,…", help="Of qa1 to qa5, by default all.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="N,M,…", help="Of the contexts, by default 1000.")
    ] = None,
    unit: Annotated[
        str, typer.Option("--unit", metavar="words|tokens", help="Of lengths; tokens of the first model.")
    ] = "words",
    examples: Annotated[
        int | None, typer.Option("--examples", parser=whole, metavar="N", help="Of each task; by default 200.")
    ] = None,
    filler: Annotated[
        str | None,
        typer.Option("--filler", metavar="NAME", help="Between the facts: generated, wikitext2, or a file of text."),
    ] = None,
    questions: Annotated[
        list[str] | None,
        typer.Option(
            "--questions",
            metavar="FILE",
            help="Your own: columns context, question, answer and, if need be, distractors; repeatable.",
        ),
    ] = None,
    template: Annotated[
        str, typer.Option("--template", metavar="TEXT", help="A prompt with {context} and {question} in it.")
    ] = "{context} {question}",
    spaced: Annotated[
        bool, typer.Option("--spaced/--no-spaced", help="A space before the full stops of generated facts.")
    ] = True,
    split: SPLIT = "test",
    seed: Annotated[int, typer.Option("--seed", parser=whole, metavar="N", help="Draws questions and resamples.")] = 0,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """How early a model knows the answer: the probability of the needle token in every layer, and of distractors."""
    wanted = whole_numbers(lengths, "--lengths", "250,1000") if lengths is not None else None
    if lens is not None and len(lens) != len(models):
        raise InputError(
            f"{len(lens)} lenses were given for {len(models)} models; give --lens for each, in their order ({LOGIT} is "
            "the logit lens)"
        )
    check_writable(out)

    from ssmscope.models.load import load
    from ssmscope.probes.snr import needle_snr

    result = needle_snr(
        [load(model, tokenizer=tokenizer, device=device) for model in models],
        lens=[None if one == LOGIT else one for one in lens] if lens is not None else None,
        tasks=names(tasks) if tasks is not None else None,
        lengths=wanted,
        unit=unit,
        examples=examples,
        filler=filler,
        questions=questions or None,
        template=template,
        spaced=spaced,
        split=split or "test",
        seed=seed,
    )
    answer(result, out, json)


# ---- what a lens is fitted on


def _known(model: Model) -> tuple[str, ...]:
    """The names of data sets of the model's kind."""
    from ssmscope.tasks import pixels
    from ssmscope.tasks.text import LINE_SOURCES, SOURCES

    if model.channels is not None:
        return tuple(pixels.KNOWN)
    return tuple(SOURCES) if model.is_classifier else tuple(LINE_SOURCES)


def _rows(model: Model, data: str, split: str | None, length: int) -> LensData:
    """Text in rows for a language model, labelled examples for a classifier."""
    from ssmscope.tasks.labelled import load_labelled
    from ssmscope.tasks.language import language_data, load_lines
    from ssmscope.tasks.text import LINE_SOURCES, SOURCES

    if not model.is_classifier:
        if model.tokenizer is None:
            raise InputError(f"{model.name} has no tokenizer to read {data} with; name one with --tokenizer")
        part = split or ("validation" if data in LINE_SOURCES else None)
        lines = load_lines(data, part)
        return language_data(lines, model.tokenizer, length=length, name=Path(data).stem, split=part or "all")
    if split is None and data in SOURCES:
        split = next(name for name in CHOSEN if name in SOURCES[data].splits)
    return load_labelled(data, split, label_names=model.labels)
