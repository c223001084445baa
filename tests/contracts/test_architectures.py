"""Contract of every architecture. It is tried on the `small_models`, among which every readable model type is."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from examples import EXAMPLES, OTHER_HYBRIDS, TEXTS, decayed, hooks, log_decay, own_output, random_example, relative
from exhaustive import half
from loud import TrueFloat64, doubled
import ssmscope
from ssmscope import ops
from ssmscope.core.attention_layers import AttentionState
from ssmscope.core.known_models import readable_types
from ssmscope.core.mixers import adapter_for, fast_scan, mixers
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace, gathered, joined
from ssmscope.errors import InputError
from ssmscope.layers.parts import BY_WEIGHT


def mixer_runs(module, dtype: torch.dtype, length: int = 23):
    """Each mixer of the model with a random input and its own output."""
    module = doubled(module) if dtype == torch.float64 else module.to(dtype)
    torch.manual_seed(1)
    for mixer in mixers(module):
        width = module.config.hidden_size
        u = torch.randn(2, length, width, dtype=dtype)
        with torch.no_grad():
            with TrueFloat64() if dtype == torch.float64 else nullcontext():
                own = own_output(mixer, u)
        yield mixer, u, own


def recomputed(mixer, u, mutate: Callable[[LayerTrace], LayerTrace] | None = None) -> torch.Tensor:
    reader = adapter_for(mixer)
    with torch.no_grad(), TrueFloat64() if u.dtype == torch.float64 else torch.no_grad():
        layer = reader.compute_terms(mixer, u)
        return reader.output(mixer, mutate(layer) if mutate else layer)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
def test_recomputed_output_is_the_mixers_own(module, dtype, tolerance):
    for mixer, u, own in mixer_runs(module, dtype):
        assert relative(recomputed(mixer, u), own) < tolerance


def _each(change: Callable[[ops.Recurrence], ops.Recurrence]) -> Callable[[LayerTrace], LayerTrace]:
    return lambda layer: replace(layer, recurrences=tuple(change(r) for r in layer.recurrences))


def mean_decay(r: ops.Recurrence) -> torch.Tensor:
    """The mean eigenvalue of the transition, (batch, length), of each matrix as a whole where it is one."""
    if not isinstance(r, ops.DeltaRecurrence):
        return r.log_decay().exp().mean((2, 3))
    transition = torch.diag_embed(r.log_a.exp().expand(*r.beta.shape, r.b.shape[-1]))
    for number, (e, along) in enumerate(r.removals()):
        removed = (
            r.beta[..., None, None] * e.unsqueeze(-1) @ along.unsqueeze(-2)
        )  # The first looks up before the decay.
        transition = transition @ (torch.eye(e.shape[-1]) - removed) if number else transition - removed
    return torch.linalg.eigvals(transition).real.mean((2, 3))


def exchanging(r: ops.DeltaRecurrence, change: Callable[[torch.Tensor], torch.Tensor]) -> ops.Recurrence:
    """Another share exchanged; along another key where those that are removed are of their own."""
    return replace(r, beta=change(r.beta)) if r.r is None else replace(r, r=change(r.r))


def varies(t: torch.Tensor) -> bool:
    return bool((t != t[:, :1]).any())


Applies, Change = Callable[[ops.Recurrence], bool], Callable[[ops.Recurrence], ops.Recurrence]
MUTATIONS: dict[str, tuple[Applies, Change]] = {
    "drop the decay": (lambda r: bool((log_decay(r) != 0).any()), lambda r: decayed(r, torch.zeros_like)),
    "shift the decay by a step": (
        lambda r: varies(log_decay(r)),
        lambda r: decayed(r, lambda log_a: log_a.roll(1, dims=1)),
    ),
    "shift the input by a step": (lambda r: True, lambda r: replace(r, x=r.x.roll(1, dims=1))),
    "shift the read by a step": (lambda r: varies(r.c), lambda r: replace(r, c=r.c.roll(1, dims=1))),
    "drop the step from the write": (  # the decay must be taken before the step goes
        lambda r: r.delta is not None,
        lambda r: replace(r, A=None, log_a=log_decay(r), delta=None, expected=False),
    ),
    "drop D": (lambda r: r.D is not None, lambda r: replace(r, D=None)),
    "swap B and C": (lambda r: not torch.equal(r.b, r.c), lambda r: replace(r, b=r.c, c=r.b)),
    "shift what is exchanged by a step": (
        lambda r: isinstance(r, ops.DeltaRecurrence),
        lambda r: exchanging(r, lambda t: t.roll(1, dims=1)),
    ),
    "exchange nothing": (
        lambda r: isinstance(r, ops.DeltaRecurrence),
        lambda r: ops.Recurrence(x=r.written, b=r.b, c=r.c, log_a=r.log_a),
    ),
}
"""Mistakes, each with the recurrences in which it is one."""


def test_a_wrong_formula_is_seen(module):
    for mixer, u, own in mixer_runs(module, torch.float64):
        layer = adapter_for(mixer).compute_terms(mixer, u)
        for name, (mistaken, mutate) in MUTATIONS.items():
            if any(map(mistaken, layer.recurrences)):
                assert relative(recomputed(mixer, u, _each(mutate)), own) > 1e-2, name


def hidden(model: Model, batch) -> torch.Tensor:
    """The last mixer's output at every position of a batch, (batch, length, width)."""
    found: dict[int, torch.Tensor] = {}

    def keep(index, layer, scans):
        found[index] = adapter_for(model.mixers[index]).output(model.mixers[index], layer, scans)

    with torch.no_grad(), fast_scan(model.module, mask=batch.mask, visit=keep):
        model.forward(batch)
    return found[model.num_layers - 1]


def test_padding_changes_nothing(model):
    """On the right, and then on the left."""
    batch, longest = model.encode(ids=TEXTS), max(map(len, TEXTS))
    alone = [hidden(model, model.encode(ids=[text]))[0] for text in TEXTS]
    together = hidden(model, batch)
    assert all(relative(row[: len(text)], own) < 1e-5 for row, own, text in zip(together, alone, TEXTS))
    for row, text in enumerate(TEXTS):
        batch.input_ids[row] = batch.input_ids[row].roll(longest - len(text))
        batch.mask[row] = batch.mask[row].roll(longest - len(text))
    together = hidden(model, batch)
    assert all(relative(row[-len(text) :], own) < 1e-5 for row, own, text in zip(together, alone, TEXTS))


def test_logits_are_the_models_own(model):
    """The text as the model runs by itself, and a padded batch without its cache."""
    without = {} if model.is_classifier else {"use_cache": False}
    for texts in (TEXTS[:1], TEXTS):
        batch = model.encode(ids=texts)
        given = {} if len(texts) == 1 else {"attention_mask": batch.mask.long(), **without}
        with torch.no_grad():
            own = model.module(input_ids=batch.input_ids, **given).logits
        real = slice(None) if model.is_classifier else batch.mask
        assert relative(model.logits(batch)[real], own[real]) < 1e-5


def test_a_run_continues_from_its_state(model, request):
    if model.is_classifier:
        pytest.skip("a classifier reads the last position only; its states are tested through language models")
    whole = model.run(model.encode(ids=TEXTS))
    cuts = (5, 1, 3)  # each row goes on from its own end
    heads, tails = [t[:cut] for t, cut in zip(TEXTS, cuts)], [t[cut:] for t, cut in zip(TEXTS, cuts)]
    first = model.run(model.encode(ids=heads))
    if not model.continues:
        assert request.node.callspec.params["module"] == "recurrent_gemma" and not BY_WEIGHT
        with pytest.raises(
            InputError, match="cannot continue from its states: a part that reads earlier tokens keeps no state"
        ):
            model.run(model.encode(ids=tails), first.states)
        return
    second = model.run(model.encode(ids=tails), first.states)
    for row, (text, cut) in enumerate(zip(TEXTS, cuts)):
        joined = torch.cat([first.logits[row, :cut], second.logits[row, : len(text) - cut]])
        assert relative(joined, whole.logits[row, : len(text)]) < 1e-5
    for a, b in zip(second.states, whole.states):
        for one, other in zip(a.ssm, b.ssm):
            assert relative(one, other) < 1e-5


CONTINUING = [name for name in OTHER_HYBRIDS if BY_WEIGHT or name != "recurrent_gemma"]
"""All but one of which transformers 4.57 keeps the keys and values in the layer."""
PREFIXES, NEXT, LAST = [TEXTS[0][:7], TEXTS[2][:4]], [[8, 2, 11], [44, 45]], [[3], [90, 17, 5, 6]]


@pytest.mark.parametrize("module", CONTINUING, indirect=True)
def test_hybrids_continue_with_their_keys_and_values(module):
    """Prefixes of two lengths, each continued in two ways, and these by further tokens: as the whole texts."""
    model = Model(doubled(module))
    with TrueFloat64():
        prefix = model.run(model.encode(ids=PREFIXES)).states
        kept = prefix[model.num_layers :]
        assert kept and all(isinstance(state, AttentionState) and state.keys.shape[1] == 7 for state in kept)
        before = [t.clone() for state in kept for t in (state.keys, state.values, state.places)]
        chosen = torch.tensor([1, 0, 0, 1])  # a prefix's own cache, once for each that goes on from it
        second = model.run(model.encode(ids=[NEXT[0], NEXT[0], NEXT[1], NEXT[1]]), gathered(prefix, chosen))
        third = model.run(model.encode(ids=[LAST[0], LAST[1], LAST[0], LAST[1]]), second.states)
        for row, (at, own, last) in enumerate(zip(chosen, (0, 0, 1, 1), (0, 1, 0, 1))):
            text = [*PREFIXES[at], *NEXT[own], *LAST[last]]
            expected = model.run(model.encode(ids=[text])).logits[0, -len(LAST[last]) :]
            assert relative(third.logits[row, : len(LAST[last])], expected) < 1e-10
        assert all(torch.equal(a, b) for a, b in zip(before, (t for s in kept for t in (s.keys, s.values, s.places))))
        alone = joined([model.run(model.encode(ids=[ids])).states for ids in PREFIXES])
        again = model.run(model.encode(ids=NEXT), alone).logits
        assert relative(again[0], second.logits[1]) < 1e-10 and relative(again[1, :2], second.logits[3, :2]) < 1e-10
        held = ["values" if state.values.numel() else "keys" for state in kept]  # Those of GLM-5.3 are one latent.
        empty = [replace(state, **{name: 0 * getattr(state, name)}) for state, name in zip(kept, held)]
        other = model.run(model.encode(ids=NEXT), (*prefix[: model.num_layers], *empty)).logits
        assert relative(other[0], again[0]) > 1e-6


@pytest.mark.parametrize("module", CONTINUING, indirect=True)
def test_hybrids_continue_from_texts_padded_on_the_left(module):
    model = Model(doubled(module))
    batch = model.encode(ids=PREFIXES)
    batch.input_ids[1], batch.mask[1] = batch.input_ids[1].roll(3), batch.mask[1].roll(3)
    with TrueFloat64():
        found = model.run(model.encode(ids=NEXT), model.run(batch).states).logits
        for row, (prefix, after) in enumerate(zip(PREFIXES, NEXT)):
            expected = model.run(model.encode(ids=[prefix + after])).logits[0, -len(after) :]
            assert relative(found[row, : len(after)], expected) < 1e-10


def test_attention_that_takes_no_mask_is_refused_in_one_line():
    model = Model(random_example("jamba"), name="flashing")
    states = model.run(model.encode(ids=[[5, 17]])).states
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="flashing cannot continue from its states: .* neither eager nor sdpa"):
        Model(model.module, name="flashing").run(model.encode(ids=[[3]]), states)


def test_retention_is_the_mean_decay(model):
    trace = model.trace(ids=TEXTS)
    assert trace.retention.shape == (model.num_layers, len(TEXTS), max(map(len, TEXTS)))
    for index, layer in enumerate(trace.layers):
        decays = [mean_decay(r) for r in layer.recurrences]
        expected = sum(decays) / len(decays)
        if layer.turn is not None:  # the others hold
            expected = sum(decay * (layer.turn == i) for i, decay in enumerate(decays))
            assert all((decay[layer.turn != i] == 1).all() for i, decay in enumerate(decays))
        torch.testing.assert_close(trace.retention[index][trace.mask], expected[trace.mask])
        torch.testing.assert_close(layer.retention()[trace.mask], expected[trace.mask])
    assert trace.retention[:, ~trace.mask].isnan().all()


def test_a_trace_does_not_depend_on_its_batch(model, monkeypatch):
    together = model.trace(ids=TEXTS)
    monkeypatch.setattr("ssmscope.core.batching.TOKENS_AT_ONCE", 8)  # every text on its own
    apart = model.trace(ids=TEXTS)
    torch.testing.assert_close(together.retention, apart.retention, equal_nan=True, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together.logits, apart.logits, rtol=1e-4, atol=1e-4)
    for a, b in zip(together.layers, apart.layers):
        torch.testing.assert_close(a.u[together.mask], b.u[together.mask], rtol=1e-4, atol=1e-4)


def test_nothing_is_left_behind(model):
    assert hooks(model) == 0
    model.trace(ids=TEXTS)
    assert hooks(model) == 0

    def fail(*_):
        raise RuntimeError("in the middle")

    batch = model.encode(ids=TEXTS)
    with pytest.raises(RuntimeError, match="in the middle"), fast_scan(model.module, visit=fail):
        assert hooks(model) >= model.num_layers
        assert all("forward" in mixer.__dict__ for mixer in model.mixers)
        model.module(batch.input_ids)
    assert hooks(model) == 0


def test_gradients_reach_every_weight_and_the_input(model):
    module = model.module
    batch = model.encode(ids=[TEXTS[0]])
    embeds = module.get_input_embeddings()(batch.input_ids).detach().requires_grad_()
    own = module(inputs_embeds=embeds).logits.square().mean()
    expected = torch.autograd.grad(own, [embeds, *module.parameters()], allow_unused=True)
    with fast_scan(module):
        ours = module(inputs_embeds=embeds).logits.square().mean()
    found = torch.autograd.grad(ours, [embeds, *module.parameters()], allow_unused=True)
    for a, b in zip(found, expected):
        assert (a is None) == (b is None)
        if a is not None and b.abs().max() > 0:
            assert relative(a, b) < 1e-3 and a.isfinite().all()


def test_gradients_are_the_slope_of_the_logits(module):
    """Both ways above go through the same terms in our own models."""
    module, ids = doubled(module), torch.tensor([TEXTS[0]])
    weights = list(module.parameters())
    steps = [torch.randn_like(weight) * weight.detach().abs().mean() for weight in weights]

    def size() -> torch.Tensor:
        with TrueFloat64(), fast_scan(module):
            return module(ids).logits.square().mean()

    found = torch.autograd.grad(size(), weights, allow_unused=True)
    slope = sum((g * step).sum() for g, step in zip(found, steps) if g is not None)
    ends = []
    for share in (1e-6, -2e-6):
        with torch.no_grad():
            for weight, step in zip(weights, steps):
                weight.add_(step, alpha=share)
            ends.append(size())
    torch.testing.assert_close((ends[0] - ends[1]) / 2e-6, slope, rtol=1e-4, atol=1e-6)


def test_save_and_load_in_transformers_layout(model, tmp_path):
    model.module.save_pretrained(tmp_path)
    again = ssmscope.load(tmp_path)
    assert type(again.module) is type(model.module) and again.fingerprint == model.fingerprint
    batch = model.encode(ids=TEXTS)
    torch.testing.assert_close(again.trace(batch).logits, model.trace(batch).logits)


def test_model_types_are_declared():
    every = {Model(made.models[name]).architecture for name, made in EXAMPLES.items()}
    assert set(readable_types()) == {*every, "ssm-classifier"}


def test_what_is_found_does_not_depend_on_the_default_dtype(model, request):
    batch = model.encode(ids=TEXTS)

    def found() -> list[torch.Tensor]:
        trace = model.trace(batch)
        linearized = trace.linearized[0]
        with torch.no_grad():
            maps = [linearized.attention(level) for level in ("ssm", "block")]
        return [
            trace.logits, trace.retention, trace.survival(), linearized.matvec(linearized.u) + linearized.bias, *maps,
        ]  # fmt: skip

    expected, before = found(), torch.get_default_dtype()
    for dtype in half((torch.bfloat16, torch.float64), request.node.name):
        torch.set_default_dtype(dtype)
        try:
            others = found()
        finally:
            torch.set_default_dtype(before)
        for one, other in zip(others, expected, strict=True):
            assert one.dtype == torch.float32
            atol = 1e-5 * float(other.nan_to_num().max())
            torch.testing.assert_close(one, other, rtol=1e-4, atol=atol, equal_nan=True)
