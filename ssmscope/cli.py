"""The command `analyze`: one verb per question about a trained state-space model.

Exit codes: 0, the answer is on stdout; 2, the input cannot be used, and one line on stderr says why; 130,
interrupted. Anything else is a fault of ours and shows a traceback. The verbs import what they need when they run.
"""

from __future__ import annotations

import json as json_module
import math
import os
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ssmscope import __version__, command
from ssmscope.command import (
    DEVICE,
    FILE,
    IDS,
    IMAGE,
    JSON,
    MAX_TOKENS,
    METHOD_OPTION,
    METHODS,
    MODEL,
    OUT,
    SPLIT,
    TEXT,
    TOKENIZER,
    Given,
    Verbs,
    answer,
    method_options,
    names,
    numbers,
)
from ssmscope.errors import InputError
from ssmscope.inputs import check_writable
from ssmscope.options import keyword_options, number, taking, whole
from ssmscope.training import ARCHITECTURES, train_model

app = typer.Typer(
    cls=Verbs,
    help="Interpret trained state-space models: Mamba, Mamba-2, Falcon-Mamba, Baleen.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ssmscope {__version__}")
        raise typer.Exit


@app.callback()
def analyze(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that need no verb."""


@app.command()
def heatmap(
    model: MODEL,
    text: TEXT = None,
    file: FILE = None,
    ids: IDS = None,
    image: IMAGE = None,
    score: Annotated[
        str, typer.Option("--score", metavar="retention|write", help="E[A_t], what is kept at a token, or 1 − E[A_t].")
    ] = "retention",
    layers: Annotated[
        str, typer.Option("--layers", metavar="mean|all|0,3", help="Average all layers; also show all, or those given.")
    ] = "mean",
    top: Annotated[
        int, typer.Option("--top", parser=whole, metavar="K", help="How many tokens the rationale has.")
    ] = 5,
    merge: Annotated[bool, typer.Option("--merge/--no-merge", help="Put the tokens of a word together.")] = False,
    out: OUT = None,
    json: JSON = False,
    max_tokens: MAX_TOKENS = 16384,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """Which tokens the selection mechanism keeps in memory, or writes to it, with the top-k rationale."""
    given = Given(text, file, ids, image, max_tokens)
    chosen = numbers(layers, "--layers", "0,3")
    check_writable(out)

    from ssmscope.interp.selection import selection_heatmap
    from ssmscope.models.load import load

    loaded = load(model, tokenizer=tokenizer, device=device)
    trace = loaded.trace(given.encoded(loaded), keep_inputs=False)
    answer(selection_heatmap(trace, score=score, layers=chosen, top=top, merge=merge), out, json)


@app.command()
def attention(
    model: MODEL,
    text: TEXT = None,
    file: FILE = None,
    ids: IDS = None,
    image: IMAGE = None,
    layer: Annotated[str, typer.Option("--layer", metavar="all|3|0,3", help="Of which layers.")] = "all",
    level: Annotated[
        str, typer.Option("--level", metavar="ssm|block", help="The recurrence, or the whole layer with its gates.")
    ] = "block",
    heads: Annotated[
        str, typer.Option("--heads", metavar="mean|abs|all", help="Over heads or channels; abs is slow.")
    ] = "mean",
    rows: Annotated[str, typer.Option("--rows", metavar="all|last|5,7", help="Of which positions.")] = "all",
    pool: Annotated[
        int | None,
        typer.Option("--pool", parser=whole, metavar="N", help="In N × N cells; 0: whole; else 512 over 1024 tokens."),
    ] = None,
    skip: Annotated[bool, typer.Option("--skip/--no-skip", help="With D on the diagonal.")] = True,
    parts: Annotated[
        bool, typer.Option("--parts/--no-parts", help="Also each part that a layer is the sum of.")
    ] = False,
    rollout: Annotated[
        bool, typer.Option("--rollout/--no-rollout", help="The product over the layers instead.")
    ] = False,
    residual: Annotated[
        float, typer.Option("--residual", parser=number, metavar="X", help="The residual's share in a rollout.")
    ] = 0.5,
    gradient: Annotated[
        bool, typer.Option("--gradient/--no-gradient", help="Attention × gradient of a class or next token instead.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--target", metavar="NAME", help="The class, or token id; else the predicted one.")
    ] = None,
    span: Annotated[
        str | None,
        typer.Option("--span", metavar="A:B|TEXT", help="Marks tokens, by position or as a piece of the text."),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", parser=whole, metavar="K", help="How many tokens are recent, or first.")
    ] = 4,
    out: OUT = None,
    json: JSON = False,
    max_tokens: MAX_TOKENS = 16384,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """What each position takes from each other one: the implicit attention of the layers, exact and signed."""
    given = Given(text, file, ids, image, max_tokens)
    layers, chosen = numbers(layer, "--layer", "0,3"), numbers(rows, "--rows", "5,7")
    if target is not None and not gradient:
        raise InputError("--target is the class or token of --gradient; give both")
    unused = [
        name for name, used in (("--rollout", rollout), ("--parts", parts), ("--level ssm", level == "ssm")) if used
    ]
    if gradient and (unused or not skip):
        raise InputError(f"--gradient cannot be combined with {unused[0] if unused else '--no-skip'}")
    check_writable(out)

    from ssmscope.interp.attending import attention_gradient, implicit_attention
    from ssmscope.models.load import load

    loaded = load(model, tokenizer=tokenizer, device=device)
    batch = given.encoded(loaded)
    same: dict[str, Any] = {"layers": layers, "heads": heads, "rows": chosen, "pool": pool, "span": span, "top": top}
    if gradient:
        result = attention_gradient(loaded, batch, target=target, **same)
    else:
        trace = loaded.trace(batch, keep_inputs=True if isinstance(layers, str) else layers)
        result = implicit_attention(
            trace, level=level, skip=skip, parts=parts, rollout=rollout, residual=residual, **same
        )
    answer(result, out, json)


@app.command()
def explain(
    model: MODEL,
    text: TEXT = None,
    file: FILE = None,
    ids: IDS = None,
    image: IMAGE = None,
    methods: METHODS = "ig,self-retention",
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="NAME", help="A class, a next token or a continuation; else what is predicted."
        ),
    ] = None,
    contrast: Annotated[
        str | None, typer.Option("--contrast", metavar="NAME", help="A class or token whose logit is subtracted.")
    ] = None,
    top: Annotated[int, typer.Option("--top", parser=whole, metavar="K", help="How many tokens are named.")] = 5,
    option: METHOD_OPTION = None,
    seed: Annotated[int, typer.Option("--seed", parser=whole, metavar="N", help="Of the methods that draw.")] = 0,
    out: OUT = None,
    json: JSON = False,
    max_tokens: MAX_TOKENS = 16384,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """Which tokens an output rests on, by one or several methods side by side.

    Methods: ig, gradxinput, smoothgrad, gradcam, occlusion, lrp, attention-rollout, attention-gradient, self-retention,
    self-write, random.
    """
    given = Given(text, file, ids, image, max_tokens)
    options = method_options(option)
    check_writable(out)

    from ssmscope.interp.explaining import explain as explained
    from ssmscope.models.load import load

    loaded = load(model, tokenizer=tokenizer, device=device, dtype="float32")  # gradients need the digits
    batch = given.encoded(loaded)
    result = explained(
        loaded,
        batch,
        methods=names(methods),
        target=target,
        contrast=contrast,
        top=top,
        seed=seed,
        options=options,
    )
    answer(result, out, json)


@app.command()
def fidelity(
    model: MODEL,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DATA", help="sst2, imdb, … or a file; else what MODEL learnt from."),
    ] = None,
    split: SPLIT = None,
    methods: METHODS = "self-retention,self-write,ig,gradxinput,gradcam",
    limit: Annotated[
        int | None, typer.Option("--limit", parser=whole, metavar="N", help="Only so many texts, drawn by the seed.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", parser=whole, metavar="N", help="Leave out longer texts.")
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", metavar="replace|delete", help="What is done with a token that is hidden.")
    ] = "replace",
    replacement: Annotated[
        str, typer.Option("--replacement", metavar="mean|zero|pad|TOKEN", help="By which embedding it is replaced.")
    ] = "mean",
    value: Annotated[
        str, typer.Option("--value", metavar="probability|logit", help="Of the class that is predicted.")
    ] = "probability",
    steps: Annotated[
        int, typer.Option("--steps", parser=whole, metavar="N", help="Into how many the share of tokens is divided.")
    ] = 20,
    random_rankings: Annotated[
        int, typer.Option("--random-rankings", parser=whole, metavar="N", help="To compare with; 20 or more.")
    ] = 20,
    option: METHOD_OPTION = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", parser=whole, metavar="N", help="Copies that are run together.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", parser=whole, metavar="N", help="Draws texts, rankings and resamples.")
    ] = 0,
    out: OUT = None,
    json: JSON = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """Can explanations be trusted? The fidelity AUC of methods over a data set, beside random rankings.

    The methods are those of `analyze explain`.
    """
    options = method_options(option)
    check_writable(out)

    from ssmscope.interp.fidelity import fidelity_auc
    from ssmscope.models.load import load, trained_on
    from ssmscope.tasks.text import SOURCES, load_text

    loaded = load(model, tokenizer=tokenizer, device=device, dtype="float32")  # gradients need the digits
    name = data if data is not None else trained_on(model)
    if name is None or (data is None and name not in SOURCES):
        raise InputError(f"no data; give --data, one of {', '.join(SOURCES)}, or a file with text and label")
    result = fidelity_auc(
        loaded,
        load_text(name, split, label_names=loaded.labels),
        methods=names(methods),
        options=options,
        limit=limit,
        max_tokens=max_tokens,
        mode=mode,
        replacement=replacement,
        value=value,
        steps=steps,
        random_rankings=random_rankings,
        batch_size=batch_size,
        seed=seed,
    )
    answer(result, out, json)


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


@app.command()
@taking(keyword_options(train_model, without=("command",)))
def train(
    architecture: Annotated[str, typer.Argument(metavar="ARCH", help=f"One of {', '.join(ARCHITECTURES)}.")],
    data: Annotated[
        str,
        typer.Option("--data", "--task", metavar="NAME", help="A data set, a generated task, or a file; see below."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where the model is written, by default runs/NAME-ARCH."),
    ] = None,
    json: JSON = False,
    **options: Any,
) -> None:
    """Fit a model to a task, or turn a trained Mamba or Mamba-2 into a Baleen. A killed run continues.

    NAME is sst2, imdb, rotten_tomatoes, snli, wnli or a csv, tsv, jsonl or parquet file with text and label
    (classifiers of texts); cifar10 or digits (of pixels); majority or listops (of sequences); associative-recall,
    fuzzy-recall, noisy-recall, selective-copying, compression, memorization or qa1 to qa5 (tokens that are asked for);
    wikitext2 or a .txt file (language models).
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
    first, last = measured["history"][0], measured["history"][-1]
    for name in ("spectral_abscissa", "mean_lambda"):
        if name in last:
            print(f"{name.replace('_', ' ')} {first[name]:.4f} after one epoch, {last[name]:.4f} after all")
    print(f"Saved in {out}{_next_step(out, measured['kind'])}")


def _next_step(out: Path, kind: str) -> str:
    if kind == "pixels":
        return f"; try: analyze position {shlex.quote(str(out))}"
    if kind in ("text", "language"):
        return f'; try: analyze heatmap {shlex.quote(str(out))} --text "…"'
    return f"; try: analyze heatmap {shlex.quote(str(out))} --ids 0,1,1,0"


@app.command()
def models(json: JSON = False) -> None:
    """The shipped models with their accuracy, and what can be loaded."""
    from ssmscope.models.load import demos, readable_types

    records = {name: json_module.loads((path / "training.json").read_bytes()) for name, path in demos().items()}
    if json:
        shown = ("architecture", "parameters", "data", "validation", "test")
        listed = [{"name": name, **{key: record[key] for key in shown}} for name, record in records.items()]
        print(json_module.dumps({"models": listed, "architectures": readable_types()}, indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table("model", "architecture", "trained on", "test accuracy", "size", box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for name, record in records.items():
        tested = "–"
        if record["test"] is not None:
            tested = "{:.3f} ({:.3f}–{:.3f})".format(record["test"]["accuracy"], *record["test"]["interval"])
        learnt = record["data"]["train"]["name"]
        table.add_row(name, record["architecture"], learnt, tested, f"{record['parameters']:,}")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "\nIn brackets 95 % intervals over the test examples; size is the number of parameters.\n"
        "\nMODEL can also be a directory or hub id in transformers' layout, a directory in mamba_ssm's, or the file of "
        f"a selective SSM's state dict.\nModel types that can be read: {', '.join(readable_types())}"
    )


def _accuracy(measured: Mapping[str, Any]) -> str:
    low, high = measured["interval"]
    return f"{measured['accuracy']:.3f} (95 % interval {low:.3f} to {high:.3f}, {measured['examples']:,} examples)"


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    return command.run(app, arguments)


def main() -> None:
    """The entry point of the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # A refusal is one line: what libraries have to say while they load would bury it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    sys.exit(run(sys.argv[1:]))
