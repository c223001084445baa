"""A byte-pair tokenizer for language models that answer prompts: it encodes every text, and nothing is appended.

Its smallest tokens are the 256 bytes, so no character is unknown, however rarely it was met in training; line breaks,
digits and punctuation stay. A word takes the space before it along (" good", "good" at the start of a line), and
decoding gives back the text, in lower case where the tokenizer reads lower case.

That nothing is appended sets it apart from `ssmscope.data.tokenizer`: an end token after a prompt would stand between
the prompt and its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ssmscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, HIDDEN, END = "[PAD]", "[UNK]", "[END]"
"""The special tokens, which no text contains: padding; what stands for a token that training hides (the unknown token
to transformers, though no text has one); and the end of an answer."""

WORD = r" ?\w+(?:'\w+)*| ?'(?:s|t|d|m|ll|re|ve)\b| ?([^\w\s])\1*|\s"
"""What tokens never cross: words with their apostrophes (`don't`), clitics that stand alone (`'s`), runs of one
punctuation mark, single white space characters; each of the first three with a space before it."""


def train_byte_pairs(
    texts: Sequence[str], *, vocabulary: int = 4000, lowercase: bool = True
) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocabulary` tokens, the same for the same `texts` in every process.

    Raises:
        InputError: no text, or a `vocabulary` without room for the bytes and the special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, HIDDEN, END]
    least = 256 + len(special)
    if not texts:
        raise InputError("there is no text to train a tokenizer on; give at least one")
    if vocabulary < least:
        raise InputError(f"a vocabulary of {vocabulary} has no room for 256 bytes and {len(special)} special tokens; "
                         f"give at least {least}")  # fmt: skip
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=HIDDEN,
        eos_token=END,
        padding_side="right",
        truncation_side="right",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        # "[END]" in a text is six characters
        split_special_tokens=True,
    )
