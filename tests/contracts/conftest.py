"""A model of every architecture: the `small_models`, among which every readable model type is."""

from __future__ import annotations

import os

import pytest
from examples import EXAMPLES, VARIANTS, random_example
from exhaustive import ALL, CONTRACTS
from loud import loud
from small_pieces import make_small

from ssmscope.core.model import Model

OTHER_MODELS = frozenset(
    "bailing_hybrid bailing_hybrid-unbounded baleen-e-mamba2 comba comba-uncorrected deltanet deltaproduct diff- "
    "mamba-hybrid diff-s6 falcon-mamba falcon_h1 gfssm-mamba gla-hybrid glm5_next granitemoehybrid groupmamba- "
    "mamba2 gsa hgrn hgrn2 kda kda-bounded lara_mini lfm2 lfm2_moe lfm3 mamba3 minimax qwen4_exp qwen4_exp-sigmoid "
    "recurrent_gemma retnet rwkv7 zamba zamba2".split()
)
"""They are read as one of `examples.FEW` is: like the variants, each is tried on a third of the contracts, and each
contract on a third of them; with SSMSCOPE_EXHAUSTIVE=all on all."""
IN_TURNS = sorted(OTHER_MODELS | VARIANTS if CONTRACTS else OTHER_MODELS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "module" not in metafunc.fixturenames or any(
        mark.args[0] == "module" for mark in metafunc.definition.iter_markers("parametrize")
    ):
        return
    turn = sum(metafunc.function.__name__.encode())
    left_out = {name for at, name in enumerate(IN_TURNS) if not ALL and (at + turn) % 3}
    left_out |= set() if CONTRACTS else VARIANTS
    metafunc.parametrize("module", [name for name in EXAMPLES if name not in left_out], indirect=True)


@pytest.fixture
def module(request):
    return loud(random_example(request.param))


@pytest.fixture
def model(module) -> Model:
    return Model(module)


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut whatever is worked in pieces in every contract, with SSMSCOPE_SMALL_PIECES=1."""
    if os.environ.get("SSMSCOPE_SMALL_PIECES") == "1":
        make_small(monkeypatch)
