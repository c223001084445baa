"""What is run, counted."""

from __future__ import annotations

import pytest

from ssmscope.evaluation import evaluator, generating, packed, running
from ssmscope.evaluation.forking import ways_to_fork


@pytest.fixture(autouse=True)
def forks_wherever_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of models for which a batch more costs nothing beside its tokens: of small ones it costs most."""
    monkeypatch.setattr(evaluator, "planned", lambda model, rows, **most: next(ways_to_fork(rows, (1,))))
    monkeypatch.setattr(packed, "planned", lambda rows: next(ways_to_fork(rows, (1,))))


@pytest.fixture
def tokens_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each batch had that was run, padding left out."""
    counts: list[int] = []
    run_batch, run_packed = running.run_batch, packed.run_packed

    def counted(model, ids, mask, *args, **kwargs):
        counts.append(int(mask.sum()))
        return run_batch(model, ids, mask, *args, **kwargs)

    def counted_packed(model, rows, pieces, read):
        counts.append(pieces.tokens)
        run_packed(model, rows, pieces, read)

    for module in (running, generating):
        monkeypatch.setattr(module, "run_batch", counted)
    monkeypatch.setattr(packed, "run_packed", counted_packed)
    return counts
