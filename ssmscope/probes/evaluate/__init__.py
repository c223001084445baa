"""Scores of a language model on standard benchmarks, through EleutherAI's lm-evaluation-harness (Gao et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL
from ssmscope.api.options import Metavar, Progress, Range, Reads, Seed

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.probes.evaluate.result import Benchmarks


@analysis("evaluate", question="How good is it on the benchmarks people cite?", models=(LANGUAGE_MODEL,))
def evaluate(
    model: Model,
    *,
    tasks: Annotated[Sequence[str], "Tasks or groups of the harness, or of the files of `include`.", Metavar("A,B,…")],
    include: Annotated[
        str | Path | None, "A folder of further task files (YAML).", Reads("folder"), Metavar("FOLDER")
    ] = None,
    shots: Annotated[int | None, "Worked examples before each question (default: the task's).", Range(0)] = None,
    limit: Annotated[int | None, "Use only the first N examples of each task.", Range(1)] = None,
    batch_size: Annotated[int, "Texts that run together.", Range(1)] = 16,
    seed: Seed = 0,
    progress: Progress = True,
) -> Benchmarks:
    """Measure accuracy, perplexity or other metrics on tasks of EleutherAI's lm-evaluation-harness.

    Prompts, metrics and standard errors are the harness's own (package lm-eval); an interval is value ± 1.96 standard
    errors over the examples of the task. If `$SSMSCOPE_DATA/TASK/SPLIT.parquet` exists, the task is read from there and
    nothing is downloaded; other tasks come from the Hugging Face Hub.

    Args:
        tasks: such as "wnli", "lambada_openai", "arc_easy,piqa".
        include: task files may name Python functions, which the harness runs; use only files that you trust.

    Raises:
        InputError: a model that is not a language model or whose tokenizer has no end token, the package lm-eval is not
            installed, an unknown task, or data that cannot be read or lacks the task's columns.
    """
    from ssmscope.api.results import record_provenance
    from ssmscope.probes.evaluate.measure import measure
    from ssmscope.probes.evaluate.result import Benchmarks
    from ssmscope.probes.long_rows import language_models

    language_models(model)
    options: dict[str, Any] = {"tasks": list(tasks), "include": None if include is None else str(include)}
    options |= {"shots": shots, "limit": limit, "batch_size": batch_size}
    scores, versions = measure(model, **options, seed=seed, progress=progress)
    provenance = record_provenance(model.source, options=options, seed=seed)
    provenance["versions"] |= {"lm-eval": versions.pop("lm-eval")}
    return Benchmarks(provenance={**provenance, "task_versions": versions}, scores=tuple(scores))
