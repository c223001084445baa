"""Labelled texts with evidence in the files of ERASER (DeYoung et al. 2020, https://arxiv.org/abs/1911.03429).

A folder holds the documents, a file for each in `docs` or all in `docs.jsonl` (`docid`, `document`), and a file for
each split. Its rows have a `classification`, a `query` and `evidences`, groups of spans of a document's words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ssmscope.core.text_files import read_text
from ssmscope.data.rows import Row, check_split, checked_column, checked_label, read_rows, text_of
from ssmscope.errors import InputError

SPLIT_FILES: Mapping[str, str] = MappingProxyType(
    {"train": "train.jsonl", "validation": "val.jsonl", "test": "test.jsonl"}
)
PAIR = ("_premise", "_hypothesis")
"""Ends of the names of the two documents of a row of e-SNLI."""


def eraser_splits(folder: Path) -> tuple[str, ...]:
    """Return the splits that a folder has. Raise InputError if it has none, or no documents."""
    splits = tuple(split for split, file in SPLIT_FILES.items() if (folder / file).is_file())
    if not splits or not ((folder / "docs").is_dir() or (folder / "docs.jsonl").is_file()):
        raise InputError(
            f"{folder} is a folder without ERASER's files; give a file, or a folder with docs or docs.jsonl and with "
            f"one of {', '.join(SPLIT_FILES.values())}"
        )
    return splits


def eraser_rows(folder: Path, split: str, separator: str) -> list[Row]:
    """Read a split's rows as `text`, `label` and `rationale`, spans of characters of the text, one for each evidence.

    A text is the row's documents, line by line, and its query after the separator. A query that all rows share, as
    that of Movies, names the task and is left out; so is that of a premise and a hypothesis, which are a pair already.
    The evidence of all groups is joined; a row may have none.

    Raises:
        InputError: the folder lacks the split or a document, or a row lacks a column or has evidence outside of its
            documents.
    """
    check_split(str(folder), split, eraser_splits(folder))
    rows = read_rows(folder / SPLIT_FILES[split])
    documents = _Documents(folder)
    shared = len(rows) > 1 and len({str(row.get("query")) for row in rows}) == 1
    found = []
    for row in rows:
        names = _documents_of(row, documents)
        paired = len(names) == 2 and names[0].endswith(PAIR[0]) and names[1].endswith(PAIR[1])
        starts, text = dict[str, int](), ""
        for name in names:
            text += (separator if paired else "\n") if text else ""
            starts[name] = len(text)
            text += documents.text(name, row)
        spans = [_span(evidence, starts, documents, row) for evidence in _evidence_of(row)]
        query = text_of(row, "query").strip() if "query" in row and not (shared or paired) else ""
        values = {
            "text": text + separator + query if query else text,
            "label": checked_label(row, "classification"),
            "rationale": spans,
        }
        found.append(Row(values, row.number, row.place))
    return found


class _Documents:
    """Documents of a folder by name, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, file = folder, folder / "docs.jsonl"
        self._texts: dict[str, str | None]
        if file.is_file():
            self._texts = {text_of(row, "docid"): text_of(row, "document").strip() for row in read_rows(file)}
        else:
            self._texts = dict.fromkeys(os.listdir(folder / "docs"))

    def __contains__(self, name: str) -> bool:
        return name in self._texts

    def text(self, name: str, row: Row) -> str:
        """Return the stripped text of a document that a row names."""
        if name not in self._texts:
            raise InputError(f"{row.where} is about the document {name!r:.80}, which is not in {self.folder}")
        text = self._texts[name]
        if text is None:
            path = self.folder / "docs" / name
            self._texts[name] = text = read_text(path, str(path)).strip()
        if not text:
            raise InputError(f"the document {name!r:.80} of {row.where} is empty; every row needs a text")
        return text


def _documents_of(row: Row, documents: _Documents) -> list[str]:
    """Return the names of a row's documents: those that it lists, else those of its evidence, else the row's own name.
    A premise comes before its hypothesis, and neither without the other."""
    given = row.get("docids") or [evidence["docid"] for evidence in _evidence_of(row)]
    if not isinstance(given, list):
        raise InputError(f"{row.where} has the docids {given!r:.80}; give a list of names of documents")
    if not given:
        own = text_of(row, "annotation_id")
        given = [own + PAIR[0]] if own + PAIR[0] in documents else [own]
    names = dict[str, None]()
    for name in map(str, given):
        stem = next((name[: -len(end)] for end in PAIR if name.endswith(end)), None)
        both = [] if stem is None else [stem + end for end in PAIR]
        names |= dict.fromkeys(both if both and all(each in documents for each in both) else [name])
    return list(names)


def _evidence_of(row: Row) -> list[Mapping[str, Any]]:
    """Return the evidence of all groups of a row."""
    groups = checked_column(row, "evidences")
    nested = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    found: list[Any] = [each for group in groups for each in group] if nested else [None]
    if not all(isinstance(each, dict) and isinstance(each.get("docid"), str) for each in found):
        raise InputError(f"{row.where} has the evidences {groups!r:.80}; give groups [[{{'docid': …}}, …], …]")
    return found


def _span(evidence: Mapping[str, Any], starts: Mapping[str, int], documents: _Documents, row: Row) -> list[int]:
    """Return the characters [start, end) of a text that evidence in one of its documents marks."""
    name, ends = evidence["docid"], (evidence.get("start_token"), evidence.get("end_token"))
    if name not in starts:
        raise InputError(f"{row.where} has evidence in the document {name!r:.80}, which is not among its docids")
    words = _words(documents.text(name, row))
    start, stop = ends
    if not (type(start) is type(stop) is int and 0 <= start < stop <= len(words)):
        raise InputError(
            f"{row.where} has evidence from token {start!r:.20} to {stop!r:.20} of {name!r:.80}; allowed are "
            f"start < end within 0 to {len(words)}"
        )
    return [starts[name] + words[start][0], starts[name] + words[stop - 1][1]]


def _words(document: str) -> list[tuple[int, int]]:
    """Return the words that evidence counts. As in the benchmark's own reader, spaces divide a stripped line, and other
    white space within it does not."""
    found = []
    for line in re.finditer(r"[^\r\n]+", document):
        start = line.start() + len(line.group()) - len(line.group().lstrip())
        found += [(start + word.start(), start + word.end()) for word in re.finditer("[^ ]+", line.group().strip())]
    return found
