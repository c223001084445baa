"""Models that forget at a known rate: one selective SSM whose output is a sum of its words' weights, each decayed by
the tokens read since."""

import math
from collections.abc import Mapping, Sequence

import torch
from bags import LABELS, tokenizer
from ssmscope.core.model import Model
from ssmscope.zoo.selective import SelectiveSSMConfig, SelectiveSSMForCausalLM, SelectiveSSMForSequenceClassification


def fading(
    weights: Mapping[str, float], *, decay: float = 0.0, steps: Mapping[str, float] | None = None, ending: float = 0.0,
    language: bool = False,
) -> Model:  # fmt: skip
    """A model of these words whose log-odds of "good" over "bad" are `log_odds`. A word's step is 1 unless `steps` has
    it. A classifier reads at the token [CLS], which has the weight `ending`; a language model answers with the words
    "good" and "bad" at the end of the text."""
    names = list(weights)
    size = 3 + len(names)
    kind = SelectiveSSMForCausalLM if language else SelectiveSSMForSequenceClassification
    module = kind(SelectiveSSMConfig(vocab_size=size, hidden_size=3, state_size=1))
    if not language:
        module.config.id2label = dict(enumerate(LABELS))
    part = module.backbone if language else module
    softplus_inverse = {name: math.log(math.expm1(step)) for name, step in (steps or {}).items()}
    with torch.no_grad():
        # u = (1, weight, what the step's argument has more than that of a step of 1)
        table = torch.zeros(size, 3)
        table[:, 0] = 1
        table[2, 1] = ending
        for at, name in enumerate(names, 3):
            table[at, 1] = weights[name]
            table[at, 2] = softplus_inverse.get(name, STEP) - STEP
        part.embedding.weight.copy_(table)
        part.ssm.A.fill_(-decay)
        part.ssm.W_B.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
        part.ssm.W_C.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
        part.ssm.q_delta.copy_(torch.tensor([0.0, 0.0, 1.0]))
        part.ssm.p_delta.fill_(STEP)
        if language:
            module.lm_head.weight.zero_()
            module.lm_head.weight[3 + names.index("good"), 1] = 1
        else:
            module.head.weight.copy_(torch.tensor([[0.0, 1.0, 0.0]]))
    return Model(module.eval(), tokenizer(names, ending=not language), "fading")


STEP = math.log(math.expm1(1))


def log_odds(
    words: Sequence[str], weights: Mapping[str, float], *, decay: float = 0.0, steps: Mapping[str, float] | None = None,
    ending: float | None = 0.0,
) -> float:  # fmt: skip
    """Return the log-odds of "good" after these words: each word's step · weight, decayed by e^(−decay · step) of every
    word after it, the last one [CLS] unless `ending` is None."""
    total = 0.0
    for word in words:
        step = (steps or {}).get(word, 1.0)
        total = math.exp(-decay * step) * total + step * weights.get(word, 0.0)
    return total if ending is None else math.exp(-decay) * total + ending
