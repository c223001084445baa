"""Random models of the shapes that benchmarks run: of 130 million parameters for a CPU, of billions for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import ssmscope
from ssmscope.core.model import Model


def mamba_130m() -> Any:
    """mamba-130m's width: 768, 1,536 channels of 16 states."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM, MambaConfig(hidden_size=768, state_size=16, num_hidden_layers=24, vocab_size=1000)


def mamba2_130m() -> Any:
    """mamba2-130m's width: 768, 24 heads of width 64, 128 states."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = dict(hidden_size=768, num_heads=24, head_dim=64, state_size=128, n_groups=1, num_hidden_layers=24)
    special = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)
    return Mamba2ForCausalLM, Mamba2Config(**sizes, **special, vocab_size=1000)


def mamba2_2_7b() -> Any:
    """mamba2-2.7b."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = dict(hidden_size=2560, num_heads=80, head_dim=64, state_size=128, n_groups=1, num_hidden_layers=64)
    special = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)
    return Mamba2ForCausalLM, Mamba2Config(**sizes, **special, vocab_size=50288)


def falcon() -> Any:
    """Falcon-Mamba-7B."""
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    sizes = dict(hidden_size=4096, num_hidden_layers=64, state_size=16, time_step_rank=256, vocab_size=65024)
    return FalconMambaForCausalLM, FalconMambaConfig(**sizes, tie_word_embeddings=False)


def codestral() -> Any:
    """Mamba-Codestral-7B."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = dict(hidden_size=4096, num_hidden_layers=64, num_heads=128, head_dim=64, state_size=128, n_groups=8)
    return Mamba2ForCausalLM, Mamba2Config(**sizes, vocab_size=32768, tie_word_embeddings=False)


def bamba() -> Any:
    """Bamba-9B: 29 layers of Mamba-2 and three of attention, with feed-forward parts."""
    from transformers import BambaConfig, BambaForCausalLM

    sizes = dict(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, vocab_size=128256)
    heads = dict(num_attention_heads=32, num_key_value_heads=8, attn_layer_indices=[9, 18, 27])
    mamba = dict(mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=256, mamba_expand=2)
    return BambaForCausalLM, BambaConfig(**sizes, **heads, **mamba, tie_word_embeddings=False)


def jamba() -> Any:
    """Jamba's blocks with four experts in place of sixteen."""
    from transformers import JambaConfig, JambaForCausalLM

    sizes = dict(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, vocab_size=65536, num_experts=4)
    heads = dict(num_attention_heads=32, num_key_value_heads=8)
    return JambaForCausalLM, JambaConfig(**sizes, **heads, mamba_dt_rank=256, use_mamba_kernels=False)


def mamba_790m() -> Any:
    """mamba-790m."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = dict(hidden_size=1536, num_hidden_layers=48, state_size=16, time_step_rank=96, vocab_size=50280)
    return MambaForCausalLM, MambaConfig(**sizes)


def nemotron() -> Any:
    """Nemotron-H-8B: 24 layers of Mamba-2, 4 of attention, 24 feed-forward."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    kinds = {"M": "mamba", "-": "mlp", "*": "attention"}
    layers = [kinds[kind] for kind in "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-"]
    sizes = dict(hidden_size=4096, intermediate_size=21504, vocab_size=131072, layers_block_type=layers)
    heads = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    mamba = dict(mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8)
    return NemotronHForCausalLM, NemotronHConfig(**sizes, **heads, **mamba)


def granite() -> Any:
    """Granite-4.0-H-Small: 36 layers of Mamba-2 and four of attention, each with 72 experts."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    layers = ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]
    sizes = dict(hidden_size=4096, num_hidden_layers=40, layer_types=layers, vocab_size=100352)
    heads = dict(num_attention_heads=32, num_key_value_heads=8)
    mamba = dict(mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1)
    experts = dict(num_local_experts=72, num_experts_per_tok=10, intermediate_size=768, shared_intermediate_size=1536)
    scales = dict(embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=1 / 128, logits_scaling=16)
    return GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig(**sizes, **heads, **mamba, **experts, **scales)


def falcon_h1() -> Any:
    """Falcon-H1-7B without its multipliers."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    sizes = dict(hidden_size=3072, num_hidden_layers=44, intermediate_size=12288, vocab_size=130048)
    heads = dict(num_attention_heads=12, num_key_value_heads=2, head_dim=128)
    mamba = dict(mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128, mamba_d_state=256, mamba_n_groups=1)
    return FalconH1ForCausalLM, FalconH1Config(**sizes, **heads, **mamba)


def qwen() -> Any:
    """Qwen3-Next-80B-A3B with 64 experts in place of 512: 36 layers of the gated delta rule and 12 of attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM, Qwen3NextConfig(num_experts=64)


SHAPES: dict[str, Callable[[], Any]] = {
    **{"mamba-130m": mamba_130m, "mamba2-130m": mamba2_130m, "mamba2-2.7b": mamba2_2_7b, "790m": mamba_790m},
    **{"falcon": falcon, "codestral": codestral, "bamba": bamba, "jamba": jamba, "nemotron": nemotron},
    **{"granite": granite, "falcon-h1": falcon_h1, "qwen": qwen},
}


def built(shape: str, dtype: torch.dtype, device: str, layers: int | None = None) -> Model:
    """Load a random model of a shape, drawn on its device.

    Projections have a standard deviation of 0.02, as Mamba's authors draw them: with transformers' 0.1 a random model
    of this depth amplifies rounding. The shapes of 130 million parameters take steps of about 1 instead of 0.01, so
    that the recurrence is a large share of a layer's output.
    """
    kind, config = SHAPES[shape]()
    config.initializer_range = 0.02
    config.num_hidden_layers = layers or config.num_hidden_layers
    torch.manual_seed(0)
    with torch.device(device):
        module = kind._from_config(config, dtype=dtype).eval()
    module.requires_grad_(False)
    if shape.endswith("130m"):
        for layer in module.backbone.layers:
            mixer = layer.mixer
            (mixer.dt_proj.bias if hasattr(mixer, "dt_proj") else mixer.dt_bias).add_(4)
    return ssmscope.load(module)
