"""Bridge that runs our models in EleutherAI's lm-evaluation-harness.

The harness's own programs find it once this module is imported:

    import lm_eval, ssmscope.probes.evaluate.harness
    lm_eval.simple_evaluate(model="ssmscope", model_args="pretrained=demo/books-mamba2", tasks=["wnli"])
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from ssmscope.core.model import Model
from ssmscope.core.tokenizing import failures_told
from ssmscope.errors import InputError
from ssmscope.loading.load import load


@register_model("ssmscope")
class HarnessModel(HFLM):
    """Hugging Face model of the harness, run with our scans in evaluation mode; its tokenizer needs an end token."""

    def __init__(self, pretrained: Model | str, batch_size: int = 16, **options: Any) -> None:
        self.loaded = pretrained if isinstance(pretrained, Model) else load(pretrained)
        tokenizer = self.loaded.tokenizer
        if tokenizer is None or tokenizer.eos_token_id is None:
            lacks = "no tokenizer with an end token, which the harness puts before texts"
            raise InputError(f"{self.loaded.name} has {lacks}")
        options |= {"tokenizer": tokenizer, "backend": "causal", "batch_size": batch_size}
        super().__init__(pretrained=self.loaded.module, **options)

    def tok_encode(self, string: Any, *args: Any, **options: Any) -> Any:
        with failures_told(self.tokenizer, string):
            return super().tok_encode(string, *args, **options)

    def tok_batch_encode(self, strings: Any, *args: Any, **options: Any) -> Any:
        with failures_told(self.tokenizer, strings):
            return super().tok_batch_encode(strings, *args, **options)

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        with self.loaded.running():
            return super()._model_call(inps, attn_mask, labels)
