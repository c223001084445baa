"""The forward pass of a module, the hooks that run, and the mode of its parts."""

import sys
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from examples import random_example
from refusals import refusal
from torch import nn
from ssmscope.core import intercept
from ssmscope.core.edits import Edit, edited, new_state, recorded
from ssmscope.core.model import Model
from ssmscope.core.weights import as_constant, weights_constant

X = torch.tensor([[1.0, 2.0]])


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 3)


def test_a_forward_pass_is_its_own_if_it_is_its_classs_on_it():
    module, other = layer(), layer()
    assert intercept.is_own(module, module.forward) and not intercept.is_own(module, other.forward)
    assert not intercept.is_own(module, lambda x: x) and not intercept.is_own(module, module.extra_repr)
    assert not intercept.is_own(module, partial(module.forward))
    with intercept.override_forward([(module, lambda below, x: below(x))]):
        assert intercept.is_own(module, module.forward)  # beneath what a run puts on it
    module.forward = lambda x: x
    with intercept.override_forward([(module, lambda below, x: below(x))]):
        assert not intercept.is_own(module, module.forward) and intercept.is_changed(module)


def test_the_innermost_context_decides_and_a_kept_one_is_told():
    module, other = layer(), layer()
    first, second = (lambda below, x, more=more: below(x) + more for more in (1, 10))
    plain = module(X)
    assert intercept.active_override(module) is None and not intercept.is_kept(module)
    with intercept.override_forward([(module, first)], kept=True):
        assert intercept.active_override(module) is first and intercept.is_kept(module) and not intercept.is_kept(other)
        with intercept.override_forward([(module, second), (other, second)]):
            assert intercept.active_override(module) is second and not intercept.is_kept(module)
            assert torch.equal(module(X), plain + 10) and torch.equal(other(X), layer()(X) + 10)
            found: list = []
            thread = threading.Thread(target=lambda: found.append((intercept.active_override(module), module(X))))
            thread.start()
            thread.join()
            assert found[0][0] is None and torch.equal(found[0][1], plain)
        assert torch.equal(module(X), plain + 1) and "forward" not in vars(other)
    assert torch.equal(module(X), plain) and "forward" not in vars(module)
    own = module.forward = lambda x: 2 * x
    with intercept.override_forward([(module, first), (other, first)]):
        assert torch.equal(module(X), 2 * X + 1)
    assert vars(module)["forward"] is own


@pytest.mark.parametrize("names", [("_old_forward",), ("_hf_hook",), ("_old_forward", "_hf_hook")], ids=" and ".join)
def test_the_forward_pass_beneath_accelerates_is_overridden(names):
    """It is the pass that accelerate found and kept when it put its hook there; else the forward pass itself."""
    module, beneath = layer(), lambda x: 7 * x
    for name in names:
        setattr(module, name, beneath)
    own = dict(vars(module))
    with intercept.override_forward([(module, lambda below, x: below(x) + 1)]):
        if len(names) == 2:
            assert torch.equal(module._old_forward(X), 7 * X + 1) and "forward" not in vars(module)
        else:
            assert torch.equal(module(X), layer()(X) + 1)
    assert vars(module) == own


@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_constants_for_a_while(bias):
    """The weights are those of linear layers that run their own forward pass, in this thread; their input is no
    constant."""
    module, other = nn.Linear(2, 3, bias=bias), layer()
    other.forward = lambda x: nn.functional.linear(x, other.weight)
    x = X.clone().requires_grad_()
    plain = module(x)

    def gradients(y):
        found = torch.autograd.grad(y.square().sum(), [x, *module.parameters(), other.weight], allow_unused=True)
        return [gradient is not None for gradient in found]

    own = [True] * (1 + bias)
    assert gradients(plain) == [True, *own, False] and as_constant(module.weight) is module.weight
    with weights_constant(nn.Sequential(module, other)):
        assert torch.equal(module(x), plain) and gradients(module(x)) == [True, *(not each for each in own), False]
        assert gradients(module(input=x)) == [True, *own, False]
        assert gradients(other(x)) == [True, *(not each for each in own), True]
        assert not as_constant(module.weight).requires_grad
    assert gradients(module(x)) == [True, *own, False] and as_constant(module.weight).requires_grad


def test_hooks_of_others_are_told_from_a_runs_own():
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        module = layer()
        with intercept.observe(before=[(module, lambda *_: None)], after=[(module, lambda *_: None)]):
            assert not intercept.has_hooks(module) and not intercept.is_changed(module)
            getattr(module, register)(lambda *_: None)
            assert intercept.has_hooks(module) and intercept.is_changed(module)
        assert intercept.has_hooks(module)


def test_what_is_seen_may_be_changed():
    module = layer()
    plain = module(X)
    with intercept.observe(before=[(module, lambda part, args, kwargs: ((2 * args[0],), kwargs))]):
        assert torch.equal(module(X), module.forward(2 * X))
    with intercept.observe(after=[(module, lambda part, output: output + 1)]):
        assert torch.equal(module(X), plain + 1)
    assert torch.equal(module(X), plain)


def test_hooks_are_skipped_by_the_runs_that_ask_for_it():
    module, other, calls = layer(), layer(), []
    module.register_forward_pre_hook(lambda part, args: calls.append("before"))
    module.register_forward_hook(lambda part, args, y: (calls.append("after"), 2 * y)[1])
    own = [dict(hooks) for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    plain = module.forward(X)
    with intercept.unhooked([module, other]):
        with intercept.unhooked([module]):
            assert torch.equal(module(X), plain) and not calls and intercept.has_hooks(module)
        assert torch.equal(module(X), plain) and not calls
        thread = threading.Thread(target=module, args=(X,))
        thread.start()
        thread.join()
        assert calls == ["before", "after"]
    assert torch.equal(module(X), 2 * plain) and len(calls) == 4
    assert [dict(hooks) for hooks in (module._forward_pre_hooks, module._forward_hooks)] == own
    assert not intercept._skipping_runs[id(module)]


def test_a_twin_has_what_others_put_on_a_module_and_nothing_of_a_run():
    module = layer()
    module.register_forward_hook(lambda part, args, y: 2 * y)
    with (
        intercept.observe(after=[(module, lambda part, y: y + 100)]),
        intercept.override_forward([(module, lambda below, x: 0 * below(x))]),
    ):
        other = intercept.twin(module)
        assert type(other) is nn.Linear and other.weight is module.weight and "forward" not in vars(other)
        assert torch.equal(other(X), 2 * nn.functional.linear(X, module.weight, module.bias))
        assert not module(X).sub(100).any()

    def scaled(part, factor, x, more=0):
        return factor * nn.functional.linear(x, part.weight) + more

    module = layer()
    module.forward = partial(scaled, module, 5, more=3)
    other = intercept.twin(module)
    assert other.forward.args == (other, 5) and other.forward.keywords == {"more": 3}
    assert "_old_forward" not in vars(other)
    own = module.forward = lambda x: x
    assert intercept.twin(module).forward is own
    module.forward = partial(own)
    assert intercept.twin(module).forward is module.forward
    del module.forward
    module._old_forward = module.forward
    other = intercept.twin(module)
    assert other._old_forward.__self__ is other and "forward" not in vars(other)
    assert torch.equal(other._old_forward(X), module(X))


def test_inference_is_left_for_a_run_that_needs_gradients():
    with torch.inference_mode():
        with intercept.out_of_inference():
            assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
            with torch.enable_grad():
                assert (2 * torch.ones(1, requires_grad=True)).requires_grad
        assert torch.is_inference_mode_enabled()
    with intercept.out_of_inference():
        assert torch.is_grad_enabled()
    with torch.no_grad(), intercept.out_of_inference():
        assert not torch.is_grad_enabled()


def test_parts_have_their_modes_again_when_the_last_context_ends():
    module = nn.Sequential(layer(), nn.Dropout(), nn.Sequential(layer()))
    module[1].eval()
    modes = [part.training for part in module.modules()]
    inner, outer = intercept.evaluating(module[2]), intercept.evaluating(module)
    inner.__enter__()
    assert [part.training for part in module.modules()] == [True, True, False, False, False]
    outer.__enter__()
    assert not any(part.training for part in module.modules())
    inner.__exit__(None, None, None)
    assert not any(part.training for part in module.modules())
    outer.__exit__(None, None, None)
    assert [part.training for part in module.modules()] == modes
    assert not intercept._trained and not any(intercept._needed[id(part)] for part in module.modules())


def test_accelerates_hooks_are_taken_off_and_its_transfers_passed_over(monkeypatch):
    hooks = pytest.importorskip("accelerate.hooks")
    moved, offloaded, other, plain = (layer() for _ in range(4))
    hooks.add_hook_to_module(moved, hooks.AlignDevicesHook(torch.device("cpu")))
    hooks.add_hook_to_module(other, hooks.ModelHook())
    for module in (moved, other):
        assert not intercept.is_own(module, module.forward)
    hooks.add_hook_to_module(offloaded, hooks.AlignDevicesHook(torch.device("cpu"), offload=True, weights_map={}))
    assert intercept.forward_without_transfer(plain) == plain.forward and not intercept.is_changed(moved)
    assert intercept.forward_without_transfer(moved) is moved._old_forward and intercept.is_own(
        moved, intercept.forward_without_transfer(moved)
    )
    for module in (other, offloaded):
        assert intercept.forward_without_transfer(module) is module.forward and intercept.is_changed(module)
    model = nn.Sequential(moved, other)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "accelerate.hooks")
        assert intercept.remove_accelerate_hooks(model) is model and hasattr(moved, "_hf_hook")
        assert intercept.forward_without_transfer(moved) is moved.forward
    assert intercept.remove_accelerate_hooks(model) is model
    assert not hasattr(moved, "_hf_hook") and not hasattr(other, "_hf_hook") and not intercept.is_changed(other)


def test_what_is_compiled_in_place_is_named():
    module = nn.Sequential(layer(), nn.Sequential(layer()))
    assert refusal(intercept.check_plain, module, module.modules()) is None
    module[1][0].compile()
    said = "Sequential: 1.0 was compiled in place with .compile(), and its runs cannot be read"
    assert refusal(intercept.check_plain, module, module.modules()).startswith(said)
    assert refusal(intercept.check_plain, module, [module[0]]) is None
    module[0].compile()
    assert refusal(intercept.check_plain, module, module.modules()).startswith("Sequential: 0 was compiled in place")
    whole = nn.Sequential(layer())
    whole.compile()
    assert refusal(intercept.check_plain, whole, whole.modules()).startswith(
        "Sequential: the model was compiled in place"
    )
    quantised = torch.ao.nn.quantized.dynamic.Linear(2, 3)
    mixed = nn.Sequential(layer(), quantised)
    assert "Sequential: 1 is a Linear of torch.ao.nn.quantized.dynamic" in refusal(
        intercept.check_plain, mixed, mixed.modules()
    )


@pytest.mark.parametrize("place", ["convolution", "taps", "terms", "input"])
def test_an_edit_is_no_change_that_a_hook_makes(place):
    """A layer's terms are compared with its own forward pass without the edits of the run."""
    model = Model(random_example("mamba2"))
    batch = model.encode(ids=[[5, 17, 3, 9, 22, 1], [7, 8, 9]])

    def change(value, site):
        if place == "terms":
            return replace(value, recurrences=tuple(replace(r, c=3 * r.c) for r in value.recurrences))
        return value & (torch.arange(value.shape[-1]) != 1) if place == "taps" else 3 * value

    edit = Edit("changed", place, change)
    plain = model.run(batch).logits
    with edited(model, edit):
        expected, trace = model.run(batch).logits, model.trace(batch)
        maps = [each.attention() for each in trace.linearized]
    hooks = [part.register_forward_hook(lambda *_: None) for part in (model.mixers[0].act, model.mixers[1].conv1d)]
    with edited(model, edit):
        assert torch.equal(model.run(batch).logits, expected)
        again = model.trace(batch)
        for each, own in zip(again.linearized, maps, strict=True):
            torch.testing.assert_close(each.attention(), own, rtol=1e-4, atol=1e-6)
    for hook in hooks:
        hook.remove()
    assert (expected - plain).abs().max() > 1e-4


def test_a_trace_refuses_layers_and_edits_that_it_cannot_have():
    model = Model(random_example("mamba"))
    batch = model.encode(ids=[[5, 17, 3, 9]])
    assert refusal(model.trace, batch, keep_inputs=[9, 0, 3]) == (
        f"there is no layer 3; {model.name} has the layers 0 to {model.num_layers - 1}"
    )
    kept: dict = {}
    for edits in ([new_state(1, lambda state, site: state), recorded("output", kept)], [recorded("output", kept)]):
        with edited(model, edits):
            said = refusal(model.trace, batch)
        assert (said is not None) == (len(edits) == 2)
    trace = model.trace(batch, keep_inputs=[1])
    assert trace.layers[1].u.shape[:2] == (1, 4)
    with pytest.raises(ValueError, match="without the input of layer 0"):
        _ = trace.layers[0]


def test_layers_in_pieces_say_where_they_are():
    """States are changed after the first token and after the last but one; every layer is visited once."""
    model = Model(random_example("mamba"))
    batch, sites = model.encode(ids=[[5, 17, 3, 9, 22, 1]]), []

    def seen(place):
        def change(value, site):
            length = value.u.shape[1] if place == "terms" else None
            sites.append((place, site.layer, site.start, length))
            return value

        return Edit("seen", place, change, (1,), after={"state": 2}.get(place))

    found = model.run(batch, edits=[seen(place) for place in ("terms", "state", "convolution")])
    plain = model.run(batch)
    assert sites == [
        *(("convolution", 1, 0, None), ("terms", 1, 0, 3), ("state", 1, 3, None)),
        *(("convolution", 1, 3, None), ("terms", 1, 3, 3)),
    ]
    torch.testing.assert_close(found.logits, plain.logits, rtol=1e-4, atol=1e-6)
    assert len(found.states) == len(plain.states) == model.num_layers
    for ours, own in zip(found.states, plain.states):
        torch.testing.assert_close(ours.ssm[0], own.ssm[0], rtol=1e-4, atol=1e-6)
    for after, refused in ((0, False), (4, False), (5, True), (-1, False)):
        edit = new_state(after, lambda state, site: state, name="own")
        said = refusal(model.run, batch, edits=edit)
        allowed = "allowed are 0 to 4, and −1 for the end of a run that keeps states"
        assert said == (f"own: no token comes after token {after} of 6; {allowed}" if refused else None)
    both = [new_state(1, lambda state, site: state), recorded("scans", {})]
    assert refusal(model.run, batch, edits=both).startswith(
        "layer 0: a state and its scans cannot be edited in one run"
    )
    assert "x: there is no layer 2; the model has the layers 0 to 1" in refusal(
        model.run, batch, edits=Edit("x", "output", lambda value, site: value, (1, 2))
    )
