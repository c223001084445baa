"""How good a language model is on the field's own benchmarks, through EleutherAI's lm-evaluation-harness.

The tasks, prompts and measures are the harness's (Gao et al. 2024), so that a number stands beside those of other
people's tables; the model is run by `ssmscope.probes.evaluate.harness`.
"""

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
    shots: Annotated[int | None, "Worked examples before each question; else as the task says.", Range(0)] = None,
    limit: Annotated[int | None, "Only the first so many examples of each task.", Range(1)] = None,
    batch_size: Annotated[int, "How many texts are run together.", Range(1)] = 16,
    seed: Seed = 0,
    progress: Progress = True,
) -> Benchmarks:
    """Accuracy, perplexity or what else a task of EleutherAI's lm-evaluation-harness measures.

    The tasks' prompts, metrics and standard errors are the harness's own (package lm-eval); an interval is
    value ± 1.96 standard errors, over the examples of the task. Where `$SSMSCOPE_DATA/TASK/SPLIT.parquet` is, a task of
    that name is read from there and nothing is downloaded; other tasks are looked up on the Hugging Face Hub.

    Args:
        tasks: such as "wnli", "lambada_openai", "arc_easy,piqa".
        include: task files may name Python functions, which the harness runs: give those that you trust.

    Raises:
        InputError: no language model with a tokenizer that has an end token, the package lm-eval is not installed, a
            task that it does not know, data that cannot be read or has not the columns that the task asks for.
    """
    from ssmscope.api.results import record_provenance
    from ssmscope.probes.evaluate.measure import measure
    from ssmscope.probes.evaluate.result import Benchmarks
    from ssmscope.probes.long_rows import language_models

    language_models(model)
    asked: dict[str, Any] = {
        "tasks": list(tasks),
        "include": None if include is None else str(include),
        "shots": shots,
        "limit": limit,
    }
    scores, versions = measure(
        model,
        asked["tasks"],
        include=asked["include"],
        shots=shots,
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
    )
    provenance = record_provenance(model.source, options={**asked, "batch_size": batch_size}, seed=seed)
    provenance["versions"] |= {"lm-eval": versions.pop("lm-eval")}
    return Benchmarks(provenance={**provenance, "task_versions": versions}, scores=tuple(scores))
