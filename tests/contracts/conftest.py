"""A model of every architecture: the `small_models`, among which every readable model type is."""

import json
import os
from pathlib import Path

import pytest
from examples import EXAMPLES, FEW, SAME, VARIANTS, random_example
from exhaustive import ALL, CONTRACTS
from loud import loud
from small_pieces import make_small
from ssmscope.core.model import Model

ROOT = Path(__file__).resolve().parents[2]
OURS = frozenset(name for name, made in EXAMPLES.items() if type(made.models[name]).__module__.startswith("ssmscope."))
OWN = {
    name
    for name in OURS
    if not any(
        kind.__module__.startswith("transformers.models.")
        for part in EXAMPLES[name].models[name].modules()
        for kind in type(part).__mro__
    )
}
"""Models without a part of transformers', which are the same on both releases."""
FULL = {*FEW, "kimi_linear", "nemotron_h", "vim", "xlstm"} - SAME
OUTSIDE = {
    name
    for name, made in EXAMPLES.items()
    if not type(made.models[name]).__module__.startswith(("ssmscope.", "transformers."))
}
"""Models of installed packages."""
THEIRS = set(EXAMPLES) - OURS - VARIANTS - SAME
IN_FULL = (FULL if ALL else FULL - OURS if CONTRACTS else FULL & OURS | THEIRS - FULL) | OUTSIDE
"""Every contract is tried on them: installed packages', ours and most of transformers' on its release 4, the others on
release 5. All others are read as one of them is: each is tried on a fifth of the contracts, and each contract on a
fifth of them; on half, if release 4 lacks them, and on an eighth of those of release 5, if they are ours; with
SSMSCOPE_EXHAUSTIVE=all on all."""
IN_TURNS = sorted(set(EXAMPLES) - IN_FULL - (set() if ALL else OWN if CONTRACTS else VARIANTS))
ON_4 = next(iter(json.loads((ROOT / "docs" / "families.json").read_text(encoding="utf-8")).values()))
ONLY_5 = {name for name in IN_TURNS if EXAMPLES[name].models[name].config.model_type not in ON_4}
EVERY = {name: 2 if name in ONLY_5 - SAME else 8 if CONTRACTS and name in OURS else 5 for name in IN_TURNS}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "module" not in metafunc.fixturenames or any(
        mark.args[0] == "module" for mark in metafunc.definition.iter_markers("parametrize")
    ):
        return
    turn = sum(metafunc.function.__name__.encode())
    chosen = IN_FULL | {name for at, name in enumerate(IN_TURNS) if ALL or not (at + turn) % EVERY[name]}
    metafunc.parametrize("module", [name for name in EXAMPLES if name in chosen], indirect=True)


module = pytest.fixture(lambda request: loud(random_example(request.param)))
model = pytest.fixture(lambda module: Model(module))


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut whatever is worked in pieces in every contract, with SSMSCOPE_SMALL_PIECES=1."""
    if os.environ.get("SSMSCOPE_SMALL_PIECES") == "1":
        make_small(monkeypatch)
