"""Comparison of two models: the results of one analysis of both on the same texts, and the difference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ssmscope.api.results import Result
from ssmscope.render.blocks import Block, Picture, Prose, TokenRows

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Paired(Result, kind="pair"):
    """Results of an analysis of two models."""

    drawn_by: ClassVar[str] = "paired_rows"
    vector: ClassVar[bool] = False

    results: tuple[Result, ...]
    """Results of the first and of the second model."""

    @property
    def names(self) -> list[str]:
        """Names of the two models, numbered where they have the same name."""
        found = [result.model_name for result in self.results]
        return found if found[0] != found[1] else [f"{name} ({at})" for at, name in enumerate(found, start=1)]

    @property
    def headline(self) -> str:
        first = self.results[0]
        return first.headline.replace(first.model_name, self.model_name, 1)

    def verdict(self, at: int = 0) -> str:
        return self.results[at].verdict()

    def rows(self) -> TokenRows | None:
        """Return the tokens in the colours of both models and of the difference; None for results without rows of
        tokens."""
        from ssmscope.interp.paired_rows import paired_rows

        shown = [result.token_rows() for result in self.results]  # type: ignore[attr-defined]
        return paired_rows(shown[0], shown[1], self.names) if shown[0] is not None and shown[1] is not None else None

    def to_frame(self) -> DataFrame:
        """Return a row per model, text, row and token, or word where the tokenizers differ: columns model (one of the
        two, or "difference", the first minus the other), text, row (the layer or method), position, token, score.
        Results without rows of tokens give both tables, with a column model."""
        import pandas as pd

        shown = self.rows()
        if shown is None:
            frames = [result.to_frame().assign(model=name) for name, result in zip(self.names, self.results)]
            return pd.concat(frames, ignore_index=True)
        found = []
        for number, text in enumerate(shown.texts):
            for row in text.rows:
                of, _, name = row.name.partition("\n")
                cells = {"model": of, "text": number, "row": name, "position": range(len(text.tokens))}
                found.append(pd.DataFrame({**cells, "token": text.tokens, "score": row.scores}))
        return pd.concat(found, ignore_index=True)

    def blocks(self) -> Iterable[Block]:
        from ssmscope.api.results import TABLE_ROWS
        from ssmscope.interp.paired_rows import differences

        yield Prose(self.headline, "title")
        for name, result in zip(self.names, self.results):
            yield Prose(f"{name}: {result.verdict()}.")
        shown = self.rows()
        if shown is None:
            first: Any = self.results[0]
            yield Picture(self.figure, self.headline, vector=False)
            yield first.differences(self.results, self.names)
            yield first.compare(self.results, [[name] for name in self.names])
            for result in self.results:
                yield Prose(result.headline, "heading")
                yield from (each for each in result.blocks() if not (isinstance(each, Prose) and each.kind == "title"))
            return
        yield shown
        yield Picture(
            self.figure, self.headline, vector=False, folded=not any(t.pixels is not None for t in shown.texts)
        )
        yield replace(differences(shown, self.names), brief=TABLE_ROWS)
