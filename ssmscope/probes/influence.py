"""How far back an output depends on its input (recency), and how alike tokens become (over-smoothing).

State-space models forget: with every state decaying, |∂y_t/∂x_s| falls exponentially in t − s, and with states that
hardly decay all tokens come to look alike (Wang et al., Understanding and mitigating bottlenecks of state space models
through the lens of recency and over-smoothing, arXiv 2501.00658). Both are measured here on the trained model itself,
with nothing frozen or linearised beyond the derivative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.encoding import Batch
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.objective import NUMBERS_AT_ONCE
from ssmscope.limits import ROW, TOGETHER, refuse_above, refuse_held, refuse_reading
from ssmscope.model import TOKENS_AT_ONCE
from ssmscope.probes.influence_jacobian import OUTPUTS, VECTORS, Dependence, Probes, block_norms, of_layer, of_output
from ssmscope.probes.influence_reach import QUANTILES, SHARES, Reach, noise_of, reach_of
from ssmscope.probes.influence_similarity import MEASURES, PARTS, Similarity, similarity_of
from ssmscope.results import Result, record_provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.model import Model

AT = ("output", "layers")
EXACT = 64
"""Up to how many components of y its Jacobian is computed exactly unless it is asked for."""


def influence(
    model: Model,
    texts: str | Sequence[str] | Batch | None = None,
    *,
    length: int | None = None,
    sequences: int = 8,
    positions: str | Sequence[int] = "last",
    at: str = "output",
    of: str = "hidden",
    exact: bool | None = None,
    probes: int = 8,
    vectors: str = "signs",
    fit_from: int = 1,
    fit_to: int | None = None,
    recent: int = 8,
    chunk: int | None = None,
    seed: int = 0,
) -> Influence:
    """Measure ‖∂y_t/∂x_s‖_F by distance t − s, its decay, the effective context, and the similarity of tokens by layer.

    y_t is what the head reads at position t, or the logits; x_s is the embedding of token s; the norm is Frobenius' of
    the whole Jacobian block. With the layers too, each mixer is also measured alone: its output against its own input,
    through its gates and norms as they are.

    By distance: the mean of ln‖J‖ over all (text, t), with a line ln‖J‖ = a − λ (t − s) through it by least squares,
    weighted by how many (text, t) a distance has; 1/λ is the decay length. The range of the fit ends where norms
    underflow. On each text's last measured position: the share of the influence that its last k tokens hold,
    Σ_{s > t−k} ‖J_ts‖ / Σ_s ‖J_ts‖; and the effective context, the smallest k that holds 50, 90 and 95 % where the
    influence goes on before the text's first token as the fitted line does: a text that is too short to hold the share
    does not reach it. Intervals are 95 % bootstrap intervals over texts; a single text has none.

    Args:
        model: a language model or a classifier.
        texts: texts, or a batch of `model.encode`.
        length: instead of texts, random sequences of so many tokens, or pixels with the class token.
        sequences: how many of these.
        positions: the t: "last" of every text, "all", or a list, negative ones counting from the end.
        at: "output", the whole model alone, or "layers", each layer's mixer too.
        of: "hidden", the vector that the head reads, or "logits", a classifier's at the last position only.
        exact: whether the norms are exact, with a backward pass for every component of y, or estimated. By default
            they are exact for up to 64 components.
        probes: how many random vectors an estimated norm is from: as many backward passes; from 2 on.
        vectors: what these are drawn from: "signs", ±1, or "normal".
        fit_from: the least distance of the fit; at 0 an output also reads its own token past the memory.
        fit_to: the largest; by default as far as the texts and the noise allow.
        recent: how many last tokens the views call recent.
        chunk: how many tokens run together; by default as many as suit the device.
        seed: draws random sequences, vectors and resamples.

    Raises:
        InputError: an option that is not one of these, a position that a text does not have, or gradients that are
            not finite.
    """
    _check(model, at, of, positions, exact, vectors)
    numbers: dict[str, tuple[int | None, int]] = {
        **{"length": (length, 1), "sequences": (sequences, 1), "probes": (probes, 2), "recent": (recent, 1)},
        **{"fit_from": (fit_from, 0), "fit_to": (fit_to, 0), "chunk": (chunk, 1), "seed": (seed, 0)},
    }
    for name, (value, least) in numbers.items():
        if value is None and name in ("length", "fit_to", "chunk"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise InputError(f"{name} is {value!r}; allowed is a whole number from {least} on")
    batch = _batch(model, texts, length, sequences, seed)
    refuse_reading(probes * batch.mask.numel(), f"{probes:,} probes", "ask for fewer")
    chosen = _positions(positions, batch.lengths)
    noise = noise_of(next(model.module.parameters()).dtype)

    def reach(place: str, dependence: Dependence) -> Reach:
        all_of_them = dependence.size <= max(EXACT, probes) if exact is None else exact
        drawn = Probes(None if all_of_them else probes, vectors, seed)
        blocks = block_norms(model, dependence, batch, chosen, drawn, chunk)
        for text, block in enumerate(blocks, start=1):
            if not np.isfinite(block.norm).all():
                where = "the output" if place == "output" else f"layer {place}"
                raise InputError(
                    f"the gradients of {where} are not finite on text {text}: the model is damaged, or overflows"
                )
        fit: dict[str, Any] = {"fit_from": fit_from, "fit_to": fit_to}
        return reach_of(place, blocks, exact=all_of_them, noise=noise, **fit, seed=seed)

    reaches = [reach("output", of_output(model, batch, of))]
    if at == "layers":
        size = batch.mask.numel() * model.module.get_input_embeddings().weight.shape[1]
        together = max(1, NUMBERS_AT_ONCE // (4 * size))  # a GroupMamba's inputs are those of several modules
        for start in range(0, model.num_layers, together):
            group = range(start, min(start + together, model.num_layers))
            trace = model.trace(batch, keep_inputs=group)
            reaches += [reach(str(index), of_layer(model, batch, index, trace.layers[index].u)) for index in group]

    similarity = similarity_of(model, batch, at_once=TOKENS_AT_ONCE if chunk is None else chunk, seed=seed)
    options: dict[str, Any] = {
        **{"length": length, "sequences": sequences if length is not None else None},
        **{"positions": positions if isinstance(positions, str) else [int(each) for each in positions]},
        **{"at": at, "of": of, "exact": exact, "probes": probes, "vectors": vectors},
        **{"fit_from": fit_from, "fit_to": fit_to, "recent": recent, "chunk": chunk},
    }
    return Influence(
        provenance=record_provenance(model.source, options=options, seed=seed),
        of=of,
        positions=positions if isinstance(positions, str) else "chosen",
        unit="pixels" if batch.values is not None else "tokens",
        lengths=np.array(batch.lengths),
        recent=int(recent),
        reaches=tuple(reaches),
        similarity=similarity,
        notes=tuple(_notes(reaches, batch)),
    )


def _check(model: Model, at: str, of: str, positions: Any, exact: Any, vectors: str) -> None:
    for name, value, allowed in (("at", at, AT), ("of", of, OUTPUTS), ("vectors", vectors, VECTORS)):
        if value not in allowed:
            known = " and ".join(map(repr, allowed))
            raise InputError(f"unknown {name} {value!r}; allowed are {known}{did_you_mean(str(value), allowed)}")
    if exact is not None and not isinstance(exact, bool):
        raise InputError(
            f"exact is {exact!r}; allowed are True, False and None, which decides by the number of components"
        )
    if of == "logits" and model.is_classifier and positions != "last":
        raise InputError(f"{model.name} is a classifier, with logits at the last position only: give positions 'last'")


def _batch(
    model: Model, texts: str | Sequence[str] | Batch | None, length: int | None, sequences: int, seed: int
) -> Batch:
    if (texts is None) == (length is None):
        raise InputError("give either texts (or a batch of encode()), or a length for random sequences")
    if isinstance(texts, Batch):
        if (texts.values is None) != (model.channels is None):
            wanted = "tokens" if model.channels is None else "pixels"
            raise InputError(f"{model.name} reads {wanted}: give it a batch of its own encode()")
        return texts
    if length is None:
        return model.encode(texts)
    refuse_above(ROW, length=length)
    what = f"{sequences:,} sequences of {length:,} tokens"
    refuse_held(sequences * length, what, "ask for fewer or shorter ones", most=TOGETHER)
    random = np.random.default_rng([seed, sequences, length])
    if model.channels is not None:
        if length < 2:
            raise InputError(f"length is {length}; allowed is a whole number from 2 on: the last is the class token")
        return model.encode(values=random.random((sequences, length - 1, model.channels), dtype=np.float32))
    special = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else set()
    ordinary = np.array([i for i in range(model.vocabulary) if i not in special] or range(model.vocabulary))
    return model.encode(ids=random.choice(ordinary, (sequences, length)).tolist())


def _positions(positions: str | Sequence[int], lengths: Sequence[int]) -> list[np.ndarray]:
    """The positions t of every text, in order."""
    if isinstance(positions, str):
        if positions not in ("last", "all"):
            hint = did_you_mean(positions, ("last", "all"))
            raise InputError(
                f"unknown positions {positions!r}; allowed are 'last', 'all' and a list of positions{hint}"
            )
        return [np.arange(n - 1 if positions == "last" else 0, n) for n in lengths]
    numbers = list(positions)
    wrong = [each for each in numbers if isinstance(each, bool) or not isinstance(each, int | np.integer)]
    if wrong or not numbers:
        raise InputError(f"positions is {numbers}; allowed are 'last', 'all' and a list of whole numbers")
    found = []
    for text, n in enumerate(lengths, start=1):
        outside = [each for each in numbers if not -n <= each < n]
        if outside:
            raise InputError(
                f"text {text} has no position {outside[0]}: it has {n} tokens; allowed are {-n} to {n - 1}"
            )
        found.append(np.unique([int(each) % n for each in numbers]))
    return found


def _notes(reaches: Sequence[Reach], batch: Batch) -> Iterable[str]:
    texts = len(batch.tokens)
    if texts == 1:
        yield "one text: no number has an interval, and its tokens are centred on their own mean"
    dead = [reach.place for reach in reaches if np.isnan(reach.context).any()]
    if dead:
        yield f"no influence at all on some positions of {named(dead)}; they are left out of logarithms and shares"
    growing = [reach.place for reach in reaches if reach.decay.rate.value <= 0]
    if growing:
        yield f"the influence on {named(growing)} does not decay with distance"
    short = [reach.place for reach in reaches if not reach.decay.defined]
    if short:
        yield f"no line is fitted for {named(short)}: fewer than three distances are measured and above the noise"


def named(places: Sequence[str]) -> str:
    """ "the output", "layer 3", "the output and layers 0, 2", in words."""
    layers = [place for place in places if place != "output"]
    parts = ["the output"] if "output" in places else []
    if layers:
        parts.append(("layer " if len(layers) == 1 else "layers ") + ", ".join(layers))
    return " and ".join(parts)


@dataclass(frozen=True)
class Influence(Result, kind="influence"):
    """How far back the output, and each layer's, depends on the input, and how alike tokens become."""

    of: str
    """What y is: "hidden" or "logits"; of a layer it is its mixer's output."""
    positions: str
    """Which positions t are measured: "last", "all" or "chosen"."""
    unit: str
    """ "tokens" or "pixels"."""
    lengths: np.ndarray
    """(texts,) int64: their tokens."""
    recent: int
    """How many last tokens the views call recent."""
    reaches: tuple[Reach, ...]
    """Of the whole model, "output", and of each layer where they were asked for."""
    similarity: Similarity
    notes: tuple[str, ...]

    @property
    def output(self) -> Reach:
        """That of the whole model."""
        return self.reaches[0]

    @property
    def layers(self) -> tuple[Reach, ...]:
        """Those of the layers' mixers; none unless they were asked for."""
        return self.reaches[1:]

    @property
    def noun(self) -> str:
        """What was read: "texts", "images", "random sequences" or "random images"."""
        drawn = self.provenance["options"]["length"] is not None
        if self.unit == "pixels":
            return "random images" if drawn else "images"
        return "random sequences" if drawn else "texts"

    @property
    def one(self) -> str:
        """One of them: "a text", "an image"."""
        return "an image" if self.unit == "pixels" else "a text"

    @property
    def counted(self) -> str:
        """How many, and how long they are."""
        low, high, number = int(self.lengths.min()), int(self.lengths.max()), len(self.lengths)
        noun = self.noun if number > 1 else self.noun.removesuffix("s")
        length = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return f"{number:,} {noun} of {length} {self.unit if high > 1 else self.unit.removesuffix('s')}"

    @property
    def headline(self) -> str:
        return f"Influence on the output of {self.provenance.get('model', 'a model')}: {self.found}"

    @property
    def found(self) -> str:
        """What was found, in a line."""
        context = self.output.effective_context(0.9)
        if math.isnan(context):
            return "there is none"
        held = f"within {context:,.0f} {self.unit}" if math.isfinite(context) else "not within the texts' length"
        return f"{falls(self.output)}, 90 % of it {held}"

    def summary(self) -> DataFrame:
        """A row for the output and each layer.

        Columns: place, rate (λ per token), decay_length (tokens), r2, fit_from, fit_to (distances); recent (the share
        of the last tokens); context_50, context_90, context_95 (tokens, medians over texts, infinite where not
        reached) and not_reached_50, … (texts); error (the median relative standard error of a norm); the 95 % intervals
        of rate, decay_length and recent in columns ending in _low and _high.
        """
        import pandas as pd

        return pd.DataFrame([_summary(reach, self.recent) for reach in self.reaches])

    def distances(self, place: str | int = "output") -> DataFrame:
        """A row per distance t − s of the output or of a layer: columns distance, pairs, log_norm, norm, share, within
        (the share of the last 1 + distance tokens), each with _low and _high, the quantiles q05 … q95 of the norm, the
        relative error of one norm, and noisy, the share of norms below the float noise.

        Raises:
            InputError: when there is no such place.
        """
        import pandas as pd

        reach = self._reach(place)
        columns: dict[str, Any] = {"distance": np.arange(len(reach.pairs)), "pairs": reach.pairs}
        for name in ("log_norm", "norm", "share", "within"):
            values = getattr(reach, name)
            columns |= {name + end: values[:, at] for at, end in enumerate(("", "_low", "_high"))}
        columns |= {f"q{round(100 * q):02d}": reach.quantiles[:, at] for at, q in enumerate(QUANTILES)}
        return pd.DataFrame({**columns, "error": reach.error, "noisy": reach.noisy})

    def to_frame(self) -> DataFrame:
        """Everything as a row per number: columns part, place, distance, measure, value, low, high, count.

        First the parts "decay" (rate, decay_length, intercept, r2), "context" (the median of the effective context for
        each share, low and high being the quartiles over texts, count the texts that reach it), "recency" (the share of
        the last tokens) and "stream" and "mixer" (cosine, centred, spread); then "distance": log_norm, norm, share,
        within, with `count` the (text, t) behind it.
        """
        import pandas as pd

        rows: list[tuple[Any, ...]] = []
        for reach in self.reaches:
            rows += _decay_rows(reach, self.recent)
        for part in PARTS:
            places = self.similarity.places if part == "stream" else self.similarity.places[1:-1]
            for place in places:
                for measure in MEASURES:
                    found = self.similarity.estimate(place, measure, part)
                    rows.append((part, place, None, measure, found.value, found.low, found.high, len(self.lengths)))
        for reach in self.reaches:
            for measure in ("log_norm", "norm", "share", "within"):
                for distance, (value, low, high) in enumerate(getattr(reach, measure).tolist()):
                    count = len(self.lengths) if measure == "within" else int(reach.pairs[distance])
                    rows.append(("distance", reach.place, distance, measure, value, low, high, count))
        names = ["part", "place", "distance", "measure", "value", "low", "high", "count"]
        return pd.DataFrame(rows, columns=names).astype({"distance": "Int64", "count": "Int64"})

    def figure(self) -> Figure:
        """Influence against distance with the fitted line, the effective context, and similarity by layer."""
        from ssmscope.probes.influence_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from ssmscope.probes.influence_terminal import show

        return show(self)

    def _reach(self, place: str | int) -> Reach:
        known = {reach.place: reach for reach in self.reaches}
        if str(place) not in known:
            hint = "" if self.layers else "; layers are measured with at='layers'"
            raise InputError(
                f"there is no {place!r}; allowed are {', '.join(known)}{did_you_mean(str(place), known)}{hint}"
            )
        return known[str(place)]


def falls(reach: Reach) -> str:
    """How fast the influence falls, in a few words."""
    if not reach.decay.defined:
        return "no decay fitted"
    if math.isinf(reach.decay.length.value):
        return "no decay with distance"
    return f"decay length {reach.decay.length.value:.3g}"


def _summary(reach: Reach, recent: int) -> dict[str, Any]:
    decay = reach.decay
    row: dict[str, Any] = {"place": reach.place}
    for name, found in (("rate", decay.rate), ("decay_length", decay.length), ("recent", reach.recent(recent))):
        row |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
        if name == "decay_length":
            row |= {"r2": decay.r2, "fit_from": decay.first, "fit_to": decay.last}
    for share in SHARES:
        row[f"context_{100 * share:.0f}"] = reach.effective_context(share)
    for share in SHARES:
        row[f"not_reached_{100 * share:.0f}"] = reach.not_reached(share)
    known = reach.error[~np.isnan(reach.error)]
    return {**row, "error": float(np.median(known)) if len(known) else math.nan}


def _decay_rows(reach: Reach, recent: int) -> Iterable[tuple[Any, ...]]:
    decay, texts = reach.decay, len(reach.context)
    nothing = (math.nan, math.nan)
    for name, found in (("rate", decay.rate), ("decay_length", decay.length)):
        yield "decay", reach.place, None, name, found.value, found.low, found.high, texts
    for name, value in (("intercept", decay.intercept), ("r2", decay.r2)):
        yield "decay", reach.place, None, name, value, *nothing, texts
    for name, distance in (("fit_from", decay.first), ("fit_to", decay.last)):
        yield "decay", reach.place, None, name, float(distance), *nothing, texts
    for share in SHARES:
        middle, low, high = (reach.effective_context(share, quantile) for quantile in (0.5, 0.25, 0.75))
        reached = int((~np.isnan(reach.context[:, 0])).sum()) - reach.not_reached(share)
        yield "context", reach.place, None, f"{100 * share:.0f} %", middle, low, high, reached
    found = reach.recent(recent)
    yield "recency", reach.place, None, f"last {recent}", found.value, found.low, found.high, texts
