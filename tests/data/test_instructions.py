"""Tasks as prompts: what every row holds, which prompts are kept out of training, and what is refused."""

from collections import Counter

import pytest
from mixture import CUES, SIZES, write_mixture
from refusals import refuses
from ssmscope.data.prompts import TASK_PROMPTS, content_of
from ssmscope.data.text import load_text, text_data
from ssmscope.errors import InputError
from ssmscope.zoo.documents import word_tokenizer
from ssmscope.zoo.instructions import (
    TASKS,
    UNSEEN_TEMPLATES,
    chosen_tasks,
    instruction_data,
    label_tokens,
    load_mixture,
    roles,
    splits_of,
    spoken,
    template_numbers,
)
from ssmscope.zoo.tokenizers import train_byte_pairs

PARTS = ("train", "validation", "test", "unseen")
folder = pytest.fixture(scope="module")(lambda tmp_path_factory: write_mixture(tmp_path_factory.mktemp("data")))


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.setenv("SSMSCOPE_DATA", str(folder))


parts = pytest.fixture(lambda: load_mixture())


class TestRows:
    def test_are_the_texts_in_their_prompts_with_the_words_of_their_classes(self) -> None:
        pairs = text_data("wnli", "train", ["It fell. ||| The cup fell.", "x {y} ||| z"], [1, 0], ("no", "yes"))
        reviews = text_data("sst2", "train", ["Fine {content} film"], [1], ("negative", "positive"))
        data = instruction_data([pairs, reviews], "train")
        assert len(data) == 12 and data.first.tolist() == [0, 4, 8]
        assert data.answers == ("correct",) * 4 + ("incorrect",) * 4 + ("positive",) * 4
        assert data.tasks == ("wnli",) * 8 + ("sst2",) * 4
        assert data.templates == (0, 1, 2, 3) * 3 and data.examples == (0,) * 4 + (1,) * 4 + (2,) * 4
        assert data.texts[2] == (
            "Decide whether the second sentence follows from the first, and answer correct or incorrect.\n"
            "Sentence 1: It fell. Sentence 2: The cup fell.\nAnswer:"
        )
        assert data.texts[9] == (
            "Classify the sentiment of the following sentence as negative or positive.\n"
            "Sentence: Fine {content} film\nSentiment:"
        )
        assert spoken(data)[9] == data.texts[9] + " positive" and spoken(data)[4].endswith(" incorrect")

    def test_of_every_part_are_those_of_its_data_sets(self, parts) -> None:
        for part, splits in {
            "test": {"sst2": "test", "wnli": "validation", "snli": "test"},
            "unseen": {"sst2": "test", "wnli": "validation", "snli": "test"},
        }.items():
            data, at = parts[part], 0
            assert data.sources == splits and data.name == "instruct" and data.split == part
            for task, split in splits.items():
                given = load_text(task, split)
                numbers = template_numbers(task, unseen=part == "unseen")
                for text, label in zip(given.texts, given.labels):
                    for number in numbers:
                        template, words = TASK_PROMPTS[task].templates[number], TASK_PROMPTS[task].words
                        assert data.texts[at] == template.replace("{content}", content_of(task, text))
                        assert (data.tasks[at], data.templates[at]) == (task, number)
                        assert (data.labels[at], data.answers[at]) == (label, words[label])
                        assert CUES[task][label] in data.texts[at]
                        at += 1
            assert at == len(data)

    def test_show_a_decoded_prompt_and_answer(self, parts) -> None:
        tokenizer = train_byte_pairs(spoken(parts["train"]), vocabulary=600)
        known = label_tokens(tokenizer, TASKS)
        data = parts["test"]
        ids = tokenizer(list(data.texts))["input_ids"]
        for row, words, label, task in zip(
            ids, (known[key] for key in zip(data.tasks, data.templates)), data.labels, data.tasks
        ):
            said = tokenizer.decode([*row, words[label]])
            assert said in {text.lower() for text in spoken(data)}
            assert len(words) == len(TASK_PROMPTS[task].words)


class TestUnseenPrompts:
    def test_are_the_last_two_of_every_task(self) -> None:
        for task in TASKS:
            count = len(TASK_PROMPTS[task].templates)
            assert [*template_numbers(task, unseen=False), *template_numbers(task, unseen=True)] == [*range(count)]
            assert len(template_numbers(task, unseen=True)) == UNSEEN_TEMPLATES == 2

    def test_are_in_no_row_but_those_of_their_part(self, parts) -> None:
        for part in PARTS:
            for text, task, number in zip(parts[part].texts, parts[part].tasks, parts[part].templates):
                beginnings = [template.partition("{content}")[::2] for template in TASK_PROMPTS[task].templates]
                fits = [i for i, (a, b) in enumerate(beginnings) if text.startswith(a) and text.endswith(b)]
                assert number in fits and (number in template_numbers(task, unseen=True)) == (part == "unseen")

    def test_ask_about_the_examples_of_the_test(self, parts) -> None:
        test, unseen = parts["test"], parts["unseen"]
        assert len(test.first) == len(unseen.first) == 16 + 9 + 21
        assert [test.labels[i] for i in test.first] == [unseen.labels[i] for i in unseen.first]


class TestParts:
    @pytest.mark.parametrize(("splits", "expected"), [
        (("train", "validation", "test"), ("train", "validation", "test")),
        (("train", "validation"), ("train", None, "validation")),
        (("train", "test"), ("train", None, "test")),
        (("validation", "test"), ("validation", None, "test")),
        (("train",), ("train", None, None)),
        (("validation",), ("validation", None, None)),
    ])  # fmt: skip
    def test_the_roles_of_splits(self, splits, expected) -> None:
        assert roles("snli", splits) == expected

    def test_a_test_split_alone_is_not_trained_on(self) -> None:
        refuses("snli has no split to train on: there are test", roles, "snli", ("test",))

    def test_splits_are_those_of_the_folder_else_of_the_hub(self, monkeypatch) -> None:
        assert splits_of("snli") == ("validation", "test")
        monkeypatch.delenv("SSMSCOPE_DATA")
        assert splits_of("snli") == ("train", "validation", "test") and splits_of("wnli") == ("train", "validation")

    def test_the_epoch_is_chosen_by_a_share_where_there_is_no_split_for_it(self, parts) -> None:
        assert parts["validation"].sources == {
            "sst2": "validation",
            "wnli": "train (held out)",
            "snli": "validation (held out)",
        }
        assert parts["train"].sources == {"sst2": "train", "wnli": "train", "snli": "validation"}
        counts = {part: Counter(parts[part].tasks[i] for i in parts[part].first) for part in PARTS}
        assert counts["validation"] == {"sst2": 12, "wnli": 2, "snli": 6}
        assert counts["train"] == {"sst2": 60, "wnli": 18, "snli": 54}
        assert not {*parts["train"].texts} & {*parts["validation"].texts, *parts["test"].texts}
        assert load_mixture("wnli", held_out=0)["validation"] is None

    def test_the_most_of_a_task(self) -> None:
        few = load_mixture(examples=30)
        counts = {part: Counter(few[part].tasks[i] for i in few[part].first) for part in PARTS}
        assert counts["train"] == {"sst2": 30, "wnli": 18, "snli": 30}
        assert counts["validation"] == {"sst2": 3, "wnli": 2, "snli": 3}
        assert counts["test"] == {"sst2": 16, "wnli": 9, "snli": 21}
        half = load_mixture(examples=30, share=0.5)
        assert Counter(half["train"].tasks) == {"sst2": 60, "wnli": 36, "snli": 60}
        assert {*half["train"].texts} < {*load_mixture()["train"].texts}

    def test_the_seed_draws_what_is_held_out(self) -> None:
        one, again, other = (load_mixture("snli", seed=seed) for seed in (0, 0, 1))
        for part in ("train", "validation"):
            assert one[part].fingerprint == again[part].fingerprint != other[part].fingerprint
        assert one["test"].fingerprint == other["test"].fingerprint != one["unseen"].fingerprint

    def test_a_label_changes_the_fingerprint(self) -> None:
        made = [
            instruction_data([text_data("sst2", "train", ["a film"], [label], ("negative", "positive"))], "train")
            for label in (0, 1)
        ]
        assert made[0].texts == made[1].texts and made[0].fingerprint != made[1].fingerprint


class TestDrawn:
    def test_is_one_prompt_of_every_example_anew_for_every_seed_and_epoch(self, parts) -> None:
        data = parts["train"]
        rows = data.drawn(0, 0)
        assert [data.examples[row] for row in rows] == list(range(len(data.first)))
        data = parts["train"]
        draws = [data.drawn(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
        assert data.drawn(0, 1) == draws[1]
        assert len({tuple(draw) for draw in draws}) == 4

    def test_all_prompts_are_as_likely(self, parts) -> None:
        data = parts["train"]
        counts = Counter(data.templates[row] for epoch in range(50) for row in data.drawn(3, epoch))
        each = 50 * len(data.first) / 4
        assert counts.keys() == {0, 1, 2, 3} and all(abs(n - each) < 5 * each**0.5 for n in counts.values())


class TestLabelTokens:
    def test_are_one_each_in_the_order_of_the_classes(self, parts) -> None:
        tokenizer = train_byte_pairs(spoken(parts["train"]), vocabulary=600)
        known = label_tokens(tokenizer, TASKS)
        assert len(known) == 18
        for (task, _), ids in known.items():
            assert [tokenizer.decode([i]) for i in ids] == [f" {word}" for word in TASK_PROMPTS[task].words]

    def test_a_word_in_pieces_is_refused(self, parts) -> None:
        tokenizer = train_byte_pairs(spoken(parts["train"]), vocabulary=300)
        with pytest.raises(
            InputError, match="'negative' of sst2 is not one token after prompt 1; .* larger vocabulary"
        ):
            label_tokens(tokenizer, ["sst2"])

    def test_two_unknown_words_are_refused(self) -> None:
        refuses("two label words of snli are the same token", label_tokens, word_tokenizer(["no label word"]), ["snli"])


class TestChosenTasks:
    def test_are_all_by_default(self) -> None:
        assert chosen_tasks(None) == TASKS == ("sst2", "wnli", "snli")
        assert chosen_tasks("snli, sst2") == ("snli", "sst2")
        assert load_mixture("snli, sst2")["test"].sources == {"snli": "test", "sst2": "test"}

    @pytest.mark.parametrize(("mixture", "says"), [
        ("sst2,snil", "'snil' is not a task of the mixture; choose from sst2, wnli, snli, .* did you mean 'snli'"),
        ("imdb", "'imdb' is not a task of the mixture"),
        ("", "'' is not a task of the mixture"),
        ("sst2,wnli,sst2", "names a task twice"),
    ])  # fmt: skip
    def test_others_are_refused(self, mixture, says) -> None:
        refuses(says, load_mixture, mixture)

    def test_absent_data_are_named(self, tmp_path, monkeypatch) -> None:
        write_mixture(tmp_path, {"sst2": SIZES["sst2"]})
        monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
        refuses("wnli has no split 'train' in .*wnli; it holds no parquet file", load_mixture)
        (tmp_path / "snli").mkdir()
        (tmp_path / "sst2" / "test.parquet").rename(tmp_path / "snli" / "test.parquet")
        refuses("snli has no split to train on: there are test", load_mixture, "snli")
