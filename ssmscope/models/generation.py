"""Generation for language models whose layers have no cache: every step runs the whole sequence."""

from __future__ import annotations

import torch
from transformers import Mamba2ForCausalLM

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
