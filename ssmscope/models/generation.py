"""What our own language models share: their output and loss, and generation without a cache."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Mamba2ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

# transformers 4 leaves these empty for Mamba-2, and then cannot save a model with tied embeddings.
MAMBA2_TIED = Mamba2ForCausalLM._tied_weights_keys or ["lm_head.weight"]


class WholeSequences:
    """Mixed in before a transformers language model, makes its `generate` hand on all tokens and no cache."""

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            model_kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
        return model_kwargs


def language_output(
    logits: Tensor,
    labels: Tensor | None,
    hidden_states: tuple[Tensor, ...] | None = None,
    return_dict: bool | None = None,
) -> CausalLMOutput | tuple[Tensor, ...]:
    """A language model's output from its `logits` (batch, length, vocabulary).

    With `labels` (batch, length), −100 where nothing is asked, the loss is the mean cross-entropy of each next token.
    """
    loss = None
    if labels is not None:
        loss = cross_entropy(rearrange(logits[:, :-1].float(), "b t v -> (b t) v"), labels[:, 1:].flatten())
    result = CausalLMOutput(loss=loss, logits=logits, hidden_states=hidden_states)
    return result if return_dict is not False else result.to_tuple()
