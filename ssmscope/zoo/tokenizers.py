"""Small byte-pair tokenizers, trained on the texts at hand: of letters for classifiers, of bytes for language models.

For classifiers, words are runs of letters and digits with their apostrophes (`don't`), separate clitics (`'ve`), and
runs of one punctuation mark (`...`); sub-words never cross a word, so `word_ids()` restores words. A character not seen
in training becomes [UNK]. Every text ends with [CLS], the token at the last position, which a recurrent classifier
reads. Sub-words have no `##` or `▁`: with a continuation prefix the `tokenizers` trainer numbers sub-words in the order
of a randomly seeded hash map, so the same texts would give another vocabulary in each process.

For language models, the smallest tokens are the 256 bytes, so no character is unknown. A word includes the space before
it, and decoding restores the text, lowercased if the tokenizer lowercases. No end token separates a prompt from its
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ssmscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN = "[PAD]", "[UNK]"
"""Padding, and the unknown token: of bytes, which know every text, the one in place of tokens dropped in training."""
END, ANSWER_END = "[CLS]", "[END]"
"""Ends of a classifier's text and of a language model's answer."""
WORD = r"\w+(?:'\w+)*|'\w+|([^\w\s])\1*"
SPACED_WORD = r" ?\w+(?:'\w+)*| ?'(?:s|t|d|m|ll|re|ve)\b| ?([^\w\s])\1*|\s"
"""Pattern of pieces that tokens of bytes never cross: words, clitics and runs of one punctuation mark, each with a
preceding space, and single white-space characters."""


def train_tokenizer(
    texts: Sequence[str], *, vocabulary: int = 4000, lowercase: bool = True, max_length: int = 512
) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer of at most `vocabulary` tokens; the same texts give the same one in every process.
    With truncation, a text is cut to `max_length` tokens and keeps its end token. Raise InputError for no text, a
    `max_length` below 2, or a `vocabulary` too small for the texts' characters."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    if max_length < 2:
        raise InputError(f"max_length is {max_length}; it must be at least 2: a token and {END}")
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    characters = {c for text in texts for c in tokenizer.normalizer.normalize_str(text) if not c.isspace()}
    needed = f"is smaller than the texts' {len(characters)} distinct characters and 3 special tokens"
    _train(tokenizer, texts, vocabulary, len(characters), needed, [PAD, UNKNOWN, END])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B:1 {END}:1", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return fast_tokenizer(tokenizer, pad_token=PAD, unk_token=UNKNOWN, cls_token=END, model_max_length=max_length)


def train_byte_pairs(
    texts: Sequence[str], *, vocabulary: int = 4000, lowercase: bool = True
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of bytes of at most `vocabulary` tokens; the same texts give the same one in every process.
    Raise InputError for no text, or a `vocabulary` without room for the bytes and the special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(SPACED_WORD), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, of_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = [PAD, UNKNOWN, ANSWER_END], sorted(pre_tokenizers.ByteLevel.alphabet())
    needed = f"has no room for 256 bytes and {len(special)} special tokens"
    _train(tokenizer, texts, vocabulary, 256, needed, special, initial_alphabet=alphabet)
    # With `split_special_tokens` the five characters "[END]" in a text are not the special token.
    return fast_tokenizer(tokenizer, pad_token=PAD, unk_token=UNKNOWN, eos_token=ANSWER_END, split_special_tokens=True)


def _train(
    tokenizer: Any, texts: Sequence[str], vocabulary: int, symbols: int, needed: str, special: list[str], **options: Any
) -> None:
    """Train a tokenizer; raise InputError for no text, or a vocabulary below the numbers of symbols and special tokens,
    which are `needed`."""
    from tokenizers import trainers

    least = symbols + len(special)
    if not texts:
        raise InputError("there is no text to train a tokenizer on; give at least one")
    if vocabulary < least:
        raise InputError(f"a vocabulary of {vocabulary} {needed}; give at least {least}")
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))


def fast_tokenizer(tokenizer: Any, **options: Any) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer of the package `tokenizers` for transformers, with padding and truncation on the right."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="right",
        truncation_side="right",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **options,
    )
