"""Compiled parts of layers: the same gradients, seen by nobody else, and not used where they are wrong."""

import io
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from ssmscope.core.mixers import fast_scan
from ssmscope.data.tokens import TokenData
from ssmscope.ops import compiling, wide
from ssmscope.zoo.baleen import BaleenMamba2Config, BaleenMamba2ForCausalLM
from ssmscope.zoo.training.fitting import Fit, compiled_parts
from ssmscope.zoo.training.objectives import NextTokens

SIZES = dict(hidden_size=8, state_size=4, num_hidden_layers=2, head_dim=4, num_heads=4, n_groups=1, expand=2)
OPTIONS = dict(
    kind="tokens", seed=0, batch_size=4, precision="fp32", embedding_dropout=0.0, label_smoothing=0.0,
    learning_rate=1e-3, weight_decay=0.1, optimizer="adamw",
)  # fmt: skip


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that were compiled, by a backend that needs no compiler."""
    names: list[str] = []
    compile_, kept = torch.compile, compiling.compiled

    def noted(function, **options):
        names.append(f"{function.__qualname__}")
        return compile_(function, **options, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", noted)
    kept.cache_clear()
    yield names
    kept.cache_clear()


@pytest.fixture
def fit(compiled, tmp_path: Path) -> Fit:
    torch.manual_seed(0)
    ids, targets = np.random.default_rng(0).integers(0, 5, (2, 8, 20))
    data = TokenData("drawn", "train", ids, targets, tuple("abcde"))
    config = BaleenMamba2Config(**SIZES, vocab_size=5, chunk_size=4, gate="bernoulli", beta=0.1)
    module = BaleenMamba2ForCausalLM(config)
    objective = NextTokens({"train": data, "validation": None, "test": None}, OPTIONS, torch.device("cpu"))
    return Fit(module, objective, OPTIONS, tmp_path / "state.pt", Console(file=io.StringIO(), soft_wrap=True))


def test_gradients_are_those_of_plain_torch(fit, compiled) -> None:
    before = torch.get_rng_state()
    with fast_scan(fit.module):
        assert fit._compiles()
    assert {name.partition(".")[0] for name in compiled} == {"_activated", "Mamba2RMSNorm", "MambaRMSNormGated"}
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in fit.parameters)
    printed = fit.console.file.getvalue()
    assert "compiled gradients are" in printed and "not compiled" not in printed


@pytest.mark.parametrize("fault", ["no gradient", "nan", "larger"])
def test_a_wrong_part_is_not_used(fit, monkeypatch, fault) -> None:
    faults = {"no gradient": Tensor.detach, "nan": lambda y: y * math.nan, "larger": lambda y: y + 0.1}
    monkeypatch.setattr(compiling, "compiled", lambda function: lambda *given: faults[fault](function(*given)))
    with fast_scan(fit.module):
        assert not fit._compiles()
    assert ": not compiled" in fit.console.file.getvalue()


def test_parts_run_plain_outside_and_without_gradients(fit, compiled) -> None:
    ids, module = torch.arange(5)[None], fit.module.eval()
    with fast_scan(module):
        expected = module(ids).logits
        assert not compiled
        with compiled_parts(module), torch.no_grad():
            assert torch.equal(module(ids).logits, expected)
    assert not compiled


def test_wide_heads_are_fused_too(compiled) -> None:
    """The scan of decays per state has many short operations; compiled, its gradients are those of plain torch."""
    torch.manual_seed(0)
    terms = [torch.randn(2, 3, 3, n, requires_grad=True) for n in (4, 4, 4, 6)]
    gradients = []
    for context in (nullcontext(), compiling.compiling()):
        with context:
            y, _ = wide.scan(-terms[0].square(), *terms[1:], torch.zeros(2, 3, 6, 4))
        gradients.append(torch.autograd.grad(y.square().sum(), terms))
    assert compiled == ["within"]
    for fused, plain in zip(*gradients):
        torch.testing.assert_close(fused, plain)
