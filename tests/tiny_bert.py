"""A BERT of a few words with random weights, as a masked language model and as an encoder of sentences."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

VOCABULARY = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] a good bad film great fine awful text sentence is say answer label of ##s ##ing "
    "##ly ##e ##d . , : ' ?"
).split()


def save_bert(folder: Path) -> Path:
    """Its directory: WordPiece in lower case, two layers of width 16, 40 positions."""
    inner = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]", max_input_chars_per_word=50)
    )
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config = BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=40, initializer_range=0.5, **sizes)
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(folder)
    return folder
