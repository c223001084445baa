"""Baleen: gates, divergences, the expected layer, conversion, the loss."""

import pytest
import torch
from bases import ADAPTERS, IDS, MAMBA2, MASK, base_model
from refusals import refuses
from transformers import MambaForCausalLM
from ssmscope import ops
from ssmscope.core.mixers import mixers
from ssmscope.layers import mamba, mamba2
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo import baleen

base = pytest.fixture(params=list(ADAPTERS))(lambda request: base_model(request.param))


def test_gate_logit_at_both_ends():
    keep = torch.tensor([1e-30, 1e-8, 0.3, 0.5, 0.999999], dtype=torch.float64)
    torch.testing.assert_close(baleen.gate_logit(keep.log()), torch.logit(keep), rtol=1e-6, atol=1e-9)
    assert baleen.gate_logit(torch.tensor([0.0, -1e-30, -200.0])).isfinite().all()


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.99])
def test_gates_are_kept_with_their_probability(keep):
    torch.manual_seed(0)
    n = 200_000
    log_gates = baleen.sample_log_gates(torch.full((n,), keep, dtype=torch.float64).log(), tau=0.5)
    assert set(log_gates.unique().tolist()) <= {0.0, baleen.LOG_DROPPED_GATE}
    assert abs((log_gates == 0).double().mean().item() - keep) < 4 * (keep * (1 - keep) / n) ** 0.5


def test_the_gates_gradient_is_the_soft_gates():
    """The gradient through log A equals that of the recurrence written in A with A = hard + soft − stop(soft)."""
    torch.manual_seed(0)
    batch, length, heads, state = 2, 9, 3, 4
    x, b, c = (torch.randn(batch, length, heads, n).double() for n in (1, state, state))
    log_keep = -torch.rand(batch, length, heads, state).double().requires_grad_()
    torch.manual_seed(5)
    log_gates = baleen.sample_log_gates(log_keep, tau=0.5)
    ours = ops.scan(ops.Recurrence(x=x, b=b, c=c, log_a=log_gates)).y.square().sum()
    torch.manual_seed(5)
    uniform = torch.rand_like(log_keep).clamp(1e-7, 1 - 1e-7)
    soft = torch.sigmoid((torch.logit(log_keep.exp()) + uniform.log() - (-uniform).log1p()) / 0.5)
    gate = (soft > 0.5).double() + soft - soft.detach()
    H, y = 0, []
    for t in range(length):
        H = gate[:, t] * H + x[:, t] * b[:, t]
        y.append((H * c[:, t]).sum(-1))
    theirs = torch.stack(y, 1).square().sum()
    assert (gate.detach() < 0.5).any() and (gate.detach() > 0.5).any()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, log_keep)[0], torch.autograd.grad(theirs, log_keep)[0], rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("prior", [0.1, 0.5])
def test_bernoulli_kl_by_monte_carlo(prior):
    torch.manual_seed(0)
    keep = torch.tensor([0.01, 0.4, 0.5, 0.97], dtype=torch.float64)
    kl = baleen.bernoulli_kl(keep.log(), prior)
    drawn = torch.distributions.Bernoulli(keep).sample((200_000,)).double()
    ratio = torch.distributions.Bernoulli(keep).log_prob(drawn) - torch.distributions.Bernoulli(
        torch.tensor(prior).double()
    ).log_prob(drawn)
    assert ((ratio.mean(0) - kl).abs() < 5 * ratio.std(0) / 200_000**0.5 + 1e-12).all()
    torch.testing.assert_close(
        baleen.bernoulli_kl(torch.tensor([prior]).double().log(), prior), torch.zeros(1).double(), atol=1e-7, rtol=0
    )
    extremes = torch.tensor([0.0, -1e-30, -500.0], requires_grad=True)
    baleen.bernoulli_kl(extremes, prior).sum().backward()
    assert extremes.grad.isfinite().all()


@pytest.mark.parametrize("form", ["true", "printed"])
def test_exponential_kl_by_monte_carlo(form):
    torch.manual_seed(0)
    delta, prior = torch.tensor([0.02, 0.1, 0.7], dtype=torch.float64), 0.1
    kl = baleen.exponential_kl(delta, prior, form)
    rates = (1 / delta, 1 / prior) if form == "true" else (delta, prior)
    p = torch.distributions.Exponential(rates[0])
    q = torch.distributions.Exponential(torch.tensor(rates[1], dtype=torch.float64))
    drawn = p.sample((400_000,))
    ratio = p.log_prob(drawn) - q.log_prob(drawn)
    assert ((ratio.mean(0) - kl).abs() < 5 * ratio.std(0) / 400_000**0.5 + 1e-9).all()
    assert kl[1].abs() < 1e-12 and (kl >= -1e-12).all()


@pytest.mark.parametrize("gate", ["bernoulli", "exponential"])
def test_expected_gates_give_the_expected_output(base, gate):
    """The mean of a layer's outputs over sampled gates, for given inputs, is the output with expected gates."""
    model = baleen.convert(base, gate)
    mixer = mixers(model)[0]
    torch.manual_seed(1)
    u = torch.randn(1, 8, 16)
    with torch.no_grad():
        expected = baleen.compute_terms(mixer.eval(), u).scan()[0].y[0]
        draws = 8_000
        mixer.train()
        layer = baleen.compute_terms(mixer, u.expand(draws, -1, -1))
        samples = layer.scan()[0].y
    mean, error = samples.mean(0), samples.std(0) / draws**0.5
    assert ((mean - expected).abs() < 5.5 * error + 1e-4 * expected.abs().max()).all()
    if gate == "exponential":  # the decay at the mean step is not the mean decay
        reader = mamba if isinstance(mixer, baleen.BaleenMambaMixer) else mamba2
        plain = reader.compute_terms(mixer, u).scan()[0].y[0]
        assert ((mean - plain).abs() > 8 * error).any()


def test_a_sampled_step_is_in_the_decay_and_in_what_is_written(base):
    """Eq. 8, token by token, with steps whose share of the mean is exponential: of mean 1 and mean square 2."""
    mixer = mixers(baleen.convert(base, "exponential"))[0]
    u, draws = torch.randn(1, 8, 16), 5_000
    with torch.no_grad():
        steps = baleen.compute_terms(mixer.eval(), u).recurrence.delta
        layer = baleen.compute_terms(mixer.train(), u.expand(draws, -1, -1))
        r, y = layer.recurrence, layer.scan()[0].y
    share = r.delta / steps
    assert share.mean().item() == pytest.approx(1, abs=0.02) and share.pow(2).mean().item() == pytest.approx(2, abs=0.1)
    state, worst = 0.0, 0.0
    for at in range(8):
        delta = r.delta[:, at, :, None, None]
        write = delta * r.x[:, at, :, :, None] * r.b[:, at, :, None, :]
        state = state * torch.exp(r.A.detach()[:, None] * delta) + write
        expected = (state * r.c[:, at, :, None, :]).sum(-1) + r.D.detach()[:, None] * r.x[:, at]
        worst = max(worst, float((y[:, at].reshape_as(expected) - expected).abs().max()))
    assert worst < 1e-4 * y.abs().max()


@pytest.mark.parametrize("gate", ["bernoulli", "exponential"])
def test_conversion_adds_no_parameter(base, gate):
    before = {name: t.clone() for name, t in base.state_dict().items()}
    model = baleen.convert(base, gate)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in base.parameters())
    assert list(model.state_dict()) == list(before)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])
    with torch.no_grad():
        converted, plain = model.eval()(IDS).logits, base(IDS, use_cache=False).logits
    difference = (converted - plain).norm() / plain.norm()
    assert difference < 1e-5 if gate == "bernoulli" else difference > 1e-3


def test_other_models_are_not_converted():
    refuses("cannot become a Baleen", baleen.convert, baleen.convert(base_model("mamba"), "bernoulli"), "exponential")
    refuses("gate 'gaussian' is unknown", baleen.BaleenMambaConfig, gate="gaussian")
    refuses("kl", baleen.BaleenMamba2Config, kl="wrong")


@pytest.mark.parametrize("gate", ["bernoulli", "exponential"])
def test_the_loss_is_cross_entropy_plus_beta_kl(base, gate):
    losses = {}
    for beta in (0.0, 0.25):
        model = baleen.convert(base, gate, beta=beta).train()
        torch.manual_seed(3)
        losses[beta] = model(IDS, attention_mask=MASK, labels=IDS).loss
        assert baleen.information_loss(model) is None  # the loss has it
    torch.manual_seed(3)
    model(IDS, attention_mask=MASK)
    left = baleen.information_loss(model)  # for the caller's own loss
    assert left is not None and baleen.information_loss(model) is None
    kls = []
    torch.manual_seed(3)
    hidden = model.backbone.embeddings(IDS)
    for block in model.backbone.layers:  # the divergences by hand
        layer = baleen.compute_terms(block.mixer, block.norm(hidden), MASK)
        kls.append(layer.extras["kl"])
        hidden = hidden + baleen.output(block.mixer, layer)
    torch.testing.assert_close(left, torch.stack(kls).mean())
    torch.testing.assert_close(losses[0.25] - losses[0.0], 0.25 * torch.stack(kls).mean(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("gate", ["bernoulli", "exponential"])
def test_padding_does_not_change_the_divergence(base, gate):
    model = baleen.convert(base, gate).train()
    mixer = mixers(model)[0]
    u = torch.randn(2, 7, 16)
    padded = torch.cat([u, 100 * torch.randn(2, 5, 16)], dim=1)
    mask = torch.tensor([[1] * 7 + [0] * 5] * 2)
    torch.testing.assert_close(
        baleen.compute_terms(mixer, padded, mask).extras["kl"], baleen.compute_terms(mixer, u).extras["kl"]
    )


def test_first_gates_are_left_out_of_bernoulli_kl(base):
    model = baleen.convert(base, "bernoulli").train()
    mixer = mixers(model)[0]
    assert baleen.compute_terms(mixer, torch.randn(1, 1, 16)).extras["kl"].item() == 0.0


def test_a_cache_is_refused():
    """A cache would stay empty, and a run continued from it would silently start anew."""
    config = baleen.BaleenMamba2Config(**MAMBA2, gate="bernoulli")
    with pytest.raises(ValueError, match="fills no cache"):
        baleen.BaleenMamba2Model(config).eval()(IDS, use_cache=True)


def test_a_base_models_checkpoint_opens_as_a_baleen(base, tmp_path):
    base.save_pretrained(tmp_path)
    cls = baleen.BaleenMambaForCausalLM if isinstance(base, MambaForCausalLM) else baleen.BaleenMamba2ForCausalLM
    model = cls.from_pretrained(tmp_path, gate="exponential").train()
    model(IDS, labels=IDS).loss.backward()
    expected = baleen.initial_steps(mixers(base)[0])
    assert baleen.prior_of(mixers(model)[0]) == pytest.approx(expected, rel=1e-5)


def test_prior_of_a_classifiers_backbone_is_saved(tmp_path):
    config = baleen.BaleenMamba2Config(**MAMBA2, gate="exponential")
    model = SSMForSequenceClassification(SSMClassifierConfig(config))
    prior = model.config.backbone.prior
    assert len(prior) == 2 and all(p > 0 for p in prior)
    with torch.no_grad():
        for mixer in mixers(model):
            mixer.dt_bias.add_(2.0)  # as training moves the steps, the prior stays
    model.save_pretrained(tmp_path)
    again = SSMForSequenceClassification.from_pretrained(tmp_path)
    assert again.config.backbone.prior == prior == mixers(again)[0].baleen.prior
