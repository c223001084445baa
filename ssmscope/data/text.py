"""Labelled texts of known data sets and users' files.

A known data set is read from `$SSMSCOPE_DATA/<name>/<split>.parquet` if that variable is set, else from the hub
through `datasets`. Both have the hub's own columns, so a file of the hub can be copied into the folder.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ssmscope.data.columns import check_read, reading, refuse_absent
from ssmscope.data.eraser import eraser_rows, eraser_splits
from ssmscope.data.hub import hub_rows, is_hub_id, labelled_rows, part_of
from ssmscope.data.planted import SIZES, TASKS, planted
from ssmscope.data.rows import (
    Row,
    Spans,
    check_split,
    checked_class_id,
    checked_label,
    checked_path,
    checked_text,
    class_ids,
    given_rows,
    label_column,
    numbered,
    rationale_spans,
    read_rows,
    sorted_names,
    whole,
)
from ssmscope.data.tokens import fingerprint_of
from ssmscope.errors import InputError, check_path, check_whole, did_you_mean

PAIR_SEPARATOR = " ||| "
"""Separator of the two sentences of a pair, a plain string that every tokenizer can read."""


@dataclass(frozen=True)
class TextData:
    """Texts with their classes (`labels`, indices into `label_names`), in the order of their source.

    Attributes:
        name: the data set's name, or the file's stem; the `split` of a user's file is `all`.
        fingerprint: first 16 hex digits of the SHA-256 of texts, labels, label names and any rationales.
        rationales: for each text the spans of characters (start, end) that people marked as the reason for its label,
            None for an unmarked text; None if no text is marked.
        label_column: column of a file whose labels are numbered in the order of their names, which means nothing;
            empty if the numbers are the source's own, or the caller's.
    """

    name: str
    split: str
    texts: tuple[str, ...]
    labels: tuple[int, ...]
    label_names: tuple[str, ...]
    fingerprint: str
    rationales: tuple[Spans | None, ...] | None = None
    label_column: str = ""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int], *, split: str | None = None) -> TextData:
        """Return the examples at `indices`, in that order, with a new fingerprint."""
        texts, labels = [self.texts[i] for i in indices], [self.labels[i] for i in indices]
        rationales = None if self.rationales is None else [self.rationales[i] for i in indices]
        made = text_data(self.name, split or self.split, texts, labels, self.label_names, rationales)
        return replace(made, label_column=self.label_column)

    def sample(self, n: int, *, seed: int = 0) -> TextData:
        """Draw at most `n` examples without replacement; they keep their order."""
        check_whole(1, n=n)
        check_whole(0, seed=seed)
        return self if n >= len(self) else self.take(sorted(random.Random(seed).sample(range(len(self)), n)))

    def divide(self, share: float, *, seed: int = 0) -> tuple[TextData, TextData]:
        """Split off about `share`, within (0, 1), of the examples; return the rest and the part. Both have every class;
        raise InputError if one has a single example."""
        check_whole(0, seed=seed)
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
    """Location of a known data set on the hub and format of its rows. Without a repository, the data set is found only
    in `$SSMSCOPE_DATA`, or is `planted`: generated. Rows without a gold label (-1), of which an `unlabelled` data set
    has some, are left out."""

    repository: str
    labels: tuple[str, ...]
    splits: tuple[str, ...]
    configuration: str | None = None
    columns: tuple[str, ...] = ("text",)
    default_split: str = "test"
    unlabelled: bool = False
    planted: bool = False


SENTIMENT, RELATIONS = ("negative", "positive"), ("entailment", "neutral", "contradiction")
SPLITS = ("train", "validation", "test")
SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        # The papers use sentence-level SST-2; GLUE's has 67,349 phrases and an unlabelled test split.
        "sst2": Source("SetFit/sst2", SENTIMENT, SPLITS),
        "imdb": Source("stanfordnlp/imdb", SENTIMENT, ("train", "test")),
        "rotten_tomatoes": Source("cornell-movie-review-data/rotten_tomatoes", SENTIMENT, SPLITS),
        # SNLI has the label -1 where the annotators did not agree.
        "snli": Source("stanfordnlp/snli", RELATIONS, SPLITS, columns=("premise", "hypothesis"), unlabelled=True),
        # GLUE does not publish the labels of WNLI's test split.
        "wnli": Source(
            "nyu-mll/glue",
            ("not_entailment", "entailment"),
            ("train", "validation"),
            configuration="wnli",
            columns=("sentence1", "sentence2"),
            default_split="validation",
        ),
        **{name: Source("", labels, tuple(SIZES), planted=True) for name, (_, labels) in TASKS.items()},
    }
)
LINE_SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        # This configuration has <unk> for rare words, as in the perplexities of the literature.
        "wikitext2": Source("Salesforce/wikitext", (), SPLITS, configuration="wikitext-2-v1"),
        # These are public-domain English novels in documents of about 10,000 characters; splits hold whole books.
        "books": Source("", (), SPLITS),
    }
)
"""Texts without labels, for language models (`ssmscope.data.language`)."""


def text_data(
    name: str,
    split: str,
    texts: Sequence[str],
    labels: Sequence[int],
    label_names: Sequence[str],
    rationales: Sequence[Spans | None] | None = None,
) -> TextData:
    """Make a `TextData` with its fingerprint from texts, class ids and optional rationales."""
    marked = None if rationales is None or not any(rationales) else tuple(spans or None for spans in rationales)
    parts = [list(texts), list(labels), list(label_names), *([marked] if marked is not None else [])]
    digest = fingerprint_of(parts, ensure_ascii=False)
    return TextData(name, split, tuple(texts), tuple(labels), tuple(label_names), digest, marked)


def load_text(
    data: Any,
    split: str | None = None,
    *,
    label_names: Sequence[str] | None = None,
    as_written: bool = False,
    rationale: str = "rationale",
    columns: Mapping[str, str] | Sequence[str] | None = None,
) -> TextData:
    """Load the labelled texts of a data set known or on the hub, of a csv, tsv, jsonl or parquet file, of an ERASER
    folder, or of a table that Python holds.

    Args:
        data: one of `SOURCES`; `OWNER/NAME` or `OWNER/NAME:CONFIGURATION` on the hub, or the path of a file, with the
            columns `text` and `label`; or that of a folder (`ssmscope.data.eraser`); or a DataFrame with these columns,
            or a list of (text, label). Pairs of sentences are joined to one text by `PAIR_SEPARATOR`. A file may have a
            column `rationale` that `rationale_spans` reads.
        split: split of a known data set, of one on the hub or of a folder, by default the one to evaluate on (`test`;
            `validation` for wnli, whose test split has no labels). `test[:200]` streams the first 200 rows of the hub
            and downloads no more. A file has no splits.
        label_names: classes of another file. The labels are then all names of these or all indices into them; if they
            could be either, name the column `label_name` or `label_index` instead of `label`. By default labels are
            numbered as on the hub, else by sorted name (integers by value), and matched when a model is asked.
        as_written: `label_names` are the labels of another file, so labels that can be names are names.
        rationale: column that is read as the rationale.
        columns: columns of a file or a table that are read in place of those named here, {"text": "sentence"}.

    Raises:
        InputError: the name or split is unknown, the file cannot be read, a text or label is missing or unclear, or a
            rationale does not fit its text.
    """
    if columns is not None:
        with reading(columns):
            found = load_text(data, split, label_names=label_names, as_written=as_written, rationale=rationale)
            check_read()
            return found
    if isinstance(data, str) and data in SOURCES:
        if rationale != "rationale":
            raise InputError(
                f"{data} has no column {rationale!r}; planted sets have 'rationale', files columns of their own"
            )
        return load_known(data, split)
    if isinstance(data, str) and data in LINE_SOURCES:
        raise InputError(f"{data} has no labels: it is data for language models; give one of {', '.join(SOURCES)}")
    own = None
    if (given := given_rows(data)) is not None:
        path, rows = Path("given"), given
        if split is not None:
            raise InputError(f"split {split!r:.80} was asked for, but a table has none; give the rows of one")
    elif is_hub_id(data):
        path, split = Path(data), split or "test"
        rows, own = labelled_rows(str(data), split)
    elif os.path.isdir(check_path(data, "data")):
        path, split = Path(data), split or "test"
        rows = eraser_rows(path, split, PAIR_SEPARATOR)
    else:
        path = checked_path(data, SOURCES, split)
        rows = read_rows(path)
    if rationale != "rationale":
        refuse_absent(rationale, rows[0], path)
    texts = [checked_text(row, "text") for row in rows]
    column = label_column(rows[0])
    raw = [checked_label(row, column) for row in rows]
    if label_names is None:
        raw = [whole(label) for label in raw]
        own = own if own and {*raw} <= {*own} else None
        names = own or sorted_names(raw)
        numbers = {name: at for at, name in enumerate(names)}
        ids, column = [numbers[label] for label in raw], "" if own else column
    else:
        names = tuple(label_names)
        ids = class_ids(raw, names, rows[0].place, column, as_written=as_written, numbers=own)
        column = ""
    name = str(data) if is_hub_id(data) else path.stem
    made = text_data(name, split or "all", texts, ids, names, [rationale_spans(row, rationale) for row in rows])
    return replace(made, label_column=column)


def known_splits(data: str | Path) -> tuple[str, ...]:
    """Return the splits of a known data set or of an ERASER folder; none for a file."""
    if data in SOURCES:
        return SOURCES[str(data)].splits
    return eraser_splits(Path(data)) if os.path.isdir(data) else ()


def load_known(name: str, split: str | None) -> TextData:
    source = SOURCES[name]
    split = split or source.default_split
    rows = [row for row in known_rows(name, source, split) if not source.unlabelled or checked_label(row) != "-1"]
    labels = [checked_class_id(row, source.labels) for row in rows]
    texts = [checked_text(row, *source.columns, separator=PAIR_SEPARATOR) for row in rows]
    rationales = list(map(rationale_spans, rows)) if source.planted else None
    return text_data(name, split, texts, labels, source.labels, rationales)


def known_rows(name: str, source: Source, split: str) -> list[Row]:
    """Return the rows of a known data set from `$SSMSCOPE_DATA` or the hub."""
    root = os.environ.get("SSMSCOPE_DATA")
    if root and not source.planted:
        with reading({}):
            return read_rows(split_file(Path(root, name), part_of(split).split))[: part_of(split).first]
    if not source.repository and not source.planted:
        raise InputError(f"{name} is not on the hub; set SSMSCOPE_DATA to a folder with {name}/<split>.parquet")
    check_split(name, part_of(split).split, source.splits, "labelled " if source.labels else "")
    if source.planted:
        rows = planted(name, part_of(split).split)[: part_of(split).first]
    else:
        advice = "set SSMSCOPE_DATA to a folder with <name>/<split>.parquet to work without it"
        rows, _ = hub_rows(source.repository, source.configuration, split, advice)
    with reading({}):
        return numbered(rows, f"{source.repository or name} ({split})")


def split_file(folder: Path, split: str) -> Path:
    """Return the file of a split in a data set's folder, or raise InputError if there is none."""
    present = sorted(path.stem for path in folder.glob("*.parquet"))
    if split not in present:
        allowed = f"there are {', '.join(present)}" if present else "it holds no parquet file"
        raise InputError(
            f"{folder.name} has no split {split!r:.80} in {folder}; {allowed}{did_you_mean(split, present)}"
        )
    return folder / f"{split}.parquet"
