"""Long runs of commands: divided among GPUs or cores, each after those it needs, taken up again where they were cut."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""The 97.5 % quantile of Student's t for 2, 3, … values."""


@dataclass(frozen=True)
class Job:
    """Commands one after the other, each Python's words after its name (`-m ssmscope train …`). `log` takes what they
    print, `done` is true once nothing is left to do, `ended` gets the seconds that it took, also in earlier calls."""

    name: str
    commands: Sequence[Sequence[str]]
    log: Path
    done: Callable[[], bool]
    needs: frozenset[str] = frozenset()
    ended: Callable[[float], None] = field(default=lambda seconds: None)


def run(jobs: Iterable[Job], places: Sequence[str], minutes: float) -> None:
    """Run the unfinished jobs, first come first served, one job at a time in each place: the number of a GPU, or the
    empty word for one core. A job waits for those that it needs, and is left out where one of them failed."""
    deadline = time.monotonic() + 60 * minutes
    jobs = list(jobs)
    waiting = [job for job in jobs if not job.done()]
    finished = {job.name for job in jobs} - {job.name for job in waiting}
    known, failed = {job.name for job in jobs}, set[str]()
    changed = threading.Condition()

    def take() -> Job | None:
        with changed:
            while waiting and time.monotonic() < deadline:
                for job in waiting:
                    if job.needs & (failed | (job.needs - known)):
                        failed.add(job.name)
                        waiting.remove(job)
                        break
                    if job.needs <= finished:
                        waiting.remove(job)
                        return job
                else:
                    changed.wait(1)
        return None

    def work(place: str) -> None:
        while (job := take()) is not None:
            worked = _run(job, place, deadline)
            with changed:
                (finished if worked else failed).add(job.name)
                changed.notify_all()

    workers = [threading.Thread(target=work, args=(place,)) for place in places]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _run(job: Job, place: str, deadline: float) -> bool:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": place}
    if not place:
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    job.log.parent.mkdir(parents=True, exist_ok=True)
    spent = job.log.with_suffix(".seconds")
    before, start, code = float(spent.read_text()) if spent.exists() else 0.0, time.monotonic(), 0
    line = "; ".join(" ".join(words) for words in job.commands)
    print(line + "\n", end="", flush=True)  # in one piece, as other workers print too
    with job.log.open("a") as log:
        for words in job.commands:
            process = subprocess.Popen([sys.executable, *words], env=environment, stdout=log, stderr=log)
            try:
                code = process.wait(max(deadline - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                process.kill()
                code = 1
            if code:
                break
    seconds = before + time.monotonic() - start
    spent.write_text(f"{seconds:.0f}")
    if not code:
        job.ended(seconds)
    return not code


_adding = threading.Lock()


def add(file: Path, record: Mapping[str, Any]) -> None:
    """Append one line of JSON."""
    with _adding:
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def told(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± half of its 95 % t interval, of as many independent values: of seeds, or of models."""
    mean = round(statistics.mean(values), digits) + 0.0  # Without the sign of a negative zero.
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    half = T975[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def arms_table(
    arms: Mapping[str, Sequence[Mapping[str, float]]],
    names: Mapping[str, str] | None = None,
    parameters: Mapping[str, int] | None = None,
) -> list[str]:
    """Return a table's lines: a row per arm, mean ± 95 % t interval over seeds.

    `arms` has what was measured of each arm, a mapping by column for each of the three seeds; a column that lacks a
    seed is `–`. `names` are those of the rows where they are not the arms' own; `parameters` adds a column.
    """
    columns = list(dict.fromkeys(column for found in arms.values() for one in found for column in one))
    head = ["", *columns] if parameters is None else ["", "parameters", *columns]
    lines = [f"| {' | '.join(head)} |".replace("|  |", "| |", 1), "|---" * len(head) + "|"]
    for arm, found in arms.items():
        cells = [(names or {}).get(arm, arm)]
        if parameters is not None:
            cells.append(f"{parameters[arm]:,}" if arm in parameters else "–")
        for column in columns:
            full = len(found) == 3 and all(column in one for one in found)
            cells.append(with_minus(told([one[column] for one in found])) if full else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verbs(text: str | None, *functions: Callable[[argparse.Namespace], None]) -> dict[str, argparse.ArgumentParser]:
    """A command line with a verb for each function, by its name, for options of its own; `train`
    and `measure` take --out, the directory of the runs or of one, and `measure` --into, the file of what it finds."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    under = parser.add_subparsers(required=True)
    found = {}
    for function in functions:
        told = (function.__doc__ or "").replace("%", "%%")  # argparse formats it
        verb = found[function.__name__] = under.add_parser(function.__name__, help=told)
        verb.set_defaults(run=function)
        if function.__name__ in ("train", "measure"):
            verb.add_argument("--out", type=Path, required=True)
        if function.__name__ == "measure":
            verb.add_argument("--into", type=Path, required=True)
        if function.__name__ == "train":
            verb.add_argument("--minutes", type=float, default=6000.0, help="then what runs is cut short")
    found[""] = parser
    return found


def start(found: Mapping[str, argparse.ArgumentParser]) -> None:
    """Run the verb that the command line names."""
    arguments = found[""].parse_args()
    arguments.run(arguments)


def with_minus(row: str) -> str:
    """Write negative numbers with a minus sign instead of a hyphen."""
    return re.sub(r"-(?=\d)", "−", row)
