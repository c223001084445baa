"""Base classes of our own language models: output and loss, and a cache of states for transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationMixin, Mamba2ForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from ssmscope.core.attention_layers import attending
from ssmscope.core.mixers import collect_states, fast_scan, mixers
from ssmscope.core.trace import LayerState, States, gathered

MAMBA2_TIED = Mamba2ForCausalLM._tied_weights_keys or ["lm_head.weight"]
"""Tied weights, which transformers 4 leaves empty for Mamba-2, and then cannot save a model with tied embeddings."""

CACHE = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
"""Name under which transformers' `generate` keeps a cache: `cache` from 5.24 on."""


class StateCache:
    """Cache of a model that continues from states: those of its layers after `length` tokens, padding included."""

    def __init__(self, states: States, length: int) -> None:
        self.states, self.length = states, length

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the states of these rows, one or several times each, as a beam search asks."""
        self.states = gathered(self.states, beam_idx)


class ContinuesFromStates:
    """Mixin before a transformers language model that returns a `StateCache` where `use_cache` is set, and continues
    from one. Its `generate` reads every token once, whatever the configuration says of caches."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: StateCache | None = None,
        cache: StateCache | None = None,
        **kwargs: Any,
    ) -> Any:
        given = {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds, "labels": labels, **kwargs}
        run = partial(super().forward, input_ids, use_cache=False, **given)  # type: ignore[misc]
        before = past_key_values if cache is None else cache
        if before is None and not use_cache:
            return run()
        module: Any = self
        states, length = ((), 0) if before is None else (before.states, before.length)
        own, attended = states[: len(mixers(module))], states[len(mixers(module)) :]
        after: list[LayerState] = []
        keys: list[LayerState] = []
        mask = None if attention_mask is None else attention_mask.bool()
        recurrent = fast_scan(module, mask=mask, states=own, visit=collect_states(module, after))
        with recurrent, attending(module, mask=mask, states=attended, keep=keys, writing=True):
            output = run()
        read = input_ids if inputs_embeds is None else inputs_embeds
        left = StateCache((*after, *keys), length + read.shape[1])  # type: ignore[union-attr]
        if isinstance(output, tuple):
            return *output, left
        output[CACHE] = left
        return output

    # To 5.23 `generate` cannot ask a cache of its own for its length where no layer is attention.
    _supports_default_dynamic_cache = classmethod(lambda cls: False)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, inputs_embeds=None, **kwargs):
        known = kwargs.get(CACHE)
        start = 0 if known is None else known.length
        mask = None if attention_mask is None else attention_mask[:, start:]
        if inputs_embeds is not None and not start:
            return {"inputs_embeds": inputs_embeds, "attention_mask": mask, "use_cache": True}
        ids = input_ids[:, start:] if inputs_embeds is None else input_ids[:, -1:]
        return {"input_ids": ids, "attention_mask": mask, CACHE: known, "use_cache": True}

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            model_kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
        model_kwargs[CACHE] = outputs[CACHE]
        return model_kwargs


class Backbone:
    """Mixin before a transformers model that makes it a backbone. `hidden` returns the hidden states (batch, length,
    width), the last one at the end, for ids, mask, embeddings and positions; of ids and embeddings one is None."""

    config: PretrainedConfig
    hidden: Callable[..., tuple[Tensor, ...]]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple[Tensor, ...]:
        """Return the last hidden state (batch, length, width) from `input_ids` (batch, length) or `inputs_embeds`, and
        all of them as `hidden_states`. There is no cache; transformers' callers pass `use_cache` to every model."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        found = self.hidden(input_ids, attention_mask, inputs_embeds, position_ids)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        result = BaseModelOutput(last_hidden_state=found[-1], hidden_states=found if output_hidden_states else None)
        return result if return_dict is not False else result.to_tuple()


class BlocksInTurn(Backbone):
    """Mixin before a transformers model that makes it a backbone of `embeddings`, `layers` and `norm_f`."""

    block_class: type[nn.Module]

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.embeddings: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.blocks(config))
        self.norm_f: Any = self.norm(config)
        self.post_init()  # type: ignore[attr-defined]

    def blocks(self, config: Any) -> list[nn.Module]:
        """Return a new model's blocks in order."""
        return [self.block_class(config, number) for number in range(config.num_hidden_layers)]

    def norm(self, config: Any) -> nn.Module:
        """Return the norm before the head."""
        return nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def normed(self, x: Tensor) -> Tensor:
        """Return the last hidden state for the last block's output (batch, length, width)."""
        return self.norm_f(x.to(self.norm_f.weight.dtype))

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = value

    def add_positions(self, x: Tensor) -> Tensor:
        """Return the first block's input for the embeddings (batch, length, width)."""
        return x

    def block_arguments(self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> tuple[Any, ...]:
        """Return the arguments of every block after the residual stream."""
        return (attention_mask,)

    def hidden(self, ids: Tensor, mask: Any, embeddings: Tensor | None, positions: Any) -> tuple[Tensor, ...]:
        """Return, as Mamba does, every layer's output and then the norm's."""
        x = self.add_positions(self.embeddings(ids) if embeddings is None else embeddings)
        arguments, after = self.block_arguments(x, mask, positions), []
        for block in self.layers:
            x = block(x, *arguments)
            after.append(x)
        return *after, self.normed(x)


class _HeadOnBackbone:
    backbone_class: Any
    backbone: PreTrainedModel
    lm_head: nn.Module

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.backbone = self.backbone_class(config)
        self.lm_head = self.make_head(config.vocab_size)
        self.post_init()  # type: ignore[attr-defined]

    def make_head(self, rows: int) -> nn.Module:
        """Return a new head."""
        return nn.Linear(self.config.hidden_size, rows, bias=False)  # type: ignore[attr-defined]

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
        **kwargs: Any,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Return logits (batch, length, vocabulary) and, with `labels` (batch, length), −100 where there is none, the
        mean cross-entropy of each next token."""
        as_tuple = kwargs.pop("return_dict", None) is False
        run = self.backbone(input_ids, attention_mask, inputs_embeds, **kwargs)
        logits, loss = self.lm_head(run.last_hidden_state), None
        if labels is not None:
            loss = cross_entropy(rearrange(logits[:, :-1].float(), "b t v -> (b t) v"), labels[:, 1:].flatten())
        result = CausalLMOutput(loss=loss, logits=logits, hidden_states=run.hidden_states)
        return result.to_tuple() if as_tuple else result


class HeadOnBackbone(ContinuesFromStates, _HeadOnBackbone):
    """Mixin before a transformers model that makes it a language model of `backbone` and `lm_head`."""
