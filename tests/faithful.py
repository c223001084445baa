"""Models and methods for tests of fidelity: a random classifier, its words, and scores drawn at random."""

import numpy as np
import torch
from loud import loud
from transformers import Mamba2Config
import ssmscope
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification

WORDS = ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")


def random_scores(goal) -> Scores:
    scores = torch.zeros(goal.batch.mask.shape)
    for row, ids in enumerate(goal.batch.input_ids):
        own = goal.batch.lengths[row]
        scores[row, :own] = torch.rand(own, generator=torch.Generator().manual_seed(int(ids[:own].sum())))
    return Scores(scores)


def reader(hidden: int = 12, labels: int = 3) -> ssmscope.Model:
    """A random classifier in which every position matters."""
    from bags import tokenizer

    torch.manual_seed(0)
    keys = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)
    sizes = dict(hidden_size=hidden, state_size=4, num_heads=4, head_dim=hidden // 2, n_groups=1, expand=2)
    backbone = Mamba2Config(vocab_size=3 + len(WORDS), num_hidden_layers=2, **sizes, **keys)
    config = SSMClassifierConfig(backbone, num_labels=labels, id2label={i: f"class {i}" for i in range(labels)})
    return ssmscope.load(loud(SSMForSequenceClassification(config)), tokenizer=tokenizer(WORDS))


def lines(n: int, seed: int = 0, shortest: int = 1, longest: int = 9) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(shortest, longest + 1))) for _ in range(n)]
