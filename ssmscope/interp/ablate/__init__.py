"""What a model can do without: heads, layers, recurrences, convolutions, gates and skips, ablated over a data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, PIXEL_CLASSIFIER, TEXT_CLASSIFIER, Examples
from ssmscope.api.options import Limit, Range, Seed

if TYPE_CHECKING:
    from ssmscope.api.inputs import ExampleData
    from ssmscope.core.model import Model
    from ssmscope.interp.ablate.result import Ablation


@analysis(
    "ablate",
    reads=Examples(),
    question="What can it do without?",
    models=(TEXT_CLASSIFIER, PIXEL_CLASSIFIER, LANGUAGE_MODEL),
    dtype="float32",
    sharded=True,
)
def ablate(
    model: Model,
    data: ExampleData,
    *,
    what: Annotated[
        Literal["head", "layer", "recurrence", "convolution", "gate", "skip"],
        "What is ablated: heads' outputs, mixers' outputs, a recurrence's output with all heads, what convolutions "
        "read, output gates before their activation, or D x.",
    ] = "head",
    by: Annotated[
        Literal["zero", "mean", "resample"],
        "Replaced by zero, by the mean over the data, or by another example's value.",
    ] = "mean",
    metric: Annotated[
        Literal["loss", "accuracy", "probability"], "Of the right answer; what importance is measured by."
    ] = "loss",
    steps: Annotated[int, "Of the curve of parts ablated together.", Range(1, 1000)] = 12,
    limit: Limit = None,
    seed: Seed = 0,
) -> Ablation:
    """What can it do without? Parts of a model replaced, one by one and together, over examples.

    Importance is how much worse the answers become: the loss −ln p of the right class, or of the right next token as a
    mean over a row, its probability, and accuracy, each less that of the plain run, example by example, with a 95 %
    bootstrap interval over examples. A part can go whose whole interval lies below 0.02: alone, and on such data.

    A part is replaced at every token by zero, by its mean over all tokens of the data, or by what it is in another
    example, drawn once, at the same share of the length (resample ablation, Chan et al. 2022, causal scrubbing). Zero
    is far from anything that later layers have seen, the mean less so.

    Then parts are ablated together, the least important first. Their order is found on half of the examples and the
    curve measured on the other half, beside one in an order drawn at random: a curve on the examples that chose its
    order would be too good.

    A head is what shares one decay, as Mamba-2's heads; where these are single channels, as in most Mambas, there are
    layers and recurrences to ablate. A layer is a mixer, whose output is replaced; of RWKV it is a block, with its
    channel mixing, and what entered it passes on. Layers below the ablated one are run once for each batch.

    Args:
        data: labelled examples of a classifier; of a language model rows of tokens, `ssmscope.data.tokens.TokenData`.

    Raises:
        InputError: data of another kind than the model reads, fewer than two examples, heads that are single channels,
            or a part that the model's layers do not have.
    """
    from ssmscope.interp.ablate.measure import ablation

    return ablation(model, data, what, by, metric, steps, limit, seed)
