"""Task prompts: instructions around a text, and the label word of each class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ssmscope.data.text import PAIR_SEPARATOR
from ssmscope.errors import InputError, did_you_mean

CONTENT = "{content}"
"""Placeholder of the text in a template."""

PAIRS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"wnli": ("Sentence 1", "Sentence 2"), "snli": ("Premise", "Hypothesis")}
)
"""Names of the two sentences of a pair."""


@dataclass(frozen=True)
class TaskPrompts:
    """Templates, each with `{content}` once, and one word per class in the order of the data set's labels."""

    templates: tuple[str, ...]
    words: tuple[str, ...]


def content_of(data_name: str, text: str) -> str:
    """Return the text that replaces `{content}`; a data set's pair of sentences gets their names."""
    if data_name not in PAIRS:
        return text
    first, separator, second = text.partition(PAIR_SEPARATOR)
    if not separator:
        raise InputError(f"{text!r:.60} is not a pair of sentences of {data_name}; join two by {PAIR_SEPARATOR!r}")
    left, right = PAIRS[data_name]
    return f"{left}: {first.strip()} {right}: {second.strip()}"


def prompts_of(data_name: str) -> TaskPrompts:
    """Return the task prompts of a known data set."""
    if data_name not in TASK_PROMPTS:
        known = f"{', '.join(TASK_PROMPTS)}{did_you_mean(data_name, TASK_PROMPTS)}"
        raise InputError(f"there are no task prompts for {data_name!r}; give templates and words, or one of {known}")
    return TASK_PROMPTS[data_name]


TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "sst2": (
        "You are a film critic. Say whether the sentence below is 'positive' or 'negative' about the film.\n"
        "{content}\nAnswer:",
        "Classify the sentiment of the following sentence as negative or positive.\nSentence: {content}\nSentiment:",
        "Does this sentence from a film review express a positive or a negative opinion? {content}\nAnswer:",
        "{content}\nIs the sentence above negative or positive? It is",
        "Sentence: {content} Sentiment:",
        "Read the sentence, decide how its author feels about the film, and answer with one word, "
        "'positive' or 'negative': {content}",
    ),
    "rotten_tomatoes": (
        "As an editor who sorts film reviews, mark the snippet as 'positive' when it recommends the film and "
        "as 'negative' when it does not.\nSnippet: {content}\nAnswer:",
        "Decide whether this line of a film review is negative or positive.\nLine: {content}\nVerdict:",
        "Did the critic who wrote this like the film? Answer 'positive' for yes and 'negative' for no.\n"
        "{content}\nAnswer:",
        "{content}\nOverall, the critic's opinion of the film is",
        "Review: {content} Label (negative or positive):",
        "Label the tone of the following review snippet with one of the two words positive and negative: {content}",
    ),
    "imdb": (
        "You help people to choose a film. Read the review and tell them whether it is 'positive' or "
        "'negative'.\nReview: {content}\nAnswer:",
        "Classify the following film review as negative or positive.\n{content}\nClass:",
        "Is the author of this review satisfied with the film? Answer 'positive' or 'negative'.\n"
        "Review: {content}\nAnswer:",
        "{content}\nIn one word, negative or positive, this review is",
        "Review: {content} Sentiment:",
        "Work out the overall sentiment of the film review that follows and reply with positive or negative. {content}",
    ),
    "wnli": (
        # This is the prompt of Baleen (000), appendix B.1.
        "In the following sentence, does the hypothesis correctly resolve the ambiguous pronoun? Answer "
        "'correct' or 'incorrect'. Please classify: Question: {content}\nAnswer:",
        "You are a teacher of English. A pupil has read the first sentence and concludes the second from it. "
        "Mark the conclusion as 'correct' or 'incorrect'.\n{content}\nMark:",
        "Decide whether the second sentence follows from the first, and answer correct or incorrect.\n"
        "{content}\nAnswer:",
        "{content}\nGiven the first sentence, is the second correct or incorrect? It is",
        "{content} Conclusion (correct or incorrect):",
        "The second sentence replaces a pronoun of the first one by what it may refer to. Say whether the "
        "replacement is correct or incorrect. {content}",
    ),
    "snli": (
        "As a careful reader, say how the hypothesis relates to the premise: 'entailment', 'neutral' or "
        "'contradiction'.\n{content}\nAnswer:",
        "Classify the pair of sentences as entailment, neutral or contradiction.\n{content}\nClass:",
        "Does the premise make the hypothesis certain (entailment), possible (neutral) or impossible "
        "(contradiction)?\n{content}\nAnswer:",
        "{content}\nThe relation of the two sentences (entailment, neutral or contradiction) is",
        "{content} Relation:",
        "Suppose that the premise is true. Reply with entailment if the hypothesis must then be true, with "
        "contradiction if it cannot be, and with neutral if both are possible. {content}",
    ),
}
WORDS = {
    **dict.fromkeys(("sst2", "rotten_tomatoes", "imdb"), ("negative", "positive")),
    "wnli": ("incorrect", "correct"),
    "snli": ("entailment", "neutral", "contradiction"),
}
TASK_PROMPTS: Mapping[str, TaskPrompts] = MappingProxyType(
    {name: TaskPrompts(templates, WORDS[name]) for name, templates in TEMPLATES.items()}
)
"""Task prompts of the known data sets, by name."""


def answered(prompt: str, word: str) -> str:
    return prompt + " " * (not prompt[-1].isspace()) + word
