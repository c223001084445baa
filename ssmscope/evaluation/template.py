"""Prompt template with a placeholder for the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ssmscope.errors import InputError, nearest

CONTENT = "{content}"
_FIELD = re.compile(r"\{[^{}]*\}?|\[[^\[\]]*\]|<[^<>]*>|[^\s{}]*\}")


@dataclass(frozen=True)
class Template:
    """Prompt that contains `{content}` once; other braces are plain text.

    Raises:
        InputError: when `{content}` is missing, or occurs more than once.
    """

    text: str

    def __post_init__(self) -> None:
        count = self.text.count(CONTENT)
        if count == 1:
            return
        shown = self.text if len(self.text) <= 60 else self.text[:60] + "…"
        if count:
            raise InputError(f"the template {shown!r} has {CONTENT} {count} times; it must have it once")
        fields = _FIELD.findall(self.text)
        like = nearest(CONTENT, fields, n=1) or fields[:1]
        hint = f"; did you mean {CONTENT} by {like[0]!r}?" if like else ""
        raise InputError(f"the template {shown!r} has no {CONTENT}, the placeholder for the text{hint}")

    @property
    def before(self) -> str:
        return self.text.partition(CONTENT)[0]

    @property
    def after(self) -> str:
        return self.text.partition(CONTENT)[2]

    def fill(self, content: str) -> str:
        """Return the prompt with a text in it."""
        return self.text.replace(CONTENT, content)
