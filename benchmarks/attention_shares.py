"""Share of the implicit attention at the end of a question that falls on the facts that answer it and on
filler: bAbI-like questions in WikiText-2, by layer.

    python benchmarks/attention_shares.py measure --out runs/shares --into benchmarks/results/attention-shares.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import running
from running import read

RESULTS = Path(__file__).with_name("results") / "attention-shares.jsonl"
MODELS = {"mamba2": "Mamba-2", "hybrid": "hybrid", "diff-mamba": "Diff-Mamba"}
COLUMNS = ("needles", "filler")
TASKS, WORDS, QUESTIONS = ("qa1", "qa2", "qa3", "qa4", "qa5"), 1000, 40


def rows() -> Iterator[dict[str, Any]]:
    """Yield the questions of the test split with the spans of the facts that answer them, of all facts, and of the
    rest of their contexts."""
    from ssmscope.data.babi import questions
    from ssmscope.data.filler import load_filler

    hay = load_filler("wikitext2", "test")
    for task in TASKS:
        drawn = questions(task, length=WORDS, examples=QUESTIONS, split="test", filler=hay)
        for one, prompt in zip(drawn.examples, drawn.prompts()):
            facts = [[fact.start, fact.end] for fact in one.facts]
            ends = [0, *(end for fact in facts for end in fact), len(one.context)]
            filler = [[start, stop] for start, stop in zip(ends[::2], ends[1::2]) if start < stop]
            needles = [[fact.start, fact.end] for fact in one.needles]
            yield {"text": prompt, "label": one.answer, "needles": needles, "facts": facts, "filler": filler}


def measure(arguments: argparse.Namespace) -> None:
    """Measure the shipped models, a line for each model, column and kind of map."""
    import ssmscope

    arguments.out.mkdir(parents=True, exist_ok=True)
    data = arguments.out / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    done = {(row["model"], row["of"], row["column"]) for row in read(arguments.into)}
    for name in MODELS:
        model = ssmscope.load(f"demo/babi-{name}")
        for of, options in (("attention", {}), ("contributions", {"gradient": True})):
            for column in COLUMNS:
                if (name, of, column) in done:
                    continue
                found = ssmscope.attention(model, data=data, relevant=column, rows="last", **options)
                layers = [[each.share.value, each.share.low, each.share.high] for each in found.maps]
                line = {"model": name, "of": of, "column": column, "seed": 0, "texts": found.texts}
                running.add(arguments.into, {**line, "even": found.even, "layers": layers})
                print(found.headline, flush=True)


def shares() -> dict[tuple[str, str, str], list[list[float]]]:
    """Return the share and the ends of its interval of every layer, by model, kind of map and column."""
    return {(row["model"], row["of"], row["column"]): row["layers"] for row in read(RESULTS)}


def docs_table() -> list[str]:
    """Return the lines of the documentation's table: the shares of attention on filler by layer, with intervals,
    and the means over layers."""
    own = [shares()[model, "attention", "filler"] for model in MODELS]
    rows = [f"| layer | {' | '.join(MODELS.values())} |", "|---" * (len(own) + 1) + "|"]
    for layer, each in enumerate(zip(*own)):
        told = ("{:.3f} [{:.3f}, {:.3f}]".format(*share).replace("0.", ".") for share in each)
        rows.append(f"| {layer} | {' | '.join(told)} |")
    for of in ("attention", "contributions"):
        means = (statistics.mean(layer[0] for layer in shares()[model, of, "filler"]) for model in MODELS)
        rows.append(f"| {of}, mean | {' | '.join(f'{mean:.3f}'.removeprefix('0') for mean in means)} |")
    return rows


def main() -> None:
    running.start(running.verbs(__doc__, measure))


if __name__ == "__main__":
    main()
