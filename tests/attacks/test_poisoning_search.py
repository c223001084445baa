"""Goals of triggers, proposals and searches against loops over texts, triggers and places."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bags import LABELS
from fading import fading
from refusals import refuses
import ssmscope.attacks.poisoning.measure as measuring
import ssmscope.attacks.poisoning.search as searching
from ssmscope.attacks.curves import questions
from ssmscope.attacks.poisoning import memory, state_poisoning
from ssmscope.attacks.poisoning.measure import observe, other_models, read_otherwise, searched
from ssmscope.attacks.poisoning.search import Goal, Guided, random_search, search
from ssmscope.attacks.words.hotflip import loss_gradients
from ssmscope.core import batching, progress
from ssmscope.core.model import Model
from ssmscope.data.text import TextData, text_data
from ssmscope.errors import InputError

WEIGHTS = {"good": 1.1, "bad": -1.3, "film": 0.25, "dull": -0.6, "fine": 0.45, "a": 0.1, "zap": 0.3}
TEXTS = (
    "good film fine", "a dull dull bad film", "fine a good", "bad film a film", "film good dull a", "fine fine bad",
)  # fmt: skip
LABELLED = (1, 0, 1, 0, 1, 1)
QUICK = dict(length=1, train=1, draws=3, candidates=6, beam=2, sweeps=2, progress=False)
TRIGGERS = ((0, 5), (3, 3), (6, 1))


@pytest.fixture(scope="module")
def model() -> Model:
    return fading(WEIGHTS, decay=0.2, steps={"zap": 8.0, "a": 2.0, "bad": 0.5}, ending=0.4)


data = pytest.fixture(scope="module")(lambda: text_data("reviews", "test", TEXTS, LABELLED, LABELS))


def test_the_best_is_better_by_more_than_the_rounding_of_an_output():
    """Values are outputs: what differs by a share of 5e-5 is no tie, what differs by 1e-6 is."""
    drawn = [(0, 1), (2, 3), (4, 5)]
    for values, best in (((2.0, 2.0001, 1.5), (2, 3)), ((2.0, 2.000001, 1.5), (0, 1)), ((-2.0001, -2.0, -3.0), (2, 3))):
        found = random_search(lambda triggers: [values[drawn.index(each)] for each in triggers], drawn)  # noqa: B023
        assert found.trigger == best


def goal_of(model: Model, data: TextData, **options) -> Goal:
    asked, words = questions(model, data), memory.Vocabulary.of(model)
    slots = memory.slots_of(model, asked, words.text((0, 0)), 0.5, None)
    fields = dict(objective="forget", target=1, detector="token", window=2, penalty=0.0, alarms=0.3)
    return Goal(model, asked, slots, words, **{**fields, **options})


def suspected(model: Model, rows: list[int], detector: str, window: int) -> float:
    terms, _ = memory.run(model, np.array([rows]))
    return 1 - float(torch.stack([memory.suspicion(each, detector, window) for each in terms]).mean(0).min())


class TestGoal:
    @pytest.mark.parametrize("objective", ["forget", "plant", "flip"])
    @pytest.mark.parametrize(("penalty", "detector"), [(0.0, "token"), (3.0, "token"), (0.7, "half-life")])
    def test_its_value_is_a_mean_over_texts(self, model, data, objective, penalty, detector):
        goal = goal_of(model, data, objective=objective, penalty=penalty, detector=detector)
        clean = sorted(suspected(model, [*s.before, *s.after], detector, 2) for s in goal.slots)
        allowed = clean[4]  # exceeded by one of six texts, not by two
        expected = []
        for trigger in TRIGGERS:
            total = 0.0
            for slot in goal.slots:
                rows = [*slot.before, *goal.vocabulary.tokens([trigger])[0].tolist(), *slot.after]
                if objective == "forget":
                    total += 1 - float(model.trace(ids=rows).survival()[:, 0].mean(0)[: len(slot.before)].sum())
                else:
                    logits = model.logits(model.encode(ids=[rows]))[0].double()
                    p, label = logits.softmax(-1), LABELLED[slot.row]
                    total += float(p[1]) if objective == "plant" else 1 - float(p[label])
                if penalty:
                    total -= penalty * max(suspected(model, rows, detector, 2) - allowed, 0)
            expected.append(total / 6)
        assert goal(TRIGGERS).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert goal.runs == 18 and goal.gradients == 0
        assert penalty == 0 or goal.allowed == pytest.approx(allowed, abs=1e-6)
        assert penalty == 0 or objective != "forget" or len(set(clean)) > 3  # so that the threshold matters

    @pytest.mark.parametrize("objective", ["plant", "flip"])
    def test_first_order_gains_are_summed_over_texts(self, model, data, objective):
        goal, table = goal_of(model, data, objective=objective), model.module.get_input_embeddings().weight.detach()
        words = table[list(goal.vocabulary.ids)]
        for place in (0, 1):
            found = goal.gains(TRIGGERS, place)
            for own, trigger in zip(found, TRIGGERS, strict=True):
                tokens, gradient = goal.vocabulary.tokens([trigger])[0].tolist(), torch.zeros(3)
                for slot in goal.slots:
                    label = 1 if objective == "plant" else LABELLED[slot.row]
                    (each,) = loss_gradients(model, [(*slot.before, *tokens, *slot.after)], [label], None)
                    gradient += each[len(slot.before) + place] * (-1 if objective == "plant" else 1)
                expected = (words - words[trigger[place]]) @ gradient
                assert own.tolist() == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-5)
        assert goal.gradients == 36 and goal.runs == 0

    def test_a_language_models_gains_are_those_of_its_words(self, data):
        model = fading({**WEIGHTS, "Is": 0.3, "it": -0.1}, decay=0.1, language=True)
        asked, words = (
            questions(model, data, template="Is {content} it", words=["bad", "good"]),
            memory.Vocabulary.of(model),
        )
        goal = Goal(model, asked, memory.slots_of(model, asked, "a", 1.0, None), words, "plant", 1, "token", 1)
        gains = goal.gains([(words.words.index("a"),)], 0)[0]
        assert words.words[int(gains.argmax())] == "good" and words.words[int(gains.argmin())] == "bad"

    def test_large_steps_are_those_of_four_texts(self, model, data, monkeypatch):
        goal, seen = goal_of(model, data), []

        def steps(model: Model, beginnings: list[memory.Beginning], ids: list[int]) -> np.ndarray:
            seen.append((beginnings, ids))
            return np.array([0.5, 0.1, 0.9, 0.5, 0.7, 0.2, 0.5])

        monkeypatch.setattr(searching, "steps", steps)
        assert goal.largest_steps == [2, 4, 0, 3, 6, 5, 1]
        assert seen == [(goal.beginnings[:4], goal.vocabulary.ids)] and len(goal.beginnings) == 6
        assert [each.slot for each in goal.beginnings] == goal.slots


class TestProposals:
    @staticmethod
    def guided(candidates: int, gradient_only: bool = False) -> Guided:
        gains = torch.tensor([[0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.6, 0.5], [0.9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8]])
        goal = SimpleNamespace(
            vocabulary=range(8), largest_steps=[5, 3, 7, 2, 0, 1, 4, 6], gains=lambda triggers, place: gains
        )
        return Guided(goal, candidates, np.random.default_rng(3), gradient_only)

    def test_thirds_are_by_gradient_by_step_and_at_random(self):
        draw = np.random.default_rng(3)
        first, second = draw.integers(0, 8, 3).tolist(), draw.integers(0, 8, 3).tolist()
        found = self.guided(7)([(0,), (1,)], 0)
        assert found == [
            list(dict.fromkeys([1, 3, 5, 5, 3, 7, *first]))[:7],
            list(dict.fromkeys([0, 7, 6, 5, 3, 7, *second]))[:7],
        ]
        assert self.guided(1)([(0,), (1,)], 0) == [[1], [0]]

    def test_all_by_the_gradient(self):
        assert self.guided(3, gradient_only=True)([(0,), (1,)], 0) == [[1, 3, 5], [0, 7, 6]]

    @pytest.mark.parametrize("candidates", [8, 9, 40])
    def test_more_than_there_are_words(self, candidates):
        assert self.guided(candidates, gradient_only=True)([(0,), (1,)], 0)[0] == [1, 3, 5, 6, 7, 2, 4, 0]
        assert sorted(self.guided(40)([(0,), (1,)], 0)[1]) == list(range(8))


class TestSearch:
    def test_it_sweeps_over_places_until_nothing_is_better(self):
        asked, places = [], []

        def value(triggers):
            asked.append(list(triggers))
            return [10 * a + b for a, b in triggers]

        def proposals(kept, place):
            places.append((list(kept), place))
            return [[trigger[place], (trigger[place] + 1) % 4] for trigger in kept]

        known = {(0, 0): 0.0}
        found = search(value, proposals, [(0, 0), (2, 1), (1, 3), (2, 1)], beam=2, sweeps=9, known=known)
        assert asked[:3] == [[(2, 1), (1, 3)], [(3, 1), (2, 3)], [(3, 2), (2, 0)]]
        assert asked[3:] == [[(0, 2), (0, 1)], [(3, 3)], [(0, 3)], [(3, 0)]]
        assert places[:3] == [([(2, 1), (1, 3)], 0), ([(3, 1), (2, 3)], 1), ([(3, 2), (3, 1)], 0)]
        assert [place for _, place in places] == [0, 1] * 3  # in the third sweep nothing is better
        assert found == ((3, 3), 33.0, 12) and known[(3, 0)] == 30.0 and len(known) == 12

    def test_sweeps_are_limited(self):
        def value(triggers):
            return [sum(trigger) for trigger in triggers]

        found = search(value, lambda kept, place: [[each[place] + 1] for each in kept], [(0, 0)], beam=1, sweeps=3)
        assert found == ((3, 3), 6.0, 7)

    def test_ties_go_to_the_first_numbers_and_no_trigger_is_asked_for_twice(self):
        asked = []

        def value(triggers):
            asked.extend(triggers)
            return [0.5 if trigger != (9, 9) else 0.1 for trigger in triggers]

        known = {(2, 2): 0.5}
        assert random_search(value, [(9, 9), (3, 1), (2, 2), (1, 7), (3, 1)], known) == ((1, 7), 0.5, 4)
        assert asked == [(9, 9), (3, 1), (1, 7)]
        assert random_search(value, [(2, 2), (9, 9)], known) == ((2, 2), 0.5, 2) and len(asked) == 3

    def test_all_searches_are_reported_and_counted(self, model, data):
        goals = {
            "found": goal_of(model, data),
            "hotflip": goal_of(model, data, objective="flip"),
            "adaptive": goal_of(model, data, penalty=2.0),
        }
        ended = []
        groups, cost = searched(goals, 2, 5, 4, 2, 2, 7, lambda: ended.append(1))
        assert [each.name for each in groups] == ["random", "random search", "found", "hotflip", "adaptive"]
        random, chance, found = groups[:3]
        draw, words = np.random.default_rng([7, 1]), len(goals["found"].vocabulary)
        starts = [tuple(row) for row in draw.integers(0, words, (5, 2)).tolist()]
        more = [tuple(row) for row in draw.integers(0, words, (found.asked - 4, 2)).tolist()]
        fresh = goal_of(model, data)
        assert len(set(starts)) == 4 == random.asked and random.triggers == tuple(starts)
        assert random.value == pytest.approx(fresh(starts).mean())
        assert chance == ("random search", *self.tried(random_search(fresh, [*starts, *more])))
        guide = functools.partial(Guided, candidates=4)
        for group, options in ((groups[2], {}), (groups[3], {"objective": "flip"}), (groups[4], {"penalty": 2.0})):
            own = goal_of(model, data, **options)
            proposals = guide(own, random=np.random.default_rng([7, 2]), gradient_only=group.name == "hotflip")
            one = search(own, proposals, starts, beam=2, sweeps=2)
            value = float(fresh([one.trigger])[0])
            assert group == (group.name, (one.trigger,), pytest.approx(value), one.asked)
        assert cost.runs == sum(goal.runs for goal in goals.values()) > cost.gradients > 0
        assert cost.gradients == sum(goal.gradients for goal in goals.values()) and 0 < cost.seconds < 60
        assert len(ended) == 4

    @staticmethod
    def tried(found: searching.Found) -> tuple:
        return (found.trigger,), pytest.approx(found.value), found.asked


def test_measurements_are_those_of_every_text_alone(model, data):
    goal, ended = goal_of(model, data), []
    slots, words = goal.slots[1:], goal.vocabulary
    seen = observe(model, goal.asked, slots, words, TRIGGERS, 2, lambda: ended.append(1))
    assert len(seen) == 4 and len(ended) == 5
    for one, tokens in zip(seen, [memory.NO_TRIGGER, *(words.tokens([each]) for each in TRIGGERS)], strict=True):
        for at, slot in enumerate(slots):
            rows = [*slot.before, *tokens[0].tolist(), *slot.after]
            share = model.trace(ids=rows).survival()[:, 0].mean(0)[: len(slot.before)].sum()
            assert one.survival[at] == pytest.approx(float(share), rel=1e-4)
            assert one.answers[at] == int(model.logits(model.encode(ids=[rows])).argmax())
            for each in memory.DETECTORS:
                short = each == "window" and len(rows) < 5  # whose window of two is never full
                expected = 0.0 if short else suspected(model, rows, each, 2)
                assert one.suspicion[each][at] == pytest.approx(expected, abs=1e-5)
    (clean,) = observe(model, goal.asked, slots, words, (), 2, lambda: None)
    assert clean.survival.tolist() == seen[0].survival.tolist() and clean.answers.tolist() == seen[0].answers.tolist()
    assert {each: own.tolist() for each, own in clean.suspicion.items()} == {
        each: own.tolist() for each, own in seen[0].suspicion.items()
    }
    assert len({tuple(one.answers) for one in seen}) > 1


class TestResult:
    def test_no_adaptive_attack_without_a_penalty(self, model, data):
        plain = state_poisoning(model, data, penalty=0, **QUICK)
        assert [each.name for each in plain.victims[0].attacks] == ["random", "random search", "found", "hotflip"]
        assert plain.texts == (1, 1, 4) and plain.vocabulary == 7 and plain.provenance["options"]["target"] is None
        planted = state_poisoning(model, data, penalty=0, objective="plant", **QUICK)
        assert planted.provenance["options"]["target"] == "bad" and planted.victims[0].planted is not None

    def test_its_bar_is_full_at_the_end(self, model, data, monkeypatch):
        bars, bar = [], progress.progress_bar
        monkeypatch.setattr(progress, "progress_bar", lambda console: bars.append(bar(console)) or bars[-1])
        state_poisoning(model, data, transfer=[fading(WEIGHTS)], **QUICK)
        tasks = [(task.description, task.completed, task.total) for task in bars[0].tasks]
        assert tasks == [("searches", 4, 4), ("texts", 10, 10)]

    def test_each_model_answers_itself(self, model, data):
        opposite = fading({word: -weight for word, weight in WEIGHTS.items()}, ending=-0.4)
        other = dataclasses.replace(opposite, name="opposite")
        found = state_poisoning(model, data, transfer=[other], **QUICK)
        alone = state_poisoning(other, data, **QUICK)
        first, second = found.victims
        assert second.accuracy == alone.victims[0].accuracy != first.accuracy and second.model == "opposite"
        assert found.provenance["options"]["transfer"] == ["opposite"]

    @pytest.mark.parametrize(("target", "planted"), [(None, 0), ("bad", 0), ("good", 1)])
    def test_texts_of_the_planted_class_are_not_searched_on(self, model, data, monkeypatch, target, planted):
        def stop(goals: dict[str, Goal], *numbers: object) -> None:
            assert numbers[:-1] == (1, 3, 6, 2, 2, 2)
            raise Stopped(goals)

        monkeypatch.setattr(measuring, "searched", stop)
        many = text_data("reviews", "test", TEXTS * 4, LABELLED * 4, LABELS)
        options = {**QUICK, "train": 6, "objective": "plant", "target": target, "seed": 2, "penalty": 3.0}
        with pytest.raises(Stopped) as caught:
            state_poisoning(model, many, **options)
        (goals,) = caught.value.args
        rows = {name: [LABELLED[slot.row % 6] for slot in goal.slots] for name, goal in goals.items()}
        assert (
            list(goals) == ["found", "hotflip", "adaptive"]
            and [each.target for each in goals.values()] == [planted] * 3
        )
        assert [each.objective for each in goals.values()] == ["plant", "flip", "plant"]
        assert [each.penalty for each in goals.values()] == [0, 0, 3]
        assert rows["found"] == rows["adaptive"] == [each for each in rows["hotflip"] if each != planted]
        assert len(rows["hotflip"]) == 6 > len(rows["found"]) > 0

    def test_texts_of_the_planted_class_alone_are_searched_on(self, model, monkeypatch):
        def stop(goals: dict[str, Goal], *_: object) -> None:
            raise Stopped(goals)

        monkeypatch.setattr(measuring, "searched", stop)
        alike = text_data("reviews", "test", TEXTS, [1] * 6, LABELS)
        with pytest.raises(Stopped) as caught:
            state_poisoning(model, alike, objective="plant", target="good", **QUICK)
        assert len(caught.value.args[0]["found"].slots) == 1

    def test_the_cost_of_a_search_is_known_before(self, model, monkeypatch):
        def stop(number: int, *_: object) -> None:
            raise Stopped(number)

        monkeypatch.setattr(batching, "refuse_reading", stop)
        options = {**QUICK, "length": 3, "draws": 5, "sweeps": 2, "beam": 3, "candidates": 7, "train": 2}
        same = text_data("reviews", "test", ["good film fine"] * 8, (*LABELLED, 0, 1), LABELS)
        with pytest.raises(Stopped) as caught:
            state_poisoning(model, same, **options)
        # Two texts of three words, a trigger, and an end.
        assert caught.value.args == (4 * (5 + 2 * 3 * 3 * 7) * 2 * (3 + 3 + 1),)


class Stopped(Exception):
    """Exception that carries the arguments of a search."""


class TestModels:
    def test_of_another_task_or_without_a_tokenizer(self, model):
        classes = fading(WEIGHTS)
        classes.module.config.id2label = {0: "bad", 1: "better"}
        language = dataclasses.replace(fading(WEIGHTS, language=True), tokenizer=model.tokenizer)
        for other in (classes, language):
            with pytest.raises(InputError, match="fading has other classes than fading; give a model of the same task"):
                other_models(model, [fading(WEIGHTS), other])
        refuses("bare has another tokenizer than fading", other_models, model, [Model(model.module, None, "bare")])
        assert other_models(model, [dataclasses.replace(model, name="same")])[0].name == "same"
        assert other_models(model, ()) == []

    def test_triggers_that_are_tokenized_differently_are_noted(self, model, data):
        goal = goal_of(model, data)
        slots = [*goal.slots[:2], *(replaced(slot) for slot in goal.slots[2:5])]
        groups = [SimpleNamespace(name="random", triggers=TRIGGERS), SimpleNamespace(name="found", triggers=[(2, 4)])]
        assert list(read_otherwise(model, goal.asked, goal.slots, goal.vocabulary, groups)) == []
        assert list(read_otherwise(model, goal.asked, slots, goal.vocabulary, groups)) == [
            "in 3 of 5 texts the trigger 'found' is tokenized differently"
        ]


def replaced(slot):
    """The slot with one more token after its trigger than its text has."""
    return type(slot)(slot.row, slot.words, slot.before, (5, *slot.after), slot.span)


def test_a_text_with_a_trigger(model, data):
    asked = questions(model, data)
    slot = SimpleNamespace(row=1, words=2)
    assert memory.attacked(asked, slot, "zap zap") == "a dull zap zap dull bad film"
