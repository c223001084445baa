"""Loss and accuracy with the recurrent state kept in few bits, exactly simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL
from ssmscope.api.options import Metavar, Range, Seed
from ssmscope.errors import InputError, refuse_unused
from ssmscope.probes.loss import Lines, LinesSplit

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.probes.precision.result import Precision

Format = Literal["bfloat16", "float16", "e4m3", "e5m2", "int8", "int4"]
"""Formats in which a state may be kept."""
Per = Literal["tensor", "head", "row"]
"""Numbers that share a scale."""


def check_every(
    *, every: int, length: int, state: Sequence[str], heads: str | None, per: Sequence[str], **options: object
) -> None:
    """Raise InputError if no token comes after the first rounding."""
    if every >= length:
        raise InputError(f"every is {every}; allowed are numbers below the {length} tokens of a window")
    formats = {*state, heads} & {"e4m3", "e5m2", "int8", "int4"}
    refuse_unused("with formats of 16 bits", per=[*per] != ["head"] and not formats)


@analysis(
    "precision",
    question="In how few bits may its state be kept?",
    models=(LANGUAGE_MODEL,),
    dtype="float32",
    check=check_every,
    scores=("precision[ROUNDING]",),
)
def precision(
    model: Model,
    *,
    data: Lines = "wikitext2",
    split: LinesSplit = None,
    length: Annotated[int, "Tokens per window.", Range(2)] = 256,
    limit: Annotated[int, "Number of windows, drawn by the seed.", Range(1)] = 16,
    state: Annotated[
        Sequence[Format], f"Formats of the state: {', '.join(get_args(Format))}.", Metavar("NAME,…")
    ] = get_args(Format),
    per: Annotated[Sequence[Per], "Numbers that share a scale, in formats of 8 and 4 bits."] = ("head",),
    every: Annotated[int, "Round after every N tokens.", Range(1)] = 1,
    stochastic: Annotated[bool, "Round up or down at random, the mean kept, by the seed."] = False,
    heads: Annotated[Format | None, "Also round each head alone in this format.", Metavar("NAME")] = None,
    seed: Seed = 0,
) -> Precision:
    """Measure what it costs to keep the recurrent state in few bits: loss, accuracy, and retrieval by distance.

    The state is rounded while it is carried, after every `every` tokens, as a runtime would that stores it so; all else
    stays in float32. Numbers of 8 and 4 bits share a scale, the largest number's, per sequence and layer (tensor),
    head, or row of a head's state. Attention's keys and values are not rounded.

    Changes are those of each window against the run without rounding; 95 % bootstrap intervals over windows, paired. A
    format is called safe if its interval stays below 0.01 nats a token. The control is the state set to zero after each
    token: where that interval is within 0.01 too, the texts hardly use the state. Retrieval is the accuracy on tokens
    of which the pair with the token before occurred earlier in the window, by the distance to there.

    Args:
        heads: rounds each head by itself, with the first of `per`: as many runs as there are heads.

    Raises:
        InputError: a model that is not a language model with a tokenizer, that reads both ways or has no recurrent
            state, texts without a window, or `every` that is as long as one.
    """
    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.mixers import check_causal
    from ssmscope.probes.long_rows import language_models
    from ssmscope.probes.loss.measure import documents, drawn, shared_windows
    from ssmscope.probes.precision import measure
    from ssmscope.probes.precision.result import Precision
    from ssmscope.probes.precision.rounding import BITS, ZERO, Rounding, state_rounded

    (model,) = language_models(model)
    model.check_recurrent_state("precision")
    check_causal(model.module, "rounding while it is carried")
    texts, name = documents(data, split)
    windows, _ = shared_windows([model], texts, length)
    found, windows = len(windows), drawn(windows, limit, seed)
    how = (every, seed if stochastic else None)
    ways = dict.fromkeys(Rounding(each, one, *how) for each in state for one in (per[:1] if BITS[each] == 16 else per))
    ways |= {Rounding(ZERO): None}
    plain, bins = measure.token_scores(model, windows), measure.bin_masks(windows)
    arms = [
        measure.arm(way, plain, measure.token_scores(model, windows, state_rounded(way)), [*bins.values()], seed)
        for way in ways
    ]
    alone = None if heads is None else Rounding(heads, per[0], *how)
    about = {"name": name, "windows": len(windows), "of": found, "length": length}
    return Precision(
        provenance={**record_provenance(model.source, options=call_options(data=name), seed=seed), "data": about},
        loss=float(plain[0].mean()),
        accuracy=float(plain[1].mean()),
        arms=tuple(arms),
        distances=tuple(bins),
        repeated=tuple(float(plain[1][mask].mean()) for mask in bins.values()),
        heads=np.empty((0, 0)) if alone is None else measure.broken_heads(model, windows, alone, plain),
        heads_in="" if alone is None else alone.name,
        layers=model.layer_numbers,
    )
