"""Parity: faults put into one layer are found there and named; runs that only round otherwise are not."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from examples import random_example
from loud import loud
from safetensors.torch import save_file

import ssmscope
from ssmscope import ops
from ssmscope.core.edits import Edit
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerState, joined, tensors
from ssmscope.errors import InputError
from ssmscope.layers import mamba2
from ssmscope.probes import parity as package
from ssmscope.probes.parity import faults
from ssmscope.probes.parity.measure import compared, read_parts
from ssmscope.probes.states.files import recorded_run, tensor_names

PARTS = ("states", "logits", "layers")
ROWS = [(0, 4), (0, 8), (0, 13), (0, 25), (1, 5), (1, 11), (1, 18)]
TEXTS = [torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (26, 19)]
Dump = dict[str, torch.Tensor]


def in_pieces(model: Model, layer: int, change: Callable[[LayerState], LayerState], cut: int | None = None) -> Dump:
    """States of runs of one token after the other, or of two pieces with a cut, between which a layer's are changed."""
    kept = []
    for text, ids in enumerate(TEXTS):
        states: Any = None
        ends = {position + 1 for own, position in ROWS if own == text}
        start = 0
        for stop in range(1, len(ids) + 1) if cut is None else sorted({*ends, cut}):
            after = list(model.run(model.encode(ids=ids[start:stop]), states).states)
            if cut is None or stop == cut:
                after[layer] = change(after[layer])
            states, start = tuple(after), stop
            kept += [states] * (stop in ends)
    every = joined(kept)
    found = dict(zip(tensor_names(model, every), tensors(every)))
    return {"rows": torch.tensor(ROWS), **found}


def of_terms(change: Callable[[Any], Any]) -> Callable[[Model, int], Dump]:
    return lambda model, layer: run(model, faults.fault_of_terms(change, layer))


def run(model: Model, *edits: Edit) -> Dump:
    return recorded_run(model, model.encode(ids=TEXTS), ROWS, PARTS, edits)


def unmasked(model: Model, layer: int) -> Dump:
    """The layer read something before every text."""

    def change(terms: Any, _: Any) -> Any:
        return replace(terms, initial=tuple(ops.scan(r.between(1, 4)).state for r in terms.recurrences))

    return run(model, Edit("unmasked", "terms", change, (layer,)))


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
        lambda model, at: in_pieces(model, at, lambda s: replace(s, conv=torch.zeros_like(s.conv)), 7),
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
HAVE = {
    "mamba2": "mask late tail order heads groups A D dtype",
    "mamba": "mask tail D",
    "jamba": "late A",
    "gated-deltanet": "mask order",
}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, own in HAVE.items() for fault in own.split()])
def test_a_fault_is_found_and_named(name: str, fault: str) -> None:
    model = Model(loud(random_example(name)))
    layer = sum((name + fault).encode()) % model.num_layers
    inject, said = FAULTS[fault]
    found, named = compared(model, model.encode(ids=TEXTS), ROWS, inject(model, layer), torch.float32)
    first = next(each for each in found if each.over)
    assert first.name.startswith(f"layers.{model.layer_numbers[layer]}.") and first.times > 5
    assert said in named
    assert not any(each.over for each in found[: found.index(first)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mamba2", "jamba", "retnet"])
def test_another_order_of_the_same_sums_is_no_fault(name: str, dtype: torch.dtype) -> None:
    model = Model(loud(random_example(name)))
    other = replace(model, module=copy.deepcopy(model.module).to(dtype))
    found, named = compared(model, model.encode(ids=TEXTS), ROWS, in_pieces(other, 0, lambda s: s), dtype)
    assert named == "" and 0 < max(each.times for each in found) <= 1
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
    name, path = "demo/books-mamba2", tmp_path / "dump.safetensors"
    model = ssmscope.load(name)
    batch = model.encode("He had never seen the old house .")
    rows = [(0, 1), (0, 4), (0, 7)]
    found = recorded_run(model, batch, rows, PARTS)
    save_file(found, path)
    assert "is of the same model: 29 tensors agree" in analyze("parity", name, "--states", path).out
    wrong = recorded_run(model, batch, rows, PARTS, [faults.fault_of_terms(faults.without_skip, 2)])
    save_file(wrong, path)
    answer = analyze("parity", name, "--layers", path, "--out", tmp_path / "out")
    told = " ".join(answer.out.split())
    assert "first differs in the output of layer 2, after token 0" in told and "likely, D is forgotten" in told
    result = ssmscope.Result.load(tmp_path / "out" / "parity.json")
    assert result == ssmscope.Result.from_dict(json.loads(result.to_json()))
    frame = result.to_frame().set_index("tensor")
    assert frame.over["layers.2.output"] == 8 and frame.token["layers.2.output"].strip() == "He"
    assert frame.over["layers.2.state.0"] == 0 and frame.text.isna()["layers.0.output"]
    states = {
        key: value for key, value in wrong.items() if not key.endswith((".output", ".residual")) and key != "logits"
    }
    save_file(states, path)
    assert "D is forgotten in layer 2" in " ".join(analyze("parity", name, "--states", path).out.split())
    assert "has no logits; it has" in refusal("parity", name, "--logits", path)
    assert "no file; give what the other runtime dumped, --states" in refusal("parity", name)
    for change, said in (
        ({"layers.9.conv": found["layers.0.conv"].clone()}, "the file has layers.9.conv, which a run of"),
        ({"layers.0.conv": found["layers.0.conv"][:2]}, "of the shape (2, 3,"),
        ({"tokens": torch.tensor([[99999] * 8])}, "99999"),
    ):
        save_file({**found, **change}, path)
        assert said in refusal("parity", name, "--states", path)
    save_file({**states, "tokens": states["tokens"].flip(1)}, tmp_path / "other.safetensors")
    save_file(found, path)
    with pytest.raises(InputError, match="has other tokens than the first file"):
        read_parts({"states": tmp_path / "other.safetensors", "logits": path, "layers": None})
    assert "reads pixels; parity compares models of tokens" in refusal("parity", "demo/cifar10-gla", "--states", path)


def test_a_model_s_own_library_in_its_modes(analyze, refusal) -> None:
    """Release 4 of transformers reads left padding of Mamba-2 in a batch of one."""
    release = transformers.__version__.partition(".")[0]
    result = ssmscope.parity(ssmscope.load("demo/books-mamba2"), self_=True)
    over = [each.name for each in result.tensors if each.over]
    alone = ["logits of left padding, alone"] if release == "4" else []
    assert over == ["logits of a prefix reused", *alone]
    names = [each.name.removeprefix("logits of ") for each in result.tensors]
    assert names[:2] == ["one pass", "one pass in bfloat16"] and "prefill in chunks" not in names
    wrong = ssmscope.load("demo/books-mamba2")
    wrong.module.lm_head.register_forward_hook(lambda _, __, out: 1.01 * out if out.shape[1] == 1 else out)
    found = ssmscope.parity(wrong, self_=True)
    assert found.first is not None and found.first.name == "logits of cached steps" and found.first.position >= 36
    assert found.first.error == pytest.approx(0.01, rel=0.5)
    assert "leave the files out" in refusal("parity", "demo/books-mamba2", "--self", "--states", "x")
    assert "give a language model" in refusal("parity", "demo/sst2-mamba2", "--self")


@pytest.mark.parametrize(
    ("fields", "library"), [({"d_model": 24, "n_layer": 2}, "mamba_ssm"), ({"model_type": "gla"}, "fla")]
)
def test_a_library_that_cannot_run_here_is_refused(fields: dict[str, Any], library: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(InputError, match=f"^{library}, which serves .*, cannot be run here .*machine with a GPU$"):
        ssmscope.parity(Model(random_example("mamba"), None, str(tmp_path)), self_=True)


def test_zamba2_s_chunks_by_hand() -> None:
    """Release 4 of transformers sums the states of Zamba2's chunks over the wrong index; plain loops agree with us."""
    mixer = Model(random_example("zamba2").double()).mixers[0]
    u = torch.randn(1, 19, mixer.in_proj.in_features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mixer.chunk_size = 8
    inner, heads, width, size = mixer.intermediate_size, mixer.num_heads, mixer.head_dim, mixer.ssm_state_size
    found, state = [], torch.zeros(heads, width, size, dtype=torch.float64)
    with torch.no_grad():
        z, xBC, step = mixer.in_proj(u)[0].split([inner, mixer.conv_dim, heads], dim=-1)
        taps = mixer.conv1d.weight[:, 0]
        for t in range(u.shape[1]):
            seen = sum(taps[:, -1 - k] * xBC[t - k] for k in range(min(taps.shape[1], t + 1))) + mixer.conv1d.bias
            x, b, c = torch.nn.functional.silu(seen).split([inner, *[mixer.n_groups * size] * 2])
            y = torch.empty(heads, width, dtype=torch.float64)
            for h in range(heads):
                group = slice(h // (heads // mixer.n_groups) * size, (h // (heads // mixer.n_groups) + 1) * size)
                delta = torch.nn.functional.softplus(step[t, h] + mixer.dt_bias[h])
                delta = delta.clamp(min=mixer.config.time_step_min)
                own = x[h * width : (h + 1) * width]
                state[h] = (-delta * mixer.A_log[h].exp()).exp() * state[h] + delta * own[:, None] * b[group]
                y[h] = state[h] @ c[group] + mixer.D[h] * own
            found.append(mixer.out_proj(mixer.norm(y.flatten()[None, None], z[t][None, None]))[0, 0])
        expected = torch.stack(found)
        ours = mamba2.FORM.output(mixer, mamba2.compute_terms(mixer, u))[0]
        theirs = mixer(u)
    assert torch.allclose(ours, expected, rtol=1e-6, atol=1e-6)
    off = float((theirs - expected).abs().max() / expected.std())
    assert (off > 1e-4) == (transformers.__version__ < "5")


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
