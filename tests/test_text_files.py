"""Files as text and JSON, and the limits on sizes: up to the bounds, and the messages beyond them."""

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal
from ssmscope.core import batching, text_files


@pytest.mark.parametrize(("content", "found"), [
    (b"", ""), (b"a\r\nb\n", "a\r\nb\n"), ("\ufeffé".encode(), "é"), (b"\xff", "f is not UTF-8 text (byte 0); advise"),
    (b"ab\xe9", "f is not UTF-8 text (byte 2); advise"),
    (b"ab\0c\0", "f is not text: it has a NUL at character 2; advise"),
    ("a".encode("utf-16"), "f is not UTF-8 text (it is UTF-16); advise"),
    (b"\xfe\xff\0a", "f is not UTF-8 text (it is UTF-16); advise"),
    ("a".encode("utf-32"), "f is not UTF-8 text (it is UTF-32); advise"),
    (b"\0\0\xfe\xff\0\0\0a", "f is not UTF-8 text (it is UTF-32); advise"),
])  # fmt: skip
def test_text(tmp_path: Path, content: bytes, found: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    said = refusal(text_files.read_text, file, "f", advice="advise")
    assert said == (found if "; advise" in found else None)
    if said is None:
        assert text_files.read_text(file, "f") == text_files.decoded_text(content, "f") == found
    else:
        assert refusal(text_files.decoded_text, content, "f") == found.replace("advise", "save it as UTF-8")


def test_text_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(text_files.read_text, tmp_path / "a", "f") == "f could not be read: No such file or directory"
    assert refusal(text_files.read_text, "a\0b", "f") == "f could not be read: embedded null byte"
    monkeypatch.setattr(text_files, "MAX_FILE_BYTES", 3 * 2**20)
    (tmp_path / "a").write_bytes(b"a" * 3 * 2**20)
    assert len(text_files.read_text(tmp_path / "a", "f")) == 3 * 2**20
    with open(tmp_path / "a", "ab") as stream:
        stream.write(b"a")
    assert refusal(text_files.read_text, tmp_path / "a", "f") == "f is larger than 3 MiB; divide it"


@pytest.mark.parametrize(("content", "twice"), [
    ('{"a": 1, "b": {"a": 2}}', None),
    ('{"a": 1, "b": 2, "c": 3, "c": 4, "b": 5}', "'c'"),
    ('{"a": 1, "b": 2, "b": 3, "a": 4}', "'b'"),
    ('{"x": [{"a": 1, "b": 2, "a": 1}]}', "'a'"),
    (json.dumps({"a" * 50: 1}).replace("}", f', "{"a" * 50}": 2}}'), "'" + "a" * 39),
])  # fmt: skip
def test_json_with_a_name_twice(content: str, twice: str | None) -> None:
    if twice is None:
        assert text_files.parse_json(content) == text_files.parse_json(content.encode()) == json.loads(content)
        return
    with pytest.raises(ValueError, match=f"^it has {twice} twice; keep one$"):
        text_files.parse_json(content)


def test_json_that_is_none() -> None:
    with pytest.raises(ValueError, match="^Expecting value$"):
        text_files.parse_json("")
    with pytest.raises(ValueError, match="^it is nested too deeply$"):
        text_files.parse_json("[" * 100_000)


@pytest.mark.parametrize(("value", "found"), [
    ("text\n", None), ("", None), ({"a": ["é", 5, None]}, None), ("a\0b", "\\u0000"), ("\ud800\0", "\\ud800"),
    ({"a": ["b", "\udfff"]}, "\\udfff"), ({"a\0": 1}, "\\u0000"), ([["\0", "\ud800"]], "\\u0000"),
    ("\ue000\ud7ff", None),
])  # fmt: skip
def test_codes_that_no_text_holds(value: Any, found: str | None) -> None:
    assert text_files.no_character(value) == found


def test_limits_are_allowed_themselves() -> None:
    batching.refuse_reading(10**10, "that", "ask for less")
    assert refusal(batching.refuse_reading, 10**10 + 1.5, "that", "ask for less") == (
        "that would have the model read about 10,000,000,002 tokens; allowed are up to 10,000,000,000: ask for less"
    )
    batching.refuse_held(2**27, "that", "ask for less")
    assert refusal(batching.refuse_held, 2**27 + 1, "that", "ask for less") == (
        "that would make 134,217,729 tokens; allowed are up to 134,217,728: ask for less"
    )
    assert refusal(batching.refuse_held, 6, "that", "ask for less", most=5, unit="words") == (
        "that would make 6 words; allowed are up to 5: ask for less"
    )
    batching.refuse_above(1000, one=1000, two=None, three=-5)
    assert (
        refusal(batching.refuse_above, 1000, one=1000, two=1001, three=5000) == "two is 1,001; allowed are up to 1,000"
    )
    batching.refuse_beyond({"a": 5, "b": 7}, {"a": 5, "b": 7.0, "c": 100})
    assert refusal(batching.refuse_beyond, {"a": 5, "b": 7}, {"b": 7.25, "a": 4}) == "b is 7.25; allowed are up to 7"
    assert refusal(batching.refuse_beyond, {"a": 5, "b": 7}, {"b": 8, "a": 6}) == "a is 6; allowed are up to 5"
