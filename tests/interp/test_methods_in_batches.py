"""Methods of explanation in batches of a few tokens, and heatmaps of data whose answers and scores are known."""

import dataclasses

import numpy as np
import pytest
import torch
from bags import tokenizer
from examples import TEXTS, random_example
from faithful import lines, reader
from loud import loud
from refusals import refuses
from ssmscope.core import batching
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.heatmap import over_data, selection_heatmap
from ssmscope.interp.methods import METHODS, bind_method
from ssmscope.interp.objective import objective

FEW_STEPS = {"ig": {"steps": 2, "cap": 6}, "smoothgrad": {"samples": 2}, "occlusion": {"window": 2}}


@pytest.fixture(scope="module")
def models():
    return {name: Model(loud(random_example(name)), name=name) for name in ("mamba2", "bamba")}


@pytest.mark.parametrize("method", METHODS)
def test_a_few_tokens_at_a_time_give_the_same_scores(models, method, monkeypatch):
    for name in ("mamba2", "bamba") if method.startswith("attention") else ("mamba2",):
        model = models[name]
        goal = objective(model, model.encode(ids=TEXTS), target=[3, 50, 7])
        explain = bind_method(method, FEW_STEPS.get(method))
        whole = explain(goal).scores
        with monkeypatch.context() as patched:
            patched.setattr(batching, "TOKENS_AT_ONCE", 12)
            assert [chosen for chosen, _ in goal.parts()] == [[1, 2], [0]]
            small = explain(goal).scores
        torch.testing.assert_close(small, whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max()))
        assert whole.any() and not small[~goal.batch.mask].any()


def test_methods_of_memory_need_one_and_copies_are_whole_numbers(models):
    without = Model(random_example("lfm2"), name="convolved")
    goal = objective(without, without.encode(ids=TEXTS), target=3)
    for method, line in (
        ("survival", "the method survival"),
        ("self-retention", "the method self-retention, or self-write,"),
        ("self-write", "the method self-retention, or self-write,"),
    ):
        with pytest.raises(InputError, match=line):
            bind_method(method)(goal)
    own = objective(models["mamba2"], models["mamba2"].encode(ids=TEXTS), target=3)
    refuses("samples is 0; allowed is a whole number from 1 on", lambda: bind_method("smoothgrad", {"samples": 0})(own))
    one = bind_method("smoothgrad", {"samples": 1, "noise": 0})(own).scores
    torch.testing.assert_close(one, bind_method("gradxinput")(own).scores, rtol=1e-4, atol=1e-6)


def test_answers_over_data_are_the_models_own():
    model = reader(labels=3)
    rows = lines(12, shortest=4)
    answers = model.logits(model.encode(rows)).argmax(-1).tolist()
    assert len(set(answers)) > 1
    labels = [answer if at % 3 else (answer + 1) % 3 for at, answer in enumerate(answers)]
    data = text_data("d", "all", rows, labels, model.labels)
    for room in (4096, 20):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(over_data, "tokens_at_once", lambda device, room=room: room)
            found = {group.name: group for group in selection_heatmap(model, data, score="write").groups}
        right, wrong = found["answered right"], found["answered wrong"]
        assert (right.texts, wrong.texts) == (8, 4)
        for group, chosen in ((right, [at for at in range(12) if at % 3]), (wrong, range(0, 12, 3))):
            ends = []
            for at in chosen:
                (one,) = selection_heatmap(model, rows[at], score="write")
                words = one.mean[:-1]
                ends.append(words[np.arange(len(words)) >= 0.75 * len(words)].mean())
            assert group.end.value == pytest.approx(np.mean(ends), rel=1e-4)


def test_data_that_a_heatmap_cannot_be_of(models, monkeypatch):
    data = text_data("d", "all", ["a b", "b a c", "a"], [0, 1, 1], ("x", "y"))
    without = Model(random_example("lfm2"), tokenizer(("a", "b", "c")), name="convolved")
    refuses("a heatmap", selection_heatmap, without, data)
    model = Model(models["mamba2"].module, tokenizer(("a", "b", "c")), name="m")
    with pytest.raises(InputError, match=r"no text of d \(all\) has a token that is not special"):
        selection_heatmap(model, dataclasses.replace(data, texts=(), labels=()))
    scored = over_data.scored_batch

    def broken(model, batch, score):
        trace, values = scored(model, batch, score)
        values[1, batch.lengths.index(4), 0] = np.nan
        return trace, values

    monkeypatch.setattr(over_data, "scored_batch", broken)
    with pytest.raises(InputError, match="the scores of row 2 of d are not finite: the model is damaged"):
        selection_heatmap(model, data, score="write")
