"""Selective state-space model of section 3 of Generalization Error Analysis for Selective State-Space Models
(Honarpisheh et al.).

One layer without convolution, gate, norm or skip: a scalar step Δ_t = softplus(p + qᵀu_t) shared by all channels, a
table A (channels, state) of diagonals that training may make positive (s_A = max A is the spectral abscissa), and
x_t = e^{Δ_t A} x_{t−1} + Δ_t (W_B u_t) u_tᵀ, y_t = (W_C u_t)ᵀ x_t. The paper's classifier reads y at the last position;
the language model, which is ours, reads every position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.utils import skip_init
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from ssmscope.core.forms import Form
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.layers.parts import ReadMixer, as_mask, at_least_float32, mask_padding
from ssmscope.networks.classifier import last_real
from ssmscope.networks.generation import Backbone, HeadOnBackbone
from ssmscope.ops import Recurrence


class SelectiveSSM(ReadMixer, nn.Module):
    """Selective SSM layer; input and output are (batch, length, channels)."""

    def __init__(self, channels: int, state: int, spectral_abscissa: float = 0.0):
        super().__init__()
        A = spectral_abscissa - 10 * torch.rand(channels, state)
        A[:, 0] = spectral_abscissa
        self.A = nn.Parameter(A)
        self.W_B = nn.Parameter(torch.randn(state, channels) * channels**-0.5)
        self.W_C = nn.Parameter(torch.randn(state, channels) * channels**-0.5)
        self.q_delta = nn.Parameter(torch.randn(channels) * channels**-0.5)
        self.p_delta = nn.Parameter(torch.zeros(1))

    @property
    def spectral_abscissa(self) -> float:
        """Largest diagonal entry s_A of the continuous state matrix; below 0 every state decays."""
        return self.A.max().item()

    def norms(self) -> dict[str, float]:
        """Return |p|, the Euclidean norm of q, max |A|, and the spectral and entrywise ℓ₁ norms of W_B and W_C
        (Honarpisheh et al., Table 3)."""
        found = {"p": self.p_delta.abs().max(), "q": self.q_delta.norm(), "A": self.A.abs().max()}
        for name, weight in (("W_B", self.W_B), ("W_C", self.W_C)):
            found |= {name: torch.linalg.matrix_norm(weight, 2), f"{name}_entrywise": weight.abs().sum()}
        return {f"norm_{name}": value.item() for name, value in found.items()}


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms (Honarpisheh et al., Eq. 3)."""
    mask = as_mask(mask)
    u = mask_padding(u, mask)
    wide = at_least_float32(u)
    A, W_B, W_C, q, p = (at_least_float32(t) for t in (mixer.A, mixer.W_B, mixer.W_C, mixer.q_delta, mixer.p_delta))
    step = mask_padding(softplus(wide @ q.unsqueeze(-1) + p), mask)
    recurrence = Recurrence(
        x=wide.unsqueeze(-1),
        b=(wide @ W_B.mT).unsqueeze(2),
        c=(wide @ W_C.mT).unsqueeze(2),
        delta=step.expand_as(wide),
        A=A,
    )
    return LayerTrace(u, (recurrence,), mask=mask)


FORM = Form(out=None)


def theorem_parameters(mixer: Any) -> dict[str, Tensor]:
    """Return the parameters whose norms are in the generalisation bound (Honarpisheh et al., Theorem 3.1)."""
    return {"A": mixer.A, "W_B": mixer.W_B, "W_C": mixer.W_C, "q": mixer.q_delta, "p": mixer.p_delta}


class SelectiveSSMConfig(PretrainedConfig):
    """Configuration of a selective SSM's classifier or language model.

    Args:
        vocab_size, hidden_size, state_size: tokens, channels d, states N per channel.
        spectral_abscissa: s_A at initialisation; A = s_A − 10 U, its column 0 equal to s_A.
        binary: whether a classifier has one head w, whose wᵀy is the log-odds of class 1; else a row of W per class.
    """

    model_type = "selective-ssm"
    num_hidden_layers = 1  # transformers' generation reads it.

    def __init__(
        self,
        vocab_size: int = 2,
        hidden_size: int = 16,
        state_size: int = 4,
        spectral_abscissa: float = 0.0,
        binary: bool = True,
        **kwargs,
    ):
        self.vocab_size, self.hidden_size, self.state_size = vocab_size, hidden_size, state_size
        self.spectral_abscissa, self.binary = spectral_abscissa, binary
        kwargs["use_cache"] = kwargs["tie_word_embeddings"] = False
        super().__init__(**kwargs)


class _SelectiveSSMPreTrainedModel(PreTrainedModel):
    config_class = SelectiveSSMConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    _is_stateful = True

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a head; all other parts initialise themselves when they are made."""
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    def make_head(self, rows: int) -> nn.Linear:
        """Return a head that `_init_weights` alone initialises, even if a directory's weights have another head."""
        like = next(self.parameters()).device
        return skip_init(nn.Linear, self.config.hidden_size, rows, bias=False, device=like)


class _EmbeddingAndSSM(_SelectiveSSMPreTrainedModel):
    def __init__(self, config: SelectiveSSMConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.ssm = SelectiveSSM(config.hidden_size, config.state_size, config.spectral_abscissa)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def outputs(self, input_ids: Tensor | None, attention_mask: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Return y (batch, length, channels) at every position."""
        u = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        return self.ssm(u, attention_mask=attention_mask)


class SelectiveSSMModel(Backbone, _EmbeddingAndSSM):
    """Backbone of an embedding and one selective SSM, whose y is its only hidden state."""

    def hidden(self, ids: Tensor | None, mask: Any, embeddings: Tensor | None, positions: Any) -> tuple[Tensor]:
        """Return y (batch, length, channels)."""
        return (self.outputs(ids, mask, embeddings),)


class SelectiveSSMForSequenceClassification(_EmbeddingAndSSM):
    """Classifier of an embedding, one selective SSM, and a head without bias on y at each row's last real position. A
    binary model's logits are (0, wᵀy), whose softmax is the paper's sigmoid(wᵀy)."""

    def __init__(self, config: SelectiveSSMConfig):
        super().__init__(config)
        self.head = self.make_head(1 if config.binary else config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Tensor, ...]:
        """Return logits (batch, classes) from `input_ids` (batch, length) or `inputs_embeds` (batch, length,
        channels)."""
        logits = self.head(last_real(self.outputs(input_ids, attention_mask, inputs_embeds), attention_mask))
        if self.config.binary:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
        loss = cross_entropy(logits.float(), labels) if labels is not None else None
        result = SequenceClassifierOutput(loss=loss, logits=logits)
        return result if return_dict is not False else result.to_tuple()


class SelectiveSSMForCausalLM(HeadOnBackbone, _SelectiveSSMPreTrainedModel, GenerationMixin):
    """Language model of an embedding, one selective SSM, and a head without bias on y at every position."""

    backbone_class = SelectiveSSMModel
    make_head = _SelectiveSSMPreTrainedModel.make_head


AUTO = (SelectiveSSMModel, SelectiveSSMForCausalLM, SelectiveSSMForSequenceClassification)
