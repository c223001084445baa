"""Batches of texts, ids and pixels: the place of every token and number, and the refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusal
from ssmscope.core import encoding
from ssmscope.core.encoding import Batch, encode_ids, encode_values, texts_or_ids


def test_rows_of_ids_are_padded_on_the_right() -> None:
    batch = encode_ids([[7], [3, 9, 5], [2, 4]], 10)
    assert batch.input_ids.tolist() == [[7, 0, 0], [3, 9, 5], [2, 4, 0]]
    assert batch.mask.tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert batch.tokens == (("7",), ("3", "9", "5"), ("2", "4")) and batch.words == ((0,), (0, 1, 2), (0, 1))
    assert batch.lengths == [1, 3, 2] and batch.last.tolist() == [0, 2, 1]
    assert batch.values is None and batch.spelled == ()
    assert encode_ids([[0, 9]], 10, max_tokens=2).input_ids.tolist() == [[0, 9]]


@pytest.mark.parametrize(("rows", "said"), [
    ([], "no token id was given"),
    ([[1], []], "no token id was given"),
    ([[1, 2], [1, 2, 3, 4]], "row 1 has 4 tokens, more than the limit of 3: shorten or split it, or raise"),
    ([[9, 12], [11, 3]], "the given ids hold id 11, outside the model's vocabulary 0…9"),
    ([[10]], "the given ids hold id 10, outside"),
    ([[100, 3, -1]], "the given ids hold id -1, outside"),
])  # fmt: skip
def test_rows_of_ids_that_are_refused(rows: Any, said: str) -> None:
    assert (refusal(encode_ids, rows, 10, max_tokens=3) or "").startswith(said)


class TestRows:
    BATCH = Batch(
        torch.tensor([[1, 2, 3, 7], [4, 0, 0, 0], [5, 6, 0, 0]]),
        torch.tensor([[True] * 4, [True, False, False, False], [True, True, False, False]]),
        (("a", "b", "c", "g"), ("d",), ("e", "f")),
        ((0, 1, 2, 3), (0,), (0, None)),
    )

    def test_are_cut_to_the_longest(self) -> None:
        found = self.BATCH.rows([2, 1])
        assert found.input_ids.tolist() == [[5, 6], [4, 0]] and found.mask.tolist() == [[True, True], [True, False]]
        assert found.tokens == (("e", "f"), ("d",)) and found.words == ((0, None), (0,)) and found.spelled == ()
        assert self.BATCH.rows([1]).input_ids.tolist() == [[4]]

    def test_of_all_are_the_batch_itself(self) -> None:
        assert self.BATCH.rows([0, 1, 2]) is self.BATCH and self.BATCH.rows(range(3)) is self.BATCH
        for chosen in ([0, 1], [1, 0, 2], [0, 0, 1, 2]):
            found = self.BATCH.rows(chosen)
            assert found is not self.BATCH
            assert found.input_ids.tolist() == [self.BATCH.input_ids[row].tolist() for row in chosen]

    def test_keep_their_images_and_texts(self) -> None:
        values = torch.arange(12.0).view(3, 2, 2)
        whole = Batch(
            torch.zeros(3, 3, dtype=torch.long), torch.ones(3, 3).bool(), (("x", "y", "z"),) * 3, ((0, 1, None),) * 3,
            values, tuple("pqr"),  # type: ignore[arg-type]
        )  # fmt: skip
        found = whole.rows([2, 0])
        assert torch.equal(found.values, values[[2, 0]]) and found.spelled == ("r", "p")
        moved = whole.to(torch.device("meta"))
        assert {t.device.type for t in (moved.input_ids, moved.mask, moved.values)} == {"meta"}
        assert moved.tokens == whole.tokens and moved.spelled == whole.spelled
        assert self.BATCH.to(torch.device("cpu")).values is None


def test_last_positions() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    assert encoding.last_positions(mask).tolist() == [1, 3, 0, 0]


class Frame:
    columns = ("a",)


class Table:
    column_names = ("a",)


ADVICE = "give a text, a list of texts, token ids, or a tokenizer's output"


@pytest.mark.parametrize(("given", "texts", "rows"), [
    ("a b", ["a b"], None), (np.array("a b"), ["a b"], None), (["a", "b"], ["a", "b"], None), (("a",), ["a"], None),
    (np.array(["a", "b"]), ["a", "b"], None), pytest.param(iter(["a", "b"]), ["a", "b"], None, id="iterator"),
    ([5, 17], None, [[5, 17]]), (range(2, 5), None, [[2, 3, 4]]), (np.array([5, 17]), None, [[5, 17]]),
    ([torch.tensor(5), torch.tensor(17)], None, [[5, 17]]), ([np.int32(5), 17], None, [[5, 17]]),
    ([[5], [17, 3]], None, [[5], [17, 3]]), ([range(2), (7,)], None, [[0, 1], [7]]),
    (torch.tensor([[5, 17], [3, 4]]), None, [[5, 17], [3, 4]]),
    ([np.array([5, 17]), torch.tensor([3])], None, [[5, 17], [3]]), ({"input_ids": [5, 17]}, None, [[5, 17]]),
    ({"input_ids": [[5, 17], [3, 4]], "attention_mask": [[1, 1], [0, 1]]}, None, [[5, 17], [4]]),
    ({"input_ids": torch.tensor([[5, 17]]), "attention_mask": torch.tensor([[1, 0]])}, None, [[5]]),
    ({"input_ids": [5, 17, 3], "attention_mask": [0, 1, 1]}, None, [[17, 3]]),
], ids=str)  # fmt: skip
def test_texts_or_ids(given: Any, texts: Any, rows: Any) -> None:
    found = texts_or_ids(given)
    assert found == (texts, rows)
    assert {type(each) for row in found[1] or () for each in row} <= {int}


@pytest.mark.parametrize(("given", "said"), [
    ([], "no text was given"),
    (5, f"int was given as texts; {ADVICE}"),
    (None, f"NoneType was given as texts; {ADVICE}"),
    (b"a", "bytes were given as texts; decode them first, e.g. given.decode('utf-8')"),
    (bytearray(b"a"), "bytes were given as texts; decode them first, e.g. given.decode('utf-8')"),
    (Path("x" * 90), f"the path '{'x' * 79} was given as texts; give the content of the file"),
    ({"a"}, "set was given as texts, which has no order; give a list"),
    (frozenset({"a"}), "frozenset was given as texts, which has no order; give a list"),
    (Frame(), "Frame was given as texts; give its column of texts"),
    (Table(), "Table was given as texts; give its column of texts"),
    ({"text": "a"}, f"dict without input_ids was given as texts; {ADVICE}"),
    ([True], f"text 0 is True (bool), no text; {ADVICE}"),
    (["a", "b", 5], f"text 2 is 5 (int), no text; {ADVICE}"),
    (["a", [5]], f"text 1 is [5] (list), no text; {ADVICE}"),
    ([[]], f"text 0 is [] (list), no text; {ADVICE}"),
    ([["a"]], f"text 0 is ['a'] (list), no text; {ADVICE}"),
    ([["a" * 50]], f"text 0 is ['{'a' * 38} (list), no text; {ADVICE}"),
    ([torch.tensor(0.5)], f"text 0 is tensor(0.5000) (Tensor), no text; {ADVICE}"),
    ([5, "a"], "the given ids hold 'a', which is not a token id; ids are whole numbers"),
    ([5, 2.0], "the given ids hold 2.0, which is not a token id; ids are whole numbers"),
    ([5, None, 0.5], "the given ids hold None, which is not a token id; ids are whole numbers"),
    ([5, True], "the given ids hold True, which is not a token id; ids are whole numbers"),
    ([5, "a" * 50], f"the given ids hold '{'a' * 39}, which is not a token id; ids are whole numbers"),
    ([[5], 5], "row 1 holds 5, which is not a list of token ids"),
    ([[5], [6], "abc"], "row 2 holds 'abc', which is not a list of token ids"),
    ([[5], [6, None]], "row 1 holds None, which is not a token id; ids are whole numbers"),
    ({"input_ids": ["a", "b"]}, "input_ids hold 'a', which is not a token id"),
    *(
        (
            {"input_ids": [[5, 6], [7, 8]], "attention_mask": mask},
            "the attention_mask is not of the shape of the input_ids",
        )
        for mask in ([[1, 1]], [[1, 1], [1]], [[1, 1], [1, 1, 1]], ["a", "b"], [1, 1])
    ),
])  # fmt: skip
def test_what_is_neither_text_nor_id(given: Any, said: str) -> None:
    assert refusal(texts_or_ids, given) == said


class TestImages:
    """Images of 2 × 3 pixels of two colours."""

    IMAGE = torch.arange(12, dtype=torch.uint8).view(6, 2) * 20

    def test_pixels_are_fractions_in_their_order(self) -> None:
        batch = encode_values(self.IMAGE, 2, shape=(2, 3))
        assert torch.equal(batch.values, self.IMAGE[None].float() / 255)
        assert batch.tokens == (("0,0", "0,1", "0,2", "1,0", "1,1", "1,2", "[class]"),)
        assert batch.words == ((0, 1, 2, 3, 4, 5, None),)
        assert torch.equal(batch.input_ids, torch.zeros(1, 7, dtype=torch.long)) and batch.mask.all()
        assert batch.mask.shape == (1, 7) and batch.mask.dtype == torch.bool

    def test_floats_stay_as_they_are(self) -> None:
        given = torch.linspace(-1, 3, 24, dtype=torch.float64).view(2, 6, 2)
        batch = encode_values(given, 2, dtype=torch.float64)
        assert torch.equal(batch.values, given) and batch.values.dtype == torch.float64
        assert batch.tokens == (("0", "1", "2", "3", "4", "5", "[class]"),) * 2 and batch.lengths == [7, 7]
        assert encode_values(given.float(), 2, shape=(3, 3)).tokens[1][:2] == ("0", "1")
        assert encode_values(given.float(), 2, shape=(3, 2)).tokens[1][:3] == ("0,0", "0,1", "1,0")
        assert encode_values(given.half(), 2).values.dtype == torch.float32

    def test_images_may_have_rows(self) -> None:
        """A square image is one image, not as many sequences as it has rows."""
        images = torch.arange(54, dtype=torch.uint8).view(2, 3, 3, 3)
        expected = encode_values(images.flatten(1, 2), 3, shape=(3, 3))
        assert torch.equal(encode_values(images, 3, shape=(3, 3)).values, expected.values)
        one = encode_values(images[1].numpy(), 3, shape=(3, 3))
        assert torch.equal(one.values, expected.values[1:]) and one.tokens == expected.tokens[1:]
        assert encode_values(images[1], 3, shape=(3, 2)).values.shape == (3, 3, 3)

    def test_arrays_of_either_byte_order(self) -> None:
        for kind in ("u1", ">f2", "<f4", ">f4", ">f8"):
            given = np.arange(12).reshape(6, 2).astype(kind)
            expected = torch.arange(12.0).view(1, 6, 2) / (255 if kind == "u1" else 1)
            assert torch.equal(encode_values(given, 2).values, expected), kind

    @pytest.mark.parametrize(("given", "options", "said"), [
        (torch.zeros(6, 2, dtype=torch.int64), {}, "pixels of torch.int64 were given; allowed are arrays of uint8"),
        (np.zeros((6, 2), dtype="i8"), {}, "pixels of int64 were given; allowed"),
        ([[0.5, 0.5]], {}, "pixels of list were given; allowed"),
        (torch.zeros(6), {}, "pixels (6,) were given; the model reads (images, length, 2)"),
        (torch.zeros(6, 3), {}, "pixels (1, 6, 3) were given; the model reads (images, length, 2)"),
        (torch.zeros(1, 0, 2), {}, "pixels (1, 0, 2) were given; the model reads"),
        (torch.zeros(1, 1, 6, 2), {}, "pixels (1, 1, 6, 2) were given; the model reads"),
        (torch.zeros(6, 3), {"patch": (1, 1)}, "patches (1, 6, 3) were given; the model reads"),
        (torch.zeros(1, 2, 4, 4), {"shape": (3, 4)},
         "pixels (1, 2, 4, 4) were given; the model reads (images, 3, 4, 2) or (images, length, 2)"),
        (torch.full((6, 2), 1.5), {"patch": (1, 1)}, "the pixels go from 1.5 to 1.5; give floats in 0…1, or uint8"),
        (torch.full((6, 2), -0.5), {"patch": (1, 1)}, "the pixels go from -0.5 to -0.5; give floats in 0…1"),
        (
            torch.zeros(6, 2),
            {"max_tokens": 6},
            "an image has 7 tokens, more than the limit of 6 (a token is a pixel, the last one the class token): "
            "raise max_tokens=…",
        ),
        (torch.zeros(6, 2), {"max_tokens": 6, "patch": (1, 1)},
         "an image has 7 tokens, more than the limit of 6 (a token is a patch"),
        (torch.arange(12.0).view(6, 2).log(), {}, "the pixels hold numbers that are not finite; give floats"),
    ])  # fmt: skip
    def test_what_is_refused(self, given: Any, options: dict[str, Any], said: str) -> None:
        assert (refusal(encode_values, given, 2, **options) or "").startswith(said)
        assert encode_values(self.IMAGE, 2, max_tokens=7).lengths == [7]

    def test_patches_overlap(self) -> None:
        """Images of 4 × 5 pixels in patches of 3 × 3, one apart: two rows of three, each with its pixels row by row."""
        pixels = torch.arange(40.0).view(1, 20, 2) / 64
        shape, patch = (2, 3), (3, 1)
        assert encoding.image_form(18, shape, patch) == (2, (4, 5))
        assert encoding.image_form(18, (4, 5), None) == (18, (4, 5))
        assert encoding.image_form(48, (2, 3), (4, 3)) == (3, (7, 10))
        found = encode_values(pixels, 18, shape=shape, patch=patch)
        image = pixels.view(4, 5, 2)
        expected = [image[y : y + 3, x : x + 3].reshape(-1) for y in range(2) for x in range(3)]
        assert torch.equal(found.values[0], torch.stack(expected)) and found.tokens[0][3:5] == ("1,0", "1,1")
        assert torch.equal(encode_values(found.values, 18, shape=shape, patch=patch).values, found.values)
        for given in (image, image[None]):
            assert torch.equal(encode_values(given, 18, shape=shape, patch=patch).values, found.values)
        for other in (pixels[:, :-1], pixels[..., :1]):
            assert encoding.in_patches(other, 2, (4, 5), patch) is other
        means = encoding.as_images(found.values, shape, patch)
        assert torch.allclose(means[0, 1, 2], image[1:4, 2:5].mean((0, 1))) and means.shape == (1, 2, 3, 2)
        assert torch.equal(encoding.as_images(pixels, (4, 5), None)[0], image)


def test_a_text_has_characters_for_its_tokens() -> None:
    encoding.check_characters("a" * 128, 2, "the text")
    encoding.check_characters("a" * 10**5, None, "the text")
    assert refusal(encoding.check_characters, "a" * 1283, 20, "the text") == (
        "the text has 1,283 characters, more than 1,280, the limit for 20 tokens: shorten or split it, or raise "
        "max_tokens=…"
    )
    encoding.check_tokens(5, 5, "the text")
    encoding.check_tokens(10**9, None, "the text")
    assert refusal(encoding.check_tokens, 1001, 1000, "the text") == (
        "the text has 1,001 tokens, more than the limit of 1,000: shorten or split it, or raise max_tokens=…"
    )
