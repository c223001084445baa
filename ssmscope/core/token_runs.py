"""Runs of a model that reads one token of each text at a time, as they are or on tensors that stay where they are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import Context
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from ssmscope.core.affine import agree
from ssmscope.core.attention_layers import attending
from ssmscope.core.compiled_blocks import Blocks, Traced, Unsettled
from ssmscope.core.edits import Edit, edited
from ssmscope.core.heads import own_logits
from ssmscope.core.intercept import evaluating, override_forward
from ssmscope.core.mixers import collect_states, fast_scan, mixers
from ssmscope.core.progress import count_tokens
from ssmscope.core.recomputing import stacked
from ssmscope.core.recording import Numbers, Step, StepInPlace
from ssmscope.core.trace import LayerState, States, mapped
from ssmscope.core.weights import weights_prepared
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.interface import Runs


class TokenRuns:
    """Runs of one token a text, from states and under the same edits: what one run has in common with the next is
    prepared once. They run in a copy of the caller's context, as the caller goes on in between. Logits may be infinite
    or NaN."""

    def __init__(self, model: Runs, edits: Sequence[Edit], context: Context) -> None:
        self.model, self.around, self.context = model, ExitStack(), context.copy()
        # A stream may be open as the interpreter ends, which takes the names of modules away before it closes streams.
        self.leave = weakref.finalize(self, self.context.run, self.around.close)
        self.layers = model.num_layers
        self.before: tuple[list[LayerState], list[LayerState]] = [], []
        self.after: tuple[list[LayerState], list[LayerState]] = [], []
        try:
            self.context.run(self._enter, edits)
        except BaseException:
            self.close()
            raise

    def _enter(self, edits: Sequence[Edit]) -> None:
        module, (own, attended), (ends, kept) = self.model.module, self.before, self.after
        if edits:
            self.around.enter_context(edited(self.model, edits))
        self.around.enter_context(evaluating(module))
        self.prepared = self.around.enter_context(weights_prepared())
        self.around.enter_context(fast_scan(module, states=own, visit=collect_states(module, ends)))
        self.around.enter_context(attending(module, states=attended, keep=kept, writing=True))

    def close(self) -> None:
        self.leave()

    def __call__(self, ids: Int[Tensor, " texts"], states: States) -> tuple[Tensor, States]:
        """Return the logits after these tokens, (texts, vocabulary), and the states."""
        return self.context.run(self._run, ids, states)

    def in_place(
        self, ids: Tensor, states: States, numbers: Numbers, draws: bool, traces: dict[Any, Traced], compiles: bool
    ) -> StepInPlace:
        """Return the step on tensors of its own, which begin as these. Raises Unsettled if it differs from token to
        token or its blocks cannot be compiled, and RuntimeError if a GPU does not record it."""
        self.context.run(self._prepare, ids, states, traces, compiles)
        step: Step = lambda ids, states: self.context.run(self._step, ids, states)  # noqa: E731
        return StepInPlace(step, numbers, ids, states, draws, self.prepared)

    def _prepare(self, ids: Tensor, states: States, traces: dict[Any, Traced], compiles: bool) -> None:
        """Ask the mixers whether a step is the same for all tokens; or compile the blocks, else the mixers alone."""
        module, failed = self.model.module, None
        run = lambda: self._step(*mapped((ids, states), torch.clone))[0].to(next(module.parameters()))  # noqa: E731
        with torch.inference_mode(False), torch.no_grad():
            expected = run() if compiles else None
            for blocks in filter(None, [*[[*stacked(module)]] * compiles, mixers(module)]):
                with ExitStack() as around:
                    made = Blocks(module, blocks, self.before[0], self.after[0], traces, compiles)
                    around.enter_context(override_forward(made.handlers))
                    try:
                        run()
                        if expected is None or agree(run(), expected):
                            self.around.enter_context(around.pop_all())
                            return
                    except (InputError, RuntimeError) as error:
                        failed = error
        raise failed or Unsettled("compiled layers pass on less than the layers")

    def _run(self, ids: Tensor, states: States) -> tuple[Tensor, States]:
        count_tokens(len(ids))
        with torch.no_grad():
            return self._step(ids, states)

    def _step(self, ids: Tensor, states: States) -> tuple[Tensor, States]:
        self.before[0][:], self.before[1][:] = states[: self.layers], states[self.layers :]
        for each in self.after:
            each.clear()
        logits = own_logits(self.model.module, {"input_ids": ids.unsqueeze(1)}, None)[:, 0]
        return logits.to(self.model.device), tuple(sum(self.after, []))
