"""Choice of the next token, and what is said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from ssmscope.errors import InputError, check_number, check_whole


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token: the likeliest with `temperature` 0, else drawn from the softmax of the logits divided
    by it, of which `top_k` tokens count, or the likeliest that together have the probability `top_p`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_number(0, temperature=self.temperature, top_p=1 if self.top_p is None else self.top_p)
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise InputError("top_k and top_p are for drawing tokens; give temperature=… above 0 too, e.g. 1")
        check_whole(0, seed=self.seed)
        check_whole(1, top_k=1 if self.top_k is None else self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; allowed are numbers above 0, up to 1")

    def draws(self, prompts: Sequence[Sequence[int]]) -> list[np.random.Generator] | None:
        """Return a generator for every text, whose draws from 0 to 1 choose its tokens in turn: from the seed, the
        prompt's ids and, of equal prompts, the text's number among them, so that they do not depend on other texts."""
        if self.temperature == 0:
            return None
        copies, rows = Counter[tuple[int, ...]](), []
        for ids in map(tuple, prompts):
            rows.append(np.random.default_rng([self.seed, copies[ids], *ids]))
            copies[ids] += 1
        return rows

    def choose(
        self, logits: Float[Tensor, "texts vocabulary"], draws: Float[np.ndarray | Tensor, " texts"] | None
    ) -> Int[Tensor, " texts"]:
        """Return a token for each row: of equally likely ones the one with the lowest id."""
        if draws is None:
            return logits.argmax(-1)
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        none: Any = None
        top = logits.amax(-1, keepdim=True)
        scores = (logits.double() - top) / self.temperature
        if self.top_k is not None:
            scores = TopKLogitsWarper(min(self.top_k, scores.shape[-1]))(none, scores)
        if self.top_p is not None:
            scores = TopPLogitsWarper(self.top_p)(none, scores)
        up_to = scores.softmax(-1).cumsum(-1)
        drawn = torch.as_tensor(draws, device=up_to.device).unsqueeze(-1) * up_to[:, -1:]
        found = torch.searchsorted(up_to, drawn, right=True).clamp(max=scores.shape[-1] - 1)
        # A temperature below the rounding of the logits is 0: only ties would be drawn from.
        rounding = torch.finfo(logits.dtype).eps * top.abs()
        return found.where(rounding < self.temperature, logits.argmax(-1, keepdim=True)).squeeze(-1)

    def numbers(
        self, logits: Float[Tensor, "texts vocabulary"], draws: Float[np.ndarray | Tensor, " texts"] | None
    ) -> Float[Tensor, "5 texts"]:
        """Return each text's token, log P of it, the entropy, and the smallest and largest logit."""
        precise = logits if logits.dtype == torch.float64 else logits.float()
        chosen = self.choose(precise, draws)
        log_p = precise.log_softmax(-1)
        chosen_log_p = log_p.gather(1, chosen.unsqueeze(1)).squeeze(1)
        entropy = -torch.linalg.vecdot(log_p.exp(), log_p.clamp_(min=torch.finfo(log_p.dtype).min))
        return torch.stack([each.to(log_p) for each in (chosen, chosen_log_p, entropy, *precise.aminmax(dim=-1))])

    def note(self, logits: Tensor, drawn: Tensor | None, ids: Tensor, numbers: Tensor, at: Tensor) -> None:
        """Put the tokens into `ids` and their numbers into those of step `at`, and count it."""
        found = self.numbers(logits, drawn)
        ids.copy_(found[0])
        numbers.index_copy_(0, at, found.to(numbers).unsqueeze(0))
        at += 1


GREEDY = Sampling()
