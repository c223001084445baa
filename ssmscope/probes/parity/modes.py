"""A model's own library in every mode in which it serves: padding, batches, cached steps, prefill in chunks."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from ssmscope.api.options import note
from ssmscope.core.intercept import evaluating
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.loading.fields import read_object
from ssmscope.loading.in_memory import converted
from ssmscope.loading.layouts import layout_of
from ssmscope.loading.load import locate
from ssmscope.probes.parity.measure import ROUNDING_FACTOR, copied
from ssmscope.probes.parity.result import Compared

PROMPT, PADDING, WRITTEN, CHUNK = 37, 7, 24, 16
"""Tokens of the prompt, of its padding, of what is written, and of a chunk of prefill or a prefix."""
REFUSALS = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, ImportError)
"""Errors with which libraries refuse a mode."""
CACHES = ("past_key_values", "cache_params", "state")
"""Names under which transformers' models return and take what they keep of earlier tokens."""

OTHERS = {
    "mamba_ssm": ("mamba_ssm", "mamba_ssm.models.mixer_seq_simple", "MambaLMHeadModel"),
    "flash-linear-attention": ("fla", "transformers", "AutoModelForCausalLM"),
}
"""Libraries that serve directories of a layout, and where the class is by which they do."""
HALF = "logits of one pass in bfloat16"

Run = Callable[[], tuple[list[int], Tensor]]
"""Function that returns a text and the logits of its last tokens."""


def library_of(model: Model) -> tuple[str, Any]:
    """Return the name of the library that serves a model, and its own module: mamba_ssm's or flash-linear-attention's
    of a directory in their layout, else transformers'. Raises InputError if it cannot be run here."""
    path = Path(model.name) / "config.json"
    with suppress(InputError):  # A model in memory has no files.
        path = locate(model.name) / "config.json"
    layout = layout_of(path.parent, read_object(path)) if path.is_file() else None
    name, home, kind = OTHERS.get(layout.name if layout else "", ("transformers", "", ""))
    module = model.module
    if not home:
        if not type(module).__module__.startswith("transformers.") or not hasattr(module, "generate"):
            raise InputError(f"{model.name} does not write with its library's generate; give a language model of one")
        return name, module
    try:
        importlib.import_module(name)
        read = getattr(importlib.import_module(home), kind).from_pretrained
        found = read(str(path.parent), **({"trust_remote_code": False} if home == "transformers" else {}))
        return name, found.to(model.device, next(module.parameters()).dtype).eval()
    except REFUSALS as error:
        said = " ".join(str(error).split())[:100]
        what = f"{name}, which serves {model.name}, cannot be run here ({said})"
        raise InputError(f"{what}; install it on a machine with a GPU") from error


def own_modes(model: Model, seed: int) -> tuple[str, tuple[Compared, ...]]:
    """Return the library's name, and the logits of its own code in each mode against this package's run of the same
    tokens in float64. A mode that the library refuses is noted. Errors are rms(difference) / rms by token, allowed as
    in `measure.compared`. Raises InputError if all are refused."""
    library, module = library_of(model)
    own = next(model.module.parameters()).dtype
    exact = model if own == torch.float64 else copied(model, torch.float64)
    rounded, found = dict[torch.dtype, Model](), list[Compared]()
    for name, run in _modes(model, library, module, np.random.default_rng(seed)):
        try:
            with evaluating(module), torch.no_grad():
                text, logits = run()
        except REFUSALS as error:
            note(f"{name} is refused: {' '.join(str(error).split())[:100]}")
            continue
        batch, start = model.encode(ids=text), len(text) - len(logits)
        dtype = torch.bfloat16 if name == HALF else own
        if dtype not in rounded:
            rounded[dtype] = copied(model, dtype)
        right, near = (each.logits(batch)[0, start:].double() for each in (exact, rounded[dtype]))
        size = right.square().mean().sqrt()
        errors, rounding = ((t - right).square().mean(-1).sqrt() / size for t in (logits.double(), near))
        errors = errors.nan_to_num(nan=float("inf"))
        allowed = ROUNDING_FACTOR * (float(rounding.max()) + torch.finfo(dtype).eps)
        places = [(0, at) for at in range(start, len(text))]
        found.append(Compared.of(name, errors.cpu().numpy(), allowed, places, batch.tokens))
    if not found:
        raise InputError(f"{library} refuses every mode of {model.name}; its own code cannot be compared")
    return library, tuple(found)


def _modes(model: Model, library: str, module: Any, random: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Yield names of modes and how they are run. Padding is tried without a cache where cached steps are refused."""
    ids, other = (
        torch.from_numpy(random.integers(3, model.vocabulary, (1, n))).to(model.device)
        for n in (PROMPT, PROMPT + PADDING)
    )
    pad, whole = torch.full_like(ids[:, :PADDING], 3), torch.ones_like(ids)
    known = inspect.signature(module.forward).parameters
    mask = torch.cat([torch.zeros_like(pad), whole], 1)
    left, right = torch.cat([pad, ids], 1), torch.cat([ids, pad], 1)

    def plain(module: Any, x: Tensor, **more: Any) -> tuple[list[int], Tensor]:
        more |= {} if library == "mamba_ssm" else {"use_cache": False}
        return ids[0].tolist(), module(input_ids=x, **more).logits[0, :PROMPT]

    def written(x: Tensor, real: Tensor, skip: int = 0, **more: Any) -> tuple[list[int], Tensor]:
        kept: dict[str, Any] = {"return_dict_in_generate": True}
        if library == "mamba_ssm":
            if more or not bool(real.all()):
                raise ValueError("its generate has neither a mask nor chunks")
            out = module.generate(x, max_length=x.shape[1] + WRITTEN, output_scores=True, **kept)
            return out.sequences[0, :-1].tolist(), torch.stack([each[0] for each in out.scores])
        kept |= dict(output_logits=True, max_new_tokens=WRITTEN, do_sample=False, eos_token_id=None, pad_token_id=0)
        out = module.generate(input_ids=x, attention_mask=real, **{"use_cache": True, **kept, **more})
        return out.sequences[0, skip:-1].tolist(), torch.stack([each[0] for each in out.logits])

    def padded(x: Tensor, real: Tensor) -> tuple[list[int], Tensor]:
        """Return the logits of the prompt in one pass, and of what is then written."""
        positions = (real.cumsum(1) - 1).masked_fill(real == 0, 1)  # As generate counts.
        given = {"position_ids": positions} if "position_ids" in known else {}
        first = module(input_ids=x, attention_mask=real, use_cache=False, **given).logits[0, PADDING:-1]
        try:
            text, then = written(x, real, PADDING)
        except REFUSALS:
            text, then = written(x, real, PADDING, use_cache=False)
        return text, torch.cat([first, then])

    def after_prefix() -> tuple[list[int], Tensor]:
        first = module(input_ids=ids[:, :CHUNK], use_cache=True)
        name = next((each for each in CACHES if getattr(first, each, None) is not None), None)
        if name is None:
            raise ValueError("its forward pass returns no cache")
        places = torch.arange(CHUNK, PROMPT, device=ids.device)
        about = {"attention_mask": whole, "position_ids": places.unsqueeze(0), "cache_position": places}
        given = {each: about[each] for each in about.keys() & known.keys()}
        kept = {name: copy.deepcopy(getattr(first, name)), "use_cache": True}
        return ids[0].tolist(), module(input_ids=ids[:, CHUNK:], **kept, **given).logits[0]

    both, every = torch.cat([left, other]), torch.cat([mask, torch.ones_like(other)])
    yield "logits of one pass", lambda: plain(module, ids)
    yield HALF, lambda: plain(converted(module, torch.bfloat16, None), ids)
    yield "logits of right padding, alone", lambda: plain(module, right, attention_mask=mask.flip(1))
    beside = dict(attention_mask=torch.cat([mask.flip(1), torch.ones_like(other)]))
    yield "logits of right padding, in a batch", lambda: plain(module, torch.cat([right, other]), **beside)
    yield "logits of cached steps", lambda: written(ids, whole)
    two = torch.cat([ids, other[:, PADDING:]])
    yield "logits of cached steps, in a batch", lambda: written(two, torch.ones_like(two))
    yield "logits of prefill in chunks", lambda: written(ids, whole, prefill_chunk_size=CHUNK)
    yield "logits of a prefix reused", after_prefix
    yield "logits of left padding, alone", lambda: padded(left, mask)
    yield "logits of left padding, in a batch", lambda: padded(both, every)
