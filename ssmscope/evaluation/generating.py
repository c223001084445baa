"""Greedy continuations of many texts in a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ssmscope.core.trace import States, gathered
from ssmscope.evaluation.forking import Rows
from ssmscope.evaluation.running import run_batch

if TYPE_CHECKING:
    from ssmscope.core.model import Model


class GreedyDecoder:
    """Greedy decoding of at most `new_tokens` tokens after a text.

    An answer stops at the tokenizer's end token, or at a line break after its first word. Of equally likely tokens the
    one with the lowest id is taken.
    """

    def __init__(self, model: Model, new_tokens: int) -> None:
        self.model, self.new_tokens = model, new_tokens
        self.end = getattr(model.tokenizer, "eos_token_id", None)
        self._broken: dict[int, bool] = {}

    def answers(self, rows: Rows, chosen: Int[np.ndarray, " ends"], logits: Tensor, states: States = ()) -> list[str]:
        """Generate the answers after these rows.

        Args:
            logits: after the rows, (ends, vocabulary).
            states: after the rows; without them, every step runs whole rows.
        """
        said: list[list[int]] = [[] for _ in chosen]
        going = list(range(len(chosen)))
        for step in range(self.new_tokens):
            tokens = logits.argmax(-1).tolist()
            for at, token in zip(going, tokens):
                said[at].append(token)
            places = [place for place, at in enumerate(going) if not self._finished(said[at])]
            going = [going[place] for place in places]
            if step + 1 == self.new_tokens or not going:
                break
            if states:
                if len(places) < len(tokens):
                    states = gathered(states, torch.tensor(places, device=logits.device))
                ids = np.array([[said[at][-1]] for at in going])
                found = run_batch(self.model, ids, np.ones_like(ids, dtype=bool), states, keep=True)
                logits, states = found.logits, found.states
            else:
                whole = [[*rows.ids[rows.starts[chosen[at]] : rows.starts[chosen[at] + 1]], *said[at]] for at in going]
                longer = Rows(np.concatenate(whole), np.cumsum([0, *map(len, whole)]))
                every = np.arange(len(longer))
                logits = run_batch(self.model, *longer.padded(every, np.zeros_like(every), longer.lengths)).logits
        return [self._text(ids).partition("\n")[0] for ids in said]

    def _text(self, ids: list[int]) -> str:
        """Return the answer from its first word on, without the end token."""
        return self.model.tokenizer.decode(ids, skip_special_tokens=True).lstrip()

    def _finished(self, ids: list[int]) -> bool:
        return ids[-1] == self.end or (self._breaks(ids[-1]) and "\n" in self._text(ids))

    def _breaks(self, token: int) -> bool:
        """Return True if a token contains a line break."""
        if token not in self._broken:
            self._broken[token] = "\n" in self.model.tokenizer.decode([token])
        return self._broken[token]
