"""Written tokens and their sources: survival and scores of every written token are those of its prefix alone."""

import numpy as np
import pytest
from examples import EXAMPLES, random_example
from exhaustive import few
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope.api.results import Result
from ssmscope.core.model import Model
from ssmscope.errors import InputError

NAMES = ("mamba", "mamba2", "diff-mamba", "groupmamba", "rwkv", "gated-deltanet", "bamba")
PROMPTS = [[5, 17, 3, 9, 22], [7, 8, 9]]
models = pytest.fixture(scope="module")(lambda: {name: Model(loud(random_example(name)), name=name) for name in NAMES})


@pytest.mark.parametrize("name", few(NAMES, "mamba2", "bamba"))
def test_scores_are_those_of_each_prefix_alone(models, name):
    model = models[name]
    methods = ["gradxinput", "occlusion", "survival", "random"]
    methods += ["lrp"] * ("lrp" in ssmscope.explain(model, model.encode(ids=PROMPTS)).methods)
    options = dict(option={"occlusion": {"window": 2}}, contrast=3)
    result = ssmscope.generate(model, model.encode(ids=PROMPTS), max_new_tokens=3, explain=methods, **options)
    for text, prompt in zip(result, PROMPTS):
        whole = [*prompt, *map(int, text.tokens[text.first :])]
        assert text.first == len(prompt) and len(whole) == len(text)
        for number in range(len(text.written)):
            end = text.first + number
            batch = model.encode(ids=whole[:end])
            alone = ssmscope.explain(model, batch, methods=methods, target=[[whole[end]]], **options)
            for own in alone[0].attributions:
                scores = next(map_ for map_ in text.maps if map_.name == own.method).values[number]
                np.testing.assert_allclose(
                    scores[:end], own.scores, atol=2e-4 * np.abs(own.scores).max() + 2e-6, rtol=1e-3
                )
                assert not scores[end:].any()


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gated-deltanet"])
def test_survival_is_that_of_the_states_a_token_is_written_from(models, name):
    model = models[name]
    result = ssmscope.generate(model, model.encode(ids=PROMPTS), max_new_tokens=4, by_layer=True)
    for text, prompt in zip(result, PROMPTS):
        trace = model.trace(ids=[[*prompt, *map(int, text.tokens[text.first :])]])
        assert [each.name for each in text.maps] == ["survival", *(f"survival, layer {n}" for n in model.layer_numbers)]
        for number in range(4):
            layers = trace.survival(text.first - 1 + number)[:, 0].numpy()
            np.testing.assert_allclose([map_.values[number] for map_ in text.maps[1:]], layers, atol=1e-6)
            np.testing.assert_allclose(text.maps[0].values[number], layers.mean(0), atol=1e-6)
        np.testing.assert_allclose(text.left, trace.survival()[:, 0].mean(0).numpy(), atol=1e-6)
        half_lives = np.array([layer.half_lives()[0].numpy() for layer in trace.layers])
        np.testing.assert_allclose(text.half_lives[:, :-1], half_lives[:, :-1])
        assert np.isnan(text.half_lives[:, -1]).all()  # nothing follows the last token
        assert text.kept == pytest.approx(text.left[: len(prompt)].sum())


@pytest.mark.parametrize("name", [name for name in ("lfm2", "lfm3") if name in EXAMPLES])
def test_a_model_without_a_memory_is_explained_without_survival(name, tmp_path):
    model = Model(loud(random_example(name)), name=name)
    result = ssmscope.generate(model, model.encode(ids=PROMPTS), max_new_tokens=4)
    for text, prompt in zip(result, PROMPTS):
        assert [each.name for each in text.maps] == ["gradxinput"] and text.left is text.half_lives is text.kept is None
        batch = model.encode(ids=[[*prompt, *map(int, text.tokens[text.first : -1])]])
        alone = ssmscope.explain(model, batch, methods="gradxinput", target=[[int(text.tokens[-1])]]).attribution()
        scores = text.maps[0].values[-1, :-1]
        np.testing.assert_allclose(scores, alone.scores, rtol=1e-3, atol=2e-4 * np.abs(alone.scores).max())
    assert "states" not in result.verdict() and result.tables()[0].columns == ("p", "entropy", "gradxinput")
    assert Result.load(result.save(tmp_path, "generate")["json"]) == result
    for options, what in (({"by_layer": True}, "survival in each layer"), ({"explain": ["survival"]}, "survival")):
        with pytest.raises(InputError, match=f"has a recurrent memory, which .*{what} is about"):
            ssmscope.generate(model, model.encode(ids=PROMPTS), max_new_tokens=2, **options)


def test_it_writes_as_the_model_does(models):
    model, drawn = models["mamba2"], dict(max_new_tokens=6, temperature=1.5, top_k=7, top_p=0.9, seed=3)
    result, found = (
        ssmscope.generate(model, model.encode(ids=PROMPTS), **drawn),
        model.generate(model.encode(ids=PROMPTS), **drawn),
    )
    for row, text in enumerate(result):
        assert text.tokens[text.first :] == found.tokens[row] and text.text == found.texts[row]
        assert text.log_probabilities.tolist() == list(found.log_probabilities[row])
        assert text.entropies.tolist() == list(found.entropies[row]) and text.ended_by == found.ended_by[row]
    assert result.provenance["seed"] == 3 and result.provenance["options"]["top_k"] == 7


def test_a_shipped_model_ends_and_stops():
    model = ssmscope.load("demo/instruct-mamba2")
    (text,) = ssmscope.generate(model, "Once upon a time there was", max_new_tokens=9)
    assert (text.text, text.ended_by, text.words[-1]) == (" positive", "end", None)
    model = ssmscope.load("demo/books-mamba2")
    (text,) = ssmscope.generate(model, "Once upon a time there was", max_new_tokens=9, stop=["deal"])
    assert (text.text.strip(), text.ended_by, len(text.written)) == ("a great", "stop", 3)


@pytest.mark.parametrize(("options", "says"), [
    ({"top_k": 3}, "top_k=… is for drawing tokens"),
    ({"contrast": 3}, "contrast=… is for methods of explanation"),
    ({"explain": ["survival", "nothing"]}, "unknown method 'nothing'|allowed"),
    ({"explain": ["lrp"], "option": {"ig": {}}}, "not among the methods"),
    ({"max_new_tokens": 0}, "max.new.tokens"),
])  # fmt: skip
def test_refused(models, options, says):
    refuses(says, ssmscope.generate, models["mamba"], models["mamba"].encode(ids=PROMPTS), **options)


def test_models_that_do_not_write_are_refused():
    refuses("is a classifier and writes nothing", ssmscope.generate, ssmscope.load("demo/sst2-mamba2"), "A film.")


def test_hidden_windows_longer_than_a_text(models):
    model = models["mamba2"]
    options = dict(explain=["occlusion"], option={"occlusion": {"window": 4}}, max_new_tokens=3)
    (text,) = ssmscope.generate(model, model.encode(ids=[PROMPTS[1]]), **options)
    alone = ssmscope.explain(
        model, model.encode(ids=[PROMPTS[1]]), methods="occlusion", option=options["option"],
        target=[[int(text.tokens[3])]],
    )  # fmt: skip
    np.testing.assert_allclose(text.maps[1].values[0, :3], alone.attribution().scores, rtol=1e-3)
