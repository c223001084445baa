"""Texts that run together: every one once, with others of similar length, within the limits."""

import numpy as np
import pytest
import torch
from ssmscope.core.batching import GPU_BATCH_FACTOR, TOKENS_AT_ONCE, by_length, tokens_at_once

LENGTHS = np.random.default_rng(0).integers(1, 30, 200).tolist()


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("limits", [{}, {"most": 5}, {"padding": 3}, {"size": 7}])
def test_batches_hold_every_row_once_within_the_limits(limits, longest_first):
    parts = list(by_length(LENGTHS, 64, **limits, longest_first=longest_first))
    assert sorted(sum(parts, [])) == list(range(200))
    found = [LENGTHS[row] for part in parts for row in part]
    assert found == sorted(LENGTHS, reverse=longest_first)
    for part, after in zip(parts, [*parts[1:], None]):
        size, tokens = len(part), max(LENGTHS[row] for row in part) * len(part)
        if "size" in limits:
            assert size == limits["size"] or after is None
            continue
        assert tokens <= 64 or size == 1
        assert size <= limits.get("most", size)
        assert tokens - sum(LENGTHS[row] for row in part) <= limits.get("padding", tokens)
        if after is not None:  # no batch has room for the next row
            lengths = [LENGTHS[row] for row in [*part, after[0]]]
            tokens, padding = max(lengths) * len(lengths), max(lengths) * len(lengths) - sum(lengths)
            assert tokens > 64 or size == limits.get("most") or padding > limits.get("padding", padding)


def test_small_cases():
    assert list(by_length([], 64)) == [] and list(by_length([500, 600], 64)) == [[0], [1]]
    assert list(by_length([3, 1, 2], 64, rows=[2, 0])) == [[2, 0]]
    assert list(by_length([1, 2, 2, 3], 64, padding=0)) == [[0], [1, 2], [3]]
    assert list(by_length([1, 2, 2, 3], 64, padding=1)) == [[0, 1, 2], [3]]
    assert list(by_length([2, 2, 2, 2, 4], 8)) == [[0, 1, 2, 3], [4]]
    assert list(by_length([2, 2, 2, 2, 4], 8, longest_first=True)) == [[4, 3], [2, 1, 0]]


def test_number_of_tokens_by_what_is_kept_of_each():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (tokens_at_once(cpu), tokens_at_once(gpu)) == (TOKENS_AT_ONCE, GPU_BATCH_FACTOR * TOKENS_AT_ONCE)
    assert tokens_at_once(cpu, 3, 100) == 33 and tokens_at_once(cpu, 1e-3, 100) == TOKENS_AT_ONCE
    assert tokens_at_once(cpu, 2**18) == 2**11 and tokens_at_once(cpu, 2**30) == 1
    assert tokens_at_once(cpu, 4, 200, width=1) == 10  # 16 numbers of a layer one wide, and 4 more
    assert tokens_at_once(cpu, 2.5, 10.0) == 4 and tokens_at_once(cpu, 2.5, 9.9) == 3
    assert tokens_at_once(gpu, 0.5, TOKENS_AT_ONCE) == 2 * TOKENS_AT_ONCE
    assert tokens_at_once(cpu, 3.0, 5.0) == tokens_at_once(cpu, 3.0, 0.5) == 1
