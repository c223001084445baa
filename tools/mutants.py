"""Tell which share of plausible one-line mistakes in the package the tests notice: `make mutants`.

A mistake (mutant) changes one expression of one function: a comparison, a sign, a bound, min for max, a dropped exp.
Tests are collected once; each mutant lives in a fork of that process, where the changed code takes the place of the
function's own. Nothing is written but the map of lines to tests, into build/mutants, made anew for files that changed.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from plausible_mistakes import PACKAGE, Mutant, mutants_of, put_in_place

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "build" / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
NEVER = (
    "tests/fuzz",
    "tests/test_docs.py",
    "tests/test_outside.py",
    "tests/test_package.py",
    "tests/test_layout.py",
    "tests/test_two_devices.py",
    "tests/test_notebooks.py",
    "tests/reports/test_engines.py",
    "tests/reports/test_browser.py",
)
"""Tests that need minutes, or processes of their own, which run the package as it is."""
WORDS = (
    "render/* */result.py */views.py */*_views.py */words.py */page.py */shown.py */terminal.py */tables.py "
    "*/show_*.py interp/paired*.py"
)
LOADING = (
    "loading/* networks/classifier.py zoo/baleen.py zoo/layouts.py "
    "core/encoding.py core/model.py core/text_files.py core/fingerprint.py core/batching.py"
)
AREAS = {
    "words": WORDS,
    "loading": LOADING,
    "reports": "reports/* api/*",
    "measures": "ops/* networks/* layers/* zoo/* core/* interp/* probes/* attacks/* evaluation/*",
}
"""Patterns of an area's files; a file belongs to the first area that names it."""
FIGURES = "*figure.py interp/attention/triangles.py"
MEMORY = 16 * 2**30
"""Bytes of address space that a mutant may take."""


def area_of(file: str) -> str | None:
    if any(fnmatch.fnmatch(file, name) for name in FIGURES.split()):
        return None
    return next((area for area, names in AREAS.items() if any(fnmatch.fnmatch(file, n) for n in names.split())), None)


class Run:
    """Takes the place of pytest's loop over tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.screen = os.fdopen(os.dup(1), "w", buffering=1)
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.session = session
        self.place = self.options.place
        self.by_file: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            self.by_file[item.nodeid.partition("::")[0]].append(item)
        self.items = {item.nodeid: item for item in session.items}
        STORE.mkdir(parents=True, exist_ok=True)
        self.reach()
        for seed in self.options.seeds:
            for area in self.options.areas:
                self.measure(area, seed)
        return True

    def in_forks(self, works: Iterable[tuple[Callable[[], Any], float]]) -> Iterator[Any]:
        """Yield in order what each work returns in a fork of this process, or None where it ended or took too long.

        A work comes with the CPU seconds that it may take; as many run at once as there are workers.
        """
        waiting, running, answers = enumerate(works), {}, {}
        try:
            for place in itertools.count():
                while place not in answers:
                    for number, (work, cpu) in itertools.islice(waiting, self.options.workers - len(running)):
                        pipe, child = self.fork(work, cpu)
                        running[pipe] = number, child, time.monotonic() + 8 * cpu  # for what waits; cores may be shared
                    if not running:
                        return
                    for pipe in wait(running, timeout=1):
                        number, child, _ = running.pop(pipe)
                        with os.fdopen(pipe) as read:
                            answer = read.read()
                        answers[number] = json.loads(answer) if answer else None
                        os.waitpid(child, 0)
                        shutil.rmtree(self.place / str(child), ignore_errors=True)
                    for _, child, end in running.values():
                        if time.monotonic() > end:
                            os.killpg(child, signal.SIGKILL)
                yield answers.pop(place)
        finally:
            for _, child, _ in running.values():
                os.killpg(child, signal.SIGKILL)

    def fork(self, work: Callable[[], Any], cpu: float) -> tuple[int, int]:
        """Start a work and return the pipe on which its answer comes, and its process."""
        read, write = os.pipe()
        child = os.fork()
        if child:
            os.close(write)
            return read, child
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu), int(cpu) + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        self.session.config.pluginmanager.unregister(name="terminalreporter")
        own = self.place / str(os.getpid())
        own.mkdir()
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(own)
        try:
            answer = json.dumps(work())
            with os.fdopen(write, "w") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)

    def reach(self) -> None:
        """Fill `self.tests`: by file and line, the tests that reach it, and `self.seconds` of each that passes."""
        self.tests: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.seconds: dict[str, float] = {}
        stale = []
        sources = b"" if self.options.reuse else b"".join(p.read_bytes() for p in sorted(PACKAGE.rglob("*.py")))
        for file in self.by_file:
            kept = kept_for(file)
            digest = hashlib.sha256(sources + (ROOT / file).read_bytes()).hexdigest()
            known = json.loads(kept.read_text()) if kept.exists() else {}
            if known.get("digest") != digest and not (known and self.options.reuse == "all"):
                stale.append((file, kept, digest))
        works = ((partial(covered, self.by_file[file], self), 3600.0) for file, *_ in stale)
        for (file, kept, digest), found in zip(stale, self.in_forks(works)):
            found = found or {"seconds": {}, "lines": {}}
            kept.write_text(json.dumps({"digest": digest, **found}))
            print(f"{file}: {len(found['seconds'])} tests", file=self.screen)
        for file in self.by_file:
            known = json.loads(kept_for(file).read_text())
            self.seconds |= known["seconds"]
            for source, lines in known["lines"].items():
                for line, names in lines.items():
                    self.tests[source][int(line)] += [name for name in names if name in self.items]

    def measure(self, area: str, seed: int) -> None:
        """Print each mutant of a sample that no test notices, and the score."""
        excused = [line.partition("  #")[0].strip() for line in EQUIVALENT.read_text().splitlines()]
        files = sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))
        chosen = [f for f in files if area_of(f) == area and fnmatch.fnmatch(f, self.options.files)]
        everything = [mutant for file in chosen for mutant in mutants_of(file)]
        reached = [mutant for mutant in everything if any(self.tests[mutant.file].get(n) for n in mutant.lines)]
        random.Random(seed).shuffle(reached)
        noticed, survived, taken = 0, 0, set()
        candidates = (m for m in reached if m.name not in excused and (m.file, m.lines.start) not in taken)
        judged, following = itertools.tee(candidates)
        for mutant, answer in zip(judged, self.in_forks(map(self.judge, following))):
            # Of a place one mutant is taken; another may have begun before the first was judged.
            if answer == "impossible" or (place := (mutant.file, mutant.lines.start)) in taken:
                continue
            taken.add(place)
            answer = answer or "time limit"
            noticed, survived = noticed + (answer != "survived"), survived + (answer == "survived")
            if answer == "survived" or self.options.verbose:
                at = getattr(mutant.node, "lineno", mutant.lines.start)  # a slice has no place of its own
                print(f"{noticed}/{noticed + survived} {answer}: {at}: {mutant.name}", file=self.screen)
            if noticed + survived == self.options.sample:
                break
        print(
            f"{area}, seed {seed}: {noticed} of {noticed + survived} noticed ({len(reached)} mutants are reached "
            f"of {len(everything)}, in {len(chosen)} files)",
            file=self.screen,
        )

    def judge(self, mutant: Mutant) -> tuple[Callable[[], str], float]:
        """Return a work and its CPU seconds.

        The work returns the test that notices, "survived", or "impossible" for a mutant that cannot be put in place.
        """
        names = {name: None for line in mutant.lines for name in self.tests[mutant.file].get(line, ())}
        groups: dict[str, list[str]] = defaultdict(list)
        for name in sorted(names, key=self.seconds.__getitem__):
            groups[name.partition("[")[0]].append(name)
        # The fastest of each function's tests before the second of any.
        turns = sorted((turn, self.seconds[name], name) for group in groups.values() for turn, name in enumerate(group))
        chosen, total = [], 0.0
        for _, seconds, name in turns:
            if total + seconds < self.options.seconds or not chosen:
                chosen.append(self.items[name])
                total += seconds

        def run() -> str:
            try:
                put_in_place(mutant)
            except (ValueError, SyntaxError, StopIteration):
                return "impossible"
            return next((item.nodeid for item in self.run(chosen) if self.failed), "survived")

        return run, 3 * total + 20

    def run(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        for item, following in zip(items, [*items[1:], None]):
            self.failed = False
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item


def kept_for(file: str) -> Path:
    """Return where the map of a file of tests is kept."""
    return STORE / (file.replace("/", ".") + ".json")


def covered(items: list[pytest.Item], run: Run) -> dict[str, Any]:
    """Run a file's tests; return the CPU seconds of each that passes, and by file and line which tests reach it."""
    import coverage

    tracer = coverage.Coverage(data_file=None, config_file=False, include=[f"{PACKAGE}/*"])
    tracer.start()
    seconds, lines, began = {}, defaultdict(dict), time.process_time()
    tracer.switch_context(items[0].nodeid)
    for item, following in zip(run.run(items), [*items[1:], items[0]]):
        if not run.failed:
            seconds[item.nodeid] = time.process_time() - began
        tracer.switch_context(following.nodeid)
        began = time.process_time()
    tracer.stop()
    data = tracer.get_data()
    for file in data.measured_files():
        for line, names in data.contexts_by_lineno(file).items():
            lines[str(Path(file).relative_to(PACKAGE))][line] = [name for name in names if name in seconds]
    return {"seconds": seconds, "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", default=list(AREAS), help=f"of {', '.join(AREAS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sample", type=int, default=200, help="mutants of each area and seed")
    parser.add_argument("--seconds", type=float, default=60, help="CPU seconds of tests at most for one mutant")
    parser.add_argument("--files", default="*", help="pattern of the files that are changed")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="tests that may notice")
    kept = "keep the map of lines to tests though the package changed; all: though tests changed too"
    parser.add_argument("--reuse", nargs="?", const="tests", choices=["tests", "all"], help=kept)
    parser.add_argument("--workers", type=int, default=2, help="mutants that are tried at once")
    parser.add_argument("--verbose", action="store_true", help="name what noticed each mutant too")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("SSMSCOPE_SMALL_PIECES", "1")
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as place:
        ignored = [f"--ignore={each}" for each in NEVER]
        options.place = Path(place)
        wanted = ["-q", "-p", "no:cacheprovider", *ignored, *options.tests]
        sys.exit(pytest.main(wanted, plugins=[Run(options)]))


if __name__ == "__main__":
    main()
