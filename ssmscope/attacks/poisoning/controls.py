"""Control triggers: what the words of a trigger do in any order, and what words do that speak for the same answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from ssmscope.attacks.curves import Questions
from ssmscope.attacks.poisoning.memory import Trigger, Vocabulary
from ssmscope.attacks.poisoning.result import MATCHED, SHUFFLED

NUMBER = 5
"""Maximum number of triggers of each control."""
MAX_WORDS_READ = 5000
"""Maximum number of words whose log-odds are computed, drawn at random from longer vocabularies."""
NEAREST, DRAWN = 8, 100
"""Number of words of nearest log-odds to draw from at each place of a trigger, and number of triggers drawn."""
MAX_GAP = 0.5
"""Maximum difference, in nats, of log-odds that are called equal."""


def controls(asked: Questions, vocabulary: Vocabulary, trigger: Trigger, seed: int) -> dict[str, list[Trigger]]:
    """Return triggers to compare a found one with; a control of which there are none is left out.

    shuffled: its words in other orders. log-odds: other words, each of nearly the log-odds of the word in its place, of
    which those triggers are kept whose own log-odds are nearest to the trigger's and equal them. Log-odds are those of
    the classes for the word or trigger alone, in the template if there is one, where nothing can be forgotten.
    """
    random = np.random.default_rng([seed, 3])
    orders = [tuple(random.permutation(trigger).tolist()) for _ in range(DRAWN)]
    shuffled = [each for each in dict.fromkeys(orders) if each != trigger][:NUMBER]
    own = list(dict.fromkeys(trigger))
    words = random.permutation(np.setdiff1d(np.arange(len(vocabulary)), own))[:MAX_WORDS_READ]
    matched: list[Trigger] = []
    if len(words):
        odds = log_odds(asked, vocabulary, [(word,) for word in (*own, *words.tolist())])
        near = {
            word: words[np.argsort(np.linalg.norm(odds[len(own) :] - odds[at], axis=1), kind="stable")[:NEAREST]]
            for at, word in enumerate(own)
        }
        nearest = tuple(int(near[word][0]) for word in trigger)
        others = [tuple(int(random.choice(near[word])) for word in trigger) for _ in range(DRAWN)]
        drawn = list(dict.fromkeys([nearest, *others]))
        odds = log_odds(asked, vocabulary, [trigger, *drawn])
        gaps = np.abs(odds[1:] - odds[0]).max(1)
        matched = [drawn[at] for at in np.argsort(gaps, kind="stable")[:NUMBER].tolist() if gaps[at] <= MAX_GAP]
    return {name: found for name, found in ((SHUFFLED, shuffled), (MATCHED, matched)) if found}


def log_odds(
    asked: Questions, vocabulary: Vocabulary, triggers: Sequence[Trigger]
) -> Float[np.ndarray, "triggers classes"]:
    """Compute each class's log-probability for a trigger alone, minus the mean over classes."""
    scores = asked.evaluator.scores(asked.wrapped(vocabulary.text(each) for each in triggers))
    return scores - scores.mean(1, keepdims=True)
