"""Inputs of analyses: combinations, how texts and data are read, and refusals without a model."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refusal as refused_by
from refusals import refuses
from ssmscope.api.inputs import (
    MAX_TOKENS,
    MODEL_KINDS,
    TEXTS,
    Data,
    Examples,
    Texts,
    check_fits,
    data_name,
    known_data,
    one_text,
)
from ssmscope.api.options import Range
from ssmscope.api.typed import lines_of, texts_of, whole_numbers
from ssmscope.core.batching import MAX_TOKENS_PER_ROW
from ssmscope.core.encoding import MAX_CHARACTERS_PER_TOKEN, encode
from ssmscope.errors import InputError

NO_INPUTS: dict[str, Any] = dict.fromkeys((*TEXTS, "data", "split", "max_tokens"))


def refusal(kind: Any, options: dict[str, Any] | None = None, **given: Any) -> str:
    with pytest.raises(InputError) as caught:
        kind.check({**NO_INPUTS, **given}, options or {})
    return str(caught.value)


class Known:
    """A model as inputs ask it: of texts, where a word is a token."""

    name, channels, labels, is_classifier = "m", None, ("no", "yes"), True

    def __init__(self, **own: Any) -> None:
        self.tokenizer: Any = lambda text, **_: {"input_ids": text.split()}
        vars(self).update(own)
        self.reads = "tokens" if self.channels is None else "pixels"

    def encode(self, texts: Any = None, **given: Any) -> Any:
        return texts, given


@pytest.mark.parametrize(("given", "said"), [
    ({}, "no text; give text=…, file=…, or ids='5,17,3'"),
    ({"text": [], "ids": []}, "no text; give text=…"),
    ({"text": ["a"], "file": "f"}, "text=… cannot be combined with file=…"),
    ({"text": ["a"], "ids": ["1"]}, "ids=… cannot be combined with text=… or file=…"),
    ({"file": "f", "ids": ["1"]}, "ids=… cannot be combined with text=… or file=…"),
    ({"file": "", "ids": ["1"]}, "ids=… cannot be combined with text=… or file=…"),
    ({"text": ["a"], "image": ["i"]}, "image=… cannot be combined with text=…, file=… or ids=…"),
    ({"file": "f", "image": ["i"]}, "image=… cannot be combined with text=…, file=… or ids=…"),
    ({"ids": ["1"], "image": ["i"]}, "image=… cannot be combined with text=…, file=… or ids=…"),
    ({"text": ["a"], "chat": "c"}, "chat=… cannot be combined with text=…, file=…, ids=…, image=… or series=…"),
    ({"text": ["a", "b\ud800"]}, "text=… is not valid UTF-8"),
    ({"ids": ["1,2", "3,x"]}, "ids='3,x': 'x' is not a whole number; write for example ids='5,17,3'"),
    ({"file": "-", "text": ["a"]}, "text=… cannot be combined with file=…"),
    ({"file": "a.CSV"}, "file='a.CSV' is a table, and file=… takes lines"),
    ({"file": "a.parquet"}, "file='a.parquet' is a table, and file=… takes lines"),
])  # fmt: skip
def test_texts_that_are_refused_without_a_model(given: dict[str, Any], said: str) -> None:
    assert said in refusal(Texts(), **given)


@pytest.mark.parametrize("given", [{"text": ["a"]}, {"file": "-"}, {"ids": ["1,2"]}, {"image": ["x.png"]}])
def test_one_kind_of_text_is_enough_and_standard_input_is_left_for_the_run(given: dict[str, Any]) -> None:
    Texts().check({**NO_INPUTS, **given}, {})


def test_random_sequences_take_the_place_of_texts() -> None:
    drawn = Texts(instead="length")
    drawn.check(NO_INPUTS, {"length": 9})
    drawn.check({**NO_INPUTS, "text": ["a"]}, {"length": None})
    for name, value in (("text", ["a"]), ("file", "f"), ("file", ""), ("ids", ["1"]), ("image", ["i"]), ("chat", "c")):
        said = refusal(drawn, {"length": 9}, **{name: value})
        assert said == (
            "length=… asks for random sequences; it cannot be combined with text=…, file=…, ids=…, image=…, "
            "series=… or chat=…"
        )
    assert "or length=… for random sequences" in refusal(drawn, {"length": None})
    Texts(needed=False, instead="length").check(NO_INPUTS, {"length": None})
    Texts(needed=False).check(NO_INPUTS, {})
    assert "'x' is not a whole number" in refusal(Texts(needed=False), ids=["x"])
    assert Texts(needed=False).read(NO_INPUTS, {}, []) is None and drawn.read(NO_INPUTS, {"length": 9}, []) is None


def test_labelled_texts_take_the_place_of_texts() -> None:
    told: list[tuple[bool, dict[str, Any]]] = []
    of_data = Texts(data=lambda labelled, **options: told.append((labelled, options)))
    of_data.check({**NO_INPUTS, "data": "sst2", "split": "test"}, {"top": 3})
    of_data.check({**NO_INPUTS, "text": ["a"]}, {"top": 4})
    assert told == [(True, {"top": 3}), (False, {"top": 4})]
    for name, value in (("text", ["a"]), ("file", "f"), ("ids", ["1"]), ("image", ["i"]), ("chat", "c")):
        assert "data=… cannot be combined with" in refusal(of_data, data="sst2", **{name: value})
    assert refusal(of_data, text=["a"], split="test") == "split=… needs data=…; give that too"
    Texts().check({**NO_INPUTS, "text": ["a"], "data": "x", "split": "test"}, {})  # no options of these texts


def test_options_of_each_kind_of_input() -> None:
    texts = ["text", "file", "ids", "image", "series", "chat", "max_tokens"]
    assert list(Texts().options) == texts
    assert list(Texts(data=lambda *_, **__: None).options) == [*texts, "data", "split"]
    assert list(Data().options) == ["data", "split", "max_tokens"] and list(Data(leaves_out=True).options) == [
        "data",
        "split",
    ]
    assert list(Data(series=True).options) == ["data", "split", "series", "max_tokens"]
    assert list(Examples().options) == ["data", "split", "series", "length", "max_tokens"]
    assert Texts().options["max_tokens"].default == MAX_TOKENS and Texts(most=7).options["max_tokens"].default == 7
    assert Examples().options["length"].range == Range(1, MAX_TOKENS_PER_ROW)
    assert Examples().options["length"].default == 256 and Texts().options["max_tokens"].range == Range(1)
    helps = [each.options["data"].help for each in (Data(), Data("examples"), Examples(), Texts(data=print))]
    assert [each.partition(",")[0] for each in helps] == [
        "sst2", "cifar10", "wikitext2", "Labelled texts instead: sst2",
    ]  # fmt: skip
    assert [name for name, each in Texts().options.items() if each.repeated] == ["text", "ids", "image"]
    assert [name for name, each in Texts().options.items() if each.reads] == ["file", "image", "series", "chat"]
    assert [kind for kind in (*MODEL_KINDS, None) if Examples().reads_lines(kind)] == ["language-model", "token-model"]
    assert not any(each.reads_lines(kind) for each in (Texts(), Data()) for kind in MODEL_KINDS)


def test_texts_are_encoded_by_the_model() -> None:
    given = {**NO_INPUTS, "max_tokens": 5}
    read = Texts().read
    nothing = {"ids": None, "values": None, "max_tokens": 5}
    assert read({**given, "text": ["a", "b"]}, {}, [Known()]) == (["a", "b"], nothing)
    assert read({**given, "ids": ["5, 17", "-3"]}, {}, [Known()]) == (None, {**nothing, "ids": [[5, 17], [-3]]})
    refuses("m reads tokens, not pixels", read, {**given, "image": ["x.png"]}, {}, [Known()])


def test_standard_input_is_read_once_for_several_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\r\nb\n \n\n")))
    assert Texts().once({**NO_INPUTS, "file": "-"}) == {**NO_INPUTS, "text": ["a", "b"]}
    for given in ({"file": "f"}, {"text": ["a"]}):
        assert Texts().once({**NO_INPUTS, **given}) == {**NO_INPUTS, **given}


def test_lines_of_a_file(tmp_path: Path) -> None:
    place = tmp_path / "a.txt"
    place.write_bytes(b" a\tb \r\nc\n\n  \n")
    assert lines_of(str(place)) == [" a\tb ", "c"] and texts_of(None, str(place)) == [" a\tb ", "c"]
    assert texts_of(["x"], None) == ["x"]
    place.write_bytes(b"a\nb\n \nc")
    refuses("line 3 is empty", lines_of, str(place))
    assert whole_numbers(" 5,17 ,-3", "ids", "1") == [5, 17, -3]
    assert whole_numbers("9" * 18, "ids", "1") == [10**18 - 1]
    for wrong in ("", "5,", "1.0", "٣", "9" * 19, "+3"):
        refuses("is not a whole number; write for example ids='1'", whole_numbers, wrong, "ids", "1")


@pytest.mark.parametrize(("most", "refused"), [(3, True), (4, False)])
def test_the_first_text_that_is_too_long_is_named(most: int, refused: bool) -> None:
    data = SimpleNamespace(name="own", texts=["a b c d e f g h"[: 2 * 2], "a b c", "a b c d", "a b c d"])
    check_fits(Known(tokenizer=None), data, most)  # type: ignore[arg-type]
    check_fits(Known(), SimpleNamespace(name="images"), 1)  # type: ignore[arg-type]
    if not refused:
        check_fits(Known(), data, most)  # type: ignore[arg-type]
        return
    refuses("row 3 of own", check_fits, Known(), data, most)


def test_texts_that_cannot_be_too_long_are_not_tokenized() -> None:
    asked: list[str] = []
    model = Known(tokenizer=lambda text, **_: asked.append(text) or {"input_ids": [1]})
    check_fits(model, SimpleNamespace(name="own", texts=["abc", "abcd", "ab"]), 12)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="row 1 of own"):
        long = "a" * (12 * MAX_CHARACTERS_PER_TOKEN + 1)
        check_fits(model, SimpleNamespace(name="own", texts=[long]), 12)  # type: ignore[arg-type]
    assert asked == ["abcd"]  # of 16 bytes at most, and so of 16 tokens


def test_the_name_of_data(tmp_path: Path) -> None:
    assert data_name("x", Known(), ["sst2"], "a file") == "x"
    assert data_name(None, Known(name="demo/sst2-mamba2"), ["sst2"], "a file") == "sst2"
    for name, known in ((str(tmp_path), ["sst2"]), ("demo/sst2-mamba2", ["imdb", "agnews"])):
        with pytest.raises(InputError, match=f"no data; give data=…, one of {', '.join(known)}, or a file"):
            data_name(None, Known(name=name), known, "a file")
    kinds = [Known(), Known(is_classifier=False), Known(channels=3)]
    texts, lines, pixels = map(known_data, kinds)
    assert "sst2" in texts and "sst2" not in lines and "wikitext2" in lines and "wikitext2" not in texts
    assert "cifar10" in pixels and "cifar10" not in {*texts, *lines}


def test_labelled_texts_are_checked_for_every_model(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("text,label\na b c,yes\n" + "a " * 9 + "b,no\n")
    given = {**NO_INPUTS, "data": str(file), "max_tokens": 20}
    found = Data().read(given, {}, [Known()])
    assert [len(text.split()) for text in found.texts] == [3, 10]
    letters = Known(tokenizer=lambda text, **_: {"input_ids": list(text)})
    assert len(Data().read({**given, "max_tokens": 10}, {}, [Known()])) == 2
    for models in ([Known(), letters], [letters, Known()]):
        with pytest.raises(InputError, match="row 2 of own"):
            Data().read({**given, "max_tokens": 10}, {}, models)
    refuses("row 2 of own", lambda: Data().read({**given, "max_tokens": 9}, {}, [Known()]))
    assert len(Data(leaves_out=True).read(given, {"max_tokens": 5}, [Known()])) == 2  # the analysis leaves them out
    assert len(Data(leaves_out=True).read(given, {"max_tokens": None}, [Known()])) == 2


def test_data_that_a_model_of_pixels_does_not_read() -> None:
    """Images of 32 × 48 pixels, in patches of 16 × 16; of a model without patches any size is a sequence."""
    model = Known(channels=768, config=SimpleNamespace(image_size=[2, 3], patch=(16, 16)), tokenizer=None)
    fits, other = (SimpleNamespace(name="own", shape=shape) for shape in ((32, 48), (48, 32)))
    remedy = "give images to heatmap, attention, explain, knockout or sanity, with image=…"
    check_fits(model, fits, 1)  # type: ignore[arg-type]
    assert refused_by(check_fits, model, other, 1) == f"own has images of 32 × 48 pixels, m reads 48 × 32; {remedy}"
    texts = SimpleNamespace(name="own", texts=["a"])
    assert refused_by(check_fits, model, texts, 1) == f"m reads pixels, but own holds texts; {remedy}"
    check_fits(Known(channels=3, config=SimpleNamespace(image_size=[2, 3], patch=None)), other, 1)  # type: ignore[arg-type]
    values = {"data": "cifar10", "split": None, "max_tokens": 5}
    told = refused_by(Data("texts").read, values, {}, [model])
    assert told == f"m reads pixels, and data=… here is texts; {remedy}"
    model.encode = lambda text: encode(model, text, None, None, None)  # type: ignore[arg-type, method-assign]
    told = "m reads pixels (48 × 32 of 3 channels), not texts: give it images, model.encode(values=…)"
    assert refused_by(one_text, model, "3,4") == told
