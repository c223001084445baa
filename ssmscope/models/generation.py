"""What our own language models share: their output and loss, and generation without a cache."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Mamba2ForCausalLM, PreTrainedModel
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


class HeadOnBackbone(WholeSequences):
    """Mixed in before a transformers model, makes it a language model of its `backbone` and `lm_head`."""

    backbone: PreTrainedModel
    lm_head: nn.Module

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Logits (batch, length, vocabulary); with `labels` (batch, length), −100 where nothing is asked, the mean
        cross-entropy of each next token."""
        run = self.backbone(
            input_ids, attention_mask, inputs_embeds, use_cache=use_cache, output_hidden_states=output_hidden_states
        )
        logits, loss = self.lm_head(run.last_hidden_state), None
        if labels is not None:
            loss = cross_entropy(rearrange(logits[:, :-1].float(), "b t v -> (b t) v"), labels[:, 1:].flatten())
        result = CausalLMOutput(loss=loss, logits=logits, hidden_states=run.hidden_states)
        return result if return_dict is not False else result.to_tuple()
