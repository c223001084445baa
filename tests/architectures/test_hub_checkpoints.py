"""PLaMo 2, Ring-linear and MiniMax-M1 from their published layouts, against their published equations in steps."""

import functools
import math
from typing import Any

import by_hand
import pytest
import torch
from by_hand import attended, below, convolved, scanned, turned
from examples import relative
from loud import TrueFloat64
from packaged import written
from refusals import refuses
from torch import Tensor
from torch.nn.functional import silu, softplus
import ssmscope

IDS = [5, 17, 3, 9, 22, 1, 40, 8]
VOCABULARY, WIDTH, INNER, EPS, HEADS, KEY_HEADS, HEAD = 48, 24, 20, 1e-6, 4, 2, 6
CONFIGS: dict[str, dict[str, Any]] = {
    "plamo2": dict(
        **dict(model_type="plamo2", hidden_size=WIDTH, num_hidden_layers=4, rms_norm_eps=EPS, mamba_num_heads=3),
        **dict(num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, hidden_size_per_head=HEAD, mamba_d_state=5),
        **dict(attention_window_size=2, full_attention_idx=[3], rope_theta=300.0, rope_local_theta=40.0),
        **dict(mamba_d_conv=3, mamba_step=2, mamba_chunk_size=8, intermediate_size=INNER, vocab_size=VOCABULARY),
        **dict(architectures=["Plamo2ForCausalLM"], auto_map={"AutoConfig": "modeling_plamo.Plamo2Config"}),
    ),
    "bailing_moe_linear": dict(
        **dict(
            model_type="bailing_moe_linear", hidden_size=WIDTH, num_hidden_layers=5, rms_norm_eps=EPS, head_dim=HEAD
        ),
        **dict(num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, partial_rotary_factor=2 / 3, rope_theta=40.0),
        **dict(layer_group_size=2, group_norm_size=2, first_k_dense_replace=1, intermediate_size=INNER, num_experts=6),
        **dict(num_experts_per_tok=2, n_group=3, topk_group=2, routed_scaling_factor=2.5, moe_intermediate_size=7),
        **dict(
            num_shared_experts=2, moe_shared_expert_intermediate_size=4, score_function="sigmoid", linear_silu=False
        ),
        **dict(norm_topk_prob=True, use_qk_norm=True, vocab_size=VOCABULARY, tie_word_embeddings=False),
        **dict(architectures=["BailingMoeLinearV2ForCausalLM"], rope_scaling=None, hidden_act="silu"),
    ),
    "minimax_m1": dict(
        **dict(model_type="minimax_m1", hidden_size=WIDTH, num_hidden_layers=4, rms_norm_eps=EPS, head_dim=HEAD),
        **dict(num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, rotary_dim=4, rope_theta=40.0),
        **dict(attn_type_list=[0, 1, 0, 1], intermediate_size=7, num_local_experts=4, num_experts_per_tok=2),
        **dict(layernorm_full_attention_alpha=1.5, layernorm_linear_attention_alpha=1.25, layernorm_mlp_alpha=0.75),
        **dict(layernorm_full_attention_beta=0.5, postnorm=True, vocab_size=VOCABULARY, tie_word_embeddings=False),
        **dict(architectures=["MiniMaxM1ForCausalLM"], shared_intermediate_size=0, hidden_act="silu"),
    ),
}
RANK = 64
QKV = (HEADS + 2 * KEY_HEADS) * HEAD


def plamo2_weights() -> dict[str, Tensor]:
    """Random weights by the published names; layers 1 and 3 have attention."""
    inner, names = 3 * HEAD, ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")
    weights = {"model.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH), "model.norm.weight": torch.randn(WIDTH) / 5}
    for layer in range(4):
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (WIDTH,) for name in names}
        shapes |= {"mlp.gate_up_proj.weight": (2 * INNER, WIDTH), "mlp.down_proj.weight": (WIDTH, INNER)}
        if layer % 2:
            shapes |= {"mixer.qkv_proj.weight": (QKV, WIDTH), "mixer.o_proj.weight": (WIDTH, HEADS * HEAD)}
            shapes |= {"mixer.q_weight": (HEADS, HEAD), "mixer.k_weight": (KEY_HEADS, HEAD)}
        else:
            shapes |= {"mixer.in_proj.weight": (2 * inner, WIDTH), "mixer.conv1d.weight": (inner, 1, 3)}
            shapes |= {"mixer.bcdt_proj.weight": (10 + RANK, inner), "mixer.dt_proj.weight": (3, RANK)}
            shapes |= {"mixer.B_norm_weight": (5,), "mixer.C_norm_weight": (5,), "mixer.dt_norm_weight": (RANK,)}
            shapes |= {"mixer.out_proj.weight": (WIDTH, inner), "mixer.D": (3,)}
            shapes |= {"mixer.A_log": (3,), "mixer.dt_bias": (3,)}
        weights |= {f"model.layers.layers.{layer}.{name}": torch.randn(shape) / 3 for name, shape in shapes.items()}
    return weights


def ring_weights() -> dict[str, Tensor]:
    """Random weights by the published names; layers 1, 3 and the last, 4, have softmax attention."""
    weights = {"model.word_embeddings.weight": torch.randn(VOCABULARY, WIDTH), "model.norm.weight": torch.randn(WIDTH)}
    weights["lm_head.weight"] = torch.randn(VOCABULARY, WIDTH)
    for layer in range(5):
        softmax, inner = layer in (1, 3, 4), HEADS * HEAD
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (WIDTH,)}
        shapes |= {"post_attention_layernorm.weight": (WIDTH,), "attention.dense.weight": (WIDTH, inner)}
        shapes |= {f"attention.{name}_layernorm.weight": (HEAD,) for name in ("query", "key")}
        shapes["attention.query_key_value.weight"] = (QKV if softmax else 3 * inner, WIDTH)
        if not softmax:
            shapes |= {"attention.g_proj.weight": (inner, WIDTH), "attention.g_norm.weight": (inner,)}
        experts = {"mlp.": INNER} if layer == 0 else {f"mlp.experts.{n}.": 7 for n in range(6)}
        experts |= {} if layer == 0 else {"mlp.shared_experts.": 8}
        for at, size in experts.items():
            shapes |= {f"{at}gate_proj.weight": (size, WIDTH), f"{at}up_proj.weight": (size, WIDTH)}
            shapes[f"{at}down_proj.weight"] = (WIDTH, size)
        if layer:
            shapes |= {"mlp.gate.weight": (6, WIDTH), "mlp.gate.expert_bias": (6,)}
        weights |= {f"model.layers.{layer}.{name}": torch.randn(shape) / 3 for name, shape in shapes.items()}
    return weights


def minimax_weights() -> dict[str, Tensor]:
    """Random weights by the published names; layers 1 and 3 have softmax attention."""
    weights = {"model.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH), "model.norm.weight": torch.randn(WIDTH)}
    weights["lm_head.weight"] = torch.randn(VOCABULARY, WIDTH)
    for layer in range(4):
        inner, keys = HEADS * HEAD, KEY_HEADS * HEAD
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (WIDTH,)}
        shapes |= {"post_attention_layernorm.weight": (WIDTH,), "block_sparse_moe.gate.weight": (4, WIDTH)}
        if layer % 2:
            sizes = {"q": inner, "k": keys, "v": keys}
            shapes |= {f"self_attn.{name}_proj.weight": (size, WIDTH) for name, size in sizes.items()}
            shapes["self_attn.o_proj.weight"] = (WIDTH, inner)
        else:
            shapes |= {"self_attn.qkv_proj.weight": (3 * inner, WIDTH), "self_attn.output_gate.weight": (inner, WIDTH)}
            shapes |= {"self_attn.out_proj.weight": (WIDTH, inner), "self_attn.norm.weight": (inner,)}
        for expert in range(4):
            at = f"block_sparse_moe.experts.{expert}."
            shapes |= {f"{at}w1.weight": (7, WIDTH), f"{at}w2.weight": (WIDTH, 7), f"{at}w3.weight": (7, WIDTH)}
        weights |= {f"model.layers.{layer}.{name}": torch.randn(shape) / 3 for name, shape in shapes.items()}
    return weights


normed = functools.partial(by_hand.normed, eps=EPS)


def shifted(weight: Tensor, offset: float) -> Tensor:
    """The weight of a norm, stored without its offset, as it is in float32."""
    return (weight.float() + offset).double()


def softmax_attention(x: Tensor, w: dict[str, Tensor], size: int, base: float, reach: int) -> Tensor:
    """Attention of tokens (length, width) to themselves and the `reach` before, with normed and rotated heads."""
    sizes = [HEADS * HEAD, KEY_HEADS * HEAD, KEY_HEADS * HEAD]
    q, k, v = (t.unflatten(-1, (-1, HEAD)) for t in (x @ w["qkv"].T).split(sizes, dim=-1))
    q, k = (normed(q, w["q"]), normed(k, w["k"])) if "q" in w else (q, k)
    return attended(q, k, v, HEAD**-0.5, lambda head, t: turned(head, t, size, base), reach + 1) @ w["out"].T


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def mamba(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    projected = (x @ w["mixer.in_proj.weight"].T).view(-1, 3, 2, HEAD)
    z, values = projected[:, :, 0], silu(convolved(projected[:, :, 1].flatten(1), w["mixer.conv1d.weight"]))
    b, c, step = (values @ w["mixer.bcdt_proj.weight"].T).split([5, 5, RANK], dim=-1)
    b, c = normed(b, w["mixer.B_norm_weight"]), normed(c, w["mixer.C_norm_weight"])
    step = normed(step, w["mixer.dt_norm_weight"]) @ w["mixer.dt_proj.weight"].T
    step, rates = softplus(step + w["mixer.dt_bias"]), -w["mixer.A_log"].exp().unsqueeze(1)
    y = scanned(values.unflatten(-1, (3, HEAD)), b, c, step, rates, w["mixer.D"])
    return (y * silu(z)).flatten(1) @ w["mixer.out_proj.weight"].T


def plamo2(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(4):
        w = below(weights, f"model.layers.layers.{layer}.")
        u = normed(x, shifted(w["pre_mixer_norm.weight"], 1))
        if layer % 2:
            names = {"qkv": "qkv_proj.weight", "out": "o_proj.weight", "q": "q_weight", "k": "k_weight"}
            own = {ours: w[f"mixer.{theirs}"] for ours, theirs in names.items()}
            y = softmax_attention(u, own, HEAD, *((300.0, len(ids)) if layer == 3 else (40.0, 2)))
        else:
            y = mamba(u, w)
        x = x + normed(y, shifted(w["post_mixer_norm.weight"], 1 / 5))
        u = normed(x, shifted(w["pre_mlp_norm.weight"], 1))
        y = swiglu(u, *w["mlp.gate_up_proj.weight"].chunk(2), w["mlp.down_proj.weight"])
        x = x + normed(y, shifted(w["post_mlp_norm.weight"], 1 / 5**1.5))
    return normed(x, shifted(weights["model.norm.weight"], 1)) @ weights["model.embed_tokens.weight"].T


def lightning(x: Tensor, w: dict[str, Tensor], layer: int) -> Tensor:
    q, k, v = (x @ w["attention.query_key_value.weight"].T).view(len(x), 3, HEADS, HEAD).unbind(1)
    q, k = normed(q, w["attention.query_layernorm.weight"]), normed(k, w["attention.key_layernorm.weight"])
    state, rows = torch.zeros(HEADS, HEAD, HEAD).double(), []
    slopes = [0.25, 0.0625, 0.015625, 0.00390625]  # of ALiBi with four heads
    share = 1 - (layer - 1) / 4 + 1e-5
    for t in range(len(x)):
        read = []
        for h in range(HEADS):
            state[h] = math.exp(-slopes[h] * share) * state[h] + torch.outer(turned(k[t, h], t, 4, 40.0), v[t, h])
            read.append(state[h].T @ turned(q[t, h], t, 4, 40.0) / math.sqrt(HEAD))
        rows.append(normed(torch.cat(read).view(2, -1), 1.0).flatten() * w["attention.g_norm.weight"])
    gate = torch.sigmoid(x @ w["attention.g_proj.weight"].T)
    return (torch.stack(rows) * gate) @ w["attention.dense.weight"].T


def routed(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Two of six experts in the two best of three groups, and the shared one."""
    rows = []
    for token in x:
        score = torch.sigmoid(w["mlp.gate.weight"] @ token)
        biased = score + w["mlp.gate.expert_bias"]
        worst = min(range(3), key=lambda group: float(biased[2 * group : 2 * group + 2].sum()))
        left = [expert for expert in range(6) if expert // 2 != worst]
        chosen = sorted(left, key=lambda expert: -float(biased[expert]))[:2]
        parts = [[w[f"mlp.experts.{e}.{name}_proj.weight"] for name in ("gate", "up", "down")] for e in chosen]
        total = sum(score[e] for e in chosen)
        rows.append(sum(2.5 * score[e] / total * swiglu(token, *part) for e, part in zip(chosen, parts)))
    shared = (w[f"mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return torch.stack(rows) + swiglu(x, *shared)  # type: ignore[arg-type]


def ring(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    x = weights["model.word_embeddings.weight"][ids]
    for layer in range(5):
        w = below(weights, f"model.layers.{layer}.")
        u = normed(x, w["input_layernorm.weight"])
        if layer in (1, 3, 4):
            names = {"qkv": "query_key_value", "out": "dense", "q": "query_layernorm", "k": "key_layernorm"}
            own = {ours: w[f"attention.{theirs}.weight"] for ours, theirs in names.items()}
            x = x + softmax_attention(u, own, 4, 40.0, len(ids))
        else:
            x = x + lightning(u, w, layer)
        u = normed(x, w["post_attention_layernorm.weight"])
        x = x + (
            routed(u, w) if layer else swiglu(u, *(w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
        )
    return normed(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def minimax(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(4):
        w = below(weights, f"model.layers.{layer}.")
        u = normed(x, w["input_layernorm.weight"])
        if layer % 2:
            qkv = torch.cat([w[f"self_attn.{name}_proj.weight"] for name in "qkv"])
            y = softmax_attention(u, {"qkv": qkv, "out": w["self_attn.o_proj.weight"]}, 4, 40.0, len(ids))
            x = 1.5 * u + 0.5 * y
        else:
            x = 1.25 * u + undamped(u, w, layer)
        u = normed(x, w["post_attention_layernorm.weight"])
        rows = []
        for token in u:
            share = (w["block_sparse_moe.gate.weight"] @ token).softmax(0)
            chosen = share.argsort(descending=True)[:2].tolist()
            parts = [[w[f"block_sparse_moe.experts.{e}.w{n}.weight"] for n in (1, 3, 2)] for e in chosen]
            rows.append(sum(share[e] / share[chosen].sum() * swiglu(token, *part) for e, part in zip(chosen, parts)))
        x = 0.75 * u + torch.stack(rows)  # type: ignore[arg-type]
    return normed(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def undamped(x: Tensor, w: dict[str, Tensor], layer: int) -> Tensor:
    """Lightning attention of heads that are activated, not normed."""
    heads = silu(x @ w["self_attn.qkv_proj.weight"].T).view(len(x), HEADS, 3, HEAD)
    q, k, v = heads.unbind(2)
    state, rows = torch.zeros(HEADS, HEAD, HEAD).double(), []
    rates = torch.tensor([s * (1 - layer / 3 + 1e-5) for s in (0.25, 0.0625, 0.015625, 0.00390625)]).tolist()
    for t in range(len(x)):
        for h, rate in enumerate(rates):  # They are stored in float32.
            state[h] = math.exp(-rate) * state[h] + torch.outer(k[t, h], v[t, h])
        rows.append(torch.cat([state[h].T @ q[t, h] for h in range(HEADS)]))
    gate = torch.sigmoid(x @ w["self_attn.output_gate.weight"].T)
    return (normed(torch.stack(rows), w["self_attn.norm.weight"]) * gate) @ w["self_attn.out_proj.weight"].T


WEIGHTS = {"minimax_m1": minimax_weights, "plamo2": plamo2_weights, "bailing_moe_linear": ring_weights}
REFERENCES = {"minimax_m1": minimax, "plamo2": plamo2, "bailing_moe_linear": ring}


def stored(kind: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return WEIGHTS[kind]()


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_the_references(kind, tmp_path):
    weights = stored(kind)
    model = ssmscope.load(written(tmp_path, CONFIGS[kind], weights), dtype="float64")
    expected = REFERENCES[kind]({name: weight.double() for name, weight in weights.items()}, IDS)
    batch = model.encode(ids=[IDS, IDS[:3]])
    with TrueFloat64(), torch.no_grad():
        found, own = model.logits(batch), model.module(torch.tensor([IDS])).logits[0]
        first = model.run(model.encode(ids=IDS[:5]))
        continued = model.run(model.encode(ids=IDS[5:]), first.states).logits[0]
    assert relative(own, expected) < (1e-6 if kind == "minimax_m1" else 1e-10)  # Its decays are stored in float32.
    assert relative(found[0], expected) < 1e-10
    assert relative(found[1, :3], expected[:3]) < 1e-10 and relative(continued, expected[5:]) < 1e-10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_of_plamo2_are_not_rounded(dtype, tmp_path):
    weights = {name: weight.bfloat16() for name, weight in stored("plamo2").items()}
    model = ssmscope.load(written(tmp_path, CONFIGS["plamo2"], weights), dtype=dtype)
    block = model.module.backbone.layers[2]
    expected = weights["model.layers.layers.2.post_mlp_norm.weight"].float() + 5**-1.5
    assert torch.equal(block.mlp_post_norm.weight, expected.to(getattr(torch, dtype)))


def test_slopes_of_heads_that_are_no_power_of_two():
    from ssmscope.layers.lightning import slopes

    assert slopes(8) == [2.0**-n for n in range(1, 9)]
    assert slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


@pytest.mark.parametrize("kind, change, words", [
    ("plamo2", {"mamba_enabled": False}, "mamba_enabled is false; allowed is True"),
    ("plamo2", {"mamba_step": 0}, "mamba_step is 0; allowed is a positive number"),
    ("plamo2", {"full_attention_idx": 3}, "full_attention_idx is 3; allowed is a list"),
    ("plamo2", {"hidden_size_per_head": 5}, "turns 5 dimensions of a head's 5"),
    ("bailing_moe_linear", {"linear_silu": True}, "linear_silu is true; allowed is False"),
    ("bailing_moe_linear", {"score_function": "softmax"}, "score_function is .softmax.; allowed is .sigmoid."),
    ("bailing_moe_linear", {"rope_scaling": {"type": "yarn"}}, "rope_scaling is .*; allowed is None"),
    ("bailing_moe_linear", {"group_norm_size": 3}, "norm_groups 3 must divide the 4 heads"),
    ("bailing_moe_linear", {"topk_group": 4}, "6 experts in 3 groups, of which 4 are chosen"),
    ("bailing_moe_linear", {"partial_rotary_factor": 0.5}, "turns 3 dimensions of a head's 6"),
    ("minimax_m1", {"postnorm": False}, "postnorm is false; allowed is True"),
    ("minimax_m1", {"attn_type_list": [0, 1, 2, 1]}, "attn_type_list is .*; allowed is a list with 0 or 1"),
    ("minimax_m1", {"attn_type_list": [0, 1]}, "attn_type_list is .*; allowed is a list with 0 or 1"),
    ("minimax_m1", {"rotary_dim": 8}, "rotary_dim is 8; allowed is an even number up to head_dim, 6"),
    ("minimax_m1", {"num_attention_heads": 0}, "num_attention_heads is 0; allowed is a positive whole number"),
    ("minimax_m1", {"num_attention_heads": 2**40}, "do not fit .* they have no 1099511627776 heads of 6"),
    ("minimax_m1", {"num_local_experts": 1.5}, "num_local_experts is 1.5; allowed is a positive whole number"),
    ("minimax_m1", {"rope_theta": 0}, "rope_theta is 0; allowed is a positive number"),
    ("minimax_m1", {"num_local_experts": 5}, "do not fit its configuration"),
    ("bailing_moe_linear", {"layer_group_size": 5}, "do not fit its configuration"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(kind, change, words, tmp_path):
    refuses(words, ssmscope.load, written(tmp_path, {**CONFIGS[kind], **change}, stored(kind)))
