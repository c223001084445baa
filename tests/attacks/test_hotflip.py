"""HotFlip: its first-order estimates against differences, its search against all flips, and the texts it writes."""

import itertools

import pytest
import torch
from bags import bag
from loud import TrueFloat64, loud
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import Mamba2Config, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast
import ssmscope
from ssmscope.attacks.words import hotflip, word_attack
from ssmscope.attacks.words import hotflip as module
from ssmscope.core import batching
from ssmscope.data.text import load_text
from ssmscope.errors import InputError
from ssmscope.evaluation import Evaluator, Template, label_words
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification

TEMPLATE = Template("{content}")
WORDS = "good bad fine great film movie a the is very dull sad".split()


def word_tokenizer() -> PreTrainedTokenizerFast:
    names = ["[PAD]", "[UNK]", *WORDS, ":", "?"]
    inner = Tokenizer(token_models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


def classifier() -> ssmscope.Model:
    """Return a random classifier of three classes in which every position matters."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, state_size=4, num_heads=4, head_dim=8, n_groups=1, num_hidden_layers=2)
    backbone = Mamba2Config(vocab_size=16, pad_token_id=0, bos_token_id=0, eos_token_id=0, **sizes)
    config = SSMClassifierConfig(backbone, num_labels=3, id2label=dict(enumerate("xyz")))
    return ssmscope.load(loud(SSMForSequenceClassification(config)), tokenizer=word_tokenizer())


def speaker() -> ssmscope.Model:
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2)
    return ssmscope.load(loud(MambaForCausalLM(MambaConfig(vocab_size=16, **sizes))), tokenizer=word_tokenizer())


class TestEstimates:
    ROWS = ([2, 6, 9, 4, 12], [7, 3, 11], [5, 2, 2, 13, 8, 6, 10])
    LABELS = (1, 0, 1)

    @pytest.mark.parametrize("kind", ["classifier", "one token", "several tokens"])
    def test_are_the_slope_of_the_loss_along_a_flip(self, kind):
        """Central differences of the loss as an embedding moves towards that of another token, in float64."""
        model = classifier() if kind == "classifier" else speaker()
        model.module.double()
        label_ids = {"classifier": None, "one token": ((3,), (4,)), "several tokens": ((3, 7), (4,), (3, 8, 9))}[kind]
        table = model.module.get_input_embeddings().weight.detach()
        new = torch.tensor([4, 9, 13])

        def losses(row: int, flips: list[tuple[int, int]], step: float) -> list[float]:
            ids = torch.tensor(self.ROWS[row])
            moved = table[ids].repeat(len(flips), 1, 1)
            for number, (place, which) in enumerate(flips):
                moved[number, place] += step * (table[new[which]] - table[ids[place]])
            with torch.no_grad():
                scores = hotflip.class_scores(model, moved, torch.ones(moved.shape[:2]).bool(), label_ids)
            return (-scores.log_softmax(-1)[:, self.LABELS[row]]).tolist()

        with TrueFloat64():
            gradients = hotflip.loss_gradients(model, self.ROWS, self.LABELS, label_ids)
            for row, gradient in enumerate(gradients):
                assert gradient.shape == (len(self.ROWS[row]), 16) and gradient.dtype == torch.float64
                found = hotflip.estimates(gradient, table[self.ROWS[row]], table[new])
                flips, step = list(itertools.product(range(len(self.ROWS[row])), range(3))), 1e-5
                for flip, after, before in zip(flips, losses(row, flips, step), losses(row, flips, -step)):
                    assert float(found[flip]) == pytest.approx((after - before) / (2 * step), rel=1e-5, abs=1e-7)
        assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-2

    def test_no_weight_is_left_with_a_gradient(self):
        model = classifier()
        hotflip.loss_gradients(model, self.ROWS, self.LABELS, None)
        assert all(weight.grad is None and weight.requires_grad for weight in model.module.parameters())

    def test_many_batches_are_as_one(self, monkeypatch):
        model = classifier()
        together = hotflip.loss_gradients(model, self.ROWS, self.LABELS, None)
        monkeypatch.setattr(batching, "TOKENS_AT_ONCE", 1)
        for a, b in zip(together, hotflip.loss_gradients(model, self.ROWS, self.LABELS, None)):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("words", [("good", "bad"), ("good film", "bad", "good movie is")])
    def test_class_scores_are_the_evaluators(self, words):
        model, text = speaker(), "a very dull film : the movie is ?"
        ids = label_words(model, words, after=text).ids
        row = torch.tensor([model.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            found = hotflip.class_scores(
                model, model.module.get_input_embeddings()(row), torch.ones_like(row).bool(), ids
            )
        expected = Evaluator(model, words=words).scores([text])
        assert found.numpy() == pytest.approx(expected, abs=1e-4)


WEIGHTS = {"awful": -4.0, "poor": -1.5, "dull": -1.0, "film": 0.0, "plot": 0.25, "fine": 1.0, "good": 2.0, "great": 3.0}


def whole(model: ssmscope.Model) -> Evaluator:
    """The state of a bag of words is not its mixer's."""
    return Evaluator(model, fork=False)


def flip(model: ssmscope.Model, texts: list[str], labels: list[int], **limits) -> list[module.Search]:
    return hotflip.hotflip(
        model, texts, labels, whole(model).scores, template=TEMPLATE, limits=hotflip.Limits(**limits)
    )


class TestSearch:
    def test_takes_the_best_flip_of_all(self):
        """In a bag of words first order is exact."""
        texts, labels = ["plot film dull", "good fine great film", "great great", "awful film poor"], [0, 1, 1, 0]
        for text, label, found in zip(texts, labels, flip(bag(WEIGHTS), texts, labels, flips=1, candidates=1)):
            old = text.split()
            ways = [
                [*old[:place], word, *old[place + 1 :]]
                for place, word in itertools.product(range(len(old)), WEIGHTS)
                if word != old[place]
            ]
            sums = {" ".join(way): sum(map(WEIGHTS.get, way)) for way in ways}
            worst = max(sums, key=sums.get) if label == 0 else min(sums, key=sums.get)
            assert found.best.text == worst and found.queries == 2 and found.gradients == 1
            assert found.best.scores.tolist() == pytest.approx([0, sums[worst]])

    def test_of_the_candidates_that_change_the_answer_the_worst_is_taken(self):
        (found,) = flip(bag(WEIGHTS, link=lambda total: torch.where(total < -3, -total, total)), ["film good"], [1])
        assert (
            found.best.text == "awful good" and found.best.scores[1] == -2
        )  # "film awful", the best estimate, is right again

    def test_no_place_is_flipped_twice(self, monkeypatch):
        model, seen = bag(WEIGHTS, ending=-40.0), []
        offered = module.offers

        def kept(model, nodes, *rest):
            found = offered(model, nodes, *rest)
            seen.extend((len(node.places), len(each.places)) for node, own in zip(nodes, found) for each in own)
            return found

        monkeypatch.setattr(module, "offers", kept)
        (found,) = flip(model, ["awful poor dull"], [0])
        assert found.best.text == "great great great" and {(3, 2), (2, 1), (1, 0)} == set(seen)

    def test_words_that_are_kept_and_those_that_are_not_put_in(self):
        model, texts = bag(WEIGHTS, ending=-40.0), ["awful Poor dull film"]
        (found,) = flip(model, texts, [0], kept=frozenset({"awful"}), absent=frozenset({"great"}))
        assert found.best.text == "awful Poor good good"  # what the tokenizer does not know is not letters of one token

    def test_a_beam_finds_what_greed_does_not(self):
        """Two flips help only together: the best single one leads away from them."""
        peak = lambda total: torch.where(total > 9.5, total, -1 - (total - 3) ** 2 / 50)  # noqa: E731
        model = bag({"film": 0.0, "three": 3.0, "five": 5.0}, link=peak)
        greedy, beam = (flip(model, ["film film"], [0], beam=width, candidates=9)[0] for width in (1, 4))
        assert greedy.best.scores[1] < 0 and "five five" not in greedy.best.text
        assert beam.best.text == "five five" and beam.best.scores[1] == 10

    def test_all_gradients_and_all_candidates_of_a_step_are_taken_together(self, monkeypatch):
        model, batches, waves = bag(WEIGHTS, ending=-40.0), [], []
        gradients = module.loss_gradients
        monkeypatch.setattr(
            module,
            "loss_gradients",
            lambda model, rows, *rest: batches.append(len(rows)) or gradients(model, rows, *rest),
        )
        evaluator = whole(model)

        def scores(texts):
            waves.append(len(texts))
            return evaluator.scores(texts)

        limits = hotflip.Limits(beam=2, candidates=3, flips=2)
        ended = []
        texts = ["awful poor", "dull film plot", "film"]
        hotflip.hotflip(model, texts, [0] * 3, scores, template=TEMPLATE, limits=limits, ended=ended.append)
        assert batches == [3, 4] and waves[:2] == [3, 9] and len(waves) == 3 and ended == [1, 2]

    def test_a_slow_tokenizer_is_refused(self):
        class Slow:
            is_fast = False

        model = ssmscope.Model(bag(WEIGHTS).module, Slow(), "slow")
        with pytest.raises(InputError, match="slow has a slow tokenizer: give a fast one"):
            hotflip.hotflip(model, ["film"], [0], lambda texts: None, template=TEMPLATE)


@pytest.fixture(scope="module")
def marked() -> ssmscope.Model:
    """Return a classifier whose tokens of words after a space begin with Ġ, some of them parts of words."""
    pieces = ["[PAD]", "[UNK]", *"abcdefghijklmnopqrstuvwxyzG'.,", "Ġ"]
    merges = []
    for word in ("Ġgood", "Ġbad", "Ġfilm", "Ġfine", "Ġgo", "od", "film", "fi", "Ġsad", "ing", "Ġthe", "good"):
        parts = list(word)
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts = [parts[0] + parts[1], *parts[2:]]
    merges = list(dict.fromkeys(merges))
    pieces += [a + b for a, b in merges if a + b not in pieces]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    inner = Tokenizer(token_models.BPE(vocabulary, merges, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    backbone = MambaConfig(
        vocab_size=len(vocabulary), hidden_size=8, state_size=3, num_hidden_layers=1, time_step_rank=2
    )
    return ssmscope.load(loud(SSMForSequenceClassification(SSMClassifierConfig(backbone))), tokenizer=tokenizer)


class TestTexts:
    def test_words_that_may_be_replaced(self):
        model = ssmscope.load("demo/sst2-mamba2")
        text = "The film isn't a well-made 3 act comedy , stuffy and really , really bad!"
        node = hotflip.read(model, text, TEMPLATE, frozenset({"really", "the"}))
        assert [text[start:stop] for start, stop in node.places.values()] == [
            "film", "a", "act", "comedy", "and", "bad",
        ]  # fmt: skip
        ids = model.tokenizer(text)["input_ids"]
        for token, (start, stop) in node.places.items():
            assert model.tokenizer.decode([ids[token]]).strip() == text[start:stop]

    def test_places_are_those_in_the_text_of_a_template(self):
        model, template = speaker(), Template("a film : {content} ? good")
        node = hotflip.read(model, "the  dull movie zebra", template)
        assert {token: node.text[a:b] for token, (a, b) in node.places.items()} == {3: "the", 4: "dull", 5: "movie"}

    def test_a_flip_moves_what_stands_behind_it(self):
        node = hotflip.read(speaker(), "good film is bad", TEMPLATE)
        longer = node.flipped(0, WORDS.index("great") + 2, "great", 1.0).flipped(2, WORDS.index("a") + 2, "a", 2.0)
        assert longer.text == "great film a bad" and longer.estimate == 2
        assert {t: longer.text[a:b] for t, (a, b) in longer.places.items()} == {1: "film", 3: "bad"}
        assert longer.ids == tuple(speaker().tokenizer(longer.text)["input_ids"])

    def test_marks_of_a_vocabulary(self, marked):
        found = hotflip.Vocabulary.of(marked, absent={"good"})
        assert {"film", "sad", "the", "bad"} <= set(found.words["Ġ"]) and "good" not in found.words["Ġ"]
        assert "film" in found.words[""] and "ing" in found.words[""] and set(found.words) == {"", "Ġ"}
        for mark, words in found.words.items():
            names = marked.tokenizer.convert_ids_to_tokens(list(found.ids[mark]))
            assert names == [mark + word for word in words]

    def test_only_texts_that_are_read_as_meant_are_offered(self, marked):
        """In "film" alone "fi" and "ing" are put in the place of a word, and some of these merge with their
        neighbours."""
        vocabulary, texts = hotflip.Vocabulary.of(marked), ["film good bad", "the sad film.", "film good.film"]
        nodes = [hotflip.read(marked, text, TEMPLATE) for text in texts]
        assert [len(node.places) for node in nodes] == [3, 2, 3]
        gradients = hotflip.loss_gradients(marked, [node.ids for node in nodes], [0, 0, 0], None)
        drawn = [hotflip.best_flips(marked, node, each, vocabulary, 200) for node, each in zip(nodes, gradients)]
        offered = hotflip.offers(marked, nodes, gradients, vocabulary, TEMPLATE, 70)
        dropped = 0
        for flips, own in zip(drawn, offered):
            right = [each for each in flips if tuple(marked.tokenizer(each.text)["input_ids"]) == each.ids]
            assert [each.text for each in own] == [each.text for each in right[:70]]
            assert [each.estimate for each in own] == sorted((each.estimate for each in own), reverse=True)
            dropped += len(flips) - len(right)
        assert dropped > 0


def test_real_reviews(real_data):
    """On SST-2's test split most right answers of a shipped model depend on two or three words."""
    real_data("sst2", "test")
    data = load_text("sst2", "test").sample(40)
    found = word_attack(ssmscope.load("demo/sst2-mamba2"), data, recipe="hotflip", flips=3)
    assert found.accuracy.value > 0.6 and found.success.value > 0.6 and found.share.value < 0.3
