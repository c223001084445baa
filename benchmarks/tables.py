"""The tables of the documentation that are drawn from benchmarks/results: each stands below a comment with the script
and the function that return its lines, as in `<!--reference.mad_table-->`.

    python benchmarks/tables.py table     # print all, page by page
    python benchmarks/tables.py write     # draw them again in the pages
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import running

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARKED = re.compile(r"(?<=<!--)(\w+)\.(\w+)-->\n\n((?:\|.*\n)*)")


def marked() -> Iterator[tuple[str, str, str, str]]:
    """Yield the page, script and function of each table, and its lines as the page has them."""
    for page in sorted(DOCS.rglob("*.md")):
        for found in MARKED.finditer(page.read_text(encoding="utf-8")):
            yield page.relative_to(DOCS).as_posix(), *found.groups()


def drawn(script: str, function: str) -> str:
    """Return a table's lines as the results have them."""
    name = f"tabled_{script}"  # not the script's own: docs/ has a `reference` too
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{script}.py")
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return "".join(f"{row}\n" for row in getattr(sys.modules[name], function)())


def table(arguments: argparse.Namespace) -> None:
    """Print every table."""
    for page, script, function, _ in marked():
        print(f"{page}, {script}.{function}", drawn(script, function), sep="\n\n")


def write(arguments: argparse.Namespace) -> None:
    """Draw the tables of the pages again."""
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = MARKED.sub(_again, before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(DOCS))


def _again(found: re.Match[str]) -> str:
    blank = "" if found[3] else "\n"  # a mark that has no table yet
    return f"{found[1]}.{found[2]}-->\n\n{drawn(found[1], found[2])}{blank}"


def main() -> None:
    running.start(running.verbs(__doc__, table, write))


if __name__ == "__main__":
    main()
