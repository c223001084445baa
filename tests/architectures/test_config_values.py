"""Values and words of configurations: what is allowed, to its bounds, and the messages for the rest."""

import json
import math
import re
from typing import Any

import pytest
from refusals import refusal, refused, refuses
from ssmscope.errors import InputError
from ssmscope.loading import fields

INFINITY = math.inf
RANGE = "[low, high] with 0 ≤ low < high"
ALLOWED: list[tuple[str, Any, Any]] = [
    ("time_step_limit", [0, 0.5], (0.0, 1.0)), ("time_step_limit", [0.0, INFINITY], (0.0, 1.0)),
    ("inner_time_step_limit", [0.5, 0.75], 5), ("dt_limit", [0.5, 2], 5), ("eos_token_id", "word", 5),
    ("eos_token_id", -1, 5), ("eos_token_ids", [1, 2], 5), ("rank", "auto", 5), ("rank", "auto", True),
    ("flag", True, False), ("flag", False, True), ("flag", 1, False), ("flag", 0, True), ("size", 0, 5),
    ("size", 0.5, 5), ("size", 2**63 - 1, 5), ("size", -3, -1), ("size", -(2**62), -1),
    ("spectral_abscissa", -0.5, 0.0), ("layer_norm_epsilon", 0.1, 1e-5), ("rms_norm_eps", 0.0, 1e-5),
    ("epsilons", 0.5, 1e-5), ("act", "gelu", "silu"), ("act", "", "silu"), ("layers", [5], []), ("layers", [], (1, 2)),
    ("anything", {"a": 5}, None),
]  # fmt: skip
REFUSED: list[tuple[str, Any, Any, str]] = [
    *(
        ("time_step_limit", value, (0.0, 1.0), RANGE)
        for value in ([0, 0], [1, 0.5], [-0.5, 1], [False, 1], [0, "1"], [0, 1, 2], [1], 5, "01", [0, 10**400], None)
    ),
    ("dt_limit", [0.5, 0.25], 5, RANGE),
    ("_token_id_size", -1, 5, "no negative number"),
    ("_token_ids_size", -1, 5, "no negative number"),
    *(("flag", value, True, "true or false") for value in (2, -1, 1.0, "true", [], {})),
    *(("size", value, 5, "a whole number") for value in (True, "5", [5], math.nan, INFINITY, -INFINITY)),
    *(("share", value, 0.5, "a number") for value in (False, "5", {}, math.nan)),
    *(("size", value, 5, "a number of fewer digits") for value in (2**63, -(2**63), 2.0**64)),
    ("size", -1, 5, "no negative number"),
    ("size", -0.25, 0, "no negative number"),
    ("share", -0.25, 0.0, "no negative number"),
    ("spectral_radius", -0.25, 0.0, "no negative number"),
    ("layer_norm_epsilon", 0.11, 1e-5, "a number from 0 to 0.1"),
    ("rms_norm_eps", 1, 1e-5, "a number from 0 to 0.1"),
    ("rms_norm_eps", -1, 1e-5, "no negative number"),
    *(("act", value, "silu", "a word, as 'silu'") for value in (5, True, ["gelu"])),
    *(("layers", value, default, "a list") for value in (5, "full", {}) for default in ([1], (1,))),
]


@pytest.mark.parametrize(("name", "value", "default"), ALLOWED)
def test_values_that_are_allowed(name: str, value: Any, default: Any) -> None:
    fields.check_value(name, value, default, "the model")


@pytest.mark.parametrize(("name", "value", "default", "allowed"), REFUSED)
def test_values_that_are_refused(name: str, value: Any, default: Any, allowed: str) -> None:
    said = f"the model cannot be built from its config.json: {name} is {fields.shown(value)}; allowed is {allowed}"
    refuses(f"^{re.escape(said)}$", fields.check_value, name, value, default, "the model")


def test_values_are_shown_to_sixty_characters() -> None:
    assert fields.shown("a" * 58) == f"'{'a' * 58}'" and fields.shown("a" * 59) == f"'{'a' * 59}…"
    assert fields.shown({"é": [True, None]}) == '{"é": [true, null]}'
    assert fields.shown(list(range(30))) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1…"


ELEVEN = {str(number): f"class {number}" for number in range(11)}


@pytest.mark.parametrize("given", [
    {"architectures": None}, {"architectures": []}, {"architectures": ["One", "Two"]},
    {"dtype": None, "torch_dtype": None}, {"dtype": "float32"}, {"torch_dtype": "torch.bfloat16"},
    {"dtype": "float16", "torch_dtype": "float32"}, {"id2label": None}, {"id2label": {"0": "one"}},
    {"id2label": {"1": "one", "0": "two"}}, {"id2label": ELEVEN}, {"state_size": None}, {"state_size": 3},
    {"tie_word_embeddings": False}, {"hidden_act": "gelu"}, {"time_step_rank": "auto"}, {"_name_or_path": "a/b"},
], ids=str)  # fmt: skip
def test_fields_that_are_allowed(given: dict[str, Any]) -> None:
    fields.check_fields({"model_type": "mamba", **given}, "the model")
    fields.check_fields({"model_type": "ssm-classifier", "backbone": {"model_type": "mamba", **given}}, "the model")


def test_words_of_a_whole_configuration() -> None:
    """Our configuration classes check the words of their own fields, which are not defaults."""
    for kind, field in (("baleen-mamba2", "gate"), ("diff-mamba", "lambda_form"), ("ssm-classifier", "dropout")):
        fields.check_fields({"model_type": kind, field: "mine"}, "the model") if field != "dropout" else None
        with pytest.raises(InputError, match="the model says in its config.json that other is 'mine'"):
            fields.check_fields({"model_type": kind, "other": "mine"}, "the model")
    with pytest.raises(InputError, match="the model says in its config.json that gate is 'mine'"):
        fields.check_fields({"model_type": "mamba2", "gate": "mine"}, "the model")


CLASS_NAMES = "a list of class names, or null"
DTYPES = "one of float32, float64, bfloat16, float16, or null"
LABELS = 'another name for each class, as {"0": "negative", "1": "positive"}'


@pytest.mark.parametrize(("name", "value", "allowed"), [
    *(("architectures", value, CLASS_NAMES) for value in ("One", ["One", 5], [None], {}, 0)),
    *((name, value, DTYPES) for name in ("dtype", "torch_dtype") for value in ("float23", 5, ["float32"], "32")),
    *(
        ("id2label", value, LABELS)
        for value in (
            {}, [], "one", {"1": "one"}, {"0": "one", "2": "two"}, {"0": "one", "1": "one"}, {"0": 5},
            {"0": "one", "1": None}, {**ELEVEN, "10": "class 9"}, {**ELEVEN, "12": "class 12"},
        )
    ),
    ("state_size", -1, "no negative number"),
    ("tie_word_embeddings", 2, "true or false"),
    ("layer_norm_epsilon", "small", "a number"),
])  # fmt: skip
def test_fields_that_are_refused(name: str, value: Any, allowed: str) -> None:
    called = name.removeprefix("torch_")
    said = f"the model cannot be built from its config.json: {called} is {fields.shown(value)}; allowed is {allowed}"
    given = {"model_type": "mamba", name: value}
    for wrapped in (given, {"model_type": "ssm-classifier", "backbone": given}):
        refuses(f"^{re.escape(said)}$", fields.check_fields, wrapped, "the model")


def test_fields_of_types_that_are_not_read_are_not_compared() -> None:
    fields.check_fields({"model_type": "gpt2", "n_layer": -1}, "the model")
    refuses("architectures is 5", fields.check_fields, {"model_type": "gpt2", "architectures": 5}, "the model")


@pytest.mark.parametrize(("given", "said"), [
    ({}, "the model: the configuration names no model_type; write its architecture's, such as 'mamba2'"),
    ({"model_type": 5}, "the model: model type 5 is unknown"),
    ({"model_type": ["mamba"]}, 'the model: model type ["mamba"] is unknown'),
    ({"model_type": "mamba22"}, "the model: model type 'mamba22' is unknown; did you mean 'mamba2'"),
])  # fmt: skip
def test_types_that_are_unknown(given: dict[str, Any], said: str) -> None:
    refuses(re.escape(said), fields.check_fields, given, "the model")


def test_types_of_newer_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "of_transformers", lambda: {"newest": "newest"})
    for given in {"model_type": "newest"}, {"model_type": "seen", "text_config": {"model_type": "newest"}}:
        said = rf"'{given['model_type']}' is unknown to transformers [\d.]+, .*: take a newer one"
        refuses(said, fields.check_fields, given, "the model")


def test_words_that_a_library_would_look_up() -> None:
    """Words of the defaults, of activations and of transformers' tables are known; names and labels are free."""
    defaults = {"form": "ours", "inner": [{"kind": "deep"}]}

    def said(given: dict[str, Any], texts: tuple[str, ...] = ()) -> str | None:
        return refusal(fields.check_config, given, "the model", defaults, texts)

    unknown = "which is not known: it could name code or another file; delete it where the model runs without it"
    for word in ("ours", "deep", "silu", "full_attention", "sdpa", "torch.float16", ""):
        assert said({"a": word, "b": [[word]], "c": {"d": word}}) is None
    assert (
        said({"id2label": {"0": "mine"}, "model_type": "mine", "own": "mine", "a": {"own": ["mine"]}}, ("own",)) is None
    )
    assert said({"own": "mine"}) == f"the model says in its config.json that own is 'mine', {unknown}"
    assert said({"a": {"b": ["silu", {"c": "mine"}]}}) == (
        f"the model says in its config.json that a.b.c is 'mine', {unknown}"
    )
    assert (
        said({"a": ("ours", "mine"), "b": "yours"}) == f"the model says in its config.json that a is 'mine', {unknown}"
    )
    for name in fields.IMPLEMENTATIONS:
        assert said({"attn_implementation": name, "a": {"_experts_implementation": name}}) is None
    allowed = "allowed are eager, sdpa, grouped_mm, batched_mm: other code is never fetched or run"
    assert said({"attn_implementation": "silu"}) == (
        f"the model asks in its config.json for attn_implementation 'silu'; {allowed}"
    )
    assert said({"attn_implementation": "one", "moe_implementation": "two"}) == (
        f"the model asks in its config.json for attn_implementation 'one'; {allowed}"
    )
    assert said({"model_type": "mine", "a": {"my_implementation": {"decoder": "theirs"}}}) == (
        f"the model asks in its config.json for my_implementation 'theirs'; {allowed}"
    )
    assert refusal(fields.check_generation, {"cache_implementation": "static", "stop_strings": ["mine"]}, "it") is None
    assert refusal(fields.check_generation, {"a": "mine"}, "it") == (
        f"it says in its generation_config.json that a is 'mine', {unknown}"
    )
    tokens = {"pad_token": "mine", "more_tokens": ["mine"], "auto_map": {"a": "mine"}, "strip": True}
    assert refusal(fields.check_tokenizer, tokens, "it") is None
    for name in ("_token_file", "_tokens_file", "vocab_file"):
        assert refusal(fields.check_tokenizer, {**tokens, name: "mine"}, "it") == (
            f"it says in its tokenizer_config.json that {name} is 'mine', {unknown}"
        )


def nested(kind: type, times: int) -> Any:
    value: Any = 5
    for _ in range(times):
        value = {"a": 1, "b": value} if kind is dict else [1, value]
    return value


def test_objects_are_read_to_a_depth(tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    for kind in (dict, list):
        file.write_text(json.dumps({"a": nested(kind, 30)}))
        assert fields.read_object(file) == {"a": nested(kind, 30)}
        file.write_text(json.dumps({"a": nested(kind, 31)}))
        assert refusal(fields.read_object, file) == f"{file} is not a model configuration: it is nested too deeply"


def test_objects_that_stand_for_numbers(tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    given = {"a": [{"__float__": "Infinity"}, {"__float__": "-Infinity"}], "b": {"__float__": "NaN"}}
    file.write_text(json.dumps({**given, "c": {"__float__": "5"}, "d": {"e": 5}}))
    found = fields.read_object(file)
    assert found["a"] == [INFINITY, -INFINITY] and math.isnan(found["b"])
    assert found["c"] == {"__float__": "5"} and found["d"] == {"e": 5}


@pytest.mark.parametrize(("content", "said"), [
    (None, "cannot be read: No such file or directory"),
    (b"[1]", "is not a model configuration: a JSON object was expected"),
    (b"{", "is not JSON: Expecting property name enclosed in double quotes"),
    (b'{"a": "\xff"}', "is not JSON: 'utf-8' codec can't decode"),
    (b'{"a": "\\ud800"}', "is not JSON: it holds half of a surrogate pair"),
    (b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "is not a model configuration: it is nested too deeply"),
])  # fmt: skip
def test_files_that_hold_no_object(tmp_path: Any, content: bytes | None, said: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    assert refused(fields.read_object, file).startswith(f"{file} {said}")


@pytest.mark.parametrize("name", fields.DEPTH_FIELDS)
def test_no_more_layers_than_tensors(name: str) -> None:
    for wrap in (
        lambda given: given,
        lambda given: {"backbone": given},
        lambda given: {"backbone": {"backbone": given}},
    ):
        for value in (5, 4.5, 0, "9", None, [9]):
            fields.check_depth(wrap({name: value, "hidden_size": 9}), 5, "the model")
        for value in (6, 5.5, 10**9):
            said = f"{name} is {value}; allowed is no more than there are tensors in the weights, 5"
            refuses(re.escape(said), fields.check_depth, wrap({name: value}), 5, "the model")
