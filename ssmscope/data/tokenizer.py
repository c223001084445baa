"""Small byte-pair tokenizer for classifiers, trained on the texts at hand.

Words are runs of letters and digits with their apostrophes (`don't`), separate clitics (`'ve`), and runs of one
punctuation mark (`...`); sub-words never cross a word, so `word_ids()` restores words. A character not seen in training
becomes [UNK]. Every text ends with [CLS], so that the last position, which a recurrent classifier reads, holds the same
token in every text.

Sub-words have no `##` or `▁`: with a continuation prefix the `tokenizers` trainer numbers sub-words in the order of a
randomly seeded hash map, and the same texts would give another vocabulary in each process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, END = "[PAD]", "[UNK]", "[CLS]"
WORD = r"\w+(?:'\w+)*|'\w+|([^\w\s])\1*"


def train_tokenizer(
    texts: Sequence[str], *, vocabulary: int = 4000, lowercase: bool = True, max_length: int = 512
) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer of at most `vocabulary` tokens; the same texts give the same one in every process.

    With truncation, a text is cut to `max_length` tokens and keeps its end token.

    Raises:
        InputError: for no text, a `max_length` below 2, or a `vocabulary` too small for the texts' characters.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    if not texts:
        raise InputError("there is no text to train a tokenizer on; give at least one")
    if max_length < 2:
        raise InputError(f"max_length is {max_length}; it must be at least 2: a token and {END}")
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    characters = {c for text in texts for c in tokenizer.normalizer.normalize_str(text) if not c.isspace()}
    if vocabulary < len(characters) + 3:
        raise InputError(
            f"a vocabulary of {vocabulary} is smaller than the texts' {len(characters)} distinct characters "
            f"and 3 special tokens; give at least {len(characters) + 3}"
        )
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[PAD, UNKNOWN, END], show_progress=False),
        length=len(texts),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B:1 {END}:1", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return fast_tokenizer(tokenizer, pad_token=PAD, unk_token=UNKNOWN, cls_token=END, model_max_length=max_length)


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


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    """Save a tokenizer like `save_pretrained`, but readable by transformers 4 and 5 and without indentation.

    transformers 5 names the class `TokenizersBackend`, which transformers 4 does not know; both know
    `PreTrainedTokenizerFast`. Indentation, four lines per merge, would make tokenizer.json several times larger.
    """
    directory = Path(directory)
    tokenizer.save_pretrained(str(directory))
    settings_file = directory / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings_file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    vocabulary_file = directory / "tokenizer.json"
    if vocabulary_file.exists():
        content = json.loads(vocabulary_file.read_text(encoding="utf-8"))
        # Truncation and padding are settings of the last call, not part of the tokenizer.
        content["truncation"] = content["padding"] = None
        vocabulary_file.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
