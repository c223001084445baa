"""Checkpoints of flash-linear-attention give the logits of its layers' definitions, written out step by step."""

import functools
from typing import Any

import by_hand
import pytest
import torch
from by_hand import attended, below, convolved, turned
from examples import relative
from loud import loud
from refusals import refuses
from saving import saved
from torch import Tensor
from torch.nn.functional import logsigmoid, silu, softplus
from transformers import Mamba2Config, Mamba2ForCausalLM
import ssmscope
from ssmscope.errors import InputError
from ssmscope.zoo.documents import byte_tokenizer

IDS = [5, 17, 3, 9, 22, 1, 4, 60]
STEPS = 3
"""Steps a token of the delta product."""
VOCABULARY, WIDTH, LAYERS, HEADS, SLOTS, INNER, EPS, TAPS = 67, 24, 3, 3, 5, 40, 1e-2, 3  # an epsilon that is seen
CONFIGS: dict[str, dict[str, Any]] = {
    "gated_deltanet": dict(head_dim=4, expand_v=1.5, allow_neg_eigval=True, num_v_heads=None),
    "gated_deltaproduct": dict(head_dim=4, expand_v=1.5, use_forget_gate=True, num_householder=STEPS),
    "kda": dict(head_dim=4, expand_v=1.5, allow_neg_eigval=True),
    "comba": dict(head_dim=4, expand_v=1.5),
    "delta_net": dict(expand_k=0.5, expand_v=1.0, tie_word_embeddings=True),
    "gla": dict(expand_k=0.5, expand_v=1.0, fuse_norm=True),
    "retnet": dict(expand_k=1.0),
    "hgrn": dict(use_lower_bound=True, expand_ratio=1),
    "hgrn, unbounded": dict(use_lower_bound=False, expand_ratio=1),
    "hgrn2": dict(use_lower_bound=True, expand_ratio=WIDTH // HEADS),
    "gsa": dict(num_slots=SLOTS, gate_logit_normalizer=3, feature_map="swish"),
}
GATED_DELTA = ("gated_deltanet", "gated_deltaproduct", "kda", "comba")
SIZES = {**dict.fromkeys(GATED_DELTA, (12, 18)), "delta_net": (12, 24), "gla": (12, 24), "retnet": (24, 48)}
LINEAR = ("gla", "retnet")
GATED_INPUTS = {"hgrn": "ifgo", "hgrn2": "qfio", "gsa": "qkvfo"}
"""Projections of the families whose new inputs come in by what their gates forget."""


def attention_shapes(kind: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    key, value = SIZES[kind]
    steps = config.get("num_householder", 1)
    shapes: dict[str, tuple[int, ...]] = {"attn.o_proj.weight": (WIDTH, value)}
    sizes = (("q", key), ("k", steps * key), ("v", steps * value))
    shapes |= {f"attn.{name}_proj.weight": (size, WIDTH) for name, size in sizes}
    if kind == "gla":
        shapes |= {"attn.gk_proj.0.weight": (16, WIDTH), "attn.gk_proj.1.weight": (key, 16)}
        shapes |= {"attn.gk_proj.1.bias": (key,)}
    if kind in LINEAR:
        shapes["attn.g_norm_swish_gate.weight"] = (value // HEADS,)
    else:
        shapes |= {f"attn.{n}_conv1d.weight": (size, 1, TAPS) for n, size in sizes}
        shapes |= {"attn.o_norm.weight": (value // HEADS,), "attn.b_proj.weight": (steps * HEADS, WIDTH)}
    if kind == "kda":
        shapes |= {"attn.f_proj.0.weight": (6, WIDTH), "attn.f_proj.1.weight": (12, 6), "attn.A_log": (HEADS,)}
        shapes |= {"attn.g_proj.0.weight": (6, WIDTH), "attn.g_proj.1.weight": (18, 6), "attn.g_proj.1.bias": (18,)}
        shapes["attn.dt_bias"] = (12,)
    elif kind != "delta_net":
        shapes["attn.g_proj.weight"] = (value, WIDTH)
    if kind == "comba":
        shapes |= {"attn.decay": (HEADS,), "attn.D": (HEADS,)}
    if kind in GATED_DELTA and kind != "kda":
        shapes |= {"attn.a_proj.weight": (HEADS, WIDTH), "attn.A_log": (HEADS,), "attn.dt_bias": (HEADS,)}
    return shapes


def gated_shapes(family: str) -> dict[str, tuple[int, ...]]:
    rows = {name: HEADS * SLOTS if (family, name) == ("gsa", "f") else WIDTH for name in GATED_INPUTS[family]}
    return {"attn.g_norm.weight": (WIDTH,)} | {f"attn.{name}_proj.weight": (rows[name], WIDTH) for name in rows}


def checkpoint(kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a configuration and random weights by the library's names."""
    family = kind.partition(",")[0]
    config = dict(
        **dict(model_type=family, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_heads=HEADS, vocab_size=VOCABULARY),
        **dict(intermediate_size=INNER, norm_eps=EPS, conv_size=TAPS, architectures=["ForCausalLM"], attn=None),
        **CONFIGS[kind],
    )
    shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (WIDTH,), "mlp_norm.weight": (WIDTH,)}
    shapes |= {f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (WIDTH, INNER)
    shapes |= gated_shapes(family) if family in GATED_INPUTS else attention_shapes(kind, config)
    torch.manual_seed(3)
    weights = {
        f"model.layers.{layer}.{name}": torch.randn(shape) * (0.5 if len(shape) > 1 else 0.3) + (len(shape) == 1)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    weights |= {"model.embeddings.weight": torch.randn(VOCABULARY, WIDTH), "model.norm.weight": torch.rand(WIDTH) + 1}
    if config.get("use_lower_bound"):
        weights["model.lower_bounds"] = torch.randn(LAYERS, WIDTH)
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = torch.randn(VOCABULARY, WIDTH)
    return config, weights


normed = functools.partial(by_hand.normed, eps=EPS)


def mixed(kind: str, p: dict[str, Tensor], x: Tensor, bound: float | None = None) -> Tensor:
    """Return a layer's output from its input (length, width), token by token and head by head."""
    length, (key, value) = len(x), (size // HEADS for size in SIZES[kind])
    made = {}
    for name in "qkv":
        made[name] = x @ p[f"{name}_proj.weight"].T
        if kind not in LINEAR:
            made[name] = silu(convolved(made[name], p[f"{name}_conv1d.weight"]))
    q, *several = (made[name].view(length, -1, HEADS, size) for name, size in (("q", key), ("k", key), ("v", value)))
    (q, k, v), steps = (each[:, 0] for each in (q, *several)), several[0].shape[1]
    outputs = torch.zeros(length, HEADS, value, dtype=x.dtype)
    for h in range(HEADS):
        S = torch.zeros(key, value, dtype=x.dtype)
        for t in range(length):
            a, b = q[t, h], k[t, h]
            if kind == "retnet":
                a, b = (turned(each, t, key, 10000.0) for each in (a, b))
                S = (1 - 2.0 ** (-5 - h)) * S + torch.outer(b, v[t, h])
            elif kind == "gla":
                gate = x[t] @ p["gk_proj.0.weight"].T @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]
                S = (logsigmoid(gate).view(HEADS, key)[h] / 16).exp()[:, None] * S + torch.outer(b, v[t, h])
            else:
                looked_up = b
                if kind == "comba":
                    looked_up = b * torch.sigmoid(p["decay"][h])
                    a = a - p["D"][h] * looked_up
                a, b, looked_up = (each / (each.square().sum() + 1e-6).sqrt() for each in (a, b, looked_up))
                beta = (2 if kind in ("gated_deltanet", "kda") else 1) * torch.sigmoid(x[t] @ p["b_proj.weight"][h])
                if kind == "kda":
                    step = x[t] @ p["f_proj.0.weight"].T @ p["f_proj.1.weight"].T + p["dt_bias"]
                    step, rate = step.view(HEADS, key)[h], p["A_log"][h].exp()
                    g = -rate * softplus(step) if bound is None else bound / (1 + (-rate * step).exp())
                    S = g.exp()[:, None] * S
                elif kind in GATED_DELTA:
                    before = S
                    S = S * (-p["A_log"][h].exp() * softplus(x[t] @ p["a_proj.weight"][h] + p["dt_bias"][h])).exp()
                # Comba's kernels look up before the decay, the other rules' after it.
                found = looked_up @ (before if kind == "comba" else S)
                S = S + beta * torch.outer(b, v[t, h] - found)
                for step in range(1, steps):
                    b, written = (each[t, step, h] for each in several)
                    b = b / (b.square().sum() + 1e-6).sqrt()
                    beta = torch.sigmoid(x[t] @ p["b_proj.weight"][step * HEADS + h])
                    S = S + beta * torch.outer(b, written - b @ S)
            outputs[t, h] = (a * key**-0.5) @ S
    o = normed(outputs, p["g_norm_swish_gate.weight" if kind in LINEAR else "o_norm.weight"]).reshape(length, -1)
    if kind == "kda":
        o = o * torch.sigmoid(x @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"])
    elif kind != "delta_net":
        o = o * (torch.sigmoid if kind == "comba" else silu)(x @ p["g_proj.weight"].T)
    return o @ p["o_proj.weight"].T


def gated(family: str, p: dict[str, Tensor], x: Tensor, low: Tensor) -> Tensor:
    """Return the output of a layer of HGRN, HGRN2 or GSA whose gates are at least `low`, token by token."""
    size, rows = WIDTH // HEADS, []
    numbers = torch.zeros(WIDTH).double()
    matrices = [torch.zeros(size, size).double() for _ in range(HEADS)]
    slots = [(torch.zeros(SLOTS, size).double(), torch.zeros(SLOTS, size).double()) for _ in range(HEADS)]
    for u in x:
        made = {name: p[f"{name}_proj.weight"] @ u for name in GATED_INPUTS[family] if name != "o"}
        f, out = made["f"].sigmoid(), []
        f = f ** (1 / 3) if family == "gsa" else low + (1 - low) * f
        if family == "hgrn":
            numbers = f * numbers + (1 - f) * silu(made["i"])
            rows.append(normed(numbers, p["g_norm.weight"]) * silu(made["g"]))
            continue
        for h in range(HEADS):
            s = slice(h * size, (h + 1) * size)
            if family == "hgrn2":
                matrices[h] = f[s, None] * matrices[h] + torch.outer(1 - f[s], made["i"][s])
                out.append(silu(made["q"][s]) @ matrices[h] * size**-0.5)
            else:
                gate = f[h * SLOTS : (h + 1) * SLOTS, None]
                keys, values = (gate * t + (1 - gate) * silu(made[n][s]) for t, n in zip(slots[h], "kv"))
                slots[h] = keys, values
                out.append(silu((keys @ silu(made["q"][s])).softmax(0) @ values))
        rows.append(normed(torch.cat(out), p["g_norm.weight"], eps=1e-5))
    return torch.stack(rows) @ p["o_proj.weight"].T


def attention(p: dict[str, Tensor], x: Tensor, o: dict[str, Any]) -> Tensor:
    """A layer of softmax attention: heads of keys shared by neighbouring heads of queries, and a window."""
    size = WIDTH // o["num_heads"]
    q, k, v = ((x @ p[f"{n}_proj.weight"].T + p.get(f"{n}_proj.bias", 0)).view(len(x), -1, size) for n in "qkv")
    turn = functools.partial(turned, size=size, base=o["rope_theta"])
    return attended(q, k, v, size**-0.5, turn, o["window_size"]) @ p["o_proj.weight"].T


def logits(
    kind: str, weights: dict[str, Tensor], attending: list[dict[str, Any]] | None = None, bound: float | None = None
) -> Tensor:
    w = {name: tensor.double() for name, tensor in weights.items()}
    x, family = w["model.embeddings.weight"][IDS], kind.partition(",")[0]
    shares = w["model.lower_bounds"].softmax(0) if "model.lower_bounds" in w else torch.zeros(LAYERS, WIDTH).double()
    for layer in range(LAYERS):
        own = below(p := below(w, f"model.layers.{layer}."), "attn.")
        options = next((each for each in attending or [] if layer in each["layers"]), None)
        u = normed(x, p["attn_norm.weight"])
        if options is not None:
            x = x + attention(own, u, options)
        elif family in GATED_INPUTS:
            x = x + gated(family, own, u, shares[1 : layer + 1].sum(0))
        else:
            x = x + mixed(kind, own, u, bound)
        inner = normed(x, p["mlp_norm.weight"])
        gate, up = (inner @ p[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ p["mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embeddings.weight"])
    return normed(x, w["model.norm.weight"]) @ head.T


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_the_definition(kind, tmp_path):
    config, weights = checkpoint(kind)
    weights = {name: tensor.double() / 3 for name, tensor in weights.items()}  # digits that float32 has not
    model = ssmscope.load(saved(tmp_path / "theirs", config, weights), dtype="float64")
    batch = model.encode(ids=[IDS, IDS[:3]])
    expected = logits(kind, weights)
    found = model.logits(batch)
    assert relative(found[0], expected) < 1e-9 and relative(found[1, :3], expected[:3]) < 1e-9
    model.module.save_pretrained(tmp_path / "ours")
    again = ssmscope.load(tmp_path / "ours", dtype="float64")
    assert again.fingerprint == model.fingerprint and torch.equal(again.logits(batch), found)
    for name in [each for each in weights if each.endswith("mlp.gate_proj.weight")]:  # as stored before 2025
        weights[name] = torch.cat([weights[name], weights.pop(name.replace("gate_proj", "up_proj"))])
    assert torch.equal(ssmscope.load(saved(tmp_path, config, weights), dtype="float64").logits(batch), found)


@pytest.mark.parametrize("named", [None, 5])
def test_a_converted_model_ends_with_its_own_token_or_the_tokenizers(named, tmp_path):
    """The settings that our class starts with are not the checkpoint's."""
    config, weights = checkpoint("gla")
    path = saved(tmp_path / "theirs", config | ({} if named is None else {"eos_token_id": named}), weights)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(7)
    tokenizer.save_pretrained(path)
    assert ssmscope.load(path).module.generation_config.eos_token_id == (named or 7)


def test_a_delta_product_of_one_step_with_a_forget_gate_is_a_deltanet(tmp_path):
    config, weights = checkpoint("gated_deltanet")
    one = {**config, "model_type": "gated_deltaproduct", "use_forget_gate": True, "num_householder": 1}
    found, same = (ssmscope.load(saved(tmp_path / each["model_type"], each, weights)) for each in (one, config))
    assert found.architecture == "ssm-deltanet" and found.fingerprint == same.fingerprint
    forgets = ("a_proj.weight", "A_log", "dt_bias")
    rest = {name: tensor for name, tensor in weights.items() if not name.endswith(forgets)}
    other = ssmscope.load(saved(tmp_path / "other", {**one, "use_forget_gate": False}, rest), dtype="float64")
    weights = {name: torch.full_like(t, -1e9) if name.endswith("A_log") else t for name, t in weights.items()}
    expected = logits("gated_deltanet", weights)
    assert (
        other.architecture == "ssm-deltaproduct" and relative(other.logits(other.encode(ids=IDS))[0], expected) < 1e-9
    )


def test_a_lower_bound_of_decays(tmp_path):
    config, weights = checkpoint("kda")
    given = {**config, "safe_gate": True, "lower_bound": -3.0}
    model = ssmscope.load(saved(tmp_path, given, weights), dtype="float64")
    found, expected = model.logits(model.encode(ids=IDS))[0], logits("kda", weights, bound=-3.0)
    assert relative(found, expected) < 1e-9 and relative(found, logits("kda", weights)) > 1e-3
    for bound in (0.0, 1, "low", True, -100):
        with pytest.raises(InputError, match="lower_bound is .*; allowed is null, or a negative number"):
            ssmscope.load(saved(tmp_path, {**config, "lower_bound": bound}, weights))


@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_of_softmax_attention_stand_between_the_others(kind, tmp_path):
    config, weights = checkpoint(kind)
    options = dict(layers=[1], num_heads=4, num_kv_heads=2, qkv_bias=True, window_size=3, rope_theta=500.0)
    kept = {name: each for name, each in weights.items() if not name.startswith("model.layers.1.attn.")}
    shapes = {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2}
    for name, size in shapes.items():
        kept[f"model.layers.1.attn.{name}_proj.weight"] = torch.randn(size, WIDTH)
        kept[f"model.layers.1.attn.{name}_proj.bias"] = torch.randn(size)
    kept["model.layers.1.attn.o_proj.weight"] = torch.randn(WIDTH, WIDTH)
    given = options if kind != "gla" else [options]
    model = ssmscope.load(saved(tmp_path, {**config, "attn": given}, kept), dtype="float64")
    batch, expected = model.encode(ids=[IDS, IDS[:3]]), logits(kind, kept, [options])
    found = model.logits(batch)
    assert relative(found[0], expected) < 1e-9 and relative(found[1, :3], expected[:3]) < 1e-9
    assert relative(logits(kind, kept, [{**options, "window_size": None}]), expected) > 1e-3
    first = model.run(model.encode(ids=[IDS[:5], IDS[:2]]))
    second = model.run(model.encode(ids=[IDS[5:], IDS[2:5]]), first.states).logits
    assert relative(second[0], expected[5:]) < 1e-9 and relative(second[1, :3], expected[2:5]) < 1e-9
    maps = ssmscope.attention(model, model.encode(ids=IDS))[0].maps
    assert [each.layer for each in maps] == ["0", "1 attention", "2"]


def test_what_our_layers_do_not_have_is_refused(tmp_path):
    for kind, change, words in (
        ("gated_deltanet", {"attn": {"layers": [1]}}, "attention has no layers or num_heads"),
        ("gla", {"attn": "some"}, "attn is 'some'; allowed is options of attention for some layers, or None"),
        ("gla", {"attn": {"layers": [3], "num_heads": 2}}, "attention has the layers .3.: give a list, .* from 0 to 2"),
        ("gla", {"attn": {"layers": [1], "num_heads": 5}}, "attention has 5 heads, .* share the width, 24, in pairs"),
        ("gated_deltanet", {"num_v_heads": 6}, "num_v_heads is 6; allowed is None"),
        ("gated_deltaproduct", {"num_householder": 2}, "do not fit its configuration"),
        ("gated_deltaproduct", {"num_householder": 0}, "householders 0 must be a positive integer"),
        ("gated_deltaproduct", {"use_forget_gate": None}, "do not fit its configuration"),
        ("comba", {"use_output_gate": False}, "use_output_gate is false; allowed is True"),
        ("delta_net", {"use_gate": True}, "use_gate is true; allowed is False"),
        ("gla", {"norm_eps": "small"}, "norm_eps is 'small'; allowed is a number"),
        ("hgrn", {"use_short_conv": True}, "use_short_conv is true; allowed is False"),
        ("hgrn", {"expand_ratio": 2}, "expand_ratio is 2; allowed is 1"),
        ("gsa", {"feature_map": "relu"}, "feature_map is 'relu'; allowed is 'swish'"),
        ("gsa", {"num_slots": 6}, "f_proj.weight is 15 × 24, and the model's is 18 × 24"),
        ("gla", {"num_heads": 4}, "do not fit its configuration"),
        ("retnet", {"num_heads": 0}, "num_heads 0 must be an integer, 1 or more"),
        ("delta_net", {"num_heads": 0}, "cannot be built from its config.json"),
        ("gated_deltanet", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; allowed is no more than"),
        ("gated_deltanet", {"head_dim": 10**6}, "it describes a model of more than"),
    ):
        config, weights = checkpoint(kind)
        refuses(words, ssmscope.load, saved(tmp_path, {**config, **change}, weights))


def test_mamba2_is_transformers_with_its_own_fields(tmp_path):
    torch.manual_seed(0)
    shared = dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, expand=2, head_dim=8, num_heads=4)
    shared |= dict(state_size=4, n_groups=1, chunk_size=8, tie_word_embeddings=False)
    module = loud(Mamba2ForCausalLM(Mamba2Config(**shared, layer_norm_epsilon=EPS, time_step_limit=(0.1, 0.7))))
    config = {"model_type": "mamba2", **shared, "norm_eps": EPS, "dt_limit": [0.1, 0.7], "hidden_act": "silu"}
    weights = {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    model = ssmscope.load(saved(tmp_path, config, weights))
    with torch.no_grad():
        own = module(torch.tensor([IDS]), use_cache=False).logits
    assert relative(model.logits(model.encode(ids=IDS)), own) < 1e-5
    with pytest.raises(InputError, match="hidden_act is 'gelu'; allowed is 'silu'"):
        ssmscope.load(saved(tmp_path, {**config, "hidden_act": "gelu"}, weights))
