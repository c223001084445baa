"""External resources of attacks on words: word vectors, synonyms, a masked language model, a sentence encoder.

Each is a file or a transformers model that the user names; only a model named by its hub id is downloaded.
"""

from __future__ import annotations

import csv
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from ssmscope.core.text_files import no_character, parse_json, read_text
from ssmscope.errors import InputError
from ssmscope.loading.fields import check_fields, read_object
from ssmscope.loading.pretrained import TOKENIZER_PATTERNS, fetched, is_adapter, quiet, read_tokenizer
from ssmscope.loading.stored import DAMAGE_ERRORS, reason, weight_files

MAX_UNZIPPED_BYTES = 2**34
UNZIPPABLE = (zipfile.BadZipFile, zlib.error)
"""Errors of damaged archives."""
SENTENCES_PER_BATCH = 32
LINES = "text with 'word v1 v2 …' on a line"
"""Form of a text file of word vectors."""


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words and their unit vectors, in the order of their file."""

    words: tuple[str, ...]
    unit: Float[np.ndarray, "words size"]

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Row of each word, the first where it occurs several times."""
        return {word: row for row, word in reversed(list(enumerate(self.words)))}


def load_vectors(path: str | Path) -> WordVectors:
    """Read word vectors from a text file with `word v1 v2 …` on a line, or from an .npz file. A first line of two
    numbers, as in word2vec's format, is skipped. An .npz file holds the arrays `words` and `vectors`."""
    path = Path(path)
    if not os.path.isfile(path):
        raise InputError(f"there is no file {path} of word vectors; give {LINES}, or an .npz")
    stamp = path.stat()
    return _load_vectors(path, stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=1)
def _load_vectors(path: Path, changed: int, size: int) -> WordVectors:
    words, matrix = _read_npz(path) if path.suffix == ".npz" else _read_lines(path)
    if not np.isfinite(matrix).all():
        raise InputError(f"{path} holds vectors that are not finite")
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    return WordVectors(tuple(words), (matrix / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32))


def _read_npz(path: Path) -> tuple[list[str], np.ndarray]:
    form = f"{path} is not a file of word vectors: an .npz needs the arrays 'words' (n) and 'vectors' (n, size)"
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MAX_UNZIPPED_BYTES:
            raise InputError(f"{path} holds {size:,} bytes; allowed are up to {MAX_UNZIPPED_BYTES:,}")
        with np.load(path, allow_pickle=False) as arrays:
            words, matrix = arrays["words"], arrays["vectors"]
        kinds = (words.dtype.kind, matrix.dtype.kind, matrix.ndim)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, EOFError, MemoryError, RuntimeError, AttributeError, *UNZIPPABLE) as error:
        raise InputError(form) from error
    if kinds != ("U", "f", 2) or words.shape != matrix.shape[:1]:
        raise InputError(form)
    if not len(words):
        raise InputError(f"{path} holds no word vector")
    return words.tolist(), matrix


def _read_lines(path: Path) -> tuple[list[str], np.ndarray]:
    words: list[str] = []
    rows: list[np.ndarray] = []
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                word, _, rest = line.rstrip().partition(" ")
                numbers = rest.split()
                if not word or (number == 1 and word.isdecimal() and len(numbers) == 1):
                    continue
                row = np.array(numbers, dtype=np.float32)
                if not len(row) or (rows and len(row) != len(rows[0])):
                    wanted = f"{len(rows[0])} as before it" if rows else "at least 1"
                    raise InputError(f"line {number} of {path} has {len(row)} numbers after its word, not {wanted}")
                words.append(word)
                rows.append(row)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text; word vectors are {LINES}") from error
    except ValueError as error:
        raise InputError(f"line {number} of {path} holds something other than numbers after its word") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not words:
        raise InputError(f"{path} holds no word vector; give {LINES}")
    return words, np.stack(rows)


def load_synonyms(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Read synonyms by lower-case word from a .json file {word: [words]} or a .csv file of lines `word,synonym`."""
    path = Path(path)
    forms = 'allowed are a .json file {"word": ["synonym", …]} and a .csv file with word,synonym on a line'
    wrong = f"{path} is not a file of synonyms; {forms}"
    if not os.path.isfile(path) or path.suffix not in (".json", ".csv"):
        raise InputError(wrong)
    content = read_text(path, str(path), advice=forms)
    try:
        if path.suffix == ".json":
            table = parse_json(content)
            if no_character(table) is not None or not all(isinstance(others, list) for others in table.values()):
                raise InputError(wrong)
            pairs = [(word.strip(), other.strip()) for word, others in table.items() for other in others]
        else:
            rows = [row for row in csv.reader(content.splitlines(), strict=True) if row]
            pairs = [(word.strip(), other.strip()) for word, other in rows]
    except (ValueError, AttributeError, TypeError, csv.Error) as error:
        raise InputError(wrong) from error
    found: dict[str, list[str]] = {}
    for word, other in pairs:
        if word and other and (word, other) != ("word", "synonym"):
            found.setdefault(word.lower(), []).append(other)
    if not found:
        raise InputError(f"{path} holds no synonym; {forms}")
    return {word: tuple(dict.fromkeys(others)) for word, others in found.items()}


class Encoder:
    """Sentence embeddings: mean of a transformers model's last hidden states over a sentence's tokens."""

    def __init__(self, name: str | Path):
        self.name = str(name)
        self.module, self.tokenizer = _load(self.name, "AutoModel", "encoder", "a sentence encoder")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.length = _max_length(self.module, self.tokenizer)

    def __call__(self, sentences: Sequence[str]) -> Float[Tensor, "sentences size"]:
        """Return the embeddings on the CPU; that of an empty sentence is zero."""
        parts = [torch.zeros(0, self.module.config.hidden_size, dtype=torch.float32)]
        form = dict(padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        for start in range(0, len(sentences), SENTENCES_PER_BATCH):
            batch = self.tokenizer(list(sentences[start : start + SENTENCES_PER_BATCH]), **form).to(self.module.device)
            with torch.no_grad():
                hidden = self.module(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].to(hidden.dtype)
            parts.append(((hidden * mask).sum(1) / mask.sum(1).clamp(min=1)).float().cpu())
        return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Read:
    """Tokens of a text and a masked language model's predictions at them."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """Start and end of each token in characters of the text; (0, 0) for special tokens."""
    log_probabilities: Float[Tensor, "tokens vocabulary"]

    def places(self, start: int, stop: int) -> list[int]:
        """Return the tokens within these characters."""
        return [i for i, (a, b) in enumerate(self.offsets) if a < b and a < stop and start < b]


class MaskedLM:
    """A transformers masked language model and its tokenizer."""

    def __init__(self, name: str | Path):
        self.name = str(name)
        self.module, self.tokenizer = _load(self.name, "AutoModelForMaskedLM", "masked_lm", "a masked language model")
        if not self.tokenizer.is_fast:
            raise InputError(
                f"masked_lm {self.name!r} has a tokenizer without offsets of its tokens; give a model with a fast "
                "tokenizer"
            )
        self.length = _max_length(self.module, self.tokenizer)
        self.special = set(self.tokenizer.all_special_ids)
        tokens = self.tokenizer.get_vocab()
        self.starts = next((mark for mark in "Ġ▁" if any(token.startswith(mark) for token in tokens)), None)
        """Mark of tokens that begin a word; None if the tokenizer marks continuations instead, with ##."""

    def read(self, text: str) -> Read:
        """Run the model on the unmasked text, cut at the model's maximum length."""
        batch = self.tokenizer(
            text, truncation=True, max_length=self.length, return_offsets_mapping=True, return_tensors="pt"
        )
        offsets = [tuple(pair) for pair in batch.pop("offset_mapping")[0].tolist()]
        with torch.no_grad():
            logits = self.module(**batch.to(self.module.device)).logits[0].float().cpu()
        logits[:, list(self.special)] = -torch.inf
        return Read(batch["input_ids"][0].tolist(), offsets, logits.log_softmax(-1))

    def continues(self, token: int) -> bool:
        """Return True if a token continues a word."""
        text = self.tokenizer.convert_ids_to_tokens(token)
        return not text.startswith(self.starts) if self.starts else text.startswith("##")

    def word(self, tokens: Sequence[int]) -> str:
        """Join tokens into one word."""
        texts = self.tokenizer.convert_ids_to_tokens(list(tokens))
        if not self.starts:
            return "".join(text.removeprefix("##") for text in texts)
        return self.tokenizer.convert_tokens_to_string(list(texts)).strip()


def _load(name: str, kind: str, option: str, what: str) -> tuple[Any, Any]:
    """Load a model in evaluation mode, on the GPU if there is one, and its tokenizer."""
    import transformers

    advice = f"give the directory or the hub id of {what}"
    try:
        with quiet():
            where = fetched(name, (*TOKENIZER_PATTERNS, "*.safetensors"))
            if not list(where.glob("*.safetensors")):
                where = fetched(name, (*TOKENIZER_PATTERNS, "*.bin"))
            tokenizer = read_tokenizer(where)
            if is_adapter(where) or not (where / "config.json").is_file():
                raise InputError("it holds no model's config.json, or a PEFT adapter")
            check_fields(read_object(where / "config.json"), name)
            weight_files(where)
            module, info = getattr(transformers, kind).from_pretrained(
                where, output_loading_info=True, trust_remote_code=False, local_files_only=True
            )
    except DAMAGE_ERRORS as error:
        raise InputError(f"{option} {name!r} could not be loaded ({reason(error)}); {advice}") from error
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    if missing:
        raise InputError(f"{option} {name!r} is not {what}: it has no weights for {missing[0]}; {advice}")
    return module.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _max_length(module: Any, tokenizer: Any) -> int:
    """Return the maximum number of tokens of a text."""
    reach = getattr(module.config, "max_position_embeddings", None) or 512
    offset = getattr(module.config, "pad_token_id", None) or 0 if module.config.model_type == "roberta" else 0
    return min(tokenizer.model_max_length, reach - (offset + 1 if offset else 0))
