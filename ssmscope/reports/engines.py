"""Engines that run the jobs of a plan: in this process, one after the other, or on the workers of a Ray cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ssmscope.api.sharding.cluster import MAX_RETRIES, Setting, check_installed, connected, finished, lacking
from ssmscope.api.sharding.workers import on_engine
from ssmscope.reports.jobs import Job
from ssmscope.reports.running import Engine, Outcome, execute
from ssmscope.reports.store import Store


def max_models_loaded(jobs: Sequence[Job]) -> int:
    """Return how many models a worker keeps loaded: one more than a job needs, for verbs that load a second dtype."""
    return 1 + max(len(job.call.models) for job in jobs)


def run_locally(jobs: Sequence[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
    """Run one job after the other in this process."""
    from ssmscope.architectures.loading.load import ModelCache, cache_models

    with cache_models(ModelCache(max_models_loaded(jobs))):
        for job in jobs:
            yield job, execute(job, store.working(job.key))


# ---- Ray


def batches_on_ray(address: str | None = None, workers: int | None = None) -> Engine:
    """Return an engine that runs jobs in this process and their batches over data sets on Ray's workers."""
    check_installed()

    def run(jobs: Sequence[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        with on_engine(engine="ray", workers=workers, address=address):
            yield from run_locally(jobs, store)

    return run


def ray_engine(address: str | None = None, workers: int | None = None) -> Engine:
    """Return an engine whose jobs are tasks of a Ray cluster, restarted elsewhere when their worker or node dies.

    Only this process writes to the report's directory: workers send the files of their jobs. They need the package, and
    the models and data under the names in the plan.

    Args:
        address: address of a running cluster; by default one is started on this machine and stopped after the run.
        workers: number of CPUs of a started cluster, by default all.

    Raises:
        InputError: if Ray is not installed.
    """
    check_installed()

    def run(jobs: Sequence[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        with connected(address, workers) as ray:
            work, setting, able = ray.remote(_work), Setting(max_models_loaded(jobs)), []
            for job in jobs:
                lacks = lacking(ray.nodes(), job.cpus, job.gpus)
                if lacks is None:
                    able.append(job)
                else:
                    yield job, Outcome(0.0, f"{lacks} that the job asks for")

            def submit(job: Job) -> Any:
                needs = {"num_cpus": job.cpus, "num_gpus": job.gpus, "max_retries": MAX_RETRIES}
                return work.options(**needs, name=f"{job.verb} {job.key}").remote(job, setting)

            for job, done in finished(ray, submit, able):
                yield job, _received(ray, done, store.working(job.key))

    return run


_kept: Any = None
"""Models that this worker keeps between its jobs."""


def _work(job: Job, setting: Setting) -> tuple[Outcome, dict[str, bytes]]:
    """Run a job on a worker; return its outcome and its files by path below `working`."""
    global _kept
    setting.apply()
    from ssmscope.architectures.loading.load import ModelCache, cache_models

    if _kept is None:
        _kept = ModelCache(setting.models)
    with tempfile.TemporaryDirectory(prefix="ssmscope-") as folder, cache_models(_kept):
        outcome = execute(job, Path(folder, job.key))
        files = {str(path.relative_to(folder)): path for path in Path(folder).rglob("*") if path.is_file()}
        return outcome, {name: path.read_bytes() for name, path in files.items()}


def _received(ray: Any, done: Any, folder: Path) -> Outcome:
    """Write the files of a task into `folder` and next to it, and return its outcome."""
    try:
        outcome, files = ray.get(done)
    except ray.exceptions.RayError as error:
        return Outcome(0.0, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", str(error))
    try:
        if folder.exists():
            shutil.rmtree(folder)
        for name, content in files.items():
            path = folder.parent / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        return Outcome(outcome.seconds, f"its results cannot be written: {error.strerror or error}", str(error))
    return outcome
