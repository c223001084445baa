"""Rows in files of every format that is read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows in the format that the path ends in, and return the path, whose folder is made if need be."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        pd.DataFrame(rows).to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t")
    return path
