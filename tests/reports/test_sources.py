"""Sources that a plan may name: readable data, models and files, recognised without loading any of them."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from planned import planned
from refusals import refused, refuses
from ssmscope.api.inputs import PIXEL_CLASSIFIER, TEXT_CLASSIFIER
from ssmscope.errors import InputError
from ssmscope.reports import keys, sources
from ssmscope.reports.sources import check_data, check_files, check_model

EXAMPLES, LINES = "text,label\na film,yes\n", "a film\nanother\n"

refusal = functools.partial(refused, check_data)


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSMSCOPE_DATA", raising=False)


def test_known_data_depends_on_the_kind_of_model() -> None:
    for data, split, kind, lines in (
        ("sst2", None, TEXT_CLASSIFIER, False), ("sst2", "validation", TEXT_CLASSIFIER, False),
        ("sst2", None, None, False), ("cifar10", None, PIXEL_CLASSIFIER, False), ("cifar10", "train", None, False),
        ("digits", "anything", PIXEL_CLASSIFIER, False), ("wikitext2", None, TEXT_CLASSIFIER, True),
        ("wikitext2", None, PIXEL_CLASSIFIER, True),
    ):  # fmt: skip
        check_data(data, split, kind, lines=lines)
    for data, kind, lines, known in (
        ("cifar10", TEXT_CLASSIFIER, False, "sst2"), ("sst2", PIXEL_CLASSIFIER, False, "cifar10"),
        ("wikitext2", None, False, "sst2"), ("sst2", None, True, "wikitext2"), ("digits", None, True, "wikitext2"),
    ):  # fmt: skip
        said = refusal(data, None, kind, lines=lines)
        assert said.startswith(f"unknown data '{data}'; give one of ") and known in said, said
    assert "did you mean 'imdb'?" in refusal("imbd", None, None)
    assert "train" in refusal("sst2", "dev", TEXT_CLASSIFIER) and "dev" in refusal("cifar10", "dev", None)


def test_files_of_data_end_as_their_kind_does() -> None:
    assert refusal(None, None, PIXEL_CLASSIFIER).endswith("digits") and "file" not in refusal(
        None, None, PIXEL_CLASSIFIER
    )
    assert "or a file ending in .csv" in refusal(None, None, None)
    assert "or a file ending in .txt, .csv" in refusal(None, None, None, lines=True)
    assert refusal("own.txt", None, None).startswith("unknown data 'own.txt'")
    assert refusal("own.txt", None, None, lines=True).startswith("there is no file 'own.txt'")
    assert refusal("own.CSV", None, None).startswith("there is no file 'own.CSV'")
    assert refusal("own.csv", None, PIXEL_CLASSIFIER).startswith("unknown data 'own.csv'")


def test_files_of_data_are_read_beforehand_unless_they_are_large(tmp_path, monkeypatch) -> None:
    examples, lines, broken = (tmp_path / name for name in ("a.csv", "b.txt", "c.csv"))
    examples.write_text(EXAMPLES)
    lines.write_text(LINES)
    broken.write_text("text\na film\n")
    check_data(str(examples), None, TEXT_CLASSIFIER)
    check_data(str(lines), None, None, lines=True)
    assert "label" in refusal(str(broken), None, TEXT_CLASSIFIER)
    assert "split" in refusal(str(examples), "train", TEXT_CLASSIFIER)
    lines.write_bytes(b"a\xff\n")
    assert "UTF-8" in refusal(str(lines), None, None, lines=True)
    monkeypatch.setattr(sources, "MAX_BYTES_CHECKED", broken.stat().st_size)
    assert "label" in refusal(str(broken), None, TEXT_CLASSIFIER)
    monkeypatch.setattr(sources, "MAX_BYTES_CHECKED", broken.stat().st_size - 1)
    check_data(str(broken), None, TEXT_CLASSIFIER)


def test_splits_are_those_of_the_files_where_they_are_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.parquet").write_bytes(b"never read")
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    check_data("sst2", "train", TEXT_CLASSIFIER)
    for split in ("validation", None):
        with pytest.raises(InputError):
            check_data("sst2", split, TEXT_CLASSIFIER)


def test_a_model_of_an_unknown_type_or_without_weights_is_refused(tmp_path: Path) -> None:
    def said(config: Any, *files: str) -> str | None:
        place = tmp_path / "m"
        place.mkdir(exist_ok=True)
        for file in place.iterdir():
            file.unlink()
        if config is not None:
            (place / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        for name in files:
            (place / name).write_bytes(b"")
        try:
            check_model("m", place)
        except InputError as error:
            return str(error)
        return None

    assert (
        said({"model_type": "mamba"}, "model.safetensors") is None and said({"model_type": "mamba2"}, "a.bin") is None
    )
    assert said({"model_type": "bert"}, "model.safetensors") is None  # loading says what it lacks
    assert said(None) is None  # a directory of checkpoints
    assert said({"d_model": 8, "n_layer": 1, "vocab_size": 9}, "pytorch_model.bin") is None  # of mamba_ssm
    assert said({"model_type": "mamba"}, "model.pt") == (
        "m has no weights: a model's directory holds config.json and .safetensors or .bin"
    )
    unknown = said({"model_type": "mamba2x"}, "model.bin")
    assert unknown is not None and unknown.startswith("m: model type 'mamba2x' is unknown; did you mean 'mamba2'")
    assert (said({"model_type": 3}, "model.bin") or "").startswith("m: model type 3 is unknown")
    assert (said({}, "model.bin") or "").endswith("names no model_type; write its architecture's, such as 'mamba2'")
    assert "is not valid JSON: Expecting" in (said("{", "model.bin") or "")
    assert "a JSON object was expected" in (said("[]", "model.bin") or "")
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"")
    check_model("weights", file)


def call_of(verb: str, **options: Any) -> Any:
    (line,) = planned({"models": ["m"], "analyses": [{verb: options}]}).calls
    return line.call


def test_files_and_folders_that_options_name_exist(tmp_path: Path) -> None:
    lens, image = tmp_path / "lens", tmp_path / "a.png"
    given = {"text": "a film", "lens": str(lens)}
    with pytest.raises(InputError, match="lens .*: there is no such directory; fit one with analyze lens fit"):
        check_files(call_of("lens show", **given))
    lens.mkdir()
    check_files(call_of("lens show", **given))
    image.write_bytes(b"")
    check_files(call_of("heatmap", image=[str(image)]))
    absent = [str(tmp_path / name) for name in ("b.png", "c.png")]
    for images, first in (([str(lens)], "lens"), ([str(image), absent[0]], "b.png"), (absent, "b.png")):
        with pytest.raises(InputError, match=f"image .*{first}': there is no such file that can be read"):
            check_files(call_of("heatmap", image=images))


@pytest.mark.parametrize("analysis", [{"fidelity": {"data": "nothing"}}, {"position": {"data": "nothing"}}])
def test_a_plan_tells_the_analysis_whose_data_is_missing(analysis: dict[str, Any]) -> None:
    (verb,) = analysis
    plan = planned({"models": ["demo/sst2-mamba2"], "analyses": ["stability", analysis]})
    refuses(rf"^analysis 2 \({verb}\): unknown data 'nothing'; give one of sst2", sources.check_sources, plan)
    with pytest.raises(InputError, match=r"^analysis 1 \(.*'first'"):
        sources.check_sources(
            planned({"models": ["demo/sst2-mamba2"], "analyses": [{verb: {"data": "first"}}, analysis]})
        )
    unlike = {**analysis, "for": ["pixel-classifier"]}
    sources.check_sources(planned({"models": ["demo/sst2-mamba2"], "analyses": [unlike]}))
    sources.check_sources(planned({"models": ["demo/sst2-mamba2"], "analyses": [{verb: {}}, {verb: {"data": "sst2"}}]}))


def test_the_default_data_of_a_model_that_names_none_is_asked_for(tmp_path: Path) -> None:
    place = tmp_path / "m"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    (place / "tokenizer.json").write_text("{}")
    for model, lacking in ((str(place), True), ("somebody/some-model", False)):
        plan = planned({"models": [model], "analyses": [{"insertion": {}}]})
        if lacking:
            refuses(r"analysis 1 \(insertion\): no data; give data, one of", sources.check_sources, plan)
        else:
            sources.check_sources(plan)  # known only when it is downloaded


def test_code_is_that_of_a_folder_and_of_all_that_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "ROOT", tmp_path)
    monkeypatch.setattr(keys, "BY_NAME", ("always",))
    files = {
        "home/__init__.py": "from ssmscope.one import two\n    from ssmscope.three.module import name\n",
        "one/two/__init__.py": "import ssmscope.four\n", "three/module.py": "x = 1\n", "four/kernel.cu": "y\n",
        "always/a.py": "", "other/a.py": "from ssmscope.home import x\n", "home/notes.md": "z\n",
        "one/other.py": "from ssmscope.other import x\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def function() -> None: ...

    monkeypatch.setattr(keys.inspect, "getfile", lambda found: str(tmp_path / "home" / "__init__.py"))
    monkeypatch.setattr(keys, "PACKAGE", tmp_path)

    def found() -> str:
        for each in (keys.code_of, keys.digest, keys.imported):
            each.cache_clear()
        return keys.code_of(function)

    try:
        before = found()
        assert len(before) == 16 and int(before, 16) >= 0 and found() == before
        for name, text in files.items():
            (tmp_path / name).write_text(text + "# more\n")
            matters = name not in ("other/a.py", "home/notes.md", "one/other.py")
            assert (found() != before) == matters, name
            (tmp_path / name).write_text(text)
        listed = Path.iterdir
        for order in (sorted, lambda files: sorted(files, reverse=True)):
            monkeypatch.setattr(Path, "iterdir", lambda self, order=order: iter(order(listed(self))))
            assert found() == before
        (tmp_path / "three" / "module.py").rename(tmp_path / "three" / "renamed.py")
        assert found() != before
    finally:
        for each in (keys.code_of, keys.digest, keys.imported):
            each.cache_clear()


def test_pairs_are_read_as_pairs(tmp_path: Path) -> None:
    """Their columns are clean and corrupted, as on the command line, and not text and label."""
    file = tmp_path / "pairs.csv"
    for text, said in (("clean,corrupted\na b,a c\n", None), (EXAMPLES, "has no column 'clean'")):
        file.write_text(text)
        for verb in ("patch", "circuit"):
            plan = planned({"models": ["demo/sst2-mamba2"], "analyses": [{verb: {"data": str(file)}}]})
            if said is None:
                sources.check_sources(plan)
                continue
            refuses(said, sources.check_sources, plan)
