"""Checks of a config.json's fields, made before a model is built from them.

Many fields change what the model computes and no weight's shape: a negative epsilon, an upper bound of Δ below the
lower one, a word in place of a truth value. Such a model runs, and its answers are not those of the trained model.

transformers and peft look some words up: one can name a kernel or a module to import, another configuration, or a file
anywhere on the machine. The allowed words are listed here or by the library's own defaults; any other is refused before
a library reads the file.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from ssmscope.core.known_models import DTYPES, of_transformers, readable_types
from ssmscope.errors import InputError, did_you_mean
from ssmscope.loading import register_added

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
    "attention", "chunked_attention", "conv", "dense", "full", "full_attention", "hybrid", "indexed_attention",
    "linear_attention", "mamba", "mlp", "moe", "recurrent", "shared", "sliding_attention", "sparse",
    "deepseek_sparse_attention", "qwen_sparse_attention",
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
    """Raise InputError if a config.json of `what` has an unknown word, naming the field. It knows the words of
    `defaults`, the fields of the model's class, which checks the fields `texts` itself."""
    from transformers.activations import ACT2FN

    for path, word in _words(fields):
        asked = next((name for name in path if "_implementation" in name), None)
        if asked is not None and word not in IMPLEMENTATIONS:
            asked = f"{asked} {shown(word)}; allowed are {', '.join(IMPLEMENTATIONS)}"
            raise InputError(f"{what} asks in its config.json for {asked}: other code is never fetched or run")
    known = {word for _, word in _words(defaults)} | {*ACT2FN, *KNOWN_WORDS, *IMPLEMENTATIONS}
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
            said = f"{what} says in its {file} that {'.'.join(path)} is {shown(word)}, which is not known:"
            raise InputError(f"{said} it could name code or another file; delete it where the model runs without it")


def _words(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str) and value:
        yield path, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _words(inner, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _words(inner, path)


def shown(value: Any) -> str:
    """Return a value of a configuration for a message, shortened."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


MAX_NESTING = 32
MAX_EPSILON = 0.1
DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "num_layers")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises InputError if it is unreadable, not an object or too deep."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"), object_hook=_decoded)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise InputError(f"{file} is not a model configuration: it is nested too deeply") from error
    except ValueError as error:  # This covers JSON, UTF-8 and numbers with thousands of digits.
        raise InputError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} is not a model configuration: a JSON object was expected")
    if _too_deep(found, MAX_NESTING):
        raise InputError(f"{file} is not a model configuration: it is nested too deeply")
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{file} is not JSON: it holds half of a surrogate pair") from error
    return found


def _too_deep(value: Any, left: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_too_deep(each, left - 1) for each in inner)


def _decoded(value: dict[str, Any]) -> Any:
    """Return an object's fields, or the number that it encodes: transformers 5 writes infinity as an object."""
    return float(value["__float__"]) if value.get("__float__") in ("Infinity", "-Infinity", "NaN") else value


SIGNED_FIELDS = ("spectral_abscissa",)
"""Fields that may be negative where their default is not."""


def check_fields(fields: Mapping[str, Any], what: str) -> None:
    """Refuse fields, a backbone's too, that no trained model has, by the defaults of its `model_type`."""
    kind, known = fields.get("model_type"), readable_types()
    if kind not in known:
        register_added()
    if kind is None:
        raise InputError(f"{what}: the configuration names no model_type; write its architecture's, such as 'mamba2'")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        said = f"{what}: model type {shown(kind)} is unknown"
        if {*filter(_is_word, (kind, _language_fields(fields).get("model_type")))} & {*of_transformers()}:
            raise InputError(f"{said} to transformers {transformers.__version__}, which is installed: take a newer one")
        raise InputError(f"{said}{did_you_mean(str(kind), known)}")
    _check_names(fields, what)
    declared, common = _declared(kind), transformers.PretrainedConfig().to_dict()
    defaults = {"tie_word_embeddings": True, **{k: v for k, v in declared.items() if k not in common}}
    for name, value in fields.items() if kind in known else ():
        if name == "backbone" and isinstance(value, dict):
            check_fields(value, what)
        elif name in defaults and value is not None:
            check_value(name, value, defaults[name], what)
    if (text := _language_fields(fields)).get("model_type") in known:
        check_fields(text, what)
    # Configuration classes of ours check their own fields.
    ours = [each for each in transformers.CONFIG_MAPPING[kind].__mro__ if each.__module__.startswith("ssmscope.")]
    texts = {name for each in ours for name in (*inspect.signature(each.__init__).parameters, *vars(each))}
    check_config(fields, what, declared, texts)


def _language_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a multimodal model's language model; empty without one."""
    found = fields.get("text_config") or fields.get("llm_config")
    return found if isinstance(found, dict) else {}


def _declared(kind: str) -> dict[str, Any]:
    """Return the fields of a type's configuration with their defaults; empty if the type cannot be built from these."""
    try:
        return transformers.CONFIG_MAPPING[kind]().to_dict()
    except (ImportError, StrictDataclassError, TypeError, ValueError, AttributeError):
        return {}


def _check_names(fields: Mapping[str, Any], what: str) -> None:
    architectures = fields.get("architectures")
    if architectures is not None and not _all_words(architectures):
        raise refused(what, "architectures", architectures, "a list of class names, or null")
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    if dtype is not None and not (isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES):
        raise refused(what, "dtype", dtype, f"one of {', '.join(DTYPES)}, or null")
    labels = fields.get("id2label")
    if labels is not None and not (
        isinstance(labels, dict)
        and sorted(labels) == sorted(map(str, range(len(labels))))
        and _all_words([*labels.values()])
        and len(set(labels.values())) == len(labels) > 0
    ):
        raise refused(what, "id2label", labels, 'another name for each class, as {"0": "negative", "1": "positive"}')


def check_value(name: str, value: Any, default: Any, what: str) -> None:
    """Refuse a value of another type or range than `default`, an allowed value of the field."""
    allowed = None
    if name.endswith("time_step_limit") or name == "dt_limit":
        allowed = None if _is_range(value) else "[low, high] with 0 ≤ low < high"
    elif name.endswith(("_token_id", "_token_ids")) or value == "auto":
        return
    elif isinstance(default, bool):
        allowed = None if isinstance(value, bool) or type(value) is int and value in (0, 1) else "true or false"
    elif isinstance(default, int | float):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            allowed = "a whole number" if isinstance(default, int) else "a number"
        elif abs(value) >= 2**63:
            allowed = "a number of fewer digits"
        elif default >= 0 > value and name not in SIGNED_FIELDS:
            allowed = "no negative number"
        elif re.search(r"(?:eps|epsilon)$", name) and value > MAX_EPSILON:
            allowed = f"a number from 0 to {MAX_EPSILON}"
    elif isinstance(default, str):
        allowed = None if isinstance(value, str) else f"a word, as {default!r}"
    elif isinstance(default, list | tuple) and not isinstance(value, list):
        allowed = "a list"
    if allowed is not None:
        raise refused(what, name, value, allowed)


def refused(what: str, name: str, value: Any, allowed: str) -> InputError:
    """Return the error for a field with a value that is not allowed."""
    return InputError(f"{what} cannot be built from its config.json: {name} is {shown(value)}; allowed is {allowed}")


def _is_range(value: Any) -> bool:
    try:
        low, high = map(float, value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not any(isinstance(each, bool | str) for each in value) and 0 <= low < high


def check_depth(fields: Mapping[str, Any], tensors: int, what: str) -> None:
    """Raise InputError for more layers than tensors, before a configuration makes lists of that length."""
    for name in DEPTH_FIELDS:
        value = fields.get(name)
        if isinstance(value, int | float) and value > tensors:
            raise refused(what, name, value, f"no more than there are tensors in the weights, {tensors}")
    for within in (fields.get("backbone"), _language_fields(fields)):
        if isinstance(within, dict) and within:
            check_depth(within, tensors, what)


def _all_words(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_word, value))


def _is_word(value: Any) -> bool:
    return isinstance(value, str)
