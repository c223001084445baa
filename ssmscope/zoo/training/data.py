"""Training, validation and test examples by the name of a task, a data set or a file."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ssmscope.data.babi import QuestionTokens, question_tokens, questions
from ssmscope.data.filler import load_filler
from ssmscope.data.hub import is_hub_id
from ssmscope.data.language import language_data, load_lines
from ssmscope.data.pixels import KNOWN as PIXELS
from ssmscope.data.pixels import PixelData, load_pixels
from ssmscope.data.rows import SUFFIXES, checked_label, checked_path, checked_text, read_rows
from ssmscope.data.stories import NEEDLES, STORIES
from ssmscope.data.text import LINE_SOURCES, SOURCES, TextData, known_splits, load_text
from ssmscope.data.tokens import SequenceData, TokenData
from ssmscope.errors import InputError
from ssmscope.zoo.documents import (
    DOCUMENTS,
    byte_tokenizer,
    document_data,
    load_documents,
    symbol_tokenizer,
    word_tokenizer,
)
from ssmscope.zoo.instructions import InstructionData, load_mixture
from ssmscope.zoo.mad import GENERATORS, next_tokens
from ssmscope.zoo.sequences import listops, listops_expressions, majority
from ssmscope.zoo.tokenizers import train_byte_pairs

Data = TextData | SequenceData | PixelData | TokenData | InstructionData
Parts = dict[str, Data | None]

MIXED_QUESTIONS = "babi"
QUESTIONS = (*STORIES, MIXED_QUESTIONS, *NEEDLES)
LENGTHS = 0, 1 / 8, 1 / 4, 1 / 2, 1
"""Lengths of the contexts of mixed questions, as parts of the longest."""


def tasks() -> dict[str, str]:
    """Return every known name with the kind of its data: text, pixels, sequences, tokens, language or instructions."""
    return {
        **dict.fromkeys(SOURCES, "text"),
        **dict.fromkeys(PIXELS, "pixels"),
        **dict.fromkeys(("majority", "listops"), "sequences"),
        **dict.fromkeys((*GENERATORS, *QUESTIONS), "tokens"),
        **dict.fromkeys(LINE_SOURCES, "language"),
        "instruct": "instructions",
    }


def kind_of(data: str | Path) -> str:
    """Return the kind of data of a known name, a file, a folder or an id of the hub: `language` for plain lines, else
    labelled `text`."""
    known = tasks()
    if isinstance(data, str) and data in known:
        return known[data]
    if is_hub_id(data):
        return "text"
    path = checked_path(data, known, suffixes=(*SUFFIXES, ".txt"))
    return "language" if path.suffix.lower() == ".txt" else "text"


def task_options(data: str | Path) -> tuple[str, ...]:
    """Return the options that a generated task or language data take."""
    own = {"majority": ("flipped",), "listops": (), "mqar": ("vocabulary", "pairs")}
    own |= dict.fromkeys(QUESTIONS, ("filler", "vocabulary"))
    recall = (name for name, draw in GENERATORS.items() if "every_token" in inspect.signature(draw).parameters)
    own |= dict.fromkeys(recall, ("vocabulary", "every_token"))
    if data in own:
        return ("length", "examples", *own[str(data)])
    if data in DOCUMENTS:
        return ("length", "vocabulary")
    return {
        "tokens": ("length", "examples", "vocabulary"),
        "language": ("length", "unit", "vocabulary"),
        "instructions": ("mixture", "examples", "vocabulary"),
    }.get(kind_of(data), ())


def parts_of(options: Mapping[str, Any]) -> tuple[Parts, Any]:
    """Return training, validation and test examples, None for missing parts, and the tokenizer that made them. There is
    a tokenizer if the data's tokens do not depend on a model: for generated tasks, questions and language. Labelled
    texts and instructions are still texts, and pixels have none."""
    data, kind = options["data"], options["kind"]
    own_splits = kind != "text" and (kind != "language" or data in DOCUMENTS)
    why = "whose questions are generated" if data in QUESTIONS else "which has its own splits"
    for name in ("split", "validation", "test"):
        if own_splits and options[name] is not None:
            why = "a mixture of data sets" if kind == "instructions" else why
            raise InputError(f"{name} does not apply to {data}, {why}; leave it out")
    if kind == "instructions":
        chosen = {name: options[name] for name in ("examples", "held_out", "share", "seed")}
        return {**load_mixture(options["mixture"], **chosen)}, None
    if kind == "pixels":
        # `load_pixels` returns the same parts of the digits, so no model is tested on training examples.
        parts: list[Any] = [load_pixels(data, "train"), None, load_pixels(data, "test")]
        tokenizer = None
    elif kind == "text":
        parts, tokenizer = [*_texts(options)], None
    elif data in QUESTIONS:
        *parts, tokenizer = _questions(options)
    elif kind == "language":
        *parts, tokenizer = (_documents if data in DOCUMENTS else _language)(options)
    else:
        train, test = _generated(options)
        parts, tokenizer = [train, None, test], symbol_tokenizer(train.tokens)
    found = _divided(parts, options)
    if options.get("every_token"):  # Only in training: what is held out and the test ask for the values.
        whole: Any = found["train"]
        found["train"] = dataclasses.replace(whole, targets=next_tokens(whole.ids))
    return found, tokenizer


def _generated(options: Mapping[str, Any]) -> tuple[Any, Any]:
    name, seed, length, examples = (options[each] for each in ("data", "seed", "length", "examples"))
    if name == "majority":
        flipped = {} if options["flipped"] is None else {"flipped": options["flipped"]}
        return majority(length or 100, examples=examples or 1000, seed=seed, **flipped)
    if name == "listops":
        return _listops(length or 100, examples or 1000, seed)
    sizes = {"length": length, "vocabulary": options["vocabulary"], "train_examples": examples}
    if name == "mqar":
        sizes["pairs"] = options["pairs"]
    return GENERATORS[name](**{key: value for key, value in sizes.items() if value is not None}, seed=seed)


def _listops(length: int, examples: int, seed: int) -> tuple[SequenceData, SequenceData]:
    """Load ListOps expressions of about `length` tokens for training and test. They are those of
    `$SSMSCOPE_DATA/listops/T<length>_<examples>_*.parquet` if there are such files, else random. Expressions of a file
    are padded to its longest, random ones to `length` + 4; models read the padding too."""
    root, splits = os.environ.get("SSMSCOPE_DATA"), []
    files = {split: Path(root or "", "listops", f"T{length}_{examples}_{split}.parquet") for split in ("train", "test")}
    if not root or not os.path.exists(files["train"]):
        return listops_expressions(length, examples=examples, seed=seed)
    for split, file in files.items():
        rows = read_rows(file)
        labels = list(map(checked_label, rows))
        wrong = next((label for label in labels if len(label) != 1 or not label.isdecimal()), None)
        if wrong is not None:
            raise InputError(f"{file} has the label '{wrong:.40}'; allowed are 0 to 9")
        texts = [checked_text(row, "text") for row in rows]
        splits.append(listops(texts, list(map(int, labels)), split=split))
    return splits[0], splits[1]


def _language(options: Mapping[str, Any]) -> tuple[Any, ...]:
    data, length = options["data"], options["length"] or 256
    known = data in LINE_SOURCES
    split = options["split"] or ("train" if known else None)
    lines = load_lines(data, split)
    if options["unit"] == "byte" and options["init_from"] is None:
        if options["vocabulary"] is not None:
            raise InputError("vocabulary does not apply to bytes, of which there are 256; leave it out")
        tokenizer = byte_tokenizer()
    else:
        tokenizer = _tokenizer(options, lines)

    def rows(source: Any, part: str) -> TokenData | None:
        if source is None:
            return None
        found = load_lines(source, part if source in LINE_SOURCES else None)
        return language_data(found, tokenizer, length=length, name=Path(source).stem, split=part)

    train = language_data(lines, tokenizer, length=length, name=Path(data).stem, split=split or "all")
    tested = data if options["test"] is None and known and split != "test" else options["test"]
    return train, rows(options["validation"], "validation"), rows(tested, "test"), tokenizer


def _documents(options: Mapping[str, Any]) -> tuple[Any, ...]:
    name = options["data"]
    texts = {split: load_documents(name, split) for split in ("train", "validation", "test")}
    tokenizer = _tokenizer(options, texts["train"])
    settings = {"length": options["length"], "name": name}
    return *(document_data(each, tokenizer, split=split, **settings) for split, each in texts.items()), tokenizer


def _questions(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Generate questions of one task in contexts of one length, or of all `STORIES` (`babi`) at all `LENGTHS`."""
    name = options["data"]
    mixed = name == MIXED_QUESTIONS
    longest, count = options["length"] or (1000 if mixed else 128), options["examples"] or (50_000 if mixed else 5000)
    cells = [(task, round(part * longest)) for task in STORIES for part in LENGTHS] if mixed else [(name, longest)]
    if count < len(cells):
        raise InputError(f"examples is {count}; {name} needs at least {len(cells)}, one of each task and length")
    made: dict[str, list[Any]] = {}
    for split, number in (("train", count), ("validation", max(count // 10, 1)), ("test", max(count // 5, 1))):
        common: dict[str, Any] = {"split": split, "filler": load_filler(options["filler"], split)}
        common["examples"] = -(-number // len(cells))
        made[split] = [
            questions(task, length=length, seed=options["seed"] + at, **common)
            for at, (task, length) in enumerate(cells)
        ]
    tokenizer = _tokenizer(options, [text for data in made["train"] for text in data.texts])
    tokens = [[question_tokens(data, tokenizer) for data in each] for each in made.values()]
    return *(QuestionTokens.joined(each, name) for each in tokens), tokenizer


def _tokenizer(options: Mapping[str, Any], texts: Sequence[str]) -> Any:
    """Return the tokenizer of `init_from`, or make one of the texts: of bytes for documents, else of words."""
    from ssmscope.loading.load import load

    if options["init_from"] is None and options["data"] in DOCUMENTS:
        return train_byte_pairs(texts, vocabulary=options["vocabulary"], lowercase=False)
    if options["init_from"] is None:
        return word_tokenizer(texts, vocabulary=options["vocabulary"] or 10_000)
    model = load(options["init_from"])
    if model.tokenizer is None:
        raise InputError(f"{options['init_from']} has no tokenizer; init_from needs a model that reads text")
    return model.tokenizer


def _texts(options: Mapping[str, Any]) -> tuple[Any, ...]:
    data, split = options["data"], options["split"]
    known = known_splits(data)
    split = split or ("train" if known or is_hub_id(data) else None)
    train = load_text(data, split)
    if len(train.label_names) < 2:
        raise InputError(f"{data} has one class, '{train.label_names[0]}'; a classifier needs at least two")

    def other(given: str | Path | None, which: str) -> TextData | None:
        if given is None and (which not in known or which == split):
            return None
        source = data if given is None else given
        own = which if which in known_splits(source) else None
        if isinstance(source, str) and source in SOURCES:
            part = load_text(source, own)
            if part.label_names != train.label_names:
                raise InputError(
                    f"{source} has the classes {', '.join(part.label_names)}, but {data} has "
                    f"{', '.join(train.label_names)}; give {which} data with the same classes"
                )
            return part
        return load_text(source, own, label_names=train.label_names, as_written=data not in SOURCES)

    return train, other(options["validation"], "validation"), other(options["test"], "test")


def _divided(parts: Sequence[Any], options: Mapping[str, Any]) -> Parts:
    """Return the parts; if there are no validation examples, they are held out from the training ones."""
    (train, validation, test), seed, share = parts, options["seed"], options["held_out"]
    if validation is None and share:
        train, validation = train.divide(share, seed=seed)
    if options["share"] < 1:
        train = balanced(train, options["share"], seed=seed)
    return {"train": train, "validation": validation, "test": test}


def balanced(data: Any, share: float, *, seed: int = 0) -> Any:
    """Draw a `share` of the examples, equally many per class if there are classes."""
    draw = np.random.default_rng(seed)
    if isinstance(data, TokenData):
        return data.take(np.sort(draw.permutation(len(data))[: max(round(share * len(data)), 1)]))
    labels = np.asarray(data.labels)
    each = round(share * len(labels) / len(data.label_names))
    chosen: list[int] = []
    for label, name in enumerate(data.label_names):
        members = np.flatnonzero(labels == label)
        if not 0 < each <= len(members):
            raise InputError(f"a balanced share of {share} needs {each} of class '{name}', which has {len(members)}")
        chosen += draw.permutation(members)[:each].tolist()
    return data.take(sorted(chosen))
