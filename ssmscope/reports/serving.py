"""Live page as a Gradio application, served on this machine without contacting any other."""

from __future__ import annotations

import importlib
import inspect
import ipaddress
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from ssmscope.api.registry import analysis_of
from ssmscope.core.encoding import MAX_CHARACTERS_PER_TOKEN
from ssmscope.errors import InputError, extra
from ssmscope.render.tokens import visible
from ssmscope.reports import forms
from ssmscope.reports.guard import MAX_CALL_BYTES, Argument, OwnPage

if TYPE_CHECKING:
    from ssmscope.api.options import Option
    from ssmscope.reports.live import Live

SIDES = ("given", "edited")
"""Names of the page's parts for the text and for the edited text."""
FONTS = ("system-ui", "-apple-system", "Segoe UI", "Noto Sans", "sans-serif")
MONO = ("ui-monospace", "Consolas", "monospace")
MAX_QUEUED_CALLS = 32
"""Maximum number of waiting calls."""
MAX_SESSIONS = 64
"""Number of opened pages whose texts are kept."""


def serve(live: Live, *, host: str = "127.0.0.1", port: int | None = None) -> None:
    """Serve the page until the process is interrupted.

    Args:
        host: address to listen on; other machines can reach the page unless it is a loopback address.
        port: by default the first free port from 7860 on.

    Raises:
        InputError: if Gradio is not installed, or the address cannot be listened on.
    """
    with tempfile.TemporaryDirectory(prefix="ssmscope-serve-") as files:
        os.environ["GRADIO_TEMP_DIR"] = files  # Gradio would leave its files behind elsewhere.
        _serve_until_interrupted(live, host, port)


def _serve_until_interrupted(live: Live, host: str, port: int | None) -> None:
    page, url = start(live, host=host, port=port)
    print(f"Serving {', '.join(model.name for model in live.models)} at {url} (Ctrl+C ends it)", flush=True)
    if not _is_loopback(host):
        print(f"Anyone who can reach {host} can use this page: it has no password.", file=sys.stderr, flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    finally:
        page.close(verbose=False)


def start(live: Live, *, host: str = "127.0.0.1", port: int | None = None) -> tuple[Any, str]:
    """Start serving the page; return the application, whose `close` ends it, and the page's address.

    Raises:
        InputError: as `serve`.
    """
    check_address(host, port)
    gradio = import_gradio()
    page, launch = build(live, gradio)
    page.queue(max_size=MAX_QUEUED_CALLS, **_known(page.queue, api_open=False))
    guard = importlib.import_module("starlette.middleware").Middleware(
        OwnPage,
        hosts={"localhost", "127.0.0.1", "[::1]", host} if _is_loopback(host) else None,
        calls=_calls(page, gradio),
        # A character may take 12 bytes in JSON. A text that is too long for the model still gets its own message.
        max_bytes=MAX_CALL_BYTES + len(SIDES) * 12 * MAX_CHARACTERS_PER_TOKEN * live.max_tokens,
    )
    try:
        _, url, _ = page.launch(
            **launch,
            server_name=f"[{host}]" if ":" in host else host,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            state_session_capacity=MAX_SESSIONS,
            app_kwargs={"middleware": [guard]},
        )
    except OSError as error:
        raise _refused(host, port, error) from error
    return page, url


def check_address(host: str, port: int | None) -> None:
    """Refuse an address that cannot be listened on, where Gradio would try one port after another for minutes.

    Raises:
        InputError: if the port is invalid or taken, or the host is not this machine's.
    """
    if port is not None and not 1 <= port <= 65535:
        raise InputError(f"--port is {port}; allowed are 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port or 0), family=family).close()
    except (OSError, TypeError, ValueError) as error:  # Names that cannot be encoded raise the last two.
        raise _refused(host, port, error) from error


def _refused(host: str, port: int | None, error: Exception) -> InputError:
    where = host if port is None else f"{host}:{port}"
    why = (getattr(error, "strerror", None) or str(error)).partition(" (")[0]
    return InputError(f"cannot listen on {where}: {why}; give another --host or --port")


def import_gradio() -> Any:
    """Import Gradio with its telemetry turned off.

    Raises:
        InputError: if it is not installed, or cannot be imported.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        return importlib.import_module("gradio")
    except ImportError as error:
        why = (
            "is not installed"
            if isinstance(error, ModuleNotFoundError) and error.name == "gradio"
            else f"fails: {error}"
        )
        raise InputError(f"serve needs Gradio, which {why}; install it {extra('serve')}") from error


def build(live: Live, gradio: Any) -> tuple[Any, dict[str, Any]]:
    """Build the application; return it and its launch options. Gradio 5 takes the theme in one, 6 in the other."""
    soft = {"block_info_text_color": "*neutral_600", "block_info_text_color_dark": "*neutral_300"}
    theme = {"theme": gradio.themes.Default(font=list(FONTS), font_mono=list(MONO)).set(**soft)}
    early = "theme" in inspect.signature(gradio.Blocks.__init__).parameters
    models = " and ".join(model.name for model in live.models)
    with gradio.Blocks(
        title=f"ssmscope: {visible(models)}", analytics_enabled=False, fill_width=True, **(theme if early else {})
    ) as page:
        _lay_out(live, gradio, page)
    launch = {} if early else theme
    return page, launch | _known(gradio.Blocks.launch, footer_links=[], show_api=False)


def _lay_out(live: Live, gradio: Any, page: Any) -> None:
    asked = gradio.State(None)  # These are the texts that are shown, not those that are being typed.
    with gradio.Row():
        begins = EXAMPLE if all(model.tokenizer is not None for model in live.models) else ""
        hint = "Enter analyzes, Shift+Enter begins a new line"
        named: dict[str, Any] = {"lines": 3, "max_lines": 8, "placeholder": hint}
        text = gradio.Textbox(begins, label="Text", elem_id="ssmscope-text", **named)
        edited = gradio.Textbox(label="Edited text (optional)", elem_id="ssmscope-edited", **named)
    button = gradio.Button("Analyze", variant="primary", elem_id="ssmscope-analyze")
    with gradio.Row(equal_height=False):
        fields = {verb: _form(gradio, verb) for verb in forms.EXCLUDED_OPTIONS}
    # One event at a time: two threads that run a model would only wait for each other.
    quiet = _known(button.click, concurrency_id="models", api_visibility="private", show_progress="minimal")
    if "api_visibility" not in quiet:
        quiet["api_name"] = False
    typed = button.click(lambda *texts: texts, [text, edited], asked, **quiet)
    with gradio.Row(equal_height=False):
        for number in range(len(live.models)):
            with gradio.Column(min_width=420):
                typed = _column(live, gradio, number, asked, fields, typed, quiet)
    page.load(None, js=SCRIPT)


def _form(gradio: Any, verb: str) -> dict[str, Any]:
    """Add the controls of an analysis's options, all but the first folded; return them by name."""
    with gradio.Column(min_width=260):
        gradio.HTML(f'<p class="ssmscope-side">{escape(analysis_of(verb).question)} <small>{verb}</small></p>')
        (first, option), *others = forms.options(verb).items()
        found = {first: _control(gradio, verb, option)}
        with gradio.Accordion("More options", open=False, elem_id=f"ssmscope-{verb}-more"):
            found |= {name: _control(gradio, verb, option) for name, option in others}
    return found


def _control(gradio: Any, verb: str, option: Option) -> Any:
    """Add a control for an option, with its words, help and default."""
    label = option.name.replace("_", " ")
    named = {"label": label, "info": option.help, "elem_id": f"ssmscope-{verb}-{option.name}"}
    value, words = forms.shown(option), forms.choices(option)
    if option.is_flag:
        return gradio.Checkbox(value, **named)
    if words:
        return gradio.Radio([(word or "none", word) for word in words], value=value, **named)
    return gradio.Textbox(value, max_lines=1, placeholder=option.metavar, **named)


def _changes(gradio: Any, fields: Mapping[str, Any]) -> list[Any]:
    """Return the events of changed choices, and of typed values when entered or left."""
    texts = [each for each in fields.values() if isinstance(each, gradio.Textbox)]
    others = [each.change for each in fields.values() if not isinstance(each, gradio.Textbox)]
    return [*others, *(event for each in texts for event in (each.submit, each.blur))]


def _column(
    live: Live, gradio: Any, number: int, asked: Any, fields: Mapping[str, Any], typed: Any, quiet: dict[str, Any]
) -> Any:
    """Add one model's parts and events; return the last event that follows a click on the button."""
    model = live.models[number]
    layers = [str(layer) for layer in model.layer_numbers]
    gradio.HTML(_heading(model))
    prediction = gradio.HTML(elem_id=f"ssmscope-prediction-{number}")
    with gradio.Row():
        named = f"ssmscope-layer-{number}"
        layer = gradio.Dropdown(["mean", *layers], value="mean", label="Layer of the heatmap", elem_id=named)
        named = f"ssmscope-attention-{number}"
        of = gradio.Dropdown(layers, value=layers[0], label="Layer of attention", elem_id=named)
    heatmaps, tokens, rows, sides = [], [], [], []
    for place, side in enumerate(SIDES):
        with gradio.Column(visible=not place) as shown:
            if place:
                gradio.HTML('<p class="ssmscope-side">The edited text</p>')
            heatmaps.append(gradio.HTML(elem_id=f"ssmscope-{side}-{number}", elem_classes="ssmscope-pick"))
            token = gradio.Textbox(
                label=f"Token of the {'edited ' if place else ''}text: click one, or give its position",
                max_lines=1,
                elem_id=f"ssmscope-{side}-{number}-token",
            )
            row = gradio.HTML(elem_id=f"ssmscope-{side}-{number}-row")
        tokens.append(token)
        rows.append(row)
        sides.append(shown)
        events = [token.change, of.change, *_changes(gradio, fields["attention"])]
        inputs = [asked, token, of, *fields["attention"].values()]
        gradio.on(events, partial(_row, live, number, place), inputs, row, **quiet)
    with gradio.Column(visible=False) as below:
        gradio.HTML('<p class="ssmscope-side">What the edit changes</p>')
        change = gradio.HTML(elem_id=f"ssmscope-change-{number}")

    def analyze(texts: tuple[str, str] | None, layer: str, *given: Any) -> list[Any]:
        texts = texts or ("", "")
        middle = len(fields["heatmap"])
        heatmap, effect = _named("heatmap", given[:middle]), _named("effect", given[middle:])
        answer = live.answer(number, *texts, layer=layer, heatmap=heatmap, effect=effect)
        unfold = gradio.update(visible=bool(answer.change))
        hints = [live.row(number, text, "", layer=0) if answer.given else "" for text in texts]
        return [answer.prediction, answer.given, answer.edited, answer.change, "", "", *hints, unfold, unfold]

    shown = [prediction, *heatmaps, change, *tokens, *rows, sides[1], below]
    of_heatmap, of_effect = ([*fields[verb].values()] for verb in ("heatmap", "effect"))
    after = typed.then(analyze, [asked, layer, *of_heatmap, *of_effect], shown, **quiet)
    events = [layer.change, *_changes(gradio, fields["heatmap"])]
    gradio.on(events, partial(_heatmaps, live, number), [asked, layer, *of_heatmap], heatmaps, **quiet)
    events = _changes(gradio, fields["effect"])
    gradio.on(events, partial(_changed, live, number), [asked, *of_effect], change, **quiet)
    return after


def _named(verb: str, given: Sequence[Any]) -> dict[str, Any]:
    """Map the values of a form, in the order of its controls, to option names."""
    return dict(zip(forms.options(verb), given, strict=True))


def _row(live: Live, number: int, place: int, texts: Any, position: str, layer: str, *given: Any) -> str:
    if texts is None or not texts[place].strip():
        return ""
    return live.row(number, texts[place], position, layer=int(layer), **_named("attention", given))


def _heatmaps(live: Live, number: int, texts: Any, layer: str, *given: Any) -> tuple[str, str]:
    return ("", "") if texts is None else live.heatmaps(number, *texts, layer=layer, **_named("heatmap", given))


def _changed(live: Live, number: int, texts: Any, *given: Any) -> str:
    return "" if texts is None else live.change(number, *texts, **_named("effect", given))


def _heading(model: Any) -> str:
    kind = "classifier" if model.is_classifier else "language model"
    what = f"{escape(model.architecture)}, {kind}, {model.num_layers} layers"
    name = escape(visible(model.name))
    return f'<style>{STYLE}</style><h2 class="ssmscope-model">{name} <small>{what}</small></h2>'


def _calls(page: Any, gradio: Any) -> dict[int, list[Argument]]:
    """Return the argument types of each call of the page, by its number."""
    return {number: [_argument(each, gradio) for each in call.inputs] for number, call in page.fns.items() if call.fn}


def _argument(component: Any, gradio: Any) -> Argument:
    if isinstance(component, gradio.State):
        return None
    if isinstance(component, gradio.Checkbox):
        return bool
    choices = getattr(component, "choices", None)
    return str if choices is None else tuple(value for _, value in choices)


def _known(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return the options that this release of Gradio has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


EXAMPLE = "A gripping, beautifully acted film, though the ending feels a little rushed."
"""Text with which a page opens."""

STYLE = """
.ssmscope-model { font: 600 18px/1.4 system-ui, sans-serif; margin: 8px 0; overflow-wrap: anywhere; }
.ssmscope-model small { font-weight: 400; font-size: 13px; opacity: 0.75; margin-left: 8px; }
.ssmscope-side { font: 600 15px/1.4 system-ui, sans-serif; margin: 8px 0; }
.ssmscope-side small { font-weight: 400; opacity: 0.75; margin-left: 8px; }
.prose :is(.ssmscope-live, .ssmscope) :is(table, tbody, thead, tr) { border: 0; }
.prose :is(.ssmscope-live, .ssmscope) table :is(th, td) { border: 0 solid var(--line); border-width: 0 0 1px;
  padding: 3px 16px 3px 0; }
.ssmscope-pick .tokens > span { cursor: pointer; }
.ssmscope-pick .chosen { outline: 2px solid #d1540a; outline-offset: 1px; }
"""

# Scripts within pieces of HTML do not run when Gradio inserts them, so one script listens for all pieces. It writes the
# position into the visible field and sends an input event, without which Gradio does not notice the new value.
SCRIPT = """
() => {
  document.addEventListener("click", (event) => {
    const token = event.target.closest(".ssmscope-pick .tokens > span");
    if (!token) return;
    const panel = token.closest("[id^=ssmscope].ssmscope-pick");
    const place = [...token.parentElement.children].filter((one) => one.tagName === "SPAN").indexOf(token);
    const field = document.querySelector(`#${panel.id}-token :is(input, textarea)`);
    for (const one of panel.querySelectorAll(".chosen")) one.classList.remove("chosen");
    token.classList.add("chosen");
    Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), "value").set.call(field, place);
    field.dispatchEvent(new Event("input", {bubbles: true}));
  });
  const fields = "#ssmscope-text textarea, #ssmscope-edited textarea";
  const button = "#ssmscope-analyze";
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || !event.target.matches(fields)) return;
    event.stopPropagation(); // Gradio has it the other way round
    event.preventDefault();
    if (event.shiftKey) return document.execCommand("insertText", false, "\\n");
    event.target.dispatchEvent(new Event("input", {bubbles: true}));
    document.querySelector(button).click();
  }, true);
  if (document.querySelector(fields).value) document.querySelector(button).click();
}
"""
