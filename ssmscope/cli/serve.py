"""The verb that serves a page for trying a model out: serve."""

from __future__ import annotations

from typing import Annotated

import typer

from ssmscope.cli.app import app
from ssmscope.command import DEVICE, MAX_TOKENS, MODEL, TOKENIZER
from ssmscope.errors import InputError
from ssmscope.options import whole


@app.command()
def serve(
    model: MODEL,
    beside: Annotated[str | None, typer.Argument(metavar="MODEL2", help="A second model beside it.")] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Listen there; by default this machine alone can ask.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option("--port", parser=whole, metavar="N", help="Else the first free one from 7860 on.")
    ] = None,
    max_tokens: MAX_TOKENS = 1024,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
) -> None:
    """A page to type texts into: prediction, heatmap, attention of a clicked token, an edited text, a second model.

    It needs Gradio, which the extra "serve" of ssmscope installs.
    """
    if max_tokens < 1:
        raise InputError(f"--max-tokens is {max_tokens}; allowed is a whole number from 1 on")

    from ssmscope.reports.serving import check_address, import_gradio

    check_address(host, port)
    import_gradio()

    from ssmscope.models.load import load
    from ssmscope.reports.live import Live
    from ssmscope.reports.serving import serve as serve_page

    models = [load(name, tokenizer=tokenizer, device=device) for name in (model, beside) if name is not None]
    serve_page(Live(models, max_tokens=max_tokens), host=host, port=port)
