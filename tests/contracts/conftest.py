"""A model of every architecture; a file in `ssmscope.models` that defines MIXERS is among them by itself."""

from __future__ import annotations

import pytest
from examples import EXAMPLES, random_example
from loud import loud

from ssmscope.model import Model


@pytest.fixture(params=list(EXAMPLES), ids=str)
def module(request):
    return loud(random_example(request.param))


@pytest.fixture
def model(module) -> Model:
    return Model(module)
