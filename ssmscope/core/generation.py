"""Text written token by token: each run reads one token and continues from the states of the run before.

A token goes the same road through a layer as a whole text does (`Model.run`), so whatever edits a run can edit it while
the model writes; see `ssmscope.core.lasting_edits`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from ssmscope.core.attention_layers import reads_positions
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.edits import Edit
from ssmscope.core.encoding import Batch
from ssmscope.core.ends import EndedBy, Ends, Stop, Written
from ssmscope.core.interface import Runs
from ssmscope.core.lasting_edits import LastingEdit
from ssmscope.core.mixers import check_causal
from ssmscope.core.progress import count_tokens
from ssmscope.core.recording import STEPS_AT_ONCE, STEPS_BEFORE, Kept, StepInPlace, can_record_steps
from ssmscope.core.sampling import GREEDY, Sampling
from ssmscope.core.token_runs import TokenRuns
from ssmscope.core.trace import Earlier, States, check_rows, gathered, joined
from ssmscope.errors import InputError, check_whole
from ssmscope.ops.compiling import compiled
from ssmscope.outline import Outlined

P = ParamSpec("P")
R = TypeVar("R")

ROWS_AT_ONCE = 32
"""Texts that are written together, by default."""
RECORDING_DEVICES = ("cuda",)
COMPILE_FROM = 4096
"""New tokens from which on a model's layers are compiled without being asked."""

GivenEdit = Edit | LastingEdit


@dataclass(frozen=True, eq=False)
class Step(Outlined):
    """One step of writing.

    Attributes:
        number: number of the tokens, from 0.
        written: a token for each text that had not ended.
        logits: (texts, vocabulary), from which the tokens were chosen.
        states: where they were asked for, the states that the logits came from: those before the tokens are read.
    """

    number: int
    written: tuple[Written, ...]
    logits: Tensor
    states: States | None = None


@dataclass(frozen=True, eq=False)
class Generation(Outlined):
    """Texts that a model wrote.

    Attributes:
        prompts: the texts that they continue.
        texts: what was written, up to a stop string and without end tokens; ids for a model without a tokenizer.
        written: each text's tokens, all of them.
        states: where they were asked for, those before each text's last token is read; `Model.run` on these tokens
            continues from them.
    """

    prompts: Batch
    texts: tuple[str, ...]
    written: tuple[tuple[Written, ...], ...]
    states: States | None = None

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(token.id for token in row) for row in self.written)

    @property
    def tokens(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(token.token for token in row) for row in self.written)

    @property
    def log_probabilities(self) -> tuple[tuple[float, ...], ...]:
        """Log P of every written token under the model, edited as it was."""
        return tuple(tuple(token.log_probability for token in row) for row in self.written)

    @property
    def entropies(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(token.entropy for token in row) for row in self.written)

    @property
    def ended_by(self) -> tuple[EndedBy, ...]:
        return tuple(row[-1].ended_by or "length" for row in self.written)

    def batch(self, model: Runs) -> Batch:
        """Return prompts with what was written after them, as the model reads it in one run."""
        whole = [[*row, *said] for row, said in zip(prompt_ids(self.prompts), self.ids)]
        return model.encode(ids=whole)


def prompt_ids(batch: Batch) -> list[list[int]]:
    """Return the ids of a batch's texts without padding."""
    return [ids[real].tolist() for ids, real in zip(batch.input_ids.cpu(), batch.mask.cpu())]


class Continuation:
    """Logits and states of texts as they are written, under edits that come and go, in the context in which it is made.

    Texts that ended are left out of the next run, but with edits, which may have values for every text: there their
    last token is read again and nothing of it is used.
    """

    def __init__(
        self,
        model: Runs,
        run: tuple[Tensor, States] | None = None,
        edits: Sequence[LastingEdit] = (),
        compiles: bool = False,
    ) -> None:
        self.model, self.edits, self.context, self.compiles = model, tuple(edits), copy_context(), compiles
        worth = not edits and (compiles or model.device.type in RECORDING_DEVICES)
        self.recordable = bool(worth and can_record_steps(model.module))
        self.runs: dict[tuple[LastingEdit, ...], TokenRuns] = {}
        self.step: StepInPlace | None = None
        self.keep: Callable[[], None] = lambda: None
        if run is not None:
            self.begin(run)

    def begin(self, run: tuple[Tensor, States]) -> None:
        """Go on from the logits and states at the ends of texts."""
        self.logits, self.states = run
        self.rows = list(range(len(self.logits)))  # Texts of the batch.

    def begin_in_place(self, batch: Batch, sampling: Sampling) -> bool:
        """Read short texts of one length by a step that is kept, which goes on with drawing their first tokens; return
        False where none is."""
        length = batch.input_ids.shape[1]
        if not self.recordable or min(batch.lengths) < length:
            return False
        kept, key = Kept.of(self.model), self._key(len(batch.input_ids), sampling)
        step = kept.steps.get(key)
        if step is None or length > step.reads:
            return False
        self.step, self.keep = kept.steps.pop(key), lambda: kept.put(key, step)
        step.read(batch.input_ids.to(self.model.device))
        count_tokens(batch.input_ids.numel())
        return True

    def _key(self, texts: int, sampling: Sampling) -> tuple[Any, ...]:
        return texts, self.compiles, replace(sampling, seed=0)

    def read(self, tokens: Sequence[Written]) -> None:
        """Read a token for each text that is still written."""
        new = {token.row: token for token in tokens}
        if not self.edits:
            (self.logits, self.states), self.rows = self.of_texts(list(new), True), list(new)
        active = {row: tuple(edit for edit in self.edits if edit.acts(token)) for row, token in new.items()}
        ids = torch.tensor([new[row].id if row in new else tokens[0].id for row in self.rows], device=self.model.device)
        sets = list(dict.fromkeys(active.values()))
        found = [self._runs(each)(ids, self.states) for each in sets]
        if len(found) == 1:
            ((self.logits, self.states),) = found
            return
        number = {each: at * len(self.rows) for at, each in enumerate(sets)}
        chosen = torch.tensor([place + number[active.get(row, sets[0])] for place, row in enumerate(self.rows)])
        self.logits = torch.cat([logits for logits, _ in found])[chosen.to(ids.device)]
        self.states = gathered(joined([states for _, states in found]), chosen)

    def in_place(self, number: int, tokens: Sequence[Written], sampling: Sampling) -> StepInPlace | None:
        """Return a step that goes on with reading these tokens, on a GPU or compiled; None where it cannot be, and
        before so many tokens were written that it is worth making one."""
        if not self.recordable or not self.states:
            return None
        kept, rows = Kept.of(self.model), [token.row for token in tokens]
        key = self._key(len(rows), sampling)
        found = kept.steps.pop(key, None)
        if found is None and number != STEPS_BEFORE:
            return None
        (self.logits, self.states), self.rows = self.of_texts(rows, True), rows
        ids = torch.tensor([token.id for token in tokens], device=self.model.device)
        if found is not None:
            found.begin(ids, self.states)
        else:
            try:
                draws, fuses = sampling.temperature > 0, self.compiles and ids.device.type == "cuda"
                note = compiled(GREEDY.note) if fuses and not draws else sampling.note
                found = self._runs(()).in_place(ids, self.states, note, draws, kept.traces, self.compiles)
            except (InputError, RuntimeError):
                return None
        if ids.device.type == "cuda":
            self.keep = lambda: kept.put(key, found)
        return found

    def of_texts(self, rows: Sequence[int], states: bool) -> tuple[Tensor, States]:
        """Return the logits and, if asked for, the states of these texts."""
        if list(rows) == self.rows:
            return self.logits, self.states
        place = {row: at for at, row in enumerate(self.rows)}
        chosen = torch.tensor([place[row] for row in rows], device=self.logits.device)
        return self.logits[chosen], gathered(self.states, chosen) if states else ()

    def _runs(self, edits: tuple[LastingEdit, ...]) -> TokenRuns:
        if edits not in self.runs:
            self.runs[edits] = TokenRuns(self.model, [each.edit for each in edits], self.context)
        return self.runs[edits]

    def close(self) -> None:
        self.keep()
        for runs in self.runs.values():
            runs.close()


class Ahead:
    """Tokens of texts `rows`, drawn by a step in place, `at_once` of each before anybody looks at them. A GPU draws the
    next ones meanwhile."""

    def __init__(
        self, step: StepInPlace, rows: Sequence[int], draws: Sequence[np.random.Generator] | None, at_once: int
    ) -> None:
        self.step, self.rows, self.draws, self.at_once = step, list(rows), draws, at_once
        self.taken, self.found = 0, list[list[list[float]]]()

    def next(self, going: Sequence[int], most: int) -> tuple[list[list[float]], list[int]]:
        """Return the numbers of the next token of some texts, of which at most so many follow, and their places."""
        if not self.found:
            count = self.taken or self._take(most)
            self.found = self.step.taken(count)
            count_tokens(count * len(self.rows))
            meanwhile = most > count and self.at_once > 1 and self.step.ids.device.type in RECORDING_DEVICES
            self.taken = self._take(most - count) if meanwhile else 0
        places = [self.rows.index(row) for row in going]
        return [[column[place] for place in places] for column in self.found.pop(0)], places

    def _take(self, most: int) -> int:
        count, draws = min(self.at_once, most), self.draws
        drawn = None if draws is None else [[draws[row].random() for row in self.rows] for _ in range(count)]
        self.step.take(count, None if drawn is None else np.array(drawn))
        return count


def written_after(
    following: Continuation,
    prompts: Sequence[Sequence[int]],
    ends: Ends,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    draws: Sequence[np.random.Generator] | None = None,
    keep_states: bool = False,
    at_once: int = 1,
) -> Iterator[Step]:
    """Yield what a model writes after prompts, at whose ends `following` is. With `sampling` above temperature 0 the
    `draws` are its own. Of several tokens written `at_once` the steps have no logits and states."""
    decode = lru_cache(maxsize=4096)(lambda i: str(i) if ends.tokenizer is None else ends.tokenizer.decode([i]))
    said: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    ahead = None if following.step is None else Ahead(following.step, going, draws, at_once)
    try:
        for number in range(max_new_tokens):
            if ahead is None:
                logits, states = following.of_texts(going, keep_states)
                drawn = None if draws is None else np.array([draws[row].random() for row in going])
                numbers = sampling.numbers(logits, drawn).tolist()  # A GPU is waited for once.
            else:
                numbers, places = ahead.next(going, max_new_tokens - number)
                logits, states = ahead.step.of_texts(places if at_once == 1 else [], keep_states)
            if not np.isfinite(numbers).all():
                following.model.checked(logits.new_full((1,), torch.nan) if at_once > 1 else logits)
            tokens = []
            for row, token, log_probability, spread in zip(going, map(int, numbers[0]), *numbers[1:3]):
                said[row].append(token)
                ended = ends.ended_by(prompts[row], said[row]) or ("length" if number + 1 == max_new_tokens else None)
                tokens.append(Written(row, number, token, decode(token), log_probability, spread, ended))
            yield Step(number, tuple(tokens), logits, states if keep_states else None)
            tokens = [token for token in tokens if token.ended_by is None]
            if not tokens:
                return
            going = [token.row for token in tokens]
            if ahead is None:
                step = following.in_place(number, tokens, sampling)
                ahead = None if step is None else Ahead(step, going, draws, at_once)
            if ahead is None:
                following.read(tokens)
    finally:
        following.close()


def check_writes(model: Runs, batch: Batch, max_new_tokens: int) -> None:
    """Raise InputError if a model does not write, or not so much after these texts."""
    check_whole(1, max_new_tokens=max_new_tokens)
    if model.gives != "next tokens":
        kind = "has no head" if model.gives == "nothing" else f"is {model.role}"
        raise InputError(f"{model.name} {kind} and writes nothing; give a language model")
    check_causal(model.module, "writing")
    if not model.continues:
        said = f"{model.name} cannot continue from its states, which writing needs: a part that reads earlier tokens"
        raise InputError(f"{said} keeps none, or attention is neither eager nor sdpa; write with its own code")
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(batch.lengths)
    if most is not None and longest + max_new_tokens > most and reads_positions(model):
        said = f"{model.name} has positions for {most:,} tokens, and the longest prompt has {longest:,}:"
        raise InputError(f"{said} ask for at most {max(0, most - longest):,} new tokens, or shorten it")


class Writer:
    """Writing of a model under edits, each of which acts in the prompt's run or in later ones; the arguments, with
    those of `Sampling`, and errors are those of `Model.generate`."""

    def __init__(
        self,
        model: Runs,
        *,
        max_new_tokens: int = 64,
        edits: GivenEdit | Sequence[GivenEdit] = (),
        stop: Stop = (),
        keep_states: bool = False,
        compile: bool | None = None,
        **sampling: Any,
    ) -> None:
        every = [edits] if isinstance(edits, Edit | LastingEdit) else list(edits)
        self.lasting = [edit for edit in every if isinstance(edit, LastingEdit)]
        self.at_prompt = [e.edit if isinstance(e, LastingEdit) else e for e in every if getattr(e, "prompt", True)]
        self.model, self.sampling, self.ends = model, Sampling(**sampling), Ends.of(model, stop)
        self.max_new_tokens, self.keep_states = max_new_tokens, keep_states
        self.compiles = max_new_tokens >= COMPILE_FROM if compile is None else compile

    def stream(
        self, batch: Batch, draws: Sequence[np.random.Generator] | None = None, states: Earlier = None, at_once: int = 1
    ) -> Iterator[Step]:
        """Return an iterator over the steps in which the texts of a batch, after `states`, are continued together."""
        check_writes(self.model, batch, self.max_new_tokens)
        prompts, following = prompt_ids(batch), Continuation(self.model, None, self.lasting, self.compiles)
        if self.at_prompt or states or not following.begin_in_place(batch, self.sampling):
            following.begin(self._read(batch, states))
        how: dict[str, Any] = {"sampling": self.sampling, "draws": draws or self.sampling.draws(prompts)}
        how["at_once"] = at_once
        how |= {"max_new_tokens": self.max_new_tokens, "keep_states": self.keep_states}
        return written_after(following, prompts, self.ends, **how)

    def generate(self, batch: Batch, batch_size: int | None, states: Earlier = None) -> Generation:
        """Return what is written after the texts of a batch, which follow `states`, `batch_size` of them at a time."""
        check_writes(self.model, batch, self.max_new_tokens)
        check_whole(1, batch_size=1 if batch_size is None else batch_size)
        count, prompts = len(batch.tokens), prompt_ids(batch)
        check_rows(states, count)
        draws = self.sampling.draws(prompts)
        said: list[list[Written]] = [[] for _ in prompts]
        last: dict[int, States] = {}
        at_once = count if self.at_prompt or self.lasting else batch_size or ROWS_AT_ONCE
        for rows in by_length(batch.lengths, 1, size=at_once):
            rows = list(range(count)) if at_once == count else rows
            before = states and gathered(tuple(states), torch.tensor(rows))
            own, ahead = draws and [draws[row] for row in rows], 1 if self.keep_states else STEPS_AT_ONCE
            for step in self.stream(batch.rows(rows), own, before, ahead):
                for place, token in enumerate(step.written):
                    said[rows[token.row]].append(token._replace(row=rows[token.row]))
                    if token.ended_by is not None and step.states is not None:
                        last[rows[token.row]] = gathered(step.states, torch.tensor([place]))
        texts = tuple(self.ends.text(prompt, [token.id for token in row]) for prompt, row in zip(prompts, said))
        ends = joined([last[row] for row in range(count)]) if last else None
        return Generation(batch, texts, tuple(map(tuple, said)), ends)

    def _read(self, batch: Batch, states: Earlier) -> tuple[Tensor, States]:
        """Return the logits at the prompts' ends and the states there, of long prompts in parts."""
        if self.at_prompt or states:  # Edits may have values for every text.
            return self.model.run(batch, states, last_only=True, edits=self.at_prompt)
        parts = [*by_length(batch.lengths, tokens_at_once(self.model.device, width=self.model.width))]
        runs = [self.model.run(batch.rows(rows), last_only=True) for rows in parts]
        if len(runs) == 1 and parts[0] == list(range(len(batch.tokens))):
            return runs[0]
        place = torch.tensor(sum(parts, [])).argsort()
        logits = torch.cat([run.logits for run in runs])
        return logits[place.to(logits.device)], gathered(joined([run.states for run in runs]), place)


def writes(method: Callable[P, R]) -> Callable[P, R]:
    """Show the arguments of `Writer` in the signature of a method that hands its `**how` on to it."""
    own, *rest = (inspect.signature(each) for each in (method, Writer, Sampling))
    options = [each for some in rest for each in some.parameters.values() if each.kind is not each.VAR_KEYWORD]
    shown = {each.name: each.replace(kind=each.KEYWORD_ONLY) for each in options if each.name != "model"}
    before = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    method.__signature__ = own.replace(parameters=[*before, *shown.values()])  # type: ignore[attr-defined]
    return method
