"""Attacks on prompts against a slow reference, by hand, through kills, and as their users meet them."""

import dataclasses
import importlib.util
import json
import math
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from prompted import (
    SENTENCES,
    SUFFIX_ATTACKS,
    TEMPLATES,
    WORDS,
    answers,
    attack,
    few,
    labelled,
    language_model,
    needs_textattack,
    reader,
)
from refusals import refuses
from tiny_bert import save_bert
from ssmscope.attacks.names import ATTACKS, Recipe
from ssmscope.attacks.prompts import search as prompt_search
from ssmscope.attacks.prompts.result import measured
from ssmscope.attacks.prompts.search import Judge, drawn_from, rewritten, tried_all, with_suffix
from ssmscope.core.bootstrap import estimate, resampled_sums
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.evaluation import Evaluator

model = pytest.fixture(scope="module")(lambda: language_model())
data = pytest.fixture(scope="module")(lambda model: labelled(model))


@pytest.fixture(scope="module")
def paper(model, data):
    """All four attacks of the paper on two templates."""
    return attack(model, data)


def slow_answers(model, prompt: str, texts=SENTENCES, words=WORDS) -> list[int]:
    """Return the likeliest word after each filled prompt, every text with every word run as a whole."""
    scores = np.zeros((len(texts), len(words)))
    starts = [
        model.tokenizer(prompt.replace("{content}", text), add_special_tokens=False)["input_ids"] for text in texts
    ]
    for column, word in enumerate(words):
        filled = [f"{prompt.replace('{content}', text)} {word}" for text in texts]
        rows = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in filled]
        log_p = model.logits(model.encode(ids=rows)).double().log_softmax(-1)
        for line, (row, start) in enumerate(zip(rows, starts)):
            scores[line, column] = sum(float(log_p[line, at - 1, row[at]]) for at in range(len(start), len(row)))
    return scores.argmax(1).tolist()


class TestAgainstASlowReference:
    def test_stresstest_and_checklist_try_everything(self, model, data):
        for one in attack(model, data, attacks=SUFFIX_ATTACKS).attacks:
            for number, template in enumerate(TEMPLATES):
                candidates = [f"{template} {suffix}".rstrip() for suffix in ATTACKS[one.name].suffixes[:6]]
                right = [np.mean(np.array(slow_answers(model, each)) == data.labels) for each in candidates]
                found = one.prompts[number]
                assert found.accuracy.value <= min(right) + 1e-12
                if len(ATTACKS[one.name].suffixes) == 3:
                    assert found.accuracy.value == pytest.approx(min(right))
                    assert found.prompt == candidates[int(np.argmin(right))] and found.tried == 3
                else:
                    assert found.tried == 50 and found.prompt.rsplit(" ", 1)[1] in ATTACKS["checklist"].suffixes

    @needs_textattack
    def test_what_is_reported_of_the_worst_prompts(self, model, data, paper):
        labels = np.array(data.labels)
        for number, template in enumerate(TEMPLATES):
            clean = np.mean(np.array(slow_answers(model, template)) == labels)
            assert paper.clean[number].value == pytest.approx(clean)
            for one in paper.attacks:
                found = one.prompts[number]
                hit = np.mean(np.array(slow_answers(model, found.prompt)) == labels)
                assert found.accuracy.value == pytest.approx(hit)
                assert found.drop.value == pytest.approx(1 - hit / clean)


class TestMeasured:
    def right(self, *shares: float, examples: int = 20) -> list[np.ndarray]:
        return [np.arange(examples) < share * examples for share in shares]

    def measure(self, clean, attacked, seed=0):
        recipe = Recipe("one", None, (), None, ("a",), ("b",))
        found = [None if each is None else (f"p{i}", i + 1) for i, each in enumerate(attacked)]
        return measured(np.array(clean), {"one": attacked}, [recipe], {"one": found}, seed)

    def test_by_hand(self):
        average, per_template, (one,), _ = self.measure(self.right(0.8, 0.5), self.right(0.6, 0.1))
        assert average.value == pytest.approx(0.65) and [each.value for each in per_template] == [0.8, 0.5]
        assert [found.drop.value for found in one.prompts] == pytest.approx([0.25, 0.8])
        assert one.drop.value == pytest.approx(0.525) and one.accuracy.value == pytest.approx(0.35)
        assert one.worst == 1 and one.ran == ("a",) and one.left_out == ("b",)
        assert [(found.prompt, found.tried) for found in one.prompts] == [("p0", 1), ("p1", 2)]

    def test_intervals_are_paired_over_examples(self):
        """For nested hits the drop varies by the few between; independent resamples would give ten times the width."""
        clean, attacked = self.right(0.75, 0.5, examples=400), self.right(0.725, 0.45, examples=400)
        _, _, (one,), _ = self.measure(clean, attacked, seed=4)
        sums = resampled_sums(np.array([*clean, *attacked]).T.astype(float), seed=4)
        drops = 1 - sums[:, 2:] / sums[:, :2]
        assert one.prompts[0].drop == estimate(drops[:, 0]) and one.drop == estimate(drops.mean(1))
        assert 0.013 < one.prompts[0].drop.low < one.prompts[0].drop.high < 0.056
        assert one.drop.high - one.drop.low < max(e.drop.high - e.drop.low for e in one.prompts)

    def test_the_worst_prompt_is_that_of_the_largest_drop(self):
        """The prompt of lowest accuracy is another: a template under which little is right loses less."""
        _, _, (one,), _ = self.measure(self.right(0.9, 0.2), self.right(0.45, 0.15))
        assert [round(found.accuracy.value, 2) for found in one.prompts] == [0.45, 0.15]
        assert [found.drop.value for found in one.prompts] == pytest.approx([0.5, 0.25]) and one.worst == 0

    def test_the_worst_attack_is_told_by_paired_differences(self):
        recipes = [Recipe(name, None, (), None, (), ()) for name in ("a", "b", "c")]
        right = {"a": self.right(0.5, examples=100), "b": self.right(0.48, examples=100), "c": [None]}
        found = {name: [("p", 1)] for name in "ab"} | {"c": [None]}
        *_, worst = measured(np.array(self.right(0.9, examples=100)), right, recipes, found, 0)
        assert worst == (1, 0)
        right["b"] = self.right(0.4, examples=100)
        *_, attackers, worst = measured(np.array(self.right(0.9, examples=100)), right, recipes, found, 0)
        assert worst == (1,) and attackers[1].drop.low < attackers[0].drop.high

    def test_templates_that_were_not_attacked(self):
        _, per_template, (one,), _ = self.measure(self.right(0.8, 0.0), [self.right(0.4)[0], None])
        assert one.drop.value == pytest.approx(0.5) and one.accuracy.value == pytest.approx(0.4) and one.worst == 0
        assert one.prompts[1].prompt is None and math.isnan(one.prompts[1].drop.value) and one.prompts[1].tried == 0
        _, _, (none,), worst = self.measure(self.right(0.0), [None])
        assert worst == () and none.worst is None and math.isnan(none.drop.value) and math.isnan(none.accuracy.low)


class TestSuffixes:
    @pytest.mark.parametrize(("template", "end", "before"), [
        ("Say: {content}\nAnswer:", "Say: {content}\nAnswer: x y", "Say: x y {content}\nAnswer:"),
        ("{content} is good.", "{content} is good. x y", "x y {content} is good."),
        ("Say:{content}", "Say:{content} x y", "Say: x y {content}"),
        ("Say:\n{content}", "Say:\n{content} x y", "Say:\nx y {content}"),
    ])  # fmt: skip
    def test_places(self, template, end, before):
        assert with_suffix(template, "x y", "end") == end
        assert with_suffix(template, " x y ", "end") == end.replace(" x", "  x")
        assert with_suffix(template, "x y", "before") == with_suffix(template, " x y ", "before") == before

    def test_before_the_content(self, model, data):
        found = attack(model, data, attacks=["stresstest"], suffix="before").attacks[0]
        for prompt, template in zip(found.prompts, TEMPLATES):
            before, _, after = template.partition("{content}")
            assert prompt.prompt.startswith(before) and prompt.prompt.endswith(after)
            assert prompt.prompt != template and prompt.prompt.count("{content}") == 1


@needs_textattack
class TestProtected:
    def test_in_every_prompt_that_is_tried(self, model, data, monkeypatch):
        """The words that deepwordbug would most like to change are kept too."""
        template = "Is this content negative, Positive or 'NEGATIVE'? content {content} content"
        tried = []
        real = Evaluator.grid

        def grid(self, templates, contents):
            tried.extend(each.text for each in templates)
            return real(self, templates, contents)

        monkeypatch.setattr(Evaluator, "grid", grid)
        attack(model, data, attacks=["deepwordbug", "textbugger"], template=[template])
        assert len(set(tried)) > 30
        for prompt in tried:
            assert prompt.count("{content}") == 1
            assert all(part in prompt for part in ("negative,", "Positive", "'NEGATIVE'?"))
        outside = [prompt.replace("{content}", "").split() for prompt in tried]
        assert any(words.count("content") < 3 for words in outside)  # other words of that name are not protected

    def test_a_classifier_keeps_the_names_of_its_classes(self):
        classifier, data = reader(), few("dull", "great")
        template = "dull or great film? {content}"
        found = attack(classifier, data, template=[template], words=None, attacks=["deepwordbug"])
        assert {"dull", "great"} <= set(found.attacks[0].prompts[0].prompt.split())

    def test_a_template_in_which_nothing_may_change(self, model, data):
        found = attack(model, data, attacks=["deepwordbug", "textbugger"], template=["Negative or positive: {content}"])
        for one in found.attacks:
            assert one.prompts[0].drop.value == 0 and one.prompts[0].tried == 0
            assert one.prompts[0].prompt == "Negative or positive: {content}"


def test_suffixes_are_asked_together_with_the_clean_prompts(model, data, monkeypatch):
    waves, grid = [], Evaluator.grid
    monkeypatch.setattr(Evaluator, "grid", lambda *given: waves.append(1) or grid(*given))
    found = attack(model, data, attacks=SUFFIX_ATTACKS)
    assert len(waves) == 1 and found.cost.asked == len(TEMPLATES) * (1 + 3 + 50) * len(data)


class TestZeroAccuracy:
    def test_no_drop_and_no_attack(self, model):
        labels = 1 - answers(model, TEMPLATES[0])
        data = text_data("sentences", "all", SENTENCES, labels.tolist(), WORDS)
        found = attack(model, data, attacks=SUFFIX_ATTACKS)
        assert found.clean[0].value == 0 and found.clean[1].value > 0
        for one in found.attacks:
            assert one.prompts[0].prompt is None and math.isnan(one.prompts[0].drop.value)
            assert one.drop == one.prompts[1].drop and one.worst == 1
        assert found.notes[0] == "under template 0 no answer is right: there is no drop to measure"
        assert "nan" not in str(found) and type(found).from_dict(json.loads(found.to_json())) == found
        alone = attack(model, data, attacks=["stresstest"], template=TEMPLATES[:1])
        assert "no drop defined" in alone.headline and alone.attacks[0].prompts[0].tried == 0

    @needs_textattack
    def test_a_search_ends_there(self, model, data, monkeypatch):
        """Once a prompt leaves nothing right, no other is tried."""
        waves = []

        def grid(templates, contents):
            waves.append([each.text for each in templates])
            return np.array([[p == TEMPLATES[0] or "[UNK]" in p] * len(contents) for p in waves[-1]])

        judge = Judge(SimpleNamespace(grid=grid, answers=lambda right: right - 1), ["a"] * 4, np.zeros(4))
        recipe = prompt_search_recipe("deepwordbug")
        from ssmscope.attacks.prompts.goal import searched

        prompt, tried = searched(recipe, TEMPLATES[0], judge, words=WORDS, seed=0)
        assert prompt != TEMPLATES[0] and len(waves) == 3  # the template, the ranking, one word's changes
        assert tried == len({each for wave in waves for each in wave} - {TEMPLATES[0]})

    def test_a_poor_start_is_said(self, model, data):
        flat = dataclasses.replace(data, labels=(0,) * 29 + (1,))
        notes = attack(model, flat, attacks=["stresstest"]).notes
        assert any("no higher than always answering the most frequent class, 0.967" in note for note in notes)


def prompt_search_recipe(name: str):
    from ssmscope.attacks.recipes import recipe

    return recipe(name, flavour="prompt")


@needs_textattack
@pytest.mark.parametrize(("recipe", "as_promptbench"), [("deepwordbug", False), ("textbugger", True)])
def test_candidates_that_cannot_be_taken_are_not_measured_to_the_end(model, data, monkeypatch, recipe, as_promptbench):
    options = dict(attacks=[recipe], as_promptbench=as_promptbench)
    found = attack(model, data, **options)
    monkeypatch.setattr(Judge, "fewer", lambda self, prompts, than: self.right(prompts).sum(1))
    whole = attack(model, data, **options)
    assert found.attacks == whole.attacks and found.cost.run < 0.95 * whole.cost.run


class Killed(Exception):
    pass


@needs_textattack
class TestResume:
    def test_another_process_draws_the_same(self, paper, model, data):
        """Whatever the global generators are at, and whichever other templates and attacks there are."""
        random.seed(123)
        np.random.seed(123)
        alone = attack(model, data, attacks=["deepwordbug"], template=TEMPLATES[1:])
        assert alone.attacks[0].prompts == paper.attacks[2].prompts[1:]
        other = attack(model, data, attacks=["deepwordbug"], seed=1)
        assert [p.prompt for p in other.attacks[0].prompts] != [p.prompt for p in paper.attacks[2].prompts]

    def test_draws(self):
        seen = {}
        for given in ((0, "a", "b"), (1, "a", "b"), (0, "b", "b"), (0, "a", "c"), (0, "a", "b")):
            before = random.getstate(), np.random.get_state()[1].tolist()
            with pytest.raises(Killed), drawn_from(*given):
                drawn = random.random(), np.random.rand()
                raise Killed
            assert (random.getstate(), np.random.get_state()[1].tolist()) == before
            assert seen.setdefault(given, drawn) == drawn
        assert len(set(seen.values())) == 4


class TestJudge:
    def test_each_prompt_once_and_together(self, model, data, monkeypatch):
        class Counting(Evaluator):
            waves: list = []

            def grid(self, templates, contents):
                self.waves.append([template.text for template in templates])
                return super().grid(templates, contents)

        evaluator = Counting(model, words=WORDS)
        judge = Judge(evaluator, data.texts, np.array(data.labels))
        first = judge.right([TEMPLATES[1], TEMPLATES[0], TEMPLATES[1]])
        assert first.shape == (3, 30) and (first[0] == first[2]).all() and (first[0] != first[1]).any()
        assert (judge.right(TEMPLATES)[::-1] == first[:2]).all() and judge.right([]).shape == (0, 30)
        assert evaluator.waves == [[TEMPLATES[1], TEMPLATES[0]]]
        worst, number = tried_all(TEMPLATES[0], [*TEMPLATES, TEMPLATES[1]], judge)
        monkeypatch.setattr(prompt_search, "MAX_CHARACTERS_PER_CALL", sum(map(len, data.texts)))
        assert (Judge(evaluator, data.texts, np.array(data.labels)).right(TEMPLATES) == first[1::-1]).all()
        assert evaluator.waves[1:] == [[TEMPLATES[0]], [TEMPLATES[1]]]  # no more texts at once than fit
        assert number == 1 and worst == TEMPLATES[int(first[:2].mean(1)[::-1].argmin())]

    def test_no_more_examples_than_it_takes(self):
        """Counts below the bound are exact, those of the others are not below it, and every prompt is done with as soon
        as a step ends with as many right ones."""
        generator, prompts = np.random.default_rng(0), [f"{{content}} {number}" for number in range(9)]
        truth = {prompt: generator.random(100) < (number + 1) / 10 for number, prompt in enumerate(prompts)}
        asked: Counter[str] = Counter()

        def grid(templates, contents):
            asked.update({each.text: len(contents) for each in templates})
            return np.array([[truth[each.text][int(content)] for content in contents] for each in templates])

        evaluator = SimpleNamespace(grid=grid, answers=lambda right: right.astype(int))
        for bound in (0, 1, 30, 50, 101):
            judge = Judge(evaluator, [str(row) for row in range(100)], np.ones(100))
            judge.right(prompts[:1])
            asked.clear()
            found = judge.fewer([*prompts[1:], prompts[1]], bound)
            assert found[-1] == found[0]
            for prompt, number in zip(prompts[1:], found):
                right = truth[prompt].sum()
                assert number == right if right < bound else bound <= number <= right
                assert asked[prompt] == 100 if right < bound else asked[prompt] <= 100
            if bound == 30:  # the likeliest first: few more than the bound
                assert asked[prompts[8]] < 50 < asked[prompts[4]]
            assert (judge.right(prompts) == np.array(list(truth.values()))).all()


class TestSemantic:
    def test_of_a_file(self, model, data, tmp_path):
        path = tmp_path / "prompts.txt"
        path.write_text(f"{TEMPLATES[1]}\n\nPositive or negative? {{content}}\\nAnswer:\n{TEMPLATES[1]}\n")
        found = attack(model, data, attacks=["stresstest"], semantic=path)
        assert [one.name for one in found.attacks] == ["stresstest", "semantic"]
        candidates = (TEMPLATES[1], "Positive or negative? {content}\nAnswer:")
        assert rewritten(path, "any") == candidates
        scores = {each: np.mean(np.array(slow_answers(model, each)) == data.labels) for each in candidates}
        for one in found.attacks[1].prompts:
            assert one.accuracy.value == pytest.approx(min(scores.values()))
            assert one.prompt == min(candidates, key=scores.get)
        assert [one.tried for one in found.attacks[1].prompts] == [2, 1]  # the second template is one of them
        assert any("1 of 2 rewritten prompts do not name every answer" in note for note in found.notes)
        again = attack(model, data, attacks=["semantic"], semantic=path)
        assert [one.name for one in again.attacks] == ["semantic"]

    def test_of_promptbench(self):
        if importlib.util.find_spec("promptbench") is None:
            pytest.skip("promptbench is not installed")
        for name in ("sst2", "wnli"):
            prompts = rewritten("promptbench", name)
            assert len(prompts) == len(set(prompts)) > 40
            assert all(prompt.endswith("\nQuestion: {content}\nAnswer:") for prompt in prompts)
            assert not any("  " in prompt or " \n" in prompt for prompt in prompts[:1])
        with pytest.raises(InputError, match="promptbench has no semantic prompts for imdb; it has some for math, "):
            rewritten("promptbench", "imdb")

    def test_without_promptbench(self, monkeypatch):
        monkeypatch.setattr(prompt_search.importlib.util, "find_spec", lambda name: None)
        refuses("need that package, which is not installed; give a file", rewritten, "promptbench", "sst2")

    def test_broken_files(self, model, data, tmp_path):
        refuses("semantic is 'prompbench'; allowed are .*did you mean 'promptbench'", rewritten, "prompbench", "sst2")
        (tmp_path / "empty.txt").write_text("\n \n")
        refuses("holds no prompt; give one a line", rewritten, tmp_path / "empty.txt", "sst2")
        (tmp_path / "latin.txt").write_bytes(b"caf\xe9 {content}")
        refuses("is not UTF-8 text", rewritten, tmp_path / "latin.txt", "sst2")
        (tmp_path / "none.txt").write_text("Positive or negative?")
        refuses("has no {content}", attack, model, data, semantic=tmp_path / "none.txt")


@needs_textattack
class TestResources:
    def test_without_any(self, paper):
        by_name = {one.name: one for one in paper.attacks}
        assert any("sentence similarity" in part for part in by_name["textbugger"].left_out)
        assert by_name["deepwordbug"].left_out == () and by_name["stresstest"].left_out == ()
        shown = " ".join(paper.to_text(full=True).split())
        assert "textbugger ran without sentence similarity ≥ 0.8 (angular): it needs a sentence encoder" in shown

    def test_all_of_them(self, model, data, tmp_path):
        bert = save_bert(tmp_path)
        rows = {"sentence": [1, 0.2], "text": [1, 0.1], "answer": [-1, 0.3], "say": [0.9, 0.3], "feeling": [-1, 0.2]}
        vectors = tmp_path / "vectors.txt"
        vectors.write_text("".join(f"{word} {a} {b}\n" for word, (a, b) in rows.items()))
        found = attack(
            model, data.take(range(8)), attacks=["textbugger", "textfooler", "bertattack"], embeddings=vectors,
            masked_lm=bert, encoder=bert,
        )  # fmt: skip
        bugger, fooler, masked = found.attacks
        assert not bugger.left_out and not masked.left_out
        assert any("5 vectors" in part for part in fooler.ran)
        assert {word for prompt in fooler.prompts for word in prompt.prompt.lower().replace(":", " ").split()} <= {
            word for text in (*TEMPLATES, *rows) for word in text.lower().replace(":", " ").split()
        }
        assert all(prompt.prompt.count("{content}") == 1 for one in found.attacks for prompt in one.prompts)
        assert found.provenance["options"]["encoder"] == str(bert)
