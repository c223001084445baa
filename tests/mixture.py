"""Small data sets of the tasks of `instruct`, with a word in every text that gives the class away."""

import random
from pathlib import Path

import pandas as pd

THINGS = ("film", "story", "actor", "scene", "ending", "plot", "cast", "song")
CUES = {"sst2": ("dull", "bright"), "wnli": ("sinking", "rising"), "snli": ("same", "maybe", "never")}
COLUMNS = {"sst2": ("text",), "wnli": ("sentence1", "sentence2"), "snli": ("premise", "hypothesis")}
SIZES = {
    "sst2": {"train": 60, "validation": 12, "test": 16},
    "wnli": {"train": 20, "validation": 9},
    "snli": {"validation": 60, "test": 21},
}


def write_mixture(folder: Path, sizes: dict[str, dict[str, int]] = SIZES) -> Path:
    """`<folder>/<task>/<split>.parquet` of so many rows; no two texts of a task are alike."""
    draw = random.Random(0)
    for task, splits in sizes.items():
        count = 0
        for split, size in splits.items():
            rows = []
            for _ in range(size):
                label = draw.randrange(len(CUES[task]))
                words = draw.choices(THINGS, k=4)
                texts = [f"a {words[0]} with {words[1]} number {count}", f"{CUES[task][label]} {words[2]} ."]
                columns = COLUMNS[task]
                shown = [" ".join(texts)] if len(columns) == 1 else texts
                rows.append({**dict(zip(columns, shown)), "label": label})
                count += 1
            path = folder / task / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(rows).to_parquet(path)
    return folder
