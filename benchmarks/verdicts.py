"""Verdicts by rule: what runs of two arms say about a question that was declared before.

A question has a measure, a margin below which a difference would not matter and, where the paper gives one, the paper's
difference. Its arms are independent runs (Welch); data sets that ask the same question are pooled, each with the same
weight. Questions of one family are tested together (Holm), and each interval has the level at which its question was
decided. The verdict is the first that applies:

- *equivalent within m*: the interval of level 0.05 / (number of questions) lies inside the margin: levels that widen
  from question to question would call more than one family in twenty equivalent that is not;
- *different*: it excludes 0;
- *the paper's effect is excluded*: it excludes the paper's number;
- *undecided*.

Beside it stands the smallest difference that this many runs could have seen: the one that a two-sided test at the same
level finds with a probability of 80 %. Less than five runs an arm are a case, and have no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from running import with_minus
from scipy import optimize, special, stats

LEVEL, POWER, FEWEST = 0.05, 0.8, 5

Arms = Sequence[tuple[Sequence[float], Sequence[float]]]
"""The runs of both arms on each data set."""


@dataclass(frozen=True)
class Question:
    """A difference of two arms, first less second, with its margin and the paper's, in the units of the measure."""

    name: str
    margin: float
    paper: float | None = None


@dataclass(frozen=True)
class Verdict:
    """An estimate with its corrected interval, the words, its standard error, degrees of freedom and level."""

    question: Question
    runs: tuple[int, int]
    estimate: float
    interval: tuple[float, float]
    words: str
    error: float
    freedom: float
    level: float = LEVEL

    @property
    def seen(self) -> float:
        """The smallest difference that these runs could have seen."""
        return smallest_seen(self.error, self.freedom, self.level)


def verdicts(family: Mapping[Question, Arms]) -> list[Verdict]:
    """Return the verdicts on a family of questions, in its order."""
    found = {question: _welch(arms) for question, arms in family.items()}
    levels = _holm({question: _p(*each) for question, each in found.items()})
    strict = LEVEL / max(len(family), 1)
    return [_verdict(question, family[question], found[question], levels[question], strict) for question in family]


def smallest_seen(error: float, freedom: float, level: float = LEVEL) -> float:
    """Return the difference that a two-sided t test of this level finds with a probability of 80 %, for estimates with
    this standard error and these degrees of freedom."""
    limit = special.stdtrit(freedom, 1 - level / 2)
    spreads = np.sqrt(stats.chi2.ppf((np.arange(1000) + 0.5) / 1000, freedom) / freedom)

    def missing(shift: float) -> float:
        return float(stats.norm.cdf(shift - limit * spreads).mean()) - POWER

    return float(error * optimize.brentq(missing, 0, 10 * limit + 10))


def _welch(arms: Arms) -> tuple[float, float, float]:
    """Return the mean difference over data sets, its standard error and degrees of freedom (Welch, Satterthwaite); of a
    single run nothing is known of the error."""
    differences = [np.mean(one) - np.mean(other) for one, other in arms]
    if any(len(arm) < 2 for both in arms for arm in both):
        return float(np.mean(differences)), math.inf, 1.0
    parts = [(np.var(arm, ddof=1) / len(arm) / len(arms) ** 2, len(arm) - 1) for both in arms for arm in both]
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / free for part, free in parts) if variance else float(parts[0][1])
    return float(np.mean(differences)), math.sqrt(variance), float(freedom)


def _p(estimate: float, error: float, freedom: float) -> float:
    if error == 0:
        return float(estimate == 0)
    return float(2 * special.stdtr(freedom, -abs(estimate) / error))


def _holm(p: Mapping[Question, float]) -> dict[Question, float]:
    """Return the level at which each question is decided: the least p at LEVEL / m, the next at LEVEL / (m − 1), … and,
    from the first that is not significant on, all at the level at which it failed."""
    levels, left = {}, len(p)
    for question in sorted(p, key=p.__getitem__):
        levels[question] = LEVEL / left
        left -= p[question] <= levels[question]
    return levels


def _verdict(question: Question, arms: Arms, found: tuple[float, float, float], level: float, strict: float) -> Verdict:
    estimate, error, freedom = found
    half, widest = (special.stdtrit(freedom, 1 - each / 2) * error for each in (level, strict))
    low, high = estimate - half, estimate + half
    runs = tuple(min(len(both[at]) for both in arms) for at in (0, 1))
    if min(runs) < FEWEST:
        words = "a case"
    elif abs(estimate) + widest < question.margin:
        words = f"equivalent within {question.margin:g}"
    elif low > 0 or high < 0:
        words = "different"
    elif question.paper is not None and not low <= question.paper <= high:
        words = "the paper's effect is excluded"
    else:
        words = "undecided"
    return Verdict(question, (runs[0], runs[1]), estimate, (low, high), words, error, freedom, level)


def against(
    base: Sequence[Sequence[float]],
    others: Mapping[str, Sequence[Sequence[float]]],
    margin: float,
    papers: Mapping[str, float] | None = None,
    digits: int = 3,
) -> list[str]:
    """Return a table's lines: what the runs of each other arm, data set by data set, say of its difference from those
    of `base`, as one family with one margin."""
    papers = papers or {}
    family = {
        Question(name, margin, papers.get(name)): list(zip(runs, base, strict=True)) for name, runs in others.items()
    }
    return table(verdicts(family), digits)


def table(found: Sequence[Verdict], digits: int = 3) -> list[str]:
    """Return the lines of a table, a row a question; the paper's number where any has one."""
    papers = any(each.question.paper is not None for each in found)
    names = ["question", "runs", "difference", "could have seen", "margin", *["the paper's"] * papers, "verdict"]
    rows = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for each in found:
        low, high = each.interval
        one, other = each.runs
        paper = "–" if each.question.paper is None else f"{each.question.paper:+.{digits}f}"
        difference = f"{each.estimate:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]".replace("-inf", "−∞")
        cells = [
            f"{one}, {other}",
            *(with_minus(cell).replace("inf", "∞") for cell in (difference, f"{each.seen:.{digits}f}")),
        ]
        cells += [f"{each.question.margin:g}", *[with_minus(paper)] * papers, f"**{each.words}**"]
        rows.append(f"| {' | '.join([each.question.name, *cells])} |")
    return rows
