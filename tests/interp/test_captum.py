"""captum's attributions through the adapter: against our own, all subsets, whatever the batch; and its metrics."""

import warnings
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from faithful import reader
from prompted import language_model
from refusals import refuses
import ssmscope
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.baselines import baseline_embeddings, ordinary_tokens
from ssmscope.interp.methods import CAPTUM, CAPTUM_METHODS, CAPTUM_PREFIX, METHODS, bind_method
from ssmscope.interp.methods.captum_names import LLM
from ssmscope.interp.methods.from_captum import attributed
from ssmscope.interp.objective import objective

TEXTS = ["Gripping, but long.", "A tedious and lifeless script."]
model = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/sst2-mamba2"))
explained = pytest.fixture(scope="module")(lambda model: objective(model, model.encode(TEXTS)))


def test_fixed_steps_are_captums(explained):
    """The nodes of both are Gauss and Legendre's: scores are equal to rounding, whether converged or not."""
    for steps in (1, 4, 50):
        theirs = bind_method("captum:IntegratedGradients", {"n_steps": steps, "method": "gausslegendre"})(explained)
        ours = bind_method("ig", {"fixed": steps})(explained)
        torch.testing.assert_close(ours.scores, theirs.scores.to(ours.scores), rtol=1e-4, atol=1e-5)
        assert ours.steps.tolist() == [3 * steps] * len(TEXTS)
        assert f"{steps} fixed steps, with an error of {100 * float(ours.error.max()):.2g} %" in ours.note
    exact = bind_method("ig", {"tolerance": 1e-4})(explained)
    for steps in (2, 6):
        ours = bind_method("ig", {"fixed": steps})(explained)
        off = (ours.scores - exact.scores).abs().amax(1) / ours.scores.abs().amax(1)
        assert bool((off <= 1.5 * ours.error).all()) and bool((off > 0.003).any())


def test_shapley_values_are_the_mean_over_all_subsets(model):
    """v_t = Σ_S |S|! (n − 1 − |S|)! / n! (f(S ∪ t) − f(S)); their sum is f(text) − f(baseline)."""
    of = objective(model, model.encode(ids=[[1500, 77, 900, 2000]]))
    found = bind_method("captum:ShapleyValues", {"baseline": "mean"})(of)
    whole, hidden = of.embeddings()[0], baseline_embeddings(of, "mean")[0]
    n = len(whole)
    worth = {}
    for size in range(n + 1):
        for kept in combinations(range(n), size):
            there = torch.tensor([place in kept for place in range(n)]).unsqueeze(1)
            with torch.no_grad():
                worth[kept] = float(of(torch.where(there, whole, hidden).unsqueeze(0), [0]))
    for place in range(n):
        rest = [each for each in range(n) if each != place]
        by_hand = sum(
            (worth[tuple(sorted((*kept, place)))] - worth[kept]) / (n * comb(n - 1, size))
            for size in range(n)
            for kept in combinations(rest, size)
        )
        assert float(found.scores[0, place]) == pytest.approx(by_hand, abs=1e-5)
    assert float(found.scores.sum()) == pytest.approx(worth[tuple(range(n))] - worth[()], abs=1e-5)


@pytest.mark.parametrize("name", ["GradientShap", "KernelShap", "Lime", "NoiseTunnel", "ShapleyValueSampling"])
def test_what_draws_hangs_on_seed_and_text_alone(model, explained, name):
    both = bind_method(f"captum:{name}", seed=3)(explained)
    state = torch.get_rng_state()
    alone = bind_method(f"captum:{name}", seed=3)(objective(model, model.encode(TEXTS[1:])))
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(both.scores[1, : alone.scores.shape[1]], alone.scores[0], rtol=1e-3, atol=1e-5)
    assert not torch.equal(both.scores, bind_method(f"captum:{name}", seed=4)(explained).scores)


def test_every_one_answers(model):
    names = [name for name in CAPTUM if name not in ("ShapleyValues", *LLM)]
    result = ssmscope.explain(model, TEXTS[0], methods=[f"captum:{name}" for name in names])
    found = {each.method.removeprefix(CAPTUM_PREFIX): each for each in result[0].attributions}
    assert list(found) == names
    (text,) = result
    of = objective(model, model.encode(TEXTS[0]))
    ordinary, of = ~text.special, objective(model, model.encode(TEXTS[0]))
    whole = of.embeddings().detach().requires_grad_()
    special = torch.from_numpy(text.special).unsqueeze(1)  # these keep their embeddings
    base = torch.where(special, whole, baseline_embeddings(of, "neutral")).detach()
    (gradient,) = torch.autograd.grad(of(whole, [0]).sum(), whole)
    removed = []
    with torch.no_grad():
        change = float((of(whole, [0]) - of(base, [0]))[0])
        for place in range(len(text)):
            hidden = torch.where(torch.arange(len(text)).unsqueeze(1) == place, base, whole)
            removed.append(float((of(whole, [0]) - of(hidden, [0]))[0]))
        by_hand = {
            "Saliency": gradient.abs().sum(-1)[0].numpy(),
            "InputXGradient": (gradient * whole).sum(-1)[0].numpy(),
            "DeepLift": (gradient * (whole - base)).sum(-1)[0].numpy(),
            **dict.fromkeys(("FeatureAblation", "Occlusion"), np.array(removed)),
        }
    for name, scores in by_hand.items():
        np.testing.assert_allclose(found[name].scores[ordinary], scores[ordinary], rtol=2e-3, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(found["LayerIntegratedGradients"].scores, found["IntegratedGradients"].scores)
    for name in ("IntegratedGradients", "ShapleyValueSampling"):
        assert found[name].scores.sum() == pytest.approx(change, rel=1e-4)
    assert found["IntegratedGradients"].delta < 1e-4
    assert found["DeepLift"].delta == pytest.approx(abs(by_hand["DeepLift"].sum() - change) / abs(change), rel=1e-3)
    sampled = found["ShapleyValueSampling"].scores[ordinary]
    for name in ("KernelShap", "Lime", "GradientShap"):
        assert np.corrcoef(found[name].scores[ordinary], sampled)[0, 1] > 0.9, name
    assert np.isfinite(found["NoiseTunnel"].scores).all() and found["NoiseTunnel"].scores.any()  # see its options below


def test_a_block_is_captums_layer():
    """captum called by hand on transformers' model and its block, from our baseline."""
    from captum.attr import LayerIntegratedGradients

    model = language_model()
    theirs = model.module
    goal = objective(model, model.encode(["a good film with fine acting", "no play"]))
    found = bind_method("captum:LayerIntegratedGradients", {"layer": 0, "n_steps": 12})(goal)
    start = torch.where(ordinary_tokens(goal).unsqueeze(-1), baseline_embeddings(goal), goal.embeddings())
    for text, length in enumerate(goal.lengths):

        def f(embeddings, target=goal.targets[text][0]):
            return theirs(inputs_embeds=embeddings, use_cache=False).logits[:, -1, target]

        inputs, base = (each[text : text + 1, :length] for each in (goal.embeddings(), start))
        method = LayerIntegratedGradients(f, theirs.backbone.layers[0])
        by_hand, missed = method.attribute(inputs, base, n_steps=12, return_convergence_delta=True)
        torch.testing.assert_close(found.scores[text, :length], by_hand[0].sum(-1), rtol=1e-3, atol=1e-4)
        missed_share = abs(float((missed / (f(inputs) - f(base))).detach()))
        assert float(found.delta[text]) == pytest.approx(missed_share, rel=0.05, abs=1e-4)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in theirs.modules())
    with pytest.raises(InputError, match="layer is 2; allowed are the state-space layers 0 to 1"):
        bind_method("captum:LayerIntegratedGradients", {"layer": 2})(goal)


@pytest.mark.parametrize("target", [" film", " with fine acting"])
def test_language_models_are_captums(target):
    """captum called by hand on transformers' model, with its own input and a token as the baseline."""
    import captum.attr as attr

    model = language_model()
    theirs, tokenizer, text = model.module, model.tokenizer, "no story about music"
    goal = objective(model, model.encode(text), target=[target])
    pad = tokenizer.pad_token_id
    given = attr.TextTokenInput(text, tokenizer, baselines=pad, skip_tokens=tokenizer.all_special_ids)
    wanted = torch.tensor(goal.targets[0])
    run = {"target": wanted, "use_cached_outputs": False}
    ablated = attr.LLMAttribution(attr.FeatureAblation(theirs), tokenizer).attribute(given, **run).seq_attr
    found = bind_method("captum:LLMAttribution", {"baseline": "pad"})(goal)
    torch.testing.assert_close(found.scores[ordinary_tokens(goal)], ablated, rtol=1e-4, atol=1e-5)
    assert found.baseline == f"the token {tokenizer.pad_token}" and found.note.endswith("log-probability")
    embedding = theirs.get_input_embeddings()
    integrated = attr.LLMGradientAttribution(attr.LayerIntegratedGradients(theirs, embedding), tokenizer)
    by_hand = integrated.attribute(given, target=wanted, n_steps=9).seq_attr
    found = bind_method("captum:LLMGradientAttribution", {"baseline": "pad", "n_steps": 9})(goal)
    torch.testing.assert_close(found.scores[ordinary_tokens(goal)], by_hand, rtol=1e-3, atol=1e-5)
    # Shapley's values add up to the change from the text to all of its tokens gone.
    options = {"attribution": "ShapleyValueSampling", "attr_target": "prob", "n_samples": 2, "baseline": "mean"}
    found = bind_method("captum:LLMAttribution", options)(goal)
    of = objective(model, model.encode(text), target=[target], probability=True)
    base = torch.where(ordinary_tokens(of).unsqueeze(-1), baseline_embeddings(of, "mean"), of.embeddings())
    change = of.values() - of.values(base)
    torch.testing.assert_close(found.scores.sum(1), change, rtol=1e-4, atol=1e-6)
    assert found.note.endswith("target's probability")


def test_attributions_of_language_models_need_one(model, explained):
    for name in LLM:
        with pytest.raises(InputError, match=f"captum:{name} explains a language model"):
            bind_method(f"captum:{name}")(explained)
    tiny = language_model()
    goal = objective(tiny, tiny.encode("a film"))
    with pytest.raises(InputError, match="LLMGradientAttribution's attribution is 'Lime'; allowed are LayerInt"):
        bind_method("captum:LLMGradientAttribution", {"attribution": "Lime"})(goal)


def test_an_instance_is_given_our_function(model, explained):
    from captum.attr import KernelShap, NoiseTunnel, Saliency

    def never(*_):
        raise AssertionError("called")

    result = ssmscope.explain(
        model, TEXTS, methods={"mine": KernelShap(never), "smooth": NoiseTunnel(Saliency(never))}, seed=5
    )
    named = attributed(explained, "KernelShap", seed=5)
    np.testing.assert_allclose(
        result[0].attributions[0].scores, named.scores[0, : len(result[0])], rtol=1e-3, atol=1e-5
    )
    assert result.methods == ("mine", "smooth")


def test_options_are_captums(explained):
    few, many = (bind_method("captum:KernelShap", {"n_samples": count}, seed=1)(explained).scores for count in (8, 64))
    assert not torch.allclose(few, many)
    wide = bind_method("captum:Occlusion", {"sliding_window_shapes": 3})(explained)
    assert not torch.allclose(wide.scores, bind_method("captum:Occlusion")(explained).scores)
    repeated = {"attribution": "IntegratedGradients", "nt_samples": 2, "n_steps": 4, "stdevs": 0.0}
    smooth = bind_method("captum:NoiseTunnel", repeated)(explained)
    plain = bind_method("captum:IntegratedGradients", {"n_steps": 4})(explained)
    torch.testing.assert_close(smooth.scores, plain.scores, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "options", "says"), [
    ("captum:KernalShap", {}, "did you mean 'captum:KernelShap'"),
    ("captum:LRP", {}, "there is no method 'captum:LRP'"),
    ("captum:KernelShap", {"samples": 3}, "captum:KernelShap has no option 'samples'; allowed are n_samples"),
    ("captum:NoiseTunnel", {"attribution": "Lime2"}, "NoiseTunnel's attribution is 'Lime2'"),
    ("captum:IntegratedGradients", {"method": "simpson"}, "captum's IntegratedGradients refuses"),
])  # fmt: skip
def test_what_is_refused(explained, name, options, says):
    refuses(says, lambda: bind_method(name, options)(explained))


def test_our_objective_is_captums_function(explained):
    """captum's own infidelity of scores that are exactly f's change is nil, and of others is not."""
    from captum.metrics import infidelity

    inputs = explained.embeddings()[:1, : explained.lengths[0]]
    f = explained.function(0)
    step = 1e-3 * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))
    gradient = explained.gradient(inputs, [0])

    def perturb(given):
        return step.expand_as(given), given - step.expand_as(given)

    right, wrong = (float(infidelity(f, perturb, inputs, each)) for each in (gradient, -gradient))
    assert right < 1e-3 * wrong


def test_fidelity_takes_them_and_says_what_is_circular(model):
    data = text_data("two", "by hand", TEXTS, [1, 0], ["negative", "positive"])
    result = ssmscope.fidelity(
        model, data, methods=["captum:FeatureAblation"], option={"captum:FeatureAblation": {"baseline": "mean"}}
    )
    assert "captum:FeatureAblation" in result.methods and any("favours it" in note for note in result.notes)
    assert not {*METHODS} & {*CAPTUM_METHODS} and len(CAPTUM_METHODS) == len(CAPTUM)


def test_what_adds_up_is_said_with_its_error_and_baseline_and_nothing_else_is():
    """The class that the baseline is for is tried too, where f falls towards the text."""
    model = reader()
    batch = model.encode(["a b c d", "e f"])
    for target in (0, 1, 2):
        goal = objective(model, batch, target=target)
        base = baseline_embeddings(goal, "mean")
        special = torch.tensor([[word is None for word in words] + [False] * (5 - len(words)) for words in batch.words])
        start = torch.where(special.unsqueeze(-1), goal.embeddings(), base)
        change = goal.values() - goal.values(start)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = bind_method("captum:DeepLift", {"baseline": "mean"})(goal)
        missed = (found.scores.sum(1) - change).abs() / change.abs()
        torch.testing.assert_close(found.delta, missed, rtol=1e-3, atol=1e-6)
        assert found.baseline == "the mean embedding" and found.note.startswith("DeepLift's rules need modules")
    plain = bind_method("captum:Saliency")(goal)
    assert plain.delta is None and plain.baseline == plain.note == "" and not plain.scores[1, 3:].any()
    hidden = bind_method("captum:FeatureAblation", {"baseline": "mean"})(goal)
    assert hidden.delta is None and hidden.baseline == "the mean embedding" and hidden.note == ""
