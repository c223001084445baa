"""Gated DeltaNet and DeltaNet: the chunked delta rule against its definitions, the layer by hand, and the models."""

from __future__ import annotations

import pytest
import torch
from loud import TrueFloat64, loud
from torch.nn.functional import silu, softplus

from ssmscope import ops
from ssmscope.core.mixers import adapter_for, mixers
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.layers import delta
from ssmscope.ops import delta_rule
from ssmscope.probes.stability.measure import step_gains

SIZES = dict(vocab_size=50, hidden_size=12, num_hidden_layers=2, num_heads=3, key_size=12, value_size=15)
GATED_BY_NAME = {"gated": True, "plain": False}
EACH_KIND = pytest.mark.parametrize("kind", list(GATED_BY_NAME))


def made(kind: str, **options) -> delta.DeltaNetForCausalLM:
    torch.manual_seed(0)
    return loud(delta.DeltaNetForCausalLM(delta.DeltaNetConfig(**{**SIZES, "gated": GATED_BY_NAME[kind], **options})))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


# ---- the delta rule


def recurrence(length: int = 37, groups: int = 3, scale=1.0, D: bool = True, dtype=torch.float64, decays: int = 1):
    """A random delta rule of 3 heads, width 5, state 4, with one decay for each head or four, and a state to start
    from."""
    torch.manual_seed(length)
    b, c = torch.randn(2, 2, length, groups, 4, dtype=dtype).unbind()
    return ops.DeltaRecurrence(
        x=torch.randn(2, length, 3, 5, dtype=dtype),
        b=b / b.norm(dim=-1, keepdim=True),
        c=c,
        log_a=-scale * torch.rand(2, length, 3, decays, dtype=dtype),
        beta=torch.rand(2, length, 3, dtype=dtype),
        D=torch.randn(3, dtype=dtype) if D else None,
    ), torch.randn(2, 3, 5, 4, dtype=dtype)


def in_words(r: ops.DeltaRecurrence, H: torch.Tensor, text: int, head: int) -> torch.Tensor:
    """y of one text and head: decay, look up, correct what was found, read."""
    rows, share = [], r.x.shape[2] // r.b.shape[2]
    for t in range(r.x.shape[1]):
        key, H = r.b[text, t, head // share], r.log_a[text, t, head].exp() * H
        found = H @ key
        H = H + r.beta[text, t, head] * torch.outer(r.x[text, t, head] - found, key)
        skip = 0 if r.D is None else r.D[head] * r.x[text, t, head]
        rows.append(H @ r.c[text, t, head // share] + skip)
    return torch.stack(rows)


@pytest.mark.parametrize("decays", [1, 4])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_reference_is_the_rule_in_words(groups, decays):
    r, H = recurrence(groups=groups, decays=decays)
    slow = ops.scan_reference(r, H)
    for text, head in ((0, 0), (1, 2)):
        assert relative(slow.y[text, :, head], in_words(r, H[text, head], text, head)) < 1e-12


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 100])
@pytest.mark.parametrize(("groups", "decays"), [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_the_chunked_scan_is_the_reference(length, groups, decays):
    r, H = recurrence(length, groups, decays=decays)
    fast, slow = ops.scan(r, H, retention=True), ops.scan_reference(r, H)
    for one, other in zip(fast, slow):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(ops.scan(r).y, ops.scan_reference(r).y, rtol=1e-10, atol=1e-11)
    assert ops.scan(r).retention is None


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_the_size_of_chunks_does_not_matter(chunk, monkeypatch):
    monkeypatch.setattr(delta_rule, "STEPS_PER_CHUNK", chunk)
    r, H = recurrence(50)
    y, final = delta_rule.scan(r.log_a, r.beta, r.b, r.c, r.x, H)
    slow = ops.scan_reference(r, H)
    torch.testing.assert_close(y + r.D.unsqueeze(-1) * r.x, slow.y, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(final, slow.state, rtol=1e-10, atol=1e-11)


def test_long_sequences_are_worked_in_segments(monkeypatch):
    r, H = recurrence(100)
    monkeypatch.setattr(delta_rule, "STEPS_PER_SEGMENT", 45)
    torch.testing.assert_close(ops.scan(r, H).y, ops.scan_reference(r, H).y, rtol=1e-10, atol=1e-11)


def test_the_parallel_form_agrees():
    """The attention matrix (QKᵀ ∘ Γ) (I + tril(β KKᵀ ∘ Γ, −1))⁻¹ β gives the scan from an empty memory."""
    r, _ = recurrence(D=False)
    b, c = (t.transpose(1, 2) for t in r.by_head())
    total = r.log_a.squeeze(-1).transpose(1, 2).cumsum(-1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()
    beta = torch.diag_embed(r.beta.transpose(1, 2))
    system = torch.eye(37) + (beta @ (b @ b.mT * decay)).tril(-1)
    attention = (c @ b.mT * decay) @ torch.linalg.inv(system) @ beta
    y = (attention @ r.x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(ops.scan(r).y, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("decays", [1, 4])
def test_gradients_are_the_references(decays):
    r, H = recurrence(40, decays=decays)
    terms = {n: getattr(r, n).requires_grad_() for n in ("x", "b", "c", "log_a", "beta", "D")}
    H.requires_grad_()
    found, wanted = (
        torch.autograd.grad(run(r, H).y.sin().sum() + run(r, H).state.sin().sum(), [*terms.values(), H])
        for run in (ops.scan, ops.scan_reference)
    )
    for a, b in zip(found, wanted):
        assert relative(a, b) < 1e-10


@pytest.mark.parametrize("decays", [1, 4])
def test_strong_decays_overflow_nowhere(decays):
    r, H = recurrence(70, scale=400.0, dtype=torch.float32, decays=decays)
    terms = [t.requires_grad_() for t in (r.x, r.b, r.c, r.log_a, r.beta)]
    y = ops.scan(r, H).y
    torch.testing.assert_close(y, ops.scan_reference(r, H).y, rtol=1e-4, atol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.square().sum(), terms))


def test_a_key_reads_what_was_written_last_under_it():
    """Without decay, β = 1: the memory is a dictionary. A sum of writes, as linear attention keeps, is none."""
    keys, values = torch.eye(4).double()[[0, 1, 2, 1, 3, 1]], torch.randn(6, 5).double()
    keys, values = keys.view(1, 6, 1, 4), values.view(1, 6, 1, 5)
    r = ops.DeltaRecurrence(
        x=values, b=keys, c=keys, log_a=torch.zeros(1, 6, 1, 1).double(), beta=torch.ones(1, 6, 1).double()
    )
    state = ops.scan(r).state[0, 0]
    torch.testing.assert_close(state, values[0, [0, 5, 2, 4], 0].T)


def test_cuts_and_states_of_a_run():
    r, H = recurrence(50)
    whole = ops.scan(r, H)
    first = ops.scan(r.between(0, 21), H)
    second = ops.scan(r.between(21), first.state)
    torch.testing.assert_close(torch.cat([first.y, second.y], 1), whole.y)
    torch.testing.assert_close(second.state, whole.state)
    torch.testing.assert_close(ops.states(r, [49, 20], H)[:, 1], first.state)
    assert ops.scan(r.to(torch.float32), H.float()).y.dtype == torch.float32


@pytest.mark.parametrize("decays", [1, 4])
def test_retention_is_the_mean_eigenvalue(decays):
    r, _ = recurrence(groups=1, decays=decays)
    b = r.by_head()[0].unsqueeze(-1)
    transition = r.log_a.exp().unsqueeze(-1) * (torch.eye(4) - r.beta[..., None, None] * b @ b.mT)
    mean = torch.linalg.eigvals(transition).real.mean(-1)
    torch.testing.assert_close(ops.retention(r, per_head=True), mean)
    torch.testing.assert_close(ops.write(r), (1 - mean).mean(-1))
    faint = ops.DeltaRecurrence(x=r.x, b=r.b, c=r.c, log_a=r.log_a * 1e-20, beta=r.beta * 1e-20)
    expected = 1e-20 * (r.beta / 4 - r.log_a.mean(-1))
    torch.testing.assert_close(ops.write(faint, per_head=True), expected, rtol=1e-10, atol=0.0)


def test_wrong_terms_are_refused():
    r, _ = recurrence()
    with pytest.raises(InputError, match="mixes the states"):
        r.log_decay()
    given = dict(x=r.x, b=r.b, c=r.c)
    with pytest.raises(ValueError, match=r"write strength beta, of shape \(2, 37, 3\)"):
        ops.DeltaRecurrence(**given, log_a=r.log_a)
    with pytest.raises(ValueError, match="write strength beta"):
        ops.DeltaRecurrence(**given, log_a=r.log_a, beta=r.beta[:, 1:])
    with pytest.raises(ValueError, match=r"the decay \(2, 37, 3, 3\) must be"):
        ops.DeltaRecurrence(**given, log_a=r.log_a.expand(-1, -1, -1, 3), beta=r.beta)
    with pytest.raises(ValueError, match="given as log_a"):
        ops.DeltaRecurrence(**given, A=-torch.ones(3, 1), delta=r.beta, beta=r.beta)


def test_no_largest_gain_is_known_of_a_decay_per_state():
    r, _ = recurrence(decays=4)
    every = torch.ones(2, 37, dtype=torch.bool)
    with pytest.raises(InputError, match="the largest gain of a step is not known"):
        step_gains(r, every, every)


# ---- the layer


def first_layer(kind: str, length: int = 19, **options):
    """The first mixer of a random model in float64, and an input."""
    mixer = mixers(made(kind, **options).double())[0]
    torch.manual_seed(1)
    return mixer, torch.randn(2, length, SIZES["hidden_size"]).double()


def own(mixer, u, **arguments) -> torch.Tensor:
    with torch.no_grad(), TrueFloat64():
        return mixer(u, **arguments)


@torch.no_grad()
def by_hand(mixer, u: torch.Tensor, mistake: str | None = None) -> torch.Tensor:
    """The mixer's output, one text, head and token at a time."""
    heads, (key, _, value) = mixer.num_heads, (size // mixer.num_heads for size in mixer.sizes)
    texts = []
    for x in u:
        projected = x @ mixer.qkv_proj.weight.T
        taps = mixer.conv1d.weight[:, 0].T
        convolved = torch.zeros_like(projected)
        for t in range(len(x)):
            for j in range(len(taps)):
                back = t - (len(taps) - 1 - j) + (mistake == "convolution")
                if 0 <= back < len(x):
                    convolved[t] += taps[j] * projected[back]
        convolved = convolved if mistake == "silu" else silu(convolved)
        q, k, v = convolved.split(mixer.sizes, dim=-1)
        beta = (x @ mixer.beta_proj.weight.T).sigmoid()
        alpha = torch.ones_like(beta)
        if mixer.decay_proj is not None and mistake != "decay":
            alpha = (-mixer.A_log.exp() * softplus(x @ mixer.decay_proj.weight.T + mixer.dt_bias)).exp()
        out = []
        for h in range(heads):
            S = torch.zeros(value, key, dtype=u.dtype)
            rows = []
            for t in range(len(x)):
                k_t, q_t = k[t, h * key : (h + 1) * key], q[t, h * key : (h + 1) * key]
                v_t = v[t, h * value : (h + 1) * value]
                if mistake != "length":
                    k_t = k_t / k_t.norm()
                q_t = q_t / q_t.norm()
                erased = 0 if mistake == "erase" else beta[t, h] * torch.outer(k_t, k_t)
                S = alpha[t, h] * S @ (torch.eye(key, dtype=u.dtype) - erased) + beta[t, h] * torch.outer(v_t, k_t)
                o = S @ q_t
                o = o if mistake == "norm" else o / torch.sqrt(o.square().mean() + mixer.head_norm.eps)
                rows.append(o * mixer.head_norm.weight)
            out.append(torch.stack(rows))
        o = torch.cat(out, dim=1)
        if mixer.z_proj is not None and mistake != "gate":
            o = o * silu(x @ mixer.z_proj.weight.T)
        texts.append(o @ mixer.out_proj.weight.T)
    return torch.stack(texts)


@EACH_KIND
@pytest.mark.parametrize("taps", [4, 2])
def test_the_layer_is_its_definition(kind, taps):
    mixer, u = first_layer(kind, conv_kernel=taps)
    assert relative(own(mixer, u), by_hand(mixer, u)) < 1e-9


@pytest.mark.parametrize("mistake", ["convolution", "silu", "decay", "length", "erase", "norm", "gate"])
def test_a_wrong_definition_is_seen(mistake):
    mixer, u = first_layer("gated")
    assert relative(by_hand(mixer, u, mistake), own(mixer, u)) > 1e-2


# ---- the models


def test_sizes_and_beginnings_are_as_documented():
    d = 48
    config = delta.DeltaNetConfig(vocab_size=9, hidden_size=d, num_hidden_layers=1)
    mixer = mixers(delta.DeltaNetModel(config))[0]
    large = sum(
        p.numel() for n, p in mixer.named_parameters() if n in ("qkv_proj.weight", "z_proj.weight", "out_proj.weight")
    )
    assert (config.key_size, config.value_size, large) == (36, 72, 6 * d * d)
    assert 0 <= mixer.A_log.min() and mixer.A_log.exp().max() <= 16
    steps = softplus(mixer.dt_bias)
    assert 0.999e-3 < steps.min() and steps.max() < 0.1001
    plain = mixers(delta.DeltaNetModel(delta.DeltaNetConfig(**SIZES, gated=False)))[0]
    assert {n for n, _ in plain.named_parameters()} == {
        *("qkv_proj.weight", "conv1d.weight", "beta_proj.weight", "head_norm.weight", "out_proj.weight")
    }


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_heads": 5}, "key_size 12 cannot be shared by 5 heads: give a multiple of 5"),
        ({"value_size": 16}, "value_size 16 cannot be shared by 3 heads"),
        ({"conv_kernel": 0}, "conv_kernel 0 must be an integer, 1 or more"),
    ],
)
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        delta.DeltaNetConfig(**{**SIZES, **options})


def test_what_reads_decays_refuses_the_layer():
    layer = Model(made("gated")).trace(ids=[5, 17, 3]).layers[0]
    assert adapter_for(mixers(made("gated"))[0]).compute_terms is delta.compute_terms
    with pytest.raises(InputError, match="a delta rule's transition"):
        layer.recurrence.log_decay()
