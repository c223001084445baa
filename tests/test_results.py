"""Results: exact round trips through JSON, safe pages, saving that leaves all files or none."""

import ast
import base64
import dataclasses
import importlib
import json
import math
import tracemalloc
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from refusals import refuses
from warm import PLAIN, TRANSFORMERS
from ssmscope.api import analyses as registry
from ssmscope.api import jsonable, results
from ssmscope.api.jsonable import MAX_LISTED_NUMBERS
from ssmscope.api.provenance import record_provenance
from ssmscope.api.results import Result
from ssmscope.errors import InputError


@dataclass(frozen=True, eq=False)
class Part:
    name: str
    values: np.ndarray


@dataclass(frozen=True)
class Sample(Result, kind="test-sample"):
    parts: tuple[Part, ...]
    mean: float
    limit: float | None
    pair: tuple[int, str]
    names: Mapping[str, tuple[float, ...]]
    choice: str | tuple[int, ...]
    note: str = "a default"
    table: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))

    def to_frame(self):
        return pd.DataFrame({"part": [part.name for part in self.parts], "mean": self.mean})

    def figure(self):
        figure = Figure(figsize=(2, 1))
        figure.add_axes((0.2, 0.2, 0.7, 0.7)).plot([0, 1])
        return figure


@dataclass(frozen=True)
class Broken(Sample, kind="test-broken"):
    def figure(self):
        raise RuntimeError("no picture today")


@pytest.fixture
def provenance():
    return record_provenance({"model": "<script>alert(1)</script>"}, options={"top": 5, "layers": [0, 2]}, seed=7)


def sample(provenance, cls=Sample, **changes):
    values = np.array([0.1, 1 / 3, np.nan, np.inf, -np.inf, 3.4e38, 1e-45], dtype=np.float32)
    fields = dict(
        parts=(Part("<b>one</b>", values), Part("two", np.array([[True, False]]))), mean=math.nan, limit=math.inf,
        pair=(3, "x"), names={"a": (0.1, math.nan)}, choice=(1, 2),
    )  # fmt: skip
    return cls(provenance=provenance, **{**fields, **changes})


def refuse(constant):
    raise AssertionError(f"not JSON: {constant}")


def test_json_brings_everything_back_exactly(provenance):
    first = sample(provenance)
    again = Result.from_dict(json.loads(first.to_json(), parse_constant=refuse))
    assert type(again) is Sample and again == first and again.to_json() == first.to_json()
    for before, after in zip(first.parts, again.parts, strict=True):
        assert after.values.dtype == before.values.dtype
        np.testing.assert_array_equal(after.values, before.values)
    assert math.isnan(again.mean) and again.limit == math.inf and again.pair == (3, "x")
    assert again.names["a"][0] == 0.1 and math.isnan(again.names["a"][1])
    assert again.choice == (1, 2) and again.table.shape == (0, 3)
    assert Result.from_dict(sample(provenance, choice="all", limit=None).to_dict()).choice == "all"


def odd_numbers(size, dtype):
    numbers = np.random.default_rng(0).normal(size=size).astype(dtype)
    if np.dtype(dtype).kind == "f":
        tiny = np.finfo(dtype).smallest_subnormal
        numbers[:6] = [np.nan, np.inf, -np.inf, -0.0, 0.0, tiny]
    return numbers


@pytest.mark.parametrize("dtype", ["float32", "float64", ">f4", "float16", "int64", ">i2", "uint8", "bool"])
def test_large_arrays_come_back_bit_for_bit_from_few_bytes(provenance, dtype):
    values = odd_numbers(2 * (MAX_LISTED_NUMBERS // 2 + 1), dtype).reshape(2, -1)
    first = sample(provenance, parts=(Part("large", values), Part("strided", values[:, ::-1].T)))
    text = first.to_json()
    document = json.loads(text, parse_constant=refuse)
    assert document["parts"][0]["values"].keys() == {"dtype", "shape", "zlib"}
    assert len(text) < 2 * 1.6 * values.nbytes + 3000
    again = Result.from_dict(document)
    assert again == first and again.to_json() == text
    for before, after in zip(first.parts, again.parts, strict=True):
        assert after.values.dtype == before.values.dtype.newbyteorder("=") and after.values.shape == before.values.shape
        assert after.values.tobytes() == before.values.astype(after.values.dtype).tobytes()
        after.values[0, 0] = 1  # as writable as any


def test_small_arrays_and_texts_stay_lists_that_can_be_read(provenance):
    texts = np.array(["a", "b"] * MAX_LISTED_NUMBERS)
    parts = (Part("at the limit", np.zeros(MAX_LISTED_NUMBERS)), Part("texts", texts))
    first = sample(provenance, parts=parts)
    document = json.loads(first.to_json(), parse_constant=refuse)
    assert all(isinstance(part["values"]["values"], list) for part in document["parts"])
    assert (Result.from_dict(document).parts[1].values == texts).all()


def test_a_list_of_any_length_still_loads(provenance):
    values = odd_numbers(MAX_LISTED_NUMBERS + 5, "float32")
    document = sample(provenance).to_dict()
    listed = [None if math.isnan(v) else v if math.isfinite(v) else str(v) for v in values.tolist()]
    document["parts"][0]["values"] = {"dtype": "float32", "shape": [len(listed)], "values": listed}
    assert Result.from_dict(json.loads(json.dumps(document))).parts[0].values.tobytes() == values.tobytes()


def test_results_with_nan_of_other_bits_are_equal(provenance):
    values = np.full(MAX_LISTED_NUMBERS + 1, np.nan, dtype=np.float32)
    other = (values.view(np.uint32) ^ np.uint32(0x80000001)).view(np.float32)
    assert np.isnan(other).all() and other.tobytes() != values.tobytes()
    assert sample(provenance, parts=(Part("", values),)) == sample(provenance, parts=(Part("", other),))


def packed(data):
    return base64.b64encode(data).decode()


COMPRESSED = zlib.compress(b"\0" * 48_000)


@pytest.fixture(scope="module")
def bomb():
    squeezer = zlib.compressobj(9)
    return b"".join([*(squeezer.compress(b"\0" * 10**6) for _ in range(200)), squeezer.flush()])


@pytest.mark.parametrize("shape", [[12_000], [10**8], [2**28, 2]])
def test_a_compressed_bomb_takes_no_memory(provenance, bomb, shape):
    document = sample(provenance).to_dict()
    document["parts"][0]["values"] = {"dtype": "float32", "shape": shape, "zlib": packed(bomb)}
    tracemalloc.start()
    try:
        refuses("damaged", Result.from_dict, document)
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_an_array_beyond_the_limit_is_listed_and_not_inflated(provenance, monkeypatch):
    first = sample(provenance, parts=(Part("", np.arange(MAX_LISTED_NUMBERS + 1)),))
    small = first.to_dict()
    monkeypatch.setattr(jsonable, "MAX_COMPRESSED_BYTES", 8 * MAX_LISTED_NUMBERS)
    assert isinstance(first.to_dict()["parts"][0]["values"]["values"], list)
    assert Result.from_dict(json.loads(first.to_json())) == first
    refuses("cannot be read as an array of shape", Result.from_dict, small)


def test_results_that_differ_are_not_equal(provenance):
    first = sample(provenance)
    assert first != sample(provenance, parts=first.parts[:1]) and first != sample({**provenance, "seed": 8})
    assert first != "something else"


def test_provenance_names_versions_date_options_and_seed(provenance):
    assert set(provenance["versions"]) == {"ssmscope", "torch", "transformers"}
    assert provenance["options"] == {"top": 5, "layers": [0, 2]} and provenance["seed"] == 7
    assert provenance["date"].endswith("+00:00")


def test_save_writes_four_files_that_say_the_same(tmp_path, provenance):
    first = sample(provenance)
    paths = first.save(tmp_path / "new" / "folder", "sample")
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "sample.csv", "sample.html", "sample.json", "sample.png",
    ]  # fmt: skip
    assert Result.load(paths["json"]) == first == Sample.load(paths["json"])
    assert pd.read_csv(paths["csv"])["part"].tolist() == ["<b>one</b>", "two"]
    assert paths["png"].read_bytes().startswith(b"\x89PNG") and paths["html"].read_text() == first.to_html()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up"])
def test_save_refuses_a_name_that_leaves_the_folder(tmp_path, provenance, name):
    refuses("not a file name", lambda: sample(provenance).save(tmp_path, name))


def test_save_says_what_is_in_the_way(tmp_path, provenance):
    (tmp_path / "file").write_text("")
    refuses("cannot write to .*file", lambda: sample(provenance).save(tmp_path / "file", "sample"))
    (tmp_path / "sample.png").mkdir()
    refuses(r"sample\.png: a folder", lambda: sample(provenance).save(tmp_path, "sample"))
    assert not (tmp_path / "sample.json").exists()


def test_load_refuses_what_is_no_result(tmp_path, provenance):
    path = tmp_path / "x.json"
    refuses("cannot read", Result.load, path)
    document = sample(provenance).to_dict()
    cases = {
        "is not a result": [b"\x89PNG\r\n\xff", b"not json", b""],
        "not a result": [b"[1, 2]", b"{}", b'{"kind": 3}'],
        "did you mean 'test-sample'": [json.dumps({**document, "kind": "test-sampel"}).encode()],
        "lacks mean": [json.dumps({k: v for k, v in document.items() if k != "mean"}).encode()],
        "has no surprise": [json.dumps({**document, "surprise": 1}).encode()],
        "damaged": [json.dumps({**document, "parts": 3}).encode(), json.dumps({**document, "pair": [1]}).encode()],
    }
    for message, contents in cases.items():
        for content in contents:
            path.write_bytes(content)
            refuses(message, Result.load, path)
    path.write_text(json.dumps(document))
    refuses("is not a Broken", Broken.load, path)


@pytest.mark.parametrize("path", ["ssmscope.__main__.X", "ssmscope.cli.command.X", "ssmscope.zoo.training.run.X"])
def test_load_imports_nothing_that_a_file_names(tmp_path, provenance, path):
    """`ssmscope.__main__` is the command line: importing it runs whatever sys.argv says, and ends the process."""
    file = tmp_path / "x.json"
    nested = {"class": path, "kind": "evil"}
    document = {**sample(provenance).to_dict(), "class": path, "provenance": {"model": "m", "inner": nested}}
    file.write_text(json.dumps({"own": document, "other": {"kind": "evil", **nested}}))
    code = (
        "import json, sys; sys.argv = ['analyze', 'models']\n"
        "from ssmscope.errors import InputError\n"
        "from ssmscope.api.results import Result\n"
        "before = set(sys.modules)\n"
        f"for name, document in json.load(open({str(file)!r})).items():\n"
        "    try: Result.from_dict(document)\n"
        "    except InputError as error: print(name, str(error)[:22])\n"
        f"print({path.rpartition('.')[0]!r} in set(sys.modules) - before, 'torch' in sys.modules)"
    )
    done = PLAIN.run(code)
    done.check_returncode()
    assert done.stdout.splitlines() == ["own unknown kind of result", "other unknown kind of result", "False False"]


def test_every_kind_is_read_from_the_module_that_defines_it():
    """The table of analyses has every kind of result of the package, and nothing else."""
    defined = {}
    for file in Path(results.__file__).parents[1].rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "kind" in text and "class" in text else ():
            if isinstance(node, ast.ClassDef):
                for keyword in node.keywords:
                    if keyword.arg == "kind":
                        place = file.relative_to(Path(results.__file__).parents[1]).with_suffix("")
                        defined[ast.literal_eval(keyword.value)] = ".".join(place.parts)
    for kind, place in defined.items():
        home = f"ssmscope.{place.rpartition('.')[0]}.result"
        assert registry.result_homes()[kind] == ("ssmscope.interp.paired" if kind == "pair" else home)
    assert sorted(registry.result_homes()) == sorted(defined)
    code = (
        "from ssmscope.errors import InputError\nfrom ssmscope.api.results import Result\n"
        f"for kind in {sorted(defined)}:\n"
        "    try: Result.from_dict({'kind': kind})\n"
        "    except InputError as error: assert f'damaged result of kind {kind!r}' in str(error), error"
    )
    TRANSFORMERS.run(code).check_returncode()


@pytest.mark.parametrize("values", [
    {"dtype": "U500000000", "shape": [1], "values": [""]},
    {"dtype": "U50000", "shape": [999], "values": ["a"] * 999},
    {"dtype": "U3", "shape": [1], "values": [7]},
    {"dtype": "int64", "shape": [0, 10**30], "values": []},
    {"dtype": "int64", "shape": [1], "values": [10**30]},
    {"dtype": "float64", "shape": [1], "values": [10**400]},
    {"dtype": ["i4", "i4"], "shape": [1], "values": [7]},
    {"dtype": {"names": ["a"], "formats": ["i4"]}, "shape": [1], "values": [7]},
    {"dtype": None, "shape": [1], "values": [7]},
    {"dtype": "(9999999,)i4", "shape": [1], "values": [7]},
])  # fmt: skip
def test_arrays_that_ask_for_all_memory_or_are_none_are_refused(provenance, values):
    document = json.loads(sample(provenance).to_json())
    document["parts"][0]["values"] = values
    tracemalloc.start()
    try:
        refuses("damaged result of kind 'test-sample'", Result.from_dict, document)
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_numbers_beyond_any_float_and_nesting_without_end_are_refused(tmp_path, provenance):
    document = json.loads(sample(provenance).to_json())
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**document, "mean": 10**400}))
    refuses("damaged", Result.load, path)
    path.write_text("[" * 200_000)
    refuses("is not a result", Result.load, path)
    refused = []
    for depth in range(100, 1600, 100):
        path.write_text(json.dumps(document).replace('"seed": 7', f'"seed": {"[" * depth}{"]" * depth}'))
        try:
            assert Result.load(path).to_html()
        except InputError:
            refused.append(depth)
    assert refused and refused == list(range(refused[0], 1600, 100))


def test_pages_escape_what_users_write(provenance):
    page = sample(provenance).to_html()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "<b>one" not in page and "&lt;b&gt;one" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_kind_belongs_to_one_class():
    with pytest.raises(TypeError, match="already taken"):
        type("Other", (Sample,), {}, kind="test-sample")


def test_every_table_says_which_model_each_row_is_of(provenance, tmp_path):
    frame = sample(provenance).to_frame()
    assert list(frame) == ["model", "part", "mean"] and set(frame.model) == {provenance["model"]}
    path = sample(provenance).save(tmp_path, "sample", ["csv"])["csv"]
    pd.testing.assert_frame_equal(pd.read_csv(path), frame)
    several = type("Several", (Sample,), {"to_frame": lambda self: pd.DataFrame({"a": [1, 2], "model": ["x", "y"]})})
    fields = {each.name: getattr(sample(provenance), each.name) for each in dataclasses.fields(Sample)}
    assert several(**fields).to_frame().model.tolist() == ["x", "y"]
    assert "model" not in str(sample(provenance)).split("part")[0].split("\n")[-1]  # the title names it
    for kind, home in registry.result_homes().items():
        importlib.import_module(home)
        assert hasattr(Result._kinds[kind].to_frame, "__wrapped__"), kind


def test_text_views(provenance):
    first = sample(provenance)
    assert repr(first) == "<Sample: test-sample of <script>alert(1)</script>>"
    assert "<b>one</b>" in str(first) and "\x1b" not in str(first)


def test_arrays_of_texts_say_their_width_in_characters(provenance):
    values = np.array([["abc", "de"], ["", "ä"]])
    document = sample(provenance, parts=(Part("", values),)).to_dict()
    expected = {"dtype": "U3", "shape": [2, 2], "values": [["abc", "de"], ["", "ä"]]}
    assert document["parts"][0]["values"] == expected
    assert Result.from_dict(document).parts[0].values.dtype == np.dtype("U3")


@pytest.mark.parametrize(("change", "said"), [
    ({"shape": [-12_000]}, "expected the sizes of an array, not [-12000]"),
    ({"shape": [-1, -12_000]}, "expected the sizes of an array, not [-1, -12000]"),
    ({"shape": [True, 12_000]}, "expected the sizes of an array, not [True, 12000]"),
    ({"shape": 12_000}, "expected the sizes of an array, not 12000"),
    ({"shape": [11_999]}, "expected 47996 bytes for an array of shape [11999], not more"),
    ({"shape": [12_001]}, "expected 48004 bytes for an array of shape [12001], not only 48000"),
    ({"zlib": 7}, "expected compressed numbers, not 7"),
    ({"zlib": packed(COMPRESSED) + "\n"}, "Only base64 data is allowed"),
    ({"zlib": packed(COMPRESSED[:-1])}, "cut off, or followed by something else"),
    ({"zlib": packed(COMPRESSED + b"more")}, "cut off, or followed by something else"),
    ({"zlib": packed(b"no zlib" * 100)}, "damaged compressed numbers: "),
    ({"shape": [10**8]}, f"{len(COMPRESSED)} compressed bytes cannot be read as an array of shape"),
    ({"dtype": "U4"}, "expected a compressed array of numbers, not of U4"),
    ({"dtype": "object"}, "expected the name of a dtype of numbers or text, not 'object'"),
])  # fmt: skip
def test_a_damaged_array_is_told_by_what_is_wrong_with_it(provenance, change, said):
    document = sample(provenance).to_dict()
    document["parts"][0]["values"] = {"dtype": "float32", "shape": [12_000], "zlib": packed(COMPRESSED), **change}
    with pytest.raises(InputError) as raised:
        Result.from_dict(document)
    assert said in str(raised.value)


@dataclass(frozen=True)
class Union(Result, kind="test-union"):
    value: tuple[int, ...] | Mapping[str, float] | float | str | None
    part: Part | str
    parts: Sequence[float]
    anything: Any = None

    def to_frame(self):
        return pd.DataFrame({"a": [1]})


@pytest.mark.parametrize(("value", "again"), [
    ((3, 1), (3, 1)), ({"a": math.inf}, {"a": math.inf}), (2.5, 2.5), (math.inf, math.inf), (-math.inf, -math.inf),
    ("infinite", "infinite"), ("", ""), (None, None), (np.float32(0.5), 0.5),
])  # fmt: skip
def test_a_field_of_several_types_comes_back_as_what_it_was(provenance, value, again):
    part = Part("x", np.arange(3))
    found = Result.from_dict(json.loads(Union(provenance, value, part, [1.5, math.inf], {"b": [1]}).to_json()))
    assert found.value == again and type(found.value) is type(again)
    assert type(found.part) is Part and found.parts == [1.5, math.inf] and found.anything == {"b": [1]}
    assert Result.from_dict(Union(provenance, None, "name", []).to_dict()).part == "name"


@pytest.mark.parametrize(("changed", "said"), [
    ({"mean": "x"}, "could not convert"), ({"pair": [1]}, "expected 2 values, not 1"),
    ({"pair": ["x", 1]}, "expected int, not 'x'"), ({"parts": [3]}, "expected the fields of Part, not 3"),
    ({"parts": [{"name": "x"}]}, "Part lacks values"),
    ({"parts": [{"name": "x", "values": 3, "b": 1, "a": 2}]}, "Part has no a, b"),
    ({"names": 3}, "expected Mapping, not 3"), ({"note": 3}, "expected str, not 3"),
])  # fmt: skip
def test_a_wrong_field_is_told_with_its_type(provenance, changed, said):
    with pytest.raises(InputError) as raised:
        Result.from_dict({**sample(provenance).to_dict(), **changed})
    assert str(raised.value).startswith(f"a damaged result of kind 'test-sample': {said}")


@pytest.mark.parametrize("value", [{1, 2}, np.array([1j]), np.array([object()]), 1j])
def test_what_no_result_can_hold_is_refused(provenance, value):
    with pytest.raises(TypeError, match="a result cannot hold a"):
        Union(provenance, 1.0, "x", [], value).to_dict()


def test_json_holds_numbers_of_numpy_as_numbers():
    encoded = jsonable.encode([np.float64(0.1), np.int8(3), np.bool_(True), (math.nan, -math.inf), {3: None}])
    assert encoded == [0.1, 3, True, [None, "-inf"], {"3": None}]
    assert [type(each) for each in encoded[:3]] == [float, int, bool]


def test_a_class_may_be_defined_again_where_it_was(provenance):
    """Notebooks do so, and `importlib.reload`."""
    again = type("Sample", (Sample,), {"__module__": Sample.__module__, "__qualname__": "Sample"}, kind="test-sample")
    try:
        assert Result._kinds["test-sample"] is again
    finally:
        Result._kinds["test-sample"] = Sample
    with pytest.raises(TypeError, match=r"'test-sample' of .*\.Other is already taken by .*\.Sample"):
        type("Other", (Sample,), {"__module__": Sample.__module__, "__qualname__": "Other"}, kind="test-sample")


def test_views_begin_with_title_paragraphs_notes_and_picture(provenance):
    title, first, second, note, picture = sample(provenance).opening("One.", "Two.", notes=["three"])
    assert [(each.text, each.kind) for each in (title, note)] == [
        (sample(provenance).headline, "title"),
        ("Note: three.", "note"),
    ]
    assert (first.text, second.text) == ("One.", "Two.") and first.kind == second.kind == "text"
    assert picture.alt == sample(provenance).headline and picture.vector


def test_formats_have_the_result_first_and_their_own_order():
    assert results.checked_formats([]) == ("json",)
    assert results.checked_formats(["tex", "csv", "csv"]) == ("json", "csv", "tex")
    refuses(r"unknown format 'jsn'; allowed are json, .*; did you mean 'json'", results.checked_formats, ["csv", "jsn"])
