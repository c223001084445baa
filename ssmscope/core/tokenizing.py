"""Calls of tokenizers: failures reported in one line, and tokens shown as their characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ssmscope.core.pattern_limit import check_time
from ssmscope.errors import InputError, ran_out_of_memory

MARKERS = "Ġ▁"
"""Signs of vocabularies for a space, or the beginning of a word."""
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Letters of scripts that write no spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
JOINERS = "\u200c\u200d"
"""Joiners within a word, or within an emoji."""


@dataclass(frozen=True)
class Spelled:
    """Text, and the beginning and end of each token's characters in it. Tokens that each have some bytes of a character
    share it; a special token has none. `unknown` are the positions of tokens that the tokenizer does not know."""

    text: str
    offsets: tuple[tuple[int, int], ...]
    unknown: tuple[int, ...] = ()

    @property
    def unknown_words(self) -> tuple[str, ...]:
        """Pieces of the text that the tokenizer does not know, each once."""
        return tuple(dict.fromkeys(self.text[slice(*self.offsets[at])].strip() for at in self.unknown))

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the tokens of the characters from `start` to before `stop`."""
        return tuple(at for at, (begin, end) in enumerate(self.offsets) if begin < stop and end > start)


def tokenize(tokenizer: Any, texts: str | Sequence[str], *, named: str = "the text", **options: Any) -> Any:
    """Call a tokenizer on one text, `named` so in errors, or several. Raises InputError naming the text and word."""
    with failures_told(tokenizer, texts, named):
        return tokenizer(texts, verbose=False, **options)


@contextmanager
def failures_told(tokenizer: Any, texts: str | Sequence[str], named: str = "the text") -> Iterator[None]:
    """Raise InputError, as `tokenize` does, if a tokenizer fails on texts in the body, or would not end on them."""
    check_time(tokenizer, texts, named)
    try:
        yield
    except BaseException as error:
        # The tokenizers library raises a plain Exception, but on a panic a BaseException.
        panic = not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        if panic or isinstance(error, InputError) or ran_out_of_memory(error):
            raise
        if isinstance(texts, str):
            raise InputError(_blame(tokenizer, texts, named, error)) from error
        for number, text in enumerate(texts):
            tokenize(tokenizer, text, named=f"text {number}" if len(texts) > 1 else named)
        raise


def _blame(tokenizer: Any, text: str, named: str, error: BaseException) -> str:
    """Return the cause of a tokenizer's failure on a text."""
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    word = _unknown_word(tokenizer, text) if isinstance(error, Exception) else None
    if word is None:
        return f"{named} ({text[:40]!r}) cannot be read by the tokenizer: {reason}; give another text or tokenizer"
    if type(tokenizer.backend_tokenizer.model).__name__ != "WordLevel":
        what = f"{named} has {word[:40]!r}, which the tokenizer does not know, and it has no unknown token ({reason})"
        return f"{what}; leave it out, or give a tokenizer that has one"
    known = tokenizer.backend_tokenizer.get_vocab()
    names = sorted(known, key=known.__getitem__)
    shown = " ".join(names[:20]) + (" …" if len(names) > 20 else "")
    return f"{named} has {word[:40]!r}, which is not a symbol of this tokenizer; its symbols are {shown}"


def _unknown_word(tokenizer: Any, text: str) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    whole = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    cut = [(whole, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(whole)
    for word, _ in cut:
        try:
            backend.model.tokenize(word)
        except Exception:  # The tokenizers library has no class of its own.
            return word
    return None


def names_of(
    tokenizer: Any, ids: Sequence[int], special: Collection[int]
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Return the names of some ids in a vocabulary, and the number of each one's word, None for special tokens.
    Continuing pieces ("##ed") lose their mark, spaces and bytes are those of a text; an id without a name is called by
    its number."""
    names: list[str] = []
    words: list[int | None] = []
    for at, (number, name) in enumerate(zip(ids, tokenizer.convert_ids_to_tokens(list(ids)))):
        continues = name is not None and name[:2] == "##" and name[2:3].isalnum() and at and words[-1] is not None
        words.append(None if number in special else words[-1] if continues else at)
        if name is None or continues or number in special:
            names.append(str(number) if name is None else name[2:] if continues else name)
        else:
            names.append(_spelled(tokenizer, name))
    return tuple(names), tuple(words)


def _spelled(tokenizer: Any, name: str) -> str:
    """Return a name in a vocabulary as the text has it: with spaces for its marks, and with the characters that its
    bytes are; the name itself if these are part of a character."""
    plain = name.lstrip(MARKERS)
    if name.isascii() or not plain:
        return " " * len(name) if name and not plain else name
    text = tokenizer.convert_tokens_to_string([name]).lstrip(" ")
    return " " * (len(name) - len(plain)) + text if text and "\ufffd" not in text else name


def is_glue(character: str) -> bool:
    """Return True if a character belongs to the one before it: a mark, a joiner, a variation or a skin tone."""
    skin = "\U0001f3fb" <= character <= "\U0001f3ff"
    return character >= "\u0300" and (skin or character in JOINERS or unicodedata.category(character)[0] == "M")


def token_texts(text: str, offsets: Sequence[tuple[int, int]], names: Sequence[str]) -> tuple[str, ...]:
    """Return each token as the text has it, every character once: the first of several tokens of a character shows it.
    A token without characters is called by its name. Between tokens only marks of the character before are kept."""
    shown: list[str] = []
    end = 0
    whole = _untrimmed(text, offsets, names)
    for at, ((begin, stop), name) in enumerate(zip(whole, names)):
        if not name.strip(MARKERS) and not text[begin:stop].isspace():  # The tokenizer put this mark before the text.
            shown.append("")
        elif stop <= begin:
            shown.append(name)
        else:
            if stop < len(text) and is_glue(text[stop]):
                later = (whole[other][0] for other in range(at + 1, len(whole)))
                limit = next((start for start in later if start >= begin), len(text))
                while stop < limit and is_glue(text[stop]):
                    stop += 1
            shown.append(text[max(begin, end) : stop])
            end = max(end, stop)
    return tuple(shown)


def _untrimmed(text: str, offsets: Sequence[tuple[int, int]], names: Sequence[str]) -> list[tuple[int, int]]:
    """Return offsets that include the spaces of tokens, which some byte tokenizers trim."""
    found: list[tuple[int, int]] = []
    end = 0
    for (begin, stop), name in zip(offsets, names):
        if name[:1] == "Ġ":
            first = max(end, begin - len(name) + len(name.lstrip("Ġ")))
            begin = first if text[first:begin].isspace() else begin
        if name[-1:] == "Ġ" and (stop <= begin or name.strip("Ġ")):
            last = stop + len(name) - len(name.rstrip("Ġ"))
            stop = last if text[stop:last].isspace() else stop
        found.append((begin, stop))
        end = max(end, stop)
    return found


def word_numbers(
    words: Sequence[int | None], text: str, offsets: Sequence[tuple[int, int]], tokens: Sequence[str]
) -> tuple[int | None, ...]:
    """Return the number of each token's word, None for special tokens. Words are the tokenizer's, but end at white
    space, and neither begin nor end between a character and the marks or joiners that belong to it."""
    found: list[int | None] = []
    number, end = -1, 0
    before: int | None = None
    for word, (begin, stop), token in zip(words, offsets, tokens):
        if word is not None and (before is None or token):
            apart = before is None or token[:1].isspace() or text[end:begin].isspace()
            number += apart or (word != before and not (begin == end and _inside(text, begin)))
        found.append(None if word is None else number)
        before, end = word, max(end, stop)
    return tuple(found)


def _inside(text: str, at: int) -> bool:
    """Return True if two words of the tokenizer meet within one word: at a mark or a joiner."""
    if not 0 < at < len(text):
        return False
    return is_glue(text[at]) or text[at - 1] in JOINERS or (_is_mark(text[at - 1]) and text[at].isalpha())


def _is_mark(character: str) -> bool:
    """Return True if a character is a mark on a letter, not a variation of a symbol."""
    mark = character >= "\u0300" and unicodedata.category(character)[0] == "M"
    return mark and not "\ufe00" <= character <= "\ufe0f"


def is_within_word(text: str, at: int) -> bool:
    """Return True if the place before a character is in a word or a shown character, in scripts with spaces."""
    if not 0 < at < len(text):
        return False
    if is_glue(text[at]) or text[at - 1] in JOINERS:
        return True
    before, after = (c.isalnum() or c == "_" or _is_mark(c) for c in (text[at - 1], text[at]))
    return before and after and not (UNSPACED.match(text[at - 1]) or UNSPACED.match(text[at]))
