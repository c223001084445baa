"""Choices that loading makes by itself: dtypes, where a model is kept, and that no code of a directory is run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from refusals import refusal
from transformers import MambaConfig, MambaForCausalLM
import ssmscope
from ssmscope.loading import load as loading
from ssmscope.loading import mamba_checkpoints
from ssmscope.loading.fields import check_config
from ssmscope.loading.load import ModelCache, cache_models
from ssmscope.loading.stored import Contents, headers_of
from ssmscope.zoo.layouts import plan_diff_mamba2


class Stop(Exception):
    pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the dtype in which each model is to be read, on devices that may be absent."""
    found: list[Any] = []

    def read(where: Path, name: str, dtype: torch.dtype | None, device_map: Any, adapter: Any = None) -> None:
        found.append(dtype)
        raise Stop

    monkeypatch.setattr(loading, "_read", read)
    monkeypatch.setattr(loading, "_device", lambda device: None if device is None else torch.device(device))
    monkeypatch.setattr(loading, "check_split", lambda *given: None)
    return found


def test_weights_are_float32_on_a_cpu_and_as_stored_elsewhere(asked: list[Any], tmp_path: Path) -> None:
    expected: list[tuple[dict[str, Any], torch.dtype | None]] = [
        ({}, torch.float32), ({"device": "cpu"}, torch.float32), ({"dtype": "auto"}, torch.float32),
        ({"device": "cuda"}, None), ({"device_map": "auto"}, None), ({"device_map": "auto", "dtype": "auto"}, None),
        ({"dtype": "bfloat16"}, torch.bfloat16), ({"dtype": torch.float16}, torch.float16),
        ({"dtype": "float64", "device": "cuda"}, torch.float64),
        ({"dtype": "float16", "device_map": {}}, torch.float16),
    ]  # fmt: skip
    for options, _ in expected:
        with pytest.raises(Stop):
            ssmscope.load(tmp_path, **options)
    assert asked == [dtype for _, dtype in expected]


def test_what_a_model_is_kept_under(asked: list[Any], tmp_path: Path) -> None:
    keys: list[Any] = []

    class Kept(ModelCache):
        def recall(self, key: Any) -> Any:
            keys.append(key)
            return "found"

    name, cpu = str(tmp_path), torch.device("cpu")
    with cache_models(Kept(1)):
        for options in (
            {}, {"tokenizer": "t"}, {"tokenizer": Path("t")}, {"device": "cuda"}, {"dtype": "float64"},
            {"labels": ["x", "y"]},
        ):  # fmt: skip
            assert ssmscope.load(tmp_path, **options) == "found"
        for options in ({"tokenizer": len}, {"device_map": "auto"}, {"device_map": "auto", "tokenizer": len}):
            with pytest.raises(Stop):
                ssmscope.load(tmp_path, **options)
    assert keys == [
        (name, None, torch.float32, cpu, None), (name, "t", torch.float32, cpu, None),
        (name, "t", torch.float32, cpu, None), (name, None, None, torch.device("cuda"), None),
        (name, None, torch.float64, cpu, None), (name, None, torch.float32, cpu, ("x", "y")),
    ]  # fmt: skip
    with pytest.raises(Stop):
        ssmscope.load(tmp_path)


def saved(where: Path) -> MambaForCausalLM:
    sizes = dict(vocab_size=12, hidden_size=8, num_hidden_layers=1, state_size=2, time_step_rank=2)
    module = MambaForCausalLM(MambaConfig(**sizes))
    module.save_pretrained(where)
    return module


def test_models_are_read_without_code_or_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    given: list[dict[str, Any]] = []
    read, made = transformers.PreTrainedModel.from_pretrained.__func__, transformers.AutoModelForCausalLM.from_config

    def from_pretrained(kind: Any, source: Any, **options: Any) -> Any:
        given.append(options)
        return read(kind, source, **options)

    def from_config(config: Any, **options: Any) -> Any:
        given.append(options)
        return made(config, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", from_config)
    ssmscope.load(tmp_path)
    assert given[0] == {"trust_remote_code": False} and len(given) == 2
    assert given[1]["trust_remote_code"] is False and given[1]["local_files_only"] is True


def test_groups_of_heads_need_a_norm_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 5.23 norm all channels together, whose norm has no size of a group."""
    norms = {True: lambda hidden_size, eps=1e-6: None, False: lambda hidden_size, group_size, eps=1e-6: None}
    for refuses, norm in norms.items():
        monkeypatch.setattr(mamba_checkpoints, "MambaRMSNormGated", norm)
        said = "m has 2 groups of heads, which transformers .* norms otherwise than mamba_ssm does: install"
        assert bool(re.match(said, refusal(mamba_checkpoints.check_groups, 2, "m") or "")) == refuses
        assert refusal(mamba_checkpoints.check_groups, 1, "m") is None


def test_older_names_of_layers_are_known() -> None:
    """Releases 5.16 to 5.18 save GLM-5.3 and Qwen4-Exp with them, and later ones read them."""
    kinds = ["linear_attention", "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"]
    assert refusal(check_config, {"layer_types": kinds}, "m", {}) is None
    said = refusal(check_config, {"layer_types": [*kinds, "another"]}, "m", {}) or ""
    assert "'another', which is not known" in said


def test_limits_of_steps_that_are_null() -> None:
    """Such a model is built, and found not to run."""
    tensors = {"backbone.layers.0.mixer_1.D": torch.ones(2), "backbone.embedding.weight": torch.zeros(20, 16)}
    sizes = dict(hidden_size=16, num_hidden_layers=1, state_size=4, num_heads=4, head_dim=8, n_groups=1)
    config = {"model_type": "mamba2", **sizes, "time_step_limit": None}
    plan = plan_diff_mamba2(config, Contents(headers_of(tensors), 10**6), "m")
    with torch.device("meta"):
        assert plan.build().config.time_step_limit == ()


def test_an_adapters_own_tokenizer_comes_before_its_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []
    adapted, base = tmp_path / "adapted", tmp_path / "base"
    adapted.mkdir()
    module = saved(base)
    monkeypatch.setattr(loading, "is_adapter", lambda where: where == adapted)
    monkeypatch.setattr(loading, "base_of", lambda *given: base)
    monkeypatch.setattr(loading, "headers_of", lambda *given: {})
    monkeypatch.setattr(loading, "_read", lambda *given: module)
    monkeypatch.setattr(loading, "with_adapter", lambda module, where, name: module)
    monkeypatch.setattr(loading, "_try", lambda model: None)
    monkeypatch.setattr(loading, "read_tokenizer", lambda where: asked.append(where) or f"of {where.name}")
    for named, found in (((), None), (("base",), "of base"), (("base", "adapted"), "of adapted")):
        for each in named:
            (tmp_path / each / "tokenizer.json").touch()
        assert ssmscope.load(adapted).tokenizer == found
    assert asked == [base, adapted] and ssmscope.load(base).tokenizer == "of base"
