"""Multimodal models of transformers: in memory and from a directory they are their language models."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from examples import relative
from exhaustive import in_turns
from loud import loud
from refusals import refuses
from small_models import CONVOLUTION_SIZES, DELTA_SIZES, GLM_SIZES, QWEN_SIZES, with_longer_memory, with_smaller_decays
from torch import nn
import ssmscope

TEXTS = [[5, 17, 3, 9, 22, 30, 1], [4, 8, 1]]
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
)
QWEN_VISION = dict(
    **dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=24),
    **dict(num_position_embeddings=16, patch_size=2),
)
SMALL_VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=2)


def made(name: str, config: str, **parts: Any) -> nn.Module:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, name)(getattr(transformers, config)(**parts))


def qwen(**more: Any) -> nn.Module:
    text = {**DELTA_SIZES, **more}
    module = made("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", text_config=text, vision_config=QWEN_VISION)
    return with_smaller_decays(module)


def qwen_with_experts() -> nn.Module:
    text = {**DELTA_SIZES, **EXPERTS}
    kind = "Qwen3_5Moe"
    module = made(f"{kind}ForConditionalGeneration", f"{kind}Config", text_config=text, vision_config=QWEN_VISION)
    return with_smaller_decays(module)


def qwen4() -> nn.Module:
    kind = "Qwen4Exp"
    parts = dict(text_config=QWEN_SIZES, vision_config=QWEN_VISION)
    return with_smaller_decays(made(f"{kind}ForConditionalGeneration", f"{kind}Config", **parts))


def glm() -> nn.Module:
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=24, patch_size=2)
    vision |= dict(projection_intermediate_size=16, image_size=8)
    kind = "Glm5Next"
    module = made(f"{kind}ForConditionalGeneration", f"{kind}Config", text_config=GLM_SIZES, vision_config=vision)
    return with_smaller_decays(module)


def minicpm() -> nn.Module:
    text = dict(model_type="qwen3_5_text", **DELTA_SIZES)
    parts = dict(text_config=text, vision_config=dict(SMALL_VISION, image_size=8), insert_layer_id=0)
    return with_smaller_decays(made("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_6Config", **parts))


def lfm2_vl() -> nn.Module:
    vision = dict(model_type="siglip2_vision_model", num_patches=16, **SMALL_VISION)
    parts = dict(text_config=dict(model_type="lfm2", **CONVOLUTION_SIZES), vision_config=vision)
    return made("Lfm2VlForConditionalGeneration", "Lfm2VlConfig", **parts, projector_hidden_size=16)


def lfm3_vl() -> nn.Module:
    sizes = {key: CONVOLUTION_SIZES[key] for key in CONVOLUTION_SIZES.keys() - {"block_auto_adjust_ff_dim"}}
    kinds = dict(layer_types=["conv", "full_attention", "sliding_attention"], head_dim=12, sliding_window=4)
    tokens = dict(model_type="lfm3", pad_token_id=0, bos_token_id=1, eos_token_id=2)
    text: dict[str, Any] = {**sizes, **kinds, **tokens}
    return made("Lfm3VlForConditionalGeneration", "Lfm3VlConfig", text_config=text, vision_config=SMALL_VISION)


def nemotron_h_omni() -> nn.Module:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, head_dim=12, initializer_range=0.1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_num_heads=6, mamba_head_dim=8, n_groups=2)
    layers = dict(layers_block_type=["mamba", "attention", "moe", "mamba"], ssm_state_size=6, chunk_size=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
    text = dict(model_type="nemotron_h", **sizes, **heads, **layers, **experts, moe_shared_expert_intermediate_size=16)
    vision = dict(SMALL_VISION, model_type="radio", video_temporal_patch_size=2)
    parts = dict(text_config=text, vision_config=vision, audio_config=None)
    kind = "NemotronH_Omni_Reasoning_V3"
    return with_longer_memory(made(kind, f"{kind}_Config", **parts, projector_hidden_size=16, vision_hidden_size=16))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Qwen3.5": (qwen, "qwen3_5_text"), "Qwen3.5 with experts": (qwen_with_experts, "qwen3_5_moe_text"),
    "Qwen4-Exp": (qwen4, "qwen4_exp_text"), "GLM-5.3-Flash": (glm, "glm5_next_text"),
    "MiniCPM-V 4.6": (minicpm, "qwen3_5_text"), "LFM2-VL": (lfm2_vl, "lfm2"), "LFM3-VL": (lfm3_vl, "lfm3"),
    "Nemotron-H Omni": (nemotron_h_omni, "nemotron_h"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "kind"), MODELS.values(), ids=list(MODELS))
def test_a_multimodal_model_is_its_language_model(make, kind, tmp_path):
    module = loud(make())
    model = ssmscope.load(module)
    assert model.architecture == kind and model.continues and model.name == type(module).__name__
    own = {id(parameter) for parameter in module.parameters()}
    assert {id(parameter) for parameter in model.module.parameters()} <= own
    batch = model.encode(ids=TEXTS)
    logits = model.trace(batch).logits
    for row, ids in enumerate(TEXTS):
        with torch.no_grad():
            assert relative(logits[row], module(input_ids=torch.tensor([ids])).logits[0, -1]) < 1e-5
    if module.config.model_type not in transformers.CONFIG_MAPPING:
        return  # Transformers 4.57 does not know LFM2-VL by the name that it writes.
    module.save_pretrained(tmp_path)
    again = ssmscope.load(tmp_path)
    assert type(again.module) is type(model.module) and again.fingerprint == model.fingerprint
    torch.testing.assert_close(again.trace(batch).logits, logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "trained_on"), in_turns(MODELS, ("the whole", "its language model")))
def test_an_adapter_of_a_multimodal_model(name, trained_on, tmp_path):
    """Its logits are those of peft's model, whichever of the two classes it was trained on."""
    make, kind = MODELS[name]
    peft = pytest.importorskip("peft")
    module = loud(make())
    if module.config.model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers 4.57 does not know LFM2-VL by the name that it writes")
    module.save_pretrained(tmp_path / "base")
    module = module if trained_on == "the whole" else ssmscope.load(tmp_path / "base").module
    targets = ["in_proj", "in_proj_qkv", "q_proj"]
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    model = ssmscope.load(tmp_path / "adapter")
    assert model.architecture == kind
    for ids in TEXTS:
        with torch.no_grad():
            own = adapted(input_ids=torch.tensor([ids])).logits[0, -1]
        assert relative(model.trace(model.encode(ids=[ids])).logits[0], own) < 1e-4


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("make", [qwen, minicpm])
def test_a_multimodal_models_end_tokens_are_its_own(make, file, tmp_path):
    """In memory and from a directory, as transformers' own generate of the whole model."""
    module, ids = loud(make()), TEXTS[0]
    module.generation_config.eos_token_id = None
    whole = dict(input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=6, pad_token_id=0)
    end = int(module.generate(**whole)[0, len(ids) + 2])
    module.generation_config.eos_token_id = [96, end]
    module.save_pretrained(tmp_path)
    if file == "config.json":
        (tmp_path / "generation_config.json").unlink()
        fields = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps(fields | {"eos_token_id": [96, end]}))
    expected = module.generate(**whole)[0, len(ids) :].tolist()
    assert expected[-1] == end and len(expected) < 6
    for model in (ssmscope.load(module), ssmscope.load(tmp_path)):
        assert list(model.generate(ids=[ids], max_new_tokens=6).ids[0]) == expected


def test_relevance_of_a_multimodal_model_adds_up():
    model = ssmscope.load(loud(qwen()), dtype="float64")
    explained = ssmscope.explain(model, model.encode(ids=TEXTS[:1]), methods=["lrp"])
    assert explained.attribution().delta < 1e-6


def test_another_value_of_a_text_is_refused(monkeypatch):
    module = loud(qwen())
    plain = type(module).forward

    def scaled(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(type(module), "forward", scaled)
    refuses("logits of a text by Qwen3_5For.* are not those of the Qwen3_5ForCausalLM", ssmscope.load, module)


def test_fields_of_a_language_model_are_checked(tmp_path):
    qwen().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    for name, value, words in (("rms_norm_eps", -1.0, "rms_norm_eps is -1.0"), ("num_hidden_layers", 9999, "9999")):
        file.write_text(json.dumps({**fields, "text_config": {**fields["text_config"], name: value}}))
        refuses(words, ssmscope.load, tmp_path)
