"""Sizes of a plan's analyses from a budget of time, before anything runs.

The unit of cost is one run of a model on one text without gradients. An analysis of N examples is declared to cost
`start` + N · `runs` such runs. A run of a model takes `RUN_SECONDS` + 2 · parameters · tokens / `FLOPS` seconds, with
parameters counted without the embeddings. For a sum of variances v / N the best sizes under Σ N · runs = R are
N = R / (√runs · Σ √runs); those beyond the number of examples leave their rest to the others. All models get the same
sizes, so that their scores are paired. The same plan, models, data and budget give the same sizes on every machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssmscope.api.analysis import Call
from ssmscope.errors import InputError
from ssmscope.reports.plan import Plan, PlannedCall
from ssmscope.reports.sizes import START, Expected, Size
from ssmscope.reports.sources import kind_of

RUN_SECONDS = 2e-4
"""Seconds of a run of a small model on a short text, with many texts in a batch, on one CPU core."""
FLOPS = {"cpu": 2e10, "cuda": 2e13}
"""Floating-point operations per second that a run reaches."""
JOB_SECONDS = 1.5
"""Seconds of a job for its files and figures in the report."""
PLAN_SECONDS = 15.0
"""Seconds of a report for imports and for its page."""
MIN_SIZE, MAX_SIZE, MAX_SEQUENCES = 24, 2000, 64
"""Smallest size, the largest number of examples, and that of random sequences."""
MAX_EXCESS = 0.25
"""Largest share of a budget by which an estimate may exceed it."""
USUAL_TOKENS = 64
CHARACTERS_PER_TOKEN = 4.5
BYTES_PER_PARAMETER = {"bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of a stored parameter; 4 for other dtypes."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def with_budget(plan: Plan) -> Plan:
    """Return the plan with the sizes that its budget allows and the estimated seconds of every call; the plan itself
    without a budget. Raise InputError if a model cannot be found, no analysis has a size, or the smallest sizes take
    more than the budget and a quarter."""
    if plan.budget is None:
        return plan
    if all(call.size is None for call in plan.calls):
        raise InputError("there is a budget, but no analysis has a size that it could choose; leave the budget out")
    seconds = _RunSeconds()
    kinds = {model.name: seconds.kind(model.model, model.tokenizer is not None) for model in plan.models}
    wanted = [
        call
        for call in plan.calls
        if call.kinds is None or all(kinds[model.name] in call.kinds for model in call.models)
    ]
    cost = {id(call): seconds.of_run(call.call) for call in wanted}
    items: dict[tuple[str, Size], list[PlannedCall]] = {}
    left = plan.budget - PLAN_SECONDS - JOB_SECONDS * len(wanted)
    for call in wanted:
        left -= cost[id(call)] * (START if call.size is None else call.size.start)
        if call.size is not None:
            items.setdefault((call.where, call.size), []).append(call)
    costs = [size.runs * sum(cost[id(call)] for call in calls) for (_, size), calls in items.items()]
    most = [min(seconds.examples(call.call, size.option) for call in calls) for (_, size), calls in items.items()]
    chosen = dict(zip(items, shared_out(left, costs, most)))

    def sized(planned: PlannedCall) -> PlannedCall:
        if id(planned) not in cost:
            return planned
        if planned.size is None:
            return replace(planned, expected=Expected(START, START * cost[id(planned)]))
        number = chosen[planned.where, planned.size]
        options = {**planned.call.options, planned.size.option: number}
        runs = planned.size.start + number * planned.size.runs
        return replace(
            planned, call=replace(planned.call, options=options), expected=Expected(runs, runs * cost[id(planned)])
        )

    found = replace(plan, calls=tuple(map(sized, plan.calls)))
    needed = estimate(found) or 0.0
    if needed > (1 + MAX_EXCESS) * plan.budget:
        least = f"budget is {plan.budget:.0f} s, and the smallest sizes take about {math.ceil(needed)} s"
        raise InputError(f"{least}; give at least that, or fewer models or analyses")
    return found


def shared_out(budget: float, costs: Sequence[float], most: Sequence[int]) -> list[int]:
    """Return the sizes N_i, at most `most`, with Σ N_i · cost_i within the budget and the smallest Σ 1 / N_i; none is
    below `MIN_SIZE` or its `most`, even if the budget is too small."""
    full: set[int] = set()
    while True:
        rest = [at for at in range(len(costs)) if at not in full]
        left = max(budget - sum(costs[at] * most[at] for at in full), 0.0)
        roots = sum(math.sqrt(costs[at]) for at in rest)
        sizes = {at: left / (math.sqrt(costs[at]) * roots) for at in rest}
        beyond = {at for at, size in sizes.items() if size >= most[at]}
        if not beyond:
            break
        full |= beyond
    every = [most[at] if at in full else int(sizes[at]) for at in range(len(costs))]
    return [max(size, min(MIN_SIZE, limit)) for size, limit in zip(every, most)]


def estimate(plan: Plan) -> float | None:
    """Return the estimated seconds of a plan with a budget, its page included; None without one."""
    known = [call.expected.seconds for call in plan.calls if call.expected is not None]
    return PLAN_SECONDS + JOB_SECONDS * len(known) + sum(known) if known else None


class _RunSeconds:
    """Kinds, sizes and data of models and calls, each read once."""

    def __init__(self) -> None:
        self._parameters: dict[str, float] = {}
        self._texts: dict[tuple[Any, ...], tuple[int, float]] = {}

    def kind(self, model: str, tokenizer: bool) -> str | None:
        from ssmscope.loading.load import locate

        return kind_of(locate(model), tokenizer=tokenizer)

    def of_run(self, call: Call) -> float:
        """Estimate the seconds of one run of the call's models on one of its texts."""
        from ssmscope.loading.load import chosen_device

        device = chosen_device(call.device).partition(":")[0]
        parameters = sum(map(self._of_model, call.models))
        return RUN_SECONDS + 2 * parameters * self._data(call)[1] / FLOPS.get(device, FLOPS["cpu"])

    def examples(self, call: Call, option: str) -> int:
        """Return the largest size that is worth asking for."""
        return min(self._data(call)[0], MAX_SIZE) if option == "limit" else MAX_SEQUENCES

    def _of_model(self, name: str) -> float:
        if name not in self._parameters:
            from ssmscope.loading.load import locate

            self._parameters[name] = parameters_of(locate(name))
        return self._parameters[name]

    def _data(self, call: Call) -> tuple[int, float]:
        """Return the number of examples and their mean length in tokens."""
        name, split, columns = (call.inputs.get(each) for each in ("data", "split", "columns"))
        key = (str(name), split)
        if key not in self._texts:
            self._texts[key] = _described(name, split, columns)
        return self._texts[key]


def _described(name: Any, split: str | None, columns: Any) -> tuple[int, float]:
    from ssmscope.data.text import load_text

    found = None
    with suppress(InputError, OSError):  # They are said when the data are checked, before anything runs.
        found = None if name is None else load_text(str(name), split, columns=columns)
    if found is None or not len(found):
        return MAX_SIZE, USUAL_TOKENS
    return len(found), max(1.0, sum(len(text) for text in found.texts) / len(found) / CHARACTERS_PER_TOKEN)


def parameters_of(place: Path) -> float:
    """Estimate a model's number of parameters, without the table of embeddings, from the size of its files."""
    files = [place] if place.is_file() else [file for file in place.glob("*") if file.suffix in WEIGHTS]
    try:
        config = json.loads((place / "config.json").read_bytes())
    except (OSError, ValueError):
        config = {}
    config = config if isinstance(config, dict) else {}
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    whole = sum(file.stat().st_size for file in files) / BYTES_PER_PARAMETER.get(dtype, 4)
    sizes = [config.get("vocab_size"), config.get("hidden_size") or config.get("d_model")]
    table = math.prod(size if isinstance(size, int) else 0 for size in sizes)
    return max(whole - table, 0.0)
