"""Controls of the live page and its small texts: words and defaults of options, signed changes, layers below their
average."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, Literal

import pandas as pd
import pytest
from ssmscope.api.options import NO_EFFECT, Reads
from ssmscope.api.signatures import options_of
from ssmscope.errors import InputError
from ssmscope.loading.load import load
from ssmscope.reports import live as module
from ssmscope.reports.live import Live, choices, form_options, form_values, refusal, shown


def function(
    *,
    word: Annotated[Literal["a", "b"], "A word."] = "b",
    maybe: Annotated[Literal["a", "b"] | None, "A word, or none."] = None,
    words: Annotated[Sequence[Literal["a", "b"]], "Several."] = ("b", "a"),
    number: Annotated[Literal["a"] | int, "A word or a number."] = 3,
    numbers: Annotated[Sequence[int] | None, "Several."] = None,
    flag: Annotated[bool, "A flag."] = True,
    file: Annotated[str | None, "A file.", Reads("file")] = None,
    cache: Annotated[str | None, "A cache.", NO_EFFECT] = None,
    left: Annotated[int, "Left out."] = 1,
) -> None: ...


OPTIONS = options_of(function)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An analysis of these options, of which one is left out."""
    monkeypatch.setattr(module, "analysis_of", lambda verb: SimpleNamespace(options=OPTIONS))
    monkeypatch.setattr(module, "EXCLUDED_OPTIONS", {"own": ("left",)})


def test_a_control_has_the_words_and_the_default_of_its_option(own) -> None:
    assert {name: (choices(each), shown(each)) for name, each in form_options("own").items()} == {
        "word": (("a", "b"), "b"), "maybe": (("", "a", "b"), ""), "words": ((), "b,a"), "number": ((), "3"),
        "numbers": ((), ""), "flag": ((), True),
    }  # fmt: skip


def test_values_of_a_form_are_those_of_the_options(own) -> None:
    given = {"word": " a ", "maybe": "", "number": " 7", "numbers": "1, 2", "flag": False, "words": " \t"}
    assert form_values("own", given) == {"word": "a", "number": 7, "numbers": [1, 2], "flag": False}
    for name in ("left", "file", "cache", "other"):
        with pytest.raises(
            InputError, match=f"own has no option '{name}' here; there are word, maybe, words, number, "
        ):
            form_values("own", {"word": "a", name: "x"})


@pytest.mark.parametrize(
    ("change", "said"),
    [(0.00049, "0.000"), (-0.00049, "0.000"), (0.0, "0.000"), (0.0006, "+0.001"), (-0.25, "−0.250"), (1.0, "+1.000")],
)
def test_a_change_has_its_sign(change: float, said: str) -> None:
    assert module._signed(change) == said


def test_a_refusal_is_one_line_of_text() -> None:
    assert refusal(InputError("a <b>\n  layers=… \x07")) == (
        '<div class="ssmscope"><p class="refusal" role="alert">a &lt;b&gt; --layers ␇</p></div>'
    )


live = pytest.fixture(scope="module")(lambda: Live([load("demo/sst2-mamba2")], max_tokens=30))


@pytest.mark.parametrize(("most", "rows"), [(1, 1), (2, 3), (8, 3)])
def test_few_layers_stand_below_their_average(monkeypatch, live, most, rows) -> None:
    monkeypatch.setattr(module, "MAX_LAYERS_SHOWN", most)
    assert live.heatmaps(0, "a good film", layer="mean")[0].count('<p class="tokens">') == rows


def test_the_best_of_each_side_is_marked(monkeypatch) -> None:
    rows = [["first", 0.5, 0.125], ["second", 0.25, 0.75], ["x" * 99, 0.1, 0.0625]]
    frame = pd.DataFrame(rows, columns=["name", "given", "edited"])
    frame["change"] = frame["edited"] - frame["given"]
    for name, edited, marks in (
        ("class", object(), [[True, False], [False, True], [False, False]]),
        ("next token", None, [[True], [False], [False]]),
    ):
        own = frame if edited is not None else frame[["name", "given"]]
        monkeypatch.setattr(module, "predictions", lambda *_, own=own: own)
        model = SimpleNamespace(is_classifier=name == "class")
        head, *lines = module._prediction(model, None, edited).split("<tr>")[1:]  # type: ignore[arg-type]
        titles = (
            "<th>p</th>" if edited is None else "<th>p of the text</th><th>p of the edited text</th><th>change</th>"
        )
        assert head == f"<th>{name}</th>{titles}</tr>"
        assert [
            [cell.startswith(' class="best"') for cell in line.split("<td")[2:4][: len(marks[0])]] for line in lines
        ] == marks
        assert "width:30.0px" in lines[0] and "0.500</td>" in lines[0] and "x" * 60 not in lines[2] and "…" in lines[2]
    assert len(lines) == 3
