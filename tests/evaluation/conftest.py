"""What is run, counted."""

from __future__ import annotations

import pytest

from ssmscope.evaluation import generating, running


@pytest.fixture
def tokens_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each batch had that was run, padding left out."""
    counts: list[int] = []
    run_batch = running.run_batch

    def counted(model, ids, mask, *args, **kwargs):
        counts.append(int(mask.sum()))
        return run_batch(model, ids, mask, *args, **kwargs)

    for module in (running, generating):
        monkeypatch.setattr(module, "run_batch", counted)
    return counts
