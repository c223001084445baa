"""A tokenizer from its directory or its id on the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import transformers

from ssmscope.errors import InputError
from ssmscope.models.quiet import quiet
from ssmscope.models.stored import BROKEN, reason


def read_tokenizer(source: str | os.PathLike[str]) -> Any:
    """transformers' tokenizer in a directory, or of a hub id; no code of either is run or offered for running.

    Raises:
        InputError: when there is none, its files are damaged, or it needs code of its own.
    """
    try:
        with quiet():
            # Without trust_remote_code=False, transformers asks on stdout whether to run the directory's code.
            found = transformers.AutoTokenizer.from_pretrained(
                source, trust_remote_code=False, local_files_only=Path(source).is_dir()
            )
            found("", verbose=False)  # some of what is damaged shows only as it is used
            return found
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, BROKEN):  # the tokenizers library raises the former
            raise
        raise InputError(f"the tokenizer {str(source)[:200]!r} cannot be loaded: {reason(error)}") from error
