"""Provenance of a result's numbers: model, options, seed, data, versions and date."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from ssmscope import __version__
from ssmscope.api.options import asked


def call_options(**changed: Any) -> dict[str, Any]:
    """Return the running analysis's options for its provenance, updated with those that it has changed or settled."""
    return {**asked.get({}), **changed}


def record_provenance(
    source: Mapping[str, Any], *, options: Mapping[str, Any] | None = None, seed: int | None = None, data: Any = None
) -> dict[str, Any]:
    """Return a result's provenance: `source` (the model, as in `Trace.source`), `options` (default: those of the
    running analysis, see `call_options`), and the origin of labelled `data`."""
    origin = {}
    if data is not None:
        about = {"name": data.name, "split": data.split, "fingerprint": data.fingerprint, "examples": len(data)}
        origin = {"data": about}
    options = call_options() if options is None else dict(options)
    return {**source, "options": options, "seed": seed, "versions": dict(versions()), "date": now(), **origin}


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of the packages that the numbers depend on."""
    found = {"ssmscope": __version__}
    for package in ("torch", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def now() -> str:
    """Return the date and time in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
