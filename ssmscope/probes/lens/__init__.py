"""Answers of a model at earlier layers: fit a tuned lens, or show the answers of a lens (Belrose et al., Eliciting
latent predictions from transformers with the tuned lens, 2023; see `ssmscope.probes.lens.lenses`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import Examples, Texts, is_named, load_examples
from ssmscope.api.options import NO_EFFECT, Metavar, Option, Progress, Range, Reads, Seed
from ssmscope.api.signatures import options_of
from ssmscope.core.batching import refuse_reading
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.probes.lens.data import LensData
    from ssmscope.probes.lens.lenses import Lens
    from ssmscope.probes.lens.result import LensFit, Trajectory


SPLITS = ("validation", "test", "train")
"""Splits in order of preference: as in the paper, a lens is not fitted on training text if possible."""


def _options(
    *,
    split: Annotated[str | None, "Split of a known data set (default: validation, else test).", Metavar("NAME")] = None,
    validation: Annotated[
        str | None, "Held-out data (default: a share of DATA).", Reads("data"), Metavar("FILE")
    ] = None,
) -> None: ...


@dataclass(frozen=True)
class FitData(Examples):
    """Text of a language model in rows of tokens, or a classifier's labelled texts or images; and held-out data."""

    prefer: tuple[str, ...] = SPLITS

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        found = {**super().options, **options_of(_options)}
        return {name: found[name] for name in ("data", "split", "validation", "length", "max_tokens")}

    def take(self, given: Any, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        # Rows of texts, or of token ids, are fitted as they are.
        if isinstance(given, list | tuple) and all(isinstance(row, str) or not is_named([row]) for row in given):
            return given
        return super().take(given, values, options, models)

    def read_besides(
        self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]
    ) -> Mapping[str, Any]:
        given, most = values["validation"], values["max_tokens"]
        if given is None:
            return {"validation": None}
        return {"validation": load_examples(models[0], given, None, values["length"], self.prefer, max_tokens=most)}


def check_steps(*, steps: int, batch_tokens: int, **others: Any) -> None:
    """Raise InputError for a fit that would run for weeks."""
    refuse_reading(steps * batch_tokens, f"{steps:,} steps of {batch_tokens:,} tokens", "take fewer")


@analysis(
    "lens fit",
    reads=FitData(),
    question="What would it answer earlier? Fit a tuned lens.",
    check=check_steps,
    settings="held_out optimizer learning_rate batch_tokens weight_decay clip patience look_every",
    writes=True,
    then='analyze lens show {model} --lens {out} --text "…"',
)
def fit_lens(
    model: Model,
    data: LensData,
    out: str | Path,
    validation: LensData | None = None,
    *,
    held_out: Annotated[
        float, "Share of DATA that is held out if there is no validation data.", Range(0, 1, strict=True)
    ] = 0.1,
    positions: Annotated[
        Literal["every", "last"] | None, "Positions that the lens reads (default: every; of a classifier last)."
    ] = None,
    optimizer: Annotated[Literal["sgd", "adam"], "sgd with Nesterov momentum, as in the paper, or adam."] = "sgd",
    learning_rate: Annotated[
        float | None, "Initial learning rate (default: 1 for sgd, 0.001 for adam).", Range(0, 10**6, strict=True)
    ] = None,
    steps: Annotated[int, "Maximum number of steps.", Range(1, 10**7)] = 250,
    batch_tokens: Annotated[int, "Tokens per step.", Range(1, 2**24)] = 4096,
    weight_decay: Annotated[float, "Weight decay, which pulls towards the logit lens.", Range(0, 10**6)] = 1e-3,
    clip: Annotated[float, "Maximum gradient norm over all layers.", Range(0, strict=True)] = 1.0,
    patience: Annotated[int | None, "Stop after N evaluations without improvement (default: never).", Range(1)] = None,
    look_every: Annotated[int, "Steps between evaluations on held-out rows.", Range(1)] = 10,
    seed: Seed = 0,
    checkpoint_minutes: Annotated[float, "Maximum minutes between checkpoints.", Range(0), NO_EFFECT] = 5.0,
    progress: Progress = True,
) -> LensFit:
    """Fit a tuned lens, an object of the package tuned-lens, to a model's own answers, layer by layer. A killed run
    continues.

    Writes to `out` config.json and params.pt in the format of the package tuned-lens (`ssmscope.load_lens`, or
    tuned-lens with an unembedding, reads both), and lens.json, the `LensFit`, with its table, figure and page.

    Every block i has one translator of its input (0: the embeddings); the last block's output needs none. Starting from
    W_i = 0, the logit lens, it minimises KL(model ‖ lens_i), averaged over positions, while the learning rate falls
    linearly to 0 (Belrose et al., 2023). Half of the held-out rows choose the step whose weights are kept, with the
    logit lens as the first candidate; the other half gives the numbers of the record.

    A run can be killed at any time and started again with the same call: it continues from its last checkpoint and, on
    a CPU, ends with exactly the numbers of an unbroken run. A finished fit is left as it is.

    Args:
        model: a language model, or a classifier, whose lens gives classes.
        data: rows of tokens (`ssmscope.data.language.language_data`), texts, labelled sequences or images, a list of
            texts, or a list of lists of token ids. Labels and targets are not read.
        out: a directory that is new, empty, or holds the same fit, which is then continued.
        validation: held-out data of the same kinds; by default a share of `data`, drawn by the seed.
        optimizer: sgd has Nesterov momentum 0.9, adam is AMSGrad.
        learning_rate: for sgd, in units in which momentum does not lengthen the steps.
        steps: data that is too short for them is read again.
        weight_decay: applies to W_i and b_i.
        checkpoint_minutes: a checkpoint is written at every evaluation, and in between after this time.

    Raises:
        InputError: data that the model cannot read or too little of it, another fit or something else in `out`, a model
            that a lens cannot read, or a divergence that is no longer finite.
    """
    from ssmscope.probes.lens.training import fit

    options: dict[str, Any] = {
        **{"positions": positions or ("last" if model.is_classifier else "every"), "optimizer": optimizer},
        **{"learning_rate": {"sgd": 1.0, "adam": 1e-3}[optimizer] if learning_rate is None else learning_rate},
        **{"steps": steps, "batch_tokens": batch_tokens, "weight_decay": weight_decay, "clip": clip},
        **{"patience": patience, "look_every": look_every, "held_out": held_out if validation is None else None},
    }
    running: dict[str, Any] = {"seed": seed, "checkpoint_minutes": checkpoint_minutes, "progress": progress}
    try:
        return fit(model, data, Path(out), validation, options=options, **running)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues from the last checkpoint") from None


@analysis("lens show", reads=Texts(most=2048), kinds=("trajectory",), question="What would it answer earlier?")
def trajectory(
    model: Model,
    texts: TextsLike,
    *,
    lens: Annotated[
        str | Path | Lens | None,
        "Directory of a tuned lens (default: the logit lens).",
        Reads("folder"),
        Metavar("LENS"),
    ] = None,
    positions: Annotated[
        Literal["every", "last"] | None, "Positions to read (default: those the lens was fitted at)."
    ] = None,
    statistic: Annotated[
        Literal["answer_probability", "top_probability", "entropy", "cross_entropy", "kl"],
        "Statistic shown in colour: answer_probability, top_probability, entropy, cross_entropy or kl.",
        Metavar("NAME"),
    ] = "answer_probability",
) -> Trajectory:
    """Show the model's answers after each layer, token by token, by the logit lens or a lens of the package tuned-lens.

    Layer i is the input of block i, 0 the embeddings; after the last block (i = L) comes the model itself. With q_i the
    lens's distribution and p = q_L the model's: entropy −Σ q_i log q_i, cross-entropy −log q_i(next token) and
    KL(p ‖ q_i), all in nats; the answer argmax q_i with its probability, and q_i of the final answer argmax p (Belrose
    et al., 2023). An answer settles at the first layer from which on the final one leads.

    A classifier's head was trained on the last position. Its answer at an earlier one is that to the text cut there,
    without the end token of its training.

    Args:
        model: a language model, or a classifier, whose answers are its classes.
        lens: a `Lens`, or the directory of one.
        positions: the logit lens reads every position of a language model, the last of a classifier.

    Raises:
        InputError: for texts that cannot be encoded, a lens of another model, the cross-entropy of a classifier, or a
            model whose answers are not finite.
    """
    if statistic == "cross_entropy" and model.is_classifier:
        raise InputError(f"{model.name} is {model.role}: there is no next token, and no cross-entropy to it")
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.take_trace import as_batch
    from ssmscope.probes.lens.lenses import answers_of, lens_of
    from ssmscope.probes.lens.result import Trajectory

    batch = as_batch(model, texts)
    found = lens_of(lens, model)
    where = positions or found.positions
    return Trajectory(
        provenance=record_provenance(model.source, options=call_options(lens=found.name, positions=where)),
        lens=found.title,
        positions=where,
        statistic=statistic,
        classes=model.is_classifier,
        texts=tuple(answers_of(model, found, batch, where)),
    )
