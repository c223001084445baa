"""Tokenizers in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    """Save a tokenizer like `save_pretrained`, but readable by transformers 4 and 5 and without indentation.
    transformers 5 names the class `TokenizersBackend`, which transformers 4 does not know; both know
    `PreTrainedTokenizerFast`. Indentation, four lines per merge, would make tokenizer.json several times larger."""
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
