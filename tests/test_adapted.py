"""Layers and networks that people write themselves: read as exactly as those of libraries, or refused in a line."""

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loud import loud
from refusals import refuses
from torch import Tensor, nn
from torch.nn import functional
from transformers import MambaConfig, MambaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
import ssmscope
from ssmscope import Form, InputError, Recurrence, Terms, testing
from ssmscope.core.mixers import adapter_for, is_readable

ROWS = [[4, 9, 8, 1, 2, 6, 7, 5, 4], [3, 5, 7, 1, 2], [11]]
TEXT = ROWS[0]


class Block(nn.Module):
    """A layer on the residual stream."""

    def __init__(self, mixer: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(width), mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Network(nn.Module):
    """Embedding, layers and a head that reads the mean over positions, or every one."""

    def __init__(
        self, make: Callable[[int], nn.Module], outputs: int = 3, pooled: bool = True, layers: int = 2
    ) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(30, 12), nn.Linear(12, outputs)
        self.blocks, self.pooled = nn.Sequential(*(Block(make(12), 12) for _ in range(layers))), pooled

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.tokens(ids))
        return self.head(x.mean(1) if self.pooled else x)


class PlainMamba(nn.Module):
    """Mamba's layer as people write it, step by step, with a bias on every part."""

    def __init__(self, width: int, states: int = 8, rank: int = 4, taps: int = 4) -> None:
        super().__init__()
        inner = 2 * width
        self.sizes = [rank, states, states]
        self.in_proj, self.out_proj = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.x_proj, self.dt_proj = nn.Linear(inner, sum(self.sizes), bias=False), nn.Linear(rank, inner)
        self.conv1d = nn.Conv1d(inner, inner, taps, groups=inner, padding=taps - 1)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).repeat(inner, 1).log())
        self.D = nn.Parameter(torch.ones(inner))

    def forward(self, u: Tensor) -> Tensor:
        x, z = self.in_proj(u).chunk(2, -1)
        x = functional.silu(self.conv1d(x.mT)[..., : u.shape[1]].mT)
        step, B, C = self.x_proj(x).split(self.sizes, -1)
        step = functional.softplus(self.dt_proj(step))
        H, found = u.new_zeros(len(u), *self.A_log.shape), []
        for t in range(u.shape[1]):
            H = torch.exp(-step[:, t, :, None] * self.A_log.exp()) * H + (step * x)[:, t, :, None] * B[:, t, None]
            found.append((H * C[:, t, None]).sum(-1))
        return self.out_proj((torch.stack(found, 1) + self.D * x) * functional.silu(z))


def mamba_terms(mixer: Any, u: Tensor) -> Terms:
    source, z = mixer.in_proj(u).chunk(2, -1)
    x = functional.silu(mixer.conv1d(source.mT)[..., : u.shape[1]].mT)
    step, B, C = mixer.x_proj(x).split(mixer.sizes, -1)
    delta = functional.softplus(mixer.dt_proj(step))
    terms = Recurrence(x.unsqueeze(-1), B.unsqueeze(2), C.unsqueeze(2), delta, -mixer.A_log.exp(), D=mixer.D)
    return Terms(terms, conv_input=source, z=z)


def mamba_output(mixer: Any, u: Tensor, ys: list[Tensor]) -> Tensor:
    return mixer.out_proj(ys[0] * functional.silu(mixer.in_proj(u).chunk(2, -1)[1]))


FORM = Form(
    values=lambda mixer, layer: lambda u, biased: half(mixer, u, biased, 0),
    gate=lambda mixer, layer: lambda u, biased: half(mixer, u, biased, 1),
    convolution="conv1d",
    activation="silu",
)


def half(mixer: Any, u: Tensor, biased: bool, which: int) -> Tensor:
    weight, bias = (each.chunk(2)[which] for each in (mixer.in_proj.weight, mixer.in_proj.bias))
    return functional.linear(u, weight, bias if biased else None)


class Formed(PlainMamba):
    """The same layer, of a class that is adapted by a form."""


class MinGRU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.z, self.h = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, u: Tensor) -> Tensor:
        z, candidates = self.z(u).sigmoid(), self.h(u)
        h, found = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = (1 - z[:, t]) * h + z[:, t] * candidates[:, t]
            found.append(h)
        return torch.stack(found, 1)


def gru_terms(mixer: Any, u: Tensor) -> Recurrence:
    z = mixer.z(u).sigmoid()[..., None]
    return Recurrence(mixer.h(u)[..., None], z, torch.ones_like(z), log_a=torch.log1p(-z))


class Diagonal(nn.Module):
    """S4D: a complex state that no token changes the decay of, computed as one long convolution."""

    def __init__(self, width: int, states: int = 6) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.rand(width) - 2)
        self.real, self.imaginary = nn.Parameter(torch.rand(width, states)), nn.Parameter(3 * torch.rand(width, states))
        self.C, self.D = nn.Parameter(torch.randn(2, width, states)), nn.Parameter(torch.randn(width))

    def coefficients(self) -> tuple[Tensor, Tensor]:
        log_a = torch.complex(-self.real.exp(), self.imaginary) * self.step.exp()[:, None]
        return log_a, torch.complex(self.C[0], self.C[1])

    def forward(self, u: Tensor) -> Tensor:
        log_a, C = self.coefficients()
        length = u.shape[1]
        kernel = (C[..., None] * (log_a[..., None] * torch.arange(length).to(self.D)).exp()).sum(1).real
        spectrum = torch.fft.rfft(kernel, 2 * length) * torch.fft.rfft(u.mT, 2 * length)
        return torch.tanh((torch.fft.irfft(spectrum, 2 * length)[..., :length] + self.D[:, None] * u.mT).mT)


def diagonal_terms(mixer: Any, u: Tensor, start: int) -> Recurrence:
    """The state turns at a rate of its own, so that it is real in a frame that turns with it."""
    log_a, C = mixer.coefficients()
    turn = torch.exp(1j * log_a.imag * (start + torch.arange(u.shape[1])).to(mixer.D)[:, None, None])
    c, b = C * turn, turn.conj()
    every = (len(u), *turn.shape[:2], -1)
    b, c = torch.cat([b.real, b.imag], -1).expand(every), torch.cat([c.real, -c.imag], -1).expand(every)
    decay = torch.cat([log_a.real, log_a.real], -1).expand(*u.shape[:2], -1, -1)
    return Recurrence(u[..., None], b, c, log_a=decay, D=mixer.D)


class BothWays(nn.Module):
    """Two recurrences, one of them from the end to the beginning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = MinGRU(width), MinGRU(width)

    def forward(self, u: Tensor) -> Tensor:
        return self.one(u) * 1.5 + self.other(u.flip(1)).flip(1)


def both_terms(mixer: Any, u: Tensor) -> tuple[Recurrence, Recurrence]:
    back = gru_terms(mixer.other, u)
    order = torch.arange(u.shape[1]).flip(0)
    return gru_terms(mixer.one, u), Recurrence(back.x, back.b, back.c, log_a=back.log_a, order=order)


class MambaBothWays(nn.Module):
    """Convolutions with biases in both directions, of which the second reads what comes later."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = PlainMamba(width), PlainMamba(width)

    def forward(self, u: Tensor) -> Tensor:
        return self.one(u) + self.other(u.flip(1)).flip(1)


def mamba_both_terms(mixer: Any, u: Tensor) -> list[Recurrence]:
    one: Any = mamba_terms(mixer.one, u).recurrences
    back: Any = mamba_terms(mixer.other, u.flip(1)).recurrences
    turned = {name: getattr(back, name).flip(1) for name in ("x", "b", "c", "delta")}
    return [one, Recurrence(**turned, A=back.A, D=back.D, order=torch.arange(u.shape[1]).flip(0))]


def mamba_both_output(mixer: Any, u: Tensor, ys: list[Tensor]) -> Tensor:
    return mamba_output(mixer.one, u, ys[:1]) + mamba_output(mixer.other, u, ys[1:])


def adapt_all() -> None:
    ssmscope.adapt(MambaBothWays, terms=mamba_both_terms, output=mamba_both_output, both_ways=True)
    ssmscope.adapt(PlainMamba, terms=mamba_terms, output=mamba_output, reach=4)
    ssmscope.adapt(Formed, terms=mamba_terms, form=FORM, reach=4)
    ssmscope.adapt(MinGRU, terms=gru_terms, output=lambda mixer, u, ys: ys[0])
    ssmscope.adapt(Diagonal, terms=diagonal_terms, output=lambda mixer, u, ys: torch.tanh(ys[0]))
    output: Any = lambda mixer, u, ys: 1.5 * ys[0] + ys[1]  # noqa: E731
    ssmscope.adapt(BothWays, terms=both_terms, output=output, both_ways=True)


adapt_all()
LAYER_CLASSES = (PlainMamba, Formed, MinGRU, Diagonal, BothWays, MambaBothWays)
BOTH_WAYS_CLASSES = (BothWays, MambaBothWays)


def network(kind: Callable[[int], nn.Module], **options: Any) -> Network:
    torch.manual_seed(3)
    module = Network(kind, **options).eval()
    for parameter in module.parameters():
        parameter.data.mul_(1.5)
    return module


@pytest.mark.parametrize("kind", LAYER_CLASSES)
def test_logits_are_each_texts_own(kind) -> None:
    module = network(kind)
    model = ssmscope.load(module, labels=["a", "b", "c"])
    assert model.labels == ["a", "b", "c"] and model.num_layers == 2 and model.gives == "classes"
    with torch.no_grad():
        expected = torch.cat([module(torch.tensor([row])) for row in ROWS])
    torch.testing.assert_close(model.logits(model.encode(ids=ROWS)), expected, rtol=1e-4, atol=1e-4)
    trace = model.trace(ROWS)
    torch.testing.assert_close(trace.logits, expected, rtol=1e-4, atol=1e-4)
    assert trace.bidirectional == (kind in BOTH_WAYS_CLASSES) and np.ptp(expected.numpy()) > 0.1


def test_survival_in_a_padded_batch_is_that_of_each_text() -> None:
    for kind in LAYER_CLASSES:
        model = ssmscope.load(network(kind))
        found = model.trace(ROWS).survival()
        for row, ids in enumerate(ROWS):
            alone = model.trace([ids]).survival()[:, 0]
            torch.testing.assert_close(found[:, row, : len(ids)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in LAYER_CLASSES if kind not in BOTH_WAYS_CLASSES])
def test_a_language_model_writes_what_it_would(kind) -> None:
    module = network(kind, outputs=30, pooled=False)
    model = ssmscope.load(module)
    assert model.gives == "next tokens" and model.continues
    expected = []
    for row in ROWS:
        written = list(row)
        for _ in range(6):
            with torch.no_grad():
                written.append(int(module(torch.tensor([written]))[0, -1].argmax()))
        expected.append(tuple(written[-6:]))
    assert list(model.generate(ids=ROWS, max_new_tokens=6).ids) == expected and len({*expected[0]}) > 2


def test_survival_is_that_of_the_definition() -> None:
    module = network(MinGRU, layers=1).double()
    model = ssmscope.load(module)
    found = model.trace([TEXT]).survival()[0, 0]
    u = module.blocks[0].norm(module.tokens(torch.tensor([TEXT])))
    z, written = module.blocks[0].mixer.z(u).sigmoid()[0], module.blocks[0].mixer.h(u)[0]
    left = torch.stack([z[s] * written[s] * (1 - z[s + 1 :]).prod(0) for s in range(len(TEXT))])
    sizes = left.abs().sum(1)  # A channel is a head.
    torch.testing.assert_close(found.double(), sizes / sizes.sum(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [PlainMamba, Formed])
def test_it_is_read_as_the_same_weights_are_in_a_library(kind) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "state_size": 8, "time_step_rank": 4, "conv_kernel": 4, "num_hidden_layers": 2}
    theirs: Any = loud(MambaForCausalLM(MambaConfig(vocab_size=30, use_bias=True, tie_word_embeddings=False, **sizes)))
    backbone = theirs.backbone

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head, self.norm = backbone.embeddings, theirs.lm_head, backbone.norm_f
            self.norms = nn.ModuleList(block.norm for block in backbone.layers)
            self.mixers = nn.ModuleList(kind(12) for _ in backbone.layers)
            for mixer, block in zip(self.mixers, backbone.layers):
                mixer.load_state_dict(block.mixer.state_dict())

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            for norm, mixer in zip(self.norms, self.mixers):
                x = x + mixer(norm(x))
            return self.head(self.norm(x))

    ours, library = ssmscope.load(Whole().eval()), ssmscope.load(theirs)
    traces = [model.trace([TEXT]) for model in (ours, library)]
    close: Any = torch.testing.assert_close
    close(traces[0].logits, traces[1].logits, rtol=1e-4, atol=1e-4)
    close(traces[0].survival(), traces[1].survival(), rtol=1e-4, atol=1e-6)
    close(traces[0].retention, traces[1].retention, rtol=1e-5, atol=1e-6)
    explained = [ssmscope.explain(m, ids=TEXT, methods=["ig", "occlusion"]).texts[0] for m in (ours, library)]
    for one, other in zip(*(text.attributions for text in explained)):
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-2, atol=1e-4)
    levels = ("ssm", "block") if kind is Formed else ("ssm",)
    for level in levels:
        maps = [trace.linearized[0].attention(level) for trace in traces]
        close(maps[0], maps[1], rtol=1e-3, atol=1e-5)
        cut = [ssmscope.knockout(m, ids=TEXT, from_=[1], to=[8], level=level).to_dict() for m in (ours, library)]
        assert cut[0]["kind"] == cut[1]["kind"] == "knockout"
    if kind is Formed:
        layer = traces[0].linearized[1]
        close(layer.matvec(layer.u) + layer.bias, ours.module.module.mixers[1](layer.u), rtol=1e-4, atol=1e-4)
        found = [ssmscope.explain(m, ids=TEXT, methods=["lrp"]).texts[0] for m in (ours, library)]
        np.testing.assert_allclose(*(text.attributions[0].scores for text in found), rtol=1e-3, atol=1e-4)


def test_the_pages_code_makes_a_heatmap(capsys) -> None:
    page = (Path(__file__).parents[1] / "docs" / "own-layers.md").read_text(encoding="utf-8")
    (code, *more) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    names: dict[str, Any] = {"__name__": "own_layers"}
    exec(code, names)  # noqa: S102
    module, model = names["module"], names["model"]
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model.encode(ids=[TEXT])), module(torch.tensor([TEXT])))
    assert len(code[code.index("def terms") :].splitlines()) <= 15
    assert names["heatmap"].headline.startswith("Memory of Network: “")
    exec("\n".join(more), names)  # noqa: S102


def test_a_run_cut_in_two_is_the_whole() -> None:
    for kind in (PlainMamba, Formed, MinGRU, Diagonal):
        model = ssmscope.load(network(kind, outputs=30, pooled=False))
        whole = model.run(model.encode(ids=[TEXT])).logits
        for cut in (1, 2, 5):
            first = model.run(model.encode(ids=[TEXT[:cut]]))
            rest = model.run(model.encode(ids=[TEXT[cut:]]), first.states).logits
            torch.testing.assert_close(rest, whole[:, cut:], rtol=1e-4, atol=1e-4)


# ---- refused in one line


def adapted(kind: type[nn.Module], **options: Any) -> type[nn.Module]:
    """A class of its own, adapted, so that nothing is left of it."""
    found = type(f"{kind.__name__}{len(options)}{id(options)}", (kind,), {})
    ssmscope.adapt(found, **options)
    return found


WRONG: dict[str, tuple[type[nn.Module], dict[str, Any], str]] = {
    "terms": (
        MinGRU,
        {"terms": lambda m, u: gru_terms(m, 1.01 * u), "output": lambda m, u, ys: ys[0]},
        r"blocks\.0\.mixer .*do not give its own output; the difference is",
    ),
    "output": (MinGRU, {"terms": gru_terms, "output": lambda m, u, ys: ys[0] + 1e-3}, "do not give its own output"),
    "reach": (PlainMamba, {"terms": mamba_terms, "output": mamba_output, "reach": 2}, "further back than reach=2"),
    "a second recurrence": (
        BothWays,
        {"terms": lambda m, u: gru_terms(m.one, u), "output": lambda m, u, ys: 1.5 * ys[0], "both_ways": True},
        "do not give its own output",
    ),
    "both ways": (BothWays, {"terms": both_terms, "output": lambda m, u, ys: 1.5 * ys[0] + ys[1]}, "both_ways=True"),
    "shapes": (
        MinGRU,
        {"terms": lambda m, u: gru_terms(m, u[:1]), "output": lambda m, u, ys: ys[0]},
        "a Recurrence of 2 sequences of 9 positions was expected",
    ),
    "no recurrence": (MinGRU, {"terms": lambda m, u: m.z(u), "output": lambda m, u, ys: ys[0]}, "hold a Tensor"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_adapter_is_refused(what) -> None:
    kind, options, said = WRONG[what]
    refuses(said, testing.check_adapter, network(adapted(kind, **options)), [TEXT, TEXT[::-1]])


def test_differences_that_single_precision_hides_are_found() -> None:
    wrong = adapted(MinGRU, terms=gru_terms, output=lambda mixer, u, ys: ys[0] * (1 + 1e-6))
    refuses("do not give its own output; the difference is 1.0e-06", ssmscope.load, network(wrong))


class Noisy(MinGRU):
    def forward(self, u: Tensor) -> Tensor:
        return functional.dropout(super().forward(u), 0.3, training=True)


class Pair(MinGRU):
    def forward(self, u: Tensor) -> Any:
        return super().forward(u), None


class Twice(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.tokens(ids))
        return self.head(self.blocks(x).mean(1))


class Config(PretrainedConfig):
    model_type = "of-ones-own"


class Library(PreTrainedModel):
    """A model of transformers' kind around a layer of one's own."""

    config_class = Config

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(Config())
        self.tokens, self.layer, self.head = nn.Embedding(30, 12), kind(12), nn.Linear(12, 30)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return CausalLMOutput(logits=self.head(x + self.layer(x)))


def test_layers_within_a_model_of_transformers_are_checked_too() -> None:
    torch.manual_seed(0)
    output = lambda m, u, ys: ys[0]  # noqa: E731
    assert ssmscope.load(Library(adapted(MinGRU, terms=gru_terms, output=output)).eval()).num_layers == 1
    wrong = adapted(MinGRU, terms=lambda m, u: gru_terms(m, 1.01 * u), output=output)
    refuses(r"layer \(MinGRU.*do not give its own output; the difference is", ssmscope.load, Library(wrong).eval())


class Unpacking(Block):
    def forward(self, x: Tensor) -> Tensor:
        y, nothing = self.mixer(self.norm(x))
        assert nothing is None
        return x + y


class Stateful(MinGRU):
    def forward(self, u: Tensor) -> Any:
        y = super().forward(u)
        return y, y[:, -1]


def test_an_output_before_nothing_is_the_layers() -> None:
    kind = adapted(Pair, terms=gru_terms, output=lambda m, u, ys: ys[0])
    module = network(kind)
    module.blocks = nn.Sequential(*(Unpacking(block.mixer, 12) for block in module.blocks)).eval()
    model = ssmscope.load(module)
    with torch.no_grad():
        own = torch.cat([module(torch.tensor([row])) for row in ROWS])
    torch.testing.assert_close(model.logits(model.encode(ids=ROWS)), own, rtol=1e-4, atol=1e-4)
    assert ssmscope.heatmap(model, ids=TEXT).headline and model.trace([TEXT]).layers[1].u.shape == (1, len(TEXT), 12)


@pytest.mark.parametrize("uses", [False, True])
def test_a_state_after_the_output_is_left_out_or_the_network_refused(uses: bool) -> None:
    class Unpacked(Block):
        def forward(self, x: Tensor) -> Tensor:
            y, state = self.mixer(self.norm(x))
            return x + y + (state[:, None] if uses else 0)

    module = network(adapted(Stateful, terms=gru_terms, output=lambda m, u, ys: ys[0]))
    module.blocks = nn.Sequential(*(Unpacked(block.mixer, 12) for block in module.blocks)).eval()
    if not uses:
        model = ssmscope.load(module)
        torch.testing.assert_close(model.logits(model.encode(ids=[TEXT])), module(torch.tensor([TEXT])))
        return
    refuses("cannot be run where its layers are read .* such as a state, is None there", ssmscope.load, module)


def test_modules_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(InputError, match="gives another output each time: it draws random numbers"):
        ssmscope.load(network(adapted(Noisy, terms=gru_terms, output=lambda m, u, ys: ys[0])))
    with pytest.raises(InputError, match=r"blocks\.0\.mixer 2 times for a text"):
        torch.manual_seed(0)
        ssmscope.load(Twice(MinGRU))
    refuses(r"logits at every position.*answer=", ssmscope.load, network(MinGRU, pooled=False))
    with pytest.raises(InputError, match="no part 'body', which embedding names; its parts are tokens"):
        ssmscope.load(network(MinGRU), embedding="body")
    refuses("give output=…, a function, or form=…", ssmscope.adapt, MinGRU, terms=gru_terms)
    refuses("one's own|of your own", ssmscope.load, Network(lambda width: nn.GRU(width, width)))
    refuses("about a module in memory", ssmscope.load, "demo/sst2-mamba2", head="head")


def test_what_is_not_declared_is_refused_where_it_is_asked_for() -> None:
    model = ssmscope.load(network(PlainMamba))
    said = "nothing says what stands around the recurrence of PlainMamba: adapt it with form=…"
    refuses(said, ssmscope.attention, model, ids=TEXT, level="block")
    refuses(said, ssmscope.explain, model, ids=TEXT, methods=["lrp"])
    refuses(said, ssmscope.knockout, model, ids=TEXT, from_=[1], to=[8], level="block")
    trace = model.trace([TEXT])
    alpha = trace.linearized[0].attention("ssm")
    assert ssmscope.attention(model, ids=TEXT, level="ssm").level == "ssm" and math.isfinite(float(alpha.sum()))


def test_an_answer_of_ones_own_and_half_precision() -> None:
    module = network(MinGRU, pooled=False, outputs=4)
    model = ssmscope.load(module, answer=lambda output: output[:, -1], head="head", embedding="tokens")
    with torch.no_grad():
        expected = torch.cat([module(torch.tensor([row]))[:, -1] for row in ROWS])
    torch.testing.assert_close(model.logits(model.encode(ids=ROWS)), expected, rtol=1e-4, atol=1e-4)
    half = ssmscope.load(copy.deepcopy(module).bfloat16(), answer=lambda output: output[:, -1])
    found = half.logits(half.encode(ids=ROWS)).float()
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


def test_what_logits_are_called() -> None:
    asked: Any = lambda answer, outputs=3, pooled=True: ssmscope.load(  # noqa: E731
        network(MinGRU, outputs=outputs, pooled=pooled), answer=answer
    )
    assert asked("class").gives == "classes" and asked("labels").gives == "labels"
    assert asked("next", 30, False).gives == "next tokens"
    assert asked("number").gives == "numbers" and asked("number", 1).gives == "numbers"
    refuses("gives logits of classes, for which 'next' is no name", asked, "next")
    refuses("give one of next, class, labels, number, position, or a function", asked, "words")
    refuses("at every position: leave at=… out", asked, "position")
    at_each = ssmscope.load(network(MinGRU, outputs=4, pooled=False), answer="position", labels=[*"abcd"])
    rows = at_each.encode(ids=ROWS[:2])
    for place in (0, 3, -1):
        own = torch.cat([at_each.module.module(torch.tensor([row]))[:, place] for row in ROWS[:2]])
        torch.testing.assert_close(at_each.at(place).logits(rows), own, rtol=1e-4, atol=1e-4)
    module = network(MinGRU, pooled=False, outputs=4)
    model = ssmscope.load(module, answer=lambda output, ids: output[torch.arange(len(ids)), ids.argmax(1)])
    with torch.no_grad():
        expected = torch.stack([module(torch.tensor([row]))[0, int(np.argmax(row))] for row in ROWS])
    torch.testing.assert_close(model.logits(model.encode(ids=ROWS)), expected, rtol=1e-4, atol=1e-4)


def test_adapting_a_class_again_replaces_its_adapter() -> None:
    kind = adapted(MinGRU, terms=lambda m, u: gru_terms(m, 2 * u), output=lambda m, u, ys: ys[0])
    with pytest.raises(InputError):
        ssmscope.load(network(kind))
    ssmscope.adapt(kind, terms=gru_terms, output=lambda mixer, u, ys: ys[0])
    assert ssmscope.load(network(kind)).num_layers == 2
    assert adapter_for(kind(12)).reach == 1  # type: ignore[attr-defined]
    other = type("Other", (nn.Linear,), {})
    assert not is_readable(other(2, 2))
    ssmscope.adapt(other, terms=gru_terms, output=lambda mixer, u, ys: ys[0])
    assert is_readable(other(2, 2))
