"""Answers layer by layer: what a lens reads in the residual stream on its way to the model's own answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ssmscope.core.batching import by_length
from ssmscope.errors import InputError
from ssmscope.probes.lens.fitting import tokens_at_once
from ssmscope.probes.lens.lensed_text import STATISTICS, LensedText
from ssmscope.probes.lens.lenses import chosen_states

if TYPE_CHECKING:
    from torch import Tensor

    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model
    from ssmscope.probes.lens.lenses import Lens


def answers_of(model: Model, lens: Lens, batch: Batch, positions: str) -> list[LensedText]:
    """Every text of the batch, texts of alike length run together."""
    texts: dict[int, LensedText] = {}
    names = _Names(model)
    for chosen in by_length(batch.lengths, tokens_at_once(model, len(lens))):
        part = batch.rows(chosen)
        hidden = chosen_states(model, part, positions)
        read = _measured(lens, hidden, _following(part, positions, asked=not model.is_classifier))
        if not all(np.isfinite(read[name]).all() for name in STATISTICS if name != "cross_entropy"):
            raise InputError(f"{model.name} gives answers that are not finite; its weights are damaged")
        counts = part.lengths if positions == "every" else [1] * len(chosen)
        for row, start, count in zip(chosen, np.cumsum([0, *counts]), counts):
            own = {name: array[:, start : start + count] for name, array in read.items()}
            length = len(batch.tokens[row])
            places = np.arange(length) if positions == "every" else np.array([length - 1])
            texts[row] = LensedText(batch.tokens[row], batch.words[row], places, **own, answers=names.of(own["top"]))
    return [texts[row] for row in sorted(texts)]


def _following(batch: Batch, positions: str, *, asked: bool) -> Tensor:
    """The token that follows each chosen position, −1 where none does."""
    following = torch.full_like(batch.input_ids, -1)
    if asked:
        following[:, :-1] = torch.where(batch.mask[:, 1:], batch.input_ids[:, 1:], -1)
    return following[batch.mask] if positions == "every" else following.gather(1, batch.last.unsqueeze(1)).squeeze(1)


def _measured(lens: Lens, hidden: Tensor, following: Tensor) -> dict[str, np.ndarray]:
    """All statistics and the leading answer's number `top`, (layers + 1, positions) each."""
    pieces: list[dict[str, Tensor]] = []
    for part in lens.slices(hidden.shape[1]):
        logs = lens.log_probs(hidden[:, part])
        probabilities = logs.exp()
        best = probabilities.max(-1)
        answer = best.indices[-1].expand(len(logs), -1).unsqueeze(-1)
        after = following[part].expand(len(logs), -1).unsqueeze(-1)
        cross = -logs.gather(-1, after.clamp(min=0)).masked_fill(after < 0, torch.nan)
        pieces.append(
            {
                "answer_probability": probabilities.gather(-1, answer).squeeze(-1),
                "top_probability": best.values,
                "entropy": -(probabilities * logs).sum(-1),
                "cross_entropy": cross.squeeze(-1),
                "kl": ((logs[-1] - logs) * probabilities[-1]).sum(-1),
                "top": best.indices,
            }
        )
    return {name: torch.cat([piece[name] for piece in pieces], dim=1).cpu().numpy() for name in pieces[0]}


class _Names:
    """What answers are called: classes by their labels, tokens as the tokenizer writes them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.known: dict[int, str] = {}

    def of(self, numbers: np.ndarray) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(self._name(number) for number in row) for row in numbers.tolist())

    def _name(self, number: int) -> str:
        if number not in self.known:
            labels, tokenizer = self.model.labels, self.model.tokenizer
            if labels is not None:
                self.known[number] = labels[number]
            else:
                self.known[number] = tokenizer.decode([number]) if tokenizer is not None else str(number)
        return self.known[number]
