"""Scoring of many texts by one model: each distinct text runs once, in full batches, from states of shared prefixes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from ssmscope import __version__
from ssmscope.api.sharding.parts import Columns, over
from ssmscope.api.store import Store, errors_told
from ssmscope.core.encoding import texts_or_ids
from ssmscope.core.model import Model
from ssmscope.core.trace import States
from ssmscope.errors import InputError, check_model, check_whole, did_you_mean
from ssmscope.evaluation.forking import Rows, as_bytes, token_rows, whole_rows
from ssmscope.evaluation.running import (
    Answers,
    Read,
    max_batch_tokens,
    max_held_states,
    plan_pieces,
    run_pieces,
    try_resuming,
)
from ssmscope.evaluation.verbalizer import (
    LabelTree,
    Template,
    WordMatcher,
    checked_words,
    label_words_after,
    log_probabilities,
    padded_tokens,
)

SCORINGS = ("likelihood", "generated")
NO_LIMIT = 2**62
BATCHES_PER_CHUNK = 16
"""Number of batches that run before their scores are stored."""


class Evaluator:
    """Scores of every class for any number of texts.

    Texts with the same tokens are one row, and a row runs once. Each call sorts its new rows and cuts them into chunks;
    rows of a chunk that share a prefix continue from the state after it. With a cache, a chunk's scores are in the file
    as soon as it is done, and a process that is killed and started again ends with the same bits as an unbroken one.

    Args:
        words: a language model's word for each class, in the order of the classes; see `label_words`.
        scoring: of a language model: "likelihood", where the score of a class is Σ_j log P(token_j | text, earlier
            tokens of its word), natural; or "generated": 1 for the class whose word comes first (as a whole word,
            ignoring case) in the greedy continuation of the text, 0 for the others. A classifier's scores are its
            logits.
        normalise: divide a likelihood by the number of its tokens.
        new_tokens: maximum length of a continuation, which stops at the tokenizer's end token, or at a line break after
            the first word.
        cache: a file that keeps scores beyond this process.
        fork: continue from the states of shared prefixes where the model allows it.
        tokens_at_once: tokens that run together; by default as many as suit the device.

    Attributes:
        asked: number of texts scored so far.
        run: number of rows that the model ran; the scores of the others were known.
        seconds: run time of these rows, and of earlier processes on the rows that the cache returned.
        forks: True if rows continue from states: the option `fork`, until a test whether a run in two parts equals one.

    Raises:
        InputError: the model does not read texts, the options do not apply to it, or the cache cannot be used.
    """

    def __init__(
        self,
        model: Model,
        *,
        words: Sequence[str] | None = None,
        scoring: str = "likelihood",
        normalise: bool = False,
        new_tokens: int = 8,
        cache: str | Path | None = None,
        fork: bool = True,
        tokens_at_once: int | None = None,
    ) -> None:
        _check(model, words, scoring, normalise)
        for name, number in (("new_tokens", new_tokens), ("tokens_at_once", tokens_at_once)):
            if number is not None:
                check_whole(1, **{name: number})
        self.model, self.words = model, None if words is None else checked_words(words)
        self.asked, self.run, self.seconds = 0, 0, 0.0
        self._normalise = normalise
        self._settings: dict[str, object] = {"version": __version__}
        self._generator: tuple[Answers, WordMatcher] | None = None
        if scoring == "generated":
            assert self.words is not None
            self._generator = Answers(model, new_tokens), WordMatcher(self.words)
            vocabulary = _digest(sorted(model.tokenizer.get_vocab().items())).hexdigest()
            self._settings |= {"words": self._generator[1].words, "new_tokens": new_tokens, "vocabulary": vocabulary}
        elif self.words is not None:
            self._settings |= {"normalise": normalise}
        self.forks, self._tried, self._states_at_once = fork, not fork, NO_LIMIT
        self._tokens_at_once = tokens_at_once or max_batch_tokens(model)
        self._trees: list[LabelTree] = []
        self._tree_of_end: dict[str, int] = {}
        self._store, self._known = Store(cache), dict[bytes, np.ndarray]()

    @property
    def _forking(self) -> bool:
        return self.forks and self._tried

    def scores(self, texts: Sequence[str]) -> Float[np.ndarray, "texts classes"]:
        """Return the scores of every text, in the order of the call. Raise InputError for a text without a token, label
        words that do not fit what a text ends with (see `label_words`), or scores that are not finite."""
        if isinstance(texts, str):
            raise InputError("one text was given; give a list of texts")
        given = texts if isinstance(texts, list | tuple) else texts_or_ids(texts)[0]
        if given is None:
            raise InputError("token ids were given; give a list of texts")
        texts = list(given)
        self.asked += len(texts)
        if not texts:
            return self._empty(0)
        rows = as_bytes(token_rows(self.model, texts))
        asked = list(zip(rows, self._tree_indices(texts)))
        keys = self._keys(asked)
        self._run_new_rows(keys)
        return np.stack([self._known[keys[row]] for row in asked])

    def grid(
        self, templates: Sequence[Template], contents: Sequence[str]
    ) -> Float[np.ndarray, "templates contents classes"]:
        """Return the scores of every template filled with every text, in one call of `scores`."""
        found = self.scores([template.fill(content) for template in templates for content in contents])
        return found.reshape(len(templates), len(contents), found.shape[1])

    def answers(self, scores: Float[np.ndarray, "*shape classes"]) -> Int[np.ndarray, "*shape"]:
        """Return the class with the highest score, the first of equal ones; −1 where a continuation names none."""
        best = np.asarray(scores).argmax(-1)
        return best if self._generator is None else np.where(np.asarray(scores).any(-1), best, -1)

    def _tree_indices(self, texts: Sequence[str]) -> list[int]:
        """Return the index in `_trees` of the label words' tokens after each text; texts with the same last word and
        white space share them."""
        if self.words is None or self._generator is not None:
            return [0] * len(texts)
        ends = []
        for text in texts:
            bare = text.rstrip()
            ends.append("".join(bare.rsplit(None, 1)[-1:]) + text[len(bare) :])
        new = {end: text for end, text in zip(ends, texts) if end not in self._tree_of_end}
        if new:
            for end, words in zip(new, label_words_after(self.model, self.words, list(new.values()))):
                tree = LabelTree.of(words)
                if tree not in self._trees:
                    self._trees.append(tree)
                self._tree_of_end[end] = self._trees.index(tree)
        return [self._tree_of_end[end] for end in ends]

    def _keys(self, rows: Sequence[tuple[bytes, int]]) -> dict[tuple[bytes, int], bytes]:
        """Return the cache key of every distinct row: a hash of everything that its scores depend on."""
        shared = self._settings | {"fingerprint": self.model.fingerprint}  # The fingerprint includes the dtype.
        if edits := self.model.source.get("edits"):
            shared |= {"edits": edits}
        of_labels = [_digest([shared, tree]) for tree in self._trees or (None,)]
        found = {}
        for row, label in dict.fromkeys(rows):
            digest = of_labels[label].copy()
            digest.update(row)
            found[row, label] = digest.digest()
        return found

    def _run_new_rows(self, keys: dict[tuple[bytes, int], bytes]) -> None:
        """Run the rows that are not known yet, chunk by chunk, in the order of rows. Where a chunk begins depends on no
        row before it, so that a restarted process cuts as the killed one did."""
        self._recall([key for key in keys.values() if key not in self._known])
        new = sorted(row for row, key in keys.items() if key not in self._known)
        if not new:
            return
        self._try_forking(sorted(keys))
        for chunk, found in over(self.model, self._chunks(new), self._timed_scores, what=None):
            each, chosen = float(found["seconds"]) / len(chunk), [keys[row] for row in chunk]
            values = [np.array([each, *row], dtype="<f8").tobytes() for row in found["scores"]]
            self._store.add(dict(zip(chosen, values)))
            self._known |= zip(chosen, found["scores"])
            self.run += len(chunk)
            self.seconds += float(found["seconds"])

    def _recall(self, keys: Sequence[bytes]) -> None:
        """Load the scores of rows from the cache, where they follow the seconds that the row took."""
        for key, value in self._store.get(keys).items():
            whole = isinstance(value, bytes) and len(value) == 8 + self._empty(1).nbytes
            numbers = np.frombuffer(value, dtype="<f8") if whole else np.array([np.nan])
            with errors_told(self._store.file):
                if np.isnan(numbers).any():
                    raise sqlite3.DatabaseError("malformed rows")
            self.seconds += float(numbers[0])
            self._known[key] = numbers[1:]

    def _timed_scores(self, chunk: list[tuple[bytes, int]]) -> Columns:
        started = time.perf_counter()
        found = self._scores(chunk)
        if not np.isfinite(found).all():
            raise InputError(
                f"the scores of {self.model.name} are not finite: the model is damaged, or overflows on these texts"
            )
        return {"scores": found, "seconds": np.array(time.perf_counter() - started)}

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a worker process, which does without the store."""
        return {**vars(self), "_store": None, "_known": {}}

    def _try_forking(self, rows: Sequence[tuple[bytes, int]]) -> None:
        """Test once, if forking saves anything, whether the model continues from states, and how large they are."""
        if self._tried:
            return
        ids = Rows.of([row for row, _ in rows])
        most = {"tokens_at_once": self._tokens_at_once, "states_at_once": NO_LIMIT}
        alone = self._generator is None and all(len(tree.prefixes) == 1 for tree in self._trees)
        if not alone or plan_pieces(self.model, ids, **most).kept.any():
            self._tried = True
            self.forks, size = try_resuming(self.model, ids)
            self._states_at_once = max_held_states(self.model, size) if self.forks else NO_LIMIT

    def _chunks(self, rows: list[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
        """Yield neighbouring rows in chunks that respect the limits on tokens and on held states."""
        ids = Rows.of([row for row, _ in rows])
        shared = ids.shared() if self._forking else np.zeros(len(ids), dtype=np.int64)
        chunk: list[tuple[bytes, int]] = []
        tokens, states = 0, 0
        parted: list[int] = []  # Positions at which rows of the chunk diverge on the path to the previous row.
        for row, length, common in zip(rows, ids.lengths.tolist(), shared.tolist()):
            tokens += length - common
            while parted and parted[-1] > common:
                parted.pop()
            if common and parted[-1:] != [common]:
                parted.append(common)
                states += 1
            own = len(self._trees[row[1]].prefixes) - 1 if self._trees else 0  # States within label words.
            states += own
            if chunk and (tokens > BATCHES_PER_CHUNK * self._tokens_at_once or states > self._states_at_once):
                yield chunk
                chunk, tokens, states, parted = [], length, own, []
            chunk.append(row)
        yield chunk

    def _scores(self, rows: Sequence[tuple[bytes, int]]) -> Float[np.ndarray, "rows classes"]:
        if self.words is not None and self._generator is None:
            return self._likelihoods(rows)
        ids, found = Rows.of([row for row, _ in rows]), self._empty(len(rows))

        def read(ends: Int[np.ndarray, " ends"], logits: Tensor, states: States) -> None:
            if self._generator is None:
                found[ends] = logits.double().cpu().numpy()
                return
            answers, matcher = self._generator
            labels = [matcher(answer) for answer in answers.after(ids, ends, logits, states)]
            found[ends] = [[number == label for number in range(found.shape[1])] for label in labels]

        self._run_rows(ids, read, states=self._forking and self._generator is not None)
        return found

    def _likelihoods(self, rows: Sequence[tuple[bytes, int]]) -> Float[np.ndarray, "rows classes"]:
        """Compute log-likelihoods of the label words from next tokens after texts, alone and with words begun."""
        begun = [as_bytes(tree.prefixes) for tree in self._trees]
        reads = [(row + start, label, at) for row, label in rows for at, start in enumerate(begun[label])]
        texts = sorted({text for text, _, _ in reads})
        number = {text: place for place, text in enumerate(texts)}
        where = np.array([number[text] for text, _, _ in reads])
        order = np.argsort(where, kind="stable")
        bounds = np.searchsorted(where[order], np.arange(len(texts) + 1))
        first = np.cumsum([0, *map(len, begun)])
        next_tokens = padded_tokens([tokens for tree in self._trees for tokens in tree.next_tokens])
        next_tokens = next_tokens[[first[label] + at for _, label, at in reads]]
        width = next_tokens.shape[-1]
        found = np.empty((len(reads), width))

        def read(ends: Int[np.ndarray, " ends"], logits: Tensor, _: States) -> None:
            counts = bounds[ends + 1] - bounds[ends]
            here = np.concatenate([order[bounds[end] : bounds[end + 1]] for end in ends])
            if (counts > 1).any():
                logits = logits[torch.from_numpy(np.repeat(np.arange(len(ends)), counts)).to(logits.device)]
            tokens = torch.from_numpy(next_tokens[here]).to(logits.device)
            found[here] = log_probabilities(logits, tokens).cpu().numpy()

        self._run_rows(Rows.of(texts), read)
        scores, labels = self._empty(len(rows)), np.array([label for _, label in rows])
        of_read = np.array([label for _, label, _ in reads])
        for label, tree in enumerate(self._trees):
            own = found[of_read == label].reshape(-1, len(tree.prefixes), width)
            scores[labels == label] = tree.scores(own, normalise=self._normalise)
        return scores

    def _empty(self, rows: int) -> Float[np.ndarray, "rows classes"]:
        return np.full((rows, len(self.words or self.model.labels or ())), np.nan)

    def _run_rows(self, rows: Rows, read: Read, *, states: bool = False) -> None:
        most = {"tokens_at_once": self._tokens_at_once, "states_at_once": self._states_at_once}
        pieces = plan_pieces(self.model, rows, **most) if self._forking else whole_rows(rows)
        run_pieces(self.model, rows, pieces, read, **most, states=states)


def _check(model: Model, words: Sequence[str] | None, scoring: str, normalise: bool) -> None:
    check_model(model, "Evaluator")
    if model.channels is not None:
        raise InputError(f"{model.name} reads {model.reads}; give a model of texts")
    model.check_classes("an evaluation")
    model.check_tokenizer()
    if scoring not in SCORINGS:
        allowed = ", ".join(SCORINGS)
        raise InputError(f"unknown scoring {scoring!r}; allowed are {allowed}{did_you_mean(str(scoring), SCORINGS)}")
    if not model.is_classifier and words is None:
        raise InputError(f"{model.name} is a language model: give the word that it says for each class")
    if model.is_classifier and (words is not None or scoring != SCORINGS[0]):
        what = "label words" if words is not None else f"the scoring {scoring!r}"
        raise InputError(f"{model.name} is {model.role}, whose scores are its logits: {what} is for language models")
    if normalise and (model.is_classifier or scoring != SCORINGS[0]):
        raise InputError("normalise applies only to likelihoods, which are divided by the number of tokens")


def _digest(what: object) -> hashlib.blake2b:
    return hashlib.blake2b(json.dumps(what).encode(), digest_size=16)
