"""The notebooks as pages of the documentation: run when the site is built, shown with what they gave.

A hook of mkdocs. The files in `notebooks/` hold pictures of their results, for which the pages have the results' own
views; an error in a cell fails the build. A run of the tests keeps what it ran, so that the site is built from that as
long as nothing changed. With `SSMSCOPE_DOCS_EXECUTE=0`, and where a package that a notebook `needs` is not installed,
the pages show what the files hold.
"""

from __future__ import annotations

import hashlib
import html
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
RAN = ROOT / "build" / "notebooks"
"""Where notebooks with their outputs are kept, under names that say of what they are the outputs."""
LONGEST = 300
"""Seconds that a cell may take."""

_ran: dict[str, Any] = {}
"""Notebooks that were run, by their text, so that `mkdocs serve` runs those that changed."""
_outputs: dict[str, str] = {}
"""The HTML that stands for a mark in a page: Markdown does not touch it."""


@event_priority(100)
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every notebook."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page(path)))
    return files


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the outputs in."""
    return re.sub(r'<div data-output="([^"]+)"></div>', lambda mark: _outputs.get(mark[1], ""), content)


def page(path: Path) -> str:
    """A notebook as Markdown, with marks where HTML comes."""
    notebook = executed(path)
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(relinked(cell.source))
        elif cell.cell_type == "code":
            parts.append(f"```python\n{cell.source}\n```")
            parts += [_shown(output, f"{path.stem}-{cell.id}-{i}") for i, output in enumerate(cell.outputs)]
    link = f"*This page is `notebooks/{path.name}`, run by the version that it documents.*"
    title, *rest = parts
    first, _, more = title.partition("\n")
    return "\n\n".join([first, link, more.strip(), *rest]) + "\n"


def executed(path: Path) -> Any:
    """The notebook with its outputs."""
    text = path.read_text(encoding="utf-8")
    if text not in _ran:
        notebook = nbformat.reads(text, as_version=4)
        needs = notebook.metadata.get("needs")
        installed = needs is None or importlib.util.find_spec(needs) is not None
        if installed and os.environ.get("SSMSCOPE_DOCS_EXECUTE", "1") != "0":
            notebook = _run(path, notebook)
        _ran[text] = notebook
    return _ran[text]


def _run(path: Path, notebook: Any) -> Any:
    kept = kept_as(path)
    if kept.is_file():
        return nbformat.read(kept, as_version=4)
    place = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=LONGEST, kernel_name="python3", resources=place).execute()
    return notebook


def kept_as(path: Path) -> Path:
    """The file in which a notebook's outputs are kept: another one for another notebook, package or library."""
    digest = hashlib.sha256(path.read_bytes())
    for file in sorted(file for file in (ROOT / "ssmscope").rglob("*") if file.is_file()):
        if "__pycache__" not in file.parts:
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    versions = sorted(f"{each.name}=={each.version}" for each in importlib.metadata.distributions())
    digest.update("\n".join(versions).encode())
    return RAN / f"{path.stem}-{digest.hexdigest()[:16]}.ipynb"


def keep(path: Path, notebook: Any) -> None:
    """Keep a notebook that was run, in place of what was kept of it before."""
    kept = kept_as(path)
    RAN.mkdir(parents=True, exist_ok=True)
    for older in RAN.glob(f"{path.stem}-{'[0-9a-f]' * 16}.ipynb"):
        older.unlink()
    begun = kept.with_suffix(".tmp")
    nbformat.write(notebook, begun)
    begun.replace(kept)


def relinked(source: str) -> str:
    """Links of a notebook, to pages in `docs/` and to other notebooks, as links within the site."""
    return re.sub(r"\]\(([\w-]+)\.ipynb", r"](\1.md", source.replace("](../docs/", "](../"))


def _shown(output: Any, mark: str) -> str:
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```" if output.name == "stdout" else ""
    if output.output_type not in ("display_data", "execute_result"):
        return ""
    data = output.data
    if "text/html" in data:
        _outputs[mark] = f'<div class="output">{data["text/html"]}</div>'
    elif "image/png" in data:
        alt = html.escape(data.get("text/plain", "a figure"))
        _outputs[mark] = f'<img alt="{alt}" src="data:image/png;base64,{data["image/png"]}">'
    else:
        return f"```text\n{data.get('text/plain', '')}\n```"
    return f'<div data-output="{mark}"></div>'
