"""Whether explanations depend on what a model learnt: randomise its parts one after the other (Adebayo et al. 2018).

Scores that stay what they were when the weights are gone describe the input or the architecture, not the model.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssmscope.bootstrap import Estimate, estimate, resampled_means
from ssmscope.encoding import Batch
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.attribution import Method
from ssmscope.interp.objective import Objective, objective
from ssmscope.model import Model
from ssmscope.results import Result, record_provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

MEASURES = {"signed": "signed scores", "absolute": "absolute scores"}
"""What is correlated, and how the views call it."""

TRAINED = "trained"
"""The name of the first point, at which nothing is randomised."""


def cascading_randomisation(
    model: Model,
    batch: Batch | Objective,
    *,
    methods: Sequence[str] | Mapping[str, Method],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    layers: str | Sequence[int] = "all",
    seed: int = 0,
) -> SanityCheck:
    """Explain texts again while the model's parts are randomised one after the other, from the head down, and correlate
    the scores with those of the trained model (Adebayo et al. 2018, cascading randomisation).

    The parts are the head, what stands between the layers and the head, the layers from the last to the first, and the
    embeddings; each stays random while the next one becomes so. Every tensor of weights is drawn anew from a normal
    distribution of its own mean and standard deviation (so a tensor of equal numbers stays as it is, and weights
    shared with the embeddings stay until these are reached). All models are explained for what the trained one was.

    Per text: Spearman's rank correlation over the non-special tokens, equal scores sharing their mean rank, of signed
    scores and of absolute values; means over texts with 95 % bootstrap intervals. It is not defined where all scores of
    a text are equal, or not finite, or where the text has a single token.

    Args:
        model: what is explained; it stays as it is.
        batch: texts (`model.encode`), explained for what the model predicts, or an objective of this model.
        methods: names of `ssmscope.interp.methods.METHODS`, or functions of your own by name.
        options: per method its own options.
        layers: all, or the numbers of the layers that are randomised after the head, from the highest to the lowest;
            the embeddings come only with all.
        seed: draws the weights and the resamples.

    Raises:
        InputError: an unknown method or option, a layer that the model does not have, an objective of another model,
            or scores of the trained model that are not finite.
    """
    from ssmscope.interp.fidelity import settled

    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed is {seed!r}; allowed is a whole number from 0 on")
    goal = batch if isinstance(batch, Objective) else objective(model, batch)
    if goal.model.module is not model.module:
        raise InputError("the objective is of another model; give one of the model whose weights are randomised")
    named = settled(methods, options or {}, seed)
    changed = Model(copy.deepcopy(model.module), model.tokenizer, model.name)
    stages = parts_of(changed, layers)
    words = goal.batch.words
    own = [[at for at, word in enumerate(row) if word is not None] for row in words]
    trained = {name: _scores(method(goal), own) for name, method in named.items()}
    for name, scores in trained.items():
        if not all(np.isfinite(row).all() for row in scores):
            raise InputError(f"the scores of the method {name} are not finite: the model is damaged, or overflows")
    values = np.empty((len(named), len(stages) + 1, len(goal), len(MEASURES)))
    for number, scores in enumerate(trained.values()):
        values[number, 0] = [_alike(row, row) for row in scores]
    for stage, tensors in enumerate(stages.values(), 1):
        randomise(tensors, seed)
        again = replace(goal, model=changed)
        for number, (name, method) in enumerate(named.items()):
            found = _scores(method(again), own)
            values[number, stage] = [_alike(*pair) for pair in zip(trained[name], found, strict=True)]
    columns = values.transpose(2, 0, 1, 3)
    rows = resampled_means(columns.reshape(len(goal), -1), seed=seed)
    ends = [estimate(rows[:, column]) for column in range(rows.shape[1])]
    shape = (len(named), len(stages) + 1, len(MEASURES), 3)
    asked: dict[str, Any] = {
        "methods": list(named),
        "options": {name: dict(given) for name, given in (options or {}).items()},
        "layers": layers if isinstance(layers, str) else list(layers),
    }
    return SanityCheck(
        provenance=record_provenance(model.source, options=asked, seed=seed),
        methods=tuple(named),
        parts=(TRAINED, *stages),
        texts=len(goal),
        values=values,
        estimates=np.array([[e.value, e.low, e.high] for e in ends]).reshape(shape),
    )


def parts_of(model: Model, layers: str | Sequence[int] = "all") -> dict[str, dict[str, nn.Parameter]]:
    """The weights of every part by name, from the head down: "head", "norm" (between the layers and the head),
    "layer 3" …, "embeddings". A part without weights is left out; a head's that are the embeddings' are of these.

    Raises:
        InputError: for layers that the model does not have, or given twice.
    """
    number = model.num_layers
    whole = isinstance(layers, str)
    if isinstance(layers, str):
        if layers != "all":
            raise InputError(f"layers is {layers!r}; allowed are 'all' or a list of layer numbers{_near(layers)}")
        chosen = set(range(number))
    else:
        chosen = set(layers)
        wrong = [each for each in layers if isinstance(each, bool) or each not in range(number)]
        if wrong or len(chosen) != len(layers):
            what = f"there is no layer {wrong[0]!r}" if wrong else "a layer is named twice"
            raise InputError(f"{what}; {model.name} has the layers 0 to {number - 1}, each to be given once")
    module = model.module
    place = {id(mixer): index for index, mixer in enumerate(model.mixers)}
    blocks: dict[str, int] = {}
    for name, part in module.named_modules():
        if id(part) in place:
            blocks[_block(name)] = place[id(part)]
    inputs = {id(parameter) for parameter in module.get_input_embeddings().parameters()}
    base = {id(parameter) for parameter in module.base_model.parameters()} if hasattr(module, "base_model") else set()
    if getattr(module, "base_model", None) is module:
        base = set()
    found: dict[str, dict[str, nn.Parameter]] = {
        "head": {},
        "norm": {},
        **{f"layer {index}": {} for index in reversed(range(number))},
        "embeddings": {},
    }
    for name, parameter in module.named_parameters():
        block = next((index for prefix, index in blocks.items() if name.startswith(prefix + ".")), None)
        if id(parameter) in inputs:
            part_name = "embeddings"
        elif block is not None:
            part_name = f"layer {block}"
        else:
            part_name = "norm" if id(parameter) in base else "head"
        found[part_name][name] = parameter
    kept = {"head", "norm", *(f"layer {index}" for index in chosen), *(["embeddings"] if whole else [])}
    return {name: tensors for name, tensors in found.items() if tensors and name in kept}


def _block(name: str) -> str:
    """The module of a mixer's layer: the innermost numbered one that holds it, or the mixer itself."""
    parts = name.split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[-1] + 1]) if numbered else name


def _near(layers: str) -> str:
    return did_you_mean(layers, ["all"])


def randomise(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Draw every tensor anew, in place, from a normal distribution of its own mean and standard deviation.

    What a tensor becomes depends on its name and the seed alone, not on what else is randomised.
    """
    with torch.no_grad():
        for name, tensor in tensors.items():
            random = np.random.default_rng([seed, zlib.crc32(name.encode())])
            drawn = torch.from_numpy(np.asarray(random.standard_normal(tuple(tensor.shape)))).to(tensor.device)
            numbers = tensor.detach().double()
            tensor.copy_(numbers.mean() + numbers.std(correction=0) * drawn)


def spearman(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float:
    """Spearman's rank correlation, equal numbers sharing their mean rank; NaN where one has equal numbers only, or a
    number that is not finite."""
    if len(a) < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    ranks = [_ranks(numbers) - (len(numbers) - 1) / 2 for numbers in (a, b)]
    size = math.sqrt(float(ranks[0] @ ranks[0]) * float(ranks[1] @ ranks[1]))
    return float(ranks[0] @ ranks[1]) / size if size else math.nan


def _ranks(numbers: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    _, inverse, times = np.unique(numbers, return_inverse=True, return_counts=True)
    ends = np.cumsum(times)
    return (ends - (times + 1) / 2)[inverse]


def _alike(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    return spearman(a, b), spearman(np.abs(a), np.abs(b))


def _scores(found: Any, own: Sequence[Sequence[int]]) -> list[np.ndarray]:
    values = found.scores.detach().double().cpu().numpy()
    return [row[list(places)] for row, places in zip(values, own, strict=True)]


@dataclass(frozen=True)
class SanityCheck(Result, kind="sanity"):
    """The rank correlation of each method's scores with those of the trained model, part by part."""

    methods: tuple[str, ...]
    parts: tuple[str, ...]
    """"trained", and then the part that is randomised next."""
    texts: int
    values: np.ndarray
    """(methods, parts, texts, 2): of signed scores and of their absolute values; NaN where it is not defined."""
    estimates: np.ndarray
    """(methods, parts, 2, 3): mean over texts, low and high end of its interval."""

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        return f"Sanity check of {len(self.methods)} methods on {model}: {len(self.parts) - 1} parts randomised in turn"

    def estimate(self, method: str, part: str, measure: str = "signed") -> Estimate:
        """The mean correlation once this part and those above it are randomised.

        Raises:
            InputError: when there is no such method, part or measure.
        """
        places = []
        for what, name, known in (
            ("method", method, self.methods),
            ("part", part, self.parts),
            ("measure", measure, tuple(MEASURES)),
        ):
            if name not in known:
                raise InputError(
                    f"there is no {what} {name!r}; allowed are {', '.join(known)}{did_you_mean(str(name), known)}"
                )
            places.append(known.index(name))
        return Estimate(*self.estimates[tuple(places)].tolist())

    def to_frame(self) -> DataFrame:
        """A row per method, part and measure: columns method, randomised (how many parts), part (the newest of them),
        measure ("signed" or "absolute"), correlation, low, high (its 95 % interval), texts (where it is defined)."""
        import pandas as pd

        rows = [
            (method, stage, part, measure, *self.estimates[a, stage, c].tolist(), int(defined[a, stage, c]))
            for defined in [(~np.isnan(self.values)).sum(2)]
            for a, method in enumerate(self.methods)
            for stage, part in enumerate(self.parts)
            for c, measure in enumerate(MEASURES)
        ]
        names = ["method", "randomised", "part", "measure", "correlation", "low", "high", "texts"]
        return pd.DataFrame(rows, columns=names)

    def figure(self) -> Figure:
        """The correlation against the number of randomised parts, signed and absolute, a line per method."""
        from ssmscope.interp.views.fidelity_figure import draw_sanity

        return draw_sanity(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.headline), title_justify="left", box=None, pad_edge=False)
        for heading in ("randomised down to", *self.methods):
            table.add_column(Text(heading), justify="left" if heading == "randomised down to" else "right")
        for part in self.parts[1:]:
            means = [self.estimate(method, part).value for method in self.methods]
            table.add_row(Text(part), *("–" if math.isnan(mean) else f"{mean:.3f}" for mean in means))
        yield table
        yield Text(
            f"\nSpearman's rank correlation of signed scores with those of the trained model, mean of {self.texts:,} "
            "texts. A method whose scores stay alike does not depend on the weights."
        )
