"""Work that needs more memory than there is ends in one line, whoever asked for it."""

import numpy as np
import pytest
import torch
from ssmscope.errors import ran_out_of_memory


def test_libraries_say_so_in_their_own_ways() -> None:
    with pytest.raises(MemoryError) as numpys:
        np.empty(2**50)
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(2**50)
    assert ran_out_of_memory(numpys.value) and ran_out_of_memory(torchs.value)
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not ran_out_of_memory(RuntimeError("shapes disagree")) and not ran_out_of_memory(None)
    assert not ran_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory\nx")]
)
def test_a_verb_refuses(analyze, monkeypatch, error: Exception) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("ssmscope.loading.load.load", fail)
    answer = analyze("heatmap", "demo/sst2-mamba2", "--text", "x")
    assert answer.code == 2 and answer.out == "" and answer.err.count("\n") == 1
    assert answer.err.startswith("analyze: this needs more memory than there is (")
