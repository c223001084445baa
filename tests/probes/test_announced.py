"""Long work says first how long it takes: the time of a trial, scaled, and the trial changes nothing."""

import pytest
import torch
from examples import random_example
from ssmscope.core.model import Model
from ssmscope.probes import long_rows
from ssmscope.probes.lens import training


@pytest.fixture
def clock(monkeypatch):
    """Time that only runs of a model spend: two seconds each."""
    now = [0.0]
    forward = Model.forward

    def slow(self, *args, **kwargs):
        now[0] += 2.0
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Model, "forward", slow)
    monkeypatch.setattr(long_rows.time, "perf_counter", lambda: now[0])
    return now


def test_an_estimate_is_the_time_of_a_short_run_for_all_tokens(clock):
    model, said = Model(random_example("mamba2"), name="own"), []
    each = long_rows.TIMED_TOKENS
    assert long_rows.announce([model, model], 90 * each, "make it shorter", said.append) == pytest.approx(360.0)
    assert said == [f"about {180 * each:,} tokens to read, about 6.0 min; make it shorter"]
    assert (
        long_rows.announce([model], 4 * each, "make it shorter", said.append) == pytest.approx(8.0) and len(said) == 1
    )


def test_a_fit_of_a_lens_is_announced_by_a_step_that_changes_nothing(monkeypatch):
    fitting, now, said = object.__new__(training.LensFitting), [0.0], []
    fitting.options = {"steps": 100, "look_every": 10}
    fitting.train, fitting.choosing = (type("R", (), {"lengths": own}) for own in ([30, 10, 20], [60, 20]))
    fitting.console = type("C", (), {"print": said.append})
    fitting.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    ran = []

    def gradients(rows):
        ran.append(rows)
        now[0] += 3.0 * len(rows)

    fitting._gradients, fitting._order = gradients, lambda: [[0, 1], [2]]
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    fitting._announce()
    # 100 steps of 4 s, as 30 of their 40 tokens take 3 s, and 11 looks at 80 tokens without the backward pass.
    # 26 steps with 2 and more looks take 116 s; 27 are more than two minutes.
    told = "at most 100 steps, about 7.2 min; steps=26 takes 2.0 min, batch_tokens=… makes a step shorter"
    assert ran == [[0], [0]] and said == [told]
    assert 100 * 4 + 11 * 4 / 3 * 80 / 40 == pytest.approx(7.2 * 60, abs=3)
    now[0] = 0.0
    fitting.choosing.lengths[:] = [6000]
    fitting._announce()  # A look takes 200 s.
    assert "steps=" not in said[-1]
