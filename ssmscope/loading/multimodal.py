"""Language models within transformers' multimodal models, as they run on text alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from ssmscope.core.heads import is_sequence_classifier
from ssmscope.core.intercept import evaluating
from ssmscope.core.mixers import mixers
from ssmscope.errors import InputError

TRIAL_IDS = ((1, 2, 3, 4, 5), (5, 3, 6, 2, 4))
"""Token ids of the texts for which the two models are compared."""


def language_model_of(module: nn.Module) -> Any:
    """Return the language model of a multimodal model, with the same parameters and parts; the module itself if it is
    none, has no head or no state-space layer. It has the whole model's generation settings. Raises InputError if the
    language model's logits of a text differ."""
    if not isinstance(module, PreTrainedModel) or is_sequence_classifier(module):
        return module
    kind = type(module.config.get_text_config(decoder=True))
    if kind is type(module.config) or not mixers(module) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return module
    within = (part for part in module.modules() if isinstance(part, PreTrainedModel) and part is not module)
    found: Any = next((part for part in within if type(part.config) is kind), None)
    if found is not None and found.get_output_embeddings() is None:
        head = module.get_output_embeddings()
        found = None if head is None else _with_head(found, head)
    if found is None:
        return module
    _check_same(module, found)
    found.generation_config = getattr(module, "generation_config", None)
    return found


def _with_head(backbone: Any, head: nn.Module) -> Any:
    """Return transformers' language model around a backbone and a head."""
    with torch.device("meta"):
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(backbone.config)](backbone.config)
    setattr(found, found.base_model_prefix, backbone)
    found.set_output_embeddings(head)
    return found.train(backbone.training)


def _check_same(module: Any, found: Any) -> None:
    ids = torch.tensor(TRIAL_IDS, device=found.get_input_embeddings().weight.device)
    ids = ids.remainder(found.get_input_embeddings().weight.shape[0])
    with torch.no_grad(), evaluating(module), evaluating(found):
        own, other = (each(input_ids=ids, use_cache=False).logits for each in (module, found))
    if not torch.allclose(own, other, rtol=1e-3, atol=1e-3 * float(own.abs().max())):
        raise InputError(
            f"the logits of a text by {type(module).__name__} are not those of the {type(found).__name__} within it: "
            "give that part"
        )
