"""Comparison of the checkpoints of a sweep: stability, norms, and the capacity in the generalisation bound.

Generalization Error Analysis for Selective State-Space Models (Honarpisheh et al.), Experiments 1 and 2.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.options import Range, Seed
from ssmscope.errors import InputError
from ssmscope.probes.bound import Delta, Lengths, Lipschitz, LossBound

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.probes.checkpoints.result import StabilityTable


@analysis(
    "checkpoints",
    kinds=("stability-table",),
    question="Which of many checkpoints are stable?",
    several=True,
    loads=False,
)
def stability_table(
    checkpoints: str | os.PathLike[str] | Model | Sequence[str | os.PathLike[str] | Model],
    *,
    length: Annotated[
        int | Sequence[int] | None, "T for C, one for all or one each (default: C is in the curves only).", Range(1)
    ] = None,
    examples: Annotated[
        int | None, "m, the number of training examples; without it there is no bound.", Range(1)
    ] = None,
    delta: Delta = 0.05,
    loss_bound: LossBound = 1.0,
    lipschitz: Lipschitz = 1.0,
    lengths: Lengths = None,
    seed: Seed = 0,
) -> StabilityTable:
    """Compare checkpoints in one table: spectral abscissa, growth, norms and capacity of each.

    The behaviour of each is measured as in `stability`, on 4 random sequences of `length` tokens, at most 512; norms,
    ln ρ, C and the bound are those of `generalization_bound`, for selective SSMs only. The curves show ln C at 41
    lengths up to 10,000 or 10 times the largest `length`. Checkpoints are loaded one after the other; one that cannot
    be read gets a row with the reason.

    Args:
        checkpoints: anything that `load` takes, a directory of them, or models; one or several.

    Raises:
        InputError: no checkpoint, none that can be read, or another number of lengths than of checkpoints.
    """
    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.progress import progress_bar
    from ssmscope.probes.bound.measure import curve_lengths
    from ssmscope.probes.checkpoints import measure
    from ssmscope.probes.checkpoints.result import StabilityTable

    given = measure.sources_of(checkpoints)
    sources = measure.expand_directories(given)
    each = [length] * len(sources) if length is None or isinstance(length, int) else list(length)
    if len(each) != len(sources):
        raise InputError(f"{len(each)} lengths were given for {len(sources)} checkpoints; give one for each, or one")
    grid = curve_lengths(lengths, max((T for T in each if T is not None), default=1))
    setting: dict[str, Any] = dict(delta=delta, loss_bound=loss_bound, lipschitz=lipschitz)
    with progress_bar() as bar:
        every = bar.track([*zip(sources, each)], description="checkpoints")
        found = [measure.measure_checkpoint(source, T, examples, setting, grid, seed) for source, T in every]
    rows, curves = zip(*found)
    if all(row.reason for row in rows):
        what = "the checkpoint" if len(rows) == 1 else f"none of the {len(rows)} checkpoints"
        raise InputError(f"{what} can{'not' if len(rows) == 1 else ''} be read: {rows[0].reason}")
    options = call_options(length=each[0] if len(set(each)) == 1 else each)
    name = {"model": f"{len(rows)} checkpoint{'s' if len(rows) > 1 else ''}"}
    provenance = record_provenance(name, options=options, seed=seed)
    return StabilityTable(
        provenance={**provenance, "given": list(map(measure.name_of, given))},
        rows=rows,
        lengths=grid,
        curves=np.array(curves),
    )
