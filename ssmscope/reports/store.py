"""Report and its directory: finished results, written atomically, and failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmscope.api.results import Result
from ssmscope.api.writing import write_whole
from ssmscope.errors import InputError
from ssmscope.reports.jobs import Job

if TYPE_CHECKING:
    from ssmscope.api.scores import Score
    from ssmscope.reports.gates import Gate
    from ssmscope.reports.hardest import Hard

DONE, FAILED, LEFT_OUT, MISSING = "done", "failed", "left-out", "missing"
"""States of an entry: left out if the analysis has no answer for its model, missing if it has not run yet."""


@dataclass(frozen=True)
class ReportEntry:
    """One job of a plan and its outcome: shown names of its models, its shell command, and all results it wrote."""

    verb: str
    heading: str
    models: tuple[str, ...]
    command: str
    options: Mapping[str, Any]
    key: str
    state: str
    results: tuple[Result, ...]
    seconds: float | None
    error: str | None
    traceback: str | None


@dataclass(frozen=True)
class Report:
    """All data from which the page and the tables are made; provenance has versions, plan, date and models."""

    title: str
    entries: tuple[ReportEntry, ...]
    provenance: Mapping[str, Any]
    gates: tuple[Gate, ...] = ()
    baseline: tuple[Score, ...] = ()
    """Scores of an earlier report, with which this one's are compared."""
    hardest: tuple[Hard, ...] = ()
    """The hardest examples, if the plan asks for them."""


RECORD = "job.json"
LOG = "job.log"
ANSWERS = "answers.sqlite"
"""File of a verb's answers, from which a killed run continues; removed when the job is finished."""


JOB_FILE = re.compile(r"([0-9a-f]{16})(?:\.json|\.log)?")
"""Name of a job's failure, working folder or log."""


class JobStore:
    """Store of results by job key: `results/KEY`, `failed/KEY.json` and, for running jobs, `working/KEY`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def working(self, key: str) -> Path:
        """Return the folder where a job writes, and from which a killed run may continue."""
        return self.root / "working" / key

    def finished(self, key: str) -> Path:
        return self.root / "results" / key

    def failure(self, key: str) -> Path:
        return self.root / "failed" / f"{key}.json"

    def record(self, key: str) -> dict[str, Any] | None:
        """Return the record of a finished job; None if it is not finished or its files are damaged."""
        folder = self.finished(key)
        try:
            record = json.loads((folder / RECORD).read_bytes())
            outside = any(".." in Path(name).parts or Path(name).is_absolute() for name in record["files"])
            whole = not outside and all(_digest(folder / name) == digest for name, digest in record["files"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return record if whole else None

    def is_done(self, job: Job) -> bool:
        return self.record(job.key) is not None

    def finish(self, job: Job, record: Mapping[str, Any]) -> None:
        """Move the results in `working` to the finished results, atomically; raise InputError if there are none."""
        folder, final = self.working(job.key), self.finished(job.key)
        for path in folder.iterdir():
            # A killed run may have left half of a save, and answers that are in the results by now.
            if path.name.startswith((".", ANSWERS)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not _results(folder):
            raise InputError(f"{job.verb} ended without a result")
        (folder / RECORD).unlink(missing_ok=True)
        files = {str(p.relative_to(folder)): _digest(p) for p in sorted(folder.rglob("*")) if p.is_file()}
        (folder / RECORD).write_text(json.dumps({**record, "files": files}, indent=2) + "\n", encoding="utf-8")
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():  # It was damaged, else the job would not have run again.
            shutil.rmtree(final)
        os.replace(folder, final)
        self.failure(job.key).unlink(missing_ok=True)

    def clear(self, keys: Collection[str]) -> None:
        """Remove the failures and working files of jobs that are finished, or not among those with these keys."""
        for folder in (self.root / "failed", self.root / "working"):
            for path in folder.iterdir() if folder.is_dir() else ():
                job = JOB_FILE.fullmatch(path.name)
                if job is not None and (job[1] not in keys or self.record(job[1]) is not None):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def fail(self, job: Job, record: Mapping[str, Any]) -> None:
        """Record why a job failed."""
        write_whole(self.failure(job.key), json.dumps(record, indent=2) + "\n")

    def entry(self, job: Job, failure: Mapping[str, Any] | None = None) -> ReportEntry:
        """Return the report's entry of a job; `failure` is that of this run, if any."""
        record = self.record(job.key)
        results: tuple[Result, ...] = ()
        if record is not None:
            failure = None
            try:
                results = tuple(Result.load(path) for path in _results(self.finished(job.key)))
            except InputError as error:
                failure, record = {"error": f"{error}; delete {self.finished(job.key)} and run again"}, None
        else:
            failure = failure or self._failed(job)
        state = DONE if record is not None else MISSING if failure is None else failure.get("state", FAILED)
        found = record or failure or ({"error": "unfinished"} if self.working(job.key).exists() else {})
        of_job: dict[str, Any] = {
            name: getattr(job, name) for name in ("verb", "heading", "models", "command", "options", "key")
        }
        told: dict[str, Any] = {name: found.get(name) for name in ("seconds", "error", "traceback")}
        return ReportEntry(**of_job, state=state, results=results, **told)

    def _failed(self, job: Job) -> dict[str, Any] | None:
        try:
            found = json.loads(self.failure(job.key).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def seconds(self) -> dict[str, list[float]]:
        """Return the durations of the finished jobs in seconds, by verb."""
        found: dict[str, list[float]] = {}
        for path in sorted(self.root.glob(f"results/*/{RECORD}")):
            record = self.record(path.parent.name) or {}
            if isinstance(record.get("verb"), str) and isinstance(record.get("seconds"), int | float):
                found.setdefault(record["verb"], []).append(float(record["seconds"]))
        return found


def _digest(path: Path) -> str:
    """Return the CRC-32 of a file: after a loss of power, one may have its size and nothing but zeros."""
    return f"{zlib.crc32(path.read_bytes()):08x}"


def _results(folder: Path) -> list[Path]:
    """Return the result files in a folder, sorted by name."""
    return [path for path in sorted(folder.glob("*.json")) if path.name != RECORD and _is_result(path)]


def _is_result(path: Path) -> bool:
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        return True  # Loading it as a result says what is wrong.
    return isinstance(document, dict) and isinstance(document.get("kind"), str) and "class" in document
