"""A tiny random language model for attacks on prompts, and sentences that it mostly labels as they are labelled."""

import importlib.util

import numpy as np
import pytest
import torch
from loud import loud
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig
import ssmscope
from ssmscope.attacks.prompts import prompt_attack
from ssmscope.attacks.prompts.result import PromptAttack
from ssmscope.data.text import TextData, text_data
from ssmscope.evaluation import Evaluator, Template
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo.tokenizers import train_tokenizer

needs_textattack = pytest.mark.skipif(
    importlib.util.find_spec("textattack") is None, reason="textattack is not installed"
)
SUFFIX_ATTACKS = ("stresstest", "checklist")
TEMPLATES = (
    "Say whether the sentence is negative or positive.\nSentence: {content}\nAnswer:",
    "Which feeling does this sentence show? {content} It is",
)
WORDS = ("negative", "positive")
SENTENCES = [
    f"{how} {what} with {more}"
    for how in ("a good", "a bad", "one more dull", "such a great", "no")
    for what in ("film", "play", "story about music")
    for more in ("fine acting", "nothing to say")
]


def language_model(seed: int = 3) -> ssmscope.Model:
    """Two layers of width 16 that read 200 subwords."""
    tokenizer = train_tokenizer([*SENTENCES, *TEMPLATES, "and true is true and false is not true"], vocabulary=200)
    config = Mamba2Config(
        vocab_size=len(tokenizer), hidden_size=16, state_size=4, num_hidden_layers=2, num_heads=4, head_dim=8,
        n_groups=1, expand=2, chunk_size=8, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    module = loud(Mamba2ForCausalLM(config), seed)
    return ssmscope.load(module, tokenizer=tokenizer)


def answers(model: ssmscope.Model, template: str, words=WORDS, texts=SENTENCES) -> np.ndarray:
    """Return the likeliest of the words after the template about each text, (texts,)."""
    evaluator = Evaluator(model, words=words)
    return evaluator.answers(evaluator.grid([Template(template)], texts))[0]


def labelled(model: ssmscope.Model, template: str = TEMPLATES[0], wrong: int = 5) -> TextData:
    """The sentences with the labels that the model gives them under a template, but for `wrong` of them."""
    labels = answers(model, template)
    labels[:wrong] = 1 - labels[:wrong]
    return text_data("sentences", "all", SENTENCES, labels.tolist(), WORDS)


def attack(model: ssmscope.Model, data: TextData, **options) -> PromptAttack:
    return prompt_attack(model, data, **{"template": TEMPLATES, "words": WORDS, **options})


WORDS_OF_A_READER = "[PAD] [UNK] [CLS] a good bad film with music acting but dull great".split()


def reader() -> ssmscope.Model:
    """A random classifier of texts."""
    tokenizer = train_tokenizer([" ".join(WORDS_OF_A_READER), *TEMPLATES], vocabulary=120)
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, state_size=3, num_hidden_layers=2, time_step_rank=2)
    config = SSMClassifierConfig(
        MambaConfig(vocab_size=len(tokenizer), **sizes), num_labels=2, id2label={0: "dull", 1: "great"}
    )
    return ssmscope.load(loud(SSMForSequenceClassification(config)), tokenizer=tokenizer)


def few(*names: str) -> TextData:
    """Twelve of the sentences, labelled in turns."""
    return text_data("few", "all", SENTENCES[:12], [i % 2 for i in range(12)], names)
