"""The verbs that attack a model: position, insertion, overflow, prompts, words, and effect, what an attack does."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmscope.cli import checks
from ssmscope.cli.app import app
from ssmscope.command import (
    DEVICE,
    JSON,
    MODEL,
    OUT,
    SPLIT,
    TOKENIZER,
    answer,
    names,
    numbers,
)
from ssmscope.errors import InputError
from ssmscope.inputs import check_writable, whole_numbers
from ssmscope.options import whole

if TYPE_CHECKING:
    from ssmscope.model import Model
    from ssmscope.tasks.text import TextData

DATA = Annotated[
    str | None, typer.Option("--data", metavar="DATA", help="sst2, imdb, … or a file; else what MODEL learnt from.")
]
LIMIT = Annotated[
    int | None, typer.Option("--limit", parser=whole, metavar="N", help="Only so many examples, drawn by the seed.")
]
SEED = Annotated[int, typer.Option("--seed", parser=whole, metavar="N", help="Of everything that is drawn.")]
TEMPLATES = Annotated[
    list[str] | None,
    typer.Option("--template", metavar="TEXT", help="A prompt with {content} in it; repeatable. Else those of DATA."),
]
TEMPLATE = Annotated[
    str | None,
    typer.Option("--template", metavar="TEXT", help="A prompt with {content} in it, for a language model."),
]
WORDS = Annotated[
    str | None,
    typer.Option("--words", metavar="A,B,…", help="What a language model answers for each class, in their order."),
]
SCORING = Annotated[
    str,
    typer.Option("--scoring", metavar="likelihood|generated", help="The likelihood of the words, or what is said."),
]
NORMALISE = Annotated[
    bool, typer.Option("--normalise/--no-normalise", help="Divide log-likelihoods by the number of tokens.")
]
CACHE = Annotated[
    Path | None,
    typer.Option("--cache", metavar="FILE", help="Where answers are kept; else in --out, as answers.sqlite."),
]
EMBEDDINGS = Annotated[
    Path | None, typer.Option("--embeddings", metavar="FILE", help="Word vectors, for neighbours in meaning.")
]
MASKED_LM = Annotated[
    str | None, typer.Option("--masked-lm", metavar="NAME", help="A directory or hub id of a masked language model.")
]
ENCODER = Annotated[
    str | None, typer.Option("--encoder", metavar="NAME", help="A directory or hub id of a sentence encoder.")
]


@contextmanager
def _answers(cache: Path | None, out: Path | None) -> Iterator[Path | None]:
    """The file of answers from which a killed run continues.

    One that this run made in --out goes again, with the directory, where the input is refused after all; it stays where
    only the disk was in the way.
    """
    if cache is not None or out is None:
        yield cache
        return
    file = out / "answers.sqlite"
    known = os.path.exists(file)
    new = [place for place in (out, *out.parents) if not os.path.lexists(place)]
    try:
        yield file
    except InputError as error:
        if not known and not isinstance(error.__cause__, OSError):
            traceback.clear_frames(error.__traceback__)  # which hold the file open: Windows deletes no such file
            for tail in ("", "-wal", "-shm"):
                file.with_name(file.name + tail).unlink(missing_ok=True)
            for place in new:
                with suppress(OSError):
                    place.rmdir()
        raise


def _texts(loaded: Model, model: str, data: str | None, split: str | None) -> TextData:
    """The examples that were asked for, or those that the model learnt from."""
    from ssmscope.models.load import trained_on
    from ssmscope.tasks.text import SOURCES, load_text

    name = data if data is not None else trained_on(model)
    if name is None or (data is None and name not in SOURCES):
        raise InputError(f"no data; give --data, one of {', '.join(SOURCES)}, or a file with text and label")
    return load_text(name, split, label_names=loaded.labels)


@app.command()
@checks.checked(checks.position)
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
    limit: LIMIT = None,
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


@app.command()
@checks.checked(checks.insertion)
def insertion(
    model: MODEL,
    data: DATA = None,
    split: SPLIT = None,
    insert: Annotated[
        list[str] | None,
        typer.Option("--insert", metavar="TEXT", help="What is put in, by default StressTest's phrase; repeatable."),
    ] = None,
    places: Annotated[
        int, typer.Option("--places", parser=whole, metavar="N", help="Evenly spread, from a prefix to a suffix.")
    ] = 11,
    template: TEMPLATE = None,
    words: WORDS = None,
    scoring: SCORING = "likelihood",
    limit: LIMIT = None,
    seed: SEED = 0,
    cache: CACHE = None,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """Where the same words hurt most: a phrase is put at every place of a text, from a prefix to a suffix."""
    check_writable(out)

    from ssmscope.attacks.insertion import insertion_sweep
    from ssmscope.models.load import load

    loaded = load(model, tokenizer=tokenizer, device=device)
    with _answers(cache, out) as kept:
        result = insertion_sweep(
            loaded,
            _texts(loaded, model, data, split),
            **({"insert": insert} if insert else {}),
            places=places,
            template=template,
            words=names(words) if words is not None else None,
            scoring=scoring,
            limit=limit,
            seed=seed,
            cache=kept,
        )
        answer(result, out, json)


@app.command()
@checks.checked(checks.overflow)
def overflow(
    model: MODEL,
    data: DATA = None,
    split: SPLIT = None,
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="0,16,…", help="Tokens of filler.")
    ] = "0,16,32,64,128,256,512",
    filler: Annotated[
        str | None,
        typer.Option("--filler", metavar="FILE", help="A text, its file, or wikitext2; else sentences."),
    ] = None,
    template: TEMPLATE = None,
    words: WORDS = None,
    limit: LIMIT = None,
    seed: SEED = 0,
    cache: CACHE = None,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """When the state is full: accuracy as filler grows between a text and the question about it."""
    tokens = whole_numbers(lengths, "--lengths", "0,64,256")
    check_writable(out)

    from ssmscope.attacks.overflow import state_overflow
    from ssmscope.models.load import load

    loaded = load(model, tokenizer=tokenizer, device=device)
    with _answers(cache, out) as kept:
        result = state_overflow(
            loaded,
            _texts(loaded, model, data, split),
            filler=filler,
            lengths=tokens,
            template=template,
            words=names(words) if words is not None else None,
            limit=limit,
            seed=seed,
            cache=kept,
        )
        answer(result, out, json)


@app.command()
@checks.checked(checks.prompts)
def prompts(
    model: MODEL,
    data: DATA = None,
    split: SPLIT = None,
    attacks: Annotated[
        str,
        typer.Option(
            "--attacks",
            metavar="A,B,…",
            help="stresstest, checklist, deepwordbug, textbugger, textfooler, bertattack, semantic.",
        ),
    ] = "stresstest,checklist,deepwordbug,textbugger",
    template: TEMPLATES = None,
    words: WORDS = None,
    scoring: SCORING = "likelihood",
    normalise: NORMALISE = False,
    suffix: Annotated[
        str, typer.Option("--suffix", metavar="end|before", help="At the prompt's very end, or before {content}.")
    ] = "end",
    as_promptbench: Annotated[
        bool,
        typer.Option(
            "--as-promptbench/--no-as-promptbench",
            help="Start searches and place suffixes as PromptBench does; else a change must cost accuracy.",
        ),
    ] = False,
    embeddings: EMBEDDINGS = None,
    masked_lm: MASKED_LM = None,
    encoder: ENCODER = None,
    semantic: Annotated[
        str | None,
        typer.Option("--semantic", metavar="promptbench|FILE", help="Rewritten prompts, for the attack semantic."),
    ] = None,
    limit: LIMIT = None,
    seed: SEED = 0,
    cache: CACHE = None,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """How far accuracy falls when the prompt is attacked: PromptBench's attacks, performance drop rate. A killed run
    continues."""
    check_writable(out)

    from ssmscope.attacks.prompts import prompt_attack
    from ssmscope.models.load import load

    loaded = load(model, tokenizer=tokenizer, device=device)
    with _answers(cache, out) as kept:
        result = prompt_attack(
            loaded,
            _texts(loaded, model, data, split),
            attacks=names(attacks),
            templates=template or None,
            words=names(words) if words is not None else None,
            scoring=scoring,
            normalise=normalise,
            suffix=suffix,
            as_promptbench=as_promptbench,
            embeddings=embeddings,
            masked_lm=masked_lm,
            encoder=encoder,
            semantic=semantic,
            limit=limit,
            seed=seed,
            cache=kept,
        )
        answer(result, out, json)


@app.command()
@checks.checked(checks.words)
def words(
    model: MODEL,
    data: DATA = None,
    split: SPLIT = None,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            metavar="NAME",
            help="deepwordbug, textbugger, pwws, checklist, textfooler, bertattack, or hotflip (white box).",
        ),
    ] = "deepwordbug",
    template: TEMPLATE = None,
    words: WORDS = None,
    budget: Annotated[
        int | None, typer.Option("--budget", parser=whole, metavar="N", help="Queries an example may take.")
    ] = None,
    beam: Annotated[int, typer.Option("--beam", parser=whole, metavar="N", help="Of hotflip; 1 is greedy.")] = 1,
    flips: Annotated[
        int | None, typer.Option("--flips", parser=whole, metavar="N", help="Words that hotflip may change.")
    ] = None,
    embeddings: EMBEDDINGS = None,
    masked_lm: MASKED_LM = None,
    encoder: ENCODER = None,
    synonyms: Annotated[
        Path | None,
        typer.Option("--synonyms", metavar="FILE", help="Of pwws: a json of word: [words], or a csv."),
    ] = None,
    limit: LIMIT = None,
    seed: SEED = 0,
    cache: CACHE = None,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """How often changing some of a text's words changes the answer: TextAttack's recipes, and HotFlip. A killed run
    continues."""
    check_writable(out)

    from ssmscope.attacks.words import word_attack
    from ssmscope.models.load import load

    loaded = load(model, tokenizer=tokenizer, device=device, dtype="float32")  # gradients need the digits
    with _answers(cache, out) as kept:
        result = word_attack(
            loaded,
            _texts(loaded, model, data, split),
            recipe=recipe,
            template=template,
            words=names(words) if words is not None else None,
            budget=budget,
            beam=beam,
            flips=flips,
            embeddings=embeddings,
            masked_lm=masked_lm,
            encoder=encoder,
            synonyms=synonyms,
            limit=limit,
            seed=seed,
            cache=kept,
        )
        answer(result, out, json)


@app.command()
@checks.checked(checks.effect)
def effect(
    model: MODEL,
    before: Annotated[str, typer.Option("--before", metavar="TEXT", help="The text as it was.")],
    after: Annotated[str, typer.Option("--after", metavar="TEXT", help="The text as the attack left it.")],
    layers: Annotated[
        str, typer.Option("--layers", metavar="mean|all|0,3", help="Average all layers; also show all, or those given.")
    ] = "mean",
    top: Annotated[int, typer.Option("--top", parser=whole, metavar="K", help="How many tokens are named.")] = 5,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """Why an attack works: memory, implicit attention and states of a text before it and after."""
    chosen = numbers(layers, "--layers", "0,3")
    check_writable(out)

    from ssmscope.attacks.effect import attack_effect
    from ssmscope.models.load import load

    loaded = load(model, tokenizer=tokenizer, device=device)
    answer(attack_effect(loaded, before, after, layers=chosen, top=top), out, json)
