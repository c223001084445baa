"""A model of every architecture writes from its states what it would write if it read the whole text."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from examples import TEXTS, relative
from exhaustive import half
from loud import TrueFloat64, doubled
from refusals import refuses
from transformers import Mamba2ForCausalLM
from transformers.models.rwkv.modeling_rwkv import RwkvBlock
from ssmscope.core.attention_layers import attention_layers
from ssmscope.core.edits import PLACES, Edit, Site, edited
from ssmscope.core.lasting_edits import while_writing
from ssmscope.core.mixers import memory_of
from ssmscope.core.model import Model
from ssmscope.core.trace import mapped
from ssmscope.layers.parts import BY_WEIGHT

STEPS = 3
PADDED = TEXTS[:2]


def scaled(t: torch.Tensor, where: slice, factor: float) -> torch.Tensor:
    t = t.clone()
    t[:, where] *= factor
    return t


def change_at(place: str, value: Any, site: Site, *, where: slice, factor: float) -> Any:
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
        name = "x" if isinstance(site.mixer, RwkvBlock) else "c"  # RWKV's next token reads the memory.
        changed = [replace(r, **{name: scaled(getattr(r, name), where, factor)}) for r in value.recurrences]
        return replace(value, recurrences=tuple(changed))
    if place == "scans":
        return tuple(scan._replace(y=scaled(scan.y, where, factor)) for scan in value)
    return scaled(value, where, factor)


def change_state(state: Any, _: Any, *, factor: float) -> Any:
    return replace(state, ssm=mapped(state.ssm, lambda t: t * factor))


def edits_for(place: str) -> list[Any]:
    """Edits that scale by one factor in the prompt and by another in the written tokens."""
    if place == "state":
        return [while_writing(Edit("state", "state", partial(change_state, factor=0.7), after=-1), prompt=True)]
    first, later = (Edit(place, place, partial(change_at, place, where=slice(None), factor=f)) for f in (1.3, 0.7))
    return [first, while_writing(later)]


def edits_on(place: str, prompt: int) -> list[Edit]:
    """The same in a run of the whole text, whose prompt is so long."""
    if place == "state":
        change = partial(change_state, factor=0.7)
        return [Edit("state", "state", change, after=prompt - 1 + at) for at in range(STEPS - 1)]
    parts = ((slice(None, prompt), 1.3), (slice(prompt, None), 0.7))
    return [Edit(place, place, partial(change_at, place, where=where, factor=f)) for where, f in parts]


def reread(model: Model, text: list[int], said: list[int], place: str | None) -> torch.Tensor:
    """The logits of a whole text, without any state, at each position from the prompt's last on."""
    edits = [] if place is None else edits_on(place, len(text))
    with edited(model, edits), torch.no_grad(), model.running():
        return model.forward(model.encode(ids=[[*text, *said[:-1]]]))[0, -STEPS:]


def worst(model: Model, texts: list[list[int]], place: str | None = None) -> float:
    """The largest relative error of the logits that texts are written from, against those of the texts read whole."""
    edits = [] if place is None else edits_for(place)
    errors = []
    steps = list(model.generate_stream(ids=texts, max_new_tokens=STEPS, edits=edits))
    for row, text in enumerate(texts):
        said = [step.written[row].id for step in steps]
        whole = reread(model, text, said, place)
        assert said == whole.argmax(-1).tolist()
        errors.append(relative(torch.stack([step.logits[row] for step in steps]), whole))
    return max(errors)


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
        refuses("cannot continue from its states, which writing needs", model.generate, ids=TEXTS)
        pytest.skip("its layers keep no state that a run continues from")
    return model


def test_what_is_written_is_what_the_whole_text_says(writer):
    assert worst(writer, PADDED) < 1e-5 and worst(writer, PADDED[1:]) < 1e-5


def test_what_is_written_under_edits_is_what_the_whole_text_says_under_them(writer, request):
    exact = Model(doubled(writer.module))
    with TrueFloat64():
        assert worst(exact, PADDED) < 1e-10
        for place in half(PLACES, request.node.name, of=3):
            if has(exact, place):
                assert worst(exact, PADDED, place) < 1e-10, place


def test_greedy_tokens_are_those_of_transformers(writer):
    ids, limits = torch.tensor(TEXTS[:1]), tuple(getattr(writer.config, "time_step_limit", None) or ())
    # One step of Mamba-2 in release 5 (5.24) leaves out the limits of its time steps, which a whole text obeys. An
    # xLSTM of either release has a cache of another shape than the state of a text that its chunks do not divide.
    unlimited = BY_WEIGHT and isinstance(writer.module, Mamba2ForCausalLM) and limits != (0, math.inf)
    right = not unlimited and writer.architecture != "xlstm"
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "use_cache": right}
    theirs = writer.module.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
    assert list(writer.generate(ids=TEXTS[:1], max_new_tokens=8).ids[0]) == theirs.tolist()
