"""Models with weights written by hand, whose circuits are known: the parts that compute an answer, and their roads.

    found = compiled("recall", "mamba2", decoy=True)
    model = ssmscope.load(found.module)
    found.edges        # ("embedding", "mixer 1", "x"), …: everything that the answer is computed by
    found.decoys       # ("mixer 0",): holds the answer too, and nothing reads it

Nothing is trained. A method that finds circuits can be tried on them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from ssmscope.core.registry import Registry
from ssmscope.data.pairs import PairData
from ssmscope.zoo.compiled.tasks import Task
from ssmscope.zoo.compiled.weights import FAMILIES, Compiled, build

TASKS: Registry[Task] = Registry("compiled task", "ssmscope.compiled")
"""Tasks by name; a package adds one by an entry point of the group `ssmscope.compiled`."""

TASKS_WITH_PAIRS = ("induction", "recall", "flip-flop", "two-hop")
"""Tasks whose pairs are generated sets of `ssmscope.data.pairs`."""

__all__ = ["FAMILIES", "TASKS", "Compiled", "compiled", "pairs_of"]


def compiled(task: str, family: str = "mamba2", *, decoy: bool = False) -> Compiled:
    """Return a language model with weights written for a task.

    Args:
        task: one of `TASKS`: induction, recall, flip-flop, two-hop.
        family: one of `FAMILIES`: mamba, mamba2, gated-delta (Qwen3-Next's layers).
        decoy: add a layer that computes the answer as well and writes it where nothing reads it.

    Raises InputError for another task or family.
    """
    return build(TASKS[task], family, decoy)


def pairs_of(task: str, pairs: int = 64, seed: int = 0) -> PairData:
    """Return generated pairs of token ids of a task's inputs: independent ones with different answers."""
    random = np.random.default_rng(seed)
    drawn = [TASKS[task].draw(4 * pairs + 16, random) for _ in range(2)]
    (_, right), (_, wrong) = drawn
    chosen = np.flatnonzero(right != wrong)[:pairs]
    clean, corrupted = (tuple(map(tuple, ids[chosen].tolist())) for ids, _ in drawn)
    return PairData(task, clean, corrupted, tuple(right[chosen].tolist()), tuple(wrong[chosen].tolist()))


induction, recall, flip_flop, two_hop = (partial(pairs_of, task) for task in TASKS_WITH_PAIRS)
