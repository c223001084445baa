"""A caller that is compiled, with texts of several lengths in turn, runs through the scans as one that is not."""

import pytest
import torch
from examples import EXAMPLES, random_example, relative
from exhaustive import few
from loud import loud
import ssmscope


@pytest.mark.parametrize("name", few(EXAMPLES, "mamba", "groupmamba"))
def test_a_compiled_caller_within_fast_scan(name):
    torch._dynamo.reset()
    module = loud(random_example(name))
    compiled = torch.compile(module, backend="aot_eager" if name == "mamba" else "eager")
    with torch.no_grad(), ssmscope.fast_scan(module):
        for length in (8, 9, 8, 5):
            ids = (7 * torch.arange(2 * length).view(2, length) + 3) % 90
            assert relative(compiled(input_ids=ids).logits, module(input_ids=ids).logits) < 1e-5
