"""Models with weights written by hand, whose circuits are known: the parts that compute an answer, and their roads.

    found = compiled("recall", "mamba2", decoy=True)
    model = ssmscope.load(found.module)
    found.edges        # ("embedding", "mixer 1", "x"), …: everything that the answer is computed by
    found.decoys       # ("mixer 0",): holds the answer too, and nothing reads it

Nothing is trained. A method that finds circuits can be tried on them.
"""

from __future__ import annotations

from ssmscope.core.registry import Registry
from ssmscope.zoo.compiled.tasks import Task
from ssmscope.zoo.compiled.weights import FAMILIES, Compiled, build

TASKS: Registry[Task] = Registry("compiled task", "ssmscope.compiled")
"""Tasks by name; a package adds one by an entry point of the group `ssmscope.compiled`."""

__all__ = ["FAMILIES", "TASKS", "Compiled", "compiled"]


def compiled(task: str, family: str = "mamba2", *, decoy: bool = False) -> Compiled:
    """Return a language model with weights written for a task.

    Args:
        task: one of `TASKS`: induction, recall, flip-flop, two-hop.
        family: one of `FAMILIES`: mamba, mamba2, gated-delta (Qwen3-Next's layers).
        decoy: add a layer that computes the answer as well and writes it where nothing reads it.

    Raises InputError for another task or family.
    """
    return build(TASKS[task], family, decoy)
