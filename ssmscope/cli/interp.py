"""The verbs that look into a model: heatmap, attention, explain, fidelity."""

from __future__ import annotations

from typing import Annotated, Any

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
    METHOD_OPTION,
    METHODS,
    MODEL,
    OUT,
    SPLIT,
    TEXT,
    TOKENIZER,
    Given,
    answer,
    method_options,
    names,
    numbers,
)
from ssmscope.errors import InputError
from ssmscope.inputs import check_writable
from ssmscope.options import number, whole


@app.command()
@checks.checked(checks.heatmap)
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
@checks.checked(checks.attention)
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
        str,
        typer.Option(
            "--heads", metavar="mean|abs|all", help="The signed mean, that of absolute values (slow), or each."
        ),
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
        bool,
        typer.Option("--rollout/--no-rollout", help="Their product over the layers instead, of |signed mean| or abs."),
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
@checks.checked(checks.explain)
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
@checks.checked(checks.fidelity)
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
