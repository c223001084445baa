"""Fingerprints of the files of models and data; a job runs again when they change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

DESCRIPTIVE_SUFFIXES = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf")
"""Suffixes of files that only describe a model, such as its card and pictures."""


class Fingerprints:
    """Hashes of files, each computed once."""

    def __init__(self) -> None:
        self._known: dict[Path, str] = {}

    def of_model(self, where: Path) -> str:
        """Return the fingerprint of a weights file, of a model's directory, or of a directory of checkpoints.

        Raises:
            OSError: if a file cannot be read.
        """
        if where.is_file():
            return self._of_file(where)
        inside = where.glob("*") if (where / "config.json").is_file() else where.rglob("*")
        return self._of_files(where, (file for file in inside if file.suffix not in DESCRIPTIVE_SUFFIXES))

    def of_data(self, name: str) -> str | None:
        """Return the fingerprint of a file, a directory, or a known data set in `$SSMSCOPE_DATA`; None for others.

        Raises:
            OSError: if a file cannot be read.
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
