"""Time limit of a tokenizer's regular expressions, which may take years of a text and cannot be interrupted.

A tokenizer with patterns that are not known first splits each text in another process, which is ended at the limit.
That process is started once for a tokenizer; where all patterns are known, none is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from ssmscope.errors import InputError

SECONDS, CHARACTERS_PER_SECOND = 10.0, 100_000
"""Seconds that a text may take in any case, and the characters for which it may take another second."""
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KNOWN_PATTERNS = frozenset({
    r"\w+(?:'\w+)*|'\w+|([^\w\s])\1*",
    r" ?\w+(?:'\w+)*| ?'(?:s|t|d|m|ll|re|ve)\b| ?([^\w\s])\1*|\s",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    *(
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        for digits in (r"\p{N}", r"\p{N}{1,3}")
    ),
})  # fmt: skip
"""Patterns that split any text in time proportional to its length: ours, and those of GPT-2, Llama 3 and Qwen 2."""
CHILD = """
import sys
sys.path = [place for place in sys.path if place]
import json
from tokenizers import Tokenizer
splitting = Tokenizer.from_str(json.loads(sys.stdin.readline()))
for line in sys.stdin:
    answer = ""
    try:
        splitting.encode(json.loads(line))
    except BaseException as error:
        answer = "" if isinstance(error, Exception) else " ".join(str(error).split())
    print(answer, flush=True)
"""


class Splitter:
    """Process that splits texts as a tokenizer does."""

    def __init__(self, steps: dict[str, Any]) -> None:
        self.lock = threading.Lock()
        self.steps = {**dict.fromkeys(("truncation", "padding", "post_processor", "decoder")), **steps}
        self.steps |= {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        self.process: subprocess.Popen[str] | None = None

    def trouble(self, text: str) -> str | None:
        """Return why a text is not split, in a few words: it takes too long, or panics. None if it is."""
        seconds = SECONDS + len(text) / CHARACTERS_PER_SECOND
        late = threading.Event()
        with self.lock:
            process = self._started()

            def end() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(seconds, end)
            timer.start()
            try:
                _write(process, text)
                answer = process.stdout.readline() if process.stdout else ""
            except OSError:  # The process has ended.
                answer = ""
            finally:
                timer.cancel()
            if not answer:
                _end(process)
                self.process = None
        return f"it takes more than {seconds:.0f} s" if late.is_set() else answer.strip() or None

    def _started(self) -> subprocess.Popen[str]:
        if self.process is None:
            pipe, command = subprocess.PIPE, [sys.executable, "-X", "utf8", "-c", CHILD]
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
            )
            weakref.finalize(self, _end, self.process)
            _write(self.process, json.dumps(self.steps))
        return self.process


def _write(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(text) + "\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


_splitters: weakref.WeakKeyDictionary[Any, tuple[list[str], Splitter]] = weakref.WeakKeyDictionary()
"""Unknown patterns of tokenizers, with their processes."""


def check_time(tokenizer: Any, texts: str | Sequence[str], named: str) -> None:
    """Raise InputError if a tokenizer's patterns do not split a text, `named` so where it is one, within its limit."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return
    if tokenizer not in _splitters:
        backend = tokenizer.backend_tokenizer
        parts = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
        steps = {name: part and json.loads(part.__getstate__()) for name, part in parts.items()}
        unknown = [pattern for pattern in _patterns(steps) if pattern not in KNOWN_PATTERNS]
        _splitters[tokenizer] = unknown, Splitter(steps)
    unknown, splitter = _splitters[tokenizer]
    one = isinstance(texts, str)
    for number, text in enumerate([texts] if one else texts) if unknown else ():
        if isinstance(text, str) and (trouble := splitter.trouble(text)) is not None:
            which = named if one or len(texts) == 1 else f"text {number}"
            said = f"{which} ({text[:40]!r}) cannot be split by the tokenizer's regular expression"
            raise InputError(f"{said} {' or '.join(unknown)!r:.80}: {trouble}; give another tokenizer or text")


def _patterns(value: Any) -> Iterator[str]:
    """Yield the regular expressions within a tokenizer's steps."""
    if isinstance(value, dict) and isinstance(value.get("Regex"), str):
        yield value["Regex"]
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _patterns(part)
