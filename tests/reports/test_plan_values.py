"""Places of faults in a plan, and the combination of its values, variables and defaults."""

from collections.abc import Iterator
from typing import Any

from planned import planned
from refusals import refuses
from ssmscope.errors import InputError
from ssmscope.reports.plain_yaml import read_yaml

MODELS = ["m", {"model": "runs/n", "name": "n"}]


def test_nothing_and_other_kinds_in_any_place() -> None:
    """Each value of a plan in turn is nothing, or of another kind: the plan is read, or refused in one line."""
    whole = {
        "title": "all",
        "variables": {"n": "3"},
        "models": ["m", {"model": "runs/n", "name": "n", "dtype": "float32", "resources": {"cpus": "2"}}],
        "require": ["accuracy >= 0.5 at 95 %"],
        "budget": "10m",
        "hardest": "3",
        "analyses": [
            {
                "explain": {"text": ["a", "b"], "methods": ["lrp", "ig"], "option": ["ig.steps=5"]},
                "for": ["token-classifier"],
            },
            {"evaluate": {"data": "sst2", "limit": "$n"}, "matrix": {"seed": ["1", "2"]}, "models": ["m"]},
            {"fidelity": {}, "size": {"option": "limit", "runs": "4", "start": "2"}, "name": "f"},
            {"heatmap": {"text": "a", "layers": ["1", "2"]}, "overrides": {"m": {"layers": "all"}}},
            {"lens show": {"lens": "x", "text": "a"}, "together": False, "resources": {"gpus": "1"}},
        ],
    }

    def changed(value: Any) -> Iterator[Any]:
        yield from (None, [None], {"x": None}, True, "x", [])
        for at in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            for other in changed(value[at]):
                yield {**value, at: other} if isinstance(value, dict) else [*value[:at], other, *value[at + 1 :]]

    refused = 0
    for document in changed(whole):
        try:
            planned(document)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100


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


def test_the_line_of_a_nested_value_is_its_own() -> None:
    for text, line in (("a: 1\nb:\n  c: 1\n  c: 2", 4), ("a:\n- 1\n- {\n  ? [b]\n  : 1}", 4)):
        refuses(f"^line {line} of the plan", read_yaml, text)
    refuses("in line 2: expected the node content, but found '<stream end>'$", read_yaml, "a: 1\nb: [")
    refuses("^the plan is not valid YAML: unacceptable character #x0007: special", read_yaml, "x\x07y: 1")
    for beyond, told in (("00110000", r"chr\(\) arg not in range"), ("FFFFFFFF", "Python int too large")):
        refuses(f"^the plan is not valid YAML: {told}", read_yaml, f'a: "\\U{beyond}"')
    assert read_yaml('"\\uD7FF\\uE000"') == "\ud7ff\ue000"  # next to the halves of pairs
