"""Runs from states of shared beginnings are the whole runs, for every architecture."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from evaluation.slow import LANGUAGE, PHRASES, TEXTS, WORDS, labels_of, language_model, slow_likelihoods
from examples import HYBRIDS
from exhaustive import few
from loud import TrueFloat64
from ssmscope.evaluation import Evaluator
from ssmscope.evaluation.forking import token_rows

RECURRENT = [name for name in LANGUAGE if name not in HYBRIDS or name in ("bamba", "falcon_h1", "jamba")]
CASES = [("float64", name) for name in RECURRENT] + [("float32", name) for name in few(RECURRENT, "mamba", "mamba2")]


@pytest.mark.parametrize("precision, name", CASES)
def test_forked_is_unforked_is_one_by_one(precision, name, tokens_run):
    dtype, words, tolerance = {"float64": (torch.float64, PHRASES, 1e-9), "float32": (torch.float32, WORDS, 2e-5)}[
        precision
    ]
    model = language_model(name, dtype)
    with TrueFloat64() if dtype == torch.float64 else nullcontext():
        forked, plain = (Evaluator(model, words=words, fork=fork, tokens_at_once=500) for fork in (True, False))
        found = forked.scores(TEXTS)
        some = sum(tokens_run)
        expected = plain.scores(TEXTS)
        assert forked.forks and not plain.forks
        assert some < 0.9 * (sum(tokens_run) - some)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        chosen = [4]
        rows = token_rows(model, [TEXTS[at] for at in chosen])
        slow = slow_likelihoods(lambda row: model.logits(model.encode(ids=row))[0], rows, labels_of(model, words))
    np.testing.assert_allclose(found[chosen], slow, rtol=tolerance, atol=tolerance)
