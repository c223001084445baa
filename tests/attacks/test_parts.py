"""The parts of attacks: imported without a trace, protecting the right words, and each as its paper defines it."""

import ast
import importlib.util
import math
import os
import string
import subprocess
import sys
import textwrap
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refuses
from warm import TRANSFORMERS

if importlib.util.find_spec("textattack") is None:
    pytest.skip("textattack is not installed", allow_module_level=True)

from tiny_bert import save_bert
from ssmscope.attacks import names, offline, resources
from ssmscope.attacks.names import ATTACKS
from ssmscope.attacks.offline import FUNCTION_WORDS, stopwords, textattack
from ssmscope.attacks.recipes import attack_of, protect, recipe

textattack()

from textattack.shared import AttackedText  # noqa: E402
from textattack.transformations import CompositeTransformation  # noqa: E402
from ssmscope.attacks.swaps import LOOKALIKES, Homoglyphs, MaskedWords, Vectors, plain_words, word_spans  # noqa: E402


def script(body: str, home: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a process with an empty home, in which nothing of ours or of TextAttack was ever imported."""
    given = {**os.environ, "HOME": str(home), **environment}
    for name in ("TA_CACHE_DIR", "NLTK_DATA", "HF_HOME", "XDG_CACHE_HOME"):
        given.pop(name, None)
    given |= environment
    return TRANSFORMERS.run(textwrap.dedent(body), env=given, cwd=home)


class TestImport:
    def test_leaves_nothing_behind(self, tmp_path):
        """One process checks all, as importing TextAttack takes seconds."""
        done = script(
            """
            import logging, os, random, sys
            import numpy as np, torch, nltk
            mine = logging.getLogger("mine")
            mine.addHandler(logging.FileHandler("mine.log"))
            handler = mine.handlers[0]
            closed = []
            handler.close = lambda: closed.append(1)
            from ssmscope.attacks.offline import textattack
            def state():
                generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
                return dict(os.environ), generators
            before = state()
            package = textattack()
            assert before == state()
            assert not mine.disabled and not closed and mine.handlers == [handler]
            assert package is textattack() and package.Attack.__module__ == "textattack.attack"
            assert "Stopwords" in repr(nltk.corpus.stopwords)
            installer = sys.modules["textattack.shared.utils.install"]
            assert package.shared.utils.install is installer
            assert installer.TEXTATTACK_CACHE_DIR == os.environ["TA_CACHE_DIR"]
            assert not os.path.exists(os.environ["TA_CACHE_DIR"]) and "HF_HOME" not in os.environ
            words = package.augmentation.recipes.DEFAULT_CONSTRAINTS[1].stopwords
            assert "the" in words and "film" not in words
            from ssmscope.attacks.recipes import recipe
            recipe("deepwordbug", flavour="prompt")
            """,
            tmp_path,
            TA_CACHE_DIR=str(tmp_path / "own"),
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "" and done.stderr == ""
        left = {path.name for path in tmp_path.rglob("*")} - {"mine.log"}
        assert not {name for name in left if "textattack" in name or "nltk" in name or "post_install" in name}

    def test_its_cache_is_where_it_would_be(self):
        expected = os.environ.get("TA_CACHE_DIR") or os.path.expanduser("~/.cache/textattack")
        assert sys.modules["textattack.shared.utils.install"].TEXTATTACK_CACHE_DIR == expected

    def test_without_the_package(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "textattack")
        monkeypatch.setattr(offline.importlib.util, "find_spec", lambda name: None)
        refuses(r"need the package textattack, .*pip install '\.\[attacks\]'", textattack)
        refuses("textattack", recipe, "deepwordbug", flavour="prompt")
        assert recipe("stresstest", flavour="prompt").suffixes  # needs no search

    def test_beside_libraries_with_which_it_does_not_work(self, monkeypatch):
        def fail(installer):
            raise ImportError("cannot import name 'Gone' from 'transformers'")

        monkeypatch.delitem(sys.modules, "textattack")
        monkeypatch.setattr(offline, "_import_without_installing", fail)
        refuses(r"cannot be imported \(cannot import name 'Gone' .*pip install '\.\[attacks", textattack)


class TestStopwords:
    def test_ours(self, monkeypatch, tmp_path):
        import nltk

        monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
        words, whose = stopwords()
        assert words == FUNCTION_WORDS and whose.startswith(f"{len(words)} English function words")
        assert {"the", "and", "not", "isn't"} <= words and not {"film", "good", "question", "answer"} & words
        assert all(word == word.lower() for word in words)

    def test_nltks(self, monkeypatch, tmp_path):
        import nltk

        monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
        (tmp_path / "corpora" / "stopwords").mkdir(parents=True)
        (tmp_path / "corpora" / "stopwords" / "english").write_text("whom\nfilm\n")
        assert stopwords() == (frozenset({"whom", "film"}), "NLTK's English stop words")
        constraint = recipe("deepwordbug", flavour="prompt").constraints[1]
        assert constraint.stopwords == {"whom", "film"}
        assert "NLTK's English stop words" in " ".join(recipe("deepwordbug", flavour="prompt").ran)


def modifiable(text: str, words, placeholder="{content}") -> list[str]:
    attacked = AttackedText(text)
    kept = protect(words, placeholder)
    return [attacked.words[i] for i in sorted(kept(attacked, CompositeTransformation([Homoglyphs()])))]


class TestProtect:
    def test_the_placeholder_itself_wherever_it_occurs(self):
        text = "Judge the content, which is content: {content} and content"
        assert modifiable(text, []) == "Judge the content which is content and content".split()
        assert modifiable("{content}", []) == []
        assert modifiable("content {content}content", []) == ["content", "content"]
        assert modifiable("the content", [], None) == ["the", "content"]
        assert modifiable("{content} or {content} content", []) == ["or", "content"]

    @pytest.mark.parametrize("written", [
        "'positive'", '"Positive"', "POSITIVE", "(positive).", "positive/", "`positive`", "positive's",
        "non-positive",
    ])  # fmt: skip
    def test_labels_in_every_guise(self, written):
        text = f"Say {written} or 'negative': {{content}}"
        assert modifiable(text, ["positive", "negative"]) == ["Say", "or"]

    def test_labels_of_several_words_and_no_parts_of_words(self):
        for label in ("not_entailment", "not entailment", "not-entailment"):
            text = "Not_entailment, not entailment, 'not-entailment' or entailments? {content}"
            assert modifiable(text, [label]) == ["or", "entailments"]
        assert modifiable("incorrect uncorrected {content}", ["correct"]) == ["incorrect", "uncorrected"]

    def test_where_words_are(self):
        attacked = AttackedText("It's a a'b, “cat” -dog- a\nt")
        found = [attacked.text[a:b] for a, b in word_spans(attacked)]
        assert found == attacked.words == ["It's", "a", "a'b", "cat", "dog", "a", "t"]
        assert [a for a, _ in word_spans(attacked)] == [0, 5, 7, 13, 19, 24, 26]
        assert plain_words("'Not_Entailment'!") == {"not_entailment", "not", "entailment"}


class TestRecipes:
    def test_every_attack_is_offered_and_says_what_its_suffixes_are(self):
        assert {*names.on_prompts(), *names.on_words()} == {*ATTACKS}
        assert [name for name in ATTACKS if ATTACKS[name].suffixes] == [name for name in ATTACKS if ATTACKS[name].about]

    def test_suffixes(self):
        once, other, five = ATTACKS["stresstest"].suffixes
        assert five == once * 5 == " and true is true " * 5 and other == " and false is not true "
        strings = ATTACKS["checklist"].suffixes
        assert len(strings) == len(set(strings)) == 50
        assert all(len(text) == 10 and set(text) <= set(string.ascii_letters + string.digits) for text in strings)
        for name in ("stresstest", "checklist"):
            found = recipe(name, flavour="prompt")
            assert found.suffixes == ATTACKS[name].suffixes and found.transformation is None and not found.left_out

    @pytest.mark.parametrize(("given", "says"), [
        (("textfooler", "prompt"), "textfooler swaps words for their neighbours, by word vectors: give embeddings=…"),
        (("bertattack", "words"), "bertattack asks a masked language model for words: give masked_lm=…"),
    ])  # fmt: skip
    def test_what_is_refused(self, given, says):
        refuses(says, recipe, given[0], flavour=given[1])

    def test_deepwordbug_is_textattacks(self, monkeypatch):
        import nltk
        from textattack.attack_recipes import DeepWordBugGao2018

        monkeypatch.setattr(nltk.corpus, "stopwords", SimpleNamespace(words=lambda language: ["the"]))
        theirs = DeepWordBugGao2018.build(SimpleNamespace(model=None))
        for flavour in ("prompt", "words"):
            ours = recipe("deepwordbug", flavour=flavour)
            assert repr(ours.transformation) == repr(theirs.transformation)
            assert repr(ours.search) == repr(theirs.search_method)
            kinds = [type(part).__name__ for part in ours.constraints]
            assert sorted(kinds) == ["LevenshteinEditDistance", "RepeatModification", "StopwordModification"]
            assert ours.constraints[2].max_edit_distance == 30

    def test_a_search_of_its_own_for_every_attack(self):
        from textattack.goal_functions import UntargetedClassification

        found = recipe("deepwordbug", flavour="words")
        goals = [UntargetedClassification(SimpleNamespace(model=None)) for _ in range(2)]
        one, two = (attack_of(found, goal, protect(["good"], None)) for goal in goals)
        assert one.search_method is not two.search_method and one.search_method.goal_function is goals[0]
        assert len(one.pre_transformation_constraints) == 3


class TestSwaps:
    def test_lookalikes(self):
        """TextAttack's own table, read from its file: some of its releases cannot make the class that holds it."""
        spec = importlib.util.find_spec("textattack")
        path = Path(spec.origin).parent / "transformations" / "word_swaps" / "word_swap_homoglyph_swap.py"
        (table,) = (
            ast.literal_eval(node.value)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.homos"
        )
        assert dict(LOOKALIKES) == table and len(table) == 38
        assert set(LOOKALIKES) == {*string.ascii_lowercase, *string.digits, "-", "'"}
        assert all(len(other) == 1 and other != letter for letter, other in LOOKALIKES.items())

    def test_homoglyphs_change_one_letter_each(self):
        found = Homoglyphs()._get_replacement_words("fame")
        names = ["MATHEMATICAL MONOSPACE SMALL F", "LATIN SMALL LETTER ALPHA", "FULLWIDTH LATIN SMALL LETTER M"]
        names.append("CYRILLIC SMALL LETTER IE")
        assert [unicodedata.name(word[at]) for at, word in enumerate(found)] == names
        assert all(word[:at] + "fame"[at] + word[at + 1 :] == "fame" for at, word in enumerate(found))
        assert Homoglyphs()._get_replacement_words("FAME") == []  # capital letters have none
        assert Homoglyphs().deterministic
        swapped = Homoglyphs()(AttackedText("a fame"), indices_to_modify=[1])
        assert [text.words for text in swapped] == [["a", word] for word in found]  # still one word each

    def test_wordnet(self, monkeypatch):
        import nltk

        senses = {"film": [["movie", "motion_picture", "film"], ["cinema"]]}
        there = SimpleNamespace(
            synsets=lambda word: [
                SimpleNamespace(lemma_names=lambda names=names: names) for names in senses.get(word, [])
            ]
        )
        monkeypatch.setattr(nltk.corpus, "wordnet", there)
        found = recipe("pwws", flavour="words")
        assert found.transformation._get_replacement_words("film") == ["cinema", "movie"]
        assert found.search.wir_method == "weighted-saliency" and "synonyms (WordNet)" in found.ran

    def test_pwws_without_synonyms(self, monkeypatch):
        import nltk

        monkeypatch.setattr(nltk.data, "path", [])
        refuses("give synonyms=…, a .json or .csv file, or install NLTK's wordnet", recipe, "pwws", flavour="words")


WORDS = "good great fine bad awful film".split()
ROWS = [[1, 0.1, 0], [1, 0.2, 0], [0.8, 0.5, 0.1], [-1, 0.1, 0], [-1, 0.3, 0], [0, 0, 2.0]]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vectors") / "vectors.txt"
    path.write_text("".join(f"{word} {' '.join(map(str, row))}\n" for word, row in zip(WORDS, ROWS)))
    return path


class TestVectors:
    def test_all_forms_are_read_alike(self, vectors, tmp_path):
        with_header = tmp_path / "header.vec"
        with_header.write_text(f"6 3\n{vectors.read_text()}\n")
        np.savez(tmp_path / "v.npz", words=np.array(WORDS), vectors=np.array(ROWS))
        expected = np.array(ROWS) / np.linalg.norm(ROWS, axis=1, keepdims=True)
        for path in (vectors, with_header, tmp_path / "v.npz"):
            found = resources.load_vectors(path)
            assert found.words == tuple(WORDS) and found.unit == pytest.approx(expected, abs=1e-6)

    def test_textfooler_swaps_and_limits(self, vectors):
        found = recipe("textfooler", flavour="words", embeddings=vectors)
        text = AttackedText("A Good film")
        swapped = {each.words[1] for each in found.transformation(text, indices_to_modify=[1])}
        assert swapped == {"Great", "Fine", "Bad", "Awful", "Film"}
        limit = next(part for part in found.constraints if type(part).__name__ == "WordEmbeddingDistance")
        kept = [each.words[1] for each in found.transformation(text, indices_to_modify=[1]) if limit(each, text)]
        assert kept == ["Great", "Fine"]
        assert any("6 vectors" in part for part in found.ran)

    def test_of_a_word_that_is_there_twice_the_first_counts(self, tmp_path):
        (tmp_path / "twice.txt").write_text("a 1 0\nb 1 1\na 0 1\n")
        found = resources.load_vectors(tmp_path / "twice.txt")
        assert found.index == {"a": 0, "b": 1} and Vectors(found)["a"].tolist() == [1, 0]

    def test_a_changed_file_is_read_again(self, tmp_path):
        path = tmp_path / "v.txt"
        path.write_text("a 1\nb 2\n")
        assert resources.load_vectors(path) is resources.load_vectors(path)
        path.write_text("c 1 1\n")
        assert resources.load_vectors(path).words == ("c",)


bert = pytest.fixture(scope="module")(lambda tmp_path_factory: save_bert(tmp_path_factory.mktemp("bert")))


class TestMaskedWords:
    def test_a_word_beyond_the_models_reach_stays(self, bert):
        masked = resources.MaskedLM(bert)
        text = AttackedText(" ".join(["film"] * 60))
        swap = MaskedWords(masked, candidates=4)
        assert masked.length == 40 and swap(text, indices_to_modify=[50]) == []
        assert swap(text, indices_to_modify=[30])

    def test_bertattack_runs(self, bert):
        found = recipe("bertattack", flavour="prompt", masked_lm=bert)
        assert found.transformation.candidates == 48 and any("similarity" in part for part in found.left_out)
        with_encoder = recipe("bertattack", flavour="prompt", masked_lm=bert, encoder=bert)
        assert not with_encoder.left_out and any(f"by {bert} in place of" in part for part in with_encoder.ran)

    def test_an_encoder_is_no_masked_model(self, bert, tmp_path):
        from transformers import AutoTokenizer, BertModel

        BertModel.from_pretrained(bert).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
        refuses("masked_lm .* is not a masked language model: it has no weights for cls", resources.MaskedLM, tmp_path)
        for load, option in ((resources.MaskedLM, "masked_lm"), (resources.Encoder, "encoder")):
            refuses(f"{option} .*nowhere.* could not be loaded", load, tmp_path / "nowhere")


class TestEncoder:
    def test_the_limit_on_similarity(self, bert):
        found = recipe("textbugger", flavour="prompt", encoder=bert)
        similar = found.constraints[-1]
        text = AttackedText("a good film")
        candidates = found.transformation(text, indices_to_modify=[1])
        embeddings = similar.encoder([text.text, *(each.text for each in candidates)])
        cosines = torch.nn.functional.cosine_similarity(embeddings[:1], embeddings[1:]).double()
        angular = 1 - cosines.arccos() / math.pi
        rising = angular.sort().values
        at = int(rising.diff().argmax())  # An arc cosine near 1 is only as exact as the root of a rounding.
        similar.threshold = float(rising[at : at + 2].mean())
        kept = similar.call_many(candidates, text)
        expected = [each.text for each, value in zip(candidates, angular) if value >= similar.threshold]
        assert [each.text for each in kept] == expected and 0 < len(kept) < len(candidates)
