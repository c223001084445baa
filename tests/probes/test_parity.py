"""Parity: faults put into one layer are found there and named; runs that only round otherwise are not."""

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from examples import EXAMPLES, random_example
from exhaustive import ALL, few
from loud import loud
from refusals import refuses
from safetensors.torch import save_file
import ssmscope
from ssmscope import ops
from ssmscope.core.edits import Edit
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerState, joined, tensors
from ssmscope.errors import InputError
from ssmscope.layers import mamba2
from ssmscope.layers.parts import BY_WEIGHT
from ssmscope.probes import parity as package
from ssmscope.probes.parity import faults
from ssmscope.probes.parity.faults import compared
from ssmscope.probes.parity.measure import read_parts
from ssmscope.probes.states.files import recorded_run, tensor_names

PARTS = ("states", "logits", "layers")
LENGTHS = (26, 19) if ALL else (14, 10)
ROWS = [(0, 4), (0, 8), (0, 13), (0, 25), (1, 5), (1, 11), (1, 18)] if ALL else [(0, 4), (0, 8), (0, 13), (1, 9)]
TEXTS = [torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
Dump = dict[str, torch.Tensor]


def in_pieces(model: Model, layer: int, change: Callable[[LayerState], LayerState], cut: int | None = None) -> Dump:
    """States of runs of one token after the other, or of two pieces with a cut, between which a layer's are changed."""
    kept = []
    for text, ids in enumerate(TEXTS):
        states: Any = None
        ends = {position + 1 for own, position in ROWS if own == text}
        for start, stop in pairwise(range(len(ids) + 1) if cut is None else sorted({0, *ends, cut})):
            states = list(model.run(model.encode(ids=ids[start:stop]), states).states)
            if cut in (None, stop):
                states[layer] = change(states[layer])
            kept += [tuple(states)] * (stop in ends)
    every = joined(kept)
    return {"rows": torch.tensor(ROWS), **dict(zip(tensor_names(model, every), tensors(every)))}


def of_terms(change: Callable[[Any], Any]) -> Callable[[Model, int], Dump]:
    return lambda model, layer: run(model, faults.fault_of_terms(change, model.layer_numbers[layer]))


def run(model: Model, *edits: Edit) -> Dump:
    parts = PARTS[: 3 if getattr(model.config, "hc_mult", 1) == 1 else 2]  # Blocks of several streams have no input.
    return recorded_run(model, model.encode(ids=TEXTS), ROWS, parts, edits)


def unmasked(model: Model, layer: int) -> Dump:
    """The layer's memory after every text's first token is that of another text."""
    other = model.run(model.encode(ids=[3, 4, 5, 6, 7])).states[layer]
    return in_pieces(model, layer, lambda s: replace(s, ssm=other.ssm), 1)


def late(model: Model, layer: int) -> Dump:
    prefix = f"layers.{model.layer_numbers[layer]}.state."
    earlier = recorded_run(model, model.encode(ids=TEXTS), [(text, at - 1) for text, at in ROWS], ("states",))
    return run(model) | {name: value for name, value in earlier.items() if name.startswith(prefix)}


def swapped(model: Model, layer: int) -> Dump:
    found = run(model)
    for name in [name for name in found if name.startswith(f"layers.{model.layer_numbers[layer]}.state.")]:
        found[name] = found[name][:, [1, 0, *range(2, found[name].shape[1])]]
    return found


FAULTS: Mapping[str, tuple[Callable[[Model, int], Dump], str]] = {
    "mask": (unmasked, "something is read before the text"),
    "late": (late, "one token late"),
    "tail": (
        lambda model, at: in_pieces(model, at, lambda s: s if s.conv is None else replace(s, conv=0 * s.conv), 7),
        "tail is lost before token 7",
    ),
    "order": (of_terms(faults.decayed_late), "decays after the write"),
    "heads": (swapped, "head 0 has the state of head 1"),
    "groups": (of_terms(faults.with_tiled_groups), "groups are swapped"),
    "A": (of_terms(faults.without_decay), "A is forgotten"),
    "D": (of_terms(faults.without_skip), "D is forgotten"),
    "dtype": (
        lambda model, at: in_pieces(model, at, lambda s: replace(s, ssm=tuple(x.bfloat16().float() for x in s.ssm))),
        "kept in bfloat16",
    ),
}


@pytest.mark.parametrize("name", few(EXAMPLES, "mamba2", "jamba", "gated-deltanet"))
def test_faults_are_found_and_named(name: str) -> None:
    """Each in a random layer, wherever it changes anything."""
    model, random, tried = Model(loud(random_example(name))), Random(name), []
    if not model.continues:
        pytest.skip("keeps no states")
    batch, clean = model.encode(ids=TEXTS), run(model)
    scale = {name: 1e-5 * (1 + max(value.abs().flatten().tolist(), default=0)) for name, value in clean.items()}
    for fault, (inject, said) in FAULTS.items():
        layer = random.randrange(model.num_layers)
        try:
            dump = inject(model, layer)
        except ValueError:  # A family that compares its recurrences cannot have every fault.
            continue
        if all(torch.allclose(value, clean[tensor], rtol=0, atol=scale[tensor]) for tensor, value in dump.items()):
            continue
        found, named = compared(model, batch, ROWS, dump, torch.float32)
        first = next(each for each in found if each.over)
        assert first.name.startswith(f"layers.{model.layer_numbers[layer]}.") and first.times > 5, fault
        # GFSSM's groups change places from row to row.
        assert said in named or (fault == "mask" and name.startswith("gfssm")), fault
        tried.append(fault)
    assert len(tried) >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", few(EXAMPLES, "mamba2", "jamba", "retnet"))
def test_another_order_of_the_same_sums_is_no_fault(name: str, dtype: torch.dtype) -> None:
    model = Model(loud(random_example(name)))
    other = replace(model, module=copy.deepcopy(model.module).to(dtype))
    if not other.continues:
        pytest.skip("keeps no states, or rounds them too much for a run in two pieces")
    if dtype == torch.bfloat16 and name in ("glm5_next", "kimi_linear"):
        pytest.skip("rounding changes which experts read a token")
    for dump in (in_pieces(other, 0, lambda s: s), run(other)):
        found, named = compared(model, model.encode(ids=TEXTS), ROWS, dump, dtype)
        assert named == "" and max(each.times for each in found) <= 1
        assert not any(each.over for each in found)


def test_faults_of_terms_are_what_they_say() -> None:
    """Against the recurrence step by step."""
    r = Model(loud(random_example("mamba2"))).trace(ids=TEXTS).layers[0].recurrence
    a, share = r.log_decay().exp(), r.shape[2] // r.b.shape[2]
    plain = late_decay = tiled = torch.zeros(*r.x.shape[:1], *r.shape[2:])
    for t in range(r.shape[1]):
        b = r.b[:, t].repeat_interleave(share, 1)
        plain = plain + r.written[:, t, :, :, None] * b[:, :, None]
        late_decay = a[:, t, :, None] * (late_decay + r.written[:, t, :, :, None] * b[:, :, None])
        tiled = a[:, t, :, None] * tiled + r.written[:, t, :, :, None] * r.b[:, t].tile(1, share, 1)[:, :, None]
    changed = (faults.without_decay, plain), (faults.decayed_late, late_decay), (faults.with_tiled_groups, tiled)
    for change, expected in changed:
        made: Any = change(r)
        assert torch.allclose(ops.scan(made).state, expected, rtol=1e-4, atol=1e-5)
    delta = Model(loud(random_example("gated-deltanet"))).trace(ids=TEXTS).layers[0].recurrence
    late_delta: Any = faults.decayed_late(delta)
    one, late_one = delta.between(0, 1), late_delta.between(0, 1)
    start = torch.randn(2, *delta.shape[2:], generator=torch.Generator().manual_seed(0))
    removed = ops.scan(replace(one, x=torch.zeros_like(one.x)), start).state
    expected = removed + one.log_a.exp()[:, 0, :, None] * (ops.scan(one, start).state - removed)
    assert torch.allclose(ops.scan(late_one, start).state, expected, rtol=1e-5, atol=1e-6)


def test_the_verb(analyze, refusal, tmp_path: Path) -> None:
    name, path = tmp_path / "model", tmp_path / "dump.safetensors"
    loud(random_example("mamba2")).save_pretrained(name)
    model = ssmscope.load(name)
    batch, rows = model.encode(ids=TEXTS[0][:8]), [(0, 1), (0, 4), (0, 7)]
    found = recorded_run(model, batch, rows, PARTS)
    save_file(found, path)
    same = analyze("parity", name, "--states", path)
    assert "is of the same model: 9 tensors agree" in " ".join(same.out.split()) and same.code == 0
    wrong = recorded_run(model, batch, rows, PARTS, [faults.fault_of_terms(faults.without_skip, 0)])
    save_file(wrong, path)
    answer = analyze("parity", name, "--layers", path, "--out", tmp_path / "out")
    told = " ".join(answer.out.split())
    assert answer.code == 1 and analyze("parity", name, "--layers", path, "--json").code == 1
    assert "first differs in the output of layer 0, after token 0" in told and "likely, D is forgotten" in told
    result = ssmscope.Result.load(tmp_path / "out" / "parity.json")
    assert result == ssmscope.Result.from_dict(json.loads(result.to_json()))
    frame = result.to_frame().set_index("tensor")
    assert frame.over["layers.0.output"] == 8 and frame.token["layers.0.output"] == str(TEXTS[0][0])
    assert frame.over["layers.0.state.0"] == 0 and frame.text.isna()["layers.0.state.0"]
    (axes,) = result.figure().axes
    agree, differ = axes.lines
    assert len(agree.get_xdata()) == (frame.over == 0).sum() > 0 and len(differ.get_xdata()) == (frame.over > 0).sum()
    assert [*agree.get_ydata()] == [axes.get_ylim()[0]] * len(agree.get_xdata())  # Errors of 0.
    assert [*differ.get_ydata()] == pytest.approx([*frame.error[frame.over > 0]])
    states = {key: t for key, t in wrong.items() if not key.endswith(("output", "residual", "logits"))}
    save_file(states, path)
    assert "D is forgotten in layer 0" in " ".join(analyze("parity", name, "--states", path).out.split())
    save_file({**found, "layers.1.state.0": found["layers.1.state.0"] / 0}, path)
    assert "likely, it overflowed" in " ".join(analyze("parity", name, "--states", path).out.split())
    save_file(states, path)
    assert "has no logits; it has" in refusal("parity", name, "--logits", path)
    assert "no file; give what the other runtime dumped, --states" in refusal("parity", name)
    assert "leave the files out" in refusal("parity", name, "--self", "--states", path)
    own = analyze("parity", name, "--self", "--json")
    differs = any(each["over"] for each in json.loads(own.out)["tensors"])
    assert own.code == int(differs) == int(ssmscope.parity(name, self_=True).failed)
    conv = found["layers.0.conv"]
    for change, said in (
        ({"layers.9.conv": conv.clone()}, "the file has layers.9.conv, which a run of"),
        ({"layers.0.conv": conv[:2]}, "layers.0.conv as float32 (2, 3, 72); it needs float32 (3, 3, 72)"),
        ({"layers.0.conv": conv.long()}, "layers.0.conv as int64 (3, 3, 72); it needs float32"),
        ({"tokens": torch.tensor([[99999] * 8])}, "99999"),
    ):
        save_file({**found, **change}, path)
        assert said in refusal("parity", name, "--states", path)
    save_file({**states, "tokens": states["tokens"].flip(1)}, tmp_path / "other.safetensors")
    save_file(found, path)
    with pytest.raises(InputError, match="has other tokens than the first file"):
        read_parts({"states": tmp_path / "other.safetensors", "logits": path, "layers": None})
    with pytest.raises(InputError, match="reads pixels; parity compares models of tokens"):
        ssmscope.parity(ssmscope.load("demo/cifar10-gla"), states=path)


SERVED = {
    row["model"]: row["modes"]
    for row in map(json.loads, (Path(__file__).parents[2] / "benchmarks/results/serving.jsonl").open(encoding="utf-8"))
    if row["transformers"].partition(".")[0] == transformers.__version__.partition(".")[0]
}
"""Modes of random models by name, as `benchmarks/serving.py` found them with this release of transformers."""


@pytest.mark.parametrize("name", few(SERVED, "mamba2-one-group", "jamba", "rwkv"))
def test_a_model_s_own_library_in_its_modes(name: str) -> None:
    """A script without this package shows each that differs."""
    found = ssmscope.parity(Model(random_example(name).eval()), self_=True).tensors
    over = {each.name.removeprefix("logits of "): each.over > 0 for each in found}
    assert over == {mode: "without" in each for mode, each in SERVED[name].items()} and len(over) > 7


def test_a_wrong_step_of_a_library_is_found() -> None:
    module = random_example("mamba2").eval()
    module.lm_head.register_forward_hook(lambda _, __, out: 1.01 * out if out.shape[1] == 1 else out)
    first = ssmscope.parity(Model(module), self_=True).first
    assert first is not None and first.name == "logits of cached steps" and first.position >= 36
    assert first.error == pytest.approx(0.01, rel=0.5)
    refuses("give a language model", ssmscope.parity, Model(random_example("selective-ssm-classes")), self_=True)


@pytest.mark.parametrize(
    ("fields", "library"), [({"d_model": 24, "n_layer": 2}, "mamba_ssm"), ({"model_type": "gla"}, "fla")]
)
def test_a_library_that_cannot_run_here_is_refused(fields: dict[str, Any], library: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(InputError, match=f"^{library}, which serves .*, cannot be run here .*machine with a GPU$"):
        ssmscope.parity(Model(random_example("mamba"), None, str(tmp_path)), self_=True)


def test_zamba2_s_chunks() -> None:
    """The slow path of older transformers sums the states of Zamba2's chunks over the wrong index; one chunk agrees."""
    mixer = Model(random_example("zamba2").double()).mixers[0]
    u = torch.randn(1, 19, mixer.in_proj.in_features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, off = mamba2.FORM.output(mixer, mamba2.compute_terms(mixer, u)), []
    for mixer.chunk_size in (32, 8):
        off.append(((mixer(u) - ours).abs().max() / ours.std()).item())
    assert off[0] < 1e-5 and (off[1] > 1e-4) != BY_WEIGHT


def test_the_guides_recipe_dumps_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' cached steps of Mamba-2, with its release 4."""
    model = ssmscope.load("demo/books-mamba2")
    cache = model.module(torch.tensor([[5]]), use_cache=True).cache_params
    if not hasattr(cache, "ssm_states"):
        pytest.skip("the recipe is for release 4 of transformers")
    ids = model.encode("He had never seen it .").input_ids
    guide = Path(package.__file__).with_name("guide.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0], {"network": model.module, "ids": ids})
    result = ssmscope.parity(model, states="dump.safetensors")
    assert result.first is None and len(result.tensors) == 14
