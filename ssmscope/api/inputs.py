"""Inputs of analyses, texts or labelled data: the options that name them, and how these are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.options import REPEATED, Columns, Metavar, Option, Range, Reads
from ssmscope.api.series import SERIES_HELP, encoded_series, labelled_series_of, reads_series
from ssmscope.api.signatures import options_of
from ssmscope.api.typed import lines_of, texts_of, whole_numbers
from ssmscope.core.batching import MAX_TOKENS_PER_ROW
from ssmscope.core.chat import is_chat, read_chats
from ssmscope.errors import InputError, refuse_unused

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model
    from ssmscope.data.pixels import PixelData
    from ssmscope.data.text import TextData
    from ssmscope.data.tokens import SequenceData, TokenData

    ExampleData = TextData | PixelData | SequenceData | TokenData

TEXT_CLASSIFIER, TOKEN_CLASSIFIER, PIXEL_CLASSIFIER = "text-classifier", "token-classifier", "pixel-classifier"
LANGUAGE_MODEL, TOKEN_MODEL = "language-model", "token-model"
MODEL_KINDS: Mapping[str, str] = {
    TEXT_CLASSIFIER: "classes of texts",
    TOKEN_CLASSIFIER: "classes of token ids, without a tokenizer",
    PIXEL_CLASSIFIER: "classes of images",
    LANGUAGE_MODEL: "the next token of a text",
    TOKEN_MODEL: "the next of token ids, without a tokenizer",
}
"""Kinds of models, and what each of them predicts."""
TEXT_MODELS = (TEXT_CLASSIFIER, LANGUAGE_MODEL)
TEXTS = ("text", "file", "ids", "image", "series", "chat")
"""Options that give texts."""
MAX_TOKENS = 16384
"""Maximum length of a text in tokens, unless `max_tokens` is given."""


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(f'{name}=…' for name in names[:-1])} or {names[-1]}=…"


class Input:
    """A kind of input: its options, and how they are read."""

    options: Mapping[str, Option]

    def reads_lines(self, kind: str | None) -> bool:
        """Return True if models of this kind read lines of text without labels."""
        return False

    def wants_data(self, kind: str | None) -> bool:
        """Return True if models of this kind read data, by default what they were trained on."""
        return True

    def check_kind(self, kind: str | None, values: Mapping[str, Any]) -> None:
        """Raise InputError for inputs and options that give a model of a kind nothing to read."""

    def check(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Raise InputError if the input can be refused without a model."""

    def read(self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        """Return the value that the function receives; raise InputError if it cannot be read or fits no model."""

    def take(self, given: Any, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        """Return what the function receives where Python gives its argument, which may be what the command line takes:
        a name, a path, or a table. Raise InputError as `read`."""
        return given

    def once(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values that can be read several times: standard input, for example, is replaced by its lines."""
        return values

    def read_besides(
        self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]
    ) -> Mapping[str, Any]:
        """Return further arguments of the function by parameter name; most kinds of input have none."""
        return {}


Split = Annotated[str | None, "Split, by default test; test[:200] streams its first 200 rows.", Metavar("NAME")]
DATA_HELP = "{}, …, OWNER/NAME on the hub, a file or an ERASER folder; by default MODEL's training data."


def _options(
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
    series: Annotated[
        str | Path | None,
        "Series for a model of numbers: npy, npz, csv or parquet, a row a step or a column of lists.",
        Reads("file"),
        Metavar("FILE"),
    ] = None,
    chat: Annotated[
        str | None,
        "JSON or JSONL of chat messages, spelled out by the tokenizer's template.",
        Reads("file"),
        Metavar("FILE"),
    ] = None,
    data: Annotated[str | None, DATA_HELP.format("sst2, imdb"), Reads("data"), Metavar("DATA")] = None,
    split: Split = None,
    relevant: Annotated[str | None, "Column of DATA that marks tokens (default: rationale).", Metavar("COLUMN")] = None,
    columns: Columns = None,
    length: Annotated[int, "Tokens per row of a language model's text.", Range(1, MAX_TOKENS_PER_ROW)] = 256,
    max_tokens: Annotated[int, "Refuse longer texts.", Range(1)] = MAX_TOKENS,
) -> None: ...


def _chosen(*names: str, **helps: str) -> dict[str, Option]:
    """Return some of the options of inputs, with other help texts where these are given."""
    known = options_of(_options)
    return {name: replace(known[name], help=helps.get(name, known[name].help)) for name in names}


COLUMNS = _chosen("columns")


def _id_rows(ids: Any) -> list[list[int]]:
    """Return token ids of one text or several, numbers as Python has them or as they are typed, "5,17,3"."""
    given = [ids] if isinstance(ids, str) else ids
    if any(isinstance(row, str) for row in given):
        return [whole_numbers(str(row), "ids", "5,17,3") for row in given]
    from ssmscope.core.encoding import texts_or_ids

    return texts_or_ids(given)[1] or []


@dataclass(frozen=True)
class Texts(Input):
    """Texts, token ids or images, as one `Batch` of the model.

    Attributes:
        needed: True if texts are required; otherwise the function receives None without them.
        instead: the option that asks for random sequences in place of texts; it excludes them.
        most: default maximum length of a text in tokens.
        data: None if labelled texts cannot be read instead. Otherwise a check, called with True for labelled texts and
            with the analysis's options, that refuses options which do not apply.
        marks: True if these labelled texts may have marked tokens.
        pairs: True if no texts are needed where the analysis's option `data` names pairs.
    """

    needed: bool = True
    instead: str | None = None
    most: int = MAX_TOKENS
    data: Callable[..., None] | None = None
    marks: bool = False
    pairs: bool = False

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        data = (
            {} if self.data is None else {"data": "Labelled texts instead: sst2, imdb, …, a file or an ERASER folder."}
        )
        found = _chosen(*TEXTS, "max_tokens", *["data", "split"] * bool(data), *["relevant"] * self.marks, **data)
        return {**found, "max_tokens": replace(found["max_tokens"], default=self.most)}

    def check(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        of_data = self._of_data(values)
        if self.data is not None:
            self.data(of_data, **options)
        if of_data:
            return
        given, drawn = self._any(values), self._drawn(options)
        if given and drawn:
            raise InputError(f"{self.instead}=… asks for random sequences; it cannot be combined with {_listed(TEXTS)}")
        if self.needed and self.instead is not None and not given and not drawn:
            raise InputError(f"no text; give {_listed(TEXTS)}, or {self.instead}=… for random sequences")
        if given or (self.needed and not drawn and not self._has_pairs(options)):
            # Standard input can be read only once, when the analysis runs.
            later = values["file"] == "-" and not values["text"]
            self._rows({**values, "file": None, "text": ["-"]} if later else values)

    def take(self, given: Any, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        from ssmscope.data.rows import given_rows, text_of

        if reads_series(models) and is_named(given):
            return encoded_series(models[0], given, values["max_tokens"])
        if is_chat(given):
            return given
        typed = isinstance(given, str) or (isinstance(given, list | tuple) and all(isinstance(t, str) for t in given))
        if typed or (rows := given_rows(given)) is None:
            return given
        if self.data is None:
            return [text_of(row) for row in rows]
        return self.read({**values, "data": given}, options, models)

    def _of_data(self, values: Mapping[str, Any]) -> bool:
        """Return True if labelled texts are asked for; refuse texts as well, or a split without data."""
        given = self.data is not None and values["data"] is not None
        if given and self._any(values):
            raise InputError(f"data=… cannot be combined with {_listed(TEXTS)}; give one of them")
        unused = next((name for name in ("split", "relevant") if values.get(name) is not None), None)
        if self.data is not None and not given and unused is not None:
            raise InputError(f"{unused}=… needs data=…; give that too")
        return given

    @staticmethod
    def _any(values: Mapping[str, Any]) -> bool:
        """Return True if texts are given."""
        return any(values[name] or values[name] == "" for name in TEXTS)

    def _drawn(self, options: Mapping[str, Any]) -> bool:
        """Return True if random sequences are asked for instead."""
        return self.instead is not None and options[self.instead] is not None

    def _has_pairs(self, options: Mapping[str, Any]) -> bool:
        from ssmscope.data.pairs import is_pairs

        return self.pairs and is_pairs(options["data"])

    def once(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**values, "text": lines_of("-"), "file": None} if values["file"] == "-" else values

    @staticmethod
    def _rows(values: Mapping[str, Any]) -> tuple[list[str] | None, list[list[int]] | None]:
        """Return the texts or the token ids, and None for the other."""
        text, file, ids, image, series, chat = (values[name] for name in TEXTS)
        text = [text] if isinstance(text, str) else text
        given = [name for name in TEXTS if values[name] not in (None, [], ())]
        if len(given) > 1 and (last := TEXTS.index(given[-1])) > 1:
            raise InputError(f"{given[-1]}=… cannot be combined with {_listed(TEXTS[:last])}; give one of them")
        rows = None if not ids else _id_rows(ids)
        elsewhere = rows is not None or bool(image) or series is not None or chat is not None
        return (None if elsewhere else texts_of(text, file)), rows

    def read(self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        if self._of_data(values):
            return Data("texts").read(values, options, models)
        if not self._any(values) and (not self.needed or self._drawn(options) or self._has_pairs(options)):
            refuse_unused("without texts", max_tokens=values["max_tokens"] not in (None, self.most))
            return None
        (model,) = models
        if values["series"] is not None:
            return encoded_series(model, values["series"], values["max_tokens"])
        if model.reads == "series":
            raise InputError(f"{model.name} reads series of {model.channels} channels: give series=…, a file of these")
        if values["chat"] is not None:
            return model.encode(read_chats(values["chat"]), max_tokens=values["max_tokens"])
        texts, rows = self._rows(values)
        pixels, image = None, values["image"]
        if image and model.channels is not None:
            from ssmscope.core.encoding import image_form
            from ssmscope.data.pixels import read_images

            size = model.config.image_size
            form = (model.channels, size) if size is None else image_form(model.channels, size, model.config.patch)
            pixels = read_images(image, *form)
        elif image:
            raise InputError(f"{model.name} reads tokens, not pixels: give text=…, file=… or ids=… instead of image=…")
        return model.encode(texts, ids=rows, values=pixels, max_tokens=values["max_tokens"])


class Named(Input):
    """Input that `data` names: a data set, a file or a folder, or in Python a table."""

    def take(self, given: Any, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        if is_named(given):
            return self.read({**values, "data": given}, options, models)
        if not hasattr(given, "fingerprint"):
            said = (
                f"data is {' '.join(repr(given).split()):.60}: give the name of a data set, a file's path, a DataFrame"
            )
            raise InputError(f"{said} or a list of (text, label)")
        return given


def is_named(given: Any) -> bool:
    """Return True for the name or path of data, and for a table that Python holds."""
    from ssmscope.data.rows import is_table

    return isinstance(given, str | os.PathLike) or is_table(given)


def one_text(model: Model, text: Any) -> Batch:
    """Encode a text, or token ids, which are typed as "5,17,3" for a model without a tokenizer, or a file with a
    series. Raise InputError as `Model.encode`, for ids that are not whole numbers, and for several texts."""
    if model.reads == "series" and is_named(text):
        text = encoded_series(model, text)
    if isinstance(text, str) and model.tokenizer is None and model.channels is None:
        return model.encode(ids=whole_numbers(text, "ids", "5,17,3"))
    batch = model.encode(text)
    if len(batch.tokens) != 1:
        raise InputError(f"{len(batch.tokens)} texts were given where one is expected; give one")
    return batch


@dataclass(frozen=True)
class Data(Named):
    """Labelled examples, by default of the data that the model was trained on.

    Attributes:
        of: "texts" alone, or "examples", which include images.
        leaves_out: True if the analysis has its own option `max_tokens`, which leaves longer texts out; without a value
            for it they are refused.
        series: True if labelled series can be given instead.
    """

    of: Literal["texts", "examples"] = "texts"
    leaves_out: bool = False
    series: bool = False

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        names = ("data", "split", *["series"] * self.series, *["max_tokens"] * (not self.leaves_out))
        helps = {"data": DATA_HELP.format("cifar10, digits, sst2")} if self.of == "examples" else {}
        return _chosen(*names, **{"series": SERIES_HELP} if self.series else {}, **helps)

    def read(self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        from ssmscope.data.pixels import LABELLED, load_labelled
        from ssmscope.data.text import SOURCES, load_text

        if (series := labelled_series_of(values, models)) is not None:
            return series
        of_pixels = next((each.name for each in models if each.channels is not None), None)
        if self.of == "texts" and of_pixels is not None:
            raise InputError(f"{of_pixels} reads pixels, and data=… here is texts; {GIVE_IMAGES}")
        known, read = (SOURCES, load_text) if self.of == "texts" else (LABELLED, load_labelled)
        name = data_name(values["data"], models[0], known, "a file with text and label, or an ERASER folder")
        column = {"rationale": values["relevant"]} if values.get("relevant") is not None else {}
        found = read(name, values["split"], **column)
        most = (options if self.leaves_out else values)["max_tokens"]
        if most is None or not self.leaves_out:
            for each in models:
                check_fits(each, found, MAX_TOKENS if most is None else most)
        return found


@dataclass(frozen=True)
class Examples(Named):
    """A classifier's labelled texts or images, or a language model's text in rows of tokens.

    Attributes:
        prefer: splits in order of preference, if none is named; a data set without any of them gives its test split.
        pairs: True if pairs of a clean and a corrupted text can be given instead.
    """

    prefer: tuple[str, ...] = ()
    pairs: bool = False
    sizes = _chosen("length", "max_tokens", max_tokens="Refuse a classifier's longer texts.")

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        told = DATA_HELP.format("wikitext2, sst2, cifar10") + " Or pairs (see patch)." * self.pairs
        return _chosen("data", "split", "series", data=told, series=SERIES_HELP) | self.sizes

    def reads_lines(self, kind: str | None) -> bool:
        return kind in (LANGUAGE_MODEL, TOKEN_MODEL)

    def read(self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        from ssmscope.data.pairs import given_pairs

        (model,) = models
        if (series := labelled_series_of(values, models)) is not None:
            return series
        if self.pairs and (pairs := given_pairs(values["data"], values["split"])) is not None:
            self._refuse_sizes("with pairs", values, "length", "max_tokens")
            return pairs
        self._refuse_sizes(f"with {model.name}", values, "length" if model.is_classifier else "max_tokens")
        name, most = data_name(values["data"], model, known_data(model), "a file"), values["max_tokens"]
        return load_examples(model, name, values["split"], values["length"], self.prefer, max_tokens=most)

    def _refuse_sizes(self, where: str, values: Mapping[str, Any], *names: str) -> None:
        refuse_unused(where, **{name: values[name] not in (None, self.sizes[name].default) for name in names})


def data_name(given: Any, model: Model, known: Collection[str], else_: str) -> Any:
    """Return the given data, or that of the data on which a model was trained."""
    from ssmscope.loading.load import trained_on

    name = given if given is not None else trained_on(model.name)
    if name is None or (given is None and name not in known):
        raise InputError(f"no data; give data=…, one of {', '.join(known)}, or {else_}")
    return name


GIVE_IMAGES = "give images to heatmap, attention, explain, knockout or sanity, with image=…"
"""Advice where labelled data do not fit a model of pixels."""


def check_fits(model: Model, data: ExampleData, most: int) -> None:
    """Raise InputError, naming the first, if labelled texts have more than `most` tokens, if they are given to a model
    of pixels, or if a model that reads whole images is given images of another size."""
    from ssmscope.core.encoding import check_characters, check_tokens, image_form
    from ssmscope.core.tokenizing import tokenize

    if model.channels is not None and hasattr(data, "texts"):
        raise InputError(f"{model.name} reads {model.reads}, but {data.name} holds texts; {GIVE_IMAGES}")
    if model.channels is not None and model.config.patch is not None and hasattr(data, "shape"):
        _, (height, width) = image_form(model.channels, model.config.image_size, model.config.patch)
        if tuple(data.shape) != (height, width):
            said = f"{data.name} has images of {data.shape[1]} × {data.shape[0]} pixels, {model.name} reads"
            raise InputError(f"{said} {width} × {height}; {GIVE_IMAGES}")
    for number, text in enumerate(getattr(data, "texts", ()) if model.tokenizer is not None else (), start=1):
        if 4 * len(text) > most:  # A character has at most four bytes and a token at least one.
            named = f"row {number} of {data.name}"
            check_characters(text, most, named)
            check_tokens(len(tokenize(model.tokenizer, text, named=named)["input_ids"]), most, named)


def known_data(model: Model) -> tuple[str, ...]:
    """Return the names of the data sets that a model of this kind reads."""
    from ssmscope.data import pixels
    from ssmscope.data.text import LINE_SOURCES, SOURCES

    if model.channels is not None:
        return tuple(pixels.KNOWN)
    return tuple(SOURCES) if model.is_classifier else tuple(LINE_SOURCES)


def load_examples(
    model: Model, data: Any, split: str | None, length: int, prefer: Sequence[str] = (), *, max_tokens: int = MAX_TOKENS
) -> ExampleData:
    """Load text in rows of `length` tokens for a language model, or labelled examples for a classifier, of at most
    `max_tokens` tokens. `data` is a known name, a file or a table; `split` is by default the first of `prefer` that a
    known data set has, else its test split. Raise InputError if the name or the split is unknown, the file cannot be
    read, a text is longer, or a language model has no tokenizer."""
    from ssmscope.data.language import language_data, load_lines
    from ssmscope.data.pixels import load_labelled
    from ssmscope.data.text import LINE_SOURCES, SOURCES

    source = (SOURCES if model.is_classifier else LINE_SOURCES).get(data) if isinstance(data, str) else None
    if split is None and source is not None:
        split = next((name for name in prefer if name in source.splits), None)
    if model.is_classifier:
        found = load_labelled(data, split)
        check_fits(model, found, max_tokens)
        return found
    name = Path(data).stem if isinstance(data, str | os.PathLike) else "given"
    model.check_tokenizer(name if name == "given" else str(data))
    if split is None and source is not None:
        split = source.default_split
    lines = load_lines(data, split)
    return language_data(lines, model.tokenizer, length=length, name=name, split=split or "all")
