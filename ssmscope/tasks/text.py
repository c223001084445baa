"""Labelled texts: the known data sets, and a user's own file.

A known name is read from `$SSMSCOPE_DATA/<name>/<split>.parquet` when that variable is set, else through
`datasets` from the hub. Both places have the hub's own columns, so a hub file can be dropped into the folder.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ssmscope.errors import InputError, did_you_mean

PAIR_SEPARATOR = " ||| "
"""Between the two sentences of a pair. A plain string, so that every tokenizer can read it."""

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")

Row = Mapping[str, Any]

Spans = tuple[tuple[int, int], ...]
"""Characters of a text: from a start to the one after the last, in order and apart from one another."""


@dataclass(frozen=True)
class TextData:
    """Texts with their classes, in the order of their source.

    Attributes:
        name: the data set's name, or the file's stem.
        split: `train`, `validation`, `test`; `all` for a user's file.
        texts: one string an example.
        labels: one class id an example, an index into `label_names`.
        label_names: what the ids mean.
        fingerprint: 16 hex digits of the SHA-256 of texts, labels, label names and, where there are any, rationales.
        rationales: per text what people marked as the reason for its label, as spans of characters (start, end), or
            None for a text that nobody marked; None where no text has any.
    """

    name: str
    split: str
    texts: tuple[str, ...]
    labels: tuple[int, ...]
    label_names: tuple[str, ...]
    fingerprint: str
    rationales: tuple[Spans | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int], *, split: str | None = None) -> TextData:
        """The examples at `indices`, in that order, under a new fingerprint."""
        texts, labels = [self.texts[i] for i in indices], [self.labels[i] for i in indices]
        rationales = None if self.rationales is None else [self.rationales[i] for i in indices]
        return text_data(self.name, split or self.split, texts, labels, self.label_names, rationales)

    def sample(self, n: int, *, seed: int = 0) -> TextData:
        """At most `n` examples drawn without replacement, in their source order."""
        if n < 1:
            raise InputError(f"a sample of {n} examples was asked for; ask for at least 1")
        if n >= len(self):
            return self
        return self.take(sorted(random.Random(seed).sample(range(len(self)), n)))

    def divide(self, share: float, *, seed: int = 0) -> tuple[TextData, TextData]:
        """Two disjoint parts: the rest, and about `share` of the examples. Both hold every class.

        Raises:
            InputError: `share` outside (0, 1), or a class with fewer than two examples.
        """
        if not 0 < share < 1:
            raise InputError(f"a share of {share} was asked for; it must lie between 0 and 1")
        draw, held = random.Random(seed), set[int]()
        for label, name in enumerate(self.label_names):
            members = [i for i, other in enumerate(self.labels) if other == label]
            if len(members) == 1:
                raise InputError(f"class '{name}' of {self.name} has one example; to be divided it needs two")
            count = min(max(round(share * len(members)), 1), len(members) - 1) if members else 0
            held.update(draw.sample(members, count))
        rest = [i for i in range(len(self)) if i not in held]
        return self.take(rest), self.take(sorted(held), split=f"{self.split} (held out)")


@dataclass(frozen=True)
class Source:
    """Where a known data set lies on the hub, and how to read its rows. Without a repository it lies in
    `$SSMSCOPE_DATA` alone."""

    repository: str
    labels: tuple[str, ...]
    splits: tuple[str, ...]
    configuration: str | None = None
    columns: tuple[str, ...] = ("text",)
    default_split: str = "test"
    unlabelled: bool = False
    """Whether rows without a gold label (-1) are part of the data set; they are left out."""


SENTIMENT = ("negative", "positive")
SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        # the sentence-level SST-2 of the papers; GLUE's has 67,349 phrases and an unlabelled test split
        "sst2": Source("SetFit/sst2", SENTIMENT, ("train", "validation", "test")),
        "imdb": Source("stanfordnlp/imdb", SENTIMENT, ("train", "test")),
        "rotten_tomatoes": Source(
            "cornell-movie-review-data/rotten_tomatoes", SENTIMENT, ("train", "validation", "test")
        ),
        # snli has -1 where the annotators did not agree
        "snli": Source(
            "stanfordnlp/snli",
            ("entailment", "neutral", "contradiction"),
            ("train", "validation", "test"),
            columns=("premise", "hypothesis"),
            unlabelled=True,
        ),
        # GLUE keeps the labels of wnli's test split to itself
        "wnli": Source(
            "nyu-mll/glue",
            ("not_entailment", "entailment"),
            ("train", "validation"),
            configuration="wnli",
            columns=("sentence1", "sentence2"),
            default_split="validation",
        ),
    }
)
LINE_SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        # rare words are <unk> in this configuration, as in the perplexities of the literature
        "wikitext2": Source("Salesforce/wikitext", (), ("train", "validation", "test"), configuration="wikitext-2-v1"),
        # English novels in the public domain, in documents of about 10,000 characters; whole books are held out
        "books": Source("", (), ("train", "validation", "test")),
    }
)
"""Texts without labels, for language models (`ssmscope.tasks.language`)."""


def text_data(
    name: str,
    split: str,
    texts: Sequence[str],
    labels: Sequence[int],
    label_names: Sequence[str],
    rationales: Sequence[Spans | None] | None = None,
) -> TextData:
    """Texts and class ids of any origin, and rationales where there are any, as `TextData`, with their fingerprint."""
    marked = None if rationales is None or not any(rationales) else tuple(spans or None for spans in rationales)
    parts = [list(texts), list(labels), list(label_names), *([marked] if marked is not None else [])]
    content = json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(content).hexdigest()[:16]
    return TextData(name, split, tuple(texts), tuple(labels), tuple(label_names), digest, marked)


def load_text(data: str | Path, split: str | None = None, *, label_names: Sequence[str] | None = None) -> TextData:
    """The labelled texts of a known data set or of a csv, tsv, jsonl or parquet file.

    Args:
        data: `sst2`, `imdb`, `rotten_tomatoes`, `snli`, `wnli`, or the path of a file with the columns `text`
            and `label`. Pairs of sentences become one text, joined by `PAIR_SEPARATOR`. A file's column `rationale`
            holds what people marked in a text, in one of the forms that `rationale_spans` reads.
        split: of a known data set; by default the one to evaluate on (`test`; `validation` for wnli, whose
            test split has no labels). A file has no splits.
        label_names: the classes of a model or of another file. A label of the file is then one of these names
            or an index into them. Without it, labels are numbered by sorted name (whole numbers by value).

    Raises:
        InputError: an unknown name or split, a file that cannot be read, a missing column, no row, an empty
            text, a missing or unknown label, a rationale that does not fit its text.
    """
    if isinstance(data, str) and data in SOURCES:
        return load_known(data, split)
    if data in LINE_SOURCES:
        raise InputError(f"{data} has no labels: it is data for language models; give one of {', '.join(SOURCES)}")
    path = Path(data)
    if path.suffix.lower() not in SUFFIXES and not path.exists():
        raise InputError(
            f"unknown data '{data}'; give one of {', '.join(SOURCES)}, or a file ending in "
            f"{', '.join(SUFFIXES)}{did_you_mean(str(data), SOURCES)}"
        )
    if split is not None:
        raise InputError(f"split '{split}' was asked for, but file {path} has none; give a file each")
    rows = read_rows(path)
    texts = [checked_text(row, ("text",), number, path) for number, row in enumerate(rows, 1)]
    raw = [checked_label(row, number, path) for number, row in enumerate(rows, 1)]
    names = tuple(label_names) if label_names is not None else sorted_names(raw)
    ids = {name: i for i, name in enumerate(names)}
    if label_names is not None:
        ids = {**{str(i): i for i in range(len(names))}, **ids}
    for number, label in enumerate(raw, 1):
        if label not in ids:
            allowed = ", ".join(names)
            raise InputError(f"row {number} of {path} has the label '{label}'; allowed are {allowed}")
    rationales = [rationale_spans(row, number, path) for number, row in enumerate(rows, 1)]
    return text_data(path.stem, "all", texts, [ids[label] for label in raw], names, rationales)


def load_known(name: str, split: str | None) -> TextData:
    source = SOURCES[name]
    split = split or source.default_split
    rows, place = known_rows(name, source, split)
    texts: list[str] = []
    labels: list[int] = []
    for number, row in enumerate(rows, 1):
        label = checked_label(row, number, place)
        if label == "-1" and source.unlabelled:
            continue
        if not label.isdecimal() or int(label) >= len(source.labels):
            allowed = ", ".join(f"{i} ({name})" for i, name in enumerate(source.labels))
            raise InputError(f"row {number} of {place} has the label '{label}'; allowed are {allowed}")
        texts.append(checked_text(row, source.columns, number, place))
        labels.append(int(label))
    return text_data(name, split, texts, labels, source.labels)


def known_rows(name: str, source: Source, split: str) -> tuple[list[Row], str]:
    """The rows of a known data set, from `$SSMSCOPE_DATA` or the hub, and where that is.

    Raises:
        InputError: for a split that it does not have, or rows that cannot be read.
    """
    root = os.environ.get("SSMSCOPE_DATA")
    if not root and not source.repository:
        raise InputError(f"{name} is not on the hub; set SSMSCOPE_DATA to a folder with {name}/<split>.parquet")
    if not root:
        if split not in source.splits:
            raise InputError(
                f"{name} has no {'labelled ' if source.labels else ''}split '{split}'; there are "
                f"{', '.join(source.splits)}{did_you_mean(split, source.splits)}"
            )
        return hub_rows(source, split), f"{source.repository} ({split})"
    directory = Path(root) / name
    present = sorted(path.stem for path in directory.glob("*.parquet"))
    if split not in present:
        allowed = f"there are {', '.join(present)}" if present else "it holds no parquet file"
        raise InputError(f"{name} has no split '{split}' in {directory}; {allowed}{did_you_mean(split, present)}")
    return read_rows(directory / f"{split}.parquet"), str(directory / f"{split}.parquet")


def hub_rows(source: Source, split: str) -> list[Row]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InputError(
            f"{source.repository} comes from the hub through the package 'datasets', which is not installed; "
            "install it, or set SSMSCOPE_DATA to a folder with <name>/<split>.parquet"
        ) from error
    # what the hub's client says of its retries would bury the one line that says what to do
    client = logging.getLogger("huggingface_hub")
    level = client.level
    client.setLevel(logging.ERROR)
    try:
        return list(datasets.load_dataset(source.repository, source.configuration, split=split))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{source.repository} could not be read from the hub ({first_line(error)}); "
            "set SSMSCOPE_DATA to a folder with <name>/<split>.parquet to work without it"
        ) from error
    finally:
        client.setLevel(level)


def read_rows(path: Path) -> list[Row]:
    """The rows of a csv, tsv, jsonl or parquet file, as column → value.

    Raises:
        InputError: no such file, another format, content that is not of its format, or no row.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{path} is not a data file; its name must end in {', '.join(SUFFIXES)}")
    if not path.is_file():
        known = ", ".join(SOURCES)
        raise InputError(f"there is no file {path}; give one of {known}, or the path of a data file")
    try:
        rows = READERS[suffix](path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path} could not be read as {suffix[1:]}: {first_line(error)}") from error
    if not rows:
        raise InputError(f"{path} holds no rows; give at least one text")
    return rows


def read_csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        return list(csv.DictReader(lines, delimiter=",", strict=True))


def read_tsv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error.msg}") from error
        if not isinstance(row, dict):
            raise ValueError(f'line {number} is not an object such as {{"text": "...", "label": 0}}')
        rows.append(row)
    return rows


def read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


READERS = {".csv": read_csv, ".tsv": read_tsv, ".jsonl": read_jsonl, ".parquet": read_parquet}


def checked_column(row: Row, column: str, number: int, place: str | Path) -> Any:
    if column not in row:
        found = ", ".join(str(name) for name in row if name is not None) or "none"
        where = place if number == 1 else f"row {number} of {place}"
        raise InputError(f"{where} has no column '{column}'; its columns are {found}")
    return row[column]


def checked_text(row: Row, columns: Sequence[str], number: int, place: str | Path) -> str:
    parts: list[str] = []
    for column in columns:
        value = checked_column(row, column, number, place)
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"row {number} of {place} has an empty {column}; every row needs a text")
        parts.append(value.strip())
    return PAIR_SEPARATOR.join(parts)


def checked_label(row: Row, number: int, place: str | Path) -> str:
    """The label as a string; whole numbers without a fraction, so that 1 and 1.0 are one class."""
    value = checked_column(row, "label", number, place)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    label = "" if value is None or value != value else str(value).strip()
    if not label:
        raise InputError(f"row {number} of {place} has no label; every row needs one")
    return label


def rationale_spans(row: Row, number: int, place: str | Path) -> Spans | None:
    """What the column `rationale` marks in the row's text, as characters of the text without its outer spaces; None
    where it is absent or empty.

    It holds spans of characters, [[0, 4], [10, 17]] (start, and the one after the last); a 0 or 1 for every word
    between spaces, [0, 1, 1] or "0 1 1"; or the marked words themselves, "a gripping film" or ["a", "film"], each of
    which stands in the text once. In a csv or tsv file lists are written as JSON.

    Raises:
        InputError: another form, a span outside the text, another number of words, or words that are not in the text or
            in it several times.
    """
    given = row.get("rationale")
    whole = row["text"]
    if isinstance(given, str):
        given = _parsed_rationale(given, len(whole.split()))
    if given is None or given != given or given == []:
        return None
    which = f"the rationale of row {number} of {place}"
    if not isinstance(given, list):
        raise InputError(f"{which} is {given!r}; allowed are {RATIONALES}")
    if all(isinstance(item, str) for item in given):
        spans = [_found(words, whole, which) for words in given]
    elif all(isinstance(item, list) for item in given):
        spans = [_checked_span(item, len(whole), which) for item in given]
    elif all(item in (0, 1) for item in given):
        words = [match.span() for match in re.finditer(r"\S+", whole)]
        if len(given) != len(words):
            raise InputError(f"{which} has {len(given)} numbers for {len(words)} words; give a 0 or 1 for every word")
        spans = [span for span, marked in zip(words, given) if marked]
    else:
        raise InputError(f"{which} is {given!r:.60}; allowed are {RATIONALES}")
    return _joined_spans(spans, whole)


RATIONALES = "spans [[start, end], …], a 0 or 1 for every word, or words of the text"


def _parsed_rationale(given: str, words: int) -> Any:
    """A string's list, its numbers, or the string itself as the one thing that is marked."""
    given = given.strip()
    if not given:
        return None
    if re.fullmatch(r"[01](\s+[01])*", given) and len(given.split()) == words:
        return [int(digit) for digit in given.split()]
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    return found if isinstance(found, list) else [given]


def _found(words: str, whole: str, which: str) -> tuple[int, int]:
    times = whole.count(words) if words else 0
    if not times:
        raise InputError(f"{which}, {words!r:.60}, is not in its text; rename the column if it holds something else")
    if times > 1:
        raise InputError(f"{which}, {words!r:.60}, is in its text {times} times; give spans [[start, end], …] instead")
    start = whole.index(words)
    return start, start + len(words)


def _checked_span(span: Sequence[Any], length: int, which: str) -> tuple[int, int]:
    whole = len(span) == 2 and all(isinstance(end, int) and not isinstance(end, bool) for end in span)
    if not whole or not 0 <= span[0] < span[1] <= length:
        raise InputError(f"{which} has the span {span!r:.60}; allowed are [start, end] within 0 to {length}")
    return span[0], span[1]


def _joined_spans(spans: Iterable[tuple[int, int]], whole: str) -> Spans | None:
    """In order, those that overlap or touch as one, counted from the first character that is no space."""
    before, end = len(whole) - len(whole.lstrip()), len(whole.strip())
    joined: list[tuple[int, int]] = []
    for start, stop in sorted((max(a - before, 0), min(b - before, end)) for a, b in spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined) or None


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def sorted_names(labels: Iterable[str]) -> tuple[str, ...]:
    distinct = set(labels)
    try:
        return tuple(sorted(distinct, key=int))
    except ValueError:
        return tuple(sorted(distinct))
