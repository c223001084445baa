"""Checkpoints of flash-linear-attention's RWKV-7 give the logits of the paper's equations, written out step by step."""

from typing import Any

import pytest
import torch
from examples import relative
from refusals import refuses
from saving import saved
from torch import Tensor
import ssmscope
from ssmscope.errors import InputError

IDS = [5, 17, 3, 9, 22, 1, 4, 60]
VOCABULARY, WIDTH, LAYERS, HEAD, INNER, EPS = 67, 24, 3, 8, 40, 1e-3
RANKS = {"decay_low_rank_dim": 5, "a_low_rank_dim": 6, "v_low_rank_dim": 4, "gate_low_rank_dim": 7}


def checkpoint(**options) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a configuration and random weights by the library's names."""
    config = dict(model_type="rwkv7", hidden_size=WIDTH, num_hidden_layers=LAYERS, head_dim=HEAD, vocab_size=VOCABULARY)
    config |= dict(num_heads=WIDTH // HEAD, intermediate_size=INNER, norm_eps=EPS, value_dim=[WIDTH] * LAYERS, **RANKS)
    config |= {**dict(hidden_act="sqrelu", attn=None, norm_first=True, norm_bias=True, fuse_norm=False), **options}
    torch.manual_seed(3)
    weights = {"model.embeddings.weight": torch.randn(VOCABULARY, WIDTH), "lm_head.weight": torch.randn(67, WIDTH)}
    norms = ["model.norm", "model.layers.0.pre_norm"] * config["norm_first"] or ["model.norm"]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        norms += [f"{at}.attn_norm", f"{at}.ffn_norm", f"{at}.attn.g_norm"]
        weights |= {f"{at}.attn.x_{name}": torch.rand(1, 1, WIDTH) for name in "rwkvag"}
        weights |= {f"{at}.attn.{name}": torch.rand(WIDTH) + 0.5 for name in ("k_k", "k_a")}
        weights |= {f"{at}.attn.{name}_proj.weight": torch.randn(WIDTH, WIDTH) * 0.3 for name in "rkvo"}
        weights[f"{at}.attn.r_k"] = torch.randn(WIDTH // HEAD, HEAD)
        for name, rank in zip("wavg", RANKS.values()):
            if name != "v" or layer:
                weights[f"{at}.attn.{name}_lora.lora.0.weight"] = torch.randn(rank, WIDTH) * 0.5
                weights[f"{at}.attn.{name}_lora.lora.2.weight"] = torch.randn(WIDTH, rank)
                if name != "g":
                    weights[f"{at}.attn.{name}_lora.lora.2.bias"] = torch.randn(WIDTH)
        weights |= {f"{at}.ffn.x_k": torch.rand(WIDTH), f"{at}.ffn.key.weight": torch.randn(INNER, WIDTH) * 0.2}
        weights[f"{at}.ffn.value.weight"] = torch.randn(WIDTH, INNER) * 0.2
    for name in norms:
        weights[f"{name}.weight"] = torch.rand(WIDTH) + 0.5
        if config["norm_bias"] or name.endswith("g_norm"):
            weights[f"{name}.bias"] = torch.randn(WIDTH) * 0.3
    return config, weights


def normed(x: Tensor, w: dict[str, Tensor], name: str, eps: float = EPS) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def logits(weights: dict[str, Tensor], unit: float) -> Tensor:
    """Compute logits by section 4 of the paper, one token, layer and head at a time."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    states = [torch.zeros(WIDTH // HEAD, HEAD, HEAD).double() for _ in range(LAYERS)]
    shown = [[torch.zeros(WIDTH).double()] * 2 for _ in range(LAYERS)]
    rows = []
    for token in IDS:
        x = w["model.embeddings.weight"][token]
        if "model.layers.0.pre_norm.weight" in w:
            x = normed(x, w, "model.layers.0.pre_norm")
        for layer in range(LAYERS):
            at = f"model.layers.{layer}"
            p = {name.removeprefix(f"{at}.attn."): each for name, each in w.items() if name.startswith(f"{at}.attn.")}
            new, old = normed(x, w, f"{at}.attn_norm"), shown[layer][0]
            shown[layer][0] = new
            mixed = {name: new + (old - new) * p[f"x_{name}"].flatten() for name in "rwkvag"}

            def low_rank(name, act, mixed=mixed, p=p):
                inner = act(p[f"{name}_lora.lora.0.weight"] @ mixed[name])
                return p[f"{name}_lora.lora.2.weight"] @ inner + p.get(f"{name}_lora.lora.2.bias", 0)

            r, k, v = (p[f"{name}_proj.weight"] @ mixed[name] for name in "rkv")
            decay = (-(torch.tensor(-0.5).double().exp()) * low_rank("w", torch.tanh).sigmoid()).exp()
            rate, gate = low_rank("a", lambda t: t).sigmoid(), low_rank("g", torch.sigmoid)
            if layer == 0:
                first = v
            else:
                v = v + (first - v) * low_rank("v", lambda t: t).sigmoid()
            removed, k = k * p["k_k"], k * (1 + (rate - 1) * p["k_a"])
            out = []
            for head in range(WIDTH // HEAD):
                s = slice(head * HEAD, (head + 1) * HEAD)
                key = removed[s] / ((removed[s].square().sum() + unit).sqrt())
                erased = torch.outer(key, rate[s] * key)
                S = states[layer][head] @ (torch.diag(decay[s]) - erased)
                states[layer][head] = S = S + torch.outer(v[s], k[s])
                o = S @ r[s]
                o = (o - o.mean()) / (o.var(correction=0) + HEAD * EPS).sqrt()
                o = o * p["g_norm.weight"][s] + p["g_norm.bias"][s]
                bonus = (r[s] * k[s] * p["r_k"][head]).sum()
                out.append(o + bonus * v[s])
            x = x + p["o_proj.weight"] @ (torch.cat(out) * gate)
            new, old = normed(x, w, f"{at}.ffn_norm"), shown[layer][1]
            shown[layer][1] = new
            inner = w[f"{at}.ffn.key.weight"] @ (new + (old - new) * w[f"{at}.ffn.x_k"])
            x = x + w[f"{at}.ffn.value.weight"] @ inner.clamp(min=0).square()
        rows.append(w["lm_head.weight"] @ normed(x, w, "model.norm"))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("options", "unit"), [({}, 0.0), ({"fuse_norm": True, "norm_bias": False, "norm_first": False}, 1e-6)]
)
def test_logits_are_those_of_the_paper(options, unit, tmp_path):
    config, weights = checkpoint(**options)
    model = ssmscope.load(saved(tmp_path / "theirs", config, weights), dtype="float64")
    batch = model.encode(ids=[IDS, IDS[:3]])
    expected, found = logits(weights, unit), model.logits(batch)
    assert relative(found[0], expected) < 1e-9 and relative(found[1, :3], expected[:3]) < 1e-9
    model.module.save_pretrained(tmp_path / "ours")
    again = ssmscope.load(tmp_path / "ours", dtype="float64")
    assert again.fingerprint == model.fingerprint and torch.equal(again.logits(batch), found)
    for layer in range(LAYERS):  # as stored before March 2025
        names = [f"model.layers.{layer}.attn.x_{name}" for name in "rwkvag"]
        weights[names[0][:-1] + "x"] = torch.stack([weights.pop(name).flatten() for name in names])
    assert torch.equal(ssmscope.load(saved(tmp_path, config, weights), dtype="float64").logits(batch), found)


def test_what_is_asked_of_any_model_is_answered(tmp_path):
    model = ssmscope.load(saved(tmp_path, *checkpoint()), dtype="float64")
    batch = model.encode(ids=[IDS])
    heat = ssmscope.heatmap(model, batch)
    assert abs(heat[0].scores.sum(-1) - 1).max() < 1e-6
    assert [each.layer for each in ssmscope.attention(model, batch)[0].maps] == ["0", "1", "2"]
    with pytest.raises(InputError, match="the largest gain of a step is not known for a delta rule with a decay per"):
        ssmscope.stability(model, batch)


def test_what_our_layers_do_not_have_is_refused(tmp_path):
    for change, words in (
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; allowed is 'sqrelu'"),
        ({"decay_low_rank_dim": 9}, "w_lora.into.weight is 5 × 24, and the model's is 9 × 24"),
        ({"intermediate_size": 0}, "intermediate_size 0: an RWKV-7 has a channel mixing"),
    ):
        config, weights = checkpoint()
        refuses(words, ssmscope.load, saved(tmp_path, {**config, **change}, weights))
