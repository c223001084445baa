"""Ablation of heads, layers, recurrences, convolutions, gates and skips over a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, PIXEL_CLASSIFIER, TEXT_CLASSIFIER, Examples
from ssmscope.api.options import REPEATED, Limit, Range, Seed, TokensWritten
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.api.inputs import ExampleData
    from ssmscope.core.model import Model
    from ssmscope.data.pairs import PairData
    from ssmscope.interp.ablate.result import Ablation


def check_ablate(*, by: str, generate: int | None, prompt: object, **_: object) -> None:
    """Raise InputError for a prompt that is not continued, or texts with other examples' values."""
    if prompt is not None and generate is None:
        raise InputError("prompt=… is a text to continue; give generate=…, the number of tokens, too")
    if generate is not None and by == "resample":
        raise InputError("what is written has no other example whose values it could get; give by='mean' or by='zero'")


@analysis(
    "ablate",
    reads=Examples(pairs=True),
    question="What can it do without?",
    models=(TEXT_CLASSIFIER, PIXEL_CLASSIFIER, LANGUAGE_MODEL),
    dtype="float32",
    check=check_ablate,
    sharded=True,
)
def ablate(
    model: Model,
    data: ExampleData | PairData,
    *,
    what: Annotated[
        Literal["head", "layer", "recurrence", "convolution", "gate", "skip", "attention", "feed-forward"],
        "Part to ablate: heads' outputs, mixers' outputs, a recurrence's output with all heads, convolutions' inputs, "
        "output gates before their activation, the skip D x, or the outputs of a hybrid's softmax attention or of "
        "feed-forward parts.",
    ] = "head",
    by: Annotated[
        Literal["zero", "mean", "resample"],
        "Replace by zero, by the mean over the data, or by another example's value.",
    ] = "mean",
    metric: Annotated[
        Literal["loss", "accuracy", "probability"], "Measure of the right answer that defines importance."
    ] = "loss",
    steps: Annotated[int, "Number of steps of the curve of parts ablated together.", Range(1, 1000)] = 12,
    generate: TokensWritten = None,
    prompt: Annotated[
        Sequence[str | Sequence[int]] | None,
        "Text to continue with generate; may be repeated. Default the first half of the first example.",
        REPEATED,
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
) -> Ablation:
    """Ablate parts of a model, one by one and together, over examples.

    Importance is how much worse the answers become: the loss −ln p of the right class, or of the right next token as a
    mean over a row, its probability, and accuracy, each less that of the plain run, example by example, with a 95 %
    bootstrap interval over examples (a classifier's accuracy itself with Wilson's). A part whose whole interval lies
    below 0.02 can go, alone and on such data.

    A part is replaced at every token by zero, by its mean over all tokens of the data, or by what it is in another
    example, drawn once, at the same share of the length (resample ablation, Chan et al. 2022, causal scrubbing). Zero
    is far from anything that later layers have seen, the mean less so.

    Then parts are ablated together, the least important first. Their order is found on half of the examples and the
    curve measured on the other half, together with one in random order: a curve on the examples that chose its order
    would be too good.

    A head is a group of channels with one decay, as in Mamba-2; where heads are single channels, as in most Mambas,
    ablate layers or recurrences. A layer is a mixer, whose output is replaced; of RWKV it is a block, with its
    channel mixing, and what entered it passes on. Softmax attention and feed-forward parts, experts included, are
    ablated block by block; a module that several blocks share is ablated in all of them.

    Pairs of a clean and a corrupted text (see `patch`) have one measure, the share of the difference of logits between
    both runs that the ablated clean run has lost, its interval over pairs; "resample" takes the corrupted text's value.

    With `generate` prompts are also continued, without and with the most harmful part ablated, at every token that is
    read or written, and with all parts that can go alone.

    Args:
        data: labelled examples of a classifier; of a language model rows of tokens, `ssmscope.data.tokens.TokenData`.

    Raises:
        InputError: data of another kind than the model reads, fewer than two examples, heads that are single channels,
            or a part that the model's layers do not have.
    """
    from dataclasses import replace

    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.ties import descending
    from ssmscope.data.pairs import PairData
    from ssmscope.interp.ablate import measure
    from ssmscope.interp.ablate.result import Ablation
    from ssmscope.interp.pairs import ScoredPairs
    from ssmscope.interp.partial_runs import note_on_attention
    from ssmscope.interp.scoring import scored_examples

    data = data if limit is None else data.sample(limit, seed=seed)
    if len(data) < 2:
        raise InputError(f"{data.name} ({data.split}) has one example; an interval needs two or more")
    pairs = isinstance(data, PairData)
    if pairs and metric != "loss":
        raise InputError("pairs are measured by the share of the answer; leave metric=… out")
    examples = ScoredPairs.of(model, data) if isinstance(data, PairData) else scored_examples(model, data)
    measure_of = "share" if pairs else metric
    if what not in measure.OUTSIDE:
        note_on_attention(model, "ablated")
    part = measure.part_of(model, what)
    units = measure.units_of(model, examples.batch.rows([0]), part)
    provenance = record_provenance(model.source, options=call_options(metric=measure_of), seed=seed, data=data)
    runs = measure.AblationRuns(examples, part, by, units, seed, provenance)
    plain, single = runs.single(units)
    halves = np.array_split(np.random.default_rng(seed).permutation(len(examples)), 2)
    harms = (single - plain) * np.array(examples.signs)
    at = examples.measures.index(measure_of)
    harm, size = harms[:, halves[0], at].mean(1), np.abs(plain[halves[0], at]).mean()
    order = descending(-harm, float(size)).tolist()
    drawn = np.random.default_rng(seed).permutation(len(units)).tolist()
    counts = sorted({round(step * len(units) / steps) for step in range(steps + 1)})
    sets = [[units[number] for number in own[:count]] for own in (order, drawn) for count in counts]
    together = runs.together(sets, halves[1].tolist()).reshape(2, len(counts), len(halves[1]), len(examples.measures))
    first, other = map(len, halves)
    notes = (f"the curve's order is that of {first:,} examples, its values are those of the other {other:,}",)
    result = Ablation(
        provenance=provenance,
        what=what,
        by=by,
        metric=measure_of,
        units=tuple(units),
        plain=examples.levels(plain, seed),
        harms=examples.means(harms.transpose(1, 0, 2), seed),
        order=tuple(order),
        counts=tuple(counts),
        curves=examples.levels(together.transpose(2, 0, 1, 3), seed, halves[1].tolist()),
        notes=notes,
        measures=examples.measures,
    )
    return result if generate is None else replace(result, written=runs.written(result, prompt, generate))
