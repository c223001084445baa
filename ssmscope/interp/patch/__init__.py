"""Activation patching: values of one run are put into another, layer by layer and token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL
from ssmscope.api.options import REPEATED, Metavar, Range, Reads, Seed, TokensWritten
from ssmscope.errors import InputError, refuse_unused

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model
    from ssmscope.data.pairs import PairData
    from ssmscope.interp.patch.result import PairPatching, Patching


def check_method(*, method: str, metric: str, **given: object) -> None:
    """Raise InputError for probabilities with the gradient's approximation, which is of logits, for a text without the
    other, and for options of one text with pairs."""
    texts = [name for name in ("clean", "corrupted") if given.get(name) is not None]
    if given.get("data") is not None:
        alone = (*texts, "positions", "align", "answer", "contrast", "generate")
        refuse_unused(
            "with pairs, data=…",
            **{name: given.get(name) is not None for name in alone},
            method=method != "exact",
            metric=metric != "normalised",
            site=given["site"] != "state" and given.get("sites") is not None,
        )
        return
    if len(texts) < 2:
        raise InputError("give two texts, clean=… and corrupted=…, or pairs of them, data=…")
    if given.get("sites") is not None or given.get("limit") is not None:
        raise InputError("sites=… and limit=… are for pairs; give data=… too, or site=…")
    if method == "gradient" and metric == "probability":
        raise InputError("the gradient approximates logits; give metric='difference' or metric='normalised'")


@analysis(
    "patch",
    check=check_method,
    asks_at=True,
    kinds=("patch", "patch-pairs"),
    question="Where, in layers and tokens, does the answer come from?",
    first=4,
    models=(TEXT_CLASSIFIER, TOKEN_CLASSIFIER, LANGUAGE_MODEL, TOKEN_MODEL),
    dtype="float32",
)
def patch(
    model: Model,
    *,
    clean: Annotated[
        str | list[int] | Batch | Tensor | ndarray | None,
        "Text with the answer; token ids for a model without a tokenizer.",
    ] = None,
    corrupted: Annotated[str | list[int] | Batch | Tensor | ndarray | None, "Text with another answer."] = None,
    data: Annotated[
        str | PairData | list[Any] | None,
        "Pairs instead: a csv or jsonl file with the columns clean, corrupted and target, or a generated set.",
        Reads("pairs"),
        Metavar("PAIRS"),
    ] = None,
    sites: Annotated[
        Sequence[Literal["state", "output", "residual", "convolution", "attention", "feed-forward"]] | None,
        "Sites to patch in pairs; default site.",
    ] = None,
    site: Annotated[
        Literal["state", "output", "residual", "convolution", "head"],
        "Value to patch: the memory after a token, a mixer's output, a block's input (the residual stream), a "
        "convolution's input, or single heads' outputs.",
    ] = "state",
    direction: Annotated[
        Literal["denoise", "noise"], "Put clean values into the corrupted run, or corrupted values into the clean run."
    ] = "denoise",
    metric: Annotated[
        Literal["normalised", "difference", "probability"],
        "Quantity shown: the difference of logits scaled from 0 (no change) to 1 (the other run), that difference, or "
        "the answer's probability.",
    ] = "normalised",
    positions: Annotated[
        str | int | list[int] | slice | None,
        "Words, positions (3, 3:5 or 3,7) or last; default all tokens.",
        Metavar("SPAN"),
    ] = None,
    align: Annotated[
        Sequence[str] | None,
        "Words of the clean text=words of the corrupted one that correspond; may be repeated.",
        REPEATED,
        Metavar("TEXT=TEXT"),
    ] = None,
    method: Annotated[
        Literal["exact", "gradient", "both"],
        "Run every cell, approximate all of them by one gradient (attribution patching), or both, with their "
        "correlation.",
    ] = "exact",
    answer: Annotated[
        int | str | None, "Class or next token of the clean text; default the predicted one.", Metavar("NAME")
    ] = None,
    contrast: Annotated[
        int | str | None, "Class or next token of the corrupted text; default the predicted one.", Metavar("NAME")
    ] = None,
    generate: TokensWritten = None,
    limit: Annotated[int | None, "Maximum number of pairs, the first ones.", Range(1)] = None,
    seed: Seed = 0,
) -> Patching | PairPatching:
    """Patch activations of the run on one text into the run on another, cell by cell.

    Activation patching (Meng et al. 2022, causal tracing; Zhang & Nanda 2024): of two texts with different answers, one
    is run with a single activation, of one layer at one token, taken from the other. Every cell has the answer's
    probability and the difference of the logits of answer and contrast, normalised as (m − m_base) / (m_other −
    m_base); a further row has those of all layers patched at that token together.

    Texts of unequal length correspond by the spans of `align`, which cut both into parts. In each part equal tokens at
    the start correspond, then the last to the last and so on backwards; what is left over of the longer one is not
    patched (`ssmscope.interp.patch.measure.aligned`).

    The state, which only recurrences have, is patched after a token: all that the layer keeps of the tokens up to it,
    the last inputs of its convolution included. The token's own output is already computed then, and later ones
    continue from it; all layers together are the whole memory, and the run is that of the other text's tokens followed
    by this one's. Heads are patched at all chosen tokens at once.

    The method "gradient" is for large models: two forward passes and a backward one give (a_other − a_base) · ∂m/∂a of
    every cell, m the difference of the logits (attribution patching, Nanda 2023; Syed et al. 2023, Eq. 2). It is
    patching to first order and misses what saturates: "both" has its correlation with the exact grid, over all cells
    from the first token that differs on. All layers together have no approximation.

    Of a model of numbers, `clean` and `corrupted` are series or images, or batches of one; they differ in some steps.

    With `data` many pairs are patched in batches, and every cell is the mean share of the way to the other run, with a
    95 % bootstrap interval over pairs. Its columns are position classes: further columns of the data, such as subject,
    have words (or positions) of each clean text, patched together; without, every position of texts of one length.

    With `generate` both texts are also continued, and the patched one with the cell of a single layer that changes the
    most, and with all layers patched there: the patch is in the prompt alone, and felt from there on.

    Raises:
        InputError: series of different length, texts that are the same or have no token in common, one answer of both,
            an answer of several tokens, positions that are not there, a convolution in a model that has none, heads
            that are single channels, or the probability as the metric of the method "gradient".
    """
    from dataclasses import replace

    import numpy as np
    from ssmscope.api.inputs import one_text
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.progress import progress_bar
    from ssmscope.interp.partial_runs import note_on_attention
    from ssmscope.interp.patch import measure as patching
    from ssmscope.interp.patch.result import Patching
    from ssmscope.interp.spans import positions_of, span_name

    if data is not None:
        from ssmscope.interp.patch.over_pairs import patch_pairs

        if sites is None and site == "head":
            raise InputError("heads are patched in two texts; give another site, or sites=…, with pairs")
        return patch_pairs(model, data, sites or [site], direction, limit, seed)
    assert clean is not None and corrupted is not None
    pair = one_text(model, clean), one_text(model, corrupted)
    pairs = patching.aligned(*pair, align or ())
    first, partners = patching.first_difference(*pair, pairs), dict(pairs)
    length, other = (batch.input_ids.shape[1] for batch in pair)
    asked = list(range(length)) if positions is None else list(positions_of(positions, pair[0]))
    paired = [place for place in asked if place in partners]
    if not paired:
        raise InputError("no token there corresponds to one of the corrupted text; give other positions, or align=…")
    if site == "state":
        paired = [place for place in paired if place < length - 1 and partners[place] < other - 1]
        if not paired:
            raise InputError("after the last token no state is read; give positions before it")
    ids, names = patching.answer_pair(model, pair, answer, contrast)
    turned = direction == "denoise"
    theirs = {b: a for a, b in pairs} if turned else partners
    chosen = [partners[place] if turned else place for place in paired]
    note_on_attention(model, "patched")
    runs = patching.PatchRuns(model, *(pair[::-1] if turned else pair), theirs)
    both = (model.run(batch, last_only=True).logits for batch in (runs.base, runs.source))
    plain = np.array([patching.measure(model, logits, ids)[0] for logits in both])
    # Tokens before the first difference are the same in both runs, unless something reads later tokens.
    differing = {pair[turned] for pair in pairs[first:]}
    later = [place for place in chosen if place in differing or not model.continues]
    columns, layers = list(range(runs.heads())) if site == "head" else chosen, model.num_layers
    values = np.broadcast_to(plain[0], (layers + (site != "head"), len(columns), 2)).copy()
    column = {place: number for number, place in enumerate(columns)}
    if method != "gradient":
        found = runs.of_states(later) if site == "state" else runs.of_values(site, later)
        with progress_bar() as bar:
            task = bar.add_task("patched cells", total=len(values) * len(columns if site == "head" else later))
            for cells, logits in found:
                rows = [layers if layer is None else runs.layers.index(layer) for layer, _ in cells]
                values[rows, [column[place] for _, place in cells]] = patching.measure(model, logits, ids)
                bar.advance(task, len(cells))
    approximate, agree = np.zeros((0, 0)), (np.nan, np.nan)
    if method != "exact":
        approximate = np.zeros((layers, len(columns)))
        own = slice(None) if site == "head" else [column[place] for place in later]
        if later:
            approximate[:, own] = patching.attributed(runs, site, later, ids)
        if method == "gradient":
            values[...] = np.nan
            values[:layers, :, 1] = plain[0, 1] + approximate
        elif later:
            agree = patching.agreement(approximate[:, own], values[:layers, own, 1], plain[0, 1])
    typed = all(isinstance(text, str | list) for text in (clean, corrupted))
    texts = [text if typed else f"{model.reads} of {length} tokens" for text in (clean, corrupted)]
    where = None if positions is None else span_name(positions)
    options = call_options(clean=texts[0], corrupted=texts[1], positions=where)
    result = Patching(
        provenance=record_provenance(model.source, options=options),
        clean=pair[0].tokens[0],
        corrupted=pair[1].tokens[0],
        site=site,
        direction=direction,
        metric=metric,
        positions=tuple(paired),
        partners=() if all(map(int.__eq__, *zip(*partners.items()))) else tuple(partners[place] for place in paired),
        answer=names[0],
        contrast=names[1],
        base=plain[0],
        other=plain[1],
        values=values,
        attributed=approximate,
        agreement=agree,
        numbers=runs.layers if runs.layers != tuple(range(layers)) else (),
    )
    if generate is None:
        return result
    (row, cell), _ = result.strongest(1)[0]
    edits = {result.name(row, cell): runs.edit(site, chosen, runs.layers[row], cell)}
    if site != "head":
        edits[f"all layers, {result.place(cell)}"] = runs.edit(site, chosen, None, cell)
    return replace(result, written=patching.written(runs, edits, generate))
