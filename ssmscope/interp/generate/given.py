"""Continuations that are given in place of written ones, and the generation settings that are not used."""

from __future__ import annotations

from typing import Any

import torch
from ssmscope.api.options import note
from ssmscope.core.encoding import Batch
from ssmscope.core.ends import Ends, Written
from ssmscope.core.generation import Generation, prompt_ids
from ssmscope.core.model import Model
from ssmscope.interp.objective import objective

UNUSED_SETTINGS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "num_beams",
    "penalty_alpha",
)
"""Settings of transformers' `GenerationConfig` that change what a model writes, and that are not used here."""


def given_texts(model: Model, batch: Batch, continuation: Any) -> Generation:
    """Return continuations as if the model had written them after the texts of a batch: the log-probability of every
    token after those before it, and the entropy there.

    Args:
        continuation: a text or token id, or a list of texts or lists of ids with one for each text, or one for all.

    Raises:
        InputError: a continuation without a token or with one that the model does not have, or as many as there are
            neither texts nor one.
    """
    listed = isinstance(continuation, list | tuple)
    ids = listed and all(isinstance(each, int) for each in continuation)
    every = [continuation] if ids or not listed else list(continuation)
    every = every * len(batch.tokens) if len(every) == 1 else every
    ends, written, texts = Ends.of(model, ()), [], []
    for row, (before, said) in enumerate(zip(prompt_ids(batch), objective(model, batch, target=every).targets)):
        logits = model.logits(model.encode(ids=[[*before, *said]]))[0, len(before) - 1 : -1]
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        own = log_p.gather(1, torch.tensor(said, device=log_p.device).unsqueeze(1)).squeeze(1).tolist()
        spread = (-(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)).tolist()
        names = [str(id_) if model.tokenizer is None else model.tokenizer.decode([id_]) for id_ in said]
        tokens = [Written(row, *each) for each in zip(range(len(said)), said, names, own, spread)]
        written.append((*tokens[:-1], tokens[-1]._replace(ended_by="given")))
        texts.append(ends.text(before, said))
    return Generation(batch, tuple(texts), tuple(written))


def note_on_settings(model: Model) -> None:
    """Note the model's own generation settings that are not used."""
    own = getattr(model.module, "generation_config", None)
    if own is None:
        return
    default = type(own)()
    used = {name: getattr(own, name, None) for name in UNUSED_SETTINGS}
    found = [f"{name}={value}" for name, value in used.items() if value not in (None, getattr(default, name, None))]
    if not own.do_sample:  # transformers ignores the settings of sampling without it.
        found = [each for each in found if not each.startswith(("temperature", "top_", "min_p", "typical_p"))]
    if found:
        note(f"the model's own generation settings are not used: {', '.join(found)}; options of generate replace them")
