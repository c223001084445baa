"""Choice of the objective by the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ssmscope.data.babi import QuestionTokens
from ssmscope.data.instructions import InstructionData
from ssmscope.data.mad import CompressionData
from ssmscope.data.pixels import PixelData
from ssmscope.data.tokens import TokenData
from ssmscope.training.answering import Answers
from ssmscope.training.objectives import NextTokens, Objective, Pixels, Questions, Reconstruction, Sequences, Texts


def objective_of(
    parts: Mapping[str, Any], options: Mapping[str, Any], device: torch.device, tokenizer: Any, module: Any
) -> Objective:
    """Return the objective for these data."""
    data = parts["train"]
    if options["kind"] == "text":
        return Texts(parts, options, device, tokenizer)
    if isinstance(data, InstructionData):
        return Answers(parts, options, device, tokenizer)
    if isinstance(data, CompressionData):
        return Reconstruction(parts, options, device, module)
    if isinstance(data, QuestionTokens):
        return Questions(parts, options, device)
    if isinstance(data, TokenData):
        return NextTokens(parts, options, device)
    return (Pixels if isinstance(data, PixelData) else Sequences)(parts, options, device)
