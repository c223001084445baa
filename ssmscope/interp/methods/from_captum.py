"""Adapter to captum's attributions (Kokhlikyan et al., Captum, 2020) of the same f."""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ssmscope.core.batching import tokens_at_once
from ssmscope.core.mixers import weights_constant
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.baselines import NEUTRAL, baseline_embeddings, baseline_name, ordinary_tokens
from ssmscope.interp.explain.result import Scores
from ssmscope.interp.methods.captum_names import CAPTUM
from ssmscope.interp.objective import Objective, text_generator

ADAPTER_PARAMETERS = {
    *("self", "inputs", "target", "additional_forward_args", "forward_func", "model", "baselines", "feature_mask"),
    *("return_convergence_delta", "return_input_shape", "show_progress", "kwargs", "args"),
}
"""Parameters of captum's that the adapter sets itself."""


def captum_method(name: str) -> Callable[..., Scores]:
    """Return captum's attribution of this name as a method with its constructor's and `attribute`'s options."""

    def attribute(objective: Objective, **options: Any) -> Scores:
        return attributed(objective, name, **options)

    defaults = {"baseline": NEUTRAL, "seed": 0}
    options = [
        inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(each)) for each in _options(name)
    ]
    objective = inspect.Parameter("objective", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    attribute.__signature__ = inspect.Signature([objective, *options])  # type: ignore[attr-defined]
    return attribute


def attributed(
    objective: Objective, which: Any, *, baseline: str | int | float = NEUTRAL, seed: int = 0, **options: Any
) -> Scores:
    """Compute the scores of tokens by one of captum's attributions, text by text.

    Methods that hide features hide whole tokens; scores of the components of an embedding are summed over the token.
    captum's random numbers depend only on the seed and the text.

    Args:
        which: a name in `captum.attr`, or an instance made with any function, which f replaces.
        baseline: embedding of hidden tokens and start of paths, see `baseline_embeddings`. Special tokens keep
            their own embedding.
        options: options of captum's constructor and of its `attribute`, by name; for NoiseTunnel also `attribution`,
            the name of what it repeats, and the options of that.

    Raises:
        InputError: for what captum refuses, in its words.
    """
    embeddings, lengths = objective.embeddings(), objective.lengths
    neutral, ordinary = baseline_embeddings(objective, baseline).to(embeddings), ordinary_tokens(objective)
    start = torch.where(ordinary.unsqueeze(-1), neutral, embeddings)
    scores = torch.zeros_like(embeddings[..., 0], dtype=torch.promote_types(embeddings.dtype, torch.float32))
    delta, adds_up, compared = torch.full(scores.shape[:1], float("nan"), dtype=torch.float32), False, False
    for text, length in enumerate(lengths):
        inputs, zero = embeddings[text : text + 1, :length], start[text : text + 1, :length]
        method = _made(which, objective.function(text), options)
        given = _arguments(method, inputs, zero, {k: v for k, v in options.items() if k != "attribution"})
        draws = int(text_generator(objective, text, seed).integers(2**31))
        with _drawing(draws), weights_constant(objective.model.module), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Setting forward, backward hooks")
            try:
                found = method.attribute(inputs.clone().requires_grad_(), **given)
            except (AssertionError, TypeError, ValueError) as error:
                raise InputError(f"captum's {type(method).__name__} refuses: {' '.join(str(error).split())}") from error
        found = found.detach().to(scores)
        whole_tokens = "feature_mask" in given or "sliding_window_shapes" in given
        scores[text, :length] = found[0, :, 0] if whole_tokens else found[0].sum(-1)
        compared = compared or "baselines" in given
        if "baselines" in given and method.has_convergence_delta():
            adds_up = True
            with torch.no_grad():
                ends = objective(torch.cat([inputs, zero]), [text, text]).to(scores)
            delta[text] = ((scores[text].sum() - (ends[0] - ends[1])).abs() / (ends[0] - ends[1]).abs()).cpu()
    return Scores(
        scores,
        delta=delta if adds_up else None,
        baseline=baseline_name(objective, baseline) if compared else "",
        note=DEEPLIFT_NOTE if which == "DeepLift" else "",
    )


DEEPLIFT_NOTE = "DeepLift's rules need modules with hooks: here it is gradient × (input − baseline)"


def _class(name: str) -> Any:
    return getattr(importlib.import_module("captum.attr"), name)


def _options(name: str) -> list[str]:
    kind = _class(name)
    known = [*inspect.signature(kind.__init__).parameters, *inspect.signature(kind.attribute).parameters]
    more = ["baseline"] if "baselines" in known else []
    if name == "NoiseTunnel":  # It also takes the options of what it repeats.
        more = ["attribution", *(option for each in CAPTUM if each != name for option in _options(each))]
    found = [each for each in [*known, *more] if each not in ADAPTER_PARAMETERS | {"attribution_method", "seed"}]
    return [*dict.fromkeys(found), "seed"]


def _made(which: Any, f: nn.Module, options: dict[str, Any]) -> Any:
    """Construct an attribution of f, with those options that its constructor takes."""
    if not isinstance(which, str):
        made = copy.copy(which)
        inner = getattr(made, "attribution_method", None)
        if inner is not None:
            made.attribution_method = _made(inner, f, {})
        for each in ("forward_func", "model"):
            if hasattr(made, each):
                setattr(made, each, f)
        return made
    kind = _class(which)
    if which == "NoiseTunnel":
        repeated, allowed = options.get("attribution", "InputXGradient"), [name for name in CAPTUM if name != which]
        if repeated not in allowed:
            names = f"{', '.join(allowed)}{did_you_mean(str(repeated), allowed)}"
            raise InputError(f"NoiseTunnel's attribution is {repeated!r}; allowed are {names}")
        return kind(_made(repeated, f, options))
    known = set(inspect.signature(kind.__init__).parameters) - ADAPTER_PARAMETERS
    return kind(f, **{name: value for name, value in options.items() if name in known})


def _arguments(method: Any, inputs: Tensor, zero: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `attribute`: the options that it takes, the baseline, features and batch sizes."""
    both = [each for each in (method, getattr(method, "attribution_method", None)) if each is not None]
    built = {name for each in both for name in inspect.signature(type(each).__init__).parameters}
    takes = {name for each in both for name in inspect.signature(each.attribute).parameters}
    length = inputs.shape[1]
    most = max(1, tokens_at_once(inputs.device) // length)
    given = {name: value for name, value in options.items() if name in takes or name not in built}
    if "baselines" in takes:
        given["baselines"] = zero
    if "feature_mask" in takes:
        given["feature_mask"] = torch.arange(length, device=inputs.device).view(1, length, 1)
    for size in {"perturbations_per_eval", "internal_batch_size"} & takes:
        given.setdefault(size, most)
    if "sliding_window_shapes" in takes:
        window = given.get("sliding_window_shapes", 1)
        given["sliding_window_shapes"] = (window, inputs.shape[2]) if isinstance(window, int) else window
    return given


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Seed torch's and numpy's random numbers within the context, and restore them afterwards."""
    state = np.random.get_state()  # noqa: NPY002  # captum draws from it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002
