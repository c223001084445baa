"""Checkpoints in other projects' layouts: mamba_ssm's directories and the state dicts of selective SSMs."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from ssmscope.affine import stored_weights
from ssmscope.errors import InputError
from ssmscope.models.selective import SelectiveSSMConfig, SelectiveSSMForSequenceClassification


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or of a pickled state dict. Pickles may hold nothing but tensors.

    Raises:
        InputError: when the file is not what it claims to be, or holds anything else.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise InputError(f"{path} is no complete safetensors file ({_first_line(error)})") from error
    except pickle.UnpicklingError as error:
        raise InputError(f"{path} is not opened: a pickle may hold tensors only, and this one holds more") from error
    except (EOFError, RuntimeError, zipfile.BadZipFile, OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is no readable PyTorch checkpoint ({_first_line(error)})") from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not found or not all(isinstance(v, Tensor) for v in found.values()):
        raise InputError(f"{path} holds no state dict: names with tensors were expected")
    return dict(found)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


# ---- mamba_ssm's own layout: config.json with d_model and ssm_cfg, pytorch_model.bin or model.safetensors


def is_mamba_ssm(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of mamba_ssm's."""
    return "d_model" in config and "n_layer" in config and "model_type" not in config


def read_mamba_ssm(directory: Path) -> PreTrainedModel:
    """A Mamba-1 or Mamba-2 language model saved by mamba_ssm, as transformers' model.

    Raises:
        InputError: for weights that are missing or do not fit, and for parts that transformers' models lack (attention
            layers, MLPs, LayerNorm, a norm before the gate, a skip per channel).
    """
    config = json.loads((directory / "config.json").read_text())
    files = [directory / name for name in ("model.safetensors", "pytorch_model.bin")]
    weights = next((read_tensors(f) for f in files if f.exists()), None)
    if weights is None:
        raise InputError(f"{directory} has no weights: neither {' nor '.join(f.name for f in files)}")
    cfg = dict(config.get("ssm_cfg") or {})
    second = cfg.get("layer", "Mamba1") == "Mamba2"
    unsupported = {
        "attention layers (attn_layer_idx)": config.get("attn_layer_idx"),
        "MLPs (d_intermediate)": config.get("d_intermediate"),
        "LayerNorm (rms_norm false)": config.get("rms_norm") is False,
        "a norm before the gate (norm_before_gate)": cfg.get("norm_before_gate"),
        "no gated norm (rmsnorm false)": cfg.get("rmsnorm") is False,
        "a skip per channel (D_has_hdim)": cfg.get("D_has_hdim"),
    }
    present = [name for name, value in unsupported.items() if value]
    if present:
        raise InputError(f"{directory} has {' and '.join(present)}, which cannot be read from this layout")
    if second:
        _check_groups(cfg.get("ngroups", 1), str(directory))
    weights = {
        name.replace("backbone.embedding.weight", "backbone.embeddings.weight"): tensor
        for name, tensor in weights.items()
    }
    embeddings = weights.get("backbone.embeddings.weight")
    if embeddings is None:
        raise InputError(f"{directory} has no backbone.embedding.weight: these are no weights of mamba_ssm")
    weights.setdefault("lm_head.weight", embeddings)
    tied = config.get("tie_embeddings", True)
    width, expand = config["d_model"], cfg.get("expand", 2)
    shared: dict[str, Any] = dict(
        vocab_size=embeddings.shape[0],  # padded to a multiple of 8 or 16
        hidden_size=width,
        num_hidden_layers=config["n_layer"],
        expand=expand,
        conv_kernel=cfg.get("d_conv", 4),
        use_bias=cfg.get("bias", False),
        use_conv_bias=cfg.get("conv_bias", True),
        residual_in_fp32=config.get("residual_in_fp32", True),
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=tied,
    )
    if second:
        head = cfg.get("headdim", 64)
        low, high = cfg.get("dt_limit", (0.0, float("inf")))
        module: PreTrainedModel = Mamba2ForCausalLM(
            Mamba2Config(
                **shared,
                state_size=cfg.get("d_state", 128),
                head_dim=head,
                num_heads=expand * width // head,
                n_groups=cfg.get("ngroups", 1),
                chunk_size=cfg.get("chunk_size", 256),
                time_step_limit=(float(low), float(high)),
            )
        )
    else:
        module = MambaForCausalLM(
            MambaConfig(**shared, state_size=cfg.get("d_state", 16), time_step_rank=cfg.get("dt_rank", "auto"))
        )
    return _fill(module, weights, directory)


def write_mamba_ssm(module: PreTrainedModel, directory: str | Path, *, safetensors: bool = False) -> Path:
    """Save transformers' Mamba or Mamba-2 language model in mamba_ssm's layout; `directory` is made if need be.

    Raises:
        InputError: for another kind of model.
    """
    c = module.config
    if type(module) is MambaForCausalLM:
        cfg: dict[str, Any] = dict(layer="Mamba1", d_state=c.state_size, dt_rank=c.time_step_rank)
    elif type(module) is Mamba2ForCausalLM:
        _check_groups(c.n_groups, "this model")
        cfg = dict(layer="Mamba2", d_state=c.state_size, headdim=c.head_dim, ngroups=c.n_groups)
        cfg.update(chunk_size=c.chunk_size)
        if tuple(c.time_step_limit) != (0.0, float("inf")):
            cfg.update(dt_limit=list(c.time_step_limit))
    else:
        raise InputError(f"{type(module).__name__} has no form in mamba_ssm's layout: Mamba and Mamba-2 models have")
    cfg.update(d_conv=c.conv_kernel, expand=c.expand, bias=c.use_bias, conv_bias=c.use_conv_bias)
    config = dict(
        d_model=c.hidden_size,
        n_layer=c.num_hidden_layers,
        vocab_size=c.vocab_size,
        ssm_cfg=cfg,
        rms_norm=True,
        residual_in_fp32=c.residual_in_fp32,
        fused_add_norm=True,
        pad_vocab_size_multiple=1,
        tie_embeddings=c.tie_word_embeddings,
    )
    weights = {
        name.replace("backbone.embeddings.weight", "backbone.embedding.weight"): t.detach().clone().contiguous()
        for name, t in stored_weights(module).items()
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if safetensors:
        save_file(weights, directory / "model.safetensors")
    else:
        torch.save(weights, directory / "pytorch_model.bin")
    return directory


def _check_groups(groups: int, what: str) -> None:
    """mamba_ssm norms every group of heads by itself; transformers before 5 norms all channels together."""
    if groups > 1 and int(transformers.__version__.split(".")[0]) < 5:
        raise InputError(
            f"{what} has {groups} groups of heads, which transformers {transformers.__version__} norms otherwise than "
            "mamba_ssm does: install transformers 5"
        )


# ---- state dicts of selective SSMs: embedding.weight, [SSM.]ssm.{A, W_B, W_C, q_delta, p_delta}, SSM.w or W


def read_selective(path: Path) -> PreTrainedModel:
    """A selective SSM's state dict as `SelectiveSSMForSequenceClassification`; binary with `SSM.w`, classes with `W`.

    Raises:
        InputError: when the file is no such state dict.
    """
    weights = {name.removeprefix("SSM."): tensor for name, tensor in read_tensors(path).items()}
    head = weights.pop("w", None)
    binary = head is not None
    head = head.unsqueeze(0) if head is not None else weights.pop("W", None)
    expected = {"embedding.weight", *(f"ssm.{part}" for part in ("A", "W_B", "W_C", "q_delta", "p_delta"))}
    if head is None or set(weights) != expected:
        raise InputError(
            f"{path} is no checkpoint that can be read: a single file must be a selective SSM's state dict with "
            f"embedding.weight, ssm.A, ssm.W_B, ssm.W_C, ssm.q_delta, ssm.p_delta and w or W; it holds "
            f"{', '.join(sorted(weights)[:4])}, …; other models are given as directories"
        )
    vocabulary, channels = weights["embedding.weight"].shape
    config = SelectiveSSMConfig(
        vocab_size=vocabulary,
        hidden_size=channels,
        state_size=weights["ssm.A"].shape[-1],
        spectral_abscissa=weights["ssm.A"].max().item(),
        binary=binary,
        num_labels=2 if binary else head.shape[0],
    )
    module = SelectiveSSMForSequenceClassification(config)
    return _fill(module, {**weights, "head.weight": head}, path)


def _fill(module: PreTrainedModel, weights: dict[str, Tensor], where: Path) -> PreTrainedModel:
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        detail = " ".join(line.strip() for line in str(error).splitlines()[1:])[:200]
        raise InputError(f"the weights of {where} do not fit its configuration: {detail}") from error
    return module
