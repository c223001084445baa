"""A tokenizer from its directory or its id on the hub."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download

from ssmscope.architectures.loading.fields import read_object
from ssmscope.architectures.loading.quiet import quiet
from ssmscope.architectures.loading.stored import DAMAGE_ERRORS, reason
from ssmscope.architectures.loading.words import check_tokenizer
from ssmscope.errors import InputError

TOKENIZER_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")


def fetched(source: str | os.PathLike[str], files: Collection[str]) -> Path:
    """Return the directory of that name, or one with the hub's files of these patterns."""
    where = Path(source).expanduser()
    return where if where.is_dir() else Path(snapshot_download(str(source), allow_patterns=list(files)))


def read_tokenizer(source: str | os.PathLike[str]) -> Any:
    """Return transformers' tokenizer of a directory or hub id, without running or offering to run any of its code.
    Raises InputError if there is none, its files are damaged or name other files, or it needs code of its own."""
    what = f"the tokenizer {str(source)[:200]!r}"
    try:
        with quiet():
            where = fetched(source, TOKENIZER_PATTERNS)
            if (where / "tokenizer_config.json").is_file():
                check_tokenizer(read_object(where / "tokenizer_config.json"), what)
            if (where / "config.json").is_file() and "configuration_files" in read_object(where / "config.json"):
                raise InputError(f"{what} has a config.json that names others (configuration_files): give theirs alone")
            # Without trust_remote_code=False, transformers asks on stdout whether to run the directory's code.
            found = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, local_files_only=True)
            found("", verbose=False)  # Some damage only shows in use.
            return found
    except InputError:
        raise
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, DAMAGE_ERRORS):  # tokenizers raises this.
            raise
        raise InputError(f"{what} cannot be loaded: {reason(error)}") from error
