"""Texts written without and with an edit, and how likely they are to the model without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ssmscope.core.batching import by_length
from ssmscope.core.encoding import Batch
from ssmscope.core.generation import Generation, GivenEdit
from ssmscope.core.model import Model
from ssmscope.interp.objective import tokens_that_fit
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.numbers import counted
from ssmscope.render.table import Cell, Line, number_cell, table

UNEDITED = "none"
"""Name of the edit of the unedited model."""


@dataclass(frozen=True)
class EditedText:
    """Text that a model wrote under an edit.

    Attributes:
        prompt: number of the text that it continues.
        edit: name of the edit, `UNEDITED` without one.
        tokens: number of written tokens.
        own, unedited: mean log-probability of a written token, in nats, under the model as it wrote and unedited.
    """

    prompt: int
    edit: str
    text: str
    tokens: int
    own: float
    unedited: float


def edited_texts(
    model: Model, batch: Batch, edits: Mapping[str, Sequence[GivenEdit]], max_new_tokens: int
) -> tuple[EditedText, ...]:
    """Return the greedy continuations of texts, by text: of the unedited model, then of each edit by its name. Raises
    InputError as `Model.generate`."""
    found = []
    for name, own in {UNEDITED: (), **edits}.items():
        written = model.generate(batch, max_new_tokens=max_new_tokens, edits=list(own))
        for row, (text, plain) in enumerate(zip(written.texts, likelihoods(model, written))):
            log_p = written.log_probabilities[row]
            found.append(EditedText(row, name, text, len(log_p), float(np.mean(log_p)), plain))
    return tuple(sorted(found, key=lambda text: text.prompt))


def likelihoods(model: Model, written: Generation) -> list[float]:
    """Return the mean log-probability that the unedited model gives to each text's written tokens, in nats."""
    batch, found = written.batch(model), [0.0] * len(written.texts)
    for rows in by_length(batch.lengths, tokens_that_fit(model, every_position=True)):
        logits = model.run(batch.rows(rows)).logits
        for row, own in zip(rows, logits):
            ids = torch.tensor(written.ids[row], device=own.device)
            at = batch.lengths[row] - len(ids) - 1
            log_p = own[at : at + len(ids)].double().log_softmax(-1)
            found[row] = float(log_p.gather(1, ids.unsqueeze(1)).mean())
    return found


def text_blocks(texts: Sequence[EditedText], named: Mapping[int, str] | None = None) -> Iterator[Block]:
    """Yield the texts side by side, if there are any; `named` has names of the prompts, by default their numbers."""
    if not texts:
        return
    several = len({text.prompt for text in texts}) > 1
    lines = []
    for text in texts:
        prompt = (named or {}).get(text.prompt, str(text.prompt))
        cells = {"written": Cell(text=text.text.strip()), "own": number_cell(text.own)}
        cells["unedited"] = number_cell(text.unedited)
        lines.append(Line((*[prompt] * several, text.edit), cells))
    note = "Log-probability of a written token, in nats: by the model as it wrote (own), and by the unedited model."
    yield Prose(f"Written: up to {counted(max(text.tokens for text in texts), 'token')}", "heading")
    yield table((*["text"] * several, "edit"), lines, note=note)
