"""The parts of attacks: imported without a trace, protecting the right words, and each as its paper defines it."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
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
from warm import TRANSFORMERS

if importlib.util.find_spec("textattack") is None:
    pytest.skip("textattack is not installed", allow_module_level=True)

from tiny_bert import save_bert

from ssmscope.attacks import names, offline, resources
from ssmscope.attacks.names import ATTACKS
from ssmscope.attacks.offline import FUNCTION_WORDS, stopwords, textattack
from ssmscope.attacks.recipes import attack_of, protect, recipe
from ssmscope.errors import InputError

textattack()

from textattack.shared import AttackedText  # noqa: E402
from textattack.transformations import CompositeTransformation  # noqa: E402

from ssmscope.attacks.swaps import (  # noqa: E402
    LOOKALIKES,
    Contractions,
    Homoglyphs,
    MaskedWords,
    Numbers,
    Synonyms,
    Vectors,
    plain_words,
    word_spans,
)

ROOT = Path(__file__).resolve().parents[2]


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
        with pytest.raises(InputError, match=r"need the package textattack, .*pip install '\.\[attacks\]'"):
            textattack()
        with pytest.raises(InputError, match="textattack"):
            recipe("deepwordbug", flavour="prompt")
        assert recipe("stresstest", flavour="prompt").suffixes  # needs no search

    def test_beside_libraries_with_which_it_does_not_work(self, monkeypatch):
        def fail(installer):
            raise ImportError("cannot import name 'Gone' from 'transformers'")

        monkeypatch.delitem(sys.modules, "textattack")
        monkeypatch.setattr(offline, "_import_without_installing", fail)
        with pytest.raises(
            InputError, match=r"cannot be imported \(cannot import name 'Gone' .*pip install '\.\[attacks"
        ):
            textattack()


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
    def test_the_placeholder_itself(self):
        text = "Judge the content, which is content: {content} and content"
        assert modifiable(text, []) == "Judge the content which is content and content".split()
        assert modifiable("{content}", []) == []
        assert modifiable("content {content}content", []) == ["content", "content"]
        assert modifiable("the content", [], None) == ["the", "content"]

    def test_every_occurrence_of_it(self):
        assert modifiable("{content} or {content} content", []) == ["or", "content"]

    @pytest.mark.parametrize(
        "written",
        [
            "'positive'",
            '"Positive"',
            "POSITIVE",
            "(positive).",
            "positive/",
            "`positive`",
            "positive's",
            "non-positive",
        ],
    )
    def test_labels_in_every_guise(self, written):
        text = f"Say {written} or 'negative': {{content}}"
        assert modifiable(text, ["positive", "negative"]) == ["Say", "or"]

    def test_labels_of_several_words(self):
        for label in ("not_entailment", "not entailment", "not-entailment"):
            text = "Not_entailment, not entailment, 'not-entailment' or entailments? {content}"
            assert modifiable(text, [label]) == ["or", "entailments"]

    def test_a_part_of_a_word_is_no_label(self):
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

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            (
                ("textfooler", "prompt"),
                "textfooler swaps words for their neighbours, by word vectors: give embeddings=…",
            ),
            (("bertattack", "words"), "bertattack asks a masked language model for words: give masked_lm=…"),
        ],
    )
    def test_what_is_refused(self, given, says):
        with pytest.raises(InputError, match=says) as caught:
            recipe(given[0], flavour=given[1])
        assert "\n" not in str(caught.value)

    def test_what_is_left_out_is_said(self):
        found = recipe("textbugger", flavour="prompt")
        assert [part.partition(":")[0] for part in found.left_out] == [
            "5 nearest neighbours of a word",
            "sentence similarity ≥ 0.8 (angular)",
        ]
        assert not any("similarity" in part or "neighbours" in part for part in found.ran)
        assert len(found.transformation.transformations) == 4 and len(found.constraints) == 2
        assert recipe("deepwordbug", flavour="words").left_out == ()

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

    def test_flavours_differ_in_their_limits(self, vectors, bert):
        of = dict(embeddings=vectors, masked_lm=bert, encoder=bert)
        limits = {}
        for flavour, name in itertools.product(("prompt", "words"), ("textfooler", "bertattack", "textbugger")):
            found = recipe(name, flavour=flavour, **of)
            by_kind = {type(part).__name__: part for part in found.constraints}
            similar = by_kind["Similarity"]
            own = [similar.threshold, similar.metric]
            if name == "textfooler":
                own.append(by_kind["WordEmbeddingDistance"].min_cos_sim)
                assert similar.window_size == 15 and similar.skip_text_shorter_than_window
            if name == "bertattack":
                own.append(by_kind["MaxWordsPerturbed"].max_percent)
                assert found.search.wir_method == "unk"
            else:
                assert found.search.wir_method == "delete"
            limits[flavour, name] = own
        assert limits == {
            ("prompt", "textfooler"): [0.840845057, "angular", 0.6],
            ("words", "textfooler"): [0.840845057, "angular", 0.5],
            ("prompt", "bertattack"): [0.8, "cosine", 1.0],
            ("words", "bertattack"): [0.2, "cosine", 0.4],
            ("prompt", "textbugger"): [0.8, "angular"],
            ("words", "textbugger"): [0.8, "angular"],
        }

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

    def test_synonyms(self, tmp_path):
        swap = Synonyms({"film": ("movie", "film", "picture", "movie")})
        assert swap._get_replacement_words("film") == ["movie", "picture"]
        assert swap._get_replacement_words("Film") == ["Movie", "Picture"] and swap._get_replacement_words("x") == []

    def test_contractions_stand_anywhere(self):
        text = AttackedText("good it is, and they are here")
        whole = Contractions()(text)
        assert [each.text for each in whole] == ["good it's, and they are here", "good it is, and they're here"]
        behind = Contractions()(text, indices_to_modify=range(3, 6))
        assert [each.text for each in behind] == ["good it is, and they're here"]
        assert Contractions()(text, indices_to_modify=[1, 5]) == []

    def test_contractions_come_in_the_order_of_the_text(self):
        text = AttackedText("so it is a long way to go they are here")
        found = Contractions()._get_transformations(text, {8, 9, 1, 2})  # a set that lists 8 before 1
        assert [each.text for each in found] == [
            "so it's a long way to go they are here",
            "so it is a long way to go they're here",
        ]

    def test_numbers_that_cannot_be_changed_stay(self):
        for text in ("² times", "99999999999999999999 times", "zero", "someone"):
            assert Numbers()(AttackedText(text)) == []
        found = Numbers()(AttackedText("12 films"))
        assert found and all(each.text.endswith(" films") and each.words[0].isdigit() for each in found)
        assert not Numbers().deterministic

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
        with pytest.raises(InputError, match="give synonyms=…, a .json or .csv file, or install NLTK's wordnet"):
            recipe("pwws", flavour="words")


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

    def test_neighbours_are_the_nearest_by_cosine(self, vectors):
        found = Vectors(resources.load_vectors(vectors))
        unit = found.vectors.unit
        for row, top in itertools.product(range(6), (1, 3, 5, 50)):
            order = sorted((other for other in range(6) if other != row), key=lambda o: -float(unit[row] @ unit[o]))
            assert found.nearest_neighbours(row, top) == order[:top]
        assert found.get_cos_sim("good", "bad") == pytest.approx((-1 + 0.01) / 1.01)
        assert found.get_mse_dist("good", "film") == pytest.approx(2)
        assert found["nothing"] is None and found["film"].tolist() == [0, 0, 1]

    def test_textfooler_swaps_and_limits(self, vectors):
        found = recipe("textfooler", flavour="words", embeddings=vectors)
        text = AttackedText("A Good film")
        swapped = {each.words[1] for each in found.transformation(text, indices_to_modify=[1])}
        assert swapped == {"Great", "Fine", "Bad", "Awful", "Film"}
        limit = next(part for part in found.constraints if type(part).__name__ == "WordEmbeddingDistance")
        kept = [each.words[1] for each in found.transformation(text, indices_to_modify=[1]) if limit(each, text)]
        assert kept == ["Great", "Fine"]
        assert any("6 vectors" in part for part in found.ran)

    def test_one_word_has_no_neighbour(self, tmp_path):
        (tmp_path / "one.txt").write_text("alone 1 2\n")
        assert Vectors(resources.load_vectors(tmp_path / "one.txt")).nearest_neighbours(0, 5) == []

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

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("a 1 2\nb 1\n", "line 2 of .* has 1 numbers after its word, not 2 as before it"),
            ("a\n", "line 1 of .* has 0 numbers after its word, not at least 1"),
            ("a 1 x\n", "line 1 of .* holds something other than numbers"),
            ("a nan 1\n", "holds vectors that are not finite"),
            ("\n", "holds no word vector"),
        ],
    )
    def test_broken_files(self, tmp_path, content, says):
        (tmp_path / "v.txt").write_text(content)
        with pytest.raises(InputError, match=says):
            resources.load_vectors(tmp_path / "v.txt")

    def test_other_files(self, tmp_path):
        with pytest.raises(InputError, match="there is no file .* of word vectors"):
            resources.load_vectors(tmp_path / "none.txt")
        (tmp_path / "v.npz").write_bytes(b"PK")
        np.savez(tmp_path / "w.npz", words=np.array(WORDS), vectors=np.ones((5, 2)))
        for name in ("v.npz", "w.npz"):
            with pytest.raises(InputError, match="an .npz needs the arrays 'words'"):
                resources.load_vectors(tmp_path / name)
        (tmp_path / "l.txt").write_bytes(b"caf\xe9 1 2\n")
        with pytest.raises(InputError, match="is not UTF-8 text"):
            resources.load_vectors(tmp_path / "l.txt")


class TestSynonymFiles:
    def test_both_forms(self, tmp_path):
        (tmp_path / "s.json").write_text(json.dumps({"Film": ["movie", "picture"], "good": ["fine"]}))
        (tmp_path / "s.csv").write_text("word,synonym\nfilm,movie\nFilm,picture\ngood,fine\n")
        for name in ("s.json", "s.csv"):
            expected = {"film": ("movie", "picture"), "good": ("fine",)}
            assert resources.load_synonyms(tmp_path / name) == expected
            found = recipe("pwws", flavour="words", synonyms=tmp_path / name)
            assert any("2 words of" in part for part in found.ran) and "entities" in found.left_out[0]

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("s.json", "[1]"),
            ("s.json", "{"),
            ("s.json", '{"a": "b"}'),
            ("s.csv", "a,b,c"),
            ("s.csv", "a"),
            ("s.txt", "a,b"),
        ],
    )
    def test_broken_files(self, tmp_path, name, content):
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match="is not a file of synonyms; allowed are a .json"):
            resources.load_synonyms(tmp_path / name)

    def test_empty(self, tmp_path):
        (tmp_path / "s.json").write_text("{}")
        with pytest.raises(InputError, match="holds no synonym"):
            resources.load_synonyms(tmp_path / "s.json")


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


class TestMaskedWords:
    def test_one_token(self, bert):
        masked = resources.MaskedLM(bert)
        text = AttackedText("a good film")
        swap = MaskedWords(masked, candidates=48)  # more than there are
        found = [each.words[1] for each in swap(text, indices_to_modify=[1])]
        ids = masked.tokenizer("a good film", return_tensors="pt")
        logits = masked.module(**ids).logits[0, 2].detach()
        special = set(masked.tokenizer.all_special_ids)
        ranked = [i for i in logits.argsort(descending=True).tolist() if i not in special]
        words = masked.tokenizer.convert_ids_to_tokens(ranked)
        assert found == [w for w in words if not w.startswith("##") and w != "good" and w.isalnum()]
        assert 10 < len(found) < len(words)

    def test_several_tokens_are_ranked_as_if_all_were_listed(self, bert):
        masked = resources.MaskedLM(bert)
        text = "a goodsing film"  # good ##s ##ing
        read = masked.read(text)
        places = read.places(2, 10)
        assert [masked.tokenizer.convert_ids_to_tokens(read.ids[p]) for p in places] == ["good", "##s", "##ing"]
        number = 5
        tops = [read.log_probabilities[place].topk(number) for place in places]
        options = [list(zip(top.values.tolist(), top.indices.tolist())) for top in tops]
        every = sorted(itertools.product(*options), key=lambda c: math.exp(-np.mean([value for value, _ in c])))
        expected = [masked.word([token for _, token in combination]) for combination in every[:number]]
        found = MaskedWords(masked, candidates=number)._words(read.log_probabilities[places], [0] * 3)
        assert found == [word for word in dict.fromkeys(expected) if any(c.isalnum() for c in word)]

    def test_words_are_replaced_in_the_order_of_the_text(self, bert):
        swap, text = MaskedWords(resources.MaskedLM(bert), candidates=4), AttackedText("a film " * 5)
        found = swap._get_transformations(text, {9, 8, 1})
        places = [next(i for i, pair in enumerate(zip(each.words, text.words)) if len(set(pair)) > 1) for each in found]
        assert places == sorted(places) and len(places) > 1

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
        with pytest.raises(InputError, match="masked_lm .* is not a masked language model: it has no weights for cls"):
            resources.MaskedLM(tmp_path)
        for load, option in ((resources.MaskedLM, "masked_lm"), (resources.Encoder, "encoder")):
            with pytest.raises(InputError, match=f"{option} .*nowhere.* could not be loaded") as caught:
                load(tmp_path / "nowhere")
            assert "\n" not in str(caught.value)


class TestEncoder:
    def test_mean_over_real_tokens(self, bert):
        encoder = resources.Encoder(bert)
        texts = ["a good film", "film", "bad film a good"]
        together = encoder(texts)
        for row, text in enumerate(texts):
            hidden = encoder.module(**encoder.tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            assert together[row].tolist() == pytest.approx(hidden.mean(0).tolist(), abs=1e-5)
        assert encoder([]).shape == (0, 16)

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
