"""Models in memory: taken out of their wrappers, and copied to another dtype or device."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ssmscope.architectures.loading.mamba_checkpoints import of_mamba_ssm
from ssmscope.architectures.loading.stored import DAMAGE_ERRORS, reason
from ssmscope.architectures.loading.user_modules import own_model
from ssmscope.core.heads import is_sequence_classifier
from ssmscope.core.mixers import mixers
from ssmscope.errors import InputError


def readable(module: nn.Module, backbone: str | None = None) -> Any:
    """Return the model that can be read in a module.

    That is a transformers model, within `torch.compile`'s, DataParallel's or peft's wrapper too; transformers' form of
    a model of mamba_ssm's, with the same parameters; or an `OwnModel` around any other module with a backbone and
    around a backbone without a head. The adapters of an unmerged PeftModel stay part of its layers. Raises InputError
    if there is no such model, its weights are not in memory, or its wrapper changes what it computes; and as
    `own_model`.
    """
    given, module = type(module).__name__, unwrapped(module)
    name = type(module).__name__
    if name == "MambaLMHeadModel" and type(module).__module__.startswith("mamba_ssm."):
        module = of_mamba_ssm(module)
    absent = next((n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta), None)
    if absent is not None:
        raise InputError(
            f"the weights of {name} are not in memory ({absent} is on the meta device): load the model without "
            "offloading"
        )
    if backbone is None and isinstance(module, PreTrainedModel) and _has_known_head(module):
        return module
    own = own_model(module, backbone)
    if own is None and isinstance(module, PreTrainedModel):
        return module  # `Model` reports that it has no layer that can be read.
    if own is None and mixers(module) not in ([], [module]):
        raise InputError(
            f"the state-space layers of {name} are not all in one transformers model: give a part of it, or a module "
            "around one backbone"
        )
    if own is None:
        within = f" within the {given} that was given" if name != given else ""
        raise InputError(
            f"{name}{within} is no transformers model and contains none that can be read; give one, such as "
            "MambaForCausalLM, mamba_ssm's MambaLMHeadModel, or a module around such a model"
        )
    return own


def _has_known_head(module: PreTrainedModel) -> bool:
    """Return True if a model is a language model, or a classifier whose forward pass is transformers' or ours."""
    if not is_sequence_classifier(module):
        return module.get_output_embeddings() is not None
    return type(module).forward.__module__.startswith(("transformers.", "ssmscope."))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module within wrappers that pass their input on unchanged. Raises InputError if a PeftModel changes
    the input, as prompt tuning does."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _inner(module: Any) -> nn.Module | None:
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return module.module
    # Neither library is imported for this: if it is not yet, the module cannot be one of its wrappers.
    dynamo, peft = sys.modules.get("torch._dynamo"), sys.modules.get("peft")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return module._orig_mod
    if peft is None or not isinstance(module, peft.PeftModel | peft.PeftMixedModel):
        return None
    for config in module.peft_config.values():
        if (
            config.is_prompt_learning
            or config.peft_type in (peft.PeftType.XLORA, peft.PeftType.POLY)
            or getattr(config, "alora_invocation_tokens", None)
        ):
            raise InputError(
                f"a PeftModel of {config.peft_type.value} changes the model's input, not only its layers: it cannot be "
                "read"
            )
    return module.base_model.model


def converted(module: nn.Module, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """Return the module itself if it has this dtype and device and allows gradients, else a copy that does. Raises
    InputError if the module cannot be copied or converted."""
    if all(
        (dtype is None or not t.is_floating_point() or t.dtype == dtype)
        and _same(t.device, device)
        and not t.is_inference()
        for t in module.parameters()
    ):
        return module
    try:
        return cast(copy.deepcopy(module), dtype, device)
    except DAMAGE_ERRORS as error:
        raise InputError(
            f"{type(module).__name__} cannot be copied to {dtype or device} ({reason(error)}): convert it first, and "
            "give neither dtype nor device"
        ) from error


def cast(module: nn.Module, dtype: torch.dtype | None, device: torch.device | None) -> nn.Module:
    """Convert a module's weights in place to this dtype and device, and return it."""
    module.to(device=device, dtype=dtype)
    for part in module.modules() if dtype == torch.float64 else ():
        if hasattr(part, "set_experts_implementation"):
            with contextlib.suppress(ValueError):  # The model has no experts.
                part.set_experts_implementation("eager")  # transformers 5 has no grouped products in float64.
    return module


def _same(present: torch.device, wanted: torch.device | None) -> bool:
    if wanted is None:
        return True
    return present.type == wanted.type and (wanted.index is None or present.index == wanted.index)
