"""YAML as a plan is written in it: mappings, lists and texts, read without building anything else.

Numbers, dates and the like stay the text that was written, because every value ends on a command line, where the option
that it belongs to reads it. Only `true`, `false` and nothing are values of their own.
"""

from __future__ import annotations

from typing import Any

import yaml

from ssmscope.errors import InputError

Value = Any
"""A str, bool or None, or a list of values or dict of str to values."""

LONGEST = 2_000_000
"""How many characters a plan has at most."""
MOST_NODES = 100_000
"""How many values a plan has at most, those that aliases repeat counted as often as they stand there."""
DEEPEST = 20
"""How many mappings and lists lie in one another at most."""

_PLAIN = "tag:yaml.org,2002:"
_BOOLEANS = {"true": True, "false": False}
_NOTHING = {"", "~", "null", "Null", "NULL"}
_SCALARS = {_PLAIN + name for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")}


def read_yaml(text: str) -> Value:
    """The value that a YAML text describes.

    Raises:
        InputError: it is no YAML, a key stands twice, a tag asks for something else than plain values, aliases make it
            too large, or a text has characters that no command line can hold.
    """
    if len(text) > LONGEST:
        raise InputError(f"the plan has {len(text):,} characters; at most {LONGEST:,} are allowed")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"the plan is no YAML{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise InputError(f"the plan is no YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise InputError(f"the plan nests more than {DEEPEST} lists and mappings; make it flatter") from error
    except ValueError as error:  # PyYAML's scanner makes characters of escapes that Unicode does not have
        raise InputError(f"the plan is no YAML: {error}") from error
    return _Reader().value(node, 0) if node is not None else None


class _Reader:
    def __init__(self) -> None:
        self.nodes = 0

    def value(self, node: yaml.Node, depth: int) -> Value:
        self.nodes += 1
        line = node.start_mark.line + 1
        if self.nodes > MOST_NODES:
            raise InputError(f"the plan has more than {MOST_NODES:,} values, aliases counted as often as they are used")
        if depth > DEEPEST:
            raise InputError(f"line {line} of the plan lies in more than {DEEPEST} lists and mappings; make it flatter")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, line)
        if isinstance(node, yaml.SequenceNode) and node.tag == _PLAIN + "seq":
            return [self.value(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode) and node.tag == _PLAIN + "map":
            return self.mapping(node, depth)
        raise InputError(f"line {line} of the plan has the tag {node.tag!r}; only plain values are allowed")

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError(f"line {line} of the plan has a list or mapping as a key; keys are words")
            self.scalar(key_node, line)
            key = key_node.value
            if key in found:
                raise InputError(f"line {line} of the plan has the key {key!r:.80} for the second time; give it once")
            found[key] = self.value(value_node, depth + 1)
        return found

    @staticmethod
    def scalar(node: yaml.ScalarNode, line: int) -> str | bool | None:
        text: str = node.value
        if node.tag not in _SCALARS:
            raise InputError(f"line {line} of the plan has the tag {node.tag!r}; only plain values are allowed")
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"line {line} of the plan has a character that is no text (U+0000, or half of a pair)")
        if node.style is None and node.tag == _PLAIN + "bool":
            return _BOOLEANS.get(text.lower(), text)
        if node.style is None and text in _NOTHING:
            return None
        return text
