"""Explained quantity: one number per text, as a function of the embeddings of its tokens."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from ssmscope.core import batching
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.encoding import Batch
from ssmscope.core.intercept import active_override, is_kept, is_own, override_forward
from ssmscope.core.model import Model
from ssmscope.core.progress import duration, on_stderr
from ssmscope.core.recomputing import recomputed
from ssmscope.core.tokenizing import tokenize
from ssmscope.core.weights import weights_constant
from ssmscope.errors import InputError, check_whole, did_you_mean
from ssmscope.outline import Outlined

GPU_MEMORY_SHARE = 0.6
"""Share of a GPU's free memory that a backward pass may use."""
KEPT_NUMBERS_PER_TOKEN = 40
"""Values that a backward pass keeps per token, as a multiple of layers × width (measured on a Mamba of 24 layers)."""

MIN_REPORTED_SECONDS = 5.0
"""Smallest duration, in seconds, of a method whose cost is reported."""
WARMUP_SECONDS = 2.0
"""Seconds of work, or one gradient of a long one, after which the rate is trusted: the first runs are slow."""
REPORT_INTERVAL_SECONDS = 10.0
"""Seconds between two lines of progress."""

Target = int | str | Sequence[int]
"""Class, token, text of several tokens, or ids of several tokens."""


def tokens_that_fit(
    model: Model, *, gradients: bool = False, every_position: bool = False, layers: int | None = None
) -> int:
    """Return the number of tokens that run together, with `gradients` in a backward pass through `layers` layers (by
    default all), which keeps their intermediate values; with `every_position` the logits of all positions are
    computed."""
    logits = 4 * model.vocabulary if every_position else 0
    most = tokens_at_once(model.device, logits + model.num_layers * model.width)
    if gradients:
        share = 1.0 if layers is None else layers / model.num_layers
        most = min(most, tokens_at_once(model.device, kept_bytes_per_token(model) * share, backward_bytes(model)))
    return most


def backward_bytes(model: Model) -> int:
    """Return the number of bytes that a backward pass may keep on a model's device."""
    device = model.device
    if device.type != "cuda":
        return 4 * batching.MAX_NUMBERS_KEPT
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(GPU_MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] + cached))


def kept_bytes_per_token(model: Model) -> float:
    """Return the number of bytes that a backward pass keeps per token; on a GPU as last measured."""
    return model.__dict__.get("_kept_of_each", 4 * KEPT_NUMBERS_PER_TOKEN * model.num_layers * model.width)


@dataclass(eq=False)
class Meter:
    """Counter of a method's gradients, which reports their cost by `say`, with times by `clock`."""

    say: Callable[[str], None] = field(default_factory=lambda: on_stderr().print)
    clock: Callable[[], float] = time.perf_counter

    def plan(self, label: str, lengths: list[int], least: int, most: int) -> None:
        """Start the count, before a method runs on texts of these lengths, each with so many gradients."""
        self._label, self._texts = label, len(lengths)
        self._gradients = [number * len(lengths) for number in (least, most)]
        self._tokens = [number * sum(lengths) for number in (least, most)]
        self._ran, self._read, self._begun = 0, 0, self.clock()
        self._said: float | None = None

    def ran(self, gradients: int, tokens: int, done: int = 0) -> None:
        """Count gradients of `tokens` tokens in all, and report; `done` texts are done."""
        self._ran += gradients
        self._read += tokens
        now = self.clock()
        seconds = [(now - self._begun) / self._read * each for each in self._tokens]
        if self._said is None:
            if seconds[0] > MIN_REPORTED_SECONDS and now - self._begun >= WARMUP_SECONDS:
                texts = f"{self._texts:,} texts take" if self._texts > 1 else "the text takes"
                number = _span([f"{count:,}" for count in self._gradients])
                self.say(f"{self._label}: {texts} {number} gradients, about {_span([duration(s) for s in seconds])}")
                self._said = now
        elif now - self._said >= REPORT_INTERVAL_SECONDS:
            share = f", {done:,} of {self._texts:,} texts done" if self._texts > 1 else ""
            self.say(f"{self._label}: {self._ran:,} gradients after {duration(now - self._begun)}{share}")
            self._said = now


def _span(ends: list[str]) -> str:
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


@dataclass(frozen=True, eq=False)
class Objective(Outlined):
    """Explained quantity f of every text of a batch: the logit of a class, of a next token or of the difference of two,
    or the summed log-probability of a continuation. Made by `objective`.

    Attributes:
        targets: per text the ids of the class, of the next token, or of a continuation's tokens.
        contrasts: per text the id whose logit is subtracted; None without one.
        names: per text the name of the class or token.
        probability: True if f is the probability (of a class or token, or of the whole continuation).
        log: True if f is the log-probability of a single token or class too.
        meter: receives the cost of slow methods; None for no report.
        recomputes: True if blocks are run again in the backward pass, which then belongs within `Model.running` and
            any other context that changes the run.
    """

    model: Model
    batch: Batch
    targets: tuple[tuple[int, ...], ...]
    contrasts: tuple[int, ...] | None
    names: tuple[str, ...]
    probability: bool = False
    log: bool = False
    meter: Meter | None = None
    recomputes: bool = False

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of every text; in a pixel classifier the class token counts."""
        return self.batch.lengths

    @property
    def continues(self) -> bool:
        """True if any text's target is a continuation of several tokens."""
        return any(len(ids) > 1 for ids in self.targets)

    def embeddings(self) -> Float[Tensor, "texts length width"]:
        """Return the embeddings of the texts' tokens, without gradients; zeros at padding."""
        with torch.no_grad():
            found = self.model.embed(self.batch)
        return found.masked_fill(~self.batch.mask.unsqueeze(-1), 0)

    def __call__(
        self, embeddings: Float[Tensor, "runs length width"], texts: Sequence[int], mask: Tensor | None = None
    ) -> Float[Tensor, " runs"]:
        """Compute f of embeddings, padded on the right, with gradients where they are enabled; `texts` has the text
        that each run is a copy of, and `mask` is true at real tokens, by default at that text's. As many runs as suit
        the device go together, see `batches`."""
        mask = self.batch.mask[list(texts), : embeddings.shape[1]].to(embeddings.device) if mask is None else mask
        ids = [self.targets[text] for text in texts]
        if max(map(len, ids)) == 1:
            asked = {id_ for each in ids for id_ in each} | set(self.contrasts or ())
            with self._running(mask), _in_float32(self.model, sorted(asked)):
                logits = _precise(self.model.forward_embeddings(embeddings, mask))
            return self._of_last(logits, texts)
        last = (mask.sum(1) - 1).tolist()
        embeddings, mask = self._continued(embeddings, mask, ids)
        with self._running(mask):
            logits = self.model.forward_embeddings(embeddings, mask, last_only=False)
        return torch.stack([self._of_continuation(logits[run], last[run], text) for run, text in enumerate(texts)])

    def values(self, embeddings: Float[Tensor, "texts length width"] | None = None) -> Float[Tensor, " texts"]:
        """Return f of every text, without gradients; for other embeddings of the same texts where they are given."""
        embeddings = self.embeddings() if embeddings is None else embeddings
        found = embeddings.new_empty(len(self), dtype=torch.promote_types(embeddings.dtype, torch.float32))
        for chosen, longest in self.parts(gradients=False):
            with torch.no_grad():
                found[chosen] = self(embeddings[chosen, :longest], chosen).to(found)
        return found

    def gradient(
        self, embeddings: Float[Tensor, "runs length width"], texts: Sequence[int]
    ) -> Float[Tensor, "runs length width"]:
        """Return ∂f/∂embeddings of every run."""
        model, tokens = self.model, embeddings.shape[0] * embeddings.shape[1]
        fits = tokens * kept_bytes_per_token(model) <= backward_bytes(model)
        on_gpu = model.device.type == "cuda"
        before = torch.cuda.memory_allocated(model.device) if on_gpu else 0
        with weights_constant(model.module), torch.enable_grad(), model.running():
            inputs = embeddings.detach().requires_grad_()
            value = (self if fits else replace(self, recomputes=True))(inputs, texts).sum()
            if fits and on_gpu:
                kept = torch.cuda.memory_allocated(model.device) - before
                model.__dict__["_kept_of_each"] = max(1.0, kept / tokens)
            (found,) = torch.autograd.grad(value, inputs)
        return found

    @contextmanager
    def _running(self, mask: Tensor) -> Iterator[None]:
        with self.model.running(mask=mask), recomputed(self.model.module) if self.recomputes else nullcontext():
            yield

    def function(self, text: int = 0) -> nn.Module:
        """Return f of one text alone, of embeddings (runs, length, width): captum's `forward_func`."""
        return _Function(self, text)

    def batches(self, texts: Sequence[int], *, gradients: bool = False) -> Iterator[list[int]]:
        """Yield the places of `texts`, the text that each run copies, in batches that suit the device."""
        sizes = [length + len(ids) - 1 for length, ids in zip(self.lengths, self.targets)]
        most = tokens_that_fit(self.model, gradients=gradients, every_position=self.continues)
        yield from by_length([sizes[text] for text in texts], most)

    def parts(self, *, gradients: bool = True) -> Iterator[tuple[list[int], int]]:
        """Yield all texts in batches, and the length of the longest in each."""
        for chosen in self.batches(range(len(self)), gradients=gradients):
            yield chosen, max(self.lengths[text] for text in chosen)

    def rows(self, chosen: Sequence[int]) -> Objective:
        """Return the objective of the chosen texts, padded to the longest of them."""
        return replace(
            self,
            batch=self.batch.rows(chosen),
            targets=tuple(self.targets[row] for row in chosen),
            contrasts=None if self.contrasts is None else tuple(self.contrasts[row] for row in chosen),
            names=tuple(self.names[row] for row in chosen),
        )

    def by_token(self, products: Float[Tensor, "... length width"]) -> Tensor:
        """Return what embeddings and gradients give for each token, summed over the width; of series by channel."""
        return products if self.model.reads == "series" else products.sum(-1)

    def _of_last(self, logits: Float[Tensor, "runs vocabulary"], texts: Sequence[int]) -> Float[Tensor, " runs"]:
        """Return f of runs whose targets are one id each."""

        def at(values: Tensor, ids: list[int]) -> Tensor:
            return values.gather(-1, torch.tensor(ids, device=values.device).unsqueeze(-1)).squeeze(-1)

        asked = self.model.probabilities(logits) if self.probability else logits
        asked = logits.log_softmax(-1) if self.log else asked
        wanted = at(asked, [self.targets[text][0] for text in texts])
        return wanted if self.contrasts is None else wanted - at(logits, [self.contrasts[text] for text in texts])

    def _of_continuation(self, logits: Float[Tensor, "length vocabulary"], last: int, text: int) -> Tensor:
        """Return f of one run; the logits at `last` are those of the first target."""
        targets = torch.tensor(self.targets[text], device=logits.device)
        if len(targets) == 1:
            return self._of_last(_precise(logits[last : last + 1]), [text])[0]
        follow = _precise(logits[last : last + len(targets)]).log_softmax(-1)
        total = follow.gather(-1, targets.unsqueeze(-1)).sum()
        return total.exp() if self.probability else total

    def _continued(self, embeddings: Tensor, mask: Tensor, ids: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Append to every run the embeddings of its targets, except the last."""
        table = self.model.module.get_input_embeddings()
        rows = []
        for run, targets in enumerate(ids):
            follow = table(torch.tensor(targets[:-1], dtype=torch.long, device=embeddings.device))
            rows.append(torch.cat([embeddings[run][mask[run]], follow.to(embeddings)]))
        real = pad_sequence([torch.ones_like(row[:, 0], dtype=torch.bool) for row in rows], batch_first=True)
        return pad_sequence(rows, batch_first=True), real


@contextmanager
def _in_float32(model: Model, ids: list[int]) -> Iterator[None]:
    """Compute, within the context, a half-precision head's logits of these ids in float32; its lrp rule is kept."""
    head: Any = None if model.is_classifier else model.module.get_output_embeddings()
    half = type(head) is nn.Linear and head.weight.dtype in (torch.bfloat16, torch.float16) and not is_kept(head)
    if not half or not is_own(head, head.forward):
        yield
        return

    def exact(taker: Any, below: Any, x: Tensor) -> Tensor:
        chosen = torch.tensor(ids, device=x.device)
        bias = None if head.bias is None else head.bias[chosen].detach().float()
        found = nn.functional.linear(x.float(), head.weight[chosen].detach().float(), bias)
        return (below(x) if taker is None else taker(below, x)).float().index_copy(-1, chosen, found)

    with override_forward([(head, partial(exact, active_override(head)))]):
        yield


def text_generator(objective: Objective, text: int, seed: int) -> np.random.Generator:
    """Return a generator that depends only on the seed and on the text's own tokens or pixels."""
    check_whole(0, seed=seed)
    batch = objective.batch
    if batch.values is not None:
        content = [zlib.crc32(batch.values[text].cpu().double().numpy().tobytes())]
    else:
        content = batch.input_ids[text, : objective.lengths[text]].tolist()
    return np.random.default_rng([int(seed), *content])


class _Function(nn.Module):
    """Function of `Objective.function`, of which the model is not part: hooks put on it do not stay. Its embeddings go
    through `entry`, on which hooks can stand."""

    def __init__(self, objective: Objective, text: int) -> None:
        super().__init__()
        self._given = objective, text
        self.entry = nn.Identity()

    def forward(self, embeddings: Tensor, *_: Any) -> Tensor:
        objective, text = self._given
        embeddings = self.entry(embeddings)
        if torch.is_grad_enabled() and embeddings.requires_grad:
            return objective(embeddings, [text] * len(embeddings))
        parts = embeddings.split(max(1, tokens_at_once(embeddings.device) // embeddings.shape[1]))
        return torch.cat([objective(part, [text] * len(part)) for part in parts])


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def objective(
    model: Model,
    batch: Batch,
    *,
    target: Target | Sequence[Target] | None = None,
    contrast: int | str | None = None,
    probability: bool = False,
) -> Objective:
    """Return the quantity to explain for every text of a batch.

    Args:
        target: a class's number or name (a classifier); a token's id or a text (a language model: of one token its
            logit, of several, as a continuation, the sum of their log-probabilities); one for all texts, or a list with
            one for each, in which a continuation may be a list of ids. By default what the model predicts.
        contrast: a class, or one token, whose logit is subtracted. Where a head gives log-odds, so that the first of
            two classes has the logit 0, it is by default the other class: f is then the log-odds of the target.
        probability: the probability instead of the logit.

    Raises:
        InputError: for a target that the model does not have, a contrast of several tokens, or with a continuation or
            a probability, or another number of targets than of texts.
    """
    count = len(batch.tokens)
    if target is None:
        target = last_logits(model, batch).argmax(-1).tolist()
    given: list[Any] = [target] * count if isinstance(target, int | str | np.integer) else list(target or ())
    if len(given) != count:
        raise InputError(f"{len(given)} targets for {count} texts: give one for all, or one for each")
    targets = [_ids(model, each) for each in given]
    if model.labels is None and model.tokenizer is not None:
        for text in dict.fromkeys(each for each in [*given, contrast] if isinstance(each, str)):
            if said := target_warning(model, text):
                on_stderr().print(said)
    names = [_name(model, ids) for ids in targets]
    contrasts = None
    if contrast is not None:
        (against, *more) = _ids(model, contrast)
        if more or any(len(ids) > 1 for ids in targets) or probability:
            raise InputError("a contrast is the difference of two logits: give one token as target, one as contrast")
        contrasts = (against,) * count
        other = _name(model, (against,))
        names = [f"{name} − {other.strip() or other}" for name in names]
    elif not probability and model.is_classifier and getattr(model.config, "binary", False):  # One logit decides.
        contrasts = tuple(1 - index for (index,) in targets)
    return Objective(model, batch, tuple(targets), contrasts, tuple(names), probability)


def last_logits(model: Model, batch: Batch) -> Float[Tensor, "texts classes"]:
    """Return a classifier's logits, or a language model's at every text's last position, without gradients."""
    most = tokens_at_once(model.device, 0 if model.is_classifier else model.vocabulary)
    found: dict[int, Tensor] = {}
    for chosen in by_length(batch.lengths, most):
        part = batch.rows(chosen)
        with torch.no_grad(), model.running(mask=part.mask):
            for row, logits in zip(chosen, _precise(model.forward(part, last_only=True))):
                found[row] = logits
    return torch.stack([found[row] for row in range(len(batch.tokens))])


def _ids(model: Model, target: Target) -> tuple[int, ...]:
    labels = model.labels
    if isinstance(target, Sequence) and not isinstance(target, str):
        if labels is not None or not target:
            needed = "a continuation has at least one token" if labels is None else "a classifier's target is one class"
            raise InputError(f"the target {list(target)!r} cannot be explained: {needed}")
        return tuple(found for each in target for found in _ids(model, each))
    if isinstance(target, str):
        if labels is not None and target in labels:
            return (labels.index(target),)
        if labels is None and model.tokenizer is not None:
            return _tokenized(model, target)
        if not target.isdecimal():
            what = f"its classes are {', '.join(labels)}" if labels else "it has no tokenizer: give a token's id"
            raise InputError(f"{model.name} has no target {target!r}; {what}{did_you_mean(target, labels or [])}")
        target = int(target)
    most = len(labels) if labels is not None else model.vocabulary
    if isinstance(target, bool) or not isinstance(target, int | np.integer) or not 0 <= target < most:
        raise InputError(f"there is no target {target!r}; allowed are 0 to {most - 1}")
    return (int(target),)


def _tokenized(model: Model, target: str) -> tuple[int, ...]:
    named = f"the target {target!r:.80}"
    found = tuple(tokenize(model.tokenizer, target, named=named, add_special_tokens=False)["input_ids"])
    if not found:
        raise InputError(f"the target {target!r} has no token; give a word")
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    if unknown is not None and unknown in found and target != model.tokenizer.unk_token:
        raise InputError(f"the target {target!r} has a word unknown to {model.name}")
    if max(found) >= model.vocabulary:
        raise InputError(f"the target {target!r} has the id {max(found)}, outside the vocabulary of {model.name}")
    return found


def target_warning(model: Model, target: str) -> str:
    """Return a warning about a target of other text, or one that with a space before it is one token; else ""."""
    found = list(_tokenized(model, target))
    pieces = ", ".join(repr(model.tokenizer.decode([each])) for each in found)
    many = f"the {len(found)} tokens {pieces}" if len(found) > 1 else f"the token {pieces}"
    if "".join(model.tokenizer.decode(found).split()) != "".join(target.split()):
        return f"the target {target!r} is read as {many}"
    spaced = tokenize(model.tokenizer, f" {target}", add_special_tokens=False)["input_ids"]
    if target[:1].isspace() or len(spaced) != 1 or spaced == found:
        return ""
    return f"the target {target!r} is read as {many}; ' {target}', with the space before it, is another, one token"


def _name(model: Model, ids: tuple[int, ...]) -> str:
    if model.labels is not None:
        return model.labels[ids[0]]
    return model.tokenizer.decode(list(ids)) if model.tokenizer is not None else ",".join(map(str, ids))
