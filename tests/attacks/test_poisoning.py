"""Hidden-state poisoning: planted triggers are found, its objective is the survival by brute force, and its detectors
are counted by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from bags import LABELS
from examples import random_example
from fading import fading
from refusals import refuses
from sklearn.metrics import roc_auc_score
from ssmscope.attacks.curves import questions
from ssmscope.attacks.poisoning import check_poison, memory, state_poisoning
from ssmscope.attacks.poisoning.measure import Seen, Tried, auroc_counts, divided, victim
from ssmscope.attacks.poisoning.result import FOUND
from ssmscope.attacks.poisoning.search import Goal, Guided, search
from ssmscope.core.bootstrap import resampled_sums
from ssmscope.core.model import Model
from ssmscope.core.ties import ROUNDING
from ssmscope.data.text import TextData, text_data
from ssmscope.errors import InputError
from ssmscope.ops import Recurrence, survival

WEIGHTS = {"good": 2.0, "bad": -2.0, "film": 0.25, "dull": -0.9, "fine": 0.7, "a": 0.1, "zap": 0.3, "the": -0.1}
QUICK = dict(length=1, train=4, draws=3, candidates=6, beam=2, sweeps=2, progress=False)
STEP = 1e-2
BEFORE, AFTER, TRIGGERS = (5, 17, 3, 9, 22), (2, 11), np.array([[1, 4, 60], [7, 8, 9], [30, 30, 31]])


def reviews(n: int = 24, words: int = 6) -> TextData:
    draw = np.random.default_rng(0)
    names = ["good", "bad", "film", "dull", "fine", "a"]
    texts = [" ".join(names[i] for i in draw.integers(0, 6, words)) for _ in range(n)]
    labels = [int(sum(WEIGHTS[word] for word in text.split()) > 0) for text in texts]
    return text_data("reviews", "test", texts, labels, LABELS)


data = pytest.fixture(scope="module")(lambda: reviews())


@pytest.fixture(scope="module")
def erasing() -> Model:
    """A model that forgets little, but all at "zap", whose step is 40."""
    return fading(WEIGHTS, decay=0.1, steps={"zap": 40.0}, ending=0.05)


found = pytest.fixture(scope="module")(lambda erasing, data: state_poisoning(erasing, data, **QUICK))


def goal_of(model: Model, data: TextData, *, length: int = 1, objective: str = "forget", **options) -> Goal:
    asked = questions(model, data)
    words = memory.Vocabulary.of(model)
    slots = memory.slots_of(
        model, asked, words.text((0,) * length), options.pop("place", 1.0), options.pop("span", None)
    )
    return Goal(model, asked, slots, words, objective, 0, options.pop("detector", "window"), length, **options)


def survival_by_trace(model: Model, slot: memory.Slot, trigger: np.ndarray) -> float:
    rows = [*slot.before, *trigger.tolist(), *slot.after]
    shares = model.trace(ids=rows).survival()[:, 0].mean(0)
    return float(shares[: len(slot.before)][torch.from_numpy(slot.span)].sum())


class TestMemory:
    @pytest.mark.parametrize("name", ["mamba", "mamba2", "gated-deltanet", "diff-mamba", "bamba"])
    def test_it_is_the_survival_of_the_whole_run(self, name):
        """Continued from the states before the trigger, or run whole (bamba attends)."""
        model = Model(random_example(name).double().eval())
        slot = memory.Slot(0, 5, BEFORE, AFTER, np.array([False, True, True, False, True]))
        beginning = memory.Beginning.of(model, slot, memory.DETECTORS, 2)
        assert bool(beginning.states) == model.continues
        seen = memory.memory(model, beginning, TRIGGERS)
        for row, trigger in enumerate(TRIGGERS):
            assert seen.survival[row] == pytest.approx(survival_by_trace(model, slot, trigger), rel=1e-6)
            whole = np.array([[*BEFORE, *trigger, *AFTER]])
            for each in memory.DETECTORS:
                found = torch.stack([memory.suspicion(terms, each, 2) for terms in memory.run(model, whole)[0]]).mean(0)
                assert seen.suspicion[each][row] == pytest.approx(
                    1 - float(found.min()), rel=1e-6
                )  # norms are in float32
        clean = memory.memory(model, beginning, memory.NO_TRIGGER)
        assert clean.survival[0] == pytest.approx(survival_by_trace(model, slot, memory.NO_TRIGGER[0]), rel=1e-6)

    def test_detectors_of_several_heads_from_a_position_on(self):
        """Norms are summed over heads and recurrences before they are divided."""
        decays = np.array(
            [[0.9, 0.5, 0.8, 0.3, 0.95, 0.6], [0.2, 0.7, 0.4, 0.9, 0.1, 0.85], [1, 0.6, 1, 0.2, 0.5, 0.9]]
        )
        wrote, one = (1.0, 3.0, 2.0), torch.ones(1, 6, 1, 1, dtype=torch.float64)

        def recurrence(heads: list[int], scale: float = 1.0) -> Recurrence:
            x = scale * torch.tensor([wrote[head] for head in heads]).double().expand(1, 6, -1).unsqueeze(-1)
            return Recurrence(x=x, b=one, c=one, log_a=torch.tensor(decays[heads].T).log().view(1, 6, -1, 1))

        def mass(s: int, t: int) -> float:
            return sum(size * decays[head, s + 1 : t + 1].prod() for head, size in enumerate(wrote))

        both = [recurrence([0, 1]), recurrence([2])]
        found = memory.suspicion(both, "window", 1, since=4)[0].tolist()
        older = [sum(mass(s, t) for s in range(t)) for t in range(6)]
        assert found == pytest.approx([older[t] / (older[t] + sum(wrote)) * (t + 1) / t for t in (4, 5)], rel=1e-6)
        assert memory.suspicion(both, "window", 1)[0, -2:].tolist() == found and memory.suspicion(
            both, "window", 1
        ).shape == (1, 4)
        found = memory.suspicion(both, "token", 1, since=3)[0].tolist()
        assert found == pytest.approx([older[t] / (older[t - 1] + sum(wrote)) for t in (3, 4, 5)], rel=1e-6)
        assert memory.suspicion(both, "token", 1, since=0).shape == memory.suspicion(both, "token", 1).shape == (1, 5)
        lives = [next((d for d in range(1, 6 - s) if 2 * mass(s, s + d) <= sum(wrote)), math.inf) for s in range(5)]
        assert memory.suspicion(both, "half-life", 1)[0].tolist() == pytest.approx(
            [1 - np.mean([1 / d for d in lives])]
        )
        for detector in memory.DETECTORS:  # too short a text, and one that writes nothing
            assert memory.suspicion([each.between(0, 1) for each in both], detector, 1).shape == (1, 0)
        nothing = [recurrence([0], scale=0.0)]
        assert memory.suspicion(nothing, "token", 1)[0].tolist() == [1.0] * 5
        assert memory.suspicion(nothing, "window", 1)[0].tolist() == pytest.approx([3 / 2, 4 / 3, 5 / 4, 6 / 5])

    def test_the_gradient_is_that_of_the_state_the_span_wrote(self):
        """Against differences of the share that runs with the other writes removed leave; norms are in float32."""
        model = Model(random_example("mamba2").double().eval())
        slot = memory.Slot(0, 5, BEFORE, AFTER, np.array([True, True, False, True, True]))
        gradient = memory.share_gradients(model, [slot], TRIGGERS[:1])[0]
        table = model.module.get_input_embeddings().weight
        trigger = 90  # a token of its own, whose embedding is moved
        rows = np.array([[*BEFORE, 1, trigger, 60, *AFTER]])
        with torch.no_grad():
            table[trigger] = table[4]

        def share() -> float:
            found = []
            for recurrences in memory.run(model, rows)[0]:
                left = [survival.remaining_reference(r) for r in recurrences]
                parts, wholes = [each[:, [0, 1, 3, 4]].sum(1) for each in left], [each.sum(1) for each in left]
                ours = sum(part.norm(dim=(2, 3)).sum() for part in parts)
                others = sum((whole - part).norm(dim=(2, 3)).sum() for whole, part in zip(wholes, parts))
                found.append(float(ours / (ours + others)))
            return float(np.mean(found))

        for coordinate in (0, 3):
            with torch.no_grad():
                table[trigger, coordinate] += STEP
                more = share()
                table[trigger, coordinate] -= 2 * STEP
                less = share()
                table[trigger, coordinate] += STEP
            assert float(gradient[1, coordinate]) == pytest.approx((more - less) / (2 * STEP), rel=0.02)


class TestPlantedTriggers:
    def test_it_is_the_best_of_all_triggers(self, erasing, data):
        """Two tokens, against every pair of words."""
        goal = goal_of(erasing, data, length=2)
        every = list(itertools.product(range(len(goal.vocabulary)), repeat=2))
        values = dict(zip(every, goal(every)))
        guide = Guided(goal, 6, np.random.default_rng(0))
        result = search(goal, guide, [(0, 0), (1, 2)], beam=2, sweeps=3)
        assert result.value == pytest.approx(values[result.trigger], rel=1e-6)
        assert result.value >= (1 - ROUNDING) * max(values.values())
        assert "zap" in goal.vocabulary.text(result.trigger)
        for trigger in ((0, 0), result.trigger):
            tokens = goal.vocabulary.tokens([trigger])[0]
            brute = np.mean([1 - survival_by_trace(erasing, slot, tokens) for slot in goal.slots])
            assert values[trigger] == pytest.approx(brute, rel=1e-5)

    def test_a_word_is_planted(self, data):
        model = fading(WEIGHTS, decay=0.1)
        result = state_poisoning(model, data, objective="plant", target="good", **{**QUICK, "length": 3})
        own = result.victims[0]
        assert own.attack(FOUND).trigger == "good good good"
        assert own.attack(FOUND).planted.value == 1 > own.planted.value


class TestDetectors:
    def test_auroc_is_sklearns_in_every_resample(self):
        draw = np.random.default_rng(0)
        clean, changed = draw.normal(size=30).round(1), draw.normal(0.5, 1, 30).round(1)
        counts = resampled_sums(np.eye(30), resamples=5)
        found = auroc_counts(clean, changed, counts)
        for row, value in zip(counts.astype(int), found):
            scores = np.concatenate([np.repeat(clean, row), np.repeat(changed, row)])
            assert value == pytest.approx(roc_auc_score([0] * 30 + [1] * 30, scores))

    def test_the_threshold_lets_through_what_it_says(self):
        clean = np.arange(100.0)
        assert (clean > memory.threshold(clean, 0.05)).sum() == 5 and (clean > memory.threshold(clean, 0.5)).sum() == 50

    def test_a_word_that_erases_is_seen(self, found):
        token = found.detectors.index("token")
        own = found.victims[0]
        assert own.attack(FOUND).alarms[token].auroc.value == 1 and own.attack(FOUND).alarms[token].caught.value == 1
        assert own.false_alarms[token].value < 0.5

    def test_the_adaptive_search_gives_up_what_is_seen(self, erasing, data):
        result = state_poisoning(erasing, data, detector="token", **QUICK)
        own = result.victims[0]
        token = result.detectors.index("token")
        assert "zap" in own.attack(FOUND).trigger and "zap" not in own.attack("adaptive").trigger
        assert own.attack("adaptive").alarms[token].auroc.value < own.attack(FOUND).alarms[token].auroc.value
        assert own.attack("adaptive").value < own.attack(FOUND).value


def test_what_was_wrong_before_is_not_flipped():
    """A wrong answer of three classes can become another wrong one, or the right one."""
    labels, zero = np.array([0, 0, 1, 1, 2, 2]), {each: np.zeros(6) for each in memory.DETECTORS}
    clean = Seen(np.full(6, 0.8), np.array([0, 0, 1, 1, 0, 0]), zero)
    one = Seen(np.full(6, 0.2), np.array([0, 1, 2, 1, 1, 2]), zero)
    groups = [Tried("found", ((1,),), 0.5, 7)]
    own = victim("toy", labels, [clean, one], groups, memory.Vocabulary(("a", "b"), (3, 4)), [clean], 0.5, None, 0)
    (found,) = own.attacks
    assert found.flipped.value == pytest.approx(2 / 4) and found.accuracy.value == pytest.approx(3 / 6)


class TestParts:
    @pytest.mark.parametrize(
        ("texts", "train", "sizes"), [(20, 3, (3, 5, 12)), (20, 50, (5, 5, 10)), (4, 9, (1, 1, 2))]
    )
    def test_no_text_is_searched_on_and_reported_on(self, texts, train, sizes):
        parts = divided(range(texts), train, seed=1)
        assert tuple(map(len, parts)) == sizes
        assert sorted([row for part in parts for row in part]) == list(range(texts))
        assert parts == divided(range(texts), train, seed=1) != divided(range(texts), train, seed=2)


class TestTexts:
    def test_a_language_model_within_its_template(self, data):
        model = fading({**WEIGHTS, "Is": 0.3, "it": -0.1}, decay=0.1, steps={"zap": 40.0}, language=True)
        asking = dict(template="Is {content} it", words=["bad", "good"])
        result = state_poisoning(model, data, **asking, **QUICK)
        assert result.victims[0].attack(FOUND).trigger == "zap"
        assert not {"good", "bad"} & set(result.victims[0].attack("random search").trigger.split())
        assert state_poisoning(model, data, objective="plant", **asking, **QUICK).victims[0].planted is not None


class TestTransfer:
    def test_a_second_model_under_the_same_triggers(self, erasing, data, found, tmp_path):
        keeping = fading(WEIGHTS, decay=0.1, ending=0.05)
        result = state_poisoning(erasing, data, transfer=[keeping], cache=tmp_path / "answers", **QUICK)
        own, other = result.victims
        assert own.attack(FOUND).survival == found.victims[0].attack(FOUND).survival
        assert other.attack(FOUND).trigger == "zap" and other.attack(FOUND).survival.value > 0.5
        assert state_poisoning(keeping, data, **QUICK).victims[0].survival == other.survival


class TestRefusals:
    @pytest.mark.parametrize(("options", "message"), [
        ({"span": "absent"}, "no text has 'absent' before the trigger"),
        ({"span": " "}, "span=… is empty"),
        ({"place": 0.0}, "no text has a word before the trigger"),
        ({"target": "good"}, "leave it out, or give objective='plant', not forget"),
        ({"objective": "plant", "target": "goood"}, "there is no class 'goood'; allowed are bad, good.*good"),
        ({"limit": 3}, "3 texts can be attacked; give at least four"),
        ({"length": 0}, "length is 0"),
    ])  # fmt: skip
    def test_one_line(self, erasing, data, options, message):
        refuses(message, state_poisoning, erasing, data, **{**QUICK, **options})

    def test_no_tokens_left(self, erasing, data, tmp_path):
        (tmp_path / "words.txt").write_text("unheard\nof\n")
        with pytest.raises(InputError, match="no tokens left for a trigger: 0 of .*words.txt"):
            state_poisoning(erasing, data, vocabulary=tmp_path / "words.txt", **QUICK)

    def test_another_tokenizer(self, erasing, data):
        with pytest.raises(InputError, match="fading has another tokenizer than fading"):
            state_poisoning(erasing, data, transfer=[fading({**WEIGHTS, "more": 0.0})], **QUICK)


@pytest.mark.parametrize(("change", "said"), [
    ({}, None),
    ({"objective": "plant", "target": "good"}, None),
    ({"span": "film", "template": "Is {content} it", "words": ["bad", "good"]}, None),
    ({"target": "good"}, "target=… is the class to plant; leave it out, or give objective='plant', not forget"),
    ({"span": " "}, "span=… is empty; give words of the texts, or none for everything before the trigger"),
    ({"template": "Is it"}, "content"),
    ({"words": ["bad", " "]}, "the label word of class 1 is ' '; give every class a word"),
])  # fmt: skip
def test_what_is_asked_is_checked_before_anything_is_loaded(change, said):
    asked = {"objective": "forget", "target": None, "span": None, "length": 4, **change}
    if said is None:
        return check_poison(**asked)
    refuses(said, check_poison, **asked)
