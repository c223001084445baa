"""Relevance is conserved, and it is that of networks written out by hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from examples import EXAMPLES, FEW, HALVES, TEXTS, random_example, relative
from exhaustive import in_turns
from loud import TrueFloat64, doubled, loud
from refusals import refuses
from small_models import language_model
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu, softplus
import ssmscope
from ssmscope.core import batching
from ssmscope.core.mixers import adapter_for, fast_scan, mixers
from ssmscope.core.model import Model
from ssmscope.interp.methods.lrp import check_lrp, lrp, propagated, relevance_rules, through_activation
from ssmscope.interp.methods.lrp_blocks import freeze_soft_caps
from ssmscope.interp.objective import Objective, objective


def example(name: str) -> Model:
    return Model(doubled(loud(random_example(name))))


@contextmanager
def exact(name: str, texts: list[list[int]] = TEXTS, **options) -> Iterator[Objective]:
    """An objective on an example in true float64; the logit of the class 0 of a binary selective SSM is always 0."""
    with TrueFloat64():
        model = example(name)
        if name == "selective-ssm":
            options["target"] = 1
        yield objective(model, model.encode(ids=texts), **options)


def values(of: Objective) -> Tensor:
    with torch.no_grad():
        return of(of.embeddings(), range(len(of)))


OTHER_MODELS = (
    "gla-hybrid gsa hgrn hgrn2 lfm2 lightning mamba2attn mamba3 minimax plamo2 recurrent_gemma rwkv7 xlstm "
    "xlstm-with-biases".split()
)
LATENT = [name for name in ("bailing_hybrid", "kimi_linear", "lara_mini", "lfm3") if name in EXAMPLES]
"""Of a release of transformers that has it."""


class Capped(nn.Module):
    def __init__(self, **fields: float | None):
        super().__init__()
        self.lm_head, self.config = nn.Linear(3, 2, bias=False), SimpleNamespace(**fields)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=2 * (self.lm_head(x) / 2).tanh())


@pytest.mark.parametrize("field", ["output_logit_soft_cap", "logits_soft_cap"])
def test_soft_caps_are_frozen_factors(field):
    """A logit of zero has the factor 1, which is the limit of the cap's."""
    module = Capped(**{field: 2.0})
    weight = module.lm_head.weight.detach()
    for x in (torch.tensor([1.5, -0.5, 2.0]), torch.zeros(3)):
        given = x.clone().requires_grad_()
        plain, capped = weight @ x, module(x).logits.detach()
        factor = torch.where(plain == 0, 1.0, capped / plain)
        with freeze_soft_caps(module, [field]):
            found = module(given).logits
        torch.testing.assert_close(found.detach(), capped)
        for at in range(2):
            (gradient,) = torch.autograd.grad(found[at], given, retain_graph=True)
            torch.testing.assert_close(gradient, factor[at] * weight[at])
        assert not module.lm_head._forward_hooks
    for uncapped in (Capped(), Capped(**{field: None}), nn.Linear(3, 2)):
        with freeze_soft_caps(uncapped, [field]):
            (gradient,) = torch.autograd.grad(Capped.forward(module, given).logits[0], given)
            torch.testing.assert_close(gradient, weight[0] * (1 - (plain[0] / 2).tanh() ** 2))


@pytest.mark.parametrize(("name", "half"), in_turns([*FEW, *OTHER_MODELS, *LATENT], [True, False]))
def test_relevance_is_conserved(name, half):
    with exact(name) as of:
        found, constants, f = lrp(of, half=half), propagated(of, half)[1], values(of)
        assert ((found.scores.sum(1) + constants - f).abs() < 1e-9 * f.abs()).all()
        assert (found.delta < 1e-9).all() and found.converged.all()


@pytest.mark.parametrize("name", HALVES[0])
def test_the_value_is_the_models_own(name):
    with exact(name, target=3 if "selective" not in name else 1) as of, torch.no_grad():
        own = values(of)
        with relevance_rules(of.model.module, own.new_ones(len(of))):
            assert relative(values(of), own) < 1e-11


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gfssm", "gated-deltanet", "retnet", "rwkv"])
def test_padding_on_the_left_is_hidden_too(name):
    with exact(name) as of, torch.no_grad():
        embeddings, mask, model = of.embeddings() + 1, of.batch.mask.flip(1), of.model
        with fast_scan(model.module, mask=mask):
            own = model.forward_embeddings(embeddings, mask, last_only=False)[:, -1]
        with relevance_rules(model.module, own.new_ones(len(own))):
            assert relative(model.forward_embeddings(embeddings, mask, last_only=False)[:, -1], own) < 1e-11


@pytest.mark.parametrize("name", HALVES[1])
def test_what_frozen_layers_say_of_gates_and_of_what_is_beside_them(name):
    model = example(name)
    torch.manual_seed(1)
    for mixer in mixers(model.module):
        modules = 1 + len(getattr(mixer, "before", ()))
        u = torch.randn(2, 7, modules * model.config.hidden_size, dtype=torch.float64)
        with torch.no_grad(), TrueFloat64():
            terms = adapter_for(mixer).compute_terms(mixer, u)
            layer = adapter_for(mixer).linearized(mixer, terms)
        for path in layer.paths:
            output_map, opening = path.output_map, path.output_map.gate_map
            assert (opening is not None) == (terms.z is not None and "rwkv" not in name)  # whose gate is not a product
            if opening is not None:
                opened = opening(layer.u, True)
                assert (
                    relative(opened if output_map.factor is None else opened * output_map.factor, output_map.gate)
                    < 1e-12
                )
                y = torch.randn_like(output_map.gate)
                shifted = 0 if output_map.shift is None else output_map.project(opened * output_map.shift)
                assert relative(output_map.project(path.shown(y) * opened), path.finish(y) + shifted) < 1e-12
                v, w, nothing = torch.randn_like(layer.u), torch.randn_like(layer.u), torch.zeros_like(layer.u)
                combined = 2 * opening(v, False) - opening(w, False)
                torch.testing.assert_close(opening(2 * v - w, False), combined, rtol=1e-9, atol=1e-12)
                constants = opening(v, True) - opening(v, False)
                torch.testing.assert_close(opening(nothing, True), constants, rtol=1e-9, atol=1e-12)
        if layer.rest_map is not None:
            mixed = layer.matvec(layer.u) + layer.bias - layer.rest
            assert relative(layer.rest_map(layer.u, mixed, True), layer.rest) < 1e-12


def convolved(c: Tensor, conv: nn.Conv1d) -> Tensor:
    taps = conv.weight.shape[-1]
    padded = torch.cat([c.new_zeros(taps - 1, c.shape[1]), c])
    steps = [(padded[t : t + taps] * conv.weight[:, 0].T).sum(0) for t in range(len(c))]
    return torch.stack(steps) + (0 if conv.bias is None else conv.bias)


def bent(c: Tensor) -> Tensor:
    return c * torch.sigmoid(c).detach()


def gated(y: Tensor, z: Tensor) -> Tensor:
    return y * silu(z).detach() / 2 + y.detach() * bent(z) / 2


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt().detach() * weight


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return rms(x, norm.weight, norm.eps) + norm.bias


def mamba(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.backbone.layers:
        m = block.mixer
        c, z = m.in_proj(rms(x, block.norm.weight, block.norm.variance_epsilon)).chunk(2, -1)
        c = bent(convolved(c, m.conv1d))
        step, B, C = m.x_proj(c).detach().split([m.time_step_rank, m.ssm_state_size, m.ssm_state_size], -1)
        delta, A = softplus(m.dt_proj(step)).detach(), -m.A_log.exp()
        H, y = 0, []
        for t in range(len(x)):
            H = torch.exp(delta[t, :, None] * A) * H + (delta[t] * c[t])[:, None] * B[t]
            y.append(H @ C[t] + m.D * c[t])
        x = x + m.out_proj(gated(torch.stack(y), z))
    norm = model.backbone.norm_f
    return model.lm_head(rms(x[-1], norm.weight, norm.variance_epsilon))


def mamba2(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.backbone.layers:
        m = block.mixer
        heads, width, n = m.num_heads, m.head_dim, m.n_groups * m.ssm_state_size
        u = rms(x, block.norm.weight, block.norm.variance_epsilon)
        z, c, step = m.in_proj(u).split([m.intermediate_size, m.conv_dim, heads], -1)
        c, B, C = bent(convolved(c, m.conv1d)).split([m.intermediate_size, n, n], -1)
        B, C = (t.detach().unflatten(-1, (m.n_groups, -1)).repeat_interleave(heads // m.n_groups, 1) for t in (B, C))
        delta = softplus(step + m.dt_bias).detach().clamp(*m.time_step_limit)
        c = c.unflatten(-1, (heads, width))
        H, y = 0, []
        for t in range(len(x)):
            keep = torch.exp(-delta[t] * m.A_log.exp())
            H = keep[:, None, None] * H + (delta[t, :, None] * c[t])[:, :, None] * B[t][:, None]
            y.append((H * C[t][:, None]).sum(-1) + m.D[:, None] * c[t])
        y = torch.stack(y).flatten(1)
        groups = (y * silu(z)).unflatten(-1, (-1, getattr(m.norm, "group_size", y.shape[1])))  # as transformers has it
        scale = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + m.norm.variance_epsilon).detach()
        x = x + m.out_proj((gated(y, z).view_as(groups) * scale).flatten(1) * m.norm.weight)
    norm = model.backbone.norm_f
    return model.lm_head(rms(x[-1], norm.weight, norm.variance_epsilon))


def gla(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.backbone.layers:
        m, u = block.mixer, rms(x, block.norm.weight, block.norm.eps)
        q, k, v = (p(u).unflatten(-1, (m.num_heads, -1)) for p in (m.q_proj, m.k_proj, m.v_proj))
        decay = torch.exp(logsigmoid(m.decay_out(m.decay_in(u))) / m.tau).detach().unflatten(-1, (m.num_heads, -1))
        H, y = 0, []
        for t in range(len(x)):
            H = decay[t][..., None] * H + k[t].detach()[..., None] * v[t][:, None]
            y.append((q[t].detach()[..., None] * m.scale * H).sum(1))
        y = torch.stack(y)
        y = y - y.mean(-1, keepdim=True)
        y = rms(y, torch.ones(()), m.head_norm.eps).flatten(1) * m.head_norm.weight + m.head_norm.bias
        x = x + m.out_proj(gated(y, m.z_proj(u)))
        mlp, u = block.mlp, rms(x, block.mlp_norm.weight, block.mlp_norm.eps)
        x = x + mlp.down(gated(mlp.up(u), mlp.gate(u)))
    norm = model.backbone.norm_f
    return model.lm_head(rms(x[-1], norm.weight, norm.eps))


def rwkv(model: nn.Module, x: Tensor) -> Tensor:
    def mixed(u: Tensor, mix: Tensor) -> Tensor:
        return u * mix[0, 0] + torch.cat([torch.zeros_like(u[:1]), u[:-1]]) * (1 - mix[0, 0])

    for block in model.rwkv.blocks:
        a, f = block.attention, block.feed_forward
        x = layer_norm(x, block.pre_ln) if block.layer_id == 0 else x
        u = layer_norm(x, block.ln1)
        k = a.key(mixed(u, a.time_mix_key)).detach()
        v = a.value(mixed(u, a.time_mix_value))
        r = torch.sigmoid(a.receptance(mixed(u, a.time_mix_receptance))).detach()
        y = []
        for t in range(len(x)):
            past = torch.arange(t - 1, -1, -1, dtype=x.dtype)[:, None]
            share = torch.softmax(torch.cat([k[:t] - past * a.time_decay.exp(), (k[t] + a.time_first)[None]]), 0)
            y.append((share * v[: t + 1]).sum(0))
        x = x + a.output(r * torch.stack(y))
        u = layer_norm(x, block.ln2)
        h = f.key(mixed(u, f.time_mix_key))
        r = torch.sigmoid(f.receptance(mixed(u, f.time_mix_receptance))).detach()
        x = x + r * f.value(h * torch.relu(h).detach())
    return model.head(layer_norm(x[-1], model.rwkv.ln_out))


BY_HAND: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "mamba": mamba, "mamba-with-biases": mamba, "mamba2": mamba2, "mamba2-one-group": mamba2, "gla": gla, "rwkv": rwkv,
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_relevance_is_that_of_the_network_written_out_by_hand(name):
    with exact(name, target=5) as of:
        found = lrp(of).scores
        for text, length in enumerate(of.lengths):
            x = of.embeddings()[text, :length].requires_grad_()
            f = BY_HAND[name](of.model.module, x)[5]
            assert abs(f - values(of)[text]) < 1e-9 * abs(f)
            (gradient,) = torch.autograd.grad(f, x)
            assert relative(found[text, :length], (gradient * x).sum(-1)) < 1e-8


@pytest.mark.parametrize("name", ["mamba", "gfssm", "rwkv", "selective-ssm-classes"])
def test_of_a_contrast_it_is_the_difference(name):
    with exact(name, target=2) as of, exact(name, target=3) as against, exact(name, target=2, contrast=3) as both:
        assert relative(lrp(both).scores, lrp(of).scores - lrp(against).scores) < 1e-9
        assert relative(propagated(both)[1] + lrp(both).scores.sum(1), values(both)) < 1e-9


def test_of_a_probability_it_is_that_of_the_logits_by_its_gradient():
    with exact("selective-ssm-classes", target=0) as of:
        with torch.no_grad():
            of.model.module.head.weight.mul_(1e-3)
        logits = [replace(of, targets=((c,),) * len(of)) for c in range(4)]
        z = torch.stack([values(each) for each in logits], dim=-1).requires_grad_()
        (gradient,) = torch.autograd.grad(z.softmax(-1)[:, 0].sum(), z)
        expected = sum(gradient[:, c, None] * lrp(each).scores for c, each in enumerate(logits))
        found = lrp(replace(of, probability=True))
        assert relative(found.scores, expected) < 1e-9 and found.delta is None and found.converged is None


@pytest.mark.parametrize("name", ["mamba2", "rwkv"])
def test_of_a_continuation_it_is_that_of_its_tokens_log_probabilities(name):
    """Every token's is that of the text before it, of which the prompt's part is summed."""
    prompt, follow = [5, 17, 3, 9], (22, 1, 4)
    with exact(name, [prompt]) as of:
        found = lrp(replace(of, targets=(follow,)))
        expected = torch.zeros(len(prompt), dtype=torch.float64)
        for i, token in enumerate(follow):
            with exact(name, [prompt + list(follow[:i])] * 97, target=list(range(97))) as logits:
                z = values(logits).requires_grad_()
                (gradient,) = torch.autograd.grad(z.log_softmax(-1)[token], z)
                expected += gradient @ lrp(logits).scores[:, : len(prompt)]
        assert relative(found.scores[0], expected) < 1e-8 and found.delta is None


@pytest.mark.parametrize("name", HALVES[0])
def test_texts_do_not_see_each_other_nor_padding(name):
    with exact(name) as of:
        together, constants = lrp(of).scores, propagated(of)[1]
        assert not together[~of.batch.mask].any() and together[of.batch.mask].all()
        for text, ids in enumerate(TEXTS):
            model = of.model
            alone = replace(of, batch=model.encode(ids=[ids]), targets=(of.targets[text],))
            assert relative(together[text, : len(ids)], lrp(alone).scores[0]) < 1e-9
            torch.testing.assert_close(constants[text : text + 1], propagated(alone)[1], rtol=1e-9, atol=1e-9)


def test_many_texts_are_run_some_at_a_time(monkeypatch):
    with exact("mamba") as of:
        together, calls = lrp(of).scores, []
        own = Objective.__call__
        monkeypatch.setattr(Objective, "__call__", lambda self, x, texts: calls.append(texts) or own(self, x, texts))
        monkeypatch.setattr(batching, "TOKENS_AT_ONCE", 12)
        assert relative(lrp(of).scores, together) < 1e-12
        assert calls == [[1, 2], [0], [1, 2], [0]]


@pytest.mark.parametrize("name", ["demo/cifar10-gla", "demo/cifar10-mamba2", "demo/cifar10-rwkv"])
def test_the_shipped_classifiers_of_pixels(name):
    model = ssmscope.load(name)
    pixels = torch.rand(2, 1024, model.channels, generator=torch.Generator().manual_seed(0))
    of = objective(model, model.encode(values=pixels), contrast=2, target=5)
    found = lrp(of)
    assert found.scores.shape == (2, 1025) and found.converged.all()
    assert relative(found.scores.sum(1) + propagated(of)[1], values(of)) < 1e-4


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gla", "gated-deltanet", "rwkv"])
def test_half_precision(name):
    """Relevance of a model in bfloat16 is about that of the same weights in float32."""
    model = example(name)
    model.module.to(torch.bfloat16)
    of = objective(model, model.encode(ids=TEXTS), target=5)
    rough = lrp(of).scores
    assert rough.dtype == torch.float32
    model.module.float()
    assert relative(rough, lrp(of).scores) < 0.15


def state(module: nn.Module) -> list[tuple[object, ...]]:
    found = []
    for part in module.modules():
        config = getattr(part, "config", None)
        hooks = len(part._forward_hooks) + len(part._forward_pre_hooks)
        found.append(
            (type(part), "forward" in vars(part), "mask" in vars(part), hooks, getattr(config, "use_cache", 0))
        )
    return [*found, *((p.requires_grad, p.grad) for p in module.parameters())]


@pytest.mark.parametrize("name", ["baleen-b-mamba", "diff-mamba", "groupmamba", "gla", "rwkv", "selective-ssm"])
def test_nothing_is_left_behind(name):
    with exact(name) as of:
        module, before, own = of.model.module, state(of.model.module), values(of)
        lrp(of)
        assert state(module) == before
        with pytest.raises(ZeroDivisionError), relevance_rules(module, own.new_ones(len(of))):
            assert state(module) != before
            raise ZeroDivisionError
        assert state(module) == before
        assert torch.equal(values(of), own)
        # without gradients around, too
        with torch.no_grad():
            lrp(of)


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.sum()


NO_RULE = r"lrp has no rule for (Softmax|GroupNorm) \(backbone.norm_f(\.1)?\), which may not be linear"


@pytest.mark.parametrize("part, why", [
    (nn.Softmax(-1), NO_RULE),
    (nn.Sequential(nn.Linear(24, 24), nn.Softmax(-1)), NO_RULE),
    (Doubled(24, 24), "lrp's Doubled, a Doubled of .*, is no linear map"),
    (nn.GroupNorm(1, 24), NO_RULE),
])  # fmt: skip
def test_a_part_without_a_rule_is_refused(part, why):
    model = example("mamba")
    model.module.backbone.norm_f = part.double()
    of = objective(model, model.encode(ids=TEXTS), target=5)
    before = state(model.module)
    for method in (lrp, propagated):
        refuses(why, method, of)
    assert state(model.module) == before


ACTIVATIONS = [
    *(nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.Softplus(), nn.LeakyReLU()),
    *(nn.ELU(), nn.PReLU(), nn.Hardtanh(), nn.Mish()),
]


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_an_activation_is_a_factor_of_its_input_beside_its_value_at_zero(act):
    act = deepcopy(act).double()
    with exact("mamba", target=5) as of:
        backbone = of.model.module.backbone
        backbone.norm_f = nn.Sequential(backbone.norm_f, deepcopy(act)).double()
        found = lrp(of)
    assert found.converged.all() and float(found.delta.max()) < 1e-10
    x = torch.tensor([[[-3.0, -0.4, 0.0, 0.7, 2.0]]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64, requires_grad=True)
    y = through_activation(act, x, one)
    assert torch.equal(y, act(x)) or relative(y, act(x)) < 1e-15
    by_x, by_one = torch.autograd.grad(y.sum(), (x, one), allow_unused=True)
    at_zero = act(torch.zeros(1, dtype=torch.float64)).item()
    assert float(by_one if by_one is not None else 0) == pytest.approx(5 * at_zero)
    for value, factor, whole in zip(*(each.flatten().tolist() for each in (x, by_x, act(x))), strict=True):
        if value:
            assert factor == pytest.approx((whole - at_zero) / value, rel=1e-12)


class Same(nn.Module):
    """A part that passes on what its own part gives, or what is not linear in it."""

    def __init__(self, part, change=lambda y: y):
        super().__init__()
        self.part, self.change = part, change

    def forward(self, x):
        return self.change(self.part(x))


def test_a_forward_pass_of_the_users_own_is_read_if_it_is_linear():
    with exact("mamba", target=5) as of:
        model, own = of.model, of.model.module.backbone.norm_f
        expected = lrp(of)
        model.module.backbone.norm_f = Same(own).double()
        check_lrp(model)
        found = lrp(of)
        assert torch.equal(found.scores, expected.scores) and found.converged.all()
        model.module.backbone.norm_f = Same(own, lambda y: y.softmax(-1)).double()
        for ask in (lambda: lrp(of), lambda: check_lrp(model)):
            refuses("its own forward pass is not linear", ask)


def test_a_lower_precision_is_allowed_its_rounding():
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=64, num_heads=4, head_dim=32, state_size=8, n_groups=1)
    module = language_model("mamba2", **sizes, num_hidden_layers=64, initializer_range=0.3).to(torch.bfloat16).eval()
    model = Model(module)
    batch = model.encode(ids=torch.randint(0, 97, (2, 64)).tolist())
    of = objective(model, batch, target=7)
    assert (lrp(of).delta > 0.1).any()  # Two runs of it differ by more than the limit of the sum.
    module.backbone.norm_f = Same(module.backbone.norm_f, lambda y: y * (1 + 0.3 * y))
    refuses("by 1[0-9.]+% of what is added: its own forward pass is not linear", lrp, of)


def test_a_model_of_another_class_is_read_by_its_parts():
    model = example("mamba")
    expected = lrp(objective(model, model.encode(ids=TEXTS), target=5))

    class Scaled(type(model.module)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.module.__class__ = Scaled
    assert torch.equal(lrp(objective(model, model.encode(ids=TEXTS), target=5)).scores, expected.scores)


def test_an_activation_that_is_no_factor_is_refused():
    model = example("mamba")
    for mixer in model.mixers:
        mixer.act, mixer.activation = nn.Sigmoid(), "sigmoid"
    before = state(model.module)
    refuses("not 0 at 0", lrp, objective(model, model.encode(ids=TEXTS), target=5))
    assert state(model.module) == before


def test_an_explanation_says_what_constants_take():
    model, texts = ssmscope.load("demo/sst2-mamba2", dtype="float64"), ["A dull film.", "A moving and wise film."]
    found = ssmscope.explain(model, texts, methods=("lrp", "gradxinput", "ig"))
    constants = propagated(objective(model, model.encode(texts)))[1]
    frame = found.summary()
    assert frame.constants[frame.method == "lrp"].tolist() == pytest.approx(constants.tolist(), abs=1e-6)
    assert constants.abs().min() > 1e-3 and frame.constants[frame.method != "lrp"].isna().all()
    low, high = sorted(constants.tolist())
    assert f"lrp: biases and other constants have −{-low:.4f} to {high:.3f} of f" in found.to_text(full=True)
