"""Requirements on a report's scores, as they are written on the command line and in plans.

    NAME <= NUMBER [%] [at LEVEL %] [for MODEL]
    NAME no worse than REFERENCE [by NUMBER [%]] [at LEVEL %] [for MODEL]

REFERENCE is `baseline`, an earlier report, or a model of the same report.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ssmscope.errors import InputError

BASELINE = "baseline"
"""Reference that stands for the earlier report."""
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda value, limit: value <= limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
    ">": lambda value, limit: value > limit,
}
MAX_REQUIREMENTS = 1000
"""Maximum number of requirements of a report."""
MAX_CHARACTERS = 500
"""Maximum length of a requirement."""
MIN_LEVEL = 0.5
"""Lower end of the confidence levels; at it a one-sided bound is the estimate."""

_NUMBER = r"[-+−]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SIZE = rf"(?P<limit>{_NUMBER})(?P<percent>\s*%)?"
_TAIL = rf"(?P<tail>(?:\s+at\s+(?P<level>{_NUMBER})\s*%)?(?:\s+for\s+(?P<model>\S.*))?)\s*"
_LIMIT = re.compile(rf"\s*(?P<name>\S.*?)\s*(?P<operator><=|>=|≤|≥|<|>)\s*{_SIZE}{_TAIL}")
_NO_WORSE = re.compile(rf"\s*(?P<name>\S.*?)\s+no\s+worse\s+than\s+(?P<reference>\S.*?)(?:\s+by\s+{_SIZE})?{_TAIL}")


@dataclass(frozen=True)
class Requirement:
    """A limit of a score, or of how much worse it may be than that of a reference."""

    text: str
    name: str
    """The score's name, such as "words.success[deepwordbug]"."""
    operator: str
    """One of `OPERATORS`; empty for "no worse than"."""
    limit: float
    """The limit, or the margin of "no worse than"; of a share from 0 to 1."""
    reference: str | None
    """`BASELINE` or a model of the report; None for a limit."""
    level: float | None
    """Confidence as a share; None if the estimate decides."""
    model: str | None
    """The one model from which it is required; None for all that have the score."""
    percent: bool = False
    """True if the limit was written in percent."""


def requirement_texts(given: object) -> tuple[str, ...]:
    """Return the requirements of a plan as written, from a text, a list of texts, or nothing."""
    found = [] if given is None else given if isinstance(given, list) else [given]
    wrong = [one for one in found if not isinstance(one, str) or not one.strip()]
    if wrong or given == []:
        shown = "nothing" if not wrong or wrong[0] in (None, "") else f"{wrong[0]!r:.60}"
        raise InputError(f"require has {shown}; give texts such as 'accuracy >= 0.8 at 95 %'")
    return tuple(found)


def read_requirement(text: str) -> Requirement:
    """Read a requirement. Raise InputError if it cannot be understood."""
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"a requirement has {len(text):,} characters; at most {MAX_CHARACTERS} are allowed")
    found = _NO_WORSE.fullmatch(text) or _LIMIT.fullmatch(text)
    named = {} if found is None else found.groupdict()
    if not named or re.search(r"\s(by|at)\s", named.get("reference", "")):
        _refuse(text)
    limit = 0.0 if named["limit"] is None else _number(named["limit"])
    percent = named["percent"] is not None
    limit = round(limit / 100, 15) if percent else limit
    level = None if named["level"] is None else round(_number(named["level"]) / 100, 12)
    if level is not None and not MIN_LEVEL < level < 1:
        given = f"{named['level']} %"
        raise InputError(f"require {text!r}: the level is {given}; give one above 50 % and below 100 %, to 10 decimals")
    if "reference" in named and limit < 0:
        raise InputError(f"require {text!r}: the margin is {limit:g}; give a number of at least 0")
    return Requirement(
        text=" ".join(text.split()),
        name=named["name"],
        operator=named.get("operator", "").replace("≤", "<=").replace("≥", ">="),
        limit=limit,
        reference=named.get("reference"),
        level=level,
        model=None if named["model"] is None else named["model"].strip(),
        percent=percent,
    )


def read_requirements(texts: Sequence[str], *, baseline: bool) -> tuple[Requirement, ...]:
    """Read requirements, each once, in their order; `baseline` says whether there is an earlier report. Raise
    InputError for one that cannot be understood, or that needs the earlier report where there is none."""
    found = tuple(dict.fromkeys(map(read_requirement, texts)))
    if len(found) > MAX_REQUIREMENTS:
        raise InputError(f"there are {len(found):,} requirements; at most {MAX_REQUIREMENTS:,} are allowed")
    for each in found:
        if each.reference == BASELINE and not baseline:
            raise InputError(f"require {each.text!r} needs an earlier report; give it with --baseline DIR")
    return found


def _number(text: str) -> float:
    return float(text.replace("−", "-"))


def _refuse(text: str) -> NoReturn:
    hint = ""
    if re.search(rf"\sat\s+{_NUMBER}(?!\s*%)", text):
        hint = "; a level ends in %, as in 'at 95 %'"
    elif re.search(r"[^<>]==?\s*", text):
        hint = "; the comparisons are <=, >=, < and >"
    raise InputError(
        f"require {text!r} is not understood; write 'NAME <= NUMBER' or 'NAME no worse than baseline by NUMBER', then "
        f"'at 95 %' and 'for MODEL' where wanted{hint}"
    )
