"""Training, validation and test examples by the name of a task, a data set or a file."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssmscope.data.instructions import InstructionData
from ssmscope.data.language import DOCUMENTS
from ssmscope.data.needles import NEEDLES
from ssmscope.data.pixels import PixelData
from ssmscope.data.rows import SUFFIXES, checked_label, checked_text, read_rows
from ssmscope.data.sequences import SequenceData, listops, listops_expressions, majority
from ssmscope.data.stories import TASKS as STORIES
from ssmscope.data.text import SOURCES, TextData, load_text
from ssmscope.data.tokens import ArrayData, TokenData
from ssmscope.errors import InputError, did_you_mean

Data = TextData | SequenceData | PixelData | TokenData | InstructionData
Parts = dict[str, Data | None]

PIXELS = ("cifar10", "digits")
SEQUENCES = ("majority", "listops")
LANGUAGE = ("wikitext2", *DOCUMENTS)
MIXED_QUESTIONS = "babi"
QUESTIONS = (*STORIES, MIXED_QUESTIONS, *NEEDLES)
LENGTHS = 0, 1 / 8, 1 / 4, 1 / 2, 1
"""Lengths of the contexts of mixed questions, as parts of the longest."""
INSTRUCTIONS = ("instruct",)
LINES = (".txt",)


def tasks() -> dict[str, str]:
    """Return every known name with the kind of its data: text, pixels, sequences, tokens, language or instructions."""
    from ssmscope.data.mad import GENERATORS

    return {
        **dict.fromkeys(SOURCES, "text"),
        **dict.fromkeys(PIXELS, "pixels"),
        **dict.fromkeys(SEQUENCES, "sequences"),
        **dict.fromkeys((*GENERATORS, *QUESTIONS), "tokens"),
        **dict.fromkeys(LANGUAGE, "language"),
        **dict.fromkeys(INSTRUCTIONS, "instructions"),
    }


def kind_of(data: str | Path) -> str:
    """Return the kind of data of a known name or a file: `language` for plain lines, else labelled `text`.

    Raises:
        InputError: the name is neither known nor a file.
    """
    known = tasks()
    if isinstance(data, str) and data in known:
        return known[data]
    path = Path(data)
    if path.suffix.lower() in LINES:
        return "language"
    if path.suffix.lower() not in SUFFIXES and not os.path.exists(path):
        raise InputError(
            f"unknown data '{data}'; give one of {', '.join(known)}, or a file ending in "
            f"{', '.join((*SUFFIXES, *LINES))}{did_you_mean(str(data), known)}"
        )
    return "text"


def task_options(data: str | Path) -> Collection[str]:
    """Return the options that a generated task or language data take."""
    if data == "majority":
        return ("length", "examples", "flipped")
    if data == "listops":
        return ("length", "examples")
    if data == "mqar":
        return ("length", "examples", "vocabulary", "pairs")
    if data in QUESTIONS:
        return ("length", "examples", "filler", "vocabulary")
    if data in DOCUMENTS:
        return ("length", "vocabulary")
    kind = kind_of(data)
    return {
        "tokens": ("length", "examples", "vocabulary"),
        "language": ("length", "unit", "vocabulary"),
        "instructions": ("mixture", "examples", "vocabulary"),
    }.get(kind, ())


def parts_of(options: Mapping[str, Any]) -> tuple[Parts, Any]:
    """Return training, validation and test examples, None for missing parts, and the tokenizer that made them.

    There is a tokenizer if the data's tokens do not depend on a model: for generated tasks, questions and language.
    Labelled texts and instructions are still texts, and pixels have none.

    Raises:
        InputError: the data cannot be read or used.
    """
    kind = options["kind"]
    if kind == "text":
        return _texts(options), None
    if options["data"] in DOCUMENTS:
        return _documents(options)
    if kind == "language":
        return _language(options)
    if options["data"] in QUESTIONS:
        return _questions(options)
    if kind == "instructions":
        return _instructions(options), None
    train, test = _pixels(options) if kind == "pixels" else _generated(options)
    _refuse_splits(options, "which has its own splits")
    tokenizer = None
    if not isinstance(train, PixelData):
        from ssmscope.data.language import symbol_tokenizer

        tokenizer = symbol_tokenizer(train.tokens)
    return _divided(train, None, test, options), tokenizer


def _refuse_splits(options: Mapping[str, Any], why: str) -> None:
    """Raise InputError if a split, validation or test data are given."""
    for name in ("split", "validation", "test"):
        if options[name] is not None:
            raise InputError(f"{name} does not apply to {options['data']}, {why}; leave it out")


def _pixels(options: Mapping[str, Any]) -> tuple[PixelData, PixelData]:
    from ssmscope.data.pixels import digits, load_pixels

    if options["data"] == "digits":
        return digits()  # These are the parts that `load_pixels` returns, so no model is tested on training examples.
    return load_pixels(options["data"], "train"), load_pixels(options["data"], "test")


def _generated(options: Mapping[str, Any]) -> tuple[Any, Any]:
    from ssmscope.data.mad import GENERATORS

    name, seed = options["data"], options["seed"]
    length, examples = options["length"], options["examples"]
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
    """Load ListOps expressions of about `length` tokens for training and test.

    They are those of `$SSMSCOPE_DATA/listops/T<length>_<examples>_*.parquet` if there are such files, else random.
    Expressions of a file are padded to its longest, random ones to `length` + 4; models read the padding too.
    """
    stem = Path(os.environ.get("SSMSCOPE_DATA", ""), "listops", f"T{length}_{examples}")
    if not (os.environ.get("SSMSCOPE_DATA") and os.path.exists(stem.with_name(f"{stem.name}_train.parquet"))):
        return listops_expressions(length, examples=examples, seed=seed)
    splits = []
    for split in ("train", "test"):
        file = stem.with_name(f"{stem.name}_{split}.parquet")
        rows = list(enumerate(read_rows(file), 1))
        labels = [checked_label(row, number, file) for number, row in rows]
        wrong = next((label for label in labels if len(label) != 1 or not label.isdecimal()), None)
        if wrong is not None:
            raise InputError(f"{file} has the label '{wrong:.40}'; allowed are 0 to 9")
        texts = [checked_text(row, ("text",), number, file) for number, row in rows]
        splits.append(listops(texts, [int(label) for label in labels], split=split))
    return splits[0], splits[1]


def _language(options: Mapping[str, Any]) -> tuple[Parts, Any]:
    from ssmscope.data.language import byte_tokenizer, language_data, load_lines, word_tokenizer

    data, length = options["data"], options["length"] or 256
    known = data in LANGUAGE
    split = options["split"] or ("train" if known else None)
    lines = load_lines(data, split)
    if options["init_from"] is not None:
        tokenizer = _tokenizer_of(options["init_from"])
    elif options["unit"] == "byte":
        if options["vocabulary"] is not None:
            raise InputError("vocabulary does not apply to bytes, of which there are 256; leave it out")
        tokenizer = byte_tokenizer()
    else:
        tokenizer = word_tokenizer(lines, vocabulary=options["vocabulary"] or 10_000)

    def rows(source: Any, part: str) -> TokenData:
        if source == data and known:
            return language_data(load_lines(data, part), tokenizer, length=length, name=str(data), split=part)
        found = load_lines(source, part if source in LANGUAGE else None)
        return language_data(found, tokenizer, length=length, name=Path(source).stem, split=part)

    train = language_data(lines, tokenizer, length=length, name=Path(data).stem, split=split or "all")
    validation = rows(options["validation"], "validation") if options["validation"] is not None else None
    test_source = options["test"] if options["test"] is not None else data if known and split != "test" else None
    test = rows(test_source, "test") if test_source is not None else None
    return _divided(train, validation, test, options), tokenizer


def _documents(options: Mapping[str, Any]) -> tuple[Parts, Any]:
    from ssmscope.data.language import document_data, load_documents
    from ssmscope.data.tokenizer import train_byte_pairs

    name = options["data"]
    _refuse_splits(options, "which has its own splits")
    texts = {split: load_documents(name, split) for split in ("train", "validation", "test")}
    if options["init_from"] is not None:
        tokenizer = _tokenizer_of(options["init_from"])
    else:
        tokenizer = train_byte_pairs(texts["train"], vocabulary=options["vocabulary"], lowercase=False)
    rows = {
        split: document_data(documents, tokenizer, length=options["length"], name=name, split=split)
        for split, documents in texts.items()
    }
    return _divided(rows["train"], rows["validation"], rows["test"], options), tokenizer


def _questions(options: Mapping[str, Any]) -> tuple[Parts, Any]:
    """Generate questions of one task in contexts of one length, or of all `STORIES` (`babi`) at all `LENGTHS`."""
    from ssmscope.data.babi import QuestionTokens, question_tokens, questions
    from ssmscope.data.filler import load_filler
    from ssmscope.data.language import word_tokenizer

    name = options["data"]
    _refuse_splits(options, "whose questions are generated")
    mixed = name == MIXED_QUESTIONS
    longest, count = options["length"] or (1000 if mixed else 128), options["examples"] or (50_000 if mixed else 5000)
    cells = [(task, round(part * longest)) for task in STORIES for part in LENGTHS] if mixed else [(name, longest)]
    if count < len(cells):
        raise InputError(f"examples is {count}; {name} needs at least {len(cells)}, one of each task and length")
    made: dict[str, list[Any]] = {}
    for split, number in (("train", count), ("validation", max(count // 10, 1)), ("test", max(count // 5, 1))):
        filler = load_filler(options["filler"], split)
        each = -(-number // len(cells))
        made[split] = [
            questions(task, length=length, examples=each, filler=filler, seed=options["seed"] + at, split=split)
            for at, (task, length) in enumerate(cells)
        ]
    if options["init_from"] is not None:
        tokenizer = _tokenizer_of(options["init_from"])
    else:
        texts = [text for data in made["train"] for text in data.texts]
        tokenizer = word_tokenizer(texts, vocabulary=options["vocabulary"] or 10_000)
    train, validation, test = (
        QuestionTokens.joined([question_tokens(data, tokenizer) for data in made[split]], name) for split in made
    )
    return _divided(train, validation, test, options), tokenizer


def _instructions(options: Mapping[str, Any]) -> Parts:
    from ssmscope.data.instructions import load_mixture

    _refuse_splits(options, "a mixture of data sets")
    chosen = {name: options[name] for name in ("examples", "held_out", "share", "seed")}
    return {**load_mixture(options["mixture"], **chosen)}


def _tokenizer_of(source: str | Path) -> Any:
    from ssmscope.architectures.loading.load import load

    model = load(source)
    if model.tokenizer is None:
        raise InputError(f"{source} has no tokenizer; init_from needs a model that reads text")
    return model.tokenizer


def _texts(options: Mapping[str, Any]) -> Parts:
    data, split = options["data"], options["split"]
    known = SOURCES.get(data) if isinstance(data, str) else None
    if known is not None:
        split = split or "train"
    train = load_text(data, split)
    if len(train.label_names) < 2:
        raise InputError(f"{data} has one class, '{train.label_names[0]}'; a classifier needs at least two")

    def other(given: str | Path | None, which: str) -> TextData | None:
        if given is None and (known is None or which not in known.splits or which == split):
            return None
        source = data if given is None else given
        if isinstance(source, str) and source in SOURCES:
            part = load_text(source, which if which in SOURCES[source].splits else None)
            if part.label_names != train.label_names:
                raise InputError(
                    f"{source} has the classes {', '.join(part.label_names)}, but {data} has "
                    f"{', '.join(train.label_names)}; give {which} data with the same classes"
                )
            return part
        return load_text(source, label_names=train.label_names, as_written=known is None)

    return _divided(train, other(options["validation"], "validation"), other(options["test"], "test"), options)


def _divided(train: Any, validation: Any, test: Any, options: Mapping[str, Any]) -> Parts:
    """Return the parts; validation examples are held out from the training ones if there are none of their own."""
    seed, share = options["seed"], options["held_out"]
    if validation is None and share:
        if isinstance(train, ArrayData):
            order = np.random.default_rng(seed).permutation(len(train))
            held = round(share * len(train))
            if not 0 < held < len(train):
                raise InputError(f"held_out {share} of {len(train)} examples leaves one of two parts empty")
            validation = train.take(np.sort(order[:held]), split=f"{train.split} (held out)")
            train = train.take(np.sort(order[held:]))
        else:
            train, validation = train.divide(share, seed=seed)
    if options["share"] < 1:
        train = balanced(train, options["share"], seed=seed)
    return {"train": train, "validation": validation, "test": test}


def balanced(data: Any, share: float, *, seed: int = 0) -> Any:
    """Draw a `share` of the examples, equally many per class if there are classes.

    Raises:
        InputError: a class has too few.
    """
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
