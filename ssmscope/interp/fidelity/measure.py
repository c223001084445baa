"""Measures of fidelity: runs with hidden tokens, or tokens knocked out, their curves, and means with intervals."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from ssmscope.core.affine import embedding_table
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.bootstrap import estimates, ratio, resampled_means
from ssmscope.core.cuts import cut_attention, cut_edges
from ssmscope.core.edits import edited
from ssmscope.core.encoding import Batch
from ssmscope.core.mixers import is_bidirectional
from ssmscope.core.model import Model
from ssmscope.core.ties import descending, difference, levels, spearman
from ssmscope.core.tokenizing import tokenize
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.fidelity.measures import LERF, MEASURES, MORF, layer_of
from ssmscope.interp.fidelity.result import Fidelity
from ssmscope.interp.knockout.measure import roads_of
from ssmscope.interp.objective import Objective, tokens_that_fit
from ssmscope.interp.plausibility.measure import agreement, rationale_size
from ssmscope.interp.plausibility.measures import MEASURES as AGREEMENT

REPLACEMENTS = ("mean", "zero", "pad")

SHARES = (Fraction(1, 20), Fraction(1, 10), Fraction(1, 5), Fraction(1, 2))
"""Shares of tokens that comprehensiveness and sufficiency are averaged over (ERASER)."""


def counts(shares: Sequence[Fraction], n: int) -> Int[np.ndarray, " shares"]:
    """Return round(q n) for every share q, halves to the even number; exact, as no share is a float."""
    return np.array([round(share * n) for share in shares], dtype=np.int64)


def ranking(scores: Float[np.ndarray, "rankings n"]) -> Int[np.ndarray, "rankings n"]:
    """Return the place of every token in its ranking: 0 for the highest signed score, ties by position."""
    order = descending(scores)
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(scores.shape[1]), order.shape), axis=1)
    return places


@dataclass(frozen=True, eq=False)
class Hidden:
    """Distinct sets of tokens of one text that rankings hide, and for each ranking and share the index of its set."""

    sets: Bool[np.ndarray, "sets n"]
    """Over the text's non-special tokens, True where one is hidden."""
    asked: Int[np.ndarray, "rankings two points"]
    """For every share of the curves the top tokens hidden (most relevant first), and the last ones (least first)."""
    without: Int[np.ndarray, "rankings shares"]
    """The top tokens hidden, for `SHARES`."""
    only: Int[np.ndarray, "rankings shares"]
    """All but the top tokens hidden."""


def hidden_sets(places: Int[np.ndarray, "rankings n"], grid: Sequence[Fraction]) -> Hidden:
    """Return the sets to hide for the shares of `grid` and `SHARES`; least relevant first begins at a ranking's end."""
    rankings, n = places.shape
    curve, bins = counts(grid, n), counts(SHARES, n)
    first = np.concatenate([curve, bins])[:, None]
    last = np.concatenate([curve, n - bins])[:, None]
    below = places[:, None, :]
    wanted = np.stack([below < first, below >= n - last], axis=1).reshape(-1, n)
    chosen, inverse = distinct(wanted)
    numbers = inverse.reshape(rankings, 2, -1)
    points = len(curve)
    return Hidden(wanted[chosen], numbers[:, :, :points], numbers[:, 0, points:], numbers[:, 1, points:])


def distinct(sets: Bool[np.ndarray, "asked n"]) -> tuple[list[int], Int[np.ndarray, " asked"]]:
    """Return the rows of the distinct sets, in order, and for every row the number of its set."""
    packed = np.packbits(sets, axis=1)
    _, first, inverse = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order].tolist(), np.argsort(order)[inverse.ravel()]


def replacement_vector(model: Model, replacement: str, data: Any = None) -> Float[Tensor, " width"]:
    """Return the embedding that replaces those of hidden tokens: the table's mean, zeros, or a token's; of images or
    series that of the mean pixel or step of their `data`, or zeros."""
    if model.channels is not None:
        if replacement not in ("mean", "zero"):
            raise InputError(f"replacement is {replacement!r:.60}; of {model.reads} allowed are mean and zero")
        mean = (data.pixels[:1] * 0.0 + data.pixels.mean((0, 1), keepdims=True) / data.largest).astype(np.float32)
        with torch.no_grad():
            found = model.embed(model.encode(values=mean))[0, 0]
        return found if replacement == "mean" else torch.zeros_like(found)
    table = embedding_table(model.module)
    if replacement == "mean":
        return table.mean(0, dtype=torch.promote_types(table.dtype, torch.float32)).to(table)
    return torch.zeros_like(table[0]) if replacement == "zero" else table[_token(model, replacement)]


def _token(model: Model, replacement: Any) -> int:
    tokenizer = model.tokenizer
    if not isinstance(replacement, str) or not replacement:
        raise InputError(f"replacement is {replacement!r}; allowed are {', '.join(REPLACEMENTS)} or a token")
    if replacement == "pad":
        if tokenizer.pad_token_id is None:
            raise InputError(f"the tokenizer of {model.name} has no padding token: give another replacement, e.g. mean")
        return int(tokenizer.pad_token_id)
    known = tokenizer.get_vocab().get(replacement)
    ids = [known] if known is not None else tokenize(tokenizer, replacement, add_special_tokens=False)["input_ids"]
    unknown = tokenizer.unk_token_id is not None and ids == [tokenizer.unk_token_id]
    if len(ids) != 1 or (unknown and replacement != tokenizer.unk_token):
        raise InputError(
            f"replacement {replacement!r} is not a token of {model.name}; allowed are "
            f"{', '.join(REPLACEMENTS)} or a token"
            f"{did_you_mean(replacement, REPLACEMENTS)}"
        )
    return int(ids[0])


def run_hidden(
    model: Model,
    batch: Batch,
    targets: Sequence[int | tuple[int, ...]],
    hidden: Sequence[Bool[np.ndarray, "_ _"]],
    *,
    fill: Float[Tensor, " width"],
    mode: str = "replace",
    value: str = "probability",
    batch_size: int | None = None,
) -> list[Float[np.ndarray, " _"]]:
    """Return the probability, log-probability or logit of each text's target with each of its sets of tokens hidden: a
    class, or the ids of a language model's next token or continuation.

    `hidden` has per text its sets (sets, n) over the non-special tokens; `fill` is the embedding of hidden tokens, and
    of the only token of a text whose tokens are all deleted. With "delete" the tokens that are left close up.
    """
    with torch.no_grad():
        embeddings = model.embed(batch)
    numbers = [len(sets) for sets in hidden]
    owner = np.repeat(np.arange(len(hidden)), numbers)
    hit = np.zeros((len(owner), embeddings.shape[1]), dtype=bool)
    for sets, words, own in zip(hidden, batch.words, np.split(hit, np.cumsum(numbers)[:-1])):
        own[:, np.flatnonzero([word is not None for word in words])] = sets
    ids = tuple((each,) if isinstance(each, int | np.integer) else tuple(each) for each in targets)
    goal = Objective(model, batch, ids, None, (), probability=value == "probability", log=value == "log-probability")
    room = tokens_at_once(model.device, 0 if model.is_classifier else model.vocabulary)
    room = tokens_that_fit(model, every_position=True) if goal.continues else room
    lengths = np.array(batch.lengths)[owner]
    if mode == "delete":
        lengths = np.maximum(lengths - hit.sum(1), 1)
    found = np.empty(len(owner))
    for rows in by_length(lengths.tolist(), room, size=batch_size, longest_first=True):
        width = int(lengths[rows].max())
        index, hides, sizes = (torch.from_numpy(each[rows]).to(embeddings.device) for each in (owner, hit, lengths))
        mask = torch.arange(width, device=embeddings.device) < sizes.unsqueeze(1)
        if mode == "delete":
            copies = _closed_up(embeddings[index], batch.mask[index] & ~hides, width, fill)
        else:
            copies = torch.where(hides[:, :width, None], fill, embeddings[index, :width])
        with torch.no_grad():
            found[rows] = goal(copies, owner[rows].tolist(), mask).double().cpu().numpy()
    return np.split(found, np.cumsum(numbers)[:-1])


def _closed_up(embeddings: Tensor, kept: Bool[Tensor, "runs length"], width: int, fill: Tensor) -> Tensor:
    """Move the embeddings of the remaining tokens to the front; `fill` stands at the first place where none remains."""
    order = torch.argsort((~kept).int(), dim=1, stable=True)[:, :width]
    moved = torch.take_along_dim(embeddings, order.unsqueeze(-1), dim=1)
    moved[~kept.any(1), 0] = fill.to(moved)
    return moved


def target_values(
    model: Model, logits: Float[Tensor, "runs classes"], targets: Int[Tensor, " runs"], value: str
) -> np.ndarray:
    """Return the probability, log-probability or logit of every run's own target, float64."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    values = model.probabilities(logits) if value == "probability" else logits
    values = logits.log_softmax(-1) if value == "log-probability" else values
    return values.gather(1, targets.unsqueeze(1)).squeeze(1).double().cpu().numpy()


def knockout_effects(
    model: Model,
    batch: Batch,
    targets: Sequence[int],
    *,
    layers: Sequence[int | None] = (None,),
    value: str = "probability",
    batch_size: int | None = None,
) -> list[Float[np.ndarray, "cuts _"]]:
    """Return f(x) − f(x with the edges from token i to all later tokens cut) for every non-special token of every text.

    The cut covers everything that the token becomes after the convolution (level "block" of `cut_edges`), in
    recurrences and softmax attention of each of `layers`, by the model's own number, or, for None, of all at once;
    where layers look ahead, no other position reads it. The token's own position keeps it: the effect of the last token
    is 0 where a model reads there.
    """
    own = [[at for at, word in enumerate(words) if word is not None] for words in batch.words]
    runs = [
        (text, at, where)
        for text, places in enumerate(own)
        for where, at in ((None, None), *itertools.product(layers, places))
    ]
    found, roads = np.empty(len(runs)), roads_of(model)
    lengths = [batch.lengths[text] for text, *_ in runs]
    for chosen in by_length(lengths, tokens_at_once(model.device), size=batch_size):
        part = batch.rows([runs[run][0] for run in chosen])
        at = torch.tensor([-1 if (place := runs[run][1]) is None else place for run in chosen]).unsqueeze(1)
        steps = torch.arange(part.input_ids.shape[1])
        others = steps != at if is_bidirectional(model.module) else steps > at
        sources, reads = steps == at, others & part.mask.cpu() & (at >= 0)
        here = {number: torch.tensor([runs[run][2] in (number, None) for run in chosen]) for number in roads}
        cuts = []
        for number, (states, attending) in roads.items():
            if states:
                cuts.append(cut_edges(sources, reads, rows=dict.fromkeys(states, here[number]), level="block"))
            if attending:
                cuts.append(cut_attention(sources, reads, rows=dict.fromkeys(attending, here[number])))
        with edited(model, cuts), torch.no_grad(), model.running(mask=part.mask):
            logits = model.forward(part)
        wanted = torch.tensor([targets[runs[run][0]] for run in chosen], device=logits.device)
        found[chosen] = target_values(model, logits, wanted, value)
    each = np.split(found, np.cumsum([1 + len(layers) * len(places) for places in own])[:-1])
    return [(values[0] - values[1:]).reshape(len(layers), -1) for values in each]


MAX_TIED_SHARE = 0.05
"""Largest share of tokens with another token's score that needs no note."""


def trapezoid(curve: Float[np.ndarray, "... points"]) -> np.ndarray:
    """Return the area under values at evenly spaced points of [0, 1], by trapezoids."""
    return (curve[..., :-1] + curve[..., 1:]).mean(-1) / 2


def measures(
    curve: Float[np.ndarray, "... two points"],
    without: Float[np.ndarray, "... shares"],
    only: Float[np.ndarray, "... shares"],
) -> Float[np.ndarray, "... measures"]:
    """Return all `MEASURES` of f along MoRF and LeRF, and of f without the top tokens and of these alone, by share."""
    areas, clean = trapezoid(curve), curve[..., MORF, 0]
    morf, lerf = areas[..., MORF], areas[..., LERF]
    return np.stack([lerf - morf, morf, lerf, clean - without.mean(-1), clean - only.mean(-1)], axis=-1)


def text_measures(
    scores: Float[np.ndarray, "rankings n"],
    hidden: Hidden,
    values: Float[np.ndarray, " sets"],
    mask: np.ndarray | None,
    effects: Float[np.ndarray, "cuts n"] | None,
    *,
    methods: int,
    share: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a text's measures (rankings, measures), those of the methods followed by the random ones: fidelity, then
    plausibility, NaN where there is no rationale, then Spearman's correlations with the effects of knocking tokens out;
    and its curves (methods + 1, 2, points), with the mean of the random ones last."""
    curves = values[hidden.asked]
    agreed = np.full((len(scores), len(AGREEMENT)), np.nan)
    if mask is not None and share is not None:
        top = rationale_size(scores.shape[1], share)
        agreed = np.array([agreement(own, mask, top) for own in scores])
    effects = np.empty((0, scores.shape[1])) if effects is None else effects
    changed = levels(effects, float(np.abs(curves[0, MORF, 0])))
    correlated = np.array([[spearman(own, effect) for effect in changed] for own in scores])
    found = [measures(curves, values[hidden.without], values[hidden.only]), agreed, correlated]
    return np.concatenate(found, axis=1), np.concatenate([curves[:methods], curves[methods:].mean(0, keepdims=True)])


def tied_share(scores: np.ndarray) -> float:
    """Return the share of tokens whose score another token also has."""
    _, times = np.unique(levels(scores), return_counts=True)
    return float(times[times > 1].sum()) / len(scores)


def circular_notes(
    goal: Objective, methods: Sequence[str], option: Mapping[str, Mapping[str, Any]], fill: Float[Tensor, " width"]
) -> Iterator[str]:
    """Yield a note for every built-in method whose baseline is the vector that tokens are replaced by."""
    from ssmscope.interp.methods import method_function

    for name in methods:
        known = inspect.signature(method_function(name)).parameters.get("baseline")
        if known is None:
            continue
        start = baseline_embeddings(goal.rows([0]), option.get(name, {}).get("baseline", known.default))[0, 0]
        if torch.allclose(start.to(fill), fill, rtol=1e-5, atol=1e-8):
            yield (
                f"the baseline of {name} is the embedding that replaces tokens, which favours it: give another "
                "replacement or baseline"
            )


def summarise(
    provenance: dict[str, Any],
    methods: tuple[str, ...],
    found: Mapping[str, np.ndarray],
    grid: Sequence[Fraction],
    *,
    total: int,
    used: np.ndarray,
    long: int,
    share: float | None,
    knocked: Sequence[str],
    further: Sequence[str] = (),
    notes: list[str],
    seed: int,
) -> Fidelity:
    """Return means and paired differences of texts' measurements, with intervals, and notes."""
    every = (*MEASURES, *AGREEMENT, *knocked, *further)
    places = [at for at, name in enumerate(every) if share is not None or name not in AGREEMENT]
    names, number = tuple(every[at] for at in places), len(methods)
    values, random = np.split(found["values"][..., places], [number], axis=1)
    beside = random.mean(1)
    columns = np.concatenate([values, beside[:, None]], axis=1)
    rows = resampled_means(columns.reshape(len(used), -1), seed=seed).reshape(-1, number + 1, len(names))
    curves = resampled_means(found["curves"].reshape(len(used), -1), seed=seed)
    paired = [difference(rows[:, a], rows[:, b]) for a, b in itertools.combinations(range(number + 1), 2)]
    of_data, of_used = f"of {total:,} texts", f"of {len(used):,} texts"
    said = [f"{short:,} {of_data} have a single token and are left out"] if (short := total - len(used) - long) else []
    said += [f"{long:,} {of_data} are longer than max_tokens and are left out"] if long else []
    for name, tied in zip(methods, found["tied"].mean(0)):
        what = f"{name} gives {100 * tied:.0f} % of the tokens a score that another one has too: position decides"
        said += [what] if tied > MAX_TIED_SHARE else []
    said += notes
    for name, failed in zip(methods, found["unconverged"].sum(0)):
        said += [f"{name} did not converge on {failed:,} {of_used}"] if failed else []
    missing = dict(zip(names, np.isnan(beside).sum(0).tolist()))
    for name in knocked:
        where = "" if (layer := layer_of(name)) is None else f" in layer {layer}"
        said += [f"in {missing[name]:,} {of_used} no knockout{where} changes the output"] if missing[name] else []
    if unmarked := missing.get(next(iter(AGREEMENT)), 0):
        said.append(f"{unmarked:,} {of_used} have no rationale; plausibility leaves them out")
    return Fidelity(
        provenance=provenance,
        methods=methods,
        measures=names,
        value=provenance["options"]["value"],
        texts=used,
        predicted=found["targets"],
        clean=found["curves"][:, 0, MORF, 0],
        values=values.transpose(1, 0, 2),
        random=beside,
        rankings=_mean_of_defined(random),
        estimates=estimates(rows),
        paired=estimates(np.stack(paired, axis=1)),
        shares=np.array([float(share) for share in grid]),
        curve=estimates(curves).reshape(number + 1, 2, len(grid), 3),
        marked=share,
        notes=tuple(said),
    )


def _mean_of_defined(values: Float[np.ndarray, "texts rankings measures"]) -> Float[np.ndarray, "rankings measures"]:
    """Return the mean over the texts for which a number is defined; NaN where there is none."""
    defined = ~np.isnan(values)
    return ratio(np.where(defined, values, 0.0).sum(0), defined.sum(0))
