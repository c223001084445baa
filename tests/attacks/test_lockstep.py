"""Searches in lockstep: their answers, their random draws, and the state after one of them fails."""

import random
import signal
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from ssmscope.attacks.words.lockstep import draw_seed, lockstep


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def walker(number: int, steps: int) -> Callable:
    """A search that draws its questions from both global generators and goes by the answers."""

    def search(ask):
        seen = []
        for _ in range(steps):
            texts = ["x" * random.randint(1, 9), "y" * int(np.random.randint(1, 9))]
            answers = ask(texts)
            assert answers == lengths(texts)
            if answers[0] > 4:
                answers += ask([f"{number} " + "z" * answers[1]])
            seen.append((answers, random.random(), float(np.random.rand())))
        return seen

    return search


def alone(search: Callable, seed: int) -> object:
    """The search run by itself: seeded, and answered at once."""
    random.seed(seed)
    np.random.seed(seed)
    return search(lengths)


STEPS = [3, 0, 7, 1, 5, 4, 2, 6]


class TestSearches:
    @pytest.mark.parametrize("active", [1, 3, 64])
    def test_each_is_what_it_is_alone(self, active):
        searches = [walker(number, steps) for number, steps in enumerate(STEPS)]
        seeds = [draw_seed(7, number) for number in range(len(searches))]
        expected = [alone(search, seed) for search, seed in zip(searches, seeds)]
        assert lockstep(searches, lengths, seeds=seeds, active=active) == expected
        assert len({str(each) for each in expected}) == len(searches)

    def test_waves_are_the_union_of_what_all_ask(self):
        waves = []

        def answer(texts):
            waves.append(texts)
            return lengths(texts)

        def asks(*questions):
            return lambda ask: [ask(each) for each in questions]

        searches = [asks(["a", "bb"], ["c"]), asks(["bb", "dd", "bb"]), asks([], ["e"]), asks(["f"]), asks()]
        found = lockstep(searches, answer, seeds=range(5), active=3)
        assert waves == [["a", "bb", "dd"], ["c", "f", "e"]]
        assert found == [[[1, 2], [1]], [[2, 2, 2]], [[], [1]], [[1]], []]

    def test_so_many_at_a_time_and_one_at_any_moment(self):
        running, most, under_way, ended = [0], [0], set(), []

        def search(number):
            def run(ask):
                under_way.add(number)
                for step in range(number % 3 + 1):
                    running[0] += 1
                    assert running[0] == 1
                    most[0] = max(most[0], len(under_way))
                    running[0] -= 1
                    ask([f"{number} {step}"])
                under_way.discard(number)
                return number

            return run

        found = lockstep([search(n) for n in range(10)], lengths, seeds=range(10), active=4, ended=ended.append)
        assert found == list(range(10)) and sorted(ended) == found and ended != found
        assert most == [4]

    def test_nothing_to_search(self):
        assert lockstep([], lengths, seeds=[]) == []


def states() -> tuple:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tolist(), rest


@pytest.fixture
def unchanged():
    """Check that global states and threads are afterwards as they were."""
    random.seed(3)
    np.random.seed(4)
    before, generator = states(), np.random.get_bit_generator()
    yield
    assert states() == before and np.random.get_bit_generator() is generator
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("search")]


@pytest.mark.usefixtures("unchanged")
class TestWhatIsLeft:
    def test_answers_are_given_in_the_callers_states(self):
        before = states()

        def answer(texts):
            assert states() == before
            return lengths(texts)

        lockstep([walker(n, 3) for n in range(4)], answer, seeds=range(4))

    def test_after_an_error_in_a_search(self):
        cleaned = []

        def fails(ask):
            ask(["a"])
            random.random()
            raise ValueError("no way on")

        def waits(ask):
            try:
                while True:
                    try:
                        ask([str(random.random())])
                    except Exception:  # as careless code has it
                        pass
            finally:
                cleaned.append(True)

        with pytest.raises(ValueError, match="no way on") as caught:
            lockstep([waits, waits, fails, waits], lengths, seeds=range(4))
        assert cleaned == [True] * 3
        assert any(entry.name == "fails" for entry in caught.traceback)

    def test_after_an_interrupt_while_a_search_runs(self):
        """The signal reaches the waiting caller; the search goes on to where it asks, in its own states."""
        if sys.gettrace() is not None:
            pytest.skip("a traced thread of Python 3.11 can spin while a signal waits for the main thread")
        went_on = []

        def interrupted(ask):
            ask(["a"])
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            went_on.append([random.random() for _ in range(100_000)][-1])
            ask(["b"])
            went_on.append("never")

        with pytest.raises(KeyboardInterrupt):
            lockstep([walker(0, 9), interrupted, walker(1, 9)], lengths, seeds=range(3))
        expected = random.Random(1)
        assert went_on == [[expected.random() for _ in range(100_000)][-1]]


def test_seeds_differ_by_seed_and_by_example():
    seeds = {draw_seed(seed, number) for seed in range(30) for number in range(30)}
    assert len(seeds) == 900 and all(0 <= seed < 2**32 for seed in seeds)
    assert draw_seed(0, 1) == draw_seed(0, 1) != draw_seed(1, 0)
