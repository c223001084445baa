"""Answers that are given: continuations token by token, and fidelity and plausibility of a language model's target."""

import copy

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
import ssmscope
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.explain.scored_text import Scores

PROMPTS = [[5, 17, 3, 9, 22], [7, 8, 9]]


@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_a_given_continuation_reads_as_what_was_written(name):
    model = Model(loud(random_example(name)), name=name)
    written = ssmscope.generate(model, model.encode(ids=PROMPTS), max_new_tokens=4, explain=["gradxinput"])
    said = [[int(token) for token in text.tokens[text.first :]] for text in written]
    given = ssmscope.generate(model, model.encode(ids=PROMPTS), continuation=said, explain=["gradxinput"])
    for own, other in zip(given, written):
        assert own.tokens == other.tokens and own.ended_by == "given"
        np.testing.assert_allclose(own.log_probabilities, other.log_probabilities, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(own.entropies, other.entropies, rtol=1e-3, atol=1e-4)
        for first, second in zip(own.maps, other.maps):
            np.testing.assert_allclose(first.values, second.values, rtol=1e-3, atol=1e-4)
    summed = ssmscope.explain(model, model.encode(ids=PROMPTS), methods=["gradxinput"], target=[[8, 3]] * 2)
    pair = ssmscope.generate(model, model.encode(ids=PROMPTS), continuation=[8, 3])
    for one, text in zip(summed, pair):
        assert text.log_probabilities.sum() == pytest.approx(one.value, rel=1e-4)
    least = pair[0].tokens[pair[0].first + int(pair[0].log_probabilities.argmin())]
    assert f"“{least}” expected least" in pair.headline
    with pytest.raises(InputError, match="leave temperature=… out"):
        ssmscope.generate(model, model.encode(ids=PROMPTS), continuation=[8], temperature=1.0)


def test_generation_settings_that_are_not_used_are_noted():
    module = copy.deepcopy(random_example("mamba2"))
    model = Model(module, name="own")

    def notes():
        return ssmscope.generate(model, model.encode(ids=PROMPTS), max_new_tokens=1).provenance.get("notes", [])

    assert notes() == []
    module.generation_config.temperature, module.generation_config.repetition_penalty = 0.7, 1.2
    (said,) = notes()
    assert "repetition_penalty=1.2" in said and "temperature" not in said  # which is of sampling alone
    module.generation_config.do_sample = True
    (said,) = notes()
    assert "do_sample=True, temperature=0.7, repetition_penalty=1.2" in said


books = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/books-mamba2"))


def marked():
    texts = ["The old man sat by the fire and said", "She walked into the dark"]
    return text_data("own", "all", texts, [0, 1], ("nothing at all", "house"), [[(4, 11)], [(20, 24)]])


def test_fidelity_of_a_continuation_is_of_its_log_probability(books):
    data, ids = marked(), [[books.tokenizer(each)["input_ids"] for each in marked().texts]][0]
    labels = [books.tokenizer(f" {each}", add_special_tokens=False)["input_ids"] for each in data.label_names]
    assert len(labels[0]) > 1
    forwards = ssmscope.fidelity(books, data, methods=["survival"], target="label", steps=2, mode="delete")
    assert forwards.value == "log-probability"
    for row, (before, said) in enumerate(zip(ids, labels)):
        log_p = books.logits(books.encode(ids=[[*before, *said]]))[0, len(before) - 1 : -1].log_softmax(-1)
        wanted = float(log_p[range(len(said)), said].sum())
        assert forwards.clean[row] == pytest.approx(wanted, rel=1e-4)
    probabilities = ssmscope.fidelity(books, data, methods=["survival"], target="label", steps=2, value="probability")
    np.testing.assert_allclose(np.log(probabilities.clean), forwards.clean, rtol=1e-4)


def test_hidden_tokens_are_hidden_before_the_continuation(books):
    data, places = marked().take([0]), {}

    def by_place(goal):
        scores = -torch.arange(goal.batch.input_ids.shape[1]).float().expand(len(goal), -1)
        places["n"] = goal.lengths[0]
        return Scores(scores)

    found = ssmscope.fidelity(books, data, methods={"by place": by_place}, target="label", steps=2, mode="delete")
    ids = books.tokenizer(data.texts[0])["input_ids"]
    special = set(books.tokenizer.all_special_ids)
    own = [at for at, id_ in enumerate(ids) if id_ not in special]
    said = books.tokenizer(" nothing at all", add_special_tokens=False)["input_ids"]
    gone = set(own[: round(len(own) / 2)])
    kept = [id_ for at, id_ in enumerate(ids) if at not in gone]
    log_p = books.logits(books.encode(ids=[[*kept, *said]]))[0, len(kept) - 1 : -1].log_softmax(-1)
    assert found.curve[0, 0, 1, 0] == pytest.approx(float(log_p[range(len(said)), said].sum()), rel=1e-4)
    with pytest.raises(InputError, match="give a target of one token"):
        ssmscope.fidelity(books, data, methods=["survival"], target="label", knockout=True)


def test_plausibility_of_a_language_models_target(books):
    seen = []

    def fixed(goal):
        seen.append(goal.targets)
        mask = torch.zeros(goal.batch.input_ids.shape)
        for row, words in enumerate(goal.batch.words):
            mask[row, [word is not None for word in words].index(True)] = 1.0
        return Scores(mask)

    found = ssmscope.plausibility(books, marked(), methods={"first": fixed}, target="label", batch_size=2)
    wanted = [
        tuple(books.tokenizer(f" {each}", add_special_tokens=False)["input_ids"]) for each in marked().label_names
    ]
    assert sorted(sum(map(list, seen), [])) == sorted(wanted)
    assert found.texts == (0, 1)
