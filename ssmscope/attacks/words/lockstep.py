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
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from ssmscope.attacks.words.recipes import ACTIVE

R = TypeVar("R")
A = TypeVar("A")

Ask = Callable[[Sequence[str]], list[A]]
"""Function that returns an answer for each of some texts."""


def draw_seed(seed: int, number: int) -> int:
    """Return the 32-bit seed of search `number` for `random.seed` and `numpy.random.seed`."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def lockstep(
    searches: Sequence[Callable[[Ask[A]], R]],
    answer: Callable[[list[str]], Sequence[A]],
    *,
    seeds: Sequence[int],
    active: int = ACTIVE,
    ended: Callable[[R], None] | None = None,
) -> list[R]:
    """Run all searches and return their results in order.

    Active searches run one after the other until each has asked or returned; the next search replaces one that has
    returned. Then `answer` is called once with all texts that they asked for, each once, in the order of asking.

    Each search has its own states of `random` and `numpy.random`, seeded by its seed, so its random choices depend on
    nothing else. Outside the searches, and in `answer`, both have the caller's states.

    An error in a search or in `answer` ends all searches and is raised, and so is a keyboard interrupt once the running
    search asks or returns. No thread is left when this function returns or raises.

    Args:
        searches: functions of one argument, which they call to ask.
        answer: returns one answer per text.
        seeds: one per search.
        active: maximum number of searches in progress.
        ended: called with each search's result, in the order in which they end.
    """
    results: dict[int, R] = {}
    begun: list[_Search[A, R]] = []
    later = iter(range(len(searches)))

    def begin() -> _Search[A, R] | None:
        number = next(later, None)
        if number is None:
            return None
        begun.append(_Search(number, searches[number], seeds[number]))
        return begun[-1]

    def until_it_asks(search: _Search[A, R] | None) -> _Search[A, R] | None:
        """Return the search that asks next in this place, if any is left."""
        while search is not None:
            search.run()
            if search.asked is not None:
                return search
            begun.remove(search)
            results[search.number] = search.result
            if ended is not None:
                ended(search.result)
            search = begin()
        return None

    try:
        places = [begin() for _ in range(min(active, len(searches)))]
        while places:
            waiting = []
            for place in places:  # In a generator, a StopIteration from a search would end the iteration.
                search = until_it_asks(place)
                waiting += [search] if search is not None else []
            texts = list(dict.fromkeys(text for search in waiting for text in search.asked or ()))
            found = dict(zip(texts, answer(texts), strict=True)) if texts else {}
            for search in waiting:
                search.answers = [found[text] for text in search.asked or ()]
            places = [*waiting]
    finally:
        for search in begun:
            search.stop()
        for search in begun:
            search.join()
    return [results[number] for number in range(len(searches))]


class _Stopped(BaseException):
    """Signal that ends a search from within; `except Exception` does not catch it."""


class _Search(Generic[A, R]):
    """Search in its own thread, which runs only while `run` waits for it."""

    def __init__(self, number: int, search: Callable[[Ask[A]], R], seed: int):
        self.number = number
        self.result: Any = None
        self.asked: list[str] | None = None
        """Texts that it waits for; None once it has returned."""
        self.answers: list[A] = []
        self._search, self._states = search, _States(seed)
        self._error: BaseException | None = None
        self._stopped = self._running = False
        # Unlike locks, queues stay consistent if an interrupt arrives during a hand-over.
        self._go: SimpleQueue[None] = SimpleQueue()
        self._back: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"search {number}", daemon=True)

    def run(self) -> None:
        """Let the search run until it asks or returns."""
        if self._thread.ident is None:
            self._thread.start()
        interrupt: KeyboardInterrupt | None = None
        with self._states.current():
            self._running = True
            self._go.put(None)
            while self._running:
                try:
                    self._back.get()
                except KeyboardInterrupt as caught:
                    interrupt = caught
        if interrupt is not None:
            raise interrupt
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Tell the search to end at its next query."""
        self._stopped = True
        self._go.put(None)

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        self._go.get()
        try:
            if not self._stopped:
                self.result = self._search(self._ask)
        except _Stopped:
            pass
        except BaseException as error:  # It is raised again in the caller's thread.
            self._error = error
        self.asked = None
        self._hand_back()

    def _ask(self, texts: Sequence[str]) -> list[A]:
        self.asked = list(texts)
        self._hand_back()
        self._go.get()
        if self._stopped:
            raise _Stopped
        return self.answers

    def _hand_back(self) -> None:
        self._running = False
        self._back.put(None)


class _States:
    """States of `random` and `numpy.random` of one search."""

    def __init__(self, seed: int):
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.MT19937(0)  # It is seeded when it first becomes the process's generator.
        self._seed: int | None = seed

    @contextmanager
    def current(self) -> Iterator[None]:
        """Install the states for the process, and restore the caller's on exit."""
        python, numpy = random.getstate(), get_bit_generator()
        try:
            random.setstate(self._python)
            set_bit_generator(self._numpy)
            if self._seed is not None:
                np.random.seed(self._seed)
                self._seed = None
            yield
        finally:
            self._python = random.getstate()
            random.setstate(python)
            set_bit_generator(numpy)
