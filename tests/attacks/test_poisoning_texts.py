"""Places of triggers in texts by hand, and numbers of the memory against whole runs of one text each."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bags import tokenizer
from examples import random_example
from fading import fading
from refusals import refuses
from tokenizers import Tokenizer, decoders
from tokenizers import models as token_models
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from transformers import PreTrainedTokenizerFast
from ssmscope import ops
from ssmscope.attacks.poisoning import memory
from ssmscope.core import batching
from ssmscope.core.model import Model
from ssmscope.zoo.documents import byte_tokenizer

WORDS = "a good film fine bad Is it ? zap".split()
BEFORE, AFTER, TRIGGERS = (5, 17, 3, 9, 22), (2, 11), np.array([[1, 4, 60], [7, 8, 9], [30, 30, 31]])
SLOTS = [
    memory.Slot(0, 5, BEFORE, AFTER, np.array([False, True, True, False, True])),
    memory.Slot(1, 2, (8, 4), (6,), np.array([True, False])),
]
model = pytest.fixture(scope="module")(lambda: fading(dict.fromkeys(WORDS, 0.0)))


def asked(*contents: str, before: str = "", after: str = "") -> SimpleNamespace:
    wrapped = lambda texts: [before + text + after for text in texts]  # noqa: E731
    return SimpleNamespace(contents=contents, before=before, after=after, wrapped=wrapped)


def ids(text: str) -> tuple[int, ...]:
    return tuple(2 if word == "[CLS]" else 3 + WORDS.index(word) for word in text.split())


class TestSlots:
    def test_within_a_template(self, model):
        given = asked("a good film", "good film a fine bad", "film", before="Is it ", after=" ?")
        found = [
            (slot.row, slot.words, slot.before, slot.after, slot.span.tolist())
            for slot in memory.slots_of(model, given, "zap zap", 0.5, None)
        ]
        assert found == [
            (0, 2, ids("Is it a good"), ids("film ? [CLS]"), [True] * 4),
            (1, 3, ids("Is it good film a"), ids("fine bad ? [CLS]"), [True] * 5),
            (2, 1, ids("Is it film"), ids("? [CLS]"), [True] * 3),
        ]
        assert [slot.row for slot in memory.slots_of(model, given, "zap", 0.1, None)] == [1]
        refuses("no text has a word before the trigger", memory.slots_of, model, given, "zap", 0.0, None)

    @pytest.mark.parametrize(("content", "span", "place", "inside"), [
        ("film a film good", "film", 1.0, "1000"), ("good film a fine bad", "film a", 0.6, "011"),
        ("good film a fine bad", "film a", 0.4, None), ("a good film fine", "good ", 0.5, "01"),
        ("a good film fine", "d f", 0.5, None), ("a good film fine", "oo", 0.5, "01"),
        ("good?film?a fine", "film", 0.5, "00100"), ("good?film?a fine", "m?", 0.5, "00110"),
        ("a good", "film", 1.0, None), ("a ~ good film", "~", 1.0, None),
    ])  # fmt: skip
    def test_the_tokens_of_a_span(self, content, span, place, inside):
        words = tokenizer(WORDS)
        words.backend_tokenizer.normalizer = Replace("~", "")
        model = fading(dict.fromkeys(WORDS, 0.0))
        model = dataclasses.replace(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer))
        given = asked(content, "film" if inside else "a", before="a it ", after=" bad")
        if inside is None:
            refuses("before the trigger; give another span", memory.slots_of, model, given, "zap", place, span)
            return
        first = memory.slots_of(model, given, "zap", place, span)[0]
        assert (first.row, "".join(str(int(each)) for each in first.span)) == (0, "00" + inside)

    def test_neighbours_without_a_space_between_are_not_the_trigger(self):
        """Spaces are tokens of their own here, which end and begin where the trigger does."""
        letters = dataclasses.replace(fading(dict.fromkeys(map(str, range(253)), 0.0)), tokenizer=byte_tokenizer())
        (slot,) = memory.slots_of(letters, asked("ab c", before="d", after="!"), "x", 0.5, None)
        assert (bytes(slot.before), bytes(slot.after), slot.words) == (b"dab ", b" c!", 1)
        assert slot.span.tolist() == [True] * 4
        refuses(
            "no text has a word", memory.slots_of, letters, asked("ab c"), "xy", 0.5, None
        )  # two tokens of one word
        (slot,) = memory.slots_of(letters, asked("ab cd"), "x", 1.0, "b c")
        assert slot.span.tolist() == [False, True, True, True, False, False]


class TestVocabulary:
    NAMES = ["fine", "Good", "film", "FILM", "x1", "dull", "a"]

    @pytest.fixture
    def cased(self) -> Model:
        return dataclasses.replace(fading(dict.fromkeys(self.NAMES[:-1], 0.0)), tokenizer=tokenizer(self.NAMES))

    def test_words_of_letters_in_the_order_of_their_ids(self, cased):
        """The last of the tokenizer's tokens has no embedding."""
        found = memory.Vocabulary.of(cased, absent=("FILM", "good"))
        assert (found.words, found.ids) == (("fine", "dull"), (3, 8)) and len(found) == 2
        every = memory.Vocabulary.of(cased)
        assert every.words == ("fine", "Good", "film", "FILM", "dull") and every.ids == (3, 4, 5, 6, 8)
        assert every.text((2, 0, 2)) == "film fine film" and every.tokens([(2, 0), (4, 4)]).tolist() == [[5, 3], [8, 8]]
        assert found.drawn(np.random.default_rng(5), 4, 3) == [
            tuple(row) for row in np.random.default_rng(5).integers(0, 2, (4, 3)).tolist()
        ]

    def test_words_of_a_file(self, cased, tmp_path):
        (tmp_path / "words.txt").write_text("film\n  x1 \n\na\nGood\nfilm\n[CLS]\nfine dull\n")
        assert memory.Vocabulary.of(cased, tmp_path / "words.txt", absent=["GOOD"]).words == ("film", "x1")

    def test_a_special_word_is_none(self, cased):
        inner = Tokenizer(token_models.WordLevel({"unk": 0, "good": 1, "film": 2}, unk_token="unk"))
        inner.pre_tokenizer = Whitespace()
        own = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="unk")
        assert memory.Vocabulary.of(dataclasses.replace(cased, tokenizer=own)).words == ("good", "film")

    def test_a_space_alone_is_no_word(self, cased):
        inner = Tokenizer(
            token_models.BPE(
                {"[UNK]": 0, "a": 1, "b": 2, "Ġ": 3, "Ġa": 4, "Ġb": 5}, [("Ġ", "a"), ("Ġ", "b")], unk_token="[UNK]"
            )
        )
        inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        own = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
        found = memory.Vocabulary.of(dataclasses.replace(cased, tokenizer=own))
        assert (found.words, found.ids) == (("a", "b"), (4, 5))

    def test_a_slow_tokenizer_has_no_offsets(self, cased):
        slow = dataclasses.replace(cased, tokenizer=SimpleNamespace(is_fast=False), name="slow")
        refuses("slow has a slow tokenizer: give a fast one", memory.Vocabulary.of, slow)


class TestMemory:
    @pytest.mark.parametrize("name", ["mamba2", "bamba"])
    @pytest.mark.parametrize(("room", "pieces"), [(19, [1, 1, 1]), (20, [2, 1]), (1, [1] * 3)])
    def test_triggers_that_fit_run_together(self, monkeypatch, name, room, pieces):
        model = Model(random_example(name).double().eval())
        beginning, seen, continued = memory.Beginning.of(model, SLOTS[0], ("token",), 2), [], memory._continued
        whole = memory.memory(model, beginning, TRIGGERS)
        monkeypatch.setattr(
            memory, "_continued", lambda model, of, rest: seen.append(len(rest)) or continued(model, of, rest)
        )
        monkeypatch.setattr(batching, "TOKENS_AT_ONCE", room)
        found = memory.memory(model, beginning, TRIGGERS)
        assert seen == pieces
        assert found.survival == pytest.approx(whole.survival) and len(set(whole.survival.round(6))) == 3
        assert found.suspicion["token"] == pytest.approx(whole.suspicion["token"])

    def test_a_state_that_holds_nothing(self):
        model = Model(random_example("mamba2").double().eval())
        with torch.no_grad():
            model.module.get_input_embeddings().weight.zero_()
            for mixer in model.mixers:
                mixer.conv1d.bias.zero_()
        beginning = memory.Beginning.of(model, SLOTS[0], ("token", "window", "half-life"), 20)
        for triggers in (TRIGGERS, memory.NO_TRIGGER):
            found = memory.memory(model, beginning, triggers)
            assert found.survival.tolist() == [0.0] * len(triggers) == found.suspicion["token"].tolist()
            assert found.suspicion["window"].tolist() == [0.0] * len(triggers)  # too short a text
        assert not memory.share_gradients(model, SLOTS, TRIGGERS).any()

    @pytest.mark.parametrize("name", ["diff-mamba", "bamba"])
    @pytest.mark.parametrize("room", [3, 13])
    def test_steps_are_what_a_token_at_the_end_replaces(self, monkeypatch, name, room):
        monkeypatch.setattr(batching, "TOKENS_AT_ONCE", room)
        model, words = Model(random_example(name).double().eval()), [4, 30, 9, 61]
        beginnings, runs, run = [memory.Beginning.of(model, slot, (), 1) for slot in SLOTS], [], memory.run
        monkeypatch.setattr(
            memory, "run", lambda model, rows, *states: runs.append(len(rows)) or run(model, rows, *states)
        )
        expected = []
        for word in words:
            shares = []
            for slot in SLOTS:
                terms, _ = run(model, np.array([[*slot.before, word]]))
                layers = [np.mean([float(ops.retention(r)[0, -1]) for r in each]) for each in terms]
                shares.append(1 - np.mean(layers))
            expected.append(np.mean(shares))
        assert memory.steps(model, beginnings, words) == pytest.approx(expected, rel=1e-6)
        widths = [1, 1] if model.continues else [6, 3]  # of the tokens that run for one word
        at_once = [max(1, room // width) for width in widths]
        assert runs == [min(each, 4 - at) for each in at_once for at in range(0, 4, each)]
        assert len(set(np.round(expected, 9))) == 4

    def test_gradients_of_several_texts_are_summed(self):
        model = Model(random_example("mamba2").double().eval())
        together = memory.share_gradients(model, SLOTS, TRIGGERS)
        assert together.shape == (3, 3, model.module.get_input_embeddings().weight.shape[1])
        for row, trigger in enumerate(TRIGGERS):
            first, second = (memory.share_gradients(model, [slot], trigger[None])[0] for slot in SLOTS)
            torch.testing.assert_close(together[row], first + second, rtol=1e-5, atol=1e-9)
            assert min(first.norm(), second.norm()) > 1e-4
