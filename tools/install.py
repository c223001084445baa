"""Installs into an environment as pip would, by uv where that is available: the same packages in a tenth of the time.

    python tools/install.py ENVIRONMENT ARGUMENT…

ENVIRONMENT is a directory with `bin/python`; the arguments are those of `pip install`. uv is taken from the package
index and asks where pip is told to ask (pip.conf and PIP_*). pip itself does it where there is no uv, or it fails.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path


def settings(pip: list[str]) -> dict[str, list[str]]:
    """Return pip's configuration, later files and the environment over earlier ones."""
    found = {}
    for line in subprocess.run(
        [*pip, "config", "list"], check=True, capture_output=True, text=True
    ).stdout.splitlines():
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = str(ast.literal_eval(value)).split()
    return found


def sources(configured: dict[str, list[str]]) -> list[str]:
    """Return uv's options for the same indexes; the best version of all of them counts, as it does for pip."""
    options = ["--index-strategy", "unsafe-best-match"]
    for theirs, ours in (
        ("index-url", "--index-url"),
        ("extra-index-url", "--extra-index-url"),
        ("find-links", "--find-links"),
    ):
        options += [part for value in configured.get(theirs, []) for part in (ours, value)]
    return options + ["--no-index"] * (configured.get("no-index", [""])[0] in ("1", "true", "True", "yes"))


def has_uv(python: str) -> bool:
    """Return True if the environment has uv, now at least."""
    tries = ["uv", "--version"], ["pip", "install", "--quiet", "uv"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return any(not subprocess.run([python, "-m", *each], **quiet).returncode for each in tries)


def main(environment: Path, arguments: list[str]) -> int:
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip"]
    uv = [python, "-m", "uv", "pip", "install", "--python", python]
    configured = settings(pip)
    certificates = dict(zip(["SSL_CERT_FILE"], configured.get("cert", [])))
    if has_uv(python):
        if not subprocess.run([*uv, *sources(configured), *arguments], env={**os.environ, **certificates}).returncode:
            return 0
        print("uv could not; pip tries", file=sys.stderr)
    return subprocess.run([*pip, "install", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
