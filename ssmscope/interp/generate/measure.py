"""Maps (written tokens, tokens): what the states hold as each token is written, and what its logit rests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from ssmscope.core.affine import is_plain
from ssmscope.core.generation import Generation
from ssmscope.core.intercept import evaluating, observe
from ssmscope.core.mixers import memory_of
from ssmscope.core.model import Model
from ssmscope.core.recomputing import recomputed
from ssmscope.core.trace import LayerTrace
from ssmscope.core.weights import weights_constant
from ssmscope.errors import InputError, check_whole
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.explain.scored_text import Method, kind_of
from ssmscope.interp.generate.result import SourceMap, WrittenText
from ssmscope.interp.methods.gradients import gradxinput
from ssmscope.interp.methods.lrp import MAX_BACKWARD_BYTES, lrp, relevance_rules
from ssmscope.interp.methods.memory import occlusion, survival
from ssmscope.interp.objective import Objective, kept_bytes_per_token, objective, tokens_that_fit
from ssmscope.layers.parts import at_least_float32
from ssmscope.ops.survival import shares_from

Map = Float[np.ndarray, "written tokens"]


def written_text(
    model: Model,
    found: Generation,
    row: int,
    methods: Mapping[str, Method],
    contrast: int | str | None = None,
    by_layer: bool = False,
) -> WrittenText:
    """Return a text of a generation with its maps: survival where the model has recurrent states, in each layer too if
    asked for, and those of methods."""
    given, said = found.prompts.input_ids[row][found.prompts.mask[row]].tolist(), found.written[row]
    ids, words = [*given, *found.ids[row]], list(found.prompts.words[row])
    special = [word is None for word in model.encode(ids=ids).words[0]]
    after = max((word for word in words if word is not None), default=-1) + 1
    words += [None if special[len(given) + token.number] else after + token.number for token in said]
    maps, left, lives = [], None, None
    remembers = memory_of(model.module)["has_recurrent_state"]
    if remembers:
        shares, lives = survivals(model, ids, len(given))
        mean = shares.mean(0)
        maps, left = [SourceMap("survival", mean[:-1], signed=False)], mean[-1]
    if by_layer and remembers:
        maps += [
            SourceMap(f"survival, layer {n}", own[:-1], signed=False) for n, own in zip(model.layer_numbers, shares)
        ]
    prefixes = Prefixes(model, tuple(ids), len(given), contrast)
    maps += [
        SourceMap(name, attributed(prefixes, name, method), signed=kind_of(method).signed)
        for name, method in methods.items()
        if not remembers or getattr(method, "func", method) is not survival  # It is among the maps.
    ]
    return WrittenText(
        tokens=(*found.prompts.tokens[row], *found.tokens[row]),
        words=tuple(words),
        first=len(given),
        text=found.texts[row],
        log_probabilities=np.array(found.log_probabilities[row]),
        entropies=np.array(found.entropies[row]),
        ended_by=found.ended_by[row],
        maps=tuple(maps),
        left=left,
        half_lives=lives,
    )


def survivals(
    model: Model, ids: Sequence[int], first: int
) -> tuple[Float[np.ndarray, "layers moments tokens"], Float[np.ndarray, "layers tokens"]]:
    """Return every layer's survival of every token in the states from which each token from `first` on is written, and
    after the last; and the half-lives of all tokens."""
    shape = model.num_layers, len(ids) - first + 1, len(ids)
    shares, lives = np.zeros(shape, dtype=np.float32), np.full(shape[::2], np.nan, dtype=np.float32)

    def look(number: int, _: Sequence[int], layer: LayerTrace) -> None:
        shares[number] = shares_from(layer.recurrences, first - 1)[0].float().cpu().numpy()
        lives[number] = layer.half_lives()[0].float().cpu().numpy()

    model.trace(ids=[list(ids)], keep_inputs=False, retention=False, visit=look)
    lives[:, -1] = np.nan  # Nothing follows the last token.
    return shares, lives


# ---- attributions


@dataclass(frozen=True, eq=False)
class Prefixes:
    """Prefixes of a text, from its first `first` tokens on; of each the logit of the token that follows it is
    explained, less that of a contrast. A causal model has all of them in one run of the text."""

    model: Model
    ids: tuple[int, ...]
    first: int
    contrast: int | str | None = None

    @property
    def targets(self) -> tuple[int, ...]:
        return self.ids[self.first :]

    @cached_property
    def objective(self) -> Objective:
        """The same quantities as those of texts of their own."""
        each = [list(self.ids[:end]) for end in range(self.first, len(self.ids))]
        return objective(self.model, self.model.encode(ids=each), target=list(self.targets), contrast=self.contrast)

    @property
    def longest(self) -> Objective:
        """The objective of the longest prefix, which has all the others in it."""
        return self.objective.rows([len(self.targets) - 1])

    def values(
        self, embeddings: Float[Tensor, "runs length width"], read: list[Tensor] | None = None
    ) -> Float[Tensor, "runs written"]:
        """Compute the explained quantities from embeddings of the longest prefix; `read` gets what the head reads for
        each of them, (runs, written, width), if the head is a linear layer, else nothing."""
        module, length = self.model.module, embeddings.shape[1]
        at = slice(self.first - 1, length)

        def choose(head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args or args[0].shape[1] != length:
                return None
            chosen = args[0][:, at]
            if read is not None:
                read.append(chosen)
            return (chosen, *args[1:]), kwargs

        head = module.get_output_embeddings()
        plain = head is not None and is_plain(head, nn.Linear)
        mask = torch.ones(embeddings.shape[:2], dtype=torch.long, device=embeddings.device)
        with self.model.running(mask=mask.bool()), observe(before=[(head, choose)] if plain else []):
            logits = module(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits
        logits = self.model.checked(at_least_float32(logits if logits.shape[1] < length else logits[:, at]))
        wanted = logits.gather(-1, logits.new_tensor(self.targets).long().expand(len(logits), -1).unsqueeze(-1))
        others = self.objective.contrasts
        return wanted.squeeze(-1) if others is None else wanted.squeeze(-1) - logits[..., others[0]]

    def scores(self) -> Map:
        """Return gradient × input of each explained quantity, over the embeddings of the longest prefix: one forward
        pass, and a backward pass for each of them. The head's is one for all, as each has a row of its own."""
        embeddings = self.longest.embeddings()
        fits = embeddings.shape[1] * kept_bytes_per_token(self.model) <= MAX_BACKWARD_BYTES
        around = nullcontext() if fits else recomputed(self.model.module)
        with torch.enable_grad(), self.model.running(), around:
            x = embeddings.detach().requires_grad_()
            read: list[Tensor] = []
            values = self.values(x, read)[0]
            roots, gradients = values, torch.ones_like(values)
            if read:
                (pulled,) = torch.autograd.grad(values.sum(), read[0], retain_graph=True)
                roots, gradients = read[0][0], pulled[0]
            scores = []
            for root, gradient in zip(roots, gradients):
                (found,) = torch.autograd.grad(root, x, gradient, retain_graph=True)
                scores.append(at_least_float32(found * x.detach())[0].sum(-1))
        return torch.stack(scores).cpu().numpy()


def gradient_scores(prefixes: Prefixes) -> Map:
    with weights_constant(prefixes.model.module):
        return prefixes.scores()


def relevance(prefixes: Prefixes, *, half: bool = True) -> Map:
    module = prefixes.model.module
    one = torch.ones(1, dtype=torch.float32, device=prefixes.model.device)
    with evaluating(module), relevance_rules(module, one, half=half):
        return prefixes.scores()


def occluded(prefixes: Prefixes, *, baseline: str | int | float = "mean", window: int = 1) -> Map:
    """Return the scores of `occlusion`: a run for every hidden window serves all prefixes that hold it."""
    check_whole(1, window=window)
    first, longest = prefixes.first, prefixes.longest
    if window > first:  # A window has at most a text's length, which differs.
        return _of_texts(prefixes, partial(occlusion, baseline=baseline, window=window))
    embeddings = longest.embeddings()
    hidden, length = baseline_embeddings(longest, baseline).to(embeddings)[0], embeddings.shape[1]
    begins = range(length - window + 1)
    ends = torch.arange(first, length + 1)
    total, count = torch.zeros(2, len(ends), length, dtype=torch.float64)
    at_once = max(1, tokens_that_fit(prefixes.model) // length)
    with torch.no_grad():
        whole = prefixes.values(embeddings)
        for chosen in (begins[at : at + at_once] for at in range(0, len(begins), at_once)):
            runs = embeddings.repeat(len(chosen), 1, 1)
            for run, begin in zip(runs, chosen):
                run[begin : begin + window] = hidden[begin : begin + window]
            for begin, fall in zip(chosen, (whole - prefixes.values(runs)).double().cpu()):
                holds = ends >= begin + window
                total[holds, begin : begin + window] += fall[holds, None]
                count[holds, begin : begin + window] += 1
    return (total / count.clamp(min=1)).numpy()


def _of_texts(prefixes: Prefixes, method: Method) -> Map:
    return method(prefixes.objective).scores.detach().cpu().numpy()


IN_ONE_RUN: Mapping[Callable[..., Any], Callable[..., Map]] = {
    gradxinput: gradient_scores,
    lrp: relevance,
    occlusion: occluded,
}
"""Methods whose scores of all prefixes come from runs of the longest."""


def attributed(prefixes: Prefixes, name: str, method: Method) -> Map:
    """Return a method's scores of the tokens before each written token, zero from there on: those of `explain` for the
    text up to it. Raises InputError if one is not finite."""
    together = IN_ONE_RUN.get(getattr(method, "func", method))
    found = _of_texts(prefixes, method) if together is None else together(prefixes, **getattr(method, "keywords", {}))
    scores = np.zeros((len(found), len(prefixes.ids)), dtype=np.float32)
    scores[:, :-1] = np.tril(found, prefixes.first - 1)
    if not np.isfinite(scores).all():
        raise InputError(f"the scores of {name} are not finite: the model is damaged")
    return scores
