"""A page for every verb of `analyze`, made from its options and from the docstring of the function it calls.

A hook of mkdocs: the pages exist in the site alone.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from reference import plain
import ssmscope
from ssmscope.cli import app

SECTION = "Verbs"
"""The part of the navigation that the pages come into."""

GUIDES = {
    "heatmap": "heatmap.md",
    "attention": "attention.md",
    "knockout": "interventions.md",
    "patch": "interventions.md",
    "ablate": "interventions.md",
    "steer": "interventions.md",
    "generate": "generation.md",
    "explain": "explanations.md",
    "fidelity": "explanations.md",
    "plausibility": "explanations.md",
    "sanity": "explanations.md",
    "position": "position-bias.md",
    "insertion": "robustness.md",
    "noise": "robustness.md",
    "overflow": "robustness.md",
    "poison": "robustness.md",
    "prompts": "robustness.md",
    "words": "robustness.md",
    "effect": "robustness.md",
    "lens": "lens.md",
    "snr": "lens.md",
    "retrieval": "long-context.md",
    "loss": "long-context.md",
    "stability": "stability.md",
    "bound": "stability.md",
    "checkpoints": "stability.md",
    "influence": "stability.md",
    "train": "training.md",
    "report": "reports.md",
    "push": "reports.md",
    "serve": "serve.md",
}
"""The page that says what a verb's numbers mean."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the verbs, in the order of `analyze --help`, into the navigation."""
    for entry in config.nav or []:
        if isinstance(entry, dict) and SECTION in entry:
            entry[SECTION] = [{name: _place(name)} for name in verbs()]
            return config
    raise PluginError(f"the navigation has no section {SECTION!r} for the pages of the verbs")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name, command in verbs().items():
        files.append(File.generated(config, _place(name), content=page(name, command)))
    return files


def verbs() -> dict[str, Any]:
    """The commands of the application by name."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def page(name: str, command: Any) -> str:
    """A verb as Markdown; a group of verbs has a section for each."""
    parts = [f"# analyze {name}", _escaped(_help(command))]
    if name in GUIDES:
        parts.append(f"What the numbers mean: [{_title(GUIDES[name])}](../{GUIDES[name]}).")
    guide = _own_guide(command)
    if guide:
        parts.append(guide)
    inner = getattr(command, "commands", None)
    if inner is None:
        parts += _described(f"analyze {name}", command, "##")
    for part, each in (inner or {}).items():
        parts += [
            f"## analyze {name} {part}",
            _escaped(_help(each)),
            *_described(f"analyze {name} {part}", each, "###"),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _own_guide(command: Any) -> str:
    """The guide that stands in the package of an analysis, below the page's title; "" where there is none."""
    analysis = getattr(getattr(command, "callback", None), "analysis", None)
    if analysis is None:
        return ""
    file = Path(inspect.getfile(inspect.unwrap(analysis.function))).with_name("guide.md")
    return file.read_text(encoding="utf-8").partition("\n")[2].strip() if file.is_file() else ""


def _place(name: str) -> str:
    return f"verbs/{name}.md"


def _title(guide: str) -> str:
    """The heading of a page."""
    return (Path(__file__).parent / guide).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help or "")


def _described(typed: str, command: Any, level: str) -> Iterator[str]:
    """Synopsis, options, and the functions behind a command."""
    arguments = [_typed(each) for each in command.params if each.param_type_name == "argument"]
    yield f"```text\n{' '.join([typed, '[OPTIONS]', *arguments])}\n```"
    yield f"{level} Arguments and options"
    rows = "\n".join(_row(parameter) for parameter in command.params)
    yield f"| | meaning | default |\n|---|---|---|\n{rows}"
    yield _escaped(command.epilog or "")
    functions = list(_functions(command.callback))
    if functions:
        yield f"{level} In Python"
    for called in functions:
        declared = getattr(called, "analysis", None)
        name = called.__name__ if declared is None else declared.name.replace(" ", "_").replace("-", "_")
        yield f"```python\nssmscope.{name}{_signature(called)}\n```"
        yield _docstring(inspect.getdoc(called) or "")


def _row(parameter: Any) -> str:
    return f"| `{_typed(parameter)}` | {_escaped(parameter.help or '')} | {_default(parameter)} |"


def _typed(parameter: Any) -> str:
    value = parameter.metavar or str(parameter.name).upper()
    if parameter.param_type_name == "argument":
        return value if parameter.nargs != -1 or value.endswith("…") else f"{value}…"
    names = " / ".join((*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} {value}"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default() if callable(parameter.default) else parameter.default
    value = ",".join(value) if isinstance(value, list | tuple) else value
    if getattr(parameter, "is_flag", False):
        return "on" if value else "off"
    return "" if value is None or value == () or value == [] else f"`{value}`"


def _functions(callback: Any) -> Iterator[Any]:
    """The public functions that answer a verb: that of an analysis, or those that it imports when it runs."""
    if hasattr(callback, "analysis"):
        yield callback.analysis.function
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(callback)))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    for name in names:
        if name in ssmscope.__all__ and name not in ("load", "load_lens"):
            found = getattr(ssmscope, name)
            if inspect.isfunction(found):
                yield found


def _signature(function: Any) -> str:
    """As it is in the source, a parameter a line."""
    signature, scope = inspect.signature(function), inspect.unwrap(function).__globals__
    shown = []
    for each in signature.parameters.values():
        if each.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = "" if each.default is inspect.Parameter.empty else f" = {each.default!r}"
        shown.append(f"{each.name}: {plain(each.annotation, scope)}{default}")
    lines = "".join(f"    {each},\n" for each in shown)
    return f"(\n{lines}) -> {signature.return_annotation}"


def _docstring(text: str) -> str:
    """Paragraphs as they are, and the named parts of a docstring, Args and Raises, as lists."""
    parts = []
    for block in re.split(r"^(?=(?:Args|Returns|Raises|Attributes):$)", text, flags=re.MULTILINE):
        title, _, rest = block.partition(":\n")
        if title not in ("Args", "Returns", "Raises", "Attributes"):
            parts.append(_escaped(block.strip()))
            continue
        body = inspect.cleandoc(rest)
        items = re.split(r"\n(?=[\w, ]+: )", body)
        parts.append(f"**{title}**\n\n" + "\n".join(_item(item) for item in items if item.strip()))
    return "\n\n".join(part for part in parts if part)


def _item(item: str) -> str:
    name, colon, meaning = " ".join(item.split()).partition(": ")
    if not colon or len(name) > 60:
        return f"- {_escaped(' '.join(item.split()))}"
    return f"- `{name}`: {_escaped(meaning)}"


def _escaped(text: str) -> str:
    """Text whose signs mean themselves in Markdown; what stands between backticks is left as it is."""
    pieces = re.split(r"(`[^`]*`)", text)
    for place in range(0, len(pieces), 2):
        pieces[place] = re.sub(r"([*_|\[\]])", r"\\\1", pieces[place]).replace("<", "&lt;")
    return "".join(pieces)
