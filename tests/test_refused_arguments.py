"""Refusals, in one line, of objects that are no model and no file, by every verb and function that takes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import random_example
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope.api.analyses import analyses
from ssmscope.api.inputs import Named, Texts
from ssmscope.errors import InputError

NOTHING = (None, 5, "demo/books-mamba2", object(), {"a": 1}, [None], [5, 5])
"""Values that are no loaded model."""


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as error:
        call()
    said = str(error.value)
    assert "\n" not in said and "give" in said
    return said


model = pytest.fixture(scope="module")(lambda: ssmscope.Model(loud(random_example("mamba2")).eval(), name="small"))


@pytest.mark.parametrize("verb", [name for name, each in analyses().items() if each.loads])
def test_a_verb_refuses_what_is_no_model(verb: str) -> None:
    each = analyses()[verb]
    for given in (*NOTHING, torch.nn.Linear(2, 2)):
        if given == "demo/books-mamba2":  # It is loaded, see below.
            continue
        for rest in ((), ("a text",)) if each.reads is not None else ((),):
            refused(lambda: each.function(given, *rest))  # noqa: B023
    first = next(iter(inspect.signature(each.function).parameters))
    assert refused(lambda: each.function(**{first: 5})) == refused(lambda: each.function(5))


def test_a_path_and_a_module_are_loaded(model: ssmscope.Model) -> None:
    loaded = ssmscope.load("demo/sst2-mamba2")
    wanted = ssmscope.explain(loaded, "a gripping film").to_frame()
    found = ssmscope.explain("demo/sst2-mamba2", "a gripping film")
    assert found.model_name == "demo/sst2-mamba2" and found.to_frame().equals(wanted)
    place = Path(ssmscope.__file__).parent / "demo/sst2-mamba2"
    assert ssmscope.explain(model=place, texts="a gripping film").to_frame()["score"].equals(wanted["score"])
    own = ssmscope.heatmap(model.module, [[3, 4, 5]]).to_frame()
    assert own.equals(ssmscope.heatmap(ssmscope.load(model.module), [[3, 4, 5]]).to_frame())
    both = ssmscope.heatmap(["demo/sst2-mamba2", loaded], "a gripping film")
    assert type(both) is type(ssmscope.heatmap([loaded, loaded], "a gripping film"))
    assert ssmscope.sanity("demo/sst2-mamba2", "a gripping film", methods=["gradxinput"]).methods == ("gradxinput",)


@pytest.mark.parametrize("verb", [name for name, each in analyses().items() if isinstance(each.reads, Named | Texts)])
def test_a_verb_refuses_what_is_no_input(verb: str, model: ssmscope.Model) -> None:
    each = analyses()[verb]
    known = inspect.signature(each.function).parameters
    needed = {name: 1 for name, p in [*known.items()][2:] if p.default is p.empty}
    needed |= {"toward": ["a"], "away": ["b"]} if verb == "steer" else {}
    optional = [*known.values()][1].default is None
    for given in (5, object(), {}, *[None] * (not optional)):
        refused(lambda: each.function(model, given, **needed))  # noqa: B023


def test_checkpoints_that_are_none_have_a_reason() -> None:
    for given in (5, None, [None], object()):
        assert "the checkpoint cannot be read: " in refused(lambda: ssmscope.checkpoints(given))  # noqa: B023


def test_functions_refuse_what_is_no_model(model: ssmscope.Model, tmp_path: Path) -> None:
    kept = model.trace(ids=[[3, 4, 5]]).states()
    ssmscope.save_states(kept, model, file := tmp_path / "kept")
    functions: dict[str, Callable[[Any], Any]] = {
        "load_states": lambda given: ssmscope.load_states(file, given),
        "save_states": lambda given: ssmscope.save_states(kept, given, tmp_path / "other"),
        "logit_lens": ssmscope.logit_lens,
        "Evaluator": ssmscope.Evaluator,
        "edited": lambda given: ssmscope.edited(given, []).__enter__(),
    }
    for name, function in functions.items():
        for given in NOTHING:
            said = refused(lambda: function(given))  # noqa: B023
            assert said.startswith(f"{type(given).__name__} was given to {name} as its model; ")
    for given in NOTHING:
        assert "was given as a module; give" in refused(lambda: ssmscope.Model(given))  # noqa: B023
        assert "was given as a module; give" in refused(lambda: ssmscope.state_numbers(given, [[3, 4]]))  # noqa: B023
    assert not (tmp_path / "other").exists()


def test_functions_refuse_what_is_no_path(model: ssmscope.Model) -> None:
    kept = model.trace(ids=[[3, 4, 5]]).states()
    for given in (None, 5, 0.5, [], object(), b"a"):
        for function in (
            lambda: ssmscope.load_states(given, model),  # noqa: B023
            lambda: ssmscope.save_states(kept, model, given),  # noqa: B023
            lambda: ssmscope.load_lens(given, model),  # noqa: B023
            lambda: ssmscope.Result.load(given),  # noqa: B023
            lambda: ssmscope.push(given, "a/b"),  # noqa: B023
            *[lambda: ssmscope.load_text(given)] * (given != []),  # noqa: B023
        ):
            assert refused(function).startswith(f"{type(given).__name__} was given as ")


def test_what_is_no_state_is_refused(model: ssmscope.Model) -> None:
    batch, kept = model.encode(ids=[[3, 4, 5]]), model.trace(ids=[[3, 4, 5]]).states()
    for given in (5, object(), "last", kept, [5], [None]):
        for function in (model.run, lambda batch, states: model.generate(batch, states=states, max_new_tokens=1)):
            said = refused(lambda: function(batch, given))  # noqa: B023
            assert said.startswith(f"{type(given).__name__} was given as states; give those of a run, or of kept ones")
    assert model.run(batch, kept.states).logits.shape[:2] == (1, 3)
    for given in (None, "last", [1], [0, -1], []):
        refuses("^(there is no row .*|no row was given); allowed are 0 to 0$", kept.of, given)
    assert refused(lambda: ssmscope.save_states(5, model, "a")).startswith("int was given as states; give those of tr")
    for given in (None, "first", 0.5, [None]):
        with pytest.raises(
            InputError, match="^at is .*; allowed are 0 to 2, positions that every text has, and 'last'$"
        ):
            model.trace(ids=[[3, 4, 5]]).states(given)


def test_a_callback_is_refused_before_the_training() -> None:
    for given in (None, 5, [], object()):
        assert refused(lambda: ssmscope.training_callback(given)).startswith("texts ")  # noqa: B023
    assert refused(lambda: ssmscope.training_callback(["a b"], log=5)) == "log is 5; give a function, such as wandb.log"
