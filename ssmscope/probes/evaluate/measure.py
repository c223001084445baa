"""Scores of the harness with intervals, and its failures as errors of one line."""

from __future__ import annotations

import importlib.metadata
import io
import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetsError
from jinja2 import UndefinedError
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.model import Model
from ssmscope.errors import InputError, did_you_mean, extra
from ssmscope.loading.stored import reason
from ssmscope.probes.evaluate.result import TaskScore

DATA_ERRORS = (OSError, ValueError, KeyError, UndefinedError, DatasetsError)
"""Errors that the harness raises for missing data, or data without a task's columns."""
SPLITS = ("train", "validation", "test")
STANDARD_ERRORS_95 = 1.96
"""Half-width of a 95 % interval in standard errors."""


def measure(
    model: Model,
    *,
    tasks: Sequence[str],
    include: str | None,
    batch_size: int,
    seed: int,
    progress: bool,
    **few: int | None,
) -> tuple[list[TaskScore], dict[str, str]]:
    """Return the scores of every task, and the versions of the harness and of the tasks."""
    try:
        from lm_eval import simple_evaluate
        from ssmscope.probes.evaluate.harness import HarnessModel
    except ImportError as error:
        raise InputError(
            f"benchmarks need the package lm-eval, which cannot be imported ({error}); install it {extra('lm-eval')}"
        ) from error
    with _quiet(progress), tempfile.TemporaryDirectory() as folder:
        harness = HarnessModel(model, batch_size=batch_size)
        manager, specs = task_manager(include) if include else own_tasks(), []
        for task in tasks:
            if task not in manager.all_tasks:
                raise InputError(f"{task!r} is not a task of lm-eval{did_you_mean(task, manager.all_tasks)}")
            entry, files = manager.task_index[task], local_files(task)
            if files and entry.yaml_path is not None:
                file = Path(folder, f"{task}.yaml")
                local = {"task": task, "include": str(entry.yaml_path), **files}
                file.write_text(json.dumps(local), encoding="utf-8")  # Every JSON file is also YAML.
                specs.append(str(file))
            else:
                specs.append(task)
        try:
            seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
            setting = {"num_fewshot": few["shots"], "limit": few["limit"], "log_samples": False}
            setting |= dict.fromkeys(seeds, seed)
            found = simple_evaluate(harness, tasks=specs, task_manager=manager, **setting)
        except DATA_ERRORS as error:
            told = reason(error.__cause__ or error)
            raise InputError(f"{', '.join(tasks)}: the data cannot be read ({told})") from error
    assert found is not None
    versions = {task: str(version) for task, version in found["versions"].items()}
    return scores_of(found), {"lm-eval": importlib.metadata.version("lm-eval"), **versions}


def task_manager(include: str | None = None) -> Any:
    """Build the harness' index of its tasks and of those in the folder `include`, which reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include)


own_tasks = cache(task_manager)


def local_files(task: str) -> dict[str, Any]:
    """Return the settings that make a task read `$SSMSCOPE_DATA/TASK/SPLIT.parquet`; empty without such a file."""
    folder = Path(os.environ.get("SSMSCOPE_DATA", ""), task)
    files = {split: str(path) for split in SPLITS if (path := folder / f"{split}.parquet").is_file()}
    if "SSMSCOPE_DATA" not in os.environ or not files:
        return {}
    return {"dataset_path": "parquet", "dataset_name": None, "dataset_kwargs": {"data_files": files}}


def scores_of(found: Mapping[str, Any]) -> list[TaskScore]:
    """Return a score for each number of the harness, of tasks and of groups."""
    scores = []
    for task, numbers in found["results"].items():
        for name, value in numbers.items():
            measure, _, kind = name.partition(",")
            if not kind or measure.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = numbers.get(f"{measure}_stderr,{kind}")
            half = STANDARD_ERRORS_95 * error if isinstance(error, (int, float)) else math.nan
            estimate = Estimate(float(value), float(value) - half, float(value) + half)
            higher = bool(found["higher_is_better"].get(task, {}).get(measure, True))
            counts = int(found["n-shot"].get(task) or 0), int(found["n-samples"].get(task, {}).get("effective", 0))
            named = measure if kind == "none" else f"{measure} ({kind})"
            scores.append(TaskScore(task, named, estimate, higher, *counts))
    return scores


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Silence the harness' log, and its progress bars unless someone watches a terminal."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with nullcontext() if progress and sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(before)
