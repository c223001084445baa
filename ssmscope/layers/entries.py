"""Entries of `ssmscope.layers`, as a package has entry points: the module that reads each layer, by the full
name of the layer's class, and the module of each model type that transformers lacks."""

from collections.abc import Mapping

_HERE = "ssmscope.layers."
_OF_TRANSFORMERS: Mapping[str, str] = {
    "falcon_h1": "falcon_h1.FalconH1Mixer", "glm5_next": "glm5_next.Glm5NextTextLinearAttention",
    "gated_delta": """
        bailing_hybrid.BailingHybridDeltaAttention kimi_linear.KimiLinearDeltaAttention
        lara_mini.LaraMiniGatedDeltaNet olmo_hybrid.OlmoHybridGatedDeltaNet
        qwen3_next.Qwen3NextGatedDeltaNet qwen3_5.Qwen3_5GatedDeltaNet qwen3_5_moe.Qwen3_5MoeGatedDeltaNet
        qwen4_exp.Qwen4ExpTextGatedDeltaNet
    """,
    "lfm2": "lfm2.Lfm2ShortConv lfm2_moe.Lfm2MoeShortConv lfm3.Lfm3ShortConv",
    "mamba": "mamba.MambaMixer falcon_mamba.FalconMambaMixer jamba.JambaMambaMixer zamba.ZambaMambaMixer",
    "mamba2": """
        mamba2.Mamba2Mixer bamba.BambaMixer granitemoehybrid.GraniteMoeHybridMambaLayer
        nemotron_h.NemotronHMamba2Mixer zamba2.Zamba2MambaMixer
    """,
    "minimax": "minimax.MiniMaxLightningAttention", "rwkv": "rwkv.RwkvBlock", "xlstm": "xlstm.xLSTMLayer",
    "recurrent_gemma": "recurrent_gemma.RecurrentGemmaRecurrentBlock",
}  # fmt: skip
"""Layers of transformers by the module that reads them, each as its family and class."""
_TEXT_TYPES = {f"{name}_text": name for name in ("glm5_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")}
"""Model types of their language models, which transformers names by the whole model's folder."""
_OURS: Mapping[str, tuple[str, str]] = {
    "comba": ("CombaMixer", "ssm-comba"), "delta": ("DeltaMixer", "ssm-deltanet"),
    "delta_product": ("DeltaProductMixer", "ssm-deltaproduct"), "kimi_delta": ("KimiDeltaMixer", "ssm-kda"),
    "hgrn": ("SlotMixer HGRNMixer HGRN2Mixer", "ssm-gsa ssm-hgrn ssm-hgrn2"),
    "lightning": ("LightningMixer", "ssm-lightning"), "linear_attention": ("", "ssm-gla ssm-retnet"),
    "mamba2attn": ("", "mamba2attn"), "mamba3": ("Mamba3Mixer", "ssm-mamba3"), "minimax_m1": ("", "ssm-minimax"),
    "mambavision": ("MambaVisionMixer", "ssm-mambavision"), "plamo2": ("Plamo2Mixer", "ssm-plamo2"),
    "rwkv7": ("RWKV7Mixer", "ssm-rwkv7"), "vim": ("VimMixer", "ssm-vim"),
}  # fmt: skip
"""Layers of our own models by the module that has and reads them, and the model types that transformers lacks."""
_OF_PACKAGES: Mapping[str, str] = {
    "mamba_ssm.modules.mamba_simple.Mamba": "MAMBA", "mamba_ssm.modules.mamba2.Mamba2": "MAMBA2",
    "mambapy.mamba.MambaBlock": "MAMBA", "minGRU_pytorch.minGRU.minGRU": "MIN_GRU",
    "xlstm.blocks.mlstm.layer.mLSTMLayer": "MLSTM", "minimamba.s6.S6": "S6", "LRU_pytorch.LRU.LRU": "LRU",
    "s5.s5_model.S5": "S5",
}  # fmt: skip
"""Layers of other packages, by their classes and the adapter in `packages`."""

ENTRIES: Mapping[str, Mapping[str, str]] = {
    "ssmscope.layers": {
        f"transformers.models.{family}.modeling_{family}.{kind}": _HERE + adapter
        for adapter, layers in _OF_TRANSFORMERS.items()
        for family, _, kind in (layer.partition(".") for layer in layers.split())
    }
    | {f"{_HERE}{module}.{layer}": _HERE + module for module, (layers, _) in _OURS.items() for layer in layers.split()}
    | {f"{_HERE}linear_layers.{each}": f"{_HERE}linear_attention" for each in ("GatedLinearAttention", "Retention")}
    | {layer: f"{_HERE}packages:{name}" for layer, name in _OF_PACKAGES.items()},
    "ssmscope.text_types": _TEXT_TYPES,
    "ssmscope.models": {kind: _HERE + module for module, (_, kinds) in _OURS.items() for kind in kinds.split()},
}
