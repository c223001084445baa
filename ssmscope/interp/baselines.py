"""Baselines: neutral embeddings at which Integrated Gradients begins, and with which occlusion hides tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from ssmscope.core.affine import embedding_table
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.objective import Objective

NEUTRAL, SCALED, MEAN, ZERO = "neutral", "scaled-mean", "mean", "zero"
BASELINE_NAMES = (NEUTRAL, SCALED, MEAN, ZERO)
"""Baselines that are not tokens."""

GREY = 0.5
"""Value of every pixel of an image's baseline, unless another is requested."""

SINGULAR_SHARE = 0.2
"""Share of the typical embedding's size below which norms are nearly singular."""

ROLES = ("pad", "unk", "mask", "bos", "eos", "cls", "sep")


def baseline_embeddings(
    objective: Objective, baseline: str | int | float = NEUTRAL
) -> Float[Tensor, "texts length width"]:
    """Return the embeddings of neutral texts, token by token; zeros at padding. Special tokens are replaced too.

    Args:
        baseline: "neutral", the token for unknown words where the tokenizer has one that was trained (whose embedding
            is not nearly singular), else "scaled-mean"; "scaled-mean", the mean of the embedding table at the table's
            median size; "mean", that mean itself, which in a small model lies near zero; "zero", where RMSNorm is
            singular, so that what integrates up to it converges slowly; a token's id, or a token (a special one by its
            role too: "pad", "unk", "mask"). Of a pixel classifier "neutral" and both means are a pixel of 0.5 in every
            channel, a number from 0 to 1 is another grey, and the class token stays. Of a model of one's own of
            series or images "neutral" and both means are the mean of each channel over the series or image, and a
            number is that at every step or pixel.

    Raises:
        InputError: for a baseline that is none of these, or a scaled mean of a table whose mean is zero.
    """
    model, batch = objective.model, objective.batch
    if not model.embeds:
        return _of_numbers(model, batch, baseline)
    table = embedding_table(model.module)
    width = table.shape[1]
    if baseline == ZERO:
        return table.new_zeros(*batch.mask.shape, width)
    if batch.values is not None:
        grey = torch.full_like(batch.values, _grey(model, baseline))
        with torch.no_grad():
            found = model.embed(replace(batch, values=grey))
    else:
        chosen = _settled(model, baseline, table)
        found = table[chosen] if isinstance(chosen, int) else _mean(model, table, scaled=chosen == SCALED)
    return found.expand(*batch.mask.shape, width).masked_fill(~batch.mask.unsqueeze(-1), 0)


def ordinary_tokens(objective: Objective) -> Bool[Tensor, "texts length"]:
    """Return a mask of the texts' own tokens: neither special tokens nor padding."""
    found = torch.zeros_like(objective.batch.mask)
    for row, words in enumerate(objective.batch.words):
        found[row, : len(words)] = torch.tensor([word is not None for word in words], device=found.device)
    return found


def baseline_name(objective: Objective, baseline: str | int | float = NEUTRAL) -> str:
    """Describe a baseline, including the one that "neutral" stands for."""
    model = objective.model
    if baseline == ZERO:
        return "a zero embedding"
    if not model.embeds:
        return (
            "the mean of each channel" if baseline in (NEUTRAL, SCALED, MEAN) else f"{_number(baseline):g} everywhere"
        )
    if objective.batch.values is not None:
        return f"a grey of {_grey(model, baseline):g}"
    chosen = _settled(model, baseline, embedding_table(model.module))
    if isinstance(chosen, str):
        return "the mean embedding" if chosen == MEAN else "the mean embedding at the median size of embeddings"
    return f"the token {model.tokenizer.convert_ids_to_tokens(chosen) if model.tokenizer is not None else chosen}"


def singularity_note(objective: Objective, start: Float[Tensor, "texts length width"]) -> str:
    """Return a note if a baseline's embeddings are so small that norms are nearly singular there; else ""."""
    if not objective.model.embeds:
        return ""
    mask, of_pixels = objective.batch.mask, objective.batch.values is not None
    table = objective.embeddings()[mask] if of_pixels else embedding_table(objective.model.module)
    typical, least = float(_sizes(table).median()), float(_sizes(start)[mask].min())
    if least >= SINGULAR_SHARE * typical:
        return ""
    return (
        f"its baseline is near the point where norms are singular (embeddings of size {least:.2g}, the typical one is "
        f"{typical:.2g}): scores depend on small changes of it"
    )


def _settled(model: Model, baseline: str | int | float, table: Tensor) -> int | str:
    """Return the id of a token, or "mean" or "scaled-mean"."""
    if baseline in (MEAN, SCALED):
        return str(baseline)
    if baseline != NEUTRAL:
        return _token(model, baseline)
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    if unknown is None or not 0 <= unknown < len(table):
        return SCALED
    sizes = _sizes(table)
    return int(unknown) if sizes[unknown] >= SINGULAR_SHARE * sizes.median() else SCALED


def _mean(model: Model, table: Float[Tensor, "vocabulary width"], *, scaled: bool) -> Float[Tensor, " width"]:
    mean = table.mean(0, dtype=torch.promote_types(table.dtype, torch.float32))
    if scaled:
        size = _sizes(mean)
        if not size > 0:
            raise InputError(
                f"the mean embedding of {model.name} is zero and cannot be scaled; give another baseline, e.g. a token"
            )
        mean = mean * (_sizes(table).median() / size)
    return mean.to(table.dtype)


def _of_numbers(model: Model, batch: Batch, baseline: str | int | float) -> Float[Tensor, "texts length channels"]:
    assert batch.values is not None
    real = batch.mask.unsqueeze(-1)
    if baseline in (NEUTRAL, SCALED, MEAN):
        found = batch.values.masked_fill(~real, 0).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        if model.config.patch is not None:
            pixels = found.unflatten(-1, (model.config.patch[0] ** 2, -1))
            found = pixels.mean(-2, keepdim=True).expand_as(pixels).flatten(-2)
    else:
        found = torch.full_like(batch.values, _number(baseline))
    return found.expand_as(batch.values).masked_fill(~real, 0)


def _number(baseline: str | int | float) -> float:
    try:
        return 0.0 if baseline == ZERO else float(baseline)
    except ValueError:
        said = f"baseline {baseline!r} is none of a series; give neutral, zero or a number"
        raise InputError(said) from None


def _sizes(embeddings: Float[Tensor, "... width"]) -> Float[Tensor, " ..."]:
    """Return the root mean square of every embedding."""
    return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)).pow(2).mean(-1).sqrt()


def _grey(model: Model, baseline: str | int | float) -> float:
    if baseline in (NEUTRAL, SCALED, MEAN):
        return GREY
    try:
        grey = float(baseline)
    except ValueError:
        grey = math.nan
    if not 0 <= grey <= 1:
        allowed = "allowed are 'neutral' and 'mean' (0.5), 'zero' and a grey from 0 to 1"
        hint = did_you_mean(str(baseline), BASELINE_NAMES)
        raise InputError(f"unknown baseline {baseline!r} for the pixels of {model.name}; {allowed}{hint}")
    return grey


def _token(model: Model, baseline: str | int | float) -> int:
    """Return the id of the token that is the baseline."""
    tokenizer, names = model.tokenizer, ", ".join(map(repr, BASELINE_NAMES))
    allowed = f"allowed are {names}, a token's id" + (" and a token" if tokenizer is not None else "")
    if isinstance(baseline, str) and tokenizer is not None:
        role = getattr(tokenizer, f"{baseline}_token_id", None) if baseline in ROLES else None
        found = tokenizer.get_vocab().get(baseline) if baseline not in ROLES else role
        if found is not None:
            return int(found)
        if baseline in ROLES:
            raise InputError(f"the tokenizer of {model.name} has no {baseline} token; {allowed}")
    if isinstance(baseline, str) and baseline.isdecimal():
        baseline = int(baseline)
    if isinstance(baseline, bool) or not isinstance(baseline, int | np.integer):
        raise InputError(
            f"unknown baseline {baseline!r}; {allowed}{did_you_mean(str(baseline), (*BASELINE_NAMES, *ROLES))}"
        )
    if not 0 <= baseline < model.vocabulary:
        raise InputError(f"there is no token {baseline} for a baseline; ids are 0 to {model.vocabulary - 1}")
    return int(baseline)
