"""Result of attacks on single texts: the outcome of every example, and totals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float
from markupsafe import Markup
from rich.text import Text
from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.api.scores import HIGHER, LOWER, Changed, Score, ScoreMaker, named
from ssmscope.core.bootstrap import INTERVALS, Estimate, estimate, ratio, resampled_sums, shares
from ssmscope.outline import outlined
from ssmscope.render.blocks import Block, Custom, Prose
from ssmscope.render.numbers import counted
from ssmscope.render.table import Cell, Line, Table, table, with_interval
from ssmscope.render.tokens import visible
from ssmscope.render.worddiff import html_diff, rich_diff

if TYPE_CHECKING:
    from pandas import DataFrame

WORD = re.compile(r"\w+(?:['’-]\w+)*")
SUCCESS, FAILED, SKIPPED = "success", "failed", "skipped"

SUMMARY = {
    "accuracy": "clean accuracy",
    "attacked": "accuracy under attack",
    "success": "success rate",
    "share": "share of words changed",
    "queries": "queries per example",
}
"""Names of the totals in views."""

WORD_BUDGETS = (1, 2, 4)
"""Numbers of changed words whose accuracies are scores."""


@outlined
class Outcome(NamedTuple):
    """End of a search: its text, the text's class probabilities, and the numbers of queries and gradients."""

    text: str
    probabilities: Float[np.ndarray, " classes"]
    queries: int
    gradients: int = 0


@dataclass(frozen=True)
class AttackedText:
    """Outcome of one example."""

    row: int
    """Row in the data, from 0."""
    status: str
    """"success": the predicted class has changed; "failed"; "skipped": the answer was wrong when clean."""
    label: int
    """True class."""
    clean: int
    """Class predicted on the clean text."""
    answer: int
    """Class predicted on the attacked text."""
    before: float
    """Probability of the true class on the clean text."""
    after: float
    """Probability of the true class on the attacked text."""
    queries: int
    """Number of texts that the model evaluated, including the clean one."""
    gradients: int
    words: int
    """Number of words of the clean text."""
    changed: int
    """Number of them that are missing from the attacked text in their order."""
    text: str
    attacked: str
    """Final text of the search: the adversarial text, or the closest to one."""

    @classmethod
    def of(cls, row: int, label: int, text: str, clean: np.ndarray, outcome: Outcome | None) -> AttackedText:
        """Combine an example and its clean probabilities with its outcome; None if it was not attacked."""
        attacked = outcome or Outcome(text, clean, queries=1)
        answer = int(attacked.probabilities.argmax())
        words, changed = changed_words(text, attacked.text)
        return cls(
            row=row,
            status=SKIPPED if outcome is None else FAILED if answer == label else SUCCESS,
            label=label,
            clean=int(clean.argmax()),
            answer=answer,
            before=float(clean[label]),
            after=float(attacked.probabilities[label]),
            queries=attacked.queries,
            gradients=attacked.gradients,
            words=words,
            changed=changed,
            text=text,
            attacked=attacked.text,
        )

    @property
    def share(self) -> float:
        """Share of the words that were changed."""
        return self.changed / self.words if self.words else 0.0


@dataclass(frozen=True)
class WordAttack(Result, kind="words"):
    """Accuracy under an attack on every text, and the text at which each attack ended."""

    recipe: str
    labels: tuple[str, ...]
    examples: tuple[AttackedText, ...]
    accuracy: Estimate
    """Accuracy on the clean texts."""
    attacked: Estimate
    """Share of the examples that are right when clean and keep their answer under attack."""
    success: Estimate
    """Share of the examples right when clean whose answer changes; undefined if none is right."""
    share: Estimate
    """Mean share of changed words over successful attacks."""
    queries: Estimate
    """Mean number of queries over the examples right when clean."""
    curve: np.ndarray
    """(words + 1, 3): accuracy and its interval when attacks that change more than 0, 1, 2, … words do not count."""
    ran: tuple[str, ...]
    """Parts of the attack that ran."""
    left_out: tuple[str, ...]
    """Parts of its definition that did not run, and why."""

    @property
    def summary(self) -> Mapping[str, Estimate]:
        """Totals by the names in `SUMMARY`."""
        return {name: getattr(self, name) for name in SUMMARY}

    def cells(self) -> dict[str, Cell]:
        return {SUMMARY[name]: Cell(one, digits=1 if name == "queries" else 3) for name, one in self.summary.items()}

    @property
    def successes(self) -> tuple[AttackedText, ...]:
        """Examples whose answer changed, those with the fewest changed words first."""
        found = [example for example in self.examples if example.status == SUCCESS]
        return tuple(sorted(found, key=lambda example: (example.changed, example.row)))

    def verdict(self, at: int = 0) -> str:
        return f"accuracy {self.accuracy.value:.3f}, {with_interval(self.attacked)} under {self.recipe}"

    @classmethod
    def compare(cls, results: Sequence[WordAttack], labels: Sequence[Sequence[str]]) -> Table:
        lines = [Line((label, r.recipe), r.cells(), r.recipe) for r, (label,) in zip(results, labels)]
        more = [SUMMARY[name] for name in ("accuracy", "attacked")]
        return table(("model", "attack"), lines, more=more, less=[SUMMARY["success"]])

    @property
    def headline(self) -> str:
        accuracies = f"{self.accuracy.value:.3f} clean, {self.attacked.value:.3f} under attack"
        return f"{self.recipe} on {self.model_name}: accuracy {accuracies}"

    @property
    def queries_made(self) -> str:
        gradients = sum(each.gradients for each in self.examples)
        return f"{sum(each.queries for each in self.examples):,} texts and {gradients:,} gradients"

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        make = ScoreMaker(self, models)
        budget = self.provenance["options"].get("budget")
        variant = (self.recipe, "" if budget is None else f"{budget} queries")
        right = np.array([one.status != "skipped" for one in self.examples])
        won = np.array([one.status == "success" for one in self.examples])
        changed = np.array([one.changed for one in self.examples])
        attacked: dict[str, Any] = dict(above=won, below=right, count=int(right.sum()), harm=True)
        yield make(named("words.success", *variant), self.success, LOWER, **attacked)
        for most in WORD_BUDGETS:
            allowed = f"{most} word{'s' * (most > 1)}"
            found = Estimate(*self.curve[min(most, len(self.curve) - 1)].tolist())
            withstood = right & ~(won & (changed <= most))
            yield make(named("words.accuracy", *variant, allowed), found, HIGHER, above=withstood)
        yield make(named("words.accuracy", *variant), self.attacked, HIGHER, above=right & ~won)

    def changed_answers(self, texts: Callable[[], Sequence[str]]) -> Iterator[Changed]:
        for one in self.successes:
            yield Changed(one.text, one.attacked, f"{one.changed} of {one.words} words changed by {self.recipe}")

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        return curve("accuracy by number of changed words", self.curve[:, 0])

    def to_frame(self) -> DataFrame:
        """A row per example. Columns: row (in the data, from 0), status, label, clean, answer (classes: the true one,
        those predicted on the clean and on the attacked text), before, after (the probability of the true class),
        queries, gradients, words, changed, share (of words changed), text, attacked."""
        import pandas as pd

        frame = pd.DataFrame(map(vars, self.examples), columns=[field.name for field in fields(AttackedText)])
        frame.insert(list(frame.columns).index("text"), "share", [each.share for each in self.examples])
        return frame.replace({name: dict(enumerate(self.labels)) for name in ("label", "clean", "answer")})

    def blocks(self) -> Iterable[Block]:
        data = self.provenance["data"]
        yield from self.opening()
        lines = [Line((name,), {self.recipe: cell}) for name, cell in self.cells().items()]
        yield replace(table(("",), lines), note="")
        count = {status: sum(each.status == status for each in self.examples) for status in (SUCCESS, FAILED, SKIPPED)}
        yield Prose(
            f"{counted(data['examples'], 'example')} of {data['name']} ({data['split']}): {count[SUCCESS]:,} answers "
            f"changed, {count[FAILED]:,} did not"
            + f"; {count[SKIPPED]:,} skipped, because their answers are wrong when clean" * (count[SKIPPED] > 0)
            + f". {INTERVALS}, over examples."
        )
        yield Prose(f"Ran: {'; '.join(self.ran)}.", "note")
        yield from (Prose(f"Note: {self.recipe} ran without {part}.", "note") for part in self.left_out)
        attacked = [*self.successes, *(each for each in self.examples if each.status == FAILED)]
        if not attacked:
            yield Prose("No example is right when clean: nothing was attacked.")
            return
        yield Prose("Attacked texts", "heading")
        yield Custom(lambda colours: terminal_texts(self), lambda: html_texts(self, attacked), STYLE)


def changed_words(text: str, attacked: str) -> tuple[int, int]:
    """Count the words of a text, and those outside its longest common subsequence with the attacked text."""
    old, new = WORD.findall(text), WORD.findall(attacked)
    longest = [0] * (len(new) + 1)
    for word in old:
        before = 0
        for place, other in enumerate(new, 1):
            best = before + 1 if word == other else max(longest[place - 1], longest[place])
            before, longest[place] = longest[place], best
    return len(old), len(old) - longest[-1]


def measure(examples: Sequence[AttackedText], seed: int) -> dict[str, Any]:
    """Compute the totals and the curve by the fields of `WordAttack`, from one set of resamples."""
    status = np.array([each.status for each in examples])
    parts, queries, changed = np.array([(each.share, each.queries, each.changed) for each in examples]).T
    right, won = status != SKIPPED, status == SUCCESS
    most = int(changed[won].max(initial=1))
    withstood = [right & ~(won & (changed <= allowed)) for allowed in range(most + 1)]
    columns = np.stack([right, won, won * parts, right * queries, *withstood], axis=1).astype(np.float64)
    sums = resampled_sums(columns, seed=seed)
    rights, wins, parts, asked = sums[:, :4].T
    return {
        "accuracy": estimate(rights / len(examples), of=len(examples)),
        "attacked": estimate((rights - wins) / len(examples), of=len(examples)),
        "success": estimate(ratio(wins, rights), of=rights[0]),
        "share": estimate(ratio(parts, wins)),
        "queries": estimate(ratio(asked, rights)),
        "curve": shares(sums[0, 4:], len(examples)),
    }


MAX_TERMINAL_TEXTS = 5
STYLE = """
.ssmscope .texts td { white-space: nowrap; }
.ssmscope .texts td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 24em; }
"""


def terminal_texts(result: WordAttack) -> Iterator[Text]:
    """Yield the successes with the fewest changed words."""
    yield Text("The successes with the fewest changed words:" if result.successes else "No attack succeeded.")
    for each in result.successes[:MAX_TERMINAL_TEXTS]:
        line = Text(f"row {each.row}, {_turn(result, each)}: ", style="bold")
        yield line.append_text(rich_diff(visible(each.text), visible(each.attacked)))


def _turn(result: WordAttack, each: AttackedText) -> str:
    """Describe the change of class and of the true class's probability."""
    label, answer = visible(result.labels[each.label]), visible(result.labels[each.answer])
    turn = f"{label} → {answer}" if each.answer != each.label else label
    return f"{turn} (p {each.before:.2f} → {each.after:.2f})"


def html_texts(result: WordAttack, attacked: Sequence[AttackedText]) -> str:
    """Render a table of the first attacked texts."""
    won = set(result.successes)
    heads = ("row", "class", "p of the true class", "words", "queries", "text")
    rows = Markup("")
    for each in attacked[:TABLE_ROWS]:
        label, answer = result.labels[each.label], result.labels[each.answer]
        turn = f"{label} → {answer}" if each in won else Markup("{} <small>failed</small>").format(label)
        words = Markup("{} <small>of {}</small>").format(each.changed, each.words)
        cells = (each.row, turn, f"{each.before:.3f} → {each.after:.3f}", words, f"{each.queries:,}")
        text = Markup(html_diff(each.text, each.attacked))
        rows += Markup('<tr>{}<td class="text">{}</td></tr>').format(in_tags("td", cells), text)
    table = (
        '<div class="wide" tabindex="0"><table class="texts"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    )
    cut = f'<p class="note">{TABLE_ROWS} of {len(attacked):,} attacked examples.</p>'
    return Markup(table + (cut if len(attacked) > TABLE_ROWS else "")).format(in_tags("th", heads), rows)


def in_tags(tag: str, parts: Sequence[object]) -> Markup:
    return Markup("").join(Markup(f"<{tag}>{{}}</{tag}>").format(part) for part in parts)
