"""Declared analyses and their calls: checks, the function's arguments, and the typed command."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from refusals import refusal, refuses
from ssmscope.api import analyses as registry
from ssmscope.api.analysis import Call, analysis
from ssmscope.api.inputs import Texts
from ssmscope.api.options import NO_EFFECT, Range, Reads, asked
from ssmscope.api.provenance import call_options
from ssmscope.api.writing import check_writable
from ssmscope.errors import InputError

Declare = Callable[..., Callable[..., Any]]


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Declare:
    """Declare an analysis for this test alone, which returns what its function received and what is recorded."""
    monkeypatch.setattr(registry.ANALYSES, "_found", dict(registry.ANALYSES._entries()))

    def declared(name: str = "own thing", **declaration: Any) -> Callable[..., Any]:
        @analysis(name, **declaration)
        def function(
            model: Any, given: Any = "nothing", *, size: Annotated[int, "A size.", Range(1)] = 5,
            from_: Annotated[str | None, "A text."] = None,
            place: Annotated[str | None, "A known name, or a file.", Reads("data")] = None,
            seed: Annotated[int, "Random seed."] = 3, fast: Annotated[bool, "Faster.", NO_EFFECT] = False,
        ) -> Any:  # fmt: skip
            return (
                model,
                given,
                {"size": size, "from_": from_, "place": place, "seed": seed, "fast": fast},
                call_options(),
            )

        return function

    return declared


def test_options_are_converted_and_recorded_while_the_function_runs(declare: Declare) -> None:
    function = declare()
    model, given, options, recorded = function("m", "text", size="7", from_="x", seed=4, fast=True)
    assert (model, given) == ("m", "text")
    assert options == {"size": 7, "from_": "x", "place": None, "seed": 4, "fast": True}
    assert recorded == {"size": 7, "from": "x"}  # neither the seed, nor data, nor what has no effect
    assert function("m")[3] == {"size": 5, "from": None} and asked.get("outside") == "outside"
    refuses("size is 0; allowed is a whole number from 1 on", function, "m", size=0)
    assert asked.get("outside") == "outside"


def test_iterators_are_read_once_and_a_lone_trace_stands_for_model_and_texts(declare: Declare) -> None:
    from ssmscope.core.trace import Trace

    function = declare()
    assert function("m", iter("ab"))[1] == ["a", "b"] and function("m", ("a", "b"))[1] == ("a", "b")
    trace = object.__new__(Trace)
    assert function(trace)[:2] == (None, trace) and function("m", trace)[:2] == ("m", trace)
    assert function("m")[:2] == ("m", "nothing")


def test_a_call_that_does_not_fit_names_the_verb_and_what_is_alike(declare: Declare) -> None:
    verb = declare("own thing")
    with pytest.raises(
        TypeError, match=r"^own_thing\(\) got an unexpected keyword argument 'sise'; did you mean 'size'"
    ):
        verb("model", sise=3)
    with pytest.raises(TypeError, match=r"^own_thing\(\) too many positional arguments$"):
        verb("model", "texts", 3)


def test_a_check_sees_all_options_with_defaults_and_the_number_of_models(declare: Declare) -> None:
    told: list[dict[str, Any]] = []

    def check(*, models: int, **options: Any) -> None:
        told.append({"models": models, **options})

    defaults = {"size": 5, "from_": None, "place": None, "seed": 3, "fast": False}
    declare(check=check, several=True)(["m", "n"], size=7)
    declare(check=check)(["m", "n"], seed=1)
    assert told == [{"models": 2, **defaults, "size": 7}, {"models": 1, **defaults, "seed": 1}]
    seen: list[dict[str, Any]] = []
    declare(check=lambda **options: seen.append(options))("m")
    assert seen == [defaults]


def test_two_models_are_paired_and_one_in_a_list_is_alone(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssmscope.interp.paired.pair", lambda found: ("pair", *(each[0] for each in found)))
    function = declare(pair="interp.paired:pair")
    assert function(["m"], "a")[:2] == ("m", "a") and function(("m", "n"), "a") == ("pair", "m", "n")
    for models in ([], ["m", "n", "o"]):
        refuses(f"own thing takes one model, or two; {len(models)} were given", function, models, "a")
    refuses("a batch, or a trace, is of one model", function, ["m", "n"], {"input_ids": 1})
    alone = declare()
    assert alone(["m", "n"])[0] == ["m", "n"]


def test_declarations_and_their_limits(declare: Declare) -> None:
    functions = [declare(**more) for more in ({}, {"pair": "interp.paired:pair"}, {"several": True})]
    one, two, many = (each.analysis for each in functions)
    assert [each.max_models for each in (one, two, many)] == [1, 2, math.inf]
    assert (
        one.module == __name__
        and [*one.inputs] == ["columns"]
        and list(replace(one, reads=Texts()).inputs)[:2] == ["text", "file"]
    )
    for declared, allowed in zip(functions, ("one model", "one model, or two", "one or more models")):
        registry.ANALYSES.add("own thing", declared)
        declared = declared.analysis
        most = int(min(declared.max_models, 3))
        assert Call.of("own thing", ["m"] * most, {}).models == ("m",) * most
        for models in ([], ["m"] * (most + 1)) if declared is not many else ([],):
            refuses(rf"own thing takes {allowed}$", Call.of, "own thing", models, {})


def test_a_call_is_checked_without_a_model(declare: Declare) -> None:
    declare(dtype="float32")
    for loading, said in (
        ({"dtype": "float3"}, "dtype 'float3' is unknown: choose one of auto, "),
        ({"dtype": "bfloat16"}, "own thing needs float32, or float64; leave dtype bfloat16 out"),
    ):
        refuses(said, Call.of, "own thing", ["m"], {}, **loading)
    for dtype in ("auto", "float32", "float64"):
        assert Call.of("own thing", ["m"], {}, dtype=dtype).dtype == dtype
    declare(loads=False)
    Call.of("own thing", ["m"], {})
    for loading, name in (
        ({"tokenizer": "t"}, "tokenizer"),
        ({"device": "cuda"}, "device"),
        ({"dtype": "float32"}, "dtype"),
    ):
        with pytest.raises(InputError, match=f"own thing has no option '{name}': it loads its models itself"):
            Call.of("own thing", ["m"], {}, **loading)
    with pytest.raises(InputError, match="no option 'siz'; it has columns, size, from_, .*; did you mean 'size'"):
        Call.of("own thing", ["m"], {"siz": 1})
    declare(reads=Texts())
    refuses("no text; give text=…", Call.of, "own thing", ["m"], {})


def test_a_call_is_typed_without_defaults(declare: Declare) -> None:
    declare(reads=Texts())
    given = {"text": ["a b", "c"], "size": "7", "seed": 3, "from_": "x", "fast": True, "max_tokens": None}
    call = Call.of("own thing", ["m"], given, tokenizer="t", device="cuda", dtype="float64")
    typed = ["own", "thing", "m", "--text", "a b", "--text", "c", "--size", "7", "--from", "x", "--fast"]
    loading = ["--tokenizer", "t", "--device", "cuda", "--dtype", "float64"]
    assert call.arguments == typed + loading
    assert call.command == "analyze " + " ".join(typed + loading).replace("a b", "'a b'")
    assert Call.of("own thing", ["m"], {"text": ["a"]}).arguments == ["own", "thing", "m", "--text", "a"]
    assert [option.name for option, _ in call.option_values()] == [
        *("text", "file", "ids", "image", "series", "chat", "max_tokens", "columns"),
        *("size", "from_", "place", "seed", "fast"),
    ]
    assert dict((option.name, value) for option, value in call.option_values())["size"] == 7


def test_a_required_option_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.ANALYSES, "_found", dict(registry.ANALYSES._entries()))

    @analysis("own")
    def function(model: Any, *, some_size: Annotated[int, "A size."]) -> None: ...

    for given in ({}, {"some_size": None}):
        refuses("missing option '--some-size'", Call.of, "own", ["m"], given)
    assert Call.of("own", ["m"], {"some_size": "4"}).arguments == ["own", "m", "--some-size", "4"]


def test_results_are_named_by_the_verb_and_several_by_their_kinds(declare: Declare) -> None:
    declare()
    call = Call.of("own thing", ["m"], {})
    one, two = (type("R", (), {"kind": kind})() for kind in ("a", "b"))
    assert call.named([one]) == {"own-thing": one}
    assert call.named([one, two]) == {"own-thing-a": one, "own-thing-b": two}


def test_names_of_analyses(declare: Declare) -> None:
    function = declare()
    assert registry.analysis_of("own thing") is function.analysis and list(registry.analyses())[-1] == "own thing"
    names = registry.names()
    assert names["own_thing"] == registry.ANALYSES.places["own thing"] and "function" not in names
    refuses("unknown analysis 'own thin'; choose one of .*; did you mean 'own thing'", registry.analysis_of, "own thin")
    with pytest.raises(
        TypeError, match=f"the analysis 'heatmap' of {__name__}:.* is already that of ssmscope.interp.heatmap"
    ):
        registry.ANALYSES.add("heatmap", function)


def test_where_nothing_can_be_written_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    check_writable(None)
    check_writable(tmp_path)
    check_writable(tmp_path / "a" / "b")
    for out, said in (
        (file, f"cannot write to {file}: it is a file; give a directory"),
        (file / "a", f"cannot write to {file / 'a'}: {file} is a file; give a directory"),
        (tmp_path / ("x" * 256), f"cannot write to {'x' * 60}…, a name of 256 characters; give a shorter one"),
        (Path(*["y" * 200] * 30), f"cannot write to {'y' * 60}…: File name too long; give a shorter name"),
    ):
        assert refusal(check_writable, out) == said
    check_writable(tmp_path / ("x" * 255))
    assert list(tmp_path.iterdir()) == [file]


def test_a_name_that_the_package_lacks_is_told_of_with_what_is_near() -> None:
    import ssmscope

    with pytest.raises(AttributeError, match="has no attribute 'heatmp'; did you mean 'heatmap'"):
        ssmscope.heatmp  # noqa: B018
    assert not hasattr(ssmscope, "_heatmap")


def test_an_explanation_names_words_that_the_tokenizer_does_not_know() -> None:
    import ssmscope

    model, text = ssmscope.load("demo/babi-mamba2"), "Clara went to the zanzibar . Where is Clara ?"
    for found in (ssmscope.explain(model, [text], methods="lrp"), ssmscope.explain(model, text=text, methods="lrp")):
        assert found.notes == ("the tokenizer does not know “zanzibar” ([UNK])",)
    assert ssmscope.explain(model, "Where is Clara ?", methods="lrp").notes == ()
