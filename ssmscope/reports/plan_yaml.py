"""Reader of the YAML of plans: mappings, lists and texts only.

Numbers, dates and the like stay text, because every value becomes a command-line argument that its option reads. Only
`true`, `false` and null have their own types.
"""

from __future__ import annotations

from typing import Any

import yaml

from ssmscope.errors import InputError

Value = Any
"""A str, bool or None, a list of values, or a dict from str to values."""

MAX_CHARACTERS = 2_000_000
"""Maximum length of a plan."""
MAX_NODES = 100_000
"""Maximum number of values of a plan; values repeated by aliases count each time."""
MAX_DEPTH = 20
"""Maximum nesting of mappings and lists."""

_PLAIN = "tag:yaml.org,2002:"
_BOOLEANS = {"true": True, "false": False}
_NOTHING = {"", "~", "null", "Null", "NULL"}
_SCALARS = {_PLAIN + name for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")}


def read_yaml(text: str) -> Value:
    """Parse a YAML text.

    Raises:
        InputError: if it is not valid YAML, a key is repeated, a tag asks for anything but plain values, aliases make
            it too large, or a text has characters that no command line can hold.
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"the plan has {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"the plan is not valid YAML{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise InputError(f"the plan is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise InputError(f"the plan nests more than {MAX_DEPTH} lists and mappings; flatten it") from error
    except ValueError as error:  # PyYAML's scanner raises it for escapes beyond Unicode.
        raise InputError(f"the plan is not valid YAML: {error}") from error
    return _Reader().value(node, 0) if node is not None else None


class _Reader:
    def __init__(self) -> None:
        self.nodes = 0

    def value(self, node: yaml.Node, depth: int) -> Value:
        self.nodes += 1
        line = node.start_mark.line + 1
        if self.nodes > MAX_NODES:
            raise InputError(f"the plan has more than {MAX_NODES:,} values, aliases counted as often as they are used")
        if depth > MAX_DEPTH:
            raise InputError(
                f"line {line} of the plan is nested in more than {MAX_DEPTH} lists and mappings; flatten it"
            )
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
                raise InputError(f"line {line} of the plan repeats the key {key!r:.80}; give it once")
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
