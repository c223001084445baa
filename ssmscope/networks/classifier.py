"""Classifier of texts or pixels on any state-space backbone: a linear head that reads the last real position, or the
backbone's own parts for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from ssmscope.core.affine import applied
from ssmscope.core.encoding import last_positions
from ssmscope.core.heads import LogitsKind, given_by
from ssmscope.errors import InputError, did_you_mean


class SSMClassifierConfig(PretrainedConfig):
    """Configuration of `SSMForSequenceClassification`.

    Args:
        backbone: the backbone's configuration, an object or a dict with its `model_type`.
        dropout: probability with which components of the head's input are dropped in training.
        channels: numbers per pixel of a classifier of pixels; None for one of tokens. The only token of a pixel
            classifier's backbone (`vocab_size` 1) is the class token, after the last pixel.
        image_size: (height, width) of a pixel classifier's training images, if known.
        patch: [size, step] in pixels if a token is a patch of size × size pixels; then `channels` are those of all its
            pixels, and `image_size` counts patches.
        num_labels, id2label, label2id: as in every transformers classifier.
    """

    model_type = "ssm-classifier"

    # An instance has these only if they are given: the fingerprints of token models have no such fields.
    channels = None
    image_size = None
    patch = None

    @property
    def class_token(self) -> bool:
        """False for pixels without a class token after them, whose every position the head reads: where the backbone
        has parts of its own for pictures."""
        return self.channels is None or not hasattr(self.backbone, "picture_parts")

    def __init__(
        self,
        backbone: Any = None,
        dropout: float = 0.0,
        channels: int | None = None,
        image_size: Sequence[int] | None = None,
        patch: Sequence[int] | None = None,
        **kwargs,
    ):
        if isinstance(backbone, dict):
            fields = dict(backbone)
            kind = fields.pop("model_type", None)
            if kind not in CONFIG_MAPPING:
                raise InputError(f"backbone type {kind!r} is unknown{did_you_mean(str(kind), CONFIG_MAPPING)}")
            backbone = CONFIG_MAPPING[kind](**fields)
        self.backbone = backbone
        self.dropout = dropout
        if channels is not None:
            self._set_channels(channels, image_size)
            if patch is not None:
                self._set_patch(patch)
        elif image_size is not None:
            raise InputError(f"image_size {image_size} needs channels: only a pixel classifier reads images")
        if backbone is not None:
            self.hidden_size, self.vocab_size = backbone.hidden_size, backbone.vocab_size
            kwargs.setdefault("pad_token_id", getattr(backbone, "pad_token_id", None))
        for derived in ("hidden_size", "vocab_size"):
            kwargs.pop(derived, None)
        super().__init__(**kwargs)

    def _set_channels(self, channels: int, image_size: Sequence[int] | None) -> None:
        if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
            raise InputError(f"channels is {channels!r}; allowed is a whole number from 1 on, or None")
        if self.backbone is not None and self.backbone.vocab_size != 1:
            raise InputError(
                f"a pixel classifier's backbone has the class token only: give it vocab_size=1, not "
                f"{self.backbone.vocab_size}"
            )
        self.channels = channels
        if image_size is not None:
            if len(image_size) != 2 or any(not isinstance(side, int) or side < 1 for side in image_size):
                raise InputError(f"image_size is {image_size!r}; allowed is [height, width]")
            self.image_size = list(image_size)

    def _set_patch(self, patch: Sequence[int]) -> None:
        if len(patch) != 2 or any(type(each) is not int or each < 1 for each in patch) or self.image_size is None:
            raise InputError(f"patch is {patch!r}; allowed is [size, step] in pixels, with an image_size in patches")
        if self.channels is None or self.channels % patch[0] ** 2:
            raise InputError(f"channels {self.channels} are not those of the {patch[0] ** 2} pixels of a patch")
        self.patch = list(patch)


class SSMForSequenceClassification(PreTrainedModel):
    """Classifier: backbone, last real position, dropout, linear head.

    With `config.channels` it reads pixels: each is mapped linearly to the backbone's width, and a learnt class token is
    appended, whose position the head reads (Baleen, section 4.3, after ViT). A backbone whose configuration has
    `picture_parts`, classes of a module before it and of one after it, brings them in place of these, and there is no
    class token: the head reads every position.

    Padding may be on either side; a row's last real position is the last one whose `attention_mask` is 1.
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
        config.backbone = self.backbone.config  # This has the fields that the backbone derives.
        self.dropout = nn.Dropout(config.dropout)
        own = None if config.class_token else config.backbone.picture_parts()
        self.head = nn.Linear(config.backbone.hidden_size, config.num_labels) if own is None else own[1](config)
        if config.channels is not None:
            width = config.backbone.hidden_size
            self.embed = nn.Linear(config.channels, width) if own is None else own[0](config)
            self.main_input_name = "input_values"
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        own = (self.head, getattr(self, "embed", None))  # The backbone initialises itself.
        if isinstance(module, nn.Linear) and any(module is part for part in own):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            nn.init.zeros_(module.bias)

    def is_custom_code(self) -> bool:
        """Return the backbone's answer: transformers 5 does not initialise parts of custom code without weights of
        their own, and such parts fill the buffers of Falcon-H1 that no file holds."""
        return self.backbone.is_custom_code()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def embed_values(self, input_values: Float[Tensor, "batch length channels"]) -> Float[Tensor, "batch after width"]:
        """Return the embeddings of the pixels and then of the class token; `after` is length + 1, or length without
        one. Raise InputError if this classifies tokens, or pixels with another number of channels."""
        if self.config.channels is None:
            raise InputError("this classifier reads tokens, not pixels: give input_ids")
        if input_values.ndim != 3 or input_values.shape[-1] != self.config.channels:
            raise InputError(
                f"input_values is {tuple(input_values.shape)}; it must be (batch, length, {self.config.channels})"
            )
        pixels = applied(self.embed, input_values)
        if not self.config.class_token:
            return pixels
        token = self.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.long, device=pixels.device))
        return torch.cat([pixels, token.expand(len(pixels), 1, -1).to(pixels.dtype)], dim=1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_values: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Tensor, ...]:
        """Return logits (batch, classes) from `input_ids` (batch, length) or `inputs_embeds` (batch, length, width).

        A pixel classifier reads `input_values` (batch, length, channels) in [0, 1]; its `inputs_embeds` and
        `attention_mask` include the class token, if it has one: they are length + 1 long.

        With `labels` (batch,) the loss is the cross-entropy, with several labels (batch, labels) that of each, with
        numbers the mean squared error, as `config.problem_type` says; plus β · KL for a Baleen backbone in training
        (Baleen, Eq. 5).
        """
        if input_values is not None:
            if input_ids is not None or inputs_embeds is not None:
                raise InputError("give one of input_values, input_ids and inputs_embeds")
            inputs_embeds = self.embed_values(input_values)
        elif self.config.channels is not None and inputs_embeds is None:
            raise InputError("this classifier reads pixels: give input_values")
        run = self.backbone(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            output_hidden_states=output_hidden_states,
            use_cache=False,
        )
        hidden = run.last_hidden_state
        read = last_real(hidden, attention_mask) if self.config.class_token else hidden
        logits = applied(self.head, self.dropout(read))
        loss = None
        if labels is not None:
            loss = _loss(given_by(self.config), logits.float(), labels)
            divergence = information_loss(self.backbone)  # Callers with a loss of their own read it themselves.
            if divergence is not None and self.training:
                loss = loss + self.config.backbone.kl_weight * divergence
        result = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=run.hidden_states)
        return result if return_dict is not False else result.to_tuple()


def information_loss(module: nn.Module) -> Tensor | None:
    """Return, and clear, the mean over layers of the last training pass's KL; None if no layer left one. A layer's KL
    is a mean over states and heads, so β means the same at every size, and a mean or (`kl_over` "sum") sum over
    positions."""
    found = [m.__dict__.pop("kl") for m in module.modules() if isinstance(m.__dict__.get("kl"), Tensor)]
    return torch.stack(found).mean() if found else None


def _loss(gives: LogitsKind, logits: Tensor, labels: Tensor) -> Tensor:
    if gives == "labels":
        return binary_cross_entropy_with_logits(logits, labels.to(logits))
    if gives == "numbers":
        return mse_loss(logits.reshape(labels.shape), labels.to(logits))
    return cross_entropy(logits, labels)


def last_real(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return each row of `hidden` (batch, length, width) at its last real position, (batch, width)."""
    if mask is None:
        return hidden[:, -1]
    return hidden[torch.arange(len(hidden), device=hidden.device), last_positions(mask.to(hidden.device))]


AUTO = (SSMForSequenceClassification,)
