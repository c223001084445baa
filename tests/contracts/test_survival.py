"""The rest of every token in every architecture's states equals a run that writes at that token alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from examples import TEXTS, random_example

from ssmscope import ops
from ssmscope.attacks.poisoning.memory import masses
from ssmscope.core.mixers import adapter_for
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.ops import delta_rule, survival
from ssmscope.ops.recurrence import by_head
from ssmscope.probes.stability.measure import state_norms

LENGTH, SHORT = 12, 8


@pytest.fixture
def layers(model):
    """Every layer's terms on random inputs, the second shorter than the first."""
    model.module.double()
    torch.manual_seed(1)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, SHORT:] = False
    u = [torch.randn(2, LENGTH, model.config.hidden_size, dtype=torch.float64) for _ in model.mixers]
    with torch.no_grad():
        return [adapter_for(mixer).compute_terms(mixer, x, mask) for mixer, x in zip(model.mixers, u)]


def left_alone(recurrences, stop=LENGTH):
    """R_s of every position by the runs that write at s alone, (batch, stop, heads of all, width · state)."""
    return together(recurrences, [survival.remaining_reference(r.between(0, stop)).flatten(3) for r in recurrences], 2)


def together(recurrences, each, dim):
    """What belongs to each recurrence, summed over the writes of one memory, the memories one after the other."""
    return torch.cat([torch.stack(own).sum(0) for own in ops.by_memory(recurrences, each)], dim)


def test_survival_is_what_the_run_that_writes_at_one_token_alone_ends_with(layers):
    for layer in layers:
        alone = left_alone(layer.recurrences)
        norms = alone.norm(dim=-1)
        torch.testing.assert_close(layer.survival(), norms.sum(2) / norms.sum((1, 2))[:, None], rtol=0, atol=1e-9)
        heads = norms / norms.sum(1, keepdim=True).clamp(min=1e-300)
        torch.testing.assert_close(layer.survival(per_head=True), heads, rtol=0, atol=1e-9)
        assert not layer.survival()[1, SHORT:].any()
        weights = norms.sum(1) / norms.sum((1, 2))[:, None]  # the mean over heads, weighted by what is left in each
        torch.testing.assert_close((heads * weights[:, None]).sum(2), layer.survival(), rtol=0, atol=1e-9)


def bidirectional(layer) -> bool:
    """Return True if states come by the positions in other orders too; see tests/architectures/test_vim.py."""
    return any(r.order is not None for r in layer.recurrences)


def test_survival_at_a_position_is_that_of_the_text_up_to_there(layers):
    for layer in layers:
        if bidirectional(layer):
            continue
        norms = left_alone(layer.recurrences, 6).norm(dim=-1)
        found = layer.survival(5)
        torch.testing.assert_close(found[:, :6], norms.sum(2) / norms.sum((1, 2))[:, None], rtol=0, atol=1e-9)
        assert not found[:, 6:].any()
        with pytest.raises(InputError, match="no position 12; allowed are 0 to 11"):
            layer.survival(12)


def test_signed_shares_are_towards_the_state_and_sum_to_one(layers):
    for layer in layers:
        alone = left_alone(layer.recurrences)
        initial = layer.initial or [None] * len(layer.recurrences)
        runs = [ops.scan_reference(r, H).state.flatten(2) for r, H in zip(layer.recurrences, initial)]
        state = together(layer.recurrences, runs, 1)
        inner = (alone * state[:, None]).sum((2, 3)) / state.square().sum((1, 2))[:, None]
        found = layer.survival(signed=True)
        torch.testing.assert_close(found, inner, rtol=0, atol=1e-9)
        none = [replace(r, x=torch.zeros_like(r.x)) for r in layer.recurrences]
        rest = together(none, [ops.scan_reference(r, H).state.flatten(2) for r, H in zip(none, initial)], 1)
        of_start = (rest * state).sum((1, 2)) / state.square().sum((1, 2))
        torch.testing.assert_close(found.sum(1) + of_start, torch.ones_like(of_start), rtol=0, atol=1e-9)
        assert (layer.initial is None) == (not of_start.any())


@pytest.mark.parametrize("name", ["deltaproduct", "deltaproduct-ungated", "mamba3"])
def test_a_token_that_writes_several_times_has_the_share_of_the_sum(name):
    """‖Σ_j R_s^j‖ of its writes j, not Σ_j ‖R_s^j‖, and the state is the sum of all of them."""
    module = random_example(name).double()
    (mixer, *_), u = Model(module, None, name).mixers, torch.randn(2, LENGTH, module.config.hidden_size).double()
    with torch.no_grad():
        layer = adapter_for(mixer).compute_terms(mixer, u)
    by_end = []
    for stop in range(1, LENGTH + 1):
        by_end.append(sum(survival.remaining_reference(r.between(0, stop)).flatten(3) for r in layer.recurrences))
    norms = [each.norm(dim=-1) for each in by_end]
    close = dict(rtol=0, atol=1e-9)
    torch.testing.assert_close(layer.survival(), norms[-1].sum(2) / norms[-1].sum((1, 2))[:, None], **close)
    torch.testing.assert_close(layer.survival(per_head=True), norms[-1] / norms[-1].sum(1, keepdim=True), **close)
    state = sum(scan.state for scan in layer.scan()).flatten(2)
    signed = (by_end[-1] * state[:, None]).sum((2, 3)) / state.square().sum((1, 2))[:, None]
    torch.testing.assert_close(layer.survival(signed=True), signed, **close)
    torch.testing.assert_close(signed.sum(1), torch.ones(2).double())
    for at, found in enumerate(survival.shares_from(layer.recurrences, 4).unbind(1), start=4):
        expected = norms[at].sum(2) / norms[at].sum((1, 2))[:, None]
        torch.testing.assert_close(found[:, : at + 1], expected, **close)
    lives = layer.half_lives(per_head=True)
    for row, s, head in itertools.product(range(2), range(LENGTH), range(lives.shape[2])):
        left = [float(norms[t][row, s, head]) for t in range(s, LENGTH)]
        assert lives[row, s, head] == next((lag for lag, norm in enumerate(left) if norm <= left[0] / 2), torch.inf)
    torch.testing.assert_close(state_norms(layer, [LENGTH - 1])[:, 0], state.flatten(1).norm(dim=1))
    torch.testing.assert_close(masses(layer.recurrences, 5), norms[5].sum(2))


def test_half_lives_are_when_half_of_what_was_written_is_left(layers):
    for layer in layers:
        if bidirectional(layer):
            with pytest.raises(InputError, match="reads its input both ways, and a half-life"):
                layer.half_lives()
            continue
        found = layer.half_lives()
        per_head = layer.half_lives(per_head=True)
        heads = [left_alone(layer.recurrences, stop).norm(dim=-1).detach() for stop in range(1, LENGTH + 1)]
        by_stop = [each.sum(2) for each in heads]
        assert per_head.shape == (2, LENGTH, heads[0].shape[2])
        for row, s in [(row, s) for row in range(2) for s in range(LENGTH)]:
            written = by_stop[s][row, s]
            halved = [t for t in range(s, LENGTH) if by_stop[t][row, s] <= written / 2 and written > 0]
            assert found[row, s] == (halved[0] - s if halved else torch.inf)
            for head, half in enumerate((heads[s][row, s] / 2).tolist()):
                halved = [t for t in range(s, LENGTH) if half > 0 and float(heads[t][row, s, head]) <= half]
                assert per_head[row, s, head] == (halved[0] - s if halved else torch.inf)


def test_a_traces_survival_is_its_layers_own(model):
    trace = model.trace(ids=TEXTS)
    found = trace.survival()
    assert found.shape == trace.retention.shape and found[:, ~trace.mask].isnan().all()
    torch.testing.assert_close(found.nansum(2), torch.ones_like(found[:, :, 0]), rtol=0, atol=1e-5)
    seen = {}
    again = model.trace(ids=TEXTS, keep_inputs=False, visit=lambda i, rows, layer: seen.update({i: layer.survival()}))
    for index, shares in seen.items():
        torch.testing.assert_close(shares[trace.mask], found[index][trace.mask], rtol=1e-4, atol=1e-6)
    if bidirectional(trace.layers[0]):
        return
    torch.testing.assert_close(trace.survival(2)[:, :, :3].sum(2), torch.ones_like(found[:, :, 0]), rtol=0, atol=1e-5)
    with pytest.raises(InputError, match="no position 3 in every text; allowed are 0 to 2"):
        trace.survival(3)
    with pytest.raises(ValueError, match="without the input of layer 0"):
        again.survival()


def long_recurrence(kind: str, length: int) -> ops.Recurrence:
    g = torch.Generator().manual_seed(3)
    b, c = (torch.randn(2, length, 2, 5, generator=g, dtype=torch.float64) for _ in range(2))
    x = torch.randn(2, length, 4, 1 if kind == "state" else 3, generator=g, dtype=torch.float64)
    rate = torch.rand(2, length, 4, 5 if kind.endswith("state") else 1, generator=g, dtype=torch.float64)
    if kind.startswith("delta"):
        b = b / b.norm(dim=-1, keepdim=True)
        return ops.DeltaRecurrence(x, b, c, log_a=-0.05 * rate, beta=rate[..., 0])
    if kind == "step":
        return ops.Recurrence(x, b, c, delta=rate[..., 0], A=-torch.arange(1, 6.0).double().expand(4, 5) / 20)
    return ops.Recurrence(x, b, c, log_a=-0.1 * rate)


@pytest.mark.parametrize("kind", ["head", "state", "step", "delta", "delta by state"])
def test_blocks_and_chunks_change_nothing(kind, monkeypatch):
    r = long_recurrence(kind, 90)  # several chunks of the delta rule
    alone = left_alone([r], 90)
    monkeypatch.setitem(survival.MAX_DECAYS_HELD, "cpu", 300)  # several blocks
    torch.testing.assert_close(survival.remaining_norms(r), alone.norm(dim=-1), rtol=1e-9, atol=1e-12)
    state = ops.scan_reference(r).state.flatten(2)
    inner, rest = survival.left_towards_state(r)
    torch.testing.assert_close(inner, (alone * state[:, None]).sum(-1), rtol=1e-9, atol=1e-9)
    assert not rest.any()
    written = r.written.norm(dim=-1)
    masses = written * by_head(r.b.norm(dim=-1), written.shape[2])
    for per_head, half in ((True, masses / 2), (False, masses.sum(2, keepdim=True) / 2)):
        walked = survival._walked([r], [written], half, per_head)
        found = survival.half_lives([r], per_head=per_head)
        torch.testing.assert_close(found.reshape(walked.shape), walked, rtol=0, atol=0)
        assert 1 < walked[walked.isfinite()].mean() < 100


@pytest.mark.parametrize("chunk", [1, 7, 200])
@pytest.mark.parametrize("kind", ["delta", "delta by state"])
def test_the_keys_of_a_delta_rule_do_not_depend_on_its_chunks(kind, chunk, monkeypatch):
    r = long_recurrence(kind, 40)
    whole = torch.cat([k for _, k in reversed([*delta_rule.keys_left(r.log_a, r.beta, r.b)])], 1)
    monkeypatch.setattr(delta_rule, "STEPS_PER_CHUNK", chunk)
    found = torch.cat([k for _, k in reversed([*delta_rule.keys_left(r.log_a, r.beta, r.b)])], 1)
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


def test_mamba_in_float32_is_mamba_in_float64():
    """Its lengths of keys come from a kernel where one can be compiled."""
    r = long_recurrence("step", 70)
    r = replace(r, b=r.b[:, :, :1], c=r.c[:, :, :1], x=r.x[..., :1])
    found, exact = survival.remaining_norms(r.to(torch.float32)), survival.remaining_norms(r)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(survival.half_lives([r.to(torch.float32)]).double(), survival.half_lives([r]))


def test_a_long_text_loses_no_digits():
    """Sums from the beginning would leave no digits of what the last tokens are: Σ log a is 1e6 there."""
    g = torch.Generator().manual_seed(0)
    r = ops.Recurrence(
        x=torch.randn(1, 5000, 2, 3, generator=g),
        b=torch.randn(1, 5000, 1, 4, generator=g),
        c=torch.randn(1, 5000, 1, 4, generator=g),
        delta=torch.rand(1, 5000, 2, generator=g) * 400,
        A=torch.tensor([[-1.0], [-1e-3]]),
    )
    found, exact = survival.shares([r]), survival.shares([r.to(torch.float64)])
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("kind", ["head", "state", "step"])
def test_small_keys_are_not_lost(kind):
    """The squares of some are no float32, in heads of one state and of several."""
    for states in (slice(0, 5), slice(0, 1)):
        exact = long_recurrence(kind, 30)
        exact.b[:, ::3] *= 1e-25
        cut = {"b": exact.b[..., states], "c": exact.c[..., states]}
        cut |= {name: t[..., states] for name in ("A", "log_a") if (t := getattr(exact, name)) is not None}
        exact = replace(exact, **cut)
        terms = ("x", "b", "c", "delta", "A", "log_a")
        rounded = replace(exact, **{n: t.float() for n in terms if (t := getattr(exact, n)) is not None})
        left, expected = survival.remaining_norms(rounded), left_alone([exact], 30).norm(dim=-1)
        torch.testing.assert_close(left.double(), expected, rtol=1e-4, atol=0)
        assert torch.equal(survival.half_lives([rounded]), survival.half_lives([exact]).float())
