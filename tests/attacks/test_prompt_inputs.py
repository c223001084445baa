"""Inputs of attacks on prompts: classifiers, known data, and options."""

import dataclasses

import numpy as np
import pytest
from prompted import (
    SENTENCES,
    SUFFIX_ATTACKS,
    TEMPLATES,
    WORDS,
    attack,
    few,
    labelled,
    language_model,
    needs_textattack,
    reader,
)
from refusals import refuses
from ssmscope.attacks.prompts import prompt_attack
from ssmscope.data.prompts import TASK_PROMPTS, content_of
from ssmscope.data.text import PAIR_SEPARATOR, text_data
from ssmscope.errors import InputError
from ssmscope.evaluation import Evaluator

model = pytest.fixture(scope="module")(lambda: language_model())
data = pytest.fixture(scope="module")(lambda model: labelled(model))


class TestClassifier:
    def test_reads_the_filled_template(self):
        classifier, data = reader(), few("great", "dull")  # the classes in another order
        found = attack(classifier, data, template=TEMPLATES[:1], words=None, attacks=["stresstest"])
        (one,) = found.attacks
        for prompt, expected in ((TEMPLATES[0], found.clean[0]), (one.prompts[0].prompt, one.prompts[0].accuracy)):
            texts = [prompt.replace("{content}", text) for text in data.texts]
            names = [classifier.labels[i] for i in classifier.logits(classifier.encode(texts)).argmax(-1).tolist()]
            right = [name == data.label_names[label] for name, label in zip(names, data.labels)]
            assert np.mean(right) == pytest.approx(expected.value)

    def test_has_no_words(self):
        refuses("is a classifier, whose", attack, reader(), few("great", "dull"))


class TestKnownData:
    def test_own_prompts_and_pairs(self, model, monkeypatch):
        pairs = [f"{a}{PAIR_SEPARATOR}{b}" for a, b in zip(SENTENCES, SENTENCES[1:])][:6]
        data = text_data("wnli", "validation", pairs, [0, 1] * 3, ("not_entailment", "entailment"))
        asked = []
        real = Evaluator.grid

        def grid(self, templates, contents):
            asked.append(([template.text for template in templates], list(contents), self.words))
            return real(self, templates, contents)

        monkeypatch.setattr(Evaluator, "grid", grid)
        found = prompt_attack(model, data, attacks=["stresstest"])
        own = TASK_PROMPTS["wnli"]
        assert found.templates == own.templates
        templates, *contents = asked[0]
        assert templates[: len(own.templates)] == list(own.templates)
        assert contents == [[content_of("wnli", text) for text in pairs], own.words]
        assert found.provenance["options"]["words"] == ["incorrect", "correct"]

    def test_a_file_of_that_name_is_another(self, model):
        """Its classes may be in another order: their words must be said."""
        data = text_data("wnli", "all", SENTENCES[:4], [0, 1, 0, 1], ("entailment", "not_entailment"))
        refuses("wnli has no task prompts of its own: give template=…, .* words=…", prompt_attack, model, data)
        with pytest.raises(InputError, match="give words=…, what it says for entailment, not_entailment"):
            prompt_attack(model, data, template=TEMPLATES)
        assert prompt_attack(model, data, template=TEMPLATES, words=WORDS, attacks=["stresstest"]).attacks

    def test_own_words_for_other_templates(self, model):
        data = text_data("sst2", "test", SENTENCES[:4], [0, 1, 0, 1], ("negative", "positive"))
        found = prompt_attack(model, data, template=TEMPLATES[:1], attacks=["stresstest"])
        assert found.provenance["options"]["words"] == ["negative", "positive"]


class TestOptions:
    def test_generated_answers(self, model, data):
        """A random model rarely says either word: what is not said is not right."""
        found = attack(model, data, attacks=["stresstest"], scoring="generated")
        evaluator = Evaluator(model, words=WORDS, scoring="generated")
        said = evaluator.answers(evaluator.scores([TEMPLATES[0].replace("{content}", text) for text in data.texts]))
        assert found.clean[0].value == pytest.approx(np.mean(said == data.labels))

    @pytest.mark.parametrize(("options", "says"), [
        (dict(attacks=["stresstest", "textbuger"]),
         "unknown among attacks: 'textbuger'; allowed are .*did you mean 'textbugger'"),
        (dict(attacks=["semantic"]), "the attack semantic needs rewritten prompts: give semantic=…"),
        (dict(as_promptbench=True, suffix="before"), "as_promptbench=True places suffixes .*leave out suffix='before'"),
        (dict(template=["Say {text}:"]), "has no {content}.* did you mean"),
        (dict(template=["{content} {content}"]), "2 times"),
        (dict(template=[TEMPLATES[0]] * 2), "is given twice"),
        (dict(words=["negative"]), "words are negative; sentences has 2 classes, negative, positive"),
        (dict(words=["positive", "positive"]), "positive"),
    ])  # fmt: skip
    def test_what_is_refused(self, model, data, options, says):
        refuses(says, attack, model, data, **{"attacks": ["stresstest"], **options})

    @needs_textattack
    @pytest.mark.parametrize(
        ("name", "says"), [("textfooler", "give embeddings=…, a file"), ("bertattack", "give masked_lm=…, a directory")]
    )
    def test_a_missing_resource(self, model, data, name, says):
        refuses(says, attack, model, data, attacks=["stresstest", name])

    def test_other_data(self, model, data):
        refuses(r"data is \[.*give the name of a data set", attack, model, [1])
        refuses(r"sentences \(all\) has no example", attack, model, data.take([]))
        refuses("no tokenizer", attack, dataclasses.replace(model, tokenizer=None), data, attacks=["stresstest"])

    def test_without_textattack_the_suffixes_still_run(self, model, data, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "textattack", None)
        assert attack(model, data, attacks=SUFFIX_ATTACKS, template=TEMPLATES[:1]).attacks[1].prompts[0].tried == 50
