"""Answers of a model to questions in long contexts, and statistics of their accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int
from ssmscope.core.bootstrap import Estimate, estimate, resampled_sums, share
from ssmscope.core.model import Model
from ssmscope.data.babi import PROMPT, QuestionData, question_tokens
from ssmscope.evaluation.forking import Rows, check_vocabulary
from ssmscope.probes.long_rows import PIECE_TOKENS, head_logits, pieces_of
from ssmscope.probes.retrieval.result import Cell, Ratio

NOTED_UNKNOWN_SHARE = 0.01
"""Share of unknown tokens above which a note says so."""


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers of a model to questions."""

    right: Bool[np.ndarray, " examples"]
    """True if the answer's first token is the likeliest of the vocabulary."""
    among: Bool[np.ndarray, " examples"]
    """True if it is the likeliest of the candidates' first tokens."""
    log_probability: Float[np.ndarray, " examples"]
    """Log-probability of the answer's first token, in nats."""
    tokens: Int[np.ndarray, " examples"]
    unknown: float
    """Share of the prompts' tokens that the tokenizer does not know."""


def answers(model: Model, data: QuestionData, *, template: str = PROMPT, piece: int = PIECE_TOKENS) -> Answers:
    rows, targets = prompts(model, data, template)
    choices = first_tokens(model, data, template)
    right, among = np.empty((2, len(data)), dtype=bool)
    log_probability = np.full(len(data), np.nan)
    for part in pieces_of(model, rows, piece=piece):
        ended = np.flatnonzero(part.ends)
        if not len(ended):
            continue
        at, last = part.rows[ended], part.lengths[ended] - 1
        given = head_logits(model, part.hidden[ended.tolist(), last.tolist()]).cpu()
        logits, wanted = given.numpy(), targets[at]
        sound = (logits < np.inf).all(1)  # This excludes NaN; −inf may rule out a token.
        right[at] = sound & (logits.argmax(1) == wanted)
        among[at] = sound & (choices[logits[:, choices].argmax(1)] == wanted)
        log_probability[at] = given.double().log_softmax(-1).numpy()[np.arange(len(at)), wanted]
    unknown = model.tokenizer.unk_token_id
    share = float((rows.ids == unknown).mean()) if unknown is not None else 0.0
    return Answers(right, among, log_probability, rows.lengths, share)


def prompts(model: Model, data: QuestionData, template: str) -> tuple[Rows, Int[np.ndarray, " examples"]]:
    """Return the prompts' tokens, and the first token of every answer."""
    found = question_tokens(data, model.tokenizer, template=template)
    lengths = found.lengths
    ids = np.concatenate([row[:length] for row, length in zip(found.ids, lengths)])
    targets = found.targets[np.arange(len(lengths)), lengths - 1]
    check_vocabulary(model, max(ids.max(), targets.max()))
    return Rows(ids, np.concatenate([[0], lengths.cumsum()])), targets


def first_tokens(model: Model, data: QuestionData, template: str) -> Int[np.ndarray, " candidates"]:
    """Return the first token of every candidate answer at the answer's position."""
    first = data.examples[0]
    short = replace(first, context=" ".join(fact.text for fact in first.facts))
    each = replace(data, examples=tuple(replace(short, answer=word) for word in data.candidates))
    return prompts(model, each, template)[1]


def sign_test(above: Bool[np.ndarray, " examples"], below: Bool[np.ndarray, " examples"]) -> float:
    """Return the two-sided p of the exact sign test on examples that only one of two models gets right."""
    first, second = int((above & ~below).sum()), int((below & ~above).sum())
    number = first + second
    tail = sum(math.comb(number, k) for k in range(min(first, second) + 1))
    return min(1.0, 2 * tail / 2**number)


def quotient(above: Float[np.ndarray, " rows"], below: Float[np.ndarray, " rows"]) -> Estimate:
    """Return above / below of the first row with an interval from the others; x / 0 is infinite, 0 / 0 is left out."""
    if below[0] == 0:
        return Estimate(math.nan, math.nan, math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = above / below
    if not np.isinf(rows).any():
        return estimate(rows)
    # The quantiles are not interpolated, because a resample may be infinite.
    low, high = np.quantile(rows[1:][~np.isnan(rows[1:])], [0.025, 0.975], method="inverted_cdf")
    return Estimate(float(rows[0]), float(low), float(high))


def compare_models(
    right: Bool[np.ndarray, "models tasks lengths examples"],
    among: Bool[np.ndarray, "models tasks lengths examples"],
    log_probability: Float[np.ndarray, "models tasks lengths examples"],
    tokens: Float[np.ndarray, "models tasks lengths"],
    seed: int,
) -> tuple[tuple[tuple[tuple[Cell, ...], ...], ...], tuple[tuple[tuple[Ratio, ...], ...], ...]]:
    """Return the cells of every model, and the ratios of the first to each of the others, [model][task][length]."""
    models, rows, columns, examples = right.shape
    cells, ratios = np.empty((models, rows, columns), object), np.empty((models - 1, rows, columns), object)
    for row, column in np.ndindex(rows, columns):
        hits = right[:, row, column]
        measured = np.concatenate([hits, log_probability[:, row, column]]).T.astype(np.float64)
        sums = resampled_sums(measured, seed=seed)
        for number in range(models):
            at = number, row, column
            free, constrained = (share(int(each[at].sum()), examples) for each in (right, among))
            cells[at] = Cell(float(tokens[at]), free, constrained, estimate(sums[:, models + number] / examples))
        for other in range(1, models):
            value = quotient(sums[:, 0], sums[:, other])
            ratios[other - 1, row, column] = Ratio(value, sign_test(hits[0], hits[other]))
    return tuple(tuple(map(tuple, each)) for each in cells), tuple(tuple(map(tuple, each)) for each in ratios)


def notes_on(
    names: Sequence[str],
    lengths: Sequence[int],
    tokens: Float[np.ndarray, "models tasks lengths"],
    unknown: Float[np.ndarray, "models tasks lengths"],
    log_probability: Float[np.ndarray, "models tasks lengths examples"],
) -> Iterable[str]:
    for number, name in enumerate(names):
        broken = np.isnan(log_probability[number]).any((0, 2))
        if broken.any():
            yield (
                f"logits of {name} are not finite from {lengths[int(broken.argmax())]:,} tokens on; there it gives no "
                "answer"
            )
        share = float((unknown[number] * tokens[number]).sum() / tokens[number].sum())
        if share > NOTED_UNKNOWN_SHARE:
            yield f"the tokenizer of {name} does not know {100 * share:.0f} % of the prompts' tokens"
