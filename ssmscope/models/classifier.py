"""A text classifier on any state-space backbone: a linear head that reads the last real position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from ssmscope.errors import InputError, did_you_mean
from ssmscope.models.baleen import information_loss


class SSMClassifierConfig(PretrainedConfig):
    """Configuration of `SSMForSequenceClassification`.

    Args:
        backbone: the backbone's configuration, an object or a dict with its `model_type`.
        dropout: probability with which components of the state that the head reads are dropped in training.
        num_labels, id2label, label2id: as in every transformers classifier.
    """

    model_type = "ssm-classifier"

    def __init__(self, backbone: Any = None, dropout: float = 0.0, **kwargs):
        if isinstance(backbone, dict):
            fields = dict(backbone)
            kind = fields.pop("model_type", None)
            if kind not in CONFIG_MAPPING:
                raise InputError(f"backbone type {kind!r} is unknown{did_you_mean(str(kind), CONFIG_MAPPING)}")
            backbone = CONFIG_MAPPING[kind](**fields)
        self.backbone = backbone
        self.dropout = dropout
        if backbone is not None:
            self.hidden_size, self.vocab_size = backbone.hidden_size, backbone.vocab_size
            kwargs.setdefault("pad_token_id", backbone.pad_token_id)
        for derived in ("hidden_size", "vocab_size"):
            kwargs.pop(derived, None)
        super().__init__(**kwargs)


class SSMForSequenceClassification(PreTrainedModel):
    """Backbone, last real position, dropout, linear head.

    Padding may stand on either side; a row's last real position is the last one whose `attention_mask` is 1.
    """

    config_class = SSMClassifierConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    _no_split_modules: list[str] = []

    def __init__(self, config: SSMClassifierConfig):
        super().__init__(config)
        if config.backbone is None:
            raise InputError("an SSM classifier needs the configuration of its backbone")
        self.backbone = AutoModel.from_config(config.backbone)
        config.backbone = self.backbone.config  # with what the backbone settled when it was made
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.backbone.hidden_size, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.head:  # the backbone initialises itself
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Tensor, ...]:
        """Logits (batch, classes) from `input_ids` (batch, length) or `inputs_embeds` (batch, length, width).

        With `labels` (batch,) the loss is the cross-entropy, plus β · KL for a Baleen backbone in training (Baleen,
        Eq. 5).
        """
        run = self.backbone(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            output_hidden_states=output_hidden_states,
            use_cache=False,
        )
        hidden = run.last_hidden_state
        logits = self.head(self.dropout(last_real(hidden, attention_mask).to(self.head.weight.dtype)))
        divergence = information_loss(self.backbone)
        loss = None
        if labels is not None:
            loss = cross_entropy(logits.float(), labels)
            if divergence is not None and self.training:
                loss = loss + self.config.backbone.kl_weight * divergence
        result = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=run.hidden_states)
        return result if return_dict is not False else result.to_tuple()


def last_real(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Each row of `hidden` (batch, length, width) at its last real position, (batch, width)."""
    if mask is None:
        return hidden[:, -1]
    positions = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
    last = (mask.bool() * positions).amax(1).sub(1).clamp(min=0)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


AUTO = ((SSMClassifierConfig, {"AutoModelForSequenceClassification": SSMForSequenceClassification}),)
