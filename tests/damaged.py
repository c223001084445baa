"""Small saved models of every layout, and the ways in which their files can be damaged."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from loud import loud
from safetensors.torch import load_file, save_file
from saving import write_diff_mamba2, write_mamba_ssm
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
from ssmscope.data.tokenizer import save_tokenizer
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo.diff_mamba import DiffMambaConfig, DiffMambaForCausalLM
from ssmscope.zoo.tokenizers import train_tokenizer

SIZES = dict(vocab_size=48, hidden_size=16, num_hidden_layers=2, expand=2, state_size=4)
HEADS = dict(num_heads=4, head_dim=8, n_groups=1)
LABELS = dict(num_labels=2, id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1})

Save = Callable[[Path], object]


def _classifier(path: Path) -> None:
    backbone = Mamba2Config(**SIZES, **HEADS)
    loud(SSMForSequenceClassification(SSMClassifierConfig(backbone, **LABELS))).save_pretrained(path)
    texts = ["a good film", "a bad film", "great text and fine words", "awful sentence of bad words"]
    save_tokenizer(train_tokenizer(texts, vocabulary=48), path)


def _pixels(path: Path) -> None:
    backbone = Mamba2Config(**{**SIZES, "vocab_size": 1}, **HEADS)
    config = SSMClassifierConfig(backbone, channels=3, image_size=(2, 2), **LABELS)
    loud(SSMForSequenceClassification(config)).save_pretrained(path)


LAYOUTS: dict[str, Save] = {
    "mamba": lambda path: loud(MambaForCausalLM(MambaConfig(**SIZES, time_step_rank=3))).save_pretrained(path),
    "mamba2": lambda path: loud(Mamba2ForCausalLM(Mamba2Config(**SIZES, **HEADS))).save_pretrained(path),
    "classifier": _classifier,
    "pixels": _pixels,
    "mamba_ssm": lambda path: write_mamba_ssm(
        loud(MambaForCausalLM(MambaConfig(**SIZES, time_step_rank=3))), path, safetensors=True
    ),
    "mamba_ssm-2": lambda path: write_mamba_ssm(loud(Mamba2ForCausalLM(Mamba2Config(**SIZES, **HEADS))), path),
    "diff-mamba": lambda path: write_diff_mamba2(
        loud(DiffMambaForCausalLM(DiffMambaConfig(**SIZES, head_dim=8, num_heads=4, n_groups=1))), path
    ),
}


def save(layout: str, path: Path) -> Path:
    """A small model of the layout, the same each time."""
    torch.manual_seed(0)
    path.mkdir(parents=True, exist_ok=True)
    LAYOUTS[layout](path)
    return path


DEEP = "<deep>"
"""Stands in for lists 50,000 deep, which json cannot write."""
VALUES: dict[str, Any] = {
    "null": None, "word": "wide", "empty": "", "true": True, "minus": -1, "zero": 0, "fraction": 0.3, "huge": 10**7,
    "astronomical": 10**18, "unbounded": 10**40, "nan": float("nan"), "infinite": float("inf"), "list": [],
    "pair": [1, 0], "numbers": [5], "object": {}, "surrogate": "\ud800", "nested": {"a": [{"b": [[[[{"c": {}}]]]]}]},
    "deep": DEEP,
}  # fmt: skip


def fields(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The paths of all fields, those of objects within too."""
    for name, value in config.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *rest) for rest in fields(value))


def with_field(path: Path, field: tuple[str, ...], value: Any, file: str = "config.json") -> None:
    """Set one field of a model's config.json."""
    config = json.loads((path / file).read_text())
    inner = config
    for name in field[:-1]:
        inner = inner[name]
    inner[field[-1]] = value
    text = json.dumps(config).replace(json.dumps(DEEP), "[" * 50_000 + "]" * 50_000)
    (path / file).write_text(text)


def damage_file(file: Path, how: str) -> None:
    """Replace a file with forbidden content."""
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "directory":
        file.unlink()
        file.mkdir()
    elif how == "unreadable":
        file.unlink()
        file.symlink_to("/proc/self/mem")  # a file that even root cannot read from its start
    elif how == "endless":
        file.unlink()
        file.symlink_to("/dev/zero")
    elif how == "deep":
        file.write_bytes(b"[" * 50_000 + b"]" * 50_000)
    else:
        file.write_bytes({"half": content[: len(content) // 2], "last": content[:-2], **CONTENTS}[how])


CONTENTS = {
    "empty": b"", "null": b"null", "number": b"5", "word": b'"model"', "list": b"[]", "object": b"{}", "brace": b"{",
    "surrogate": b'{"model_type": "\\ud800", "model": "\\ud800", "unk_token": "\\ud800"}',
    "invalid": b'{"model_type": "\xff\xfe"}', "zeros": bytes(100),
}  # fmt: skip
WAYS = (*CONTENTS, "half", "last", "missing", "directory", "unreadable", "endless", "deep")


def rewritten(file: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Save a file's tensors again, changed."""
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
