"""GLA and RetNet: the layers against their definitions, the papers' decays and rotation, and both as models."""

import cmath
import math

import pytest
import torch
from examples import relative
from loud import TrueFloat64, loud
from torch.nn.functional import silu
from transformers import MambaConfig, MambaModel
from ssmscope.core.mixers import adapter_for, mixers
from ssmscope.core.model import Model
from ssmscope.layers import linear_attention as la
from ssmscope.layers.linear_layers import rotated

SIZES = dict(vocab_size=50, hidden_size=12, num_hidden_layers=2, num_heads=3, key_size=12, value_size=24)
MODELS = {
    "gla": lambda **options: la.GLAForCausalLM(la.GLAConfig(**{**SIZES, "tau": 4.0, "gate_rank": 5, **options})),
    "retnet": lambda **options: la.RetNetForCausalLM(la.RetNetConfig(**{**SIZES, **options})),
}
EACH_MODEL = pytest.mark.parametrize("kind", list(MODELS))


def made(kind: str, **options):
    torch.manual_seed(0)
    return loud(MODELS[kind](**options))


def first_layer(kind: str, length: int = 19, **options):
    """The first mixer of a random model in float64, and an input."""
    mixer = mixers(made(kind, **options).double())[0]
    torch.manual_seed(1)
    return mixer, torch.randn(2, length, SIZES["hidden_size"]).double()


def own(mixer, u, **arguments) -> torch.Tensor:
    with torch.no_grad(), TrueFloat64():
        return mixer(u, **arguments)


def rotation(n: int, key: int, base: float = 10000.0) -> torch.Tensor:
    """The matrix (key, key) that turns pair i by n base^{−2i / key}."""
    R = torch.zeros(key, key, dtype=torch.float64)
    for i in range(key // 2):
        angle = n * base ** (-2 * i / key)
        R[2 * i, 2 * i] = R[2 * i + 1, 2 * i + 1] = math.cos(angle)
        R[2 * i, 2 * i + 1], R[2 * i + 1, 2 * i] = -math.sin(angle), math.sin(angle)
    return R


@torch.no_grad()
def by_hand(mixer, u: torch.Tensor) -> torch.Tensor:
    """The mixer's output, one text, head and token at a time (GLA, section 4; RetNet, Eq. 6 and 8)."""
    heads, is_gla = mixer.num_heads, isinstance(mixer, la.GatedLinearAttention)
    texts = []
    for x in u:
        q, k, v = x @ mixer.q_proj.weight.T, x @ mixer.k_proj.weight.T, x @ mixer.v_proj.weight.T
        key, value = q.shape[1] // heads, v.shape[1] // heads
        z = x @ mixer.z_proj.weight.T + (mixer.z_proj.bias if is_gla else 0)
        if is_gla:
            gate = x @ mixer.decay_in.weight.T @ mixer.decay_out.weight.T + mixer.decay_out.bias
            alpha = torch.sigmoid(gate) ** (1 / mixer.tau)
        rows = []
        for h in range(heads):
            H = torch.zeros(key, value, dtype=u.dtype)
            of_keys, of_values = slice(h * key, (h + 1) * key), slice(h * value, (h + 1) * value)
            rows.append([])
            for t in range(len(x)):
                q_t, k_t, v_t = q[t, of_keys], k[t, of_keys], v[t, of_values]
                if is_gla:
                    a = alpha[t, of_keys]
                else:
                    a = torch.full((key,), 1 - 2.0 ** (-5 - h), dtype=u.dtype)
                    R = rotation(t, key)
                    q_t, k_t = R @ q_t, R @ k_t
                H = a[:, None] * H + k_t[:, None] * v_t
                rows[h].append(H.T @ q_t / math.sqrt(key))
        o = torch.stack([torch.stack(row) for row in rows], 1)  # (length, heads, value)
        mean, var = o.mean(2, keepdim=True), o.var(2, unbiased=False, keepdim=True)
        o = ((o - mean) / torch.sqrt(var + mixer.head_norm.eps)).flatten(1)
        o = o * mixer.head_norm.weight + mixer.head_norm.bias
        texts.append((o * silu(z)) @ mixer.out_proj.weight.T)
    return torch.stack(texts)


@EACH_MODEL
def test_the_layer_is_its_definition(kind):
    mixer, u = first_layer(kind)
    expected = by_hand(mixer, u)
    assert relative(own(mixer, u), expected) < 1e-10
    reader = adapter_for(mixer)
    with torch.no_grad():
        assert relative(reader.output(mixer, reader.compute_terms(mixer, u)), expected) < 1e-10


def test_decays_are_the_papers():
    mixer, u = first_layer("retnet")
    (r,) = la.compute_terms(mixer, u).recurrences
    assert r.one_decay_per_head
    torch.testing.assert_close(r.log_decay().exp()[1, 7, :, 0], torch.tensor([31 / 32, 63 / 64, 127 / 128]).double())
    mixer, u = first_layer("gla")
    (r,) = la.compute_terms(mixer, u).recurrences
    gate = torch.sigmoid(mixer.decay_out(mixer.decay_in(u)))
    torch.testing.assert_close(r.log_decay().exp().flatten(2) ** mixer.tau, gate)
    torch.manual_seed(0)
    fresh = mixers(la.GLAForCausalLM(la.GLAConfig(**SIZES)))[0]
    zero = torch.zeros(1, 1, SIZES["hidden_size"])
    torch.testing.assert_close(fresh.log_decay(zero).exp(), torch.full((1, 1, 3, 4), 0.5 ** (1 / 16)))


def test_rotated_scores_depend_on_distance():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 6).double().unbind()

    def score(n: int, m: int) -> float:
        return (rotated(q, torch.tensor([[n]])) * rotated(k, torch.tensor([[m]]))).sum().item()

    for n, m in ((5, 2), (100, 40), (7, 7)):
        assert score(n, m) == pytest.approx(score(n + 12345, m + 12345), rel=1e-9)
        assert score(n, m) != pytest.approx(score(n + 1, m), rel=1e-3)
        pairs = [complex(*pair) for pair in q.view(3, 2).tolist()], [complex(*pair) for pair in k.view(3, 2).tolist()]
        turned = (
            a * b.conjugate() * cmath.exp(1j * (n - m) * 10000 ** (-i / 3)) for i, (a, b) in enumerate(zip(*pairs))
        )
        assert score(n, m) == pytest.approx(sum(turned).real)


def test_a_text_may_start_at_any_position():
    mixer, u = first_layer("retnet")
    with torch.no_grad():
        state = la.RetentionState(conv=None, ssm=(), position=torch.tensor([4000, 17]))
        first, later = la.compute_terms(mixer, u), la.compute_terms(mixer, u, state=state)
    assert relative(first.recurrence.b, later.recurrence.b) > 0.1
    for a, b in zip(first.scan()[0].y, later.scan()[0].y):
        assert relative(a, b) < 1e-9


def test_a_run_knows_the_position_of_each_rows_end():
    model = Model(made("retnet"))
    states = model.run(model.encode(ids=[[5, 17, 3, 9, 22], [7], [11, 1, 2]])).states
    states = model.run(model.encode(ids=[[1, 4], [8, 9, 2], [3, 4, 5]]), states).states
    assert [state.position.tolist() for state in states] == [[7, 4, 6]] * 2


@EACH_MODEL
def test_without_feed_forward_the_backbone_is_mambas(kind):
    ours = made(kind, intermediate_size=0).backbone.state_dict()
    mambas = MambaModel(MambaConfig(vocab_size=50, hidden_size=12, num_hidden_layers=2)).state_dict()
    around = [{n: t.shape for n, t in weights.items() if ".mixer." not in n} for weights in (ours, mambas)]
    assert around[0] == around[1]
    assert any(".mlp." in name for name in made(kind).state_dict())


@EACH_MODEL
def test_the_backbone_by_hand(kind):
    model = made(kind)
    ids = torch.tensor([[3, 9, 17, 4]])
    with torch.no_grad():
        x = model.backbone.embeddings(ids)
        after = []
        for block in model.backbone.layers:
            x = x + block.mixer(block.norm(x))
            n = block.mlp_norm(x)
            if kind == "gla":
                inner = silu(n @ block.mlp.gate.weight.T) * (n @ block.mlp.up.weight.T)
            else:
                inner = torch.nn.functional.gelu(n @ block.mlp.up.weight.T)
            x = x + inner @ block.mlp.down.weight.T
            after.append(x)
        last = model.backbone.norm_f(x)
        run = model(ids, labels=ids, output_hidden_states=True)
    for found, expected in zip(run.hidden_states, (*after, last), strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(run.logits, last @ model.lm_head.weight.T)
    chosen = run.logits[0, :-1].log_softmax(-1)[range(3), ids[0, 1:]]
    torch.testing.assert_close(run.loss, -chosen.mean())
