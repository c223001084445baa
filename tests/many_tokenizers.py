"""Small tokenizers of the kinds that models come with, and texts of whose characters some make several tokens."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["Der Müller aß 10€ ok, the film movie gripping", "a film and a movie 10 ok the great film"] * 3
TEXTS = [
    "Der Müller aß 10€ ok", "the  film \n x ", " film\t\tmovie", "a cafe\u0301 film, re\u0301sume\u0301 \ufb01x",
    "ok 👩\u200d👩\u200d👧 film 👍🏽ok", "电影 film 很好", "the שלום עולם film", "the film\r\na movie", "फ़िल्म ok अच्छी",
    "€€€ 10€",
]  # fmt: skip


def _fast(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def byte_level(*, trim: bool | None = None, prefix: bool = False, words: bool = True) -> PreTrainedTokenizerFast:
    """Byte-pair encoding of bytes; `trim` of its offsets, None without what would trim them; not `words`: tokens reach
    over spaces and parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if trim is not None:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim, add_prefix_space=prefix)
    return _fast(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama's: spaces are ▁, one is put before the text, and unknown characters are their
    bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    merges = [("f", "i"), ("l", "m"), ("fi", "lm"), ("▁", "film"), ("o", "k"), ("▁", "ok")]
    names += ["".join(pair) for pair in merges]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return _fast(tokenizer, unk_token="<unk>")


def unigram() -> PreTrainedTokenizerFast:
    """Return a tokenizer as T5's: composed characters (NFKC), ▁ before words, and unknown characters."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = {"unk_token": "<unk>", "special_tokens": ["<unk>"]}
    tokenizer.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=60, show_progress=False, **special))
    return _fast(tokenizer, unk_token="<unk>")


def word_piece() -> PreTrainedTokenizerFast:
    """Return a tokenizer as BERT's: lower case, without accents, pieces of words, between [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    both = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=both)
    return _fast(tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


TOKENIZERS = {
    "bytes": byte_level, "trimmed bytes": lambda: byte_level(trim=True),
    "bytes behind a space": lambda: byte_level(trim=False, prefix=True),
    "trimmed bytes behind a space": lambda: byte_level(trim=True, prefix=True),
    "bytes over spaces": lambda: byte_level(words=False),
    "trimmed bytes over spaces": lambda: byte_level(trim=True, words=False), "byte fallback": byte_fallback,
    "unigram": unigram, "word pieces": word_piece,
}  # fmt: skip
LOSSLESS = [name for name in TOKENIZERS if name != "word pieces"]
