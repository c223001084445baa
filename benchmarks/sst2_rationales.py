"""Do explanations find the words that carry a sentence's sentiment? 50 sentences of SST-2, marked by a rule.

    python benchmarks/sst2_rationales.py write runs/sst2-rationales
    analyze plausibility demo/sst2-mamba2 --data runs/sst2-rationales
    python benchmarks/sst2_rationales.py measure demo/sst2-mamba2 demo/sst2-mamba demo/sst2-baleen-b
    python benchmarks/sst2_rationales.py table

The sentences are a seeded draw from the test split, 25 of each class, of 8 to 25 words. They are not here: a line of
sst2_rationales.jsonl has a sentence's row, its class and the marked words [start, end), and `write` joins these with the
split, from $SSMSCOPE_DATA or the hub, as an ERASER folder.

The marks are ours, made by one annotator who saw the classes; nobody marked them twice. The rule: mark the shortest
spans that, read alone, give the class, all of them. A word of evaluation is marked with the negation, comparison or
word of degree that changes it, an idiom or figure of speech as far as it is needed. Nothing is marked that only names
the subject or speaks for the other class, and no conjunction or punctuation between marked words. In rows 1002 and
1578, which evaluate nothing, what comes nearest is marked.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import running

from ssmscope.data.text import TextData, load_text

MARKS = Path(__file__).with_suffix(".jsonl")
RESULTS = Path(__file__).parent / "results" / "sst2-rationales.jsonl"
FINGERPRINT = "48b6f4aa724ee64f"
"""Fingerprint of the test split that the rows and words are of."""
PER_CLASS, MIN_WORDS, MAX_WORDS = 25, 8, 25


def drawn(data: TextData) -> list[int]:
    """Draw the rows of the sentences, as many of each class."""
    draw, rows = random.Random(0), list[int]()
    for label in range(len(data.label_names)):
        fitting = [row for row, text in enumerate(data.texts) if MIN_WORDS <= len(text.split()) <= MAX_WORDS]
        rows += draw.sample([row for row in fitting if data.labels[row] == label], PER_CLASS)
    return sorted(rows)


def join(folder: Path) -> None:
    """Write the sentences with their marks as an ERASER folder."""
    data = load_text("sst2", "test")
    if data.fingerprint != FINGERPRINT:
        sys.exit(f"this test split of sst2 is {data.fingerprint}, and the marks are of {FINGERPRINT}")
    marks = running.read(MARKS)
    assert [mark["row"] for mark in marks] == drawn(data)
    documents, rows = [], []
    for mark in marks:
        name, words = f"sst2-test-{mark['row']}", data.texts[mark["row"]].split()
        documents.append({"docid": name, "document": data.texts[mark["row"]]})
        spans = [
            {"docid": name, "start_token": start, "end_token": end, "text": " ".join(words[start:end])}
            for start, end in mark["words"]
        ]
        rows.append({"annotation_id": name, "classification": mark["label"], "query": "", "evidences": [spans]})
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines in (("docs.jsonl", documents), ("test.jsonl", rows)):
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write(arguments: argparse.Namespace) -> None:
    """Write the sentences with their marks as an ERASER folder."""
    join(arguments.folder)


def measured(arguments: argparse.Namespace) -> None:
    """Measure the AUPRC of every method on models, and keep it with its interval over the sentences."""
    import ssmscope
    from ssmscope.interp.methods import METHODS

    with tempfile.TemporaryDirectory() as folder:
        join(Path(folder))
        done = {record["model"] for record in running.read(RESULTS)}
        for name in arguments.models:
            if name in done:
                continue
            model = ssmscope.load(name)
            data = load_text(folder, label_names=model.labels)
            found = ssmscope.plausibility(model, data, methods=[name for name in METHODS if name != "random"])
            right = sum(int(row) == label for row, label in zip(ssmscope_answers(model, data), data.labels))
            own = {method: found.estimates[3 * at + 2] for at, method in enumerate(found.methods)}
            running.add(
                RESULTS,
                {
                    "model": name,
                    "right": right,
                    "chance": found.chance,
                    "share": found.share,
                    "auprc": {method: [each.value, each.low, each.high] for method, each in own.items()},
                },
            )
