"""Bridge to captum's attributions (Kokhlikyan et al., Captum, 2020) of the same f."""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from ssmscope.core.batching import tokens_at_once
from ssmscope.core.edits import blocks_of
from ssmscope.core.intercept import override_forward
from ssmscope.core.model import Model
from ssmscope.core.weights import weights_constant
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.baselines import NEUTRAL, baseline_embeddings, baseline_name, ordinary_tokens
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.methods.captum_names import CAPTUM, LLM
from ssmscope.interp.objective import Objective, text_generator

BRIDGED_PARAMETERS = {
    *("self", "inputs", "target", "additional_forward_args", "forward_func", "model", "baselines", "feature_mask"),
    *("return_convergence_delta", "return_input_shape", "show_progress", "kwargs", "args", "device_ids"),
    *("attribution_method", "attr_method", "tokenizer", "inp", "gen_args", "use_cached_outputs", "_inspect_forward"),
    *("num_trials", "forward_in_tokens"),
}
"""Parameters of captum's that the bridge sets itself."""
OURS = ("attribution", "layer")
"""Options that name what a method wraps, or a part of the model."""


def captum_method(name: str, run: Callable[..., Scores]) -> Callable[..., Scores]:
    """Return captum's attribution of this name, which `run` computes, as a method with its constructor's and
    `attribute`'s options."""

    def attribute(objective: Objective, **options: Any) -> Scores:
        return run(objective, name, **options)

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
            the name of what it repeats, and the options of that; for LayerIntegratedGradients also `layer`, the number
            of the state-space layer whose block's output is explained, by default the embeddings.

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
        place, through = _place(objective.model, options.get("layer"))
        method = _made(which, objective.function(text), options | {"layer": place})
        given = _arguments(method, inputs, zero, {k: v for k, v in options.items() if k not in OURS})
        draws = int(text_generator(objective, text, seed).integers(2**31))
        with through, drawing(draws), weights_constant(objective.model.module), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Setting forward, backward hooks")
            with refusals(type(method).__name__):
                found = method.attribute(inputs.clone().requires_grad_(), **given)
        found = found[:, :length].detach().to(scores)  # At a block a continuation's tokens follow.
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


def captum_class(name: str) -> Any:
    """Import one of captum's attributions."""
    return getattr(importlib.import_module("captum.attr"), name)


def _options(name: str) -> list[str]:
    kind = captum_class(name)
    known = [*inspect.signature(kind.__init__).parameters, *inspect.signature(kind.attribute).parameters]
    more = ["baseline"] if "baselines" in known else []
    if inner := wrapped(name):  # It also takes the options of what it wraps.
        more = ["attribution", "baseline", *(option for each in inner for option in _options(each))]
    found = [each for each in [*known, *more] if each not in BRIDGED_PARAMETERS | {"seed"}]
    return [*dict.fromkeys(found), "seed"]


def wrapped(name: str) -> tuple[str, ...]:
    """Return the attributions that one of captum's can wrap, none for most."""
    if name == "NoiseTunnel":
        return tuple(each for each in CAPTUM if each != name and each not in LLM)
    return LLM.get(name, ())


def chosen(name: str, options: Mapping[str, Any], default: str) -> str:
    """Return the attribution that one of captum's is to wrap. Raises InputError if it cannot."""
    asked, allowed = options.get("attribution") or default, wrapped(name)
    if asked not in allowed:
        names = f"{', '.join(allowed)}{did_you_mean(str(asked), allowed)}"
        raise InputError(f"{name}'s attribution is {asked!r}; allowed are {names}")
    return asked


def _made(which: Any, f: Any, options: Mapping[str, Any]) -> Any:
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
    kind = captum_class(which)
    if which == "NoiseTunnel":
        return kind(_made(chosen(which, options, "InputXGradient"), f, options))
    layer = {"layer": options.get("layer") or f.entry} if which == "LayerIntegratedGradients" else {}
    return kind(f, **constructor_options(which, options) | layer)


def constructor_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that captum's constructor takes."""
    known = {*inspect.signature(captum_class(name).__init__).parameters} - BRIDGED_PARAMETERS - {"layer"}
    return {option: value for option, value in options.items() if option in known}


def _place(model: Model, layer: int | None) -> tuple[nn.Module | None, AbstractContextManager[None]]:
    """Return a module of our own through which a block's output goes within the context: captum's hooks stand there,
    unseen by other runs of the model."""
    if layer is None:
        return None, nullcontext()
    blocks = blocks_of(model.module)
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < len(blocks):
        raise InputError(f"layer is {layer!r}; allowed are the state-space layers 0 to {len(blocks) - 1}")
    place = nn.Identity()

    def through(below: Any, *args: Any, **kwargs: Any) -> Any:
        output = below(*args, **kwargs)
        return (place(output[0]), *output[1:]) if isinstance(output, tuple) else place(output)

    return place, override_forward([(blocks[layer], through)])


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
def refusals(name: str) -> Iterator[None]:
    """Raise InputError in place of captum's errors within the context, in its words."""
    try:
        yield
    except InputError:
        raise
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"captum's {name} refuses: {' '.join(str(error).split())}") from error


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Seed torch's and numpy's random numbers within the context, and restore them afterwards."""
    state = np.random.get_state()  # noqa: NPY002  # captum draws from it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002
