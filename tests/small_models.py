"""Small random models of every architecture, on which the contracts and analyses are tried. A function for each
architecture returns its models by name, seeded by the caller. That every readable model type is among them is a
contract."""

from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
import ssmscope.loading  # noqa: F401, which makes our model types known to transformers
from ssmscope.core.known_models import of_transformers
from ssmscope.layers.mambavision import MambaVisionConfig
from ssmscope.layers.vim import VimConfig
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo.selective import SelectiveSSMConfig, SelectiveSSMForSequenceClassification

SMALL_MODELS: dict[str, Callable[[], dict[str, nn.Module]]] = {}
"""The function of every architecture that is installed, by its name."""


def language_model(kind: str, **options: Any) -> nn.Module:
    """Return a random language model of a type with these fields of its configuration."""
    config = CONFIG_MAPPING[kind](**options)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def small_models(make: Callable[[], dict[str, nn.Module]]) -> Callable[[], dict[str, nn.Module]]:
    """List a function in `SMALL_MODELS`, unless it is named for a family that the installed transformers lacks."""
    if make.__name__ not in of_transformers().values() or find_spec(f"transformers.models.{make.__name__}") is not None:
        SMALL_MODELS[make.__name__] = make
    return make


for each in entry_points(group="ssmscope.examples"):
    SMALL_MODELS[each.name] = each.load()

CONVOLUTION_SIZES: dict[str, Any] = dict(
    **dict(vocab_size=97, hidden_size=24, intermediate_size=32, num_hidden_layers=3, conv_bias=True),
    **dict(num_attention_heads=2, num_key_value_heads=1, block_auto_adjust_ff_dim=False, initializer_range=0.2),
    layer_types=["conv", "full_attention", "conv"],
)


def with_longer_memory(module: nn.Module) -> nn.Module:
    """Give a random hybrid steps like those of Mamba and Mamba-2; as initialised most layers forget within one."""
    for name, parameter in module.named_parameters():
        if name.endswith(("dt_bias", "dt_proj.bias")):
            parameter.data.uniform_(-5.0, -2.0)
    return module


DELTA_SIZES: dict[str, Any] = dict(
    **dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, initializer_range=0.05),
    **dict(num_attention_heads=2, num_key_value_heads=2, head_dim=12, linear_num_key_heads=2),
    **dict(linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=8),
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)


def with_smaller_decays(module: nn.Module) -> nn.Module:
    """Make a random hybrid's heads keep their states for some steps; as initialised most forget within one."""
    for name, parameter in module.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data.uniform_(-6.0, -3.0)
        elif name.endswith("A_log"):
            parameter.data.uniform_(0.0, 2.0)
    return module


GLM_SIZES: dict[str, Any] = dict(
    **dict(vocab_size=97, hidden_size=24, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=4),
    **dict(num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=8),
    **dict(q_lora_rank=8, v_head_dim=6, qk_nope_head_dim=8, pad_token_id=0, eos_token_id=0, initializer_range=0.05),
    **dict(index_topk=4, index_head_dim=8, index_n_heads=8, index_kpool=2, linear_head_dim=6, linear_num_heads=3),
    **dict(hc_mult=2, mlp_layer_types=["dense", "sparse", "sparse", "dense"]),
    layer_types=["linear_attention", "full_attention", "full_attention", "linear_attention"],
    indexer_types=["full", "full", "shared", "full"],
)
QWEN_SIZES: dict[str, Any] = dict(
    **dict(vocab_size=97, hidden_size=24, num_hidden_layers=3, initializer_range=0.05, num_attention_heads=2),
    **dict(num_key_value_heads=2, head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4),
    **dict(linear_key_head_dim=6, linear_value_head_dim=8, hc_count=2, hc_lowrank=8, num_experts=4),
    **dict(num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    **dict(indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=12, indexer_budget=4, indexer_compress_ratio=2),
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)


@small_models
def baleen() -> dict[str, nn.Module]:
    small = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, expand=2, conv_kernel=4)
    one = dict(**small, state_size=5, time_step_rank=3)
    two = dict(**small, state_size=6, num_heads=6, head_dim=8, n_groups=2, chunk_size=8)
    models = {
        f"{name}-{base}": language_model(f"baleen-{base}", **sizes, gate=gate)
        for name, gate in (("baleen-b", "bernoulli"), ("baleen-e", "exponential"))
        for base, sizes in (("mamba", one), ("mamba2", two))
    }
    soft = language_model("baleen-mamba2", **two, gate="bernoulli", samples="soft", tau=1.0)
    return {**models, "baleen-b-soft-mamba2": soft}


@small_models
def comba() -> dict[str, nn.Module]:
    small: dict[str, Any] = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, num_heads=3)
    return {
        "comba": language_model("ssm-comba", **small),
        "comba-uncorrected": language_model("ssm-comba", **small, output_correction=False, conv_kernel=3),
    }


@small_models
def delta() -> dict[str, nn.Module]:
    small: dict[str, Any] = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, num_heads=3)
    sizes = dict(key_size=12, value_size=15, intermediate_size=0, tie_word_embeddings=False)
    other = dict(head_norm_epsilon=1e-2, unit_epsilon=1e-2, largest_beta=2.0)
    return {
        "gated-deltanet": language_model("ssm-deltanet", **small),
        "gated-deltanet-as-mamba": language_model("ssm-deltanet", **small, **sizes, **other),
        "deltanet": language_model("ssm-deltanet", **small, gated=False, conv_kernel=3),
    }


@small_models
def delta_product() -> dict[str, nn.Module]:
    small: dict[str, Any] = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, num_heads=3)
    return {
        "deltaproduct": language_model("ssm-deltaproduct", **small, largest_beta=2.0),
        "deltaproduct-ungated": language_model(
            "ssm-deltaproduct", **small, householders=3, forget_gate=False, conv_kernel=3
        ),
    }


@small_models
def diff_mamba() -> dict[str, nn.Module]:
    small = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, expand=2, conv_kernel=4)
    two = dict(**small, state_size=6, num_heads=6, head_dim=8, n_groups=2, chunk_size=8)
    variants: dict[str, dict[str, Any]] = {
        "diff-mamba": {},
        "diff-mamba-hybrid": dict(differential_layers="hybrid"),
        "diff-mamba-not-normalized": dict(normalize=False, lambda_form="scalar", use_bias=True),
        "diff-s6": dict(scope="s6"),
        "diff-s6-not-normalized": dict(scope="s6", normalize=False, lambda_form="exponential", conv_kernel=3),
    }
    first = dict(**small, state_size=5, time_step_rank=3)
    return {
        **{name: language_model("diff-mamba", **{**two, **more}) for name, more in variants.items()},
        "diff-mamba1": language_model("diff-mamba1", **first),
    }


@small_models
def gfssm() -> dict[str, nn.Module]:
    small = dict(vocab_size=97, num_hidden_layers=2, expand=2, conv_kernel=4)
    one = dict(**small, hidden_size=16, state_size=3, time_step_rank=2)
    two = dict(**small, hidden_size=24, state_size=6, num_heads=6, head_dim=8, n_groups=2, chunk_size=8)
    models: dict[str, nn.Module] = {
        "gfssm": language_model("gfssm", **two),
        "gfssm-three-groups": language_model("gfssm", **two, state_groups=3, fir_taps=3),
        "gfssm-without-prompts": language_model("gfssm", **two, prompt=False),
        "gfssm-mamba": language_model("gfssm-mamba", **one),
    }
    for model in models.values():
        for name, parameter in model.named_parameters():
            if ".grouping." in name:
                nn.init.normal_(parameter, std=0.5 if name.endswith("fir") else 0.1)
    return models


@small_models
def groupmamba() -> dict[str, nn.Module]:
    small = dict(vocab_size=97, expand=2, conv_kernel=4)
    one = dict(**small, hidden_size=16, state_size=3, time_step_rank=2)
    two = dict(**small, hidden_size=24, state_size=6, num_heads=6, head_dim=8, n_groups=2, chunk_size=8)
    models: dict[str, nn.Module] = {
        "groupmamba": language_model("groupmamba", **one, num_hidden_layers=3),
        "groupmamba-alone": language_model("groupmamba", **one, num_hidden_layers=2, k=1),
        "groupmamba-mamba2": language_model("groupmamba-mamba2", **two, num_hidden_layers=3),
        "groupmamba-mamba2-one-group": language_model("groupmamba-mamba2", **two, num_hidden_layers=3, k=3),
    }
    for model in models.values():
        for name, parameter in model.named_parameters():
            if ".attention." in name:
                nn.init.normal_(parameter, std=0.3 if name.endswith("W_V") else 0.05)
    return models


@small_models
def hgrn() -> dict[str, nn.Module]:
    small: dict[str, Any] = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2)
    models: dict[str, nn.Module] = {
        "hgrn": language_model("ssm-hgrn", **small),
        "hgrn2": language_model("ssm-hgrn2", **small, num_heads=3),
        "gsa": language_model("ssm-gsa", **small, num_heads=3, num_slots=5, tau=2.0),
    }
    for name in ("hgrn", "hgrn2"):
        nn.init.normal_(models[name].backbone.lower_bounds.weight)
    return models


@small_models
def kimi_delta() -> dict[str, nn.Module]:
    small: dict[str, Any] = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, num_heads=3)
    return {
        "kda": language_model("ssm-kda", **small),
        "kda-bounded": language_model("ssm-kda", **small, lower_bound=-5.0),
    }


@small_models
def linear_attention() -> dict[str, nn.Module]:
    small: dict[str, Any] = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, num_heads=3)
    attention = dict(layers=[1], num_heads=2, num_kv_heads=1, qkv_bias=True, window_size=8)
    return {
        "gla": language_model("ssm-gla", **small, tau=4.0, gate_rank=4),
        "gla-as-mamba": language_model(
            "ssm-gla", **small, key_size=18, value_size=36, intermediate_size=0, tie_word_embeddings=False,
            head_norm="rms",
        ),
        "gla-hybrid": language_model("ssm-gla", **{**small, "num_hidden_layers": 3}, attention=[attention]),
        "retnet": language_model("ssm-retnet", **small),
        "retnet-unrotated": language_model("ssm-retnet", **small, rotary=False, intermediate_size=0),
    }  # fmt: skip


@small_models
def lightning() -> dict[str, nn.Module]:
    sizes: dict[str, Any] = dict(vocab_size=97, hidden_size=24, num_hidden_layers=3, num_heads=4, intermediate_size=16)
    attention = dict(layers=[1], num_heads=4, num_kv_heads=2, rotary_dim=4, qk_norm="shared")
    experts = dict(num_experts=6, experts_per_token=2, expert_groups=3, chosen_groups=2, expert_scale=2.5)
    routed = dict(routed_layers=[1, 2], **experts, expert_size=8, shared_size=8)
    own = dict(norm_groups=2, rotary_dim=4)
    return {"lightning": language_model("ssm-lightning", **sizes, **own, **routed, attention=[attention])}


@small_models
def mamba() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, state_size=5, num_hidden_layers=2)
    sizes |= dict(expand=2, conv_kernel=4, time_step_rank=3)
    return {
        "mamba": language_model("mamba", **sizes),
        "mamba-with-biases": language_model("mamba", **{**sizes, "use_bias": True, "conv_kernel": 3}),
        "falcon-mamba": language_model("falcon_mamba", **sizes),
    }


@small_models
def mamba2() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, state_size=6, num_hidden_layers=2)
    sizes |= dict(expand=2, conv_kernel=4, chunk_size=8)
    hybrid = dict(sizes, num_hidden_layers=3, num_heads=6, head_dim=8, n_groups=1, initializer_range=0.1)
    options = dict(num_heads=4, num_heads_kv=2, head_dim=8, causal=True, d_conv=4, rotary_emb_dim=4)
    attention = dict(attn_layer_idx=[1], attn_cfg=options, d_intermediate=16)
    return {
        "mamba2": language_model("mamba2", **sizes, num_heads=6, head_dim=8, n_groups=2),
        "mamba2-one-group": language_model(
            "mamba2", **sizes, num_heads=4, head_dim=12, n_groups=1, use_bias=True, time_step_limit=(0.01, 0.2)
        ),
        "mamba2attn": with_longer_memory(language_model("mamba2attn", **hybrid, **attention)),
    }


@small_models
def mamba3() -> dict[str, nn.Module]:
    sizes: dict[str, Any] = dict(vocab_size=97, hidden_size=24, state_size=8, head_dim=8, initializer_range=0.06)
    attention = dict(num_heads=4, head_dim=8, causal=True, rotary_emb_dim=4)
    other: dict[str, Any] = dict(n_groups=2, rope_fraction=1.0, head_norm=True, decay="softplus", num_hidden_layers=3)
    hybrid = dict(attn_layer_idx=[1], attn_cfg=attention, d_intermediate=16)
    return {
        "mamba3": with_longer_memory(language_model("ssm-mamba3", **sizes, num_hidden_layers=2)),
        "mamba3-hybrid": with_longer_memory(language_model("ssm-mamba3", **sizes, **other, **hybrid)),
    }


@small_models
def plamo2() -> dict[str, nn.Module]:
    sizes: dict[str, Any] = dict(vocab_size=97, hidden_size=24, num_hidden_layers=4, num_heads=3, intermediate_size=16)
    attention = dict(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm="per head")
    both = [{**attention, "layers": [1], "window_size": 5}, {**attention, "layers": [3], "rope_theta": 1e6}]
    own = dict(head_dim=8, state_size=5, time_step_rank=4)
    module = language_model("ssm-plamo2", **sizes, **own, attention=both)
    return {"plamo2": with_longer_memory(module)}


@small_models
def rwkv() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, rescale_every=0, use_cache=False)
    models: dict[str, nn.Module] = {
        "rwkv": language_model("rwkv", **sizes),
        "rwkv-deeper": language_model("rwkv", **{**sizes, "num_hidden_layers": 3}, intermediate_size=40),
    }
    for model in models.values():
        nn.init.normal_(model.get_input_embeddings().weight)
    return models


@small_models
def rwkv7() -> dict[str, nn.Module]:
    small: dict[str, Any] = dict(vocab_size=97, hidden_size=24, num_heads=3, intermediate_size=40)
    small |= dict(decay_rank=5, rate_rank=6, value_rank=4, gate_rank=7, initializer_range=1.0)
    model = language_model("ssm-rwkv7", **small, num_hidden_layers=2)
    for block in model.backbone.layers:
        nn.init.zeros_(block.mixer.attn.w_lora.out.bias)  # The decays then matter.
    return {"rwkv7": model}


@small_models
def selective() -> dict[str, nn.Module]:
    small: dict[str, Any] = dict(vocab_size=97, hidden_size=12, state_size=5)
    return {
        "selective-ssm": SelectiveSSMForSequenceClassification(SelectiveSSMConfig(**small)),
        "selective-ssm-classes": SelectiveSSMForSequenceClassification(
            SelectiveSSMConfig(**small, binary=False, num_labels=4)
        ),
        "selective-ssm-language": language_model("selective-ssm", **small),
    }


@small_models
def mambavision() -> dict[str, nn.Module]:
    sizes: dict[str, Any] = dict(vocab_size=97, hidden_size=16, num_hidden_layers=3, state_size=3, time_step_rank=2)
    sizes |= dict(num_attention_heads=2, intermediate_size=24, last_heads=2, layer_scale=True, initializer_range=0.5)
    config = SSMClassifierConfig(backbone=MambaVisionConfig(**sizes), num_labels=3)
    return {"mambavision": SSMForSequenceClassification(config)}


@small_models
def vim() -> dict[str, nn.Module]:
    sizes: dict[str, Any] = dict(vocab_size=97, hidden_size=16, num_hidden_layers=2, state_size=3, time_step_rank=2)
    config = VimConfig(**sizes, middle=False, initializer_range=0.5)
    return {"vim": SSMForSequenceClassification(SSMClassifierConfig(backbone=config, num_labels=3))}


@small_models
def bailing_hybrid() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, num_attention_heads=3)
    kinds = dict(layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=6)
    latent = dict(kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, num_key_value_heads=3)
    experts = dict(first_k_dense_replace=1, moe_intermediate_size=16, num_experts_per_tok=2, num_local_experts=4)
    groups = dict(n_group=1, topk_group=1, pad_token_id=0, eos_token_id=0, initializer_range=0.05)
    options = {**sizes, **kinds, **latent, **experts, **groups}
    return {
        "bailing_hybrid": with_smaller_decays(language_model("bailing_hybrid", **options)),
        "bailing_hybrid-unbounded": with_smaller_decays(
            language_model("bailing_hybrid", **options, kda_safe_gate=False)
        ),
    }


@small_models
def bamba() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, attn_layer_indices=[1])
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_n_heads=6, mamba_d_head=8, mamba_d_state=6)
    module = language_model("bamba", **sizes, **heads, mamba_chunk_size=8, initializer_range=0.1)
    return {"bamba": with_longer_memory(module)}


@small_models
def falcon_h1() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=2, initializer_range=0.1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_n_heads=6, mamba_d_head=8, mamba_d_ssm=48)
    scales = dict(ssm_multipliers=[0.7, 1.2, 0.9, 1.1, 0.8], ssm_in_multiplier=1.3, lm_head_multiplier=0.5)
    small = dict(**sizes, **heads, **scales, mamba_d_state=6, mamba_n_groups=2, mamba_chunk_size=8)
    each = {
        "falcon_h1": dict(mamba_rms_norm=False),
        "falcon_h1-gate-then-norm": dict(mamba_rms_norm=True, mamba_norm_before_gate=False),
        "falcon_h1-norm-then-gate": dict(mamba_rms_norm=True, mamba_norm_before_gate=True),
    }
    models = {name: language_model("falcon_h1", **small, **more) for name, more in each.items()}
    return {name: with_longer_memory(module) for name, module in models.items()}


@small_models
def glm5_next() -> dict[str, nn.Module]:
    from ssmscope.layers.glm5_next import Glm5NextForCausalLM, Glm5NextTextConfig

    return {"glm5_next": with_smaller_decays(Glm5NextForCausalLM(Glm5NextTextConfig(**GLM_SIZES)))}


@small_models
def granitemoehybrid() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, shared_intermediate_size=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_n_heads=6, mamba_d_head=8, mamba_d_state=6)
    layers = dict(layer_types=["mamba", "attention", "mamba"], num_local_experts=4, num_experts_per_tok=2)
    module = language_model("granitemoehybrid", **sizes, **heads, **layers, mamba_chunk_size=8, initializer_range=0.1)
    return {"granitemoehybrid": with_longer_memory(module)}


@small_models
def jamba() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, initializer_range=0.1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_d_state=5, mamba_dt_rank=3)
    layers = dict(attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=4)
    module = language_model("jamba", **sizes, **heads, **layers, use_mamba_kernels=False)
    return {"jamba": with_longer_memory(module)}


@small_models
def kimi_linear() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2)
    kinds = dict(layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_heads=3)
    latent = dict(kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, num_key_value_heads=2)
    experts = dict(mlp_layer_types=["dense", "sparse", "sparse"], moe_intermediate_size=16, num_experts_per_tok=2)
    tokens = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)
    module = language_model(
        "kimi_linear", **sizes, **kinds, **latent, **experts, **tokens, linear_head_dim=6, num_local_experts=4,
        initializer_range=0.05,
    )  # fmt: skip
    return {"kimi_linear": with_smaller_decays(module)}


@small_models
def lara_mini() -> dict[str, nn.Module]:
    sizes = {name: value for name, value in DELTA_SIZES.items() if name not in ("intermediate_size", "layer_types")}
    kinds = ["linear_attention", "full_attention", "linear_attention", "sliding_attention"]
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    sizes = {**sizes, "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 4, "eos_token_id": 0}
    return {"lara_mini": with_smaller_decays(language_model("lara_mini", **sizes, **experts))}


@small_models
def lfm2() -> dict[str, nn.Module]:
    return {"lfm2": language_model("lfm2", **CONVOLUTION_SIZES)}


@small_models
def lfm2_moe() -> dict[str, nn.Module]:
    sizes = {name: value for name, value in CONVOLUTION_SIZES.items() if name != "block_auto_adjust_ff_dim"}
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1)
    return {"lfm2_moe": language_model("lfm2_moe", **sizes, **experts)}


@small_models
def lfm3() -> dict[str, nn.Module]:
    sizes = {
        name: value
        for name, value in CONVOLUTION_SIZES.items()
        if name not in ("block_auto_adjust_ff_dim", "layer_types")
    }
    kinds = ["conv", "full_attention", "conv", "sliding_attention"]
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    module = language_model(
        "lfm3", **{**sizes, "num_hidden_layers": 4}, **ends, layer_types=kinds, head_dim=12, sliding_window=6
    )
    return {"lfm3": module}


def minimax_options() -> dict[str, Any]:
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=4, layer_types=kinds)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6, block_size=8, initializer_range=0.1)
    return {**sizes, **heads, "num_local_experts": 4, "num_experts_per_tok": 2}


@small_models
def minimax() -> dict[str, nn.Module]:
    scales = dict(full_attn_alpha_factor=1.5, linear_attn_alpha_factor=1.5, mlp_alpha_factor=1.5)
    own = dict(rotary_dim=4, rotary_base=40.0, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    return {
        "minimax": language_model("minimax", **minimax_options()),
        "minimax-m1": language_model("ssm-minimax", **minimax_options(), **scales, **own),
    }


@small_models
def nemotron_h() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, head_dim=12, initializer_range=0.1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_num_heads=6, mamba_head_dim=8, n_groups=2)
    layers = dict(layers_block_type=["mamba", "attention", "moe", "mamba"], ssm_state_size=6, chunk_size=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
    module = language_model("nemotron_h", **sizes, **heads, **layers, **experts, moe_shared_expert_intermediate_size=16)
    return {"nemotron_h": with_longer_memory(module)}


@small_models
def olmo_hybrid() -> dict[str, nn.Module]:
    sizes = {name: value for name, value in DELTA_SIZES.items() if name != "head_dim"}
    tokens = dict(pad_token_id=0, eos_token_id=1)
    return {
        name: with_smaller_decays(language_model("olmo_hybrid", **sizes, **tokens, linear_allow_neg_eigval=negative))
        for name, negative in (("olmo_hybrid", False), ("olmo_hybrid-negative-eigenvalues", True))
    }


@small_models
def qwen3_5() -> dict[str, nn.Module]:
    return {"qwen3_5": with_smaller_decays(language_model("qwen3_5_text", **DELTA_SIZES))}


@small_models
def qwen3_5_moe() -> dict[str, nn.Module]:
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    return {"qwen3_5_moe": with_smaller_decays(language_model("qwen3_5_moe_text", **DELTA_SIZES, **experts))}


@small_models
def qwen3_next() -> dict[str, nn.Module]:
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    return {"qwen3_next": with_smaller_decays(language_model("qwen3_next", **DELTA_SIZES, **experts))}


@small_models
def qwen4_exp() -> dict[str, nn.Module]:
    return {
        "qwen4_exp": with_smaller_decays(language_model("qwen4_exp_text", **QWEN_SIZES)),
        "qwen4_exp-sigmoid": with_smaller_decays(
            language_model("qwen4_exp_text", **QWEN_SIZES, output_gate_type="sigmoid")
        ),
    }


@small_models
def recurrent_gemma() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=32, num_hidden_layers=3, use_cache=False)
    kinds = dict(
        block_types=["recurrent", "attention", "recurrent"],
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_window_size=6,
    )
    module = language_model("recurrent_gemma", **sizes, **kinds, w_init_variance_scale=1.0)
    for name, parameter in module.named_parameters():
        if name.endswith("recurrent_param"):
            parameter.data.uniform_(-3.0, -1.0)  # The decays then differ from token to token.
    return {"recurrent_gemma": module}


@small_models
def xlstm() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, num_heads=2, ffn_round_up_to_multiple_of=8)
    models: dict[str, nn.Module] = {
        "xlstm": language_model("xlstm", **sizes, use_cache=False),
        "xlstm-with-biases": language_model("xlstm", **sizes, use_cache=False, use_bias=True),
    }
    for module in models.values():
        for name, parameter in module.named_parameters():
            if name.endswith(("igate_preact.weight", "fgate_preact.weight")):
                parameter.data.normal_(0.0, 0.15)
            elif name.endswith(("igate_preact.bias", "fgate_preact.bias")):  # i is e^{−10} as initialised.
                parameter.data.uniform_(0.0, 2.0)
    return models


@small_models
def zamba() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=4, initializer_range=0.1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, n_mamba_heads=2, mamba_d_state=5, mamba_dt_rank=3)
    layers = dict(attn_layer_period=2, attn_layer_offset=0, use_mamba_kernels=False)
    return {"zamba": language_model("zamba", **sizes, **heads, **layers)}


@small_models
def zamba2() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, initializer_range=0.1)
    heads = dict(num_attention_heads=2, mamba_d_state=6, mamba_headdim=8, n_mamba_heads=6, mamba_ngroups=2)
    layers = dict(layers_block_type=["mamba", "hybrid", "mamba"], chunk_size=32, adapter_rank=4)
    return {"zamba2": language_model("zamba2", **sizes, **heads, **layers)}
