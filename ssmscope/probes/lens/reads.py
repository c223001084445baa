"""What a tuned lens is fitted on, as somebody names it: rows of a language model's text, or a classifier's examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ssmscope.errors import InputError
from ssmscope.limits import ROW
from ssmscope.reads import LANGUAGE_MODEL, TOKEN_MODEL, Input
from ssmscope.signature import Metavar, Option, Range, Reads, options_of

if TYPE_CHECKING:
    from ssmscope.model import Model
    from ssmscope.probes.lens.data import LensData

SPLITS = ("validation", "test", "train")
"""A lens is fitted on the first of these splits that a known data set has: as in the paper, on no training text."""


def _options(
    *,
    data: Annotated[
        str | None,
        "wikitext2, sst2, cifar10, … or a file; else what MODEL learnt from.",
        Reads("data"),
        Metavar("DATA"),
    ] = None,
    split: Annotated[str | None, "Of a known data set; by default validation, else test.", Metavar("NAME")] = None,
    validation: Annotated[
        str | None, "Held-out data; by default a share of DATA.", Reads("data"), Metavar("FILE")
    ] = None,
    length: Annotated[int, "Tokens of a row, of a language model's text.", Range(1, ROW)] = 256,
) -> None: ...


@dataclass(frozen=True)
class FitData(Input):
    """A language model's text in rows of tokens, or a classifier's labelled texts or images; and held-out data."""

    parameter: ClassVar[str] = "data"

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        return options_of(_options)

    def reads_lines(self, kind: str | None) -> bool:
        return kind in (LANGUAGE_MODEL, TOKEN_MODEL)

    def check(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        return

    def read(self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> LensData:
        from ssmscope.models.load import trained_on

        (model,) = models
        name = values["data"] if values["data"] is not None else trained_on(model.name)
        known = known_data(model)
        if name is None or (values["data"] is None and name not in known):
            raise InputError(f"no data; give --data, one of {', '.join(known)}, or a file")
        return load_rows(model, name, values["split"], values["length"])

    def read_besides(
        self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]
    ) -> Mapping[str, Any]:
        given = values["validation"]
        return {"validation": None if given is None else load_rows(models[0], given, None, values["length"])}


def known_data(model: Model) -> tuple[str, ...]:
    """The names of the data sets that a model of this kind reads."""
    from ssmscope.tasks import pixels
    from ssmscope.tasks.text import LINE_SOURCES, SOURCES

    if model.channels is not None:
        return tuple(pixels.KNOWN)
    return tuple(SOURCES) if model.is_classifier else tuple(LINE_SOURCES)


def load_rows(model: Model, data: str, split: str | None, length: int) -> LensData:
    """Text in rows of `length` tokens for a language model, labelled examples for a classifier.

    Args:
        data: a known name or a file.
        split: of a known name; None for validation, else test.

    Raises:
        InputError: an unknown name or split, a file that cannot be read, or a language model without a tokenizer.
    """
    from ssmscope.tasks.labelled import load_labelled
    from ssmscope.tasks.language import language_data, load_lines
    from ssmscope.tasks.text import LINE_SOURCES, SOURCES

    if not model.is_classifier:
        if model.tokenizer is None:
            raise InputError(f"{model.name} has no tokenizer to read {data} with; name one with --tokenizer")
        part = split or ("validation" if data in LINE_SOURCES else None)
        lines = load_lines(data, part)
        return language_data(lines, model.tokenizer, length=length, name=Path(data).stem, split=part or "all")
    if split is None and data in SOURCES:
        split = next(name for name in SPLITS if name in SOURCES[data].splits)
    return load_labelled(data, split, label_names=model.labels)
