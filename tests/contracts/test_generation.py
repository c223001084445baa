"""A model of every architecture writes from its states what it would write if it read the whole text at every step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from examples import TEXTS, relative
from loud import TrueFloat64, doubled

from ssmscope.core.attention_layers import attention_layers
from ssmscope.core.edits import PLACES, Edit, edited
from ssmscope.core.lasting_edits import while_writing
from ssmscope.core.mixers import memory_of
from ssmscope.core.model import Model
from ssmscope.core.trace import mapped
from ssmscope.errors import InputError

STEPS = 4


def writes(model: Model) -> bool:
    return model.gives == "next tokens" and model.continues


def scaled(t: torch.Tensor, where: slice, factor: float) -> torch.Tensor:
    t = t.clone()
    t[:, where] *= factor
    return t


def change_at(place: str, value: Any, _: Any = None, *, where: slice, factor: float) -> Any:
    """The value at a place, changed at some positions of its run."""
    if place in ("taps", "attention"):
        value = value.clone()
        if place == "taps":
            value[:, where, -1] = False
        else:
            value[:, :, where, 0] = False
            value[:, :, where.start or 0 : where.stop, 1] = True
        return value
    if place == "terms":
        return replace(value, recurrences=tuple(replace(r, c=scaled(r.c, where, factor)) for r in value.recurrences))
    if place == "scans":
        return tuple(scan._replace(y=scaled(scan.y, where, factor)) for scan in value)
    return scaled(value, where, factor)


def change_state(state: Any, _: Any, *, factor: float) -> Any:
    return replace(state, ssm=mapped(state.ssm, lambda t: t * factor))


def edits_for(place: str) -> list[Any]:
    """What acts on the prompt with one factor, and on what is written with another."""
    if place == "state":
        return [while_writing(Edit("state", "state", partial(change_state, factor=0.7), after=-1), prompt=True, stop=2)]
    first, later = (Edit(place, place, partial(change_at, place, where=slice(None), factor=f)) for f in (1.3, 0.7))
    return [first, while_writing(later)]


def edits_on(place: str, prompt: int) -> list[Edit]:
    """The same in a run of the whole text, whose prompt is so long."""
    if place == "state":
        change = partial(change_state, factor=0.7)
        return [Edit("state", "state", change, after=prompt - 1 + at) for at in range(3)]
    parts = ((slice(None, prompt), 1.3), (slice(prompt, None), 0.7))
    return [Edit(place, place, partial(change_at, place, where=where, factor=f)) for where, f in parts]


def reread(model: Model, ids: list[int], prompt: int, place: str | None) -> torch.Tensor:
    """The logits of a whole text, without any state, at each of its positions from the prompt's last on."""
    edits = [] if place is None else edits_on(place, prompt)
    if place == "state":
        edits = [edit for edit in edits if edit.after < len(ids) - 1]
    with edited(model, edits), torch.no_grad(), model.running():
        return model.forward(model.encode(ids=[ids]))[0, -1]


def agree(model: Model, place: str | None, tolerance: float) -> bool:
    """Whether texts written together, and each alone, have the logits of the texts read whole at every step."""
    edits = [] if place is None else edits_for(place)
    steps = list(model.generate_stream(ids=TEXTS, max_new_tokens=STEPS, edits=edits, stop=lambda ids: False))
    rows = [[token.id for step in steps for token in step.written if token.row == row] for row in range(len(TEXTS))]
    close = []
    for row, (text, said) in enumerate(zip(TEXTS, rows)):
        alone = list(model.generate_stream(ids=[text], max_new_tokens=STEPS, edits=edits))
        assert [step.written[0].id for step in alone] == said
        for number, (step, own) in enumerate(zip(steps, alone)):
            expected = reread(model, [*text, *said[:number]], len(text), place)
            found = step.logits[[token.row for token in step.written].index(row)]
            assert step.written[[token.row for token in step.written].index(row)].id == expected.argmax()
            close += [relative(found, expected) < tolerance, relative(own.logits[0], expected) < tolerance]
    return all(close)


def has(model: Model, place: str) -> bool:
    if place in ("convolution", "taps"):
        return model.run(model.encode(ids=TEXTS)).states[0].conv is not None
    if place == "attention":
        return bool(attention_layers(model.module))
    return place not in ("state", "terms", "scans") or memory_of(model.module)["has_recurrent_state"]


@pytest.fixture
def writer(model) -> Model:
    if model.gives != "next tokens":
        pytest.skip("a classifier writes nothing")
    model.module.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    if not model.continues:
        with pytest.raises(InputError, match="cannot continue from its states, which writing needs"):
            model.generate(ids=TEXTS)
        pytest.skip("its layers keep no state that a run continues from")
    return model


def test_what_is_written_is_what_the_whole_text_says(writer):
    assert agree(writer, None, 1e-5)


def test_what_is_written_under_edits_is_what_the_whole_text_says_under_them(writer):
    exact = Model(doubled(writer.module))
    with TrueFloat64():
        for place in (None, *PLACES):
            if place is None or has(exact, place):
                assert agree(exact, place, 1e-10), place
