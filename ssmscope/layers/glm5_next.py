"""GLM-5.3-Flash (Z.ai 2026): Kimi's delta attention, sparse attention between, and four residual streams.

Its layers are read as `gated_delta` reads Kimi's, with a lower bound of the decay. transformers has the model with a
vision tower alone; here is its language model.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel
from ssmscope.core.blocks import LATENT, UNREAD, of_hybrids
from ssmscope.layers.gated_delta import FORM, compute_terms

__all__ = ["BLOCK_PARTS", "FORM", "Glm5NextForCausalLM", "compute_terms"]

BLOCK_PARTS = of_hybrids("Glm5NextText", Attention=LATENT, HyperConnection=UNREAD)


# transformers lets experts be computed in other ways where it finds "@use_experts_implementation" in a model's module.
class Glm5NextForCausalLM(Glm5NextPreTrainedModel, transformers.GenerationMixin):
    """Language model of transformers' `Glm5NextTextModel` and a head, as its multimodal model runs on text alone."""

    config_class = Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **given: Any) -> Any:
        """Return logits (batch, length, vocabulary) and, with `labels`, the mean cross-entropy of each next token."""
        run = self.model(input_ids, **given)
        logits, loss = self.lm_head(run.last_hidden_state), None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        kept = {name: run[name] for name in ("cache", "hidden_states", "attentions") if name in run}
        return MoeCausalLMOutputWithPast(loss=loss, logits=logits, **kept)


# From 5.14 to 5.18 `register` ignores configurations of transformers' own.
transformers.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[Glm5NextTextConfig] = Glm5NextForCausalLM
