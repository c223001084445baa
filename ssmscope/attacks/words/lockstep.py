"""Lockstep of many searches, whose queries to a model are answered together.

A search asks for the scores of some texts, evaluates them and asks again. One search alone fills no batch, so many are
interleaved: each runs until it asks, and when all wait, one call answers them all. Every search is a plain function in
a thread of its own, but only one thread runs at any moment, so shared objects need no lock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
from ssmscope.attacks.names import ACTIVE

R = TypeVar("R")
A = TypeVar("A")
Ask = Callable[[Sequence[str]], list[A]]
"""Function that returns an answer for each of some texts."""


def draw_seed(seed: int, number: int) -> int:
    """Return the 32-bit seed of search `number` for `random.seed` and `numpy.random.seed`."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def sampled_rows(number: int, limit: int | None, seed: int) -> list[int]:
    """Return the rows that `TextData.sample` takes, so that an example has the same seed under any limit."""
    if limit is None or limit >= number:
        return list(range(number))
    return sorted(random.Random(seed).sample(range(number), limit))


def seeded(python: int, numpy: int) -> list[Any]:
    """Return the states of `random` and `numpy.random` after these seeds."""
    return [random.Random(python).getstate(), np.random.RandomState(numpy).get_state()]


@contextmanager
def drawing_from(states: list[Any]) -> Iterator[None]:
    """Install states of `random` and `numpy.random`; on exit keep them in `states` and restore the caller's."""
    callers: list[Any] = [random.getstate(), np.random.get_state()]
    try:
        random.setstate(states[0])
        np.random.set_state(states[1])
        yield
    finally:
        states[:] = random.getstate(), np.random.get_state()
        random.setstate(callers[0])
        np.random.set_state(callers[1])


def lockstep(
    searches: Sequence[Callable[[Ask[A]], R]],
    answer: Callable[[list[str]], Sequence[A]],
    *,
    seeds: Sequence[int],
    active: int = ACTIVE,
    ended: Callable[[R], None] | None = None,
) -> list[R]:
    """Run all searches and return their results in order. Of the `active` searches each runs until it asks or returns;
    the next one replaces one that has returned. Then `answer` is called once with all texts that they asked for, each
    once, in the order of asking. `ended` is called with each search's result. Each search has its own states of
    `random` and `numpy.random`, seeded by its seed; outside the searches, and in `answer`, both have the caller's. An
    error in a search or in `answer` ends all searches and is raised, and so is a keyboard interrupt once the running
    search asks or returns; no thread is left."""
    results: dict[int, R] = {}
    begun: dict[int, _Search[A, R]] = {}

    def begin() -> _Search[A, R] | None:
        number = len(results) + len(begun)
        if number == len(searches):
            return None
        return begun.setdefault(number, _Search(number, searches[number], seeds[number]))

    try:
        places = [begin() for _ in range(min(active, len(searches)))]
        while places:
            waiting = []
            for search in places:
                while search is not None and not search.asks():
                    results[search.number] = begun.pop(search.number).result
                    if ended is not None:
                        ended(search.result)
                    search = begin()
                waiting += [search] if search is not None else []
            texts = list(dict.fromkeys(text for search in waiting for text in search.asked))
            found = dict(zip(texts, answer(texts), strict=True)) if texts else {}
            for search in waiting:
                search.answers = [found[text] for text in search.asked]
            places = [*waiting]
    finally:
        for search in begun.values():
            search.stop()
    return [results[number] for number in range(len(searches))]


class _Stopped(BaseException):
    """Signal that ends a search from within; `except Exception` does not catch it."""


class _Search(threading.Thread, Generic[A, R]):
    """Search in its own thread, which runs only while `asks` waits for it."""

    def __init__(self, number: int, search: Callable[[Ask[A]], R], seed: int):
        super().__init__(name=f"search {number}", daemon=True)
        self.number = number
        self.asked: list[str] = []
        self.answers: list[A] | None = []
        """Answers to what it asked; None tells it to end."""
        self.result: Any = None
        self._search, self._states = search, seeded(seed, seed)
        self._error: BaseException | None = None
        self._running = self._over = False
        # Unlike locks, queues stay consistent if an interrupt arrives during a hand-over.
        self._go: SimpleQueue[None] = SimpleQueue()
        self._back: SimpleQueue[None] = SimpleQueue()

    def asks(self) -> bool:
        """Let the search run until it asks (True) or returns (False)."""
        if self.ident is None:
            self.start()
        interrupt: KeyboardInterrupt | None = None
        with drawing_from(self._states):
            self._running = True
            self._go.put(None)
            while self._running:
                try:
                    self._back.get()
                except KeyboardInterrupt as caught:
                    interrupt = caught
        if error := interrupt or self._error:
            raise error
        return not self._over

    def stop(self) -> None:
        """End the search at its query."""
        self.answers = None
        self._go.put(None)
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        try:
            self._go.get()
            if self.answers is not None:
                self.result = self._search(self._ask)
        except _Stopped:
            pass
        except BaseException as error:  # It is raised again in the caller's thread.
            self._error = error
        self._over = True
        self._hand_back()

    def _ask(self, texts: Sequence[str]) -> list[A]:
        self.asked = list(texts)
        self._hand_back()
        self._go.get()
        if self.answers is None:
            raise _Stopped
        return self.answers

    def _hand_back(self) -> None:
        self._running = False
        self._back.put(None)
