"""Parts of loading: the layout of a directory, defaults of its fields, the place that a name leads to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from refusals import refusal, refused
from safetensors.torch import save_file
from transformers import MambaConfig, MambaForCausalLM
from transformers.utils import logging
import ssmscope
from ssmscope.errors import InputError
from ssmscope.loading import load as loading
from ssmscope.loading import pretrained
from ssmscope.loading.load import ModelCache, cache_models, chosen_device, trained_examples
from ssmscope.loading.mamba_checkpoints import is_mamba_ssm, plan_mamba_ssm
from ssmscope.loading.stored import Contents, Stored, headers_of
from ssmscope.zoo.documents import symbol_tokenizer
from ssmscope.zoo.layouts import is_diff_mamba2, plan_diff_mamba2, plan_selective


def saved(where: Path, **options: Any) -> MambaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(vocab_size=12, hidden_size=8, num_hidden_layers=1, state_size=2, time_step_rank=2)
    module = MambaForCausalLM(MambaConfig(**sizes, **options))
    module.save_pretrained(where)
    return module


@pytest.mark.parametrize(("fields", "known"), [
    ({"d_model": 1, "n_layer": 2}, True), ({"d_model": 1}, False), ({"n_layer": 2}, False), ({}, False),
    ({"d_model": 1, "n_layer": 2, "model_type": "mamba"}, False),
])  # fmt: skip
def test_configurations_of_mamba_ssm(fields: dict[str, Any], known: bool) -> None:
    assert is_mamba_ssm(Path(), fields) == known


HELD = Contents({"backbone.embedding.weight": Stored((24, 64), True)}, 10**6)
FIRST = dict(
    vocab_size=24, hidden_size=64, num_hidden_layers=3, expand=2, conv_kernel=4, use_bias=False, use_conv_bias=True,
    residual_in_fp32=True, layer_norm_epsilon=1e-5, tie_word_embeddings=True, state_size=16, time_step_rank=4,
)  # fmt: skip
SECOND = {
    **{name: value for name, value in FIRST.items() if name != "time_step_rank"},
    **dict(state_size=128, head_dim=64, n_groups=1, num_heads=2, chunk_size=256, time_step_limit=(0.0, float("inf"))),
}
FIELDS = dict(residual_in_fp32=False, norm_epsilon=0.01, tie_embeddings=False)
SSM = dict(d_state=7, d_conv=3, expand=4, bias=True, conv_bias=False)
OUR_FIELDS = dict(
    residual_in_fp32=False, layer_norm_epsilon=0.01, tie_word_embeddings=False, state_size=7, conv_kernel=3, expand=4,
    use_bias=True, use_conv_bias=False,
)  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, FIRST),
    ({"ssm_cfg": None, "attn_cfg": None, "attn_layer_idx": [], "d_intermediate": 0}, FIRST),
    ({"ssm_cfg": {"layer": "Mamba1", "dt_rank": "auto"}}, FIRST),
    ({**FIELDS, "ssm_cfg": {**SSM, "dt_rank": 5}}, {**FIRST, **OUR_FIELDS, "time_step_rank": 5}),
    ({"ssm_cfg": {"layer": "Mamba2"}}, SECOND),
    ({**FIELDS, "ssm_cfg": {**SSM, "layer": "Mamba2", "headdim": 16, "chunk_size": 9, "dt_limit": [1, 2]}},
     {**SECOND, **OUR_FIELDS, "head_dim": 16, "num_heads": 16, "chunk_size": 9, "time_step_limit": (1.0, 2.0)}),
    *(
        (
            {"ssm_cfg": {"layer": "Mamba2"}, "d_intermediate": given},
            {**SECOND, "d_intermediate": inner, "attn_layer_idx": []},
        )
        for given, inner in ((1, 128), (128, 128), (129, 256))
    ),
    ({"ssm_cfg": {"layer": "Mamba3", "headdim": 32, "rope_fraction": 1.0, "A_floor": 0.5, "decay": "softplus"}},
     dict(hidden_size=64, state_size=128, head_dim=32, decay="softplus", decay_floor=0.5, rope_fraction=1.0)),
])  # fmt: skip
def test_fields_of_mamba_ssm_by_default_and_given(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = plan_mamba_ssm({"d_model": 64, "n_layer": 3, **fields}, HELD, "m")
    with torch.device("meta"):
        config = plan.build().config
    found = {name: getattr(config, name) for name in expected}
    if "time_step_limit" in found:
        found["time_step_limit"] = tuple(found["time_step_limit"])
    assert found == expected and plan.tied == fields.get("tie_embeddings", True)
    one, two, head = torch.ones(2), torch.zeros(3), torch.zeros(4)
    given = {"backbone.embedding.weight": one, "backbone.norm_f.weight": two}
    assert plan.translate(given) == {
        "backbone.embeddings.weight": one, "backbone.norm_f.weight": two, "lm_head.weight": one
    }  # fmt: skip
    assert plan.translate({**given, "lm_head.weight": head})["lm_head.weight"] is head


@pytest.mark.parametrize(("fields", "said"), [
    ({"attn_layer_idx": [1]}, "attention layers (attn_layer_idx) with Mamba-1"),
    ({"d_intermediate": 64}, "MLPs (d_intermediate) with Mamba-1"),
    ({"ssm_cfg": {"layer": "Mamba3", "is_mimo": True}}, "several inputs and outputs per head (is_mimo)"),
    ({"rms_norm": False}, "LayerNorm (rms_norm false)"),
    ({"ssm_cfg": {"norm_before_gate": True}}, "a norm before the gate (norm_before_gate)"),
    ({"rms_norm": False, "ssm_cfg": {"layer": "Mamba2", "rmsnorm": False, "D_has_hdim": True}},
     "LayerNorm (rms_norm false) and no gated norm (rmsnorm false) and a skip per channel (D_has_hdim)"),
])  # fmt: skip
def test_parts_that_mamba_ssms_layout_may_not_have(fields: dict[str, Any], said: str) -> None:
    found = refusal(plan_mamba_ssm, {"d_model": 64, "n_layer": 3, **fields}, HELD, "m")
    assert found == f"m has {said}, which cannot be read from this layout"


@pytest.mark.parametrize(("fields", "said"), [
    ({"ssm_cfg": 5}, "ssm_cfg is 5; allowed is an object"),
    ({"ssm_cfg": {}, "attn_cfg": [1]}, "attn_cfg is [1]; allowed is an object"),
    ({"rms_norm": 2}, "rms_norm is 2; allowed is true or false"),
    ({"ssm_cfg": {"d_state": -1}}, "d_state is -1; allowed is no negative number"),
    ({"ssm_cfg": {"layer": "Mamba4"}}, "m has layers 'Mamba4'; Mamba1, Mamba2, Mamba3 can be read from this layout"),
])  # fmt: skip
def test_fields_of_mamba_ssm_of_another_kind(fields: dict[str, Any], said: str) -> None:
    assert refused(plan_mamba_ssm, {"d_model": 64, "n_layer": 3, **fields}, HELD, "m").endswith(said)
    assert refusal(plan_mamba_ssm, {"d_model": 64, "n_layer": 3}, Contents({}, 5), "m") == (
        "m has no backbone.embedding.weight: these are not weights of mamba_ssm"
    )


def test_how_a_differential_mamba_is_known(tmp_path: Path) -> None:
    def known(**fields: Any) -> bool:
        return is_diff_mamba2(tmp_path, {"model_type": "mamba2", **fields})

    assert not known() and not known(diffmamba=False) and not known(architectures=["Mamba2ForCausalLM"])
    assert known(diffmamba=True) and known(architectures=["Other", "DiffMamba2ForCausalLM"])
    assert not known(architectures="DiffMamba2ForCausalLM") and not known(diffmamba=True, model_type="mamba")
    save_file({"layers.0.mixer.x": torch.ones(1)}, tmp_path / "a.safetensors")
    assert not known()
    save_file({"y": torch.ones(1), "layers.0.mixer_1.x": torch.ones(1)}, tmp_path / "b.safetensors")
    assert known() and not known(model_type="mamba")
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    (tmp_path / "b.safetensors").unlink()
    assert not known()


@pytest.mark.parametrize(("number", "with_parts", "layers"), [
    (3, (0, 1, 2), "full"), (3, (0, 2), "hybrid"), (4, (0, 2), "hybrid"), (3, (2, 1), [1, 2]),
    (12, (8, 2), [2, 8]), (1, (0,), "full"),
])  # fmt: skip
@pytest.mark.parametrize(("head", "fields", "tied"), [
    (False, {}, True), (True, {}, False), (True, {"tie_word_embeddings": True}, True),
    (False, {"tie_word_embeddings": False}, True),
])  # fmt: skip
def test_the_plan_of_a_differential_mamba(number, with_parts, layers, head, fields, tied) -> None:
    names = [f"backbone.layers.{at}.mixer_1.D" for at in with_parts] + ["x.backbone.layers.7.mixer_1.D"]
    tensors = {name: torch.ones(2) for name in [*names, *(["lm_head.weight"] if head else [])]}
    tensors |= {"backbone.embedding.weight": torch.zeros(20, 16), "backbone.layers.0.mixer_2.mixer_1.D": torch.ones(2)}
    sizes = dict(hidden_size=16, num_hidden_layers=number, state_size=4, num_heads=4, head_dim=8, n_groups=1)
    config = {"model_type": "mamba2", **sizes, **fields, "diffmamba": True, "time_step_limit": [0, 1]}
    plan = plan_diff_mamba2(config, Contents(headers_of(tensors), 10**6), "m")
    with torch.device("meta"):
        built = plan.build().config
    assert built.differential_layers == layers and built.vocab_size == 20 and built.num_hidden_layers == number
    assert plan.tied == tied == built.tie_word_embeddings and built.time_step_limit == (0.0, 1.0)
    found = plan.translate(tensors)
    first = f"backbone.layers.{with_parts[0]}.mixer.m1.D"
    assert found[first] is tensors[names[0]] and "x.backbone.layers.7.mixer_1.D" in found
    assert "backbone.layers.0.mixer.m2.mixer_1.D" in found
    assert found["lm_head.weight"] is (tensors["lm_head.weight"] if head else tensors["backbone.embedding.weight"])


def test_a_differential_mamba_without_its_parts() -> None:
    config = {"model_type": "mamba2"}
    assert refusal(plan_diff_mamba2, config, HELD, "m") == (
        "m calls itself a Differential Mamba, but none of its layers has a mixer_1"
    )
    held = Contents({"backbone.layers.0.mixer_1.D": Stored((2,), True)}, 5)
    assert refusal(plan_diff_mamba2, config, held, "m") == "the weights of m lack backbone.embeddings.weight"


SELECTIVE = {
    "embedding.weight": torch.arange(28.0).view(7, 4), "ssm.A": torch.tensor([[-3.0, -0.5, -2.0]]).expand(4, 3),
    "ssm.W_B": torch.ones(3, 4), "ssm.W_C": torch.ones(3, 4), "ssm.q_delta": torch.ones(4),
    "ssm.p_delta": torch.ones(1),
}  # fmt: skip


def test_the_plan_of_a_selective_ssm() -> None:
    sizes = {"vocab_size": 7, "hidden_size": 4, "state_size": 3, "spectral_abscissa": -0.5}
    for prefix in ("", "SSM."):
        given = {prefix + name: t for name, t in SELECTIVE.items()}
        for name, head, labels in (("w", torch.ones(4), 2), ("W", torch.ones(5, 4), 5)):
            plan = plan_selective({**given, name: head}, None, "m")
            config = plan.build().config
            assert {each: getattr(config, each) for each in sizes} == sizes
            assert config.num_labels == labels and config.binary == (name == "w") and not plan.tied
            found = plan.translate({})
            assert torch.equal(found["head.weight"], head[None] if name == "w" else head) and {*SELECTIVE} < {*found}


@pytest.mark.parametrize(("change", "said"), [
    ({"w": None}, "w or W; it holds embedding.weight, ssm.A, ssm.W_B, ssm.W_C, …;"),
    ({"a": torch.ones(1)}, "w or W; it holds a, embedding.weight, ssm.A, ssm.W_B, …;"),
    ({"ssm.A": torch.ones(3)}, "m is damaged: ssm.A is (3,); a matrix was expected"),
    ({"embedding.weight": torch.ones(0, 4)}, "m is damaged: embedding.weight is (0, 4); a matrix was expected"),
    ({"w": torch.ones(0)}, "m is damaged: W is (1, 0); a matrix was expected"),
    ({"w": None, "W": torch.ones(4)}, "m is damaged: W is (4,); a matrix was expected"),
])  # fmt: skip
def test_state_dicts_of_no_selective_ssm(change: dict[str, Any], said: str) -> None:
    given = {**SELECTIVE, "w": torch.ones(4), **change}
    assert said in refused(plan_selective, {name: t for name, t in given.items() if t is not None}, None, "m")


@pytest.mark.parametrize("name", ["", "a", "a/b/c", "./a", "/a", "~/a", "a/b.pth", "a/b.pt", "a/b.bin", ".a/b"])
def test_names_that_the_hub_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*given: Any, **options: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(loading, "snapshot_download", fetch)
    assert refused(ssmscope.load, name).startswith(f"no model {name!r}: it is no file or directory, no demo (")
    for other in ("a/b", "a/b.c", "a/b.safetensors"):
        with pytest.raises(AssertionError):
            ssmscope.load(other)


def test_long_names_are_shown_in_part(tmp_path: Path) -> None:
    (tmp_path / "m-jamba").mkdir()
    (tmp_path / "m-jamba" / "config.json").write_text("{}")
    said = f"did you mean '{tmp_path / 'm-jamba'}'?"  # Models beside it come before demos.
    assert refused(ssmscope.load, str(tmp_path / "m-jamb")).endswith(said)
    assert refused(ssmscope.load, "x" * 200).startswith(f"no model '{'x' * 200}': it is no file")
    assert refused(ssmscope.load, "x" * 201).startswith(f"no model '{'x' * 100}'… (201 characters): it is")
    assert "no model '" + "x" * 100 + "'… (1,201 characters): " in refused(ssmscope.load, "x" * 1201)


def test_models_that_are_split_are_in_transformers_layout(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "config.json").write_text('{"d_model": 8, "n_layer": 1}')
    (tmp_path / "a.pth").touch()
    (tmp_path / "a.safetensors").touch()
    for name in (tmp_path, tmp_path / "a.pth", tmp_path / "a.safetensors"):
        assert refusal(ssmscope.load, name, device_map="auto") == (
            f"{name} is not in transformers' layout, and only that is split by device_map: give a device"
        )
    assert "is a file of weights without a configuration" in refused(ssmscope.load, tmp_path / "a.safetensors")


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("mps", [True, False])
def test_the_device_that_is_chosen(cuda: bool, mps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert chosen_device("auto") == ("cuda" if cuda else "mps" if mps else "cpu")
    assert chosen_device("cpu") == "cpu" and chosen_device("cuda:3") == "cuda:3"


@pytest.mark.parametrize("name", [*loading.TOKENIZER_FILES, None])
def test_files_by_which_a_tokenizer_is_known(name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    if name is not None:
        (tmp_path / name).touch()
    monkeypatch.setattr(loading, "_try", lambda model: None)
    monkeypatch.setattr(loading, "read_tokenizer", lambda source: f"of {source}")
    assert ssmscope.load(tmp_path).tokenizer == (None if name is None else f"of {tmp_path}")
    assert ssmscope.load(tmp_path, tokenizer="elsewhere").tokenizer == "of elsewhere"
    assert ssmscope.load(tmp_path, tokenizer=len).tokenizer is len
    assert refusal(ssmscope.load, tmp_path, tokenizer=5) == (
        "tokenizer is a int; give a tokenizer, or the directory or hub id of one"
    )


def test_models_are_kept_by_name_tokenizer_dtype_and_device(tmp_path: Path) -> None:
    saved(tmp_path / "one"), saved(tmp_path / "two")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    tokenizer = symbol_tokenizer([f"w{at}" for at in range(12)])
    with cache_models(ModelCache(2)):
        first = ssmscope.load(one)
        assert ssmscope.load(one) is first is ssmscope.load(one, device="cpu", dtype="float32")
        assert ssmscope.load(one, tokenizer=tokenizer) is not first
        double = ssmscope.load(one, dtype="float64")
        assert double is not first and ssmscope.load(one) is first
        assert ssmscope.load(two) is not first  # which makes room by leaving `double`
        assert ssmscope.load(one) is first and ssmscope.load(one, dtype="float64") is not double
    assert ssmscope.load(one) is not first


@pytest.mark.parametrize(("content", "number"), [
    ({"examples": 5}, 5), ({"examples": "7"}, 7), ({}, None), ({"examples": None}, None), ({"examples": "x"}, None),
    (None, None),
])  # fmt: skip
def test_how_many_examples_a_training_had(content: Any, number: int | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "training.json").write_text(json.dumps({"data": {"train": {"name": "mine", **content}}}))
    assert trained_examples(tmp_path) == number


def test_weights_are_read_in_their_own_dtype_or_another(tmp_path: Path) -> None:
    module = saved(tmp_path).double()
    for parameter in module.parameters():
        parameter.data.add_(1e-10)
    module.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    found = pretrained.read_transformers(tmp_path, "m", fields, torch.float64, None, None, None)
    assert all(torch.equal(weight, found.state_dict()[name]) for name, weight in module.state_dict().items())
    module.bfloat16().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for dtype in (None, torch.bfloat16, torch.float16, torch.float64):
        found = pretrained.read_transformers(tmp_path, "m", fields, dtype, None, None, None)
        assert found.backbone.embeddings.weight.dtype == (dtype or torch.bfloat16)
        decays, stored = (each.backbone.layers[0].mixer.A_log for each in (found, module))
        assert torch.equal(decays.double(), stored.to(decays.dtype).double())


def test_a_tokenizer_is_read_without_code_or_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def read(where: Path, **options: Any) -> Any:
        asked.append((where, options, logging.is_progress_bar_enabled(), logging.get_verbosity()))
        return lambda text, verbose: asked.append((text, verbose))

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read)
    logging.set_verbosity_info()
    try:
        pretrained.read_tokenizer(tmp_path)
        assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        with pretrained.quiet():
            pass
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()
        logging.set_verbosity_warning()
    options = {"trust_remote_code": False, "local_files_only": True}
    assert asked == [(tmp_path, options, False, logging.ERROR), ("", False)]
    (tmp_path / "config.json").write_text('{"configuration_files": []}')
    assert "has a config.json that names others (configuration_files)" in refused(pretrained.read_tokenizer, tmp_path)
    assert refused(pretrained.read_tokenizer, "x" * 300).startswith(f"the tokenizer '{'x' * 200}' cannot be")


def test_errors_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizers library raises plain exceptions; others than these and damage are faults of the code."""
    for error, told in (
        (Exception("odd"), True), (ValueError("odd"), True), (KeyError("odd"), True), (SyntaxError("odd"), False),
    ):  # fmt: skip

        def read(where: Path, error: Exception = error, **options: Any) -> None:
            raise error

        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read)
        with pytest.raises(InputError if told else SyntaxError, match="cannot be loaded: '?odd" if told else "odd"):
            pretrained.read_tokenizer(tmp_path)


def test_a_tokenizer_is_fetched_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(pretrained, "snapshot_download", fetch)
    assert pretrained.fetched(tmp_path, ("*.json",)) == tmp_path and asked == []
    assert pretrained.fetched("a/b", ("*.json", "*.txt")) == tmp_path and asked == [("a/b", ["*.json", "*.txt"])]


def adapter(where: Path, **fields: Any) -> Path:
    where.mkdir(exist_ok=True)
    (where / "adapter_config.json").write_text(json.dumps(fields))
    return where


def test_the_model_of_an_adapter(tmp_path: Path) -> None:
    where, elsewhere = adapter(tmp_path / "a", base_model_name_or_path="b"), tmp_path / "elsewhere"

    def found(name: str) -> Path:
        if name != "b":
            raise InputError("nowhere")
        return elsewhere

    assert pretrained.is_adapter(where) and not pretrained.is_adapter(tmp_path)
    assert pretrained.base_of(where, "m", found) == elsewhere
    (where / "b").mkdir()
    assert pretrained.base_of(where, "m", found) == where / "b"
    adapter(where / "b")
    assert refusal(pretrained.base_of, where, "m", found) == (
        "m holds a PEFT adapter of 'b', which is one too; merge that one first"
    )
    for value in (None, "", 5):
        said = "m holds a PEFT adapter whose adapter_config.json names no model (base_model_name_or_path)"
        assert refusal(pretrained.base_of, adapter(where, base_model_name_or_path=value), "m", found) == said
    adapter(where, base_model_name_or_path="c" * 120)
    assert refusal(pretrained.base_of, where, "m", found) == (
        f"m holds a PEFT adapter of '{'c' * 99}, which is not there: nowhere"
    )


@pytest.mark.parametrize("file", pretrained.WEIGHT_FILES)
def test_the_classes_of_an_adapter(file: str, tmp_path: Path) -> None:
    def classes(**tensors: torch.Tensor) -> int | None:
        where = adapter(tmp_path / "a")
        held = {name.replace("_", "."): tensor for name, tensor in tensors.items()}
        if file.endswith("safetensors"):
            save_file(held, where / file)
        else:
            torch.save(held, where / file)
        return pretrained._classes_of(pretrained.headers_of(where, "m"))

    assert classes(a_score_weight=torch.ones(3, 5), b=torch.ones(2)) == 3
    assert classes(a_score_weight=torch.ones(3)) is None
    assert classes(b=torch.ones(3, 5)) is None
    (tmp_path / "a" / file).unlink()
    assert refusal(pretrained.headers_of, tmp_path / "a", "m") == (
        "m holds a PEFT adapter without weights: neither adapter_model.safetensors nor adapter_model.bin"
    )


def test_the_first_weight_of_an_adapter_that_does_not_fit_is_named(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is in the dev extra: pip install '.[dev]' in a checkout")
    module = saved(tmp_path / "base")
    wrapped = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["in_proj", "x_proj"]))
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    wrapped.save_pretrained(tmp_path / "a", save_embedding_layers=False)
    file = tmp_path / "a" / "adapter_model.safetensors"
    held = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    held = {name: tensor.contiguous() for name, tensor in held.items()}
    save_file({**held, "z": torch.ones(1), "a": torch.ones(1)}, file)
    assert refused(ssmscope.load, tmp_path / "a").endswith("holds a, which has no place in the model")
    lacking = sorted(held)[1:]
    save_file({**{name: held[name] for name in lacking[1:]}, "z": torch.ones(1)}, file)
    assert refused(ssmscope.load, tmp_path / "a").endswith(f"{file.name} has no {min(held)}")
    save_file(held, file)
    assert ssmscope.load(tmp_path / "a").num_layers == 1
