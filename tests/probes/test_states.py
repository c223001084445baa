"""States as files: after any token they are those of a run that ended there, and runs continue from them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import FEW, TEXTS, random_example, relative
from loud import loud
from refusals import refuses
from safetensors.torch import load_file, save_file
import ssmscope
from ssmscope.core.edits import replaced
from ssmscope.core.model import Model
from ssmscope.core.take_trace import few_tokens
from ssmscope.core.trace import tensors
from ssmscope.probes import states as package
from ssmscope.probes.states.files import load_states, named_tensors, recorded_run, save_states


@pytest.mark.parametrize("name", FEW)
def test_a_file_continues_a_run(name: str, tmp_path: Path) -> None:
    model = Model(loud(random_example(name)))
    trace = model.trace(ids=TEXTS)
    kept = trace.states(at=["last", 1])
    assert kept.rows == ((0, 1), (0, 10), (1, 1), (1, 2), (2, 1), (2, 5))
    save_states(kept, model, tmp_path / "s.safetensors")
    found = load_states(tmp_path / "s.safetensors", model)
    assert found.rows == kept.rows and found.mask.tolist() == trace.mask.tolist()
    assert all(map(torch.equal, tensors(found.states), tensors(kept.states)))
    for text, own in ((0, found.of([0])), (2, found.of([4]))):
        whole = model.run(model.encode(ids=TEXTS[text]), last_only=True).logits
        rest = model.run(model.encode(ids=TEXTS[text][2:]), own, last_only=True).logits
        assert relative(rest, whole) < 1e-5
    ended = model.run(model.encode(ids=TEXTS[:1])).states
    kept_rows = zip(tensors(found.of([1])), tensors(ended))
    assert all(torch.allclose(own.double(), one.double(), rtol=1e-4, atol=1e-5) for own, one in kept_rows)


def test_writing_continues_from_states() -> None:
    model = Model(loud(random_example("jamba")))
    model.module.generation_config.eos_token_id = None
    kept = model.trace(ids=[TEXTS[0], TEXTS[2]]).states(at=[3])
    rest = [TEXTS[0][4:], TEXTS[2][4:]]
    whole = model.generate(ids=[TEXTS[0], TEXTS[2]], max_new_tokens=5)
    for found in (
        model.generate(ids=rest, states=kept.states, max_new_tokens=5),
        model.generate(ids=rest, states=kept.states, max_new_tokens=5, batch_size=1),
    ):
        assert found.ids == whole.ids
    first = next(model.generate_stream(ids=rest[1:], states=kept.of([1]), max_new_tokens=1))
    assert first.written[0].id == whole.ids[1][0] and model.generate(ids=rest, max_new_tokens=5).ids != whole.ids


def test_a_trace_runs_again_as_it_was_taken() -> None:
    model = Model(loud(random_example("mamba2")))
    plain = model.trace(ids=TEXTS[0]).states(at=[4])
    with ssmscope.edited(model, replaced("output", torch.zeros(1, 1, 24), [2], layers=[0])):
        trace = model.trace(ids=TEXTS[0])
        inside = trace.states(at=[4])
    after = trace.states(at=[4])
    assert all(map(torch.equal, tensors(inside.states), tensors(after.states)))
    assert relative(after.states[1].ssm[0], plain.states[1].ssm[0]) > 1e-2
    with torch.no_grad():
        model.mixers[0].in_proj.weight.mul_(1.5)
    refuses("have changed since this trace", trace.states)
    refuses("has no model to run again", lambda: replace(trace, rerun=None).states())


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, path = Model(loud(random_example("mamba2"))), tmp_path / "s.safetensors"
    kept = model.trace(ids=TEXTS[0]).states(at=[1, 4])
    good = {name: value.contiguous() for name, value in named_tensors(model, kept).items()}
    tokens = good["tokens"]
    for change, said in (
        ({"tokens": None}, "has no tokens"),
        ({"tokens": tokens.flip(1).masked_fill(tokens.flip(1) == 5, -1)}, "padding comes last"),
        ({"rows": None}, "has no rows"),
        ({"rows": torch.tensor([[0, 1], [1, 0]])}, r"no \(text, position\) of its 1 texts"),
        ({"rows": torch.tensor([[0, 1], [0, 11]])}, "after the end of their text"),
        ({"layers.1.conv": None}, "has no layers.1.conv; did you mean 'layers.0.conv'"),
        ({"layers.1.state.0": good["layers.1.state.0"][:, 1:].contiguous()}, r"it needs float32 \(2, 6, 8, 6\)"),
        ({"layers.1.state.0": good["layers.1.state.0"][:1]}, r"as float32 \(1, 6, 8, 6\); it needs float32 \(2, "),
    ):
        save_file({name: value for name, value in {**good, **change}.items() if value is not None}, path)
        refuses(said, load_states, path, model)
    save_file({**good, "extra": torch.zeros(1)}, path)
    assert torch.equal(load_states(path, model).states[1].ssm[0], kept.states[1].ssm[0])
    save_states(kept, model, path)
    other = Model(loud(random_example("mamba2"), seed=1))
    refuses("whose weights differ from those of", load_states, path, other)
    assert load_states(path, other, any_model=True).rows == kept.rows
    save_states(kept, other, path)  # Of the same layers, under the name of the model that they are of.
    assert load_states(path, model).source["fingerprint"] == model.fingerprint != other.fingerprint
    for name, said in (
        ("mamba", "has layers.0.conv as float32"),
        ("jamba", "and small keeps others; give the model th"),
    ):
        refuses(said, save_states, kept, Model(loud(random_example(name)), name="small"), path)
    save_file({**good, "layers.1.conv": good["layers.1.conv"].long()}, path)
    refuses("layers.1.conv as int64 .*; it needs float32", load_states, path, model)
    for ask in (lambda: kept.of([2]), lambda: model.run(model.encode(ids=[5]), kept.states)):
        refuses("there is no row 2|have 2 rows and 1 texts", ask)
    refuses("have 2 rows and 1 texts", model.generate, ids=[[5]], states=kept.states, max_new_tokens=1)
    path.write_bytes(b"no")
    refuses("cannot read", load_states, path, model)
    bidirectional = Model(loud(random_example("vim")))
    refuses("cannot continue from its states", ssmscope.states, bidirectional, few_tokens(bidirectional))


def test_the_verb(analyze, refusal, tmp_path: Path) -> None:
    name, path = tmp_path / "model", tmp_path / "s.safetensors"
    loud(random_example("jamba")).save_pretrained(name)
    given = ("states", name, "--ids", "5,17,3,9,22,1")
    answer = analyze(
        *given, "--at", "1,last", "--save", path, "--parts", "states,logits,layers", "--out", tmp_path / "out"
    )
    result, found = ssmscope.Result.load(tmp_path / "out" / "states.json"), load_file(path)
    assert result == ssmscope.Result.from_dict(json.loads(result.to_json()))
    frame = result.to_frame()
    recurrent = frame[frame.tensor.str.endswith("state.0")]
    top = recurrent.loc[recurrent.norm.idxmax()]
    layer, said = top.tensor.split(".")[1], " ".join(answer.out.split())
    assert (
        answer.code == 0 and f"the largest norm is {top.norm:.3g}, in layer {layer} after token {top.position}" in said
    )
    one = frame[(frame.tensor == top.tensor) & (frame.position == 5)]
    assert one.norm.item() == pytest.approx(found[top.tensor][1].double().norm().item(), rel=1e-9)
    assert (
        one.largest.item() == found[top.tensor][1].abs().max().item()
        and one.numbers.item() == found[top.tensor][1].numel()
    )
    model = ssmscope.load(name)
    assert torch.equal(found["logits"], model.logits(model.encode(ids=[5, 17, 3, 9, 22, 1])))
    assert "at is 6; allowed are 0 to 5" in refusal(*given, "--at", "6")
    assert "give the file too, --save" in refusal(*given, "--parts", "logits")
    assert "at is 'lst'" in refusal(*given, "--at", "lst")


def test_the_parts_of_a_run() -> None:
    """In Mamba-2 a block adds its mixer's output to the residual stream."""
    model = Model(loud(random_example("mamba2")))
    batch = model.encode(ids=TEXTS)
    found = recorded_run(model, batch, [(0, 3)], ("layers", "logits"))
    assert [*found] == ["tokens", "logits", *(f"layers.{n}.{what}" for what in ("residual", "output") for n in (0, 1))]
    difference = found["layers.1.residual"] - found["layers.0.residual"]
    assert relative(difference[batch.mask], found["layers.0.output"][batch.mask]) < 1e-6
    assert torch.equal(found["layers.0.residual"], model.embed(batch).detach())


def test_the_guides_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuned state makes its text likelier than an empty one does."""
    guide = Path(package.__file__).with_name("guide.md").read_text(encoding="utf-8")
    read, tune = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = ssmscope.load("demo/books-mamba2")
    save_states(model.trace("He had never seen the old house .").states([3, "last"]), model, "house.safetensors")
    names: dict[str, Any] = {}
    exec(read.replace("max_new_tokens=8", "max_new_tokens=1") + tune.replace("range(20)", "range(3)"), names)
    model, batch = names["model"], names["batch"]
    runs = [model.run(batch, states).logits[0, :-1] for states in (names["tuned"].states, None)]
    tuned, plain = (torch.nn.functional.cross_entropy(logits, batch.input_ids[0, 1:]) for logits in runs)
    assert tuned < plain - 0.01
