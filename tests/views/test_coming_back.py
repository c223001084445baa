"""Every hand-made result is, read back, the one that was written."""

import json
from typing import Any

import pytest
from described import results_of
from views import test_attacks, test_explanations, test_heatmaps, test_interventions, test_probes
from ssmscope.api.results import Result

CASES = {
    name: case
    for module in (test_attacks, test_explanations, test_heatmaps, test_interventions, test_probes)
    for name, case in module.CASES.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_result_comes_back(name: str) -> None:
    found: list[Any] = results_of(CASES[name])
    assert all(Result.from_dict(json.loads(result.to_json())) == result for result in found)
