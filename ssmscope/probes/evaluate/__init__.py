"""Scores of a classifier on labelled data, and of a language model on standard benchmarks, through EleutherAI's
lm-evaluation-harness (Gao et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import LANGUAGE_MODEL, PIXEL_CLASSIFIER, TEXT_CLASSIFIER, Examples, check_fits
from ssmscope.api.limits import NOT_NEGATIVE, SHARE
from ssmscope.api.options import Metavar, Option, Progress, Range, Reads, Seed
from ssmscope.errors import InputError, refuse_unused

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.data.pixels import PixelData
    from ssmscope.data.text import TextData
    from ssmscope.probes.evaluate.result import Benchmarks


GIVE = "give data=…, labelled texts, or of a language model tasks=…"


class Labelled(Examples):
    """Labelled texts or images of a classifier, or texts with labels that continue them; None with tasks."""

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        return {name: option for name, option in super().options.items() if name != "length"}

    def reads_lines(self, kind: str | None) -> bool:
        return False

    def wants_data(self, kind: str | None) -> bool:
        return kind != LANGUAGE_MODEL

    def check(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        if options["tasks"] is not None and (values["data"] is not None or values["split"] is not None):
            raise InputError("tasks=… are texts of their own; give those or data=…")
        if options["tasks"] is not None:
            own = {"series": None, "max_tokens": self.sizes["max_tokens"].default}
            refuse_unused("with tasks=…", **{name: values[name] != default for name, default in own.items()})

    def check_kind(self, kind: str | None, values: Mapping[str, Any]) -> None:
        if kind == LANGUAGE_MODEL and values.get("tasks") is None and values.get("data") is None:
            raise InputError(f"there is nothing to measure a language model on; {GIVE}")

    def take(self, given: Any, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        return None if given is None else super().take(given, values, options, models)

    def read(self, values: Mapping[str, Any], options: Mapping[str, Any], models: Sequence[Model]) -> Any:
        if options["tasks"] is not None:
            return None
        if not models[0].is_classifier:
            from ssmscope.data.text import load_text

            if values["data"] is None:
                return None
            found = load_text(values["data"], values["split"])
            check_fits(models[0], found, values["max_tokens"])
            return found
        return super().read({**values, "length": None}, options, models)


def check_asked(*, tasks: Sequence[str] | None, include: Any, shots: int | None, **others: Any) -> None:
    """Raise InputError for options of tasks without tasks."""
    if tasks is None and (include is not None or shots is not None):
        raise InputError(f"{'include' if include is not None else 'shots'}=… is an option of tasks; give tasks=… too")


@analysis(
    "evaluate",
    reads=Labelled(),
    question="How good is it, on labelled data or on the benchmarks people cite?",
    models=(TEXT_CLASSIFIER, PIXEL_CLASSIFIER, LANGUAGE_MODEL),
    check=check_asked,
    scores={"accuracy": SHARE, "cross-entropy": NOT_NEGATIVE},
    dimensions=(Dimension("Clean answers", r"accuracy", "accuracy"),),
)
def evaluate(
    model: Model,
    data: TextData | PixelData | None = None,
    *,
    tasks: Annotated[
        Sequence[str] | None, "Tasks or groups of the harness, or of the files of `include`.", Metavar("A,B,…")
    ] = None,
    include: Annotated[
        str | Path | None, "A folder of further task files (YAML).", Reads("folder"), Metavar("FOLDER")
    ] = None,
    shots: Annotated[int | None, "Worked examples before each question (default: the task's).", Range(0)] = None,
    limit: Annotated[
        int | None, "Use only N examples: the first of each task, or a random sample of DATA.", Range(1)
    ] = None,
    batch_size: Annotated[int, "Texts that run together.", Range(1)] = 16,
    seed: Seed = 0,
    progress: Progress = True,
) -> Benchmarks:
    """Measure accuracy and cross-entropy on labelled data, or a language model on tasks of EleutherAI's
    lm-evaluation-harness.

    A language model answers with the likeliest of the data's labels, as continuations of the text; its cross-entropy is
    that of the text's label.

    Accuracy has Wilson's 95 % interval, cross-entropy (nats) a bootstrap interval over examples. Prompts, metrics and
    standard errors of tasks are the harness's own (package lm-eval); an interval is value ± 1.96 standard errors over
    the examples of the task. If `$SSMSCOPE_DATA/TASK/SPLIT.parquet` exists, the task is read from there and nothing is
    downloaded; other tasks come from the Hugging Face Hub.

    Args:
        data: labelled texts or images.
        tasks: such as "wnli", "lambada_openai", "arc_easy,piqa".
        include: task files may name Python functions, which the harness runs; use only files that you trust.

    Raises:
        InputError: neither data nor tasks, data with other classes, a tokenizer
            without an end token, the package lm-eval is not installed, an unknown task, or data that cannot be read or
            lacks the task's columns.
    """
    from ssmscope.api.provenance import record_provenance
    from ssmscope.probes.evaluate.result import Benchmarks
    from ssmscope.probes.long_rows import language_models

    if tasks is None:
        from ssmscope.probes.evaluate.labelled import labelled_scores

        if data is None:
            raise InputError(f"there is nothing to measure {model.name} on; {GIVE}")
        data = data if limit is None else data.sample(limit, seed=seed)
        provenance = record_provenance(model.source, seed=seed, data=data)
        return Benchmarks(provenance, *labelled_scores(model, data, batch_size, seed=seed, progress=progress))
    from ssmscope.probes.evaluate.measure import measure

    language_models(model)
    options: dict[str, Any] = {"tasks": list(tasks), "include": None if include is None else str(include)}
    options |= {"shots": shots, "limit": limit, "batch_size": batch_size}
    scores, versions = measure(model, **options, seed=seed, progress=progress)
    provenance = record_provenance(model.source, options=options, seed=seed)
    provenance["versions"] |= {"lm-eval": versions.pop("lm-eval")}
    return Benchmarks(provenance={**provenance, "task_versions": versions}, scores=tuple(scores))
