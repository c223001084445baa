"""What analyses read beside models, texts or labelled data: the options that name it, and their values."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ssmscope.api.options import REPEATED, WHOLE_NUMBER, Metavar, Option, Range, Reads, options_of
from ssmscope.core.limits import MAX_TOKENS_PER_ROW
from ssmscope.core.reading import MAX_FILE_BYTES, SURROGATE, decoded_text, read_text
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model
    from ssmscope.data.pixels import PixelData
    from ssmscope.data.sequences import SequenceData
    from ssmscope.data.text import TextData
    from ssmscope.data.tokens import TokenData

    ExampleData = TextData | PixelData | SequenceData | TokenData

TEXT_CLASSIFIER, TOKEN_CLASSIFIER, PIXEL_CLASSIFIER = "text-classifier", "token-classifier", "pixel-classifier"
LANGUAGE_MODEL, TOKEN_MODEL = "language-model", "token-model"
KINDS: Mapping[str, str] = {
    TEXT_CLASSIFIER: "classes of texts",
    TOKEN_CLASSIFIER: "classes of token ids, without a tokenizer",
    PIXEL_CLASSIFIER: "classes of images",
    LANGUAGE_MODEL: "the next token of a text",
    TOKEN_MODEL: "the next of token ids, without a tokenizer",
}
"""The kinds of models, and what each predicts."""
TEXT_MODELS = (TEXT_CLASSIFIER, LANGUAGE_MODEL)

TEXTS = ("text", "file", "ids", "image")
"""The options that give texts."""
MOST_TOKENS = 16384
"""Of a text, unless somebody says otherwise."""
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".xlsx")
"""How files end that hold more than lines of text."""


class Input(ABC):
    """A kind of input: its options, and how they are read."""

    options: Mapping[str, Option]
    parameter: ClassVar[str]
    """What it is called in the function's signature."""

    def reads_lines(self, kind: str | None) -> bool:
        """Whether of a model of this kind the data is lines of text, without labels."""
        return False

    @abstractmethod
    def check(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Refuse what can be refused without a model.

        Raises:
            InputError: as said.
        """

    @abstractmethod
    def read(self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        """The value that the function gets.

        Raises:
            InputError: it cannot be read, or does not fit the models.
        """

    def once(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values for being read several times: what can be read once alone is read."""
        return values

    def read_besides(
        self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]
    ) -> Mapping[str, Any]:
        """What the function gets besides, by the name of its parameter; of most kinds of input nothing.

        Raises:
            InputError: as `read`.
        """
        return {}


def _text_options(
    *,
    text: Annotated[Sequence[str] | None, "A text; may be repeated.", REPEATED] = None,
    file: Annotated[str | None, "UTF-8 texts, one a line; - is stdin.", Reads("file", ("-",)), Metavar("FILE")] = None,
    ids: Annotated[
        Sequence[str] | None, "Token ids instead of a text; may be repeated.", REPEATED, Metavar("5,17,3")
    ] = None,
    image: Annotated[
        Sequence[str] | None,
        "A PNG or JPEG, for a model of pixels; may be repeated.",
        REPEATED,
        Reads("file"),
        Metavar("FILE"),
    ] = None,
    max_tokens: Annotated[int, "Refuse longer texts.", Range(1)] = MOST_TOKENS,
) -> None: ...


@dataclass(frozen=True)
class Texts(Input):
    """Texts, token ids or images, as one `Batch` of the model.

    Attributes:
        needed: whether there must be any; without, the function gets None.
        instead: the option that asks for random sequences in place of texts, and cannot stand beside them.
        most: how many tokens a text may have, unless somebody says otherwise.
        data: where labelled texts may be read instead, as `Data` does: refuses options that do not go with them, or
            with texts, told which it is; None where they may not.
    """

    needed: bool = True
    instead: str | None = None
    most: int = MOST_TOKENS
    data: Callable[..., None] | None = None
    parameter: ClassVar[str] = "texts"

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        found = options_of(_text_options)
        found["max_tokens"] = replace(found["max_tokens"], default=self.most)
        if self.data is None:
            return found
        data = options_of(_data_options, without=("max_tokens",))
        return {**found, **data, "data": replace(data["data"], help="Labelled texts instead: sst2, imdb, … or a file.")}

    def check(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        of_data = self._of_data(values)
        if self.data is not None:
            self.data(of_data, **options)
        if of_data:
            return
        given, drawn = self._any(values), self._drawn(options)
        if given and drawn:
            beside = ", ".join(f"--{name}" for name in TEXTS[:-1])
            raise InputError(
                f"--{self.instead} is that of random sequences; leave it out beside {beside} and --{TEXTS[-1]}"
            )
        if self.needed and self.instead is not None and not given and not drawn:
            raise InputError(
                f"no text; give --text, --file, --ids or --image, or --{self.instead} N for random sequences"
            )
        if given or (self.needed and not drawn):
            # What stands on standard input can be read once, when it runs.
            self._rows(
                {**values, "file": None, "text": ["-"]} if values["file"] == "-" and not values["text"] else values
            )

    def _of_data(self, values: Mapping[str, Any]) -> bool:
        """Whether labelled texts are asked for.

        Raises:
            InputError: beside texts, or with what is of one of the two alone.
        """
        given = self.data is not None and values["data"] is not None
        if given and self._any(values):
            raise InputError("--data cannot be combined with --text, --file, --ids or --image; give one of them")
        if self.data is not None and not given and values["split"] is not None:
            raise InputError("--split is of --data; give it too")
        return given

    @staticmethod
    def _any(values: Mapping[str, Any]) -> bool:
        """Whether texts are given."""
        return any(values[name] or values[name] == "" for name in TEXTS)

    def _drawn(self, options: Mapping[str, Any]) -> bool:
        """Whether random sequences are asked for instead."""
        return self.instead is not None and options[self.instead] is not None

    def once(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**values, "text": lines_of("-"), "file": None} if values["file"] == "-" else values

    @staticmethod
    def _rows(values: Mapping[str, Any]) -> tuple[list[str] | None, list[list[int]] | None]:
        """The texts, or the token ids."""
        text, file, ids, image = (values[name] for name in TEXTS)
        if ids and (text or file is not None):
            raise InputError("--ids cannot be combined with --text or --file; give one of them")
        if image and (text or file is not None or ids):
            raise InputError("--image cannot be combined with --text, --file or --ids; give one of them")
        rows = [whole_numbers(row, "--ids", "5,17,3") for row in ids] if ids else None
        return (texts_of(text, file) if rows is None and not image else None), rows

    def read(self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        if self._of_data(values):
            return Data("texts").read(values, options, models)
        if not self._any(values) and (not self.needed or self._drawn(options)):
            return None
        texts, rows = self._rows(values)
        (model,) = models
        pixels, image = None, values["image"]
        if image and model.channels is not None:
            from ssmscope.core.encoding import image_form
            from ssmscope.data.pixels import read_images

            size = model.config.image_size
            form = (model.channels, size) if size is None else image_form(model.channels, size, model.config.patch)
            pixels = read_images(image, *form)
        elif image:
            raise InputError(f"{model.name} reads tokens, not pixels: give --text, --file or --ids instead of --image")
        return model.encode(texts, ids=rows, values=pixels, max_tokens=values["max_tokens"])


def one_text(model: Model, text: Any) -> Batch:
    """A text, or token ids, which somebody types as "5,17,3" for a model without a tokenizer.

    Raises:
        InputError: as `Model.encode`, for what are no ids, and for several texts.
    """
    if isinstance(text, str) and model.tokenizer is None:
        return model.encode(ids=whole_numbers(text, "token ids", "5,17,3"))
    batch = model.encode(text)
    if len(batch.tokens) != 1:
        raise InputError(f"{len(batch.tokens)} texts were given where one is read; give one")
    return batch


def _data_options(
    *,
    data: Annotated[
        str | None, "sst2, imdb, … or a file; else what MODEL learnt from.", Reads("data"), Metavar("DATA")
    ] = None,
    split: Annotated[str | None, "Of a known data set; by default the one to test on.", Metavar("NAME")] = None,
    max_tokens: Annotated[int, "Refuse longer texts.", Range(1)] = MOST_TOKENS,
) -> None: ...


@dataclass(frozen=True)
class Data(Input):
    """Labelled examples, by default of the data that the model learnt from.

    Attributes:
        of: "texts" alone, or "examples": of pixels too.
        leaves_out: whether the analysis has an option `max_tokens` of its own, which leaves longer texts out; where it
            is not given they are refused here.
    """

    of: Literal["texts", "examples"] = "texts"
    leaves_out: bool = False
    parameter: ClassVar[str] = "data"

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        found = options_of(_data_options, without=("max_tokens",) if self.leaves_out else ())
        if self.of == "examples":
            help_ = "cifar10, digits, sst2, … or a file; else what MODEL learnt from."
            return {**found, "data": replace(found["data"], help=help_)}
        return found

    def check(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        return

    def read(self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        from ssmscope.architectures.loading.load import trained_on
        from ssmscope.data.labelled import KNOWN, load_labelled
        from ssmscope.data.text import SOURCES, load_text

        known = SOURCES if self.of == "texts" else KNOWN
        data, model = values["data"], models[0]
        name = data if data is not None else trained_on(model.name)
        if name is None or (data is None and name not in known):
            raise InputError(f"no data; give --data, one of {', '.join(known)}, or a file with text and label")
        read = load_text if self.of == "texts" else load_labelled
        found = read(name, values["split"], label_names=model.labels)
        most = (options if self.leaves_out else values)["max_tokens"]
        if most is None or not self.leaves_out:
            for each in models:
                check_lengths(each, found, MOST_TOKENS if most is None else most)
        return found


def _example_options(
    *,
    data: Annotated[
        str | None,
        "wikitext2, sst2, cifar10, … or a file; else what MODEL learnt from.",
        Reads("data"),
        Metavar("DATA"),
    ] = None,
    split: Annotated[str | None, "Of a known data set; by default the one to test on.", Metavar("NAME")] = None,
    length: Annotated[int, "Tokens of a row, of a language model's text.", Range(1, MAX_TOKENS_PER_ROW)] = 256,
    max_tokens: Annotated[int, "Refuse longer texts, of a classifier.", Range(1)] = MOST_TOKENS,
) -> None: ...


@dataclass(frozen=True)
class Examples(Input):
    """A classifier's labelled texts or images, or a language model's text in rows of tokens.

    Attributes:
        prefer: where no split is named, the first of these that a known data set has is read; else the one to test on.
    """

    prefer: tuple[str, ...] = ()
    parameter: ClassVar[str] = "data"

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        return options_of(_example_options)

    def reads_lines(self, kind: str | None) -> bool:
        return kind in (LANGUAGE_MODEL, TOKEN_MODEL)

    def check(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        return

    def read(self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> ExampleData:
        from ssmscope.architectures.loading.load import trained_on

        (model,) = models
        name = values["data"] if values["data"] is not None else trained_on(model.name)
        known = known_data(model)
        if name is None or (values["data"] is None and name not in known):
            raise InputError(f"no data; give --data, one of {', '.join(known)}, or a file")
        most = values["max_tokens"]
        return load_examples(model, name, values["split"], values["length"], self.prefer, max_tokens=most)


def check_lengths(model: Model, data: ExampleData, most: int) -> None:
    """Refuse labelled texts of more than `most` tokens before any is read.

    Raises:
        InputError: naming the first one.
    """
    from ssmscope.core.encoding import check_characters, check_tokens
    from ssmscope.core.tokenizing import tokenize

    for number, text in enumerate(getattr(data, "texts", ()) if model.tokenizer is not None else (), start=1):
        if 4 * len(text) > most:  # a character is of four bytes at most, and a token has one at least
            named = f"row {number} of {data.name}"
            check_characters(text, most, named)
            check_tokens(len(tokenize(model.tokenizer, text, named=named)["input_ids"]), most, named)


def known_data(model: Model) -> tuple[str, ...]:
    """The names of the data sets that a model of this kind reads."""
    from ssmscope.data import pixels
    from ssmscope.data.text import LINE_SOURCES, SOURCES

    if model.channels is not None:
        return tuple(pixels.KNOWN)
    return tuple(SOURCES) if model.is_classifier else tuple(LINE_SOURCES)


def load_examples(
    model: Model,
    data: str,
    split: str | None,
    length: int,
    prefer: Sequence[str] = (),
    *,
    max_tokens: int = MOST_TOKENS,
) -> ExampleData:
    """Text in rows of `length` tokens for a language model, labelled examples for a classifier.

    Args:
        data: a known name or a file.
        split: of a known name; None for the first of `prefer` that it has, else the one to test on.
        max_tokens: of a classifier's text.

    Raises:
        InputError: an unknown name or split, a file that cannot be read, a longer text, or a language model without a
            tokenizer.
    """
    from ssmscope.data.labelled import load_labelled
    from ssmscope.data.language import language_data, load_lines
    from ssmscope.data.text import LINE_SOURCES, SOURCES

    source = (SOURCES if model.is_classifier else LINE_SOURCES).get(data)
    if split is None and source is not None:
        split = next((name for name in prefer if name in source.splits), None)
    if model.is_classifier:
        found = load_labelled(data, split, label_names=model.labels)
        check_lengths(model, found, max_tokens)
        return found
    model.check_tokenizer(str(data))
    if split is None and source is not None:
        split = source.default_split
    lines = load_lines(data, split)
    return language_data(lines, model.tokenizer, length=length, name=Path(data).stem, split=split or "all")


# ---- what was typed, as values


def texts_of(texts: Sequence[str] | None, file: str | None) -> list[str]:
    """The texts of `--text` or of `--file`.

    Raises:
        InputError: both or neither are given, a text is not valid UTF-8, or the file cannot be used.
    """
    if texts and file is not None:
        raise InputError("--text cannot be combined with --file; give one of them")
    if file is not None:
        return lines_of(file)
    if not texts:
        raise InputError(
            "no text; give --text TEXT, --file FILE, or --ids 5,17,3 for a model without a tokenizer; --image FILE for "
            "one of pixels"
        )
    for text in texts:
        if SURROGATE.search(text):
            raise InputError("--text is not valid UTF-8; give it in UTF-8, or in a file with --file")
    return list(texts)


def lines_of(file: str) -> list[str]:
    """The lines of a UTF-8 file, `-` being stdin.

    Raises:
        InputError: the file cannot be read, is a table, is no UTF-8 text, has no line, or an empty one between others:
            the numbers of the texts would no longer be those of the lines.
    """
    suffix = Path(file).suffix.lower()
    if suffix in TABLES:
        raise InputError(f"--file {file} is a table, and --file takes lines: save its texts one a line in a .txt file")
    advice = "save it as UTF-8, one text a line"
    if file == "-":
        text = decoded_text(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), "--file -", advice=advice)
    else:
        text = read_text(file, f"--file {file}", advice=advice)
    lines = text.replace("\r\n", "\n").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise InputError(f"--file {file} is empty; give one text a line")
    empty = next((number for number, line in enumerate(lines, start=1) if not line.strip()), None)
    if empty is not None:
        raise InputError(f"--file {file}: line {empty} is empty; give one text a line")
    return lines


def whole_numbers(value: str, option: str, example: str) -> list[int]:
    """The numbers of "5,17,3".

    Raises:
        InputError: a part is no whole number of at most 18 digits.
    """
    parts = [part.strip() for part in value.split(",")]
    wrong = next((part for part in parts if not WHOLE_NUMBER.fullmatch(part)), None)
    if wrong is not None:
        raise InputError(f"{option} {value!r}: {wrong!r} is no whole number; write for example {option} {example}")
    return [int(part) for part in parts]
