"""Is a trained model stable? What its states can grow by in a step, how fast they forget, how large they become.

Generalization Error Analysis for Selective State-Space Models (Honarpisheh et al.), section 4 and Experiment 1, made
into measurements that every architecture has.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.bootstrap import RESAMPLES, Estimate, estimate, resampled_means
from ssmscope.errors import InputError
from ssmscope.results import Result, record_provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.encoding import Batch
    from ssmscope.model import Model
    from ssmscope.probes.stability_layers import Recorded

VERDICTS = ("stable", "marginal", "unstable")
"""From best to worst."""

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Of the half-lives of a layer's states."""

POSITIONS = 33
"""At how many positions the states' norms are taken: of 1,024 tokens the scans between them are of 32, their chunk."""


def stability(
    model: Model,
    texts: str | Sequence[str] | Batch | None = None,
    *,
    length: int | None = None,
    samples: int = 4,
    positions: int | Sequence[int] = POSITIONS,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> Stability:
    """How a model's states grow and fade, layer by layer and head by head, and a verdict.

    The gain of a step is what the recurrence multiplies its state by, a_t = exp(Δ_t A) of every head and state; where
    the transition is a matrix (delta rules) it is the largest singular value. All gains are natural logarithms.

    - The spectral abscissa of a head is the largest diagonal entry of its continuous state matrix A, s_A of the paper.
      GLA, RetNet, RWKV and delta rules have no such matrix: theirs is the largest log-gain of a step on the inputs.
    - The half-life of a state, ln 2 / −E[log a_t] with the mean over all tokens of the inputs, is in tokens; infinite
      where the mean is not negative. A delta rule has one per head, by the mean over the directions of its memory.
    - Growth, ln ρ as observed, is the mean log-gain of a layer's state that grows most, averaged over texts, with its
      95 % bootstrap interval over texts. (Quantiles of half-lives describe the states, and have none.)
    - The worst case over all inputs is ln ρ of the generalisation bound for a selective SSM (s_A δ_min for s_A ≤ 0,
      else s_A M_Δ); elsewhere the supremum of s_A Δ: 0, approached as Δ → 0, for s_A ≤ 0, unless Δ is clamped, and
      unbounded for s_A > 0.
    - Norms are ‖H_t‖ (Frobenius) over all states of a layer, after token t was written, averaged over texts.

    A layer is unstable if a log-gain exceeds the tolerance, on the inputs or in the worst case; marginal if a half-life
    is longer than the longest text or growth is within the tolerance of 0; else stable: it cannot grow and forgets. A
    model is what its worst layer is.

    Args:
        model: any model.
        texts: texts, or a batch of the model's own `encode`. Without, random tokens.
        length: how many tokens the random sequences have; 512 by default, for pixel models those of an image.
        samples: how many random sequences.
        positions: at how many positions norms are taken, evenly from the first token of the longest text to its last,
            or which, counted from 0.
        tolerance: log-gains up to this count as 1.
        seed: draws random tokens and resamples.

    Raises:
        InputError: as `Model.encode`; a text of one token, a length beside texts, an option out of range, or decays
            that are not finite.
    """
    from ssmscope.probes.stability_inputs import inputs_of
    from ssmscope.probes.stability_layers import run

    if not (isinstance(tolerance, int | float) and 0 <= tolerance < math.inf):
        raise InputError(f"tolerance is {tolerance!r}; allowed is a number from 0 on")
    inputs = inputs_of(model, texts, length=length, samples=samples, seed=seed)
    chosen = _positions(positions, inputs.longest)
    found = run(model, inputs.batch, chosen)
    layers = tuple(
        _layer(index, part, len(parts), one, inputs.longest, tolerance, seed, bool(norms.isinf().any()))
        for index, (parts, norms) in enumerate(zip(found.layers, found.norms))
        for part, one in enumerate(parts)
    )
    options: dict[str, Any] = {
        "length": length,
        "samples": samples if texts is None else None,
        "positions": positions if isinstance(positions, int) else list(positions),
        "tolerance": tolerance,
    }
    return Stability(
        provenance=record_provenance(model.source, options=options, seed=seed),
        inputs=inputs.name,
        given=texts is not None,
        texts=len(inputs.batch.tokens),
        longest=inputs.longest,
        verdict=max((layer.verdict for layer in layers), key=VERDICTS.index),
        layers=layers,
        positions=np.array(chosen),
        norms=np.stack([_norms(each.numpy(), seed) for each in found.norms]),
        notes=_notes([one for parts in found.layers for one in parts]),
    )


@dataclass(frozen=True)
class LayerStability:
    """One recurrence of one layer; most layers have one."""

    layer: int
    part: int
    """Its number among the layer's recurrences, from 0."""
    parts: int
    """How many recurrences the layer has."""
    states: int
    """How many decays a head has, each with its half-life: as many as states, or one where all states decay alike."""
    verdict: str
    why: str
    """The number behind the verdict, in words."""
    abscissa: np.ndarray | None
    """(heads,) spectral abscissae; None where there is no continuous A."""
    largest: np.ndarray
    """(heads,) the largest log-gain of a step on the inputs; −∞ where a head makes no step."""
    possible: np.ndarray | None
    """(heads,) the largest log-gain of a step over all inputs; None where no bound is known."""
    bounded_by: str
    """Why it is no larger."""
    mean: np.ndarray
    """(heads,) the mean log-gain of each head's slowest state."""
    half_life: np.ndarray
    """(heads,) the median half-life of each head's states, in tokens."""
    quantiles: tuple[float, ...]
    """The `QUANTILES` of the half-lives of all heads and states; each is that of one of the states."""
    never: int
    """Of heads × states, how many have a half-life longer than the longest text."""
    growth: Estimate

    @property
    def heads(self) -> int:
        return len(self.largest)

    @property
    def name(self) -> str:
        """As "3", or "3.1" for the second of several recurrences."""
        return str(self.layer) if self.parts == 1 else f"{self.layer}.{self.part}"

    @property
    def spectral_abscissa(self) -> float:
        """s_A, the largest of all heads'; NaN where there is none."""
        return math.nan if self.abscissa is None else float(self.abscissa.max())

    @property
    def largest_gain(self) -> float:
        """The largest log-gain of a step on the inputs."""
        return float(self.largest.max())

    @property
    def possible_gain(self) -> float:
        """The largest log-gain of a step over all inputs; NaN where no bound is known."""
        return math.nan if self.possible is None else float(self.possible.max())


@dataclass(frozen=True)
class Stability(Result, kind="stability"):
    """The stability of every layer, and the model's. `len`, iteration and `[i]` are over `layers`."""

    inputs: str
    """What the model was run on, in words."""
    given: bool
    """Whether these are the user's texts, and not random tokens."""
    texts: int
    longest: int
    """Tokens of the longest text."""
    verdict: str
    layers: tuple[LayerStability, ...]
    positions: np.ndarray
    """(positions,) at which norms were taken, from 0."""
    norms: np.ndarray
    """(layers, positions, 3) mean norm over texts and the ends of its interval (NaN with one text)."""
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> LayerStability:
        return self.layers[index]

    @property
    def number(self) -> int:
        """The model's layers; a layer may have several recurrences."""
        return len(self.norms)

    def counts(self) -> dict[str, int]:
        """How many recurrences have which verdict."""
        return {name: sum(layer.verdict == name for layer in self.layers) for name in VERDICTS}

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        same = self.counts()[self.verdict]
        if len(self.layers) == 1:
            return f"Stability of {model}: {self.verdict}"
        where = f"all {same}" if same == len(self.layers) else f"{same} of {len(self.layers)}"
        return f"Stability of {model}: {self.verdict} in {where} {self.unit}"

    @property
    def unit(self) -> str:
        """What `layers` are: layers, or recurrences where some layer has several."""
        return "recurrences" if any(layer.parts > 1 for layer in self.layers) else "layers"

    def to_frame(self) -> DataFrame:
        """A row per layer (or recurrence of it).

        Columns: layer, part (of the layer's recurrences, from 0), heads, states (decays per head), verdict,
        spectral_abscissa, largest_gain (of a step on the inputs), possible_gain (over all inputs), growth with its 95 %
        interval growth_low and growth_high: these are natural logarithms per token, spectral_abscissa per unit of Δ;
        half_life_5 … half_life_95 in tokens; never (states with a half-life longer than the longest text) and
        never_share; last_norm, at the last position.
        """
        import pandas as pd

        rows = []
        for one in self.layers:
            row = {
                "layer": one.layer,
                "part": one.part,
                "heads": one.heads,
                "states": one.states,
                "verdict": one.verdict,
                "spectral_abscissa": one.spectral_abscissa,
                "largest_gain": one.largest_gain,
                "possible_gain": one.possible_gain,
                "growth": one.growth.value,
                "growth_low": one.growth.low,
                "growth_high": one.growth.high,
            }
            row |= {f"half_life_{round(100 * q)}": value for q, value in zip(QUANTILES, one.quantiles)}
            share = one.never / (one.heads * one.states)
            rows.append({**row, "never": one.never, "never_share": share, "last_norm": self.norms[one.layer, -1, 0]})
        return pd.DataFrame(rows)

    def heads(self) -> DataFrame:
        """A row per head: columns layer, part, head, spectral_abscissa, largest_gain, possible_gain, mean_gain (of its
        slowest state) and half_life (the median of its states), as in `to_frame`."""
        import pandas as pd

        parts = []
        for one in self.layers:
            columns = {
                "layer": one.layer,
                "part": one.part,
                "head": range(one.heads),
                "spectral_abscissa": math.nan if one.abscissa is None else one.abscissa,
                "largest_gain": one.largest,
                "possible_gain": math.nan if one.possible is None else one.possible,
                "mean_gain": one.mean,
                "half_life": one.half_life,
            }
            parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def norms_over_time(self) -> DataFrame:
        """A row per layer and position: columns layer, position (from 0), norm, low, high."""
        import pandas as pd

        rows = [
            (layer, int(position), *self.norms[layer, at].tolist())
            for layer in range(self.number)
            for at, position in enumerate(self.positions)
        ]
        return pd.DataFrame(rows, columns=["layer", "position", "norm", "low", "high"])

    def figure(self) -> Figure:
        """Half-lives by layer, on a logarithmic axis, and the states' norms over time."""
        from ssmscope.probes.stability_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from ssmscope.probes.stability_terminal import view

        return view(self)

    def _repr_html_(self) -> str:
        from ssmscope.probes.stability_terminal import in_words

        said = (f"On {self.inputs}. {in_words(self)}", *(f"Note: {note}." for note in self.notes))
        return "".join(f"<p>{html.escape(line)}</p>" for line in said) + super()._repr_html_()


def _layer(
    layer: int,
    part: int,
    parts: int,
    found: Recorded,
    longest: int,
    tolerance: float,
    seed: int,
    overflows: bool,
) -> LayerStability:
    assert found.sums is not None and found.largest is not None
    mean = found.sums.cpu().numpy() / found.steps
    half = half_lives(mean)
    largest = found.largest.cpu().numpy()
    possible = None if found.possible is None else found.possible.cpu().numpy()
    growth = _mean(np.array(found.growth)[:, None], seed)[0]
    never = int((half > longest).sum())
    verdict, why = _verdict(largest, possible, growth.value, never, half.size, longest, tolerance, overflows)
    return LayerStability(
        layer=layer,
        part=part,
        parts=parts,
        states=mean.shape[1],
        verdict=verdict,
        why=why,
        abscissa=None if found.abscissa is None else found.abscissa.cpu().numpy(),
        largest=largest,
        possible=possible,
        bounded_by=found.bounded_by,
        mean=mean.max(1),
        half_life=np.array([_ranked(row, 0.5) for row in half]),
        quantiles=tuple(_ranked(half.ravel(), q) for q in QUANTILES),
        never=never,
        growth=growth,
    )


def _notes(found: Sequence[Recorded]) -> tuple[str, ...]:
    notes = []
    if any(one.mixes for one in found):
        notes.append("a delta rule's half-lives are means over the directions of its memory")
    bare = [one.bare.log().cpu().numpy() for one in found if one.bare is not None]
    if bare:
        low, median, high = (_ranked(half_lives(np.concatenate(bare)), q) for q in (0.05, 0.5, 0.95))
        notes.append(
            "an RWKV's memory is a weighted mean, which fades by what is added to it; its weights by themselves fade "
            f"alike at every token, with half-lives of {median:.3g} tokens (median; 5 % to 95 %: {low:.3g} to "
            f"{high:.3g})"
        )
    return tuple(notes)


def half_lives(mean: np.ndarray) -> np.ndarray:
    """ln 2 / −E[log a], in tokens, any shape; infinite where the mean log-gain is not negative."""
    fading = mean < 0
    return np.where(fading, math.log(2) / -np.where(fading, mean, -1.0), math.inf)


def _ranked(values: np.ndarray, q: float) -> float:
    """The smallest of the values that is at least as large as a share q of them: one of them, be they infinite."""
    return float(np.sort(values)[max(math.ceil(q * len(values)) - 1, 0)])


def _verdict(
    largest: np.ndarray,
    possible: np.ndarray | None,
    growth: float,
    never: int,
    states: int,
    longest: int,
    tolerance: float,
    overflows: bool,
) -> tuple[str, str]:
    if largest.max() > tolerance:
        return "unstable", f"a step multiplies a state by {_gain(largest.max())} on the inputs"
    if possible is not None and possible.max() > tolerance:
        return "unstable", f"a step may multiply a state by {_gain(possible.max())}"
    if overflows:
        return "unstable", "its states overflow on the inputs"
    if never:
        share = f"{never:,} of {states:,} states" if states > 1 else "its one state"
        return "marginal", f"{share} keep half of what they hold beyond the {longest:,} tokens of the longest text"
    if growth >= -tolerance:
        return "marginal", f"its slowest state changes by e^{growth:.2g} a token"
    can = "and none can grow" if possible is not None else "and none grows on the inputs"
    return "stable", f"every state forgets half within the {longest:,} tokens of the longest text, {can}"


def _gain(log_gain: float) -> str:
    if math.isinf(log_gain):
        return "any number"
    factor = math.exp(min(log_gain, 700.0))
    return f"{factor:.4g}" if factor > 1.0005 and log_gain < 20 else f"e^{log_gain:.3g}"


def _positions(positions: int | Sequence[int], longest: int) -> list[int]:
    if isinstance(positions, int) and not isinstance(positions, bool):
        if positions < 1:
            raise InputError(f"positions is {positions}; allowed is how many, from 1 on, or a list of them")
        if positions == 1:
            return [longest - 1]
        return sorted(set(np.linspace(0, longest - 1, positions).round().astype(int).tolist()))
    whole = isinstance(positions, Iterable) and not isinstance(positions, str)
    chosen = list(positions) if whole else []  # type: ignore[arg-type]
    if not chosen or any(not isinstance(at, int | np.integer) or not 0 <= at < longest for at in chosen):
        raise InputError(f"positions is {positions!r}; allowed are places from 0 to {longest - 1}, or how many of them")
    return sorted({int(at) for at in chosen})


def _norms(norms: np.ndarray, seed: int) -> np.ndarray:
    """(positions, 3) from the norms of every text, (texts, positions)."""
    return np.array([(e.value, e.low, e.high) for e in _mean(norms, seed)])


def _mean(columns: np.ndarray, seed: int) -> list[Estimate]:
    """The mean of each column (texts, columns) over the texts that have one, with its interval where there are two."""
    finite = np.where(np.isinf(columns), math.nan, columns)
    texts = (~np.isnan(finite)).sum(0)
    rows = resampled_means(finite, resamples=RESAMPLES if texts.max(initial=0) > 1 else 0, seed=seed)
    means = []
    for row, number, beyond in zip(rows.T, texts, np.isinf(columns).any(0)):
        one = Estimate(float(row[0]), math.nan, math.nan)
        means.append(Estimate(math.inf, math.inf, math.inf) if beyond else estimate(row) if number > 1 else one)
    return means
