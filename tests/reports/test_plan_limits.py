"""Plans at their limits, where in a plan something is wrong, and how its own values and defaults come together."""

from __future__ import annotations

from typing import Any

import pytest
from planned import planned

from ssmscope.errors import InputError
from ssmscope.reports import plan as plan_module
from ssmscope.reports.plan import read_yaml

MODELS = ["m", {"model": "runs/n", "name": "n"}]


def refusal(document: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        planned(document, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": ["m", {"name": "x"}]}, "model 2 lacks 'model'"),
        ({"models": ["m", {"model": " "}]}, "model 2: model is ' '; give a text"),
        ({"models": [{"model": "m", "resources": {"cpus": True}}]}, "model 1: cpus is True"),
        ({"models": [{"model": "m", "resources": {"cpus": 100_001}}]}, "model 1: cpus is '100001'"),
        ({"analyses": ["stability", {"loss": {"sede": 1}}]}, "analysis 2 (loss): loss has no option 'sede'"),
        ({"analyses": ["stability", 5]}, "analysis 2: no verb '5'"),
        ({"analyses": [{"stability": {}, "name": " "}]}, "analysis 1 (stability): name is ' '; give a text"),
        ({"analyses": [{"stability": {}, "matrix": {"seed": []}}]}, "seed is []; give a list of values"),
        (
            {"analyses": [{"stability": {}, "models": "n", "overrides": {"m": {"seed": 1}}}]},
            "overrides: 'm' is not among the models of this analysis",
        ),
        ({"variables": {"t": None}, "title": "$t"}, "title needs a variable that is not set"),
        ({"variables": {"t": None}, "models": ["m", "$t"]}, "models needs a variable that is not set"),
    ],
)
def test_where_something_is_wrong(change: dict[str, Any], said: str) -> None:
    assert said in refusal({"models": MODELS, "analyses": ["stability"], **change})


def test_its_own_title_and_its_variables_in_lists() -> None:
    document = {
        "title": "own",
        "variables": {"word": None, "list": ["a", "b"]},
        "models": MODELS,
        "analyses": [{"heatmap": {"text": ["c", "$word"]}}, {"heatmap": {"text": "$list"}, "models": ["n", "n"]}],
    }
    found = planned(document, name="other")
    assert found.title == "own" and planned({**document, "title": ""}, name="other").title == "other"
    assert [each.call.arguments for each in found.calls] == [["heatmap", "runs/n", "--text", "a", "--text", "b"]]
    texts = [call.call.inputs["text"] for call in planned(document, variables={"word": "d"}).calls]
    assert [list(text) for text in texts] == [["c", "d"], ["c", "d"], ["a", "b"]]


def test_nothing_is_a_default_and_one_loading_option_can_be_of_all() -> None:
    bare = {"model": "m", "tokenizer": None, "device": None, "resources": None}
    (call,) = planned({"models": [bare], "analyses": [{"stability": None, "together": False}]}).calls
    assert call.models[0].tokenizer is None and call.resources == {} and call.call.arguments == ["stability", "m"]
    unlike = [{"model": "m", "tokenizer": "t"}, {"model": "n", "tokenizer": "u"}]
    (call,) = planned({"models": unlike, "analyses": [{"loss": {"tokenizer": "w"}, "together": True}]}).calls
    assert call.call.arguments == ["loss", "m", "n", "--tokenizer", "w"]
    limits = {"cpus": 100_000, "gpus": 1}
    assert planned({"models": [{**bare, "resources": limits}], "analyses": ["stability"]}).calls[0].resources == limits


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("a: 1\nb: [", "the plan is not valid YAML in line 2: expected the node content, but found '<stream end>'"),
            ("a: 1\nb: !mine {}", "line 2 of the plan has the tag '!mine'; only plain values are allowed"),
            ("a:\n- 1\n- !!binary aGk=", "line 3 of the plan has the tag 'tag:yaml.org,2002:binary'"),
            ("a:\n- 1\n- !!set {b}", "line 3 of the plan has the tag 'tag:yaml.org,2002:set'"),
            ("a: 1\n? [b]\n: 2", "line 2 of the plan has a list or mapping as a key"),
            ('a: 1\n"\\0": 2', "line 2 of the plan has a character that is no text"),
            ("a: 1\nb:\n  c: 1\n  c: 2", "line 4 of the plan repeats the key 'c'; give it once"),
        ],
    )
    def test_the_line_is_named(self, text: str, said: str) -> None:
        with pytest.raises(InputError) as caught:
            read_yaml(text)
        assert str(caught.value).startswith(said)

    def test_its_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan_module, "MAX_NODES", 6)
        monkeypatch.setattr(plan_module, "MAX_DEPTH", 3)
        monkeypatch.setattr(plan_module, "MAX_CHARACTERS", 20)
        assert read_yaml("a: [1, 2, [3]]") == {"a": ["1", "2", ["3"]]}
        assert read_yaml("a: {b: {c: d}}") == {"a": {"b": {"c": "d"}}} and read_yaml("abcd " * 4) == ("abcd " * 4).strip()
        for text, said in (
            ("a: [1, 2, [3, 4]]", "the plan has more than 6 values"),
            ("a: [[[1]]]", "line 1 of the plan is nested in more than 3 lists and mappings"),
            ("\na: {b: {c:\n [d]}}", "line 3 of the plan is nested in more than 3 lists and mappings"),
            ("abcd " * 4 + "e", "the plan has 21 characters; at most 20 are allowed"),
        ):
            with pytest.raises(InputError, match=said):
                read_yaml(text)

    def test_characters_beside_half_pairs(self) -> None:
        assert read_yaml('"\\uD7FF\\uE000"') == "\ud7ff\ue000"
