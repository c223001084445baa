"""Counts of what is run."""

import pytest
from ssmscope.evaluation import evaluator, running
from ssmscope.evaluation.forking import ways_to_fork


@pytest.fixture(autouse=True)
def forks_wherever_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork as for models for which a batch more costs nothing compared with its tokens: of small ones it costs most."""
    monkeypatch.setattr(evaluator, "plan_pieces", lambda model, rows, **most: next(ways_to_fork(rows, (1,))))


@pytest.fixture
def tokens_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of tokens of each batch that was run, padding left out."""
    counts: list[int] = []
    run_batch = running.run_batch

    def counted(model, ids, mask, *args, **kwargs):
        counts.append(int(mask.sum()))
        return run_batch(model, ids, mask, *args, **kwargs)

    monkeypatch.setattr(running, "run_batch", counted)
    return counts
