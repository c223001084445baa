"""Position-bias attack: accuracy with the tokens of one region of the sequence replaced.

State-space models depend on their last tokens (Baleen, section 4.3 and Table 3, after Wang et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import PIXEL_CLASSIFIER, TEXT_CLASSIFIER, Data
from ssmscope.api.limits import DROP, SHARE
from ssmscope.api.options import BatchSize, Limit, Metavar, Seed
from ssmscope.attacks.position.regions import check_places

if TYPE_CHECKING:
    from ssmscope.attacks.position.result import PositionBias
    from ssmscope.core.model import Model
    from ssmscope.data.pixels import PixelData
    from ssmscope.data.text import TextData
    from ssmscope.data.tokens import SequenceData


@analysis(
    "position",
    reads=Data("examples", series=True),
    question="Where in the sequence is it weakest?",
    models=(TEXT_CLASSIFIER, PIXEL_CLASSIFIER),
    check=check_places,
    sharded=True,
    scores={"position.drop": DROP, "position.drop[REGION]": DROP, "position.success[REGION]": SHARE},
    dimensions=(
        Dimension("Noise at the ends", r"position\.drop", "average drop of accuracy"),
        Dimension("Another class at the ends", r"position\.drop\[other\]", "average drop of accuracy"),
    ),
)
def position_bias(
    model: Model,
    data: PixelData | TextData | SequenceData,
    *,
    regions: Annotated[
        str | Sequence[str | tuple[float, float]] | None,
        "Tokens 0:32,992:1024 or shares 0%:10%; by default the paper's, else the first and last 10 % and 25 %.",
        Metavar("A:B,…"),
    ] = None,
    replacement: Annotated[
        Literal["noise", "zeros", "mean", "other"], "Replacement of the tokens; other: tokens of another class."
    ] = "noise",
    window: Annotated[
        int | str | None, "Width of a window that also slides along the sequence.", Metavar("N|P%")
    ] = None,
    stride: Annotated[int | str | None, "Stride of the windows; by default their width.", Metavar("N|P%")] = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    seed: Seed = 0,
) -> PositionBias:
    """Measure how much a classifier's accuracy drops when the tokens of one region are replaced.

    Regions are replaced one after the other (Baleen, Table 3). They refer to the sequence without class and special
    tokens. The drop is relative, 1 − accuracy / clean accuracy. Every number has a 95 % interval over examples:
    Wilson's of accuracies and other shares, else a bootstrap; drops are paired, clean and attacked accuracy coming from
    the same resamples. With "other", the attack succeeds on an example that is right when clean and is then given the
    class of the inserted tokens.

    Noise is drawn once per example for all places: regions, batches and stride do not change it.

    Args:
        regions: "0:32,0:96" or [(0, 32), (0, 96)], pairs of tokens, or shares of each example's own tokens, "0%:10%".
            By default the paper's regions 0:32, 0:96, 928:1024, 992:1024 of 1024 tokens; for other lengths the first
            and last 10 % and 25 %.
        replacement: noise (pixels: N(0, 1) as in the paper; tokens: an embedding of N(0, 1) times the standard
            deviation of the embedding table), zeros (black; a zero embedding), mean (the data's mean pixel; the
            table's mean embedding), other (the same places of an example of another class).
        window: a number of tokens, or a share of each example's own such as 10%.
        batch_size: by default chosen for the device.

    Raises:
        InputError: the model is not a classifier or has other inputs or classes, a region or window does not fit, or
            "other" is used on data of one class.
    """
    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.attacks.position import measure
    from ssmscope.attacks.position.regions import regions_of, windows_of
    from ssmscope.attacks.position.result import PositionBias
    from ssmscope.core.batching import refuse_above
    from ssmscope.data.pixels import PixelData
    from ssmscope.interp.labelled import class_ids

    refuse_above(2**16, batch_size=batch_size)
    kind = measure.replaced_inputs(model, data)
    if limit is not None:
        data = data.sample(limit, seed=seed)
    labels = class_ids(model, data)
    inputs = kind(model, data, replacement, seed)
    longest = int(inputs.lengths.max())
    usual = measure.PAPER if longest == measure.PAPER[-1][1] and inputs.lengths.min() == longest else measure.SHARES
    named = regions_of(usual if regions is None else regions, longest)
    windows = windows_of(window, stride, longest) if window is not None else ()
    every = (*named, *windows)
    donors = None
    if replacement == "other":
        reach = [[stop for _, stop in (r.bounds(n) for r in every) if stop <= n] for n in inputs.lengths.tolist()]
        needed = np.array([max(stops, default=0) for stops in reach])
        donors = measure.draw_donors(labels, inputs.lengths, needed, seed)
    options = call_options(regions=[str(region) for region in named])
    provenance = record_provenance(model.source, options=options, seed=seed, data=data)
    clean, attacked = inputs.predict(every, donors, batch_size, provenance)
    donor_labels = None if donors is None else labels[donors]
    found = measure.measure(labels, clean, attacked, donor_labels, named, windows, seed)
    return PositionBias(
        provenance=provenance,
        replacement=replacement,
        unit=inputs.unit,
        length=longest,
        width=data.shape[1] if isinstance(data, PixelData) and data.shape[0] > 1 else None,
        **found,
        notes=(*inputs.remarks, *measure.notes_on(found["clean"], (*found["regions"], *found["windows"]), len(data))),
    )
