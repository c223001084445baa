"""Sizes from a budget: the best allocation, its limits, and what a plan is refused for."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from refusals import refused, refuses
from ssmscope.errors import InputError
from ssmscope.reports.budget import (
    FLOPS,
    JOB_SECONDS,
    PLAN_SECONDS,
    RUN_SECONDS,
    estimate,
    parameters_of,
    shared_out,
    with_budget,
)
from ssmscope.reports.plan import read_plan
from ssmscope.reports.sizes import START, read_budget

ROWS = "".join(f"{json.dumps({'text': 'a good film ' * 3, 'label': label})}\n" for label in ("bad", "good") * 150)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "own.jsonl"
    file.write_text(ROWS)
    return file


def plan_text(data: Path, *, budget: str = "40s", more: str = "") -> str:
    return f"""
budget: {budget}
models: [demo/sst2-mamba2, demo/sst2-baleen-e]
analyses:
  - position: {{data: {data}}}
    size: {{option: limit, runs: 25}}
  - fidelity: {{data: {data}}}
    size: {{option: limit, runs: 100, start: 100}}
  - stability
{more}"""


def limits(text: str) -> list[int]:
    return [call.call.options.get("limit") for call in with_budget(read_plan(text)).calls]


def test_the_sum_of_variances_is_smallest():
    costs, most = [1.0, 4.0, 9.0], [10**6] * 3
    best = shared_out(6000.0, costs, most)
    assert best == [1000, 500, 333]  # N = R / (√cost · Σ √cost), Σ √cost = 6
    random = np.random.default_rng(0)
    for _ in range(200):
        other = random.dirichlet([3, 3, 3]) * 6000 / np.array(costs)
        assert (1 / other).sum() >= (1 / np.array(best)).sum() - 1e-4


def test_what_some_cannot_use_goes_to_the_others():
    assert shared_out(6000.0, [1.0, 4.0, 9.0], [100, 10**6, 10**6]) == [100, 590, 393]
    assert shared_out(1e9, [1.0, 4.0], [100, 50]) == [100, 50]
    assert shared_out(-5.0, [1.0, 4.0], [100, 7]) == [24, 7]


def test_every_model_has_the_same_size_and_the_time_is_kept(data):
    found = limits(plan_text(data))
    assert found[0] == found[1] and found[2] == found[3] and found[4:] == [None, None] and found[0] < 300
    plan = with_budget(read_plan(plan_text(data)))
    assert 39 < estimate(plan) <= 40
    runs = [call.expected.runs for call in plan.calls]
    assert runs == [START + 25 * found[0], START + 25 * found[0], *[100 + 100 * found[2]] * 2, START, START]
    seconds = plan.calls[0].expected.seconds / runs[0]
    tokens = len(("a good film " * 3).strip()) / 4.5
    parameters = parameters_of(Path("ssmscope/demo/sst2-mamba2"))
    assert seconds == pytest.approx(RUN_SECONDS + 2 * parameters * tokens / FLOPS["cpu"])
    rest = sum(one.expected.seconds for one in plan.calls)
    assert estimate(plan) == pytest.approx(PLAN_SECONDS + 6 * JOB_SECONDS + rest)


def test_more_time_gives_larger_sizes_up_to_the_data(data):
    few, more, most = (limits(plan_text(data, budget=budget)) for budget in ("40s", "60s", "2h"))
    assert few[0] < more[0] <= 300 and few[2] < more[2] <= 300
    assert most[0] == most[2] == 300
    assert limits(plan_text(data, budget="40s")) == few


def test_sizes_that_the_plan_gives_stay_and_all_without_a_budget(data):
    text = plan_text(data).replace(f"position: {{data: {data}}}", f"position: {{data: {data}, limit: 7}}")
    assert limits(text)[:2] == [7, 7]
    plan = read_plan(plan_text(data).replace("budget: 40s", ""))
    assert with_budget(plan) is plan and estimate(plan) is None


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 m", 120)])
def test_times(text, seconds):
    assert read_budget(text) == seconds


@pytest.mark.parametrize("text", ["10", "0s", "-5m", "5 days", "m", "1e9h"])
def test_a_time_is_refused(text):
    refuses("give a time such as 90s, 10m or 1.5h", read_budget, text)


@pytest.mark.parametrize(("size", "told"), [
    ("5", "give a mapping with option, runs, start"),
    ("{option: limit}", "give a mapping with option, runs, start"),
    ("{option: limit, runs: 1, more: 2}", "give a mapping with option, runs, start"),
    ("{option: limits, runs: 1}", "which it does not have; did you mean 'limit'"),
    ("{option: limit, runs: none}", "size has runs 'none'; give a number above 0"),
    ("{option: limit, runs: 1, start: 0}", "size has start '0'; give a number above 0"),
])  # fmt: skip
def test_a_size_is_refused(size, told):
    text = f"models: [demo/sst2-mamba2]\nanalyses:\n  - position: {{data: sst2}}\n    size: {size}\n"
    assert told in refused(read_plan, text)


def test_a_budget_without_a_size_is_refused():
    with pytest.raises(InputError, match="no analysis has a size"):
        with_budget(read_plan("budget: 5m\nmodels: [demo/sst2-mamba2]\nanalyses: [stability]\n"))


def test_parameters_are_counted_without_the_embeddings(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "hidden_size": 8, "torch_dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(2 * 5000))
    (tmp_path / "notes.txt").write_bytes(bytes(999))
    assert parameters_of(tmp_path) == 5000 - 800
    (tmp_path / "config.json").write_text("no json")
    assert parameters_of(tmp_path) == 2500
    assert not math.isnan(parameters_of(tmp_path / "model.safetensors"))


def test_a_budget_that_the_smallest_sizes_exceed_by_more_than_a_quarter_is_refused(data):
    with pytest.raises(InputError, match=r"budget is 20 s, and the smallest sizes take about \d+ s; give"):
        with_budget(read_plan(plan_text(data, budget="20s")))
