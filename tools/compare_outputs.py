"""Compare two recordings of `record_outputs.py`, number by number and line by line."""

from __future__ import annotations

import base64
import csv
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

IGNORED = re.compile(r"(^|\.)(date|versions|seconds)$|^files\.|\.attributions\.\*\.(delta|error)$")
"""JSON paths of what no two recordings share: time, versions, sizes of files, rounding errors of conserved sums."""
DURATION = re.compile(r"\b[\d.,]+ (s|min|h)\b")
JOB = re.compile(r"[0-9a-f]{16}")
"""Name of a report's folder for a job, a hash of the code among others."""
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def compare(old: Path, new: Path, tolerance: float) -> Iterator[str]:
    """Yield a line for every difference between two recordings.

    Numbers of JSON and CSV files may differ by the tolerance, relative to the largest number of the same column, array
    or JSON path; numbers in printed text by one unit of their last digit, or by the tolerance relative to
    the number itself.
    """
    before, after = files(old), files(new)
    cases = {name.split("/")[0] for name in before} & {name.split("/")[0] for name in after}
    missing = {name if (case := name.split("/")[0]) in cases else case: name for name in before.keys() ^ after.keys()}
    for shown, name in sorted(missing.items()):
        yield f"{shown}: only in {old if name in before else new}"
    for name in sorted(before.keys() & after.keys()):
        if name.endswith((".json", ".csv")):
            one, two = columns(before[name]), columns(after[name])
            for column in dict.fromkeys((*one, *two)):
                if said := differing_values(one.get(column, []), two.get(column, []), tolerance):
                    yield f"{name}: {column}: {said}"
        elif said := differing_text(before[name].read_text(), after[name].read_text(), tolerance):
            yield f"{name}: {said}"


def files(folder: Path) -> dict[str, Path]:
    """Return the files that are compared, by their path in the recording."""
    found = [file for kind in ("*.json", "*.csv", "*.txt", "exit") for file in folder.rglob(kind)]
    return {JOB.sub("JOB", str(file.relative_to(folder))): file for file in found}


def columns(file: Path) -> dict[str, list[Any]]:
    """Return the values of a JSON or CSV file by their path or column, numbers as arrays."""
    found: dict[str, list[Any]] = defaultdict(list)
    if file.suffix == ".json":
        for path, leaf in leaves(json.loads(file.read_text())):
            found[path].append(leaf)
    else:
        for row in csv.DictReader(file.read_text().splitlines(keepends=True)):
            row.pop("fingerprint", None)  # which the JSON has too
            for name, cell in row.items():
                is_number = cell and NUMBER.fullmatch(cell) and "," not in cell
                found[name].append(np.array(float(cell)) if is_number else cell)
    return found


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSON document with their paths, in which * stands for an index."""
    if isinstance(value, dict) and {"dtype", "shape"} < value.keys():
        if "zlib" in value:
            numbers = np.frombuffer(zlib.decompress(base64.b64decode(value["zlib"])), np.dtype(value["dtype"]))
            yield path, numbers.reshape(value["shape"])
        else:
            text = value["dtype"].startswith("U")
            yield path, str(value["values"]) if text else np.array(value["values"], float).reshape(value["shape"])
    elif isinstance(value, dict):
        trained = str(value.get("model", value.get("name"))).startswith("train-")  # by a case: its weights may differ
        for name, item in value.items():
            inner = f"{path}.{name}" if path else name
            if not IGNORED.search(inner) and not (trained and name == "fingerprint"):
                yield from leaves(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, f"{path}.*")
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        yield path, np.array(float(value)) if is_number else value


def differing_values(old: list[Any], new: list[Any], tolerance: float) -> str:
    """Return how the values of one column differ; empty when they agree."""
    if len(old) != len(new):
        return f"{len(old)} values became {len(new)}"
    pairs = list(zip(old, new))
    alike = [pair for pair in pairs if are_arrays(*pair)]
    other = [pair for pair in pairs if not are_arrays(*pair) and repr(pair[0]) != repr(pair[1])]
    if other:
        return f"{len(other)} of {len(old)} values differ, first {other[0][0]!s:.70} → {other[0][1]!s:.70}"
    if not alike:
        return ""
    a, b = (np.concatenate([each.ravel().astype(float) for each in side]) for side in zip(*alike))
    largest = np.abs(a[np.isfinite(a)]).max(initial=0)
    with np.errstate(invalid="ignore"):
        gaps = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.nan_to_num(np.abs(a - b), nan=np.inf))
    apart = gaps > tolerance * largest
    if not apart.any():
        return ""
    worst = gaps.max() / largest if largest else np.inf
    return f"{apart.sum()} of {len(a)} numbers differ, by up to {worst:.1e} of the largest, {largest:.4g}"


def are_arrays(a: Any, b: Any) -> bool:
    """Return whether both are arrays of one shape."""
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape


def differing_text(old: str, new: str, tolerance: float) -> str:
    """Return the first line that differs by more than spaces, or in a number by more than `nearly` allows."""
    one, two = ([" ".join(line.split()) for line in text.splitlines() if line.strip()] for text in (old, new))
    for a, b in zip(one, two):
        a, b = (JOB.sub("JOB", DURATION.sub("some time", line)).replace("−", "-") for line in (a, b))
        if NUMBER.sub("#", a) != NUMBER.sub("#", b) or not all(
            nearly(*pair, tolerance) for pair in zip(NUMBER.findall(a), NUMBER.findall(b))
        ):
            return f"{a!r} → {b!r}"
    return "" if len(one) == len(two) else f"{len(one)} lines became {len(two)}"


def nearly(a: str, b: str, tolerance: float) -> bool:
    """Return whether two printed numbers are at most one unit of the last digit, or the tolerance as a share of the
    larger one, apart, or both of rounding errors."""
    a, b = a.replace(",", ""), b.replace(",", "")
    larger = max(abs(float(a)), abs(float(b)))
    if larger < 1e-6 or abs(float(a) - float(b)) <= tolerance * larger:
        return True
    digits, _, exponent = a.partition("e")
    return abs(float(a) - float(b)) <= 1.01 * 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
