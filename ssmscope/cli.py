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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ssmscope import __version__
from ssmscope.errors import InputError, did_you_mean
from ssmscope.inputs import check_writable, texts_of, whole_numbers
from ssmscope.options import keyword_options, number, taking, whole
from ssmscope.training import ARCHITECTURES, train_model

if TYPE_CHECKING:
    from ssmscope.encoding import Batch
    from ssmscope.model import Model
    from ssmscope.results import Result

# UsageError and ClickException, which typer brings itself or takes from click, depending on its version.
_USAGE_ERROR: Any = typer.BadParameter.__base__
_CLICK_ERROR: Any = _USAGE_ERROR.__base__


class Verbs(TyperGroup):
    """The verbs; an unknown one is answered with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            verbs = ", ".join(self.commands)
            raise InputError(f"no verb {args[0]!r}; there are {verbs}{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


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


MODEL = Annotated[str, typer.Argument(metavar="MODEL", help="demo/NAME, a directory, a file, or a hub id.")]
OUT = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write VERB.json, .csv, .png and .html there.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
TOKENIZER = Annotated[
    str | None, typer.Option("--tokenizer", metavar="NAME", help="A directory or hub id, where MODEL has none.")
]
DEVICE = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1 or mps.")]
TEXT = Annotated[list[str] | None, typer.Option("--text", metavar="TEXT", help="A text; may be repeated.")]
FILE = Annotated[str | None, typer.Option("--file", metavar="FILE", help="UTF-8 texts, one a line; - is stdin.")]
IDS = Annotated[
    list[str] | None, typer.Option("--ids", metavar="5,17,3", help="Token ids instead of a text; may be repeated.")
]
IMAGE = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="FILE", help="A PNG or JPEG, for a model of pixels; may be repeated."),
]
MAX_TOKENS = Annotated[int, typer.Option("--max-tokens", parser=whole, metavar="N", help="Refuse longer texts.")]


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
    given = _Given(text, file, ids, image, max_tokens)
    chosen = _numbers(layers, "--layers", "0,3")
    check_writable(out)

    from ssmscope.interp.selection import selection_heatmap
    from ssmscope.models.load import load

    loaded = load(model, tokenizer=tokenizer, device=device)
    trace = loaded.trace(given.encoded(loaded), keep_inputs=False)
    _answer(selection_heatmap(trace, score=score, layers=chosen, top=top, merge=merge), out, json)


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
    given = _Given(text, file, ids, image, max_tokens)
    layers, chosen = _numbers(layer, "--layer", "0,3"), _numbers(rows, "--rows", "5,7")
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
    _answer(result, out, json)


@app.command()
def position(
    model: MODEL,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DATA", help="cifar10, digits, sst2, … or a file; else what MODEL learnt from."),
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", metavar="NAME", help="Of a known data set; by default the one to test on.")
    ] = None,
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
    _answer(result, out, json)


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
    command = shlex.join(["analyze", *_given])
    try:
        train_model(architecture, data, out, **options, command=command)
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


class _Given:
    """The texts, ids or images of a command line, checked before a model is loaded."""

    def __init__(
        self,
        text: list[str] | None,
        file: str | None,
        ids: list[str] | None,
        image: list[str] | None,
        max_tokens: int,
    ) -> None:
        if ids and (text or file is not None):
            raise InputError("--ids cannot be combined with --text or --file; give one of them")
        if image and (text or file is not None or ids):
            raise InputError("--image cannot be combined with --text, --file or --ids; give one of them")
        if max_tokens < 1:
            raise InputError(f"--max-tokens is {max_tokens}; allowed is a whole number from 1 on")
        self.rows = [whole_numbers(row, "--ids", "5,17,3") for row in ids] if ids else None
        self.texts = texts_of(text, file) if self.rows is None and not image else None
        self.image, self.max_tokens = image, max_tokens

    def encoded(self, model: Model) -> Batch:
        """As a batch of the model."""
        values = None
        if self.image and model.channels is not None:
            from ssmscope.tasks.pixels import read_images

            values = read_images(self.image, model.channels, model.config.image_size)
        elif self.image:
            raise InputError(f"{model.name} reads tokens, not pixels: give --text, --file or --ids instead of --image")
        return model.encode(self.texts, ids=self.rows, values=values, max_tokens=self.max_tokens)


def _numbers(value: str, option: str, example: str) -> str | list[int]:
    """A list of numbers where there are any in it, else the word that it is."""
    return whole_numbers(value, option, example) if set(value) & set("0123456789,") else value


def _answer(result: Result, out: Path | None, json: bool) -> None:
    """Write the files if they are wanted, then show the result as a person or a program reads it."""
    files = result.save(out, result.kind) if out is not None else {}
    if json:
        print(result.to_json())
    else:
        from rich.console import Console

        Console().print(result)
    if files:
        print("\nFiles:", *files.values(), sep="\n  ", file=sys.stderr if json else sys.stdout)


_given: list[str] = []
"""The command line that runs, for the model card."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    _given[:] = arguments
    command = typer.main.get_command(app)
    try:
        with command.make_context("analyze", list(arguments) or ["--help"]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except InputError as error:
        return _refuse(str(error))
    except _CLICK_ERROR as error:
        return _refuse(_usage_message(error, arguments))
    except (KeyboardInterrupt, typer.Abort) as end:
        print("; ".join(["analyze: interrupted", *map(str, end.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # `analyze … | head` has read enough; nothing may be flushed into the pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _refuse(message: str) -> int:
    line = " ".join(message.split())
    print("analyze:", "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr)
    return 2


def _usage_message(error: Any, arguments: Sequence[str]) -> str:
    """What a usage error says, with the nearest options and with where to read more."""
    message = str(error.format_message()).strip()
    if message.startswith("No such option") and error.ctx is not None:
        options = [name for parameter in error.ctx.command.params for name in parameter.opts if name[:1] == "-"]
        message = f"no option {error.option_name}{did_you_mean(error.option_name, [*options, '--help'])}"
    verb = arguments[0] if arguments and arguments[0].isidentifier() else ""
    return f"{message[:1].lower()}{message[1:].rstrip('.')} (see {' '.join(filter(None, ('analyze', verb)))} --help)"


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
