"""Entries of `ssmscope.layers`, as a package has entry points: the module that reads each layer, by the full
name of the layer's class, and the module of each model type that transformers lacks."""

from collections.abc import Mapping

_HERE = "ssmscope.layers."
_OF_TRANSFORMERS: Mapping[str, tuple[str, ...]] = {
    "falcon_h1": ("falcon_h1.FalconH1Mixer",),
    "gated_delta": (
        "bailing_hybrid.BailingHybridDeltaAttention",
        "kimi_linear.KimiLinearDeltaAttention",
        "lara_mini.LaraMiniGatedDeltaNet",
        "olmo_hybrid.OlmoHybridGatedDeltaNet",
        "qwen3_5.Qwen3_5GatedDeltaNet",
        "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
        "qwen3_next.Qwen3NextGatedDeltaNet",
        "qwen4_exp.Qwen4ExpTextGatedDeltaNet",
    ),
    "glm5_next": ("glm5_next.Glm5NextTextLinearAttention",),
    "lfm2": ("lfm2.Lfm2ShortConv", "lfm2_moe.Lfm2MoeShortConv", "lfm3.Lfm3ShortConv"),
    "mamba": ("mamba.MambaMixer", "falcon_mamba.FalconMambaMixer", "jamba.JambaMambaMixer", "zamba.ZambaMambaMixer"),
    "mamba2": (
        "mamba2.Mamba2Mixer",
        "bamba.BambaMixer",
        "granitemoehybrid.GraniteMoeHybridMambaLayer",
        "nemotron_h.NemotronHMamba2Mixer",
        "zamba2.Zamba2MambaMixer",
    ),
    "minimax": ("minimax.MiniMaxLightningAttention",),
    "recurrent_gemma": ("recurrent_gemma.RecurrentGemmaRecurrentBlock",),
    "rwkv": ("rwkv.RwkvBlock",),
    "xlstm": ("xlstm.xLSTMLayer",),
}
"""Layers of transformers by the module that reads them, each as its family and class."""
_LAYERS: Mapping[str, str] = {
    "comba.CombaMixer": "comba",
    "delta.DeltaMixer": "delta",
    "delta_product.DeltaProductMixer": "delta_product",
    "linear_layers.GatedLinearAttention": "linear_attention",
    "hgrn.SlotMixer": "hgrn",
    "hgrn.HGRNMixer": "hgrn",
    "hgrn.HGRN2Mixer": "hgrn",
    "kimi_delta.KimiDeltaMixer": "kimi_delta",
    "lightning.LightningMixer": "lightning",
    "mamba3.Mamba3Mixer": "mamba3",
    "mambavision.MambaVisionMixer": "mambavision",
    "plamo2.Plamo2Mixer": "plamo2",
    "linear_layers.Retention": "linear_attention",
    "rwkv7.RWKV7Mixer": "rwkv7",
    "vim.VimMixer": "vim",
}
"""Layers of our own models, by module and class."""
_OF_PACKAGES: Mapping[str, str] = {
    "mamba_ssm.modules.mamba_simple.Mamba": "MAMBA",
    "mamba_ssm.modules.mamba2.Mamba2": "MAMBA2",
    "mambapy.mamba.MambaBlock": "MAMBA",
    "minGRU_pytorch.minGRU.minGRU": "MIN_GRU",
    "xlstm.blocks.mlstm.layer.mLSTMLayer": "MLSTM",
    "minimamba.s6.S6": "S6",
    "LRU_pytorch.LRU.LRU": "LRU",
    "s5.s5_model.S5": "S5",
}
"""Layers of other packages, by their classes and the adapter in `packages`."""
_MODELS: Mapping[str, str] = {
    "mamba2attn": "mamba2attn",
    "ssm-comba": "comba",
    "ssm-deltanet": "delta",
    "ssm-deltaproduct": "delta_product",
    "ssm-gla": "linear_attention",
    "ssm-gsa": "hgrn",
    "ssm-hgrn": "hgrn",
    "ssm-hgrn2": "hgrn",
    "ssm-kda": "kimi_delta",
    "ssm-lightning": "lightning",
    "ssm-mamba3": "mamba3",
    "ssm-mambavision": "mambavision",
    "ssm-minimax": "minimax_m1",
    "ssm-plamo2": "plamo2",
    "ssm-retnet": "linear_attention",
    "ssm-rwkv7": "rwkv7",
    "ssm-vim": "vim",
}
"""Modules of the model types that transformers lacks."""

ENTRIES: Mapping[str, Mapping[str, str]] = {
    "ssmscope.layers": {
        f"transformers.models.{family}.modeling_{family}.{kind}": _HERE + adapter
        for adapter, layers in _OF_TRANSFORMERS.items()
        for family, _, kind in (layer.partition(".") for layer in layers)
    }
    | {_HERE + layer: _HERE + adapter for layer, adapter in _LAYERS.items()}
    | {layer: f"{_HERE}packages:{name}" for layer, name in _OF_PACKAGES.items()},
    "ssmscope.models": {kind: _HERE + module for kind, module in _MODELS.items()},
}
