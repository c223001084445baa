"""Conversion of results' fields to JSON values and back, without loss.

Fields are plain values, numpy arrays, tuples, mappings or nested dataclasses of these; `Result.to_dict` describes the
format.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
import types
import typing
import zlib as zlib_
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_LISTED_NUMBERS = 10_000
"""Maximum number of numbers in an array that is written as a list; larger arrays are compressed."""

MAX_COMPRESSED_BYTES = 2**30
"""Maximum size of a compressed array in bytes, so that a small file cannot ask for all memory."""

MAX_INFLATION = 1040
"""Maximum bytes that zlib makes of one: its longest match, 258 bytes, takes at least two bits, 1032 : 1."""

DTYPE = re.compile(r"bool|(?:int|uint|float)\d{1,3}|U\d{1,9}", re.ASCII)


def encode(value: Any) -> Any:
    """Convert a value to JSON values. Raise TypeError if no result can hold it."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufU":
            raise TypeError(f"a result cannot hold an array of {value.dtype}")
        if value.size > MAX_LISTED_NUMBERS and value.dtype.kind != "U" and value.nbytes <= MAX_COMPRESSED_BYTES:
            if value.dtype.kind == "f":  # All NaNs get the same bytes, so that results with NaN can be equal.
                value = np.where(np.isnan(value), np.array(np.nan, value.dtype), value)
            numbers = value.astype(value.dtype.newbyteorder("<")).tobytes()
            packed = base64.b64encode(zlib_.compress(numbers, 6)).decode()
            return {"dtype": value.dtype.name, "shape": list(value.shape), "zlib": packed}
        name = f"U{value.dtype.itemsize // 4}" if value.dtype.kind == "U" else value.dtype.name
        return {"dtype": name, "shape": list(value.shape), "values": encode(value.tolist())}
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return value.to_dict() if hasattr(value, "to_dict") else encode_fields(value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [encode(item) for item in value]
    raise TypeError(f"a result cannot hold a {type(value).__name__}")


def encode_fields(record: Any) -> dict[str, Any]:
    """Convert the fields of a dataclass to JSON values by name."""
    return {field.name: encode(getattr(record, field.name)) for field in dataclasses.fields(record)}


def _decode(value: Any, hint: Any) -> Any:
    """Return the value of type `hint` that `encode` turned into `value`."""
    if isinstance(value, Mapping) and value.keys() == {"dtype", "shape", "values"}:
        return _decode_array(**value)
    if isinstance(value, Mapping) and value.keys() == {"dtype", "shape", "zlib"}:
        return _unpack_array(**value)
    if hint is Any:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None and type(None) in args else _decode(value, _fitting(value, args))
    if hint is float:
        return math.nan if value is None else float(value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint.from_dict(value) if hasattr(hint, "from_dict") else decode_fields(value, hint)
    if origin is tuple and isinstance(value, list):
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(hints) != len(value):
            raise ValueError(f"expected {len(hints)} values, not {len(value)}")
        return tuple(map(_decode, value, hints))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: _decode(item, args[1]) for key, item in value.items()}
    if isinstance(origin, type) and issubclass(origin, Sequence) and isinstance(value, list):
        return [_decode(item, args[0]) for item in value]
    expected = origin or hint
    if isinstance(expected, type) and not isinstance(value, expected):
        raise ValueError(f"expected {expected.__name__}, not {value!r:.60}")
    return value


def _decode_array(dtype: Any, shape: Any, values: Any) -> np.ndarray:
    kind = _decode_dtype(dtype)
    if kind.kind == "U":
        flat = np.array(values, dtype=object)
        written = sum(map(len, flat.ravel()))
        if kind.itemsize * flat.size > MAX_INFLATION * (written + flat.size):
            raise ValueError(f"{written} characters cannot be read as an array of {dtype}")
        return flat.astype(kind).reshape(shape)
    flat = np.array(values, dtype=object if kind.kind == "f" else kind)
    return flat.astype(np.float64 if kind.kind == "f" else kind).astype(kind).reshape(shape)


def _decode_dtype(dtype: Any) -> np.dtype:
    if isinstance(dtype, str) and DTYPE.fullmatch(dtype):
        return np.dtype(dtype)
    raise ValueError(f"expected the name of a dtype of numbers or text, not {dtype!r:.60}")


def _unpack_array(dtype: Any, shape: Any, zlib: Any) -> np.ndarray:
    """Decompress an array, inflating no more bytes than its shape needs; the arguments are the document's keys."""
    kind = _decode_dtype(dtype)
    if kind.kind == "U":
        raise ValueError(f"expected a compressed array of numbers, not of {dtype}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"expected the sizes of an array, not {shape!r:.60}")
    if not isinstance(zlib, str):
        raise ValueError(f"expected compressed numbers, not {zlib!r:.60}")
    size = math.prod(shape) * kind.itemsize
    packed = base64.b64decode(zlib, validate=True)
    if size > min(MAX_COMPRESSED_BYTES, MAX_INFLATION * len(packed)):
        raise ValueError(f"{len(packed)} compressed bytes cannot be read as an array of shape {shape!r:.60}")
    stream = zlib_.decompressobj()
    try:
        numbers = stream.decompress(packed, size + 1)
    except zlib_.error as error:
        raise ValueError(f"damaged compressed numbers: {error}") from error
    if len(numbers) <= size and (not stream.eof or stream.unused_data):
        raise ValueError("damaged compressed numbers: cut off, or followed by something else")
    if len(numbers) != size:
        found = f"only {len(numbers)}" if len(numbers) < size else "more"
        raise ValueError(f"expected {size} bytes for an array of shape {shape!r:.60}, not {found}")
    return np.frombuffer(numbers, kind.newbyteorder("<")).astype(kind).reshape(shape)


def decode_fields(document: Any, cls: type[Any]) -> Any:
    """Return the dataclass whose fields `encode_fields` wrote. Raise TypeError, ValueError, KeyError, OverflowError or
    RecursionError if the document does not describe one."""
    if not isinstance(document, Mapping):
        raise ValueError(f"expected the fields of {cls.__name__}, not {document!r:.60}")
    hints = typing.get_type_hints(cls)
    former = getattr(cls, "FORMER_FIELDS", {})
    document = {former.get(name, name): value for name, value in document.items()}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = document.keys() - fields.keys() - {"kind", "class"}
    if unknown:
        raise ValueError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
    missing = [
        name
        for name, field in fields.items()
        if name not in document and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{cls.__name__} lacks {', '.join(missing)}")
    return cls(**{name: _decode(document[name], hints[name]) for name in fields if name in document})


def _fitting(value: Any, options: Sequence[Any]) -> Any:
    """Return the first of a union's types that `encode` writes like `value`."""
    for option in options:
        origin = typing.get_origin(option) or option
        if not isinstance(origin, type):
            continue
        if isinstance(value, list):
            fits = issubclass(origin, Sequence) and origin is not str
        elif isinstance(value, Mapping):
            fits = issubclass(origin, Mapping) or dataclasses.is_dataclass(origin)
        elif origin is float:
            fits = value is None or isinstance(value, int | float) or value in ("inf", "-inf")
        else:
            fits = isinstance(value, origin)
        if fits:
            return option
    if all(isinstance(typing.get_origin(option) or option, type) for option in options):
        raise ValueError(f"expected {' or '.join(option.__name__ for option in options)}, not {value!r:.60}")
    return Any
