"""Texts and images explained: which tokens a model's output comes from, by one method or several beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ssmscope.encoding import Batch
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.attribution import Attribution, ExplainedText, Explanation, Scores
from ssmscope.interp.meter import Meter
from ssmscope.interp.methods import METHODS, method
from ssmscope.interp.objective import Target, last_logits, objective
from ssmscope.model import Model
from ssmscope.results import record_provenance


def explain(
    model: Model,
    texts: Batch | str | Sequence[str],
    *,
    methods: str | Sequence[str] = ("ig",),
    target: Target | Sequence[Target] | None = None,
    contrast: int | str | None = None,
    top: int = 5,
    seed: int = 0,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Explain the model's output on every text, or on every image, by its tokens.

    Where Integrated Gradients takes more than two seconds, stderr says beforehand how many gradients they are and how
    long that takes, and then how far it is.

    Args:
        texts: texts, or a batch of `model.encode`, which also makes one of token ids or of pixels.
        methods: names of `ssmscope.interp.methods.METHODS`.
        target: a class, a next token or a continuation, see `objective`; by default what the model predicts.
        contrast: a class or token whose logit is subtracted.
        top: how many tokens the views name.
        seed: of the methods that draw.
        options: of methods, by their names: {"ig": {"baseline": "pad"}}.
        progress: called with each method's name before it begins.

    Raises:
        InputError: for an unknown method, option, target or contrast, or scores that are not finite.
    """
    names = (methods,) if isinstance(methods, str) else tuple(methods)
    if not names or len(set(names)) < len(names):
        raise InputError(
            f"methods is {list(names)}; name at least one, and each once; allowed are {', '.join(METHODS)}"
        )
    if isinstance(top, bool) or not isinstance(top, int | np.integer) or top < 1:
        raise InputError(f"top is {top!r}; allowed is a whole number of tokens from 1 on")
    given = dict(options or {})
    for name in given:
        if name not in names:
            raise InputError(f"options of {name!r}, which is not among the methods{did_you_mean(str(name), names)}")
    settled = [method(name, given.get(name), seed=seed) for name in names]

    batch = texts if isinstance(texts, Batch) else model.encode(texts)
    logits = last_logits(model, batch)
    explained = objective(
        model, batch, target=logits.argmax(-1).tolist() if target is None else target, contrast=contrast
    )
    explained = replace(explained, meter=Meter())
    values = explained.values()
    found: list[Scores] = []
    for name, each in zip(names, settled, strict=True):
        if progress is not None:
            progress(name)
        found.append(each(explained))

    answers, pixels = model._answers(logits), model._as_images(batch)
    rows = []
    for row, length in enumerate(batch.lengths):
        rows.append(
            ExplainedText(
                tokens=tuple(batch.tokens[row]),
                words=tuple(batch.words[row]),
                answer=answers[row][0],
                probability=float(answers[row][1]),
                target=explained.names[row],
                value=float(values[row]),
                attributions=tuple(
                    _attribution(name, scores, row, length) for name, scores in zip(names, found, strict=True)
                ),
                pixels=None if pixels is None else pixels[row].float().cpu().numpy(),
            )
        )
    asked = {"methods": list(names), "target": list(explained.names), "top": int(top)}
    asked["options"] = {name: dict(each) for name, each in given.items()}
    return Explanation(
        provenance=record_provenance(model.source, options=asked, seed=int(seed)),
        texts=tuple(rows),
        methods=names,
        top=int(top),
    )


def _attribution(name: str, found: Scores, row: int, length: int) -> Attribution:
    scores = found.scores[row, :length].detach().float().cpu().numpy()
    if not np.isfinite(scores).all():
        raise InputError(f"the scores of {name} for text {row + 1} are not finite: the model is damaged")

    def at(values: Tensor | None) -> Any:
        return None if values is None else values[row].item()

    return Attribution(
        name,
        scores,
        delta=at(found.delta),
        steps=at(found.steps),
        converged=at(found.converged),
        error=at(found.error),
        baseline=found.baseline,
        note=found.note,
    )
