"""Answers of a lens layer by layer."""

from __future__ import annotations

from functools import cache
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
    """Read every text of the batch; texts of similar length run together."""
    texts: dict[int, LensedText] = {}

    @cache
    def name(answer: int) -> str:
        if model.labels is not None:
            return model.labels[answer]
        return model.tokenizer.decode([answer]) if model.tokenizer is not None else str(answer)

    for chosen in by_length(batch.lengths, tokens_at_once(model, len(lens))):
        part = batch.rows(chosen)
        hidden = chosen_states(model, part, positions)
        read = _statistics(lens, hidden, _next_tokens(part, positions, asked=not model.is_classifier))
        if not all(np.isfinite(read[name]).all() for name in STATISTICS if name != "cross_entropy"):
            raise InputError(f"{model.name} gives answers that are not finite; its weights are damaged")
        counts = part.lengths if positions == "every" else [1] * len(chosen)
        for row, start, count in zip(chosen, np.cumsum([0, *counts]), counts):
            own = {name: array[:, start : start + count] for name, array in read.items()}
            length = len(batch.tokens[row])
            places = np.arange(length) if positions == "every" else np.array([length - 1])
            answers = tuple(tuple(map(name, layer)) for layer in own["top"].tolist())
            texts[row] = LensedText(batch.tokens[row], batch.words[row], places, **own, answers=answers)
    return [texts[row] for row in sorted(texts)]


def _next_tokens(batch: Batch, positions: str, *, asked: bool) -> Tensor:
    """Return the token that follows each chosen position, −1 where none does."""
    following = torch.full_like(batch.input_ids, -1)
    if asked:
        following[:, :-1] = torch.where(batch.mask[:, 1:], batch.input_ids[:, 1:], -1)
    return following[batch.mask] if positions == "every" else following.gather(1, batch.last.unsqueeze(1)).squeeze(1)


def _statistics(lens: Lens, hidden: Tensor, following: Tensor) -> dict[str, np.ndarray]:
    """Compute all statistics and the index `top` of the leading answer, (layers + 1, positions) each."""
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
