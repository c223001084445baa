"""Byte-level byte-pair tokenizer for language models that answer prompts.

Its smallest tokens are the 256 bytes, so no character is unknown. A word includes the space before it (" good", or
"good" at the start of a line), and decoding restores the text, lowercased if the tokenizer lowercases. Unlike
`ssmscope.data.tokenizer`, it appends no end token, which would separate a prompt from its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ssmscope.data.tokenizer import fast_tokenizer
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, HIDDEN, END = "[PAD]", "[UNK]", "[END]"
"""Special tokens, which no text contains: padding, the token that training puts in place of dropped ones (the unknown
token in transformers' terms), and the end of an answer."""

WORD = r" ?\w+(?:'\w+)*| ?'(?:s|t|d|m|ll|re|ve)\b| ?([^\w\s])\1*|\s"
"""Pattern of pieces that tokens never cross: words with their apostrophes (`don't`), separate clitics (`'s`) and runs
of one punctuation mark, each with a preceding space, and single white-space characters."""


def train_byte_pairs(
    texts: Sequence[str], *, vocabulary: int = 4000, lowercase: bool = True
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocabulary` tokens; the same texts give the same tokenizer in every process.

    Raises:
        InputError: no text, or a `vocabulary` without room for the bytes and the special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = [PAD, HIDDEN, END]
    least = 256 + len(special)
    if not texts:
        raise InputError("there is no text to train a tokenizer on; give at least one")
    if vocabulary < least:
        raise InputError(
            f"a vocabulary of {vocabulary} has no room for 256 bytes and {len(special)} special tokens; give at least "
            f"{least}"
        )
    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    # With `split_special_tokens` the five characters "[END]" in a text are not the special token.
    return fast_tokenizer(tokenizer, pad_token=PAD, unk_token=HIDDEN, eos_token=END, split_special_tokens=True)
