"""The rest of every token in every architecture's states equals a run that writes at that token alone."""

import itertools
from dataclasses import replace

import pytest
import torch
from examples import TEXTS, random_example
from refusals import refuses
from ssmscope import ops
from ssmscope.attacks.poisoning.memory import masses
from ssmscope.core.mixers import adapter_for
from ssmscope.core.model import Model
from ssmscope.ops import survival
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
        refuses("no position 12; allowed are 0 to 11", layer.survival, 12)


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
            refuses("reads its input both ways, and a half-life", layer.half_lives)
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
    refuses("no position 3 in every text; allowed are 0 to 2", trace.survival, 3)
    with pytest.raises(ValueError, match="without the input of layer 0"):
        again.survival()
