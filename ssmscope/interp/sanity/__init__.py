"""Sanity check of explanations: a model's parts are randomised one after another (Adebayo et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import Texts
from ssmscope.api.limits import CORRELATION
from ssmscope.api.options import Range, Seed
from ssmscope.errors import InputError
from ssmscope.interp.methods import MethodOptions, Methods, check_methods

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.interp.objective import Objective
    from ssmscope.interp.sanity.result import SanityCheck


@analysis(
    "sanity",
    reads=Texts(),
    question="Do explanations depend on what the model learnt?",
    dtype="float32",  # Gradients need the precision.
    check=check_methods,
    scores={"sanity[methods]": CORRELATION},
    dimensions=(Dimension("Explanations, sanity", r"sanity\[.*\]", "likeness to those of random weights"),),
)
def cascading_randomisation(
    model: Model,
    texts: TextsLike | Objective,
    *,
    methods: Methods = None,
    layers: Annotated[
        Literal["all"] | Sequence[int], "Layers to randomise; `all` includes the embeddings.", Range(0)
    ] = "all",
    option: MethodOptions = None,
    seed: Seed = 0,
) -> SanityCheck:
    """Randomise a model's parts one after another, from the head down, and correlate the scores with those of the
    trained model.

    This is cascading randomisation (Adebayo et al. 2018). The parts are the head, everything between the layers and the
    head, the layers from the last to the first, and the embeddings; each stays random while the next one becomes so.
    Every tensor of weights is drawn anew from a normal distribution of its own mean and standard deviation (so a tensor
    of equal numbers stays as it is, and weights shared with the embeddings stay until these are reached). All models
    are explained for what the trained one was.

    Per text: Spearman's rank correlation over the non-special tokens, equal scores sharing their mean rank, of signed
    scores and of absolute values; means over texts with 95 % bootstrap intervals. It is not defined where all scores of
    a text are equal, or not finite, or where the text has a single token.

    Args:
        texts: explained for the predicted answers; or an objective of this model, which is not changed.
        methods: those of `explain`, or functions by name, see there.
        layers: all, or the numbers of the layers that are randomised after the head, from the highest to the lowest.

    Raises:
        InputError: a layer that the model does not have, an objective of another model, or scores of the trained model
            that are not finite.
    """
    import copy
    from dataclasses import replace

    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.progress import progress_bar
    from ssmscope.core.take_trace import as_batch
    from ssmscope.interp.labelled import token_scores
    from ssmscope.interp.methods import bind_methods
    from ssmscope.interp.objective import Objective, objective
    from ssmscope.interp.sanity.measure import parts_of, randomise, similarities
    from ssmscope.interp.sanity.result import MEASURES, TRAINED, SanityCheck
    from ssmscope.interp.scoring import means_with_intervals

    goal = texts if isinstance(texts, Objective) else objective(model, as_batch(model, texts))
    if goal.model.module is not model.module:
        raise InputError("the objective is of another model; give one of the model whose weights are randomised")
    ready = bind_methods(methods, option, model=model, seed=seed)
    changed = replace(model, module=copy.deepcopy(model.module))
    stages = parts_of(changed, layers)
    trained = {name: token_scores(name, method(goal), goal.batch)[0] for name, method in ready.items()}
    values = np.empty((len(ready), len(stages) + 1, len(goal), len(MEASURES)))
    for number, scores in enumerate(trained.values()):
        values[number, 0] = [similarities(row, row) for row in scores]
    with progress_bar() as bar:
        for stage, tensors in enumerate(bar.track([*stages.values()], description="randomised parts"), 1):
            randomise(tensors, seed)
            again = replace(goal, model=changed)
            for number, (name, method) in enumerate(ready.items()):
                found = token_scores(name, method(again), goal.batch, finite=False)[0]
                values[number, stage] = [similarities(*pair) for pair in zip(trained[name], found)]
    options = call_options(methods=list(ready), option=option or {})
    return SanityCheck(
        provenance=record_provenance(model.source, options=options, seed=seed),
        methods=tuple(ready),
        parts=(TRAINED, *stages),
        texts=len(goal),
        values=values,
        estimates=means_with_intervals(values.transpose(2, 0, 1, 3), seed),
    )
