"""Series from files and tables, on the command line and in Python, and models that a user's code makes."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from refusals import refuses
import ssmscope
from ssmscope.cli import run
from ssmscope.data.series import read_series
from ssmscope.loading.code import is_import_string
from ssmscope.loading.load import locate
from ssmscope.render.series import draw_series, svg
from ssmscope.render.token_figure import colours_of_row

NETWORK = """
import torch
from torch import nn

import ssmscope


class Unit(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.candidate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, u):
        gate, candidate = self.gate(u).sigmoid(), self.candidate(u)
        h, found = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = (1 - gate[:, t]) * h + gate[:, t] * candidate[:, t]
            found.append(h)
        return torch.stack(found, 1)


def terms(layer, u):
    gate = layer.gate(u).sigmoid().unsqueeze(-1)
    one = torch.ones_like(gate)
    return ssmscope.Recurrence(x=layer.candidate(u).unsqueeze(-1), b=gate, c=one, log_a=torch.log1p(-gate))


ssmscope.adapt(Unit, terms=terms, form=ssmscope.Form(values="candidate", out=None))
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(3, 8), Unit(8), nn.Linear(8, 2)).eval()


def model():
    return ssmscope.load(module, at=-1, labels=["low", "high"], example=torch.randn(2, 9, 3))


def fails():
    raise ValueError("no weights\\nhere")


number = 3
"""

Given = tuple[Path, np.ndarray, np.ndarray]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """A folder with the code of a model, and labelled series."""
    monkeypatch.chdir(tmp_path)
    Path("network.py").write_text(NETWORK)
    values = np.random.default_rng(0).normal(size=(6, 9, 3))
    return tmp_path, values, np.array(["low", "high", "high"] * 2)


def written(kind: str, values: np.ndarray, labels: np.ndarray) -> Path:
    """Write labelled series to a file of this kind; in a table of steps the rows are in no order."""
    path = Path(f"given-{kind}").with_suffix({"steps": ".csv", "lists": ".csv"}.get(kind, f".{kind}"))
    lists = pd.DataFrame({"series": [each.tolist() for each in values], "label": labels})
    if kind == "npz":
        np.savez(path, series=values, labels=labels)
    elif kind == "parquet":
        lists.to_parquet(path)
    elif kind == "lists":
        lists.assign(series=[json.dumps(each) for each in lists["series"]]).to_csv(path, index=False)
    else:
        steps = [
            {"series": f"s{at}", "step": t, "label": labels[at], **dict(zip("uvw", step))}
            for at, each in enumerate(values)
            for t, step in enumerate(each)
        ]
        pd.DataFrame(steps).sample(frac=1, random_state=0).sort_values("series").to_csv(path, index=False)
    return path


@pytest.mark.parametrize("kind", ["npz", "parquet", "lists", "steps"])
def test_a_file_of_labelled_series_is_those_series(given: Given, kind: str) -> None:
    _, values, labels = given
    path = written(kind, values, labels)
    data = ssmscope.labelled_series(path, label_names=["low", "high"])
    np.testing.assert_allclose(data.pixels, values, atol=1e-12)
    assert [data.label_names[label] for label in data.labels] == labels.tolist() and data.name == path.stem
    model = ssmscope.load("network.py:model")
    found = ssmscope.evaluate(model, path).to_frame()
    answers = model.logits(model.encode(torch.tensor(values))).argmax(1)
    right = np.mean([["low", "high"][answer] == label for answer, label in zip(answers, labels)])
    assert float(found["value"].iloc[0]) == pytest.approx(right)


def test_series_may_have_several_lengths(given: Given) -> None:
    _, values, _ = given
    own = [values[0], values[1, :4]]
    steps = [pd.DataFrame(each, columns=list("uvw")).assign(series=at) for at, each in enumerate(own)]
    table = pd.concat(steps)
    for found in (read_series(table).values, read_series([{"series": each.tolist()} for each in own]).values):
        assert all(np.array_equal(one, other) for one, other in zip(found, own))
    model = ssmscope.load("network.py:model")
    assert model.encode(read_series(table).values).lengths == [9, 4]
    refuses("have 4 to 9 steps; data need one length", ssmscope.labelled_series, table, [0, 1])
    np.save("one.npy", values[0].astype(np.float32))
    (one,) = read_series("one.npy").values
    assert one.dtype == np.float32 and np.array_equal(one, values[0].astype(np.float32))
    flat = read_series([{"series": [1, 2, 3]}]).values
    assert flat[0].tolist() == [[1], [2], [3]]


def test_the_command_line_answers_as_python_does(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    _, values, labels = given
    np.save("two.npy", values[:2])
    model = ssmscope.load("network.py:model")
    verbs = {"heatmap": {}, "explain": {"methods": ["gradxinput"]}, "attention": {}, "stability": {}}
    for verb, options in verbs.items():
        typed = [part for name, value in options.items() for part in (f"--{name}", ",".join(value))]
        assert run([verb, "network.py:model", "--series", "two.npy", "--json", *typed]) == 0
        found = [
            json.loads(capsys.readouterr().out),
            *(json.loads(getattr(ssmscope, verb)(model, x, **options).to_json()) for x in (values[:2], "two.npy")),
        ]
        first, *others = [{name: value for name, value in each.items() if name != "provenance"} for each in found]
        assert all(other == first for other in others), verb
    path = str(written("parquet", values, labels))
    for verb, options in {"noise": ["--change", "dropped"], "position": [], "ablate": [], "fidelity": []}.items():
        assert run([verb, "network.py:model", "--series", path, "--json", *options]) == 0, verb
        assert json.loads(capsys.readouterr().out)["provenance"]["data"]["name"] == "given-parquet"
    for at in range(2):
        np.save(f"{at}.npy", values[at])
    own = ["--answer", "low", "--contrast", "high"]
    assert run(["patch", "network.py:model", "--clean", "0.npy", "--corrupted", "1.npy", "--json", *own]) == 0
    found = ssmscope.patch(model, clean=values[0], corrupted=values[1], answer="low", contrast="high")
    assert json.loads(capsys.readouterr().out)["values"] == json.loads(found.to_json())["values"]


@pytest.mark.parametrize(("model", "options", "said"), [
    ("network.py:model", ["--series", "absent.npy"], "there is no file absent.npy"),
    ("network.py:model", ["--series", "network.py"], "is no file of series; its name must end in .npy, .npz"),
    ("network.py:model", ["--series", "flat.npy"], r"are (9,) float64; give numbers (length, channels)"),
    ("network.py:model", ["--series", "narrow.npy"], "series 0 is (9, 2); the model reads (length, 3)"),
    ("network.py:model", ["--series", "objects.npy"], "could not be read as npy"),
    ("network.py:model", ["--series", "damaged.npz"], "could not be read as npz"),
    ("network.py:model", ["--series", "several.npz"], "holds the arrays a, b; call that of the series"),
    ("network.py:model", ["--series", "words.csv"], "has 'x' in the column 'v', which is read as a channel"),
    ("network.py:model", ["--series", "mixed.csv"], "another label than the earlier steps of series a"),
    ("network.py:model", ["--series", "ragged.jsonl"], "give a list of numbers at each step"),
    ("network.py:model", ["--series", "narrow.npy", "--ids", "1"], "--series cannot be combined with"),
    ("network.py:model", ["--text", "hello"], "reads series of 3 channels: give --series"),
    ("network.py:fails", ["--series", "narrow.npy"], "failed with ValueError: no weights (line"),
    ("network.py:number", ["--series", "narrow.npy"], "gives a int; it has to give a torch module"),
    ("network.py:modle", ["--series", "narrow.npy"], "has no 'modle'"),
    ("absent.py:model", ["--series", "narrow.npy"], "there is no file absent.py"),
    ("absent_package:model", ["--series", "narrow.npy"], "No module named 'absent_package'"),
    ("demo/sst2-mamba2", ["--series", "narrow.npy"], "reads tokens, not series of numbers"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(given, capsys, model, options, said) -> None:
    _, values, _ = given
    np.save("flat.npy", values[0, :, 0])
    np.save("narrow.npy", values[0, :, :2])
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    Path("damaged.npz").write_bytes(b"PK\x03\x04 and no more")
    np.savez("several.npz", a=values, b=values)
    Path("words.csv").write_text("u,v,w\n1,x,2\n")
    Path("mixed.csv").write_text("series,u,v,w,label\na,1,2,3,low\na,1,2,3,high\n")
    Path("ragged.jsonl").write_text('{"series": [[1, 2, 3], [4]]}\n')
    assert run(["heatmap", model, *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_data_of_series_need_labels_and_no_other_data(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    _, values, labels = given
    np.save("bare.npy", values)
    path = str(written("npz", values, labels))
    for options, said in {
        ("--series", "bare.npy"): "bare has no labels; give a column 'label'",
        ("--series", path, "--data", path): "cannot be combined with --data",
        (): "no data; give --series",
    }.items():
        assert run(["noise", "network.py:model", *options]) == 2
        assert said in capsys.readouterr().err


def test_the_command_line_asks_about_a_position(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    _, values, _ = given
    np.save("one.npy", values[0])
    asked = ["explain", "network.py:model", "--series", "one.npy", "--methods", "gradxinput", "--json"]
    model = ssmscope.load("network.py:model")
    found = [ssmscope.explain(model.at(at), values[:1], methods=["gradxinput"]) for at in (4, -1)]
    for typed, expected in zip((["--at", "4"], []), found):
        assert run([*asked, *typed]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["texts"] == json.loads(expected.to_json())["texts"] and "at" not in told["provenance"]["options"]
    assert run([*asked, "--at", "9"]) == 2
    assert "there is no position 9 in an input of 9" in capsys.readouterr().err


def test_code_runs_only_where_it_is_named(given: Given) -> None:
    assert is_import_string("network.py:model") and is_import_string("some.package:make")
    assert not any(map(is_import_string, ["demo/x", "owner/name", "C:\\models\\x", "network.py", "a b:c", ":x"]))
    Path("a:b").mkdir()
    assert not is_import_string("a:b")
    refuses("is Python code", locate, "network.py:model")
    model = ssmscope.load("network.py:model", dtype="float64", labels=["a", "b"])
    assert model.labels == ["a", "b"] and model.source["dtype"] == "float64" and model.name == "network.py:model"
    assert ssmscope.load("network.py:model").labels == ["low", "high"]


def test_a_series_is_drawn_above_its_map_on_the_same_steps(given: Given) -> None:
    _, values, _ = given
    model = ssmscope.load("network.py:model")
    found = ssmscope.explain(model, [values[0], values[1, :4]], methods=["gradxinput"])
    above, below, *other = [axes for axes in found.figure().axes if axes.get_xlim()[0] == -0.5]
    assert above.get_xlim() == below.get_xlim() == (-0.5, 8.5) and other[0].get_xlim() == (-0.5, 3.5)
    np.testing.assert_allclose([line.get_ydata() for line in above.lines], values[0].T, rtol=1e-6)
    assert [text.get_text() for text in above.get_legend().texts] == ["channel 0", "channel 1", "channel 2"]
    (strip,) = below.images
    shades = colours_of_row(found.token_rows().texts[0].rows[0])
    assert strip.get_array().shape[:2] == (1, 9) and strip.get_extent()[:2] == [-0.5, 8.5]
    np.testing.assert_allclose(strip.get_array()[0], [to_rgb(shade) for shade in shades])
    page = found.to_html()
    first, second = re.findall(r'<svg class="series" viewBox="0 0 (\d+) 100".*?</svg>', page)
    assert (first, second) == ("9", "4")
    drawn = [re.findall(r'points="(.*?)"', part) for part in re.findall("<svg.*?</svg>", page)][0]
    points = np.array([[list(map(float, point.split(","))) for point in line.split()] for line in drawn])
    np.testing.assert_allclose(points[:, :, 0], np.tile(np.arange(9) + 0.5, (3, 1)))
    low, high = values[0].min(), values[0].max()
    np.testing.assert_allclose(points[:, :, 1], 4 + 92 * (high - values[0].T) / (high - low), atol=0.01)
    steps = re.findall(r'<p class="tokens steps">(.*?)</p>', page)
    assert [len(re.findall("<span", row)) for row in steps] == [9, 4] and "position 8" in steps[0]
    found.save(Path(), "found", ["json"])
    again = type(found).load("found.json")
    np.testing.assert_array_equal(again[1].series, values[1, :4].astype(np.float32))


def test_many_channels_have_one_colour_and_no_legend() -> None:
    axes = Figure().subplots()
    draw_series(axes, np.arange(24.0).reshape(3, 8))
    assert len({line.get_color() for line in axes.lines}) == 1 and axes.get_legend() is None
    assert axes.get_ylabel() == "8 channels" and svg(np.ones((3, 8))).count("<polyline") == 8
