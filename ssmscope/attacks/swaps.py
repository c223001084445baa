"""TextAttack's swaps and constraints, without downloads. Importing this module imports TextAttack."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from ssmscope.attacks.offline import textattack
from ssmscope.attacks.resources import Encoder, MaskedLM, WordVectors
from ssmscope.core.tokenizing import is_within_word

textattack()

from textattack.constraints import PreTransformationConstraint  # noqa: E402
from textattack.constraints.semantics.sentence_encoders import SentenceEncoder  # noqa: E402
from textattack.shared import AbstractWordEmbedding, AttackedText  # noqa: E402
from textattack.shared.utils import is_one_word  # noqa: E402
from textattack.transformations import WordSwap, WordSwapChangeNumber, WordSwapContract  # noqa: E402
from textattack.transformations.word_swaps.word_swap_embedding import recover_word_case  # noqa: E402

LOOKALIKES: Mapping[str, str] = dict(
    zip(
        "abcdefghijklmnopqrstuvwxyz0123456789-'",
        "\u0251\u042c\u03f2\u0501\u0435\U0001d68f\u0261\u0570\u0456\u03f3"
        "\U0001d48c\u217c\uff4d\u0578\u043e\u0440\u051b\u2c85\u0455"
        "\U0001d69d\u057d\u0475\u051d\u00d7\u0443\u1d22"
        "Ol\u14bf\u01b7\u13ce\u01bc\u0431\U0001d7d5\u0222\u09ed\u02d7`",
    )
)
"""TextAttack's homoglyphs of small Latin letters, digits, hyphen and apostrophe."""
MAX_CHANGED_NUMBER = 2**31
"""Largest number that is replaced, because random integers are bounded."""
ASKED_LATER = 1e-12
"""Part of a score by which a later text stands behind an earlier one with the same: TextAttack's order of equal scores
depends on the processor."""


def word_spans(text: AttackedText) -> list[tuple[int, int]]:
    """Return the start and end of each word in characters of the text."""
    spans, at = [], 0
    for word in text.words:
        at = text.text.index(word, at)
        spans.append((at, at + len(word)))
        at += len(word)
    return spans


def plain_words(text: str) -> set[str]:
    """Return the words of a text in lower case, split at white space and at anything but a letter or digit."""
    whole = {re.sub(r"^[\W_]+|[\W_]+$", "", word) for word in text.lower().split()}
    return (whole | set(re.split(r"[\W_]+", text.lower()))) - {""}


class Protected(PreTransformationConstraint):
    """Constraint that keeps the words of some texts in any case and punctuation, and a placeholder. It also keeps parts
    of words, which arise because TextAttack ends a word at a combining mark or a joiner."""

    def __init__(self, words: Iterable[str], placeholder: str | None):
        self.words = set().union(*map(plain_words, words))
        self.placeholder = placeholder

    def _get_modifiable_indices(self, current_text: AttackedText) -> set[int]:
        text = current_text.text
        kept = [match.span() for match in re.finditer(re.escape(self.placeholder or "\0"), text)]
        return {
            index
            for index, (word, (start, stop)) in enumerate(zip(current_text.words, word_spans(current_text)))
            if not plain_words(word) & self.words
            and not any(start < end and begin < stop for begin, end in kept)
            and (text.isascii() or not (is_within_word(text, start) or is_within_word(text, stop)))
        }


class Homoglyphs(WordSwap):
    """Replacement of one character by its homoglyph, each in turn; TextAttack's own lacks a file in some releases."""

    def _get_replacement_words(self, word: str) -> list[str]:
        return [word[:i] + LOOKALIKES[c] + word[i + 1 :] for i, c in enumerate(word) if c in LOOKALIKES]


class Vectors(AbstractWordEmbedding):
    """Word vectors from a file as TextAttack's embedding; neighbours are by cosine."""

    def __init__(self, vectors: WordVectors):
        self.vectors = vectors

    def _row(self, index: int | str) -> int:
        return self.vectors.index[index] if isinstance(index, str) else index

    def __getitem__(self, index: int | str) -> np.ndarray | None:
        known = not isinstance(index, str) or index in self.vectors.index
        return self.vectors.unit[self._row(index)] if known else None

    def get_cos_sim(self, a: int | str, b: int | str) -> float:
        return float(self.vectors.unit[self._row(a)] @ self.vectors.unit[self._row(b)])

    def get_mse_dist(self, a: int | str, b: int | str) -> float:
        """Return the squared distance of the unit vectors, under TextAttack's name for it."""
        return 2 - 2 * self.get_cos_sim(a, b)

    def word2index(self, word: str) -> int:
        return self.vectors.index[word]

    def index2word(self, index: int) -> str:
        return self.vectors.words[index]

    @lru_cache(maxsize=2**16)  # noqa: B019
    def nearest_neighbours(self, index: int | str, topn: int) -> list[int]:
        row = self._row(index)
        cosines = self.vectors.unit @ self.vectors.unit[row]
        cosines[row] = -np.inf
        number = min(topn, len(cosines) - 1)
        nearest = np.argpartition(-cosines, number - 1)[:number] if number else np.empty(0, int)
        return sorted(nearest.tolist(), key=lambda other: (-cosines[other], other))


class Similarity(SentenceEncoder):
    """Minimum similarity of sentences by the embeddings of an `Encoder`."""

    def __init__(self, encoder: Encoder, **options: Any):
        super().__init__(**options)
        self.encoder = encoder

    def encode(self, sentences: Sequence[str]) -> torch.Tensor:
        distinct = {sentence: row for row, sentence in enumerate(dict.fromkeys(sentences))}
        return self.encoder(list(distinct))[[distinct[sentence] for sentence in sentences]]


class Synonyms(WordSwap):
    """Replacement by the words of a table, in the case of the replaced word."""

    def __init__(self, table: Mapping[str, Sequence[str]]):
        super().__init__()
        self.table = table

    def _get_replacement_words(self, word: str) -> list[str]:
        found = (recover_word_case(other, word) for other in self.table.get(word.lower(), ()))
        return [other for other in dict.fromkeys(found) if other != word]


class WordNetSynonyms(WordSwap):
    """Replacement by the single words of every WordNet sense (Ren et al. 2019)."""

    def _get_replacement_words(self, word: str) -> list[str]:
        from nltk.corpus import wordnet

        lemmas = {lemma for sense in wordnet.synsets(word) for lemma in sense.lemma_names()}
        return sorted(lemma for lemma in lemmas if lemma != word and "_" not in lemma and is_one_word(lemma))


class MaskedWords(WordSwap):
    """Replacements by a masked language model that reads the unmasked text (Li et al. 2020, BERT-Attack): for a word of
    one token the `candidates` likeliest tokens, for a word of several the combinations of likeliest tokens of lowest
    perplexity. These are found exactly without listing all: the perplexity is exp of the mean negative log-likelihood,
    so every prefix of a best combination is a best prefix. (TextAttack's version lists all and takes the first ones,
    unranked.)"""

    def __init__(self, masked_lm: MaskedLM, candidates: int):
        super().__init__()
        self.masked_lm = masked_lm
        self.candidates = candidates

    def _get_transformations(self, current_text: AttackedText, indices_to_modify: Iterable[int]) -> list[AttackedText]:
        read = self.masked_lm.read(current_text.text)
        spans, transformed = word_spans(current_text), []
        for index in sorted(int(i) for i in indices_to_modify):
            places = read.places(*spans[index])
            for word in self._words(read.log_probabilities[places], [read.ids[place] for place in places]):
                if word != current_text.words[index] and is_one_word(word):
                    transformed.append(current_text.replace_word_at_index(index, word))
        return transformed

    def _words(self, log_probabilities: torch.Tensor, replaced: Sequence[int]) -> list[str]:
        """Return the candidates from log-probabilities (tokens, vocabulary), likeliest first."""
        if not replaced:
            return []
        number = min(self.candidates, log_probabilities.shape[-1])
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for values, tokens in zip(*(part.tolist() for part in log_probabilities.topk(number))):
            joined = ((score + value, (*ids, token)) for score, ids in best for value, token in zip(values, tokens))
            best = heapq.nsmallest(number, joined, key=lambda pair: (-pair[0], pair[1]))
        if len(replaced) == 1:  # A token that continues a word is not a word.
            kind = self.masked_lm.continues(replaced[0])
            best = [(score, ids) for score, ids in best if self.masked_lm.continues(ids[0]) == kind]
        words = [self.masked_lm.word(ids) for score, ids in best if math.isfinite(score)]
        return [word for word in dict.fromkeys(words) if any(c.isalnum() for c in word)]


class Contractions(WordSwapContract):
    """Contraction of two adjacent words ("it is" → "it's"); TextAttack's own skips some pairs."""

    def _get_transformations(self, current_text: AttackedText, indices_to_modify: Iterable[int]) -> list[AttackedText]:
        allowed, words, transformed = {int(i) for i in indices_to_modify}, current_text.words, []
        for index in sorted(allowed):
            pair = " ".join(words[index : index + 2])
            if index + 1 in allowed and pair in self.reverse_contraction_map:
                drawn = current_text.replace_word_at_index(index, self.reverse_contraction_map[pair])
                transformed.append(drawn.delete_word_at_index(index + 1))
        return transformed


class Numbers(WordSwapChangeNumber):
    """Replacement of numbers by others; superscripts (²) and huge numbers stay."""

    deterministic = False

    def _get_new_number(self, word: str) -> list[Any]:
        return [] if word.isdigit() and not word.isdecimal() else super()._get_new_number(word)

    def _alter_number(self, num: float) -> list[Any]:
        return super()._alter_number(num) if abs(num) < MAX_CHANGED_NUMBER else []
