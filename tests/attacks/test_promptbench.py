"""Our attacks on prompts compared with PromptBench's own code, on the same model, prompt and examples."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prompted import WORDS, answers, labelled, language_model
from refusals import refused
from ssmscope.attacks.names import ATTACKS
from ssmscope.attacks.offline import FUNCTION_WORDS, textattack
from ssmscope.attacks.prompts import prompt_attack
from ssmscope.attacks.prompts.search import Judge, drawn_from, with_suffix
from ssmscope.attacks.recipes import recipe
from ssmscope.evaluation import Evaluator

for package in ("textattack", "promptbench"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

from ssmscope.attacks.prompts.goal import searched  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ENDS_IN_A_WORD = "Decide whether the sentence, this one, is 'positive' or 'negative': {content} My answer"
ENDS_IN_A_MARK = "Say what this sentence is, positive or negative.\nSentence: {content}\nAnswer:"
KEPT = [*WORDS, *(f"{word}'" for word in WORDS), "content"]
model = pytest.fixture(scope="module")(lambda: language_model())


@pytest.fixture(scope="module")
def data_of(model):
    """Sentences that the model labels well under a template."""
    return functools.cache(lambda template: labelled(model, template).take(range(0, 30, 2)))


@pytest.fixture(scope="module")
def promptbench():
    """Its module of attacks."""
    textattack()
    with contextlib.redirect_stdout(io.StringIO()):
        from promptbench.prompt_attack import attack
    return attack


@pytest.fixture
def theirs(promptbench, model, data_of, monkeypatch):
    """Run one of its attacks: the prompts that it evaluates, in order, and what it returns."""
    import nltk

    # both sides keep the same stop words: ours, where NLTK has no list
    stopwords = SimpleNamespace(words=lambda language="english": sorted(FUNCTION_WORDS))
    monkeypatch.setattr(nltk.corpus, "stopwords", stopwords)
    monkeypatch.setattr(nltk.data, "path", [])

    def run(name: str, template: str, seed: int = 0):
        data = data_of(template)
        judge = Judge(Evaluator(model, words=WORDS), data.texts, np.array(data.labels))
        asked: list[str] = []

        def accuracy(prompt, dataset, judged) -> float:
            asked.append(prompt)
            if prompt.count("{content}") != 1:
                return 1.0
            return float(judge.right([prompt]).mean())

        with contextlib.redirect_stdout(io.StringIO()), drawn_from(seed, template, name):
            attack = promptbench.Attack(model, name, data, template, accuracy, KEPT, verbose=False)
            found = attack.attack()
        return asked, found

    return run


def ours(model, data, name: str, template: str, monkeypatch, **options):
    """The prompts that we evaluate, and the attack on the template."""
    asked: list[str] = []
    real = Evaluator.grid

    def grid(self, templates, contents):
        asked.extend(each.text for each in templates)
        return real(self, templates, contents)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "grid", grid)
        found = prompt_attack(model, data, attacks=[name], template=template, words=WORDS, **options)
    return asked, found


def always() -> Judge:
    """Every example is right under every prompt."""
    evaluator = SimpleNamespace(
        grid=lambda templates, contents: np.zeros((len(templates), len(contents))), answers=lambda scores: scores
    )
    return Judge(evaluator, ["a"] * 3, np.zeros(3))


@pytest.mark.parametrize("name", ["stresstest", "checklist"])
class TestSuffixes:
    def test_the_same_candidates_behind_a_word(self, name, theirs, model, data_of, monkeypatch):
        their_prompts, their_result = theirs(name, ENDS_IN_A_WORD)
        our_prompts, our_result = ours(model, data_of(ENDS_IN_A_WORD), name, ENDS_IN_A_WORD, monkeypatch)
        # the space after a suffix is that before the answer
        expected = {prompt.rstrip() for prompt in their_prompts}
        assert set(our_prompts) == expected and len(expected) == 1 + len(ATTACKS[name].suffixes)
        (found,) = our_result.attacks[0].prompts
        assert found.accuracy.value == pytest.approx(their_result["attacked score"])
        assert found.drop.value == pytest.approx(their_result["PDR"])
        assert found.accuracy.value != our_result.clean[0].value == pytest.approx(their_result["original score"])

    def test_behind_a_mark_only_the_place_differs(self, name, theirs, model, data_of, monkeypatch):
        their_prompts, _ = theirs(name, ENDS_IN_A_MARK)
        our_prompts, _ = ours(model, data_of(ENDS_IN_A_MARK), name, ENDS_IN_A_MARK, monkeypatch)
        body = ENDS_IN_A_MARK.removesuffix(":")
        inserted = {prompt.removeprefix(body).removesuffix(":").strip() for prompt in their_prompts}
        appended = {prompt.removeprefix(ENDS_IN_A_MARK).strip() for prompt in our_prompts}
        assert inserted == appended == {"", *(suffix.strip() for suffix in ATTACKS[name].suffixes)}
        assert all(prompt.startswith(body) and prompt.endswith(":") for prompt in their_prompts)

    def test_behind_the_content_theirs_break_it(self, name, theirs):
        """Protected words are ignored there; ours keep the placeholder by construction."""
        their_prompts, _ = theirs(name, "Positive or negative? {content}")
        assert sum("{content}" not in prompt for prompt in their_prompts) == len(ATTACKS[name].suffixes)


class TestDeepWordBug:
    @pytest.mark.parametrize("template", [ENDS_IN_A_WORD, ENDS_IN_A_MARK])
    def test_the_same_search(self, template, theirs, promptbench, model, data_of, monkeypatch):
        """The searches agree once their first prompt's score is the accuracy that it costs."""
        import nltk

        monkeypatch.setattr(nltk.data, "path", [])
        data = data_of(template)
        clean = float(np.mean(answers(model, template, texts=data.texts) == data.labels))
        goal = promptbench.AdvPromptGoalFunction
        monkeypatch.setattr(goal, "_get_score", lambda self, accuracy, text: clean - accuracy)
        their_prompts, their_result = theirs("deepwordbug", template)
        our_prompts, our_result = ours(model, data, "deepwordbug", template, monkeypatch)
        (found,) = our_result.attacks[0].prompts
        assert set(our_prompts) == set(their_prompts) and len(set(our_prompts)) > 15
        assert found.prompt == their_result["attacked prompt"] != template
        assert found.accuracy.value == pytest.approx(their_result["attacked score"])
        assert found.drop.value == pytest.approx(their_result["PDR"]) and found.drop.value > 0

    def test_their_first_change_is_always_taken(self, theirs, model, monkeypatch):
        """They score the prompt that they start from as −1 − accuracy: any change of the first word seems better."""
        real = Judge.right
        monkeypatch.setattr(Judge, "right", lambda self, prompts: np.ones_like(real(self, prompts)))
        _, their_result = theirs("deepwordbug", ENDS_IN_A_WORD)
        assert their_result["PDR"] == 0 and their_result["attacked prompt"] != ENDS_IN_A_WORD
        found = searched(recipe("deepwordbug", flavour="prompt"), ENDS_IN_A_WORD, always(), words=WORDS, seed=0)
        assert found[0] == ENDS_IN_A_WORD

    def test_another_seed_is_another_search(self, theirs):
        one, two = (theirs("deepwordbug", ENDS_IN_A_WORD, seed)[0] for seed in (0, 1))
        assert set(one) != set(two)


class TestAsPromptBench:
    """Attacks with `as_promptbench`, compared with unchanged PromptBench."""

    @pytest.mark.parametrize("template", [ENDS_IN_A_WORD, ENDS_IN_A_MARK])
    @pytest.mark.parametrize("name", ["stresstest", "checklist", "deepwordbug"])
    def test_the_same_candidates_and_the_same_drop(self, name, template, theirs, model, data_of, monkeypatch):
        import nltk

        monkeypatch.setattr(nltk.data, "path", [])
        their_prompts, their_result = theirs(name, template)
        our_prompts, our_result = ours(model, data_of(template), name, template, monkeypatch, as_promptbench=True)
        # the space after a suffix at the very end is that before the answer
        assert set(our_prompts) == {prompt.rstrip() for prompt in their_prompts} and len(set(our_prompts)) > 3
        (found,) = our_result.attacks[0].prompts
        assert found.prompt == their_result["attacked prompt"].rstrip()
        assert found.accuracy.value == pytest.approx(their_result["attacked score"])
        assert found.drop.value == pytest.approx(their_result["PDR"])

    def test_the_first_change_is_always_taken(self):
        given = dict(words=WORDS, seed=0)
        parts = recipe("deepwordbug", flavour="prompt")
        assert searched(parts, ENDS_IN_A_WORD, always(), **given)[0] == ENDS_IN_A_WORD
        assert searched(parts, ENDS_IN_A_WORD, always(), as_promptbench=True, **given)[0] != ENDS_IN_A_WORD

    def test_the_content_is_not_broken(self):
        string, sentence = "d6ZQ3u0GBQ", " and true is true "
        for template, suffix, expected in (
            ("Good or bad? {content}.", string, "Good or bad? {content} d6ZQ3u0GBQ."),
            ("{content}\nAnswer:", sentence, "{content}\nAnswer  and true is true :"),
            ("Is it? {content}", sentence, "Is it? {content}  and true is true"),
        ):
            assert with_suffix(template, suffix, "promptbench") == expected


class TestRunByPromptBench:
    """Attacks promptbench:NAME, compared with the package called by hand."""

    @pytest.mark.parametrize("name", ["stresstest", "checklist", "deepwordbug"])
    def test_by_hand(self, name, theirs, model, data_of, monkeypatch):
        their_prompts, their_result = theirs(name, ENDS_IN_A_WORD)
        names = [f"promptbench:{name}", name]
        given = dict(attacks=names, template=ENDS_IN_A_WORD, words=WORDS, as_promptbench=True)
        found = prompt_attack(model, data_of(ENDS_IN_A_WORD), **given)
        run, ours = (one.prompts[0] for one in found.attacks)
        # the space after a suffix is that before the answer
        assert run.prompt == their_result["attacked prompt"].rstrip()
        assert run.tried == len({prompt.rstrip() for prompt in their_prompts} - {ENDS_IN_A_WORD})
        assert run.accuracy.value == pytest.approx(their_result["attacked score"]) and run.drop.value != 0
        assert run.drop.value == pytest.approx(their_result["PDR"]) == pytest.approx(ours.drop.value)
        versions = found.provenance["versions"]
        assert versions["promptbench"] == importlib.metadata.version("promptbench")
        assert f"promptbench:{name}: run by PromptBench {versions['promptbench']} itself." in found.measured
        table = found.to_frame().query("part == 'template'").set_index("attack")
        assert table["drop"].to_dict() == dict.fromkeys(names, pytest.approx(100 * their_result["PDR"]))

    def test_beside_ours(self, model, data_of):
        data, templates = data_of(ENDS_IN_A_MARK), [ENDS_IN_A_MARK, "Positive or negative? {content}."]
        found = prompt_attack(
            model, data, attacks=["stresstest", "promptbench:stresstest"], template=templates, words=WORDS
        )
        table = found.to_frame().query("part == 'template'").set_index(["attack", "template"])
        assert table["measured_as"].to_list() == ["ssmscope"] * 2 + ["promptbench"] * 2
        # between the braces it is no prompt any more
        assert table["prompt"].isna().to_list() == [False, False, False, True]
        assert found.attacks[1].left_out[0].startswith("template 1: no word follows {content}")
        assert found.attacks[1].drop == found.attacks[1].prompts[0].drop

    def test_what_is_refused(self, model, data_of, monkeypatch):
        def attack(**options):
            return refused(
                prompt_attack, model, data_of(ENDS_IN_A_MARK), template=ENDS_IN_A_MARK, words=WORDS, **options
            )

        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "tensorflow_hub", None)
            said = attack(attacks=["promptbench:textbugger"])
            assert "install tensorflow_hub, or try textbugger with encoder=…" in said
        with monkeypatch.context() as patch:

            def check_reach(repository, kind):
                raise ConnectionError(f"{kind} {repository} is out of reach")

            patch.setattr(importlib.util, "find_spec", lambda name: object())
            patch.setattr("ssmscope.attacks.prompts.from_promptbench.check_reach", check_reach)
            said = attack(attacks=["promptbench:bertattack"])
            asked = "(model bert-base-uncased is out of reach); leave it out, or try bertattack"
            assert said == f"promptbench:bertattack cannot start here {asked}"
        assert "options of ssmscope's own attacks" in attack(attacks=["promptbench:stresstest"], suffix="before")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "promptbench.prompt_attack", None)
            said = attack(attacks=["promptbench:checklist"])
        assert "promptbench:checklist needs the package promptbench, which cannot be imported" in said
        (pinned,) = re.findall("^PROMPTBENCH = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert said.endswith(f"pip install --no-deps {pinned}")
        assert pinned in " ".join((ROOT / "docs" / "packages.md").read_text(encoding="utf-8").split())


def test_the_random_strings_are_the_packages_own():
    package = importlib.util.find_spec("promptbench")
    source = Path(package.origin).parent.joinpath("prompt_attack", "transformations.py").read_text()
    assert all(f"'{text}'" in source for text in ATTACKS["checklist"].suffixes)
    assert '" and true is true ", " and false is not true ", " and true is true "*5' in source
