"""Keys of jobs: everything that is asked and every byte that is read is in them, for every verb and option there is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import MINIMAL, jobs_of, planned, tiny_model

from ssmscope.api import registry
from ssmscope.api.analysis import Call
from ssmscope.errors import InputError
from ssmscope.reports.fingerprints import Fingerprints
from ssmscope.reports.jobs import key_of
from ssmscope.reports.store import RECORD, Store

VERBS = registry.analyses()
MODEL = {"model": "m", "files": "0123456789abcdef"}


def key(call: Call, **model: Any) -> str:
    """Files are read anew each time."""
    return key_of(call, [{**MODEL, **model}], Fingerprints())


def with_option(call: Call, name: str, value: Any) -> Call:
    part = "inputs" if name in call.inputs else "options"
    return replace(call, **{part: {**getattr(call, part), name: value}})


@pytest.fixture(params=VERBS)
def call(request) -> Call:
    (line,) = planned({"models": ["m"], "analyses": [{request.param: MINIMAL.get(request.param)}]}).lines
    return line.call


def test_every_option_matters_but_those_without_effect(call):
    before = key(call)
    assert key(replace(call)) == before
    for option, value in call.every():
        for other in ("another", 7, ["a", "b"], not value):
            changed = key(with_option(call, option.name, other)) != before
            assert changed == (not option.no_effect), (call.name, option.name)
    for field, other in (("device", "cuda:1"), ("dtype", "float64"), ("tokenizer", "other")):
        assert key(replace(call, **{field: other})) != before, field


def test_the_models_and_their_files_matter(call):
    others = [key(call, model="n"), key(call, files="fedcba9876543210"), key_of(call, [MODEL, MODEL], Fingerprints())]
    assert len({key(call), *others}) == 4


def changes(place: Path) -> Iterator[int]:
    """A number for each change of what is in a file or folder, which lasts until the next."""
    number = 0
    for file in [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.is_file()):
        content = file.read_bytes()
        places = (0, len(content) // 2, len(content) - 1)
        flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places]
        for other in (*flipped, content + b"x"):
            file.write_bytes(other)
            yield (number := number + 1)
        file.write_bytes(content)
    if place.is_dir():
        (place / "more").write_bytes(b"more")
        yield number + 1
        (place / "more").unlink()


def test_every_byte_of_what_is_read_matters(call, tmp_path, monkeypatch):
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path / "data"))
    file, folder, known = tmp_path / "file.csv", tmp_path / "folder", tmp_path / "data" / "sst2" / "test.parquet"
    for place in (file, folder / "config.json", folder / "within" / "weights", known):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"some bytes of it")
    named = [option.name for option, _ in call.every() if option.reads is not None]
    for name in [*named, "tokenizer"]:
        for given, place in ((str(file), file), (str(folder), folder), ("sst2", known)):
            asked = replace(call, tokenizer=given) if name == "tokenizer" else with_option(call, name, given)
            before = key(asked)
            for number in changes(place):
                assert key(asked) != before, (call.name, name, given, number)
            assert key(asked) == before
        if name != "tokenizer":
            listed = with_option(call, name, [str(folder), str(file)])
            before = key(listed)
            file.write_bytes(b"other")
            assert key(listed) != before
            file.write_bytes(b"some bytes of it")


def test_what_names_a_file_is_said_to_read_it():
    """Else its content would be in no key."""
    paths = {
        (verb, option.name)
        for verb, each in VERBS.items()
        for option in (*each.inputs.values(), *each.options.values())
        if (option.kind is Path or Path in option.objects) and option.reads is None and not option.no_effect
    }
    assert paths == set()


def keys_of(model: Path) -> set[str]:
    asked = [{"heatmap": {"text": "a"}}, {"stability": {}}]
    return {job.key for job in jobs_of({"models": [str(model)], "analyses": asked}).every}


def test_every_file_of_a_model_matters_but_what_tells_of_it(tmp_path):
    model = tiny_model(tmp_path / "m")
    (model / "vocab.bpe").write_bytes(b"a b")
    before, keys = Fingerprints().of_model(model), keys_of(model)
    for number in changes(model):
        assert Fingerprints().of_model(model) != before, number
    (model / "README.md").write_text("a card")
    (model / "picture.png").write_bytes(b"a picture")
    assert Fingerprints().of_model(model) == before and keys_of(model) == keys
    (model / "vocab.bpe").write_bytes(b"a c")
    assert keys_of(model).isdisjoint(keys)


def test_an_adapters_model_matters(tmp_path):
    model, adapter = tiny_model(tmp_path / "m"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../m"}))
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    found = [keys_of(adapter)]
    for place in (adapter / "adapter_model.safetensors", model / "model.safetensors"):
        place.write_bytes(place.read_bytes() + b"x")
        found.append(keys_of(adapter))
    assert len(set.union(*found)) == 6


def test_data_that_a_card_names_is_a_data_set_and_no_file(tmp_path):
    model = tiny_model(tmp_path / "m")
    secret = tmp_path / "secret.txt"
    secret.write_text("a good film\n")
    for name in (str(secret), "../secret.txt", "secret.txt"):
        (model / "training.json").write_text(json.dumps({"data": {"train": {"name": name}}}))
        with pytest.raises(InputError, match="no data; give data"):
            jobs_of({"models": [str(model)], "analyses": [{"ablate": {}}]})
    (model / "training.json").write_text(json.dumps({"data": {"train": {"name": "wikitext2"}}}))
    (job,) = jobs_of({"models": [str(model)], "analyses": [{"ablate": {}}]}).every
    assert job.options["data"] == "wikitext2"


@pytest.mark.parametrize("name", ["../../outside.json", "/outside.json"])
def test_a_record_that_names_files_elsewhere_is_of_no_finished_job(tmp_path, name):
    store = Store(tmp_path)
    folder = store.finished("0123456789abcdef")
    folder.mkdir(parents=True)
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    (folder / "inside.json").write_text("{}")
    name = str(outside) if name.startswith("/") else name
    for files, done in (({"inside.json": 2}, True), ({name: 2}, False), ({"inside.json": 2, name: 2}, False)):
        (folder / RECORD).write_text(json.dumps({"verb": "heatmap", "files": files}))
        assert (store.record("0123456789abcdef") is not None) == done
