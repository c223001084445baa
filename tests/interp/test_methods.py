"""Methods of explanation: by hand, against slow references and captum, whatever the batch, on every shipped model."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examples import TEXTS, random_example
from exhaustive import few, in_turns
from loud import loud
from refusals import refuses
from torch import Tensor, nn
from warm import PLAIN
import ssmscope
import ssmscope.core.model
from ssmscope import ops
from ssmscope.core.known_models import demos
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace
from ssmscope.errors import InputError
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.explain import explain
from ssmscope.interp.explain.scored_text import Scores, kind_of
from ssmscope.interp.methods import METHODS, bind_method
from ssmscope.interp.methods.gradients import output_gradients
from ssmscope.interp.objective import objective, text_generator

CHEAP = {"ig": {"steps": 8, "cap": 8}, "smoothgrad": {"samples": 3}}
ARCHITECTURES = ["mamba", "mamba2", "diff-mamba", "gfssm", "groupmamba-mamba2", "rwkv", "gla", "gated-deltanet"]


def example(name: str) -> Model:
    return Model(loud(random_example(name)))


def run(name: str, found, **options):
    return bind_method(name, {**CHEAP.get(name, {}), **options})(found)


def close(a, b, tolerance: float = 1e-4) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-12)


class Tiny(nn.Module):
    """A mixer of one channel and one state: h_t = a_t h_{t−1} + e_t, a_t = exp(−e_t), or 1/2 where it is linear."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, u: Tensor) -> Tensor:
        h, outputs = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = (torch.full_like(h, 0.5) if self.linear else (-u[:, t]).exp()) * h + u[:, t]
            outputs.append(h)
        return torch.stack(outputs, 1)


class Reader:
    MIXERS = (Tiny,)
    MODEL_TYPES = ("tiny",)

    @staticmethod
    def compute_terms(mixer: Tiny, u: Tensor, mask: Tensor | None = None, state=None) -> LayerTrace:
        x = u.unsqueeze(-1)
        log_a = torch.full_like(x, math.log(0.5)) if mixer.linear else -x
        if mask is not None:
            keep = mask.view(*mask.shape, 1, 1)
            x, log_a = x * keep, log_a * keep
        one = torch.ones_like(x)
        return LayerTrace(u=u, recurrences=(ops.Recurrence(x=x, b=one, c=one, log_a=log_a),), mask=mask)

    @staticmethod
    def output(mixer: Tiny, layer: LayerTrace, scans=None) -> Tensor:
        return scans[0].y.squeeze(-1)


WEIGHT = 1.5
E1, E2 = 0.7, 1.3


class TinyForSequenceClassification(nn.Module):
    """Two classes of logits ±1.5 h_T: what the mixer has in its state after the last token."""

    def __init__(self, linear: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="tiny", id2label={0: "up", 1: "down"}, num_labels=2)
        self.table = nn.Embedding(3, 1)
        self.mixer = Tiny(linear)
        with torch.no_grad():
            self.table.weight.copy_(torch.tensor([[0.0], [E1], [E2]]))

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None):
        y = self.mixer(self.table(input_ids) if inputs_embeds is None else inputs_embeds)
        last = y[torch.arange(len(y)), attention_mask.sum(1) - 1, 0]
        return SimpleNamespace(logits=torch.stack([WEIGHT * last, -WEIGHT * last], -1))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(ssmscope.core.mixers._ADAPTERS, Tiny, Reader)
    return lambda target=0, linear=False, ids=(1, 2): (
        lambda model: objective(model, model.encode(ids=list(ids)), target=target)
    )(Model(TinyForSequenceClassification(linear)))


# f(e₁, e₂) = w (e₁ exp(−e₂) + e₂), the state after the second token, so that
#   ∂f/∂e₁ = w exp(−e₂),   ∂f/∂e₂ = w (1 − e₁ exp(−e₂)).
F = WEIGHT * (E1 * math.exp(-E2) + E2)


def test_by_hand_integrated_gradients(tiny):
    # On the way (α e₁, α e₂) from zero:
    #   IG₁ = w e₁ ∫ exp(−α e₂) dα = w e₁ (1 − exp(−e₂)) / e₂,
    #   IG₂ = w e₂ ∫ 1 − α e₁ exp(−α e₂) dα = w e₂ − w e₁ (1 − (1 + e₂) exp(−e₂)) / e₂;
    # their sum is w (e₂ + e₁ exp(−e₂)) = f(e) − f(0).
    first = WEIGHT * E1 * (1 - math.exp(-E2)) / E2
    second = WEIGHT * E2 - WEIGHT * E1 * (1 - (1 + E2) * math.exp(-E2)) / E2
    assert first + second == pytest.approx(F)
    found = run("ig", tiny(), baseline="zero", cap=24)
    assert found.scores[0].tolist() == pytest.approx([first, second], rel=1e-5)
    assert found.converged.all() and found.steps.tolist() == [24] and max(found.delta[0], found.error[0]) < 1e-5
    once = run("ig", tiny(), baseline="zero")  # eight gradients are right here too, but nothing says so
    assert once.scores[0].tolist() == pytest.approx([first, second], rel=1e-5)
    assert not once.converged.any() and once.steps.tolist() == [8] and once.error.tolist() == [math.inf]
    # From (m, m), the mean of the table, Σ is f(e) − f(m, m).
    m = (E1 + E2) / 3
    mean = run("ig", tiny(), baseline="mean", steps=32, cap=96)
    assert mean.scores.sum().item() == pytest.approx(F - WEIGHT * (m * math.exp(-m) + m), rel=1e-4)
    same = run("ig", tiny(), baseline=1, steps=32, cap=32)  # from (e₁, e₁): the first token does not move
    assert same.scores[0, 0] == 0 and same.scores[0, 1].item() == pytest.approx(
        F - WEIGHT * (E1 * math.exp(-E1) + E1), rel=1e-4
    )


def test_of_a_linear_f_all_agree(tiny):
    found = tiny(linear=True, ids=(1, 2, 1))
    expected = [WEIGHT * E1 / 4, WEIGHT * E2 / 2, WEIGHT * E1]
    for name in ("gradxinput", "ig", "occlusion"):
        options = {} if name == "gradxinput" else {"baseline": "zero"}
        assert run(name, found, **options).scores[0].tolist() == pytest.approx(expected, rel=1e-5)


# A loud random gated DeltaNet has cliffs that no quadrature sees.
@pytest.mark.parametrize("name", few(ARCHITECTURES[:-1], "mamba", "mamba2", "diff-mamba"))
@pytest.mark.parametrize("target", [3, [[4, 9], 8, [2, 2, 5]]])
def test_integrated_gradients_are_complete(name, target):
    model = example(name)
    found = objective(model, model.encode(ids=TEXTS), target=target)
    result = run("ig", found, steps=12, cap=2048)
    gap = found.values() - found.values(baseline_embeddings(found))
    assert result.converged.all()
    missed = (result.scores.sum(1) - gap).abs()
    # of the largest score: f may hardly differ where scores of both signs cancel
    assert (missed <= 0.0101 * result.scores.abs().amax(1)).all() and (result.error <= 0.01).all()
    missed /= gap.abs()
    close(result.delta, missed, 0.05 if missed.max() > 1e-3 else 1)


mamba = pytest.fixture(scope="module")(lambda: example("mamba"))


def test_smoothgrad_is_the_mean_over_noisy_copies(mamba):
    found = objective(mamba, mamba.encode(ids=TEXTS), target=3)
    result = run("smoothgrad", found, samples=4, noise=0.2, seed=5).scores
    for text, ids in enumerate(TEXTS):
        e = found.embeddings()[text, : len(ids)]
        draw, total = text_generator(found, text, 5), torch.zeros(len(ids))
        for _ in range(4):
            noise = torch.from_numpy(draw.standard_normal(tuple(e.shape), dtype=np.float32))
            own = (e + 0.2 * (e.max() - e.min()) * noise).unsqueeze(0).requires_grad_()
            logit = mamba.module(inputs_embeds=own, use_cache=False).logits[0, -1, 3]
            total += (torch.autograd.grad(logit, own)[0] * own).sum(-1)[0].detach() / 4
        close(result[text, : len(ids)], total, 2e-3)
    close(run("smoothgrad", found, noise=0.0).scores, run("gradxinput", found).scores)
    other = run("smoothgrad", found, samples=4, noise=0.2, seed=6).scores
    assert (other - result).abs().max() > 1e-3 * result.abs().max()


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("name", ["mamba", "rwkv"])
def test_grad_cam_of_a_layer(name, layer):
    model = example(name)
    found = objective(model, model.encode(ids=TEXTS), target=[3, 50, 7])
    result = run("gradcam", found, layer=layer).scores
    assert result.any()
    for text, (ids, target) in enumerate(zip(TEXTS, [3, 50, 7])):
        kept = []
        handle = model.mixers[layer].register_forward_hook(
            lambda m, i, o, kept=kept: kept.append(o[0] if isinstance(o, tuple) else o)
        )
        logit = model.module(torch.tensor([ids]), use_cache=False).logits[0, -1, target]
        handle.remove()
        (gradient,) = torch.autograd.grad(logit, kept)
        expected = torch.zeros(len(ids))
        for t in range(len(ids)):
            weighed = [gradient[0, :, d].mean() * kept[0][0, t, d] for d in range(gradient.shape[-1])]
            expected[t] = max(0.0, sum(weighed).item())
        close(result[text, : len(ids)], expected, 1e-3)


def test_grad_cam_of_a_continuation_is_of_the_texts_tokens(mamba):
    together = run("gradcam", objective(mamba, mamba.encode(ids=TEXTS), target=[[4, 9], 8, [2, 2, 5]])).scores
    alone = run("gradcam", objective(mamba, mamba.encode(ids=TEXTS[2:]), target=[[2, 2, 5]])).scores
    close(together[2, :6], alone[0], 1e-3)


@pytest.mark.parametrize("window", [1, 3, 50])
def test_occlusion_is_the_fall_without_a_token(mamba, window):
    found = objective(mamba, mamba.encode(ids=TEXTS), target=3, contrast=7)
    result = run("occlusion", found, window=window).scores
    mean = mamba.module.get_input_embeddings().weight.detach().mean(0)
    for text, ids in enumerate(TEXTS):
        e = found.embeddings()[text, : len(ids)]
        each = [[] for _ in ids]
        for first in range(max(1, len(ids) - window + 1)):
            covered = range(first, min(first + window, len(ids)))
            hidden = e.clone()
            hidden[list(covered)] = mean
            logits = [mamba.module(inputs_embeds=x[None], use_cache=False).logits[0, -1] for x in (e, hidden)]
            fall = ((logits[0][3] - logits[0][7]) - (logits[1][3] - logits[1][7])).item()
            for t in covered:
                each[t].append(fall)
        close(result[text, : len(ids)], [np.mean(falls) for falls in each], 1e-3)


@pytest.mark.parametrize("name", ["mamba2", "diff-mamba", "groupmamba-mamba2", "deltanet"])
def test_attention_gradient_is_the_columns_of_its_maps(name):
    model = example(name)
    batch = model.encode(ids=TEXTS)
    result = run("attention-gradient", objective(model, batch, target=42)).scores
    maps = ssmscope.attention(model, batch, gradient=True, target=42)
    against = ssmscope.attention(model, batch, gradient=True, target=7)
    contrast = run("attention-gradient", objective(model, batch, target=42, contrast=7)).scores
    for text, ids in enumerate(TEXTS):
        columns = np.sum([each.values.sum(0) for each in maps[text].maps], axis=0)
        close(result[text, : len(ids)], columns, 1e-3)
        other = np.sum([each.values.sum(0) for each in against[text].maps], axis=0)
        close(contrast[text, : len(ids)], columns - other, 5e-3)


def test_retention_is_the_heatmaps(mamba):
    found = objective(mamba, mamba.encode(ids=TEXTS))
    kept, written = run("self-retention", found).scores, run("self-write", found).scores
    heatmap = ssmscope.heatmap(mamba.trace(ids=TEXTS), score="retention")
    for text, ids in enumerate(TEXTS):
        close(kept[text, : len(ids)], heatmap[text].mean, 1e-6)
        close(written[text, : len(ids)], 1 - heatmap[text].mean, 1e-6)


def test_random_scores_are_of_the_text_and_the_seed(mamba):
    many = np.random.default_rng(0).integers(0, 97, (1, 3000)).tolist()
    scores = run("random", objective(mamba, mamba.encode(ids=many), target=3)).scores[0].numpy()
    assert 0 <= scores.min() < 0.01 and 0.99 < scores.max() < 1 and abs(scores.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(scores[1:], scores[:-1])[0, 1]) < 0.06
    found = objective(mamba, mamba.encode(ids=[TEXTS[1], TEXTS[1], TEXTS[2]]), target=3)
    first, second = run("random", found, seed=1).scores, run("random", found, seed=2).scores
    assert first[0].tolist() == first[1].tolist() and (first[2, :3] - first[0, :3]).abs().min() > 1e-6
    assert (first - second)[0, :3].abs().min() > 1e-6


@pytest.mark.parametrize(("which", "name"), in_turns(METHODS, ARCHITECTURES, 5))
def test_scores_do_not_depend_on_the_batch(name, which):
    model = example(name)
    together = run(which, objective(model, model.encode(ids=TEXTS), target=[3, 50, 7]))
    assert together.scores.shape == (3, 11) and together.scores.isfinite().all()
    for text, (ids, target) in enumerate(zip(TEXTS, [3, 50, 7])):
        alone = run(which, objective(model, model.encode(ids=[ids]), target=target))
        if name == "rwkv" and which in ("gradxinput", "smoothgrad"):
            # A norm follows its embeddings at once: f does not change with their length, and Σ_d ∂f/∂e · e is 0.
            assert max(together.scores.abs().max(), alone.scores.abs().max()) < 1e-4
        else:
            close(together.scores[text, : len(ids)], alone.scores[0], 2e-3)
        assert not together.scores[text, len(ids) :].any()
        if not kind_of(METHODS[which]).signed:
            assert alone.scores.min() >= 0
    assert all(not m._forward_hooks and "forward" not in m.__dict__ for m in model.mixers)
    assert all(p.requires_grad and p.grad is None for p in model.module.parameters())


ALIKE = ("random", "survival", "self-retention", "self-write")
"""Those that know nothing of f."""


@pytest.mark.parametrize("which", [name for name in METHODS if name not in ALIKE])
def test_in_float64_too(which):
    model = example("mamba2")
    model.module.double()
    found = run(which, objective(model, model.encode(ids=TEXTS[:2]), target=3))
    assert found.scores.isfinite().all() and (found.scores.any() or which == "gradcam")  # its ReLU may leave nothing


@pytest.mark.parametrize("name", [name for name in sorted(demos()) if "sst2" in name])
def test_every_method_on_every_demo_of_texts(name):
    model = ssmscope.load(name)
    result = explain(model, "A gripping film.", methods=list(METHODS), contrast="negative", option=CHEAP)
    assert result.methods == tuple(METHODS) and [each.method for each in result[0].attributions] == list(METHODS)
    assert result[0].answer == "positive" and result[0].target == "positive − negative"
    for each in result[0].attributions:
        assert len(each.scores) == len(result[0]) and each.scores.dtype == np.float32
        assert each.scores.any() or each.method == "gradcam"  # its ReLU may leave nothing


@pytest.mark.parametrize("name", [name for name in sorted(demos()) if "cifar10" in name])
def test_cheap_methods_on_every_demo_of_pixels(name):
    model = ssmscope.load(name)
    image = np.random.default_rng(0).integers(0, 256, (1024, 3)).astype(np.uint8)
    methods = ["ig", "gradxinput", "gradcam", "attention-gradient", "self-write", "random"]
    result = explain(model, model.encode(values=image), methods=methods, option={"ig": {"steps": 2, "cap": 2}})
    assert result[0].pixels.shape == (32, 32, 3)
    for each in result[0].attributions:
        assert each.scores.shape == (1025,) and np.isfinite(each.scores).all()
        assert each.scores.any() or each.method == "gradcam"
    assert result.attribution(method="ig").scores[-1] == 0  # the class token is its own baseline


def test_nothing_is_left_after_an_error(mamba, monkeypatch):
    found = objective(mamba, mamba.encode(ids=TEXTS), target=3)

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Model, "forward_embeddings", broken)
    for which in ("ig", "gradxinput", "smoothgrad", "gradcam", "occlusion", "attention-gradient"):
        with pytest.raises(RuntimeError, match="out of memory"):
            run(which, found)
        assert all(not m._forward_hooks and "forward" not in m.__dict__ for m in mamba.mixers)
        assert all(p.requires_grad for p in mamba.module.parameters())


def test_outputs_come_with_their_gradients(mamba):
    found = objective(mamba, mamba.encode(ids=TEXTS[:1]), target=3)
    pairs = output_gradients(found, found.embeddings(), [0], mamba.mixers)
    assert len(pairs) == mamba.num_layers
    for output, gradient in pairs:
        assert output.shape == gradient.shape and not output.requires_grad and gradient.any()
    assert not pairs[-1][1][0, :-1].any()  # after the last layer only the last token is read


def test_values_and_answers(mamba):
    result = explain(mamba, mamba.encode(ids=TEXTS), methods="gradxinput", target=3, contrast=7)
    logits = mamba.logits(mamba.encode(ids=TEXTS))
    last = torch.stack([logits[row, len(ids) - 1] for row, ids in enumerate(TEXTS)])
    assert len(result) == 3 and [len(text) for text in result] == [11, 3, 6]
    for row, text in enumerate(result):
        assert text.value == pytest.approx((last[row, 3] - last[row, 7]).item(), rel=1e-3)
        assert text.answer == str(int(last[row].argmax())) and text.target == "3 − 7"
        assert text.probability == pytest.approx(last[row].softmax(-1).max().item(), rel=1e-4)
    assert result.provenance["options"]["target"] == ["3 − 7"] * 3


def test_seed_and_options_reach_the_methods(mamba):
    batch = mamba.encode(ids=TEXTS[:1])
    by_seed = [explain(mamba, batch, methods=["random"], seed=seed)[0].attributions[0].scores for seed in (1, 2)]
    own = explain(mamba, batch, methods=["random"], seed=1, option={"random": {"seed": 2}})[0].attributions[0].scores
    assert (by_seed[0] != by_seed[1]).all() and (own == by_seed[1]).all()
    continued = explain(mamba, batch, methods=["ig", "occlusion"], target=[[4, 9]], option={"ig": {"cap": 64}})
    assert continued[0].target == "4,9" and continued[0].value < 0


def test_functions_of_your_own_explain_too(mamba):
    batch = mamba.encode(ids=TEXTS)

    def doubled(goal, factor=2):
        return Scores(factor * run("gradxinput", goal).scores)

    plain = explain(mamba, batch, methods="gradxinput")
    own = explain(mamba, batch, methods={"doubled": doubled}, option={"doubled": {"factor": 4}})
    assert own.methods == ("doubled",) and own.provenance["options"]["option"] == {"doubled": {"factor": 4}}
    np.testing.assert_allclose(own[0].attributions[0].scores, 4 * plain[0].attributions[0].scores)


@pytest.mark.parametrize(("options", "message"), [
    ({"methods": "ig", "option": {"ig": {"step": 3}}}, "ig has no option 'step'.*did you mean 'steps'"),
    ({"methods": "gradxinput", "option": {"gradxinput": {"layer": 1}}}, "it has none"),
    ({"methods": "gradcam", "option": {"gradcam": {"layer": 9}}}, "no layer 9; allowed are 0 to 1"),
    ({"methods": "ig", "option": {"ig": {"baseline": "pad"}}}, "unknown baseline 'pad'"),
    ({"methods": "occlusion", "option": {"occlusion": {"window": 0}}}, "window is 0"),
    ({"methods": "smoothgrad", "option": {"smoothgrad": {"noise": -1}}}, "noise is -1"),
    ({"methods": "attention-rollout", "option": {"attention-rollout": {"residual": 2}}}, "residual is 2"),
    ({"methods": "attention-gradient", "target": [[1, 2]]}, "not a continuation"),
])  # fmt: skip
def test_what_cannot_be_is_refused(mamba, options, message):
    refuses(message, explain, mamba, mamba.encode(ids=TEXTS[:1]), **options)


def test_a_damaged_model_is_named(monkeypatch):
    model = example("mamba")
    with torch.no_grad():
        model.module.get_input_embeddings().weight[5] = float("nan")
    with pytest.raises(InputError, match="the logits of model are not finite: it is damaged"):
        explain(model, model.encode(ids=TEXTS[:1]), methods="gradxinput", target=3)


def test_methods_are_imported_when_asked_for():
    code = "import sys; from ssmscope.interp.methods import METHODS; list(METHODS); print('torch' in sys.modules)"
    assert PLAIN.run(code).stdout.strip() == "False"
    assert "lrp" in METHODS and "ig" in METHODS and "igg" not in METHODS and len(METHODS) == len([*METHODS]) > 2


def test_survival_is_the_mean_over_layers_of_what_is_left(mamba):
    batch = mamba.encode(ids=TEXTS)
    found = run("survival", objective(mamba, batch, target=3)).scores
    for row, ids in enumerate(TEXTS):
        alone = mamba.trace(ids=[ids])
        close(found[row, : len(ids)], alone.survival().mean(0)[0], 1e-4)
    assert found.sum(1).tolist() == pytest.approx([1.0] * len(TEXTS), abs=1e-4)
