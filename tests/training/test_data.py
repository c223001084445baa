"""Examples that a run trains on, chooses by and tests on."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from ssmscope.data.stories import NAMES
from ssmscope.data.text import TextData
from ssmscope.data.tokens import IGNORED
from ssmscope.errors import InputError
from ssmscope.zoo.mad import GENERATORS
from ssmscope.zoo.sequences import majority
from ssmscope.zoo.training.data import balanced, kind_of, parts_of, task_options, tasks

PARTS = ("train", "validation", "test")
NOTHING = dict.fromkeys(
    "split validation test length examples flipped unit filler vocabulary init_from every_token".split()
)


def parts(data, **given):
    options = {**NOTHING, "data": data, "kind": kind_of(data), "seed": 0, "held_out": 0.1, "share": 1.0, **given}
    return parts_of(options)


class TestKind:
    def test_of_a_known_name(self) -> None:
        known = tasks()
        assert all(kind_of(name) == kind for name, kind in known.items())
        assert {known[name] for name in GENERATORS} == {"tokens"}
        assert set(known.values()) == {"text", "pixels", "sequences", "tokens", "language", "instructions"}

    @pytest.mark.parametrize(
        ("file", "kind"), [("a.txt", "language"), ("A.TXT", "language"), ("a.csv", "text"), ("b/a.parquet", "text")]
    )
    def test_of_a_file(self, file, kind) -> None:
        assert kind_of(file) == kind_of(Path(file)) == kind

    def test_of_what_is_neither(self) -> None:
        refuses("unknown data 'majorty'; give one of sst2, .* did you mean 'majority'", kind_of, "majorty")

    def test_decides_the_options(self) -> None:
        assert set(task_options("majority")) == {"length", "examples", "flipped"}
        assert set(task_options("qa2")) == {"length", "examples", "filler", "vocabulary"}
        assert set(task_options("memorization")) == {"length", "examples", "vocabulary"}
        assert set(task_options("noisy-recall")) == {"length", "examples", "vocabulary", "every_token"}
        assert set(task_options("mqar")) == {"length", "examples", "vocabulary", "pairs"}
        assert set(task_options("a.txt")) == {"length", "unit", "vocabulary"}
        assert set(task_options("instruct")) == {"mixture", "examples", "vocabulary"}
        assert not task_options("sst2") and not task_options("cifar10")


class TestParts:
    def test_mqar_has_the_pairs_asked_for(self) -> None:
        found, _ = parts("mqar", examples=40, length=40, vocabulary=20, pairs=5)
        assert all(((part.targets != IGNORED).sum(1) == 5).all() for part in found.values())

    @pytest.mark.parametrize("task", ["associative-recall", "noisy-recall", "fuzzy-recall"])
    def test_every_token_is_a_target_in_training_alone(self, task) -> None:
        (values, _), (every, _) = (parts(task, examples=40, length=32, every_token=each) for each in (None, True))
        train = every["train"]
        assert np.array_equal(train.ids, values["train"].ids)
        assert np.array_equal(train.targets[:, :-1], train.ids[:, 1:]) and (train.targets[:, -1] == IGNORED).all()
        for part in ("validation", "test"):
            assert every[part].fingerprint == values[part].fingerprint

    def test_validation_is_drawn_from_training(self) -> None:
        (whole, _), (found, _) = (parts("majority", examples=50, length=40, held_out=h) for h in (0.0, 0.2))
        assert whole["validation"] is None and len(whole["train"]) == 50
        assert [len(found[part]) for part in PARTS] == [40, 10, 50]
        assert found["validation"].split == "train (held out)"
        rows = sorted(map(tuple, np.concatenate([found["train"].ids, found["validation"].ids]).tolist()))
        assert rows == sorted(map(tuple, whole["train"].ids.tolist()))
        assert np.array_equal(found["test"].ids, whole["test"].ids)

    def test_the_seed_draws_data_and_validation(self) -> None:
        options = {"examples": 50, "length": 40, "held_out": 0.2}
        one, again, other = (parts("majority", seed=seed, **options)[0] for seed in (0, 0, 1))
        for part in PARTS:
            assert one[part].fingerprint == again[part].fingerprint != other[part].fingerprint

    @pytest.mark.parametrize("held_out", [0.001, 0.99])
    def test_no_part_is_empty(self, held_out) -> None:
        with pytest.raises(InputError, match=f"held_out {held_out} of 20 examples leaves one of two parts empty"):
            parts("majority", examples=20, held_out=held_out)

    def test_share_leaves_validation_and_test_whole(self) -> None:
        found, _ = parts("majority", examples=200, held_out=0.1, share=0.5)
        assert [len(found[part]) for part in PARTS] == [90, 20, 200]
        assert Counter(found["train"].labels.tolist()) == {0: 45, 1: 45}

    def test_of_questions_have_one_tokenizer(self) -> None:
        found, tokenizer = parts("qa1", examples=40, length=32)
        assert [len(found[part]) for part in PARTS] == [40, 4, 8]
        for part in PARTS:
            assert found[part].tokens == tuple(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
            assert ((found[part].targets != IGNORED).sum(1) == 1).all()

    def test_mixed_questions_have_every_task_at_every_length(self) -> None:
        found, tokenizer = parts("babi", examples=100, length=80)
        train = found["train"]
        assert train.task_names == ("qa1", "qa2", "qa3", "qa4", "qa5")
        assert np.bincount(train.tasks).tolist() == [20] * 5
        assert [len(found[part]) for part in PARTS] == [100, 25, 25]
        asked = train.targets != IGNORED
        assert (asked.sum(1) == 1).all() and (asked.argmax(1) == train.lengths - 1).all()
        by_cell = train.lengths.reshape(25, 4)  # a cell is one task and length
        longest = by_cell[4::5].mean()  # questions have 3 to 6 words
        assert 75 <= longest <= 90 and by_cell[0::5].mean() < 65
        kinds = {"qa1": "place", "qa4": "place"}
        for target, task in zip(train.targets[asked], train.tasks):
            answer = tokenizer.convert_ids_to_tokens(int(target))
            allowed = (
                NAMES[kinds[train.task_names[task]]] if train.task_names[task] in kinds else sum(NAMES.values(), ())
            )
            assert answer in allowed
        other, _ = parts("babi", examples=100, length=80, seed=1)
        assert other["train"].fingerprint != train.fingerprint

    def test_mixed_questions_need_one_of_each(self) -> None:
        refuses("examples is 20; babi needs at least 25", parts, "babi", examples=20)

    def test_of_generated_tokens_are_written_by_their_symbols(self) -> None:
        found, tokenizer = parts("selective-copying", length=40, vocabulary=6, examples=10)
        row = found["train"].ids[0]
        text = " ".join(found["train"].tokens[i] for i in row)
        assert tokenizer(text)["input_ids"] == row.tolist()

    def test_of_pixels_have_no_tokenizer(self) -> None:
        pytest.importorskip("sklearn")
        found, tokenizer = parts("digits", held_out=0.05)
        assert tokenizer is None and [len(found[part]) for part in PARTS] == [1366, 72, 359]


class TestLanguage:
    @pytest.fixture
    def files(self, tmp_path: Path) -> dict[str, Path]:
        made = {}
        for part, words in {"train": "a b b c c c", "other": "c a z"}.items():
            made[part] = tmp_path / f"{part}.txt"
            made[part].write_text(f"{words}\n" * 20)
        return made

    def test_words_are_those_of_the_training_text_and_its_special_tokens(self, files) -> None:
        found, tokenizer = parts(files["train"], test=files["other"], length=10)
        assert found["train"].tokens == ("<unk>", "<eos>", "c", "b", "a")
        assert found["test"].ids[0, :4].tolist() == [2, 4, 0, 1]  # z is unknown
        assert (found["test"].name, found["test"].split) == ("other", "test")
        assert len(found["validation"]) == round(0.1 * 14)
        found, _ = parts(files["train"], vocabulary=3, length=10)
        assert found["train"].tokens == ("<unk>", "<eos>", "c")

    def test_bytes(self, files) -> None:
        found, tokenizer = parts(files["train"], unit="byte", length=12, validation=files["other"])
        assert len(tokenizer) == 256
        assert bytes(found["train"].ids[0].tolist()) == b"a b b c c c\n"
        assert bytes(found["train"].targets[0].tolist()) == b" b b c c c\na"
        assert bytes(found["validation"].ids[0].tolist()) == b"c a z\nc a z\n" and found["test"] is None

    def test_every_token_is_asked_once(self, files) -> None:
        found, _ = parts(files["train"], unit="byte", length=7, held_out=0.25)
        asked = sum(int((found[part].targets != IGNORED).sum()) for part in ("train", "validation"))
        assert asked == 20 * len("a b b c c c\n") - 1


class TestBalanced:
    @pytest.mark.parametrize("share", [0.1, 0.3])
    def test_has_as_many_of_every_class(self, share) -> None:
        data, _ = majority(40, examples=200, seed=3)
        found = balanced(data, share, seed=1)
        assert Counter(found.labels.tolist()) == {0: round(100 * share), 1: round(100 * share)}
        known = {tuple(ids): label for ids, label in zip(data.ids.tolist(), data.labels.tolist())}
        assert all(known[tuple(ids)] == label for ids, label in zip(found.ids.tolist(), found.labels.tolist()))

    def test_of_texts(self) -> None:
        texts = tuple(f"text {i}" for i in range(40))
        data = TextData("file", "all", texts, tuple(i % 4 // 3 for i in range(40)), ("no", "yes"), "0" * 16)
        found = balanced(data, 0.2, seed=0)
        assert Counter(found.labels) == {0: 4, 1: 4}
        assert all(label == data.labels[texts.index(text)] for text, label in zip(found.texts, found.labels))

    def test_of_tokens_is_any_share_but_no_more_than_a_class_has(self) -> None:
        train, _ = GENERATORS["associative-recall"](length=8, vocabulary=4, train_examples=50, test_examples=1)
        assert len(balanced(train, 0.3)) == 15 and len(balanced(train, 0.001)) == 1
        assert balanced(train, 0.3, seed=1).fingerprint != balanced(train, 0.3, seed=2).fingerprint
        data, _ = majority(9, examples=200, seed=3)
        rare = data.take(np.concatenate([np.flatnonzero(data.labels == 0), np.flatnonzero(data.labels == 1)[:3]]))
        refuses("a balanced share of 0.5 needs .* of class 'more ones', which has 3", balanced, rare, 0.5)
