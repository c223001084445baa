"""Python takes data as the command line does: by name, path, table or list, in every verb that reads some."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from refusals import refuses
import ssmscope
from ssmscope.api.analyses import ANALYSES, analysis_of
from ssmscope.api.inputs import Named
from ssmscope.cli import run
from ssmscope.data.rows import given_rows
from ssmscope.data.text import text_data
from ssmscope.errors import InputError, as_typed

ROWS = [("A gripping film.", "positive"), ("A dull film.", "negative"), ("moving", "positive"), ("a mess", "negative")]
FRAME = pd.DataFrame(ROWS, columns=["text", "label"])
SMALL: dict[str, dict[str, Any]] = {
    "fidelity": dict(methods=("gradxinput",)), "ablate": dict(what="layer"), "noise": dict(rates=(0.3,)),
    "insertion": dict(insert="film", places=2), "overflow": dict(lengths=(0, 40)), "words": dict(budget=1),
}  # fmt: skip
VERBS = ("ablate", "evaluate", "fidelity", "insertion", "noise", "overflow", "position", "words")
model = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/sst2-mamba2"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data") / "rows.csv"
    FRAME.to_csv(place, index=False)
    return place


def same(found: Any, expected: Any) -> None:
    """All numbers and the data are the same; a table is called "given" where the file is "rows"."""
    pd.testing.assert_frame_equal(found.to_frame().replace("given (all)", "rows (all)"), expected.to_frame())
    assert found.provenance["data"]["fingerprint"] == expected.provenance["data"]["fingerprint"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_reads_what_the_command_line_reads(verb: str, model: ssmscope.Model, path: Path) -> None:
    run = getattr(ssmscope, verb)
    known = analysis_of(verb).options
    options = {name: value for name, value in SMALL.get(verb, {}).items() if name in known}
    expected = run(model, ssmscope.load_text(path), **options)
    for given in (str(path), path, FRAME, ROWS):
        same(run(model, given, **options), expected)
    same(run(model, data=path, **options), expected)


def test_every_verb_of_data_takes_them() -> None:
    verbs = {name for name in ANALYSES if isinstance(analysis_of(name).reads, Named)}
    assert verbs == {*VERBS, "plausibility", "poison", "prompts", "lens fit"}


def test_rows_of_tables() -> None:
    class Listed(list):  # As polars has it.
        columns = ("text", "label")

        def to_dicts(self) -> list[dict[str, str]]:
            return FRAME.to_dict("records")

    for table in (FRAME, ROWS, [list(row) for row in ROWS], FRAME.to_dict("records"), Listed()):
        rows = given_rows(table)
        assert rows is not None and [(row["text"], row["label"]) for row in rows] == ROWS
    assert [row["text"] for row in given_rows(["a", "b"]) or ()] == ["a", "b"]
    assert given_rows([1, 2]) is None and given_rows("a") is None and given_rows(Path("a")) is None
    with pytest.raises(InputError, match="row 1 of the data has no text|the data has no column 'text'"):
        ssmscope.load_text(pd.DataFrame({"sentence": ["a"], "label": [1]}))
    refuses("row 2 of the data has no label", ssmscope.load_text, [("a", "x"), ("b", None)])
    assert ssmscope.load_text([("a", 1), ("b", 0)]).labels == (1, 0)


def test_a_heatmap_reads_labelled_texts_and_texts(model: ssmscope.Model, path: Path) -> None:
    expected = ssmscope.heatmap(model, ssmscope.load_text(path))
    same(ssmscope.heatmap(model, data=str(path)), expected)
    same(ssmscope.heatmap(model, FRAME), expected)
    texts = [text for text, _ in ROWS]
    alone = ssmscope.explain(model, texts, methods=("gradxinput",)).to_frame()
    for given in (dict(texts=FRAME), dict(text=texts)):
        pd.testing.assert_frame_equal(ssmscope.explain(model, **given, methods=("gradxinput",)).to_frame(), alone)


@pytest.mark.parametrize(("given", "said"), [
    (dict(data=[("a",)]), r"data is \[\('a',\)\]: give the name of a data set, a file's path, a DataFrame or"),
    (dict(data=5), "data is 5: give the name of a data set"),
    (dict(data=[]), "the data hold no rows"),
    (dict(data="nothing"), "unknown data 'nothing'; give one of"),
    (dict(data=ROWS, split="test"), "split 'test' was asked for, but a table has none"),
    (dict(data=text_data("t", "all", ["a"], [0], ["x", "y"]), split="test"), "split is for data that are named"),
    (dict(data=ROWS, max_tokens=2), "row 1 of given has 5 tokens"),
])  # fmt: skip
def test_what_is_no_data_is_refused(given: dict[str, Any], said: str, model: ssmscope.Model) -> None:
    refuses(said, ssmscope.evaluate, model, **given)


def test_texts_are_given_once(model: ssmscope.Model) -> None:
    for given in (dict(data="sst2"), dict(text=["b"]), dict(file="f")):
        refuses(f"texts and {next(iter(given))} were given; give one of them", ssmscope.heatmap, model, "a", **given)
    refuses("split is for data that are named; texts is a str", ssmscope.heatmap, model, "a", split="test")


def test_held_out_data_of_a_lens(model: ssmscope.Model, path: Path, tmp_path: Path) -> None:
    """A second input is read as the first."""
    short = dict(steps=2, look_every=1, progress=False)
    found = ssmscope.lens_fit(model, path, tmp_path / "a", validation=FRAME, **short)
    data = ssmscope.load_text(path)
    expected = ssmscope.lens_fit(model, data, tmp_path / "b", validation=ssmscope.load_text(FRAME), **short)
    pd.testing.assert_frame_equal(found.to_frame(), expected.to_frame())


def test_data_of_options(model: ssmscope.Model, path: Path) -> None:
    """Data that a verb reads besides its texts."""
    toward = dict(toward=["Good."], away=["Bad."], random=1, strengths=(0, 1))
    for measured in (
        lambda data: ssmscope.steer(model, "A film.", data=data, **toward),
        lambda data: ssmscope.heatmap(model, "A gripping film.", contrast=data),
    ):
        expected = measured(str(path)).to_frame()
        for given in (path, FRAME, ROWS):
            pd.testing.assert_frame_equal(measured(given).to_frame(), expected)
    refuses("contrast=… applies to single texts", ssmscope.heatmap, model, ROWS, contrast=FRAME)
    writer, texts = ssmscope.load("demo/books-mamba2"), ["the film is in the city of the king"] * 2
    found = [ssmscope.loss(writer, data=data, length=4, smooth=1) for data in (texts, pd.DataFrame({"text": texts}))]
    pd.testing.assert_frame_equal(found[1].to_frame(), found[0].to_frame())


def test_lines_of_a_language_model(tmp_path: Path) -> None:
    model = ssmscope.load("demo/books-mamba2")
    texts = ["the film is in the city of the king", "the song of the war was the first"]
    place = tmp_path / "lines.txt"
    place.write_text("\n".join(texts))
    options = dict(length=8, what="layer", steps=2)
    expected = ssmscope.ablate(model, place, **options)
    for given in (texts, pd.DataFrame({"text": texts})):
        pd.testing.assert_frame_equal(ssmscope.ablate(model, given, **options).to_frame(), expected.to_frame())


@pytest.mark.parametrize(("python", "typed"), [
    ("give it without through=… and from_=…", "give it without --through and --from"),
    ("give heads='mean', or pool=0", "give --heads mean, or --pool 0"),
    ("gradient=True cannot go with skip=False", "--gradient cannot go with --no-skip"),
    ("give images, model.encode(values=…), (or file='a b.txt')", "give images, --image, (or --file a b.txt)"),
    ("such as ig.baseline=…, ids=… (5)", "such as ig.baseline=…, --ids (5)"),
])  # fmt: skip
def test_messages_name_options_as_each_side_writes_them(python: str, typed: str) -> None:
    assert as_typed(python) == typed


def test_python_and_the_command_line_refuse_in_their_own_words(model, capsys) -> None:
    with pytest.raises(InputError, match="^half_lives=… concerns each layer's own writes; give it without through=…$"):
        ssmscope.heatmap(model, "a film", through=True, half_lives=True)
    assert run(["heatmap", "demo/sst2-mamba2", "--text", "a film", "--through", "--half-lives"]) == 2
    assert "--half-lives concerns each layer's own writes; give it without --through" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"^data=… cannot be combined with text=…, .*series=… or chat=…"):
        ssmscope.heatmap(model, data="sst2", text=["a film"])


def test_a_models_own_names_in_another_order_are_noted(model: ssmscope.Model, path: Path) -> None:
    turned = ssmscope.load("demo/sst2-mamba2", labels=["positive", "negative"])
    (said,) = ssmscope.evaluate(turned, path).provenance["notes"]
    assert "own names in another order; its logits are negative,positive" in said
    assert ssmscope.explain(turned, ["A film."], methods=["gradxinput"]).provenance["notes"] == [said]
    for labels in (["negative", "positive"], ["bad", "good"]):
        named = ssmscope.load("demo/sst2-mamba2", labels=labels)
        assert "notes" not in ssmscope.explain(named, ["A film."], methods=["gradxinput"]).provenance
