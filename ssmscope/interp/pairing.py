"""Pairing of two models' results, in a module that is quick to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssmscope.api.results import Result
    from ssmscope.interp.paired import Paired


def pair(results: Sequence[Result]) -> Paired:
    """Return the results of an analysis of two models on the same texts as one."""
    from ssmscope.interp.paired import Paired

    first, other = (result.provenance for result in results)
    names = [result.model_name for result in results]
    provenance = {**first, "model": " and ".join(names), "models": [dict(first), dict(other)]}
    found = Paired(provenance=provenance, results=tuple(results))
    found.rows()
    return found
