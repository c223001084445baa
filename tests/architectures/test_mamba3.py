"""Mamba-3: its scan and mamba_ssm's models of it against a slow reference, with the state as complex numbers."""

import math
from typing import Any

import packaged
import pytest
import torch
from by_hand import normed
from examples import random_example, relative
from loud import TrueFloat64
from packaged import IDS, WIDTH, check_logits, in_memory, reference
from refusals import refuses
from saving import saved
from torch import Tensor
from torch.nn.functional import silu, softplus
import ssmscope
from ssmscope.core.model import Model
from ssmscope.layers import mamba3

STATE, HEAD = 8, 8
INNER = 2 * WIDTH
HEADS = INNER // HEAD
PLAIN_OPTIONS: dict[str, Any] = {"layer": "Mamba3", "d_state": STATE, "headdim": HEAD, "is_mimo": False, "mimo_rank": 4}
OTHER_OPTIONS = {**PLAIN_OPTIONS, "ngroups": 3, "rope_fraction": 1.0, "is_outproj_norm": True, "A_floor": 0.8}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"ssm_cfg": PLAIN_OPTIONS},
    "other": {"ssm_cfg": OTHER_OPTIONS, "d_intermediate": 130, "tie_embeddings": False},
    "softplus": {"ssm_cfg": {**PLAIN_OPTIONS, "decay": "softplus"}},
}


def stored(config: dict[str, Any]) -> dict[str, Tensor]:
    cfg = config["ssm_cfg"]
    pairs, groups = int(STATE * cfg.get("rope_fraction", 0.5)) // 2, cfg.get("ngroups", 1)

    def mixer(layer: int) -> dict[str, Tensor]:
        return {
            "in_proj.weight": torch.randn(2 * INNER + 2 * groups * STATE + 3 * HEADS + pairs, WIDTH) / 4,
            "dt_bias": torch.rand(HEADS) * 3 - 3,
            "D": torch.randn(HEADS),
            **{f"{name}_bias": torch.randn(HEADS, 1, STATE) for name in "BC"},
            **{f"{name}_norm.weight": 1 + torch.randn(STATE) / 3 for name in "BC"},
            **({"norm.weight": 1 + torch.randn(INNER) / 3} if cfg.get("is_outproj_norm") else {}),
            "out_proj.weight": torch.randn(WIDTH, INNER) / 4,
        }

    return packaged.stored(config, mixer)


def complex_pairs(t: Tensor) -> Tensor:
    return torch.complex(t[..., ::2], t[..., 1::2])


def mixer(u: Tensor, w: dict[str, Tensor], cfg: dict[str, Any]) -> Tensor:
    """One head and one step after the other: the state, of complex numbers, is turned and decays, then what the token
    before gave is written, turned and decayed with it, then what this one gives (Mamba-3, the trapezoidal rule)."""
    groups, pairs = cfg.get("ngroups", 1), int(STATE * cfg.get("rope_fraction", 0.5)) // 2
    sizes = [INNER, INNER, groups * STATE, groups * STATE, HEADS, HEADS, HEADS, pairs]
    z, x, B, C, step, rate, share, theta = (u @ w["in_proj.weight"].T).split(sizes, dim=-1)
    delta, share = softplus(step + w["dt_bias"]), torch.sigmoid(share)
    positive = softplus(rate) if cfg.get("decay") == "softplus" else torch.where(rate >= 0, 1 + rate, 1 / (1 - rate))
    A = -positive.clamp(min=cfg.get("A_floor", 1e-4))
    rows = torch.zeros(len(u), HEADS, HEAD).double()
    for head in range(HEADS):
        of = head // (HEADS // groups)
        b, c = (
            complex_pairs(normed(t.unflatten(-1, (groups, STATE))[:, of], w[f"{n}_norm.weight"]) + w[f"{n}_bias"][head])
            for n, t in (("B", B), ("C", C))
        )
        values = x.unflatten(-1, (HEADS, HEAD))[:, head]
        H = torch.zeros(HEAD, STATE // 2, dtype=torch.complex128)
        for t in range(len(u)):
            angle = torch.zeros(STATE // 2).double()
            angle[:pairs] = math.pi * theta[t].tanh() * delta[t, head]
            moved = (delta[t, head] * A[t, head]).exp() * torch.polar(torch.ones_like(angle), -angle)
            if t:
                H = H + (1 - share[t, head]) * delta[t, head] * torch.outer(values[t - 1], b[t - 1])
            H = moved * H + share[t, head] * delta[t, head] * torch.outer(values[t], b[t])
            rows[t, head] = (H * c[t].conj()).real.sum(-1) + w["D"][head] * values[t]
    if "norm.weight" in w:
        rows = normed(rows, w["norm.weight"].view(HEADS, HEAD))
    return (rows.flatten(1) * silu(z)) @ w["out_proj.weight"].T


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_the_references(kind, tmp_path):
    config = {"d_model": WIDTH, "n_layer": 2, **CONFIGS[kind]}
    check_logits(tmp_path, config, stored(config), lambda layer, u, w: mixer(u, w, config["ssm_cfg"]))


def test_flash_linear_attentions_layout(tmp_path):
    """Its decays are a softplus, and its one epsilon is that of every norm."""
    cfg = {**OTHER_OPTIONS, "decay": "softplus"}
    weights = stored({"ssm_cfg": cfg, "n_layer": 2, "tie_embeddings": False})
    weights["backbone.embeddings.weight"] = weights.pop("backbone.embedding.weight")
    fields: dict[str, Any] = dict(model_type="mamba3", hidden_size=WIDTH, num_hidden_layers=2, state_size=STATE)
    fields |= dict(head_dim=HEAD, n_groups=3, rope_fraction=1.0, is_outproj_norm=True, A_floor=0.8, vocab_size=48)
    model = ssmscope.load(saved(tmp_path, {**fields, "norm_eps": 1e-5}, weights), dtype="float64")
    assert model.config.decay == "softplus" and not model.config.tie_word_embeddings
    with TrueFloat64():
        found = model.logits(model.encode(ids=IDS[:1]))[0]
    names = {"backbone.embedding.weight": weights["backbone.embeddings.weight"], **weights}
    assert relative(found, reference({"n_layer": 2}, names, IDS[0], lambda layer, u, w: mixer(u, w, cfg))) < 1e-10
    other = ssmscope.load(saved(tmp_path, {**fields, "norm_eps": 0.01}, weights))
    norms = [part.eps for part in other.module.modules() if hasattr(part, "eps")]
    assert norms and set(norms) == {0.01} and {mixer.epsilon for mixer in other.mixers} == {0.01}
    for change, words in (({"use_bias": True}, "use_bias is true; allowed is False"), ({"is_mimo": True}, "is_mimo")):
        refuses(words, ssmscope.load, saved(tmp_path, {**fields, **change}, weights))


def test_decays_of_the_first_release_are_told_by_its_class(monkeypatch):
    config = {"d_model": WIDTH, "n_layer": 1, "ssm_cfg": PLAIN_OPTIONS}
    theirs = in_memory(config, stored(config))
    part = theirs.get_submodule("backbone.layers.0.mixer")
    part.__class__ = type("Mamba3", (type(part),), {"__module__": __name__})
    assert ssmscope.load(theirs).config.decay == "softplus"
    monkeypatch.setitem(globals(), "heavy_tail_activation", None)
    assert ssmscope.load(theirs).config.decay == "heavy-tail"


@pytest.mark.parametrize("change, words", [
    ({"is_mimo": True}, r"has several inputs and outputs per head \(is_mimo\), which cannot be read"),
    ({"rope_fraction": 0.25}, "rope_fraction 0.25 of a state of 8: give 0.5 or 1"),
    ({"headdim": 7}, "head_dim 7 must divide the 48 channels"),
    ({"ngroups": 4}, "n_groups 4 the heads"),
    ({"decay": "steep"}, "decay 'steep' is unknown: choose one of heavy-tail, softplus"),
    ({"A_floor": -1.0}, "A_floor is -1.0; allowed is no negative number"),
    ({"d_state": 4}, "do not fit its configuration"),
    ({"layer": "Mamba4"}, "layers 'Mamba4'; Mamba1, Mamba2, Mamba3 can be read"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(change, words):
    config = {"d_model": WIDTH, "n_layer": 2, "ssm_cfg": PLAIN_OPTIONS}
    refuses(words, ssmscope.load, in_memory({**config, "ssm_cfg": {**PLAIN_OPTIONS, **change}}, stored(config)))


def test_a_step_writes_what_two_tokens_give():
    """γ_s of an input is written at once and β_{s+1} with the next one; with λ = 1 there is no second write."""
    model = Model(random_example("mamba3").double())
    u = torch.randn(1, 6, model.config.hidden_size, dtype=torch.float64)
    layer = mamba3.compute_terms(model.mixers[0], u)
    now, before = layer.recurrences
    assert not before.x[:, 0].any() and torch.equal(before.x[:, 1:], now.x[:, :-1])
    assert torch.equal(before.b[:, 1:], now.b[:, :-1]) and torch.equal(now.log_decay(), before.log_decay())
    step = now.delta + before.delta / now.log_decay().squeeze(-1).exp()
    mixer = model.mixers[0]
    delta = softplus(mixer.in_proj(u).split(mixer.sizes, dim=-1)[4] + mixer.dt_bias)
    torch.testing.assert_close(step, delta)
    assert layer.reach == 2 and relative(now.delta, delta) > 0.1
