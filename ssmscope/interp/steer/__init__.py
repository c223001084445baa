"""Steering of answers by a direction, and its cost on other data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL, Texts
from ssmscope.api.options import NO_EFFECT, REPEATED, Limit, Metavar, Range, Reads, Seed, TokensWritten, chosen_layers
from ssmscope.core.batching import HELD_OUT_LENGTH
from ssmscope.errors import InputError, refuse_unused

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.data.pairs import PairData
    from ssmscope.data.pixels import PixelData
    from ssmscope.data.text import TextData
    from ssmscope.data.tokens import SequenceData, TokenData
    from ssmscope.interp.steer.result import Steering


STRENGTHS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)


def check_steer(*, strengths: Sequence[float], vector: Any, layer: Any, site: str, data: Any, **given: Any) -> None:
    """Raise InputError if a strength is given twice, the direction not once, a state's in several layers, or an answer
    for pairs, which have theirs."""
    from ssmscope.data.pairs import is_pairs

    pairs = is_pairs(data)
    if pairs and given["answer"] is not None:
        raise InputError("data=… gives pairs, which have their answers; leave answer=… out")
    if site == "state" and layer is not None and not isinstance(layer, int) and len(layer) > 1:
        raise InputError("a state is one layer's; give one layer, or site='residual'")
    texts = [name for name in ("toward", "away") if given[name]]
    if vector is not None:
        own = {**dict.fromkeys(texts, True), "layer": layer is not None, "site": site != "residual"}
        refuse_unused("with vector=…, whose file has it", **own, method=given["method"] != "mean")
    refuse_unused("without export=…", export_strength=given["export"] is None and given["export_strength"] != 1)
    if vector is None and len(texts) < 2 and (texts or not pairs):
        raise InputError("no text to steer to or from; give toward=… and away=…, or vector=…")
    if len(set(strengths)) < len(strengths):
        raise InputError(f"strengths has a number twice: {', '.join(f'{each:g}' for each in strengths)}; keep one")


@analysis(
    "steer",
    reads=Texts(pairs=True),
    question="Can its answers be steered, and at what cost?",
    models=(TEXT_CLASSIFIER, TOKEN_CLASSIFIER, LANGUAGE_MODEL, TOKEN_MODEL),
    dtype="float32",
    check=check_steer,
)
def steer(
    model: Model,
    texts: TextsLike | None = None,
    *,
    toward: Annotated[
        Sequence[str | Sequence[int]] | None,
        "Text to steer towards; may be repeated. Token ids for a model without a tokenizer.",
        REPEATED,
    ] = None,
    away: Annotated[Sequence[str | Sequence[int]] | None, "Text to steer away from; may be repeated.", REPEATED] = None,
    vector: Annotated[
        str | Path | None,
        "File of a control vector, in place of texts; its site and layer count.",
        Reads("file"),
        Metavar("FILE"),
    ] = None,
    site: Annotated[
        Literal["residual", "state"],
        "Value that the direction is added to: a block's input (the residual stream), at every token, or the layer's "
        "memory after a text's first token.",
    ] = "residual",
    layer: Annotated[
        int | Sequence[int] | None, "State-space layer, or several; default the one in the middle.", Range(0)
    ] = None,
    method: Annotated[
        Literal["mean", "pca"], "Difference of means, or its part along the pairs' first principal component."
    ] = "mean",
    strengths: Annotated[Sequence[float], "Factors of the direction.", Range(-1000, 1000), Metavar("X,…")] = STRENGTHS,
    answer: Annotated[
        int | str | None, "Class or next token in question; default the predicted one.", Metavar("NAME")
    ] = None,
    data: Annotated[
        str | TextData | PixelData | SequenceData | TokenData | PairData | list[Any] | None,
        "Held-out examples or text, to measure the cost; default the data that MODEL was trained on. Or pairs (see "
        "patch), in place of texts.",
        Reads("data"),
        Metavar("DATA"),
    ] = None,
    split: Annotated[str | None, "Split of a known data set; default the test split.", Metavar("NAME")] = None,
    length: Annotated[int, "Tokens per row of a language model's text.", Range(2, 2**17)] = HELD_OUT_LENGTH,
    limit: Limit = 200,
    random: Annotated[int, "Number of random directions of the same norm.", Range(1, 1000)] = 5,
    generate: TokensWritten = None,
    save: Annotated[
        str | Path | None,
        "File for the control vector: safetensors, or GGUF if it ends in .gguf (extra: gguf).",
        NO_EFFECT,
        Metavar("FILE"),
    ] = None,
    export: Annotated[
        str | Path | None,
        "New directory for a copy of the model with the direction, times export-strength, in its weights.",
        NO_EFFECT,
        Metavar("DIR"),
    ] = None,
    export_strength: Annotated[float, "Strength in the exported copy.", Range(-1000, 1000), NO_EFFECT] = 1.0,
    seed: Seed = 0,
) -> Steering:
    """Steer answers by a direction that is added at a layer, in several strengths.

    The direction is the difference of means of contrasting texts (Rimsky et al. 2024, contrastive activation addition):
    of the residual stream that the layer's block reads at the texts' last tokens, which is then added, times its
    strength, at every token; or of the layer's states after the texts, added to the state after the first token, as if
    such texts had been read before. With several layers each has its own direction, all added together. What a
    convolution keeps stays. Strength 1 is the difference itself.

    Measured are the answer's probability on the texts, and what the direction costs on held-out data: a classifier's
    accuracy and loss, a language model's loss of the next token. They are compared with random directions
    (Gaussian, each scaled to the same norm); both have a mean with a 95 % bootstrap interval over texts or examples,
    paired: a direction that does no more than random ones of its size steers nothing. A classifier's accuracy with the
    direction has Wilson's interval.

    With pairs of a clean and a corrupted text (see `patch`) the corrupted texts are steered, towards the clean ones
    unless other texts or a vector are given. Measured is the share of the way to the clean run, of the difference of
    logits, with its interval over pairs; a direction of one half of the pairs is tried on the other.

    With `generate` every text is also continued, unedited and with every strength: the direction is added at each token
    that is read or written; of a state, after the first token alone, and felt from there on.

    Args:
        save: file that the control vector is written to, see `ssmscope.interp.steer.vectors`.
        vector: file of a control vector to steer by.
        export: a bias of the block before the layer has the direction, see `bake`.
        data: may also be a DataFrame, a list of (text, label) or examples; without any, and where the model's own are
            not known, costs are left out.

    Raises:
        InputError: a layer that the model does not have, texts whose means are the same, an answer of several tokens, a
            text of one token with the site "state", strengths that are given twice, a vector of another width, or an
            export that no bias can hold.
    """
    from functools import partial

    import numpy as np
    import torch
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.take_trace import as_batch
    from ssmscope.data.pairs import is_pairs, read_pairs
    from ssmscope.interp.edited_texts import EditedText, edited_texts
    from ssmscope.interp.pairs import ScoredPairs
    from ssmscope.interp.scoring import (
        answer_ids,
        means_with_intervals,
        probability_and_logit,
        scored_examples,
    )
    from ssmscope.interp.steer import measure
    from ssmscope.interp.steer.result import Steering
    from ssmscope.interp.steer.vectors import ControlVector, bake

    pairs, own = None, False
    if is_pairs(data):
        given = read_pairs(data).take(limit)
        if texts is not None:
            raise InputError("data=… gives pairs, whose corrupted texts are steered; leave the texts out")
        if own := vector is None and not toward:
            toward, away = given.clean, given.corrupted
            if len(given) < 2:
                raise InputError(f"{given.name} has one pair, and a direction is tried on others; give two or more")
        pairs, data = ScoredPairs.of(model, given), None
        batch = pairs.pairs.corrupted
    elif texts is None:
        raise InputError("no text; give text=…, or pairs, data=…")
    else:
        batch = as_batch(model, texts)
    strengths = tuple(map(float, strengths))
    known = None if vector is None else ControlVector.load(vector, model)
    if known is not None:
        site, layer = known.site, known.layer
    layer = model.layer_numbers[model.num_layers // 2] if layer is None else layer
    numbers = tuple(dict.fromkeys(measure.layers_of(layer)))
    layer = numbers[0] if len(numbers) == 1 else numbers
    chosen_layers(numbers, model.layer_numbers)
    if site == "state":
        model.check_recurrent_state("a state")
    if site == "state" and min(batch.lengths) < 2:
        raise InputError("a text has one token, after which no state is read; give longer texts, or another site")
    between = partial(ControlVector.between, model, site=site, layer=layer, pca=method == "pca")
    known = known or between(toward or (), away or ())
    every = list(range(len(batch.tokens)))
    tried = [(known.direction, every)]
    if own and toward and away:
        halves = every[::2], every[1::2]
        sides = [[[side[row] for row in half] for side in (toward, away)] for half in halves]
        tried = [(between(*side).direction, half) for side, half in zip(sides, halves[::-1])]
    written: tuple[EditedText, ...] = ()
    if generate is not None:
        edits = {
            f"strength {each:g}".replace("-", "−"): measure.lasting(known.edit(each)) for each in strengths if each
        }
        written = edited_texts(model, batch, edits, generate)

    def runs_of(direction: measure.Direction) -> measure.SteeredRuns:
        generator = torch.Generator().manual_seed(seed)
        directions = [direction, *(measure.draw_like(direction, generator) for _ in range(random))]
        return measure.SteeredRuns(model, site, layer, directions, strengths)

    if pairs is None:
        ids, names = answer_ids(model, batch, answer)
        means, whole = means_with_intervals, 1.0
    else:
        names, means, whole = [right for right, _ in pairs.pairs.names], pairs.means, float(pairs.whole.mean())
    held_out = measure.held_out_examples(model, data, split, length, limit, seed)
    if export is not None:
        bake(model, known, export_strength, export)
    if save is not None:
        known.save(save, model)

    def asked(rows: list[int], logits: torch.Tensor, text: int) -> float:
        if pairs is not None:
            return float(pairs.measured(logits, [rows[text]])[0, 0])
        return float(probability_and_logit(model, logits, ids[rows[text]])[0])

    found = np.empty((1 + random, len(strengths), len(every)))
    for direction, rows in tried:
        found[..., rows] = runs_of(direction).answers(batch.rows(rows), partial(asked, rows))
    costs = np.empty((3, len(strengths), 0, 3))
    if held_out is not None:
        examples = scored_examples(model, held_out)
        values = runs_of(known.direction).costs(examples)
        costs = measure.summarise(values, seed)
        costs[0] = examples.levels(values[0].transpose(1, 0, 2), seed)
    options = call_options(site=site, layer=layer, strengths=list(strengths))
    return Steering(
        provenance=record_provenance(model.source, options=options, seed=seed, data=held_out),
        site=site,
        layer=layer,
        strengths=strengths,
        answers=tuple(names),
        norm=float(measure.norm(known.direction)),
        direction=tuple(part.double().cpu().numpy() for part in known.direction),
        probability=measure.summarise(found[..., None], seed, means)[..., 0, :],
        by_direction=found.mean(-1) / whole,
        costs=costs,
        classifies=model.is_classifier,
        written=written,
        measure="probability" if pairs is None else "share",
    )
