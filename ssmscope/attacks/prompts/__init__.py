"""Attacks on the prompt: drop of accuracy when the words around the text are changed.

Baleen, section 4.3 and Table 4, after PromptBench (Zhu et al. 2023): the performance drop rate
PDR = 1 − accuracy(attacked prompt) / accuracy(clean prompt).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import TEXT_MODELS, Data
from ssmscope.api.limits import DROP, SHARE
from ssmscope.api.options import (
    REPEATED,
    Cache,
    Embeddings,
    Encoder,
    LabelWords,
    Limit,
    MaskedLM,
    OneOf,
    Progress,
    Reads,
    Scoring,
    Seed,
)
from ssmscope.attacks.names import ATTACKS, FROM_PROMPTBENCH, PROMPTBENCH, SEMANTIC, check_asked, on_prompts
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.attacks.prompts.result import PromptAttack
    from ssmscope.core.model import Model
    from ssmscope.data.text import TextData

PAPER = ("stresstest", "checklist", "deepwordbug", "textbugger")
"""Attacks of Baleen's Table 4."""


def check_prompts(
    *,
    attacks: Sequence[str],
    template: str | Sequence[str] | None,
    suffix: str,
    as_promptbench: bool,
    semantic: str | Path | None,
    **others: Any,
) -> None:
    """Raise InputError if options contradict each other, or if templates or label words are not usable."""
    if SEMANTIC in attacks and semantic is None:
        raise InputError("the attack semantic needs rewritten prompts: give semantic=…, 'promptbench' or a text file")
    if as_promptbench and suffix != "end":
        raise InputError(f"as_promptbench=True places suffixes as PromptBench does; leave out suffix={suffix!r}, or it")
    if set(attacks) <= {*FROM_PROMPTBENCH} and (as_promptbench or suffix != "end"):
        raise InputError("as_promptbench=… and suffix=… are options of ssmscope's own attacks, and none is among them")
    check_asked(template=template, **others)
    given = [template] if isinstance(template, str) else list(template or ())
    if twice := [text for text in given if given.count(text) > 1]:
        raise InputError(f"the template {twice[0]!r:.60} is given twice; give each once")


@analysis(
    "prompts",
    reads=Data("texts"),
    question="How easily does another prompt break it?",
    models=TEXT_MODELS,
    check=check_prompts,
    sharded=True,
    scores={"prompts.clean": SHARE, "prompts.drop[ATTACK]": DROP},
    dimensions=(
        Dimension("Clean prompts", r"prompts\.clean", "accuracy"),
        *(
            Dimension(f"Prompts, {ATTACKS[name].row}", rf"prompts\.drop\[{re.escape(name)}\]", "drop of accuracy")
            for name in on_prompts()
            if ATTACKS[name].row
        ),
    ),
)
def prompt_attack(
    model: Model,
    data: TextData,
    *,
    attacks: Annotated[
        Sequence[str],
        f"{', '.join(on_prompts())}, {SEMANTIC}; PromptBench's own code as {FROM_PROMPTBENCH[0]}.",
        OneOf("attacks.names:on_prompts", (SEMANTIC, *FROM_PROMPTBENCH)),
    ] = PAPER,
    template: Annotated[
        str | Sequence[str] | None, "A prompt with {content}; may be repeated. By default those of DATA.", REPEATED
    ] = None,
    words: LabelWords = None,
    scoring: Scoring = "likelihood",
    normalise: Annotated[bool, "Divide log-likelihoods by the number of tokens."] = False,
    suffix: Annotated[Literal["end", "before"], "Place of suffixes: the prompt's end, or before {content}."] = "end",
    as_promptbench: Annotated[
        bool, "Search and place suffixes as PromptBench does; by default a change must cost accuracy."
    ] = False,
    embeddings: Embeddings = None,
    masked_lm: MaskedLM = None,
    encoder: Encoder = None,
    semantic: Annotated[
        Literal["promptbench"] | str | Path | None,
        "Rewritten prompts for the attack semantic: those of promptbench, or a text file's, one a line.",
        Reads("file", ("promptbench",)),
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    cache: Cache = None,
    progress: Progress = True,
) -> PromptAttack:
    """Attack the prompt with PromptBench's attacks, whose words TextAttack changes, and measure the performance drop
    rate. A killed run continues.

    An attack changes a template around its `{content}`, measures candidates on all examples, and ends at the prompt of
    lowest accuracy that it found; the drop is PDR = 1 − accuracy / clean accuracy (Baleen, Table 4). The placeholder
    and the words for the classes do not change. stresstest and checklist append fixed suffixes and try them all;
    semantic tries rewritten prompts; the others change words in a greedy search as PromptBench defines it, and stop
    measuring a candidate once it cannot be taken.

    PromptBench itself differs in two points, so its drops are not comparable with those of the default. Its searches
    score the initial prompt as −1 − accuracy and so always change the first word; here a change is taken only if it
    costs accuracy. And it places suffixes before the template's last punctuation; here they stand at its very end, or
    before `{content}`. With `as_promptbench` both follow PromptBench. (In neither does a space follow a suffix at a
    prompt's end, because the answer begins with its own.)

    `promptbench:stresstest` and so on are PromptBench's own attacks, run by that package (`prompt_attack.Attack`) in a
    row beside ours; the model's answers are batched as for ours. Templates that end in `{content}` are left out there,
    because PromptBench would put its suffix inside the braces.

    Every number has a 95 % interval over examples: Wilson's of an accuracy, else a bootstrap, in which clean and
    attacked accuracy, and averages over templates, come from the same resamples. The worst prompt is chosen on the same
    examples that it is measured on, which the intervals do not include. A template under which no answer is right has
    no drop and is not attacked.

    Random choices depend on seed, template and attack alone: with `cache`, a run that was killed and starts again
    has the same result and runs only what is missing.

    Args:
        model: a language model, or a classifier of texts, which reads the filled template.
        attacks: textfooler needs `embeddings`, bertattack `masked_lm`, and semantic `semantic`, which also adds it.
            PromptBench's own need the package promptbench, installed without what it pins.
        template: one or several; by default the data set's own (`TASK_PROMPTS`).
        words: by default the data set's own. A classifier has none.
        as_promptbench: excludes `suffix`, and needs TextAttack for suffixes too.

    Raises:
        InputError: a template without `{content}`, no template or words for data without their own, words that do not
            fit the classes, options that contradict each other, or a missing resource.
    """
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.attacks.curves import check_data, own_prompts, questions
    from ssmscope.attacks.prompts import from_promptbench
    from ssmscope.attacks.prompts.result import Cost, PromptAttack, answered, measured, notes_on
    from ssmscope.attacks.prompts.search import Judge, fixed, recipe_of, rewritten, tried_all
    from ssmscope.core.progress import on_stderr, progress_bar
    from ssmscope.data.prompts import TASK_PROMPTS
    from ssmscope.evaluation import Template

    check_data(data)
    own = own_prompts(data)
    if template is None and own is None:
        raise InputError(
            f"{data.name} has no task prompts of its own: give template=…, and for a language model words=… too "
            f"(data sets with their own are {', '.join(TASK_PROMPTS)})"
        )
    templates = (template,) if isinstance(template, str) else tuple(template or (own.templates if own else ()))
    asking: dict[str, Any] = dict(words=words, scoring=scoring, normalise=normalise, limit=limit, cache=cache)
    asked = questions(model, data, template=templates[0], seed=seed, **asking)
    candidates = rewritten(semantic, data.name) if semantic is not None else ()
    for text in candidates:
        Template(text)
    named = tuple(dict.fromkeys([*attacks, *([SEMANTIC] if semantic is not None else [])]))
    resources: dict[str, Any] = dict(embeddings=embeddings, masked_lm=masked_lm, encoder=encoder)
    theirs = {name: from_promptbench.own_recipe(name, templates) for name in named if name in FROM_PROMPTBENCH}
    recipes = [theirs.get(name) or recipe_of(name, candidates, resources) for name in named]
    judge = Judge(asked.evaluator, asked.contents, asked.labels)
    protected = asked.evaluator.words or asked.classes
    tries = {each.name: [fixed(each, text, suffix, as_promptbench) for text in templates] for each in recipes}
    found: dict[str, list[tuple[str, int] | None]] = {name: [] for name in named}
    with progress_bar(on_stderr(progress)) as bar:
        task = bar.add_task("clean and fixed prompts", total=len(recipes) * len(templates))
        # All fixed prompts are judged together, so that their common beginnings are run once.
        clean = judge.right([*templates, *(text for each in tries.values() for some in each for text in some)])
        clean = clean[: len(templates)]
        for each in recipes:
            for number, (text, some) in enumerate(zip(templates, tries[each.name])):
                bar.update(task, description=f"{each.name}, template {number}")
                place = None
                if clean[number].any() and some:
                    place = tried_all(text, some, judge)
                elif clean[number].any() and each.name in theirs:
                    place = from_promptbench.attacked(each, text, judge, words=protected, seed=seed)
                elif clean[number].any():
                    from ssmscope.attacks.prompts.goal import searched  # imports TextAttack

                    place = searched(each, text, judge, words=protected, seed=seed, as_promptbench=as_promptbench)
                found[each.name].append(place)
                bar.advance(task)
    right = {name: [judge.right([place[0]])[0] if place else None for place in found[name]] for name in found}
    average, per_template, per_attack, worst = measured(clean, right, recipes, found, seed)
    options = call_options(attacks=list(named), template=list(templates), words=asked.options["words"])
    provenance = record_provenance(model.source, options=options, seed=seed, data=asked.data)
    if theirs:
        provenance["versions"] |= {PROMPTBENCH: from_promptbench.version()}
    return PromptAttack(
        provenance=provenance,
        templates=templates,
        clean=per_template,
        average_clean=average,
        attacks=per_attack,
        worst=worst,
        right=answered(clean, right, named),
        cost=Cost(asked.evaluator.asked, asked.evaluator.run, asked.evaluator.seconds),
        notes=tuple(notes_on(clean, asked.labels, candidates, asked.evaluator.words)),
    )
