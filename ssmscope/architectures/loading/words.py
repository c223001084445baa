"""The words in the JSON files of a model, each of which must be one that is known.

transformers and peft look some of them up: a word can name a kernel or a module to import, another configuration, or a
file anywhere on the machine. What a field may say is listed, here or by the library's own defaults; anything else is
refused before a library reads the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from ssmscope.core.shipped import DTYPES
from ssmscope.errors import InputError

TEXTS = frozenset({
    "_commit_hash", "_name_or_path", "architectures", "auto_map", "diffmamba_settings", "finetuning_task",
    "hybrid_override_pattern", "id2label", "init_method", "initializer_cfg", "label2id", "license", "model_name",
    "model_type", "name_or_path", "norm_rel_ebd", "normalization_function", "pipeline_tag", "pos_att_type", "prefix",
    "problem_type", "shared_moe_mode", "stop_strings", "task_specific_params", "tokenizer_class", "topk_method",
    "transformers.js_config", "transformers_version", "unsloth_version",
})  # fmt: skip
"""Fields of config.json and generation_config.json by which nothing is fetched, imported or opened, whatever they say:
names of the model and its classes, labels, notes of its training."""
WORDS = frozenset({
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
"""Attention and experts that need no code beside transformers' own and torch's."""

TOKENIZER_TEXTS = frozenset({
    "_name_or_path", "added_tokens_decoder", "additional_special_tokens", "auto_map", "backend", "chat_template",
    "errors", "extra_special_tokens", "language", "model_input_names", "model_specific_special_tokens", "name_or_path",
    "padding_side", "processor_class", "response_schema", "special_tokens_map_file", "task", "tokenizer_class",
    "transformers_version", "truncation_side", "truncation_strategy", "unsloth_version",
})  # fmt: skip
"""The same of tokenizer_config.json; its special_tokens_map_file is where that file once was, and is not read."""


def check_config(
    fields: Mapping[str, Any], what: str, defaults: Mapping[str, Any], texts: Collection[str] = ()
) -> None:
    """Refuse a config.json that names what is not known.

    Args:
        fields: its content.
        what: the model, for messages.
        defaults: the fields of the model's class with their defaults, whose words are known.
        texts: fields whose words that class checks itself.

    Raises:
        InputError: naming the field.
    """
    for path, word in _words(fields):
        asked = next((name for name in path if "_implementation" in name), None)
        if asked is not None and word not in IMPLEMENTATIONS:
            raise InputError(
                f"{what} asks in its config.json for {asked} {shown(word)}; allowed are {', '.join(IMPLEMENTATIONS)}: "
                "other code is never fetched or run"
            )
    known = {word for _, word in _words(defaults)} | _activations() | {*WORDS, *IMPLEMENTATIONS}
    check_words(fields, TEXTS.union(texts), known, what, "config.json")


def check_generation(fields: Mapping[str, Any], what: str) -> None:
    """Refuse a generation_config.json that names what is not known.

    Raises:
        InputError: as `check_config`.
    """
    check_words(fields, TEXTS, WORDS, what, "generation_config.json")


def check_tokenizer(fields: Mapping[str, Any], what: str) -> None:
    """Refuse a tokenizer_config.json that names what is not known, as files, which its folder must hold itself.

    Raises:
        InputError: as `check_config`.
    """
    texts = {*TOKENIZER_TEXTS, *(name for name in fields if name.endswith(("_token", "_tokens")))}
    check_words(fields, texts, (), what, "tokenizer_config.json")


def check_words(
    fields: Mapping[str, Any], texts: Collection[str], words: Collection[str], what: str, file: str
) -> None:
    """Refuse a JSON object with words other than `words`, but within the fields `texts`.

    Raises:
        InputError: as `check_config`.
    """
    for path, word in _words(fields):
        if set(path).isdisjoint(texts) and word not in words:
            raise _unknown(what, file, path, word)


def _unknown(what: str, file: str, path: tuple[str, ...], word: str) -> InputError:
    return InputError(
        f"{what} says in its {file} that {'.'.join(path)} is {shown(word)}, which is not known: it could name code or "
        "another file; delete it where the model runs without it"
    )


def _words(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every word in a JSON value, with the names of the fields that it is in."""
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
    """A value of a configuration in a message, cut short."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
