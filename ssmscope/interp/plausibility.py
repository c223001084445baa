"""How far explanations agree with what people marked as the reason (DeYoung et al. 2020, ERASER).

Agreement with people says whether an explanation convinces, not whether it is what the model does: that is fidelity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from ssmscope.bootstrap import Estimate, estimate, resampled_means
from ssmscope.errors import InputError
from ssmscope.results import Result, record_provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.interp.attribution import Explanation
    from ssmscope.model import Model
    from ssmscope.tasks.rationales import Spans
    from ssmscope.tasks.text import TextData

MEASURES = {"token_f1": "token F1", "iou_f1": "IOU F1", "auprc": "AUPRC"}
"""The measures by name, and how the views call them; the higher the better."""

OVERLAP = 0.5
"""From how much intersection over union on two spans match."""


def token_f1(chosen: Bool[np.ndarray, " n"], marked: Bool[np.ndarray, " n"]) -> float:
    """F1 of the chosen tokens as a guess of the marked ones: 2 |both| / (|chosen| + |marked|)."""
    total = int(chosen.sum()) + int(marked.sum())
    return 2 * int((chosen & marked).sum()) / total if total else 0.0


def iou_f1(chosen: Bool[np.ndarray, " n"], marked: Bool[np.ndarray, " n"], threshold: float = OVERLAP) -> float:
    """F1 of the chosen spans as a guess of the marked ones; a span is a run of tokens (DeYoung et al. 2020, sec. 4.1).

    Two spans match when their intersection has at least `threshold` of the tokens of their union.
    """
    guesses, truths = _runs(chosen), _runs(marked)
    if not guesses or not truths:
        return 0.0
    overlap = np.array([[_overlap(guess, truth) for truth in truths] for guess in guesses]) >= threshold
    precision, recall = overlap.any(1).mean(), overlap.any(0).mean()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def average_precision(scores: Float[np.ndarray, " n"], marked: Bool[np.ndarray, " n"]) -> float:
    """The area under the curve of precision over recall, Σ_k (R_k − R_{k−1}) P_k over the distinct scores from the
    highest on; NaN where nothing is marked."""
    if not marked.any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    ordered, hits = scores[order], np.cumsum(marked[order])
    last = np.append(ordered[1:] != ordered[:-1], True)  # of tokens that share a score
    precision = hits[last] / (np.flatnonzero(last) + 1)
    recall = hits[last] / hits[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def chance_precision(n: int, marked: int) -> float:
    """The expected average precision of a random ranking of n tokens of which some are marked (Bestgen 2015):
    ((r − 1) / (n − 1) · (n − H_n) + H_n) / n with r marked tokens and H_n = 1 + 1/2 + … + 1/n."""
    harmonic = sum(1 / place for place in range(1, n + 1))
    return ((marked - 1) / (n - 1) * (n - harmonic) + harmonic) / n if n > 1 else 1.0


def _runs(tokens: Bool[np.ndarray, " n"]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], tokens, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> float:
    both = max(0, min(a[1], b[1]) - max(a[0], b[0]))
    return both / (a[1] - a[0] + b[1] - b[0] - both)


def agreement(scores: Float[np.ndarray, " n"], marked: Bool[np.ndarray, " n"], top: int) -> tuple[float, ...]:
    """The measures of one text, in the order of `MEASURES`; the rationale is the `top` tokens, ties by position."""
    chosen = np.zeros(len(scores), dtype=bool)
    chosen[np.argsort(-scores, kind="stable")[:top]] = True
    return token_f1(chosen, marked), iou_f1(chosen, marked), average_precision(scores, marked)


def size_of(n: int, top: int | float) -> int:
    """How many of n tokens a rationale has: `top`, or that share of them, rounded; at least 1 and at most n."""
    return min(n, max(1, round(top * n) if isinstance(top, float) else top))


def marked_share(masks: Iterable[Bool[np.ndarray, " _"] | None]) -> float:
    """The mean over texts of the share of tokens that is marked."""
    shares = [float(mask.mean()) for mask in masks if mask is not None]
    return sum(shares) / len(shares)


def rationale_masks(model: Model, data: TextData) -> list[Bool[np.ndarray, " tokens"] | None]:
    """Per text which of the tokens that the model reads people marked: those that share a character that is no space
    with a marked span. Special tokens are never marked. None for a text without a rationale, or with one that no token
    is of.

    Raises:
        InputError: data without rationales, or a tokenizer that does not say which characters a token is of.
    """
    if data.rationales is None:
        raise InputError(f"{data.name} has no rationales: give a file with a column 'rationale'")
    return [marked_tokens(model, text, spans) for text, spans in zip(data.texts, data.rationales)]


def marked_tokens(model: Model, text: str, spans: Spans | None) -> Bool[np.ndarray, " tokens"] | None:
    """As `rationale_masks`, of one text."""
    if spans is None:
        return None
    if not getattr(model.tokenizer, "is_fast", False):
        raise InputError(
            f"the tokenizer of {model.name} does not say which characters a token is of: rationales need one that does"
        )
    marked = np.zeros(len(text), dtype=bool)
    for start, stop in spans:
        marked[start:stop] = True
    marked &= np.array([not character.isspace() for character in text], dtype=bool)
    encoded = model.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    places = zip(encoded["offset_mapping"], encoded["special_tokens_mask"])
    found = np.array([not special and bool(marked[start:stop].any()) for (start, stop), special in places], dtype=bool)
    return found if found.any() else None


def plausibility(
    explained: Explanation | Mapping[str, Sequence[Float[np.ndarray, " tokens"]]],
    rationales: Sequence[Bool[np.ndarray, " tokens"] | Sequence[int] | None],
    *,
    top: int | float | None = None,
    seed: int = 0,
) -> Plausibility:
    """How far the scores of each method agree with human rationales, token by token.

    Per text: token F1 and IOU F1 of the top tokens as a rationale, and the area under the precision-recall curve of all
    scores (AUPRC), beside what random scores would have; their means have 95 % bootstrap intervals over texts.

    Args:
        explained: texts that `explain` explained, whose special tokens are left out, or per method its scores of every
            text, without special tokens.
        rationales: per text a 0 or 1 for every token that its scores are of (`rationale_masks` makes them); None for a
            text that nobody marked, which is left out.
        top: how many tokens a rationale has, or, as a number between 0 and 1, which share of each text's tokens. By
            default the mean share that people marked.
        seed: draws the resamples.

    Raises:
        InputError: not one rationale for every text, one of another length, none at all, or a score that is not finite.
    """
    _check_top(top)
    by_method, kept, source = _scores(explained)
    texts = len(next(iter(by_method.values()), ()))
    if len(rationales) != texts or any(len(scores) != texts for scores in by_method.values()):
        raise InputError(f"{len(rationales)} rationales were given for {texts} texts; give one for each, or None")
    masks: list[np.ndarray | None] = []
    for row, given in enumerate(rationales):
        mask = None if given is None else np.asarray(given)
        if mask is not None:
            if kept is not None and len(mask) == len(kept[row]):
                mask = mask[kept[row]]
            mask = _checked(mask, len(next(iter(by_method.values()))[row]), row)
        masks.append(mask)
    used = [row for row, mask in enumerate(masks) if mask is not None]
    if not used:
        raise InputError("no text has a rationale: there is nothing to agree with")
    share = marked_share(masks)
    values = np.empty((len(by_method), len(used), len(MEASURES)))
    for number, (method, scores) in enumerate(by_method.items()):
        for line, row in enumerate(used):
            own, mask = np.asarray(scores[row], dtype=np.float64), masks[row]
            assert mask is not None
            if own.shape != mask.shape or not np.isfinite(own).all():
                raise InputError(f"the scores that {method} gives text {row + 1} are not {len(mask)} finite numbers")
            values[number, line] = agreement(own, mask, size_of(len(own), share if top is None else top))
    rows = resampled_means(values.transpose(1, 0, 2).reshape(len(used), -1), seed=seed)
    found = tuple(estimate(rows[:, column]) for column in range(rows.shape[1]))
    return Plausibility(
        provenance=record_provenance(source, options={"top": top}, seed=seed),
        methods=tuple(by_method),
        values=values,
        estimates=found,
        texts=tuple(used),
        share=share,
        chance=float(np.mean([chance_precision(len(m), int(m.sum())) for m in masks if m is not None])),
        top=share if top is None else top,
        left_out=texts - len(used),
    )


@dataclass(frozen=True)
class Plausibility(Result, kind="plausibility"):
    """Agreement of methods' scores with human rationales."""

    methods: tuple[str, ...]
    values: np.ndarray
    """(methods, texts, measures): every text's, in the order of `MEASURES`."""
    estimates: tuple[Estimate, ...]
    """Their means over texts: method by method, measure by measure."""
    texts: tuple[int, ...]
    """Which texts have a rationale."""
    share: float
    """The mean share of tokens that is marked."""
    chance: float
    """The expected AUPRC of random scores on these texts."""
    top: int | float
    """How many tokens, or which share of them, a rationale has."""
    left_out: int
    """Texts without a rationale."""

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        return f"Plausibility of {len(self.methods)} methods on {model}: agreement with {len(self.texts)} rationales"

    def to_frame(self) -> DataFrame:
        """A row per method and measure: columns method, measure, value, low, high (its 95 % interval), texts."""
        import pandas as pd

        names = [(method, measure) for method in self.methods for measure in MEASURES]
        rows = [(*name, e.value, e.low, e.high, len(self.texts)) for name, e in zip(names, self.estimates)]
        return pd.DataFrame(rows, columns=["method", "measure", "value", "low", "high", "texts"])

    def figure(self) -> Figure:
        """Each measure's mean by method, with its interval."""
        from ssmscope.interp.views.fidelity_figure import draw_plausibility

        return draw_plausibility(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.headline), title_justify="left", box=None, pad_edge=False)
        table.add_column("method")
        for name in MEASURES.values():
            table.add_column(name, justify="right", no_wrap=True)
        found = iter(self.estimates)
        for method in self.methods:
            table.add_row(Text(method), *(str(next(found)) for _ in MEASURES))
        yield table
        size = f"{100 * self.top:.1f} % of the" if isinstance(self.top, float) else f"{self.top}"
        yield Text(
            f"\nRationales of {size} tokens, where people marked {100 * self.share:.1f} %. The AUPRC of random scores "
            f"is {self.chance:.3f}. 95 % bootstrap intervals."
        )
        if self.left_out:
            yield Text(f"Note: {self.left_out:,} texts have no rationale and are left out.")


def _check_top(top: Any) -> None:
    fits = top is None or (isinstance(top, float) and 0 < top < 1)
    if not fits and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise InputError(f"top is {top!r}; allowed is a whole number of tokens from 1 on or a share between 0 and 1")


def _scores(
    explained: Any,
) -> tuple[dict[str, Sequence[np.ndarray]], list[np.ndarray] | None, dict[str, Any]]:
    """Per method its scores of the non-special tokens, which tokens those are, and where it comes from."""
    if isinstance(explained, Mapping):
        if not explained:
            raise InputError("no method was given; give at least one method's scores")
        return dict(explained), None, {}
    kept = [np.array([word is not None for word in text.words], dtype=bool) for text in explained]
    by_method: dict[str, list[np.ndarray]] = {method: [] for method in explained.methods}
    for text, own in zip(explained, kept):
        for attribution in text.attributions:
            by_method[attribution.method].append(np.asarray(attribution.scores)[own])
    origin = ("model", "architecture", "fingerprint", "dtype", "device")
    source = {name: explained.provenance[name] for name in origin if name in explained.provenance}
    return dict(by_method), kept, source


def _checked(mask: np.ndarray, tokens: int, row: int) -> np.ndarray:
    if mask.shape != (tokens,) or not np.isin(mask, (0, 1)).all():
        raise InputError(f"the rationale of text {row + 1} is not a 0 or 1 for each of its {tokens} tokens")
    if not mask.any():
        raise InputError(f"the rationale of text {row + 1} marks no token; give None for a text that nobody marked")
    return mask.astype(bool)
