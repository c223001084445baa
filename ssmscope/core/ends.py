"""Written tokens and the ends of texts: end tokens, stop strings, and what is left of a text before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ssmscope.core.interface import Runs
from ssmscope.errors import InputError

EXTRA_TOKENS_DECODED = 8
"""Tokens decoded to look for a stop string, beyond four for each of its characters (their bytes)."""

EndedBy = Literal["end", "stop", "length", "given"]
Stop = str | Sequence[str] | Callable[[Sequence[int]], bool]
"""Strings, any of which ends a text, or a function from the ids written so far to True if they end it."""


class Written(NamedTuple):
    """Token written after text number `row`, the `number`-th from 0: its `id`, its characters, log P of it and the
    entropy of the model's distribution, both natural and before temperature, `top_k` and `top_p`; and what ended its
    text, if that ended with it: the end token, a stop string, the maximum length, or that of a given continuation."""

    row: int
    number: int
    id: int
    token: str
    log_probability: float
    entropy: float
    ended_by: EndedBy | None = None


@dataclass(frozen=True, eq=False)
class Ends:
    """Conditions that end a text: one of the `ids` of end tokens, or `stop`."""

    tokenizer: Any
    ids: frozenset[int]
    stop: tuple[str, ...] | Callable[[Sequence[int]], bool] = ()

    @classmethod
    def of(cls, model: Runs, stop: Stop) -> Ends:
        """Return the end tokens of a model's generation settings, as transformers reads them, and `stop`. Of a model
        without settings they are the tokenizer's or, if it has none, the configuration's."""
        own = model.config if getattr(model.tokenizer, "eos_token_id", None) is None else model.tokenizer
        ids = getattr(getattr(model.module, "generation_config", None) or own, "eos_token_id", None)
        ids = [each for each in (ids if isinstance(ids, list | tuple) else [ids]) if isinstance(each, int)]
        stops = stop if callable(stop) else (stop,) if isinstance(stop, str) else tuple(stop)
        if not callable(stops):
            if stops:
                model.check_tokenizer("stop strings")
            if not all(stops):
                raise InputError("a stop string is empty; leave it out")
        return cls(model.tokenizer, frozenset(ids), stops)

    def ended_by(self, prompt: Sequence[int], said: Sequence[int]) -> EndedBy | None:
        """Return what ends a text with the last of the ids written after a prompt, if it does. A stop string may begin
        within the prompt, as in transformers, and contain special tokens."""
        if said[-1] in self.ids:
            return "end"
        if callable(self.stop):
            return "stop" if self.stop(said) else None
        if not self.stop:
            return None
        count = 4 * max(map(len, self.stop)) + EXTRA_TOKENS_DECODED
        before = prompt[-max(0, count - len(said)) :] if count > len(said) else []
        return "stop" if self._stop_in(before, said[-count:]) is not None else None

    def _stop_in(self, before: Sequence[int], said: Sequence[int]) -> int | None:
        """Return where the first stop string that ends within the text of `said` begins in it, below 0 if it begins in
        the text of the tokens before; None without one."""
        assert not callable(self.stop)
        start = len(self.decode(before, special=True)) if before else 0
        text = self.decode([*before, *said], special=True)
        found = [text.find(each, max(0, start - len(each) + 1)) for each in self.stop]
        return min((at - start for at in found if at >= 0), default=None)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(list(ids), **options)

    def text(self, prompt: Sequence[int], said: Sequence[int]) -> str:
        """Return what these ids add to the prompt's text, up to a stop string, without special tokens."""
        if self.tokenizer is None:
            return " ".join(map(str, said))
        at = None if callable(self.stop) or not self.stop else self._stop_in(prompt, said)
        if at is None:
            return self._added(prompt, said)
        count = len(said)
        while count and len(self._added(prompt, said[:count], special=True)) > at:
            count -= 1
        whole, kept = (self._added(prompt, each, special=True) for each in (said, said[:count]))
        return self._added(prompt, said[:count]) + whole[len(kept) : max(at, 0)]

    def _added(self, prompt: Sequence[int], said: Sequence[int], *, special: bool = False) -> str:
        before, whole = self.decode(prompt, special=special), self.decode([*prompt, *said], special=special)
        return whole[len(before) :] if whole.startswith(before) else self.decode(said, special=special)
