"""The verbs that probe a model: stability, with the generalisation bound, and influence."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    TEXT,
    TOKENIZER,
    Given,
    answer,
    console,
    numbers,
)
from ssmscope.errors import InputError
from ssmscope.inputs import check_writable, whole_numbers
from ssmscope.options import number, whole

if TYPE_CHECKING:
    from ssmscope.model import Model
    from ssmscope.probes.generalization import GeneralizationBound
    from ssmscope.results import Result

CHECKPOINTS = (".pth", ".pt")
"""How files of weights end that are looked for in a directory of checkpoints."""

MOST_TOKENS = 16384
"""Of a text, unless --max-tokens says otherwise."""


def _checkpoints(models: Sequence[str]) -> list[str]:
    """The models; in place of a directory that is none itself, the checkpoints in it, in the order of their names."""
    found = []
    for name in models:
        inside: list[Path] = []
        if Path(name).is_dir() and not Path(name, "config.json").exists():
            try:
                files = sorted(file for file in Path(name).iterdir() if not file.name.startswith("."))
            except OSError as error:
                raise InputError(f"cannot read {name}: {error.strerror or error}") from error
            inside = [f for f in files if (f.suffix in CHECKPOINTS and f.is_file()) or (f / "config.json").is_file()]
        found += [str(file) for file in inside] or [name]
    return found


def _given(
    text: list[str] | None,
    file: str | None,
    ids: list[str] | None,
    image: list[str] | None,
    max_tokens: int,
    length: Any,
) -> Given | None:
    """The texts of a command line; None where there are none, and random sequences are drawn instead."""
    if not (text or file is not None or ids or image):
        return None
    if length is not None:
        raise InputError("--length is that of random sequences; leave it out beside --text, --file, --ids and --image")
    return Given(text, file, ids, image, max_tokens)


@app.command()
@checks.checked(checks.stability)
def stability(
    model: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="demo/NAME, a directory, a file, or a hub id; of several, a table."),
    ],
    text: TEXT = None,
    file: FILE = None,
    ids: IDS = None,
    image: IMAGE = None,
    length: Annotated[
        str | None,
        typer.Option(
            "--length",
            metavar="N|A,B,…",
            help="Tokens of random sequences, else 512, and the bound's T; of several models, one T for each or all.",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", parser=whole, metavar="N", help="How many random sequences; else 4.")
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            "--positions", metavar="N|0,5,…", help="Where norms are taken: how many places, else 33, or which."
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", parser=number, metavar="X", help="Log-gains up to this count as 1; else 1e-6."),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            "--examples",
            parser=whole,
            metavar="M",
            help="Of the bound: how many MODEL was trained on, else as recorded.",
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option("--delta", parser=number, metavar="P", help="Of the bound: the chance that it fails; else 0.05."),
    ] = None,
    loss_bound: Annotated[
        float | None,
        typer.Option("--loss-bound", parser=number, metavar="X", help="Of the bound: the largest loss; else 1."),
    ] = None,
    lipschitz: Annotated[
        float | None,
        typer.Option("--lipschitz", parser=number, metavar="X", help="Of the bound: the loss's constant; else 1."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="A,B,…", help="Of the bound: at which T its curves have ln C.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", parser=whole, metavar="N", help="Draws random sequences and resamples.")
    ] = 0,
    out: OUT = None,
    json: JSON = False,
    max_tokens: MAX_TOKENS = MOST_TOKENS,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """Can its states grow, and how fast do they fade? Spectral abscissa, growth, half-lives and a verdict by layer.

    Of a selective SSM also the generalisation bound, of another model with --examples the terms that stand for it.
    Several models, or a directory of checkpoints, make one table.
    """
    chosen = None if length is None else whole_numbers(length, "--length", "100")
    bounded = {"examples": examples, "delta": delta, "loss_bound": loss_bound, "lipschitz": lipschitz}
    setting: dict[str, Any] = {name: value for name, value in bounded.items() if value is not None}
    if lengths is not None:
        setting["lengths"] = whole_numbers(lengths, "--lengths", "10,100,1000")
    given = _given(text, file, ids, image, max_tokens, length)
    own = {"samples": samples, "positions": positions, "tolerance": tolerance}
    check_writable(out)

    names = _checkpoints(model)
    if len(names) > 1:
        of_one = {"--text, --file, --ids and --image": given, **{f"--{name}": value for name, value in own.items()}}
        of_one |= {"--tokenizer": tokenizer, "--device": None if device == "cpu" else device}
        unused = next((name for name, value in of_one.items() if value is not None), None)
        if unused is not None:
            raise InputError(f"{unused} cannot be used with {len(names)} models, which make a table; give one model")
        from ssmscope.probes.stability_table import stability_table

        each = chosen[0] if chosen is not None and len(chosen) == 1 else chosen
        answer(stability_table(names, length=each, **setting, seed=seed), out, json)
        return
    if chosen is not None and len(chosen) > 1:
        raise InputError(f"--length {length} has {len(chosen)} numbers for one model; give one")

    from ssmscope.models.load import load
    from ssmscope.probes.stability import stability as stability_of

    loaded = load(names[0], tokenizer=tokenizer, device=device)
    texts = None if given is None else given.encoded(loaded)
    options: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    if positions is not None:
        places = whole_numbers(positions, "--positions", "0,5")
        options["positions"] = places[0] if len(places) == 1 else places
    found = stability_of(loaded, texts, length=chosen[0] if chosen else None, **options, seed=seed)
    bound, hint = _bound(loaded, names[0], texts, found.longest, setting, seed)
    _answer_both(found, bound, hint, out, json)


def _bound(
    model: Model, name: str, texts: Any, length: int, setting: dict[str, Any], seed: int
) -> tuple[GeneralizationBound | None, str]:
    """The bound at T = `length`, and what is to be said where there is none."""
    from ssmscope.probes.bound_norms import theorem_model
    from ssmscope.probes.generalization import generalization_bound

    theorems = theorem_model(model) is not None
    known = setting.get("examples")
    if known is None and theorems:
        known = _trained_on_so_many(name)
    if known is None:
        unused = next((f"--{option.replace('_', '-')}" for option in setting), None)
        if unused is not None:
            raise InputError(f"{unused} is of the bound: give --examples too, how many {model.name} was trained on")
        return None, "With --examples M, the number of its training examples, its bound stands here too." * theorems
    measured = {} if theorems else {"texts": texts, "seed": seed}
    return generalization_bound(model, length=length, **{**setting, "examples": known}, **measured), ""


def _trained_on_so_many(name: str) -> int | None:
    """How many examples a model learnt from, where its directory has our record of the training."""
    try:
        record = json_module.loads(Path(name, "training.json").read_bytes())
        return int(record["data"]["train"]["examples"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def _answer_both(found: Result, bound: Result | None, hint: str, out: Path | None, json: bool) -> None:
    """As `answer`, for the stability and the bound of one model; the JSON is one object with both."""
    from ssmscope.results import save_together

    results = [found] if bound is None else [found, bound]
    saved = {} if out is None else save_together({one.kind: one for one in results}, out)
    files = [path for paths in saved.values() for path in paths.values()]
    if json:
        both = {"stability": found.to_dict(), "bound": None if bound is None else bound.to_dict()}
        print(json_module.dumps(both, allow_nan=False))
    else:
        console().print(found)
        if bound is not None or hint:
            print()
            console().print(hint if bound is None else bound)
    if files:
        print("\nFiles:", *files, sep="\n  ", file=sys.stderr if json else sys.stdout)


@app.command()
@checks.checked(checks.influence)
def influence(
    model: MODEL,
    text: TEXT = None,
    file: FILE = None,
    ids: IDS = None,
    image: IMAGE = None,
    length: Annotated[
        int | None,
        typer.Option("--length", parser=whole, metavar="N", help="Instead of texts, random sequences of N tokens."),
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", parser=whole, metavar="N", help="How many of these.")] = 8,
    positions: Annotated[
        str, typer.Option("--positions", metavar="last|all|0,-1", help="Of which outputs; -1 is a text's last.")
    ] = "last",
    at: Annotated[
        str, typer.Option("--at", metavar="output|layers", help="The whole model alone, or each layer's mixer too.")
    ] = "output",
    of: Annotated[
        str, typer.Option("--of", metavar="hidden|logits", help="What the head reads, or the logits.")
    ] = "hidden",
    exact: Annotated[
        bool | None,
        typer.Option("--exact/--estimated", help="Exact norms, or estimated; by default exact up to 64 components."),
    ] = None,
    probes: Annotated[
        int, typer.Option("--probes", parser=whole, metavar="N", help="Random vectors of an estimate, from 2 on.")
    ] = 8,
    fit_from: Annotated[
        int, typer.Option("--fit-from", parser=whole, metavar="N", help="The least distance of the fitted line.")
    ] = 1,
    fit_to: Annotated[
        int | None, typer.Option("--fit-to", parser=whole, metavar="N", help="The largest; else as far as can be seen.")
    ] = None,
    recent: Annotated[
        int, typer.Option("--recent", parser=whole, metavar="K", help="How many last tokens are called recent.")
    ] = 8,
    seed: Annotated[
        int, typer.Option("--seed", parser=whole, metavar="N", help="Draws sequences, vectors and resamples.")
    ] = 0,
    out: OUT = None,
    json: JSON = False,
    max_tokens: MAX_TOKENS = MOST_TOKENS,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """How far back an output depends on its input (recency), and how alike tokens become by layer (over-smoothing)."""
    given = _given(text, file, ids, image, max_tokens, length)
    if given is None and length is None:
        raise InputError("no text; give --text, --file, --ids or --image, or --length N for random sequences")
    chosen = numbers(positions, "--positions", "0,-1")
    check_writable(out)

    from ssmscope.models.load import load
    from ssmscope.probes.influence import influence as influence_of

    loaded = load(model, tokenizer=tokenizer, device=device, dtype="float32")  # gradients need the digits
    result = influence_of(
        loaded,
        None if given is None else given.encoded(loaded),
        length=length,
        sequences=sequences,
        positions=chosen,
        at=at,
        of=of,
        exact=exact,
        probes=probes,
        fit_from=fit_from,
        fit_to=fit_to,
        recent=recent,
        seed=seed,
    )
    answer(result, out, json)
