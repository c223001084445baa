"""Checks that the words in a model's JSON files are known.

transformers and peft look some of them up: a word can name a kernel or a module to import, another configuration, or a
file anywhere on the machine. The allowed words are listed here or by the library's own defaults; any other is refused
before a library reads the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from ssmscope.core.shipped import DTYPES
from ssmscope.errors import InputError

FREE_TEXT_FIELDS = frozenset({
    "_commit_hash", "_name_or_path", "architectures", "auto_map", "diffmamba_settings", "finetuning_task",
    "hybrid_override_pattern", "id2label", "init_method", "initializer_cfg", "label2id", "license", "model_name",
    "model_type", "name_or_path", "norm_rel_ebd", "normalization_function", "pipeline_tag", "pos_att_type", "prefix",
    "problem_type", "shared_moe_mode", "stop_strings", "task_specific_params", "tokenizer_class", "topk_method",
    "transformers.js_config", "transformers_version", "unsloth_version",
})  # fmt: skip
"""Fields of config.json and generation_config.json that may hold any text, as nothing is fetched, imported or opened by
it: names of the model and its classes, labels, notes on its training."""
KNOWN_WORDS = frozenset({
    "auto", "random", "constant", "cls", "mean",
    *DTYPES, *(f"torch.{dtype}" for dtype in DTYPES),
    # kinds of layers
    "attention", "chunked_attention", "conv", "dense", "full_attention", "hybrid", "linear_attention", "mamba", "mlp",
    "moe", "recurrent", "sliding_attention", "sparse",
    # positions
    "absolute", "default", "dynamic", "linear", "llama3", "longrope", "mrope", "nope", "proportional", "rope", "yarn",
    # caches of generation
    "static", "offloaded_static", "dynamic_full", "offloaded", "quantized", "sliding_window",
    # xLSTM
    "chunkwise--native_autograd", "chunkwise--triton_xl_chunk", "chunkwise--triton_limit_chunk",
    "parallel--native_autograd", "native_sequence__native", "native_sequence__triton", "native", "triton", "train",
    "train_with_padding", "inference", "single", "fused",
})  # fmt: skip
"""Words that transformers looks up in tables of its own."""
IMPLEMENTATIONS = ("eager", "sdpa", "grouped_mm", "batched_mm")
"""Implementations of attention and experts that need only transformers' and torch's code."""

TOKENIZER_FREE_TEXT_FIELDS = frozenset({
    "_name_or_path", "added_tokens_decoder", "additional_special_tokens", "auto_map", "backend", "chat_template",
    "errors", "extra_special_tokens", "language", "model_input_names", "model_specific_special_tokens", "name_or_path",
    "padding_side", "processor_class", "response_schema", "special_tokens_map_file", "task", "tokenizer_class",
    "transformers_version", "truncation_side", "truncation_strategy", "unsloth_version",
})  # fmt: skip
"""Fields of tokenizer_config.json that may hold any text; its special_tokens_map_file is not read."""


def check_config(
    fields: Mapping[str, Any], what: str, defaults: Mapping[str, Any], texts: Collection[str] = ()
) -> None:
    """Raise InputError if a config.json has an unknown word, naming the field.

    Args:
        fields: its content.
        what: the model, for messages.
        defaults: the fields of the model's class with their defaults, whose words are known.
        texts: fields whose words that class checks itself.
    """
    for path, word in _words(fields):
        asked = next((name for name in path if "_implementation" in name), None)
        if asked is not None and word not in IMPLEMENTATIONS:
            raise InputError(
                f"{what} asks in its config.json for {asked} {shown(word)}; allowed are {', '.join(IMPLEMENTATIONS)}: "
                "other code is never fetched or run"
            )
    known = {word for _, word in _words(defaults)} | _activations() | {*KNOWN_WORDS, *IMPLEMENTATIONS}
    check_words(fields, FREE_TEXT_FIELDS.union(texts), known, what, "config.json")


def check_generation(fields: Mapping[str, Any], what: str) -> None:
    """Raise InputError if a generation_config.json has an unknown word."""
    check_words(fields, FREE_TEXT_FIELDS, KNOWN_WORDS, what, "generation_config.json")


def check_tokenizer(fields: Mapping[str, Any], what: str) -> None:
    """Raise InputError if a tokenizer_config.json has an unknown word, such as the name of a file."""
    texts = {*TOKENIZER_FREE_TEXT_FIELDS, *(name for name in fields if name.endswith(("_token", "_tokens")))}
    check_words(fields, texts, (), what, "tokenizer_config.json")


def check_words(
    fields: Mapping[str, Any], texts: Collection[str], words: Collection[str], what: str, file: str
) -> None:
    """Raise InputError if a JSON object has a word other than `words` outside the fields `texts`."""
    for path, word in _words(fields):
        if set(path).isdisjoint(texts) and word not in words:
            raise _unknown(what, file, path, word)


def _unknown(what: str, file: str, path: tuple[str, ...], word: str) -> InputError:
    return InputError(
        f"{what} says in its {file} that {'.'.join(path)} is {shown(word)}, which is not known: it could name code or "
        "another file; delete it where the model runs without it"
    )


def _words(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every word in a JSON value, with the names of the fields around it."""
    if isinstance(value, str):
        if value:
            yield path, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _words(inner, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _words(inner, path)


@cache
def _activations() -> frozenset[str]:
    from transformers.activations import ACT2FN

    return frozenset(ACT2FN)


def shown(value: Any) -> str:
    """Return a value of a configuration for a message, shortened."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
