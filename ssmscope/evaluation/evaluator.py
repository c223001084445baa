"""Ask one model about many texts: every distinct text once, in full batches, from the states of shared beginnings."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssmscope import __version__
from ssmscope.api.sharding.parts import Columns, over
from ssmscope.core.encoding import texts_or_ids
from ssmscope.core.model import Model
from ssmscope.core.states import States
from ssmscope.errors import InputError, did_you_mean
from ssmscope.evaluation.encoded import token_rows
from ssmscope.evaluation.forking import Rows, as_bytes, whole
from ssmscope.evaluation.generating import Speaker
from ssmscope.evaluation.running import Read, continues, planned, run_pieces, states_together, tokens_together
from ssmscope.evaluation.scoring import Paths, log_probabilities, table
from ssmscope.evaluation.store import Store
from ssmscope.evaluation.template import Template
from ssmscope.evaluation.verbalizer import Named, checked_words, label_words_after

SCORINGS = ("likelihood", "generated")
NO_LIMIT = 2**62
BATCHES = 16
"""How many batches are run before their scores are kept."""


class Evaluator:
    """The scores that a model gives each class, for any number of texts.

    Texts of the same tokens are one row, and a row is run once. What is asked in one call is one wave: its new rows are
    sorted, cut into chunks, and where rows of a chunk begin alike their beginning is run once and all continue from its
    state. With a cache a chunk's scores are in the file when it is done. A process that was killed and asks the same
    again finds them there, and runs what is missing in the same batches as an unbroken one: to the same bits.

    Args:
        model: a classifier of texts, or a language model, with a tokenizer.
        words: of a language model, what it says for each class, in the order of the classes; see `label_words`.
        scoring: of a language model: "likelihood", the score of a class being Σ_j log P(token_j | text, earlier tokens
            of its word), natural; or "generated": 1 for the class whose word comes first, as a whole word and case
            ignored, in the greedy continuation of the text, 0 for the others. A classifier's scores are its logits.
        normalise: divide a likelihood by the number of its tokens.
        new_tokens: the most tokens of a continuation, which stops at the tokenizer's end token, and at a line break
            once something was said.
        cache: a file that keeps scores beyond this process.
        fork: continue from the states of shared beginnings, where the model allows (see `forks`); without, every row is
            run as a whole.
        tokens_at_once: how many tokens are run together; by default as many as suit the device.

    Attributes:
        asked: how many texts were asked about.
        run: how many rows the model was run on; the others were known.
        seconds: how long these runs took, and those of earlier processes on the rows that the cache gave back.

    Raises:
        InputError: for a pixel classifier or a model without a tokenizer, words for a classifier or none for a language
            model, an unknown scoring, a number that is not positive, or a cache that cannot be used; see `Store`.
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
            if number is not None and number < 1:
                raise InputError(f"{name} is {number}; allowed is a whole number from 1 on")
        self.model, self.words = model, None if words is None else checked_words(words)
        self.asked, self.run, self.seconds = 0, 0, 0.0
        self._normalise = normalise
        self._settings: dict[str, object] = {"version": __version__, "scoring": "logits" if words is None else scoring}
        self._answering: tuple[Speaker, Named] | None = None
        if self.words is not None and scoring == "generated":
            self._answering = Speaker(model, new_tokens), Named(self.words)
            vocabulary = _digest(sorted(model.tokenizer.get_vocab().items())).hexdigest()
            self._settings |= {"words": self._answering[1].words, "new_tokens": new_tokens, "vocabulary": vocabulary}
        elif self.words is not None:
            self._settings |= {"normalise": normalise}
        self._forks, self._tried, self._states_at_once = fork, not fork, NO_LIMIT
        self._tokens_at_once = tokens_at_once or tokens_together(model)
        self._paths: list[Paths] = []
        self._behind: dict[str, int] = {}
        self._store = Store(cache, len(self.words or model.labels or ()))

    @property
    def forks(self) -> bool:
        """Whether rows continue from states: what was asked for, until the first wave that would gain by it has shown
        whether the model's run in two parts is its whole run."""
        return self._forks

    @property
    def _forking(self) -> bool:
        return self._forks and self._tried

    def scores(self, texts: Sequence[str]) -> Float[np.ndarray, "texts classes"]:
        """The scores of every text, in the order of the call.

        Raises:
            InputError: for a text without a token, ids outside the model's vocabulary, label words that do not fit what
                a text ends with (see `label_words`), or scores that are not finite.
        """
        if isinstance(texts, str):
            raise InputError("one text was given; give a list of texts")
        if not isinstance(texts, list | tuple):
            found, _ = texts_or_ids(texts)
            if found is None:
                raise InputError("token ids were given; give a list of texts")
            texts = found
        texts = list(texts)
        self.asked += len(texts)
        if not texts:
            return self._store.scores([])
        rows = as_bytes(token_rows(self.model, texts))
        asked = list(zip(rows, self._labels(texts)))
        keys = self._keys(asked)
        self._wave(keys)
        return self._store.scores([keys[row] for row in asked])

    def grid(
        self, templates: Sequence[Template], contents: Sequence[str]
    ) -> Float[np.ndarray, "templates contents classes"]:
        """The scores of every template filled with every text, as one wave; see `scores`."""
        found = self.scores([template.fill(content) for template in templates for content in contents])
        return found.reshape(len(templates), len(contents), found.shape[1])

    def answers(self, scores: Float[np.ndarray, "*shape classes"]) -> Int[np.ndarray, "*shape"]:
        """The class with the highest score, the first of equal ones; −1 where a continuation names none."""
        best = np.asarray(scores).argmax(-1)
        return best if self._answering is None else np.where(np.asarray(scores).any(-1), best, -1)

    def _labels(self, texts: Sequence[str]) -> list[int]:
        """Which of the `_paths` are those behind each text. Texts whose last words and white space are alike share
        them: tokens do not reach over white space."""
        if self.words is None or self._answering is not None:
            return [0] * len(texts)
        ends = []
        for text in texts:
            bare = text.rstrip()
            ends.append("".join(bare.rsplit(None, 1)[-1:]) + text[len(bare) :])
        new = {end: text for end, text in zip(ends, texts) if end not in self._behind}
        if new:
            for end, words in zip(new, label_words_after(self.model, self.words, list(new.values()))):
                paths = Paths.of(words)
                if paths not in self._paths:
                    self._paths.append(paths)
                self._behind[end] = self._paths.index(paths)
        return [self._behind[end] for end in ends]

    def _keys(self, rows: Sequence[tuple[bytes, int]]) -> dict[tuple[bytes, int], bytes]:
        """Distinct rows by what decides their scores."""
        shared = self._settings | {"fingerprint": self.model.fingerprint}  # which knows the dtype, too
        if edits := self.model.source.get("edits"):
            shared |= {"edits": edits}
        of_labels = [_digest([shared, paths]) for paths in self._paths or (None,)]
        found = {}
        for row, label in rows:
            if (row, label) not in found:
                digest = of_labels[label].copy()
                digest.update(row)
                found[row, label] = digest.digest()
        return found

    def _wave(self, keys: dict[tuple[bytes, int], bytes]) -> None:
        """Run the rows that are not known yet, chunk by chunk.

        Chunks are run in the order of their rows, and where one begins depends on no row before it: those that a killed
        process leaves are cut as they would have been.
        """
        self.seconds += self._store.recall(list(keys.values()))
        new = sorted(row for row, key in keys.items() if key not in self._store)
        if not new:
            return
        self._try(sorted(keys))
        for chunk, found in over(self.model, self._chunks(new), self._timed, what=None):
            self._store.add([keys[row] for row in chunk], found["scores"], float(found["seconds"]))
            self.run += len(chunk)
            self.seconds += float(found["seconds"])

    def _timed(self, chunk: list[tuple[bytes, int]]) -> Columns:
        """The scores of a chunk, and how many seconds they took."""
        started = time.perf_counter()
        found = self._scores(chunk)
        if not np.isfinite(found).all():
            raise InputError(
                f"the scores of {self.model.name} are not finite: the model is damaged, or overflows on these texts"
            )
        return {"scores": found, "seconds": np.array(time.perf_counter() - started)}

    def __getstate__(self) -> dict[str, object]:
        """What a worker needs: not what is known already."""
        return {**vars(self), "_store": None}

    def _try(self, rows: Sequence[tuple[bytes, int]]) -> None:
        """Find out once, where it would save anything, whether the model continues from states, and how large these
        are."""
        if self._tried:
            return
        ids = Rows.of([row for row, _ in rows])
        most = {"tokens_at_once": self._tokens_at_once, "states_at_once": NO_LIMIT}
        alone = self._answering is None and all(len(paths.beginnings) == 1 for paths in self._paths)
        if not alone or planned(self.model, ids, **most).kept.any():
            self._tried = True
            self._forks, size = continues(self.model, ids)
            self._states_at_once = states_together(self.model, size) if self._forks else NO_LIMIT

    def _chunks(self, rows: list[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
        """Neighbours in parts of at most so many tokens that are run, and forks whose states are held."""
        ids = Rows.of([row for row, _ in rows])
        shared = ids.shared() if self._forking else np.zeros(len(ids), dtype=np.int64)
        chunk: list[tuple[bytes, int]] = []
        tokens, states = 0, 0
        parted: list[int] = []  # where the rows of the chunk have parted, on the way to the row before
        for row, length, common in zip(rows, ids.lengths.tolist(), shared.tolist()):
            tokens += length - common
            while parted and parted[-1] > common:
                parted.pop()
            if common and parted[-1:] != [common]:
                parted.append(common)
                states += 1
            own = len(self._paths[row[1]].beginnings) - 1 if self._paths else 0  # of its end and of begun label words
            states += own
            if chunk and (tokens > BATCHES * self._tokens_at_once or states > self._states_at_once):
                yield chunk
                chunk, tokens, states, parted = [], length, own, []
            chunk.append(row)
        yield chunk

    def _scores(self, rows: Sequence[tuple[bytes, int]]) -> Float[np.ndarray, "rows classes"]:
        if self.words is not None and self._answering is None:
            return self._likelihoods(rows)
        ids, found = Rows.of([row for row, _ in rows]), self._empty(len(rows))

        def read(ends: Int[np.ndarray, " ends"], logits: Tensor, states: States) -> None:
            if self._answering is None:
                found[ends] = logits.double().cpu().numpy()
                return
            speaker, named = self._answering
            found[ends] = 0
            for end, answer in zip(ends, speaker.answers(ids, ends, logits, states)):
                if (label := named(answer)) is not None:
                    found[end, label] = 1

        self._through(ids, read, states=self._forking and self._answering is not None)
        return found

    def _likelihoods(self, rows: Sequence[tuple[bytes, int]]) -> Float[np.ndarray, "rows classes"]:
        """Every text is run to its end, and to the end of every beginning that several label words share or that one of
        them goes on from; there the next tokens are read."""
        begun = [as_bytes(paths.beginnings) for paths in self._paths]
        reads = [(row + start, label, at) for row, label in rows for at, start in enumerate(begun[label])]
        texts = sorted({text for text, _, _ in reads})
        number = {text: place for place, text in enumerate(texts)}
        where = np.array([number[text] for text, _, _ in reads])
        order = np.argsort(where, kind="stable")
        bounds = np.searchsorted(where[order], np.arange(len(texts) + 1))
        first = np.cumsum([0, *map(len, begun)])
        next_tokens = table([tokens for paths in self._paths for tokens in paths.following])
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

        self._through(Rows.of(texts), read)
        scores, labels = self._empty(len(rows)), np.array([label for _, label in rows])
        of_read = np.array([label for _, label, _ in reads])
        for label, paths in enumerate(self._paths):
            own = found[of_read == label].reshape(-1, len(paths.beginnings), width)
            scores[labels == label] = paths.scores(own, normalise=self._normalise)
        return scores

    def _empty(self, rows: int) -> Float[np.ndarray, "rows classes"]:
        return np.full((rows, len(self.words or self.model.labels or ())), np.nan)

    def _through(self, rows: Rows, read: Read, *, states: bool = False) -> None:
        most = {"tokens_at_once": self._tokens_at_once, "states_at_once": self._states_at_once}
        pieces = planned(self.model, rows, **most) if self._forking else whole(rows)
        run_pieces(self.model, rows, pieces, read, **most, states=states)


def _check(model: Model, words: Sequence[str] | None, scoring: str, normalise: bool) -> None:
    if model.channels is not None:
        raise InputError(f"{model.name} reads pixels; give a model of texts")
    model.check_classes("an evaluation")
    model.check_tokenizer()
    if scoring not in SCORINGS:
        allowed = ", ".join(SCORINGS)
        raise InputError(f"unknown scoring {scoring!r}; allowed are {allowed}{did_you_mean(str(scoring), SCORINGS)}")
    if not model.is_classifier and words is None:
        raise InputError(f"{model.name} is a language model: give the word that it says for each class")
    if model.is_classifier and (words is not None or scoring != SCORINGS[0]):
        what = "label words" if words is not None else f"the scoring {scoring!r}"
        raise InputError(f"{model.name} is a classifier, whose scores are its logits: {what} is for language models")
    if normalise and (model.is_classifier or scoring != SCORINGS[0]):
        raise InputError("normalise was asked for, but only a likelihood is divided by the number of its tokens")


def _digest(what: object) -> hashlib.blake2b:
    return hashlib.blake2b(json.dumps(what).encode(), digest_size=16)
