"""Texts, token ids and pixels as batches, with the shown text and the word of each token."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from ssmscope.core.chat import chat_ids, is_chat
from ssmscope.core.interface import Runs
from ssmscope.core.tokenizing import Spelled, names_of, token_texts, tokenize, word_numbers
from ssmscope.errors import InputError
from ssmscope.outline import Outlined

# These control a terminal or end a string. The upper control characters are allowed: real texts have them where
# Windows' own quotation marks and dashes were read as Latin-1. Halves of surrogate pairs are not characters at all.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, eq=False)
class Batch(Outlined):
    """Texts, token ids or images that run together.

    Attributes:
        input_ids: (batch, length) int64, padded on the right; a pixel classifier's only id is the class token's.
        mask: True at real positions, (batch, length).
        tokens: per text, the tokens as they are shown.
        words: per text, the number of the word that each token belongs to; None for special tokens.
        values: (batch, length − 1, channels), the pixels or patches of images, or (batch, length, channels) without a
            class token, or the steps of series; None for texts.
        spelled: per text that was given as such, the text with the characters of each token.
    """

    input_ids: Tensor
    mask: Tensor
    tokens: tuple[tuple[str, ...], ...]
    words: tuple[tuple[int | None, ...], ...]
    values: Tensor | None = None
    spelled: tuple[Spelled, ...] = field(default=(), repr=False)

    @property
    def lengths(self) -> list[int]:
        """Number of real tokens of each text."""
        return [len(tokens) for tokens in self.tokens]

    @property
    def last(self) -> Tensor:
        """Last real position of each text, (batch,)."""
        return last_positions(self.mask)

    def rows(self, chosen: Sequence[int]) -> Batch:
        """Return the chosen texts, padded to the longest of them."""
        longest = max(len(self.tokens[row]) for row in chosen)
        if longest == self.input_ids.shape[1] and list(chosen) == list(range(len(self.tokens))):
            return self
        own = list(chosen)
        ids, mask = (t[own, :longest] for t in (self.input_ids, self.mask))
        shown: tuple[Any, ...] = (self.tokens, self.words, self.spelled)
        tokens, words, spelled = (tuple(each[row] for row in own) if each else () for each in shown)
        return Batch(ids, mask, tokens, words, None if self.values is None else self.values[own, :longest], spelled)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on this device."""
        if self.input_ids.device == device:
            return self
        values = None if self.values is None else self.values.to(device)
        return replace(self, input_ids=self.input_ids.to(device), mask=self.mask.to(device), values=values)


def encode(model: Runs, texts: Any, ids: Any, values: Any, max_tokens: int | None) -> Batch:
    """Encode a model's input as one batch; arguments and errors as `Model.encode`."""
    if isinstance(texts, Batch):
        return texts.to(model.device)
    if model.channels is not None:
        of_series = getattr(model.config, "series", False)
        if values is None and ids is None and (of_series or isinstance(texts, Tensor | np.ndarray)):
            texts, values = None, texts
        if of_series:
            if values is None or isinstance(values, str) or texts is not None or ids is not None:
                said = f"{model.name} reads series of {model.channels} channels: give numbers (length, channels)"
                raise InputError(f"{said}, (series, length, channels), or a list of such")
            dtype = next(model.module.parameters()).dtype
            return encode_series(values, model.channels, dtype, max_tokens).to(model.device)
        if values is None or texts is not None or ids is not None:
            channels, size = model.channels, model.config.image_size
            if size:
                channels, size = image_form(channels, size, model.config.patch)
            form = f"{channels} channel{'s' if channels != 1 else ''}"
            form = f"{size[1]} × {size[0]} of {form}" if size else form
            raise InputError(f"{model.name} reads pixels ({form}), not texts: give it images, model.encode(values=…)")
        read = {"shape": model.config.image_size, "dtype": next(model.module.parameters()).dtype}
        read |= {name: getattr(model.config, name) for name in ("patch", "class_token")}
        read["normalised"] = getattr(model.config, "normalises", True)
        return encode_values(values, model.channels, **read, max_tokens=max_tokens).to(model.device)
    if values is not None:
        raise InputError(f"{model.name} reads tokens, not pixels: give texts or token ids")
    if (texts is None) == (ids is None):
        raise InputError("give either texts or token ids")
    if is_chat(texts):
        return encode_ids(chat_ids(model, texts), model.vocabulary, model.tokenizer, max_tokens).to(model.device)
    given = texts if ids is None else ids
    words, rows = (None, []) if isinstance(ids, list) and not ids else texts_or_ids(given)
    if ids is not None and rows is None:
        raise InputError("texts were given as ids; ids are whole numbers, e.g. [5, 17, 3]")
    if words is None and ids is None and model.tokenizer is not None:
        words = spelled_out(rows or [], model.tokenizer, model.vocabulary)
    if words is None:
        return encode_ids(rows or [], model.vocabulary, model.tokenizer, max_tokens).to(model.device)
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer: give token ids, model.encode(ids=…), or a tokenizer")
    return encode_texts(words, model.tokenizer, model.vocabulary, max_tokens).to(model.device)


def texts_or_ids(given: Any) -> tuple[list[str] | None, list[list[int]] | None]:
    """Return texts (one, or any sequence, array, series or generator of them) as a list; or token ids of one text or of
    several, or a tokenizer's output without its padding, as rows. Raises InputError for anything else."""
    advice = "give a text, a list of texts, token ids, or a tokenizer's output"
    if isinstance(given, str):
        return [given], None
    if isinstance(given, Mapping):
        if "input_ids" not in given:
            raise InputError(f"{type(given).__name__} without input_ids was given as texts; {advice}")
        return None, _unpadded(given["input_ids"], given.get("attention_mask"))
    if isinstance(given, bytes | bytearray | memoryview):
        raise InputError("bytes were given as texts; decode them first, e.g. given.decode('utf-8')")
    if isinstance(given, os.PathLike):
        raise InputError(f"the path {os.fspath(given)!r:.80} was given as texts; give the content of the file")
    if isinstance(given, set | frozenset):
        raise InputError(f"{type(given).__name__} was given as texts, which has no order; give a list")
    if hasattr(given, "columns") or hasattr(given, "column_names"):
        raise InputError(f"{type(given).__name__} was given as texts; give its column of texts")
    items = _plain(given)
    if isinstance(items, str):
        return [items], None
    if not isinstance(items, list | tuple):
        try:
            items = list(items)
        except TypeError:
            raise InputError(f"{type(given).__name__} was given as texts; {advice}") from None
    if not items:
        raise InputError("no text was given")
    if _is_id(items[0]):
        return None, [_id_row(items, "the given ids hold")]
    if not isinstance(items[0], str) and isinstance(rows := _plain(items[0]), list | tuple | range) and len(rows):
        if not isinstance(rows[0], str):
            return None, [_id_row(_plain(row), f"row {number} holds") for number, row in enumerate(items)]
    for number, item in enumerate(items):
        if not isinstance(item, str):
            raise InputError(f"text {number} is {item!r:.40} ({type(item).__name__}), no text; {advice}")
    return [str(item) for item in items], None


def _plain(given: Any) -> Any:
    if isinstance(given, str):
        return given
    for name in ("to_pylist", "tolist"):
        if hasattr(given, name):
            return getattr(given, name)()
    return given


def _is_id(value: Any) -> bool:
    value = value if isinstance(value, str) or getattr(value, "shape", None) != () else _plain(value)
    return isinstance(value, Integral) and not isinstance(value, bool)


def _id_row(row: Any, where: str) -> list[int]:
    if isinstance(row, str) or not isinstance(row, Sequence):
        raise InputError(f"{where} {row!r:.40}, which is not a list of token ids")
    if wrong := [value for value in row if not _is_id(value)]:
        raise InputError(f"{where} {wrong[0]!r:.40}, which is not a token id; ids are whole numbers")
    return [int(value) for value in row]


def _unpadded(ids: Any, mask: Any) -> list[list[int]]:
    """Return the rows of a tokenizer's output without the padding that its mask declares."""
    texts, rows = texts_or_ids(ids)
    if rows is None:
        wrong = f"input_ids hold {texts[0]!r:.40}, which is not a token id" if texts else "no token id was given"
        raise InputError(wrong)
    if mask is None:
        return rows
    _, real = texts_or_ids(mask)
    if real is None or [*map(len, real)] != [*map(len, rows)]:
        raise InputError("the attention_mask is not of the shape of the input_ids")
    return [[i for i, kept in zip(row, own) if kept] for row, own in zip(rows, real)]


def last_positions(mask: Tensor) -> Tensor:
    """Return the last position at which each row of a mask (batch, length) is true, (batch,); 0 if it is nowhere."""
    return (mask.bool() * torch.arange(mask.shape[1], device=mask.device)).amax(1)


def encode_texts(texts: Sequence[str], tokenizer: Any, vocabulary: int, max_tokens: int | None = None) -> Batch:
    """Encode texts as one batch, with the tokenizer's special tokens; tokens are shown as in the text. Raises
    InputError for no text, an empty one, control characters, only unknown tokens, or more than `max_tokens` tokens."""
    if not texts:
        raise InputError("no text was given")
    ids: list[list[int]] = []
    tokens: list[tuple[str, ...]] = []
    words: list[tuple[int | None, ...]] = []
    spelled: list[Spelled] = []
    for number, text in enumerate(texts):
        which = f"text {number}" if len(texts) > 1 else "the text"
        if not text.strip():
            raise InputError(f"{which} is empty: give at least one word")
        if control := _CONTROL.search(text):
            code = f"U+{ord(control.group()):04X}"
            raise InputError(f"{which} has the control character {code} at position {control.start()}: remove it")
        check_characters(text, max_tokens, which)
        fast = {"return_offsets_mapping": tokenizer.is_fast}
        encoded = tokenize(tokenizer, text, named=which, return_special_tokens_mask=True, **fast)
        row, special = encoded["input_ids"], encoded["special_tokens_mask"]
        check_tokens(len(row), max_tokens, which)
        unk_id, unk = tokenizer.unk_token_id, tokenizer.unk_token  # Each is looked up in many steps.
        content = [i for i, s in zip(row, special) if not s or i == unk_id]
        if not content:
            raise InputError(f"{which} has no token that this model's tokenizer knows")
        if unk_id is not None and set(content) == {unk_id}:
            raise InputError(f"{which} has only characters that this model's tokenizer does not know: {text[:40]!r}")
        ids.append(row)
        if tokenizer.is_fast:
            offsets = tuple(encoded["offset_mapping"])
            tokens.append(token_texts(text, offsets, tokenizer.convert_ids_to_tokens(row)))
            words.append(word_numbers(encoded.word_ids(0), text, offsets, tokens[-1]))
            unknown = [at for at, i in enumerate(row) if i == unk_id and text[slice(*offsets[at])] != unk]
            spelled.append(Spelled(text, offsets, tuple(unknown)))
        else:
            names, numbers = names_of(tokenizer, row, ())
            tokens.append(names)
            words.append(tuple(None if s else i for i, s in zip(numbers, special)))
    _check_range(ids, vocabulary, "the tokenizer gives")
    return replace(_padded(ids, tokens, words, getattr(tokenizer, "pad_token_id", None)), spelled=tuple(spelled))


def spelled_out(rows: Sequence[Sequence[int]], tokenizer: Any, vocabulary: int) -> list[str] | None:
    """Return the texts that a tokenizer encodes as these ids; None if it encodes its own decoding of them differently,
    or one is blank, as of a line break or the begin token alone. Raises InputError for an id outside the vocabulary.
    """
    _check_range(rows, vocabulary, "the given ids hold")
    texts = [tokenizer.decode(list(row), skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in rows]
    if not all(map(str.strip, texts)):
        return None
    try:
        again = tokenize(tokenizer, texts)["input_ids"]
    except InputError:
        return None
    return texts if [list(row) for row in rows] == again and not any(map(_CONTROL.search, texts)) else None


def encode_ids(
    rows: Sequence[Sequence[int]], vocabulary: int, tokenizer: Any = None, max_tokens: int | None = None
) -> Batch:
    """Encode token ids as one batch, without adding special tokens. Raises InputError for no id, one outside the
    vocabulary, or more than `max_tokens`."""
    if not rows or any(not row for row in rows):
        raise InputError("no token id was given")
    for number, row in enumerate(rows):
        check_tokens(len(row), max_tokens, f"row {number}")
    _check_range(rows, vocabulary, "the given ids hold")
    if tokenizer is None:
        return _padded(rows, [tuple(map(str, row)) for row in rows], [tuple(range(len(row))) for row in rows], None)
    own = set(tokenizer.all_special_ids)
    named = [names_of(tokenizer, row, own) for row in rows]
    return _padded(rows, [names for names, _ in named], [words for _, words in named], None)


MAX_CHARACTERS_PER_TOKEN = 64
"""Characters allowed per allowed token; longer texts are refused before they are tokenized."""
CLASS_TOKEN = "[class]"
_NUMBERS = ("uint8", "float16", "float32", "float64")


def encode_values(
    values: Tensor | np.ndarray,
    channels: int,
    *,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,
    patch: Sequence[int] | None = None,
    class_token: bool = True,
    normalised: bool = True,
    max_tokens: int | None = None,
) -> Batch:
    """Encode pixels (n, length, channels) or (length, channels) as one batch, with the class token after them unless
    the model has none. Where `shape` (height, width) is that of the images, they may be (n, height, width, channels) or
    (height, width, channels), or with the channels first, too.

    Of a model that reads patches, `patch` pixels wide and so many apart, `channels` are those of a patch's pixels, and
    `shape` is that of the patches; images may be given as pixels too. Whole numbers are uint8 and divided by 255;
    floats stay as they are. Tokens are called "row,column" where `shape` (height, width) is that of the images, and by
    their position elsewhere. Raises InputError for another shape or dtype, numbers that are not finite, patches outside
    0…1 for a model that has them `normalised`, or more than `max_tokens` tokens.
    """
    given = values
    if isinstance(values, np.ndarray) and (native := values.dtype.newbyteorder("=")) in _NUMBERS:
        given = torch.from_numpy(np.array(values, dtype=native))
    if not isinstance(given, Tensor) or not (given.dtype == torch.uint8 or given.is_floating_point()):
        kind = getattr(given, "dtype", type(given).__name__)
        raise InputError(f"pixels of {kind} were given; allowed are arrays of uint8 (0…255) or floats (0…1)")
    allowed = f"(images, length, {channels})"
    if shape is not None:
        colours, form = image_form(channels, shape, patch)
        image = (*form, colours)
        allowed = f"(images, {', '.join(map(str, image))}) or {allowed}"
        first = (colours, *form)
        given = given.movedim(-3, -1) if given.shape[-3:] == first and given.shape[-3:] != image else given
        given = given.unsqueeze(0) if given.shape == image else given
        given = given.flatten(1, 2) if given.ndim == 4 and given.shape[1:] == image else given
    given = given.unsqueeze(0) if given.ndim == 2 else given
    if patch is not None and shape is not None:
        given = in_patches(given, colours, form, patch)
    if given.ndim != 3 or 0 in given.shape or given.shape[2] != channels:
        what = "pixels" if patch is None else "patches"
        raise InputError(f"{what} {tuple(given.shape)} were given; the model reads {allowed}")
    images, length = given.shape[:2]
    tokens = length + class_token
    if max_tokens is not None and tokens > max_tokens:
        over = f"an image has {tokens:,} tokens, more than the limit of {max_tokens:,}"
        each = f"a token is a {'pixel' if patch is None else 'patch'}{', the last one the class token' * class_token}"
        raise InputError(f"{over} ({each}): raise max_tokens=…")
    pixels = given.to(dtype) / 255 if given.dtype == torch.uint8 else given.to(dtype)
    if not bool(pixels.isfinite().all()):
        raise InputError("the pixels hold numbers that are not finite; give floats in 0…1")
    if patch is not None and normalised and not (0 <= float(pixels.min()) and float(pixels.max()) <= 1):
        ends = f"from {float(pixels.min()):.3g} to {float(pixels.max()):.3g}"
        raise InputError(f"the pixels go {ends}; give floats in 0…1, or uint8: the model normalises them itself")
    across = shape[1] if shape is not None and shape[0] * shape[1] == length else None
    names = (str(at) if across is None else f"{at // across},{at % across}" for at in range(length))
    shown, words = (*names, *[CLASS_TOKEN] * class_token), (*range(length), *[None] * class_token)
    ids, mask = (torch.zeros(images, tokens, dtype=kind) for kind in (torch.long, torch.bool))
    return Batch(ids, ~mask, (shown,) * images, (words,) * images, values=pixels)


def encode_series(values: Any, channels: int, dtype: torch.dtype, max_tokens: int | None = None) -> Batch:
    """Encode series, (length, channels) or (series, length, channels) or a list of (length, channels), as one batch
    padded on the right with zeros, whose tokens are the steps. Raises InputError for another shape, numbers that are
    not finite, or more than `max_tokens` steps."""
    try:
        whole = isinstance(values, Tensor | np.ndarray) or np.ndim(values[0]) < 2
        rows = torch.as_tensor(values) if whole else [torch.as_tensor(row) for row in values]
        rows = rows[None] if isinstance(rows, Tensor) and rows.ndim == 2 else rows
        rows = [row.to(dtype) for row in rows]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        said = f"a {type(values).__name__} was given; give numbers (length, {channels}), or several such"
        raise InputError(said) from error
    for number, row in enumerate(rows):
        if row.ndim != 2 or 0 in row.shape or row.shape[1] != channels:
            said = f"series {number} is {tuple(row.shape)}; the model reads (length, {channels})"
            raise InputError(f"{said}: {channels} numbers at each step")
        if not bool(row.isfinite().all()):
            raise InputError(f"series {number} holds numbers that are not finite")
        check_tokens(len(row), max_tokens, f"series {number}")
    if not rows:
        raise InputError("no series was given")
    filled = pad_sequence(rows, batch_first=True)
    lengths = [len(row) for row in rows]
    mask = torch.arange(filled.shape[1]) < torch.tensor(lengths)[:, None]
    shown = [tuple(f"step {at}" for at in range(length)) for length in lengths]
    return Batch(mask.long() * 0, mask, tuple(shown), tuple(tuple(range(n)) for n in lengths), values=filled)


def image_form(channels: int, shape: Sequence[int], patch: Sequence[int] | None) -> tuple[int, tuple[int, int]]:
    """Return the channels and (height, width) of images, from the `shape` of their tokens, pixels or patches."""
    if patch is None:
        return channels, (shape[0], shape[1])
    size, step = patch
    return channels // size**2, ((shape[0] - 1) * step + size, (shape[1] - 1) * step + size)


def in_patches(pixels: Tensor, channels: int, form: tuple[int, int], patch: Sequence[int]) -> Tensor:
    """Return images (n, height · width, channels) in patches (n, patches, size · size · channels), row by row."""
    if pixels.shape[1:] != (form[0] * form[1], channels):
        return pixels
    size, step = patch
    cut = pixels.unflatten(1, form).unfold(1, size, step).unfold(2, size, step)
    return rearrange(cut, "n y x c a b -> n (y x) (a b c)")


def as_images(values: Tensor, shape: Sequence[int], patch: Sequence[int] | None) -> Tensor:
    """Return a batch's tokens as images (n, height, width, channels), each patch as its mean colour, in 0…1: scaled
    where they are not."""
    images = values.unflatten(1, tuple(shape))
    images = images if patch is None else images.unflatten(-1, (patch[0] ** 2, -1)).mean(-2)
    low, high = torch.aminmax(images)
    return images if low >= 0 and high <= 1 else (images - low) / (high - low).clamp(min=torch.finfo(images.dtype).tiny)


def check_characters(text: str, max_tokens: int | None, which: str) -> None:
    """Raise InputError if a text is too long for so many tokens, without tokenizing it."""
    if max_tokens is not None and len(text) > MAX_CHARACTERS_PER_TOKEN * max_tokens:
        said = f"{which} has {len(text):,} characters, more than {MAX_CHARACTERS_PER_TOKEN * max_tokens:,},"
        raise InputError(f"{said} the limit for {max_tokens:,} tokens: shorten or split it, or raise max_tokens=…")


def check_tokens(number: int, max_tokens: int | None, which: str) -> None:
    """Raise InputError if there are more than `max_tokens` tokens."""
    if max_tokens is not None and number > max_tokens:
        said = f"{which} has {number:,} tokens, more than the limit of {max_tokens:,}: shorten or split it, or raise"
        raise InputError(f"{said} max_tokens=…")


def _check_range(rows: Sequence[Sequence[int]], vocabulary: int, who: str) -> None:
    outside = sorted({i for row in rows for i in row if not 0 <= i < vocabulary})
    if outside:
        raise InputError(f"{who} id {outside[0]}, outside the model's vocabulary 0…{vocabulary - 1}")


def _padded(ids, tokens, words, pad_id: int | None) -> Batch:
    rows = [torch.tensor(row, dtype=torch.long) for row in ids]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_id or 0)
    mask = torch.arange(input_ids.shape[1]) < torch.tensor([[len(row)] for row in ids])
    return Batch(input_ids, mask, tuple(tokens), tuple(words))
