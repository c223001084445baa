"""Whether a model selects: planted time steps, closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from ssmscope.models import baleen
from ssmscope.training.selectivity import selectivity

SIZES = dict(vocab_size=20, hidden_size=16, num_hidden_layers=2, expand=2, state_size=4, num_heads=4, head_dim=8)


def model(gate: str | None = None, **options):
    torch.manual_seed(0)
    module = Mamba2ForCausalLM(Mamba2Config(**SIZES, n_groups=1, chunk_size=8))
    return module if gate is None else baleen.convert(module, gate, **options)


def steps_without_tokens(module) -> None:
    """Let Δ be its bias's softplus, whatever is read."""
    for block in module.backbone.layers:
        block.mixer.in_proj.weight.data[-4:] = 0


BATCHES = [{"input_ids": torch.arange(12).view(2, 6)}, {"input_ids": torch.arange(7).view(1, 7)}]


def test_steps_that_do_not_vary_select_nothing_and_have_half_lives_in_closed_form():
    module = model()
    steps_without_tokens(module)
    for layer, record in enumerate(selectivity(module, BATCHES)):
        mixer = module.backbone.layers[layer].mixer
        rate = torch.nn.functional.softplus(mixer.dt_bias) * mixer.A_log.exp()
        assert record["layer"] == layer and record["selective"] == 0.0 and "kl" not in record
        assert max(record["variation"]) < 1e-3
        assert record["half_life"] == pytest.approx((math.log(2) / rate).tolist(), abs=0.01)


def test_steps_are_summed_over_all_tokens_of_all_batches():
    module = model().train()
    found = selectivity(module, BATCHES)
    deltas = []
    with torch.no_grad():
        module.backbone.layers[0].mixer.register_forward_pre_hook(lambda _, given: deltas.append(given[0]))
        for batch in BATCHES:
            module(**batch)
    mixer = module.backbone.layers[0].mixer
    rows = torch.cat([mixer.in_proj(u)[..., -4:].flatten(0, 1) for u in deltas])
    delta = torch.nn.functional.softplus(rows + mixer.dt_bias).detach()
    assert found[0]["variation"] == pytest.approx((delta.std(0, correction=0) / delta.mean(0)).tolist(), abs=1e-3)
    assert module.training


@pytest.mark.parametrize("per", ["layer", "head"])
def test_the_divergence_of_steps_at_their_prior(per):
    module = model("exponential", prior_per=per)
    steps_without_tokens(module)
    for layer, record in enumerate(selectivity(module, BATCHES)):
        delta = torch.nn.functional.softplus(module.backbone.layers[layer].mixer.dt_bias).double()
        exact = 0.0 if per == "head" else baleen.exponential_kl(delta, module.config.prior[layer]).mean().item()
        assert record["kl"] == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("samples", ["hard", "soft"])
def test_the_divergence_of_gates_is_that_of_their_keep_probability(samples):
    module = model("bernoulli", samples=samples)
    steps_without_tokens(module)
    record = selectivity(module, BATCHES)[0]
    mixer = module.backbone.layers[0].mixer
    log_keep = -torch.nn.functional.softplus(mixer.dt_bias) * mixer.A_log.exp()
    assert record["kl"] == pytest.approx(baleen.bernoulli_kl(log_keep.double(), 0.5).mean().item(), rel=1e-5)
