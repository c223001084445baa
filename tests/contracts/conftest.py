"""A model of every architecture; a file in `ssmscope.models` that defines MIXERS is among them by itself."""

from __future__ import annotations

import pytest
import torch
from examples import EXAMPLES
from loud import loud

from ssmscope.model import Model


@pytest.fixture(params=list(EXAMPLES), ids=str)
def module(request):
    architecture, index = EXAMPLES[request.param]
    torch.manual_seed(0)
    return loud(list(architecture.examples().values())[index])


@pytest.fixture
def model(module) -> Model:
    return Model(module)
