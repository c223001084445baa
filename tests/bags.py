"""Classifiers whose output is known in closed form: a function of the sum of their words' weights."""

from collections.abc import Callable, Mapping, Sequence

import torch
from examples import random_example
from tokenizers import Tokenizer
from tokenizers import models as token_models
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.modeling_outputs import SequenceClassifierOutput
from ssmscope.core.model import Model
from ssmscope.data.text import TextData, text_data
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.objective import Objective

LABELS = ("bad", "good")


class BagForSequenceClassification(nn.Module):
    """Its logits are 0 and g(Σ w_i), with the weights as embeddings of width 1; its mixer does nothing."""

    def __init__(self, weights: Sequence[float], link: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.idle = next(iter(random_example("mamba").children()))
        self.words = nn.Embedding.from_pretrained(torch.tensor(weights).unsqueeze(1))
        self.link = link
        self.config = PretrainedConfig(num_labels=2, id2label=dict(enumerate(LABELS)), model_type="bag")
        self.calls = 0

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids=None, inputs_embeds=None, attention_mask=None):
        values = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        self.calls += len(values) if inputs_embeds is not None else 0
        total = self.link((values.squeeze(-1) * attention_mask).sum(1))
        return SequenceClassifierOutput(logits=torch.stack([torch.zeros_like(total), total], 1))


def tokenizer(words: Sequence[str], ending: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words between spaces, with [CLS] after them."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", *words])}
    backend = Tokenizer(token_models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    if ending:
        backend.post_processor = TemplateProcessing(single="$A [CLS]", special_tokens=[("[CLS]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")


def bag(
    weights: Mapping[str, float], *, link: Callable[[torch.Tensor], torch.Tensor] = lambda total: total,
    ending: float | None = 0.0,
) -> Model:  # fmt: skip
    """A bag of these words; `ending` is the weight of the special token after every text."""
    table = [0.0, 0.0, ending or 0.0, *weights.values()]
    return Model(BagForSequenceClassification(table, link), tokenizer(list(weights), ending is not None), "bag")


def texts(*lines: str, rationales=None) -> TextData:
    return text_data("toy", "test", lines, [i % 2 for i in range(len(lines))], LABELS, rationales)


def by_word(values: Mapping[str, float]) -> Callable[[Objective], Scores]:
    """A method that scores every token by its word; specials get more than all words."""

    def method(goal: Objective) -> Scores:
        scores = torch.zeros(goal.batch.mask.shape)
        for row, tokens in enumerate(goal.batch.tokens):
            scores[row, : len(tokens)] = torch.tensor([values.get(token, 99.0) for token in tokens])
        return Scores(scores)

    return method


def by_position(goal: Objective) -> Scores:
    """Score tokens by position: the later, the less relevant."""
    return Scores(-torch.arange(goal.batch.mask.shape[1]).float().expand(len(goal), -1))
