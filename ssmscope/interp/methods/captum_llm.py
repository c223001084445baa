"""Bridge to captum's attributions of language models, from token ids to the log-probability of the target."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from captum.attr import TextTokenInput
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from ssmscope.core.model import Model
from ssmscope.core.weights import weights_constant
from ssmscope.errors import InputError
from ssmscope.interp.baselines import NEUTRAL, baseline_embeddings, baseline_name, ordinary_tokens
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.methods.captum_names import LLM
from ssmscope.interp.methods.from_captum import captum_class, chosen, constructor_options, drawing, refusals
from ssmscope.interp.objective import Objective, text_generator

OF_TOKENS = ("attribution", "attr_target", "baseline", "layer", "seed")
"""Options that are not those of the wrapped attribution's `attribute`."""


def attributed_by_tokens(
    objective: Objective, name: str, *, baseline: str | int | float = NEUTRAL, seed: int = 0, **options: Any
) -> Scores:
    """Compute the scores of tokens by captum's LLMAttribution or LLMGradientAttribution, text by text.

    They explain Σ log p of the target's tokens, in one forward pass over text and target; a token that is taken away
    has the baseline's embedding. Special tokens stay.

    Args:
        options: `attribution`, what it wraps, and the options of that; `attr_target` of LLMAttribution.

    Raises:
        InputError: a classifier, a contrast, or what captum refuses, in its words.
    """
    model = objective.model
    if model.is_classifier or objective.contrasts is not None:
        raise InputError(f"captum:{name} explains a language model's log-probability of a target, without contrast")
    model.check_tokenizer()
    inner, kind = chosen(name, options, LLM[name][0]), captum_class(name)
    neutral, ordinary = baseline_embeddings(objective, baseline), ordinary_tokens(objective)
    scores = torch.zeros(objective.batch.mask.shape, dtype=torch.float32)
    for text, length in enumerate(objective.lengths):
        language_model = _LanguageModel(model, neutral[text, 0])
        places = ordinary[text, :length].cpu()
        given = _Tokens(objective.batch.input_ids[text, :length].cpu(), places, model)
        layer = [language_model.embed] if inner.startswith("Layer") else []
        method = captum_class(inner)(language_model, *layer, **constructor_options(inner, options))
        own = {k: v for k, v in options.items() if k not in (*OF_TOKENS, *constructor_options(inner, options))}
        if name == "LLMAttribution":
            own["forward_in_tokens"] = own["use_cached_outputs"] = False
        target = torch.tensor(objective.targets[text], device=model.device)
        draws = int(text_generator(objective, text, seed).integers(2**31))
        with drawing(draws), weights_constant(model.module), warnings.catch_warnings(), refusals(name):
            warnings.simplefilter("ignore")  # captum decodes the target for a plot that is not drawn.
            made = kind(method, model.tokenizer, **constructor_options(name, options))
            found = made.attribute(given, target=target, **own).seq_attr
        scores[text, :length][places] = found.reshape(-1).detach().float().cpu()
    what = "probability" if options.get("attr_target") == "prob" else "log-probability"
    return Scores(scores, baseline=baseline_name(objective, baseline), note=f"it explains the target's {what}")


class _Embedding(nn.Module):
    """Embeddings of token ids; `ABSENT` stands for a token that was taken away and has the baseline's embedding."""

    ABSENT = -1

    def __init__(self, table: nn.Module, baseline: Float[Tensor, " width"]) -> None:
        super().__init__()
        self._given = table, baseline

    def forward(self, ids: Int[Tensor, "runs length"]) -> Float[Tensor, "runs length width"]:
        table, baseline = self._given
        return torch.where((ids == self.ABSENT).unsqueeze(-1), baseline, table(ids.clamp(min=0)))


class _LanguageModel(nn.Module):
    """A language model as captum calls it: from token ids to an object with logits at every position."""

    def __init__(self, model: Model, baseline: Float[Tensor, " width"]) -> None:
        super().__init__()
        self._given, self.device = (model,), model.device
        self.embed = _Embedding(model.module.get_input_embeddings(), baseline)

    def forward(self, input_ids: Int[Tensor, "runs length"], **_: Any) -> Any:
        (model,), embeddings = self._given, self.embed(input_ids)
        mask = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
        with model.running(mask=mask):
            logits = model.forward_embeddings(embeddings, mask, last_only=False)
        return SimpleNamespace(logits=logits.to(torch.promote_types(logits.dtype, torch.float32)))


class _Tokens(TextTokenInput):
    """Token ids of a text, of which the ordinary ones can be taken away."""

    def __init__(self, ids: Int[Tensor, " length"], ordinary: Bool[Tensor, " length"], model: Model) -> None:
        # The parent's __init__ is skipped, because it tokenizes a text.
        self.inp_tensor, self.itp_mask = ids.unsqueeze(0), ordinary.unsqueeze(0)
        self.itp_tensor = ids[ordinary].unsqueeze(0)
        self.tokenizer, self.baselines, self.skip_tokens = model.tokenizer, _Embedding.ABSENT, None
        self.values = model.tokenizer.convert_ids_to_tokens(ids[ordinary].tolist())
        self.n_itp_features = len(self.values)
