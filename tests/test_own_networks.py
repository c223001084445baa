"""Networks of one's own that do more around their layers, and adapters that say less than these compute."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused, refuses
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad
import ssmscope
from ssmscope.errors import InputError

ROWS = [[4, 9, 8, 1, 2, 6, 7, 5, 4]]


class Unit(nn.Module):
    """A minimal GRU, whose state is lost every `span` positions if there is one."""

    span = 0

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gate, self.candidate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, u: Tensor) -> Tensor:
        gate, candidate = self.gate(u).sigmoid(), self.candidate(u)
        h, found = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = torch.zeros_like(h) if self.span and t % self.span == 0 else h
            h = (1 - gate[:, t]) * h + gate[:, t] * candidate[:, t]
            found.append(h)
        return torch.stack(found, 1)


class Forgetful(Unit):
    span = 16


class Convolved(Unit):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)

    def forward(self, u: Tensor) -> Tensor:
        x = self.conv(self.candidate(u).mT)[..., : u.shape[1]].mT
        gate, h, found = self.gate(u).sigmoid(), torch.zeros_like(x[:, 0]), []
        for t in range(u.shape[1]):
            h = (1 - gate[:, t]) * h + gate[:, t] * x[:, t]
            found.append(h)
        return torch.stack(found, 1)


class Network(nn.Module):
    def __init__(self, make: type[nn.Module] = Unit, shift: int = 0, twice: bool = False) -> None:
        super().__init__()
        self.tokens, self.other, self.layer, self.head = (
            nn.Embedding(20, 8), nn.Embedding(20, 8), make(), nn.Linear(8, 20),
        )  # fmt: skip
        self.shift, self.twice = shift, twice

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + (self.other(ids) if self.twice else 0)
        late = pad(x, (0, 0, self.shift, 0))[:, : x.shape[1]] if self.shift else 0
        return self.head(x + self.layer(x + late))


def terms(layer: Any, u: Tensor) -> ssmscope.Recurrence:
    log_a = logsigmoid(-layer.gate(u)).unsqueeze(-1)
    b = -torch.expm1(log_a)
    return ssmscope.Recurrence(x=layer.candidate(u).unsqueeze(-1), b=b, c=torch.ones_like(b), log_a=log_a)


def convolved_terms(layer: Any, u: Tensor) -> ssmscope.Terms:
    source, log_a = layer.candidate(u), logsigmoid(-layer.gate(u)).unsqueeze(-1)
    x, b = layer.conv(source.mT)[..., : u.shape[1]].mT.unsqueeze(-1), -torch.expm1(log_a)
    return ssmscope.Terms(ssmscope.Recurrence(x=x, b=b, c=torch.ones_like(b), log_a=log_a), conv_input=source)


def network(*args: Any, **options: Any) -> Network:
    torch.manual_seed(0)
    found = Network(*args, **options)
    with torch.no_grad():
        for weight in found.parameters():
            weight.mul_(2)
    return found.eval()


@pytest.fixture(autouse=True)
def adapted() -> None:
    form = ssmscope.Form(values="candidate", out=None)
    ssmscope.adapt(Unit, terms=terms, form=form)
    ssmscope.adapt(Forgetful, terms=terms, form=form)


def test_of_two_embeddings_one_is_not_all() -> None:
    model = ssmscope.load(network(twice=True))
    assert ssmscope.heatmap(model.trace(ids=ROWS)).headline
    refuses("reads its tokens' ids besides their embeddings", ssmscope.explain, model, ROWS, methods=["gradxinput"])
    ssmscope.explain(ssmscope.load(network()), ROWS, methods=["gradxinput"])


@pytest.mark.parametrize("shift", [1, 2, 3, 5])
def test_a_network_that_shifts_tokens_does_not_continue_from_states(shift: int) -> None:
    module = network(shift=shift)
    model = ssmscope.load(module)
    assert not model.continues and ssmscope.load(network()).continues
    torch.testing.assert_close(model.logits(model.encode(ids=ROWS)), module(torch.tensor(ROWS)))


def test_a_layer_that_differs_late_is_refused() -> None:
    refuses("its terms and output do not give its own output", ssmscope.load, network(Forgetful))
    short = ssmscope.load(network(Forgetful), example=torch.tensor(ROWS))
    torch.testing.assert_close(short.logits(short.encode(ids=ROWS)), network(Forgetful)(torch.tensor(ROWS)))


def test_a_form_without_a_part_is_refused() -> None:
    whole = ssmscope.Form(values="candidate", convolution="conv", out=None)
    ssmscope.adapt(Convolved, terms=convolved_terms, form=whole, reach=3)
    ssmscope.load(network(Convolved))
    ssmscope.adapt(Convolved, terms=convolved_terms, form=ssmscope.Form(values="candidate", out=None), reach=3)
    refuses("the parts that its form names do not lead from its input to its output", ssmscope.load, network(Convolved))


def test_half_precision_is_read_in_single() -> None:
    half, whole = (ssmscope.load(network().to(dtype)).trace(ids=ROWS) for dtype in (torch.bfloat16, torch.float32))
    assert ssmscope.heatmap(half).headline and half.layers[0].recurrence.x.dtype == torch.float32
    torch.testing.assert_close(half.survival(), whole.survival(), atol=0.02, rtol=0)


WRONG: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "no terms": ({"terms": lambda layer, u: None}, "fails on the example (TypeError"),
    "no decay": (
        {"terms": lambda layer, u: ssmscope.Recurrence(x=u[..., None], b=u[..., None], c=u[..., None])},
        "give the decay once",
    ),
    "late terms": (
        {"terms": lambda layer, u: terms(layer, u[:, 1:])},
        "of (2, 39), where a Recurrence of 2 sequences of 40",
    ),
    "a list": ({"output": lambda layer, u, ys: ys}, "returns a list; it should return the layer's output"),
    "not finite": ({"output": lambda layer, u, ys: ys[0] / 0}, "do not give its own output"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_adapter_that_fails_is_refused_in_a_line(name: str) -> None:
    changed, said = WRONG[name]
    ssmscope.adapt(Unit, **{"terms": terms, "output": lambda layer, u, ys: ys[0], **changed})
    assert said in refused(ssmscope.load, network())


@pytest.mark.parametrize(("options", "said"), [
    ({"layers": ["layer"]}, "layers is ['layer']; give the path of one part"),
    ({"example": [[1, 2], [1]]}, "the example is a list that is no array"),
    ({"example": torch.zeros(0, 4, dtype=torch.long)}, "the example has no row"),
    ({"head": "tokens"}, "head='tokens' is a Embedding; give the path of the linear layer"),
])  # fmt: skip
def test_what_names_no_part_or_example_is_refused(options: dict[str, Any], said: str) -> None:
    assert said in refused(ssmscope.load, network(), **options)


@pytest.mark.parametrize("kind", [Unit(), nn.Linear, nn.Module])
def test_only_classes_of_ones_own_are_adapted(kind: Any) -> None:
    refuses("no class of layers of one's own", ssmscope.adapt, kind, terms=terms, output=lambda layer, u, ys: ys[0])


def test_a_position_beyond_the_tokens_that_a_module_is_tried_on() -> None:
    module = network()
    model = ssmscope.load(module, at=45, answer="position")
    ids = torch.arange(50)[None] % 20
    torch.testing.assert_close(model.logits(model.encode(ids=ids)), module(ids)[:, 45])


class Placed(nn.Module):
    """A classifier that adds learnt positions: those of an embedding, or its own."""

    def __init__(self, embedded: bool) -> None:
        super().__init__()
        self.tokens, self.layer, self.head = nn.Embedding(20, 8), Unit(), nn.Linear(8, 3)
        self.places = nn.Embedding(50, 8) if embedded else nn.Parameter(torch.randn(50, 8))

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places if isinstance(self.places, nn.Parameter) else self.places.weight
        added = places[: ids.shape[1]] if self.places is places else self.places(torch.arange(ids.shape[1]))
        x = self.tokens(ids) + added
        return self.head((x + self.layer(x)).mean(1))


def test_positions_are_constants_of_the_relevance() -> None:
    torch.manual_seed(0)
    module = Placed(True).eval()
    found = ssmscope.explain(ssmscope.load(module), ROWS, methods=["lrp"])[0].attributions[0]
    assert found.delta < 1e-4 and np.abs(found.scores).max() > 0.01
    other = Placed(False).eval()
    other.load_state_dict({name.replace("places.weight", "places"): t for name, t in module.state_dict().items()})
    with pytest.raises(
        InputError, match="of its own uses Placed.places; positions are read if an nn.Embedding"
    ) as error:
        ssmscope.explain(ssmscope.load(other), ROWS, methods=["lrp"])
    assert "\n" not in str(error.value)


class OwnNorm(nn.Module):
    """A norm of one's own code, with names of its own."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(like.weight.data), getattr(like, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.beta is None else x - x.mean(-1, keepdim=True)
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-2).rsqrt() * self.gamma + (
            0 if self.beta is None else self.beta
        )


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def test_norms_and_scales_of_ones_own_are_read_by_what_they_compute() -> None:
    for make in (nn.RMSNorm, nn.LayerNorm):
        torch.manual_seed(0)
        theirs = make(8, eps=1e-2)
        for weight in theirs.parameters():
            weight.data = torch.randn(8)
        scores = []
        for norm in (theirs, OwnNorm(theirs)):
            torch.manual_seed(1)
            module = nn.Sequential(nn.Embedding(20, 8), norm, Unit(), Scale(), nn.Linear(8, 20)).eval()
            (found,) = ssmscope.explain(ssmscope.load(module), ROWS[:1], methods=["lrp"])[0].attributions
            assert found.delta < 1e-4 and np.abs(found.scores).max() > 0.01
            scores.append(found.scores)
        np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-5)


class Halving(nn.Module):
    """A U-Net: a stage at every step, one at every second, and one at every step again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down, self.up = nn.Linear(3, 8), nn.Conv1d(8, 8, 2, 2), nn.ConvTranspose1d(8, 8, 2, 2)
        self.first, self.middle, self.last, self.head = Unit(), Unit(), Unit(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + self.first(x)
        y = self.down(x.mT).mT
        x = x + self.up((y + self.middle(y)).mT).mT
        return self.head(x + self.last(x))


def test_stages_of_another_length_are_read_apart_or_refused() -> None:
    torch.manual_seed(0)
    module, x = Halving().eval(), torch.randn(2, 12, 3)
    load = lambda **options: ssmscope.load(module, inputs="floats", example=x, at=-1, **options)  # noqa: E731
    for options, advice in (({}, "layers=…"), ({"layers": "middle"}, "windows of 2 steps")):
        refuses(f"middle of Halving reads 6 positions where .* has 12: give {advice}", load, **options)
    for stage in ("first", "last"):
        model = load(layers=stage)
        torch.testing.assert_close(model.logits(model.encode(x)), module(x)[:, -1])
        own: list[Tensor] = []
        hook = getattr(module, stage).register_forward_hook(lambda layer, args, y: own.append(args[0]))  # noqa: B023
        module(x)
        hook.remove()
        held = 1 - getattr(module, stage).gate(own[0]).sigmoid()
        torch.testing.assert_close(model.trace(x).retention[0], held.mean(-1))
        assert not model.continues and ssmscope.knockout(model, x[:1], from_="2").headline
        refuses("are not read, and lrp needs all of them", ssmscope.explain, model, x[:1], methods=["lrp"])


class Strided(nn.Module):
    """Sound: every four samples make a position of the layer, and the answer is a mean over those of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layer, self.head = nn.Conv1d(1, 8, 4, 4), Unit(), nn.Linear(8, 3)

    def forward(self, sound: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.enter(sound.mT).mT
        x = x + self.layer(x)
        return self.head(x.mean(1) if mask is None else (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True))


def test_windows_are_the_steps_of_a_network_that_reads_them_as_one() -> None:
    torch.manual_seed(0)
    module, sound = Strided().eval(), torch.randn(2, 48, 1)
    said = r"reads 12 positions .* has 48: give windows of 4 steps as one step, .*inputs="
    refuses(said, ssmscope.load, module, inputs=lambda sound: (sound, None), example=sound)
    windows = sound.reshape(2, 12, 4)
    whole = lambda w: (w.reshape(len(w), -1, 1), w.new_ones(w.shape[:2]))  # noqa: E731
    model = ssmscope.load(module, inputs=whole, example=windows)
    torch.testing.assert_close(model.logits(model.encode(windows)), module(sound))
    (found,) = ssmscope.explain(model, windows[:1], methods=["gradxinput"], target=1)[0].attributions
    given = sound[:1].clone().requires_grad_()
    module(given)[0, 1].backward()
    assert given.grad is not None
    np.testing.assert_allclose(found.channels.ravel(), (given * given.grad).detach().ravel(), atol=1e-6)


def test_a_module_that_reads_one_length_alone() -> None:
    """A forecaster whose head reads all steps side by side."""
    torch.manual_seed(0)
    layer = Unit()

    class Forecaster(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = layer, nn.Linear(10 * 8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x).flatten(1))

    module, x = Forecaster().eval(), torch.randn(3, 10, 8)
    model = ssmscope.load(module, inputs="floats", example=x, labels=list("abcd"))
    torch.testing.assert_close(model.logits(model.encode(x)), module(x))
    assert not model.continues and ssmscope.explain(model, x[:1], methods=["lrp"])[0].attributions[0].delta < 1e-4
    refuses("cannot be run on 6 positions .*: give inputs as long as .* 10", model.logits, model.encode(x[:, :6]))


class Dropping(Unit):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, u: Tensor) -> Tensor:
        return self.dropout(super().forward(u))


def test_a_module_in_training_is_read_as_in_evaluation() -> None:
    module = network(Dropping)
    expected = module(torch.tensor(ROWS)).detach()
    model = ssmscope.load(module.train())
    torch.testing.assert_close(model.logits(model.encode(ids=ROWS)), expected)
    torch.testing.assert_close(model.trace(ids=ROWS).logits, expected[:, -1])
    scores = [ssmscope.explain(model, ROWS, methods=["gradxinput"])[0].attributions[0].scores for _ in range(2)]
    assert np.array_equal(*scores) and np.abs(scores[0]).max() > 0


class Tied(nn.Module):
    """Two layers of the same weights, and a head of the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers, self.head = (
            nn.Embedding(20, 8),
            nn.ModuleList([Unit(), Unit()]),
            nn.Linear(8, 20, bias=False),
        )
        self.layers[1].gate, self.layers[1].candidate = self.layers[0].gate, self.layers[0].candidate
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_layers_that_share_weights_are_read_each_by_itself() -> None:
    torch.manual_seed(0)
    module = Tied().eval()
    model, ids = ssmscope.load(module), torch.tensor(ROWS)
    torch.testing.assert_close(model.logits(model.encode(ids=ids)), module(ids))
    x = module.tokens(ids)
    for layer, held in zip(module.layers, model.trace(ids=ids).retention):
        torch.testing.assert_close(held, 1 - layer.gate(x).sigmoid().mean(-1))
        x = x + layer(x)
    assert ssmscope.explain(model, ROWS, methods=["lrp"])[0].attributions[0].delta < 1e-4
    module.layers[1] = module.layers[0]
    refuses("2 times for a text; once can be read", ssmscope.load, module)
