"""What the harness says of a model: its numbers as scores with intervals, its failures in one line."""

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

from ssmscope.architectures.loading.stored import reason
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.model import Model
from ssmscope.errors import InputError, did_you_mean, extra
from ssmscope.probes.evaluate.result import Score

UNREADABLE = (OSError, ValueError, KeyError, UndefinedError, DatasetsError)
"""What the harness and its readers raise at data that is not there, or has other columns than a task asks for."""
SPLITS = ("train", "validation", "test")
NORMAL = 1.96
"""Standard errors on each side of a 95 % interval."""


def measure(
    model: Model,
    tasks: Sequence[str],
    *,
    include: str | None,
    shots: int | None,
    limit: int | None,
    batch_size: int,
    seed: int,
    progress: bool,
) -> tuple[list[Score], dict[str, str]]:
    """The scores of every task, and the versions of the harness and of the tasks.

    Raises:
        InputError: as `evaluate`.
    """
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
                raise InputError(f"{task!r} is no task of lm-eval{did_you_mean(task, manager.all_tasks)}")
            entry, files = manager.task_index[task], local_files(task)
            if files and entry.yaml_path is not None:
                file = Path(folder, f"{task}.yaml")
                local = {"task": task, "include": str(entry.yaml_path), **files}
                file.write_text(json.dumps(local), encoding="utf-8")  # JSON is YAML
                specs.append(str(file))
            else:
                specs.append(task)
        try:
            found = simple_evaluate(
                harness,
                tasks=specs,
                num_fewshot=shots,
                limit=limit,
                task_manager=manager,
                log_samples=False,
                **dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seed),
            )
        except UNREADABLE as error:
            raise InputError(
                f"{', '.join(tasks)}: the data cannot be read ({reason(error.__cause__ or error)})"
            ) from error
    assert found is not None
    versions = {task: str(version) for task, version in found["versions"].items()}
    return scores_of(found), {"lm-eval": importlib.metadata.version("lm-eval"), **versions}


def task_manager(include: str | None = None) -> Any:
    """The harness' index of its tasks, and of the user's own in the folder `include`: thousands of files are read."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include)


own_tasks = cache(task_manager)
"""Once for all calls: the harness' own files stay as they are."""


def local_files(task: str) -> dict[str, Any]:
    """What has a task read `$SSMSCOPE_DATA/TASK/SPLIT.parquet`; nothing where there is no such file."""
    folder = Path(os.environ.get("SSMSCOPE_DATA", ""), task)
    files = {split: str(path) for split in SPLITS if (path := folder / f"{split}.parquet").is_file()}
    if "SSMSCOPE_DATA" not in os.environ or not files:
        return {}
    return {"dataset_path": "parquet", "dataset_name": None, "dataset_kwargs": {"data_files": files}}


def scores_of(found: Mapping[str, Any]) -> list[Score]:
    """A score for each number that the harness has, of tasks and of groups."""
    scores = []
    for task, numbers in found["results"].items():
        for name, value in numbers.items():
            measure, _, kind = name.partition(",")
            if not kind or measure.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = numbers.get(f"{measure}_stderr,{kind}")
            half = NORMAL * error if isinstance(error, (int, float)) else math.nan
            scores.append(
                Score(
                    task=task,
                    measure=measure if kind == "none" else f"{measure} ({kind})",
                    estimate=Estimate(float(value), float(value) - half, float(value) + half),
                    higher=bool(found["higher_is_better"].get(task, {}).get(measure, True)),
                    shots=int(found["n-shot"].get(task) or 0),
                    examples=int(found["n-samples"].get(task, {}).get("effective", 0)),
                )
            )
    return scores


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """The harness says on its log what our views say, and draws its bars for people who watch alone."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with nullcontext() if progress and sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(before)
