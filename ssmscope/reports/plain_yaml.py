"""Plain YAML: mappings, lists and texts only.

Numbers, dates and the like stay text, because every value becomes a command-line argument that its option reads. Only
`true`, `false` and null have their own types.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import yaml
from ssmscope.errors import InputError

MAX_CHARACTERS = 2_000_000
"""Maximum length of a plan."""
MAX_NODES = 100_000
"""Maximum number of values of a plan; values repeated by aliases count each time."""
MAX_DEPTH = 20
"""Maximum nesting of mappings and lists."""

_PLAIN = "tag:yaml.org,2002:"
_BOOLEANS = {"true": True, "false": False}
_SCALARS = {_PLAIN + name for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")}


def read_yaml(text: str) -> Any:
    """Parse a YAML text to None, a str, a bool, a list, or a dict from str to values. Raise InputError if it is not
    valid YAML, a key is repeated, a tag asks for anything but plain values, aliases make it too large, or a text has
    characters that no command line can hold."""
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"the plan has {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise InputError(f"the plan nests more than {MAX_DEPTH} lists and mappings; flatten it") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # The last two are of escapes beyond Unicode.
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        told = getattr(error, "problem", None) or " ".join(str(error).split())
        raise InputError(f"the plan is not valid YAML{where}: {told}") from error
    return None if node is None else _value(node, 0, itertools.count(1))


def _value(node: yaml.Node, depth: int, count: Iterator[int]) -> Any:
    line = f"line {node.start_mark.line + 1} of the plan"
    if next(count) > MAX_NODES:
        raise InputError(f"the plan has more than {MAX_NODES:,} values, aliases counted as often as they are used")
    if depth > MAX_DEPTH:
        raise InputError(f"{line} is nested in more than {MAX_DEPTH} lists and mappings; flatten it")
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if node.tag not in (_PLAIN + "seq", _PLAIN + "map"):
        raise InputError(f"{line} has the tag {node.tag!r}; only plain values are allowed")
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, depth + 1, count) for item in node.value]
    found: dict[str, Any] = {}
    for key, value in node.value:
        line = f"line {key.start_mark.line + 1} of the plan"
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(f"{line} has a list or mapping as a key; keys are words")
        _scalar(key)
        if key.value in found:
            raise InputError(f"{line} repeats the key {key.value!r:.80}; give it once")
        found[key.value] = _value(value, depth + 1, count)
    return found


def _scalar(node: yaml.ScalarNode) -> str | bool | None:
    text: str = node.value
    line = f"line {node.start_mark.line + 1} of the plan"
    if node.tag not in _SCALARS:
        raise InputError(f"{line} has the tag {node.tag!r}; only plain values are allowed")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError(f"{line} has a character that is not text (U+0000, or half of a pair)")
    if node.tag == _PLAIN + "bool":
        return _BOOLEANS.get(text.lower(), text)
    return None if node.tag == _PLAIN + "null" else text
