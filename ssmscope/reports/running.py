"""Running a plan: what is done is skipped, what finishes appears whole, what fails is recorded, and a page ends it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmscope import __version__
from ssmscope.api.writing import held, write_whole
from ssmscope.errors import InputError, Unanswerable, as_typed
from ssmscope.reports.jobs import Job, Jobs
from ssmscope.reports.plan import Plan
from ssmscope.reports.record import DONE, FAILED, LEFT_OUT, Report
from ssmscope.reports.store import LOG, Store


@dataclass(frozen=True)
class Outcome:
    """How a job ended; `error` and `traceback` are None where it succeeded, its files then lie where it worked.

    `unanswerable` where the error says that its model has nothing that it asks about.
    """

    seconds: float
    error: str | None = None
    traceback: str | None = None
    unanswerable: bool = False


def execute(job: Job, folder: Path) -> Outcome:
    """Run one job in this process, its results written to `folder`.

    What it prints lies beside the folder, as its name and ".log", until it has succeeded: the folder is the job's own.
    """
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
        # Whatever goes wrong in one job is its own: the others go on, and the report shows it.
        told = "".join(traceback.format_exception(error))
        message = " ".join(str(error).split())
        message = as_typed(message) if isinstance(error, InputError) else _named(error, message)
        return Outcome(time.perf_counter() - started, message, told, isinstance(error, Unanswerable))
    return Outcome(time.perf_counter() - started)


def _named(error: BaseException, message: str) -> str:
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Within the context torch uses so many threads; sums may differ in their last digit by how many there are."""
    if number is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- a whole plan

Engine = Callable[[Sequence[Job], Store], Iterator[tuple[Job, Outcome]]]
"""Runs jobs and yields each as it ends, what it wrote in `Store.working`."""


def run_plan(plan: Plan, jobs: Jobs, root: Path, *, engine: Engine) -> Report:
    """Run what is missing of a plan and write its report into `root`: `index.html` and the tables of all results.

    Raises:
        InputError: another process runs in the directory, it cannot be written to, or the engine cannot start.
        OSError: the page or the tables cannot be written; results that are finished stay.
    """
    with held(root):
        store = Store(root)
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
        report = Report(
            title=plan.title,
            entries=tuple(store.entry(job, failures.get(job.key)) for job in jobs.every),
            provenance=_provenance(plan, jobs),
        )
        _write(report, root)
    return report


def _settle(job: Job, outcome: Outcome, store: Store) -> dict[str, Any] | None:
    """Keep what a job gave; the record of its failure where it failed, or where its results cannot be kept."""
    record = {
        "command": job.command,
        "verb": job.verb,
        "models": list(job.models),
        "options": dict(job.options),
        "seconds": round(outcome.seconds, 3),
        "versions": versions(),
        "date": _now(),
    }
    error, told = outcome.error, outcome.traceback
    if error is None:
        try:
            store.finish(job, {**record, "state": DONE})
            return None
        except (OSError, InputError) as problem:
            error, told = _told(problem), traceback.format_exc()
    failure = {**record, "state": LEFT_OUT if outcome.unanswerable else FAILED, "error": error, "traceback": told}
    try:
        store.fail(job, failure)
    except OSError as problem:  # a full disk: this run still tells of it
        _say(f"the failure of {job.verb} cannot be recorded: {_told(problem)}")
    return failure


def _told(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _write(report: Report, root: Path) -> None:
    from ssmscope.reports import exports, page

    try:
        exports.write(report, root)
    except InputError as error:  # nothing of the plan is wrong: the disk is
        raise OSError(str(error)) from error
    write_whole(root / "index.html", page.render(report))


def _provenance(plan: Plan, jobs: Jobs) -> dict[str, Any]:
    return {"date": _now(), "versions": versions(), "models": dict(jobs.models), "plan": plan.text}


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    python = ".".join(map(str, sys.version_info[:3]))
    installed = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"ssmscope": __version__, "python": python, **installed}


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _say(line: str) -> None:
    print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr, flush=True)
