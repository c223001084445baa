"""Report on stderr of the cost of an explanation that takes more than two seconds: an estimate, and progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ssmscope.core.progress import on_stderr

MIN_REPORTED_SECONDS = 2.0
"""Smallest duration, in seconds, of a method whose cost is reported."""
WARMUP_SECONDS = 0.3
"""Seconds of work, or one gradient of a long one, after which the rate is trusted: the first runs are slow."""
REPORT_INTERVAL_SECONDS = 10.0
"""Seconds between two lines of progress."""


@dataclass(eq=False)
class Meter:
    """Counter of a method's gradients, which reports their cost by `say`, with times by `clock`."""

    say: Callable[[str], None] = field(default_factory=lambda: on_stderr().print)
    clock: Callable[[], float] = time.perf_counter

    def plan(self, label: str, lengths: list[int], least: int, most: int) -> None:
        """Start the count, before a method runs on texts of these lengths, each with so many gradients."""
        self._label, self._texts = label, len(lengths)
        self._gradients = [number * len(lengths) for number in (least, most)]
        self._tokens = [number * sum(lengths) for number in (least, most)]
        self._ran, self._read, self._begun = 0, 0, self.clock()
        self._said: float | None = None

    def ran(self, gradients: int, tokens: int, done: int = 0) -> None:
        """Count gradients of `tokens` tokens in all, and report; `done` texts are done."""
        self._ran += gradients
        self._read += tokens
        now = self.clock()
        seconds = [(now - self._begun) / self._read * each for each in self._tokens]
        if self._said is None:
            if seconds[0] > MIN_REPORTED_SECONDS and now - self._begun >= WARMUP_SECONDS:
                texts = f"{self._texts:,} texts take" if self._texts > 1 else "the text takes"
                number = _span([f"{count:,}" for count in self._gradients])
                self.say(f"{self._label}: {texts} {number} gradients, about {_span([duration(s) for s in seconds])}")
                self._said = now
        elif now - self._said >= REPORT_INTERVAL_SECONDS:
            share = f", {done:,} of {self._texts:,} texts done" if self._texts > 1 else ""
            self.say(f"{self._label}: {self._ran:,} gradients after {duration(now - self._begun)}{share}")
            self._said = now


def _span(ends: list[str]) -> str:
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def duration(seconds: float) -> str:
    """Format a time: "14 s", "2.5 min", "1.2 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"
