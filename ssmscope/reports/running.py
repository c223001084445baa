"""Execution of a plan, here or on a Ray cluster: finished jobs are skipped, failures recorded, the report written
last."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssmscope.api.provenance import now, versions
from ssmscope.api.scores import Score
from ssmscope.api.sharding.workers import MAX_RETRIES, Setting, check_installed, connected, finished, lacking, on_engine
from ssmscope.api.writing import locked, write_errors_explained, write_whole
from ssmscope.errors import InputError, Unanswerable, as_typed
from ssmscope.reports.gate_files import write_gates
from ssmscope.reports.gates import report_gates
from ssmscope.reports.hardest import follow_up, hardest
from ssmscope.reports.jobs import Job, Jobs, make_jobs
from ssmscope.reports.plan import Plan
from ssmscope.reports.requirements import Requirement
from ssmscope.reports.store import DONE, FAILED, LEFT_OUT, LOG, JobStore, Report, ReportEntry


@dataclass(frozen=True)
class Outcome:
    """Outcome of a job. `error` and `traceback` are None if it succeeded; its files are then in its working folder.
    `unanswerable` is True if the error says that the analysis has no answer for the model."""

    seconds: float
    error: str | None = None
    traceback: str | None = None
    unanswerable: bool = False


def execute(job: Job, folder: Path) -> Outcome:
    """Run one job in this process and write its results to `folder`. Its output goes to a file next to the folder, with
    the folder's name and ".log", and into the folder on success."""
    started = time.perf_counter()
    log = folder.with_name(f"{folder.name}.log")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            log.open("w", encoding="utf-8", errors="backslashreplace") as printed,
            redirect_stdout(printed),
            redirect_stderr(printed),
            _threads(job.threads),
        ):
            job.call.run(folder)
        folder.mkdir(exist_ok=True)
        os.replace(log, folder / LOG)
    except (Exception, SystemExit) as error:
        # A failure concerns one job only: the others go on, and the report shows it.
        told = "".join(traceback.format_exception(error))
        message = " ".join(str(error).split())
        name = type(error).__name__
        message = as_typed(message) if isinstance(error, InputError) else f"{name}: {message}" if message else name
        return Outcome(time.perf_counter() - started, message, told, isinstance(error, Unanswerable))
    return Outcome(time.perf_counter() - started)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Set the number of torch threads within the context; it can change the last digits of sums."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- a whole plan

JobEngine = Callable[[Sequence[Job], JobStore], Iterator[tuple[Job, Outcome]]]
"""Function that runs jobs and yields each as it ends, its files in `JobStore.working`."""


def run_plan(
    plan: Plan,
    jobs: Jobs,
    root: Path,
    *,
    engine: JobEngine,
    requirements: Sequence[Requirement] = (),
    baseline: Sequence[Score] = (),
    strict: bool = False,
) -> Report:
    """Run the unfinished jobs of a plan and write its report into `root`: `index.html`, tables of all results, and the
    gates of `requirements`.

    Args:
        baseline: scores of an earlier report, with which requirements compare.
        strict: report an undecided gate as a failure.

    Raises:
        InputError: another process uses the directory, it cannot be written to, the engine cannot start, the page or
            the tables cannot be written (finished results stay).
    """
    with locked(root):
        store = JobStore(root)
        report = Report(
            title=plan.title,
            entries=_entries(jobs, store, engine),
            provenance={"date": now(), "versions": _versions(), "models": dict(jobs.models), "plan": plan.text},
            baseline=tuple(baseline),
        )
        if plan.hardest:
            report = replace(report, hardest=hardest(report, plan.hardest))
            if (next_ := follow_up(plan, report)) is not None:
                _say("the hardest examples:")
                report = replace(report, entries=report.entries + _entries(make_jobs(next_), store, engine))
        with write_errors_explained(root):
            store.clear({entry.key for entry in report.entries})
        report = replace(report, gates=report_gates(report, requirements, baseline))
        try:
            with write_errors_explained(root):
                _write(report, root)
                write_gates(report.gates, root, title=report.title, strict=strict)
        except InputError as error:
            raise InputError(f"{error}; the results stay, and the same command writes the page") from error
    return report


def _entries(jobs: Jobs, store: JobStore, engine: JobEngine) -> tuple[ReportEntry, ...]:
    """Run the unfinished jobs and return the entries of all."""
    missing = [job for job in jobs.to_run() if not store.is_done(job)]
    failures: dict[str, Mapping[str, Any]] = {}
    total = len(missing)
    skipped = len(jobs.to_run()) - total
    _say(f"{total} job{'s' * (total != 1)} to run" + f", {skipped} done already" * bool(skipped))
    for number, (job, outcome) in enumerate(engine(missing, store) if missing else (), start=1):
        failure = _settle(job, outcome, store)
        if failure is not None:
            failures[job.key] = failure
        ended = f"{outcome.seconds:.1f} s" if failure is None else failure["state"].replace("-", " ")
        _say(f"[{number}/{total}] {job.verb} {' '.join(job.models)}: {ended}")
    return tuple(store.entry(job, failures.get(job.key)) for job in jobs.every)


def _settle(job: Job, outcome: Outcome, store: JobStore) -> dict[str, Any] | None:
    """Store a job's results; return the record of its failure if it failed or its results cannot be stored."""
    record = {
        "command": job.command,
        "verb": job.verb,
        "models": list(job.models),
        "options": dict(job.options),
        "seconds": round(outcome.seconds, 3),
        "versions": _versions(),
        "date": now(),
    }
    error, told = outcome.error, outcome.traceback
    if error is None:
        try:
            store.finish(job, {**record, "state": DONE})
            return None
        except (OSError, InputError) as problem:
            error, told = _reason(problem), traceback.format_exc()
    failure = {**record, "state": LEFT_OUT if outcome.unanswerable else FAILED, "error": error, "traceback": told}
    try:
        store.fail(job, failure)
    except InputError as problem:  # The disk may be full; this run still reports the failure.
        _say(f"the failure of {job.verb} cannot be recorded: {_reason(problem)}")
    return failure


def _write(report: Report, root: Path) -> None:
    from ssmscope.reports import exports, page
    from ssmscope.reports.scores import report_scores, write_scores

    exports.write(report, root)
    write_scores(report_scores(report), root)
    write_whole(root / "index.html", page.render(report))


def _versions() -> dict[str, str]:
    return {**versions(), "python": platform.python_version()}


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _say(line: str) -> None:
    print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr, flush=True)


# ---- engines


def max_models_loaded(jobs: Sequence[Job]) -> int:
    """Return how many models a worker keeps loaded: one more than a job needs, for verbs that load a second dtype."""
    return 1 + max(len(job.call.models) for job in jobs)


def run_locally(jobs: Sequence[Job], store: JobStore) -> Iterator[tuple[Job, Outcome]]:
    """Run one job after the other in this process."""
    from ssmscope.loading.load import ModelCache, cache_models

    with cache_models(ModelCache(max_models_loaded(jobs))):
        for job in jobs:
            yield job, execute(job, store.working(job.key))


def batches_on_ray(address: str | None = None, workers: int | None = None) -> JobEngine:
    """Return an engine that runs jobs in this process and their batches over data sets on Ray's workers."""
    check_installed()

    def run(jobs: Sequence[Job], store: JobStore) -> Iterator[tuple[Job, Outcome]]:
        with on_engine(engine="ray", workers=workers, address=address):
            yield from run_locally(jobs, store)

    return run


def ray_engine(address: str | None = None, workers: int | None = None) -> JobEngine:
    """Return an engine whose jobs are tasks of a Ray cluster, restarted elsewhere when their worker or node dies.

    Only this process writes to the report's directory: workers send the files of their jobs. They need the package, and
    the models and data under the names in the plan. Without an `address` a cluster with `workers` CPUs, by default all,
    is started on this machine and stopped after the run. Raise InputError if Ray is not installed."""
    check_installed()

    def run(jobs: Sequence[Job], store: JobStore) -> Iterator[tuple[Job, Outcome]]:
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
    from ssmscope.loading.load import ModelCache, cache_models

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
