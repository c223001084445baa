"""Plans: their calls, and one clear sentence for every fault."""

import functools
import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from planned import MINIMAL, planned
from refusals import refused
import ssmscope.loading.load
from ssmscope import cli
from ssmscope.api import analyses as registry
from ssmscope.api.analysis import Call
from ssmscope.api.inputs import MODEL_KINDS
from ssmscope.attacks.position.measure import PAPER
from ssmscope.core.known_models import demos
from ssmscope.errors import InputError
from ssmscope.reports import plan as plan_module
from ssmscope.reports.jobs import make_jobs
from ssmscope.reports.keys import json_options
from ssmscope.reports.plan import SHIPPED_PLANS, Plan, PlannedCall, read_plan

VERBS = registry.analyses()


def lines(analysis: Any, models: Any = ("m",), **more: Any) -> list[tuple[str, ...]]:
    return [
        tuple(line.call.arguments) for line in planned({"models": list(models), "analyses": [analysis], **more}).calls
    ]


def options(line: PlannedCall) -> dict[str, Any]:
    return json_options(line.call)


refusal = functools.partial(refused, planned)


class TestLines:
    def test_options_and_flags_are_typed_as_on_the_command_line(self) -> None:
        given = {"text": ["-5 stars", "b, c"], "max-tokens": 9, "layers": [0, 1], "merge": True}
        assert lines({"heatmap": given}) == [
            ("heatmap", "m", "--text", "-5 stars", "--text", "b, c", "--max-tokens", "9", "--layers", "0,1", "--merge")
        ]
        assert lines({"attention": {"text": "a", "skip": False}})[0][-1] == "--no-skip"
        assert lines({"influence": {"text": "a", "exact": True}})[0][-1] == "--exact"
        assert lines({"influence": {"text": "a", "exact": False}})[0][-1] == "--no-exact"

    def test_nothing_leaves_the_default_and_words_that_yaml_takes_for_more_stay_words(self) -> None:
        text = "models: [m]\nanalyses:\n- attention: {text: no, span: 1:30, target: null, top: 007}\n"
        assert [tuple(line.call.arguments) for line in planned(text).calls] == [
            ("attention", "m", "--text", "no", "--span", "1:30", "--top", "7")
        ]

    def test_defaults_are_filled_in_and_values_have_their_types(self) -> None:
        (line,) = planned({"models": ["m"], "analyses": [{"heatmap": {"text": "a", "top": 3}}]}).calls
        assert line.call.options["top"] == 3 and line.call.options["score"] == "survival"
        assert options(line)["max_tokens"] == 16384 and options(line)["text"] == ["a"]
        assert "out" not in options(line) and "json" not in options(line)

    def test_the_matrix_is_the_product_of_its_options(self) -> None:
        matrix = {"length": [10, 20], "seed": [0, 1, 2]}
        found = lines({"stability": {"sequences": 2}, "matrix": matrix}, models=("m", "n"))
        wanted = [
            ("stability", model, "--length", length, "--sequences", "2", *(["--seed", seed] if seed != "0" else []))
            for length, seed, model in itertools.product(("10", "20"), ("0", "1", "2"), ("m", "n"))
        ]
        assert found == wanted

    def test_overrides_are_of_one_model(self) -> None:
        item = {"stability": {"seed": 1}, "overrides": {"n": {"seed": 2, "sequences": 3}}}
        assert lines(item, models=("m", "n")) == [
            ("stability", "m", "--seed", "1"),
            ("stability", "n", "--sequences", "3", "--seed", "2"),
        ]

    def test_models_can_be_chosen_and_taken_together(self) -> None:
        models = ["m", {"model": "runs/n", "name": "n"}, "o"]
        assert lines({"stability": None, "models": ["o", "n"]}, models=models) == [
            ("stability", "o"),
            ("stability", "runs/n"),
        ]
        (line,) = planned({"models": models, "analyses": [{"loss": {}, "together": True}]}).calls
        assert line.call.arguments == ["loss", "m", "runs/n", "o"]
        assert [model.name for model in line.models] == ["m", "n", "o"]

    def test_a_model_brings_its_tokenizer_and_device_where_the_analysis_gives_none(self) -> None:
        model = {"model": "m", "tokenizer": "t", "device": "cuda", "dtype": "bfloat16"}
        assert lines({"stability": {"dtype": "auto"}}, models=[model]) == [
            ("stability", "m", "--tokenizer", "t", "--device", "cuda")
        ]
        assert lines({"stability": {}}, models=[model])[0][-2:] == ("--dtype", "bfloat16")
        assert "explain needs float32, or float64; leave dtype bfloat16 out" in refusal(
            {"models": [model], "analyses": [{"explain": {"text": "a"}}]}
        )
        plain = {"stability": {"device": "cpu", "dtype": "auto"}}
        assert lines(plain, models=[model])[0] == ("stability", "m", "--tokenizer", "t")
        unlike = {"models": [model, {"model": "n", "tokenizer": "u"}], "analyses": [{"loss": {}, "together": True}]}
        assert "the same tokenizer" in refusal(unlike)

    def test_resources_are_of_the_model_unless_the_analysis_has_its_own(self) -> None:
        models = [{"model": "m", "resources": {"cpus": 2, "gpus": 1}}, {"model": "n", "resources": {"cpus": 4}}]
        items = [{"stability": {}, "resources": {"gpus": 0.5}}, {"loss": {"seed": 1}, "together": True}]
        found = [line.resources for line in planned({"models": models, "analyses": items}).calls]
        assert found == [{"cpus": 2, "gpus": 0.5}, {"cpus": 4, "gpus": 0.5}, {"cpus": 4, "gpus": 1}]

    def test_headings_and_title(self) -> None:
        found = planned(
            {"models": ["m"], "analyses": ["stability", {"stability": {"seed": 1}, "name": "growth"}]}, name="p"
        )
        assert [line.heading for line in found.calls] == ["stability", "growth"] and found.title == "p"

    def test_models_of_the_command_line_stand_in_for_those_of_the_plan(self) -> None:
        found = planned({"models": ["m"], "analyses": ["stability"]}, models=["a", "b"])
        assert [tuple(line.call.arguments) for line in found.calls] == [("stability", "a"), ("stability", "b")]


class TestVariables:
    DOCUMENT = {
        "variables": {"data": None, "limit": 5},
        "models": ["m"],
        "analyses": [{"fidelity": {"data": "$data", "limit": "$limit"}}, {"heatmap": {"text": ["$$limit", "$5"]}}],
    }

    def test_they_are_filled_in(self) -> None:
        found = planned(self.DOCUMENT, variables={"data": "sst2"})
        assert tuple(found.calls[0].call.arguments) == ("fidelity", "m", "--data", "sst2", "--limit", "5")
        assert tuple(found.calls[1].call.arguments) == ("heatmap", "m", "--text", "$limit", "--text", "$5")
        assert planned(self.DOCUMENT, variables={"data": "x", "limit": "7"}).calls[0].call.options["limit"] == 7

    def test_an_analysis_that_needs_one_which_is_not_set_is_left_out(self) -> None:
        assert [line.call.name for line in planned(self.DOCUMENT).calls] == ["heatmap"]

    def test_unknown_ones(self) -> None:
        assert "did you mean 'data'?" in refusal(self.DOCUMENT, variables={"dota": "x"})
        assert "it has none" in refusal({"models": ["m"], "analyses": ["stability"]}, variables={"data": "x"})
        undeclared = {"variables": {"data": 1}, "models": ["m"], "analyses": [{"heatmap": {"text": "$dat"}}]}
        assert "did you mean 'data'?" in refusal(undeclared) and "'$$dat'" in refusal(undeclared)
        only = {"variables": {"d": None}, "models": ["m"], "analyses": [{"fidelity": {"data": "$d"}}]}
        assert "--set" in refusal(only)
        assert "models needs a variable" in refusal(
            {"variables": {"d": None}, "models": ["$d"], "analyses": ["stability"]}
        )


WRONG_PLANS = [
    ({"modles": ["m"]}, "did you mean 'models'?"),
    ({"title": ["x"]}, "title is"),
    ({"variables": ["data"]}, "variables is"),
    ({"variables": "data"}, "variables is 'data'"),
    ({"variables": {"data": {"a": 1}}}, "variables is"),
    ({"models": []}, "models is"),
    ({"models": "m"}, "models is 'm'"),
    ({"models": [{"model": "m", "nmae": "x"}]}, "did you mean 'name'?"),
    ({"models": [{"name": "m"}]}, "lacks 'model'"),
    ({"models": [{"model": ["m"]}]}, "model is"),
    ({"models": ["m", "m"]}, "two models are called 'm'"),
    ({"models": ["--out"]}, "an option"),
    ({"models": [{"model": "m", "resources": {"cpu": 1}}]}, "did you mean 'cpus'"),
    ({"models": [{"model": "m", "resources": {"cpus": -1}}]}, "at least 0"),
    ({"models": [{"model": "m", "resources": {"gpus": 1.5}}]}, "whole numbers"),
    ({"models": [{"model": "m", "resources": {"gpus": "nan"}}]}, "at least 0"),
    ({"analyses": {}}, "analyses is"),
    ({"analyses": ["heatmpa"]}, "did you mean 'heatmap'?"),
    ({"analyses": [{"heatmpa": {"text": "a"}}]}, "did you mean 'heatmap'?"),
    ({"analyses": [{"name": "x"}]}, "names no verb"),
    ({"analyses": [{"train": {}}]}, "no verb 'train'"),
    ({"analyses": [{"models": "m", "models ": {}}]}, "no verb 'models '"),
    ({"analyses": [{"stability": {}, "influence": {"length": 5}}]}, "an item of the list of each"),
    ({"analyses": [{"stability": {}, "matrx": {"seed": [0]}}]}, "did you mean 'matrix'?"),
    ({"analyses": [{"stability": [1]}]}, "the options are"),
    ({"analyses": [{"stability": {"sede": 0}}]}, "did you mean 'seed' or 'series'?"),
    ({"analyses": [{"stability": {"out": "x"}}]}, "set by the report"),
    ({"analyses": [{"stability": {"max_tokens": 5, "max-tokens": 5}}]}, "given twice"),
    ({"analyses": [{"stability": {"seed": {"a": 1}}}]}, "seed is"),
    ({"analyses": [{"stability": {"seed": "x"}}]}, "seed is 'x'; allowed is a whole number"),
    ({"analyses": [{"stability": {"seed": "9" * 400}}]}, "allowed is a whole number"),
    ({"analyses": [{"stability": {"length": "ten"}}]}, "length is 'ten'"),
    ({"analyses": [{"attention": {"text": "a", "skip": "maybe"}}]}, "write true or false"),
    ({"analyses": [{"heatmap": {}}]}, "no text"),
    ({"analyses": [{"heatmap": {"file": "-"}}]}, "standard input"),
    ({"analyses": [{"heatmap": {"file": "/no/such/file"}}]}, "could not be read"),
    ({"analyses": [{"stability": {}, "matrix": {"sede": [0]}}]}, "did you mean 'seed' or 'series'?"),
    ({"analyses": [{"stability": {}, "matrix": {"seed": 0}}]}, "give a list"),
    ({"analyses": [{"stability": {}, "matrix": {"seed": ["x"]}}]}, "a whole number"),
    ({"analyses": [{"stability": {"seed": 1}, "matrix": {"seed": [0]}}]}, "give it once"),
    ({"analyses": [{"stability": {}, "models": ["mm"]}]}, "did you mean 'm'?"),
    ({"analyses": [{"stability": {}, "models": []}]}, "empty list"),
    ({"analyses": [{"stability": {}, "overrides": {"mm": {}}}]}, "did you mean 'm'?"),
    ({"analyses": [{"stability": {}, "overrides": {"m": {"sede": 0}}}]}, "did you mean 'seed' or 'series'?"),
    ({"analyses": [{"stability": {}, "overrides": {"m": {"seed": "x"}}}]}, "a whole number"),
    ({"analyses": [{"stability": {}, "matrix": {"seed": [0]}, "overrides": {"m": {"seed": 1}}}]}, "give it once"),
    ({"analyses": [{"stability": {}, "together": "yes"}]}, "write true or false"),
    ({"analyses": [{"influence": {"text": "a"}, "together": True}]}, "one model at a time"),
    ({"analyses": [{"loss": {}, "together": True, "overrides": {"m": {}}}]}, None),
    ({"analyses": [{"loss": {}, "together": True, "overrides": {"m": {"seed": 1}}}]}, "leave them out"),
    ({"analyses": [{"stability": {}, "for": "text-clasifier"}]}, "did you mean 'text-classifier'"),
    ({"analyses": [{"stability": {}, "for": []}]}, "allowed are"),
    ({"analyses": [{"stability": {}, "name": ["x"]}]}, "name is"),
    ({"analyses": [{"stability": {}, "resources": {"gpu": 1}}]}, "did you mean 'gpus'"),
    ({"analyses": [{"stability": {}, "matrix": {"seed": ["0"] * 101, "sequences": ["1"] * 100}}]}, "10,000 jobs"),
]


@pytest.mark.parametrize(("change", "said"), [pair for pair in WRONG_PLANS if pair[1] is not None])
def test_what_is_wrong_is_said_with_the_nearest_name(change: dict[str, Any], said: str) -> None:
    assert said in refusal({"models": ["m"], "analyses": ["stability"], **change})


def test_the_limit_of_jobs_counts_all_analyses_and_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "MAX_JOBS", 5)
    item = {"stability": {}, "matrix": {"seed": [0, 1]}}
    assert len(planned({"models": ["m", "n"], "analyses": [item]}).calls) == 4
    assert "more than 5 jobs" in refusal({"models": ["m", "n"], "analyses": [item, item]})
    assert "more than 5 jobs" in refusal({"models": ["m", "n", "o"], "analyses": [item]})


def test_the_example_of_the_docs_is_a_plan() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
    found = planned(page.partition("```yaml\n")[2].partition("```")[0])
    wanted = ["heatmap", "heatmap", "fidelity", "fidelity", "insertion", "insertion"]
    wanted += ["stability", "stability", "checkpoints"]
    assert [line.call.name for line in found.calls] == wanted
    assert [(line.call.options["limit"], line.call.options["seed"]) for line in found.calls[2:4]] == [(50, 0), (50, 1)]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything that would run a verb, load a model or analyse it raise an error."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a plan ran something")

    monkeypatch.setattr(ssmscope.loading.load, "load", never)
    for name, home in ssmscope._HOMES.items():
        module, _, own = home.partition(":")
        if name[0].islower() and name not in ("fast_scan", "load"):
            monkeypatch.setattr(importlib.import_module(f"ssmscope.{module}"), own or name, never)
    monkeypatch.setattr(Call, "run", never)
    with pytest.raises(AssertionError, match="ran something"):
        cli.run(["heatmap", "demo/sst2-mamba2", "--text", "a"])


@pytest.mark.usefixtures("nothing_runs")
class TestNothingRuns:
    def read(self, document: Any, **options: Any) -> Plan:
        text = document if isinstance(document, str) else yaml.safe_dump(document)
        return read_plan(text, **options)

    @pytest.mark.parametrize("name", VERBS)
    def test_while_a_verb_is_checked(self, name: str) -> None:
        item = {name: MINIMAL.get(name, {})}
        (line,) = self.read({"models": ["m"], "analyses": [item]}).calls
        assert line.call.arguments[: len(name.split()) + 1] == [*name.split(), "m"]

    @pytest.mark.parametrize("name", SHIPPED_PLANS)
    def test_while_shipped_plans_are_checked_and_their_jobs_made(self, name: str) -> None:
        chosen = self.read(SHIPPED_PLANS[name].read_text(encoding="utf-8"), variables={})
        if all(place.is_dir() for place in demos().values()):
            assert make_jobs(chosen).every

    @pytest.mark.parametrize("option", ["--help", "-h", "--version", "--install-completion", "--show-completion"])
    def test_what_ends_a_command_line_is_no_part_of_a_plan(self, option: str, capsys) -> None:
        ends = option.strip("-")
        for document in (
            {"models": [option], "analyses": ["stability"]},
            {"models": ["m"], "analyses": [option]},
            {"models": ["m"], "analyses": [{"stability": {ends: True}}]},
            {"models": ["m"], "analyses": [{"stability": {option: True}}]},
            {"models": ["m"], "analyses": [{"stability": {}, "matrix": {ends: [True]}}]},
        ):
            with pytest.raises(InputError):
                self.read(document)
        (line,) = self.read({"models": ["m"], "analyses": [{"heatmap": {"text": [option]}}]}).calls
        assert options(line)["text"] == [option]
        assert capsys.readouterr().err == ""


WRONG_VALUES = [
    ("heatmap", {"text": "a", "score": "retenton"}, "did you mean 'retention'?"),
    ("heatmap", {"text": "a", "ids": "1"}, "ids=… cannot be combined"),
    ("attention", {"text": "a", "target": "x"}, "of gradient=…; give that too"),
    ("explain", {"text": "a", "methods": "ig,lpr"}, "did you mean 'lrp'?"),
    ("explain", {"text": "a", "methods": "ig", "option": "ig.stpes=4"}, "did you mean 'steps'"),
    ("explain", {"text": "a", "methods": "ig", "option": "lrp.x=4"}, "not among the methods"),
    ("position", {"stride": "3"}, "without window"),
    ("insertion", {"places": "1"}, "from 2 on"),
    ("overflow", {"template": "no place"}, "{content}"),
    ("poison", {"target": "positive"}, "leave it out, or give objective='plant', not forget"),
    ("prompts", {"attacks": "stresstst"}, "did you mean 'stresstest' or"),
    ("words", {"recipe": "deepwordbugs"}, "did you mean 'deepwordbug'?"),
    ("words", {"words": "a,,b"}, "label word"),
    ("effect", {"clean": " ", "corrupted": "a"}, "clean is empty"),
    ("effect", {"clean": "a"}, "corrupted"),
    ("snr", {"lens": ["a", "b"]}, "2 lenses were given for 1 models"),
    ("loss", {"smooth": "4"}, "an odd number"),
    ("stability", {"text": "a", "length": "9"}, "length=… asks for random sequences"),
    ("influence", {}, "no text"),
]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("verb", "options", "said"), WRONG_VALUES)
def test_values_that_no_model_can_take_are_refused_by_the_plan(verb: str, options: dict[str, Any], said: str) -> None:
    assert said in refusal({"models": ["m"], "analyses": [{verb: options}]})


def test_the_verbs_of_plans() -> None:
    assert {"heatmap", "fidelity", "position", "snr", "retrieval", "loss", "lens fit", "lens show"} <= set(VERBS)
    assert not {"train", "models", "report", "serve"} & set(VERBS)
    assert {name for name, verb in VERBS.items() if verb.several} == {"snr", "retrieval", "loss", "checkpoints"}


def test_every_option_that_names_data_counts_by_its_content() -> None:
    read = set()
    for verb in VERBS.values():
        for name, option in {**verb.inputs, **verb.options}.items():
            if any(part in option.metavar for part in ("FILE", "DATA", "LENS", "DIR")) and not option.no_effect:
                assert option.reads is not None, f"{verb.name} --{name}"
            read |= {name} if option.reads is not None else set()
    assert {"data", "file", "lens", "filler", "masked_lm", "encoder", "synonyms", "embeddings"} <= read


def test_restricted_verbs_name_kinds_that_exist() -> None:
    assert all(set(verb.models) <= set(MODEL_KINDS) for verb in VERBS.values())
    assert any(verb.models for verb in VERBS.values())


@pytest.mark.parametrize("name", SHIPPED_PLANS)
def test_shipped_plans_are_plans(name: str) -> None:
    text = SHIPPED_PLANS[name].read_text(encoding="utf-8")
    found = read_plan(
        text, models=["m"] if name == "quick" else [], variables={"data": "sst2"} if name == "quick" else {}
    )
    assert found.title and found.calls


def test_the_plan_of_baleen_runs_the_papers_rows() -> None:
    """Tables 2 to 4 of the paper: what each row is of, what it is measured by, and on which data."""
    plan = read_plan(SHIPPED_PLANS["baleen"].read_text(encoding="utf-8"))
    rows: dict[str, set[tuple[str, str]]] = {}
    for line in plan.calls:
        call = line.call
        rows.setdefault(call.name, set()).update((model, call.inputs["data"]) for model in call.models)
        if call.name == "fidelity":
            assert list(call.options["methods"]) == ["ig", "gradxinput", "gradcam", "self-retention", "self-write"]
        elif call.name == "position":
            assert call.options["regions"] is None and list(PAPER) == [(0, 32), (0, 96), (928, 1024), (992, 1024)]
        else:
            assert set(call.options["attacks"]) == {"checklist", "deepwordbug", "stresstest", "textbugger"}
            assert call.options["as_promptbench"]
    texts = {"sst2": "sst2", "imdb": "imdb", "snli": "snli"}
    of = ("rwkv", "gla", "mamba", "mamba2", "baleen-b", "baleen-e")
    assert rows == {
        "fidelity": {(f"demo/{name}-baleen-{kind}", data) for name, data in texts.items() for kind in "be"},
        "position": {(f"demo/cifar10-{kind}", "cifar10") for kind in of},
        "prompts": {(f"demo/instruct-{kind}", data) for kind in (*of[3:],) for data in ("sst2", "wnli")},
    }
