"""Keys of jobs: they hold every option and every byte that is read, for every verb and option there is."""

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import MINIMAL, jobs_of, planned, tiny_model
from refusals import refuses
from ssmscope.api import analyses as registry
from ssmscope.api.analysis import Call
from ssmscope.api.inputs import MODEL_KINDS
from ssmscope.reports.keys import Fingerprints, key_of
from ssmscope.reports.sources import kind_of
from ssmscope.reports.store import RECORD, JobStore, _results

VERBS = registry.analyses()
MODEL = {"model": "m", "files": "0123456789abcdef"}


def key(call: Call, **model: Any) -> str:
    """Return the key of a job, reading its files anew."""
    return key_of(call, [{**MODEL, **model}], Fingerprints())


def with_option(call: Call, name: str, value: Any) -> Call:
    part = "inputs" if name in call.inputs else "options"
    return replace(call, **{part: {**getattr(call, part), name: value}})


@pytest.fixture(params=VERBS)
def call(request) -> Call:
    (line,) = planned({"models": ["m"], "analyses": [{request.param: MINIMAL.get(request.param)}]}).calls
    return line.call


def test_every_option_matters_but_those_without_effect(call):
    before = key(call)
    assert key(replace(call)) == before
    for option, value in call.option_values():
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
    named = [option.name for option, _ in call.option_values() if option.reads is not None]
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
    """Otherwise its content would be in no key."""
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


def test_what_lies_deeper_counts_where_a_directory_holds_checkpoints_alone(tmp_path):
    for place, counts in ((tiny_model(tmp_path / "m"), False), (tmp_path / "checkpoints", True)):
        (place / "deeper").mkdir(parents=True)
        before = Fingerprints().of_model(place)
        (place / "deeper" / "weights.pt").write_bytes(b"more")
        assert (Fingerprints().of_model(place) != before) == counts


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
        refuses("no data; give data", jobs_of, {"models": [str(model)], "analyses": [{"ablate": {}}]})
    (model / "training.json").write_text(json.dumps({"data": {"train": {"name": "wikitext2"}}}))
    (job,) = jobs_of({"models": [str(model)], "analyses": [{"ablate": {}}]}).every
    assert job.options["data"] == "wikitext2"


@pytest.mark.parametrize("name", ["../../outside.json", "/outside.json"])
def test_a_record_that_names_files_elsewhere_is_of_no_finished_job(tmp_path, name):
    store = JobStore(tmp_path)
    folder = store.finished("0123456789abcdef")
    folder.mkdir(parents=True)
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    (folder / "inside.json").write_text("{}")
    name, digest = str(outside) if name.startswith("/") else name, f"{zlib.crc32(b'{}'):08x}"
    inside = {"inside.json": digest}
    for files, done in ((inside, True), ({name: digest}, False), ({**inside, name: digest}, False)):
        (folder / RECORD).write_text(json.dumps({"verb": "heatmap", "files": files}))
        assert (store.record("0123456789abcdef") is not None) == done


@pytest.mark.parametrize(("resources", "device", "asked"), [
    (None, None, (1, 0, None)), (None, "cuda:1", (1, 1, None)), ({"cpus": 3, "gpus": 0.5}, None, (3, 0.5, 3)),
    ({"cpus": 4, "gpus": 0}, "cuda", (4, 0, 4)), ({"cpus": 0.5}, None, (0.5, 0, 1)),
    ({"cpus": 0, "gpus": 2}, None, (0, 2, 1)),
])  # fmt: skip
def test_a_job_asks_for_cores_and_gpus(tmp_path, resources, device, asked):
    """One core by default, a GPU where its model is on one, and threads only where its cores are given."""
    model = {"model": str(tiny_model(tmp_path / "m")), **({"device": device} if device else {})}
    item = {"stability": {}, **({"resources": resources} if resources else {})}
    (job,) = jobs_of({"models": [model], "analyses": [item]}).every
    assert (job.cpus, job.gpus, job.threads) == asked


def test_results_in_a_folder_are_files_that_say_so_in_the_order_of_their_names(tmp_path):
    contents = {
        **dict.fromkeys(["b.json", "d.json", "a.json", "c.json", RECORD, "e.txt"], '{"kind": "heatmap", "class": "X"}'),
        "f.json": '{"kind": "heatmap"}',
        "g.json": '{"class": "X"}',
        "h.json": '{"kind": 3, "class": "X"}',
        "i.json": "[1]",
        "j.json": "{half",  # reading it says what is wrong
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    assert [path.name for path in _results(tmp_path)] == ["a.json", "b.json", "c.json", "d.json", "j.json"]


@pytest.mark.parametrize(("architecture", "channels", "kinds"), [
    ("MambaForCausalLM", None, ("token-model", "language-model")),
    (None, None, ("token-model", "language-model")),
    ("SSMForSequenceClassification", None, ("token-classifier", "text-classifier")),
    ("SSMForSequenceClassification", 3, ("pixel-classifier", "pixel-classifier")),
    ("MambaForCausalLM", 3, ("token-model", "language-model")),
])  # fmt: skip
def test_a_model_is_of_the_kind_that_its_configuration_and_tokenizer_say(tmp_path, architecture, channels, kinds):
    config = {"architectures": [architecture] if architecture else None, "channels": channels}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert set(kinds) <= set(MODEL_KINDS)
    assert (kind_of(tmp_path), kind_of(tmp_path, tokenizer=True)) == kinds
    (tmp_path / "vocab.txt").write_text("a")
    assert kind_of(tmp_path) == kinds[1]


def test_a_kind_is_not_guessed(tmp_path):
    for content in (None, "[]", "{half"):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        assert kind_of(tmp_path) is kind_of(tmp_path, tokenizer=True) is None
    assert kind_of(tmp_path / "config.json") == "token-classifier"
    assert kind_of(tmp_path / "config.json", tokenizer=True) == "text-classifier"


def test_what_is_known_of_a_plans_models(tmp_path):
    """A key is 16 digits; a tokenizer that a plan gives tells a model's kind as one of its own does."""
    model = tiny_model(tmp_path / "m")
    (tmp_path / "words").mkdir()
    for file in model.glob("tokenizer*"):
        file.rename(tmp_path / "words" / file.name)
    for given, kind in (({}, "token-model"), ({"tokenizer": str(tmp_path / "words")}, "language-model")):
        jobs = jobs_of({"models": [{"model": str(model), "name": "x", **given}], "analyses": ["stability"]})
        assert list(jobs.models) == ["x"] and jobs.models["x"]["kind"] == kind
        assert all(re.fullmatch("[0-9a-f]{16}", job.key) for job in jobs.every)


def test_hidden_files_and_folders_are_no_content(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n")
    before = Fingerprints().of_data(str(tmp_path))
    assert before is not None and re.fullmatch("[0-9a-f]{16}", before)
    (tmp_path / ".cache" / "deep").mkdir(parents=True)
    for place in (".hidden", ".cache/index", ".cache/deep/index"):
        (tmp_path / place).write_text("of nobody's concern")
        assert Fingerprints().of_data(str(tmp_path)) == before
    (tmp_path / "b.csv").write_text("text,label\n")
    assert Fingerprints().of_data(str(tmp_path)) != before
