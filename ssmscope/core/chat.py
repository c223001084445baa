"""Chats: messages with a role and a content, as token ids by the tokenizer's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ssmscope.core.text_files import read_text
from ssmscope.errors import InputError

ADVICE = 'messages are objects with role and content, such as {"role": "user", "content": "Hello"}'


def is_chat(given: Any) -> bool:
    """Return True for a chat, a list of messages (mappings with a role and a content), or a list of chats."""
    one = given[0] if isinstance(given, list | tuple) and given else None
    return is_chat(one) if isinstance(one, list | tuple) else isinstance(one, Mapping) and {"role", "content"} <= {*one}


def chat_ids(model: Any, given: Any) -> list[list[int]]:
    """Return the ids of a chat, or of several, by the template of a model's tokenizer, which has the begin token where
    the model wants it. After a last message that is not the assistant's, the answer is begun.

    Raises:
        InputError: a model without a tokenizer or chat template, other than messages, or messages that the template
            refuses.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        what = "no tokenizer" if tokenizer is None else "a tokenizer without a chat template"
        raise InputError(f"{model.name} has {what}; give the chat as a text, as the model was trained on it")
    chats: Sequence[Any] = given if isinstance(given[0], list | tuple) else [given]
    found = []
    for number, messages in enumerate(chats):
        if not all(is_chat([each]) and isinstance(each["content"], str) for each in messages):
            raise InputError(f"chat {number} holds something that is no message: {ADVICE}")
        begun = messages[-1]["role"] != "assistant"
        try:
            ids = tokenizer.apply_chat_template(
                [dict(each) for each in messages],
                tokenize=True,
                add_generation_prompt=begun,
                return_dict=False,
                tokenizer_kwargs={"split_special_tokens": False},  # Those of the template are single tokens.
            )
        except Exception as error:  # Templates raise errors of their own, and of jinja2.
            raise InputError(f"the chat template of {model.name} refuses chat {number}: {error}") from error
        found.append(list(ids))
    return found


def read_chats(path: Any) -> list[Any]:
    """Return given chats, or those of a file: JSON that is a list of messages, a list of chats, or an object with
    `messages`; or JSONL with one of these on each line. Raises InputError if it cannot be read or holds no chat."""
    if is_chat(path):
        return [*path] if isinstance(path[0], list | tuple) else [path]
    text = read_text(path, f"chat={path!r}", advice="save it as UTF-8 JSON")
    try:
        values = [json.loads(text)]
    except ValueError:
        try:
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise InputError(f"chat={path!r} is not JSON: {error}") from error
    found: list[Any] = []
    for value in values:
        own: Any = value.get("messages") if isinstance(value, Mapping) else value
        if not is_chat(own):
            raise InputError(f"chat={path!r} holds no chat: give a list of messages; {ADVICE}")
        found += own if isinstance(own[0], list) else [own]
    return found
