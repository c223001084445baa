"""Where the jobs of a plan run: in this process, one after the other, or on the workers of a Ray cluster."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssmscope.errors import InputError, extra
from ssmscope.reports.jobs import Job
from ssmscope.reports.running import Engine, Outcome, execute
from ssmscope.reports.store import Store

RETRIES = 3
"""How often a job starts again whose worker or node died."""
OBJECTS = 256 * 2**20
"""Bytes of memory for what workers send, in a Ray that is started here: results are small."""
PASSED_ON = ("SSMSCOPE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "NLTK_")
"""How the variables of the environment begin that workers get."""


def models_at_once(jobs: Sequence[Job]) -> int:
    """How many models a worker keeps loaded: one more than a job needs, for a verb that reads it in another dtype."""
    return 1 + max(len(job.call.models) for job in jobs)


def local(jobs: Sequence[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
    """One job after the other in this process."""
    from ssmscope.models.load import Kept, kept_loaded

    with kept_loaded(Kept(models_at_once(jobs))):
        for job in jobs:
            yield job, execute(job, store.working(job.key))


# ---- Ray


def ray_engine(address: str | None = None, workers: int | None = None) -> Engine:
    """An engine whose jobs are tasks of a Ray cluster, and start again elsewhere when their worker or node dies.

    Only this process writes to the report's directory: workers send what their jobs wrote. They need the package, the
    models and the data under the names that the plan gives them.

    Args:
        address: of a cluster that runs; else one is started on this machine, and ended with the run.
        workers: how many CPUs that has, by default all.

    Raises:
        InputError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"--engine ray needs the package ray, which is not installed; install it {extra('ray')}")

    def run(jobs: Sequence[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        with _connected(address, workers) as ray:
            work = ray.remote(_work)
            setting = _Setting(models_at_once(jobs))
            running: dict[Any, Job] = {}
            for job in jobs:
                lacking = _lacking(ray.nodes(), job)
                if lacking is not None:
                    yield job, Outcome(0.0, lacking)
                    continue
                needs = {"num_cpus": job.cpus, "num_gpus": job.gpus, "max_retries": RETRIES}
                running[work.options(**needs, name=f"{job.verb} {job.key}").remote(job, setting)] = job
            while running:
                for done in ray.wait(list(running), num_returns=1)[0]:
                    job = running.pop(done)
                    yield job, _received(ray, done, store.working(job.key))

    return run


class _Setting:
    """What a worker needs so that it works as this process would."""

    def __init__(self, models: int) -> None:
        import torch

        self.models = models
        self.threads = torch.get_num_threads()  # sums may differ in their last digit by how many there are
        self.directory = os.getcwd()
        self.environment = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}

    def apply(self) -> None:
        os.environ.update(self.environment)
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        import torch

        torch.set_num_threads(self.threads)


_kept: Any = None
"""The models that this worker keeps between its jobs."""


def _work(job: Job, setting: _Setting) -> tuple[Outcome, dict[str, bytes]]:
    """Run a job on a worker: how it ended, and what it wrote, by its place in `working`."""
    global _kept
    setting.apply()
    from ssmscope.models.load import Kept, kept_loaded

    if _kept is None:
        _kept = Kept(setting.models)
    with tempfile.TemporaryDirectory(prefix="ssmscope-") as folder, kept_loaded(_kept):
        outcome = execute(job, Path(folder, job.key))
        files = {str(path.relative_to(folder)): path for path in Path(folder).rglob("*") if path.is_file()}
        return outcome, {name: path.read_bytes() for name, path in files.items()}


def _received(ray: Any, done: Any, folder: Path) -> Outcome:
    """The outcome of a task, what it wrote being put into `folder` and beside it."""
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


def _lacking(nodes: Sequence[Mapping[str, Any]], job: Job) -> str | None:
    """Why no node can ever run a job; None where one can."""
    for node in nodes:
        has = node["Resources"]
        if node["Alive"] and has.get("CPU", 0) >= job.cpus and has.get("GPU", 0) >= job.gpus:
            return None
    return f"no node of the cluster has the {job.cpus:g} CPUs and {job.gpus:g} GPUs that the job asks for"


@contextmanager
def _connected(address: str | None, workers: int | None) -> Iterator[Any]:
    """Ray, connected or started; what was not connected before is not afterwards."""
    import ray

    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init(num_cpus=workers, include_dashboard=False, object_store_memory=OBJECTS, **quiet)
    else:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"--address {address}: no Ray cluster answers there ({reason})") from error
    try:
        yield ray
    finally:
        ray.shutdown()
