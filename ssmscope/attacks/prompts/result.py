"""Result of attacks on prompts: accuracies and drops with their intervals, the worst prompts, and the cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int
from markupsafe import Markup, escape
from rich.text import Text
from ssmscope.api.results import Result
from ssmscope.api.scores import HIGHER, LOWER, Changed, Lost, Score, ScoreMaker, average, first_wrong, lost, named
from ssmscope.attacks.closing import percent, tidy
from ssmscope.attacks.names import FROM_PROMPTBENCH, PROMPTBENCH, SEMANTIC, Recipe
from ssmscope.core.bootstrap import INTERVALS, Estimate, estimate, lowest, ratio, resampled_sums
from ssmscope.core.ties import descending
from ssmscope.render.blocks import Block, Custom, Prose
from ssmscope.render.html import grid
from ssmscope.render.numbers import counted, with_ties
from ssmscope.render.table import Cell, Line, Table, in_percent, table, with_interval
from ssmscope.render.tokens import unbroken
from ssmscope.render.worddiff import html_diff, rich_diff

if TYPE_CHECKING:
    from pandas import DataFrame

UNDEFINED = Estimate(math.nan, math.nan, math.nan)

MEASURED = {
    False: "Measured as ssmscope does: a search takes a change only if it costs accuracy, and suffixes stand at the "
    "prompt's end or before its content; not comparable with PromptBench's own drops.",
    True: "Measured as PromptBench does: a search always takes a change of the first word, and suffixes stand before "
    "the prompt's last punctuation; not comparable with ssmscope's own drops.",
}
"""Explanation of the drops, by `as_promptbench`."""


@dataclass(frozen=True)
class AttackedPrompt:
    """Outcome of an attack on one template."""

    prompt: str | None
    """Worst prompt that it found; None if no answer is right under the template."""
    accuracy: Estimate
    drop: Estimate
    """PDR, 1 − accuracy / clean accuracy."""
    tried: int
    """Number of measured prompts other than the template; some attacks use a part of them to rank words."""


@dataclass(frozen=True)
class PromptAttacker:
    """An attack on all templates."""

    name: str
    prompts: tuple[AttackedPrompt, ...]
    """One for each template."""
    accuracy: Estimate
    """Mean over the templates that were attacked."""
    drop: Estimate
    """Mean PDR over these templates."""
    worst: int | None
    """Template (0, 1, …) with the largest drop; None if no drop is defined."""
    ran: tuple[str, ...]
    """Parts of the attack's definition that ran."""
    left_out: tuple[str, ...]
    """Parts that did not run, and why."""

    @property
    def tried(self) -> int:
        """Number of prompts tried over all templates."""
        return sum(found.tried for found in self.prompts)


@dataclass(frozen=True)
class Cost:
    """Cost of the answers; a run that continues from a cache runs fewer rows."""

    asked: int
    """Number of filled prompts that were asked for."""
    run: int
    """Number of prompts that the model ran; the others were known."""
    seconds: float
    """Running time, including earlier runs whose answers are in the cache."""


@dataclass(frozen=True)
class PromptAttack(Result, kind="prompts"):
    """Accuracy under clean and attacked prompts, attack by attack and template by template."""

    templates: tuple[str, ...]
    clean: tuple[Estimate, ...]
    """Accuracy under each template."""
    average_clean: Estimate
    attacks: tuple[PromptAttacker, ...]
    worst: tuple[int, ...]
    """Attack with the largest mean drop, and those indistinguishable from it (`bootstrap.lowest`); empty if no drop is
    defined."""
    cost: Cost
    notes: tuple[str, ...]
    right: np.ndarray | None = None
    """(1 + attacks, templates, examples) int8: 1 for a right answer under each template and under the worst prompt of
    each attack, 0 for a wrong one, −1 for a template that was not attacked."""

    def verdict(self, at: int = 0) -> str:
        defined = [one for one in self.attacks if not math.isnan(one.drop.value)]
        if not defined:
            return f"accuracy {with_interval(self.average_clean)}, no PDR defined"
        worst, *others = (defined[at] for at in descending(np.array([one.drop.value for one in defined])))
        way = " as PromptBench measures it" if self.as_promptbench else ""
        most = f"PDR{way} {in_percent(worst.drop)} under {worst.name}"
        listed = ", ".join(f"{one.name} {in_percent(one.drop, interval=False)}" for one in others)
        return f"{most} (▼ the worst), {listed}" if others else most

    @classmethod
    def compare(cls, results: Sequence[PromptAttack], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        less: list[str] = []
        for result, (label,) in zip(results, labels):
            cells = {"clean accuracy": Cell(result.average_clean)}
            drops = [each.drop.value for each in result.attacks if not math.isnan(each.drop.value)]
            for each in result.attacks:
                name = f"PDR of {each.name}, %"
                less.append(name)
                worst = len(set(drops)) > 1 and each.drop.value == max(drops)
                cells[name] = Cell(each.drop.times(100), digits=1, worst=worst)
            lines.append(Line((label,), cells, "all"))
        ways = dict.fromkeys(result.measured for result in results)
        note = " ".join(["PDR: 1 − accuracy under the attack / clean accuracy, mean over templates.", *ways])
        return table(("model",), lines, more=["clean accuracy"], less=less, note=note)

    @property
    def headline(self) -> str:
        start = f"Prompt attacks on {self.model_name}: accuracy {self.average_clean.value:.3f} clean"
        if not self.worst:
            return f"{start}, no drop defined"
        accuracies = [one.accuracy.value for one in self.attacks if not math.isnan(one.drop.value)]
        if where := with_ties([self.attacks[at].name for at in self.worst], len(accuracies)):
            accuracy = self.attacks[self.worst[0]].accuracy.value
            return f"{start}, {accuracy:.3f} under {'the worst on average, ' * (len(accuracies) > 1)}{where}"
        ends = dict.fromkeys(f"{end:.3f}" for end in (min(accuracies), max(accuracies)))
        return f"{start}, {' to '.join(ends)} attacked, under no attack clearly lowest"

    @property
    def as_promptbench(self) -> bool:
        """True if searches start and suffixes stand as in PromptBench."""
        return bool(self.provenance.get("options", {}).get("as_promptbench", False))

    @property
    def measured(self) -> str:
        """Sentences that say whether drops are measured as PromptBench does, and which of them by PromptBench."""
        theirs = [one.name for one in self.attacks if one.name in FROM_PROMPTBENCH]
        own = [MEASURED[self.as_promptbench]] if len(theirs) < len(self.attacks) else []
        release = f" {version}" if (version := self.provenance.get("versions", {}).get(PROMPTBENCH)) else ""
        return " ".join([*own, *([f"{', '.join(theirs)}: run by PromptBench{release} itself."] if theirs else [])])

    @property
    def queries_made(self) -> str:
        return f"{self.cost.asked:,} filled prompts, {self.cost.run:,} of them run"

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        make = ScoreMaker(self, models)
        clean = None if self.right is None else self.right[0].mean(0)
        yield make("prompts.clean", self.average_clean, HIGHER, above=clean)
        for at, one in enumerate(self.attacks):
            found: list[Lost | None] = [None]
            if self.right is not None:
                found = [lost(*pair) for pair in zip(self.right[0], self.right[1 + at]) if (pair[1] >= 0).all()]
            yield make(named("prompts.drop", one.name), one.drop, LOWER, harm=True, **average(found))

    def changed_answers(self, texts: Callable[[], Sequence[str]]) -> Iterator[Changed]:
        for text, at in first_wrong(None if self.right is None else self.right[:, 0], texts):
            attack = self.attacks[at]
            yield Changed(text, None, f"the prompt “{attack.prompts[0].prompt}” of {attack.name}")

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import bars

        return bars("drop by attack", [one.drop.value for one in self.attacks])

    def to_frame(self) -> DataFrame:
        """A row for each attack and template, and for each attack its average over templates and its worst template.
        Columns: part (template, average, worst), attack, template (0, 1, …; none for an average), clean and accuracy
        (shares of the examples), drop (PDR in percent), each with its 95 % interval in columns ending in _low and
        _high, tried (prompts measured; of an average, over all templates), prompt (the worst one found), clean_prompt,
        and measured_as ("ssmscope" or "promptbench"), which `attrs["caption"]` says in a sentence."""
        rows: list[dict[str, Any]] = []
        for one in self.attacks:
            each = [
                {**vars(found), "part": "template", "template": at, "clean": clean, "clean_prompt": text}
                for at, (text, clean, found) in enumerate(zip(self.templates, self.clean, one.prompts))
            ]
            mean = {"clean": self.average_clean, "accuracy": one.accuracy, "drop": one.drop, "tried": one.tried}
            worst = [each[one.worst] | {"part": "worst"}] if one.worst is not None else []
            every = [*each, {"part": "average", **mean}, *worst]
            rows += [row | {"attack": one.name, "drop": row["drop"].times(100)} for row in every]
        columns = ["part", "attack", "template", "clean", "accuracy", "drop", "tried", "prompt", "clean_prompt"]
        frame = tidy(rows, columns).astype({"template": "Int64", "tried": "Int64"})
        as_promptbench = frame["attack"].isin(FROM_PROMPTBENCH) | self.as_promptbench
        frame["measured_as"] = as_promptbench.map({True: "promptbench", False: "ssmscope"})
        frame.attrs["caption"] = self.measured
        return frame

    def blocks(self) -> Iterable[Block]:
        data, cost, several = self.provenance["data"], self.cost, len(self.templates) > 1
        yield from self.opening()
        lines = [Line(("clean",), {"accuracy": Cell(self.average_clean)})]
        for one in self.attacks:
            cells = {"accuracy": Cell(one.accuracy), "drop (PDR) in %": percent(one.drop)}
            if several:
                worst = (
                    "–" if one.worst is None else in_percent(one.prompts[one.worst].drop, interval=False, sign=False)
                )
                cells["worst drop in %"] = Cell(text=worst + f" (template {one.worst})" * (one.worst is not None))
            lines.append(Line((one.name,), {**cells, "tried": Cell(text=f"{one.tried:,}")}))
        yield replace(table(("prompt",), lines), note="")
        if several:
            yield Custom(html=lambda: by_template(self))
        templates = f"{len(self.templates)} templates (averages over them)" if several else "one template"
        yield Prose(
            f"{counted(data['examples'], 'example')} of {data['name']} ({data['split']}), {templates}; {INTERVALS}. "
            f"{self.measured}"
        )
        if any(one.worst is not None for one in self.attacks):
            yield Prose("The worst prompts", "heading")
        yield Custom(lambda colours: terminal_prompts(self), lambda: html_prompts(self), STYLE)
        left = [f"{one.name} ran without {part}" for one in self.attacks for part in one.left_out]
        yield from (Prose(f"Note: {note}.", "note") for note in (*left, *self.notes))
        took = f"{cost.asked:,} filled prompts, {cost.run:,} of them run by the model, in {cost.seconds:,.1f} s."
        yield Prose(took, "note")


def measured(
    clean: np.ndarray,
    right: Mapping[str, Sequence[np.ndarray | None]],
    recipes: Sequence[Recipe],
    found: Mapping[str, Sequence[tuple[str, int] | None]],
    seed: int,
) -> tuple[Estimate, tuple[Estimate, ...], tuple[PromptAttacker, ...], tuple[int, ...]]:
    """Compute all estimates from one set of resamples.

    Args:
        clean: (templates, examples) bool, True where the answer under a template is right.
        right: the same under the worst prompt, by attack and template; None if the template was not attacked.
        found: the worst prompt and how many were tried, by attack and template.

    Returns:
        The mean clean accuracy, that of each template, each attack's estimates, and the worst attacks.
    """
    examples, number = clean.shape[1], len(clean)
    missing = np.full(examples, math.nan)
    attacked = [each if each is not None else missing for one in recipes for each in right[one.name]]
    sums = resampled_sums(np.concatenate([clean, np.stack(attacked)]).T.astype(np.float64), seed=seed)
    below = sums[:, :number]
    attackers, drops = [], []
    for index, one in enumerate(recipes):
        hits = sums[:, number * (index + 1) : number * (index + 2)]
        accuracy, drop = hits / examples, 1 - ratio(hits, below)
        there = [at for at in range(number) if right[one.name][at] is not None]
        prompts = [
            AttackedPrompt(prompt, estimate(accuracy[:, at], of=examples), estimate(drop[:, at]), tried)
            for at, (prompt, tried) in enumerate(place or (None, 0) for place in found[one.name])
        ]
        drops.append(drop[:, there].mean(1) if there else np.full(len(drop), math.nan))
        mean = estimate(accuracy[:, there].mean(1), of=examples * (len(there) == 1)) if there else UNDEFINED
        worst = there[descending(np.array([prompts[at].drop.value for at in there]))[0]] if there else None
        own = PromptAttacker(one.name, tuple(prompts), mean, estimate(drops[-1]), worst, one.ran, one.left_out)
        attackers.append(own)
    per_template = tuple(estimate(below[:, at] / examples, of=examples) for at in range(number))
    mean = per_template[0] if number == 1 else estimate(below.mean(1) / examples)
    return mean, per_template, tuple(attackers), lowest(-np.stack(drops, axis=1))


def answered(
    clean: np.ndarray, right: Mapping[str, Sequence[np.ndarray | None]], names: Sequence[str]
) -> Int[np.ndarray, "attacks+1 templates examples"]:
    """Return right answers under the templates and under the worst prompts of the attacks, −1 without a prompt."""
    missing = np.full(clean.shape[1], -1)
    every = [[missing if one is None else one for one in right[name]] for name in names]
    return np.array([clean, *every]).astype(np.int8)


def notes_on(
    clean: np.ndarray, labels: np.ndarray, candidates: Sequence[str], words: Sequence[str] | None
) -> Iterator[str]:
    """Yield notes on the clean accuracies and on the rewritten prompts."""
    if nothing := [str(i) for i, right in enumerate(clean) if not right.any()]:
        yield f"under template {', '.join(nothing)} no answer is right: there is no drop to measure"
    share = np.bincount(labels).max() / len(labels)
    if poor := [str(i) for i, right in enumerate(clean) if 0 < right.mean() <= share]:
        yield (
            f"under template {', '.join(poor)} the clean accuracy is no higher than always answering the most frequent "
            f"class, {share:.3f}: a drop from there means little"
        )
    words = words or ()
    without = sum(not all(word.lower() in prompt.lower() for word in words) for prompt in candidates)
    if without:
        yield f"{without} of {len(candidates)} rewritten prompts do not name every answer ({', '.join(words)})"


UNCHANGED = "no prompt it tried is worse than the template"
STYLE = """
.ssmscope .prompt { white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0 12px; }
"""


def _prompts(one: PromptAttacker, result: PromptAttack) -> tuple[str, str]:
    """Return the template with the largest drop, and its worst prompt."""
    assert one.worst is not None
    return result.templates[one.worst], one.prompts[one.worst].prompt or ""


def terminal_prompts(result: PromptAttack) -> Iterator[Text]:
    """Yield the worst prompt of each attack with its changes."""
    for number, one in enumerate(one for one in result.attacks if one.worst is not None):
        before, after = _prompts(one, result)
        where = f", template {one.worst}" if len(result.templates) > 1 else ""
        line = Text("\n" if number else "").append(f"{one.name}{where}: ", style="bold")
        if after == before:
            yield line.append(UNCHANGED)
        elif one.name == SEMANTIC:
            yield line.append(after.replace("\n", "⏎"))
        else:
            yield line.append_text(rich_diff(before, after))


def html_prompts(result: PromptAttack) -> str:
    """Render the worst prompts with numbers and, folded away, the templates and the parts of each attack."""
    shown = Markup("")
    for one in result.attacks:
        if one.worst is None:
            continue
        before, after = _prompts(one, result)
        if after == before:
            marked = escape(f"{UNCHANGED[0].upper()}{UNCHANGED[1:]}.")
        else:
            marked = escape(after) if one.name == SEMANTIC else Markup(html_diff(before, after))
        found = one.prompts[one.worst]
        numbers = f"{result.clean[one.worst].value:.3f} → {found.accuracy.value:.3f}, drop {in_percent(found.drop)}"
        head = Markup("<b>{}, template {}</b>: {}").format(one.name, one.worst, unbroken(numbers))
        shown += Markup('<div>{}</div><p class="prompt">{}</p>').format(head, marked)
    items = Markup("").join(Markup('<li class="prompt">{}</li>').format(template) for template in result.templates)
    item = Markup("<li><b>{}</b>: {}</li>")
    parts = Markup("").join(item.format(one.name, "; ".join(one.ran)) for one in result.attacks)
    templates = Markup('<details><summary>Templates</summary><ol start="0">{}</ol></details>').format(items)
    return shown + templates + Markup("<details><summary>What ran</summary><ul>{}</ul></details>").format(parts)


def by_template(result: PromptAttack) -> str:
    """Render accuracy and drop of each attack under each template as two tables, an attack's extreme drops marked."""
    columns = [*(f"template {number}" for number in range(len(result.templates))), "average"]
    accuracies = [Line(("clean",), dict(zip(columns, map(Cell, (*result.clean, result.average_clean)))))]
    drops = []
    for one in result.attacks:
        found = (*(each.accuracy for each in one.prompts), one.accuracy)
        accuracies.append(Line((one.name,), dict(zip(columns, map(Cell, found)))))
        values = [each.drop.value for each in one.prompts if not math.isnan(each.drop.value)]
        low, high = (min(values), max(values)) if len(set(values)) > 1 else (None, None)
        cells = [
            Cell(each.drop.times(100), digits=1, best=each.drop.value == low, worst=each.drop.value == high)
            for each in one.prompts
        ]
        drops.append(Line((one.name,), dict(zip(columns, [*cells, Cell(one.drop.times(100), digits=1)]))))
    note = (
        "Drop (PDR) in %; the worst prompts were chosen on the same examples. The template with the smallest drop of "
        "each attack is bold, the one with the largest underlined."
    )
    return grid(table(("accuracy",), accuracies)) + grid(replace(table(("drop in %",), drops), note=note))
