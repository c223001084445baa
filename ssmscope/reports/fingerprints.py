"""What the files of a model or of data hold, as a few digits: a job is done again when they change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

TOLD = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf")
"""Endings of a model's files that describe it, its card and pictures, and change nothing that it computes."""


class Fingerprints:
    """Hashes files, each once."""

    def __init__(self) -> None:
        self._known: dict[Path, str] = {}

    def of_model(self, where: Path) -> str:
        """Of a file of weights, of a model's directory, or of a directory of checkpoints.

        Raises:
            OSError: a file cannot be read.
        """
        if where.is_file():
            return self._of_file(where)
        inside = where.glob("*") if (where / "config.json").is_file() else where.rglob("*")
        return self._of_files(where, (file for file in inside if file.suffix not in TOLD))

    def of_data(self, name: str) -> str | None:
        """Of a file, of a directory, or of a known data set in `$SSMSCOPE_DATA`; None for what lies elsewhere.

        Raises:
            OSError: a file cannot be read.
        """
        if not name.strip():
            return None
        if os.path.isfile(name):
            return self._of_file(Path(name))
        if os.path.isdir(name):
            return self._of_files(Path(name), Path(name).rglob("*"))
        root = os.environ.get("SSMSCOPE_DATA")
        if root and Path(name).name == name and os.path.isdir(os.path.join(root, name)):
            return self._of_files(Path(root, name), Path(root, name).glob("*.parquet"))
        return None

    def _of_files(self, root: Path, files: Iterable[Path]) -> str:
        digest = hashlib.sha256()
        for file in sorted(files):
            inside = file.relative_to(root)
            if file.is_file() and not any(part.startswith(".") for part in inside.parts):
                digest.update(f"{inside.as_posix()}\0{self._of_file(file)}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]

    def _of_file(self, file: Path) -> str:
        place = file.resolve()
        if place not in self._known:
            digest = hashlib.sha256()
            with place.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
            self._known[place] = digest.hexdigest()[:16]
        return self._known[place]
