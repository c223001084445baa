"""Do explanations find the words that carry a sentence's sentiment? 50 sentences of SST-2, marked by a rule.

    python benchmarks/sst2_rationales.py write runs/sst2-rationales
    analyze plausibility demo/sst2-mamba2 --data runs/sst2-rationales
    python benchmarks/sst2_rationales.py measure_models demo/sst2-mamba runs/texts/sst2-mamba2-warm-*
    python benchmarks/sst2_rationales.py table

The sentences are a seeded draw from the test split, 25 of each class, of 8 to 25 words. They are not here: a line of
sst2_rationales.jsonl has a sentence's row, its class and the marked words [start, end), and `write` joins these with
the split, from $SSMSCOPE_DATA or the hub, as an ERASER folder.

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
SHOWN = ("lrp", "ig", "survival", "occlusion", "self-write", "gradcam", "self-retention")
"""Methods of the docs' table; the results have all."""
SEEDS = (0, 1, 2)
ARMS = {
    "mamba2-warm": "Mamba-2",
    "baleen-e-true-0.005-warm": "Baleen-E, β = .005",
    "baleen-b-0.01-warm": "Baleen-B, β = .01",
}
"""Models of benchmarks/baleen_texts.py, trained equally long from Mamba-2's weights."""
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


def measure_models(arguments: argparse.Namespace) -> None:
    """Measure the AUPRC of every method on models that are not measured yet, with 95 % intervals over the sentences."""
    import ssmscope
    from ssmscope.interp.methods import METHODS

    done = {record["fingerprint"] for record in running.read(RESULTS)}
    with tempfile.TemporaryDirectory() as folder:
        join(Path(folder))
        for name in arguments.models:
            model = ssmscope.load(name)
            if model.fingerprint in done:
                continue
            data = load_text(folder, label_names=model.labels)
            found = ssmscope.plausibility(model, data, methods=[method for method in METHODS if method != "random"])
            table = found.to_frame().query("measure == 'auprc'")
            record = {
                "model": name if name.startswith("demo/") else Path(name).name,
                "fingerprint": model.fingerprint,
                "accuracy": ssmscope.evaluate(model, data).scores[0].estimate.value,
                "share": found.share,
                "chance": found.chance,
                "auprc": {row.method: [row.value, row.low, row.high] for row in table.itertuples()},
                "versions": found.provenance["versions"],
            }
            running.add(RESULTS, record)


def docs_table() -> list[str]:
    """Return the lines of the docs' table: AUPRC of the models trained with three seeds, by method."""
    found = {record["model"]: record["auprc"] for record in running.read(RESULTS)}
    models = {arm: [f"sst2-{arm}-{seed}" for seed in SEEDS] for arm in ARMS}
    arms = {
        arm: [{f"`{method}`": found[name][method][0] for method in SHOWN} for name in names]
        for arm, names in models.items()
        if found.keys() >= set(names)
    }
    return running.arms_table(arms, ARMS)


def table(arguments: argparse.Namespace) -> None:
    """Print the table."""
    print("\n".join(docs_table()))


def main() -> None:
    found = running.verbs(__doc__, write, measure_models, table)
    found["write"].add_argument("folder", type=Path)
    found["measure_models"].add_argument("models", nargs="+")
    running.start(found)


if __name__ == "__main__":
    main()
