"""A model of every architecture; a file in `ssmscope.models` that defines MIXERS is among them by itself."""

from __future__ import annotations

import pytest
from examples import EXAMPLES, VARIANTS, random_example
from exhaustive import CONTRACTS
from loud import loud

from ssmscope.model import Model


@pytest.fixture(params=[name for name in EXAMPLES if CONTRACTS or name not in VARIANTS], ids=str)
def module(request):
    return loud(random_example(request.param))


@pytest.fixture
def model(module) -> Model:
    return Model(module)
