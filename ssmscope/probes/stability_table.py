"""Many checkpoints side by side: how stable each is, its norms, and the capacity in the generalisation bound.

Generalization Error Analysis for Selective State-Space Models (Honarpisheh et al.), Experiments 1 and 2, for the
checkpoints of a sweep.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.errors import InputError
from ssmscope.probes.bound_terms import Norms
from ssmscope.probes.generalization import CURVES, check_setting, check_whole, generalization_bound, grid_of
from ssmscope.probes.stability import VERDICTS, stability
from ssmscope.probes.stability_inputs import LENGTH
from ssmscope.results import TABLE_ROWS, Result, record_provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.model import Model
    from ssmscope.probes.generalization import GeneralizationBound


def stability_table(
    checkpoints: Sequence[str | os.PathLike[str] | Model],
    *,
    length: int | Sequence[int] | None = None,
    examples: int | None = None,
    delta: float = 0.05,
    loss_bound: float = 1.0,
    lipschitz: float = 1.0,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
) -> StabilityTable:
    """A row per checkpoint with its spectral abscissa, norms, growth, verdict and capacity.

    The verdict is that of `stability` on 4 random sequences of `length` tokens, at most 512; norms, ln ρ, C and the
    bound are those of `generalization_bound`, of selective SSMs alone. Checkpoints are loaded one after the other, and
    one that cannot be read gets a row that says why.

    Args:
        checkpoints: anything that `load` takes, or models.
        length: T at which C is given: of all, or a list with one for each; without, C is in the curves only.
        examples: m, how many examples the models were trained on; without, there is no bound.
        delta, loss_bound, lipschitz: as in `generalization_bound`.
        lengths: at which T the curves have ln C; by default 41 lengths up to 10,000 or 10 times the largest `length`.
        seed: draws random tokens.

    Raises:
        InputError: no checkpoint, none that can be read, or an option out of range.
    """
    one = isinstance(checkpoints, str | os.PathLike) or not isinstance(checkpoints, Iterable)
    sources: list[Any] = [checkpoints] if one else list(checkpoints)
    if not sources:
        raise InputError("no checkpoint was given; give files, directories, names or models")
    each = _length_of_each(length, len(sources))
    if examples is not None:
        check_whole("examples", examples)
    check_setting(delta, loss_bound, lipschitz)
    check_whole("seed", seed, least=0)
    grid = grid_of(lengths, max((T for T in each if T is not None), default=1))
    setting: dict[str, Any] = dict(delta=delta, loss_bound=loss_bound, lipschitz=lipschitz)
    rows, curves = [], []
    for source, T in zip(sources, each):
        row, curve = _row(source, T, examples, setting, grid, seed)
        rows.append(row)
        curves.append(curve)
    if all(row.reason for row in rows):
        what = "the checkpoint" if len(rows) == 1 else f"none of the {len(rows)} checkpoints"
        raise InputError(f"{what} can{'not' if len(rows) == 1 else ''} be read: {rows[0].reason}")
    options = {"length": each[0] if len(set(each)) == 1 else each, "examples": examples, **setting}
    name = {"model": f"{len(rows)} checkpoint{'s' if len(rows) > 1 else ''}"}
    return StabilityTable(
        provenance=record_provenance(name, options=options, seed=seed),
        rows=tuple(rows),
        lengths=grid,
        curves=np.array(curves),
    )


@dataclass(frozen=True)
class Checkpoint:
    """What is known of one checkpoint. Numbers that it has not are NaN."""

    name: str
    reason: str
    """Why it could not be read; empty where it could."""
    architecture: str = ""
    fingerprint: str = ""
    verdict: str = ""
    abscissa: float = math.nan
    """s_A, the largest of all layers'."""
    largest_gain: float = math.nan
    """The largest log-gain of a step on random tokens."""
    possible_gain: float = math.nan
    """The largest log-gain of a step over all inputs, of a selective SSM ln ρ of the bound."""
    growth: float = math.nan
    """The mean log-gain of the state that grows most, on random tokens."""
    norms: Norms | None = None
    """None where the model is not the theorem's."""
    length: int | None = None
    log_capacity: float = math.nan
    log_capacity_printed: float = math.nan
    bound: float = math.nan
    vacuous: bool | None = None


@dataclass(frozen=True)
class StabilityTable(Result, kind="stability-table"):
    """Checkpoints side by side. `len`, iteration and `[i]` are over the rows."""

    rows: tuple[Checkpoint, ...]
    lengths: np.ndarray
    """(lengths,) T of the curves."""
    curves: np.ndarray
    """(checkpoints, lengths) ln C with all constants; NaN where there is none."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Checkpoint:
        return self.rows[index]

    @property
    def names(self) -> list[str]:
        """The checkpoints' names without the folder that all are in."""
        names = [row.name for row in self.rows]
        folder = os.path.commonpath(names) if len({os.path.isabs(name) for name in names}) == 1 else ""
        if len(set(names)) == 1:
            return [os.path.basename(name) for name in names]
        return [os.path.relpath(name, folder) if folder else name for name in names]

    @property
    def read(self) -> list[Checkpoint]:
        """The checkpoints that could be read."""
        return [row for row in self.rows if not row.reason]

    @property
    def headline(self) -> str:
        counts = {name: sum(row.verdict == name for row in self.rows) for name in VERDICTS}
        counts["unreadable"] = len(self.rows) - len(self.read)
        listed = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        return f"Stability of {self.provenance.get('model', 'checkpoints')}: {listed}"

    def to_frame(self) -> DataFrame:
        """A row per checkpoint, in the order given.

        Columns: name, reason (why it could not be read, else empty), architecture, verdict, spectral_abscissa,
        log_rho (the largest log-gain of a step over all inputs), largest_gain and growth (on random tokens); length,
        log_capacity (ln C with all constants), log_capacity_printed (Eq. 14), bound (Eq. 13; c_l where vacuous) and
        vacuous; p, states (N), channels (d), the norms B_u to M_A; fingerprint. What a checkpoint has not is missing.
        """
        import pandas as pd

        rows = []
        for row in self.rows:
            norms = {name: math.nan if row.norms is None else getattr(row.norms, name) for name in _NORMS}
            sizes = {"states": row.norms.state, "channels": row.norms.channels} if row.norms is not None else {}
            rows.append(
                {
                    "name": row.name,
                    "reason": row.reason,
                    "architecture": row.architecture,
                    "verdict": row.verdict,
                    "spectral_abscissa": row.abscissa,
                    "log_rho": row.possible_gain,
                    "largest_gain": row.largest_gain,
                    "growth": row.growth,
                    "length": row.length,
                    "log_capacity": row.log_capacity,
                    "log_capacity_printed": row.log_capacity_printed,
                    "bound": row.bound,
                    "vacuous": row.vacuous,
                    "states": sizes.get("states"),
                    "channels": sizes.get("channels"),
                    **norms,
                    "fingerprint": row.fingerprint,
                }
            )
        types = {"length": "Int64", "vacuous": "boolean", "states": "Int64", "channels": "Int64"}
        return pd.DataFrame(rows).astype(types)

    def curve(self) -> DataFrame:
        """A row per checkpoint and length: columns name, length, log_capacity (with all constants)."""
        import pandas as pd

        found = [
            (row.name, int(T), value)
            for row, curve in zip(self.rows, self.curves)
            for T, value in zip(self.lengths, curve.tolist())
            if row.norms is not None
        ]
        return pd.DataFrame(found, columns=["name", "length", "log_capacity"])

    def figure(self) -> Figure:
        """ln C against T, a line per checkpoint coloured by s_A; and ln C against s_A."""
        from ssmscope.probes.stability_table_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        from ssmscope.interp.views.tokens import shorten, visible
        from ssmscope.probes.stability_terminal import number

        table = Table(title=Text(self.headline), title_justify="left", box=None, pad_edge=False)
        headings = ("checkpoint", "verdict", "s_A", "ln ρ", "growth", "T", "ln C", "Eq. 14", "bound")
        for heading in headings:
            table.add_column(heading, justify="left" if heading in headings[:2] else "right", no_wrap=True)
        for name, row in list(zip(self.names, self.rows))[:TABLE_ROWS]:
            said = "–" if row.vacuous is None else "vacuous" if row.vacuous else number(row.bound)
            numbers = (row.abscissa, row.possible_gain, row.growth)
            length = "–" if row.length is None else f"{row.length:,}"
            capacities = ("–" if math.isnan(c) else f"{c:.2f}" for c in (row.log_capacity, row.log_capacity_printed))
            cells = (row.verdict or "unreadable", *map(number, numbers), length, *capacities, said)
            table.add_row(*map(Text, (shorten(visible(name), 34), *cells)))
        yield table
        if len(self.rows) > TABLE_ROWS:
            yield Text(f"{TABLE_ROWS} of {len(self.rows)} checkpoints", style="dim")
        yield Text(
            "\nln ρ: the largest log-gain of a step over all inputs; growth: the mean log-gain of the state that grows "
            "most, on random tokens; ln C: with all constants, and by Eq. 14."
        )
        yield from map(Text, self._remarks())

    def _remarks(self) -> Iterable[str]:
        from ssmscope.interp.views.tokens import visible

        outside = sum(row.norms is None for row in self.read)
        if outside:
            what = "1 is no selective SSM" if outside == 1 else f"{outside} are no selective SSMs"
            yield f"{what}, outside of the theorem: no C."
        for name, row in zip(self.names, self.rows):
            if row.reason:
                yield f"{visible(name)}: {visible(row.reason)}"

    def _repr_html_(self) -> str:
        return "".join(f"<p>{html.escape(line)}</p>" for line in self._remarks()) + super()._repr_html_()


_NORMS = ("p", "B_u", "B_B", "B_C", "B_w", "B_q", "B_A", "M_B", "M_C", "M_w", "M_q", "M_A")


def _row(
    source: Any, length: int | None, examples: int | None, setting: dict[str, Any], grid: np.ndarray, seed: int
) -> tuple[Checkpoint, np.ndarray]:
    from ssmscope.model import Model
    from ssmscope.models.load import load
    from ssmscope.probes.bound_norms import theorem_model

    curve, bounded = np.full(len(grid), math.nan), {}
    try:
        model = source if isinstance(source, Model) else load(source)
        probe = None if model.channels is not None else min(max(length or LENGTH, 2), LENGTH)
        found = stability(model, length=probe, positions=1, seed=seed)
        if theorem_model(model) is not None:
            at = length or int(grid[-1])
            bound = generalization_bound(model, length=at, examples=examples or 1, **setting, lengths=grid.tolist())
            curve = bound.curves[CURVES.index("with constants")]
            bounded = _bounded(bound, length is not None, examples is not None)
    except InputError as error:
        name = source.name if isinstance(source, Model) else str(source)
        return Checkpoint(name, str(error)), curve
    row = Checkpoint(
        name=model.name,
        reason="",
        architecture=model.architecture,
        fingerprint=str(found.provenance["fingerprint"]),
        verdict=found.verdict,
        abscissa=_largest(layer.spectral_abscissa for layer in found.layers),
        largest_gain=_largest(layer.largest_gain for layer in found.layers),
        possible_gain=_largest(layer.possible_gain for layer in found.layers),
        growth=_largest(layer.growth.value for layer in found.layers),
        **bounded,
    )
    return row, curve


def _bounded(bound: GeneralizationBound, at_length: bool, at_examples: bool) -> dict[str, Any]:
    """The fields of a checkpoint that the bound gives, as far as a length and a number of examples are known."""
    assert bound.capacity is not None and bound.gap is not None
    found: dict[str, Any] = {"norms": bound.norms}
    if at_length:
        found |= {
            "length": bound.length,
            "log_capacity": bound.capacity.log,
            "log_capacity_printed": bound.capacity.log_printed,
        }
        if at_examples:
            found |= {"bound": bound.gap.bound, "vacuous": bound.gap.vacuous}
    return found


def _largest(values: Iterable[float]) -> float:
    """The largest that is a number; NaN where none is."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _length_of_each(length: Any, number: int) -> list[int | None]:
    if length is None:
        return [None] * number
    if isinstance(length, Sequence) and not isinstance(length, str):
        if len(length) != number:
            raise InputError(f"{len(length)} lengths were given for {number} checkpoints; give one for each, or one")
        for T in length:
            check_whole("a length", T)
        return [int(T) for T in length]
    check_whole("length", length)
    return [int(length)] * number
