"""Checks of a config.json's fields, made before a model is built from them.

Many fields change what the model computes and no weight's shape: a negative epsilon, an upper bound of Δ below the
lower one, a word in place of a truth value. Such a model runs, and its answers are not those of the trained model.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from ssmscope.architectures.loading.words import check_config, shown
from ssmscope.core.shipped import DTYPES, readable_types
from ssmscope.errors import InputError, did_you_mean

MAX_NESTING = 32
"""Levels of nested lists and objects; a model's configuration has three or four."""
MAX_EPSILON = 0.1
DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "num_layers")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises InputError if the file cannot be read, is no JSON, holds no object, or
    half a surrogate pair, or is nested more than `MAX_NESTING` deep."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"), object_hook=_decoded)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise InputError(f"{file} is no model configuration: it is nested too deeply") from error
    except ValueError as error:  # This covers JSON, UTF-8 and numbers with thousands of digits.
        raise InputError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} is no model configuration: a JSON object was expected")
    if _too_deep(found, MAX_NESTING):
        raise InputError(f"{file} is no model configuration: it is nested too deeply")
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{file} is no JSON: it holds half of a surrogate pair") from error
    return found


def _too_deep(value: Any, left: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_too_deep(each, left - 1) for each in inner)


def _decoded(value: dict[str, Any]) -> Any:
    """Return an object's fields, or the number that it stands for: transformers 5 writes infinity as an object."""
    return float(value["__float__"]) if value.get("__float__") in ("Infinity", "-Infinity", "NaN") else value


SIGNED_FIELDS = ("spectral_abscissa",)
"""Fields that may be negative where their default is not."""


def check_fields(fields: Mapping[str, Any], what: str) -> None:
    """Refuse fields of a transformers configuration that no trained model has.

    Args:
        fields: the model's, with its backbone's in `backbone`; each is checked by the defaults of its `model_type`.
        what: the model, for messages.
    """
    kind, known = fields.get("model_type"), readable_types()
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise InputError(f"{what}: model type {shown(kind)} is unknown{did_you_mean(str(kind), known)}")
    _check_names(fields, what)
    declared, common = _declared(kind), transformers.PretrainedConfig().to_dict()
    defaults = {"tie_word_embeddings": True, **{k: v for k, v in declared.items() if k not in common}}
    for name, value in fields.items() if kind in known else ():
        if name == "backbone" and isinstance(value, dict):
            check_fields(value, what)
        elif name in defaults and value is not None:
            check_value(name, value, defaults[name], what)
    check_config(fields, what, declared, texts=_checked_by_us(kind))


def _declared(kind: str) -> dict[str, Any]:
    """Return the fields of a type's configuration with their defaults; empty if the type cannot be built from these."""
    try:
        return transformers.CONFIG_MAPPING[kind]().to_dict()
    except (ImportError, StrictDataclassError, TypeError, ValueError, AttributeError):
        return {}


def _checked_by_us(kind: str) -> set[str]:
    """Return the fields that this package's own configuration class checks itself; empty for other types."""
    ours = [each for each in transformers.CONFIG_MAPPING[kind].__mro__ if each.__module__.startswith("ssmscope.")]
    return {name for each in ours for name in (*inspect.signature(each.__init__).parameters, *vars(each))}


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
        if not _is_range(value):
            allowed = "[low, high] with 0 ≤ low < high"
    elif name.endswith(("_token_id", "_token_ids")) or value == "auto":
        return
    elif isinstance(default, bool):
        if not (isinstance(value, bool) or (type(value) is int and value in (0, 1))):
            allowed = "true or false"
    elif isinstance(default, int | float):
        whole = isinstance(default, int)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            allowed = "a whole number" if whole else "a number"
        elif abs(value) >= 2**63:
            allowed = "a number of fewer digits"
        elif default >= 0 > value and name not in SIGNED_FIELDS:
            allowed = "no negative number"
        elif re.search(r"(?:eps|epsilon)$", name) and value > MAX_EPSILON:
            allowed = f"a number from 0 to {MAX_EPSILON}"
    elif isinstance(default, str):
        if not isinstance(value, str):
            allowed = f"a word, as {default!r}"
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
    """Raise InputError for more layers than tensors.

    A configuration makes lists as long as its layers before any layer is built.
    """
    for name in DEPTH_FIELDS:
        value = fields.get(name)
        if isinstance(value, int | float) and value > tensors:
            raise refused(what, name, value, f"no more than there are tensors in the weights, {tensors}")
    if isinstance(fields.get("backbone"), dict):
        check_depth(fields["backbone"], tensors, what)


def _all_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
