"""Models that somebody observes or changes: they give what their own forward pass gives, or a refusal. Every part of
every architecture gets hooks; a refusal names the part."""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from examples import FEW, random_example, relative
from exhaustive import ALL, half, in_turns
from loud import loud
from refusals import refuses
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from ssmscope.core.mixers import adapter_for, mixers
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.methods.gradients import gradxinput
from ssmscope.interp.methods.lrp import lrp
from ssmscope.interp.objective import objective
from ssmscope.layers.parts import BY_WEIGHT

TEXTS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5, 8, 14, 33, 71, 2], [7, 8, 9]]
LATE_POSITION = 14  # after all positions of a layer's own trial


def own_logits(model: Model, batch: Any) -> Tensor:
    """Return the logits of the library's own forward pass, at real positions."""
    without = {} if model.is_classifier else {"use_cache": False}
    with torch.no_grad():
        found = model.module(input_ids=batch.input_ids, attention_mask=batch.mask.long(), **without).logits
    return found if model.is_classifier else found[batch.mask]


def read_logits(model: Model, batch: Any) -> Tensor:
    found = model.logits(batch)
    return found if model.is_classifier else found[batch.mask]


def kinds_of_parts(module: nn.Module) -> dict[str, list[nn.Module]]:
    """The parts of a model by their names without numbers, each kind in all layers."""
    found: dict[str, list[nn.Module]] = {}
    for name, part in module.named_modules():
        if name and not isinstance(part, nn.ModuleList):
            found.setdefault(re.sub(r"\.\d+", "", name), []).append(part)
    return found


def on_first(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """A change of a tensor of numbers, or of the first of several."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple) and value:
            return (changed(value[0]), *value[1:])
        return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    return changed


def doubled_late(t: Tensor) -> Tensor:
    """Double the entries at a late position, along whichever dimension is as long as the text."""
    along = [dim for dim, size in enumerate(t.shape) if size == len(TEXTS[0])]
    scale = torch.ones(len(TEXTS[0])).index_fill(0, torch.tensor(LATE_POSITION), 2.0)
    return t * scale.view(-1, *[1] * (t.ndim - 1 - along[0])) if along else t


@contextmanager
def hooked(parts: list[nn.Module], way: str) -> Iterator[None]:
    louder, late = on_first(lambda t: 1.3 * t), on_first(doubled_late)
    put: dict[str, Callable[[nn.Module], list[Any]]] = {
        "read": lambda part: [
            part.register_forward_hook(lambda *_: None),
            part.register_forward_pre_hook(lambda *_: None),
            part.register_forward_hook(lambda *_, **__: None, with_kwargs=True, always_call=True),
        ],
        "output": lambda part: [part.register_forward_hook(lambda module, args, y: louder(y))],
        "late": lambda part: [part.register_forward_hook(lambda module, args, y: late(y))],
        "input": lambda part: [part.register_forward_pre_hook(lambda module, args: louder(args))],
    }
    handles = [handle for part in parts for handle in put[way](part)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_maps(model: Model, batch: Any, layers: Sequence[int]) -> None:
    """A trace's logits are the model's, and its linear maps the layers' outputs."""
    trace = model.trace(batch, keep_inputs=layers)
    last = model.logits(batch)
    last = last if model.is_classifier else last[torch.arange(len(last)), batch.mask.sum(1) - 1]
    assert relative(trace.logits, last) < 1e-5
    for index in layers:
        mixer, layer, linearized = model.mixers[index], trace.layers[index], trace.linearized[index]
        with torch.no_grad():
            found = linearized.matvec(linearized.u) + linearized.bias
            assert relative(found[trace.mask], adapter_for(mixer).output(mixer, layer)[trace.mask]) < 1e-4


def relevance(model: Model, batch: Any) -> Tensor | None:
    """Relevance by layer-wise propagation; None for an architecture that it does not know."""
    try:
        return lrp(objective(model, batch, target=1)).scores
    except InputError:
        return None


def test_hooks_that_read_change_nothing(model):
    batch = model.encode(ids=TEXTS)
    before, scores = read_logits(model, batch), relevance(model, batch)
    with hooked([part for part in model.module.modules() if not isinstance(part, nn.ModuleList)], "read"):
        found, own = read_logits(model, batch), own_logits(model, batch)
        assert relative(found, own) < 1e-5 and relative(found, before) < 1e-5
        check_maps(model, batch, [model.num_layers - 1])
        if scores is not None:
            assert relative(relevance(model, batch), scores) < 1e-3


WAYS = ("output", "input", "late")


def test_hooks_that_change_are_computed_through_or_refused(model, request):
    """A third of the kinds of parts in one way, in turn; with SSMSCOPE_EXHAUSTIVE=all every kind in every one."""
    batch = model.encode(ids=TEXTS)
    plain, inside = own_logits(model, batch), {part for mixer in model.mixers for part in mixer.modules()}
    changed = seen = 0
    for number, (kind, parts) in enumerate(half(kinds_of_parts(model.module).items(), request.node.name, of=3)):
        for way in WAYS if ALL else (WAYS[number % len(WAYS)],):
            if way == "late" and ".experts." in kind:
                continue  # An expert gets chosen tokens alone, whose number may be a text's length by chance.
            with hooked(parts, way):
                expected = own_logits(model, batch)
                if not expected.isfinite().all():
                    continue
                changed += relative(expected, plain) > 1e-3
                try:
                    assert relative(read_logits(model, batch), expected) < 1e-4, (kind, way)
                    seen += relative(expected, plain) > 1e-3
                    if inside & set(parts):
                        check_maps(model, batch, [0])
                except InputError as error:
                    assert kind.rpartition(".")[2] in str(error) and "\n" not in str(error), f"{kind}: {error}"
    assert seen >= changed / 2 > 0


def each(module: nn.Module, *kinds: type[nn.Module]) -> list[Any]:
    return [part for mixer in mixers(module) for part in mixer.modules() if type(part) in kinds]


def prune_all(module: nn.Module) -> None:
    for part in each(module, nn.Linear, nn.Conv1d):
        prune.l1_unstructured(part, "weight", amount=0.3)


def prune_and_train(module: nn.Module) -> None:
    """The attribute `weight` is that of the last forward pass."""
    prune_all(module)
    for part in each(module, nn.Linear, nn.Conv1d):
        part.weight_orig.data.mul_(1.2)


def norm_weights(module: nn.Module) -> None:
    for part in each(module, nn.Linear, nn.Conv1d):
        nn.utils.weight_norm(part)


def parametrise(module: nn.Module) -> None:
    for part in each(module, nn.Linear, nn.Conv1d):
        parametrizations.weight_norm(part)
        part.parametrizations.weight.original0.data.mul_(1.2)


def scale(module: nn.Module, kind: Any = nn.Linear) -> None:
    forward = {"forward": lambda self, x: 1.5 * kind.forward(self, x)}
    for part in each(module, kind):
        part.__class__ = type("Scaled", (kind,), forward)


def scale_convolutions(module: nn.Module) -> None:
    scale(module, nn.Conv1d)


def replace_activations(module: nn.Module) -> None:
    for mixer in mixers(module):
        for name, part in list(mixer.named_children()):
            if type(part).__name__ in ("SiLUActivation", "SiLU"):
                setattr(mixer, name, nn.GELU())


CHANGES = [prune_all, prune_and_train, norm_weights, parametrise, scale, scale_convolutions, replace_activations]


@pytest.mark.parametrize("name, change", in_turns(FEW, CHANGES, of=3))
def test_changed_weights_and_classes_are_computed_through_or_refused(name, change):
    module = loud(random_example(name))
    change(module)
    model = Model(module)
    batch = model.encode(ids=TEXTS)
    try:
        found = read_logits(model, batch)  # before the library's, which sets the weights anew
        assert relative(found, own_logits(model, batch)) < 1e-4
        check_maps(model, batch, [0])
    except InputError as error:
        assert re.search("conv|dt_proj", str(error)) and BY_WEIGHT, str(error)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gated-deltanet", "rwkv", "bamba", "baleen-b-mamba"])
def test_a_mixer_of_a_class_made_from_one_is_read_as_it_or_refused(name):
    module = loud(random_example(name))
    mixer, expected = mixers(module)[1], Model(loud(random_example(name))).trace(ids=TEXTS)
    kind, factor = type(mixer), 1.0

    def forward(self, *args, **kwargs):
        y = kind.forward(self, *args, **kwargs)
        return (factor * y[0], *y[1:]) if isinstance(y, tuple) else factor * y

    mixer.__class__ = type("Own", (kind,), {"forward": forward})
    model = Model(module)
    found = model.trace(ids=TEXTS)
    assert model.num_layers == 2 and relative(found.logits, expected.logits) < 1e-5
    torch.testing.assert_close(found.retention, expected.retention, equal_nan=True)
    factor = 1.5
    for run in (lambda: model.trace(ids=TEXTS), lambda: lrp(objective(model, model.encode(ids=TEXTS), target=1))):
        refuses("layer 1|layer 0 of Own|^Own.* it make", run)


ACTIVATIONS = ("hidden_act", "hidden_mamba_act", "mamba_hidden_act")


def test_activations_are_those_of_the_configuration(module):
    """Release 5 of transformers has the gate of a Mamba always SiLU, 4.57 as the rest."""
    config = copy.deepcopy(module.config)
    named = [name for name in ACTIVATIONS if hasattr(config, name)]
    if not named:
        pytest.skip("this architecture names no activation")
    for name in named:
        setattr(config, name, "gelu")
    torch.manual_seed(0)
    other = loud(type(module)(config))
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if parameter.ndim > 1 and "A_log" not in name:
                nn.init.normal_(parameter, std=0.3)
    model = Model(other)
    batch = model.encode(ids=TEXTS)
    assert relative(read_logits(model, batch), own_logits(model, batch)) < 1e-4
    check_maps(model, batch, [0])


@pytest.mark.parametrize("part", ["conv1d", "act", "in_proj", "x_proj"])
def test_a_hook_of_the_backward_pass_is_run_or_refused(part):
    module = loud(random_example("mamba"))
    model, ids = Model(module), [TEXTS[0]]
    plain = objective(model, model.encode(ids=ids), target=1)
    before = gradxinput(plain).scores
    handles = [getattr(mixer, part).register_full_backward_hook(lambda *_: None) for mixer in model.mixers]
    assert relative(gradxinput(plain).scores, before) < 1e-4
    for handle in handles:
        handle.remove()
    for mixer in model.mixers:
        getattr(mixer, part).register_full_backward_hook(lambda module, inputs, outputs: tuple(2 * g for g in inputs))
    embeddings = module.get_input_embeddings()(torch.tensor(ids)).detach().requires_grad_()
    (own,) = torch.autograd.grad(module(inputs_embeds=embeddings, use_cache=False).logits[0, -1, 1], embeddings)
    try:
        found = gradxinput(plain).scores
    except InputError as error:
        assert part in str(error)
        return
    assert relative(found, (own * embeddings).sum(-1).detach()) < 5e-3
