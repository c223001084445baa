"""Attacks on the prompt: drop of accuracy when the words around the text are changed.

Baleen, section 4.3 and Table 4, after PromptBench (Zhu et al. 2023): the performance drop rate
PDR = 1 − accuracy(attacked prompt) / accuracy(clean prompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import TEXT_MODELS, Data
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
from ssmscope.attacks.prompts.checks import SEMANTIC, check_parts, check_prompts
from ssmscope.attacks.recipes import PROMPT

if TYPE_CHECKING:
    from ssmscope.attacks.prompts.result import PromptAttack
    from ssmscope.core.model import Model
    from ssmscope.data.text import TextData

PAPER = ("stresstest", "checklist", "deepwordbug", "textbugger")
"""Attacks of Baleen's Table 4."""


@analysis(
    "prompts",
    reads=Data("texts"),
    question="How easily does another prompt break it?",
    models=TEXT_MODELS,
    check=check_prompts,
    sharded=True,
)
def prompt_attack(
    model: Model,
    data: TextData,
    *,
    attacks: Annotated[
        Sequence[str],
        f"{', '.join(PROMPT)}, {SEMANTIC}.",
        OneOf("attacks.recipes:PROMPT", (SEMANTIC,)),
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
    """Attack the prompt with PromptBench's attacks and measure the performance drop rate. A killed run continues.

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

    Every number has a 95 % bootstrap interval over examples; clean and attacked accuracy come from the same resamples,
    and so do averages over templates. The worst prompt is chosen on the same examples that it is measured on, which
    the intervals do not include. A template under which no answer is right has no drop and is not attacked.

    Random choices depend on seed, template and attack alone: with `cache`, a run that was killed and starts again
    has the same result and runs only what is missing.

    Args:
        model: a language model, or a classifier of texts, which reads the filled template.
        attacks: textfooler needs `embeddings`, bertattack `masked_lm`, and semantic `semantic`, which also adds it.
        template: one or several; by default the data set's own (`TASK_PROMPTS`).
        words: by default the data set's own. A classifier has none.
        as_promptbench: excludes `suffix`, and needs TextAttack for suffixes too.

    Raises:
        InputError: a template without `{content}`, no template or words for data without their own, words that do not
            fit the classes, options that contradict each other, or a missing resource.
    """
    from ssmscope.api.results import call_options, record_provenance
    from ssmscope.attacks.curves import check_data
    from ssmscope.attacks.prompts.measure import attacked, fixed, labels_and_words, notes_on, own_prompts, recipe_of
    from ssmscope.attacks.prompts.result import Cost, PromptAttack, measured
    from ssmscope.attacks.prompts.search import Judge, rewritten
    from ssmscope.core.progress import on_stderr, progress_bar
    from ssmscope.data.prompts import TASK_PROMPTS, content_of
    from ssmscope.data.text import SOURCES
    from ssmscope.evaluation import Evaluator, Template

    check_data(data)
    named = tuple(dict.fromkeys([*attacks, *([SEMANTIC] if semantic is not None else [])]))
    known = data.name in SOURCES and data.label_names == SOURCES[data.name].labels
    if limit is not None:
        data = data.sample(limit, seed=seed)
    own = TASK_PROMPTS.get(data.name) if known else None
    given = (template,) if isinstance(template, str) else template
    templates = tuple(given) if given is not None else own_prompts(own, data, "a template").templates
    labels, chosen = labels_and_words(model, data, words, own)
    contents = [content_of(data.name, text) if known else text for text in data.texts]
    candidates = rewritten(semantic, data.name) if semantic is not None else ()
    for text in candidates:
        Template(text)
        check_parts(text)
    resources: dict[str, Any] = dict(embeddings=embeddings, masked_lm=masked_lm, encoder=encoder)
    recipes = [recipe_of(name, candidates, resources) for name in named]
    evaluator = Evaluator(model, words=chosen, scoring=scoring, normalise=normalise, cache=cache)
    judge = Judge(evaluator, contents, labels)
    protected = chosen if chosen is not None else data.label_names
    tries = {each.name: [fixed(each, text, suffix, as_promptbench) for text in templates] for each in recipes}
    found: dict[str, list[tuple[str, int] | None]] = {name: [] for name in named}
    with progress_bar(on_stderr(progress)) as bar:
        task = bar.add_task("clean and fixed prompts", total=len(recipes) * len(templates))
        # All fixed prompts are judged together, so that their common beginnings are run once.
        clean = judge.right([*templates, *(text for each in tries.values() for some in each for text in some)])
        clean = clean[: len(templates)]
        for each in recipes:
            for number, text in enumerate(templates):
                bar.update(task, description=f"{each.name}, template {number}")
                place = None
                if clean[number].any():
                    some = tries[each.name][number]
                    place = attacked(each, text, some, judge, protected, seed, as_promptbench)
                found[each.name].append(place)
                bar.advance(task)
    answers = None if chosen is None else list(chosen)
    options = call_options(attacks=list(named), template=list(templates), words=answers)
    right = {
        name: [judge.right([place[0]])[0] if place is not None else None for place in places]
        for name, places in found.items()
    }
    average, per_template, per_attack, worst = measured(clean, right, recipes, found, seed)
    return PromptAttack(
        provenance=record_provenance(model.source, options=options, seed=seed, data=data),
        templates=templates,
        clean=per_template,
        average_clean=average,
        attacks=per_attack,
        worst=worst,
        cost=Cost(evaluator.asked, evaluator.run, evaluator.seconds),
        notes=tuple(notes_on(clean, labels, candidates, chosen)),
    )
