"""What the benchmarks share: a model of mamba-130m's shape, timing, and peak memory of a child process."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

THREADS = 2


def mamba_130m(
    layers: int = 24, vocabulary: int = 1000, width: int = 768, expand: int = 2, state: int = 16
) -> torch.nn.Module:
    """A random Mamba-1 of mamba-130m's shape (24 layers of width 768 and 1536 channels, state 16).

    Projections are drawn with a standard deviation of 0.02, as mamba_ssm does in effect: with transformers' 0.1 a
    random model of this depth amplifies float32 rounding, and either scan is then 2e-4 from float64. The steps are of
    about 1 instead of 0.01, so that the scan's share of a layer's output is large and a wrong one would be seen.
    """
    from transformers import MambaConfig, MambaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        expand=expand,
        state_size=state,
        num_hidden_layers=layers,
        initializer_range=0.02,
    )
    model = MambaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.mixer.dt_proj.bias.add_(4)
    return model


def mamba2_130m(layers: int = 24, vocabulary: int = 1000) -> torch.nn.Module:
    """A random Mamba-2 of mamba2-130m's shape (24 layers of width 768, 24 heads of width 64, state 128)."""
    from transformers import Mamba2Config, Mamba2ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=vocabulary,
        hidden_size=768,
        num_heads=24,
        head_dim=64,
        state_size=128,
        n_groups=1,
        num_hidden_layers=layers,
        initializer_range=0.02,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.mixer.dt_bias.add_(4)
    return model


SHAPES = {"mamba-130m": mamba_130m, "mamba2-130m": mamba2_130m}


def classifier_on(language: Any) -> Any:
    """A random head of SST-2's two classes on the backbone of a language model, which keeps it."""
    from ssmscope.models.classifier import SSMClassifierConfig, SSMForSequenceClassification

    labels = {0: "negative", 1: "positive"}
    with torch.device("meta"):
        config = SSMClassifierConfig(language.config, id2label=labels, label2id={labels[i]: i for i in labels})
        found = SSMForSequenceClassification(config).eval()
    torch.manual_seed(0)
    head = torch.nn.Linear(language.config.hidden_size, len(labels))
    found.backbone, found.head = language.backbone, head.to(language.device, language.dtype)
    return found


def reader(name: str, *, classifies: bool = False) -> Any:
    """A model of texts by its name, or a random one of one of the SHAPES, with the tokenizer of demo/instruct-mamba2.

    Args:
        classifies: the random one is a classifier.
    """
    import ssmscope

    if name not in SHAPES:
        return ssmscope.load(name)
    module: Any = SHAPES[name](vocabulary=50280)
    tokenizer = ssmscope.load("demo/instruct-mamba2").tokenizer
    return ssmscope.load(classifier_on(module) if classifies else module, tokenizer=tokenizer)


def seconds(run: Callable[[], object], repeats: int, warm_up: int = 1) -> float:
    """Median wall seconds of `run`."""
    for _ in range(warm_up):
        run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of `b`."""
    return ((a - b).norm() / b.norm()).item()


def machine() -> str:
    """One line on what the numbers were measured on."""
    import transformers

    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, float32"
    )


def in_a_row(run: Callable[[], object], least: float = 100.0) -> float:
    """Milliseconds on a GPU of one of many calls in a row, median of three such rows of at least so many."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def row(calls: int) -> float:
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls

    row(1)
    calls = max(3, round(least / max(row(1), 1e-3)))
    return sorted(row(calls) for _ in range(3))[1]
