"""Data options for fitting a tuned lens: rows of a language model's text, or a classifier's examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.inputs import Examples, load_examples
from ssmscope.api.options import Metavar, Option, Reads
from ssmscope.api.signatures import options_of

if TYPE_CHECKING:
    from ssmscope.core.model import Model

SPLITS = ("validation", "test", "train")
"""Splits in order of preference: as in the paper, a lens is not fitted on training text if possible."""


def _options(
    *,
    split: Annotated[str | None, "Split of a known data set (default: validation, else test).", Metavar("NAME")] = None,
    validation: Annotated[
        str | None, "Held-out data (default: a share of DATA).", Reads("data"), Metavar("FILE")
    ] = None,
) -> None: ...


@dataclass(frozen=True)
class FitData(Examples):
    """Text of a language model in rows of tokens, or a classifier's labelled texts or images; and held-out data."""

    prefer: tuple[str, ...] = SPLITS

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        found = {**super().options, **options_of(_options)}
        return {name: found[name] for name in ("data", "split", "validation", "length", "max_tokens")}

    def read_besides(
        self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]
    ) -> Mapping[str, Any]:
        given, most = values["validation"], values["max_tokens"]
        if given is None:
            return {"validation": None}
        return {"validation": load_examples(models[0], given, None, values["length"], self.prefer, max_tokens=most)}
