"""Loss of the next token against its position in a long text.

Differential Mamba compares models this way in its Figure 3 (a), after Lin et al. (2025, Forgetting Transformer): while
the curve falls, distant tokens still help; where it rises, the context is longer than the model can handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import LANGUAGE_MODEL
from ssmscope.api.limits import ANY, NOT_NEGATIVE
from ssmscope.api.options import Metavar, Piece, Progress, Range, Reads, Seed
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.probes.loss.result import TokenLoss

Lines = Annotated[
    str | Path | list[str],
    "wikitext2, books, a .txt file (one long document), or a file with a column text, one document per row.",
    Reads("lines"),
    Metavar("DATA"),
]
LinesSplit = Annotated[str | None, "Split of a known text (default: test).", Metavar("NAME")]


def check_smooth(*, smooth: int, remembers: Sequence[int] | None, length: int, **options: Any) -> None:
    """Raise InputError for an even number of positions to average over, or no token to leave out."""
    if remembers and max(remembers) >= length:
        raise InputError(f"remembers is {max(remembers)}; allowed are numbers below the {length} tokens of a window")
    if smooth % 2 == 0:
        raise InputError(f"smooth is {smooth}; allowed is an odd number of positions, as many on both sides")


@analysis(
    "loss",
    question="How well does it use its context?",
    several=True,
    models=(LANGUAGE_MODEL,),
    dtype="float32",
    check=check_smooth,
    sharded=True,
    scores={"loss": NOT_NEGATIVE, "loss.slope": ANY},
    dimensions=(Dimension("Clean text", r"loss", "loss per token"),),
)
def token_loss(
    models: Model | Sequence[Model],
    *,
    data: Lines = "wikitext2",
    split: LinesSplit = None,
    length: Annotated[int, "Tokens per window.", Range(1)] = 2048,
    limit: Annotated[int | None, "Use only N windows, drawn by the seed.", Range(1)] = None,
    smooth: Annotated[int, "Positions of the moving average; odd.", Range(1)] = 101,
    remembers: Annotated[
        Sequence[int] | None, "Also measure what leaving out all but the last N tokens changes.", Range(1)
    ] = None,
    unit: Annotated[Literal["nats", "bits"], "Unit of the loss."] = "nats",
    piece: Piece = 2048,
    seed: Seed = 0,
    progress: Progress = True,
) -> TokenLoss:
    """Measure how well a model uses its context: the loss of the next token by its position in long texts.

    The loss is −ln p(token | the i tokens before it) for i = 1 … `length`, averaged over windows of long texts. Each
    document is cut into consecutive windows of `length` tokens, without the remainder; a model reads each from an empty
    state and predicts every next token. All models read the same windows, so they must share a tokenizer.

    At each position the losses are averaged over the windows and over `smooth` positions around it (`smoothed`). The
    summary has the mean loss in bins of positions and its slope, that of the least-squares line of the loss on log₂
    position from position 101 on: the change of the loss when the context doubles. Intervals are 95 % bootstrap
    intervals over windows. With several models, each bin and the slope also have the paired difference of the first
    model minus another; all numbers share their resamples.

    With `remembers` it also measures effective remembrance (Buitrago and Gu 2025): the total variation between the
    next token's distribution after a whole window and after its last n tokens alone. Beside it stand, in hybrids, the
    same with attention alone cut off from the tokens before, and the exact share of the states that these tokens have.

    Args:
        data: may also be a DataFrame with a column `text`, or a list of texts, one document each.

    Raises:
        InputError: a model that is not a language model with a tokenizer, models that do not share one, texts without a
            window, or a loss that is not finite.
    """
    import hashlib
    import time

    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.progress import on_stderr
    from ssmscope.probes.long_rows import distinct_names, language_models
    from ssmscope.probes.loss import measure, remembrance
    from ssmscope.probes.loss.result import TokenLoss

    every = language_models(models)
    texts, name = measure.documents(data, split)
    windows, left_out = measure.shared_windows(every, texts, length)
    found, windows = len(windows), measure.drawn(windows, limit, seed)
    spans = sorted({*(remembers or ())})
    names, places = distinct_names(model.name for model in every), measure.positions_of(length)
    options = call_options(data=name)
    digest = hashlib.sha256(np.ascontiguousarray(windows, dtype="<i8").tobytes()).hexdigest()[:16]
    losses = np.empty((len(every), len(windows), length), dtype=np.float32)
    say = on_stderr(progress).print
    for number, model in enumerate(every):
        began = time.perf_counter()
        say(f"{names[number]}: {len(windows):,} windows of {length:,} tokens")
        provenance = record_provenance(model.source, options={**options, "windows": digest}, seed=seed)
        nats = measure.all_losses(model, windows, piece=piece, provenance=provenance, shown=progress)
        losses[number] = nats * measure.UNITS_PER_NAT[unit]
        if not np.isfinite(losses[number]).all():
            at = int((~np.isfinite(losses[number]).all(0)).argmax()) + 1
            raise InputError(
                f"the loss of {names[number]} is not finite from position {at:,} on: the model overflows; give a "
                f"length below {at:,}"
            )
        say(f"  {losses[number].mean():.4f} {unit} a token in {time.perf_counter() - began:.1f} s")
    return TokenLoss(
        provenance={
            **record_provenance({"model": " and ".join(names)}, options=options, seed=seed),
            "models": [{**model.source, "model": name} for model, name in zip(every, names)],
            "data": {"name": options["data"], "windows": len(windows), "of": found, "fingerprint": digest},
        },
        models=names,
        unit=unit,
        smooth=smooth,
        positions=places,
        losses=losses.astype(np.float64).mean(1),
        **measure.summarise(losses, places, smooth, seed),
        notes=tuple(measure.notes_on(len(windows), left_out)),
        remembrance=tuple(remembrance.remembrances(model, windows, spans, seed) for model in (every if spans else ())),
    )
