"""Models as files in the layouts of other libraries."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedModel
from ssmscope.core.affine import stored_weights
from ssmscope.zoo.layouts import DIFF_PART_NAMES, FILE_FIELDS


def saved(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_mamba_ssm(module: PreTrainedModel, directory: Path, *, safetensors: bool = False) -> Path:
    """Save transformers' Mamba or Mamba-2 language model in mamba_ssm's layout; `directory` is made if need be."""
    c, second = module.config, isinstance(module, Mamba2ForCausalLM)
    cfg: dict[str, Any] = dict(layer="Mamba2" if second else "Mamba1", d_state=c.state_size, d_conv=c.conv_kernel)
    cfg.update(expand=c.expand, bias=c.use_bias, conv_bias=c.use_conv_bias)
    if second:
        cfg.update(headdim=c.head_dim, ngroups=c.n_groups, chunk_size=c.chunk_size)
        if tuple(c.time_step_limit) != (0.0, float("inf")):
            cfg.update(dt_limit=list(c.time_step_limit))
    else:
        cfg.update(dt_rank=c.time_step_rank)
    config = dict(
        **dict(d_model=c.hidden_size, n_layer=c.num_hidden_layers, vocab_size=c.vocab_size, ssm_cfg=cfg, rms_norm=True),
        **dict(residual_in_fp32=c.residual_in_fp32, fused_add_norm=True, pad_vocab_size_multiple=1),
        tie_embeddings=c.tie_word_embeddings,
    )
    weights = {
        name.replace("backbone.embeddings.weight", "backbone.embedding.weight"): t.detach().clone().contiguous()
        for name, t in stored_weights(module).items()
    }
    saved(directory, config, weights)
    if not safetensors:
        (directory / "model.safetensors").unlink()
        torch.save(weights, directory / "pytorch_model.bin")
    return directory


def their_name(name: str) -> str:
    """The name in the authors' model of a tensor of `DiffMambaForCausalLM`."""
    for theirs, ours in DIFF_PART_NAMES.items():
        name = re.sub(rf"^(backbone\.layers\.\d+\.){re.escape(ours)}", rf"\g<1>{theirs}", name)
    return name


def write_diff_mamba2(module: PreTrainedModel, directory: Path) -> Path:
    """Save a `DiffMambaForCausalLM` in the authors' layout, which has Diff-Mamba blocks with a norm and a sum of λ in
    all layers, every other one or the last quarter."""
    config, number = module.config, module.config.num_hidden_layers
    settings = {
        "all": list(range(number)),
        "alternate": list(range(0, number, 2)),
        "quarter": list(range(number - number // 4, number)),
    }
    setting = next(name for name, those in settings.items() if those == config.differential_indices)
    shape = [name for name in Mamba2Config().to_dict() if name not in FILE_FIELDS and not name.startswith("_")]
    fields = {name: getattr(config, name) for name in shape}
    fields.update(model_type="mamba2", architectures=["DiffMamba2ForCausalLM"])
    fields.update(diffmamba=True, diffmamba_settings=setting)
    weights: dict[str, Tensor] = {
        their_name(name): tensor.detach().clone().contiguous()
        for name, tensor in stored_weights(module).items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    return saved(directory, fields, weights)
