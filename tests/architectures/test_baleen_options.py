"""Baleen's options: soft samples and their expectation, sums over positions, a prior per head, an annealed prior."""

import pytest
import torch
from bases import ADAPTERS, IDS, MASK, base_model
from refusals import refuses
from transformers import AutoModelForCausalLM
from ssmscope.core.mixers import mixers
from ssmscope.core.model import Model
from ssmscope.zoo import baleen
from ssmscope.zoo.baleen import mean_log_gate
from ssmscope.zoo.training.fitting import prior_in

base = pytest.fixture(params=list(ADAPTERS))(lambda request: base_model(request.param))


def divergence(model, seed=0, mask=MASK):
    torch.manual_seed(seed)
    model.train()(input_ids=IDS, attention_mask=mask)
    return baleen.information_loss(model)


def test_soft_samples_are_the_relaxed_gates():
    torch.manual_seed(3)
    log_keep = -torch.rand(50, dtype=torch.float64)
    torch.manual_seed(5)
    ours = baleen.sample_log_gates(log_keep, 0.7, "soft")
    torch.manual_seed(5)
    uniform = torch.rand_like(log_keep).clamp(1e-7, 1 - 1e-7)
    theirs = torch.sigmoid((torch.logit(log_keep.exp()) + torch.logit(uniform)) / 0.7)
    torch.testing.assert_close(ours.exp(), theirs)
    assert ((ours < 0) & (ours >= baleen.LOG_DROPPED_GATE)).all()


@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_soft_gates_have_their_own_expectation(base, tau):
    """The mean of a layer's outputs over soft gates is the output with the tabulated gates, not with Ā."""
    model = baleen.convert(base, "bernoulli", samples="soft", tau=tau)
    mixer = mixers(model)[0]
    torch.manual_seed(1)
    u, draws = torch.randn(1, 8, 16), 5_000
    with torch.no_grad():
        layer = baleen.compute_terms(mixer.eval(), u)
        expected = layer.scan()[0].y[0]
        hard = baleen.convert(base, "bernoulli").eval()
        plain = baleen.compute_terms(mixers(hard)[0], u).scan()[0].y[0]
        samples = baleen.compute_terms(mixer.train(), u.expand(draws, -1, -1)).scan()[0].y
    mean, error = samples.mean(0), samples.std(0) / draws**0.5
    assert ((mean - expected).abs() < 5.5 * error + 1e-4 * expected.abs().max()).all()
    assert ((mean - plain).abs() > 8 * error).any()
    log_keep = baleen.compute_terms(mixers(hard)[0], u).recurrence.log_decay()
    torch.testing.assert_close(layer.recurrence.log_decay(), mean_log_gate(baleen.gate_logit(log_keep), tau))


def test_padding_does_not_reach_soft_gates(base):
    model = Model(baleen.convert(base, "bernoulli", samples="soft", tau=1.0).eval())
    both, alone = (model.run(model.encode(ids=ids)) for ids in ([[3, 9, 17, 2, 40], [7, 7]], [[7, 7]]))
    torch.testing.assert_close(both.logits[1, :2], alone.logits[0], rtol=1e-4, atol=1e-5)
    for one, other in zip(both.states, alone.states):
        torch.testing.assert_close(one.ssm[0][1], other.ssm[0][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("samples", ["hard", "soft"])
def test_nothing_changes_at_padding_in_training(base, samples):
    mixer = mixers(baleen.convert(base, "bernoulli", samples=samples, tau=20.0))[0].train()
    log_a = baleen.compute_terms(mixer, torch.randn(2, 7, 16), MASK).recurrence.log_a
    assert not log_a[1, 5:].any() and log_a[MASK.bool()].any()


def test_the_ends_of_what_is_drawn_are_finite(base, monkeypatch):
    """Uniform numbers are from 0 on, and below 1 as float32 has it."""
    drawn = torch.tensor([0.0, 1.0, 0.5, 0.25])
    monkeypatch.setattr(torch, "rand_like", lambda t: drawn.to(t).expand(t.shape) if t.shape[-1] == 4 else 0 * t)
    soft = baleen.sample_log_gates(torch.tensor([0.5] * 4, dtype=torch.float64).log(), 2.0, "soft")
    inner = torch.tensor([1e-7, 1 - 1e-7, 0.5, 0.25], dtype=torch.float64)
    torch.testing.assert_close(soft, torch.nn.functional.logsigmoid(inner.logit() / 2))
    hard = baleen.sample_log_gates(torch.tensor([0.5] * 4).log(), 2.0)
    assert hard.tolist() == [-30, 0, -30, -30]
    mixer = mixers(baleen.convert(base, "exponential"))[0]
    u = torch.randn(1, 3, 16)
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    found, plain = (baleen.compute_terms(mixer.train(mode), u).recurrence.delta for mode in (True, False))
    torch.testing.assert_close(found, plain * 16.118095651)  # −log 10⁻⁷


def test_a_prior_that_is_given_stays(base, tmp_path):
    model = baleen.convert(base, "exponential", prior=0.3)
    assert model.config.prior == 0.3 and baleen.prior_of(mixers(model)[1]) == 0.3
    mixer = mixers(model)[0].train()
    layer = baleen.compute_terms(mixer, torch.randn(1, 1, 16))
    assert layer.extras["kl"].item() == pytest.approx(
        baleen.exponential_kl(baleen.compute_terms(mixer.eval(), layer.u).recurrence.delta, 0.3).mean().item()
    )
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.prior == 0.3
    each = baleen.convert(base, "exponential", prior=[0.2, 0.4])
    assert [baleen.prior_of(mixer) for mixer in mixers(each)] == [0.2, 0.4] and baleen.convert(
        base, "bernoulli"
    ).config.prior is None


def test_what_can_become_a_baleen(base):
    own = type(type(base).__name__, (type(base),), {"__module__": __name__})
    for module in (own(base.config), torch.nn.Linear(1, 1), type("GPT", (), {"__module__": "transformers.models"})()):
        said = (
            f"{type(module).__name__} cannot become a Baleen: give one of MambaModel, MambaForCausalLM, Mamba2Model, "
        )
        refuses(said, baleen.convert, module, "bernoulli")
    alone = baleen.convert(base.base_model, "bernoulli", beta=0.5)
    assert type(alone).__name__ == f"Baleen{type(base).__name__.removesuffix('ForCausalLM')}Model"
    weights = {"bernoulli": 0.01, "exponential": 0.5}
    assert {gate: baleen.convert(base, gate).config.kl_weight for gate in weights} == weights
    assert alone.config.kl_weight == 0.5 and baleen.convert(base, "bernoulli", beta=0.0).config.kl_weight == 0


@pytest.mark.parametrize("gate", ["bernoulli", "exponential"])
def test_a_sum_over_positions_is_the_mean_times_their_number(base, gate):
    positions = 7 - (gate == "bernoulli")  # the first gate acts on an empty memory
    every = torch.ones_like(MASK)
    mean, total = (divergence(baleen.convert(base, gate, kl_over=how), mask=every) for how in ("mean", "sum"))
    torch.testing.assert_close(total, positions * mean)
    mixer = mixers(baleen.convert(base, gate, kl_over="sum"))[0].train()
    torch.manual_seed(2)
    u = torch.randn(2, 7, 16)
    together = baleen.compute_terms(mixer, u, MASK).extras["kl"]
    singly = [baleen.compute_terms(mixer, u[i : i + 1, :n]).extras["kl"] for i, n in enumerate((7, 5))]
    torch.testing.assert_close(together, torch.stack(singly).mean())


def test_a_prior_for_every_head(base, tmp_path):
    model = baleen.convert(base, "exponential", prior_per="head")
    mixer = mixers(model)[0]
    bias = mixer.dt_proj.bias if isinstance(mixer, baleen.BaleenMambaMixer) else mixer.dt_bias
    steps = torch.nn.functional.softplus(bias.detach())
    torch.testing.assert_close(torch.tensor(model.config.prior[0]), steps)
    u = torch.randn(2, 7, 16)
    layer = baleen.compute_terms(mixer.train(), u)
    delta = baleen.compute_terms(mixer.eval(), u).recurrence.delta
    torch.testing.assert_close(layer.extras["kl"], baleen.exponential_kl(delta, steps).mean())
    one = baleen.convert(base, "exponential")
    assert one.config.prior[0] == pytest.approx(steps.log().mean().exp().item())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.prior == model.config.prior and again.config.prior_per == "head"
    torch.testing.assert_close(divergence(again), divergence(model))


def test_the_divergence_is_from_the_annealed_prior(base):
    model, other = baleen.convert(base, "bernoulli"), baleen.convert(base, "bernoulli", prior=0.9)
    baleen.anneal_prior(model, 0.9)
    torch.testing.assert_close(divergence(model), divergence(other))
    baleen.anneal_prior(model, 0.5)
    torch.testing.assert_close(divergence(model), divergence(baleen.convert(base, "bernoulli")))
    assert model.config.prior is None


def test_the_prior_goes_down_in_steps():
    options = {"prior_from": 0.9, "prior_step": None, "prior_every": None}
    found = [prior_in(epoch, options, 0.5) for epoch in (0, 9, 10, 39, 40, 99)]
    assert found == pytest.approx([0.9, 0.9, 0.8, 0.6, 0.5, 0.5])
    upward = {"prior_from": 0.1, "prior_step": 0.25, "prior_every": 1}
    assert [prior_in(epoch, upward, 0.5) for epoch in range(3)] == pytest.approx([0.1, 0.35, 0.5])


def test_unknown_words_are_refused():
    for given in ({"samples": "soggy"}, {"kl_over": "max"}, {"prior_per": "channel"}):
        refuses("is unknown: choose one of", baleen.BaleenMamba2Config, **given)
