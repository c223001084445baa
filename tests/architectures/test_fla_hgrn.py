"""Checkpoints of flash-linear-attention's HGRN, HGRN2 and GSA give the logits of the papers' equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import relative
from saving import saved
from torch import Tensor
from torch.nn.functional import silu

import ssmscope
from ssmscope.errors import InputError

IDS = [5, 17, 3, 9, 22, 1, 4, 60]
VOCABULARY, WIDTH, LAYERS, HEADS, SLOTS, INNER, EPS = 67, 24, 3, 3, 5, 40, 1e-2  # an epsilon that is seen
CONFIGS: dict[str, dict[str, Any]] = {
    "hgrn": dict(use_lower_bound=True, expand_ratio=1),
    "hgrn2": dict(use_lower_bound=True, expand_ratio=WIDTH // HEADS, num_heads=HEADS),
    "gsa": dict(num_heads=HEADS, num_slots=SLOTS, gate_logit_normalizer=3, feature_map="swish"),
}
PROJECTIONS = {"hgrn": "ifgo", "hgrn2": "qfio", "gsa": "qkvfo"}


def checkpoint(kind: str, **options) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a configuration and random weights by the library's names."""
    config = dict(model_type=kind, hidden_size=WIDTH, num_hidden_layers=LAYERS, vocab_size=VOCABULARY, norm_eps=EPS)
    config = {**config, "intermediate_size": INNER, **CONFIGS[kind], **options}
    torch.manual_seed(3)
    weights = {"model.embeddings.weight": torch.randn(VOCABULARY, WIDTH), "model.norm.weight": torch.rand(WIDTH) + 1}
    weights["lm_head.weight"] = torch.randn(VOCABULARY, WIDTH)
    if config.get("use_lower_bound"):
        weights["model.lower_bounds"] = torch.randn(LAYERS, WIDTH)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        weights |= {f"{at}.{name}.weight": torch.rand(WIDTH) + 0.5 for name in ("attn_norm", "mlp_norm", "attn.g_norm")}
        weights |= {f"{at}.mlp.{name}_proj.weight": torch.randn(INNER, WIDTH) * 0.3 for name in ("gate", "up")}
        weights[f"{at}.mlp.down_proj.weight"] = torch.randn(WIDTH, INNER) * 0.3
        for name in PROJECTIONS[kind]:
            rows = HEADS * SLOTS if (kind, name) == ("gsa", "f") else WIDTH
            weights[f"{at}.attn.{name}_proj.weight"] = torch.randn(rows, WIDTH) * 0.5
    return config, weights


def normed(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def mixed(kind: str, p: dict[str, Tensor], x: Tensor, bound: Tensor, mistake: str) -> Tensor:
    """Return a layer's output from its input (length, width), token by token."""
    states: list[Tensor] = [torch.zeros(WIDTH).double()] if kind == "hgrn" else []
    size = WIDTH // HEADS
    slots = [(torch.zeros(SLOTS, size).double(), torch.zeros(SLOTS, size).double()) for _ in range(HEADS)]
    matrices = [torch.zeros(size, size).double() for _ in range(HEADS)]
    rows = []
    for u in x:
        made = {name: p[f"{name}_proj.weight"] @ u for name in PROJECTIONS[kind] if name != "o"}
        f = made["f"].sigmoid()
        if kind == "hgrn":
            f = bound + (1 - bound) * f
            states[0] = f * states[0] + (1 - f) * silu(made["i"])
            row = normed(states[0], p["g_norm.weight"]) * silu(made["g"])
        elif kind == "hgrn2":
            f, out = bound + (1 - bound) * f, []
            for h in range(HEADS):
                s = slice(h * size, (h + 1) * size)
                matrices[h] = f[s, None] * matrices[h] + torch.outer(1 - f[s], made["i"][s])
                out.append(silu(made["q"][s]) @ matrices[h] * size**-0.5)
            row = normed(torch.cat(out), p["g_norm.weight"], 1e-5)
        else:
            f, out = f ** (1 / (1 if mistake == "root" else 3)), []
            for h in range(HEADS):
                s, gate = slice(h * size, (h + 1) * size), f[h * SLOTS : (h + 1) * SLOTS, None]
                keys, values = slots[h]
                keys = gate * keys + (1 - gate) * silu(made["k"][s])
                values = gate * values + (1 - gate) * silu(made["v"][s])
                slots[h] = keys, values
                scores = keys @ silu(made["q"][s])
                out.append((scores if mistake == "softmax" else scores.softmax(0)) @ values)
            row = normed(silu(torch.cat(out)), p["g_norm.weight"], 1e-5)
        rows.append(p["o_proj.weight"] @ row)
    return torch.stack(rows)


def logits(kind: str, weights: dict[str, Tensor], mistake: str = "") -> Tensor:
    w = {name: tensor.double() for name, tensor in weights.items()}
    shares = w.get("model.lower_bounds", torch.zeros(LAYERS, WIDTH).double()).softmax(0)
    x = w["model.embeddings.weight"][IDS]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        p = {name.removeprefix(at): tensor for name, tensor in w.items() if name.startswith(at)}
        own = {name.removeprefix("attn."): tensor for name, tensor in p.items() if name.startswith("attn.")}
        bound = shares[1 : layer + 1].sum(0) if "model.lower_bounds" in w else torch.zeros(WIDTH).double()
        x = x + mixed(kind, own, normed(x, p["attn_norm.weight"]), bound * (mistake != "bound"), mistake)
        inner = normed(x, p["mlp_norm.weight"])
        gate, up = (inner @ p[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ p["mlp.down_proj.weight"].T
    return normed(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


@pytest.mark.parametrize(
    ("kind", "options", "mistakes"),
    [
        ("hgrn", {}, ["bound"]),
        ("hgrn", {"use_lower_bound": False}, []),
        ("hgrn2", {}, ["bound"]),
        ("gsa", {}, ["root", "softmax"]),
    ],
)
def test_logits_are_those_of_the_papers(kind, options, mistakes, tmp_path):
    config, weights = checkpoint(kind, **options)
    model = ssmscope.load(saved(tmp_path / "theirs", config, weights), dtype="float64")
    batch = model.encode(ids=[IDS, IDS[:3]])
    expected, found = logits(kind, weights), model.logits(batch)
    assert relative(found[0], expected) < 1e-9 and relative(found[1, :3], expected[:3]) < 1e-9
    for mistake in mistakes:
        assert relative(logits(kind, weights, mistake), expected) > 1e-2
    model.module.save_pretrained(tmp_path / "ours")
    again = ssmscope.load(tmp_path / "ours", dtype="float64")
    assert again.fingerprint == model.fingerprint and torch.equal(again.logits(batch), found)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_layer_of_softmax_attention_is_read(kind, tmp_path):
    """Its numbers are tested with the other families; here, that its weights come to their places."""
    config, weights = checkpoint(kind, attn={"layers": [1], "num_heads": 4, "num_kv_heads": 2})
    weights = {name: each for name, each in weights.items() if not name.startswith("model.layers.1.attn.")}
    rows = {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2, "o": WIDTH}
    own = {f"model.layers.1.attn.{name}_proj.weight": torch.randn(size, WIDTH) for name, size in rows.items()}
    model = ssmscope.load(saved(tmp_path, config, weights | own))
    assert model.layer_numbers == (0, 2)
    found = model.module.state_dict()["backbone.layers.1.mixer.in_proj.weight"]
    assert torch.equal(found, torch.cat([own[f"model.layers.1.attn.{name}_proj.weight"] for name in "qkv"]))


def test_what_our_layers_do_not_have_is_refused(tmp_path):
    for kind, change, words in (
        ("hgrn", {"use_short_conv": True}, "use_short_conv is true; allowed is False"),
        ("hgrn", {"expand_ratio": 2}, "expand_ratio is 2; allowed is 1"),
        ("hgrn2", {"expand_ratio": 7}, "expand_ratio 7 does not divide hidden_size 24"),
        ("gsa", {"feature_map": "relu"}, "feature_map is 'relu'; allowed is 'swish'"),
        ("gsa", {"num_slots": 6}, "f_proj.weight is 15 × 24, and the model's is 18 × 24"),
    ):
        config, weights = checkpoint(kind)
        with pytest.raises(InputError, match=words):
            ssmscope.load(saved(tmp_path, {**config, **change}, weights))
