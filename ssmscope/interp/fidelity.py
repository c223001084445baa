"""How far explanations are true of the model: what hiding the tokens that they name does to its output."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ssmscope.bootstrap import estimate, resampled_means
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.attribution import Method
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.fidelity_result import LERF, MEASURES, MORF, RANDOM, Fidelity
from ssmscope.interp.objective import objective
from ssmscope.interp.perturbed import (
    MODES,
    VALUES,
    Hidden,
    fill_of,
    hidden_sets,
    ranking,
    run_hidden,
    tokens_at_once,
)
from ssmscope.interp.plausibility import MEASURES as AGREEMENT
from ssmscope.interp.plausibility import agreement, marked_share, marked_tokens, size_of
from ssmscope.limits import refuse_above
from ssmscope.results import record_provenance
from ssmscope.tasks.text import TextData

if TYPE_CHECKING:
    from torch import Tensor

    from ssmscope.encoding import Batch
    from ssmscope.interp.objective import Objective
    from ssmscope.model import Model

FEWEST = 20
"""How many random rankings there are at least."""


def fidelity_auc(
    model: Model,
    data: TextData,
    *,
    methods: Sequence[str] | Mapping[str, Method],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    limit: int | None = None,
    max_tokens: int | None = None,
    mode: str = "replace",
    replacement: str = "mean",
    value: str = "probability",
    steps: int = 20,
    random_rankings: int = FEWEST,
    batch_size: int | None = None,
    seed: int = 0,
) -> Fidelity:
    """Fidelity AUC of explanation methods over a data set (Baleen, Table 2), beside random rankings.

    f is the probability of the class that the model predicts on the clean text. Each method explains that class's
    logit; its signed scores rank the n non-special tokens, ties by position. For q = 0, 1/steps, …, 1 the first
    round(q n) tokens of the ranking are hidden (most relevant first, MoRF), or the last ones (least relevant first,
    LeRF, which goes through the same ranking from its end: of equal scores the last token first). Halves are rounded to
    the even number.

    - A_MoRF and A_LeRF are the areas under f over q, by trapezoids; ΔA = A_LeRF − A_MoRF, the higher the better.
    - Comprehensiveness is f(x) − f(x without the top tokens), sufficiency f(x) − f(the top tokens alone, the others
      hidden), each the mean over the top round(q n) tokens for q = 0.05, 0.1, 0.2, 0.5 (DeYoung et al. 2020, ERASER,
      without its share of 0.01, which is no token of a short text).

    Every number has a 95 % bootstrap interval over texts, and so have the differences between any two methods, and
    between a method and the random rankings (whose mean is taken text by text): all come from the same resamples. Texts
    of one token have no ranking and are left out. Where people marked the texts' rationales, the methods' agreement
    with them (`ssmscope.interp.plausibility`) is measured beside it.

    Args:
        model: a classifier of texts.
        data: texts; their labels are not used.
        methods: names of `ssmscope.interp.methods.METHODS`, or functions of your own by name: each gets the
            objective of a batch of texts and gives their `Scores`. The random rankings are there in any case.
        options: per method its own options, such as {"ig": {"steps": 64}}.
        limit: only so many texts, drawn by the seed.
        max_tokens: leave out the longer ones among them.
        mode: replace (hidden tokens' embeddings become one fixed vector, and the length is kept) or delete (the tokens
            that are left close up).
        replacement: the vector, which should not be a method's own baseline: mean (the mean of the embedding table),
            zero, pad (the padding token's embedding), or
            any other token. When everything is deleted it is the one token that is left.
        value: probability, or logit: what f is.
        steps: into how many parts the shares of hidden tokens divide [0, 1].
        random_rankings: how many random rankings stand beside the methods, at least 20.
        batch_size: texts, and perturbed copies of them, that run together; by default as many as suit the device.
        seed: draws texts, random rankings and resamples.

    Raises:
        InputError: the model is no classifier of texts, no text of two tokens, an unknown method or option, scores or
            logits that are not finite.
    """
    _check(model, data, mode, value, steps, random_rankings, batch_size, seed)
    named = settled(methods, options or {}, seed)
    if limit is not None:
        data = data.sample(limit, seed=seed)
    fill = fill_of(model, replacement)
    lengths, sizes, masks = _read(model, data)
    long = sum(max_tokens is not None and length > max_tokens for length in lengths)
    used = [row for row, size in enumerate(sizes) if size > 1 and (max_tokens is None or lengths[row] <= max_tokens)]
    if not used:
        asked = "has two tokens" if max_tokens is None else f"has between two tokens and {max_tokens:,}"
        raise InputError(f"no text of {data.name} ({data.split}) {asked}: there is nothing to rank")
    marked = [masks[row] for row in used]
    share = marked_share(marked) if any(mask is not None for mask in marked) else None
    grid = [Fraction(step, steps) for step in range(steps + 1)]
    found = _Found.empty(len(used), len(named), random_rankings, steps + 1)
    line_of = {row: line for line, row in enumerate(used)}
    with _progress() as bar:
        task = bar.add_task("texts", total=len(used))
        for rows in _together(used, lengths, batch_size, tokens_at_once(model)):
            batch = model.encode([data.texts[row] for row in rows])
            goal = objective(model, batch)
            given = {name: method(goal) for name, method in named.items()}
            scores = {name: _scored(name, each, batch) for name, each in given.items()}
            found.said.update({f"{name}: {each.note}": None for name, each in given.items() if each.note})
            drawn = [np.random.default_rng([seed, row]).random((random_rankings, sizes[row])) for row in rows]
            every = [
                np.concatenate([np.stack([own[text] for own, _ in scores.values()]), drawn[text]])
                for text in range(len(rows))
            ]
            hidden = [hidden_sets(ranking(each), grid) for each in every]
            targets = [ids[0] for ids in goal.targets]
            sets = [each.sets for each in hidden]
            values = run_hidden(model, batch, targets, sets, fill=fill, mode=mode, value=value, batch_size=batch_size)
            for text, row in enumerate(rows):
                line = line_of[row]
                found.put(line, hidden[text], values[text], targets[text])
                found.tied[line] = [_tied(own) for own in every[text][: len(named)]]
                if share is not None:
                    found.agree(line, every[text], masks[row], share)
            for number, (_, converged) in enumerate(scores.values()):
                found.unconverged[number] += int((~converged).sum()) if converged is not None else 0
            bar.advance(task, len(rows))
    arguments: dict[str, Any] = {
        "methods": list(named),
        "options": {name: dict(given) for name, given in (options or {}).items()},
        "limit": limit,
        "max_tokens": max_tokens,
        "mode": mode,
        "replacement": replacement,
        "value": value,
        "steps": steps,
        "random_rankings": random_rankings,
        "batch_size": batch_size,
    }
    origin = {"name": data.name, "split": data.split, "fingerprint": data.fingerprint, "examples": len(data)}
    provenance = {**record_provenance(model.source, options=arguments, seed=seed), "data": origin}
    if mode == "replace":
        found.said.update({note: None for note in _circular(goal, methods, options or {}, fill)})
    return _result(provenance, tuple(named), data, found, grid, np.array(used), share, seed, long)


def trapezoid(curve: Float[np.ndarray, "... points"]) -> np.ndarray:
    """The area under values at evenly spaced points of [0, 1], by trapezoids."""
    return (curve[..., :-1] + curve[..., 1:]).mean(-1) / 2


def measures(
    curve: Float[np.ndarray, "... two points"],
    without: Float[np.ndarray, "... shares"],
    only: Float[np.ndarray, "... shares"],
) -> Float[np.ndarray, "... measures"]:
    """All measures, in the order of `MEASURES`.

    Args:
        curve: f along MoRF and along LeRF, from the clean text on.
        without: f without the top tokens, for every share.
        only: f of the top tokens alone.
    """
    areas, clean = trapezoid(curve), curve[..., MORF, 0]
    morf, lerf = areas[..., MORF], areas[..., LERF]
    return np.stack([lerf - morf, morf, lerf, clean - without.mean(-1), clean - only.mean(-1)], axis=-1)


@dataclass(eq=False)
class _Found:
    """What is known of every text; the rankings of a text are those of the methods and then the random ones."""

    values: np.ndarray
    """(methods, texts, measures), those of plausibility behind those of fidelity, NaN where there is no rationale."""
    random: np.ndarray
    """(texts, rankings, measures)."""
    curves: np.ndarray
    """(texts, methods + 1, 2, points), the mean of the random ones last."""
    targets: np.ndarray
    tied: np.ndarray
    """(texts, methods)."""
    unconverged: list[int]
    said: dict[str, None] = field(default_factory=dict)
    """What has to be said of methods' baselines, each once."""

    @staticmethod
    def empty(texts: int, methods: int, rankings: int, points: int) -> _Found:
        width = len(MEASURES) + len(AGREEMENT)
        return _Found(
            values=np.full((methods, texts, width), np.nan),
            random=np.full((texts, rankings, width), np.nan),
            curves=np.empty((texts, methods + 1, 2, points)),
            targets=np.empty(texts, dtype=np.int64),
            tied=np.empty((texts, methods)),
            unconverged=[0] * methods,
        )

    def put(self, line: int, hidden: Hidden, values: np.ndarray, target: int) -> None:
        methods = len(self.values)
        curves = values[hidden.asked]
        measured = measures(curves, values[hidden.without], values[hidden.only])
        self.values[:, line, : len(MEASURES)] = measured[:methods]
        self.random[line, :, : len(MEASURES)] = measured[methods:]
        self.curves[line, :methods], self.curves[line, methods] = curves[:methods], curves[methods:].mean(0)
        self.targets[line] = target

    def agree(self, line: int, scores: np.ndarray, mask: np.ndarray | None, share: float) -> None:
        if mask is None:
            return
        methods = len(self.values)
        top = size_of(scores.shape[1], share)
        measured = np.array([agreement(own, mask, top) for own in scores])
        self.values[:, line, len(MEASURES) :] = measured[:methods]
        self.random[line, :, len(MEASURES) :] = measured[methods:]


def _check(
    model: Model, data: Any, mode: str, value: str, steps: int, rankings: int, batch_size: int | None, seed: int
) -> None:
    if not model.is_classifier:
        raise InputError(f"{model.name} is no classifier: fidelity is of the class that a classifier predicts")
    if model.channels is not None or not isinstance(data, TextData):
        given = "a model of pixels" if model.channels is not None else f"data of {type(data).__name__}"
        raise InputError(f"{given} was given; fidelity is measured on classifiers of texts and labelled texts")
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer to read texts with; name one with --tokenizer")
    if not len(data):
        raise InputError(f"{data.name} ({data.split}) has no example")
    for name, given, allowed in (("mode", mode, MODES), ("value", value, VALUES)):
        if given not in allowed:
            raise InputError(
                f"unknown {name} {given!r}; allowed are {', '.join(allowed)}{did_you_mean(str(given), allowed)}"
            )
    least: list[tuple[str, int | None, int]] = [
        ("steps", steps, 1),
        ("random_rankings", rankings, FEWEST),
        ("batch_size", batch_size, 1),
        ("seed", seed, 0),
    ]
    for name, number, lowest in least:
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < lowest):
            raise InputError(f"{name} is {number!r}; allowed is a whole number from {lowest} on")
    refuse_above(10_000, steps=steps)
    refuse_above(100_000, random_rankings=rankings)
    refuse_above(2**16, batch_size=batch_size)


def settled(
    methods: Sequence[str] | Mapping[str, Method], options: Mapping[str, Mapping[str, Any]], seed: int
) -> dict[str, Method]:
    """The methods by name, with their options settled; methods of ours that draw get the seed.

    Raises:
        InputError: no method, an unknown one, one named twice, a function of one's own named "random", or options of
            another method. The name "random" among names asks for what is there in any case.
    """
    from ssmscope.interp.methods import METHODS, method

    own = methods if isinstance(methods, Mapping) else None
    known: Mapping[str, Any] = METHODS if own is None else own
    asked = [methods] if isinstance(methods, str) else list(methods)
    if own is None:
        asked = [name for name in asked if name != RANDOM]
    allowed = ", ".join(name for name in known if name != RANDOM)
    if not asked:
        raise InputError(f"no method was given; allowed are {allowed or 'names and functions'}")
    for name in asked:
        if name not in known:
            raise InputError(f"unknown method {name!r}; allowed are {allowed}{did_you_mean(str(name), known)}")
        if name == RANDOM or asked.count(name) > 1:
            what = "always there, as random rankings" if name == RANDOM else "there twice"
            raise InputError(f"the method {name!r} is {what}; give other methods, each once")
    stray = sorted(set(options) - set(asked))
    if stray:
        raise InputError(
            f"options of {stray[0]!r} were given, which is no method here; these are {', '.join(asked)}"
            f"{did_you_mean(stray[0], asked)}"
        )
    if own is None:
        return {name: method(name, options.get(name), seed=seed) for name in asked}
    return {name: partial(own[name], **options[name]) if options.get(name) else own[name] for name in asked}


def _read(model: Model, data: TextData) -> tuple[list[int], list[int], list[np.ndarray | None]]:
    """Per text its tokens, those that are not special, and which of the latter people marked."""
    lengths, sizes, masks = [], [], []
    for row, text in enumerate(data.texts):
        try:
            (words,) = model.encode([text]).words
        except InputError as error:
            raise InputError(f"row {row + 1} of {data.name} ({data.split}): {error}") from error
        own = np.array([word is not None for word in words], dtype=bool)
        mask = marked_tokens(model, text, data.rationales[row]) if data.rationales is not None else None
        mask = None if mask is None else mask[own]
        lengths.append(len(words))
        sizes.append(int(own.sum()))
        masks.append(mask if mask is not None and mask.any() else None)
    return lengths, sizes, masks


def _together(rows: Sequence[int], lengths: Sequence[int], size: int | None, tokens: int) -> Iterator[list[int]]:
    """Texts of alike length in batches of `size`, or of at most `tokens` tokens, padding included."""
    chosen: list[int] = []
    for row in sorted(rows, key=lambda row: lengths[row]):
        if chosen and (len(chosen) == size or (size is None and lengths[row] * (len(chosen) + 1) > tokens)):
            yield chosen
            chosen = []
        chosen.append(row)
    yield chosen


def _scored(name: str, scores: Any, batch: Batch) -> tuple[list[np.ndarray], np.ndarray | None]:
    """A method's scores of the non-special tokens of every text, and which texts it converged on."""
    values = scores.scores.detach().double().cpu().numpy()
    if values.shape != tuple(batch.mask.shape):
        raise InputError(f"the method {name} gives scores of shape {values.shape} for {tuple(batch.mask.shape)} tokens")
    own = [
        row[: len(words)][[word is not None for word in words]] for row, words in zip(values, batch.words, strict=True)
    ]
    if not all(np.isfinite(row).all() for row in own):
        raise InputError(f"the scores of the method {name} are not finite: the model is damaged, or overflows")
    return own, None if scores.converged is None else scores.converged.detach().cpu().numpy().astype(bool)


def _tied(scores: np.ndarray) -> float:
    """The share of tokens whose score another one has."""
    _, times = np.unique(scores, return_counts=True)
    return float(times[times > 1].sum()) / len(scores)


def _circular(
    goal: Objective,
    methods: Sequence[str] | Mapping[str, Method],
    options: Mapping[str, Mapping[str, Any]],
    fill: Float[Tensor, " width"],
) -> Iterator[str]:
    """Of every method of ours whose baseline is the vector that tokens are replaced by: that this is circular."""
    from ssmscope.interp.methods import METHODS

    if isinstance(methods, Mapping):
        return
    for name in dict.fromkeys([methods] if isinstance(methods, str) else methods):
        known = inspect.signature(METHODS[name]).parameters.get("baseline")
        if known is None:
            continue
        start = baseline_embeddings(goal.rows([0]), options.get(name, {}).get("baseline", known.default))[0, 0]
        if torch.allclose(start.to(fill), fill, rtol=1e-5, atol=1e-8):
            yield (
                f"{name} compares with the very embedding that tokens are replaced by, which favours it: give another "
                "replacement or baseline"
            )


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def _result(
    provenance: dict[str, Any],
    methods: tuple[str, ...],
    data: TextData,
    found: _Found,
    grid: Sequence[Fraction],
    used: np.ndarray,
    share: float | None,
    seed: int,
    long: int,
) -> Fidelity:
    names = (*MEASURES, *(AGREEMENT if share is not None else ()))
    width, number = len(names), len(methods)
    values, random = found.values[..., :width], found.random[..., :width]
    beside = random.mean(1)
    columns = np.concatenate([values, beside[None]]).transpose(1, 0, 2)
    rows = resampled_means(columns.reshape(len(used), -1), seed=seed).reshape(-1, number + 1, width)
    curves = resampled_means(found.curves.reshape(len(used), -1), seed=seed)
    paired = [rows[:, a] - rows[:, b] for a, b in itertools.combinations(range(number + 1), 2)]
    short = len(data) - len(used) - long
    notes = [f"{short:,} of {len(data):,} texts have a single token and are left out"] if short else []
    notes += [f"{long:,} of {len(data):,} texts are longer than asked for and are left out"] if long else []
    for name, tied in zip(methods, found.tied.mean(0)):
        if tied > 0.05:
            notes.append(
                f"{name} gives {100 * tied:.0f} % of the tokens a score that another one has: position decides"
            )
    notes += list(found.said)
    for name, failed in zip(methods, found.unconverged):
        if failed:
            notes.append(f"{name} did not converge on {failed:,} of {len(used):,} texts")
    unmarked = int(np.isnan(beside[:, -1]).sum())
    if unmarked:
        notes.append(f"{unmarked:,} of {len(used):,} texts have no rationale; plausibility leaves them out")
    return Fidelity(
        provenance=provenance,
        methods=methods,
        measures=names,
        value=provenance["options"]["value"],
        texts=used,
        predicted=found.targets,
        clean=found.curves[:, 0, MORF, 0],
        values=values,
        random=beside,
        rankings=np.nanmean(random, axis=0),
        estimates=_ends(rows),
        paired=_ends(np.stack(paired, axis=1)),
        shares=np.array([float(share) for share in grid]),
        curve=_ends(curves).reshape(number + 1, 2, len(grid), 3),
        marked=share,
        notes=tuple(notes),
    )


def _ends(rows: Float[np.ndarray, "rows ..."]) -> Float[np.ndarray, "... three"]:
    """Value and 95 % interval of every column of resamples."""
    flat = rows.reshape(len(rows), -1)
    found = [estimate(flat[:, column]) for column in range(flat.shape[1])]
    return np.array([[e.value, e.low, e.high] for e in found]).reshape(*rows.shape[1:], 3)
